"""Which features of a relevance vector machine are switched on."""

import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from numpyro_scalegp.core import checks


def relevance_vectors(
    precision: Float[ArrayLike, " m"], threshold: float = 1e4
) -> Bool[Array, " m"]:
    """Find the features that the prior does not switch off.

    A weight with a large prior precision is zero for all that its feature could do. The mask has a
    fixed shape, so it may be computed under `jit`. `ChevronPosterior.pruned` takes the mask, or
    computes it from the precisions. Train until the precisions lie well to either side of the
    threshold: a feature that has only just crossed it still matters.

    Args:
        precision: prior precisions s of the weights, in units of one over the function squared
            times the feature squared, shape (m,).
        threshold: precisions from here on are switched off.

    Returns:
        True for each relevance vector, shape (m,).

    Raises:
        ValueError: if `threshold` or a precision is not positive.

    References:
        Tipping (2001), Sparse Bayesian Learning and the Relevance Vector Machine; the threshold is
        that of Evans and Nair (2020), appendix I.3.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> sgp.relevance_vectors(jnp.array([0.5, 1e6, 20.0])).tolist()
        [True, False, True]
    """
    checks.number("threshold", threshold, "(0, inf]")
    precision = checks.as_float(precision, "precision")
    if checks.is_concrete(precision) and not (wanted := np.asarray(precision) > 0).all():
        bad = int(np.argmin(wanted))
        raise ValueError(
            f"`precision` must be positive, got {precision.reshape(-1)[bad]} at {bad}."
        )
    # A traced NaN stays: what is made of such a feature shows it.
    return ~(precision >= threshold)
