"""A relevance vector machine: a noisy sinc function from a dozen of 500 basis functions.

The basis has a kernel function centered at each of 500 data points. The weight of each function has
its own prior precision, which is learned. Most precisions go to infinity, so that the weights
become zero and the functions drop out. A step uses 100 of the data points and all basis functions.

The script prints the number of remaining functions and the error of the posterior mean. Large dots
in the figure are the relevance vectors: the data points whose functions remain.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def data(num_rows, seed):
    """Inputs between -10 and 10, and sin(x) / x with noise of standard deviation 0.1."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-10, 10, size=(num_rows, 1))
    y = np.sinc(X[:, 0] / np.pi) + 0.1 * rng.normal(size=num_rows)
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def model(X, y, batch_size):
    """Kernel functions centered at all data points, with independent weights."""
    features = sgp.features.InducingPoints(sgp.kernels.RBF(1.5), X)
    start = jnp.full(len(X), 1e3)
    precision = numpyro.param("precision", start, constraint=constraints.positive, rows=True)
    noise = numpyro.param("noise", jnp.std(y), constraint=constraints.positive)
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.WeightSpaceGP(features, X, precision=precision))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def main(
    num_rows=500, num_steps=20_000, batch_size=100, seed=0, folder="outputs/relevance_vectors"
):  # fmt: skip
    """Train, prune and plot; returns the number of relevance vectors and the error."""
    X, y = data(num_rows, seed)
    guide = sgp.guides.AutoChevronGP(model)
    svi = sgp.infer.RowSVI(model, guide, optax.adam(0.01))
    result = svi.run(jax.random.key(seed), num_steps, X, y, batch_size, progress_bar=False)

    precision = result.params["precision"]
    active = np.asarray(sgp.relevance_vectors(precision))
    posterior = sgp.posterior(model, guide, result, X, y, batch_size).pruned(precision)
    x = jnp.linspace(-10, 10, 1001)
    mean, sd = posterior.mean(x[:, None]), jnp.sqrt(posterior.variance(x[:, None]))
    rmse = float(jnp.sqrt(jnp.mean((mean - jnp.sinc(x / jnp.pi)) ** 2)))
    noise = float(result.params["noise"])
    print(f"{active.sum()} relevance vectors among {num_rows} rows, noise {noise:.3f}")
    print(f"  RMSE to the function {rmse:.4f}")

    figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
    ax.plot(X[:, 0], y, "k.", markersize=2, label="data", rasterized=True)
    ax.plot(X[active, 0], y[active], "ko", markersize=7, label="relevance vectors")
    ax.plot(x, mean, label="mean")
    total = jnp.hypot(sd, noise)
    ax.fill_between(x, mean - total, mean + total, alpha=0.3, label="one standard deviation")
    ax.set(xlabel="x", ylabel="y")
    ax.legend(frameon=False)
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "fit.svg")
    return int(active.sum()), rmse


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
