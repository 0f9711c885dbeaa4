"""Births by day: trend, seasons, a changing week and special days over twenty years.

The number of births on each day is a sum of functions of time, as in chapter 21 of Gelman et al.
(2013), Bayesian Data Analysis: a trend, a season, a weekly pattern that changes over the years, and
disturbances of a few days. Special days are effects in the mean: one for each day of the year, with
a Laplace prior that shrinks most of them to nearly zero, and one for each holiday without a fixed
date. The data are simulated to resemble the American births from 1969 to 1988; `--csv` reads the
real data (columns year, month, day and births).

`StateSpace` makes this Gaussian process exact, at a cost linear in the number of days. The weekly
pattern is a sum of three waves, of 7, 7/2 and 7/3 days, since these represent any seven values
with mean zero. Births enter as 100 log(births / mean), which is close to the deviation from the
mean in percent. The last year is held out; the table compares the forecast with the births of
364 days, 52 weeks, earlier.
"""

import argparse
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

YEAR = 365.25
HOLIDAYS = ["Memorial Day", "Labor Day", "Thanksgiving", "day after Thanksgiving"]


def calendar(dates):
    """The day of the year, as in leap years, and the holiday, 0 if there is none, of each date."""
    month, day, weekday = dates.month, dates.day, dates.day_of_week
    day_of_year = pandas.to_datetime({"year": 2000, "month": month, "day": day}).dt.day_of_year
    holiday = np.zeros(len(dates), int)
    holiday[(month == 5) & (weekday == 0) & (day >= 25)] = 1
    holiday[(month == 9) & (weekday == 0) & (day <= 7)] = 2
    holiday[(month == 11) & (weekday == 3) & (day >= 22) & (day <= 28)] = 3
    holiday[np.flatnonzero(holiday[:-1] == 3) + 1] = 4
    return day_of_year.to_numpy() - 1, holiday


def load(csv, num_years):
    """Dates and 100 log(births / mean)."""
    if csv is not None:
        table = pandas.read_csv(csv)
        dates = pandas.to_datetime(table[["year", "month", "day"]], errors="coerce")
        table = table.assign(date=dates).dropna().sort_values("date")[: int(YEAR * num_years)]
        percent = 100.0 * np.log(table["births"] / table["births"].mean())
        return pandas.DatetimeIndex(table["date"]), percent.to_numpy(np.float32)
    generator = np.random.default_rng(0)
    dates = pandas.date_range("1969-01-01", periods=int(YEAR * num_years))
    years = np.arange(len(dates)) / YEAR
    trend = 8.0 * np.cos(0.35 * years) + 0.4 * years
    season = 4.0 * np.cos(2.0 * np.pi * (years - 0.7)) + 1.5 * np.sin(4.0 * np.pi * years)
    week = np.array([1.0, 4.0, 2.0, 2.0, 3.0, -4.0, -8.0])[dates.day_of_week] * (1.0 + 0.05 * years)
    day_of_year, holiday = calendar(dates)
    special = np.zeros(366)
    special[[0, 185, 358, 359]] = -12.0, -10.0, -8.0, -18.0
    effect = special[day_of_year] + np.array([0.0, -12.0, -12.0, -14.0, -4.0])[holiday]
    noise = 2.0 * generator.normal(size=len(dates))
    return dates, (trend + season + week + effect + noise).astype(np.float32)


def model_of(day_of_year, holiday):
    """The model for days numbered from the first date, with the calendar of all days."""

    def model(days, percent=None):
        def positive(name, median, width=0.5):
            return numpyro.sample(name, dist.LogNormal(np.log(median), width))

        kernels = sgp.kernels
        # In units of 5 %, so that steps of the optimizer suit effects and hyperparameters.
        special = 5.0 * numpyro.sample("special", dist.Laplace(0.0, 0.1).expand([366]).to_event(1))
        moving = 5.0 * numpyro.sample("moving", dist.Normal(0.0, 2.0).expand([4]).to_event(1))
        # A level with prior deviation 10 and a slope, in percent per year, with 3, which changes.
        change = positive("change_of_slope", 1.0) / YEAR
        trend = kernels.Linear((3.0 / YEAR) ** 2, bias=100.0) + kernels.IntegratedWiener(
            change**2 / YEAR
        )
        shape, scale = positive("season_shape", 1.0), positive("season_scale", 5.0)
        season = kernels.Periodic(shape, period=YEAR, variance=scale**2, constant=False)
        waves = sum(kernels.Cosine(7.0 / number) for number in (1, 2, 3))
        length, scale = positive("week_changes_years", 10.0) * YEAR, positive("week_scale", 5.0)
        week = waves * kernels.Matern32(length, scale**2)
        length, scale = positive("disturbance_days", 30.0, 1.0), positive("disturbance_scale", 2.0)
        disturbances = kernels.Matern12(length, scale**2)
        noise = positive("noise", 2.0)

        def mean(days):
            day = jnp.round(days[:, 0]).astype(int)
            return special[day_of_year[day]] + jnp.append(0.0, moving)[holiday[day]]

        gp = sgp.GaussianProcess(
            trend + season + week + disturbances,
            days,
            noise**2,
            mean=mean,
            estimator=sgp.estimators.StateSpace(num_harmonics=4),
        )
        numpyro.sample("percent", gp, obs=percent)

    return model


