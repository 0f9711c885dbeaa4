"""The pathwise posterior against the exact one: moments, samples and where its solves start."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from numpyro import handlers

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import Hutchinson, Pathwise, SolverState
from numpyro_scalegp.linear.preconditioners import PivotedCholesky
from numpyro_scalegp.processes.pathwise import PathwisePosterior
from numpyro_scalegp.solvers import AlternatingProjections, ConjugateGradients, Solution, StopReason
from tests.integrated.test_gaussian_process import assert_within_standard_errors

N, M, MANY, FEW = 60, 5, 3_000, 8
KEY = jax.random.key(0)
NOISE = 0.1
PER_ROW = np.linspace(0.05, 0.4, N)
CG = ConjugateGradients(1e-9, 60, PivotedCholesky(20))


def data() -> tuple[Array, Array, Array]:
    """Inputs with repeated rows, observations, and new inputs, one of them a training input."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(N, 2))
    X[-5:] = X[:5]
    y = np.sin(2 * X.sum(axis=1)) + X[:, 0] + 0.3 * rng.normal(size=N)
    Xs = np.concatenate([rng.normal(size=(M - 1, 2)), X[:1]])
    return jnp.array(X), jnp.array(y), jnp.array(Xs)


def trend(X: Array) -> Array:
    return 0.5 + X[:, 0]


def process(estimator: Any, noise: Any = NOISE, **options: Any) -> sgp.GaussianProcess:
    kernel = sgp.kernels.Matern32(jnp.array([0.8, 1.2]), 1.5)
    options = {"mean": trend, **options}
    return sgp.GaussianProcess(kernel, data()[0], noise, estimator=estimator, **options)


def pathwise(solver: Any = CG, num_features: int = 2000) -> Pathwise:
    return Pathwise(solver, FEW, num_features, num_logdet_probes=0)


@functools.cache
def exact(per_row: bool = False) -> sgp.posteriors.ExactPosterior:
    estimator = sgp.estimators.Cholesky()
    return process(estimator, PER_ROW if per_row else NOISE).condition(data()[1])


def posterior(num_samples: int = MANY, per_row: bool = False) -> PathwisePosterior:
    return conditioned(num_samples, per_row)


@functools.cache
def conditioned(num_samples: int, per_row: bool) -> PathwisePosterior:
    # Each 16 samples share features: with fewer, samples vary more than independent ones.
    estimator = pathwise(num_features=1000 if num_samples == MANY else 2000)
    gp = process(estimator, PER_ROW if per_row else NOISE)
    y = data()[1]
    return jax.jit(lambda y: gp.condition(y, key=KEY, num_samples=num_samples))(y)


per_row = pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per_row"])


# Moments


@per_row
def test_mean_is_exact(per_row, x64):
    Xs = data()[2]
    mean, expected = posterior(FEW, per_row).mean(Xs), exact(per_row).mean(Xs)
    np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-6)
    weights = posterior(FEW, per_row).representer_weights
    np.testing.assert_allclose(weights, exact(per_row).representer_weights, rtol=1e-6, atol=1e-6)


@per_row
def test_samples_have_the_exact_moments(per_row, x64):
    Xs = data()[2]
    draws = posterior(MANY, per_row).sample(KEY, Xs, MANY)
    assert draws.shape == (MANY, M)
    assert_within_standard_errors(draws, exact(per_row).mean(Xs), exact(per_row).covariance(Xs))


@pytest.mark.slow
@per_row
def test_variance_is_the_mean_square_of_the_samples(per_row, x64):
    Xs = data()[2]
    approximate = posterior(MANY, per_row)
    variance = approximate.variance(Xs)
    deviations = approximate.sample(KEY, Xs, MANY) - approximate.mean(Xs)
    np.testing.assert_allclose(variance, np.mean(np.square(deviations), axis=0), rtol=1e-9)
    expected = exact(per_row).variance(Xs)
    assert np.all(np.abs(variance - expected) < 4 * np.sqrt(2 / MANY) * expected)


