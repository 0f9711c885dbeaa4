"""An optimizer with natural-gradient steps for natural parameters."""

from collections.abc import Callable
from typing import Any

import optax
from jaxtyping import Array

from numpyro_scalegp.core import checks
from numpyro_scalegp.variational.sparse.natural import LOC, PRECISION, REFERENCE


def natural_gradients(
    optimizer: optax.GradientTransformation, step_size: float | Callable[[Array], Array] = 0.1
) -> optax.GradientTransformation:
    """Natural-gradient steps for guides with `natural=True`, `optimizer` for other parameters.

    Use it with NumPyro's `SVI`. The derivatives of such a guide with respect to its natural
    parameters are already natural gradients, and this optimizer takes plain gradient steps in
    them. Apply gradient transformations such as `optax.clip` to `optimizer`; applied to the result,
    they would shorten the natural-gradient steps. A guide cannot check the optimizer of `SVI`, so a
    wrong one shows only in the results: a NaN loss, or a warning by the posterior.

    Args:
        optimizer: an optax optimizer, for all other parameters.
        step_size: above 0 and at most 1, or a schedule: the weight of the current mini-batch in an
            exponential average over mini-batches. 0.1 averages over about ten; with all
            observations and a normal likelihood, 1 reaches the optimum in one step.

    Returns:
        An optax optimizer.

    Raises:
        TypeError: if `optimizer` is not an optax optimizer.
        ValueError: if `step_size` is not in (0, 1], or, at initialization, if there are no natural
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
        if not any(map(_is_natural, params)):
            raise ValueError(
                "`natural_gradients` found no natural parameters: give the guide `natural=True`."
            )
        return {name: "natural" if _is_natural(name) else "other" for name in params}

    return optax.multi_transform({"natural": optax.sgd(step_size), "other": optimizer}, labels)


def _is_natural(name: str) -> bool:
    return name.endswith((f"_{LOC}", f"_{PRECISION}", f"_{REFERENCE}"))
