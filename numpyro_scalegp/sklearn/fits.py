"""Models of the estimators, and their fits as programs that are compiled once for each size."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta

from numpyro_scalegp.core.padding import pad_rows
from numpyro_scalegp.features.selection import kmeans_points
from numpyro_scalegp.infer.conditioning import posterior
from numpyro_scalegp.infer.initialization import initial_hyperparameters
from numpyro_scalegp.infer.quadrature import QuadratureELBO
from numpyro_scalegp.integrated.cholesky import Cholesky
from numpyro_scalegp.integrated.gaussian_process import GaussianProcess
from numpyro_scalegp.integrated.iterative.pathwise import Pathwise
from numpyro_scalegp.linear.auto_solver import AutoSolver
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.sparse.guide import AutoSparseGP

BATCH_SIZE = 1024


class Fit(NamedTuple):
    """A posterior of the function, and the values of the other sites."""

    posterior: Any
    values: dict[str, Any]


def _kernel(family: type, num_columns: int) -> Any:
    """A kernel with a lengthscale for each column; the prior is Hvarfner et al.'s (2024)."""
    loc, scale = np.sqrt(2.0) + 0.5 * np.log(num_columns), np.sqrt(3.0)
    prior = dist.LogNormal(loc, scale).expand([num_columns]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", prior)
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    return family(lengthscale, variance)


def _noise() -> Any:
    return numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))


def _start(num_columns: int, scale: Any = 0.7, noise: Any = 0.3, **values: Any) -> Any:
    """Point estimates of the hyperparameters that start at given values.

    Standardized inputs are about sqrt(2 d) apart.
    """
    lengthscale = scale * jnp.sqrt(float(num_columns)) * jnp.ones(num_columns)
    values |= {"lengthscale": lengthscale, "variance": jnp.ones(()), "noise": jnp.asarray(noise)}
    return functools.partial(AutoDelta, init_loc_fn=init_to_value(values=values))


@functools.cache
def integrated_model(family: type, tolerance: float | None = None) -> Any:
    """The model with the function integrated out: exact, or by solves to a tolerance."""

    def model(X: Any, y: Any = None, observed: Any = None) -> None:
        kernel, noise = _kernel(family, X.shape[1]), _noise()
        estimator = Cholesky() if tolerance is None else Pathwise(AutoSolver(tolerance))
        gp = GaussianProcess(kernel, X, noise**2, estimator=estimator, observed=observed)
        numpyro.sample("y", gp, obs=y)

    return model


def fit_exact(family: type, X: np.ndarray, y: np.ndarray, num_steps: int) -> Fit:
    """Maximize the posterior density, and condition exactly; O(n^3) a step."""
    return _fit_exact(*pad_rows(_size(len(X)), X, y), family=family, num_steps=num_steps)


