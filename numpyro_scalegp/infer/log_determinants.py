"""The log-determinants of a model's `FeatureSpaceGP` sites: their start and their bias."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.mutable_state import if_finite
from numpyro_scalegp.distributions import FeatureSpaceGP
from numpyro_scalegp.log_determinants.log_determinant import AbstractStateful, Batch
from numpyro_scalegp.log_determinants.state import LogDeterminantState, first_state
from numpyro_scalegp.tracing.runs import Trace, traced


def initial_pass(
    svi: SVI, svi_state: SVIState, num_batches: int, *args: Any, **kwargs: Any
) -> SVIState:
    """Let the state of a log-determinant start from many mini-batches, not from the first alone.

    Runs the model on `num_batches` batches of its own choice with the parameters as they are, takes
    the mean of their estimates of F = Phi'Phi + noise I, and starts the state of each
    `FeatureSpaceGP` from it. Worth it for parameters that are trained already, or where training
    is short: a state finds F within some hundred steps by itself. Schedules start again.

    Args:
        svi: an SVI, set up by `init`.
        svi_state: its state.
        num_batches: at least 1; n / b of them have as many rows as there are.
        *args: the model's positional arguments.
        **kwargs: the model's keyword arguments.

    Returns:
        The state from which `svi.update` goes on, in O(num_batches b d^2 + d^3).

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
        given, (guide_key, model_key) = {**params, **mutable}, jax.random.split(key)
        guide_trace = traced(svi.guide, guide_key, given, args, kwargs)
        return traced(svi.model, model_key, given, args, kwargs, replayed=guide_trace)

    def grams(key: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
        found = {name: batch.gram() for name, (_, batch) in _with_state(run(key)).items()}
        return {name: _or_nothing(gram) for name, gram in found.items()}

    key = jax.random.fold_in(svi_state.rng_key, 1)
    sites = _with_state(run(key))
    if not sites:
        raise ValueError("the model has no `FeatureSpaceGP` whose log-determinant has a state.")
    if missing := set(sites) - set(mutable):
        raise ValueError(
            f"the model's mutable sites are {sorted(mutable)}, without {sorted(missing)}: a state "
            "cannot be found where `numpyro.handlers.scope` renames its site."
        )

    def add(total: Any, key: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grams(key)), None

    zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(grams, key))
    total = jax.lax.scan(add, zero, jax.random.split(key, num_batches))[0]
    begun = {}
    for name, (logdet, _) in sites.items():
        gram, count = total[name]
        new = first_state(logdet.start(gram / count, num_batches), gram.dtype)
        begun[name] = {"state": if_finite(new, mutable[name]["state"])}
    return svi_state._replace(mutable_state={**mutable, **begun})


def _or_nothing(gram: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The estimate of a batch and its count, or zeros where it is not finite."""
    good = jnp.all(jnp.isfinite(gram))
    return jnp.where(good, gram, 0.0), good.astype(gram.dtype)


def _with_state(trace: Trace) -> dict[str, tuple[AbstractStateful, Batch]]:
    """The log-determinants that have a state, and their batches, by the names of their states."""
    found = (site.get("fn") for site in trace.values())
    return {
        stateful.name: (stateful, fn.batch)
        for fn in found
        if isinstance(fn, FeatureSpaceGP) and (stateful := fn.logdet.stateful) is not None
    }


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
        `MiniBatch`, nor after batches of all rows alone, which are exact.

    Raises:
        TypeError: if `svi_state` is something else, such as what `svi.run` returned.

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
