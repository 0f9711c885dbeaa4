"""The guide for a sparse Gaussian process with additional basis functions for its mean."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks
from numpyro_scalegp.tracing.sites import GPSite, Model
from numpyro_scalegp.variational.bases import Basis, InitialPoints, hold_categories, spread_rows
from numpyro_scalegp.variational.coordinates import MeanCoordinates
from numpyro_scalegp.variational.guide import Rest
from numpyro_scalegp.variational.hybrid.hybrid import HybridGP
from numpyro_scalegp.variational.solving import AbstractDecoupledGuide, prior_scale
from numpyro_scalegp.variational.sparse.guide import declare_unexplained_scale
from numpyro_scalegp.variational.sparse.sparse import declare_whitened, initial_inducing_points


class AutoHybridGP(AbstractDecoupledGuide):
    """A guide with a `HybridGP` at one GP site: a sparse GP plus many points for the mean.

    Its parameters are the parameters of `AutoSparseGP`, so that a fit of that guide can initialize
    them, `{site}_{prefix}_residual_points` and `..._residual_weights`. Gradients train the latter
    in coordinates that hardly change the mean at the inducing points; with `train_residual=False`
    they are the weights in units of one over the prior standard deviation. `solve_mean` sets the
    weights to their optimum, and their mean at the inducing points, whitened, as
    `..._residual_loc`.

    With `growth`, each mini-batch adds inputs to the residual points until there are
    `num_residual`, as in `AutoDecoupledGP`, and the parameter `..._residual_shift` shifts these:
    give `posterior` and `solve_mean` the mutable state as well. The number of inducing points stays
    the same.

    `model`, `site`, `rest`, `num_inducing`, `inducing_points`, `prefix` and `jitter` are as in
    `AutoSparseGP`.

    Args:
        num_residual: number of residual points (after growth), if `residual_points` is not given.
            Without `growth` they are random inputs among those that `AutoSparseGP` uses for
            k-means, or all of these if there are fewer.
        residual_points: the residual points, shape (M_r, d), such as random rows of the data.
        growth: largest number of points that a mini-batch adds; None for no growth.
        train_residual: whether gradients train the residual points and weights. If not, only
            `solve_mean` changes the weights, and there is no `..._residual_loc`.
        num_columns: number of columns of the residual points' covariance matrix that each step
            draws for the KL divergence; None for all.

    Raises:
        ValueError: as for `AutoSparseGP`, or if a number is not positive, or both `residual_points`
            and `growth` are given.

    References:
        Cheng and Boots (2017), appendix A.3; Salimbeni et al. (2018), Orthogonally Decoupled
        Variational Gaussian Processes. A step costs O(b (M^2 + d M_r) + M_r M^2 + M^3) for a
        mini-batch of b observations.

    Example:
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        ...     f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        ...     with numpyro.plate("rows", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> guide = sgp.guides.AutoHybridGP(model, num_inducing=20, num_residual=200)
    """

    weights_name, loc_name = "residual_weights", "residual_loc"

    def __init__(
        self,
        model: Model,
        site: str | None = None,
        *,
        rest: Rest = AutoNormal,
        num_inducing: int = 512,
        inducing_points: Float[ArrayLike, "M d"] | None = None,
        num_residual: int = 2048,
        residual_points: Float[ArrayLike, "M_r d"] | None = None,
        growth: int | None = None,
        train_residual: bool = True,
        num_columns: int | None = 256,
        prefix: str = "auto",
        jitter: float | None = None,
    ) -> None:
        super().__init__(model, site, rest=rest, num_columns=num_columns, prefix=prefix)
        if growth is not None and residual_points is not None:
            raise ValueError(
                "`growth` must be None where `residual_points` are given: these do not grow."
            )
        self.inducing_points = initial_inducing_points(num_inducing, inducing_points)
        self.residual_points = InitialPoints(
            "residual_points",
            "num_residual",
            num_residual,
            residual_points,
            spread_rows,
            "random rows",
        )
        self.growth = checks.count_or_none("growth", growth)
        self.train_residual = train_residual
        self.jitter = checks.jitter(jitter)

    def _residual(
        self, site: GPSite, *, training: bool
    ) -> tuple[Basis, Float[Array, "*batch M_r"]]:
        """Declare the residual points and their weights."""
        if self.growth is None:
            R = self.param(
                site,
                "residual_points",
                lambda key: self.residual_points(key, site.rows, site.kernel),
            )
            R = hold_categories(R, site.kernel)
            basis = Basis(R, jnp.ones(len(R), bool))
            return basis, self.param(
                site, "residual_weights", jnp.zeros((*site.batch_shape, len(R)), R.dtype)
            )
        sizes = {"residual": self.residual_points.num}
        start = jnp.zeros((*site.batch_shape, sizes["residual"]), site.X.dtype)
        w = self.param(site, "residual_weights", start)
        bases = self.grown(site, sizes, self.growth, begins=w is start, training=training)
        return bases["residual"], w

    def family(self, site: GPSite, *, training: bool = True) -> HybridGP:
        """The sparse GP with residual points; see `AbstractGPGuide.family`."""
        basis, w = self._residual(site, training=training)
        param = functools.partial(self.param, site)
        Z, loc, scale_tril = declare_whitened(
            param, self.inducing_points, site.rows, site.kernel, site.batch_shape
        )
        weights = jnp.where(basis.active, w, 0.0)
        coordinates = self._coordinates(site, basis, Z)
        if coordinates is None:
            basis, weights = jax.lax.stop_gradient((basis, weights))
            weights = weights / prior_scale(site, basis.points)
        else:
            residual_loc = param("residual_loc", jnp.zeros_like(loc))
            weights = coordinates.weights(weights, jax.lax.stop_gradient(residual_loc))
        scale = declare_unexplained_scale(param, site) if training else None
        return HybridGP(
            site.kernel,
            site.X,
            Z,
            loc,
            scale_tril,
            basis.points,
            weights,
            **self.columns(len(basis.points)),
            jitter=self.jitter,
            unexplained_scale=scale,
        )

    def _coordinates(
        self, site: GPSite, basis: Basis, Z: Float[Array, "M d"]
    ) -> MeanCoordinates | None:
        if not self.train_residual:
            return None
        return MeanCoordinates.at(site.kernel, basis, Basis(Z, jnp.ones(len(Z), bool)))

    def coordinates(self, site: GPSite, family: Any) -> MeanCoordinates | None:
        """Coordinates by the inducing points; see `AbstractDecoupledGuide.coordinates`."""
        basis, _ = self._residual(site, training=False)
        return self._coordinates(site, basis, family.inducing_points)

    def basis(self, site: GPSite, family: Any) -> tuple[Basis, Float[Array, "*batch M"]]:
        """The residual points and their weights."""
        return self._residual(site, training=False)[0], family.residual_weights

    def fixed_mean(self, family: Any, X: Float[Array, "n d"]) -> Float[Array, "*batch n"]:
        """The terms of the mean at X that come from the inducing points."""
        return dataclasses.replace(family.posterior(), further=None).marginals(X)[0]
