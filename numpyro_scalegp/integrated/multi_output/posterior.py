"""The posterior of several correlated functions at shared inputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.kernels.coregion import long_format
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.batch import BatchPosterior
from numpyro_scalegp.processes.exact import ExactPosterior
from numpyro_scalegp.processes.function_samples import AbstractFunctionSamples
from numpyro_scalegp.processes.posterior import AbstractConditioned
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.functions import RowsFunction, constant_rows


class OutputsOfFunctions(eqx.Module):
    """Maps inputs of p outputs to inputs of latent functions, and values back to the outputs.

    The latent functions are either p independent functions g with f_j = sum_i mixing[j, i] g_i or,
    without a mixing, one function of inputs in long format.
    """

    mixing: Float[Array, "p p"] | None
    num_outputs: int = eqx.field(static=True)

    def rows(self, Xs: Float[Array, "m d"]) -> Float[Array, "..."]:
        """The inputs of the latent functions."""
        return long_format(Xs, self.num_outputs) if self.mixing is None else Xs

    def chunk_size(self, chunk_size: int | None) -> int | None:
        """The chunk size for the inputs of the latent functions."""
        if chunk_size is None or self.mixing is not None:
            return chunk_size
        return chunk_size * self.num_outputs

    def combined(self, values: Float[Array, "..."], *, power: int = 1) -> Float[Array, "... m p"]:
        """Values of the outputs from values of the latent functions; `power=2` for variances."""
        if self.mixing is None:
            return values.reshape(*values.shape[:-1], -1, self.num_outputs)
        return matmul(jnp.swapaxes(values, -1, -2), self.mixing.T**power)


class MultiOutputFunctionSamples(AbstractFunctionSamples):
    """Joint draws of p functions, with values of shape (num_samples, m, p)."""

    functions: AbstractFunctionSamples
    outputs: OutputsOfFunctions
    mean_function: RowsFunction
    num_columns: int = eqx.field(static=True)

    @property
    def _row_axis(self) -> int:
        return -2

    @property
    def _num_columns(self) -> int:
        return self.num_columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        size = self.outputs.chunk_size(chunk_size)
        values = self.functions._values(self.outputs.rows(Xs), size)
        return self.mean_function(Xs) + self.outputs.combined(values)


class MultiOutputPosterior(AbstractConditioned):
    """The posterior of p functions with the prior covariance k(x, z) B, given observed outputs.

    Moments have shape (m, p), samples (num_samples, m, p), the noise of predictions () or (p,).
    If every row is complete or missing, the outputs are combinations of p independent latent
    functions, and moments at m inputs cost O(p n^2 m). Otherwise there is one latent function of
    inputs in long format (a row for each input and output), and moments cost O(n^2 p^3 m).

    Made by `MultiOutputGP.condition`; immutable.

    Args:
        functions: the posterior of the latent functions, without the prior means.
        outputs: the map from latent functions to outputs.
        X: inputs, shape (n, d).
        y: observations, shape (n, p).
        noise_variance: of the observations, shape (), (p,) or (n, p).
        mean_function: the prior mean, from (n, d) inputs to (n, p) values.
        observed: mask of the observed entries, shape (n, p); None if all are observed.
        places: indices of the rows of y, or of the entries in long format, that the latent
            functions are conditioned on; None for all.
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
    def _row_axis(self) -> int:
        return -2

    @property
    def _last_axis(self) -> str:
        return "output"

    def _kernel_inputs(self, Xs: Float[Array, "m d"]) -> Float[Array, "..."]:
        return self.functions._kernel_inputs(self.outputs.rows(Xs))

    @compiled
    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        size = self.outputs.chunk_size(chunk_size)
        mean = self.functions._mean(self.outputs.rows(Xs), size)
        return self.mean_function(Xs) + self.outputs.combined(mean)

    @compiled
    def _variance(self, Xs: Array, chunk_size: int | None) -> Array:
        size = self.outputs.chunk_size(chunk_size)
        variance = self.functions._variance(self.outputs.rows(Xs), size)
        return self.outputs.combined(variance, power=2)

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
        """The posterior of one component of each f, whose kernel is `change(kernel)`."""

        def change_inner(kernel: Any) -> AbstractKernel:
            if self.outputs.mixing is not None:  # a scaled kernel for each function
                return dataclasses.replace(kernel, kernel=change(kernel.kernel))
            left = dataclasses.replace(kernel.left, kernel=change(kernel.left.kernel))
            return dataclasses.replace(kernel, left=left)

        return dataclasses.replace(
            self,
            functions=self.functions.restrict(change_inner),
            mean_function=constant_rows(jnp.zeros(self.y.shape[1], self.y.dtype)),
        )

    @property
    def diagnostics(self) -> dict[str, Array]:
        """The diagnostics of the factorizations, see `ExactPosterior.diagnostics`.

        For several factorizations, the largest ratio of jitter to noise.
        """
        diagnostics = self.functions.diagnostics
        if self.outputs.mixing is None:
            return diagnostics
        return {"jitter_to_noise": jnp.max(diagnostics["jitter_to_noise"])}

    def leave_one_out(self) -> dist.Normal:
        """The predictive distribution of each entry given all other entries, shape (n, p).

        For an entry without a target, the predictive distribution given all observations.
        """
        latent = self.functions.leave_one_out()
        precision = latent.scale**-2
        weights = (self.functions.y - latent.loc) * precision  # H^-1 (y - m(X))
        y = self.y.ravel()
        if (mixing := self.outputs.mixing) is not None:
            # With V = D^-1 M for the noise D: H^-1 = sum_i H_i^-1 x v_i v_i'.
            V = mixing / jnp.reshape(self.noise_variance, (-1, 1))
            weights, precision = matmul(weights.T, V.T), matmul(precision.T, V.T**2)
            y = self.y
        shape, places, observed = y.shape, self.places, self.observed
        loc = (y if places is None else y[places]) - weights / precision
        scale = precision**-0.5
        if observed is not None:
            at_data = self.at_data()

            def filled(values: Array, defaults: Array) -> Array:
                defaults = defaults.reshape(shape)
                values = values if places is None else defaults.at[places].set(values)
                return jnp.where(observed.reshape(shape), values, defaults)

            loc, scale = filled(loc, at_data.loc), filled(scale, at_data.scale)
        return dist.Normal(loc.reshape(self.y.shape), scale.reshape(self.y.shape))
