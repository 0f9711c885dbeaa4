"""The progress bar of a solve: its text, when it appears, and that results do not change."""

import math
import os
import signal
import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.iterative import iterative
from numpyro_scalegp.linear import progress
from numpyro_scalegp.linear.solver import solved
from numpyro_scalegp.programs import stretches
from numpyro_scalegp.solvers import StopReason

N = 30
X = jnp.array(np.random.default_rng(0).uniform(-2.0, 2.0, size=(N, 1)))
Y = jnp.sin(2.0 * X[:, 0])
quiet = pytest.mark.filterwarnings("ignore:a linear solve ended above:RuntimeWarning")


class Richardson(sgp.solvers.AbstractSolver):
    """The custom solver of the documentation."""

    tolerance: float = eqx.field(static=True, default=0.3)
    max_epochs: int = eqx.field(static=True, default=100)

    def init(self, operator, key):
        return jnp.max(operator.matmul(jnp.ones((operator.size, 1))))

    def run(self, c, system):
        def advance(state, iteration):
            value = state.value + state.residual / c
            residual = system.target - system.operator.matmul(value)
            return state._replace(value=value, residual=residual)

        return sgp.solvers.descend(
            system, system.start, advance, tolerance=self.tolerance, max_epochs=self.max_epochs
        )


SOLVERS = {
    "cg": sgp.solvers.ConjugateGradients(1e-3, 20, sgp.preconditioners.Identity()),
    "ap": sgp.solvers.AlternatingProjections(10, 1e-3, 50),
    "sgd": sgp.solvers.StochasticGradientDescent(10, tolerance=0.05, max_epochs=200),
    "own": Richardson(),
}


def process(solver: Any) -> Any:
    estimator = sgp.estimators.Pathwise(solver, 2, num_features=16)
    kernel = sgp.kernels.Matern32(0.5)
    return sgp.GaussianProcess(kernel, X, 0.3, estimator=estimator, key=jax.random.key(0))


@pytest.fixture
def at_once(monkeypatch):
    """Show bars for the smallest problems, and at the first report."""
    monkeypatch.setattr(iterative, "_LEAST_ROWS", 0)
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    monkeypatch.setattr(stretches, "_SECONDS", 0.0)


