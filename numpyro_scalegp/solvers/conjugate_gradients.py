"""Block conjugate gradients, preconditioned."""

import abc
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.solvers import krylov
from numpyro_scalegp.solvers.iteration import check_budget, iterate, largest, num_iterations
from numpyro_scalegp.solvers.krylov import Krylov, join, split
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.preconditioners import AbstractPreconditioner, RandomlyPivotedCholesky
from numpyro_scalegp.solvers.solver import (
    AbstractSolver,
    Coefficients,
    Course,
    Solution,
    System,
    finish,
    prepare,
)

# Probes that share a Krylov space, and the order of the tridiagonal matrix recorded for them: its
# eigenvectors take a fraction of a second.
_PROBE_GROUP = 8
_MAX_ORDER = 800


class AbstractConjugateGradients(AbstractSolver):
    """Conjugate gradients, which give log|H| for nothing from the coefficients of extra columns.

    A subclass implements `run_with_probes`, of which `run` makes use.
    """

    def run(
        self,
        operator: KernelOperator,
        system: System,
        key: Key[Array, ""] | None,
        num_averaged: int,
    ) -> Solution:
        """Solve without probes; see `AbstractSolver.run`."""
        no_probes = jax.random.key(0), 0
        return self.run_with_probes(operator, system, *no_probes, key, num_averaged, True)[0]


class ConjugateGradients(AbstractConjugateGradients):
    """Preconditioned block conjugate gradients.

    Each iteration multiplies H with all search directions, one epoch, and minimizes over the Krylov
    space that all right-hand sides span together: many of them converge in a fraction of the
    iterations that each alone would take. The coefficients of extra columns give log|H| for
    nothing. It gains less than other solvers from a good guess, and from a budget too small to
    converge.

    Args:
        tolerance: relative residual ||b - H v|| / ||b|| at which a column counts as solved; the
            loop goes on until all are, averaged columns in their mean.
        max_epochs: iterations at most. To compute the residual at the end takes one epoch more.
        preconditioner: by default a randomly pivoted Cholesky factor, of a rank that follows from n
            and memory.
        group_size: right-hand sides that share a Krylov space; 1 for one each, the textbook method.

    Raises:
        ValueError: if the tolerance is not in [0, 1), or the budget or `group_size` not positive.

    References:
        O'Leary (1980), The Block Conjugate Gradient Algorithm; Dubrulle (2001), Retooling the
        Method of Block Conjugate Gradients, algorithm BCGrQ, which keeps the residuals' factors
        orthonormal so that converged columns do no harm, here in the inner product of P^-1; Lin et
        al. (2024), algorithm 1, whose first direction should be the preconditioned residual and
        whose loop should go on while either residual is too large. Time
        O(iterations n^2 (d / 2 + k)), memory O(n (k + rank)).

    Example:
        >>> import numpyro_scalegp as sgp
        >>> solver = sgp.solvers.ConjugateGradients(tolerance=1e-3, max_epochs=50)
    """

    tolerance: float = eqx.field(static=True, converter=checks.plain, default=1e-2)
    max_epochs: int | float = eqx.field(static=True, converter=checks.plain, default=100)
    preconditioner: AbstractPreconditioner = RandomlyPivotedCholesky()
    group_size: int = eqx.field(static=True, converter=checks.plain, default=128)

    def __check_init__(self) -> None:
        check_budget(self.tolerance, self.max_epochs)
        checks.instance("preconditioner", self.preconditioner, AbstractPreconditioner)
        checks.count("group_size", self.group_size)

    def run_with_probes(
        self,
        operator: KernelOperator,
        system: System,
        probe_key: Key[Array, ""],
        num_probes: int,
        key: Key[Array, ""] | None,
        num_averaged: int,
        paired: bool,
    ) -> tuple[Solution, Coefficients]:
        """Iterate until the residuals are within the tolerance; see `solve_with_probes`."""
        settings = Settings(
            self.preconditioner,
            self.group_size,
            self.tolerance,
            num_iterations(self.max_epochs, system, 1.0),
            num_averaged,
        )
        return iterate_blocks(operator, system, probe_key, num_probes, settings)[:2]


class AbstractRecorder(eqx.Module):
    """What a run keeps beside the solution, and where it stops at random."""

    stop: eqx.AbstractVar[Int[Array, ""]]  # iterations to make, known only at run time

    @abc.abstractmethod
    def init(self, value: Float[Array, "n k"]) -> Any:
        """The record before the first iteration, which starts at `value`."""

    @abc.abstractmethod
    def update(
        self,
        record: Any,
        iteration: Int[Array, ""],
        move: Float[Array, "n k"],
        value: Float[Array, "n k"],
        moves: Bool[Array, ""],
    ) -> Any:
        """The record after an iteration, counted from zero, that moves by `move` to `value`."""


class Settings(NamedTuple):
    """How a run goes."""

    preconditioner: AbstractPreconditioner
    group_size: int
    tolerance: float
    max_iterations: int
    num_averaged: int
    recorder: AbstractRecorder | None = None


class _State(NamedTuple):
    value: Float[Array, "groups n g"]
    data: Krylov
    norms: Float[Array, " k"]  # of the data's residuals
    probes: Krylov
    probes_work: Bool[Array, ""]
    num_steps: Int[Array, ""]  # of the probes
    curvature: Float[Array, "steps groups g g"]
    triangle: Float[Array, "steps groups g g"]
    record: Any


