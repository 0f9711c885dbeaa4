"""House prices on a map: the smoothness of the function is estimated with the other parameters.

The logarithm of a price is a level, a Gaussian process of the place and noise. `Vecchia` conditions
each house on the thirty nearest ones that precede it in an ordering, which makes the density linear
in the number of houses. The kernel is `Matern`, whose smoothness is estimated, or `Matern32`, of
smoothness 1.5. Prices are then predicted at other houses, and for a region without any.

The prices are simulated at 4,000 places. If the environment variable `SCALEGP_DATA` names a folder
that contains them, they are prices of 17,751 houses in England, and the table has the predictions
by an exact Gaussian process in the study that the data come from.
"""

import argparse
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

kernels = sgp.kernels


def load(rows):
    """Places in kilometers and logarithms of prices: for the fit, and two sets for predictions.

    Third, means and variances of the exact process for these sets, where they are stored.
    """
    if "SCALEGP_DATA" in os.environ:
        folder = Path(os.environ["SCALEGP_DATA"]) / "house_prices"

        def table(name):
            return np.loadtxt(folder / f"{name}.csv.gz", delimiter=",", skiprows=1)

        names = "interpolation", "extrapolation"
        train, *new = (table(name) for name in ("train", *names))
        exact = [table(f"exact_{name}").T for name in names]
        level = train[:, 2].mean()
        exact = [dist.Normal(mean + level, np.sqrt(variance)) for mean, variance in exact]
    else:
        generator = np.random.default_rng(0)
        towns = generator.uniform(0.0, 1e5, (40, 2))
        places = towns[generator.integers(40, size=2 * rows)]
        places = places + generator.normal(0.0, 5e3, places.shape)
        prior = sgp.GaussianProcess(kernels.Matern(20.0, 0.8, 0.3), places[:1] / 1e3, 1.0)
        functions = prior.condition(jnp.zeros(1))
        f = functions.sample_functions(jax.random.key(1), 1, num_features=4000)(places / 1e3)[0]
        prices = 11.5 + f + 0.25 * generator.normal(size=len(f))
        everything = np.column_stack([places, prices])
        is_far = (places > 6e4).all(axis=1)
        train, near = np.array_split(everything[~is_far][: rows + 500], [rows])
        new, exact = [near, everything[is_far][:500]], None
    pairs = [(part[:, :2] / 1e3, part[:, 2]) for part in (train, *new)]
    pairs = [(X.astype(np.float32), y.astype(np.float32)) for X, y in pairs]
    return pairs[0], dict(zip(("interpolation", "extrapolation"), pairs[1:], strict=True)), exact


def model(X, y=None, *, estimator, smoothness=None):
    level = numpyro.sample("level", dist.Normal(11.0, 3.0))
    lengthscale = numpyro.sample("lengthscale", sgp.infer.lengthscale_prior(0.3, 100.0))
    variance = numpyro.sample("variance", sgp.infer.variance_prior(2.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    if smoothness is None:
        smoothness = numpyro.sample("smoothness", dist.LogNormal(0.0, 0.7))
        kernel = kernels.Matern(lengthscale, smoothness, variance)
    else:
        kernel = kernels.Matern32(lengthscale, variance)
    gp = sgp.GaussianProcess(kernel, X, noise**2, mean=level, estimator=estimator)
    numpyro.sample("y", gp, obs=y)


def fit(X, y, num_steps, **options):
    """The most probable parameters."""
    guide = AutoDelta(model, init_loc_fn=init_to_median)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, num_steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    result = svi.run(jax.random.key(0), num_steps, X, y, progress_bar=False, **options)
    return guide.median(result.params)


def main(num_steps=100, rows=4000, folder="outputs/house_prices"):
    """Fit, predict and draw; returns the errors and log scores by set and method."""
    began = time.perf_counter()
    (X, y), new, exact = load(rows)
    estimator = sgp.estimators.Vecchia(30).find_neighbors(X)
    print(f"{len(X):,} houses, neighbors after {time.perf_counter() - began:.1f} s")
    scores = {}
    for name, options in (("Matern32", {"smoothness": 1.5}), ("any smoothness", {})):
        values = fit(X, y, num_steps, estimator=estimator, **options)
        shown = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        print(f"{name}: {shown}; {time.perf_counter() - began:.0f} s")
        posterior = sgp.posterior(model, values, X, y, estimator=estimator, **options)
        for kind, (X_new, y_new) in new.items():
            scores[kind, name] = score(posterior.predictive(X_new), y_new)
    for predictive, (kind, (_, y_new)) in zip(exact or [], new.items(), strict=False):
        scores[kind, "exact, of the study"] = score(predictive, y_new)
    for (kind, name), (error, log_score) in sorted(scores.items(), reverse=True):
        print(f"{kind:15}{name:20} RMSE {error:.4f}, negative log density {log_score:.4f}")
    draw(folder, X, y, posterior, new)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return scores


def score(predictive, y):
    """The root mean squared error and the mean negative log density."""
    error = np.sqrt(np.mean((np.asarray(predictive.mean) - y) ** 2))
    return float(error), -float(np.mean(predictive.log_prob(y)))


def draw(folder, X, y, posterior, new):
    """Draw prices, and means and standard deviations of the function on a map."""
    corners = np.concatenate([X, *(places for places, _ in new.values())])
    low, high = corners.min(axis=0), corners.max(axis=0)
    grid = np.meshgrid(*(np.linspace(low[j], high[j], 120) for j in range(2)), indexing="ij")
    places = np.stack(grid, axis=-1).reshape(-1, 2).astype(np.float32)
    maps = {
        "mean": posterior.mean(places),
        "standard deviation": np.sqrt(posterior.variance(places)),
    }
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", sharey=True)
    points = panels[0].scatter(*X.T, c=y, s=1.0, rasterized=True)
    figure.colorbar(points, label="logarithm of the price", location="top")
    for panel, (name, values) in zip(panels[1:], maps.items(), strict=True):
        values = np.asarray(values).reshape(grid[0].shape)
        colors = panel.pcolormesh(*grid, values, rasterized=True)
        figure.colorbar(colors, label=name, location="top")
    for panel in panels:
        panel.set(xlabel="east (km)", aspect="equal")
    panels[0].set_ylabel("north (km)")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "map.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4000, help="of simulated data")
    parser.add_argument("--folder", type=Path, default=Path("outputs/house_prices"))
    arguments = parser.parse_args()
    main(arguments.num_steps, arguments.rows, arguments.folder)
