"""Outputs mixed from a few GPs under `QuadratureELBO`: milliseconds a step against their number.

    python benchmarks/evidence.py mixing

Counts whose log rates are W f, functions in a plate and W learned: every entry of the likelihood
depends on all functions, through one affine combination, and is integrated as one normal variable.
Made-up data, an RBF kernel, float32.
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
    """Y, (outputs, n), of which each has a log rate of its own, mixed from the same functions."""
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
    """The record of a unit, of "20 outputs": milliseconds a step, the least of the blocks."""
    key, outputs = jax.random.key(seed), number_in(method)
    X = jax.random.normal(key, (rows, 3))
    W = 0.5 * np.random.default_rng(seed).normal(size=(outputs, functions))
    f = jnp.sin(X @ jax.random.normal(key, (3, functions)))
    Y = jax.random.poisson(key, jnp.exp(W @ f.T))
    points = sgp.features.kmeans_points(key, X, num_inducing)
    guide = sgp.guides.AutoSparseGP(model, rest=AutoDelta, inducing_points=points)
    svi = SVI(model, guide, optax.adam(0.005), sgp.infer.QuadratureELBO(nodes))
    given = X, Y, functions, batch_size
    state = svi.init(key, *given)

    @jax.jit
    def run(state):
        return jax.lax.scan(lambda state, _: svi.update(state, *given), state, length=steps)

    losses, spent = [], []
    for _ in range(blocks + 1):
        start = time.perf_counter()
        state, loss = jax.block_until_ready(run(state))
        spent.append(1e3 * (time.perf_counter() - start) / steps)
        losses.append(float(loss.mean()))
    # The first block was compiled.
    return {"milliseconds": min(spent[1:]), "first_loss": losses[0], "last_loss": losses[-1]}
