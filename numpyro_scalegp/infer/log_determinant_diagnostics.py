"""Whether the log-determinants of an SVI are unbiased."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int
from numpyro.infer.svi import SVIState

from numpyro_scalegp.log_determinants.learned import Learned


class LogDeterminantDiagnostics(NamedTuple):
    """How well A^-1 serves as F^-1 in the gradient of log|F|, by recent batches."""

    mean_eigenvalue: Float[Array, ""]  # of A^-1 F: 1 where there is no bias
    standard_error: Float[Array, ""]  # of it, from the differences between batches
    spread: Float[Array, ""]  # how much batches differ: about d / b for rows of similar lengths
    num_batches: Int[Array, ""]  # since the start


def log_determinant_diagnostics(svi_state: SVIState) -> dict[str, LogDeterminantDiagnostics]:
    """Measure the bias of each log-determinant that is learned from mini-batches.

    The gradient of log|F| is <F^-1, dF>, for which a `FeatureSpaceGP` takes <A^-1, dF_batch>. Each
    step compares its batch with the A of the batches before, which is independent of it: so
    the mean of tr(A^-1 F_batch) / d estimates the mean eigenvalue of A^-1 F without bias, as a
    running mean over some 1,000 batches, or those of an epoch if they are more. It is 1 where A^-1
    is F^-1 in the mean, and otherwise the factor by which the gradient is wrong in the direction
    that scales all features. Errors of different signs in other directions cancel in it.

    A factor that is off by more than a fifth is warned of in training, after 2,048 batches.

    Args:
        svi_state: the state of an SVI, such as `result.state` of `svi.run`.

    Returns:
        The diagnostics by the names of the states (`name=` of the log-determinants); none for
        `MiniBatch`, nor for what has seen batches of all rows alone, which are exact.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import optax
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y):
        ...     X_batch, y_batch = sgp.plate("rows", len(X), 4).take(X, y)
        ...     scale, weights = numpyro.param("scale", 1.0), numpyro.param("w", jnp.zeros(3))
        ...     logdet = sgp.log_determinants.Variational()
        ...     phi = lambda X: scale * X
        ...     gp = sgp.FeatureSpaceGP(phi, X_batch, 0.1, weights, num_data=20, logdet=logdet)
        ...     numpyro.sample("y", gp, obs=y_batch)
        >>> X = jax.random.normal(jax.random.key(0), (20, 3))
        >>> guide, loss = lambda X, y: None, numpyro.infer.Trace_ELBO()
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.01), loss)
        >>> result = svi.run(jax.random.key(1), 30, X, X[:, 0], progress_bar=False)
        >>> found = sgp.infer.log_determinant_diagnostics(result.state)["log_determinant"]
        >>> int(found.num_batches)
        31
    """
    sites = svi_state.mutable_state or {}
    records = {
        name: site["learned"].record
        for name, site in sites.items()
        if isinstance(site, dict) and isinstance(site.get("learned"), Learned)
    }
    return {
        name: LogDeterminantDiagnostics(
            record.eigenvalue, record.standard_error, record.spread, record.num_batches
        )
        for name, record in records.items()
        if record.num_batches > 0
    }
