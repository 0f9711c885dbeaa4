"""The page on extending: its classes are short, and work with the rest of the package."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from tests.extending import BLOCKS, CLASSES


def test_each_class_takes_at_most_20_lines():
    sizes = [len([line for line in block.splitlines() if line.strip()]) for block in BLOCKS[1:]]
    assert len(sizes) >= 5
    assert max(sizes) <= 20


def test_kernels_work_in_models(x64):
    X = jnp.array(np.random.default_rng(0).normal(size=(12, 2)))
    kernel = 0.5 * CLASSES["NeuralNetwork"](2.0) + CLASSES["Cauchy"](jnp.array([0.5, 2.0]))
    H = kernel(X, X) + 0.1 * jnp.eye(12)
    expected = jax.scipy.stats.multivariate_normal.logpdf(X[:, 0], jnp.zeros(12), H)
    log_prob = sgp.GaussianProcess(kernel, X, 0.1).log_prob(X[:, 0])
    np.testing.assert_allclose(log_prob, expected, rtol=1e-10)
    with pytest.raises(ValueError, match="`NeuralNetwork` has no spectral density"):
        kernel.random_features(jax.random.key(0), X, 4)


def test_stationary_kernel_without_precisions_says_so():
    own = CLASSES["Cauchy"]

    class Without(own):  # type: ignore[valid-type, misc]
        sample_precisions = sgp.kernels.AbstractStationary.sample_precisions

    with pytest.raises(ValueError, match="`Without` does not say how its frequencies are drawn"):
        Without(1.0).sample_frequencies(jax.random.key(0), 3, 2)


def test_preconditioner_helps(x64):
    X = jnp.array(np.random.default_rng(0).normal(size=(60, 1)))
    noise = jnp.geomspace(0.01, 100.0, 60)
    operator = sgp.solvers.KernelOperator(sgp.kernels.RBF(0.5), X, noise)

    def iterations(preconditioner):
        solver = sgp.solvers.ConjugateGradients(1e-6, 200, preconditioner, group_size=1)
        solution = solver.solve(operator, X)
        assert solution.converged
        return int(solution.iterations)

    assert iterations(CLASSES["Jacobi"]()) < 0.7 * iterations(sgp.preconditioners.Identity())
