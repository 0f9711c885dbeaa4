"""`condition` resumes: from the last posterior, from a file, and with appended rows."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import Hutchinson, Pathwise, SolverState
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.solvers import (
    AlternatingProjections,
    KernelOperator,
    StochasticGradientDescent,
)
from tests.compilation import assert_compiled_once

N, MORE, PROBES, TOLERANCE = 16, 20, 3, 1e-6
KEY = jax.random.key(0)
ROOT = Path(__file__).parents[3]
# Every block lowers the error, and two epochs are not enough from zero.
SOLVER = AlternatingProjections(4, TOLERANCE, 400)
FEW = 2

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:a linear solve ended above:RuntimeWarning"),
]


def rows(num: int = N) -> tuple[Any, Any]:
    X = np.random.default_rng(0).uniform(-2.0, 2.0, size=(MORE, 1))[:num]
    return X, np.sin(2.0 * X[:, 0])


X, Y = rows()  # of NumPy, since they are made before 64-bit types are enabled


def make(kind: Any = Pathwise, solver: Any = SOLVER, **options: Any) -> Any:
    options = {"num_features": 16, "num_logdet_probes": 0, "num_records": 4, **options}
    return kind(solver, PROBES, **options)


def process(
    X: Any = X,
    *,
    state: SolverState | None = None,
    estimator: Any = None,
    kernel: Any = None,
    noise: Any = 0.1,
    key: Any = KEY,
    with_state: bool = True,
) -> Any:
    kernel = sgp.kernels.Matern32(0.8, 1.3) if kernel is None else kernel
    estimator = make() if estimator is None else estimator
    name = "solver" if with_state else None
    with handlers.substitute(data={} if state is None else {"solver": state}):
        return sgp.GaussianProcess(kernel, X, noise, estimator=estimator, key=key, state=name)


def alone(X: Any = X, **options: Any) -> Any:
    """A process without a state, and without a key."""
    return process(X, with_state=False, **{"key": None, **options})


def assert_solves(posterior: Any, y: Any, tolerance: float = TOLERANCE) -> None:
    """The residuals of all columns by NumPy, against what is reported and the tolerance."""
    noise = jnp.broadcast_to(posterior.noise_variance, y.shape)
    H = np.asarray(posterior.kernel.covariance(posterior.X)) + np.diag(noise)
    xi = posterior.draws.observations(posterior.kernel, posterior.X, noise)
    B = np.concatenate([y[:, None], xi], axis=1)
    residual = np.linalg.norm(B - H @ posterior.solution.value, axis=0) / np.linalg.norm(B, axis=0)
    np.testing.assert_allclose(posterior.solution.residual, residual, rtol=1e-3, atol=1e-12)
    assert residual[0] <= tolerance
    assert np.mean(residual[1:]) <= tolerance


def epochs(posterior: Any) -> float:
    return float(posterior.diagnostics["epochs"])


def largest(posterior: Any) -> float:
    diagnostics = posterior.diagnostics
    return float(max(diagnostics["residual"], diagnostics["sample_residual"]))


def assert_same(tree: Any, expected: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def cold() -> Any:
    return process().condition(Y)


# With a state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_samples"), [(Pathwise, None), (Pathwise, 5), (Hutchinson, None)]
)
def test_a_second_call_resumes(kind, num_samples):
    gp = process(estimator=make(kind))
    options = {"num_samples": num_samples, "max_epochs": FEW}
    posteriors = [gp.condition(Y, **options) for _ in range(3)]
    sizes = [largest(posterior) for posterior in posteriors]
    assert TOLERANCE < sizes[2] < sizes[1] < sizes[0]
    assert_same(posteriors[0].draws, posteriors[2].draws)
    last = gp.condition(Y, num_samples=num_samples)
    assert 0 < epochs(last) < epochs(process(estimator=make(kind)).condition(Y))
    assert_solves(last, Y)
    # The solution has converged, so that any budget makes no further epochs.
    for budget in (None, FEW):
        again: Any = gp.condition(Y, num_samples=num_samples, max_epochs=budget)
        assert epochs(again) == 0
        np.testing.assert_array_equal(again.solution.value, last.solution.value)


def test_resuming_compiles_once():
    solver = AlternatingProjections(4, TOLERANCE, 401)
    gp = process(estimator=make(solver=solver))
    assert_compiled_once(lambda scale: gp.condition(scale * Y, max_epochs=FEW))
    without = alone(estimator=make(solver=solver))
    start = gp.condition(Y, max_epochs=FEW)
    assert_compiled_once(lambda scale: without.condition(scale * Y, start=start, max_epochs=FEW))


def test_conditioning_does_not_change_training():
    gp = process()
    gp.log_prob(Y)
    before = jax.tree.map(jnp.copy, gp.state.memory)
    history = gp.state.history()
    gp.condition(Y, max_epochs=FEW)
    gp.condition(2.0 * Y)
    assert_same(gp.state.memory, before)
    assert_same(gp.state.history(), history)
    # Only the memory flattens, with the same leaves.
    assert len(jax.tree.leaves(gp.state)) == len(jax.tree.leaves(before))
    assert jax.tree.map(jnp.asarray, gp.state).posterior is None
    # The next step is the same as without conditioning.
    steps = [process(state=SolverState(memory)) for memory in (gp.state.memory, before)]
    assert_same(*(step.log_prob(1.5 * Y) for step in steps))
    assert_same(*(step.state.memory for step in steps))


def test_a_step_of_training_is_newer_than_the_posterior():
    gp = process()
    gp.condition(Y, max_epochs=FEW)
    gp.log_prob(Y)
    assert gp.state.posterior is None
    assert epochs(gp.condition(Y)) == 0


def model(X: Any, y: Any, estimator: Any = None) -> None:
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 0.5))
    estimator = make() if estimator is None else estimator
    kernel = sgp.kernels.Matern32(0.8, 1.3)
    gp = sgp.GaussianProcess(kernel, X, noise, estimator=estimator, state="solver")
    numpyro.sample("y", gp, obs=y)


def fitted() -> tuple[Any, SVI, Any]:
    guide = AutoDelta(model)
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    return guide, svi, svi.run(KEY, 2, X, Y, progress_bar=False)


@pytest.mark.slow
def test_a_posterior_of_a_fit_resumes():
    guide, svi, result = fitted()
    before = jax.tree.map(jnp.copy, result.state)
    posteriors = [sgp.posterior(model, guide, result, X, Y, max_epochs=FEW) for _ in range(3)]
    sizes = [largest(posterior) for posterior in posteriors]
    assert TOLERANCE < sizes[2] < sizes[1] < sizes[0]
    last: Any = sgp.posterior(model, guide, result, X, Y)
    assert_solves(last, Y)
    assert epochs(sgp.posterior(model, guide, result, X, Y)) == 0
    # Training resumes as if there had been no conditioning.
    update = jax.jit(svi.update)
    after = [update(state, X, Y)[0] for state in (result.state, before)]
    assert_same(*(state.mutable_state for state in after))
    assert_same(*(svi.get_params(state) for state in after))
    # With appended rows, the solve starts from the state of the old rows.
    more: Any = sgp.posterior(model, guide, result, *rows(MORE))
    assert_solves(more, rows(MORE)[1])
    assert more.draws.is_same(last.draws)
    # The posterior replaces the memory as a start in this process only; it is not saved.
    parameters = jax.tree.map(jnp.asarray, {**result.params, **result.state.mutable_state})
    again = sgp.posterior(model, guide, parameters, X, Y, start=last, progress_bar=False)
    assert epochs(again) == 0
    samples = {"noise": jnp.array([0.1, 0.2])}
    with pytest.raises(ValueError, match="`start` is for one posterior, and after NUTS"):
        sgp.posterior(model, samples, X, Y, start=last)


@pytest.mark.slow
def test_two_processes_share_a_state():
    """Each solves its own system, regardless of the solution that the other wrote."""
    first = process()
    second = process(state=first.state, kernel=sgp.kernels.RBF(0.5), noise=0.3)
    third = process(state=first.state, noise=jnp.full(N, 0.2))
    for gp in (first, second, first, third, second):
        posterior: Any = gp.condition(Y)
        assert epochs(posterior) > 0
        assert_solves(posterior, Y)
        assert type(posterior.kernel) is type(gp.kernel)
    assert epochs(second.condition(Y)) == 0


@pytest.mark.parametrize("scale", [2.0, -0.5])
def test_other_observations(scale):
    gp = process()
    gp.condition(Y)
    posterior: Any = gp.condition(scale * Y)
    assert_solves(posterior, scale * Y)
    # Each column starts at the best multiple of the last solution.
    assert epochs(posterior) < epochs(cold())
    assert_solves(gp.condition(jnp.cos(3.0 * X[:, 0])), jnp.cos(3.0 * X[:, 0]))


@pytest.mark.slow
def test_under_transformations():
    """A traced call starts from the state as well, and does not change it."""
    gp = process()
    conditioned = gp.condition(Y, max_epochs=FEW)

    def weights(y: Array) -> Array:
        return gp.condition(y).representer_weights

    first = jax.jit(weights)(Y)
    batched = jax.vmap(weights)(jnp.stack([Y, 2.0 * Y]))
    assert gp.state.posterior is conditioned
    H = np.asarray(gp.kernel.covariance(X)) + 0.1 * np.eye(N)
    exact = np.linalg.solve(H, Y)
    for weights_of, factor in ((first, 1.0), (batched[0], 1.0), (batched[1], 2.0)):
        np.testing.assert_allclose(weights_of, factor * exact, rtol=1e-4, atol=1e-5)
    # A trace uses a converged solution unchanged, too.
    last = gp.condition(Y)
    np.testing.assert_array_equal(jax.jit(weights)(Y), last.representer_weights)

    @jax.jit
    def without(y: Array) -> Array:
        return alone().condition(y, start=last).diagnostics["epochs"]

    assert without(Y) == 0
    assert without(1.1 * Y) > 0


# From a posterior


def test_a_posterior_resumes_without_a_key(tmp_path):
    first = alone(key=KEY).condition(Y, max_epochs=FEW)
    sgp.save(tmp_path / "posterior.npz", first)
    start = sgp.load(tmp_path / "posterior.npz")
    second: Any = alone().condition(Y, start=start)
    assert 0 < epochs(second) < epochs(cold())
    assert_same(second.draws, first.draws)
    assert_solves(second, Y)
    assert epochs(alone().condition(Y, start=second)) == 0
    # Another number of samples has other draws, which start at zero; the weights do not.
    resampled: Any = alone(key=KEY).condition(Y, start=second, num_samples=5)
    assert resampled.num_samples == 5
    assert_solves(resampled, Y)


CONTINUES = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
import numpyro_scalegp as sgp
from tests.integrated.iterative.test_continuing import Y, alone

for file in sys.argv[1:]:
    posterior = alone().condition(Y, start=sgp.load(file))
    sgp.save(file, posterior)
"""


