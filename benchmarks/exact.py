"""Value and gradient of the exact log marginal likelihood, against autodiff through Cholesky.

    python benchmarks/exact.py --n 4000

Matern-3/2 with ARD, d = 18, float64. Both are timed in turn, so that noise disturbs both alike.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

import numpyro_scalegp as sgp


def covariance(parameters, X):
    """The covariance of the observations."""
    kernel = sgp.kernels.Matern32(
        jnp.exp(parameters["lengthscale"]), jnp.exp(parameters["variance"])
    )
    return kernel(X, X) + jnp.exp(parameters["noise"]) * jnp.eye(X.shape[0])


def plain(parameters, X, y):
    """Autodiff through the factorization."""
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


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", type=int, default=4000)
    parser.add_argument("--d", type=int, default=18)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--float32", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", not arguments.float32)
    X = jax.random.normal(jax.random.key(0), (arguments.n, arguments.d))
    y = jnp.sin(X.sum(1))
    parameters = {
        "lengthscale": jnp.full(arguments.d, 1.0),
        "variance": jnp.array(0.0),
        "noise": jnp.array(-2.0),
    }
    functions = {
        "ours": jax.jit(jax.value_and_grad(ours)),
        "autodiff": jax.jit(jax.value_and_grad(plain)),
        "value only": jax.jit(ours),
        "Cholesky only": jax.jit(lambda p, X, y: jnp.linalg.cholesky(covariance(p, X))),
    }
    results = {name: jax.block_until_ready(f(parameters, X, y)) for name, f in functions.items()}
    times = {name: [] for name in functions}
    for _ in range(arguments.repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(parameters, X, y))
            times[name].append(time.perf_counter() - start)
    print(f"n = {arguments.n}, d = {arguments.d}, {X.dtype}, device {jax.devices()[0]}")
    for name, seconds in times.items():
        print(f"{name:14s} median {np.median(seconds):.3f} s, minimum {min(seconds):.3f} s")
    print(f"autodiff / ours {np.median(times['autodiff']) / np.median(times['ours']):.2f}")
    (value, gradient), (reference, expected) = results["ours"], results["autodiff"]
    error = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), gradient, expected
    )
    print(
        f"relative difference of the values {abs(value - reference) / abs(reference):.1e}, {error}"
    )


if __name__ == "__main__":
    main()
