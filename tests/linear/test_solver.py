"""Every solver against NumPy in float64: accuracy, budgets, initial guesses and failures."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.integrated.iterative.lanczos import log_determinant
from numpyro_scalegp.kernels import RBF, Matern32
from numpyro_scalegp.linear import adasap
from numpyro_scalegp.linear.preconditioners import Identity, PivotedCholesky
from numpyro_scalegp.linear.solver import Options, Probes, prepare
from numpyro_scalegp.solvers import (
    ADASAP,
    AlternatingProjections,
    AutoSolver,
    Cholesky,
    ConjugateGradients,
    KernelOperator,
    RussianRouletteCG,
    StochasticDualDescent,
    StochasticGradientDescent,
    StopReason,
)

N = 50  # no multiple of a block
BLOCK = 16

# solver = factory(tolerance, max_epochs)
ITERATIVE = {
    "cg": lambda tolerance, epochs: ConjugateGradients(
        tolerance, float(epochs), PivotedCholesky(20)
    ),
    "plain_cg": lambda tolerance, epochs: ConjugateGradients(tolerance, float(epochs), Identity()),
    "ap": lambda tolerance, epochs: AlternatingProjections(BLOCK, tolerance, float(epochs)),
    "sgd": lambda tolerance, epochs: StochasticGradientDescent(
        BLOCK, tolerance=tolerance, max_epochs=float(epochs)
    ),
    "sdd": lambda tolerance, epochs: StochasticDualDescent(
        BLOCK, tolerance=tolerance, max_epochs=float(epochs)
    ),
    "adasap": lambda tolerance, epochs: ADASAP(
        BLOCK, tolerance=tolerance, max_epochs=float(epochs)
    ),
    "sketched": lambda tolerance, epochs: ADASAP(BLOCK, 6, 1.0, tolerance, float(epochs)),
}
RANDOM = ("sgd", "sdd", "adasap", "sketched")
SOLVERS = {"cholesky": lambda tolerance, _: Cholesky(tolerance), **ITERATIVE}
# Tolerances for errors below 1e-8 with the noise of any test. One for each solver, so that tests
# share compiled programs: tolerances are static.
TIGHT = {"cholesky": 1e-8, "cg": 1e-13, "plain_cg": 1e-13}
TIGHT |= dict.fromkeys(("ap", *RANDOM), 1e-11)
# What an iteration may cost, in epochs.
STEPS = {"cg": 1.0, "plain_cg": 1.0} | dict.fromkeys(("ap", *RANDOM), BLOCK / N)

every_solver = pytest.mark.parametrize("name", SOLVERS)
every_iterative_solver = pytest.mark.parametrize("name", ITERATIVE)
quiet = pytest.mark.filterwarnings("ignore:a covariance matrix:RuntimeWarning")


def rows(n=N, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=(n, 2)))


def targets(n=N, seed=0):
    """Columns whose norms differ by twelve orders of magnitude, and a column of zeros."""
    B = np.random.default_rng(100 + seed).normal(size=(n, 4))
    return jnp.array(B * np.array([1.0, 1e6, 0.0, 1e-6]))


def operator(noise=0.3, lengthscale=0.7, n=N):
    return KernelOperator(Matern32(lengthscale, 1.3), rows(n), jnp.asarray(noise))


def dense(H):
    noise = np.broadcast_to(np.asarray(H.noise_variance, np.float64), (H.size,))
    X = np.asarray(H.X, np.float64) / np.float64(H.kernel.lengthscale)
    r = np.sqrt(3.0 * np.sum(np.square(X[:, None] - X[None]), axis=-1))
    return np.float64(H.kernel.variance) * (1.0 + r) * np.exp(-r) + np.diag(noise)


@functools.partial(jax.jit, static_argnums=4)
def solve(solver, H, B, guess=None, num_averaged=0):
    return solver.solve(H, B, guess=guess, key=jax.random.key(7), num_averaged=num_averaged)


def solve_tightly(name, H, B, guess=None):
    return solve(SOLVERS[name](TIGHT[name], 5000), H, B, guess)


def true_residual(H, B, value):
    """||b - H v|| / ||b|| column by column; ||H v|| where b is zero."""
    B, value = np.asarray(B, np.float64), np.asarray(value, np.float64)
    norm = np.linalg.norm(B, axis=0)
    return np.linalg.norm(B - dense(H) @ value, axis=0) / np.where(norm > 0, norm, 1.0)


def assert_solved(H, B, solution, bound=1e-8):
    """Each column is within `bound` of NumPy's, relative to the norm of the column."""
    exact = np.linalg.solve(dense(H), np.asarray(B, np.float64))
    error = np.linalg.norm(solution.value - exact, axis=0)
    assert np.all(error <= bound * np.linalg.norm(exact, axis=0)), error
    assert solution.converged


