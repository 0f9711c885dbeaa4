"""Features of a network: a deep kernel without inducing points, in mini-batches of 32.

The last layer of a neural network has 128 outputs, and the GP's kernel is their inner product, so
that no inducing points are needed. The network, the noise and the posterior mean of the weights are
trained on the log marginal likelihood of all data, from mini-batches of 32; then one pass over the
data yields the exact posterior under the learned features. The data are simulated from a function
of eight inputs or, if `SCALEGP_DATA` names a folder of UCI data sets, real (`--data bike`).

The script prints the training time, and the error and log density on test data in standardized
units. The figure shows the estimated log marginal likelihood during training.
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
import optax
from flax import nnx
from numpyro.contrib.module import nnx_module
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WIDTH = 128


class Network(nnx.Module):
    """Two layers of rectified linear units."""

    def __init__(self, num_in, *, rngs):
        start = nnx.initializers.he_normal()
        self.first = nnx.Linear(num_in, WIDTH, kernel_init=start, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, kernel_init=start, rngs=rngs)

    def __call__(self, X):
        return jax.nn.relu(self.second(jax.nn.relu(self.first(X)))) / jnp.sqrt(float(WIDTH))


def model(X, y, batch_size, logdet):
    network = nnx_module("network", Network(X.shape[1], rngs=nnx.Rngs(0)))
    noise = numpyro.param("noise", 0.3, constraint=constraints.positive)
    weights = numpyro.param("weights", jnp.zeros(WIDTH))
    X_batch, y_batch = sgp.plate("rows", len(X), batch_size).take(X, y)
    gp = sgp.FeatureSpaceGP(
        network, X_batch, jnp.square(noise), weights, num_data=len(X), logdet=logdet
    )
    numpyro.sample("y", gp, obs=y_batch)


def guide(*args):
    """Nothing is latent: the weights are integrated out."""


def load(name):
    """Standardized training and test data."""
    if "SCALEGP_DATA" in os.environ:
        data = sgp.datasets.load_uci(name, split=0)
        return data.X_train, data.y_train, data.X_test, data.y_test
    rng = np.random.default_rng(0)
    X = rng.normal(size=(6000, 8))
    y = np.sin(X[:, 0] * X[:, 1]) + np.cos(2.0 * X[:, 2]) + 0.1 * rng.normal(size=6000)
    y = (y - y.mean()) / y.std()
    return X[:5000], y[:5000], X[5000:], y[5000:]


def main(data="bike", epochs=30, folder="outputs/network_features"):
    """Train, condition and score; returns the error in standardized units."""
    X, y, X_test, y_test = (jnp.asarray(array, jnp.float32) for array in load(data))
    batch_size, logdet = 32, sgp.log_determinants.Variational()
    num_steps = epochs * len(X) // batch_size
    svi = SVI(
        model,
        guide,
        optax.adam(optax.cosine_decay_schedule(0.01, num_steps)),
        Trace_ELBO(),
    )
    began = time.perf_counter()
    args = (X, y, batch_size, logdet)
    result = svi.run(jax.random.key(0), num_steps, *args, progress_bar=False)
    print(f"{len(X):,} rows, {num_steps:,} steps: {time.perf_counter() - began:.0f} s")

    posterior = sgp.posterior(model, guide, result, X, y, None, logdet)  # given all data
    predicted = posterior.predictive(X_test)
    error = float(jnp.sqrt(jnp.mean(jnp.square(predicted.mean - y_test))))
    print(f"test RMSE {error:.3f}, log density {float(predicted.log_prob(y_test).mean()):.3f}")

    figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
    likelihood = -np.asarray(result.losses) / len(X)
    smooth = np.convolve(likelihood, np.ones(200) / 200, mode="valid")
    ax.plot(np.arange(len(smooth)), smooth)
    ax.set(xlabel="step", ylabel="log p(y) a row, mean of 200", ylim=(-2.0, None))
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "training.svg")
    return error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="bike", help="name of a UCI data set")
    parser.add_argument("--epochs", type=int, default=30)
    main(**vars(parser.parse_args()))
