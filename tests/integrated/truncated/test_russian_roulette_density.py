"""Value and gradient with Russian roulette against the exact ones; the biased ones fail."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.iterative import iterative, lanczos
from numpyro_scalegp.linear import conjugate_gradients
from numpyro_scalegp.linear.preconditioners import Identity, PivotedCholesky
from numpyro_scalegp.solvers import ConjugateGradients, KernelOperator, RussianRouletteCG
from tests.compilation import optimized

N, NUM_DRAWS = 200, 2000
# Enough for biases of more than ten standard errors.
NUM_BIASED_DRAWS = 400
# A solver, and conjugate gradients cut short at the same expected cost.
SOLVERS = {
    "plain": (
        RussianRouletteCG(0.15, 12, group_size=1),
        ConjugateGradients(1e-14, 24, Identity(), group_size=1),
    ),
    "rank_10": (
        RussianRouletteCG(0.25, 5, None, PivotedCholesky(10), group_size=1),
        ConjugateGradients(1e-14, 12, PivotedCholesky(10), group_size=1),
    ),
}


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, 2))
    y = np.sin(2 * X.sum(axis=1)) + 0.3 * rng.normal(size=N)
    kernel = sgp.kernels.Matern32(jnp.array([0.7, 1.3]), 1.4)
    return {"kernel": kernel, "noise": jnp.array(0.05), "y": jnp.array(y), "X": jnp.array(X)}


def log_prob(p: dict[str, Any], X: Any, estimator: Any, key: Any = None) -> Any:
    gp = sgp.GaussianProcess(p["kernel"], X, p["noise"], estimator=estimator, key=key)
    return gp.log_prob(p["y"])


def estimator(family: str, solver: Any) -> Any:
    if family == "hutchinson":
        return sgp.estimators.Hutchinson(solver, 4, num_logdet_probes=0)
    return sgp.estimators.Pathwise(solver, 4, 64, num_logdet_probes=0)


def scores(family: str, solver: Any, num_draws: int) -> dict[str, np.ndarray]:
    """Mean errors of value and gradient, in standard errors."""
    p = parameters()
    X = p.pop("X")
    value_and_gradient = jax.value_and_grad(log_prob)

    def draw(key: Any) -> Any:
        return value_and_gradient(p, X, estimator(family, solver), key)

    keys = jax.random.split(jax.random.key(5), num_draws)
    draws = optimized(lambda keys: jax.lax.map(draw, keys))(keys)
    value, gradient = value_and_gradient(p, X, sgp.estimators.Cholesky())
    # Without probes, the value omits log|H|.
    H = p["kernel"].covariance(X) + p["noise"] * jnp.eye(N)
    expected = value + 0.5 * jnp.linalg.slogdet(H)[1], gradient
    result = {}
    for (path, leaf), exact in zip(
        jax.tree_util.tree_leaves_with_path(draws), jax.tree.leaves(expected), strict=True
    ):
        spread = np.maximum(np.std(leaf, axis=0, ddof=1) / math.sqrt(num_draws), 1e-12)
        result[jax.tree_util.keystr(path)] = (np.mean(leaf, axis=0) - exact) / spread
    return result


@pytest.mark.monte_carlo
@pytest.mark.parametrize(("family", "name"), [("hutchinson", "plain"), ("pathwise", "rank_10")])
def test_value_and_gradient_are_unbiased(family, name, x64):
    family_scores = scores(family, SOLVERS[name][0], NUM_DRAWS)
    assert len(family_scores) == 5  # value, lengthscale, variance, noise and y
    for name, score in family_scores.items():
        # One of the 200 entries for y may be an outlier.
        assert np.max(np.abs(score)) < (4.0 if score.size < 5 else 4.5), name


@pytest.mark.monte_carlo
@pytest.mark.filterwarnings("ignore:a linear solve ended above:RuntimeWarning")
@pytest.mark.parametrize("name", SOLVERS)
def test_the_same_check_detects_the_bias_of_a_truncated_solve(name, x64):
    biased_scores = scores("hutchinson", SOLVERS[name][1], NUM_BIASED_DRAWS)
    hyperparameters = [
        np.ravel(v) for k, v in biased_scores.items() if "kernel" in k or "noise" in k
    ]
    assert np.max(np.abs(np.concatenate(hyperparameters))) > 10


@pytest.mark.slow
def test_posterior_is_solved_to_tolerance(x64):
    p = parameters()
    solver = RussianRouletteCG(0.5, 2, None, PivotedCholesky(20))
    gp = sgp.GaussianProcess(
        p["kernel"], p["X"], p["noise"], estimator=sgp.estimators.Hutchinson(solver, 4)
    )
    posterior = gp.condition(p["y"], key=jax.random.key(0))
    exact = sgp.GaussianProcess(p["kernel"], p["X"], p["noise"]).condition(p["y"])
    assert posterior.diagnostics["converged"]
    np.testing.assert_allclose(posterior.mean(p["X"]), exact.mean(p["X"]), atol=0.05)


@pytest.mark.monte_carlo
@pytest.mark.filterwarnings("ignore:a linear solve ended above:RuntimeWarning")
def test_log_determinant_by_telescoped_quadrature_is_unbiased(x64):
    p = parameters()
    kernel, X = p["kernel"], p["X"]
    exact = jnp.linalg.slogdet(kernel.covariance(X) + p["noise"] * jnp.eye(N))[1]

    def log_determinant(solver: Any, num_probes: int, key: Any) -> Any:
        # One probe for the value, whose quadrature has one node per iteration.
        hutchinson = sgp.estimators.Hutchinson(solver, num_probes, num_logdet_probes=1)
        gp = sgp.GaussianProcess(kernel, X, p["noise"], estimator=hutchinson, key=key)
        return -2.0 * gp.log_prob(jnp.zeros(N)) - N * math.log(2.0 * math.pi)

    def score(solver: Any, num_draws: int, num_probes: int = 1) -> float:
        keys = jax.random.split(jax.random.key(7), num_draws)
        function = functools.partial(log_determinant, solver, num_probes)
        draws = optimized(functools.partial(jax.lax.map, function))(keys)
        return float((draws.mean() - exact) / draws.std() * math.sqrt(num_draws))

    # The data are zero, so that plain conjugate gradients last as long as the probes for the trace.
    assert abs(score(RussianRouletteCG(0.3, 4, 60, group_size=1), NUM_DRAWS)) < 4.0
    # Here these share a Krylov space and are solved long before the lanczos is good.
    assert abs(score(RussianRouletteCG(0.1, 6), 500, 40)) < 4.0
    assert score(ConjugateGradients(0.0, 8, Identity(), group_size=1), 600) > 10.0


@pytest.mark.monte_carlo
def test_a_single_index_for_both_sides_is_biased(x64, monkeypatch):
    solution = sgp.solvers.Solution
    alone = jnp.ones(1)
    monkeypatch.setattr(solution, "outer_products", lambda s, m: (alone, s.value[None, :, :m]))
    biased_scores = scores("hutchinson", SOLVERS["plain"][0], NUM_BIASED_DRAWS)
    hyperparameters = [
        np.ravel(v) for k, v in biased_scores.items() if "kernel" in k or "noise" in k
    ]
    assert np.max(np.abs(np.concatenate(hyperparameters))) > 10


def small_estimates(
    monkeypatch: Any, y: Any, max_order: int, num_draws: int, *, probes_alone: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Errors of values under many keys, and their reported standard errors.

    Args:
        monkeypatch: pytest's.
        y: forty observations.
        max_order: capacity of the Lanczos coefficients.
        num_draws: number of keys.
        probes_alone: whether to exclude the random stop from standard errors.
    """
    X, noise = jnp.array(np.random.default_rng(0).normal(size=(40, 2))), jnp.array(0.1)
    operator = KernelOperator(sgp.kernels.Matern32(0.9, 1.4), X, noise)
    solver = RussianRouletteCG(0.2, 4, 40, group_size=1)
    hutchinson = sgp.estimators.Hutchinson(solver, 1, num_logdet_probes=4)

    def evaluate(key: Any) -> Any:
        estimate = hutchinson.estimate(operator, y[:, None], key=key)
        return estimate.value[0], estimate.standard_error

    with monkeypatch.context() as patch:
        patch.setattr(conjugate_gradients, "_MAX_ORDER", max_order)
        if probes_alone:
            for module in (iterative, lanczos):
                patch.setattr(module, "stopping_variance", lambda _, terms: 0.0 * terms[0])
        keys = jax.random.split(jax.random.key(1), num_draws)
        values, errors = optimized(functools.partial(jax.lax.map, evaluate))(keys)
    exact = sgp.GaussianProcess(operator.kernel, X, noise).log_prob(y)
    return np.asarray(values - exact), np.asarray(errors)