PARTS = {
    "trend": lambda kernel: kernel.left.left.left,
    "season": lambda kernel: kernel.left.left.right,
    "week": lambda kernel: kernel.left.right,
}


def main(num_years=20, csv=None, num_steps=100, folder="outputs/births"):
    """Fit, score and draw; returns the mean log scores and the largest effects in percent."""
    began = time.perf_counter()
    dates, percent = load(csv, num_years)
    day_of_year, holiday = calendar(dates)
    days = np.arange(len(dates), dtype=np.float32)[:, None]
    is_past = np.arange(len(dates)) < len(dates) - 365
    model = model_of(jnp.asarray(day_of_year), jnp.asarray(holiday))
    guide = AutoDelta(model, init_loc_fn=init_to_median)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.15, num_steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    train = days[is_past], percent[is_past]
    result = svi.run(jax.random.key(0), num_steps, *train, progress_bar=False)
    values = guide.median(result.params)
    for name, value in values.items():
        if value.ndim == 0:
            print(f"{name:20}{value:8.2f}")
    effects = 5.0 * np.concatenate([values["special"], values["moving"]])
    names = [*pandas.date_range("2000-01-01", periods=366).strftime("%B %-d"), *HOLIDAYS]
    largest = {names[place]: effects[place] for place in np.argsort(-np.abs(effects))[:10]}
    print("special days:", ", ".join(f"{name} {value:.1f} %" for name, value in largest.items()))
    print(f"fitted to {is_past.sum():,} days after {time.perf_counter() - began:.0f} s")

    posterior = sgp.posterior(model, values, *train)
    change = np.std(percent[364:][is_past[364:]] - percent[:-364][is_past[364:]])
    forecasts = {
        "process": posterior.predictive(days[~is_past]),
        "364 days earlier": dist.Normal(percent[np.flatnonzero(~is_past) - 364], change),
    }
    scores = {}
    for name, forecast in forecasts.items():
        scores[name] = float(sgp.scores.log_score(forecast, percent[~is_past]).mean())
        crps = sgp.scores.crps(forecast, percent[~is_past]).mean()
        coverage = sgp.scores.coverage(forecast, percent[~is_past], level=0.9)
        print(f"{name:20}log score {scores[name]:.3f}, CRPS {crps:.2f}, {coverage:.0%} covered")
    draw(folder, dates, days, percent, posterior, effects)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return scores, largest


def draw(folder, dates, days, percent, posterior, effects):
    """Draw the trend, the season with special days, and the week in several years."""
    trend, season, week = (posterior.component(select) for select in PARTS.values())
    figure, panels = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")

    def band(panel, x, function, times):
        mean, width = function.mean(times), 2.0 * np.sqrt(function.variance(times))
        panel.fill_between(x, mean - width, mean + width, alpha=0.3, lw=0, zorder=3)
        panel.plot(x, mean, zorder=3)
        return mean

    panel = panels[0, 0]
    panel.plot(dates, percent, ".", color="gray", ms=1, alpha=0.4, rasterized=True)
    band(panel, dates[::10], trend, days[::10])
    panel.axvline(dates[-365], color="black", lw=0.8, ls="--")
    panel.set(title="births and trend", ylabel="percent of the mean")
    year = np.arange(366, dtype=np.float32)[:, None]
    leap_year = pandas.date_range("2000-01-01", periods=366)
    mean = band(panels[0, 1], leap_year, season, year)
    panels[0, 1].set_title("season")
    panel = panels[1, 1]
    panel.plot(leap_year, mean + effects[:366], lw=0.8)
    for place in np.argsort(-np.abs(effects[:366]))[:4]:
        at = leap_year[place], (mean + effects[:366])[place]
        side = "right" if place > 183 else "left"
        text = f" {leap_year[place]:%b} {leap_year[place].day} "
        panel.annotate(text, at, fontsize=9, ha=side, va="center")
    panel.set_title("season and special days")
    for panel in panels[:, 1]:
        panel.xaxis.set_major_locator(matplotlib.dates.MonthLocator((1, 4, 7, 10)))
        panel.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%b"))
    monday = (7 - dates[0].weekday()) % 7
    for share in (0.0, 0.5, 0.95):
        first = monday + 7 * int(share * len(days) / 7)
        times = first + np.arange(7, dtype=np.float32)[:, None]
        width = 2.0 * np.sqrt(week.variance(times))
        label = str(dates[first].year)
        panels[1, 0].errorbar(range(7), week.mean(times), width, fmt="o-", capsize=3, label=label)
    names = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
    panels[1, 0].set(title="week", ylabel="percent", xticks=range(7), xticklabels=names)
    panels[1, 0].legend(fontsize=9)
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "parts.svg")
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-years", type=int, default=20)
    parser.add_argument("--csv", help="a file of births by day")
    main(**vars(parser.parse_args()))
