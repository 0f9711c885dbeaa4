"""Hyperparameters for large data, from exact fits to subsets."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.infer.fits import Fits
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model

# The size of a random observation's group of neighbors, itself included.
_GROUP = 8

# Candidates disagree if their mean log densities differ by more than this, and by more than two
# standard errors: then a larger subset is worth its time.
_AGREEMENT = 0.01

# Initial values that differ by more than this, on the unconstrained scale, may lead to different
# modes.
_FAR_APART = 1.5
_FROM_MEDIANS = "random rows, from the priors' medians"

# Refinement steps on up to `_MANY_ROWS` observations, and how many of them between two scores.
_REFINEMENTS = 20
_MANY_ROWS = 50_000
_STEPS_PER_SCORE = 4

# Seconds before a progress bar appears.
_DELAY = 3.0


@jax.tree_util.register_pytree_node_class
class Hyperparameters(dict[str, Any]):
    """Values of a model's latent sites and parameters, by name, and the fit that they come from.

    A dict, for `sgp.posterior(model, values, X, y)`, `init_to_value(values=...)` and the handlers
    `substitute` and `condition`.

    Args:
        values: values by name, fitted or chosen by you.
        picked: a description of the fit.
        scores: for each candidate its name, the mean log density of a held-out observation, and the
            standard error; empty if no observation was held out.

    Raises:
        TypeError: if `values` is not a dict.

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
        expected = "a dict of values by the names of the model's sites"
        super().__init__(checks.instance("values", values, Mapping, expected))
        self.picked, self.scores = picked, scores

    def copy(self) -> "Hyperparameters":
        """The same values and scores, in another dict."""
        return Hyperparameters(self, self.picked, self.scores)

    def __or__(self, values: Mapping[str, Any]) -> "Hyperparameters":  # type: ignore[override]
        """These values updated by `values`, without scores."""
        return Hyperparameters({**self, **values})

    @property
    def report(self) -> str:
        """The selected fit and the scores of all candidates, in one line."""
        if not self.scores:
            return f"hyperparameters from {self.picked}"
        ranked = sorted(self.scores, key=lambda score: -score[1])
        table = ", ".join(f"{name} {mean:.3f} +- {error:.3f}" for name, mean, error in ranked)
        return f"hyperparameters from {self.picked}: log density of a row left out: {table}"

    def tree_flatten(self) -> tuple[Any, Any]:
        """The values sorted by name, and the static fields."""
        names = tuple(sorted(self))
        return tuple(self[name] for name in names), (names, self.picked, self.scores)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "Hyperparameters":
        """The inverse of flattening."""
        names, picked, scores = static
        return cls(dict(zip(names, children, strict=True)), picked, scores)


