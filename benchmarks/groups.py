"""A batch of exact GPs beside one batched Cholesky factorization: time of a value and its gradient.

    python benchmarks/evidence.py groups

The log density of all groups with hyperparameters of their own, and its gradient in these, beside
`jnp.linalg.cholesky` of the same (groups, rows, rows) array and its derivative in all entries, and
beside a loop over the groups' own distributions, in float32. LAPACK has one thread.
"""

import jax
import jax.numpy as jnp
import numpy as np
from iterative import seconds_in_turn
from mesh import on_devices
from sparse import number_in

import numpyro_scalegp as sgp


def log_density(hyperparameters, X, y):
    """Of one group, or of all."""
    lengthscale, variance, noise = hyperparameters
    noise = noise[:, None] if noise.ndim else noise
    gp = sgp.GaussianProcess(sgp.kernels.RBF(lengthscale, variance), X, noise)
    return jnp.sum(gp.log_prob(y))


def log_determinant(H):
    """By a batched factorization."""
    diagonal = jnp.diagonal(jnp.linalg.cholesky(H), axis1=-2, axis2=-1)
    return jnp.sum(jnp.log(diagonal))


def record(data, split, seed, method, **options):
    """The record of a unit, of "100 groups, 50 rows": see `compare`."""
    groups, n = map(number_in, method.split(", "))
    return on_devices(1, compare, groups=groups, n=n, seed=seed, **options)


def compare(groups, n, seed, d=2, repeats=50):
    """Median milliseconds, taken in turn."""
    generator = np.random.default_rng(seed)

    def positive(*shape):
        return jnp.asarray(generator.uniform(0.5, 2.0, shape))

    X, y = (jnp.asarray(generator.normal(size=shape)) for shape in ((groups, n, d), (groups, n)))
    values = positive(groups, d), positive(groups), 0.1 * positive(groups)
    lengthscale, variance, noise = values
    H = sgp.kernels.RBF(lengthscale, variance).covariance(X) + noise[:, None, None] * jnp.eye(n)
    batch = jax.jit(jax.value_and_grad(log_density))

    def loop():
        return [batch(*one) for one in zip(zip(*values, strict=True), X, y, strict=True)]

    tasks = {
        "gradient": (batch, values, X, y),
        "factorization": (jax.jit(jax.value_and_grad(log_determinant)), H),
        "loop": (loop,),
    }
    took = seconds_in_turn(tasks, repeats)
    found = {name: 1e3 * float(np.median(times)) for name, times in took.items()}
    batched = found["gradient"] / found["factorization"]
    return {**found, "batched_ratio": batched, "loop_ratio": found["loop"] / found["gradient"]}
