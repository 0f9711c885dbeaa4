"""The page on extending: its classes are short, and work with the rest of the package."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI

import numpyro_scalegp as sgp
from tests.extending import BLOCKS, CLASSES


def test_each_class_takes_at_most_20_lines():
    sizes = [len([line for line in block.splitlines() if line.strip()]) for block in BLOCKS[1:]]
    assert len(sizes) >= 10
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


def test_stationary_kernel_without_precisions_raises():
    Cauchy = CLASSES["Cauchy"]

    class Without(Cauchy):  # type: ignore[valid-type, misc]
        sample_precisions = sgp.kernels.AbstractStationary.sample_precisions

    with pytest.raises(ValueError, match="`Without` does not define how its frequencies are drawn"):
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
    """A class of the page with one method replaced."""
    return type(name, (CLASSES[name],), {method: function})


def a_row(self, X, *args):
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
            lambda X: sgp.GaussianProcess(
                sgp.kernels.RBF(1.0) + replaced("NeuralNetwork", "evaluate", a_row)(2.0), X, 0.1
            ),
            r"`NeuralNetwork.evaluate` must return an array of shape \(4, 4\)",
        ),
        (
            lambda X: sgp.solvers.KernelOperator(
                replaced("NeuralNetwork", "evaluate_diag", lambda self, X: X)(2.0).on((0,)), X, 0.1
            ),
            r"`NeuralNetwork.evaluate_diag` must return an array of shape \(4,\), got .*\(4, 1\)",
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


@pytest.mark.slow
def test_likelihood_is_a_distribution_for_any_objective(x64):
    Contaminated = CLASSES["ContaminatedNormal"]
    value = jnp.linspace(-30.0, 30.0, 4001)
    density = jnp.exp(Contaminated(0.3, 0.5, 0.2).log_prob(value))
    np.testing.assert_allclose(jnp.trapezoid(density, value), 1.0, rtol=1e-6)
    draws = Contaminated(jnp.array([0.3, 2.0]), 0.5, 0.2).sample(jax.random.key(0), (20_000,))
    np.testing.assert_allclose(draws.mean(axis=0), [0.3, 2.0], atol=0.03)
    np.testing.assert_allclose(draws.var(axis=0), 0.25 * (0.8 + 9.0 * 0.2), rtol=0.1)

    def model(X, y, likelihood):
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.5), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", likelihood(f), obs=y)

    X = jnp.linspace(0.0, 1.0, 6)[:, None]
    guide = sgp.guides.AutoSparseGP(model, inducing_points=X[::2])

    def loss(likelihood):
        # The tighter bound knows a normal distribution by its operations.
        objective = sgp.infer.QuadratureELBO(20, tight=False)
        svi = SVI(model, guide, optax.sgd(0.1), objective)
        params = svi.get_params(svi.init(jax.random.key(0), X, X[:, 0], likelihood))
        params.pop("f_auto_unexplained_scale", None)
        key, args = jax.random.key(0), (model, guide, X, X[:, 0], likelihood)
        return jax.value_and_grad(lambda p: objective.loss(key, p, *args))(params)

    # Without outliers it is a normal distribution.
    actual, expected = (
        loss(lambda f: Contaminated(f, 0.5, 0.0)),
        loss(lambda f: dist.Normal(f, 0.5)),
    )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"the site `y` combines rows.*JointELBO"):
        loss(lambda f: Contaminated(jnp.cumsum(f), 0.5, 0.2))


def test_family_without_information_is_the_prior(x64):
    X = jnp.linspace(0.0, 1.0, 5)[:, None]
    kernel = sgp.kernels.RBF(0.5)
    q = CLASSES["PseudoDataGP"](kernel, X, X[:3], jnp.ones(3), jnp.full(3, 1e12))
    np.testing.assert_allclose(kl_divergence(q, sgp.LatentGP(kernel, X)), 0.0, atol=1e-9)
    np.testing.assert_allclose(q.variance, 1.0)
