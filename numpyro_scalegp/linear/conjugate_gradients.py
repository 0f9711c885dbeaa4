"""Preconditioned block conjugate gradients."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.linear import krylov
from numpyro_scalegp.linear.iteration import check_budget, iterate
from numpyro_scalegp.linear.krylov import Krylov, join, split
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.preconditioners import (
    AbstractFactor,
    AbstractPreconditioner,
    PreconditionerFactor,
    RandomlyPivotedCholesky,
)
from numpyro_scalegp.linear.solver import (
    AbstractSolver,
    Coefficients,
    Solution,
    System,
    normalized,
)

# The number of probes that share a Krylov space, and the largest order of the tridiagonal matrix
# that is recorded for them: its eigenvectors take a fraction of a second.
_PROBE_GROUP = 8
_MAX_ORDER = 800


class ConjugateGradients(AbstractSolver):
    """Preconditioned block conjugate gradients.

    Each iteration multiplies H by all search directions, in one epoch, and minimizes over the
    Krylov space that all right-hand sides span together, so that many right-hand sides converge in
    a fraction of the iterations that each alone would take. The coefficients of probe vectors yield
    log|H| at no extra cost. Other solvers benefit more from a good initial guess, and do better
    with a budget too small to converge.

    Args:
        tolerance: relative residual ||b - H v|| / ||b|| at which a right-hand side counts as
            solved. The loop continues until all are solved; averaged columns count by the mean of
            their residuals.
        max_epochs: maximum number of iterations, each of one epoch (all entries of H). The final
            residual takes one more.
        preconditioner: by default a randomly pivoted Cholesky factor, of a rank chosen from n and
            the memory.
        group_size: number of right-hand sides that share a Krylov space; 1 for the textbook method.

    Raises:
        ValueError: if the tolerance is not in [0, 1), or the budget or `group_size` not positive.

    References:
        O'Leary (1980), The Block Conjugate Gradient Algorithm; Dubrulle (2001), Retooling the
        Method of Block Conjugate Gradients, algorithm BCGrQ, which keeps the factors of the
        residuals orthonormal so that converged columns do no harm, here in the inner product of
        P^-1; Lin et al. (2024), algorithm 1, whose first direction should be the preconditioned
        residual and whose loop should continue while either residual is too large. Time
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

    def init(self, operator: KernelOperator, key: Key[Array, ""] | None) -> PreconditionerFactor:
        """Factorize the preconditioner."""
        return self.preconditioner.factorize(operator)

    def run(self, factor: PreconditionerFactor, system: System) -> Solution:
        """Iterate until the residuals are within the tolerance."""
        max_iterations = system.num_iterations(self.max_epochs)
        return iterate_blocks(factor, system, self.group_size, self.tolerance, max_iterations)[0]


class Recorder(NamedTuple):
    """What a run that stops at a random iteration records besides the solution."""

    stop: Int[Array, ""]  # number of iterations, known only at run time
    record: Any  # before the first iteration
    # Maps the record, the number of iterations made, the last move, the solutions after it and
    # whether they moved to the next record.
    update: Callable[[Any, Array, Array, Array, Array], Any]


class _Lanczos(NamedTuple):
    """The recorded steps of the probes."""

    krylov: Krylov
    works: Bool[Array, ""]
    num_steps: Int[Array, ""]
    curvature: Float[Array, "steps groups g g"]
    triangle: Float[Array, "steps groups g g"]


class _State(NamedTuple):
    value: Float[Array, "groups n g"]
    krylov: Krylov
    norms: Float[Array, " k"]  # of the residuals
    lanczos: _Lanczos
    record: Any


