"""Several outputs by their structure beside the dense matrix: time of a value and its gradient.

    python benchmarks/outputs.py --rows 300 --outputs 5

The log density of a complete matrix of observations and its gradient in all hyperparameters, once
by p factorizations of n x n matrices, and once, as the same distribution does with gaps, by one of
an np x np matrix. Calls alternate, so that a noisy machine disturbs both alike.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_scalegp as sgp


def problem(num_rows, num_outputs, d=2):
    """Inputs, observations and hyperparameters."""
    generator = np.random.default_rng(0)
    X = jnp.asarray(generator.normal(size=(num_rows, d)))
    Y = jnp.asarray(generator.normal(size=(num_rows, num_outputs)))
    W = jnp.asarray(generator.normal(size=(num_outputs, 2)))
    return X, Y, (jnp.ones(d), W, 0.5 * jnp.ones(num_outputs), 0.1 * jnp.ones(num_outputs))


def log_density(hyperparameters, X, Y, by_structure):
    """Noise of the shape of Y is taken for one variance for each entry, without a structure."""
    lengthscale, W, diag, noise = hyperparameters
    noise = noise if by_structure else jnp.broadcast_to(noise, Y.shape)
    outputs = sgp.kernels.Coregion(W, diag)
    return sgp.MultiOutputGP(sgp.kernels.RBF(lengthscale), outputs, X, noise).log_prob(Y)


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--outputs", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=10)
    arguments = parser.parse_args()
    X, Y, values = problem(arguments.rows, arguments.outputs)
    evaluate = jax.jit(jax.value_and_grad(log_density), static_argnums=3)
    spent = {"by structure": [], "dense": []}
    found = {}
    for repetition in range(arguments.repetitions + 1):
        for name, times in spent.items():
            start = time.perf_counter()
            found[name] = jax.block_until_ready(evaluate(values, X, Y, name == "by structure"))
            if repetition:  # the first one compiles
                times.append(time.perf_counter() - start)
    print(f"{arguments.rows} rows of {arguments.outputs} outputs, device {jax.devices()[0]}")
    for name, times in spent.items():
        print(f"{name:12s} median {1e3 * np.median(times):8.1f} ms, value {found[name][0]:.3f}")
    ratio = np.median(spent["dense"]) / np.median(spent["by structure"])
    print(f"{'ratio':12s} {ratio:.1f}")


if __name__ == "__main__":
    main()
