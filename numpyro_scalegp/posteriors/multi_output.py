"""The posterior of several functions that know of each other, at shared inputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core.functions import RowsFunction, constant_rows
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.coregion import long_format
from numpyro_scalegp.posteriors.batch import BatchPosterior
from numpyro_scalegp.posteriors.exact import ExactPosterior
from numpyro_scalegp.posteriors.function_samples import AbstractFunctionSamples
from numpyro_scalegp.posteriors.posterior import AbstractConditioned


class OutputsOfFunctions(eqx.Module):
    """What makes p outputs of functions: the rows these take, and how their values combine.

    Either p independent functions g with f_j = sum_i mixing[j, i] g_i or, without a mixing, one
    function of rows in long format.
    """

    mixing: Float[Array, "p p"] | None
    num_outputs: int = eqx.field(static=True)

    def rows(self, Xs: Float[Array, "m d"]) -> Float[Array, "..."]:
        """Inputs as the functions take them."""
        return long_format(Xs, self.num_outputs) if self.mixing is None else Xs

    def chunk_size(self, chunk_size: int | None) -> int | None:
        """How many of these rows a chunk of rows of Xs is."""
        if chunk_size is None or self.mixing is not None:
            return chunk_size
        return chunk_size * self.num_outputs

    def combined(self, values: Float[Array, "..."], *, power: int = 1) -> Float[Array, "... m p"]:
        """Values of the outputs from those of the functions, or variances with a power of two."""
        if self.mixing is None:
            return values.reshape(*values.shape[:-1], -1, self.num_outputs)
        return matmul(jnp.swapaxes(values, -1, -2), self.mixing.T**power)


class MultiOutputFunctionSamples(AbstractFunctionSamples):
    """Draws of p functions at a time, of shape (num_samples, m, p)."""

    functions: AbstractFunctionSamples
    outputs: OutputsOfFunctions
    mean_function: RowsFunction
    num_columns: int = eqx.field(static=True)

    @property
    def _num_columns(self) -> int:
        return self.num_columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        size = self.outputs.chunk_size(chunk_size)
        values = self.functions._values(self.outputs.rows(Xs), size)
        return self.mean_function(Xs) + self.outputs.combined(values)


class MultiOutputPosterior(AbstractConditioned):
    """The posterior of p functions with the prior covariance k(x, z) B, given rows of outputs.

    Moments have shape (m, p), samples (num_samples, m, p), a noise of predictions () or (p,). Where
    complete rows were observed, p independent functions make the outputs, and m moments cost
    O(p n^2 m); otherwise one function in long format does, with the number of observed entries in
    place of n, and in O(n^2 p^3 m).

    Made by `MultiOutputGP.condition`; immutable.

    Args:
        functions: the posterior of the p functions, or of the one, less the prior means.
        outputs: how these make the outputs.
        X: inputs, shape (n, d).
        y: observations, shape (n, p).
        noise_variance: of the observations, shape (), (p,) or (n, p).
        mean_function: the prior mean, from (n, d) inputs to (n, p) values.
        observed: which entries have a target, shape (n, p), or None for all.
        places: which rows of y, or entries in long format, the functions were given; None for all.
    """

    functions: ExactPosterior | BatchPosterior
    outputs: OutputsOfFunctions
    X: Float[Array, "n d"]
    y: Float[Array, "n p"]
    noise_variance: Float[Array, "..."]
    mean_function: RowsFunction
    observed: Bool[Array, "n p"] | None
    places: Int[Array, " k"] | None

    @property
    def _last_axis(self) -> str:
        return "output"

    def _seen(self, Xs: Float[Array, "m d"]) -> Float[Array, "..."]:
        return self.functions._seen(self.outputs.rows(Xs))

    @compiled
    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        size = self.outputs.chunk_size(chunk_size)
        found = self.functions._mean(self.outputs.rows(Xs), size)
        return self.mean_function(Xs) + self.outputs.combined(found)

    @compiled
    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        size = self.outputs.chunk_size(chunk_size)
        found = self.functions._variance(self.outputs.rows(Xs), size)
        return self.outputs.combined(found, power=2)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        covariance, p = self.functions._covariance(self.outputs.rows(Xs)), self.outputs.num_outputs
        if (M := self.outputs.mixing) is None:
            return covariance.reshape(len(Xs), p, len(Xs), p)
        return jnp.einsum("ji,iab,li->ajbl", M, covariance, M, precision="highest")

    @compiled
    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        draws = self.functions._sample(key, self.outputs.rows(Xs), num_samples)
        return self.mean_function(Xs) + self.outputs.combined(draws)

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> MultiOutputFunctionSamples:
        functions = self.functions._functions(key, num_samples, num_features)
        columns = self.X.shape[1]
        return MultiOutputFunctionSamples(functions, self.outputs, self.mean_function, columns)

    def _noise_or_raise(self) -> Float[Array, "..."]:
        if jnp.ndim(self.noise_variance) < 2:
            return self.noise_variance
        raise ValueError(
            "`noise_variance` must be given: the model has one noise variance for each entry "
            f"(shape {self.noise_variance.shape}) and none for new inputs."
        )

    def restrict(
        self, change: Callable[[AbstractKernel], AbstractKernel]
    ) -> "MultiOutputPosterior":
        """The posterior of a part of each f, by a part of the kernel of the rows."""

        def inside(kernel: Any) -> AbstractKernel:
            if self.outputs.mixing is not None:  # a scaled kernel for each function
                return dataclasses.replace(kernel, kernel=change(kernel.kernel))
            of_rows = dataclasses.replace(kernel.left, kernel=change(kernel.left.kernel))
            return dataclasses.replace(kernel, left=of_rows)

        return dataclasses.replace(
            self,
            functions=self.functions.restrict(inside),
            mean_function=constant_rows(jnp.zeros(self.y.shape[1], self.y.dtype)),
        )

    @property
    def diagnostics(self) -> dict[str, Array]:
        """What the factorizations took; see `ExactPosterior.diagnostics`.

        Of several, the largest ratio of the jitter to the noise.
        """
        found = self.functions.diagnostics
        if self.outputs.mixing is None:
            return found
        return {"jitter_to_noise": jnp.max(found["jitter_to_noise"])}

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each entry given all other entries, shape (n, p).

        Of an entry that is not observed, that given all observations.
        """
        found = self.functions.leave_one_out()
        precision = found.scale**-2
        weights = (self.functions.y - found.loc) * precision  # H^-1 (y - m(X))
        y = self.y.ravel()  # or rows, as the functions were given
        if (mixing := self.outputs.mixing) is not None:
            # With V = D^-1 M for the noise D: H^-1 = sum_i H_i^-1 x v_i v_i'.
            V = mixing / jnp.reshape(self.noise_variance, (-1, 1))
            weights, precision = matmul(weights.T, V.T), matmul(precision.T, V.T**2)
            y = self.y
        shape, places, observed = y.shape, self.places, self.observed
        loc = (y if places is None else y[places]) - weights / precision
        scale = precision**-0.5
        if observed is not None:
            hidden = self.at_data()

            def filled(values: Array, rest: Array) -> Array:
                rest = rest.reshape(shape)
                values = values if places is None else rest.at[places].set(values)
                return jnp.where(observed.reshape(shape), values, rest)

            loc, scale = filled(loc, hidden.loc), filled(scale, hidden.scale)
        return dist.Normal(loc.reshape(self.y.shape), scale.reshape(self.y.shape))
