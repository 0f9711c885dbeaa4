"""Observations of a Gaussian process in NumPyro's `TransformedDistribution`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import transforms as T

from numpyro_scalegp.core import checks
from numpyro_scalegp.processes.warped import WarpedPosterior
from numpyro_scalegp.sites.collapsed import CollapsedDistribution

_REMEDY = (
    "write the Gaussian process itself as the site, and transform its observations before the "
    "model gets them."
)


class WarpedGP(dist.TransformedDistribution, CollapsedDistribution):
    """A warped Gaussian process, y_i = T(z_i) with z from a distribution over observations.

    `unwrapped` makes it from a `TransformedDistribution` around a collapsed distribution. Density,
    draws and predictive distributions follow NumPyro's `TransformedDistribution`.

    Args:
        base: the distribution of z.
        transforms: the transforms whose composition is T, in order of application.

    References:
        Snelson, Ghahramani and Rasmussen (2003), Warped Gaussian Processes.
    """

    def __init__(self, base: Any, transforms: list[T.Transform]) -> None:
        super().__init__(base, transforms, validate_args=False)

    @property
    def X(self) -> Float[Array, "... n d"]:
        """The inputs."""
        return self.base_dist.X

    @property
    def posterior_inputs(self) -> Any:
        """The inputs, as the methods of a posterior take them."""
        return self.base_dist.posterior_inputs

    @property
    def observed(self) -> Any:
        """The mask of the rows with a target, None for all; see `condition`."""
        return getattr(self.base_dist, "observed", None)

    @property
    def condition_options(self) -> frozenset[str]:
        """See `CollapsedDistribution.condition_options`."""
        return self.base_dist.condition_options

    @property
    def elementwise(self) -> tuple[T.Transform, ...]:
        """The transforms, as bijections of single values.

        Raises:
            ValueError: if a transform is not elementwise.
        """
        return tuple(step for transform in self.transforms for step in _elementwise(transform))

    def condition(self, y: ArrayLike, **options: Any) -> WarpedPosterior:
        """The posterior of f given observations y.

        Args:
            y: observations, of the shape of one draw.
            **options: options of the base's `condition`.

        Raises:
            ValueError: if T is not elementwise, z is discrete, or the density of z is scaled to all
                rows; if some rows have no target; if `y` lies outside of the range of T.
        """
        name, transforms = type(self.base_dist).__name__, self.elementwise
        if self.observed is not None:
            raise ValueError(
                f"`observed` of a `{name}` in a `TransformedDistribution` hides rows from the "
                "density of the process, but not from the density of the transform: leave the rows "
                "without a target out of `X` and `y`."
            )
        if self.base_dist.is_of_batch or self.base_dist.support.is_discrete:
            reason = "is scaled to all rows" if self.base_dist.is_of_batch else "is discrete"
            raise ValueError(
                f"a `{name}` in a `TransformedDistribution` has a density that {reason}, and the "
                f"transform does not follow: {_REMEDY}"
            )
        z = jnp.asarray(y)
        inside = transforms[-1].codomain(z)
        if checks.is_concrete(inside) and not np.all(inside):
            wrong = np.asarray(z)[~np.broadcast_to(inside, z.shape)]
            raise ValueError(
                f"`y` must lie in the support of the transformed distribution, "
                f"{transforms[-1].codomain}, got {wrong[0]}."
            )
        for transform in reversed(transforms):
            z = transform.inv(z)
        return WarpedPosterior(self.base_dist.condition(z, **options), transforms)

    def given(self, f: Float[Array, "... n"]) -> dist.TransformedDistribution:
        """See `CollapsedDistribution.given`."""
        return self._of(self.base_dist.given(f))

    def predictive(
        self, posterior: WarpedPosterior, *, at_data: bool = False
    ) -> dist.TransformedDistribution:
        """See `CollapsedDistribution.predictive`."""
        return self._of(self.base_dist.predictive(posterior.process, at_data=at_data))

    def leave_one_out(self, posterior: WarpedPosterior) -> dist.TransformedDistribution:
        """See `CollapsedDistribution.leave_one_out`."""
        return self._of(self.base_dist.leave_one_out(posterior.process))

    def _of(self, z: dist.Distribution) -> dist.TransformedDistribution:
        return dist.TransformedDistribution(z, list(self.elementwise))


def _elementwise(transform: T.Transform) -> list[T.Transform]:
    if isinstance(transform, T.ComposeTransform):
        return [step for factor in transform.parts for step in _elementwise(factor)]
    if isinstance(transform, T.IndependentTransform):
        return _elementwise(transform.base_transform)
    if isinstance(transform, T.AffineTransform):  # regardless of its domain
        return [T.AffineTransform(transform.loc, transform.scale)]
    inner = getattr(transform, "_inv", None) if isinstance(transform, T._InverseTransform) else None
    if inner is not None:
        return [step.inv for step in reversed(_elementwise(inner))]
    is_elementwise = transform.domain.event_dim == 0 == transform.codomain.event_dim
    if not is_elementwise or isinstance(transform, T.AbsTransform):
        raise ValueError(
            f"`{type(transform).__name__}` around a Gaussian process is not a bijection of single "
            f"values, such as `ExpTransform`, `AffineTransform` or `PowerTransform`: {_REMEDY}"
        )
    return [transform]
