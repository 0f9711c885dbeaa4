"""An infinite stream: a GP that adds points for its mean as batches arrive.

The target is a function of two inputs with fine detail, observed with noise in batches. Each batch
trains the covariance by one step of SVI and adds inducing points for the mean, up to 1,024. Only
the last 40 batches are stored, and after every 40 batches a linear solve with them computes the
mean.

Compare the test errors: with the same 64 inducing points, the error of a sparse GP decreases slowly
and stays far larger, since 64 points cannot represent the function.
"""

import argparse
import functools
from collections import deque
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.initialization import init_to_value

import numpyro_scalegp as sgp

ROWS = 1_000_000  # expected in total, which each batch represents


def function(X):
    """A function of two inputs with fine detail."""
    return np.sin(6 * X[:, 0] * X[:, 1]) + 0.5 * np.cos(12 * X[:, 0]) * np.sin(9 * X[:, 1])


def stream(seed, batch_size=512):
    """An infinite stream of noisy batches."""
    generator = np.random.default_rng(seed)
    while True:
        X = generator.uniform(-1, 1, size=(batch_size, 2)).astype(np.float32)
        noise = 0.2 * generator.normal(size=batch_size)
        yield X, (function(X) + noise).astype(np.float32)


def hyperparameters():
    """The kernel and the noise, with their priors; both inputs have the same lengthscale."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    return sgp.kernels.RBF(lengthscale, variance), noise


def exact_model(X, y):
    """An exact GP regression on the first batch."""
    kernel, noise = hyperparameters()
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise**2), obs=y)


def model(X, y=None, size=ROWS):
    """A GP regression on one batch of a data set of `size` rows."""
    kernel, noise = hyperparameters()
    f = numpyro.sample("f", sgp.LatentGP(kernel, X))
    with sgp.plate("rows", size, X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def follow(guide, batches, every, held):
    """Train on a stream; returns the test errors during training."""
    svi = SVI(guide.model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(num_nodes=2))
    update = jax.jit(svi.update)

    @jax.jit
    def solve(params, X, y):
        if not hasattr(guide, "solve_mean"):
            return params
        # Each observation counts once: weighted as all `ROWS`, they would be overfitted.
        return guide.solve_mean(params, X, y, size=len(X)).params

    X_test = next(stream(seed=1, batch_size=4000))[0]
    state, errors, recent = None, [], deque(maxlen=held)
    for step, (X, y) in zip(range(1, batches + 1), stream(seed=0), strict=False):
        state = jax.jit(svi.init)(jax.random.key(0), X, y) if state is None else state
        state, _ = update(state, X, y)
        recent.append((X, y))
        if step % every == 0:
            # The points added to the mean are mutable state, not parameters.
            fitted = {**svi.get_params(state), **(state.mutable_state or {})}
            fitted = solve(fitted, *map(np.concatenate, zip(*recent, strict=True)))
            state = sgp.infer.replace_params(svi, state, fitted)
            mean = sgp.posterior(guide.model, guide, fitted, X, y).mean(X_test)
            errors.append((step, float(np.sqrt(np.mean((mean - function(X_test)) ** 2)))))
            print("  {:5d} batches: RMSE {:.4f}".format(*errors[-1]), flush=True)
    return errors


def main(
    batches=400, every=40, held=40, num_inducing=64, num_residual=1024, output="outputs/streaming"
):
    """Train on the stream with both guides, and draw their errors."""
    X, y = next(stream(seed=0))
    # 64 points are too few to learn a short lengthscale and small noise. An exact fit to the first
    # batch can.
    start = sgp.infer.initial_hyperparameters(
        jax.random.key(0), exact_model, X, y, num_subsets=1, subset_size=len(y)
    )
    print("first batch:", {name: round(float(value), 3) for name, value in start.items()})
    hyperparameter_guide = functools.partial(AutoDelta, init_loc_fn=init_to_value(values=start))
    points = sgp.features.kmeans_points(jax.random.key(1), X, num_inducing)
    sparse = sgp.guides.AutoSparseGP(model, rest=hyperparameter_guide, inducing_points=points)
    hybrid = sgp.guides.AutoHybridGP(
        numpyro.handlers.condition(model, data=start),
        rest=AutoDelta, inducing_points=points, num_residual=num_residual, growth=128,
        train_residual=False,
    )  # fmt: skip
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    errors = {}
    for name, guide in {"sparse": sparse, "decoupled": hybrid}.items():
        print(name)
        errors[name] = follow(guide, batches, every, held)
        axes.plot(*zip(*errors[name], strict=True), marker=".", label=name)
    axes.set(xlabel="batches", ylabel="test RMSE", yscale="log")
    axes.legend()
    Path(output).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(output) / "errors.svg")
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--output", default="outputs/streaming")
    main(**vars(parser.parse_args()))