@pytest.mark.slow
@per_row
def test_predictive_at_the_data(per_row, x64):
    predictive, expected = posterior(MANY, per_row).at_data(), exact(per_row).at_data()
    assert predictive.batch_shape == (N,)
    np.testing.assert_allclose(predictive.mean, expected.mean, rtol=1e-6, atol=1e-6)
    noise = PER_ROW if per_row else NOISE
    posterior_variance = expected.variance - noise
    assert np.all(
        np.abs(predictive.variance - expected.variance)
        < 4.5 * np.sqrt(2 / MANY) * posterior_variance
    )
    # The same as the moments at these inputs from kernel evaluations.
    X = data()[0]
    variance = posterior(MANY, per_row).variance(X)
    np.testing.assert_allclose(predictive.variance, variance + noise, rtol=1e-5)


@pytest.mark.slow
@per_row
def test_leave_one_out(per_row, x64):
    predictive, expected = posterior(MANY, per_row).leave_one_out(), exact(per_row).leave_one_out()
    assert predictive.batch_shape == (N,)
    bound = 4.5 * np.sqrt(2 / MANY)
    assert np.all(np.abs(predictive.variance / expected.variance - 1) < 1.1 * bound)
    y = data()[1]
    assert np.all(np.abs(predictive.mean - expected.mean) < 1.1 * bound * np.abs(y - expected.mean))
    np.testing.assert_allclose(predictive.log_prob(y), expected.log_prob(y), atol=0.3)
    # With few samples, too, the variances are within their bounds.
    few = posterior(FEW, per_row).leave_one_out().variance
    noise = PER_ROW if per_row else NOISE
    assert np.all(few >= noise * (1 - 1e-9))
    assert np.all(few <= (noise + 1.5) * (1 + 1e-9))


@pytest.mark.slow
def test_predictive_adds_the_noise(x64):
    Xs = data()[2]
    approximate = posterior()
    predictive = approximate.predictive(Xs)
    np.testing.assert_allclose(predictive.mean, approximate.mean(Xs), rtol=1e-12)
    np.testing.assert_allclose(predictive.variance, approximate.variance(Xs) + NOISE, rtol=1e-12)
    varying = approximate.predictive(Xs, jnp.arange(1.0, M + 1))
    np.testing.assert_allclose(
        varying.variance, approximate.variance(Xs) + np.arange(1, M + 1), rtol=1e-12
    )


def test_predictive_needs_the_noise_at_new_inputs_where_it_varies(x64):
    Xs = data()[2]
    approximate = posterior(FEW, per_row=True)
    with pytest.raises(ValueError, match=r"`noise_variance` must be given.*shape \(60,\)"):
        approximate.predictive(Xs)
    predictive = approximate.predictive(Xs, 0.3)
    np.testing.assert_allclose(predictive.variance, approximate.variance(Xs) + 0.3, rtol=1e-12)


@pytest.mark.slow
def test_far_away_the_posterior_is_the_prior(x64):
    far = jnp.full((1, 2), 100.0)
    approximate = posterior()
    np.testing.assert_allclose(approximate.mean(far), trend(far), rtol=1e-9)
    assert abs(approximate.variance(far)[0] - 1.5) < 4 * np.sqrt(2 / MANY) * 1.5


# Samples


@pytest.mark.slow
def test_samples_are_functions(x64):
    """With the same key, the same functions at any inputs."""
    Xs = data()[2]
    approximate = posterior(FEW)
    draws = approximate.sample(KEY, Xs, 3)
    assert draws.shape == (3, M)
    rows = np.array([3, 0])
    np.testing.assert_allclose(approximate.sample(KEY, Xs[rows], 3), draws[:, rows], rtol=1e-9)
    np.testing.assert_allclose(approximate.sample(KEY, Xs[2:3], 3), draws[:, 2:3], rtol=1e-9)
    assert approximate.sample(KEY, Xs).shape == (1, M)
    assert not np.allclose(approximate.sample(jax.random.key(1), Xs, 3), draws)