# Accuracy


@pytest.mark.parametrize(
    ("name", "noise"),
    [(name, noise) for name in ("cholesky", "cg", "plain_cg") for noise in (1e-3, 0.1, 10.0)]
    + [(name, noise) for name in ("ap", *RANDOM) for noise in (0.05, 0.3, 10.0)],
)
def test_numpy_agrees(name, noise, x64):
    H, B = operator(noise), targets()
    solution = solve_tightly(name, H, B)
    assert_solved(H, B, solution)
    assert solution.reason == StopReason.CONVERGED
    np.testing.assert_array_equal(solution.value[:, 2], np.zeros(N))
    assert solution.residual.shape == (4,)
    assert np.all(solution.residual <= TIGHT[name])


@every_solver
def test_noise_of_each_row(name, x64):
    H, B = operator(np.linspace(0.1, 2.0, N)), targets()
    assert_solved(H, B, solve_tightly(name, H, B))


@every_solver
def test_duplicate_rows(name, x64):
    X = jnp.concatenate([rows(30), rows(20)])
    H, B = KernelOperator(Matern32(0.7), X, 0.3), targets()
    assert_solved(H, B, solve_tightly(name, H, B))


@every_solver
@pytest.mark.parametrize("n", [1, BLOCK - 3])
def test_fewer_rows_than_a_block(name, n, x64):
    H, B = operator(n=n), targets(n)
    assert_solved(H, B, solve_tightly(name, H, B))


@pytest.mark.parametrize("family", [StochasticGradientDescent, StochasticDualDescent])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
def test_descent_with_a_given_rate(family, momentum, x64):
    H, B = operator(), targets()
    rate = 0.3 * (1 - momentum)
    solver = family(10, learning_rate=rate, momentum=momentum, tolerance=1e-11, max_epochs=5000.0)
    assert_solved(H, B, solve(solver, H, B))


@every_solver
def test_float32(name):
    H, B = operator(), targets()
    solution = solve(SOLVERS[name](1e-2, 500), H, B)
    assert {solution.value.dtype, solution.residual.dtype, solution.epochs.dtype} == {
        jnp.dtype("float32")
    }
    assert solution.converged
    assert np.all(true_residual(H, B, solution.value) <= 1.01e-2)


@every_solver
def test_residual_is_computed_from_the_solution(name, x64):
    H, B = operator(0.05), targets()[:, jnp.array([0, 1, 3])]
    largest = []
    for epochs in (2, 6):
        solution = solve(SOLVERS[name](0.0, epochs), H, B)
        largest.append(np.max(solution.residual))
        expected = true_residual(H, B, solution.value)
        if name == "cholesky":
            assert np.all(expected < 1e-13)
            assert np.all(solution.residual < 1e-13)
        else:
            assert solution.reason == StopReason.BUDGET
            assert np.all(expected > 1e-8)
            np.testing.assert_allclose(solution.residual, expected, rtol=1e-6)
    # A larger budget helps, except for the direct solver.
    assert largest[1] < 0.8 * largest[0] or name == "cholesky"


