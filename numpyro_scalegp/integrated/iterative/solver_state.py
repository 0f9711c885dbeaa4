"""The state that an iterative estimator carries from one optimizer step to the next."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, UInt

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.mesh import divided
from numpyro_scalegp.features.prior_draws import PriorDraws, rows_stay
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.solver import Solution, solved
from numpyro_scalegp.processes.pathwise import PathwisePosterior
from numpyro_scalegp.programs.comparison import begins_with, is_of_kind, is_same
from numpyro_scalegp.sites.mutable_state import refuse_batches


class Records(NamedTuple):
    """Residuals and cost of the last `num_records` steps, in a ring buffer."""

    residual: Float[Array, " records"]  # of the solution for the observations, relative
    probe_residual: Float[Array, " records"]  # mean over the probes
    epochs: Float[Array, " records"]
    converged: Bool[Array, " records"]
    standard_error: Float[Array, " records"]  # of the value of log p(y)


class Memory(NamedTuple):
    """The leaves of a state. All are arrays, so that any tool that saves pytrees can save them."""

    solutions: Float[Array, "p n k"]  # newest first; column 0 for the observations, then probes
    target: Float[Array, " n"]  # the right-hand side of column 0 of the newest solution
    kernel: AbstractKernel  # of the newest solution, as are the noise variance and X
    noise_variance: Float[Array, "..."]
    X: Float[Array, "n d"]
    estimator: UInt[Array, ""]  # fingerprint of the settings of the estimator
    seed: UInt[Array, " 2"]  # of the probes
    step: Int[Array, ""]
    records: Records

    @property
    def num_records(self) -> int:
        """The capacity of the records, in steps."""
        return self.records.epochs.size

    def key(self) -> Key[Array, ""]:
        """The key of the probes."""
        return jax.random.wrap_key_data(self.seed, impl="threefry2x32")


@jax.tree_util.register_pytree_with_keys_class
class SolverState:
    """The solutions, the probe vectors' seed and the records of an iterative estimator.

    A `GaussianProcess` with `state=name` creates a state as the NumPyro mutable site of that name.
    `log_prob` reads the memory from the start of the step, and writes a new memory, which is the
    pytree's content. So a model can be traced any number of times with the same state.

    The object also holds the last posterior conditioned with it, from which the next one starts.
    That posterior is not part of the pytree, and conditioning leaves the memory unchanged.

    Args:
        memory: the contents of the state; None until an estimator initializes it.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self.begin = memory
        self._written: Memory | None = None
        self.posterior: PathwisePosterior | None = None

    @property
    def _current(self) -> Memory | None:
        return self.begin if self._written is None else self._written

    @property
    def num_rows(self) -> int | None:
        """The number of observations that the state has solutions for; None while it is empty."""
        return None if self._current is None else self._current.X.shape[0]

    @property
    def memory(self) -> Memory:
        """The memory that the last step wrote, or the initial memory before the first step.

        Raises:
            ValueError: if the state is empty.
        """
        return _nonempty(self._current)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flatten to the current memory."""
        return ((jax.tree_util.GetAttrKey("memory"), self._current),), None

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "SolverState":
        """Invert the flattening."""
        state = object.__new__(cls)
        (state.begin,) = children
        state._written = state.posterior = None
        return state

    def prepare(
        self,
        operator: KernelOperator,
        key: Key[Array, ""] | None,
        *,
        num_columns: int,
        num_solutions: int,
        num_records: int,
    ) -> None:
        """Initialize an empty state: zero solutions, no records, and a seed for the probe vectors.

        Args:
            operator: the linear system of the first step.
            key: a typed JAX key for the probe vectors.
            num_columns: number of right-hand sides of a step.
            num_solutions: number of previous solutions to hold.
            num_records: number of steps to record.

        Raises:
            ValueError: if the state is empty and there is no key.
        """
        if self.begin is not None:
            return
        if key is None:
            raise ValueError(
                "a new solver state needs a `key` for its probes: pass `key=` to the "
                "`GaussianProcess`, or run the model under `numpyro.handlers.seed`. To resume from "
                "an existing state, run the model under `numpyro.handlers.substitute`, with "
                "data={name: state}."
            )
        n, dtype = operator.size, operator.dtype
        empty = jnp.full(num_records, jnp.nan, dtype)
        records = Records(empty, empty, empty, jnp.zeros(num_records, bool), empty)
        operator = jax.lax.stop_gradient(operator)
        self.begin = Memory(
            divided(jnp.zeros((num_solutions, n, num_columns), dtype), operator.mesh, axis=1),
            jnp.zeros(n, dtype),
            operator.kernel,
            operator.noise_variance,
            operator.X,
            jnp.zeros((), jnp.uint32),
            jax.random.bits(key, (2,), jnp.uint32),
            jnp.zeros((), jnp.int32),
            records,
        )

    def with_rows(self, X: Float[ArrayLike, "n d"]) -> "SolverState":
        """The state for the same data with new rows appended.

        The solutions start at zero for the new rows; hyperparameters, probe vectors and records
        stay.

        Args:
            X: all inputs, shape (n, d): first the inputs of the state, in the same order, then the
                new inputs.

        Returns:
            A new state; this one is unchanged.

        Raises:
            ValueError: if the state is empty, or X does not begin with its rows.
        """
        memory, rows = self.memory, checks.inputs("X", X)
        if not begins_with(rows, memory.X):
            raise ValueError(
                f"the solver state holds a solution for inputs of shape {memory.X.shape}, and `X`, "
                f"of shape {rows.shape}, does not begin with these rows: append new rows after "
                "the rows of the state, in the same order, or start with a new state."
            )
        num_old, num_new = memory.X.shape[0], rows.shape[0] - memory.X.shape[0]
        noise = memory.noise_variance
        if noise.ndim:
            noise = jnp.concatenate([noise, jnp.broadcast_to(noise[-1], (num_new,))])
        solutions = jnp.pad(memory.solutions, ((0, 0), (0, num_new), (0, 0)))
        if num_new and not rows_stay():
            solutions = solutions.at[:, :, 1:].set(0.0)
        # Infinity differs from any observation, so that the padded solution never counts as solved.
        target = jnp.pad(memory.target, (0, num_new), constant_values=jnp.inf)
        rows = rows.astype(memory.X.dtype).at[:num_old].set(memory.X)
        return SolverState(
            memory._replace(solutions=solutions, target=target, noise_variance=noise, X=rows)
        )

    def keep(self, posterior: PathwisePosterior) -> None:
        """Hold a posterior for the next solve to start from, unless it is traced."""
        if checks.is_concrete(posterior):
            self.posterior = posterior

    def read(self, shape: tuple[int, int], *, last: bool = False) -> Memory:
        """The memory at the start of the step or, if `last`, the memory that the step wrote.

        Raises:
            ValueError: if the state is for data or probe vectors of a different shape.
        """
        memory = _nonempty(self._current if last else self.begin)
        if memory.solutions.shape[1:] != shape:
            raise ValueError(
                f"the solver state holds a solution of shape {memory.solutions.shape[1:]}, but the "
                f"data and the estimator ask for {shape} (rows, 1 + num_probes): a state serves "
                "one data set and one estimator. After appending rows to the data, use "
                "`state.with_rows(X)`."
            )
        return memory

    def write(
        self,
        operator: KernelOperator,
        estimator: UInt[Array, ""],
        solution: Float[Array, "n k"],
        target: Float[Array, " n"],
        record: Records,
        key: Key[Array, ""] | None,
    ) -> None:
        """Write the record of a step, and its solution if all entries are finite.

        Args:
            operator: the linear system.
            estimator: the fingerprint of the settings of the estimator.
            solution: shape (n, k).
            target: the right-hand side of the first column, shape (n,).
            record: residuals and cost of the step, each of shape ().
            key: the key of the step, if any, which also shows whether the step is batched.

        Raises:
            ValueError: if the step runs under `jax.vmap`, as with `num_particles > 1`, or the state
                was created with a different kind of kernel.
        """
        begin = _nonempty(self.begin)
        system = operator.kernel, operator.noise_variance, operator.X
        before = begin.kernel, begin.noise_variance, begin.X
        if not is_of_kind(system, before):
            raise ValueError(
                f"the solver state was made with {_described(before)}, and is used with "
                f"{_described(system)}: a state serves one model. Use a separate state here."
            )
        system = jax.tree.unflatten(jax.tree.structure(before), jax.tree.leaves(system))
        finite = jnp.all(jnp.isfinite(solution))
        solutions = jnp.concatenate([solution[None], begin.solutions[:-1]])
        solutions = divided(solutions, operator.mesh, axis=1)
        new = (solutions, target, *system, estimator)
        old = (begin.solutions, begin.target, *before, begin.estimator)
        updated: Any = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        index = begin.step % begin.num_records
        # Infinity replaces values that are not finite; NaN marks empty records.
        records = Records(
            *(
                ring.at[index].set(
                    jnp.where(jnp.isfinite(entry), entry, jnp.inf).astype(ring.dtype)
                )
                for ring, entry in zip(begin.records, record, strict=True)
            )
        )
        names = "solutions", "target", "kernel", "noise_variance", "X", "estimator"
        memory = begin._replace(
            **dict(zip(names, updated, strict=True)), step=begin.step + 1, records=records
        )
        self._written, _ = refuse_batches(jax.lax.stop_gradient((memory, key)))
        self.posterior = None

    def last(
        self, operator: KernelOperator, target: Float[Array, " n"]
    ) -> tuple[Bool[Array, ""], Solution]:
        """The last solution, and whether its first column solves this system."""
        memory = self.memory
        system = operator.kernel, operator.noise_variance, operator.X, target
        before = memory.kernel, memory.noise_variance, memory.X, memory.target
        is_solution = (memory.step > 0) & is_same(system, before)
        is_solution &= memory.solutions.dtype == operator.dtype
        index = (memory.step - 1) % memory.num_records
        record = jax.tree.map(lambda ring: ring[index], memory.records)
        newest = memory.solutions[0].astype(operator.dtype)
        residual = jnp.full(newest.shape[1], record.probe_residual, newest.dtype)
        return is_solution, solved(newest, residual.at[0].set(record.residual))

    def history(self) -> dict[str, Array]:
        """The records of the steps, oldest first; for concrete states only.

        Returns:
            `residual`, `probe_residual`, `epochs`, `converged` and `standard_error`, each of shape
            (min(steps, num_records),).
        """
        memory = self.memory
        steps, capacity = int(memory.step), memory.num_records
        shift = -(steps % capacity) if steps > capacity else 0
        length = min(steps, capacity)
        return {
            name: jnp.roll(ring, shift)[:length]
            for name, ring in zip(Records._fields, memory.records, strict=True)
        }


def _nonempty(memory: Memory | None) -> Memory:
    if memory is None:
        raise ValueError("the solver state is empty: no `GaussianProcess` was built with it.")
    return memory


def _described(system: tuple[AbstractKernel, Array, Array]) -> str:
    kernel, noise_variance, X = system
    shapes = ", ".join(str(jnp.shape(leaf)) for leaf in jax.tree.leaves(kernel))
    return (
        f"a `{type(kernel).__name__}` (hyperparameters of shape {shapes}), a noise variance of "
        f"shape {noise_variance.shape} and inputs of shape {X.shape}"
    )


class Start(NamedTuple):
    """Initial guesses for a solve, and a solution that may make the solve unnecessary."""

    candidates: Float[Array, "p n k"]  # each column starts at their best linear combination
    is_solution: Bool[Array, ""]  # whether `last` solves this system within the tolerance
    last: Solution


def check_start(start: PathwisePosterior, X: Float[Array, "n d"]) -> None:
    """Raise unless a solve for inputs X can start from this posterior."""
    checks.instance(
        "start", start, PathwisePosterior, "a posterior from an iterative estimator's `condition`"
    )
    if not begins_with(X, start.X):
        raise ValueError(
            f"`start` is a posterior for inputs of shape {start.X.shape}, and the inputs here, of "
            f"shape {X.shape}, do not begin with these rows: append new rows after the rows of "
            "`start`, in the same order, or leave `start` out."
        )


def start_from_posterior(
    posterior: PathwisePosterior,
    operator: KernelOperator,
    target: Float[Array, " n"],
    draws: PriorDraws,
    tolerance: float,
) -> Start:
    """Start from a posterior's solution, with zeros for appended rows.

    The columns of the samples start at zero unless the draws are the same.
    """
    system = operator.kernel, operator.noise_variance, operator.X, target
    old_target = (posterior.y - posterior.mean_function(posterior.X)).astype(operator.dtype)
    before = posterior.kernel, posterior.noise_variance, posterior.X, old_target
    num_new = operator.size - posterior.X.shape[0]
    value = posterior.solution.value
    same_draws = draws.is_same(posterior.draws)
    # The same key gives different draws in another dtype.
    same_draws &= value.dtype == operator.dtype and (num_new == 0 or rows_stay())
    is_solution = is_same(system, before) & same_draws
    is_solution &= jnp.all(draws.origin == posterior.draws.origin)
    # A failed solve is NaN.
    value = jnp.where(jnp.isfinite(value), value, 0.0).astype(operator.dtype)
    value = jnp.pad(value, ((0, num_new), (0, 0)))
    residual = posterior.solution.residual.astype(operator.dtype)
    is_solution &= jnp.maximum(residual[0], jnp.mean(residual[1:])) <= tolerance
    if posterior.num_samples != draws.num_draws:
        shape = operator.size, 1 + draws.num_draws
        value = jnp.zeros(shape, value.dtype).at[:, 0].set(value[:, 0])
        residual = jnp.full(1 + draws.num_draws, jnp.inf, value.dtype)
    candidates = value.at[:, 1:].multiply(same_draws)
    return Start(candidates[None], is_solution, solved(value, residual))
