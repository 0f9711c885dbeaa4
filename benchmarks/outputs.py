"""Several outputs by Kronecker structure or a dense matrix: time of a value and its gradient.

    python benchmarks/evidence.py outputs

The log density of a complete matrix of observations and its gradient with respect to all
hyperparameters, by p factorizations of n x n matrices, and, as for data with gaps, by one
factorization of an np x np matrix, in float32. LAPACK has one thread.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from iterative import interleaved_seconds
from mesh import on_devices
from sparse import number_in

import numpyro_scalegp as sgp


def log_density(by_structure, hyperparameters, X, Y):
    """The log density; noise of the shape of Y prevents the use of the structure."""
    lengthscale, W, diag, noise = hyperparameters
    noise = noise if by_structure else jnp.broadcast_to(noise, Y.shape)
    outputs = sgp.kernels.Coregion(W, diag)
    return sgp.MultiOutputGP(sgp.kernels.RBF(lengthscale), outputs, X, noise).log_prob(Y)


def record(data, split, seed, method, **options):
    """The record of a unit such as "300 rows, 5 outputs": see `compare`."""
    n, p = map(number_in, method.split(", "))
    return on_devices(1, compare, n=n, p=p, seed=seed, **options)


def compare(n, p, seed, d=2, repeats=10):
    """Median milliseconds of calls that alternate."""
    generator = np.random.default_rng(seed)
    X, Y, W = (jnp.asarray(generator.normal(size=shape)) for shape in ((n, d), (n, p), (p, 2)))
    values = jnp.ones(d), W, 0.5 * jnp.ones(p), 0.1 * jnp.ones(p)
    functions = {kind: functools.partial(log_density, kind) for kind in (True, False)}
    tasks = {kind: (jax.jit(jax.value_and_grad(f)), values, X, Y) for kind, f in functions.items()}
    ours, dense = (
        1e3 * float(np.median(times)) for times in interleaved_seconds(tasks, repeats).values()
    )
    return {"gradient": ours, "dense_gradient": dense, "dense_ratio": dense / ours}
