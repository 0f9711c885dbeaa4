"""Posteriors of a batch of collapsed Gaussian processes, or of one with unobserved rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float

from numpyro_scalegp.core import batches
from numpyro_scalegp.kernels.indicated import Indicated
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.processes.function_samples import (
    AbstractFunctionSamples,
    BatchFunctionSamples,
    ShiftedFunctionSamples,
)
from numpyro_scalegp.processes.posterior import AbstractConditioned, AbstractPosterior, Inputs
from numpyro_scalegp.programs import functions
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction


class BatchPosterior(AbstractConditioned):
    """The posteriors of a batch of functions, each with separate data and hyperparameters.

    Moments have shape (*batch, m), samples (num_samples, *batch, m). New inputs are the same for
    all members, (m, d), or separate, (*batch, m, d). The cost is the sum over the members.

    Made by `GaussianProcess.condition` and `LatentGP.condition`, also for a single Gaussian process
    whose mask `observed` is traced; immutable.

    Args:
        members: the posteriors of the functions minus their prior means; the batch axes of each
            array come first.
        X: inputs, shape (n, d) or (*batch, n, d).
        y: observations, shape (*batch, n).
        noise_variance: noise variance, of a shape that broadcasts with (*batch, n), or None.
        mean_function: the prior mean.
        observed: mask of the observed rows, of a shape that broadcasts with (*batch, n); None if
            all are observed. With a mask the kernels of the members are `Indicated`.
        batch_shape: shape of the batch.
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

    def _check(self, Xs: Inputs) -> Any:
        X = super()._check(Xs)
        # Raise if the batch axes of the inputs do not broadcast against the posterior's.
        batches.shape_of(batches.Batch(self.y, self.y.ndim - 1), batches.Batch(X, X.ndim - 2))
        return X

    def _kernel_inputs(self, Xs: Float[Array, "... m d"]) -> Float[Array, "... m k"]:
        return Xs if self.observed is None else Indicated.with_indicator(Xs)

    def _each(self, function: Callable[..., Any], *arguments: batches.Batch) -> Any:
        """Apply `function` to the posterior of each member, with its entries of `arguments`."""
        members = batches.Batch(self.members, len(self.batch_shape))
        return batches.each(function, members, *arguments)

    def _rows(self, Xs: Float[Array, "... m d"]) -> batches.Batch:
        """The inputs of each member, in the form that its kernel takes."""
        return batches.Batch(self._kernel_inputs(Xs), Xs.ndim - 2)

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
    ) -> ShiftedFunctionSamples:
        def of_one(member: AbstractPosterior, key: Array) -> AbstractFunctionSamples:
            return member._functions(key, num_samples, num_features)

        functions = self._each(of_one, batches.keys(key, self.batch_shape))
        is_indicated = self.observed is not None
        functions = BatchFunctionSamples(functions, len(self.batch_shape), is_indicated)
        return ShiftedFunctionSamples(functions, self.mean_function)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "BatchPosterior":
        """The posteriors of one component of each f; see `AbstractPosterior.restrict`."""

        def change_inner(kernel: Any) -> AbstractKernel:
            return change(kernel) if self.observed is None else Indicated(change(kernel.kernel))

        members = self._each(lambda member: member.restrict(change_inner))
        zero = functions.constant_function(jnp.zeros((), self.y.dtype))
        return dataclasses.replace(self, members=members, mean_function=zero)

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The diagnostics of each member, with the batch axes in front."""
        return self._each(lambda member: member.diagnostics)

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each y_i given the other observations of its member.

        At an unobserved row it is given all observations. The batch shape is (*batch, n).
        """

        def of_one(member: AbstractConditioned) -> tuple[Array, Array]:
            predictive = member.leave_one_out()
            return predictive.loc, predictive.scale

        loc, scale = self._each(of_one)
        loc = self.mean_function(self.X) + loc
        if self.observed is not None:
            predictive = self.at_data()
            loc = jnp.where(self.observed, loc, predictive.loc)
            scale = jnp.where(self.observed, scale, predictive.scale)
        return dist.Normal(loc, scale)

    @compiled
    def _precision(self) -> Float[Array, "*batch n"]:
        """The diagonal of H^-1 of each member."""
        return self._each(lambda member: member._precision())
