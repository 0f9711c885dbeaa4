"""Values put in the place of a model's own, by the kind of the site."""

from collections.abc import Callable
from typing import Any

from numpyro import handlers


def substituted(
    run: Callable[..., Any] | None,
    params: dict[str, Any],
    values: dict[str, Any] | None = None,
    indices: dict[str, Any] | None = None,
) -> handlers.substitute:
    """Put given values in the place of what a model or a guide would make itself.

    Deterministic sites are functions of the others, and observed ones have their value: neither is
    ever replaced, though NumPyro's samples and medians hold the former too.

    Args:
        run: a model or a guide; None for a context manager.
        params: values of parameters and mutable sites, by name.
        values: values of latent sample sites.
        indices: of plates.
    """
    latent, plates = values or {}, indices or {}

    def value_of(site: dict[str, Any]) -> Any:
        if site["type"] in ("param", "mutable"):
            return params.get(site["name"])
        if site["type"] == "plate":
            return plates.get(site["name"])
        if site["type"] == "sample" and not site["is_observed"]:
            return latent.get(site["name"])
        return None

    return handlers.substitute(run, substitute_fn=value_of)