def shown(capsys) -> list[str]:
    return capsys.readouterr().err.replace("\r", "\n").split("\n")


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_shows_a_bar_that_changes_no_number(name, at_once, capsys):
    gp = process(SOLVERS[name])
    silent = gp.condition(Y, progress_bar=False)
    assert shown(capsys) == [""]
    posterior: Any = gp.condition(Y)
    lines = shown(capsys)
    epochs, tolerance = float(posterior.diagnostics["epochs"]), SOLVERS[name].tolerance
    # About one line for each epoch, one before the first epoch and one at the end.
    assert min(2, epochs) < len(lines) < epochs + 6
    assert any("epochs, residual" in line and f" to {tolerance:.2g}" in line for line in lines)
    last = [line for line in lines if line.strip()][-1]
    residual = posterior.diagnostics["residual"]
    assert f"residual {float(residual):.2g}, of samples " in last
    assert f"(tolerance {tolerance:.2g}): converged, {epochs:.0f} epochs in 0 s" in last
    for value, expected in zip(jax.tree.leaves(posterior), jax.tree.leaves(silent), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_second_bar_compiles_nothing(at_once, capsys, monkeypatch):
    calls, run = [], sgp.solvers.AlternatingProjections.run

    def counted(self, *args):
        calls.append(self)
        return run(self, *args)

    monkeypatch.setattr(sgp.solvers.AlternatingProjections, "run", counted)
    gp = process(sgp.solvers.AlternatingProjections(15, 1e-3, 50))
    gp.condition(Y)
    assert len(calls) == 1
    first = shown(capsys)
    gp.condition(2.0 * Y)
    assert len(calls) == 1
    # The second call shows a separate bar.
    assert len(first) > 3
    assert len(shown(capsys)) > 3


@pytest.mark.slow
def test_no_bar_where_something_is_traced(at_once, capsys):
    gp = process(SOLVERS["ap"])

    def model(X, y):
        noise = numpyro.sample("noise", dist.LogNormal())
        likelihood = sgp.GaussianProcess(gp.kernel, X, noise, estimator=gp.estimator)
        numpyro.sample("y", likelihood, obs=y)

    jax.jit(lambda: gp.condition(Y).representer_weights)()
    jax.vmap(lambda y: gp.condition(y).representer_weights)(jnp.stack([Y, 2.0 * Y]))
    jax.lax.map(lambda y: gp.condition(y).representer_weights, jnp.stack([Y, 2.0 * Y]))
    draws = {"noise": jnp.array([0.2, 0.3])}
    sgp.posterior(model, draws, X, Y).mean(X[:2])
    jax.effects_barrier()
    assert shown(capsys) == [""]
    # A derivative with respect to new inputs does not trace the solve.
    jax.grad(lambda z: jnp.sum(gp.condition(Y).mean(z * X)))(1.0)
    assert "converged" in "".join(shown(capsys))


@pytest.mark.slow
def test_small_and_short_solves_are_silent(capsys, monkeypatch):
    gp, runs, run = process(SOLVERS["ap"]), [], stretches.run

    def counted(*args):
        runs.append(args)
        return run(*args)

    monkeypatch.setattr(stretches, "run", counted)
    gp.condition(Y)
    assert not runs
    monkeypatch.setattr(iterative, "_LEAST_ROWS", N)
    gp.condition(Y)
    assert runs
    assert shown(capsys) == [""]


@pytest.mark.parametrize("x64_enabled", [False, True])
def test_types_and_budgets_without_end(x64_enabled, at_once, capsys):
    with jax.enable_x64(x64_enabled):
        solver = sgp.solvers.AlternatingProjections(10, 1e-3, float("inf"))
        posterior: Any = process(solver).condition(Y)
    assert posterior.diagnostics["converged"]
    lines = shown(capsys)
    assert any(line.strip().startswith("0 epochs, residual") for line in lines)
    assert not any("at most" in line or "%" in line for line in lines)


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def said(clock: Clock, reports: list[tuple[float, float, float]], budget: float = 40.0) -> str:
    bar = progress._Bar()
    for clock.now, epochs, size in reports:
        bar.report(epochs, size, budget, 0.01)
    bar.close()
    return "" if bar.bar is None else bar.bar.desc


def test_the_time_left(monkeypatch):
    clock = Clock(monkeypatch)
    # Ten seconds per epoch, 36 epochs left and one for the residual; a tenth in two epochs.
    falling = [(100.0, 0.0, 1.0), (120.0, 2.0, 0.9), (140.0, 4.0, 0.09)]
    assert said(clock, falling).endswith(
        "4/40 epochs, residual 0.09 to 0.01, ~29 s left, at most 370"
    )
    rising = [(100.0, 0.0, 1.0), (120.0, 2.0, 2.0), (140.0, 4.0, 3.0)]
    assert said(clock, rising) == "4/40 epochs, residual 3 to 0.01, at most 370 s left"
    # If the residual falls too slowly for the budget, the text has the bound alone.
    slow = [(100.0, 0.0, 1.0), (120.0, 2.0, 1.0), (140.0, 4.0, 0.99)]
    assert said(clock, slow) == "4/40 epochs, residual 0.99 to 0.01, at most 370 s left"
    assert said(clock, falling, math.inf) == "4 epochs, residual 0.09 to 0.01, ~29 s left"
    assert said(clock, rising, math.inf) == "4 epochs, residual 3 to 0.01"
    # No time before the end of the first epoch, and no bar for a short solve.
    assert said(clock, [(0.0, 0.0, 1.0), (4.0, 0.0, 1.0)]) == "0/40 epochs, residual 1 to 0.01"
    assert said(clock, [(0.0, 0.0, 1.0), (2.0, 5.0, 0.1)]) == ""
    assert said(clock, [(0.0, 0.0, 1.0), (4.0, 1.0, np.nan)]).endswith(
        "nan to 0.01, at most 160 s left"
    )


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (StopReason.CONVERGED, "converged"),
        (StopReason.BUDGET, "the budget ended"),
        (StopReason.PRECISION, "rounding errors ended it"),
        (StopReason.FAILED, "failed"),
    ],
)
def test_the_end_says_what_was_reached(reason, text, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    bar = progress._Bar()
    for clock.now in (0.0, 5.0):
        bar.report(clock.now, 0.1, 40.0, 0.01)
    solution = solved(jnp.ones((5, 3)), jnp.array([0.02, 0.03, 0.05]))
    bar.finish(solution._replace(reason=jnp.array(int(reason)), epochs=jnp.array(6.0)))
    bar.close()
    expected = f"residual 0.02, of samples 0.04 (tolerance 0.01): {text}, 6 epochs in 5 s"
    assert shown(capsys)[-2].strip() == expected


@pytest.fixture
def interruptible():
    """Python's handler of Ctrl-C, which workers of a parallel run may not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_an_interrupt_ends_the_solve_and_breaks_nothing(
    at_once, interruptible, monkeypatch, capsys
):
    # In ten thousand epochs the residual does not reach the tolerance.
    estimator = process(sgp.solvers.AlternatingProjections(5, 0.0, 10_000)).estimator
    options = {"estimator": estimator, "key": jax.random.key(0), "state": "solver"}
    gp: Any = sgp.GaussianProcess(sgp.kernels.Matern32(0.5), X, 0.3, **options)
    reports, report = [], progress._Bar.report

    def press(self, *values):
        reports.append(values)
        if len(reports) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        report(self, *values)

    monkeypatch.setattr(progress._Bar, "report", press)
    with pytest.raises(KeyboardInterrupt):
        gp.condition(Y)
    assert 3 <= len(reports) < 100
    assert gp.state.posterior is None
    monkeypatch.setattr(progress._Bar, "report", report)
    again: Any = process(SOLVERS["ap"]).condition(Y)
    assert again.diagnostics["converged"]
    assert "converged" in "".join(shown(capsys))


def test_in_another_thread(at_once, capsys):
    posteriors: list[Any] = []
    gp = process(SOLVERS["ap"])
    thread = threading.Thread(target=lambda: posteriors.append(gp.condition(Y)))
    thread.start()
    thread.join()
    assert posteriors[0].diagnostics["converged"]
    assert "converged" in "".join(shown(capsys))


def test_a_bar_is_true_or_false(unchecked):
    with pytest.raises(TypeError, match="`progress_bar` must be True or False"):
        process(SOLVERS["ap"]).condition(Y, progress_bar=1)