@pytest.mark.slow
def test_the_worst_column_decides(x64):
    # A column in the span of few eigenvectors is solved long before one of noise.
    H = operator(1e-3)
    _, vectors = np.linalg.eigh(dense(H))
    B = jnp.array(np.stack([vectors[:, -1], np.random.default_rng(0).normal(size=N)], axis=1))
    for name in ("plain_cg", "ap"):
        alone = solve(ITERATIVE[name](1e-6, 5000), H, B[:, :1])
        together = solve(ITERATIVE[name](1e-6, 5000), H, B)
        assert alone.iterations < together.iterations
        assert np.all(true_residual(H, B, together.value) <= 1.001e-6)


@pytest.mark.slow
@every_solver
def test_averaged_columns_count_by_their_mean(name, x64):
    # Two columns that take long and six that take no iteration at all.
    H = operator(0.05)
    vectors = np.random.default_rng(0).normal(size=(N, 8))
    B = jnp.array(vectors)
    guess = jnp.array(np.linalg.solve(dense(H), vectors)).at[:, [1, 5]].set(0.0)
    solver = SOLVERS[name](1e-3, 5000)
    each, mean = solve(solver, H, B, guess), solve(solver, H, B, guess, 7)
    assert each.converged and mean.converged
    if name == "cholesky":
        return
    assert np.max(each.residual) <= 1e-3
    assert mean.iterations < each.iterations
    assert np.mean(mean.residual[1:]) <= 1e-3 < np.max(mean.residual[1:])
    # A column that is not averaged still counts alone.
    alone = solve(solver, H, B[:, ::-1], guess[:, ::-1], 2)
    assert np.max(alone.residual[:6]) <= 1e-3
    # The mean of the averaged columns counts as well.
    short = solve(SOLVERS[name](1e-3, 2), H, B, guess, 7)
    assert not short.converged
    assert np.mean(short.residual[1:]) > 1e-3


@pytest.mark.parametrize("num_averaged", [-1, 5])
@pytest.mark.parametrize("solver", [Cholesky(), RussianRouletteCG()], ids=["exact", "roulette"])
def test_bad_number_of_averaged_columns(solver, num_averaged):
    with pytest.raises(
        ValueError, match=r"`num_averaged` must be (at least 0|from 0 to .* 4), got"
    ):
        solve(solver, operator(), targets(), num_averaged=num_averaged)


# Initial guesses


@every_iterative_solver
def test_a_guess_at_the_solution_takes_no_iterations(name, x64):
    H, B = operator(), targets()
    exact = jnp.array(np.linalg.solve(dense(H), B))
    solution = solve(ITERATIVE[name](1e-8, 5000), H, B, exact)
    assert (solution.iterations, solution.epochs) == (0, 1)  # for the residual of the guess
    np.testing.assert_allclose(solution.value, exact, rtol=1e-14)
    assert solution.converged
    assert np.all(solution.residual < 1e-12)


@every_solver
def test_warm_and_cold_starts_end_alike(name, x64):
    H, B = operator(), targets()
    cold = solve_tightly(name, H, B)
    near = solve_tightly(name, operator(0.32), B)
    warm = solve_tightly(name, H, B, near.value)
    assert_solved(H, B, warm)
    # A bad guess only costs time, also for the column of zeros.
    scale = np.linalg.norm(cold.value, axis=0) + 1.0
    guess = 10 * scale * np.random.default_rng(5).normal(size=B.shape)
    far = solve_tightly(name, H, B, jnp.array(guess))
    exact = np.linalg.solve(dense(H), B)
    assert np.all(np.linalg.norm(far.value - exact, axis=0) <= 1e-8 * scale)
    assert far.converged


@every_iterative_solver
def test_the_best_combination_of_several_guesses(name, x64):
    H, B = operator(), targets()
    exact = np.linalg.solve(dense(H), B)
    norms = np.linalg.norm(exact, axis=0)
    direction = np.random.default_rng(5).normal(size=B.shape) * np.where(norms > 0, norms, 1.0)
    # Guesses that span the solution, one of them twice and one of zeros.
    candidates = (exact + 3 * direction, exact - direction, exact - direction, 0 * direction)
    solution = solve(ITERATIVE[name](1e-6, 5000), H, B, jnp.array(np.stack(candidates)))
    assert (solution.iterations, solution.epochs) == (0, 1)
    np.testing.assert_allclose(solution.residual, 0, atol=1e-6)
    error = np.linalg.norm(solution.value - exact, axis=0)
    assert np.all(error <= 1e-5 * np.where(norms > 0, norms, 1.0))


