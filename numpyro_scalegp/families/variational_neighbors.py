"""The variational family in which a function follows from its nearest inducing values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import batches, checks, linalg
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.families.family import AbstractVariationalGP
from numpyro_scalegp.families.latent import LatentGP
from numpyro_scalegp.families.same import one_if_same
from numpyro_scalegp.families.sparse import unexplained_part
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.kernel import as_single
from numpyro_scalegp.posteriors.function_samples import (
    AbstractFunctionSamples,
    OutputsFunctionSamples,
    prior_draws,
    zero_function,
)
from numpyro_scalegp.posteriors.neighbor_levels import NeighborLevels
from numpyro_scalegp.posteriors.variational import AbstractVariationalPosterior
from numpyro_scalegp.posteriors.vecchia import NeighborFunctionSamples, Neighbors


class NearestNeighborPosterior(AbstractVariationalPosterior):
    """The posterior of f at each input given the nearest of its inducing values.

    With q(v) = N(loc, diag(scale^2)), inducing values u = B v, and a the weights of the m nearest
    of these at x: mean a'B loc and variance r(x) + ||diag(scale) B'a||^2, with r(x) what they
    leave of the prior's variance.

    The fields are the arguments of `VariationalNearestNeighborGP`. What the inducing values need,
    O(M^2 + M m^3), is computed when it is made. Moments at n inputs cost O(n (M^2 + m^3)); joint
    samples are drawn one input after the other, each given the nearest among the inducing values
    and the inputs before, in O(M m + n m) a draw after O(n (M + m^3)).

    References:
        Wu, Pleiss and Cunningham (2022), Variational Nearest Neighbor Gaussian Process.
    """

    kernel: AbstractKernel
    inducing_points: Float[Array, "M d"]
    loc: Float[Array, "*batch M"]
    scale: Float[Array, "*batch M"]
    num_neighbors: int = eqx.field(static=True)
    jitter: float | None = eqx.field(static=True, default=None)
    noise_variance: Float[Array, "..."] | None = None
    part: AbstractKernel | None = None  # of f, in place of the whole
    levels: NeighborLevels = None  # type: ignore[assignment]  # made of the others

    def __post_init__(self) -> None:
        if self.levels is None:
            points = self.kernel, self.inducing_points
            self.levels = _levels(*points, self.num_neighbors, self.jitter)

    def restrict(
        self, change: Callable[[AbstractKernel], AbstractKernel]
    ) -> "NearestNeighborPosterior":
        """The posterior of a part of f, as the m nearest values tell it from the rest.

        Joint draws know more of it than each value's moments do, for few neighbors; see
        `AbstractPosterior.restrict`.
        """
        own = self.kernel if self.part is None else self.part
        return dataclasses.replace(self, part=change(own))

    @property
    def _num_columns(self) -> int:
        return self.inducing_points.shape[-1]

    @property
    def _row_width(self) -> int:
        return len(self.inducing_points)

    def _weights(self) -> tuple[Any, ...]:
        return self.loc, self.scale

    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        near, a, unexplained = self._given(X)
        means = self.levels.values(self.loc[:, None])[:, 0]
        inside = jnp.square(self.levels.whitened(near, a) * self.scale)
        return jnp.sum(a * means[near], axis=1), jnp.sum(inside, axis=1), unexplained

    def _given(self, X: Float[Array, "n d"]) -> tuple[Array, ...]:
        """The nearest inducing values of each row, their weights, and what they leave."""
        points = self.levels.points
        near = points.nearest(X)
        a, variance = points.weights(near, X, self.part)
        return near, a, jnp.maximum(variance, 0.0)

    def _drawn_values(self, key: Key[Array, ""], num_samples: int) -> Float[Array, "M num_samples"]:
        """Draws of the inducing values."""
        normal = jax.random.normal(key, (len(self.loc), num_samples), self.loc.dtype)
        return self.levels.values(self.loc[:, None] + self.scale[:, None] * normal)

    @property
    def _takes_batches(self) -> bool:
        return False

    @compiled
    def _given_draw(
        self, key: Key[Array, ""], X: Float[Array, "n d"]
    ) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """Mean and variance of f at each row given one draw of the inducing values.

        In O(M (M + m^3) + n (M + m^3)).
        """

        def of_one(one: NearestNeighborPosterior, key: Array) -> tuple[Array, Array]:
            near, a, unexplained = one._given(X)
            values = one._drawn_values(key, 1)[:, 0]
            return jnp.sum(a * values[near], axis=1), unexplained

        return self._each(of_one, batches.keys(key, self.batch_shape))

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        order, near = self.levels.points.in_turn(Xs)
        drawn = self._drawn_in_turn(key, Xs[order], near, num_samples)
        return jnp.moveaxis(drawn, -2, 0)[..., np.argsort(order)]

    @compiled
    def _drawn_in_turn(self, key: Array, Xs: Array, near: Array, num_samples: int) -> Array:
        def of_one(one: NearestNeighborPosterior, key: Array) -> Array:
            keys = jax.random.split(key)
            values = one._drawn_values(keys[0], num_samples)
            return one.levels.points.draw(keys[1], Xs, near, values, num_samples, one.part)

        return self._each(of_one, batches.keys(key, self.batch_shape))

    @compiled
    def _functions(
        self, key: Array, num_samples: int, num_features: int | None
    ) -> AbstractFunctionSamples:
        def of_one(one: NearestNeighborPosterior, key: Array) -> AbstractFunctionSamples:
            keys = jax.random.split(key)
            points, dtype = one.levels.points, one.loc.dtype
            Z = points.X.astype(dtype)
            draws = prior_draws(keys[0], one.kernel, num_samples, num_features, Z)
            rest = one._drawn_values(keys[1], num_samples)
            rest = rest - draws.observations(one.kernel, Z, points.noise)
            return NeighborFunctionSamples(points, one.part, zero_function(dtype), draws, rest)

        functions = self._each(of_one, batches.keys(key, self.batch_shape))
        if not self.batch_shape:
            return functions
        return OutputsFunctionSamples(functions, len(self.batch_shape))


@compiled
def _levels(
    kernel: AbstractKernel, points: Float[Array, "M d"], num_neighbors: int, jitter: float | None
) -> NeighborLevels:
    prior = kernel.diag(points)
    noise = jnp.broadcast_to(linalg.added_variance(prior, jitter), prior.shape)
    return NeighborLevels.found(Neighbors(kernel, points, noise, num_neighbors))


class VariationalNearestNeighborGP(AbstractVariationalGP):
    """A variational process that follows at each row from the nearest of many inducing values.

    Inducing values u at M points, in an order from coarse to fine, each depend on the m nearest
    before them, and f(x) on the m nearest of all: a prior whose precision has a sparse factor, for
    thousands of inducing points where `SparseGP` has hundreds. With u = B v and v ~ N(0, I) a
    priori, q(v) = N(loc, diag(scale^2)).

    The divergence is that from this prior, (sum scale^2 + loc^2 - 1 - 2 log scale) / 2: what is
    bounded is the likelihood of the GP of nearest neighbors, which comes close to that of the exact
    one as m grows. How the site behaves in a model is described in `AbstractVariationalGP`.

    Args:
        kernel: covariance function of the prior.
        X: inputs, shape (n, d).
        inducing_points: Z, shape (M, d), from coarse to fine.
        loc: mean of v, shape (M,), or (*batch, M) for independent functions.
        scale: deviations of v, positive, of the same shape.
        num_neighbors: m, positive. With M <= m all is as of `SparseGP`.
        jitter: what each inducing value gets as independent variance, relative to the mean of
            k(z, z); None for 100 `eps`.
        unexplained_scale: as of `SparseGP`.
        key: a typed JAX key, with which moments are those given one draw of the inducing values:
            unbiased for a bound, in O(M^2 + M m^3 + n (M + m^3)) in place of another O(n M^2).

    Raises:
        ValueError: if a shape does not fit, inputs hold NaN or infinity, a scale or `num_neighbors`
            is not positive.

    References:
        Wu, Pleiss and Cunningham (2022), Variational Nearest Neighbor Gaussian Process, here with
        independent v in place of u.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 20)[:, None]
        >>> kernel = sgp.kernels.RBF(0.3)
        >>> guide = sgp.VariationalNearestNeighborGP(kernel, X, X, jnp.zeros(20), jnp.ones(20))
        >>> guide.mean.shape, guide.variance.shape
        ((20,), (20,))
    """

    arg_constraints = {
        "inducing_points": constraints.real_matrix,
        "loc": constraints.real_vector,
        "scale": constraints.independent(constraints.positive, 1),
        "unexplained_scale": constraints.positive,
    }
    reparametrized_params = list(arg_constraints)
    pytree_data_fields = ("kernel", "X", *arg_constraints, "key")
    pytree_aux_fields = ("num_neighbors", "jitter")

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "n d"],
        inducing_points: Float[ArrayLike, "M d"],
        loc: Float[ArrayLike, "*batch M"],
        scale: Float[ArrayLike, "*batch M"],
        *,
        num_neighbors: int = 15,
        jitter: float | None = None,
        unexplained_scale: Float[ArrayLike, "*batch"] | None = None,
        key: Key[Array, ""] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = as_single("kernel", kernel)
        self.X = checks.inputs("X", X)
        self.inducing_points = checks.inputs("inducing_points", inducing_points, self.X.shape[1])
        self.loc, M = checks.as_float(loc, "loc"), len(self.inducing_points)
        batch = self.loc.shape[:-1]
        checks.shape("loc", self.loc, (*batch, M), why="one value for each inducing point")
        checks.finite("loc", self.loc)
        self.scale = checks.as_positive(scale, "scale")
        checks.shape("scale", self.scale, self.loc.shape, why="one for each of `loc`")
        checks.positive("scale", self.scale)
        self.num_neighbors = checks.count("num_neighbors", num_neighbors)
        self.jitter = checks.jitter(jitter)
        self.unexplained_scale = unexplained_part(unexplained_scale, batch)
        self.key = key if key is None else checks.as_key(key)
        super().__init__(batch, (self.X.shape[0],), validate_args=validate_args)

    def marginals(self) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """The mean and the variance of f at each row; with a key, given drawn inducing values."""
        if self.key is None:
            return super().marginals()
        return self.posterior()._given_draw(self.key, self.X)

    def split_marginals(self) -> tuple[Float[Array, "*batch n"], ...]:
        """Mean, variance of the inducing values' part, zero if drawn, and unexplained variance."""
        if self.key is None:
            return self.posterior().split_marginals(self.X)
        mean, unexplained = self.marginals()
        return mean, jnp.zeros_like(mean), unexplained

    def posterior(self) -> NearestNeighborPosterior:
        """The process itself, for moments and joint samples at any inputs."""
        return NearestNeighborPosterior(
            self.kernel, self.inducing_points, self.loc, self.scale, self.num_neighbors, self.jitter
        )


@kl_divergence.register(VariationalNearestNeighborGP, LatentGP)
def _kl_neighbors_latent(q: VariationalNearestNeighborGP, p: LatentGP) -> Float[Array, "*batch"]:
    """KL(q(v) || N(0, I)), whatever rows the two sites are evaluated at."""
    terms = 0.5 * (jnp.square(q.loc) + jnp.square(q.scale) - 1.0) - jnp.log(q.scale)
    return one_if_same("kernel", q.kernel, p.kernel) * jnp.sum(terms, axis=-1)