@model_keywords_first(lambda key, model, *_: (model, 2))
def initial_hyperparameters(
    key: Key[Array, ""],
    model: Callable[..., Any],
    X: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, " n"],
    *model_args: Any,
    subset_size: int = 1500,
    num_subsets: int = 3,
    num_steps: int = 60,
    learning_rate: float = 0.1,
    num_scored: int = 1000,
    num_neighbors: int = 400,
    num_refinements: int | None = None,
    progress_bar: bool = True,
    **model_kwargs: Any,
) -> Hyperparameters:
    """Fit a model exactly to subsets of the data, and select the fit that predicts best.

    The candidates are a fit to random observations, a fit to random observations and their
    neighbors, and the average of fits to neighborhoods, taken on the unconstrained scale. Which
    candidate is best depends on the data: a random subset has too few close pairs to tell short
    lengthscales from noise, and a neighborhood is informative about its region only. Each fit is
    the posterior mode, found by Adam with the exact log marginal likelihood, for any estimator of
    the model. Initial lengthscales are near the median distance between inputs; if the prior
    medians are far from them, one more fit to random observations starts at the prior medians.

    The score of a candidate is the mean log density of held-out observations, each given the other
    observations that are most correlated with it under the candidate's kernel. So the score
    measures predictions from all data, not from a subset. The best candidate is then refined by
    steps on all observations that are not held out, until the score stops rising. These steps use
    the pathwise estimator, with warm starts and a few epochs of `AlternatingProjections` each.
    Without refinement, if candidates disagree, one more candidate is fitted to a subset of twice
    the size. If one subset holds all the data, there is no score.

    Args:
        key: a typed JAX key.
        model: a model whose first two arguments are inputs and observations, with an observed
            `GaussianProcess` site.
        X: inputs, shape (n, d). Distances between neighbors are Euclidean, with each input
            dimension scaled to unit variance.
        y: observations, shape (n,).
        *model_args: the model's further positional arguments.
        subset_size: observations in each subset; if n is not larger, one fit uses all of them.
        num_subsets: number of neighborhoods.
        num_steps: steps of Adam on each subset.
        learning_rate: step size of Adam, on the unconstrained scale.
        num_scored: number of held-out observations, at most n / 5.
        num_neighbors: number of observations from which each held-out observation is predicted.
        num_refinements: at most this many steps on all observations, each with the work of about
            nine products with the n x n matrix; 0 for none. None for 20 on up to 50,000
            observations, and the same total work for larger n.
        progress_bar: whether fits and steps that take longer than a few seconds show their progress
            on stderr.
        **model_kwargs: the model's keyword arguments.

    Returns:
        `Hyperparameters`, a dict of values of the model's latent sites and `numpyro.param` sites,
        for `sgp.posterior(model, values, X, y)`, `numpyro.infer.init_to_value(values=...)` and, if
        the model has `numpyro.param` sites, the `init_params` of `SVI.run`. Its `report` names the
        selected fit and all scores. Time O(num_steps num_subsets subset_size^3 + num_scored (n d +
        num_neighbors^3) + num_refinements n^2 d), memory O(1000 n). Warns if a fit never left its
        initial values.

    Raises:
        ValueError: if a count is less than 1, `y` does not match `X`, `X` or `y` holds NaN or
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
    model_kwargs = of_model(model_kwargs)
    for name, number in (
        ("subset_size", subset_size),
        ("num_subsets", num_subsets),
        ("num_steps", num_steps),
        ("num_scored", num_scored),
        ("num_neighbors", num_neighbors),
    ):
        checks.count(name, number)
    if num_refinements is not None:
        checks.count("num_refinements", num_refinements, 0)
    checks.number("learning_rate", learning_rate, "(0, inf)")
    checks.instance("progress_bar", progress_bar, bool, "True or False")
    if np.ndim(X) > 2:
        raise ValueError(
            f"`X` must have shape (n, d), got {np.shape(X)}: for a batch, give the inputs of one "
            "member, and a model of it."
        )
    key, X, y = checks.as_key(key), checks.inputs("X", X), checks.as_float(y, "y")
    checks.shape("y", y, X.shape[:1], why="one value for each row of `X`")
    checks.finite("y", y)
    n = len(X)
    order, *keys = _order_and_keys(key, n)
    fits = Fits(keys[0], model, X, y, model_args, model_kwargs, learning_rate)
    if n <= subset_size:
        (params,) = fits.run([(fits.starts(order)[0], order)], num_steps)
        return Hyperparameters(fits.values(params), f"a fit of all {n} rows", ())
    held_out, training = map(jnp.asarray, np.split(order, [max(1, min(num_scored, n // 5))]))
    subset_size = min(subset_size, len(training))
    if num_refinements is None:
        num_refinements = int(_REFINEMENTS * min(1.0, (_MANY_ROWS / n) ** 2))
    subsets = _Subsets(keys[1], X, training)
    start, medians = fits.starts(training[:subset_size])
    rows = [subsets.draw(subset_size, group) for group in (1, _GROUP, *num_subsets * [n])]
    tasks = [(start, subset) for subset in rows]
    if _far_apart(start, medians):
        tasks.append((medians, rows[0]))
    candidates = _Candidates(lambda params: fits.score(params, held_out, num_neighbors))
    total = len(tasks) + num_refinements
    with tqdm.tqdm(total=total, delay=_DELAY, disable=not progress_bar) as bar:
        bar.set_description("fits of subsets")
        fitted = list(_with_progress(bar, fits.run(tasks, num_steps)))
        candidates.add("random rows", fitted[0])
        candidates.add("random rows with neighbors", fitted[1])
        neighborhoods = fitted[2 : len(rows)]
        mean = jax.tree.map(lambda *leaves: jnp.asarray(np.mean(leaves, axis=0)), *neighborhoods)
        candidates.add("neighborhoods", mean)
        for params in fitted[len(rows) :]:
            candidates.add(_FROM_MEDIANS, params)
        best = candidates.best
        if num_refinements:
            refined = fits.refine(candidates.params[best], training, num_refinements)
            _refine(bar, candidates, _with_progress(bar, refined), num_refinements)
        elif candidates.disagree() and len(training) > subset_size:
            size = min(2 * subset_size, len(training))
            groups = {"random rows": 1, _FROM_MEDIANS: 1, "neighborhoods": subset_size // 4}
            larger = candidates.params[best], subsets.draw(size, groups.get(best, _GROUP))
            (params,) = fits.run([larger], max(1, num_steps // 4))
            candidates.add(f"{best}, {size} of them", params)
    best = candidates.best
    return Hyperparameters(fits.values(candidates.params[best]), best, candidates.summary())


@compiled
def _order_and_keys(key: Array, n: int) -> tuple[Int[Array, " n"], Array, Array]:
    """A random order of n rows, and two keys."""
    keys = jax.random.split(key, 3)
    return jax.random.permutation(keys[0], n), keys[1], keys[2]


def _far_apart(start: Any, medians: Any) -> bool:
    """Whether two initial values differ enough to fit from both of them."""
    pairs = zip(jax.tree.leaves(start), jax.tree.leaves(medians), strict=True)
    return any(np.any(np.abs(np.asarray(a) - np.asarray(b)) > _FAR_APART) for a, b in pairs)


def _with_progress(bar: tqdm.tqdm, items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        yield jax.block_until_ready(item)
        bar.update()


def _refine(
    bar: tqdm.tqdm, candidates: "_Candidates", refined: Iterator[Any], num_steps: int
) -> None:
    """Add the best of the refinement steps as a candidate; stop when the score stops rising."""
    best = candidates.best
    name, top, num_falls = f"{best}, then all rows", candidates.mean(best), 0
    for count, params in enumerate(refined, 1):
        bar.set_description(f"steps on all rows from {best} ({top:.3f})")
        if count % _STEPS_PER_SCORE and count < num_steps:
            continue
        score = candidates.add(name, params)
        num_falls = 0 if score > top else num_falls + 1
        top = max(top, score)
        if num_falls == 2:
            return


class _Candidates:
    """Fitted parameters by the name of the fit, and held-out log densities under each of them."""

    def __init__(self, score: Callable[[Any], np.ndarray]) -> None:
        self.score = score
        self.params: dict[str, Any] = {}
        self.scores: dict[str, np.ndarray] = {}

    def add(self, name: str, params: Any) -> float:
        """Score a candidate, which replaces a worse one of the same name; returns the score."""
        densities = self.score(params)
        score = float(np.mean(densities))
        if name not in self.scores or score > self.mean(name):
            self.params[name], self.scores[name] = params, densities
        return score

    def mean(self, name: str) -> float:
        """The score of a candidate."""
        return float(np.mean(self.scores[name]))

    @property
    def best(self) -> str:
        """The name with the largest score; of equal scores, the first."""
        return max(self.scores, key=self.mean)

    def disagree(self) -> bool:
        """Whether a score is below the best by `_AGREEMENT` and two standard errors."""
        best = self.scores[self.best]
        for densities in self.scores.values():
            if not np.isfinite(densities).all():
                return True
            mean, error = _mean_and_error(best - densities)
            if mean > max(_AGREEMENT, 2.0 * error):
                return True
        return False

    def summary(self) -> tuple[tuple[str, float, float], ...]:
        """Names, scores and standard errors."""
        return tuple((name, *_mean_and_error(scores)) for name, scores in self.scores.items())


def _mean_and_error(densities: np.ndarray) -> tuple[float, float]:
    return float(np.mean(densities)), float(np.std(densities) / np.sqrt(len(densities)))


class _Subsets:
    """Draws subsets of observations: groups of neighbors around random centers."""

    def __init__(self, key: Array, X: Float[Array, "n d"], rows: Int[Array, " m"]) -> None:
        self.key, self.X, self.rows = key, X, rows

    def draw(self, size: int, group: int) -> Int[Array, " size"]:
        """`size` distinct rows: neighbors of random centers, one center for each `group` rows."""
        rows, self.key = _drawn(self.key, self.X, self.rows, size, group)
        return rows


@compiled
def _drawn(
    key: Array, X: Float[Array, "n d"], rows: Int[Array, " m"], size: int, group: int
) -> tuple[Int[Array, " size"], Array]:
    """See `_Subsets.draw`; and the next key."""
    next_key, key = jax.random.split(key)
    if group == 1:
        return jax.random.choice(key, rows, (size,), replace=False), next_key
    scale = jnp.std(X, axis=0)
    scaled = X[rows] / jnp.where(scale > 0, scale, 1.0)
    centers = jax.random.permutation(key, len(rows))[: -(-size // group)]
    return rows[_around(scaled, centers, size)], next_key


def _around(X: Float[Array, "m d"], centers: Int[Array, " c"], size: int) -> Int[Array, " size"]:
    """The rows with the smallest rank among any center's neighbors; a center has rank zero."""

    def ranks(center: Array) -> Int[Array, " m"]:
        distances = jnp.sum(jnp.square(X - X[center]), axis=1)
        return jnp.argsort(jnp.argsort(distances.at[center].set(-1.0)))

    def nearer(best: Array, center: Array) -> tuple[Array, None]:
        return jnp.minimum(best, ranks(center)), None

    worst = jnp.full(len(X), len(X))
    rank, _ = jax.lax.scan(nearer, worst, centers)
    return jax.lax.top_k(-rank, size)[1]
