"""Guides at fitted parameters: their draws, their medians, and what `params` must have."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoGuide, AutoLaplaceApproximation
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.programs import compiled

Guide = Callable[..., Any]


class RequireParams(Messenger):
    """Raises where a parameter would be initialized because `params` lacks it."""

    def __init__(self, fn: Guide | None, params: dict[str, Any]) -> None:
        super().__init__(fn)
        self.params = params

    def process_message(self, msg: dict[str, Any]) -> None:
        """Look at a parameter."""
        if msg["type"] == "param" and msg["value"] is None:
            _require(msg["name"], self.params)


def _require(name: str, params: dict[str, Any]) -> None:
    """Raise where there is no such parameter."""
    if name not in params:
        raise ValueError(
            f"`params` lacks `{name}`: give all parameters of guide and model, such as "
            "`svi.get_params(state)`, to the guide that they were fitted with."
        )


def medians(guide: Any, params: dict[str, Any]) -> dict[str, Any]:
    """What a guide's `median` returns.

    Raises:
        ValueError: if `params` lacks a parameter.
    """
    try:
        return guide.median(params)
    except KeyError as error:
        _require(error.args[0], params)
        raise


def components(guide: Any) -> Iterator[Any]:
    """A guide and all guides that it is made of, handlers around them included."""
    yield guide
    names = ("rest", "fn", "global_guide", "local_guide")
    inner = [*getattr(guide, "_guides", ()), *(getattr(guide, name, None) for name in names)]
    for component in inner:
        if isinstance(component, AutoGuide | Messenger) or hasattr(component, "rest"):
            yield from components(component)


def laplace_approximations(guide: Any) -> dict[str, AutoLaplaceApproximation]:
    """The guide's `AutoLaplaceApproximation`s, by the name of the site that all others follow."""
    return {
        f"_{component.prefix}_latent": component
        for component in components(guide)
        if isinstance(component, AutoLaplaceApproximation)
    }


def latent_normals(guide: Any, params: dict[str, Any]) -> dict[str, dist.MultivariateNormal]:
    """The distributions that `AutoLaplaceApproximation` has in place of its modes.

    A Hessian of the model each: found once, for all draws.

    Args:
        guide: any guide.
        params: its parameters.

    Returns:
        Distributions by the names of auxiliary sites; none where no component is such a guide.

    Raises:
        ValueError: if `params` lacks a mode.
    """
    approximations = laplace_approximations(guide)
    for approximation in approximations.values():
        _require(f"{approximation.prefix}_loc", params)
    normals = _normals(guide, params) if approximations else {}
    for name, normal in normals.items():
        # What NumPyro puts in the place of a factor that is not there.
        if checks.is_concrete(normal.scale_tril) and not np.any(normal.scale_tril):
            warnings.warn(
                f"the Hessian of the log density at the mode `{name}` is not positive definite, so "
                "that all draws of `AutoLaplaceApproximation` are the mode: train it longer, or "
                "give another guide, such as AutoMultivariateNormal.",
                RuntimeWarning,
                stacklevel=3,
            )
    return normals


@compiled
def _normals(guide: Any, params: dict[str, Any]) -> dict[str, dist.MultivariateNormal]:
    return {
        name: approximation.get_posterior(params)
        for name, approximation in laplace_approximations(guide).items()
    }


class DrawingGuide(Messenger):
    """A fitted guide, a run of which is a draw from it.

    A run of NumPyro's `AutoLaplaceApproximation` alone has its mode, the point estimate that it
    trains.

    Args:
        guide: any guide.
        params: its parameters, all of which must be there.
        normals: of `latent_normals`.
    """

    def __init__(
        self, guide: Guide, params: dict[str, Any], normals: dict[str, dist.MultivariateNormal]
    ) -> None:
        super().__init__(RequireParams(guide, params))
        self.normals = normals

    def process_message(self, msg: dict[str, Any]) -> None:
        """Put a distribution in the place of a mode."""
        if msg["type"] == "sample" and msg["name"] in self.normals:
            msg["fn"] = self.normals[msg["name"]]
