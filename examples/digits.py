"""Odd or even digits: classification with 100,000 random Fourier features.

A step of `QuadruplyStochasticELBO` uses 256 of the images and 4,000 of the features, so that its
cost does not depend on their total numbers. With a logistic likelihood, a subset of the features
yields no unbiased estimate of the ELBO; since the log likelihood is concave, the approximation
`bound="plug_in"` can be used instead.

The script prints accuracy and mean negative log probability on held-out images. The figure shows
the images with the worst predictions and their predicted probability of an odd digit.
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
from numpyro.infer.autoguide import AutoDelta
from sklearn.datasets import load_digits

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def load():
    """Training and test data: images of 64 pixels in [0, 1], and whether the digit is odd."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    X, y = jnp.asarray(images[order] / 16.0, jnp.float32), jnp.asarray(digits[order] % 2)
    return (X[:1347], y[:1347]), (X[1347:], y[1347:])


def make_model(X, num_features):
    """The model; it learns the kernel's lengthscale and variance with the weights."""
    guess = 0.6 * sgp.infer.median_distance(X)
    # Frequencies in 64 dimensions are expensive to draw: store them, and pass the kernel later.
    features = sgp.features.RandomFourier(sgp.kernels.RBF(1.0), num_features, seed=0)
    features = features.stored(X.shape[1])

    def model(X, y=None, batch_size=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(guess), 0.5))
        variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
        rows = sgp.plate("rows", len(X), batch_size)
        X, y = rows.take(X, y)
        phi = features.with_kernel(sgp.kernels.RBF(lengthscale, variance))
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        with rows:
            numpyro.sample("odd", dist.BernoulliLogits(f), obs=y)

    return model


def probability(posterior, X, num_nodes=20):
    """The probability of an odd digit: the logistic function, averaged over the posterior of f."""
    nodes, masses = np.polynomial.hermite_e.hermegauss(num_nodes)
    mean, sd = posterior.mean(X), jnp.sqrt(posterior.variance(X))
    return jax.nn.sigmoid(mean[:, None] + sd[:, None] * nodes) @ (masses / masses.sum())


def main(num_features=100_000, num_steps=1500, num_drawn=4000, seed=0, folder="outputs/digits"):
    """Train, and score the held-out images; returns the scores."""
    train, (X_test, y_test) = load()
    model = make_model(train[0], num_features)
    guide = sgp.guides.AutoChevronGP(model, rest=AutoDelta, rank=0)
    loss = sgp.infer.QuadruplyStochasticELBO(num_features=num_drawn, bound="plug_in")
    row_optim = sgp.infer.row_adagrad(optax.exponential_decay(0.2, num_steps, 0.1))
    svi = sgp.infer.RowSVI(model, guide, optax.adam(0.01), loss, row_optim=row_optim)
    result = svi.run(jax.random.key(seed), num_steps, *train, 256, progress_bar=False)

    odd = np.asarray(probability(sgp.posterior(model, guide, result, *train), X_test))
    right = np.where(y_test, odd, 1.0 - odd)
    scores = {"accuracy": np.mean(right > 0.5), "mnlp": -np.mean(np.log(right))}
    kernel = {name: round(float(value), 2) for name, value in guide.median(result.params).items()}
    print(f"{len(y_test)} test images, {num_features} features, {kernel}:")
    print("  accuracy {accuracy:.4f}, mean negative log probability {mnlp:.4f}".format(**scores))

    Path(folder).mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(2, 6, figsize=(8, 3.2), layout="constrained")
    for ax, i in zip(axes.ravel(), np.argsort(right), strict=False):
        ax.imshow(X_test[i].reshape(8, 8), cmap="gray_r")
        ax.set(xticks=[], yticks=[], title=f"p(odd) = {odd[i]:.2f}")
    figure.savefig(Path(folder) / "most_wrong.svg")
    return {name: float(score) for name, score in scores.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-features", type=int, default=100_000)
    parser.add_argument("--num-steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
