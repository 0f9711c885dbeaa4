"""Russian-roulette conjugate gradients: unbiased solutions, and products of two of them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.integrated.truncated.stopping import StoppingTime
from numpyro_scalegp.kernels import Matern32
from numpyro_scalegp.linear.preconditioners import Identity, PivotedCholesky
from numpyro_scalegp.solvers import ConjugateGradients, KernelOperator, RussianRouletteCG
from tests.compilation import optimized

N, NUM_DRAWS = 200, 2000
DIRECTIONS = np.random.default_rng(1).normal(size=(N, 4))
KEY = jax.random.key(3)
# A truncated solve of this cost is inaccurate, and terms decrease faster than probabilities.
SOLVERS = {
    "plain": RussianRouletteCG(0.15, 12, group_size=1),
    "rank_10": RussianRouletteCG(0.2, 4, None, PivotedCholesky(10), group_size=1),
    "block": RussianRouletteCG(0.3, 3, group_size=8),
}
every_solver = pytest.mark.parametrize("name", SOLVERS)


def system(num_columns=3):
    rng = np.random.default_rng(0)
    X = jnp.array(rng.normal(size=(N, 2)))
    return KernelOperator(Matern32(0.8, 1.2), X, 0.05), jnp.array(rng.normal(size=(N, num_columns)))


def dense(H):
    return np.asarray(H.rows(jnp.arange(H.size)))


@functools.cache
def draws(name):
    """Projections of solutions under many keys: the data's column and two averaged ones."""
    H, B = system()

    def draw(key):
        solution = SOLVERS[name].solve(H, B, key=key, num_averaged=2)
        weights, vectors = solution.outer_products(1)
        projected = DIRECTIONS.T @ vectors[:, :, 0].T
        value, independent = DIRECTIONS.T @ solution.value, DIRECTIONS.T @ solution.independent
        squares = jnp.concatenate(
            [(projected**2 @ weights)[:, None], value[:, 1:] * independent], axis=1
        )
        return value, independent, squares, solution.iterations

    draws = optimized(lambda keys: jax.lax.map(draw, keys))(jax.random.split(KEY, NUM_DRAWS))
    return *map(np.asarray, draws), DIRECTIONS.T @ np.linalg.solve(dense(H), B)


def scores(samples, expected):
    """Distances of means from what they should be, in standard errors."""
    return (samples.mean(axis=0) - expected) / (samples.std(axis=0, ddof=1) / math.sqrt(NUM_DRAWS))


@pytest.mark.monte_carlo
@every_solver
def test_value_and_independent_estimate_are_unbiased(name, x64):
    value, independent, _, _, expected = draws(name)
    assert np.max(np.abs(scores(value, expected))) < 4
    assert np.max(np.abs(scores(independent, expected[:, 1:]))) < 4


@pytest.mark.monte_carlo
@every_solver
def test_squares_are_unbiased(name, x64):
    # Outer products of data columns from weighted iterates, of averaged columns from two estimates.
    value, _, squares, _, expected = draws(name)
    assert np.max(np.abs(scores(squares, np.square(expected)))) < 4
    # With the same index on both sides, products are biased.
    assert np.max(np.abs(scores(np.square(value), np.square(expected)))) > 10


@pytest.mark.monte_carlo
@every_solver
def test_the_plain_solve_of_the_same_cost_is_biased(name, x64):
    value, _, _, iterations, expected = draws(name)
    H, B = system()
    solver = SOLVERS[name]
    preconditioner = Identity() if solver.preconditioner is None else solver.preconditioner
    epochs = math.ceil(iterations.mean())
    plain = ConjugateGradients(1e-14, epochs, preconditioner, solver.group_size)
    cut = np.asarray(DIRECTIONS.T @ jax.jit(plain.solve)(H, B).value)
    # In units of the standard errors of the unbiased means.
    errors = (cut - expected) / (value.std(axis=0, ddof=1) / math.sqrt(NUM_DRAWS))
    assert np.max(np.abs(errors)) > 10


