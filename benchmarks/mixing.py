"""Outputs mixed from a few GPs under `QuadratureELBO`: milliseconds per step by their number.

    python benchmarks/evidence.py mixing

The data are counts with log rates W f, for functions f in a plate and a learned W. Every entry of
the likelihood depends on all functions through one affine combination, and is integrated over a
single normal variable. Simulated data, an RBF kernel, float32.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
from sparse import number_in

import numpyro_scalegp as sgp


def model(X, Y, num_functions, batch_size):
    """Counts Y of shape (outputs, n); the log rates are mixed from the same functions."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    rows = sgp.plate("rows", len(X), batch_size)
    prior = sgp.LatentGP(sgp.kernels.RBF(lengthscale), rows.take(X))
    with numpyro.plate("functions", num_functions):
        f = numpyro.sample("f", prior)
    mixing = dist.Normal(0.0, 1.0).expand([len(Y), num_functions]).to_event(2)
    W = numpyro.sample("W", mixing)
    with numpyro.plate("outputs", len(Y), dim=-2), rows:
        numpyro.sample("y", dist.Poisson(jnp.exp(W @ f)), obs=rows.take(Y.T).T)


def record(
    data,
    split,
    seed,
    method,
    *,
    functions=4,
    rows=5000,
    batch_size=256,
    num_inducing=100,
    nodes=20,
    steps=20,
    blocks=40,
):
    """The record of a unit such as "20 outputs": milliseconds per step of the fastest block."""
    key, outputs = jax.random.key(seed), number_in(method)
    X = jax.random.normal(key, (rows, 3))
    W = 0.5 * np.random.default_rng(seed).normal(size=(outputs, functions))
    f = jnp.sin(X @ jax.random.normal(key, (3, functions)))
    Y = jax.random.poisson(key, jnp.exp(W @ f.T))
    points = sgp.features.kmeans_points(key, X, num_inducing)
    guide = sgp.guides.AutoSparseGP(model, rest=AutoDelta, inducing_points=points)
    svi = SVI(model, guide, optax.adam(0.005), sgp.infer.QuadratureELBO(nodes))
    data = X, Y, functions, batch_size
    state = svi.init(key, *data)

    @jax.jit
    def run(state):
        return jax.lax.scan(lambda state, _: svi.update(state, *data), state, length=steps)

    losses, spent = [], []
    for _ in range(blocks + 1):
        start = time.perf_counter()
        state, loss = jax.block_until_ready(run(state))
        spent.append(1e3 * (time.perf_counter() - start) / steps)
        losses.append(float(loss.mean()))
    # The first block includes compilation.
    return {"milliseconds": min(spent[1:]), "first_loss": losses[0], "last_loss": losses[-1]}