@every_iterative_solver
def test_a_good_guess_saves_iterations(name, x64):
    H, B = operator(), targets()
    cold = solve_tightly(name, H, B)
    guess = cold.value * (1 + 1e-4)
    warm = solve_tightly(name, H, B, guess)
    assert 0 < warm.iterations < cold.iterations


# Budgets


@every_iterative_solver
@pytest.mark.parametrize(
    ("warm", "max_epochs"), [(False, 0.1), (False, 3.7), (True, 1.0), (True, 3.7)]
)
def test_budget(name, warm, max_epochs, x64):
    H, B = operator(0.05), targets()
    guess = 0.1 * B if warm else None
    solution = solve(ITERATIVE[name](0.0, max_epochs), H, B, guess)
    assert not solution.converged
    assert solution.iterations >= 1
    spent = float(warm) + float(solution.iterations) * STEPS[name]
    # The final residual takes one more epoch.
    np.testing.assert_allclose(solution.epochs, spent + 1, rtol=1e-12)
    # The first iteration is made even if the residual of the guess took all of the budget.
    assert spent <= max(max_epochs, float(warm) + STEPS[name]) + 1e-9
    assert spent > max_epochs - STEPS[name] - 1e-9  # and the budget is used


def test_cholesky_counts_one_epoch(x64):
    solution = solve(Cholesky(), operator(), targets())
    assert (solution.iterations, solution.epochs) == (1, 1)


@every_iterative_solver
def test_the_loop_ends_at_the_tolerance(name, x64):
    H, B = operator(), targets()
    loose, tight = solve(ITERATIVE[name](1e-2, 5000), H, B), solve_tightly(name, H, B)
    assert loose.converged
    assert loose.iterations < tight.iterations
    assert TIGHT[name] < np.max(loose.residual) <= 1e-2


def test_fresh_blocks_and_momentum_beat_greedy_projections(x64):
    # In theory the rate depends on the square root of the condition number, not on all of it.
    H, B = operator(1e-3, 1.5, 200), targets(200)
    worst = {
        solver: np.max(solve(solver, H, B, None, 0).residual)
        for solver in (ADASAP(40, None, 1.0, 0.0, 40.0), AlternatingProjections(40, 0.0, 40.0))
    }
    fast, slow = worst.values()
    assert fast < 0.2 * slow


@pytest.mark.slow
def test_a_pass_that_raises_the_residual_is_followed_by_ones_with_less_momentum(x64, monkeypatch):
    H, B = operator(1e-3, 1.5, 200), targets(200)
    monkeypatch.setattr(adasap, "_CAUTION", 0.3)
    guarded = ADASAP(20, None, 1.0, 0.0, 40.0).solve(H, B, key=jax.random.key(0))
    monkeypatch.setattr(adasap, "_safeguarded", lambda state: state)
    unguarded = ADASAP(20, None, 1.0, 0.0, 40.0).solve(H, B, key=jax.random.key(0))
    assert np.max(guarded.residual) < 0.2
    assert not np.max(unguarded.residual) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "expected"), [(1.0, ConjugateGradients), (1e-3, ADASAP)])
