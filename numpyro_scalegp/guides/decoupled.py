"""The guide for a Gaussian process with one basis for its mean and one for its covariance."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks
from numpyro_scalegp.families import DecoupledGP
from numpyro_scalegp.families.bases import Basis, hold_categories
from numpyro_scalegp.families.decoupled import small_scale_tril
from numpyro_scalegp.guides.guide import Rest
from numpyro_scalegp.guides.solving import AbstractDecoupledGuide, prior_scale
from numpyro_scalegp.tracing.sites import GPSite, Model


class AutoDecoupledGP(AbstractDecoupledGuide):
    """A guide with a `DecoupledGP` at one GP site: a large basis for the mean, a small one besides.

    Its parameters are `{site}_{prefix}_mean_weights`, as multiples of one over the prior's standard
    deviation, and `..._cov_scale_tril` likewise; and the points `..._mean_points` and
    `..._cov_points`, or, where they grow, their shifts since then, `..._mean_shift` and
    `..._cov_shift`.

    With `growth`, each mini-batch adds rows to both bases until they are full, with weights of
    zero; nothing is compiled again. The points then live in the mutable site
    `{site}_{prefix}_bases`: give `posterior` and the like
    `{**svi.get_params(state), **state.mutable_state}`.

    `model`, `site`, `rest` and `prefix` are as of `AutoSparseGP`.

    Args:
        mean_size: number of mean points, where they grow.
        cov_size: number of covariance points, where they grow.
        growth: rows that each mini-batch adds at most.
        mean_points: the mean's points, shape (M_p, d), such as random rows of the data; with
            `cov_points`, in place of growth.
        cov_points: the covariance's points, shape (M_q, d).
        train_mean: whether gradients train the mean's points and weights. If not, only `solve_mean`
            changes the weights.
        num_columns: columns of the mean points' covariance that each step draws for the
            divergence; None for all.

    Raises:
        ValueError: if a number is not positive, or only one of `mean_points` and `cov_points` is
            given; when called, as of `AutoSparseGP`.

    References:
        Cheng and Boots (2017), algorithm 1. A step costs
        O(b (d M_p + M_q^2) + d M_p num_columns + M_q^3) for b rows.

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

    weights_name = "mean_weights"

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
        """Declare the mean's weights; also whether they are about to be made."""
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
            site.kernel.check_categories(name, start)
            return hold_categories(self.param(site, name, jnp.asarray(start)), site.kernel)

        return {
            key: Basis(points(f"{key}_points", start), jnp.ones(len(start), bool))
            for key, start in self.points.items()
        }

    def family(self, site: GPSite, *, training: bool = True) -> DecoupledGP:
        """The decoupled GP, near the prior to begin with; see `AbstractGPGuide.family`."""
        bases = self._bases(site, training=training)
        (P, mean_active), (Q, cov_active) = bases["mean"], bases["cov"]
        w, _ = self._weights(site)
        L = jnp.tril(self.param(site, "cov_scale_tril", small_scale_tril(Q, site.batch_shape)))
        if not self.train_mean:
            P, w = jax.lax.stop_gradient((P, w))
        scale = prior_scale(site, P)
        return DecoupledGP(
            site.kernel,
            site.X,
            P,
            jnp.where(mean_active, w, 0.0) / scale,
            Q,
            jnp.where(cov_active[:, None], L, 0.0) / scale,
            **self.columns(len(P)),
        )

    def basis(self, site: GPSite, family: Any) -> tuple[Basis, Float[Array, "*batch M"]]:
        """The mean's points and their weights."""
        return self._bases(site, training=False)["mean"], family.mean_weights
