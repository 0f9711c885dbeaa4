"""Block conjugate gradients, preconditioned."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.linalg import matmul, triangular_inverse
from numpyro_scalegp.solvers.operator import KernelOperator
from numpyro_scalegp.solvers.preconditioners import (
    AbstractPreconditioner,
    AbstractPreconditionerFactor,
    PivotedCholesky,
)
from numpyro_scalegp.solvers.solver import (
    AbstractSolver,
    Coefficients,
    Solution,
    check_budget,
    finish,
    iterate,
    largest,
    num_iterations,
    start,
)

# Probes that share a Krylov space, and the order of the tridiagonal matrix recorded for them: its
# eigenvectors take a fraction of a second.
_PROBE_GROUP = 8
_MAX_ORDER = 800


class _Krylov(NamedTuple):
    """Groups of right-hand sides, each with a Krylov space of its own; residuals are Q C."""

    basis: Float[Array, "groups n g"]  # Q, with Q'P^-1 Q = I
    direction: Float[Array, "groups n g"]  # S
    triangle: Float[Array, "groups g g"]  # C


class Roulette(NamedTuple):
    """Where a run stops at random, and what it keeps on the way."""

    stop: Int[Array, ""]  # iterations to make, known only at run time
    # What each column's move in an iteration, counted from zero, is multiplied by in each of
    # several copies of the solution.
    weights: Callable[[Int[Array, ""]], Float[Array, "copies k"]]
    checkpoints: tuple[int, ...]  # iterations after which iterates are kept
    num_kept: int  # so many of the first columns of B


class _State(NamedTuple):
    values: Float[Array, "copies groups n g"]  # the plain one first
    kept: Float[Array, "checkpoints n kept"]
    data: _Krylov
    norms: Float[Array, " k"]  # of the data's residuals
    probes: _Krylov
    probes_work: Bool[Array, ""]
    num_steps: Int[Array, ""]  # of the probes
    curvature: Float[Array, "steps groups g g"]
    turn: Float[Array, "steps groups g g"]


class ConjugateGradients(AbstractSolver):
    """Preconditioned block conjugate gradients.

    Each iteration multiplies H with all search directions, one epoch, and minimises over the Krylov
    space that all right-hand sides span together: many of them converge in a fraction of the
    iterations that each alone would take. The coefficients of extra columns give log|H| for
    nothing. It gains less than other solvers from a good guess, and from a budget too small to
    converge.

    Args:
        tolerance: relative residual ||b - H v|| / ||b|| at which a column counts as solved; the
            loop goes on until all are, averaged columns in their mean.
        max_epochs: iterations at most. To compute the residual at the end takes one epoch more.
        preconditioner: by default a pivoted Cholesky factor of rank 100.
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
    preconditioner: AbstractPreconditioner = PivotedCholesky(100)
    group_size: int = eqx.field(static=True, converter=checks.plain, default=128)

    def __check_init__(self) -> None:
        check_budget(self.tolerance, self.max_epochs)
        checks.instance("preconditioner", self.preconditioner, AbstractPreconditioner)
        checks.count("group_size", self.group_size)

    def solve(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        *,
        guess: Float[Array, "*candidates n k"] | None = None,
        key: Key[Array, ""] | None = None,
        num_averaged: int = 0,
    ) -> Solution:
        """Solve H V = B; see `AbstractSolver.solve`. No key is needed."""
        return self.solve_with_probes(
            operator, B, jax.random.key(0), 0, guess=guess, num_averaged=num_averaged
        )[0]

    def solve_with_probes(
        self,
        operator: KernelOperator,
        B: Float[Array, "n k"],
        probe_key: Key[Array, ""],
        num_probes: int,
        *,
        guess: Float[Array, "*candidates n k"] | None = None,
        key: Key[Array, ""] | None = None,
        num_averaged: int = 0,
        paired: bool = True,
    ) -> tuple[Solution, Coefficients]:
        """Solve H V = B with probes; see `AbstractSolver.solve_with_probes`.

        The probes start at zero, whatever the guess for B. They share the evaluations of the kernel
        and do not count for convergence, unless B has no columns.
        """
        *_, solution, coefficients = run(
            operator,
            B,
            probe_key,
            num_probes,
            guess=guess,
            num_averaged=num_averaged,
            preconditioner=self.preconditioner,
            group_size=self.group_size,
            tolerance=self.tolerance,
            max_iterations=num_iterations(self.max_epochs, guess, 1.0),
        )
        return solution, coefficients


