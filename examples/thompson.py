"""Thompson sampling: the next experiments are at the maxima of posterior draws.

The simulated yield of a process with two settings is measured with noise. In each round, four
functions are drawn from the posterior given all experiments so far. Each function is maximized by
gradient ascent from the best of many random settings, and the next four experiments are at the
maxima. The data are padded to the size that they reach, so that only the first round compiles.
Where the yield is uncertain, the functions differ, so that some have their maximum there;
where the yield is known to be low, no function has its maximum.

The script prints the yields measured in each round: they explore both hills, then mostly stay on
the higher one. Dots in the figure are experiments; later ones are darker.
"""

import argparse
import functools
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

NOISE = 0.1


def true_yield(X):
    """Two hills in the unit square, of heights 2.02 and 1.5."""
    low, high = jnp.array([0.25, 0.75]), jnp.array([0.75, 0.3])
    hills = [jnp.exp(-jnp.sum((X - top) ** 2, axis=1) / 0.03) for top in (low, high)]
    return 1.5 * hills[0] + 2.0 * hills[1] + 0.1 * jnp.sin(9.0 * X[:, 0])


def model(X, y=None, observed=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.5, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    kernel = sgp.kernels.Matern52(lengthscale, scale**2)
    gp = sgp.GaussianProcess(kernel, X, NOISE**2, mean=0.5, observed=observed)
    numpyro.sample("y", gp, obs=y)


@functools.partial(jax.jit, static_argnums=2)
def next_experiments(key, values, num, *data):
    """The settings at which `num` posterior draws are largest, and the draws."""
    draw_key, key = jax.random.split(key)
    functions = sgp.posterior(model, values, *data).sample_functions(draw_key, num)
    return maxima(key, functions), functions


def maxima(key, functions):
    """The maximizer of each function in the unit square, shape (num_samples, 2)."""
    starts = jax.random.uniform(key, (2000, 2))
    best = starts[jnp.argmax(functions(starts), axis=1)]

    def total(X):  # the sum of each function at its row of X
        return jnp.trace(functions(X))

    def climb(X, _):
        return jnp.clip(X + 1e-3 * jax.grad(total)(X), 0.0, 1.0), None

    return jax.lax.scan(climb, best, length=100)[0]


def main(num_rounds=8, num_functions=4, num_first=16, folder="outputs/thompson"):
    """Run it all; returns the yield where the posterior mean is largest, and the largest yield."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * num_rounds + 3))

    def experiment(X):
        return true_yield(X) + NOISE * jax.random.normal(next(keys), (len(X),))

    X = jax.random.uniform(next(keys), (num_first, 2))
    y = experiment(X)
    values = sgp.infer.initial_hyperparameters(next(keys), model, X, y, progress_bar=False)
    size = num_first + num_rounds * num_functions  # one program serves all rounds
    for number in range(num_rounds):
        data = sgp.pad_rows(size, X, y)
        new, functions = next_experiments(next(keys), dict(values), num_functions, *data)
        X, y = jnp.concatenate([X, new]), jnp.concatenate([y, experiment(new)])
        print(f"round {number + 1}:", *[f"{value:.2f}" for value in y[-num_functions:]])

    side = jnp.linspace(0.0, 1.0, 101)
    grid = jnp.stack(jnp.meshgrid(side, side), axis=-1).reshape(-1, 2)
    truth, mean = true_yield(grid), sgp.posterior(model, values, X, y).mean(grid)
    best, largest = float(truth[jnp.argmax(mean)]), float(truth.max())
    print(f"after {len(y)} experiments: yield {best:.2f}; the largest is {largest:.2f}")

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    panels = [("true yield", truth), ("one function of the last round", functions(grid)[0])]
    for panel, (title, shown) in zip(axes, panels, strict=True):
        contours = panel.contourf(side, side, shown.reshape(101, 101), 20)
        contours.set_rasterized(True)
        panel.scatter(*X.T, c=np.arange(len(X)), cmap="Greys", edgecolors="white", s=20)
        panel.set(title=title, xlabel="first setting")
        figure.colorbar(contours, ax=panel)
    axes[1].plot(*new[0], "r*", markersize=12)
    axes[0].set_ylabel("second setting")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "yield.svg")
    return best, largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-rounds", type=int, default=8)
    parser.add_argument("--num-functions", type=int, default=4)
    main(**vars(parser.parse_args()))
