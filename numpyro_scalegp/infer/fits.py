"""Fits of a model's hyperparameters to subsets of the data, and their predictive scores."""

import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Int
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.svi import SVIState
from numpyro.primitives import Messenger

from numpyro_scalegp.core.device import memory_share
from numpyro_scalegp.integrated.cholesky import Cholesky
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.gaussian_process import GaussianProcess
from numpyro_scalegp.integrated.iterative.hutchinson import Hutchinson
from numpyro_scalegp.integrated.iterative.pathwise import Pathwise
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.likelihoods.elbo import AbstractParticleELBO, ModelAndGuide, elbo_terms
from numpyro_scalegp.likelihoods.likelihood import summed
from numpyro_scalegp.linear.alternating_projections import AlternatingProjections
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.programs.compiled import CompiledForLoop, compiled
from numpyro_scalegp.sites.rows import unwrapped
from numpyro_scalegp.tracing.first_run import initial_state
from numpyro_scalegp.tracing.fitted_runs import trace_of
from numpyro_scalegp.tracing.runs import is_observed, mutable_values, traced
from numpyro_scalegp.tracing.starting_values import deviation, lengthscale_pairs, scaled_start

# Initial values: the noise variance as a fraction of the observations' variance, lengthscales as a
# fraction of the median distance between inputs.
_NOISE_SHARE = 0.1
_DISTANCE_SHARE = 0.5**0.5


def _exact(gp: GaussianProcess) -> AbstractEstimator:
    return Cholesky()


def _iterative(gp: GaussianProcess) -> AbstractEstimator:
    """An estimator for steps on many observations, each a warm start from the step before."""
    kind: type[Pathwise | Hutchinson] = Pathwise
    try:
        jax.eval_shape(lambda: gp.kernel.random_features(jax.random.key(0), gp.X[:1], 2))
    except ValueError:
        kind = Hutchinson  # the kernel has no random features
    return kind(AlternatingProjections(max_epochs=5), num_probes=16, num_logdet_probes=0)


class _JointDensity(AbstractParticleELBO):
    """The log joint density at the values of an `AutoDelta`.

    NumPyro's `Trace_ELBO` is the same, but adds sites in an order that differs between processes,
    so that none finds the programs of another in a compilation cache.
    """

    def __init__(self) -> None:
        super().__init__(1, vectorize_particles=True)

    def particle(self, key: Array, pair: ModelAndGuide) -> tuple[Float[Array, ""], dict[str, Any]]:
        """The density, and the mutable state."""
        (model_key, guide_key), (params, model, guide, args, kwargs) = jax.random.split(key), pair
        of_guide = traced(guide, guide_key, params, args, kwargs)
        params = {**params, **mutable_values(of_guide)}
        of_model = traced(model, model_key, params, args, kwargs, replayed=of_guide)
        mutable = {**mutable_values(of_guide), **mutable_values(of_model)}
        return summed(elbo_terms(of_model, of_guide)), mutable


class _ReplaceEstimators(Messenger):
    """Replaces the estimators of the Gaussian processes of a model."""

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
                    "rows that are not observed: give a model of a single process, and only the "
                    "rows that have a target."
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


class _Data(NamedTuple):
    X: Float[Array, "m d"]
    y: Float[Array, " m"]


