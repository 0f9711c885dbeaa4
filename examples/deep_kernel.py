"""A jump and a fast wave: a neural network transforms the inputs of an RBF kernel.

The simulated function is smooth on the left, jumps, and oscillates fast on the right, so that no
single lengthscale fits it. A small Flax network g maps the inputs, the kernel is k(g(x), g(z)), and
the network, the inducing points and the hyperparameters are trained together. A comment in the
model shows what to change for an Equinox network.

For comparison, a plain RBF kernel is trained in the same way. At the jump, the plain kernel smooths
and overshoots; the deep kernel follows the jump, and its band is wide only there.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpyro
import numpyro.distributions as dist
import optax
from flax import nnx
from numpyro.contrib.module import nnx_module
from numpyro.infer import SVI

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Network(nnx.Module):
    """The input itself, and two outputs of a network with one hidden layer."""

    def __init__(self, width=32, *, rngs):
        self.hidden = nnx.Linear(1, width, rngs=rngs)
        self.out = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, X):
        return jnp.concatenate([X, self.out(jnp.tanh(5.0 * self.hidden(X)))], axis=1)


def true_function(X):
    x = X[:, 0]
    return jnp.where(x < 0.0, 0.5 * x, 1.0 + 0.5 * jnp.sin(4.0 * jnp.square(x)))


def model(X, y=None, batch_size=None, *, deep):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.7))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    kernel = sgp.kernels.RBF(lengthscale, variance)
    if deep:
        # With Equinox: network = eqx_module("network", eqx.nn.MLP(1, 3, 32, 1, key=key)), from the
        # same numpyro.contrib.module; `FeatureMapped` applies it row by row.
        network = nnx_module("network", Network(rngs=nnx.Rngs(0)))
        kernel = sgp.kernels.FeatureMapped(kernel, network)
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(kernel, X))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def main(num_rows=2000, num_inducing=40, num_steps=2000, folder="outputs/deep_kernel"):
    """Run it all; returns the error of each kernel's posterior mean against the true function."""
    data_key, noise_key, guide_key, run_key = jax.random.split(jax.random.key(0), 4)
    X = jax.random.uniform(data_key, (num_rows, 1), minval=-2.0, maxval=2.0)
    y = true_function(X) + 0.1 * jax.random.normal(noise_key, (num_rows,))
    Xs = jnp.linspace(-2.0, 2.0, 801)[:, None]

    figure, axes = plt.subplots(2, 1, figsize=(8, 6), sharex=True)
    errors = {}
    for name, panel in zip(["plain", "deep"], axes, strict=True):
        kernel_model = functools.partial(model, deep=name == "deep")
        points = sgp.features.kmeans_points(guide_key, X, num_inducing)
        guide = sgp.guides.AutoSparseGP(kernel_model, inducing_points=points)
        # The step size decays: at a constant one the network still fluctuates when training ends.
        # Gradients are clipped, since a rare, very large one would ruin the network for good.
        rate = optax.cosine_decay_schedule(0.03, num_steps)
        optimizer = optax.chain(optax.clip_by_global_norm(1000.0), optax.adam(rate))
        svi = SVI(kernel_model, guide, optimizer, sgp.infer.QuadratureELBO(num_nodes=2))
        result = svi.run(run_key, num_steps, X, y, 256, progress_bar=False)
        posterior = sgp.posterior(kernel_model, guide, result, X, y)
        mean, scale = posterior.mean(Xs), jnp.sqrt(posterior.variance(Xs))
        errors[name] = float(jnp.sqrt(jnp.mean(jnp.square(mean - true_function(Xs)))))
        print(f"{name:6} kernel: RMSE against the true function {errors[name]:.3f}")

        panel.plot(X[:, 0], y, ".", color="0.7", markersize=2, rasterized=True)
        panel.plot(Xs[:, 0], true_function(Xs), color="black", linewidth=1, label="true")
        panel.plot(Xs[:, 0], mean, color="C0", label=f"{name} kernel")
        panel.fill_between(Xs[:, 0], mean - 2 * scale, mean + 2 * scale, color="C0", alpha=0.3)
        panel.set_ylabel("y")
        panel.legend(loc="upper left")
    axes[-1].set_xlabel("x")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "fits.svg", bbox_inches="tight")
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-rows", type=int, default=2000)
    parser.add_argument("--num-inducing", type=int, default=40)
    parser.add_argument("--num-steps", type=int, default=2000)
    main(**vars(parser.parse_args()))