@pytest.mark.monte_carlo
@every_solver
def test_iterations_follow_the_distribution(name, x64):
    *_, iterations, _ = draws(name)
    distribution = SOLVERS[name].distribution(N)
    # The larger of two indices, since averaged columns have two estimates.
    survival = 1 - (1 - np.asarray(distribution.survival)) ** 2
    expected = survival.sum()
    assert abs(iterations.mean() - expected) < 4 * iterations.std() / math.sqrt(NUM_DRAWS)
    assert iterations.min() == SOLVERS[name].min_iterations


def test_stops_at_rounding_errors(x64):
    H, B = system()
    solution = RussianRouletteCG(0.0, 150, N, PivotedCholesky(N)).solve(H, B, key=KEY)
    assert solution.iterations < 20
    assert solution.converged
    np.testing.assert_allclose(solution.value, np.linalg.solve(dense(H), B), rtol=1e-8)
    weights, vectors = solution.outer_products(3)
    square = np.einsum("r,rnk->nk", weights, np.square(vectors))
    np.testing.assert_allclose(square, np.square(solution.value), rtol=1e-12)


@pytest.mark.slow
def test_a_stop_after_the_end_of_the_run_adds_no_error(monkeypatch):
    # The weights of the last terms are above 1e10, and the terms are zero.
    X = jnp.linspace(0.0, 3.0, 60)[:, None]
    H = KernelOperator(Matern32(1.0), X, 0.1)
    B = jnp.sin(jnp.arange(60.0))[:, None]
    solver = RussianRouletteCG(0.4, 4, group_size=1)
    stops = jnp.array([58, 60])

    def spread(solution):
        return float(jnp.max(jnp.abs(solution.value)) / jnp.linalg.norm(B))

    with monkeypatch.context() as patch:
        patch.setattr(StoppingTime, "sample", lambda *_: stops[:1])
        late = solver.solve(H, B, key=KEY)
        patch.setattr(StoppingTime, "sample", lambda *_: late.iterations[None])
        at_the_end = solver.solve(H, B, key=KEY)
    assert late.iterations < 55
    assert spread(late) < 3.0 * max(spread(at_the_end), 1.0)


@pytest.mark.slow
def test_an_initial_guess_adds_no_bias(x64):
    H, B = system(1)
    exact = np.linalg.solve(dense(H), B)
    guess = jnp.array(1.3 * exact)
    solver = SOLVERS["block"]

    def draw(key):
        return solver.solve(H, B, guess=guess, key=key).value[:3, 0]

    draws = optimized(lambda keys: jax.lax.map(draw, keys))(jax.random.split(KEY, NUM_DRAWS))
    assert np.max(np.abs(scores(np.asarray(draws), exact[:3, 0]))) < 4


def test_float32():
    H = KernelOperator(Matern32(0.8), jnp.ones((20, 1)) * jnp.arange(20.0)[:, None], 0.1)
    solution = RussianRouletteCG(0.1, 5).solve(H, jnp.ones((20, 2)), key=KEY)
    leaves = (solution.value, *solution.outer_products(2))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)


def test_specified_mean(x64):
    solver = RussianRouletteCG.with_mean(25, N, preconditioner=PivotedCholesky(10), group_size=1)
    np.testing.assert_allclose(solver.distribution(N).mean, 25.0, rtol=0.01)
    assert solver.min_iterations == 20


def test_checkpoints_are_close_where_runs_mostly_end(x64):
    points = RussianRouletteCG(0.2, 10).checkpoints(1000)
    assert points[:8] == tuple(range(10, 18))
    assert points[-1] == 1000
    assert len(points) < 50
    assert RussianRouletteCG(0.05, 80).checkpoints(15_000)[:3] == (80, 85, 90)
    assert RussianRouletteCG(0.05, 80).checkpoints(30) == (30,)
    distribution = RussianRouletteCG(0.2, 10).distribution(1000)
    np.testing.assert_allclose(
        distribution.survival[16] / distribution.survival[15], np.exp(-0.2), rtol=1e-6
    )
    assert np.count_nonzero(distribution.probabilities) <= len(points)
