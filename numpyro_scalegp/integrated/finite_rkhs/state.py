"""The mutable state of a log-determinant, and a record of how well it fits."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import AbstractStateful, Batch
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.mutable_state import if_finite

# Running means are over about 1,000 batches, or over an epoch if that has more.
_WINDOW = 1000


# Batches with a larger `size` are scaled down, so that running means recover sooner.
_LARGEST_SIZE = 100.0


# When to warn that A does not fit F: the error, the standard errors, and the number of batches.
_TOLERANCE, _NUM_STANDARD_ERRORS, _FIRST_CHECK = 0.2, 4.0, 2048


class FitRecord(NamedTuple):
    """Running means that compare each batch with an A from earlier batches."""

    num_batches: Int[Array, ""]
    eigenvalue: Float[Array, ""]  # mean of tr(A^-1 F_batch) / d: 1 if A^-1 has no bias
    square: Float[Array, ""]  # mean of its square
    variance: Float[Array, ""]  # of W F_batch W', summed over entries and divided by d
    size: Float[Array, ""]  # of |W F W'|^2 / d: 1 if A = F

    @classmethod
    def empty(cls, dtype: jnp.dtype) -> "FitRecord":
        """The record before the first batch."""
        zero = jnp.zeros((), dtype)
        return cls(jnp.zeros((), jnp.int32), zero, zero, zero, zero)

    @property
    def spread(self) -> Float[Array, ""]:
        """The mean |F_batch - F|^2 over |F|^2, in the coordinates W: a property of the features.

        It is (d + 1) / b for b Gaussian feature vectors, and up to n / b if a few vectors have most
        of the length. If A is far from F, the directions with large errors dominate both norms, so
        the ratio stays moderate and does not slow the updates of A down.
        """
        return self.variance / jnp.maximum(self.size, jnp.finfo(self.size.dtype).tiny)

    @property
    def standard_error(self) -> Float[Array, ""]:
        """The standard error of `eigenvalue`, from the variance between batches."""
        count = jnp.clip(self.num_batches, 1, 2 * _WINDOW)
        return jnp.sqrt(jnp.maximum(self.square - jnp.square(self.eigenvalue), 0.0) / count)

    def updated(
        self,
        eigenvalue: Float[Array, ""],
        norms: tuple[Float[Array, ""], Float[Array, ""]],
        batches_per_epoch: float,
    ) -> "FitRecord":
        """The record after one more batch and its `norms`; warns if A does not fit F."""
        count = self.num_batches + 1
        weight = jnp.maximum(1.0 / count, 1.0 / max(_WINDOW, batches_per_epoch))
        weight = weight.astype(self.eigenvalue.dtype)
        variance, size = norms
        scale = jnp.minimum(1.0, _LARGEST_SIZE / size)
        entries = (eigenvalue, jnp.square(eigenvalue), scale * variance, scale * size)
        means = [
            (1.0 - weight) * mean + weight * entry
            for mean, entry in zip(self[1:], entries, strict=True)
        ]
        record = FitRecord(count, *means)
        error = jnp.abs(record.eigenvalue - 1.0)
        # At powers of two, so that a fit that stays bad makes only a few calls to the host.
        due = (count >= _FIRST_CHECK) & (count & (count - 1) == 0)
        significant = error > _NUM_STANDARD_ERRORS * record.standard_error
        call_where(due & (error > _TOLERANCE) & significant, _warn, record.eigenvalue)
        return record


class LogDeterminantState(NamedTuple):
    """The contents of a mutable site: the state of a log-determinant and the record of its fit."""

    state: Any
    record: FitRecord
    num_starts: Int[Array, ""]  # 1, or 0 before the first finite batch


def first_state(state: Any, dtype: jnp.dtype) -> LogDeterminantState:
    """A state that was estimated from batches, and an empty record."""
    return LogDeterminantState(state, FitRecord.empty(dtype), jnp.ones((), jnp.int32))


def placeholder(
    logdet: AbstractStateful, num_features: int, dtype: jnp.dtype
) -> LogDeterminantState:
    """A state of the right shapes, to be initialized by the next finite mini-batch."""
    zeros = Batch(jnp.zeros((1, num_features), dtype), jnp.ones((), dtype), 1)
    state = first_state(logdet.start_from_scale(zeros), dtype)
    return state._replace(num_starts=jnp.zeros((), jnp.int32))


def updated_state(
    logdet: AbstractStateful, batch: Batch, site: dict[str, LogDeterminantState]
) -> Any:
    """The state for a mini-batch, from the previous batches; writes the next state to `site`.

    If the batch is not finite, the contents of the site stay, or become a placeholder if empty.
    """
    batch = Batch(*jax.lax.stop_gradient(batch[:2]), batch.num_data)
    state, old, new = _update(logdet, batch, site.get("state"))
    site["state"] = if_finite(new, old)
    return state


@compiled  # `SVI.init` calls it outside of compiled code: one program, not one per operation
def _update(
    logdet: AbstractStateful, batch: Batch, old: Any
) -> tuple[Any, LogDeterminantState, LogDeterminantState]:
    """The state for the batch, the old contents of the site, and the new, finite or not."""
    d = batch.features.shape[1]
    if old is None:
        state = logdet.start(batch.first_gram())
        old = placeholder(logdet, d, batch.features.dtype)
    else:
        select = lambda a, b: jnp.where(old.num_starts > 0, a, b)  # noqa: E731
        state = jax.tree.map(select, old.state, logdet.start_from_scale(batch))
    eigenvalue = logdet.trace(batch, state) / d
    record = old.record.updated(eigenvalue, norms(batch, state.W), batch.scale)
    new_state = logdet.advance(batch, state, old.record.spread)
    return state, old, LogDeterminantState(new_state, record, jnp.ones((), jnp.int32))


def norms(batch: Batch, W: Float[Array, "d d"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The variance of W F_batch W' between batches, summed over entries, and |W F W'|^2, over d.

    The estimates are unbiased: the variance is the sample variance of the rows' outer products, not
    the difference between the batch and I, since A may be far from F. A single row has no sample
    variance; the result then assumes Gaussian features.
    """
    white = batch.whitened(W)
    num, d = white.shape
    batch_square = jnp.sum(jnp.square(batch.whitened_gram(W))) / d
    if num == 1:
        return (d + 1) / (d + 2) * batch_square, batch_square / (d + 2)
    squares = jnp.sum(jnp.square(jnp.sum(jnp.square(white), axis=1)))
    small = white if num <= d else white.T
    square_of_mean = jnp.sum(jnp.square(matmul(small, small.T))) / num
    factor = batch.num_data * batch.scale / ((num - 1) * d)
    variance = factor * jnp.maximum(squares - square_of_mean, 0.0)
    return variance, jnp.maximum(batch_square - variance, 0.0)


def _warn(eigenvalue: ArrayLike) -> None:
    mean = np.asarray(eigenvalue).item()
    warnings.warn(
        f"the matrix A of a `FeatureSpaceGP` does not fit F: the mean eigenvalue of A^-1 F is "
        f"{mean:.2f}, where it must be 1, so the gradient of log|F| is too "
        f"{'large' if mean > 1.0 else 'small'} by that factor. A lags behind hyperparameters that "
        "change, or forgets a few feature vectors that are far longer than the others: use a "
        "smaller learning rate of the optimizer, larger batches, a smaller `step_size` or a larger "
        "`decay`, or features of similar lengths. See `sgp.infer.log_determinant_diagnostics`.",
        RuntimeWarning,
        stacklevel=1,
    )