@pytest.mark.slow
def test_another_process_resumes(tmp_path):
    """As after a crash."""
    files = [tmp_path / name for name in ("ended.npz", "converged.npz")]
    ended, converged = (process().condition(Y, max_epochs=budget) for budget in (FEW, None))
    for file, posterior in zip(files, (ended, converged), strict=True):
        sgp.save(file, posterior)
    done = subprocess.run(
        [sys.executable, "-c", CONTINUES, *map(str, files)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = [sgp.load(file) for file in files]
    assert [epochs(posterior) > 0 for posterior in loaded] == [True, False]
    assert_solves(loaded[0], Y)
    assert_same(loaded[1].solution.value, converged.solution.value)


def test_a_solver_that_draws_resumes_without_a_key():
    solver = StochasticGradientDescent(8, tolerance=1e-2, max_epochs=300)
    gp = alone(estimator=make(solver=solver), noise=0.5)
    start = process(estimator=make(), noise=0.5).condition(Y, max_epochs=FEW)
    assert_solves(gp.condition(Y, start=start), Y, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["float32", "float64"])
def test_another_dtype(to):
    """A posterior of another dtype is a start, but never counts as the solution."""
    other_dtype = {"float32": "float64", "float64": "float32"}[to]
    tolerance = 1e-3
    estimator = make(solver=AlternatingProjections(4, tolerance, 400))

    def gp(dtype: str) -> Any:
        kernel = sgp.kernels.Matern32(jnp.array(0.8, dtype), jnp.array(1.3, dtype))
        noise = jnp.array(0.1, dtype)
        return alone(X.astype(dtype), kernel=kernel, noise=noise, estimator=estimator)

    start = process(estimator=estimator).condition(Y)  # for its draws
    start = gp(other_dtype).condition(Y.astype(other_dtype), start=start)
    assert start.solution.value.dtype == other_dtype
    posterior: Any = gp(to).condition(Y.astype(to), start=start)
    assert posterior.solution.value.dtype == to
    assert posterior.diagnostics["converged"]
    assert epochs(posterior) > 0
    if to == "float64":
        assert_solves(posterior, Y, tolerance)


@pytest.mark.parametrize("num_samples", [None, 5])
def test_inputs_of_lower_precision_than_the_default(num_samples):
    gp = process(X.astype("float32"))
    options = {"num_samples": num_samples, "max_epochs": FEW}
    posteriors = [gp.condition(Y.astype("float32"), **options) for _ in range(2)]
    assert largest(posteriors[1]) < largest(posteriors[0])
    assert posteriors[1].solution.value.dtype == "float32"


def test_a_failed_start_is_ignored():
    good = process().condition(Y)
    broken = eqx.tree_at(lambda p: p.solution.value, good, jnp.full((N, 1 + PROBES), jnp.nan))
    broken = eqx.tree_at(lambda p: p.solution.residual, broken, jnp.full(1 + PROBES, jnp.nan))
    posterior: Any = alone().condition(Y, start=broken)
    assert_solves(posterior, Y)


def test_objects_that_cannot_be_a_start(unchecked):
    gp = alone()
    exact = process(estimator=sgp.estimators.Cholesky(), with_state=False).condition(Y)
    sum_posterior = process(kernel=sgp.kernels.RBF(0.5) + sgp.kernels.RBF(1.0)).condition(Y)
    for start in (exact, sum_posterior.component(lambda kernel: kernel.left), "posterior.npz"):
        with pytest.raises(TypeError, match="`start` must be a posterior from an iterative est"):
            gp.condition(Y, start=start)
    cholesky = process(estimator=sgp.estimators.Cholesky(), with_state=False)
    with pytest.raises(ValueError, match="`Cholesky` has no use for `start`, which is for an est"):
        cholesky.condition(Y, start=exact)


# More rows


def test_draws_do_not_depend_on_which_row_is_first():
    """If random features were centered at the first row, a distant first row would shift them."""
    inputs = np.concatenate([np.full((1, 2), 9.0), np.random.default_rng(0).normal(size=(60, 2))])

    def moved(rows):
        draws = PriorDraws.from_key(KEY, 64, 200, jnp.asarray(rows))
        before, after = (draws(sgp.kernels.RBF(scale), jnp.asarray(rows)) for scale in (1.0, 1.05))
        return np.sort(np.mean(np.square(after - before), axis=1))[:-1]

    np.testing.assert_allclose(moved(inputs), moved(inputs[::-1]), rtol=1e-3)
    assert np.mean(moved(inputs)) < 0.05


@pytest.mark.slow
def test_draws_stay_where_rows_are_appended(dtype):
    """Draws of functions and noise at the first rows are the same with more rows."""
    kernel = sgp.kernels.Matern32(0.8, 1.3)
    for seed, count in ((0, 3), (1, 17)):
        few, many = (jnp.asarray(rows(num)[0], dtype) for num in (N, MORE))
        draws = PriorDraws.from_key(jax.random.key(seed), count, 16, few)
        few_rows = draws.observations(kernel, few, jnp.full(N, 0.1, dtype))
        many_rows = draws.observations(kernel, many, jnp.full(MORE, 0.1, dtype))
        np.testing.assert_allclose(
            few_rows, many_rows[:N], rtol=2e-5 if dtype == "float32" else 1e-12
        )
        np.testing.assert_array_equal(
            draws.errors(jnp.ones(N, dtype)), draws.errors(jnp.ones(MORE, dtype))[:N]
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["start", "memory", "posterior"])
def test_appended_rows_start_at_zero(way, monkeypatch):
    starts = list[Any]()
    original = Pathwise._start

    def recorded(self, *args):
        starts.append(original(self, *args))
        return starts[-1]

    X_more, y_more = rows(MORE)
    gp = process()
    if way == "memory":
        gp.log_prob(Y)
    before = gp.condition(Y)
    if way == "memory":
        state = jax.tree.map(jnp.asarray, gp.state)
        assert state.posterior is None
    else:
        state = gp.state
    monkeypatch.setattr(Pathwise, "_start", recorded)
    if way == "start":
        posterior: Any = alone(X_more).condition(y_more, start=before)
    else:
        posterior = process(X_more, state=state).condition(y_more)
        assert state.posterior is posterior
    np.testing.assert_array_equal(starts[0].candidates[0, :N], before.solution.value)
    assert not np.any(starts[0].candidates[0, N:])
    assert not starts[0].is_solution
    # With `start`, draws keep their origin; otherwise the origin is the mean of all rows.
    assert posterior.draws.is_same(before.draws)
    assert np.all(posterior.draws.origin == before.draws.origin) == (way == "start")
    assert_solves(posterior, y_more)
    cold: Any = process(X_more).condition(y_more)
    assert 0 < epochs(posterior) < epochs(cold)
    # For the first rows the state's memory still serves.
    if way == "memory":
        assert epochs(process(state=state).condition(Y)) == 0


@pytest.mark.slow
def test_draws_with_another_origin_are_solved_again():
    X_more, y_more = rows(MORE)
    gp = process(X_more)
    before = gp.condition(y_more, start=process().condition(Y))
    again: Any = process(X_more, state=gp.state).condition(y_more)
    assert not np.array_equal(again.draws.origin, before.draws.origin)
    assert_solves(again, y_more)
    assert epochs(again) > 0


@pytest.mark.slow
def test_appended_rows_where_random_bits_depend_on_the_shape():
    X_more, y_more = rows(MORE)
    try:
        jax.config.update("jax_threefry_partitionable", False)
        gp = process()
        gp.log_prob(Y)
        before: Any = gp.condition(Y)
        errors = before.draws.errors(jnp.ones(MORE))[:N]
        assert not np.allclose(before.draws.errors(jnp.ones(N)), errors)
        many = process(X_more, state=gp.state)
        operator = KernelOperator(many.kernel, many.X, many.noise_variance)
        system = operator, jnp.asarray(y_more), before.draws
        for start in (
            many.estimator._start(system, None, before, TOLERANCE),
            many.estimator._start(system, gp.state, None, TOLERANCE),
            many.estimator._start(system, jax.tree.map(jnp.asarray, gp.state), None, TOLERANCE),
        ):
            np.testing.assert_array_equal(start.candidates[0, :N, 0], before.representer_weights)
            assert not np.any(start.candidates[:, :, 1:])
        # With the same rows, the state is unchanged.
        assert epochs(gp.condition(Y)) == 0
        assert_solves(many.condition(y_more, start=before), y_more)
    finally:
        jax.config.update("jax_threefry_partitionable", True)


OTHER_ROWS = {
    "permuted": lambda X: X[::-1],
    "fewer": lambda X: X[:-1],
    "prepended": lambda X: jnp.concatenate([X[:1], X]),
    "one_changed": lambda X: X.at[3, 0].add(1e-9),
    "columns": lambda X: jnp.concatenate([X, X], axis=1),
}


@pytest.mark.parametrize("change", OTHER_ROWS)
def test_rows_that_differ_from_the_rows_of_the_start(change):
    start = process().condition(Y, max_epochs=FEW)
    other_rows = OTHER_ROWS[change](jnp.asarray(X))
    message = r"`start` is a posterior for inputs of shape \(16, 1\), and the inputs here, of shape"
    with pytest.raises(ValueError, match=message):
        alone(other_rows).condition(jnp.ones(len(other_rows)), start=start)
    # A state of another number of rows raises; with as many rows it is an initial guess.
    gp = process(other_rows, state=SolverState(process().state.memory))
    y = jnp.cos(other_rows[:, 0])
    if len(other_rows) == N:
        gp.state.keep(start)
        assert_solves(gp.condition(y), y)
    else:
        with pytest.raises(ValueError, match=r"the solver state holds a solution (for|of) "):
            gp.condition(y)


# More rows for the training


@pytest.mark.slow
@pytest.mark.parametrize("per_row", [False, True])
def test_a_state_for_more_rows(per_row):
    X_more, y_more = rows(MORE)

    def noise(num: int) -> Any:
        return jnp.linspace(0.1, 0.2, MORE)[:num] if per_row else 0.1

    gp = process(noise=noise(N))
    gp.log_prob(Y)
    with pytest.raises(ValueError, match=r"After appending rows .* `state.with_rows\(X\)`"):
        process(X_more, state=gp.state, noise=noise(MORE)).log_prob(y_more)
    state = gp.state.with_rows(X_more)
    assert gp.state.memory.X.shape == (N, 1)
    np.testing.assert_array_equal(state.memory.solutions[:, :N], gp.state.memory.solutions)
    warm, cold = process(X_more, state=state, noise=noise(MORE)), process(X_more, noise=noise(MORE))
    for warm_or_cold in (warm, cold):
        warm_or_cold.log_prob(y_more)
        assert warm_or_cold.state.memory.records.converged[warm_or_cold.state.memory.step - 1]
    assert warm.state.memory.step == 2
    assert warm.state.history()["epochs"][1] < cold.state.history()["epochs"][0]
    np.testing.assert_array_equal(warm.state.memory.seed, cold.state.memory.seed)
    with pytest.raises(ValueError, match="does not begin with these rows: append new rows after"):
        gp.state.with_rows(X_more[::-1])
    with pytest.raises(ValueError, match="does not begin with these rows"):
        state.with_rows(X)


def test_new_rows_are_never_taken_for_solved():
    """Not even if the new observations are equal to padding."""
    gp = process()
    gp.log_prob(Y)
    X_more, y_more = rows(MORE)[0], jnp.concatenate([Y, jnp.zeros(MORE - N)])
    posterior: Any = process(X_more, state=gp.state.with_rows(X_more)).condition(y_more)
    assert epochs(posterior) > 0
    assert_solves(posterior, y_more)


@pytest.mark.slow
def test_svi_resumes_with_more_rows():
    """The example of the documentation."""
    guide, svi, result = fitted()
    X_more, y_more = rows(MORE)
    solver = result.state.mutable_state["solver"].with_rows(X_more)
    state = result.state._replace(mutable_state={"solver": solver})
    again = svi.run(KEY, 2, X_more, y_more, progress_bar=False, init_state=state)
    history = again.state.mutable_state["solver"].history()
    assert history["epochs"].shape == (4,)
    assert np.all(history["converged"])
    assert again.state.mutable_state["solver"].memory.X.shape == (MORE, 1)
    assert_solves(sgp.posterior(model, guide, again, X_more, y_more), y_more)
