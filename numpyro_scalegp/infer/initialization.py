"""Hyperparameters for large data, from exact fits on parts of them."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, ArrayLike, Float, Int, Key
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.svi import SVIState
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks, linalg
from numpyro_scalegp.distributions import GaussianProcess
from numpyro_scalegp.distributions.rows import unwrapped
from numpyro_scalegp.infer.fitted_runs import trace_of
from numpyro_scalegp.infer.starting_values import scaled_start
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.tracing.runs import is_observed

# Rows that are drawn together, with their neighbors, where a subset has some of each.
_GROUP = 8

# Candidates whose mean log densities are further apart than this, and than two standard errors,
# disagree: then a larger subset is worth its time.
_AGREEMENT = 0.01


@jax.tree_util.register_pytree_node_class
class Hyperparameters(dict[str, Any]):
    """Values of a model's latent sites and parameters, by name, and how they were found.

    `sgp.posterior(model, values, X, y)` conditions on them. As a dict they go into
    `init_to_value(values=...)` and the handlers `substitute` and `condition`; `sgp.save` takes
    `dict(values)`.

    Args:
        values: by name; of your own, too, to condition on these.
        picked: what was picked.
        scores: of all candidates the name, the mean log density of a row left out, and its standard
            error; none where no row was left out.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> values = sgp.infer.Hyperparameters({"lengthscale": 0.3})
        >>> values["lengthscale"], values.report
        (0.3, 'hyperparameters from given values')
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        picked: str = "given values",
        scores: tuple[tuple[str, float, float], ...] = (),
    ) -> None:
        super().__init__(values)
        self.picked, self.scores = picked, scores

    @property
    def report(self) -> str:
        """What was picked and why, in one line."""
        if not self.scores:
            return f"hyperparameters from {self.picked}"
        ranked = sorted(self.scores, key=lambda one: -one[1])
        each = ", ".join(f"{name} {mean:.3f} +- {error:.3f}" for name, mean, error in ranked)
        return f"hyperparameters from {self.picked}: log density of a row left out: {each}"

    def tree_flatten(self) -> tuple[Any, Any]:
        """Flatten to the values, sorted by name."""
        names = tuple(sorted(self))
        return tuple(self[name] for name in names), (names, self.picked, self.scores)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "Hyperparameters":
        """The inverse of flattening."""
        names, picked, scores = static
        return cls(dict(zip(names, children, strict=True)), picked, scores)