@pytest.mark.slow
@pytest.mark.parametrize(
    "of_X, of_noise", [(np.float64, np.float32), (np.float32, np.float64)], ids=["noise", "X"]
)
def test_inputs_of_another_dtype_are_those_of_the_same_functions(of_X, of_noise, x64):
    X, y, Xs = data()
    kernel = sgp.kernels.Matern32(0.8)
    noise = jnp.asarray(PER_ROW, of_noise)
    gp = sgp.GaussianProcess(kernel, X.astype(of_X), noise, estimator=pathwise(), key=KEY)
    approximate = gp.condition(y)
    np.testing.assert_allclose(
        approximate.at_data().variance - noise, approximate.variance(X), rtol=1e-4
    )
    cast = Xs.astype(jnp.float32)
    np.testing.assert_allclose(approximate.variance(cast), approximate.variance(Xs), rtol=1e-4)
    np.testing.assert_allclose(
        approximate.sample(KEY, cast), approximate.sample(KEY, Xs), rtol=1e-4, atol=1e-4
    )


def test_stored_samples_come_without_repetition(x64):
    Xs = data()[2]
    approximate = posterior(FEW)
    assert approximate.num_samples == FEW
    draws = np.asarray(approximate.sample(KEY, Xs, FEW))
    assert len(np.unique(draws[:, 0].round(9))) == FEW
    reordered = np.asarray(approximate.sample(jax.random.key(1), Xs, FEW))
    np.testing.assert_allclose(np.sort(draws[:, 0]), np.sort(reordered[:, 0]), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 2, 100])
def test_chunks_change_nothing(chunk_size, x64):
    Xs = data()[2]
    approximate = posterior(FEW)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9)
    close(approximate.mean(Xs, chunk_size=chunk_size), approximate.mean(Xs))
    close(approximate.variance(Xs, chunk_size=chunk_size), approximate.variance(Xs))
    close(approximate.sample(KEY, Xs, 3, chunk_size=chunk_size), approximate.sample(KEY, Xs, 3))
    close(
        approximate.predictive(Xs, chunk_size=chunk_size).variance,
        approximate.predictive(Xs).variance,
    )


@pytest.mark.slow
def test_more_samples_than_are_stored(x64):
    Xs = data()[2]
    approximate = posterior(FEW)
    draws = approximate.sample(KEY, Xs, 400)
    assert draws.shape == (400, M)
    assert len(np.unique(draws[:, 0])) == 400
    assert_within_standard_errors(draws, exact().mean(Xs), exact().covariance(Xs))
    # They are functions as well.
    np.testing.assert_allclose(approximate.sample(KEY, Xs[1:3], 400), draws[:, 1:3], rtol=1e-7)


@pytest.mark.slow
def test_resampled(x64):
    Xs = data()[2]
    approximate = posterior(FEW)
    more = approximate.resampled(KEY, 500)
    assert (approximate.num_samples, more.num_samples) == (FEW, 500)
    np.testing.assert_allclose(more.mean(Xs), approximate.mean(Xs), rtol=1e-12)
    expected = exact().variance(Xs)
    assert np.all(np.abs(more.variance(Xs) - expected) < 4 * np.sqrt(2 / 500) * expected)
    assert more.diagnostics["converged"]
    assert more.diagnostics["residual"] == approximate.diagnostics["residual"]
    assert more.diagnostics["sample_residual"] <= 1e-9
    another = approximate.resampled(jax.random.key(1), 500)
    assert not np.allclose(more.variance(Xs), another.variance(Xs))


def test_dtype_follows_the_inputs(dtype):
    Xs = data()[2]
    solver = ConjugateGradients(1e-3, 60, PivotedCholesky(20))
    gp = process(Pathwise(solver, 2, num_features=16), key=KEY)

    def everything(gp: sgp.GaussianProcess, y: Array) -> Any:
        approximate = gp.condition(y)
        values = (
            approximate.mean(Xs),
            approximate.variance(Xs),
            approximate.sample(KEY, Xs),
            approximate.sample(KEY, Xs, 4),
        )
        return (
            values,
            approximate.at_data(),
            approximate.leave_one_out(),
            approximate.predictive(Xs),
        )

    leaves = jax.tree.leaves(jax.eval_shape(everything, gp, data()[1]))
    assert {leaf.dtype for leaf in leaves} == {dtype}