@functools.partial(jax.jit, static_argnames=("family", "num_steps"))
def _fit_exact(X: Array, y: Array, observed: Array, *, family: type, num_steps: int) -> Fit:
    """A fifth of the steps choose between two starts, and the better one continues."""
    model, num_columns = integrated_model(family), X.shape[1]
    guide = _start(num_columns)(model)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, num_steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO())

    def steps(state: Any, length: int) -> tuple[Any, Array]:
        state, losses = jax.lax.scan(
            lambda state, _: svi.update(state, X, y, observed), state, length=length
        )
        return state, losses[-1]

    def first_steps(start: tuple[Array, Array]) -> tuple[Any, Array]:
        from_start = SVI(model, _start(num_columns, *start)(model), optimizer, Trace_ELBO())
        state = from_start.init(jax.random.key(0), X, y, observed)
        return steps(state, num_steps // 5)

    svi.init(jax.random.key(0), X, y, observed)  # the guide needs its sites
    starts = jnp.array([0.7, 4.0], X.dtype), jnp.array([0.3, 0.5], X.dtype)
    states, losses = jax.lax.map(first_steps, starts)
    best = jax.tree.map(lambda leaf: leaf[jnp.nanargmin(losses)], states)
    state, _ = steps(best, num_steps - num_steps // 5)
    values = guide.median(svi.get_params(state))
    return Fit(posterior(model, values, X, y, observed), values)


def _size(n: int) -> int:
    """The least of 16, 24, 32, 48, 64, 96, ... that is at least n: a step costs O(size^3)."""
    size = 16
    while size < n:
        size *= 2
    return 3 * size // 4 if 3 * size // 4 >= n else size


def fit_iterative(
    family: type, key: Array, X: np.ndarray, y: np.ndarray, *, progress_bar: bool
) -> Fit:
    """Hyperparameters from subsets and refinements, then one solve for all rows.

    An error of the solve is one of the mean, so it is to be small relative to the noise: a tenth of
    its standard deviation, where that is less than the solvers' tolerance of 0.01. Where float32
    has too few digits for that, the solve is in float64.
    """
    values = initial_hyperparameters(
        key, integrated_model(family, 1e-2), X, y, progress_bar=progress_bar
    )
    half_decades = np.floor(2.0 * np.log10(0.1 * float(values["noise"])))
    tolerance = float(10.0 ** (np.clip(half_decades, -8, -4) / 2.0))
    model = integrated_model(family, tolerance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        solved = posterior(model, values, X, y, progress_bar=progress_bar)
    if not bool(solved.diagnostics["converged"]) and X.dtype != np.float64:
        with jax.enable_x64(True):
            X, y = X.astype(float), y.astype(float)
            precise = {name: jnp.asarray(value, float) for name, value in values.items()}
            return Fit(posterior(model, precise, X, y, progress_bar=progress_bar), precise)
    return Fit(solved, dict(values))


@functools.cache
def latent_model(family: type, num_classes: int) -> Any:
    """The model of a mini-batch: a normal likelihood with `num_classes` 0, otherwise classes."""

    def model(X: Array, y: Array | None, weights: Array) -> None:
        prior = LatentGP(_kernel(family, X.shape[1]), X)
        if num_classes == 0:
            function = numpyro.sample("f", prior)
            likelihood = dist.Normal(function, _noise())
        elif num_classes == 2:
            level = numpyro.sample("level", dist.Normal(0.0, 2.0))
            likelihood = dist.Bernoulli(logits=level + numpyro.sample("f", prior))
        else:
            level = numpyro.sample("level", dist.Normal(0.0, 2.0).expand([num_classes]).to_event(1))
            with numpyro.plate("classes", num_classes):
                functions = numpyro.sample("f", prior)
            likelihood = dist.Categorical(logits=level + functions.T)
        with numpyro.plate("rows", X.shape[0]), handlers.scale(scale=weights):
            numpyro.sample("y", likelihood, obs=y)

    return model


def fit_sparse(
    family: type,
    key: Array,
    X: np.ndarray,
    y: np.ndarray,
    *,
    num_inducing: int,
    num_steps: int,
    num_classes: int = 0,
) -> Fit:
    """Train inducing points in mini-batches."""
    points_key, key = jax.random.split(key)
    # A power of two, so that few programs are compiled.
    num_points = min(num_inducing, 2 ** (len(X).bit_length() - 1))
    points = kmeans_points(points_key, X, num_points)
    num_rows, size = len(X), _size(len(X))
    X, y, _ = pad_rows(size, X, y)
    return _fit_sparse(
        key,
        X,
        y,
        num_rows,
        points,
        num_steps,
        family=family,
        num_classes=num_classes,
        batch_size=min(BATCH_SIZE, size),
    )


@functools.partial(jax.jit, static_argnames=("family", "num_classes", "batch_size"))
def _fit_sparse(
    key: Array,
    X: Float[Array, "size d"],
    y: Array,
    num_rows: Any,
    points: Float[Array, "m d"],
    num_steps: Any,
    *,
    family: type,
    num_classes: int,
    batch_size: int,
) -> Fit:
    """Rows after the first `num_rows` are padding."""
    model, num_columns = latent_model(family, num_classes), X.shape[1]
    # The points are parameters; these only have their shape.
    placeholder = np.arange(points.size, dtype=points.dtype).reshape(points.shape)
    levels = {"level": jnp.zeros([num_classes] if num_classes > 2 else [])}
    point_estimates = _start(num_columns, noise=0.5, **levels)
    guide = AutoSparseGP(model, rest=point_estimates, inducing_points=placeholder)

    def rate(step: Any) -> Array:
        return 0.02 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(step / num_steps, 1.0)))

    svi = SVI(model, guide, optax.adam(rate), QuadratureELBO())
    first_key, key = jax.random.split(key)

    def batch(step: Any) -> tuple[Array, Array, Array]:
        if batch_size == X.shape[0]:
            return X, y, jnp.where(jnp.arange(batch_size) < num_rows, 1.0, 0.0)
        rows = jax.random.randint(jax.random.fold_in(key, step), (batch_size,), 0, num_rows)
        return X[rows], y[rows], jnp.full(batch_size, num_rows / batch_size, X.dtype)

    state = svi.init(first_key, *batch(0), init_params={"f_auto_inducing_points": points})
    state = jax.lax.fori_loop(
        0, num_steps, lambda step, state: svi.update(state, *batch(step))[0], state
    )
    params = svi.get_params(state)
    return Fit(posterior(model, guide, params, *batch(0), site="f"), guide.median(params))
