"""A batch of exact GPs and a batched Cholesky factorization: time of a value and its gradient.

    python benchmarks/evidence.py groups

The log density of all groups, each with its own hyperparameters, and its gradient, in float32. They
are compared with `jnp.linalg.cholesky` of the same (groups, rows, rows) array and its derivative
with respect to all entries, and with a loop over the groups. LAPACK has one thread.
"""

import jax
import jax.numpy as jnp
import numpy as np
from iterative import interleaved_seconds
from mesh import on_devices
from sparse import number_in

import numpyro_scalegp as sgp


def log_density(hyperparameters, X, y):
    """The log density of one group, or the sum over all groups."""
    lengthscale, variance, noise = hyperparameters
    noise = noise[:, None] if noise.ndim else noise
    gp = sgp.GaussianProcess(sgp.kernels.RBF(lengthscale, variance), X, noise)
    return jnp.sum(gp.log_prob(y))


def log_determinant(H):
    """The sum of the log-determinants, by a batched factorization."""
    diagonal = jnp.diagonal(jnp.linalg.cholesky(H), axis1=-2, axis2=-1)
    return jnp.sum(jnp.log(diagonal))


def record(data, split, seed, method, **options):
    """The record of a unit such as "100 groups, 50 rows": see `compare`."""
    groups, n = map(number_in, method.split(", "))
    return on_devices(1, compare, groups=groups, n=n, seed=seed, **options)


def compare(groups, n, seed, d=2, repeats=50):
    """Median milliseconds of calls that alternate."""
    generator = np.random.default_rng(seed)

    def positive(*shape):
        return jnp.asarray(generator.uniform(0.5, 2.0, shape))

    X, y = (jnp.asarray(generator.normal(size=shape)) for shape in ((groups, n, d), (groups, n)))
    values = positive(groups, d), positive(groups), 0.1 * positive(groups)
    lengthscale, variance, noise = values
    H = sgp.kernels.RBF(lengthscale, variance).covariance(X) + noise[:, None, None] * jnp.eye(n)
    batch = jax.jit(jax.value_and_grad(log_density))

    def loop():
        return [batch(*group) for group in zip(zip(*values, strict=True), X, y, strict=True)]

    tasks = {
        "gradient": (batch, values, X, y),
        "factorization": (jax.jit(jax.value_and_grad(log_determinant)), H),
        "loop": (loop,),
    }
    seconds = interleaved_seconds(tasks, repeats)
    medians = {name: 1e3 * float(np.median(times)) for name, times in seconds.items()}
    batched = medians["gradient"] / medians["factorization"]
    return {
        **medians,
        "batched_ratio": batched,
        "loop_ratio": medians["loop"] / medians["gradient"],
    }
