"""The mutable state of a log-determinant, and a record of how well it fits."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.mutable_state import if_finite
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.log_determinants.log_determinant import AbstractStateful, Batch

# Running means are over about 1,000 batches, or those of an epoch, if they are more.
_WINDOW = 1000


# A batch for which A is this far off has less weight, or running means would be off for too long.
_LARGEST_SIZE = 100.0


# When to warn that A does not fit F: by how much, and by how many standard errors.
_TOLERANCE, _SURE, _FIRST_CHECK = 0.2, 4.0, 2048


class FitRecord(NamedTuple):
    """Running means over batches, each of them compared with an A from earlier batches."""

    num_batches: Int[Array, ""]
    eigenvalue: Float[Array, ""]  # of tr(A^-1 F) / d: 1 if A^-1 has no bias
    square: Float[Array, ""]  # of its square
    variance: Float[Array, ""]  # of W F_batch W', summed over entries and divided by d
    size: Float[Array, ""]  # of |W F W'|^2 / d: 1 where A = F

    @classmethod
    def empty(cls, dtype: jnp.dtype) -> "FitRecord":
        """Before the first batch."""
        zero = jnp.zeros((), dtype)
        return cls(jnp.zeros((), jnp.int32), zero, zero, zero, zero)

    @property
    def spread(self) -> Float[Array, ""]:
        """|F_batch - F|^2 over |F|^2 in the mean, in the coordinates W: a property of the rows.

        (d + 1) / b for b Gaussian rows, and up to n / b where few rows have most of the length.
        Where A is far from F, both norms are those of the directions that are off, so their ratio
        stays moderate, and A free to move.
        """
        return self.variance / jnp.maximum(self.size, jnp.finfo(self.size.dtype).tiny)

    @property
    def standard_error(self) -> Float[Array, ""]:
        """That of `eigenvalue`, from the spread between batches."""
        count = jnp.clip(self.num_batches, 1, 2 * _WINDOW)
        return jnp.sqrt(jnp.maximum(self.square - jnp.square(self.eigenvalue), 0.0) / count)

    def updated(
        self,
        eigenvalue: Float[Array, ""],
        norms: tuple[Float[Array, ""], Float[Array, ""]],
        batches_per_epoch: float,
    ) -> "FitRecord":
        """The record after one more batch and its `norms`; warns where A does not fit."""
        count = self.num_batches + 1
        new = jnp.maximum(1.0 / count, 1.0 / max(_WINDOW, batches_per_epoch))
        new = new.astype(self.eigenvalue.dtype)
        variance, size = norms
        less = jnp.minimum(1.0, _LARGEST_SIZE / size)
        found = (eigenvalue, jnp.square(eigenvalue), less * variance, less * size)
        means = [(1.0 - new) * old + new * one for old, one in zip(self[1:], found, strict=True)]
        record = FitRecord(count, *means)
        off = jnp.abs(record.eigenvalue - 1.0)
        # At powers of two: a fit that stays bad calls the host some ten times, not at each step.
        due = (count >= _FIRST_CHECK) & (count & (count - 1) == 0)
        bad = due & (off > _TOLERANCE) & (off > _SURE * record.standard_error)
        call_where(bad, _warn, record.eigenvalue)
        return record


class LogDeterminantState(NamedTuple):
    """What a mutable site holds: the state of a log-determinant, and the record of its fit."""

    state: Any
    record: FitRecord
    num_starts: Int[Array, ""]  # 1, or 0 before the first finite batch


def first_state(state: Any, dtype: jnp.dtype) -> LogDeterminantState:
    """A state that was estimated from batches, and an empty record."""
    return LogDeterminantState(state, FitRecord.empty(dtype), jnp.ones((), jnp.int32))


def placeholder(
    logdet: AbstractStateful, num_features: int, dtype: jnp.dtype
) -> LogDeterminantState:
    """A placeholder, for which the next finite mini-batch is the first."""
    nothing = Batch(jnp.zeros((1, num_features), dtype), jnp.ones((), dtype), 1)
    held = first_state(logdet.start_from_scale(nothing), dtype)
    return held._replace(num_starts=jnp.zeros((), jnp.int32))


def updated_state(
    logdet: AbstractStateful, batch: Batch, site: dict[str, LogDeterminantState]
) -> Any:
    """The state for a mini-batch, from those before it; the next one's goes into `site`.

    A batch that is not finite leaves what the site holds, or a placeholder if that is nothing.
    """
    batch = Batch(*jax.lax.stop_gradient(batch[:2]), batch.num_data)
    state, held, new = _update(logdet, batch, site.get("state"))
    site["state"] = if_finite(new, held)
    return state


@compiled  # without a step around it, as in `SVI.init`, one program in the place of a hundred
def _update(
    logdet: AbstractStateful, batch: Batch, held: Any
) -> tuple[Any, LogDeterminantState, LogDeterminantState]:
    """The state for the batch, what was held, and what is to be held, finite or not."""
    d = batch.features.shape[1]
    if held is None:
        state = logdet.start(batch.first_gram())
        held = placeholder(logdet, d, batch.features.dtype)
    else:
        keep = lambda old, new: jnp.where(held.num_starts > 0, old, new)  # noqa: E731
        state = jax.tree.map(keep, held.state, logdet.start_from_scale(batch))
    eigenvalue = logdet.trace(batch, state) / d
    record = held.record.updated(eigenvalue, norms(batch, state.W), batch.scale)
    after = logdet.advance(batch, state, held.record.spread)
    return state, held, LogDeterminantState(after, record, jnp.ones((), jnp.int32))


def norms(batch: Batch, W: Float[Array, "d d"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The variance of W F_batch W' between batches, entries summed, and |W F W'|^2, both over d.

    Without bias: the first is the sample variance of the rows' outer products, and not the batch's
    own difference from I, since A may be far from F. Of a single row there is none: Gaussian ones
    are assumed.
    """
    white = batch.whitened(W)
    num, d = white.shape
    second = jnp.sum(jnp.square(batch.whitened_gram(W))) / d
    if num == 1:
        return (d + 1) / (d + 2) * second, second / (d + 2)
    squares = jnp.sum(jnp.square(jnp.sum(jnp.square(white), axis=1)))
    small = white if num <= d else white.T
    of_mean = jnp.sum(jnp.square(matmul(small, small.T))) / num
    factor = batch.num_data * batch.scale / ((num - 1) * d)
    variance = factor * jnp.maximum(squares - of_mean, 0.0)
    return variance, jnp.maximum(second - variance, 0.0)


def _warn(eigenvalue: ArrayLike) -> None:
    found = np.asarray(eigenvalue).item()
    warnings.warn(
        f"the matrix A of a `FeatureSpaceGP` does not fit F: the mean eigenvalue of A^-1 F is "
        f"{found:.2f}, where it must be 1, so the gradient of log|F| is too "
        f"{'large' if found > 1.0 else 'small'} by that factor. A lags behind hyperparameters that "
        "move, or forgets rows that are far longer than others: lower the optimizer's learning "
        "rate, take larger batches, a smaller `step_size` or a larger `decay`, or features of "
        "similar lengths. See `sgp.infer.log_determinant_diagnostics`.",
        RuntimeWarning,
        stacklevel=1,
    )
