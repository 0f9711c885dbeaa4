"""What goes from step to step for a log-determinant: a state, and a record of how well it fits."""

import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core.carried import carried
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.estimators.log_determinant import AbstractBound, Batch

# Means are over about so many batches, or those of an epoch, if they are more.
_WINDOW = 1000
# When users are told that A does not fit F: by how much, and in how many standard errors.
_TOLERANCE, _SURE, _FIRST_CHECK = 0.2, 4.0, 2048


class FitRecord(NamedTuple):
    """Running means over batches, each of them judged by an A that has not seen it yet."""

    num_batches: Int[Array, ""]
    eigenvalue: Float[Array, ""]  # of tr(A^-1 F) / d: 1 if A^-1 has no bias
    square: Float[Array, ""]  # of its square
    variance: Float[Array, ""]  # of W F_batch W', summed over entries and divided by d

    @classmethod
    def empty(cls, dtype: jnp.dtype) -> "FitRecord":
        """Before the first batch."""
        zero = jnp.zeros((), dtype)
        return cls(jnp.zeros((), jnp.int32), zero, zero, zero)

    @property
    def spread(self) -> Float[Array, ""]:
        """The variance relative to the squared mean eigenvalue: a property of the rows alone.

        (d + 1) / b for b Gaussian rows, and up to n / b where few rows have most of the length.
        """
        tiny = jnp.finfo(self.variance.dtype).tiny
        return self.variance / jnp.maximum(jnp.square(self.eigenvalue), tiny)

    @property
    def standard_error(self) -> Float[Array, ""]:
        """That of `eigenvalue`, from the spread between batches."""
        count = jnp.clip(self.num_batches, 1, 2 * _WINDOW)
        return jnp.sqrt(jnp.maximum(self.square - jnp.square(self.eigenvalue), 0.0) / count)

    def updated(
        self, eigenvalue: Float[Array, ""], variance: Float[Array, ""], batches_per_epoch: float
    ) -> "FitRecord":
        """The record after one more batch; warns where it shows that A does not fit."""
        count = self.num_batches + 1
        new = jnp.maximum(1.0 / count, 1.0 / max(_WINDOW, batches_per_epoch))
        new = new.astype(self.eigenvalue.dtype)
        said = (eigenvalue, jnp.square(eigenvalue), variance)
        means = [(1.0 - new) * old + new * one for old, one in zip(self[1:], said, strict=True)]
        record = FitRecord(count, *means)
        off = jnp.abs(record.eigenvalue - 1.0)
        # At powers of two: a fit that stays bad calls the host some ten times, not at each step.
        due = (count >= _FIRST_CHECK) & (count & (count - 1) == 0)
        bad = due & (off > _TOLERANCE) & (off > _SURE * record.standard_error)
        jax.lax.cond(bad, lambda: jax.debug.callback(_warn, bad, record.eigenvalue), lambda: None)
        return record


class Learned(NamedTuple):
    """What goes from step to step: the state of a treatment, and the record of its fit."""

    state: Any
    record: FitRecord
    num_starts: Int[Array, ""]  # 1, or 0 before the first finite batch


def started(state: Any, dtype: jnp.dtype) -> Learned:
    """A state that knows something of F, and an empty record."""
    return Learned(state, FitRecord.empty(dtype), jnp.ones((), jnp.int32))


def learned(logdet: AbstractBound, batch: Batch, site: dict[str, Learned]) -> Any:
    """The state for a batch, which comes from those before it; the next one's goes into `site`.

    A batch that is not finite leaves what the site holds. If there was none before it, that is a
    placeholder, for which the next finite batch is the first.
    """
    batch = Batch(*jax.lax.stop_gradient(batch[:2]), batch.num_data)
    state, held, new = _learn(logdet, batch, site.get("learned"))
    site["learned"] = carried(new, held)
    return state


@eqx.filter_jit  # without a step around it, as in `SVI.init`, one program in the place of a hundred
def _learn(logdet: AbstractBound, batch: Batch, held: Any) -> tuple[Any, Learned, Learned]:
    """The state for the batch, what was held, and what is to be held, finite or not."""
    dtype = batch.features.dtype
    if batch.is_full or held is None:
        state = logdet.start(batch.first_gram())
    else:
        keep = lambda old, new: jnp.where(held.num_starts > 0, old, new)  # noqa: E731
        state = jax.tree.map(keep, held.state, logdet.start_from_scale(batch))
    if held is None:
        nothing = Batch(jnp.zeros_like(batch.features), jnp.ones((), dtype), batch.num_data)
        held = started(logdet.start_from_scale(nothing), dtype)
        held = held._replace(num_starts=jnp.zeros((), jnp.int32))
    if batch.is_full:
        return state, held, Learned(state, held.record, jnp.ones((), jnp.int32))
    variance = outer_product_variance(batch.whitened(state.W), batch.num_data)
    eigenvalue = logdet.trace(batch, state) / batch.features.shape[1]
    record = held.record.updated(eigenvalue, variance, batch.scale)
    after = logdet.advance(batch, state, held.record.spread)
    return state, held, Learned(after, record, jnp.ones((), jnp.int32))


def outer_product_variance(white: Float[Array, "b d"], num_data: int) -> Float[Array, ""]:
    """The variance of (n / b) sum_i x_i x_i' between batches of rows x_i, entries summed, over d.

    As the sample variance of the rows' outer products, without bias, and not the batch's own
    difference from its expectation: so it does not depend on how far A is from F. A single row has
    no sample variance: there its square is taken.
    """
    num, d = white.shape
    lengths = jnp.sum(jnp.square(white), axis=1)
    squares = jnp.sum(jnp.square(lengths))
    if num > 1:
        small = white if num <= d else white.T
        of_mean = jnp.sum(jnp.square(matmul(small, small.T))) / num
        squares = jnp.maximum(squares - of_mean, 0.0) / (num - 1)
    return num_data**2 / (num * d) * squares


def _warn(bad: ArrayLike, eigenvalue: ArrayLike) -> None:
    if not bad:  # under `jax.vmap` both branches of a condition run
        return
    high = float(eigenvalue) > 1.0
    warnings.warn(
        f"the matrix A of a `FeatureSpaceGP` does not fit F: the mean eigenvalue of A^-1 F is "
        f"{float(eigenvalue):.2f}, where it must be 1, so the gradient of log|F| is too "
        f"{'large' if high else 'small'} by that factor. A lags behind hyperparameters that move, "
        "or forgets rows that are far longer than others: lower the optimizer's learning rate, "
        "take larger batches, a smaller `step_size` or a larger `decay`, or features of similar "
        "lengths. See `sgp.infer.log_determinant_diagnostics`.",
        RuntimeWarning,
        stacklevel=1,
    )
