"""A batch of exact GPs beside one batched Cholesky factorization: time of a value and its gradient.

    python benchmarks/groups.py --groups 100 --rows 50

The log density of all groups with hyperparameters of their own, and its gradient in these, beside
`jnp.linalg.cholesky` of the same (groups, rows, rows) array and its derivative in all entries, and
beside a loop over the groups' own distributions. Calls alternate, so that a noisy machine disturbs
all alike.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_scalegp as sgp


def problem(num_groups, num_rows, d=2):
    """Inputs, observations and hyperparameters of each group."""
    generator = np.random.default_rng(0)

    def positive(*shape):
        return jnp.asarray(generator.uniform(0.5, 2.0, shape), jnp.float32)

    X = jnp.asarray(generator.normal(size=(num_groups, num_rows, d)), jnp.float32)
    y = jnp.asarray(generator.normal(size=(num_groups, num_rows)), jnp.float32)
    return X, y, (positive(num_groups, d), positive(num_groups), 0.1 * positive(num_groups))


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


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--repetitions", type=int, default=50)
    arguments = parser.parse_args()
    X, y, values = problem(arguments.groups, arguments.rows)
    lengthscale, variance, noise = values
    eye = jnp.eye(arguments.rows)
    H = sgp.kernels.RBF(lengthscale, variance).covariance(X) + noise[:, None, None] * eye
    batch = jax.jit(jax.value_and_grad(log_density))
    factorization = jax.jit(jax.value_and_grad(log_determinant))

    def loop():
        parts = zip(*values, X, y, strict=True)
        return [batch((l, v, s), Xg, yg) for l, v, s, Xg, yg in parts]  # noqa: E741

    calls = {
        "batch": lambda: batch(values, X, y),
        "batched factorization": lambda: factorization(H),
        "loop over groups": loop,
    }
    spent = {name: [] for name in calls}
    for repetition in range(arguments.repetitions + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if repetition:  # the first one compiles
                spent[name].append(time.perf_counter() - start)
    print(f"{arguments.groups} groups of {arguments.rows} rows, device {jax.devices()[0]}")
    least = np.median(spent["batched factorization"])
    for name, times in spent.items():
        median = np.median(times)
        print(f"{name:22s} median {1e3 * median:7.2f} ms, ratio {median / least:5.2f}")


if __name__ == "__main__":
    main()
