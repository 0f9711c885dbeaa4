"""Guides at fitted parameters: draws, medians and checks that `params` is complete."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoGuide, AutoLaplaceApproximation
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.programs.compiled import compiled

Guide = Callable[..., Any]


class RequireParams(Messenger):
    """Raises where a parameter would be initialized because `params` lacks it."""

    def __init__(self, fn: Guide | None, params: dict[str, Any]) -> None:
        super().__init__(fn)
        self.params = params

    def process_message(self, msg: dict[str, Any]) -> None:
        """Raise for a parameter without a value."""
        if msg["type"] == "param" and msg["value"] is None:
            _require(msg["name"], self.params)


def _require(name: str, params: dict[str, Any]) -> None:
    """Raise if `params` lacks the parameter."""
    if name not in params:
        raise ValueError(
            f"`params` lacks `{name}`: give all parameters of guide and model, such as "
            "`svi.get_params(state)`, to the guide that they were fitted with."
        )


def medians(guide: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The guide's medians.

    Raises:
        ValueError: if `params` lacks a parameter.
    """
    try:
        return guide.median(params)
    except KeyError as error:
        _require(error.args[0], params)
        raise


def components(guide: Any) -> Iterator[Any]:
    """A guide, its component guides and the handlers around them."""
    yield guide
    names = ("rest", "fn", "global_guide", "local_guide")
    inner = [*getattr(guide, "_guides", ()), *(getattr(guide, name, None) for name in names)]
    for component in inner:
        if isinstance(component, AutoGuide | Messenger) or hasattr(component, "rest"):
            yield from components(component)


def laplace_approximations(guide: Any) -> dict[str, AutoLaplaceApproximation]:
    """The guide's `AutoLaplaceApproximation`s, by the names of their auxiliary sites."""
    return {
        f"_{component.prefix}_latent": component
        for component in components(guide)
        if isinstance(component, AutoLaplaceApproximation)
    }


def latent_normals(guide: Any, params: dict[str, Any]) -> dict[str, dist.MultivariateNormal]:
    """The normal distributions of the guide's `AutoLaplaceApproximation`s.

    Each needs a Hessian of the model: compute them once for all draws.

    Args:
        guide: any guide.
        params: its parameters.

    Returns:
        Distributions by the names of auxiliary sites; empty without an `AutoLaplaceApproximation`.

    Raises:
        ValueError: if `params` lacks a mode.
    """
    approximations = laplace_approximations(guide)
    for approximation in approximations.values():
        _require(f"{approximation.prefix}_loc", params)
    normals = _normals(guide, params) if approximations else {}
    for name, normal in normals.items():
        # NumPyro sets the factor to zero if the Hessian is not positive definite.
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
    """A fitted guide each run of which is a draw from it.

    A run of NumPyro's `AutoLaplaceApproximation` itself returns the mode, the point estimate that
    it trains.

    Args:
        guide: any guide.
        params: all of its parameters.
        normals: as from `latent_normals`.
    """

    def __init__(
        self, guide: Guide, params: dict[str, Any], normals: dict[str, dist.MultivariateNormal]
    ) -> None:
        super().__init__(RequireParams(guide, params))
        self.normals = normals

    def process_message(self, msg: dict[str, Any]) -> None:
        """Replace a mode by its normal distribution."""
        if msg["type"] == "sample" and msg["name"] in self.normals:
            msg["fn"] = self.normals[msg["name"]]