def test_auto_solver_takes_conjugate_gradients_if_their_factor_is_accurate(noise, expected):
    n, key = 600, jax.random.key(3)
    X = jax.random.normal(jax.random.key(0), (n, 6))
    H, B = KernelOperator(Matern32(1.0), X, noise), targets(n)
    solution, reference = (
        solver(max_epochs=20).solve(H, B, key=key) for solver in (AutoSolver, expected)
    )
    assert solution.iterations == reference.iterations > 1
    np.testing.assert_allclose(solution.value, reference.value, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_units_of_the_data_do_not_matter(x64):
    H, B = operator(0.05), targets()
    scaled = KernelOperator(Matern32(0.7, 1.3e4), H.X, 0.05e4)
    for name in RANDOM:
        solution, rescaled = (solve(ITERATIVE[name](0.0, 4), A, B) for A in (H, scaled))
        np.testing.assert_allclose(1e4 * rescaled.value, solution.value, rtol=1e-6, atol=1e-12)


# Failures are values


@every_solver
def test_single_precision_at_its_limit(name):
    """Reported residuals are true where float32 is not enough, and solves end early."""
    X = jnp.concatenate([rows(30), rows(30)[:20]])
    B = targets()[:, :2]
    compiled = jax.jit(lambda H: SOLVERS[name](1e-5, 400).solve(H, B, key=jax.random.key(0)))
    for noise in (1e-3, 1e-4, 1e-6):
        H = KernelOperator(Matern32(2.0, 1.3), X, noise)
        solution = compiled(H)
        true = true_residual(H, B, solution.value)
        assert np.all(np.isfinite(true))
        # A float32 product has rounding errors of this size itself.
        rounding = 1e-6 * N * 1.3 * np.linalg.norm(solution.value, axis=0)
        np.testing.assert_array_less(
            np.abs(true - solution.residual), 1e-6 + rounding / np.linalg.norm(B, axis=0)
        )
        assert solution.converged == (np.max(solution.residual) <= 1e-5)
        assert solution.converged == (solution.reason == StopReason.CONVERGED)
        if not solution.converged and name in ("cg", "plain_cg"):
            assert solution.reason == StopReason.PRECISION
    assert not solution.converged


@quiet
@pytest.mark.parametrize("solver", [AlternatingProjections, ADASAP])
def test_blocks_that_are_singular_but_for_rounding(solver):
    # Their inverses had large eigenvalues that H does not have, and the iterates diverged.
    X = jax.random.normal(jax.random.key(0), (600, 2), jnp.float32)
    B = jnp.stack([jnp.sin(2.0 * X[:, 0]), X[:, 1] > 0], axis=1)
    H = KernelOperator(RBF(3.0), X, 1e-8)
    solution = solver(block_size=60, max_epochs=40).solve(H, B, key=jax.random.key(1))
    assert np.max(solution.residual) < 2.0


@quiet
@every_solver
@pytest.mark.parametrize("broken", ["lengthscale", "noise", "target"])
def test_not_a_number(name, broken, x64):
    H, B = operator(), targets()
    bad = jnp.array(jnp.nan)
    # Past the checks of concrete values, like a NaN that comes up inside `jit`.
    H = {
        "lengthscale": eqx.tree_at(lambda H: H.kernel.lengthscale, H, bad),
        "noise": eqx.tree_at(lambda H: H.noise_variance, H, bad),
        "target": H,
    }[broken]
    solution = solve_tightly(name, H, B.at[3, 0].set(jnp.nan) if broken == "target" else B)
    assert not solution.converged
    assert solution.reason == StopReason.FAILED
    assert solution.epochs <= 2
    assert np.all(np.isnan(solution.value))
    assert not np.all(np.isfinite(solution.residual))


@quiet
@every_solver
def test_a_matrix_that_is_not_positive_definite(name, x64):
    # The diagonal is positive, and so are small blocks.
    H = eqx.tree_at(lambda H: H.kernel.variance, operator(), jnp.array(-0.1))
    assert np.linalg.eigvalsh(dense(H))[0] < -0.1
    solution = solve(SOLVERS[name](TIGHT[name], 500), H, targets())
    assert not solution.converged
    assert np.all(np.isnan(solution.value)) or name in ("ap", *RANDOM)


# Transformations


@every_solver
def test_vmap_over_hyperparameters(name, x64):
    B = targets()

    def run(lengthscale, noise):
        return solve_tightly(name, operator(noise, lengthscale), B)

    lengthscales, noises = jnp.array([0.4, 0.7, 1.1]), jnp.array([0.3, 1.0, 0.5])
    batch = jax.vmap(run)(lengthscales, noises)
    for i in range(3):
        member = jax.tree.map(lambda leaf, i=i: leaf[i], batch)
        assert_solved(operator(noises[i], lengthscales[i]), B, member)


@every_solver
def test_compiles_once(name, x64):
    traces = 0

    @jax.jit
    def run(solver, H, B, guess):
        nonlocal traces
        traces += 1
        return solver.solve(H, B, guess=guess, key=jax.random.key(0))

    for noise, seed in ((0.3, 0), (0.5, 1)):
        H, B = operator(noise, 0.5 + noise), targets(seed=seed)
        assert_solved(H, B, run(SOLVERS[name](TIGHT[name], 5000), H, B, 0.1 * B))
    assert traces == 1


@every_solver
def test_nothing_is_differentiated(name, x64):
    def value(lengthscale, noise, B, guess):
        solution = SOLVERS[name](1e-3, 20).solve(
            operator(noise, lengthscale), B, guess=guess, key=jax.random.key(0)
        )
        return jnp.sum(solution.value**2) + jnp.sum(solution.residual)

    args = jnp.array(0.7), jnp.array(0.3), targets(), 0.1 * targets()
    result, gradient = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3)))(*args)
    assert result > 0
    for leaf in gradient:
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))


