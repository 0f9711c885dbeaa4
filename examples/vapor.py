"""A map of positive amounts: water vapor at scattered places, with a gamma likelihood.

The logarithm of the mean amount is a Gaussian process, which `LaplaceGP` integrates out by
Laplace's approximation. Vecchia's approximation of the prior conditions each place on the twenty
nearest places that precede it in an ordering. Hyperparameters, among them the shape of the gamma
distribution, are estimated by SVI.

The amounts are simulated at 6,000 places. If the environment variable `SCALEGP_DATA` names a folder
that contains them, the data are instead 20,000 places of a satellite image of water vapor.
"""

import argparse
import functools
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


def load(rows, new_rows):
    """Places and amounts, for the fit and for predictions; a side of the map is about one."""
    if "SCALEGP_DATA" in os.environ:
        path = Path(os.environ["SCALEGP_DATA"]) / "water_vapor" / "water_vapor.csv.gz"
        table = np.loadtxt(path, delimiter=",", skiprows=1)
        rows = 20_000
        chosen = np.random.default_rng(0).permutation(len(table))[: rows + new_rows]
        y, X = table[chosen, 0], table[chosen, 1:]
        X = (X - X.min(axis=0)) / np.ptp(X, axis=0).max()
    else:
        X = np.random.default_rng(0).uniform(size=(rows + new_rows, 2))
        prior = sgp.GaussianProcess(sgp.kernels.Matern32(0.2, 0.5), X[:1], 1.0)
        functions = prior.condition(jnp.zeros(1))
        f = functions.sample_functions(jax.random.key(1), 1, num_features=4000)(X)[0]
        y = np.asarray(dist.Gamma(10.0, 10.0 * jnp.exp(-f)).sample(jax.random.key(2)))
    X, y = X.astype(np.float32), y.astype(np.float32)
    return X[:rows], y[:rows], X[rows:], y[rows:]


def amounts(shape, f):
    """The distribution of amounts whose means have the logarithm f."""
    return dist.Gamma(shape, shape * jnp.exp(-f))


def model(X, y=None, *, estimator):
    lengthscale = numpyro.sample("lengthscale", sgp.infer.lengthscale_prior(0.02, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(-1.0, 1.0))
    shape = numpyro.sample("shape", dist.LogNormal(2.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    kernel = sgp.kernels.Matern32(lengthscale, variance)
    likelihood = functools.partial(amounts, shape)
    gp = sgp.LaplaceGP(kernel, X, likelihood, mean=level, estimator=estimator)
    numpyro.sample("y", gp, obs=y)


def main(steps=60, rows=6000, new_rows=2000, folder="outputs/vapor"):
    """Fit, predict, score and draw; returns the scores."""
    X, y, X_new, y_new = load(rows, new_rows)
    print(f"{len(X)} places, {len(X_new)} held out")
    start = time.perf_counter()
    estimator = sgp.estimators.Vecchia(num_neighbors=20).find_neighbors(X)
    guide = AutoDelta(model, init_loc_fn=init_to_median())
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.2, steps)), Trace_ELBO())
    options = {"estimator": estimator}
    result = svi.run(jax.random.key(0), steps, X, y, progress_bar=False, **options)
    median = guide.median(result.params)
    print({name: round(float(value), 3) for name, value in median.items()})
    posterior = sgp.posterior(model, guide, result, X, y, **options)

    keys = jax.random.split(jax.random.key(3))
    f = posterior.sample(keys[0], X_new, 200)
    draws = amounts(median["shape"], f).sample(keys[1])
    scores = {
        "CRPS": float(sgp.scores.crps(draws, y_new).mean()),
        "coverage of 90 % intervals": float(sgp.scores.coverage(draws, y_new, level=0.9)),
    }
    print(f"{time.perf_counter() - start:.0f} s to fit and predict")
    print(", ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    draw(posterior, X, y, folder)
    return scores


def draw(posterior, X, y, folder):
    """Draw amounts, medians on a grid, and the uncertainty of their logarithms."""
    axes = [np.linspace(x.min(), x.max(), 90, dtype=np.float32) for x in X.T]
    grid = np.stack(np.meshgrid(*axes), axis=-1)
    cells = grid.reshape(-1, 2)
    mean, variance = posterior.mean(cells), posterior.variance(cells)
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
    limits = {"vmin": np.quantile(y, 0.02), "vmax": np.quantile(y, 0.98)}
    extent = [*axes[0][[0, -1]], *axes[1][[0, -1]]]
    panels[0].scatter(*X.T, c=y, s=2, rasterized=True, **limits)
    shape, options = grid.shape[:2], {"origin": "lower", "extent": extent}
    medians = panels[1].imshow(np.exp(mean).reshape(shape), **options, **limits)
    deviation = np.sqrt(np.asarray(variance)).reshape(shape)
    spread = panels[2].imshow(deviation, cmap="magma", **options)
    figure.colorbar(medians, ax=list(panels[:2]), label="amount", shrink=0.85)
    figure.colorbar(spread, ax=panels[2], label="deviation of its logarithm", shrink=0.85)
    for panel, title in zip(panels, ("observed", "median", "uncertainty"), strict=True):
        panel.set(title=title, aspect="equal", xticks=[], yticks=[])
        panel.set(xlim=extent[:2], ylim=extent[2:])
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "map.svg", dpi=70)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=6000, help="places of the simulated map")
    main(**vars(parser.parse_args()))