def run(
    operator: KernelOperator,
    B: Float[Array, "n k"],
    key: Key[Array, ""],
    num_probes: int,
    *,
    guess: Float[Array, "*candidates n k"] | None,
    num_averaged: int,
    preconditioner: AbstractPreconditioner,
    group_size: int,
    tolerance: float,
    max_iterations: int,
    roulette: Roulette | None = None,
) -> tuple[Float[Array, "copies n k"], Float[Array, "checkpoints n kept"], Solution, Coefficients]:
    """Block conjugate gradients on B, and on probes that ride along.

    Args:
        operator: the matrix H.
        B: right-hand sides, shape (n, k).
        key: a typed JAX key for the probes.
        num_probes: how many probes ride along.
        guess: as of `AbstractSolver.solve`.
        num_averaged: as of `AbstractSolver.solve`.
        preconditioner: what P is made by.
        group_size: right-hand sides that share a Krylov space.
        tolerance: relative residual at which the loop stops.
        max_iterations: iterations at most.
        roulette: where to stop at random, and what to keep; by default no copies and no
            checkpoints.

    Returns:
        The weighted copies of the solution, what was kept of the plain one, the plain solution, and
        the coefficients of the probes.
    """
    operator, B, guess = jax.lax.stop_gradient((operator, B, guess))
    factor = preconditioner.factorise(operator)
    begin = start(operator, B, guess)
    riders = start(operator, factor.sample(key, num_probes), None)
    k = B.shape[1]
    limit = max_iterations if roulette is None else jnp.minimum(roulette.stop, max_iterations)
    points = () if roulette is None else roulette.checkpoints
    # Whatever rounding has done to H, its eigenvalues are above minus this.
    relative = 10.0 * operator.size * float(jnp.finfo(operator.dtype).eps)
    rounding = relative * jnp.max(jnp.abs(operator.diagonal()))
    advance = functools.partial(_advance, factor=factor, rounding=rounding)

    def split(columns: Array, size: int) -> Array:
        """Groups of columns, filled up with zeros: shape (groups, n, size)."""
        groups = -(-columns.shape[1] // size)
        filled = jnp.pad(columns, ((0, 0), (0, groups * size - columns.shape[1])))
        return jnp.moveaxis(filled.reshape(len(columns), groups, size), 1, 0)

    def join(groups: Array) -> Array:
        return jnp.moveaxis(groups, 0, 1).reshape(operator.size, -1)

    def from_residual(residual: Array, size: int) -> _Krylov:
        orthonormalise = jax.vmap(functools.partial(_orthonormalise, factor=factor))
        basis, direction, triangle = orthonormalise(split(residual, size))
        return _Krylov(basis, direction, triangle)

    def weigh(move: Array, iteration: Array) -> Array:
        if roulette is None:
            return move[None]
        weights = roulette.weights(iteration)
        return jnp.concatenate(
            [move[None], jax.vmap(lambda row: split(row[None], size) * move)(weights)]
        )

    def keep(kept: Array, iteration: Array, moves: Array, values: Array) -> Array:
        if not points:
            return kept
        # Written on the way to the next checkpoint, too: what is there last is right.
        place = jnp.searchsorted(jnp.array(points), iteration)
        place = jnp.where(moves, place, len(points))
        return kept.at[place].set(join(values[0])[:, : kept.shape[2]])

    def size_of(state: _State) -> Array:
        if not k:
            return largest(_norms(state.probes), num_averaged)
        norm = largest(state.norms, num_averaged)
        if roulette is None or not num_probes:
            return norm
        # The log-determinant, too, is a sum that ends where the rest is zero.
        of_probes = jnp.max(_norms(state.probes)[:num_probes])
        return jnp.maximum(norm, jnp.where(state.probes_work, of_probes, 0.0))

    def step(state: _State, iteration: Array, check: Array) -> tuple[_State, Array]:
        left = jnp.where(check, state.values[0], state.data.direction)
        image = operator.matmul(jnp.concatenate([join(left), join(state.probes.direction)], axis=1))
        width = left.shape[0] * size
        of_data, of_probes = split(image[:, :width], size), split(image[:, width:], probe_size)
        fresh = target - of_data
        data = advance(state.data, of_data, fresh, check)
        computed = jnp.linalg.norm(join(fresh), axis=0)[:k]
        norms = jnp.where(data.works, _norms(data.krylov)[:k], state.norms)
        moves = data.works & ~check
        values = state.values + jnp.where(moves, weigh(data.move, iteration), 0.0)
        # The probes go on meanwhile, as long as that works.
        probes = advance(state.probes, of_probes, state.probes.basis, False)
        place = jnp.where(probes.works, state.num_steps, len(state.curvature))
        state = _State(
            values,
            keep(state.kept, iteration + 1, moves, values),
            data.krylov,
            jnp.where(check, computed, norms),
            probes.krylov,
            probes.works,
            state.num_steps + probes.works.astype(int),
            state.curvature.at[place].set(probes.curvature),
            state.turn.at[place].set(probes.turn),
        )
        return state, data.works if k else probes.works

    # A group that nearly spans the whole space has no orthonormal basis in finite precision.
    size = max(1, min(group_size, k, operator.size // 4))
    data, target = from_residual(begin.residual, size), split(begin.target, size)
    # A roulette's sum goes on to the end: a smaller group has room for more steps.
    probe_group = _PROBE_GROUP if roulette is None else _MAX_ORDER // max_iterations
    probe_size = max(1, min(_PROBE_GROUP, probe_group, num_probes, operator.size // 4))
    probes = from_residual(riders.residual, probe_size)
    order = min(_MAX_ORDER, operator.size + probe_size)
    num_steps = min(max_iterations, order // probe_size)
    no_turns = jnp.zeros((num_steps, *probes.triangle.shape), operator.dtype)
    unit = no_turns + jnp.eye(probe_size, dtype=operator.dtype)
    zero = jnp.zeros((), int)
    copies = 0 if roulette is None else jax.eval_shape(roulette.weights, zero).shape[0]
    values = jnp.broadcast_to(split(begin.value, size), (1 + copies, *data.basis.shape))
    num_kept = 0 if roulette is None else roulette.num_kept
    kept = jnp.zeros((len(points), operator.size, num_kept), operator.dtype)
    norms = jnp.linalg.norm(begin.residual, axis=0)
    state = _State(values, kept, data, norms, probes, jnp.ones((), bool), zero, unit, no_turns)
    state, course = iterate(
        step,
        state,
        size_of,
        max_iterations=limit,
        epochs_per_iteration=1.0,
        tolerance=tolerance,
        can_check=k > 0,
    )
    values = jax.vmap(lambda copy: join(copy)[:, :k])(state.values)
    # Once the rest is zero, later checkpoints are where the run ended.
    reached = jnp.array(points, int)[:, None, None] <= course.iterations
    kept = jnp.where(reached, state.kept, values[0][:, :num_kept]) * begin.scale[:num_kept]
    of_probes = _norms(state.probes)[:num_probes]
    return (
        values[1:] * begin.scale,
        kept,
        finish(begin, values[0], state.norms, course),
        Coefficients(
            state.curvature,
            state.turn,
            state.num_steps[None],
            jnp.ones(1, operator.dtype),
            probes.triangle,
            jnp.where(jnp.all(jnp.isfinite(of_probes)), factor.log_determinant(), jnp.nan),
            of_probes,
            jnp.zeros((), bool),
        ),
    )


def _norms(krylov: _Krylov) -> Float[Array, " k"]:
    """The norms of all residuals, those of filling columns included."""
    return jnp.linalg.norm(matmul(krylov.basis, krylov.triangle), axis=1).reshape(-1)


class _Step(NamedTuple):
    krylov: _Krylov
    move: Float[Array, "groups n g"]  # what the solutions move by
    works: Bool[Array, ""]
    curvature: Float[Array, "groups g g"]
    turn: Float[Array, "groups g g"]


def _advance(
    krylov: _Krylov,
    image: Float[Array, "groups n g"],
    fresh: Float[Array, "groups n g"],
    restarts: Bool[Array, ""] | bool,
    *,
    factor: AbstractPreconditionerFactor,
    rounding: Float[Array, ""],
) -> _Step:
    """One iteration of each group, given H S, or a start at the residuals `fresh`.

    The step minimises over the span of S, so that errors never grow, whatever rounding or dependent
    columns do to the factors; S'Q, which is the identity in exact arithmetic, sees to that.

    It works unless rounding leaves no positive curvature: then the groups stay as they are. Where
    the image is not finite, or the curvature too negative for rounding, the next state is NaN.
    """

    def turn(krylov: _Krylov, image: Array, fresh: Array) -> tuple[_Step, Array]:
        S, Q, T = krylov.direction, krylov.basis, krylov.triangle
        curvature = matmul(S.T, image)
        W = _inverse_factor(curvature)[1]
        step = matmul(matmul(W.T, W), matmul(S.T, Q))
        move = matmul(S, matmul(step, T))
        residual = jnp.where(restarts, fresh, Q - matmul(image, step))
        basis, preconditioned, triangle = _orthonormalise(residual, factor=factor)
        direction = preconditioned + jnp.where(restarts, 0.0, matmul(S, triangle.T))
        chained = jnp.where(restarts, triangle, matmul(triangle, T))
        lifted = _lifted_cholesky(curvature + rounding * matmul(S.T, S))
        positive = restarts | jnp.isfinite(lifted[-1, -1])
        works = jnp.all(jnp.isfinite(triangle))
        curvature = 0.5 * (curvature + curvature.T)
        new = _Step(_Krylov(basis, direction, chained), move, works, curvature, triangle)
        return new, jnp.all(jnp.isfinite(image)) & positive

    new, harmless = jax.vmap(turn)(krylov, image, fresh)
    stays = ~jnp.all(new.works) & jnp.all(new.works | harmless)
    krylov = jax.tree.map(lambda a, b: jnp.where(stays, a, b), krylov, new.krylov)
    return new._replace(krylov=krylov, works=~stays)


def _orthonormalise(
    R: Float[Array, "n g"], *, factor: AbstractPreconditionerFactor
) -> tuple[Float[Array, "n g"], Float[Array, "n g"], Float[Array, "g g"]]:
    """R = Q C with Q'P^-1 Q = I, and P^-1 Q; by Cholesky factorisations, twice for accuracy."""
    C = jnp.eye(R.shape[1], dtype=R.dtype)
    Q, Z = R, factor.solve(R)
    for _ in range(2):
        L, W = _inverse_factor(matmul(Q.T, Z))
        Q, Z, C = matmul(Q, W.T), matmul(Z, W.T), matmul(L.T, C)
    return Q, Z, C


def _inverse_factor(G: Float[Array, "g g"]) -> tuple[Float[Array, "g g"], Float[Array, "g g"]]:
    """L and L^-1 with L L' ~ G, lifted by rounding so that dependent columns do no harm."""
    L = _lifted_cholesky(G)
    return L, triangular_inverse(L)


def _lifted_cholesky(G: Float[Array, "g g"]) -> Float[Array, "g g"]:
    g, limits = G.shape[0], jnp.finfo(G.dtype)
    lift = 10.0 * limits.eps * jnp.abs(jnp.trace(G)) + limits.tiny
    return jnp.linalg.cholesky(0.5 * (G + G.T) + lift * jnp.eye(g, dtype=G.dtype))