@pytest.mark.slow
def test_keys_change_the_path_of_random_batches_alone(x64):
    H, B = operator(0.05), targets()

    @jax.jit
    def run(solver, seed):
        return solver.solve(H, B, key=jax.random.key(seed)).value

    for name in ("cg", "ap", *RANDOM):
        value, again, another = (run(ITERATIVE[name](0.0, 4), seed) for seed in (0, 0, 1))
        np.testing.assert_array_equal(value, again)
        assert np.array_equal(value, another) == (name not in RANDOM)


@pytest.mark.parametrize("name", ["cg", "ap", "sdd", "adasap"])
def test_a_budget_may_be_infinite(name, x64):
    H, B = operator(0.05), targets()
    assert_solved(H, B, solve(ITERATIVE[name](TIGHT[name], float("inf")), H, B))


# Probes for the log-determinant


@functools.partial(jax.jit, static_argnums=3)
def solve_with_probes(solver, H, B, num_probes, guess=None):
    options = Options(probes=Probes(jax.random.key(11), num_probes))
    solution = solver.solve_system(prepare(H, B, guess, options))
    coefficients = solution.coefficients
    return solution, coefficients, log_determinant(coefficients, H.size, num_probes)


PRECONDITIONERS = {
    "plain": Identity(),
    "rank_5": PivotedCholesky(5),
    "rank_20": PivotedCholesky(20),
}


@pytest.mark.parametrize("noise", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_log_determinant(name, noise, x64):
    H, B = operator(noise), targets()
    solver = ConjugateGradients(1e-10, 200.0, PRECONDITIONERS[name])
    solution, coefficients, estimate = solve_with_probes(solver, H, B, 64)
    exact = np.linalg.slogdet(dense(H))[1]
    assert abs(estimate.value - exact) < 4 * estimate.standard_error
    assert estimate.standard_error < 0.1 * N
    steps, groups, g, _ = coefficients.curvature.shape
    assert coefficients.triangle.shape == (steps, groups, g, g)
    assert groups * g >= 64
    assert solution.iterations <= coefficients.stops[0] <= solution.epochs
    assert np.all(coefficients.triangle[int(coefficients.stops[0]) :] == 0)
    assert np.all(coefficients.residual < 1e-2)
    assert_solved(H, B, solution, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "rank_5"])
def test_the_quadrature_converges_with_many_probes(name, x64):
    H = operator(0.1, n=12)
    solver = ConjugateGradients(1e-12, 40.0, PRECONDITIONERS[name])
    exact = np.linalg.slogdet(dense(H))[1]
    _, _, few = solve_with_probes(solver, H, jnp.zeros((12, 0)), 20)
    _, _, many = solve_with_probes(solver, H, jnp.zeros((12, 0)), 20 * 64)
    assert 4 < few.standard_error / many.standard_error < 16  # an eighth is expected
    assert abs(many.value - exact) < 4 * many.standard_error < 1.0