def iterate_blocks(
    factor: AbstractFactor,
    system: System,
    group_size: int,
    tolerance: float,
    max_iterations: int,
    recorder: Recorder | None = None,
) -> tuple[Solution, Any]:
    """Block conjugate gradients on a system and on its probes, which start at zero.

    Returns:
        The solution, and the last record of a recorder, for right-hand sides of norm one.
    """
    operator, n, k = system.operator, system.operator.size, system.target.shape[1]
    # Rounding errors of H cannot make its eigenvalues smaller than minus this.
    relative = 10.0 * n * float(jnp.finfo(operator.dtype).eps)
    rounding = relative * jnp.max(jnp.abs(operator.diagonal()))
    advance = functools.partial(krylov.advance, factor=factor, rounding=rounding)
    # A group that nearly spans the whole space has no orthonormal basis in finite precision.
    size = max(1, min(group_size, k, n // 4))
    target = split(system.target, size)
    probes = system.options.probes
    num_probes = 0 if probes is None else probes.number
    # A run that stops at random records all steps: a smaller group has room for more steps.
    probe_size = _PROBE_GROUP if recorder is None else _MAX_ORDER // max_iterations
    probe_size = max(1, min(_PROBE_GROUP, probe_size, num_probes, n // 4))
    num_steps = min(max_iterations, min(_MAX_ORDER, n + probe_size) // probe_size)
    vectors = jnp.zeros((n, 0), operator.dtype)
    if probes is not None:
        vectors, _ = normalized(factor.sample(probes.key, num_probes))

    def step(
        state: _State, iteration: Int[Array, ""], check: Bool[Array, ""]
    ) -> tuple[_State, Bool[Array, ""]]:
        # One product for the search directions, or for the solution to be checked, and the probes.
        probes = state.lanczos.krylov
        factors = jnp.where(check, state.value, state.krylov.direction)
        product = operator.matmul(jnp.concatenate([join(factors), join(probes.direction)], axis=1))
        width = factors.shape[0] * size
        of_data, of_probes = split(product[:, :width], size), split(product[:, width:], probe_size)

        residual = target - of_data
        data = advance(state.krylov, of_data, residual, check)
        norms = jnp.where(data.works, krylov.norms(data.krylov)[:k], state.norms)
        norms = jnp.where(check, jnp.linalg.norm(join(residual), axis=0)[:k], norms)
        moves = data.works & ~check
        move = jnp.where(moves, data.move, 0.0)
        value, record = state.value + move, state.record
        if recorder is not None:
            vectors = join(move)[:, :k], join(value)[:, :k]
            record = recorder.update(record, iteration, *vectors, moves)

        # The probes advance in the same iteration, until a step does not work.
        lanczos = _recorded(state.lanczos, advance(probes, of_probes, probes.basis, False))
        works = data.works if k else lanczos.works
        return _State(value, data.krylov, norms, lanczos, record), works

    def size_of(state: _State) -> Float[Array, ""]:
        of_probes = jnp.max(krylov.norms(state.lanczos.krylov)[:num_probes], initial=0.0)
        if not k:
            return of_probes
        of_data = system.largest(state.norms)
        if recorder is None:
            return of_data
        # The sum for the log-determinant also ends once the remaining terms are zero.
        return jnp.maximum(of_data, jnp.where(state.lanczos.works, of_probes, 0.0))

    value, residual = system.start
    start = _State(
        split(value, size),
        krylov.from_residual(residual, size, factor),
        jnp.linalg.norm(residual, axis=0),
        _no_steps(krylov.from_residual(vectors, probe_size, factor), num_steps),
        None if recorder is None else recorder.record,
    )
    limit = max_iterations if recorder is None else jnp.minimum(recorder.stop, max_iterations)
    end, outcome = iterate(
        step,
        start,
        size_of,
        max_iterations=limit,
        tolerance=tolerance,
        can_check=k > 0,
        in_stretches=system.options.in_stretches,
    )
    solution = system.solution(join(end.value)[:, :k], end.norms, outcome)
    if num_probes:
        coefficients = _coefficients(start.lanczos, end.lanczos, num_probes, factor)
        solution = solution._replace(coefficients=coefficients)
    return solution, end.record


def _no_steps(start: Krylov, num_steps: int) -> _Lanczos:
    """The probes before the first step, with room to record `num_steps` steps."""
    size, dtype = start.triangle.shape[-1], start.triangle.dtype
    triangle = jnp.zeros((num_steps, *start.triangle.shape), dtype)
    curvature = triangle + jnp.eye(size, dtype=dtype)
    return _Lanczos(start, jnp.ones((), bool), jnp.zeros((), int), curvature, triangle)


def _recorded(lanczos: _Lanczos, step: krylov.Step) -> _Lanczos:
    """The probes after another step, or as before if it did not work."""
    place = jnp.where(step.works, lanczos.num_steps, len(lanczos.curvature))
    return _Lanczos(
        step.krylov,
        step.works,
        lanczos.num_steps + step.works.astype(int),
        lanczos.curvature.at[place].set(step.curvature),
        lanczos.triangle.at[place].set(step.triangle),
    )


def _coefficients(
    start: _Lanczos, end: _Lanczos, num_probes: int, factor: AbstractFactor
) -> Coefficients:
    residual = krylov.norms(end.krylov)[:num_probes]
    is_finite = jnp.all(jnp.isfinite(residual))
    return Coefficients(
        end.curvature,
        end.triangle,
        end.num_steps[None],
        jnp.ones(1, residual.dtype),
        start.krylov.triangle,
        jnp.where(is_finite, factor.log_determinant(), jnp.nan),
        residual,
        jnp.zeros((), bool),
    )