# Where solves start


class Counted(AlternatingProjections):
    """A solver that counts when it runs, not when it is traced."""

    def run(self, *args: Any, **kwargs: Any) -> Solution:
        jax.debug.callback(lambda: CALLS.append(None))
        return super().run(*args, **kwargs)


CALLS: list[None] = []
COUNTED = Counted(20, 1e-7, 1000)


def calls() -> int:
    jax.effects_barrier()
    number = len(CALLS)
    CALLS.clear()
    return number


@jax.jit
def step(estimator: Any, noise: Array, y: Array, key: Array = KEY) -> SolverState:
    """A state after one evaluation."""
    gp = process(estimator, noise, key=key, state="solver")
    gp.log_prob(y)
    return gp.state


@functools.partial(jax.jit, static_argnames="num_samples")
def condition(
    estimator: Any, noise: Array, y: Array, state: Any = None, num_samples: int | None = None
) -> PathwisePosterior:
    with handlers.substitute(data={"solver": state}):
        gp = process(estimator, noise, key=KEY, state=None if state is None else "solver")
    return gp.condition(y, num_samples=num_samples)


def hutchinson(solver: Any) -> Hutchinson:
    return Hutchinson(solver, FEW, num_features=2000, num_logdet_probes=0)


@pytest.mark.slow
def test_a_fit_conditions_without_another_solve(x64):
    _, y, Xs = data()
    noise = jnp.array(NOISE)
    estimator = pathwise(COUNTED)
    state = step(estimator, noise, y)
    assert calls() == 1
    approximate = condition(estimator, noise, y, state)
    assert calls() == 0
    assert approximate.diagnostics["epochs"] == 0
    assert approximate.diagnostics["converged"]
    assert approximate.diagnostics["residual"] == state.history()["residual"][-1] <= 1e-7
    probe_residual = state.history()["probe_residual"][-1]
    np.testing.assert_allclose(approximate.diagnostics["sample_residual"], probe_residual)
    np.testing.assert_allclose(approximate.mean(Xs), exact().mean(Xs), rtol=1e-5, atol=1e-5)
    # Its samples solve the system for the same draws.
    np.testing.assert_array_equal(approximate.solution.value, state.memory.solutions[0])
    xi = approximate.draws.observations(approximate.kernel, approximate.X, jnp.full(N, NOISE))
    H = np.asarray(approximate.kernel.covariance(approximate.X)) + NOISE * np.eye(N)
    error = np.linalg.norm(H @ approximate.solution.value[:, 1:] - xi, axis=0)
    assert np.all(error <= 1e-6 * np.linalg.norm(xi, axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["noise", "y"])
def test_other_hyperparameters_or_data_are_solved_for_from_the_state(change, x64):
    _, y, Xs = data()
    noise = jnp.array(NOISE)
    estimator = pathwise(COUNTED)
    state = step(estimator, noise, y)
    new_noise, new_y = (1.001 * noise, y) if change == "noise" else (noise, 1.001 * y)
    calls()
    warm = condition(estimator, new_noise, new_y, state)
    assert calls() == 1
    cold = condition(estimator, new_noise, new_y)
    assert calls() == 1
    assert 0 < warm.diagnostics["epochs"] < 0.8 * cold.diagnostics["epochs"]
    expected = process(sgp.estimators.Cholesky(), new_noise).condition(new_y).mean(Xs)
    for approximate in (warm, cold):
        assert approximate.diagnostics["converged"]
        np.testing.assert_allclose(approximate.mean(Xs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_another_number_of_samples_takes_a_solve(x64):
    _, y, Xs = data()
    noise = jnp.array(NOISE)
    estimator = pathwise(COUNTED)
    state = step(estimator, noise, y)
    calls()
    approximate = condition(estimator, noise, y, state, num_samples=FEW + 3)
    assert calls() == 1
    assert approximate.num_samples == FEW + 3
    assert approximate.sample(KEY, Xs, FEW + 3).shape == (FEW + 3, M)
    np.testing.assert_allclose(approximate.mean(Xs), exact().mean(Xs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_fit_by_hutchinson_conditions(x64):
    """Its probes are not samples: these are solved for, and the solution for the data is reused."""
    _, y, Xs = data()
    noise = jnp.array(NOISE)
    estimator = hutchinson(COUNTED)
    state = step(estimator, noise, y, jax.random.key(1))
    calls()
    approximate = condition(estimator, noise, y, state, num_samples=400)
    assert calls() == 1
    assert approximate.diagnostics["epochs"] > 0
    np.testing.assert_allclose(approximate.mean(Xs), exact().mean(Xs), rtol=1e-5, atol=1e-5)
    draws = approximate.sample(KEY, Xs, 400)
    assert_within_standard_errors(draws, exact().mean(Xs), exact().covariance(Xs))


@pytest.mark.slow
def test_key_of_condition(x64):
    """Another key draws other samples; the mean is the same."""
    _, y, Xs = data()
    gp = process(pathwise(), key=KEY)
    conditioned = jax.jit(lambda key: gp.condition(y, key=key))
    without_key = jax.jit(gp.condition)(y)
    same, another = conditioned(KEY), conditioned(jax.random.key(1))
    np.testing.assert_allclose(without_key.variance(Xs), same.variance(Xs), rtol=1e-9)
    assert not np.allclose(without_key.variance(Xs), another.variance(Xs))
    np.testing.assert_allclose(without_key.mean(Xs), another.mean(Xs), rtol=1e-6)


# Diagnostics and errors


def test_diagnostics(x64):
    diagnostics = posterior(FEW).diagnostics
    assert set(diagnostics) == {"residual", "sample_residual", "epochs", "converged", "reason"}
    assert all(np.shape(value) == () for value in diagnostics.values())
    assert 0 < diagnostics["residual"] <= 1e-9
    assert 0 < diagnostics["sample_residual"] <= 1e-9
    assert 1 < diagnostics["epochs"] < 60
    assert diagnostics["converged"]


@pytest.mark.slow
def test_solves_that_end_above_the_tolerance_warn():
    y = data()[1]
    gp = process(pathwise(ConjugateGradients(1e-3, 2, PivotedCholesky(5))), key=KEY)
    with pytest.warns(RuntimeWarning, match="a linear solve ended above its tolerance") as caught:
        approximate = jax.jit(gp.condition)(y)
        jax.effects_barrier()
    assert len(caught) == 1
    assert not approximate.diagnostics["converged"]
    assert approximate.diagnostics["residual"] > 1e-3
    assert approximate.diagnostics["epochs"] == 3  # two iterations, and the residual at the end
    assert approximate.diagnostics["reason"] == StopReason.BUDGET
    with pytest.warns(RuntimeWarning, match="a linear solve ended above its tolerance"):
        approximate.resampled(KEY, 3)
        jax.effects_barrier()


def test_without_a_key():
    y = data()[1]
    gp = process(pathwise())
    with pytest.raises(ValueError, match=r"`Pathwise` draws at random: give .* `condition`, a"):
        gp.condition(y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a linear solve ended above its tolerance:RuntimeWarning")
def test_budget_of_condition():
    """The final residual takes an epoch beyond the budget; direct solvers have no budget."""
    y = data()[1]
    gp = process(pathwise(AlternatingProjections(20, 1e-6, 1000)), key=KEY)
    approximate = gp.condition(y, max_epochs=3)
    assert not approximate.diagnostics["converged"]
    assert approximate.diagnostics["epochs"] == 4
    exact = process(pathwise(sgp.solvers.Cholesky()), key=KEY).condition(y, max_epochs=3)
    assert exact.diagnostics["converged"]
