"""What an iterative estimator keeps from one step of an optimizer to the next."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, UInt

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.comparison import begins_with, is_of_kind, is_same
from numpyro_scalegp.core.mesh import divided
from numpyro_scalegp.core.mutable_state import refuse_batches
from numpyro_scalegp.features.prior_draws import rows_stay
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.pathwise import PathwisePosterior
from numpyro_scalegp.solvers import KernelOperator, Solution
from numpyro_scalegp.solvers.solver import solved


class Records(NamedTuple):
    """What each step took; a ring of the last `num_records` steps."""

    residual: Float[Array, " records"]  # of the data's column, relative
    probe_residual: Float[Array, " records"]  # mean over the probes' columns
    epochs: Float[Array, " records"]
    converged: Bool[Array, " records"]
    standard_error: Float[Array, " records"]  # of the value of log p(y)


class Memory(NamedTuple):
    """The leaves of a state: arrays alone, so that any way to save a pytree saves them."""

    solutions: Float[Array, "p n k"]  # the newest first; the data's column, then the probes'
    target: Float[Array, " n"]  # the right-hand side of the newest's first column
    kernel: AbstractKernel  # the hyperparameters that the newest belongs to
    noise_variance: Float[Array, "..."]
    X: Float[Array, "n d"]  # its inputs
    estimator: UInt[Array, ""]  # a fingerprint of what else the probes' columns depend on
    seed: UInt[Array, " 2"]  # of the probes
    step: Int[Array, ""]
    records: Records

    @property
    def num_records(self) -> int:
        """The number of steps that there is room for in the records."""
        return self.records.epochs.size

    def key(self) -> Key[Array, ""]:
        """The key of the probes."""
        return jax.random.wrap_key_data(self.seed, impl="threefry2x32")


@jax.tree_util.register_pytree_with_keys_class
class SolverState:
    """The solutions, the probes' seed and the records of an iterative estimator.

    A `GaussianProcess` with `state=name` makes one, as the NumPyro mutable site of that name. It is
    written to where `log_prob` runs and read where the next step begins: all that a step reads is
    what it was given, and what it wrote is what the object flattens to. So a model can be traced
    any number of times with one and the same state.

    The object, and not what it flattens to, also has the last posterior that was conditioned with
    it: there the next one starts, and the memory of the training stays what it is.

    Args:
        memory: what the state holds; None until an estimator gives it its shape.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self.begin = memory
        self._written: Memory | None = None
        self.posterior: PathwisePosterior | None = None

    @property
    def _newest(self) -> Memory | None:
        return self.begin if self._written is None else self._written

    @property
    def num_rows(self) -> int | None:
        """The number of rows that the state holds solutions for; None while it is empty."""
        return None if self._newest is None else self._newest.X.shape[0]

    @property
    def memory(self) -> Memory:
        """What the last step wrote, or else what the state was given.

        Raises:
            ValueError: if the state is empty.
        """
        return _present(self._newest)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flatten to what the last step wrote."""
        return ((jax.tree_util.GetAttrKey("memory"), self._newest),), None

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "SolverState":
        """The inverse of flattening."""
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
        """Give an empty state its shape: zeros, no records, and a seed for the probes.

        Args:
            operator: the first step's system.
            key: a typed JAX key for the probes.
            num_columns: number of right-hand sides of a step.
            num_solutions: number of the last solutions that are kept.
            num_records: number of the last steps whose records are kept.

        Raises:
            ValueError: if the state is empty and there is no key.
        """
        if self.begin is not None:
            return
        if key is None:
            raise ValueError(
                "a new solver state needs a `key` for its probes: pass `key=` to the "
                "`GaussianProcess`, or run the model under `numpyro.handlers.seed`. To go on from "
                "a state that you have, run it under `numpyro.handlers.substitute`, with "
                "data={name: state}."
            )
        n, dtype = operator.size, operator.dtype
        nothing = jnp.full(num_records, jnp.nan, dtype)
        records = Records(nothing, nothing, nothing, jnp.zeros(num_records, bool), nothing)
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
        """The state for the same data with new rows after them.

        The solutions start at zero for the new rows; hyperparameters, probes and records stay.

        Args:
            X: all inputs, shape (n, d): those of the state, in their order, and the new ones.

        Returns:
            A new state; this one stays what it is.

        Raises:
            ValueError: if the state is empty, or X does not begin with its rows.
        """
        memory, rows = self.memory, checks.inputs("X", X)
        if not begins_with(rows, memory.X):
            raise ValueError(
                f"the solver state holds a solution for inputs of shape {memory.X.shape}, and `X`, "
                f"of shape {rows.shape}, does not begin with these rows: append new rows after "
                "those of the state, in their order, or begin with a new state."
            )
        before, num_new = memory.X.shape[0], rows.shape[0] - memory.X.shape[0]
        noise = memory.noise_variance
        if noise.ndim:
            noise = jnp.concatenate([noise, jnp.broadcast_to(noise[-1], (num_new,))])
        solutions = jnp.pad(memory.solutions, ((0, 0), (0, num_new), (0, 0)))
        if num_new and not rows_stay():
            solutions = solutions.at[:, :, 1:].set(0.0)
        # No observation is infinite: nobody takes the solution for that of all rows.
        target = jnp.pad(memory.target, (0, num_new), constant_values=jnp.inf)
        rows = rows.astype(memory.X.dtype).at[:before].set(memory.X)
        return SolverState(
            memory._replace(solutions=solutions, target=target, noise_variance=noise, X=rows)
        )

    def keep(self, posterior: PathwisePosterior) -> None:
        """Keep a posterior for the next one to start from, unless it is being traced."""
        if checks.is_concrete(posterior):
            self.posterior = posterior

    def read(self, shape: tuple[int, int], *, last: bool = False) -> Memory:
        """What the step starts from or, if `last`, what the last step wrote.

        Raises:
            ValueError: if the state belongs to data or probes of another shape.
        """
        memory = _present(self._newest if last else self.begin)
        if memory.solutions.shape[1:] != shape:
            raise ValueError(
                f"the solver state holds a solution of shape {memory.solutions.shape[1:]}, but the "
                f"data and the estimator ask for {shape} (rows, 1 + num_probes): a state serves "
                "one data set and one estimator. For rows appended to the data, take "
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
        """Keep a step's solution, unless it has an entry that is not finite, and its record.

        Args:
            operator: the system that was solved.
            estimator: the fingerprint of what else the probes' columns depend on.
            solution: shape (n, k).
            target: the right-hand side of its first column, shape (n,).
            record: what the step took, each of shape ().
            key: the step's key if it had one, as another sign of whether the step is batched.

        Raises:
            ValueError: if the step runs under `jax.vmap`, as with `num_particles > 1`, or the state
                was made with another kind of kernel.
        """
        begin = _present(self.begin)
        system = operator.kernel, operator.noise_variance, operator.X
        before = begin.kernel, begin.noise_variance, begin.X
        if not is_of_kind(system, before):
            raise ValueError(
                f"the solver state was made with {_described(before)}, and is used with "
                f"{_described(system)}: a state serves one model. Give this one a state of its own."
            )
        system = jax.tree.unflatten(jax.tree.structure(before), jax.tree.leaves(system))
        finite = jnp.all(jnp.isfinite(solution))
        solutions = jnp.concatenate([solution[None], begin.solutions[:-1]])
        solutions = divided(solutions, operator.mesh, axis=1)
        new = (solutions, target, *system, estimator)
        old = (begin.solutions, begin.target, *before, begin.estimator)
        kept: Any = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        place = begin.step % begin.num_records
        # What is not finite counts as infinite, so that no NaN is ever kept.
        records = Records(
            *(
                ring.at[place].set(
                    jnp.where(jnp.isfinite(entry), entry, jnp.inf).astype(ring.dtype)
                )
                for ring, entry in zip(begin.records, record, strict=True)
            )
        )
        names = "solutions", "target", "kernel", "noise_variance", "X", "estimator"
        memory = begin._replace(
            **dict(zip(names, kept, strict=True)), step=begin.step + 1, records=records
        )
        self._written, _ = refuse_batches(jax.lax.stop_gradient((memory, key)))
        self.posterior = None

    def last(
        self, operator: KernelOperator, target: Float[Array, " n"]
    ) -> tuple[Bool[Array, ""], Solution]:
        """The last solution, and whether its first column is the one for this system."""
        memory = self.memory
        system = operator.kernel, operator.noise_variance, operator.X, target
        before = memory.kernel, memory.noise_variance, memory.X, memory.target
        same = (memory.step > 0) & is_same(system, before)
        same &= memory.solutions.dtype == operator.dtype
        place = (memory.step - 1) % memory.num_records
        record = jax.tree.map(lambda ring: ring[place], memory.records)
        newest = memory.solutions[0].astype(operator.dtype)
        residual = jnp.full(newest.shape[1], record.probe_residual, newest.dtype)
        return same, solved(newest, residual.at[0].set(record.residual))

    def history(self) -> dict[str, Array]:
        """The records of the steps made, oldest first; concrete states only.

        Returns:
            `residual`, `probe_residual`, `epochs`, `converged` and `standard_error`, each of shape
            (min(steps, num_records),).
        """
        memory = self.memory
        steps, room = int(memory.step), memory.num_records
        shift = -(steps % room) if steps > room else 0
        kept = min(steps, room)
        return {
            name: jnp.roll(ring, shift)[:kept]
            for name, ring in zip(Records._fields, memory.records, strict=True)
        }


def _present(memory: Memory | None) -> Memory:
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
