"""Fits of a model's hyperparameters on some of its rows, and what they predict elsewhere."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Int
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.svi import SVIState
from numpyro.primitives import Messenger

from numpyro_scalegp.core import linalg
from numpyro_scalegp.core.programs import CompiledForLoop, compiled
from numpyro_scalegp.distributions import GaussianProcess
from numpyro_scalegp.distributions.rows import unwrapped
from numpyro_scalegp.estimators import AbstractEstimator, Cholesky, Hutchinson, Pathwise
from numpyro_scalegp.infer.fitted_runs import trace_of
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.solvers import AlternatingProjections
from numpyro_scalegp.tracing.runs import is_observed
from numpyro_scalegp.tracing.starting_values import deviation, lengthscale_pairs, scaled_start

# Of the observations' variance, what the noise starts at, and of the median distance between rows
# what lengthscales do.
_NOISE_SHARE = 0.1
_DISTANCE_SHARE = 0.5**0.5


def _exact(gp: GaussianProcess) -> AbstractEstimator:
    return Cholesky()


def _iterative(gp: GaussianProcess) -> AbstractEstimator:
    """Of a step on many rows, which goes on from the solutions of the one before."""
    kind: type[Pathwise | Hutchinson] = Pathwise
    try:
        jax.eval_shape(lambda: gp.kernel.random_features(jax.random.key(0), gp.X[:1], 2))
    except ValueError:
        kind = Hutchinson  # which needs no random features
    return kind(AlternatingProjections(max_epochs=5), num_probes=16, num_logdet_probes=0)


class _Reestimated(Messenger):
    """Runs a model with other estimators in place of its Gaussian processes' own."""

    def __init__(
        self,
        model: Callable[..., Any],
        estimator_of: Callable[[GaussianProcess], AbstractEstimator],
    ) -> None:
        super().__init__(model)
        self.estimator_of = estimator_of

    def process_message(self, msg: dict) -> None:
        fn = msg.get("fn")
        if msg["type"] == "sample" and isinstance(fn, GaussianProcess):
            if fn.batch_shape or fn.observed is not None:
                raise ValueError(
                    f"`model` has a batch of Gaussian processes at the site `{msg['name']}`, or "
                    "rows that are not observed: give a model of one, and those of its rows that "
                    "have a target."
                )
            estimator = self.estimator_of(fn)
            msg["fn"] = GaussianProcess(
                fn.kernel,
                fn.X,
                fn.noise_variance,
                mean=fn.mean_function,
                estimator=estimator,
                state=f"{msg['name']}_solver" if estimator.is_stochastic else None,
            )


class _Rows(NamedTuple):
    X: Float[Array, "m d"]
    y: Float[Array, " m"]


