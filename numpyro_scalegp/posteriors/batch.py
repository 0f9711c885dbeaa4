"""The posteriors of a batch of collapsed Gaussian processes, or of one with hidden rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Bool, Float

from numpyro_scalegp.core import batches, functions
from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.indicated import Indicated
from numpyro_scalegp.posteriors.function_samples import (
    AbstractFunctionSamples,
    OutputsFunctionSamples,
)
from numpyro_scalegp.posteriors.posterior import AbstractConditioned, AbstractPosterior


class BatchFunctionSamples(OutputsFunctionSamples):
    """Functions of each member of a batch, less its prior mean, with that mean."""

    mean_function: RowsFunction
    is_indicated: bool = eqx.field(static=True)  # whether the members' kernels are `Indicated`

    @property
    def _num_columns(self) -> int | None:
        columns = super()._num_columns
        return columns - 1 if columns and self.is_indicated else columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        seen = Indicated.with_indicator(Xs) if self.is_indicated else Xs
        return self.mean_function(Xs) + super()._values(seen, chunk_size)


class BatchPosterior(AbstractConditioned):
    """The posteriors of a batch of functions, each given data and hyperparameters of its own.

    Moments have shape (*batch, m), samples (num_samples, *batch, m), for new inputs that all share,
    (m, d), or of each member, (*batch, m, d). Each costs what the member's does.

    Made by `GaussianProcess.condition` and `LatentGP.condition`, also for one Gaussian process
    whose `observed` is not known while it is traced; immutable.

    Args:
        members: the posteriors of the functions less their prior means, with the batch's axes in
            front of those of each array.
        X: inputs, shape (n, d) or (*batch, n, d).
        y: observations, shape (*batch, n).
        noise_variance: of the observations, of a shape that broadcasts with (*batch, n), or None.
        mean_function: the prior mean.
        observed: which rows have a target, of a shape that broadcasts with (*batch, n), or None for
            all: then the kernels of the members are `Indicated`.
        batch_shape: the batch's.
    """

    members: AbstractConditioned
    X: Float[Array, "... n d"]
    y: Float[Array, "... n"]
    noise_variance: Float[Array, "..."] | None
    mean_function: RowsFunction
    observed: Bool[Array, "... n"] | None
    batch_shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def _takes_batches(self) -> bool:
        return bool(self.batch_shape)

    def _check(self, Xs: ArrayLike) -> Float[Array, "... m d"]:
        X = super()._check(Xs)
        # What would be another batch raises, by the axes alone.
        batches.shape_of(batches.Batch(self.y, self.y.ndim - 1), batches.Batch(X, X.ndim - 2))
        return X

    def _seen(self, Xs: Float[Array, "... m d"]) -> Float[Array, "... m k"]:
        return Xs if self.observed is None else Indicated.with_indicator(Xs)

    def _each(self, function: Callable[..., Any], *others: batches.Batch) -> Any:
        """What a function gives for the posterior of each member, and a part of the others."""
        members = batches.Batch(self.members, len(self.batch_shape))
        return batches.each(function, members, *others)

    def _rows(self, Xs: Float[Array, "... m d"]) -> batches.Batch:
        """Inputs as the members take them."""
        return batches.Batch(self._seen(Xs), Xs.ndim - 2)

    @compiled
    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        def of_one(member: AbstractPosterior, Xs: Array) -> Array:
            return member._mean(Xs, chunk_size)

        return self.mean_function(Xs) + self._each(of_one, self._rows(Xs))

    @compiled
    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        def of_one(member: AbstractPosterior, Xs: Array) -> Array:
            return member._variance(Xs, chunk_size)

        return self._each(of_one, self._rows(Xs))

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        return self._each(lambda member, Xs: member._covariance(Xs), self._rows(Xs))

    @compiled
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        def of_one(member: AbstractPosterior, Xs: Array, key: Array) -> Array:
            return member.sample(key, Xs, num_samples)

        keys = batches.keys(key, self.batch_shape)
        draws = self._each(of_one, self._rows(Xs), keys)
        return self.mean_function(Xs) + jnp.moveaxis(draws, -2, 0)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> "BatchFunctionSamples":
        def of_one(member: AbstractPosterior, key: Array) -> AbstractFunctionSamples:
            return member._functions(key, num_samples, num_features)

        functions = self._each(of_one, batches.keys(key, self.batch_shape))
        is_indicated = self.observed is not None
        return BatchFunctionSamples(
            functions, len(self.batch_shape), self.mean_function, is_indicated
        )

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "BatchPosterior":
        """The posteriors of a part of each f; see `AbstractPosterior.restrict`."""

        def inside(kernel: Any) -> AbstractKernel:
            return change(kernel) if self.observed is None else Indicated(change(kernel.kernel))

        members = self._each(lambda member: member.restrict(inside))
        zero = functions.constant_function(jnp.zeros((), self.y.dtype))
        return dataclasses.replace(self, members=members, mean_function=zero)

    @property
    def diagnostics(self) -> dict[str, Array]:
        """Those of each member, with the axes of the batch in front."""
        return self._each(lambda member: member.diagnostics)

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given all others of its member, (*batch, n).

        Of a row that is not observed, that given all observations.
        """

        def of_one(member: AbstractConditioned) -> tuple[Array, Array]:
            found = member.leave_one_out()
            return found.loc, found.scale

        loc, scale = self._each(of_one)
        loc = self.mean_function(self.X) + loc
        if self.observed is not None:
            hidden = self.at_data()
            loc = jnp.where(self.observed, loc, hidden.loc)
            scale = jnp.where(self.observed, scale, hidden.scale)
        return dist.Normal(loc, scale)
