"""Initialization and bias of the log-determinants of a model's `FeatureSpaceGP` sites."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.finite_rkhs.feature_space import FeatureSpaceGP
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import AbstractStateful, Batch
from numpyro_scalegp.integrated.finite_rkhs.state import LogDeterminantState, first_state
from numpyro_scalegp.sites.mutable_state import if_finite
from numpyro_scalegp.tracing.runs import Trace, traced


def initial_pass(
    svi: SVI, svi_state: SVIState, num_batches: int, *args: Any, **kwargs: Any
) -> SVIState:
    """Initialize the state of log-determinants from many mini-batches instead of one.

    Runs the model on `num_batches` random batches with the current parameters, averages their
    estimates of F = Phi'Phi + noise I, and initializes the state of each `FeatureSpaceGP` with the
    average. Use it if the parameters are trained already, or if training is short; otherwise the
    state converges to F within a few hundred steps. Step-size schedules of the log-determinants
    restart.

    Args:
        svi: an SVI after `init`.
        svi_state: its state.
        num_batches: at least 1; n / b batches of b rows have as many rows as the data.
        *args: the model's positional arguments.
        **kwargs: the model's keyword arguments.

    Returns:
        The state for the next `svi.update`, in O(num_batches b d^2 + d^3).

    Raises:
        ValueError: if `num_batches` is less than 1, or no `FeatureSpaceGP` of the model has a
            state, or `numpyro.handlers.scope` renames its site.

    References:
        Shoham and Avron (2025), Unbiased Stochastic Optimization for Gaussian Processes on Finite
        Dimensional RKHS, section 3.2.
    """
    checks.instance("svi", svi, SVI, "a numpyro.infer.SVI")
    checks.count("num_batches", num_batches)
    mutable, params = svi_state.mutable_state or {}, svi.get_params(svi_state)
    kwargs = {**kwargs, **svi.static_kwargs}

    def run(key: jax.Array) -> Trace:
        values, (guide_key, model_key) = {**params, **mutable}, jax.random.split(key)
        guide_trace = traced(svi.guide, guide_key, values, args, kwargs)
        return traced(svi.model, model_key, values, args, kwargs, replayed=guide_trace)

    def grams(key: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
        sites = _stateful_sites(run(key))
        return {name: _gram_and_count(batch) for name, (_, batch) in sites.items()}

    key = jax.random.fold_in(svi_state.rng_key, 1)
    sites = _stateful_sites(run(key))
    if not sites:
        raise ValueError("the model has no `FeatureSpaceGP` whose log-determinant has a state.")
    if missing := set(sites) - set(mutable):
        raise ValueError(
            f"the model's mutable sites are {sorted(mutable)}, without {sorted(missing)}: "
            "`initial_pass` does not support sites that `numpyro.handlers.scope` renames."
        )

    def add(total: Any, key: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grams(key)), None

    zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(grams, key))
    total = jax.lax.scan(add, zero, jax.random.split(key, num_batches))[0]
    states = {}
    for name, (logdet, _) in sites.items():
        gram, count = total[name]
        new = first_state(logdet.start(gram / count, num_batches), gram.dtype)
        states[name] = {"state": if_finite(new, mutable[name]["state"])}
    return svi_state._replace(mutable_state={**mutable, **states})


def _gram_and_count(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The batch's estimate of F and 1, or zeros if the estimate is not finite."""
    gram = batch.gram()
    is_finite = jnp.all(jnp.isfinite(gram))
    return jnp.where(is_finite, gram, 0.0), is_finite.astype(gram.dtype)


def _stateful_sites(trace: Trace) -> dict[str, tuple[AbstractStateful, Batch]]:
    """The log-determinants that have a state, and their batches, by the names of their states."""
    distributions = (site.get("fn") for site in trace.values())
    return {
        stateful.name: (stateful, fn.batch)
        for fn in distributions
        if isinstance(fn, FeatureSpaceGP) and (stateful := fn.logdet.stateful) is not None
    }


class LogDeterminantDiagnostics(NamedTuple):
    """The bias of an estimate of log|F|; see `log_determinant_diagnostics`."""

    mean_eigenvalue: Float[Array, ""]  # of A^-1 F: 1 without bias
    standard_error: Float[Array, ""]  # of the mean eigenvalue, from the variance between batches
    spread: Float[Array, ""]  # between batches: about d / b if features have similar lengths
    num_batches: Int[Array, ""]  # since the initialization


def log_determinant_diagnostics(svi_state: SVIState) -> dict[str, LogDeterminantDiagnostics]:
    """Measure the bias of each log-determinant that is estimated from mini-batches.

    The gradient of log|F| is <F^-1, dF>, which a `FeatureSpaceGP` replaces by <A^-1, dF_batch>. A,
    the estimate of F from the previous batches, is independent of the current batch, so that the
    mean of tr(A^-1 F_batch) / d is an unbiased estimate of the mean eigenvalue of A^-1 F. The
    diagnostics are running means over about 1,000 batches, or over an epoch if that has more. The
    mean eigenvalue is 1 if the mean of A^-1 is F^-1; otherwise it is the factor by which the
    gradient is wrong in the direction that scales all features. Errors of opposite signs in other
    directions cancel in the mean eigenvalue.

    After 2,048 batches, training warns if the factor differs from 1 by more than a fifth.

    Args:
        svi_state: the state of an SVI, such as `result.state` of `svi.run`.

    Returns:
        The diagnostics by the names of the states (`name=` of the log-determinants). `MiniBatch`
        has none, nor have models that only saw batches of all rows, which are exact.

    Raises:
        TypeError: if `svi_state` is not an `SVIState`, such as the result of `svi.run`.

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
        >>> diagnostics = sgp.infer.log_determinant_diagnostics(result.state)["log_determinant"]
        >>> int(diagnostics.num_batches)
        31
    """
    expected = "the state of an SVI, such as `result.state` of `svi.run`"
    sites = checks.instance("svi_state", svi_state, SVIState, expected).mutable_state or {}
    records = {
        name: site["state"].record
        for name, site in sites.items()
        if isinstance(site, dict) and isinstance(site.get("state"), LogDeterminantState)
    }
    return {
        name: LogDeterminantDiagnostics(
            record.eigenvalue, record.standard_error, record.spread, record.num_batches
        )
        for name, record in records.items()
        if record.num_batches > 0
    }