def initial_hyperparameters(
    key: Key[Array, ""],
    model: Callable[..., Any],
    X: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, " n"],
    *model_args: Any,
    subset_size: int = 1500,
    num_subsets: int = 3,
    num_steps: int = 100,
    learning_rate: float = 0.1,
    num_scored: int = 300,
    num_neighbors: int = 400,
    **model_kwargs: Any,
) -> Hyperparameters:
    """Fit a model exactly on parts of the data, and pick the fit that predicts other rows best.

    Candidates are the fits of random rows, of random rows with their neighbors, and the average
    over neighborhoods, on the unconstrained scale: which one is right depends on the data. A random
    subset has too few close pairs to tell short lengthscales from noise; a neighborhood knows its
    surroundings alone. Each fit seeks the mode of the posterior by Adam with the exact log marginal
    likelihood, whatever estimator the model names, from lengthscales like the data's distances.

    The score of a candidate is the mean log density of rows that were in none of the subsets, each
    given those of all other rows that the candidate's own kernel relates it to most: what the
    posterior of all data will predict, not that of a subset. Where candidates disagree, there is
    another from a subset of twice the size. A subset of all rows is not scored.

    Args:
        key: a typed JAX key.
        model: a model whose first two arguments are inputs and observations, with an observed
            `GaussianProcess` site.
        X: inputs, shape (n, d); neighbors are Euclidean in columns scaled to unit variance.
        y: observations, shape (n,).
        *model_args: the model's further positional arguments.
        subset_size: rows of each subset; where there are no more, all are fitted at once.
        num_subsets: number of neighborhoods.
        num_steps: steps of Adam on each subset.
        learning_rate: of Adam, on the unconstrained scale.
        num_scored: rows left out to score by, at most a fifth of all.
        num_neighbors: rows that each of these is predicted from.
        **model_kwargs: the model's keyword arguments.

    Returns:
        `Hyperparameters`, a dict of values of the model's latent sites and `numpyro.param` sites:
        for `sgp.posterior(model, values, X, y)`, `numpyro.infer.init_to_value(values=...)` and,
        where the model has params, for the `init_params` of `SVI.run`. Its `report` says what was
        picked and why. Time O(num_steps num_subsets subset_size^3 + num_scored (n d +
        num_neighbors^3)). A warning where a fit never left its start.

    Raises:
        ValueError: if a number is less than 1, `y` does not match `X`, one of them holds NaN or
            infinity, or the model has no observed `GaussianProcess`.

    References:
        Lin et al. (2023), Sampling from Gaussian Process Posteriors using Stochastic Gradient
        Descent, section 4; Lin et al. (2024), appendix B (neighborhoods); Vecchia (1988),
        Estimation and Model Identification for Continuous Spatial Processes (the score).

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
        ...     jax.random.key(0), model, X, jnp.sin(X[:, 0]), subset_size=30, num_steps=50
        ... )
        >>> sorted(values), len(values.scores) >= 3
        (['lengthscale'], True)
    """
    for name, number in (
        ("subset_size", subset_size),
        ("num_subsets", num_subsets),
        ("num_steps", num_steps),
        ("num_scored", num_scored),
        ("num_neighbors", num_neighbors),
    ):
        checks.count(name, number)
    checks.number("learning_rate", learning_rate, "(0, inf)")
    key, X, y = checks.as_key(key), checks.inputs("X", X), checks.as_float(y, "y")
    checks.shape("y", y, X.shape[:1], why="one value for each row of `X`")
    checks.finite("y", y)
    keys = jax.random.split(key, 3)
    fits = _Fits(keys[1], model, X, y, model_args, model_kwargs, learning_rate)
    n = len(X)
    order = jax.random.permutation(keys[0], n)
    if n <= subset_size:
        params = fits.run(fits.start(order), order[None], num_steps)
        return Hyperparameters(fits.values(_one(params, 0)), f"a fit of all {n} rows", ())
    held, rest = jnp.split(order, [max(1, min(num_scored, n // 5))])
    subset_size = min(subset_size, len(rest))
    subsets = _Subsets(keys[2], X, rest)
    groups = {"random rows": 1, "random rows with neighbors": min(_GROUP, subset_size)}
    rows = [subsets.draw(subset_size, group) for group in groups.values()]
    rows += [subsets.draw(subset_size, subset_size) for _ in range(num_subsets)]
    params = fits.run(fits.start(rows[0]), jnp.stack(rows), num_steps)
    fitted = {name: _one(params, i) for i, name in enumerate(groups)}
    fitted["neighborhoods"] = jax.tree.map(lambda leaf: jnp.mean(leaf[len(groups) :], 0), params)
    scores = {name: fits.score(one, held, num_neighbors) for name, one in fitted.items()}
    best = _best(scores)
    if _disagree(scores) and len(rest) > subset_size:
        group = groups.get(best, max(1, subset_size // 4))
        larger = subsets.draw(min(2 * subset_size, len(rest)), group)[None]
        name = f"{best}, {larger.shape[1]} of them"
        fitted[name] = _one(fits.run(fitted[best], larger, max(1, num_steps // 2)), 0)
        scores[name] = fits.score(fitted[name], held, num_neighbors)
        best = _best(scores)
    summary = ((one, *_mean_and_error(scores[one])) for one in scores)
    return Hyperparameters(fits.values(fitted[best]), best, tuple(summary))


def _one(params: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], params)


def _mean_and_error(densities: np.ndarray) -> tuple[float, float]:
    return float(np.mean(densities)), float(np.std(densities) / np.sqrt(len(densities)))


def _best(scores: dict[str, np.ndarray]) -> str:
    """The candidate with the largest score; the first one where none has any."""
    return max(scores, key=lambda name: float(np.mean(scores[name])))


def _disagree(scores: dict[str, np.ndarray]) -> bool:
    best = scores[_best(scores)]
    for other in scores.values():
        mean, error = _mean_and_error(best - other) if np.isfinite(other).all() else (np.inf, 0.0)
        if mean > max(_AGREEMENT, 2.0 * error):
            return True
    return False


class _Exact(Messenger):
    """Runs a model with the exact estimator in place of its Gaussian processes' own."""

    def process_message(self, msg: dict) -> None:
        fn = msg.get("fn")
        if msg["type"] == "sample" and isinstance(fn, GaussianProcess):
            msg["fn"] = GaussianProcess(fn.kernel, fn.X, fn.noise_variance, mean=fn.mean_function)


class _Subsets:
    """Draws subsets of some rows: groups of neighbors around random ones."""

    def __init__(self, key: Array, X: Float[Array, "n d"], rows: Int[Array, " m"]) -> None:
        scale = jnp.std(X, axis=0)
        self.scaled = X[rows] / jnp.where(scale > 0, scale, 1.0)
        self.key, self.rows = key, rows

    def draw(self, size: int, group: int) -> Int[Array, " size"]:
        """`size` different rows, `group` of which or more lie around each of the centers."""
        self.key, key = jax.random.split(self.key)
        if group == 1:
            return jax.random.choice(key, self.rows, (size,), replace=False)
        centers = jax.random.permutation(key, len(self.rows))[: -(-size // group)]
        return self.rows[_around(self.scaled, centers, size)]


@eqx.filter_jit
def _around(X: Float[Array, "m d"], centers: Int[Array, " c"], size: int) -> Int[Array, " size"]:
    """The rows that are nearest to any of the centers by rank: first all centers, then the next."""

    def ranks(center: Array) -> Int[Array, " m"]:
        distances = jnp.sum(jnp.square(X - X[center]), axis=1)
        return jnp.argsort(jnp.argsort(distances.at[center].set(-1.0)))

    def nearer(best: Array, center: Array) -> tuple[Array, None]:
        return jnp.minimum(best, ranks(center)), None

    worst = jnp.full(len(X), len(X))
    rank, _ = jax.lax.scan(nearer, worst, centers)
    return jax.lax.top_k(-rank, size)[1]


class _Problem(NamedTuple):
    X: Float[Array, "n d"]
    y: Float[Array, " n"]


class _Fits:
    """Exact fits of a model on subsets of its rows, and what they predict elsewhere."""

    def __init__(
        self,
        key: Array,
        model: Callable[..., Any],
        X: Float[Array, "n d"],
        y: Float[Array, " n"],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        learning_rate: float,
    ) -> None:
        self.exact = _Exact(model)
        self.guide = AutoDelta(self.exact)
        self.svi = SVI(self.exact, self.guide, optax.adam(learning_rate), Trace_ELBO())
        self.key, self.data, self.args, self.kwargs = key, _Problem(X, y), args, kwargs

    def _arguments(self, rows: Int[Array, " m"] | None) -> tuple[Any, ...]:
        data = self.data if rows is None else jax.tree.map(lambda a: a[rows], self.data)
        return (*data, *self.args)

    def _first(self, rows: Int[Array, " m"]) -> SVIState:
        """The state of a fit that begins, whose mutable sites have the shapes of these rows."""
        return self.svi.init(self.key, *self._arguments(rows), **self.kwargs)

    def start(self, rows: Int[Array, " m"]) -> Any:
        """Parameters to start from, by scales of the data."""
        params = self.svi.optim.get_params(self._first(rows).optim_state)
        arguments = self._arguments(rows)
        return jax.jit(lambda p: scaled_start(lambda q: self._processes(q, arguments), p))(params)

    def run(self, start: Any, subsets: Int[Array, "s m"], num_steps: int) -> Any:
        """Fit each subset, from the same start; parameters with a leading axis of subsets."""
        first = self._first(subsets[0])._replace(optim_state=self.svi.optim.init(start))
        params = jax.jit(self._steps, static_argnums=2)(first, subsets, num_steps)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(start), strict=True)
        changed = [jnp.any((a != b).reshape(len(a), -1), axis=1) for a, b in pairs]
        if changed and (stuck := int(jnp.sum(~jnp.any(jnp.stack(changed), axis=0)))):
            warnings.warn(
                f"the fits on {stuck} of {len(subsets)} subsets never left their start: the log "
                "density or its gradient is not finite there, or overflows in this precision. "
                "Standardize `X` and `y`, check the model's priors, or work in float64.",
                RuntimeWarning,
                stacklevel=3,
            )
        return params

    def _steps(self, first: SVIState, subsets: Int[Array, "s m"], num_steps: int) -> Any:
        def on_subset(rows: Array) -> Any:
            arguments = self._arguments(rows)

            def step(state: Any, _: None) -> tuple[Any, None]:
                # A step that fails leaves the parameters where they were.
                return self.svi.stable_update(state, *arguments, **self.kwargs)[0], None

            state, _ = jax.lax.scan(step, first, length=num_steps)
            return self.svi.optim.get_params(state.optim_state)

        return jax.lax.map(on_subset, subsets)

    def values(self, params: Any) -> dict[str, Any]:
        """Values of the latent sites and of the model's own parameters."""
        params = self.svi.constrain_fn(params)
        latents = self.guide.median(params)
        own = {f"{name}_{self.guide.prefix}_loc" for name in latents}
        return {**latents, **{name: value for name, value in params.items() if name not in own}}

    def _processes(
        self, params: Any, arguments: tuple[Any, ...]
    ) -> list[tuple[GaussianProcess, Array]]:
        trace = trace_of(self.exact, self.values(params), arguments, self.kwargs)
        sites = [site for site in trace.values() if is_observed(site)]
        found = [(unwrapped(site["fn"])[0], site["value"]) for site in sites]
        found = [(fn, value) for fn, value in found if isinstance(fn, GaussianProcess)]
        if not found:
            raise ValueError(
                "`model` must have an observed `GaussianProcess` site, and has none: "
                "hyperparameters of a latent GP come from a fit by SVI."
            )
        return found

    def score(self, params: Any, held: Int[Array, " t"], num_neighbors: int) -> np.ndarray:
        """Log densities of the held rows given their neighbors, summed over the GP sites."""
        count = min(num_neighbors, len(self.data.y) - 1)
        total = np.zeros(len(held))
        for gp, y in self._processes(params, self._arguments(None)):
            noise = jnp.broadcast_to(gp.noise_variance, gp.event_shape)
            found = _predict_from_neighbors(gp.kernel, gp.X, noise, y - gp.mean, held, count)
            total += np.asarray(found, float)
        return np.where(np.isfinite(total), total, -np.inf)


@eqx.filter_jit
def _predict_from_neighbors(
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    noise: Float[Array, " n"],
    residual: Float[Array, " n"],
    rows: Int[Array, " t"],
    count: int,
) -> Float[Array, " t"]:
    """The log density of each row's residual given those of the rows that say most about it."""
    variance = kernel.diag(X) + noise

    def of_row(row: Array) -> Array:
        # What one other row alone takes from the variance here.
        taken = jnp.square(kernel(X[row][None], X)[0]) / variance
        near = jax.lax.top_k(taken.at[row].set(-jnp.inf), count)[1]
        H = kernel.covariance(X[near]) + jnp.diag(noise[near])
        factor = linalg.factorize(H, warn=False)
        sides = jnp.stack([kernel(X[near], X[row][None])[:, 0], residual[near]], axis=1)
        across, white = solve_triangular(factor.tril, sides, lower=True).T
        left = jnp.maximum(variance[row] - across @ across, noise[row])
        return jax.scipy.stats.norm.logpdf(residual[row], across @ white, jnp.sqrt(left))

    return jax.lax.map(of_row, rows)
