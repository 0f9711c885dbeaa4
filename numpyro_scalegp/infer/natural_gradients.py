"""An optimizer that takes natural-gradient steps for the parameters that have them."""

from collections.abc import Callable
from typing import Any

import optax
from jaxtyping import Array

from numpyro_scalegp.core import checks
from numpyro_scalegp.families.natural import LOC, PRECISION


def natural_gradients(
    optimizer: optax.GradientTransformation, step_size: float | Callable[[Array], Array] = 0.1
) -> optax.GradientTransformation:
    """Natural-gradient steps for guides with `natural=True`, another optimizer for all else.

    For stock `SVI`: the derivatives of such a guide with respect to its natural parameters are
    natural gradients already, and take a plain step. What changes gradients, such as
    `optax.clip`, belongs inside, around `optimizer`: outside it makes these steps short. Stock
    `SVI` does not tell a guide which optimizer it has, so that another one is seen only in its
    results: a NaN loss, or a warning by the posterior.

    Args:
        optimizer: of optax, for all other parameters.
        step_size: from 0 to 1, or a schedule of it. Each step takes that share from its mini-batch
            and leaves the others what they had: 0.1 averages over some ten mini-batches, and 1, for
            all rows and a normal likelihood, is the optimum at once.

    Returns:
        An optimizer of optax.

    Raises:
        TypeError: if `optimizer` is none of optax.
        ValueError: if `step_size` is not from 0 to 1, or, when set up, there are no natural
            parameters.

    References:
        Salimbeni, Eleftheriadis and Hensman (2018), Natural Gradients in Practice; Khan and Lin
        (2017), Conjugate-Computation Variational Inference.

    Example:
        >>> import optax
        >>> import numpyro_scalegp as sgp
        >>> optimizer = sgp.infer.natural_gradients(optax.adam(0.01))
    """
    checks.instance("optimizer", optimizer, optax.GradientTransformation, "an optimizer of optax")
    step_size = checks.rate("step_size", step_size, "(0, 1]")

    def labels(params: dict[str, Any]) -> dict[str, str]:
        found = {name: _is_natural(name) for name in params}
        if not any(found.values()):
            raise ValueError(
                "`natural_gradients` found no natural parameters: give the guide `natural=True`."
            )
        return {name: "natural" if one else "other" for name, one in found.items()}

    return optax.multi_transform({"natural": optax.sgd(step_size), "other": optimizer}, labels)


def _is_natural(name: str) -> bool:
    return name.endswith((f"_{LOC}", f"_{PRECISION}"))