class Fits:
    """Fits of a model on some of its rows, and what they predict elsewhere."""

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
        self.key, self.all, self.args, self.kwargs = key, _Rows(X, y), args, kwargs
        self.model, self.learning_rate = model, learning_rate
        self.exact = _Reestimated(model, _exact)
        self.svi = _svi(self.exact, learning_rate)
        self._exact_steps = CompiledForLoop(self._steps)

    def _of(self, rows: Int[Array, " m"]) -> _Rows:
        return jax.tree.map(lambda leaf: leaf[rows], self.all)

    def _first(self, svi: SVI, rows: _Rows) -> SVIState:
        """The state of a fit that begins, whose mutable sites have the shapes of these rows."""
        return svi.init(self.key, *rows, *self.args, **self.kwargs)

    def starts(self, subset: Int[Array, " m"]) -> tuple[Any, Any]:
        """Parameters to start from: by scales of the data, and at the priors' medians."""
        rows = self._of(subset)
        medians = self.svi.optim.get_params(self._first(self.svi, rows).optim_state)

        @compiled
        def scaled(params: Any, rows: _Rows) -> Any:
            return scaled_start(lambda params: self._pairs(params, rows), params)

        return scaled(medians, rows), medians

    def _pairs(self, params: Any, rows: _Rows) -> list[tuple[Array, Array]]:
        """What depends on parameters, and what that is wanted to be."""
        return [pair for one in self._processes(params, rows) for pair in _scales(*one)]

    def run(self, tasks: list[tuple[Any, Int[Array, " m"]]], num_steps: int) -> Iterator[Any]:
        """Fit subsets exactly, each from its start: their parameters."""
        first, num_stuck = self._first(self.svi, self._of(tasks[0][1])), 0
        for start, subset in tasks:
            state = first._replace(optim_state=self.svi.optim.init(start))
            params = self._exact_steps(state, self._of(subset), num_steps)
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(start), strict=True)
            num_stuck += bool(start) and all([bool(jnp.all(a == b)) for a, b in pairs])
            yield params
        if num_stuck:
            warnings.warn(
                f"the fits on {num_stuck} of {len(tasks)} subsets never left their start: the "
                "log density or its gradient is not finite there, or overflows in this precision. "
                "Standardize `X` and `y`, check the model's priors, or work in float64.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _steps(self, first: SVIState, rows: _Rows, num_steps: int) -> Any:
        def step(state: Any, _: None) -> tuple[Any, None]:
            # A step that fails leaves the parameters where they were.
            return self.svi.stable_update(state, *rows, *self.args, **self.kwargs)[0], None

        state, _ = jax.lax.scan(step, first, length=num_steps)
        return self.svi.optim.get_params(state.optim_state)

    def refine(self, start: Any, subset: Int[Array, " m"], num_steps: int) -> Iterator[Any]:
        """Go on from `start` on many rows: the parameters after each step."""
        # From near the mode, and at the end the steps average the noise of the gradients.
        rate = optax.cosine_decay_schedule(0.5 * self.learning_rate, num_steps)
        svi, rows = _svi(_Reestimated(self.model, _iterative), rate), self._of(subset)
        state = self._first(svi, rows)._replace(optim_state=svi.optim.init(start))
        step = CompiledForLoop(
            lambda state, rows: svi.stable_update(state, *rows, *self.args, **self.kwargs)[0]
        )
        for _ in range(num_steps):
            state = step(state, rows)
            yield svi.optim.get_params(state.optim_state)

    def values(self, params: Any) -> dict[str, Any]:
        """Values of the latent sites and of the model's own parameters."""
        params, guide = self.svi.constrain_fn(params), self.svi.guide
        latents = guide.median(params)
        own = {f"{name}_{guide.prefix}_loc" for name in latents}
        return {**latents, **{name: value for name, value in params.items() if name not in own}}

    def _processes(self, params: Any, rows: _Rows) -> list[tuple[GaussianProcess, Array]]:
        trace = trace_of(self.exact, self.values(params), (*rows, *self.args), self.kwargs)
        sites = [site for site in trace.values() if is_observed(site) and not _is_hidden(site)]
        found = [(unwrapped(site["fn"])[0], site["value"]) for site in sites]
        found = [
            (fn, value)
            for fn, value in found
            if isinstance(fn, GaussianProcess) and len(fn.X) == len(rows.y)  # not others' rows
        ]
        if not found:
            raise ValueError(
                "`model` must have an observed `GaussianProcess` site over the rows of `X`, and "
                "has none: hyperparameters of a latent GP come from a fit by SVI."
            )
        return found

    def score(self, params: Any, held: Int[Array, " t"], num_neighbors: int) -> np.ndarray:
        """Log densities of the held rows given their neighbors, summed over the GP sites."""
        count = min(num_neighbors, len(self.all.y) - 1)
        total = np.zeros(len(held))
        for gp, y in self._processes(params, self.all):
            noise = jnp.broadcast_to(gp.noise_variance, gp.event_shape)
            found = _predict_from_neighbors(gp.kernel, gp.X, noise, y - gp.mean, held, count)
            total += np.asarray(found, float)
        return np.where(np.isfinite(total), total, -np.inf)


def _scales(gp: GaussianProcess, y: Array) -> list[tuple[Array, Array]]:
    """Hyperparameters of a GP over observations, and what they are wanted to be.

    The mean variance of the function that of the observations, the noise variance a tenth of it.
    """
    variance = jnp.square(deviation(y - gp.mean))
    return [
        *lengthscale_pairs(gp.kernel, gp.X, _DISTANCE_SHARE),
        (jnp.mean(gp.kernel.diag(gp.X)), variance),
        (jnp.mean(gp.noise_variance), _NOISE_SHARE * variance),
    ]


def _is_hidden(site: dict[str, Any]) -> bool:
    """Whether `handlers.mask(mask=False)` leaves a site out of the density."""
    return getattr(site["fn"], "_mask", None) is False


def _svi(model: Callable[..., Any], learning_rate: Any) -> SVI:
    return SVI(model, AutoDelta(model), optax.adam(learning_rate), Trace_ELBO())


@compiled
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
