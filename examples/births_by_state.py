"""Births by state and day: gaps are filled, and the next weeks forecast, from all states together.

In a table of days by states a third of the cells are hidden at random, and the last eight weeks of
all states. A `GridGP` has a kernel for each axis and a sum of two products: a level that wanders
over months, times one covariance between states, and what happens on single days, such as holidays,
times another one. With `StateSpace` it is exact, by a Kalman filter whose state is the function of
all states.

Births enter as 100 log(births / mean of the state), which is close to the deviation from the mean
in percent, less a season and a weekly pattern of each state by least squares. The noise of a state
follows from its number of births. Hyperparameters are estimated on the last four years alone. The
table compares with the calendar alone and with a process for each state, in units of the standard
deviation of a Poisson variable with a known mean. The data are simulated to resemble the American
births from 1969 to 1988; `--csv` reads the real ones: dates, and a column for each state.
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

YEAR, WEEKS = 365.25, 8
kernels = sgp.kernels


def load(csv, num_states, num_days):
    """A table of births, with a row for each date and a column for each state."""
    if csv is not None:
        return pandas.read_csv(csv, index_col=0, parse_dates=True)
    generator = np.random.default_rng(0)
    dates = pandas.date_range("1969-01-01", periods=num_days)
    time_of_year = 2.0 * np.pi * np.arange(num_days) / YEAR
    levels = np.exp(generator.normal(6.0, 1.0, num_states))
    week = np.outer([1.0, 4.0, 2.0, 2.0, 3.0, -4.0, -8.0], generator.uniform(0.5, 2.0, num_states))
    season = np.outer(4.0 * np.cos(time_of_year - 4.4), generator.uniform(0.3, 1.7, num_states))
    trends = np.cumsum(generator.normal(0.0, 0.3, (num_days, 3)), axis=0)
    trend = trends @ generator.normal(0.4, 0.6, (3, num_states))
    days = generator.normal(0.0, 2.0, num_days) - 15.0 * (dates.day_of_year == 359)
    special = np.outer(days, generator.uniform(0.5, 1.5, num_states))
    percent = season + week[dates.day_of_week] + trend + special
    births = generator.poisson(levels * np.exp(percent / 100.0))
    return pandas.DataFrame(births, dates, [f"state {i + 1}" for i in range(num_states)])


def calendar(dates, percent, shown):
    """The season and the week of each state, by least squares on the cells that are shown."""
    angles = 2.0 * np.pi * np.outer(np.arange(len(dates)) / YEAR, np.arange(1, 5))
    weekdays = np.eye(7)[dates.day_of_week]
    columns = np.concatenate([weekdays, np.cos(angles), np.sin(angles)], axis=1)
    fitted = np.empty_like(percent)
    for state in range(percent.shape[1]):
        rows = shown[:, state]
        effects = np.linalg.lstsq(columns[rows], percent[rows, state], rcond=None)[0]
        fitted[:, state] = columns @ effects
    return fitted


def model(days, states, variances, percent=None, observed=None, together=True):
    def positive(name, median, width=0.5):
        return numpyro.sample(name, dist.LogNormal(np.log(median), width))

    def between_states(name, rank):
        """Covariances between states; without them, if each state is by itself."""
        num = len(states)
        own = numpyro.sample(f"{name}_own", dist.LogNormal(0.0, 1.0).expand([num]).to_event(1))
        shape = [num, rank]
        W = numpyro.sample(f"{name}_shared", dist.Normal(0.3, 1.0).expand(shape).to_event(2))
        return kernels.Coregion(W if together else jnp.zeros_like(W), own)

    slow = kernels.Matern32(positive("months", 3.0) * YEAR / 12.0, 9.0)
    quick = kernels.Matern12(positive("days", 1.0), 9.0)
    products = [[slow, between_states("slow", 2)], [quick, between_states("quick", 1)]]
    gp = sgp.GridGP(
        products,
        [days, states],
        positive("noise", 1.0) * variances,
        observed=observed,
        estimator=sgp.estimators.StateSpace(),
    )
    numpyro.sample("percent", gp, obs=percent)


def fit(arguments, num_steps, **options):
    """The most probable hyperparameters."""
    guide = AutoDelta(model, init_loc_fn=init_to_median)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.15, num_steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    result = svi.run(jax.random.key(0), num_steps, *arguments, progress_bar=False, **options)
    return guide.median(result.params)


def main(
    num_states=12, num_days=1500, csv=None, num_steps=60, years=4, folder="outputs/births_by_state"
):
    """Fit, fill and forecast; returns errors and coverages by cells and method."""
    began = time.perf_counter()
    table = load(csv, num_states, num_days)
    births, dates = table.to_numpy(np.float64), table.index
    means = births.mean(axis=0)
    percent = 100.0 * np.log((births + 0.5) / means)
    is_past = (np.arange(len(dates)) < len(dates) - 7 * WEEKS)[:, None]
    hidden = np.random.default_rng(1).uniform(size=births.shape) < 1.0 / 3.0
    observed = ~hidden & is_past
    expected = calendar(dates, percent, observed)
    residual = np.where(observed, percent - expected, 0.0).astype(np.float32)
    days, states = (np.arange(float(num), dtype=np.float32)[:, None] for num in births.shape)
    variances = (1e4 / means).astype(np.float32)[None]  # of a Poisson variable, in percent^2

    recent = slice(-int(years * YEAR), None)
    data = days[recent], states, variances, residual[recent], observed[recent]
    everything = days, states, variances, residual, observed
    results, filled = {}, {}
    targets = {
        "hidden cells": hidden & is_past,
        "next weeks": np.broadcast_to(~is_past, hidden.shape),
    }
    for name, together in (("all states together", True), ("each state alone", False)):
        values = fit(data, num_steps, together=together)
        posterior = sgp.posterior(model, values, *everything, together=together)
        predictive = posterior.predictive([days, states], variances * values["noise"])
        filled[name] = expected + predictive.mean, np.sqrt(predictive.variance)
        lengths = f"lengthscales of {values['months']:.1f} months and {values['days']:.1f} days"
        print(f"{name}: {lengths}, after {time.perf_counter() - began:.0f} s")
    filled["calendar alone"] = (
        expected,
        np.broadcast_to(np.std((percent - expected)[observed]), expected.shape),
    )
    print(f"{observed.sum():,} of {observed.size:,} cells shown")
    for target, cells in targets.items():
        for name, (mean, deviation) in filled.items():
            error = np.abs(percent - mean)
            covered = np.mean((error < 1.645 * deviation)[cells])
            relative = np.sqrt(np.mean((error**2 / variances)[cells]))
            results[target, name] = float(relative), float(covered)
            print(f"{target:14}{name:22}error {relative:.3f}, {covered:.0%} in 90 % intervals")
    draw(folder, table, percent, observed, filled["all states together"])
    print(f"{time.perf_counter() - began:.0f} s in all")
    return results


def draw(folder, table, percent, observed, filled):
    """Draw the last months of three states of different size."""
    mean, deviation = filled
    order = np.argsort(table.to_numpy().sum(axis=0))
    figure, panels = plt.subplots(3, 1, figsize=(9, 8), sharex=True, layout="constrained")
    recent = slice(-140, None)
    dates = table.index[recent]
    for panel, state in zip(panels, order[[0, len(order) // 2, -1]], strict=True):
        band = mean[recent, state], 1.645 * deviation[recent, state]
        panel.fill_between(dates, band[0] - band[1], band[0] + band[1], alpha=0.3, lw=0)
        panel.plot(dates, band[0], lw=1.0)
        shown = observed[recent, state]
        panel.plot(dates[shown], percent[recent, state][shown], "k.", label="shown")
        panel.plot(dates[~shown], percent[recent, state][~shown], "o", mfc="none", label="hidden")
        panel.axvline(dates[-7 * WEEKS], color="black", lw=0.8, ls="--")
        panel.set(title=str(table.columns[state]), ylabel="percent of the mean")
    panels[-1].xaxis.set_major_formatter(
        matplotlib.dates.ConciseDateFormatter(panels[-1].xaxis.get_major_locator())
    )
    panels[0].legend(loc="upper left", ncols=2)
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "filled.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="dates, and a column of births for each state")
    parser.add_argument("--num-states", type=int, default=12, help="of simulated data")
    parser.add_argument("--num-days", type=int, default=1500, help="of simulated data")
    parser.add_argument("--num-steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("outputs/births_by_state"))
    arguments = parser.parse_args()
    main(
        arguments.num_states,
        arguments.num_days,
        arguments.csv,
        arguments.num_steps,
        folder=arguments.folder,
    )
