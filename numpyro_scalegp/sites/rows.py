"""The base class of distributions over the rows of an input matrix."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool
from numpyro.distributions import (
    Distribution,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    TransformedDistribution,
    constraints,
)
from numpyro.distributions.batch_util import promote_batch_shape

from numpyro_scalegp.core import checks, summary
from numpyro_scalegp.sites.collapsed import refuse_scan
from numpyro_scalegp.sites.mini_batches import MiniBatch, mini_batch_of, refuse_mini_batch
from numpyro_scalegp.sites.warped import WarpedGP

_TRANSFORM = "`TransformedDistribution`"
_WRAPPERS = (ExpandedDistribution, Independent, MaskedDistribution, TransformedDistribution)


class RowsDistribution(Distribution):
    """A distribution whose event has one entry, or one row, for each row of `X`."""

    support = constraints.real_vector
    # "prior" for a function in a model, "variational" in a guide, "collapsed" for observations.
    role: ClassVar[str] = ""
    # The mini-batch that the rows belong to, in the model that made the distribution.
    mini_batch: MiniBatch | None = None

    def __init__(
        self,
        batch_shape: tuple[int, ...] = (),
        event_shape: tuple[int, ...] = (),
        *,
        validate_args: bool | None = None,
    ) -> None:
        if self.role in ("prior", "collapsed"):
            self.mini_batch = mini_batch_of(self.X)
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    def __repr__(self) -> str:
        batch = f"batch shape {self.batch_shape}" if self.batch_shape else ""
        return summary.one_line(self, [*self._summary(), summary.counted_rows(self.X), batch])

    def _summary(self) -> list[str]:
        """What `repr` says besides the rows."""
        kernel = getattr(self, "kernel", None)
        return [] if kernel is None else [repr(kernel)]

    @property
    def posterior_inputs(self) -> Any:
        """The inputs of the event, as the methods of a posterior take them."""
        return self.X

    def check_all_rows(self) -> None:
        """Raise if the rows are a mini-batch, since the density is for all rows.

        Draws from the prior, and guides of this package, need no density.
        """
        refuse_mini_batch(type(self).__name__, self.role, self.mini_batch)

    def get_args(self) -> dict[str, Any]:
        """The parameters that are not None."""
        return {name: value for name, value in super().get_args().items() if value is not None}

    def validate_args(self, strict: bool = True) -> None:
        """Check parameters against their constraints, in one program.

        NumPyro compiles each operation of a check separately, under a trace as well.
        """
        arg_constraints = self.arg_constraints
        args = {
            name: value
            for name, value in self.get_args().items()
            if not constraints.is_dependent(arg_constraints[name])
        }
        if not args or not (strict or checks.is_concrete(args)):
            return
        is_valid = _is_valid({name: arg_constraints[name] for name in args}, args)
        if not (checks.is_concrete(is_valid) and is_valid):
            super().validate_args(strict)

    def expand(self, batch_shape: Sequence[int]) -> Any:
        """Independent copies, as in a plate over outputs.

        Raises:
            ValueError: if the last batch dimension is the number of rows: then the site stands
                inside a plate over the rows, which would count it once for each row; or if a batch
                axis of length one would be repeated.
        """
        n = self.event_shape[0]
        lengths = zip(reversed(self.batch_shape), reversed(batch_shape), strict=False)
        if any(old == 1 != new for old, new in lengths):
            raise ValueError(
                f"`{type(self).__name__}` of the batch shape {self.batch_shape} stands inside "
                f"plates of the shape {tuple(batch_shape)}: give its hyperparameters, or its "
                "inputs, the axes of all plates, by jnp.broadcast_to."
            )
        if batch_shape and not self.batch_shape and batch_shape[-1] == n and n > 1:
            name = type(self).__name__
            raise ValueError(
                f"`{name}` got the batch shape {tuple(batch_shape)} with {n} rows in `X`: take the "
                "site out of the plate over the rows, since it is one draw for all of them. "
                "(For as many independent functions as rows, put their plate at dim=-2.)"
            )
        return super().expand(tuple(batch_shape))

    def mask(self, mask: Any) -> Any:
        """Leave whole draws out of the density, as `numpyro.handlers.mask` does.

        Raises:
            ValueError: if the mask has an entry for each row.
        """
        shape, event = jnp.shape(mask), self.event_shape
        n, is_of_entries = event[0], shape[-len(event) :] == event or shape[-1:] == event[:1]
        if is_of_entries and math.prod(event) > 1 and shape != self.batch_shape:
            raise ValueError(
                f"`{type(self).__name__}` got a mask of shape {shape} with {n} rows in `X`: it is "
                "one draw for all rows, and a row cannot be masked. Mask the likelihood of a "
                "latent function, and give a collapsed GP `observed=mask`."
            )
        return super().mask(mask)


promote_batch_shape.register(RowsDistribution, refuse_scan)


@jax.jit
def _is_valid(constraints_of: dict[str, Any], args: dict[str, Any]) -> Bool[Array, ""]:
    return jnp.all(
        jnp.stack([jnp.all(constraints_of[name](value)) for name, value in args.items()])
    )


class Unwrapped(NamedTuple):
    """A distribution without the wrappers of plates, `to_event` and `mask`.

    Transformed observations of a Gaussian process are a `WarpedGP`.
    """

    distribution: Any
    wrapper: str  # the innermost `to_event`, `mask` or transform of a function; empty without any
    mask: Any  # the conjunction of all masks; True without any

    def refuse_transform(self, site: str) -> None:
        """Raise if a site has a transformed function, or a transformed batch of processes.

        Args:
            site: the name of the site.
        """
        if self.wrapper == _TRANSFORM:
            raise ValueError(
                f"the GP site `{site}` has a {_TRANSFORM} around a "
                f"`{type(self.distribution).__name__}`: write the latter as the site, and "
                "transform its value in the next line of the model."
            )


def unwrapped(distribution: Any) -> Unwrapped:
    """The distribution inside of the wrappers of plates, `to_event` and `mask`."""
    wrapper = ""
    mask: Any = True
    while isinstance(distribution, _WRAPPERS):
        if isinstance(distribution, TransformedDistribution):
            base = distribution.base_dist
            if getattr(base, "role", "") == "collapsed":
                return Unwrapped(WarpedGP(base, distribution.transforms), wrapper, mask)
            if role_of(base) not in ("prior", "collapsed"):
                break
            wrapper = _TRANSFORM
        elif isinstance(distribution, Independent):
            wrapper = "`to_event`"
        elif isinstance(distribution, MaskedDistribution):
            wrapper, inner = "`mask`", jnp.asarray(distribution._mask)
            axes = distribution.event_dim if inner.ndim else 0
            mask = mask & inner.reshape(inner.shape + (1,) * axes)
        distribution = distribution.base_dist
    return Unwrapped(distribution, wrapper, mask)


def role_of(distribution: Any) -> str:
    """The `role` of a distribution over rows, inside of any wrappers; empty for others."""
    return getattr(unwrapped(distribution).distribution, "role", "")


def counted(distribution: Any) -> Bool[Array, "..."]:
    """Which entries of the pointwise log density count, since no `mask` hides them.

    The result has the batch shape, followed for a collapsed GP by the event shape.
    """
    shape = distribution.batch_shape
    if isinstance(distribution, MaskedDistribution | ExpandedDistribution | Independent):
        base = distribution.base_dist
        is_counted = counted(base)
        rows = is_counted.shape[len(base.batch_shape) :]
        if isinstance(distribution, Independent):
            return jnp.any(is_counted, axis=tuple(range(len(shape), len(base.batch_shape))))
        if isinstance(distribution, MaskedDistribution):
            mask = jnp.broadcast_to(distribution._mask, shape)
            is_counted = is_counted & mask.reshape(*shape, *(1 for _ in rows))
        return jnp.broadcast_to(is_counted, (*shape, *rows))
    if role_of(distribution) != "collapsed":
        return jnp.ones(shape, bool)
    observed = getattr(distribution, "observed", None)
    return jnp.broadcast_to(
        True if observed is None else observed, shape + distribution.event_shape
    )
