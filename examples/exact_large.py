"""An exact GP on thousands of rows, without its covariance matrix: warm-started linear solves.

Elevators from the UCI collection (New York flights where no UCI folder is given): a Matern-3/2
kernel with a lengthscale for each column, priors on all hyperparameters, and SVI with the pathwise
gradient estimator. Every step goes on from the last one's solutions, within a budget of epochs; the
last solutions are posterior functions, so that predictions need no factorization.

    SCALEGP_DATA=path/to/uci python examples/exact_large.py --num-rows 5000
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
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SOLVER = sgp.solvers.AlternatingProjections(block_size=500, max_epochs=10)
ESTIMATOR = sgp.estimators.Pathwise(SOLVER)


def model(X, y=None):
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(1.0, 1.0).expand([X.shape[1]]).to_event(1)
    )
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    kernel = sgp.kernels.Matern32(lengthscale, variance)
    gp = sgp.GaussianProcess(kernel, X, noise**2, estimator=ESTIMATOR, state="solver")
    numpyro.sample("y", gp, obs=y)


def load_data(num_rows):
    if "SCALEGP_DATA" in os.environ:
        data = sgp.datasets.load_uci("elevators")
    else:
        data = sgp.datasets.load_flights()
    rows = np.random.default_rng(0).permutation(len(data.X_train))[:num_rows]
    X, y = jnp.array(data.X_train[rows]), jnp.array(data.y_train[rows])
    return data, X, y, jnp.array(data.X_test[:2000]), jnp.array(data.y_test[:2000])


def plot(folder, data, X, posterior, history, column):
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.semilogy(history["residual"], label="residual, data")
    left.semilogy(history["probe_residual"], label="residual, probes")
    left.axhline(SOLVER.tolerance, color="k", linewidth=0.8, linestyle=":", label="tolerance")
    left.plot(history["epochs"], color="0.7", label="epochs")
    left.set_xlabel("step")
    left.legend()
    # A slice through the middle of the data: the column with the shortest lengthscale varies.
    grid = jnp.linspace(*np.quantile(X[:, column], [0.02, 0.98]), 200)
    slice_ = jnp.broadcast_to(jnp.median(X, axis=0), (200, X.shape[1])).at[:, column].set(grid)
    paths = posterior.sample(jax.random.key(3), slice_, 8)
    mean, scale = posterior.mean(slice_), jnp.sqrt(posterior.variance(slice_))
    right.plot(grid, paths.T, color="C0", linewidth=0.6, alpha=0.7)
    right.plot(grid, mean, color="k")
    right.fill_between(grid, mean - 2 * scale, mean + 2 * scale, color="C0", alpha=0.2)
    right.set_xlabel(f"{data.columns[column]}, standardized; other columns at their medians")
    right.set_title("posterior mean, two deviations, and functions")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "fit.png", dpi=150)


def main(num_rows=3000, num_steps=60, num_draws=20, folder="outputs/exact_large"):
    """Run it all; returns the test scores and the ArviZ data."""
    data, X, y, X_test, y_test = load_data(num_rows)
    guide = AutoDelta(model)
    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    result = svi.run(jax.random.key(0), num_steps, X, y)
    history = result.state.mutable_state["solver"].history()
    print(f"{float(history['epochs'].sum()):.0f} epochs in {num_steps} steps")

    # The parameters have moved since the last solve: this one starts there and ends quickly.
    posterior = sgp.posterior(model, guide, result, X, y, max_epochs=50)
    print({name: float(value) for name, value in posterior.diagnostics.items()})
    predictive = posterior.predictive(X_test)
    scores = {
        "rmse": float(jnp.sqrt(jnp.mean((predictive.mean - y_test) ** 2))),
        "nll": float(-jnp.mean(predictive.log_prob(y_test))),
        "rmse of the mean": float(jnp.std(y_test)),
    }
    print(f"{data.name}, {len(y)} rows: {scores}")
    plot(folder, data, X, posterior, history, int(jnp.argmin(posterior.kernel.lengthscale)))
    sgp.save(Path(folder) / "posterior.npz", posterior)  # predicts again without a solve

    inference_data = sgp.to_arviz(
        result, model, guide, key=jax.random.key(1), model_args=(X, y), num_samples=num_draws
    )
    return scores, inference_data


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-rows", type=int, default=3000)
    parser.add_argument("--num-steps", type=int, default=60)
    main(**vars(parser.parse_args()))
