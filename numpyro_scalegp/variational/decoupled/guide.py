"""The guide for a Gaussian process with one basis for its mean and one for its covariance."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks
from numpyro_scalegp.tracing.sites import GPSite, Model
from numpyro_scalegp.variational.bases import Basis, hold_categories
from numpyro_scalegp.variational.coordinates import MeanCoordinates
from numpyro_scalegp.variational.decoupled.decoupled import (
    DecoupledGP,
    noise_tril,
    scale_of_pseudo_observations,
)
from numpyro_scalegp.variational.guide import Rest
from numpyro_scalegp.variational.solving import AbstractDecoupledGuide, prior_scale
from numpyro_scalegp.variational.sparse.guide import declare_unexplained_scale
from numpyro_scalegp.variational.sparse.sparse import whitened_loc


class AutoDecoupledGP(AbstractDecoupledGuide):
    """A guide with a `DecoupledGP` at one GP site: many points for mean, few for covariance.

    The covariance is the prior's, conditional on noisy pseudo-observations at the covariance
    points, whose noise has the covariance E E'; E is the parameter `{site}_{prefix}_cov_noise_tril`
    in units of the prior standard deviation. `..._mean_weights` and `..._loc` are coordinates of
    the weights of the mean in which gradient steps converge faster: `..._loc` is the whitened mean
    at the covariance points, and the former are residual weights. (Without covariance points or
    with `train_mean=False`, `..._mean_weights` are the weights in units of one over the prior
    standard deviation.) The points are `..._mean_points` and `..._cov_points`. If they are not
    given, the two sets of points grow: each mini-batch adds inputs to both until they are full,
    with zero weights and without recompilation. Where gradients train the mean, its other weights
    change a little, unless they are from a solve; an added covariance point starts with noise of
    the prior variance, which reduces the variance near it. The mutable site `{site}_{prefix}_bases`
    then holds these inputs, and the parameters are shifts of them, `..._mean_shift` and
    `..._cov_shift`, in place of points: give `{**svi.get_params(state), **state.mutable_state}` as
    `params` to `posterior` and other methods.

    `model`, `site`, `rest` and `prefix` are as in `AutoSparseGP`.

    Args:
        mean_size: number of mean points after growth.
        cov_size: number of covariance points after growth.
        growth: largest number of points that a mini-batch adds.
        mean_points: initial points of the mean, shape (M_p, d), such as random rows of the data;
            together with `cov_points`, for sets of points that do not grow.
        cov_points: initial points of the covariance, shape (M_q, d).
        train_mean: whether gradients train the mean's points and weights. If not, only `solve_mean`
            changes the weights.
        num_columns: number of columns of the mean points' covariance matrix that each step draws
            for the KL divergence; None for all.

    Raises:
        ValueError: if a number is not positive, or only one of `mean_points` and `cov_points` is
            given; when called, as for `AutoSparseGP`.

    References:
        Cheng and Boots (2017), algorithm 1. A step costs
        O(b (d M_p + M_q^2) + M_p (d num_columns + M_q^2) + M_q^3) for a mini-batch of b
        observations. Salimbeni et al. (2018), Orthogonally Decoupled Variational Gaussian
        Processes, for a mean in two parts.

    Example:
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        ...     f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        ...     with numpyro.plate("rows", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> guide = sgp.guides.AutoDecoupledGP(model, mean_size=400, cov_size=20)
    """

    weights_name, loc_name = "mean_weights", "loc"

    def __init__(
        self,
        model: Model,
        site: str | None = None,
        *,
        rest: Rest = AutoNormal,
        mean_size: int = 2048,
        cov_size: int = 128,
        growth: int = 128,
        mean_points: Float[ArrayLike, "M_p d"] | None = None,
        cov_points: Float[ArrayLike, "M_q d"] | None = None,
        train_mean: bool = True,
        num_columns: int | None = 256,
        prefix: str = "auto",
    ) -> None:
        super().__init__(model, site, rest=rest, num_columns=num_columns, prefix=prefix)
        if (mean_points is None) != (cov_points is None):
            raise ValueError("`mean_points` and `cov_points` must be given together, or neither.")
        self.sizes = {
            "mean": checks.count("mean_size", mean_size),
            "cov": checks.count("cov_size", cov_size),
        }
        self.growth = checks.count("growth", growth)
        # On the host, so that an optimizer that donates its state cannot delete the guide's copy.
        self.points = (
            None
            if mean_points is None or cov_points is None
            else {
                "mean": np.array(checks.inputs("mean_points", mean_points)),
                "cov": np.array(checks.inputs("cov_points", cov_points, may_be_empty=True)),
            }
        )
        self.train_mean = train_mean

    def _weights(self, site: GPSite) -> tuple[Float[Array, "*batch M_p"], bool]:
        """Declare the mean's weights; also return whether this initializes them."""
        size = self.sizes["mean"] if self.points is None else len(self.points["mean"])
        start = jnp.zeros((*site.batch_shape, size), site.X.dtype)
        weights = self.param(site, "mean_weights", start)
        return weights, weights is start

    def _bases(self, site: GPSite, *, training: bool) -> dict[str, Basis]:
        if self.points is None:
            _, begins = self._weights(site)
            return self.grown(site, self.sizes, self.growth, begins=begins, training=training)

        def points(name: str, start: np.ndarray) -> Array:
            checks.inputs(name, start, width=site.X.shape[1], may_be_empty=name == "cov_points")
            site.kernel.check_values(name, start)
            return hold_categories(self.param(site, name, jnp.asarray(start)), site.kernel)

        return {
            key: Basis(points(f"{key}_points", start), jnp.ones(len(start), bool))
            for key, start in self.points.items()
        }

    def family(self, site: GPSite, *, training: bool = True) -> DecoupledGP:
        """The decoupled GP, initially near the prior; see `AbstractGPGuide.family`."""
        bases = self._bases(site, training=training)
        (P, mean_active), (Q, cov_active) = bases["mean"], bases["cov"]
        scale, param = prior_scale(site, P), functools.partial(self.param, site)
        w = jnp.where(mean_active, self._weights(site)[0], 0.0)
        if not self.train_mean:
            P, w = jax.lax.stop_gradient((P, w))
        coordinates = self._coordinates(site, bases)
        if coordinates is None:
            weights = w / scale
        else:
            start = jnp.zeros((*site.batch_shape, len(Q)), Q.dtype)
            weights = coordinates.weights(w, param("loc", start, constraint=whitened_loc))
        eye = jnp.broadcast_to(jnp.eye(len(Q), dtype=Q.dtype), (*site.batch_shape, len(Q), len(Q)))
        E = scale * param("cov_noise_tril", eye, constraint=noise_tril)
        return DecoupledGP(
            site.kernel,
            site.X,
            P,
            weights,
            Q,
            jnp.where(cov_active[:, None], scale_of_pseudo_observations(E), 0.0),
            **self.columns(len(P)),
            unexplained_scale=declare_unexplained_scale(param, site) if training else None,
        )

    def _coordinates(self, site: GPSite, bases: dict[str, Basis]) -> MeanCoordinates | None:
        if not self.train_mean or len(bases["cov"].points) == 0:
            return None
        return MeanCoordinates.at(site.kernel, bases["mean"], bases["cov"])

    def coordinates(self, site: GPSite, family: Any) -> MeanCoordinates | None:
        """Coordinates by the covariance points; see `AbstractDecoupledGuide.coordinates`."""
        return self._coordinates(site, self._bases(site, training=False))

    def basis(self, site: GPSite, family: Any) -> tuple[Basis, Float[Array, "*batch M"]]:
        """The mean's points and their weights."""
        return self._bases(site, training=False)["mean"], family.mean_weights
