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


def replaced(name, method, function):
    """A class of the page in which one method does something else."""
    return type(name, (CLASSES[name],), {method: function})


def a_row(self, X, *others):
    return X[:, 0]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda X: sgp.LatentGP(replaced("NeuralNetwork", "evaluate", a_row)(2.0), X).sample(
                jax.random.key(0)
            ),
            r"`NeuralNetwork.evaluate` must return an array of shape \(4, 4\), got .*\(4,\)",
        ),
        (
            lambda X: (sgp.kernels.RBF(1.0) + replaced("NeuralNetwork", "evaluate", a_row)(2.0))(
                X, X
            ),
            r"`NeuralNetwork.evaluate` must return an array of shape \(4, 4\)",
        ),
        (
            lambda X: replaced("NeuralNetwork", "evaluate_diag", lambda self, X: X)(2.0).diag(X),
            r"`NeuralNetwork.evaluate_diag` must return an array of shape \(4,\), got .*\(4, 1\)",
        ),
        (
            lambda X: replaced("Cauchy", "sample_precisions", lambda *_: X)(2.0).sample_frequencies(
                jax.random.key(0), 4, 1
            ),
            r"`Cauchy.sample_precisions` must return an array of shape \(4,\)",
        ),
        (
            lambda X: sgp.WeightSpaceGP(
                replaced("Cosines", "evaluate", lambda self, X, index: (X * index).T)(2.0, 3), X
            ).sample(jax.random.key(0)),
            r"`Cosines.evaluate` must return an array of shape \(4, 3\), got .*\(3, 4\)",
        ),
        (
            lambda X: sgp.GaussianProcess(
                sgp.kernels.RBF(1.0), X, 0.1,
                estimator=replaced("Dense", "log_prob", lambda self, H, r, **_: r)(),
            ).log_prob(X[:, 0]),
            r"`Dense.log_prob` must return an array of shape \(\), got .*\(4,\)",
        ),
        (
            lambda X: sgp.GaussianProcess(
                sgp.kernels.RBF(1.0), X, 0.1,
                estimator=replaced("Dense", "sample_prior", lambda *_: jnp.ones((4, 3)))(),
            ).sample(jax.random.key(0), (3,)),
            r"`Dense.sample_prior` must return an array of shape \(3, 4\), got .*\(4, 3\)",
        ),
    ],
)  # fmt: skip
def test_a_hook_that_returns_another_shape(use, message):
    with pytest.raises(ValueError, match=message):
        use(jnp.linspace(0.0, 1.0, 4)[:, None])
