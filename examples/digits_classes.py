"""Ten classes of digits: ten sparse GPs in a plate and a softmax likelihood.

Ten functions share their kernel and inducing points; `dist.Categorical(logits=f.T)` turns their
values at an image into probabilities of the ten digits. The softmax depends on ten functions at
once, too many for a product of one-dimensional quadrature rules, so `QuadratureELBO` uses 64 points
of a shifted Sobol' sequence.

The script prints accuracy and mean negative log probability on held-out images, and the time of a
step for ten functions and for a single one: ten functions take less than ten times as long, since
they share their kernel matrix. The figure shows the images with the worst predictions: the true
digit and its probability above, the predicted digit below.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
from sklearn.datasets import load_digits

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def load():
    """Training and test data: images of 64 pixels in [0, 1], and their digits."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    X, y = jnp.asarray(images[order] / 16.0, jnp.float32), jnp.asarray(digits[order])
    return (X[:1347], y[:1347]), (X[1347:], y[1347:])


def kernel():
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(2.0, 1.0))
    return sgp.kernels.RBF(lengthscale, variance)


def model(X, y=None, batch_size=None):
    """Ten independent functions of one kernel; the largest is the likeliest class."""
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    prior = sgp.LatentGP(kernel(), X)
    with numpyro.plate("classes", 10):
        f = numpyro.sample("f", prior)
    with rows:
        numpyro.sample("digit", dist.Categorical(logits=f.T), obs=y)


def one_class(X, y=None, batch_size=None):
    """Zero or not: a single function, to compare the time of a step."""
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(kernel(), X))
    with rows:
        numpyro.sample("is_zero", dist.Bernoulli(logits=f), obs=y == 0)


def train(model, data, points, num_steps, batch_size=256, seed=0):
    """The guide, the fitted parameters, and the seconds that a step takes."""
    guide = sgp.guides.AutoSparseGP(model, rest=AutoDelta, inducing_points=points)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, num_steps))
    svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())

    @jax.jit
    def tenth(state):
        update = lambda state, _: svi.update(state, *data, batch_size)  # noqa: E731
        return jax.lax.scan(update, state, length=num_steps // 10)[0]

    state = svi.init(jax.random.key(seed), *data, batch_size)
    compiled, seconds = tenth.lower(state).compile(), []
    for _ in range(10):
        start = time.perf_counter()
        state = jax.block_until_ready(compiled(state))
        seconds.append((time.perf_counter() - start) / (num_steps // 10))
    return guide, svi.get_params(state), min(seconds)


def main(num_inducing=100, num_steps=1500, num_draws=200, folder="outputs/digits_classes"):
    """Train, and score the held-out images; returns the scores and the ratio of two steps."""
    data, (X_test, y_test) = load()
    points = sgp.features.kmeans_points(jax.random.key(1), data[0], num_inducing)
    guide, params, seconds = train(model, data, points, num_steps)
    *_, single = train(one_class, data, points, max(num_steps // 10, 10))

    f = sgp.posterior(model, guide, params, *data).sample(jax.random.key(2), X_test, num_draws)
    probabilities = np.asarray(jax.nn.softmax(f, axis=1).mean(axis=0)).T
    right = probabilities[np.arange(len(y_test)), y_test]
    scores = {
        "accuracy": np.mean(probabilities.argmax(axis=1) == y_test),
        "mnlp": -np.mean(np.log(right)),
        "ratio": seconds / (10 * single),
    }
    print(f"{len(y_test)} test images, ten functions of {num_inducing} inducing points:")
    print("  accuracy {accuracy:.4f}, mean negative log probability {mnlp:.4f}".format(**scores))
    print(f"  a step takes {1e3 * seconds:.1f} ms, a step of one function {1e3 * single:.1f} ms")

    Path(folder).mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(2, 6, figsize=(8, 3.4), layout="constrained")
    for ax, i in zip(axes.ravel(), np.argsort(right), strict=False):
        ax.imshow(X_test[i].reshape(8, 8), cmap="gray_r")
        predicted = probabilities[i].argmax()
        ax.set(
            xticks=[],
            yticks=[],
            title=f"{y_test[i]}: {right[i]:.2f}",
            xlabel=f"taken for {predicted}",
        )
    figure.savefig(Path(folder) / "most_wrong.svg")
    return {name: float(score) for name, score in scores.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--num-steps", type=int, default=1500)
    main(**vars(parser.parse_args()))