@pytest.mark.slow
def test_few_steps_overestimate_the_log_determinant(x64):
    H = operator(1e-2)
    exact = np.linalg.slogdet(dense(H))[1]
    errors = []
    for steps in (1, 2, 60):
        solver = ConjugateGradients(1e-10, float(steps), Identity())
        solution, _, estimate = solve_with_probes(solver, H, targets(), 512)
        assert solution.iterations == min(steps, solution.iterations)
        errors.append((estimate.value - exact) / estimate.standard_error)
    assert errors[0] > errors[1] > 4  # Gauss quadrature of a function with odd derivatives > 0
    assert abs(errors[2]) < 4


def test_an_exact_preconditioner_leaves_no_error(x64):
    # Where P = H, a single step gives log|H| = log|P| without any error.
    H = operator(0.1)
    solver = ConjugateGradients(1e-8, 50.0, PivotedCholesky(N))
    _, coefficients, estimate = solve_with_probes(solver, H, targets(), 4)
    exact = np.linalg.slogdet(dense(H))[1]
    np.testing.assert_allclose(coefficients.log_determinant, exact, rtol=1e-10)
    np.testing.assert_allclose(estimate.value, exact, rtol=1e-8)


@pytest.mark.slow
def test_probes_do_not_disturb_the_solution(x64):
    H, B = operator(), targets()
    solver = ITERATIVE["cg"](1e-6, 200)
    alone = solve(solver, H, B, 0.1 * B)
    together, _, estimate = solve_with_probes(solver, H, B, 8, 0.1 * B)
    np.testing.assert_allclose(together.value, alone.value, rtol=1e-9, atol=1e-18)
    assert (together.iterations, together.epochs) == (alone.iterations, alone.epochs)
    # The probes start at zero for any guess.
    _, _, without_guess = solve_with_probes(solver, H, B, 8)
    np.testing.assert_allclose(estimate.value, without_guess.value, rtol=1e-3)


def test_probes_alone(x64):
    H = operator()
    solver = ITERATIVE["plain_cg"](1e-6, 200)
    solution, coefficients, _ = solve_with_probes(solver, H, jnp.zeros((N, 0)), 8)
    assert solution.value.shape == (N, 0)
    assert solution.iterations > 3
    assert np.all((coefficients.residual > 0) & (coefficients.residual <= 1e-6))


# Bad input


@every_solver
def test_bad_right_hand_sides(name, unchecked):
    solver = SOLVERS[name](1e-2, 10)
    for B, shape in ((jnp.ones(N), r"\(50,\)"), (jnp.ones((N + 1, 2)), r"\(51, 2\)")):
        with pytest.raises(ValueError, match=rf"`B` must have shape \(50, k\), got {shape}"):
            jax.eval_shape(solve, solver, operator(), B)


@every_iterative_solver
def test_bad_guesses(name, unchecked):
    solver = ITERATIVE[name](1e-2, 10)
    for guess, shape in ((jnp.ones((N, 3)), r"\(50, 3\)"), (jnp.ones(N), r"\(50,\)")):
        message = rf"`guess` must have shape \(50, 4\), got {shape}: a guess"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(solve, solver, operator(), targets(), guess)


@every_solver
def test_no_right_hand_sides(name):
    solution = SOLVERS[name](1e-2, 1).solve(operator(n=3), jnp.zeros((3, 0)), key=jax.random.key(7))
    assert solution.value.shape == (3, 0)
    assert solution.converged


@pytest.mark.parametrize("name", RANDOM)
def test_random_batches_need_a_key(name):
    with pytest.raises(ValueError, match="`key` must be given: the batches are drawn at random"):
        ITERATIVE[name](1e-2, 100).solve(operator(), targets())