def iterate_blocks(
    operator: KernelOperator,
    system: System,
    probe_key: Key[Array, ""],
    num_probes: int,
    settings: Settings,
) -> tuple[Solution, Coefficients, Any]:
    """Block conjugate gradients on a system and on probes from N(0, P) that start at zero.

    Returns:
        The solution, the coefficients of the probes, and the record, unscaled, if there is a
        recorder.
    """
    blocks = _Blocks(operator, system, probe_key, num_probes, settings)
    recorder, limit = settings.recorder, settings.max_iterations
    state, course = iterate(
        blocks.step,
        blocks.start(),
        blocks.size_of,
        max_iterations=limit if recorder is None else jnp.minimum(recorder.stop, limit),
        epochs_per_iteration=1.0,
        tolerance=settings.tolerance,
        can_check=blocks.num_columns > 0,
        progress=system.progress,
    )
    return blocks.solution(state, course), blocks.coefficients(state), state.record


class _Blocks:
    """What stays the same over the iterations of a run."""

    def __init__(
        self,
        operator: KernelOperator,
        system: System,
        probe_key: Key[Array, ""],
        num_probes: int,
        settings: Settings,
    ) -> None:
        self.operator, self.system, self.settings = operator, system, settings
        self.num_columns, self.num_probes = system.target.shape[1], num_probes
        self.factor = settings.preconditioner.factorize(operator)
        # Whatever rounding has done to H, its eigenvalues are above minus this.
        relative = 10.0 * operator.size * float(jnp.finfo(operator.dtype).eps)
        rounding = relative * jnp.max(jnp.abs(operator.diagonal()))
        self.advance = functools.partial(krylov.advance, factor=self.factor, rounding=rounding)
        # A group that nearly spans the whole space has no orthonormal basis in finite precision.
        self.size = max(1, min(settings.group_size, self.num_columns, operator.size // 4))
        self.target = split(system.target, self.size)
        # A run that stops at random goes on to the end: a smaller group has room for more steps.
        limit = settings.max_iterations
        probe_group = _PROBE_GROUP if settings.recorder is None else _MAX_ORDER // limit
        group = min(_PROBE_GROUP, probe_group, num_probes, operator.size // 4)
        self.probe_size = max(1, group)
        order = min(_MAX_ORDER, operator.size + self.probe_size)
        self.num_steps = min(limit, order // self.probe_size)
        _, probes = prepare(operator, self.factor.sample(probe_key, num_probes))
        self.probes = krylov.from_residual(probes.residual, self.probe_size, self.factor)

    def start(self) -> _State:
        system, dtype = self.system, self.operator.dtype
        no_triangles = jnp.zeros((self.num_steps, *self.probes.triangle.shape), dtype)
        recorder = self.settings.recorder
        return _State(
            split(system.value, self.size),
            krylov.from_residual(system.residual, self.size, self.factor),
            jnp.linalg.norm(system.residual, axis=0),
            self.probes,
            jnp.ones((), bool),
            jnp.zeros((), int),
            no_triangles + jnp.eye(self.probe_size, dtype=dtype),
            no_triangles,
            None if recorder is None else recorder.init(system.value),
        )

    def step(
        self, state: _State, iteration: Int[Array, ""], check: Bool[Array, ""]
    ) -> tuple[_State, Bool[Array, ""]]:
        k, recorder = self.num_columns, self.settings.recorder
        left = jnp.where(check, state.value, state.data.direction)
        both = jnp.concatenate([join(left), join(state.probes.direction)], axis=1)
        product, width = self.operator.matmul(both), left.shape[0] * self.size
        of_data = split(product[:, :width], self.size)
        fresh = self.target - of_data
        data = self.advance(state.data, of_data, fresh, check)
        computed = jnp.linalg.norm(join(fresh), axis=0)[:k]
        norms = jnp.where(data.works, krylov.norms(data.krylov)[:k], state.norms)
        moves = data.works & ~check
        move = jnp.where(moves, data.move, 0.0)
        value, record = state.value + move, state.record
        if recorder is not None:
            vectors = join(move)[:, :k], join(value)[:, :k]
            record = recorder.update(record, iteration, *vectors, moves)
        # The probes go on meanwhile, as long as that works.
        of_probes = split(product[:, width:], self.probe_size)
        probes = self.advance(state.probes, of_probes, state.probes.basis, False)
        place = jnp.where(probes.works, state.num_steps, len(state.curvature))
        state = _State(
            value,
            data.krylov,
            jnp.where(check, computed, norms),
            probes.krylov,
            probes.works,
            state.num_steps + probes.works.astype(int),
            state.curvature.at[place].set(probes.curvature),
            state.triangle.at[place].set(probes.triangle),
            record,
        )
        return state, data.works if k else probes.works

    def size_of(self, state: _State) -> Float[Array, ""]:
        num_averaged = self.settings.num_averaged
        if not self.num_columns:
            return largest(krylov.norms(state.probes), num_averaged)
        norm = largest(state.norms, num_averaged)
        if self.settings.recorder is None or not self.num_probes:
            return norm
        # The log-determinant, too, is a sum that ends where the rest is zero.
        of_probes = jnp.max(self._probe_norms(state))
        return jnp.maximum(norm, jnp.where(state.probes_work, of_probes, 0.0))

    def _probe_norms(self, state: _State) -> Float[Array, " s"]:
        return krylov.norms(state.probes)[: self.num_probes]

    def solution(self, state: _State, course: Course) -> Solution:
        value = join(state.value)[:, : self.num_columns]
        return finish(self.system, value, state.norms, course)

    def coefficients(self, state: _State) -> Coefficients:
        residual = self._probe_norms(state)
        is_finite = jnp.all(jnp.isfinite(residual))
        return Coefficients(
            state.curvature,
            state.triangle,
            state.num_steps[None],
            jnp.ones(1, self.operator.dtype),
            self.probes.triangle,
            jnp.where(is_finite, self.factor.log_determinant(), jnp.nan),
            residual,
            jnp.zeros((), bool),
        )
