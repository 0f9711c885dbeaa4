"""Value and gradient of the exact log marginal likelihood, against autodiff through Cholesky.

    python benchmarks/evidence.py exact

Matern-3/2 with ARD, d = 18. The timed calls alternate, so that noise of the machine disturbs all
alike.
"""

import jax
import jax.numpy as jnp
import numpy as np
from iterative import interleaved_seconds
from jax.scipy.linalg import solve_triangular
from sparse import number_in

import numpyro_scalegp as sgp


def covariance(parameters, X):
    """The covariance of the observations."""
    kernel = sgp.kernels.Matern32(
        jnp.exp(parameters["lengthscale"]), jnp.exp(parameters["variance"])
    )
    return kernel(X, X) + jnp.exp(parameters["noise"]) * jnp.eye(X.shape[0])


def plain(parameters, X, y):
    """The log density, for autodiff through the Cholesky factorization."""
    L = jnp.linalg.cholesky(covariance(parameters, X))
    white = solve_triangular(L, y, lower=True)
    return (
        -0.5 * white @ white
        - jnp.sum(jnp.log(jnp.diagonal(L)))
        - 0.5 * y.size * jnp.log(2 * jnp.pi)
    )


def ours(parameters, X, y):
    """The package's density."""
    kernel = sgp.kernels.Matern32(
        jnp.exp(parameters["lengthscale"]), jnp.exp(parameters["variance"])
    )
    return sgp.GaussianProcess(kernel, X, jnp.exp(parameters["noise"])).log_prob(y)


def record(data, split, seed, method, *, d=18, repeats=5):
    """The record of a unit such as "4,000 rows, float64": median seconds, gradient difference."""
    size, dtype = method.split(" rows, ")
    with jax.enable_x64(dtype == "float64"):
        X = jax.random.normal(jax.random.key(seed), (number_in(size), d))
        y = jnp.sin(X.sum(1))
        parameters = {
            "lengthscale": jnp.full(d, 1.0),
            "variance": jnp.array(0.0),
            "noise": jnp.array(-2.0),
        }
        functions = {
            "ours": jax.jit(jax.value_and_grad(ours)),
            "autodiff": jax.jit(jax.value_and_grad(plain)),
            "value": jax.jit(ours),
            "factor": jax.jit(lambda p, X, y: jnp.linalg.cholesky(covariance(p, X))),
        }
        tasks = {name: (function, parameters, X, y) for name, function in functions.items()}
        took = {
            name: np.median(times) for name, times in interleaved_seconds(tasks, repeats).items()
        }
        actual, expected = (functions[name](parameters, X, y)[1] for name in ("ours", "autodiff"))
        differences = [
            jnp.max(jnp.abs(actual[name] - expected[name])) / jnp.max(jnp.abs(expected[name]))
            for name in parameters
        ]
    return {
        "seconds": took["ours"],
        "autodiff_seconds": took["autodiff"],
        "autodiff_ratio": took["autodiff"] / took["ours"],
        "value_seconds": took["value"],
        "factor_seconds": took["factor"],
        "difference": float(max(differences)),
    }
