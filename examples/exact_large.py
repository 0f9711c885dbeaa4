"""An exact GP on 10,000 observations: from data to posterior with the defaults.

The GP has a Matern-3/2 kernel with a lengthscale for each of eight input dimensions. The data are
simulated, with five irrelevant inputs, or, if the environment variable `SCALEGP_DATA` names a
folder of UCI data sets, kin40k. No n x n matrix is stored. The hyperparameters are estimated by
exact fits to subsets of the data, followed by a few steps on all data; one iterative solve then
yields the posterior. When more observations arrive, the solver starts from the previous solution.

The script prints a report on the estimation of the hyperparameters, diagnostics of the last solve,
and test errors before and after more observations arrive. The figure is a slice through the
posterior along the input with the shortest lengthscale. The posterior is saved to a file, from
which it predicts without another solve.
"""

import argparse
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def model(X, y=None):
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(1.0, 1.0).expand([X.shape[1]]).to_event(1)
    )
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    kernel = sgp.kernels.Matern32(lengthscale, variance)
    gp = sgp.GaussianProcess(kernel, X, noise**2, estimator=sgp.estimators.Pathwise())
    numpyro.sample("y", gp, obs=y)


def load_data(num_rows):
    """Name of the data set, and standardized training and test data."""
    if "SCALEGP_DATA" in os.environ:
        data = sgp.datasets.load_uci("kin40k")
        rows = np.random.default_rng(0).permutation(len(data.X_train))[:num_rows]
        train = data.X_train[rows], data.y_train[rows]
        return "kin40k", *map(jnp.array, (*train, data.X_test[:2000], data.y_test[:2000]))
    generator = np.random.default_rng(0)
    X = generator.normal(size=(num_rows + 2000, 8))
    y = np.sin(2.0 * X[:, 0]) * np.cos(X[:, 1]) + 0.5 * np.abs(X[:, 2])
    y += 0.1 * generator.normal(size=len(X))
    y = (y - y.mean()) / y.std()
    parts = X[:num_rows], y[:num_rows], X[num_rows:], y[num_rows:]
    return "made up", *map(jnp.array, parts)


def scores_of(posterior, X, y):
    predictive = posterior.predictive(X)
    rmse = jnp.sqrt(jnp.mean((predictive.mean - y) ** 2))
    return {"rmse": float(rmse), "nll": float(-jnp.mean(predictive.log_prob(y)))}


def plot(folder, X, posterior, column):
    # A slice through the median of the data, along one input.
    grid = jnp.linspace(*np.quantile(X[:, column], [0.02, 0.98]), 200)
    slice_ = jnp.broadcast_to(jnp.median(X, axis=0), (200, X.shape[1])).at[:, column].set(grid)
    paths = posterior.sample(jax.random.key(3), slice_, 8)
    mean, scale = posterior.mean(slice_), jnp.sqrt(posterior.variance(slice_))
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(grid, paths.T, color="C0", linewidth=0.6, alpha=0.7)
    axes.plot(grid, mean, color="k")
    axes.fill_between(grid, mean - 2 * scale, mean + 2 * scale, color="C0", alpha=0.2)
    axes.set_xlabel(f"column {column}; other columns at their medians")
    axes.set_ylabel("target, standardized")
    axes.set_title("posterior mean, two deviations, and functions")
    figure.savefig(Path(folder) / "fit.svg")


def main(num_rows=10_000, num_later=500, folder="outputs/exact_large", **options):
    """Run it all; returns test scores before and after the later data, and the posterior."""
    name, X, y, X_test, y_test = load_data(num_rows)
    first = len(X) - num_later
    values = sgp.infer.initial_hyperparameters(
        jax.random.key(0), model, X[:first], y[:first], **options
    )
    print(values.report)
    posterior = sgp.posterior(model, values, X[:first], y[:first])
    scores = {"first": scores_of(posterior, X_test, y_test)}

    # The solve starts from the previous solution, and from zero for the later observations.
    posterior = sgp.posterior(model, values, X, y, start=posterior)
    scores["all"] = scores_of(posterior, X_test, y_test)
    scores["rmse of the mean"] = float(jnp.std(y_test))
    print({key: float(value) for key, value in posterior.diagnostics.items()})
    print(f"{name}, {len(y)} rows: {scores}")

    Path(folder).mkdir(parents=True, exist_ok=True)
    plot(folder, X, posterior, int(jnp.argmin(posterior.kernel.lengthscale)))
    sgp.save(Path(folder) / "posterior.npz", posterior)
    return scores, posterior


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-rows", type=int, default=10_000)
    main(**vars(parser.parse_args()))
