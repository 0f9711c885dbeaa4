"""Natural parameters of guides: their names, their derivatives and their optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks

# Names of parameters: of sites exp(c'b - c'P c / 2), and what they are for, which stays as it is.
LOC, PRECISION = "natural_loc", "natural_precision"
REFERENCE, INPUTS = "natural_reference", "natural_inputs"


HOW_TO_TRAIN = (
    "train natural parameters with sgp.infer.natural_gradients(optimizer) only, and put clipping "
    "and other gradient transformations inside, around `optimizer`."
)


def natural_gradients(
    optimizer: optax.GradientTransformation,
    step_size: float | Callable[[Array], Array] = 0.1,
    *,
    delay: int = 0,
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
        delay: the number of first steps in which natural parameters alone change. Where they start
            far from their optimum, the first derivatives of other parameters are large and point
            elsewhere, and an optimizer such as Adam remembers them for hundreds of steps.

    Returns:
        An optax optimizer.

    Raises:
        TypeError: if `optimizer` is not an optax optimizer.
        ValueError: if `step_size` is not in (0, 1], `delay` is negative, or, at initialization, if
            there are no natural parameters.

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
    if checks.count("delay", delay, 0):
        optimizer = optax.conditionally_mask(optimizer, lambda step: step >= delay)

    def labels(params: dict[str, Any]) -> dict[str, str]:
        if not any(map(_is_natural, params)):
            raise ValueError(
                "`natural_gradients` found no natural parameters: give the guide `natural=True`, "
                "or take `AutoStateSpaceGP`."
            )
        return {name: "natural" if _is_natural(name) else "other" for name in params}

    return optax.multi_transform({"natural": optax.sgd(step_size), "other": optimizer}, labels)


def _is_natural(name: str) -> bool:
    return name.endswith(tuple(f"_{part}" for part in (LOC, PRECISION, REFERENCE, INPUTS)))


@jax.custom_vjp
def without_derivatives(values: Any) -> Any:
    """The same values, for draws; their derivatives raise an error.

    A likelihood's derivatives at a draw are noisy. Negative curvatures count as zero, so noise that
    changes signs would bias covariances downward.
    """
    return values


def _no_backward(*_: Any) -> Any:
    raise ValueError(
        "natural parameters have no derivatives through draws of their function: train with "
        "sgp.infer.QuadratureELBO, which draws none, or without `natural=True`."
    )


without_derivatives.defvjp(lambda values: (values, None), _no_backward)


@jax.custom_vjp
def scaled_derivatives(values: Any, scale: Float[Array, ""]) -> Any:
    """The same values, with derivatives divided by a scale that is not zero."""
    return values


def _scaled_backward(scale: Array, cotangents: Any) -> tuple[Any, Array]:
    divisor = jnp.where(scale == 0.0, 1.0, scale)
    divided = jax.tree.map(lambda leaf: (leaf / divisor).astype(leaf.dtype), cotangents)
    return divided, jnp.zeros_like(scale)


scaled_derivatives.defvjp(lambda values, scale: (values, scale), _scaled_backward)
