"""The active features of a relevance vector machine."""

import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from numpyro_scalegp.core import checks


def relevance_vectors(
    precision: Float[ArrayLike, " m"], threshold: float = 1e4
) -> Bool[Array, " m"]:
    """Find the features whose prior precisions do not switch them off.

    A large prior precision forces a weight to about zero. The mask has a fixed shape, so it may be
    computed under `jit`. `ChevronPosterior.pruned` takes the mask, or computes it from the
    precisions. Train until the precisions are far from the threshold: a feature that has just
    crossed it still matters.

    Args:
        precision: prior precisions s of the weights, in units of the squared feature over the
            squared function, shape (m,).
        threshold: features with at least this precision are switched off.

    Returns:
        True for each relevance vector, shape (m,).

    Raises:
        ValueError: if `threshold` or a precision is not positive.

    References:
        Tipping (2001), Sparse Bayesian Learning and the Relevance Vector Machine; threshold of
        Evans and Nair (2020), appendix I.3.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> sgp.relevance_vectors(jnp.array([0.5, 1e6, 20.0])).tolist()
        [True, False, True]
    """
    checks.number("threshold", threshold, "(0, inf]")
    precision = checks.as_float(precision, "precision")
    if checks.is_concrete(precision) and not (is_positive := np.asarray(precision) > 0).all():
        bad = int(np.argmin(is_positive))
        raise ValueError(
            f"`precision` must be positive, got {precision.reshape(-1)[bad]} at {bad}."
        )
    # A feature with a traced NaN counts as active, so that results show the NaN.
    return ~(precision >= threshold)
