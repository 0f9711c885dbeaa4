"""Gaussian processes whose mean and covariance are expansions in kernel functions."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core import batches
from numpyro_scalegp.core.chunks import map_rows
from numpyro_scalegp.core.mesh import divided, mesh_of
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.rounding import at_least
from numpyro_scalegp.numerics.summation import pairwise_product
from numpyro_scalegp.processes.function_samples import (
    AbstractFunctionSamples,
    BatchFunctionSamples,
    KernelFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.processes.variational import AbstractVariationalPosterior
from numpyro_scalegp.processes.whitening import Whitening, whitened_moments
from numpyro_scalegp.programs.compiled import compiled


class KernelFunctions(NamedTuple):
    """The function k(., R) a, or several functions with the same points R."""

    points: Float[Array, "R d"]
    weights: Float[Array, "*batch R"]

    def evaluate(
        self,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        *,
        chunk_size: int | None = None,
    ) -> Float[Array, "*batch n"]:
        """K(X, R) a, in O(n R d).

        Args:
            kernel: covariance function.
            X: inputs, shape (n, d).
            chunk_size: rows evaluated at a time; None for all.
        """
        functions = self.weights.reshape(-1, self.weights.shape[-1]).T

        def evaluate(rows: Array) -> Array:
            return matmul(divided(kernel.evaluate(rows, self.points), mesh_of(rows)), functions)

        values = evaluate(X) if chunk_size is None else map_rows(evaluate, X, chunk_size)
        return values.T.reshape(*self.weights.shape[:-1], X.shape[0])


class WhitenedNormal(eqx.Module):
    """The distribution q(v) = N(loc, S S') of whitened values with the prior N(0, I)."""

    loc: Float[Array, "*batch M"]
    scale_tril: Float[Array, "*batch M M"]  # S

    def moments(
        self,
        whitening: Whitening,
        across: Float[Array, "M n"],
        diagonal: Float[Array, " n"],
    ) -> tuple[Float[Array, " n"], ...]:
        """The mean of f and both parts of its variance; see `whitened_moments`."""
        return whitened_moments(whitening, across, diagonal, self.loc, self.scale_tril)

    def to_draw(self) -> "WhitenedNormal":
        """The distribution to make joint draws from."""
        return self


class ExpansionPosterior(AbstractVariationalPosterior):
    """A Gaussian process whose mean and covariance are expansions in kernel functions.

    Let o = P'f(Z) + e have the prior covariance L L'. Then v = L^-1 o has the prior N(0, I), and
    the variational distribution N(loc, S S'). With A = L^-1 P'k(Z, x) and further kernel functions
    k(x, R) a in the mean: mean A'loc + k(x, R) a, covariance k(x, z) - A'A + A'S S'A.

    - `SparseGP`: o are inducing values, P = I, and e is jitter.
    - `HybridGP`: as `SparseGP`, with residual points R.
    - `DecoupledGP`: P is the scale of its precision, e ~ N(0, I) and v = 0. Its mean is k(x, R) a.

    The functions of a batch share the kernel and the points, or have separate ones. Construction
    costs O(M^3) for M points. The mean at m inputs costs O(m d (M + R)), and the variance O(m M^2),
    in chunks of rows; joint samples cost O(m^3) on top.

    References:
        Hensman, Matthews and Ghahramani (2015), Scalable Variational Gaussian Process
        Classification, eq. 9, in whitened form; Cheng and Boots (2017), Variational Inference for
        Gaussian Process Models with Linear Complexity, eq. 8 and appendix A.3.
    """

    kernel: AbstractKernel
    points: Float[Array, "... M d"]  # Z
    whitening: Whitening  # of o
    values: WhitenedNormal | None = None  # q(v); None for v = 0
    representer_weights: Float[Array, "*batch M"] | None = None  # L^-T loc
    projection: Float[Array, "*batch M M"] | None = None  # P, with e ~ N(0, I); None for P = I
    further: KernelFunctions | None = None  # R and a
    noise_variance: Float[Array, "..."] | None = None
    component_kernel: AbstractKernel | None = None  # covariance of a component with f

    @classmethod
    def of_inducing_values(
        cls,
        kernel: AbstractKernel,
        points: Float[Array, "... M d"],
        values: WhitenedNormal,
        *,
        jitter: float | None = None,
        further: KernelFunctions | None = None,
        whitening: Whitening | None = None,
    ) -> "ExpansionPosterior":
        """Factorize K(Z, Z) and compute the representer weights, in O(M^3).

        Args:
            kernel: covariance function.
            points: Z, shape (M, d), or (*batch, M, d).
            values: q(v).
            jitter: added to the diagonal of K(Z, Z), relative to its mean; None for 100 `eps`.
            further: kernel functions in the mean besides k(., Z).
            whitening: `inducing_whitening(kernel, points, jitter)`, if it has been computed; its
                jitter may count what other factorizations added; moments and draws warn of it.
        """
        if whitening is None:
            whitening = inducing_whitening(kernel, points, jitter)
        whitening = whitening._replace(factor=None)  # of which it makes no use
        inverse = batches.Batch(whitening.inverse, whitening.inverse.ndim - 2)
        weights = _representer_weights(inverse, values.loc)
        return cls(kernel, points, whitening, values, weights, further=further)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "ExpansionPosterior":
        """The posterior of one component of f; see `AbstractPosterior.restrict`."""
        return dataclasses.replace(self, component_kernel=change(self._target_kernel))

    @property
    def _target_kernel(self) -> AbstractKernel:
        return self.kernel if self.component_kernel is None else self.component_kernel

    @property
    def _num_columns(self) -> int:
        return self.points.shape[-1]

    @property
    def _row_width(self) -> int:
        return sum(points.shape[-2] for points in self._all_points)

    @property
    def _all_points(self) -> list[Float[Array, "... k d"]]:
        return [self.points] if self.further is None else [self.points, self.further.points]

    @property
    def _expansions(self) -> list[KernelFunctions]:
        """The kernel functions whose sum is the mean."""
        weights = self.representer_weights
        expansions = [] if weights is None else [KernelFunctions(self.points, weights)]
        return expansions if self.further is None else [*expansions, self.further]

    @property
    def _added_jitter(self) -> Float[Array, "..."]:
        return self.whitening.jitter

    def _weights(self) -> tuple[Any, ...]:
        further = None if self.further is None else self.further.weights
        parts = self.representer_weights, further, self.values, self.projection
        return tuple(jax.tree.leaves(parts))

    def _members(self) -> batches.Batch:
        _, leading = super()._members()
        axes, jitter_axes = self.whitening.inverse.ndim - 2, self.whitening.jitter.ndim
        shared: list[Any] = [
            self.kernel.as_batch().leading,
            self.points.ndim - 2,
            Whitening(axes, axes, jitter_axes),  # type: ignore[arg-type]
        ]
        leading = eqx.tree_at(lambda p: [p.kernel, p.points, p.whitening], leading, shared)
        if (component := self.component_kernel) is not None:
            leading = eqx.tree_at(
                lambda p: p.component_kernel, leading, component.as_batch().leading
            )
        return batches.Batch(self, leading)

    def _projected(self, at_points: Float[Array, "M n"]) -> Float[Array, "M n"]:
        """P'F for values or covariances F at the points."""
        return at_points if self.projection is None else matmul(self.projection.T, at_points)

    def _with_further(
        self, mean: Float[Array, " n"] | None, X: Float[Array, "n d"]
    ) -> Float[Array, " n"]:
        """Add the further kernel functions to a mean at the rows of X."""
        further = None if self.further is None else self.further.evaluate(self._target_kernel, X)
        return functools.reduce(jnp.add, [term for term in (mean, further) if term is not None])

    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        across = divided(self._target_kernel.evaluate(self.points, X), mesh_of(X), axis=1)
        across, diagonal = self._projected(across), self._target_kernel.evaluate_diag(X)
        if self.values is None:
            reduction = jnp.sum(jnp.square(matmul(self.whitening.inverse, across)), axis=0)
            return self._with_further(None, X), at_least(diagonal - reduction, 0.0)
        mean, *variances = self.values.moments(self.whitening, across, diagonal)
        return self._with_further(mean, X), *variances

    def _joint(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        """The mean and the covariance of f at the rows of X."""
        A = matmul(
            self.whitening.inverse, self._projected(self._target_kernel.evaluate(self.points, X))
        )
        covariance = self._target_kernel.evaluate_covariance(X) - matmul(A.T, A)
        if self.values is None:
            return self._with_further(None, X), covariance
        q = self.values.to_draw()
        SA = matmul(q.scale_tril.T, A)
        return self._with_further(matmul(q.loc, A), X), covariance + matmul(SA.T, SA)

    def _mean(self, Xs: Array, chunk_size: int | None) -> Array:
        linalg.warn_of_added_jitter(self._added_jitter)
        return self._expanded_mean(Xs, chunk_size)

    @compiled
    def _expanded_mean(self, Xs: Array, chunk_size: int | None) -> Array:
        def of_one(posterior: ExpansionPosterior, Xs: Array) -> Array:
            def mean(rows: Array) -> Array:
                terms = []
                for points, weights in posterior._expansions:
                    K = posterior._target_kernel.evaluate(rows, points)
                    terms.append(pairwise_product(divided(K, mesh_of(rows)), weights))
                return functools.reduce(jnp.add, terms)

            size = chunk_size or self.rows_per_chunk()
            return map_rows(mean, Xs, size, share=posterior._shares_rows)

        return self._each(of_one, batches.Batch(Xs, Xs.ndim - 2))

    def _covariance(self, Xs: Array) -> Array:
        linalg.warn_of_added_jitter(self._added_jitter)
        return self._joint_covariance(Xs)

    @compiled
    def _joint_covariance(self, Xs: Array) -> Array:
        def of_one(posterior: ExpansionPosterior, Xs: Array) -> Array:
            return posterior._joint(Xs)[1]

        return self._each(of_one, batches.Batch(Xs, Xs.ndim - 2))

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        linalg.warn_of_added_jitter(self._added_jitter)
        return self._drawn(key, Xs, num_samples)

    @compiled
    def _drawn(self, key: Array, Xs: Array, num_samples: int) -> Array:
        def draw(posterior: ExpansionPosterior, Xs: Array, key: Array) -> Array:
            prior_variance = posterior._target_kernel.evaluate_diag(Xs)
            return self._joint_sample(key, *posterior._joint(Xs), prior_variance, num_samples)

        draws = self._each(
            draw, batches.Batch(Xs, Xs.ndim - 2), batches.keys(key, self.batch_shape)
        )
        return jnp.moveaxis(draws, -2, 0)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        linalg.warn_of_added_jitter(self._added_jitter)
        return self._drawn_functions(key, num_samples, num_features)

    @compiled
    def _drawn_functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        if self.kernel.batch_shape or self.points.ndim > 2:

            def of_one(posterior: ExpansionPosterior, key: Array) -> AbstractFunctionSamples:
                return posterior._drawn_functions(key, num_samples, num_features)

            functions = self._each(of_one, batches.keys(key, self.batch_shape))
            return BatchFunctionSamples(functions, len(self.batch_shape))
        draw_key, key = jax.random.split(key)
        centers = jnp.concatenate(self._all_points)
        centers = centers.astype(self._weights()[0].dtype)
        num = num_samples * math.prod(self.batch_shape)
        draws = prior_draws(draw_key, self.kernel, num, num_features, centers)
        prior = draws(self.kernel, centers)[: len(self.points)]
        # One prior draw for each function of the batch and sample, (*batch, M, num_samples).
        prior = jnp.moveaxis(prior.reshape(-1, num_samples, *self.batch_shape), (0, 1), (-2, -1))

        def update(posterior: ExpansionPosterior, prior: Array, key: Array) -> Array:
            return posterior._update(prior, key)

        priors = batches.Batch(prior, len(self.batch_shape))
        weights = self._each(update, priors, batches.keys(key, self.batch_shape))
        return KernelFunctionSamples(
            self._target_kernel,
            zero_function(weights.dtype),
            draws,
            jnp.arange(num),
            centers,
            jnp.moveaxis(weights, (-2, -1), (0, 1)),
        )

    def _update(self, prior: Float[Array, "M s"], key: Key[Array, ""]) -> Float[Array, "k s"]:
        """The weights of the kernel functions that turn prior draws p into posterior draws of f.

        At Z the weights are P L^-T (v - L^-1 o), for o = P'p(Z) + e and draws v of q; at R, a.

        Args:
            prior: the values p(Z).
            key: for e and v.
        """
        K, W, *_ = self.whitening
        normals = jax.random.normal(key, (2, *prior.shape), prior.dtype)
        errors = normals[0]
        if self.projection is None:
            added = jnp.diagonal(K) - self.kernel.evaluate_diag(self.points)
            errors = jnp.sqrt(jnp.maximum(added, 0.0))[:, None] * errors
        white = -matmul(W, self._projected(prior) + errors)
        if self.values is not None:
            q = self.values.to_draw()
            white = q.loc[:, None] + matmul(q.scale_tril, normals[1]) + white
        weights = matmul(W.T, white)
        if self.projection is not None:
            weights = matmul(self.projection, weights)
        if self.further is None:
            return weights
        a = self.further.weights[:, None]
        return jnp.concatenate([weights, jnp.broadcast_to(a, (len(a), prior.shape[1]))])


def inducing_whitening(
    kernel: AbstractKernel, points: Float[Array, "... M d"], jitter: float | None
) -> Whitening:
    """The whitening of the inducing values f(Z), for each kernel and points of a batch.

    Args:
        kernel: covariance function, or a batch of them.
        points: Z, shape (M, d), or (*batch, M, d).
        jitter: added to the diagonal of K(Z, Z), relative to its mean; None for 100 `eps`.
    """
    leading = kernel.as_batch().leading, points.ndim - 2
    return _whitening(batches.Batch((kernel, points), leading), jitter)


@compiled
def _whitening(prior: batches.Batch, jitter: float | None) -> Whitening:
    def of_one(prior: tuple[AbstractKernel, Float[Array, "M d"]]) -> Whitening:
        kernel, points = prior
        return Whitening.of(linalg.add_jitter(kernel.evaluate_covariance(points), jitter))

    return batches.each(of_one, prior)


@compiled
def _representer_weights(
    inverse: batches.Batch, loc: Float[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """L^-T loc."""
    return batches.each(lambda W, loc: matmul(loc, W), inverse, batches.Batch(loc, loc.ndim - 1))