class Fits:
    """Fits of a model to subsets of the data, and their scores on held-out observations."""

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
        self.key, self.data, self.args, self.kwargs = key, _Data(X, y), args, kwargs
        self.model, self.learning_rate = model, learning_rate
        self.exact = _ReplaceEstimators(model, _exact)
        self.svi = SVI(
            self.exact, AutoDelta(self.exact), optax.adam(learning_rate), _JointDensity()
        )
        # One program for each, not one for each operation.
        self._exact_steps = CompiledForLoop(self._steps)
        self._scores = CompiledForLoop(self._densities)
        self._constrained = CompiledForLoop(self._values)
        self._initialized = CompiledForLoop(self.svi.optim.init)

    def _subset(self, rows: Int[Array, " m"]) -> _Data:
        return _at(self.data, rows)

    def _initial_state(self, svi: SVI, data: _Data) -> SVIState:
        """The state before the first step."""
        return initial_state(svi, self.key, (*data, *self.args), self.kwargs)[0]

    def starts(self, rows: Int[Array, " m"]) -> tuple[Any, Any]:
        """Two initial values: scaled to the data, and at the prior medians."""
        data = self._subset(rows)
        medians = self.svi.optim.get_params(self._initial_state(self.svi, data).optim_state)

        @compiled
        def scaled(params: Any, data: _Data) -> Any:
            return scaled_start(lambda params: self._scales(params, data), params)

        return scaled(medians, data), medians

    def _scales(self, params: Any, data: _Data) -> list[tuple[Array, Array]]:
        """Quantities that depend on the parameters, and their target values."""
        return [pair for gp, y in self._processes(params, data) for pair in _scales(gp, y)]

    def run(self, tasks: list[tuple[Any, Int[Array, " m"]]], num_steps: int) -> Iterator[Any]:
        """Fit each subset exactly from its initial parameters, and yield the fitted parameters."""
        first, num_stuck = self._initial_state(self.svi, self._subset(tasks[0][1])), 0
        for start, rows in tasks:
            state = first._replace(optim_state=self._initialized(start))
            params = self._exact_steps(state, self._subset(rows), num_steps)
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(start), strict=True)
            num_stuck += bool(start) and all([np.array_equal(a, b) for a, b in pairs])
            yield params
        if num_stuck:
            warnings.warn(
                f"the fits on {num_stuck} of {len(tasks)} subsets never left their start: the "
                "log density or its gradient is not finite there, or overflows in this precision. "
                "Standardize `X` and `y`, check the model's priors, or work in float64.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _steps(self, initial_state: SVIState, data: _Data, num_steps: int) -> Any:
        def step(state: Any, _: None) -> tuple[Any, None]:
            # A step that fails leaves the parameters unchanged.
            return self.svi.stable_update(state, *data, *self.args, **self.kwargs)[0], None

        state, _ = jax.lax.scan(step, initial_state, length=num_steps)
        return self.svi.optim.get_params(state.optim_state)

    def refine(self, start: Any, rows: Int[Array, " m"], num_steps: int) -> Iterator[Any]:
        """Fit many observations from `start`, and yield the parameters after each step."""
        # `start` is near the mode, and decaying steps average the noise of the gradients.
        rate = optax.cosine_decay_schedule(0.5 * self.learning_rate, num_steps)
        # The guide is set up for the same sites.
        model, data = _ReplaceEstimators(self.model, _iterative), self._subset(rows)
        svi = SVI(model, self.svi.guide, optax.adam(rate), _JointDensity())
        state = self._initial_state(svi, data)
        state = state._replace(optim_state=CompiledForLoop(svi.optim.init)(start))
        step = CompiledForLoop(
            lambda state, data: svi.stable_update(state, *data, *self.args, **self.kwargs)[0]
        )
        for _ in range(num_steps):
            state = step(state, data)
            yield svi.optim.get_params(state.optim_state)

    def values(self, params: Any) -> dict[str, Any]:
        """Values of the latent sites and of the model's own parameters."""
        return self._constrained(params)

    def _values(self, params: Any) -> dict[str, Any]:
        params, guide = self.svi.constrain_fn(params), self.svi.guide
        latents = guide.median(params)
        guide_params = {f"{name}_{guide.prefix}_loc" for name in latents}
        model_params = {name: v for name, v in params.items() if name not in guide_params}
        return {**latents, **model_params}

    def _processes(self, params: Any, data: _Data) -> list[tuple[GaussianProcess, Array]]:
        """The observed Gaussian processes over the data, and their observations."""
        trace = trace_of(self.exact, self._values(params), (*data, *self.args), self.kwargs)
        sites = [site for site in trace.values() if is_observed(site) and not _is_hidden(site)]
        observed = [(unwrapped(site["fn"])[0], site["value"]) for site in sites]
        processes = [
            (fn, value)
            for fn, value in observed
            if isinstance(fn, GaussianProcess) and len(fn.X) == len(data.y)
        ]
        if not processes:
            raise ValueError(
                "`model` must have an observed `GaussianProcess` site over the rows of `X`, and "
                "has none: hyperparameters of a latent GP come from a fit by SVI."
            )
        return processes

    def score(self, params: Any, held_out: Int[Array, " t"], num_neighbors: int) -> np.ndarray:
        """Log densities of held-out observations given their neighbors, summed over GP sites."""
        count = min(num_neighbors, len(self.data.y) - 1)
        total = np.asarray(self._scores(params, self.data, held_out, count), float)
        return np.where(np.isfinite(total), total, -np.inf)

    def _densities(
        self, params: Any, data: _Data, held_out: Int[Array, " t"], count: int
    ) -> Float[Array, " t"]:
        def of_process(gp: GaussianProcess, y: Array) -> Array:
            noise, residual = jnp.broadcast_to(gp.noise_variance, gp.event_shape), y - gp.mean
            return _log_density_given_neighbors(gp.kernel, gp.X, noise, residual, held_out, count)

        densities = [of_process(*pair) for pair in self._processes(params, data)]
        return functools.reduce(operator.add, densities)


@compiled
def _at(data: _Data, rows: Int[Array, " m"]) -> _Data:
    return jax.tree.map(lambda leaf: leaf[rows], data)


def _scales(gp: GaussianProcess, y: Array) -> list[tuple[Array, Array]]:
    """Quantities that depend on a GP's hyperparameters, and their target values.

    The targets are the observations' variance for the function's mean variance, a tenth of it for
    the noise variance, and distances between inputs for the lengthscales.
    """
    variance = jnp.square(deviation(y - gp.mean))
    return [
        *lengthscale_pairs(gp.kernel, gp.X, _DISTANCE_SHARE),
        (jnp.mean(gp.kernel.each(lambda kernel, X: kernel.evaluate_diag(X), gp.X)), variance),
        (jnp.mean(gp.noise_variance), _NOISE_SHARE * variance),
    ]


def _is_hidden(site: dict[str, Any]) -> bool:
    """Whether `handlers.mask(mask=False)` excludes a site from the density."""
    return getattr(site["fn"], "_mask", None) is False


@compiled
def _log_density_given_neighbors(
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    noise: Float[Array, " n"],
    residual: Float[Array, " n"],
    rows: Int[Array, " t"],
    count: int,
) -> Float[Array, " t"]:
    """The log density of each residual given the `count` residuals most correlated with it."""
    variance = kernel.evaluate_diag(X) + noise

    def log_density(row: Array) -> Array:
        # The reduction of this row's variance by each other observation alone.
        reduction = jnp.square(kernel.evaluate(X[row][None], X)[0]) / variance
        near = jax.lax.top_k(reduction.at[row].set(-jnp.inf), count)[1]
        H = kernel.evaluate_covariance(X[near]) + jnp.diag(noise[near])
        factor = linalg.factorize(H, warn=False)
        sides = jnp.stack([kernel.evaluate(X[near], X[row][None])[:, 0], residual[near]], axis=1)
        cross, white = solve_triangular(factor.tril, sides, lower=True).T
        conditional_variance = jnp.maximum(variance[row] - cross @ cross, noise[row])
        return jax.scipy.stats.norm.logpdf(
            residual[row], cross @ white, jnp.sqrt(conditional_variance)
        )

    # Several factorizations at a time on an accelerator, in a share of its memory.
    batch_size = memory_share(1 / 400, 0) // (4 * X.dtype.itemsize * count**2)
    return jax.lax.map(log_density, rows, batch_size=batch_size if batch_size > 1 else None)