@pytest.mark.monte_carlo
def test_standard_errors_include_the_random_stop(x64, monkeypatch):
    y = jnp.array(np.random.default_rng(1).normal(size=40))
    values, errors = small_estimates(monkeypatch, y, 800, 1000)
    assert np.all(np.isfinite(errors))
    assert 0.85 < math.sqrt(np.mean(np.square(errors))) / np.std(values) < 1.6
    # The variance over probes is only a part of the error.
    _, errors = small_estimates(monkeypatch, y, 800, 200, probes_alone=True)
    assert math.sqrt(np.mean(np.square(errors))) / np.std(values) < 0.6


@pytest.mark.monte_carlo
def test_a_truncated_log_determinant_has_an_infinite_standard_error(x64, monkeypatch):
    def score(values: np.ndarray) -> float:
        return float(values.mean() / values.std() * math.sqrt(values.size))

    # Room for all 40 steps, which probes that share a Krylov space would not have.
    values, errors = small_estimates(monkeypatch, jnp.zeros(40), 40, 1000)
    assert abs(score(values)) < 4.0
    assert np.all(np.isfinite(errors))
    values, errors = small_estimates(monkeypatch, jnp.zeros(40), 5, 1000)
    assert abs(score(values)) > 6.0
    assert 0.1 < np.mean(np.isinf(errors)) < 0.99  # the runs that got there
