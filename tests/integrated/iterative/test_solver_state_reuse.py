"""Which solution of a state a posterior uses, and the errors of mismatched states."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from numpyro import handlers

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import Hutchinson, Pathwise, SolverState
from numpyro_scalegp.solvers import Cholesky

N, PROBES = 12, 3
KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("x64")


def data() -> dict[str, Any]:
    X = jnp.array(np.random.default_rng(0).uniform(-2.0, 2.0, size=(N, 1)))
    kernel = sgp.kernels.Matern32(0.8, 1.3)
    return {"kernel": kernel, "X": X, "noise_variance": jnp.array(0.1), "y": jnp.sin(2 * X[:, 0])}


def make(
    kind: Any = Pathwise, tolerance: float = 1e-8, num_features: int = 16, solver: Any = None
) -> Any:
    solver = Cholesky(tolerance) if solver is None else solver
    return kind(solver, PROBES, num_features=num_features, num_logdet_probes=0, num_records=3)


def process(
    estimator: Any, p: dict[str, Any], state: SolverState | None = None
) -> sgp.GaussianProcess:
    parts = (p[name] for name in ("kernel", "X", "noise_variance"))
    with handlers.substitute(data={"solver": state}):
        return sgp.GaussianProcess(*parts, estimator=estimator, key=KEY, state="solver")


def after_a_step(estimator: Any, p: dict[str, Any], state: SolverState | None = None) -> Any:
    gp = process(estimator, p, state)
    gp.log_prob(p["y"])
    return gp.state


@functools.cache
def trained(kind: Any = Pathwise) -> SolverState:
    return jax.tree.map(jnp.asarray, after_a_step(make(kind), data()))


def assert_solves(posterior: Any) -> None:
    """The data's weights and the samples', against NumPy."""
    H = np.asarray(posterior.kernel.covariance(posterior.X)) + np.diag(
        np.broadcast_to(posterior.noise_variance, N)
    )
    noise = jnp.broadcast_to(posterior.noise_variance, (N,))
    xi = posterior.draws.observations(posterior.kernel, posterior.X, noise)
    expected = np.linalg.solve(H, np.concatenate([posterior.y[:, None], xi], axis=1))
    np.testing.assert_allclose(posterior.solution.value, expected, rtol=1e-7, atol=1e-7)


CHANGES: dict[str, Any] = {
    "X": lambda p: {**p, "X": 3.0 * p["X"]},
    "y": lambda p: {**p, "y": p["y"].at[0].add(1e-3)},
    "noise": lambda p: {**p, "noise_variance": jnp.array(0.2)},
    "noise_of_each_row": lambda p: {**p, "noise_variance": jnp.full(N, 0.1)},
    "hyperparameter": lambda p: {**p, "kernel": sgp.kernels.Matern32(0.9, 1.3)},
    "kernel": lambda p: {**p, "kernel": sgp.kernels.Matern52(0.8, 1.3)},
    "structure": lambda p: {**p, "kernel": p["kernel"] + sgp.kernels.Constant(0.5)},
    "columns": lambda p: {**p, "X": jnp.concatenate([p["X"], p["X"] ** 2], axis=1)},
}


@pytest.mark.slow
def test_the_last_solution_is_used_for_the_same_system():
    posterior: Any = process(make(), data(), trained()).condition(data()["y"])
    assert posterior.diagnostics["epochs"] == 0
    np.testing.assert_array_equal(posterior.solution.value, trained().memory.solutions[0])
    assert_solves(posterior)


@pytest.mark.parametrize("change", CHANGES)
def test_another_system_is_solved_again(change):
    p = CHANGES[change](data())
    posterior = process(make(), p, trained()).condition(p["y"])
    assert posterior.diagnostics["epochs"] > 0
    assert_solves(posterior)


@pytest.mark.parametrize("different", [make(Hutchinson), make(num_features=18)])
def test_another_estimator_solves_again(different):
    p = data()
    state = trained(Hutchinson) if isinstance(different, Hutchinson) else trained()
    # A state of the other estimator, used with pathwise samples, and the reverse.
    mine = make() if isinstance(different, Hutchinson) else different
    posterior = process(mine, p, state).condition(p["y"])
    assert posterior.diagnostics["epochs"] > 0
    assert_solves(posterior)


@pytest.mark.slow
def test_a_random_solution_does_not_serve_as_a_posterior():
    """Regardless of the recorded residual, which belongs to the unweighted iterate."""
    p = data()
    roulette = sgp.solvers.RussianRouletteCG(min_iterations=2)
    state = after_a_step(make(solver=roulette), p)
    posterior = process(make(tolerance=1e-2), p, state).condition(p["y"])
    assert posterior.diagnostics["epochs"] > 0
    assert_solves(posterior)


@pytest.mark.slow
def test_solutions_for_other_probes_are_not_used():
    """In a step with another estimator, only the column of the data starts warm."""
    p, solver = data(), sgp.solvers.ConjugateGradients(1e-6, 60, sgp.preconditioners.Identity())

    @jax.jit
    def epochs(state: SolverState) -> Array:
        return after_a_step(make(Hutchinson, solver=solver), p, state).memory.records.epochs[1]

    moved = after_a_step(make(solver=solver), p)
    zeroed = eqx.tree_at(
        lambda s: s.memory.solutions, moved, moved.memory.solutions.at[:, :, 1:].set(0.0)
    )
    assert epochs(moved) == epochs(zeroed)


def test_a_tighter_tolerance_resumes():
    p = data()
    loose = eqx.tree_at(lambda s: s.memory.records.residual, trained(), jnp.full(3, 1e-3))
    for tolerance, again in ((1e-2, False), (1e-4, True)):
        posterior = process(make(tolerance=tolerance), p, loose).condition(p["y"])
        assert (posterior.diagnostics["epochs"] > 0) == again
        assert posterior.diagnostics["converged"]


def test_under_jit_as_well():
    @jax.jit
    def epochs(state: SolverState, X: Array) -> Array:
        p = {**data(), "X": X}
        return process(make(), p, state).condition(p["y"]).diagnostics["epochs"]

    X = data()["X"]
    assert epochs(trained(), X) == 0
    assert epochs(trained(), X.at[3, 0].add(1e-6)) > 0


@pytest.mark.parametrize("change", ["kernel", "structure", "noise_of_each_row", "columns"])
def test_a_state_serves_one_model(change):
    p = CHANGES[change](data())
    message = (
        r"the solver state was made with a `Matern32` \(hyperparameters of shape \(\), \(\)\), a "
        r"noise variance of shape \(\) and inputs of shape \(12, 1\), and is used with a `"
    )
    with pytest.raises(ValueError, match=message):
        process(make(), p, trained()).log_prob(p["y"])


@pytest.mark.slow
@pytest.mark.parametrize("with_state", [True, False])
def test_a_second_posterior_traces_no_solve(with_state, monkeypatch):
    calls, run = [], Cholesky.run

    def counted(self, *args):
        calls.append(self)
        return run(self, *args)

    monkeypatch.setattr(Cholesky, "run", counted)
    p = data()
    gp = process(make(), p, trained() if with_state else SolverState())
    gp.condition(2.0 * p["y"])  # not what the state solves, so a solve
    first = len(calls)
    gp.condition(3.0 * p["y"])
    assert len(calls) == first
