"""Hyperparameters to start from: by a rule of thumb, or by exact fits on parts of the data."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Key
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.distributions import GaussianProcess
from numpyro_scalegp.kernels.distances import squared_distances


def median_distance(X: Float[ArrayLike, "n d"], *, max_rows: int = 1000) -> Float[Array, ""]:
    """The median Euclidean distance between rows: a lengthscale to start from.

    For inputs of like scales, such as standardized ones. On the first mini-batch of a stream it is
    a start where nothing else is known.

    Args:
        X: inputs, shape (n, d).
        max_rows: at most this many rows take part, from all over X.

    Returns:
        The median over all pairs of different rows, shape (), in units of the inputs. Time and
        memory O(max_rows^2).

    Raises:
        ValueError: if there are fewer than two rows, `max_rows` is less than 2, or `X` holds NaN or
            infinity.

    References:
        Cheng and Boots (2017), section 5 (the median trick).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> float(sgp.infer.median_distance(jnp.array([[0.0], [1.0], [3.0]])))
        2.0
    """
    checks.count("max_rows", max_rows, 2)
    X = checks.inputs("X", X)
    if X.shape[0] < 2:
        raise ValueError(f"`X` must have two rows or more, got {X.shape[0]}.")
    if X.shape[0] > max_rows:
        X = X[stratified_indices(jax.random.key(0), X.shape[0], max_rows)]
    # Squares of large or small values would leave the range of the type.
    X = X - X[0]
    scale = jnp.max(jnp.abs(X))
    scale = jnp.where(scale > 0, scale, 1.0)
    squared = squared_distances(X / scale, X / scale)[jnp.triu_indices(X.shape[0], 1)]
    return scale * jnp.sqrt(jnp.median(squared))


class _Exact(Messenger):
    """Runs a model with the exact estimator in place of its Gaussian processes' own."""

    def process_message(self, msg: dict) -> None:
        fn = msg.get("fn")
        if msg["type"] == "sample" and isinstance(fn, GaussianProcess):
            msg["fn"] = GaussianProcess(fn.kernel, fn.X, fn.noise_variance, mean=fn.mean_function)


def initial_hyperparameters(
    key: Key[Array, ""],
    model: Callable[..., Any],
    X: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, " n"],
    *model_args: Any,
    num_subsets: int = 10,
    subset_size: int = 1000,
    num_steps: int = 100,
    learning_rate: float = 0.1,
    **model_kwargs: Any,
) -> dict[str, Any]:
    """Fit a model exactly on neighborhoods of random rows, and average over them.

    Each subset consists of the rows nearest to a random one, so that its points lie as close as
    in the whole data: a random subset would make lengthscales too long. On each, the mode of the
    posterior is sought by Adam with the exact log marginal likelihood, whatever estimator the
    model names. Averages are taken on the unconstrained scale: geometric means of positive
    parameters.

    Args:
        key: a typed JAX key.
        model: a model whose first two arguments are inputs and observations, with an observed
            `GaussianProcess` site.
        X: inputs, shape (n, d); distances are Euclidean in columns scaled to unit variance.
        y: observations, shape (n,).
        *model_args: the model's further positional arguments.
        num_subsets: number of neighborhoods.
        subset_size: rows of each; at most n are used. Lin et al. take 10,000.
        num_steps: steps of Adam on each.
        learning_rate: of Adam, on the unconstrained scale.
        **model_kwargs: the model's keyword arguments.

    Returns:
        Values of the model's latent sites and `numpyro.param` sites: for
        `numpyro.infer.init_to_value(values=...)` and, where the model has params, for the
        `init_params` of `SVI.run`. Time O(num_subsets num_steps subset_size^3). A warning where a
        fit never left its start.

    Raises:
        ValueError: if a number is less than 1, `y` does not match `X`, or one of them holds NaN or
            infinity.

    References:
        Lin et al. (2023), Sampling from Gaussian Process Posteriors using Stochastic Gradient
        Descent, section 4; Lin et al. (2024), appendix B.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        ...     gp = sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.1)
        ...     numpyro.sample("y", gp, obs=y)
        >>> X = jnp.linspace(0.0, 9.0, 100)[:, None]
        >>> values = sgp.infer.initial_hyperparameters(
        ...     jax.random.key(0), model, X, jnp.sin(X[:, 0]), num_subsets=2, subset_size=30
        ... )
        >>> sorted(values)
        ['lengthscale']
    """
    for name, number in (
        ("num_subsets", num_subsets),
        ("subset_size", subset_size),
        ("num_steps", num_steps),
    ):
        checks.count(name, number)
    checks.number("learning_rate", learning_rate, "(0, inf)")
    key, X, y = checks.as_key(key), checks.inputs("X", X), checks.as_float(y, "y")
    checks.shape("y", y, X.shape[:1], why="one value for each row of `X`")
    checks.finite("y", y)
    center_key, init_key = jax.random.split(key)
    subsets = _neighborhoods(center_key, X, num_subsets, subset_size)
    exact = _Exact(model)
    guide = AutoDelta(exact)
    svi = SVI(exact, guide, optax.adam(learning_rate), Trace_ELBO())
    first = svi.init(init_key, X[subsets[0]], y[subsets[0]], *model_args, **model_kwargs)

    @jax.jit
    def fit(X: Array, y: Array, subsets: Array) -> Any:
        def on_subset(rows: Array) -> Any:
            def step(state: Any, _: None) -> tuple[Any, None]:
                # A step that fails leaves the parameters where they were.
                arguments = (X[rows], y[rows], *model_args)
                return svi.stable_update(state, *arguments, **model_kwargs)[0], None

            state, _ = jax.lax.scan(step, first, length=num_steps)
            params = svi.optim.get_params(state.optim_state)
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(start), strict=True)
            return params, jnp.array([jnp.any(one != other) for one, other in pairs])

        params, changed = jax.lax.map(on_subset, subsets)
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), params), changed

    start = svi.optim.get_params(first.optim_state)
    means, changed = fit(X, y, subsets)
    if (stuck := int(jnp.sum(~jnp.any(changed, axis=1)))) and changed.size:
        warnings.warn(
            f"the fits on {stuck} of {num_subsets} subsets never left their start: the log density "
            "or its gradient is not finite there, or overflows in this precision. Standardize `X` "
            "and `y`, check the model's priors, or work in float64.",
            RuntimeWarning,
            stacklevel=2,
        )
    params = svi.constrain_fn(means)
    latents = guide.median(params)
    own = {f"{name}_{guide.prefix}_loc" for name in latents}
    return {**latents, **{name: value for name, value in params.items() if name not in own}}


def _neighborhoods(key: Array, X: Array, num_subsets: int, subset_size: int) -> Array:
    """The rows next to random centers, shape (num_subsets, subset_size) or, at most, all rows."""
    centers = jax.random.choice(key, X.shape[0], (num_subsets,), replace=True)
    scale = jnp.std(X, axis=0)
    scaled = X / jnp.where(scale > 0, scale, 1.0)

    def nearest(center: Array) -> Array:
        distances = jnp.sum(jnp.square(scaled - scaled[center]), axis=1)
        return jax.lax.top_k(-distances, min(subset_size, X.shape[0]))[1]

    return jax.lax.map(nearest, centers)
