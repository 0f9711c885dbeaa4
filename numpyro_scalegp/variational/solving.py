"""Guides that solve for the optimal weights of their mean."""

import abc
import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from numpyro_scalegp.core import batches, checks, chunks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.likelihoods.likelihood import ExpectedLikelihood, pseudo_observations
from numpyro_scalegp.processes.expansion import KernelFunctions
from numpyro_scalegp.programs.compiled import compiled_unless_traced
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.tracing.sites import GPSite, Model, WithoutSite
from numpyro_scalegp.variational.bases import Basis, growing_bases, hold_categories
from numpyro_scalegp.variational.coordinates import MeanCoordinates
from numpyro_scalegp.variational.guide import AbstractGPGuide, Rest, set_up
from numpyro_scalegp.variational.representer_weights import RepresenterWeights, representer_weights


class SolvedMean(NamedTuple):
    """Parameters with a new mean, and how the linear solve of the last Newton step went.

    Arrays have the batch shape of the functions in a plate, () for a single function.
    """

    params: dict[str, Any]
    residual: Float[Array, "*batch"]  # relative to the residual of a zero mean
    iterations: Int[Array, "*batch"]  # 0 where the solve is direct
    converged: Bool[Array, "*batch"]


def solved_mean(
    params: dict[str, Any],
    residual: Float[Array, "*batch"],
    iterations: Int[Array, "*batch"],
    converged: Bool[Array, "*batch"],
) -> SolvedMean:
    """The result of `solve_mean`, with a warning on the host if the solve did not converge."""
    failed = ~jnp.all(converged)
    call_where(failed, _warn_of_residual, jnp.max(residual), jnp.max(iterations))
    return SolvedMean(params, residual, iterations, converged)


def _warn_of_residual(residual: ArrayLike, iterations: ArrayLike) -> None:
    warnings.warn(
        f"`solve_mean` ended with a residual of {np.asarray(residual):.2g} after {iterations} "
        "iterations, above its tolerance: the mean is not the optimum. Raise `max_iterations`, "
        "spread the points over the inputs, or work in float64; with little noise, float32 "
        "may not get further. Check the inputs for NaN if the residual is NaN.",
        RuntimeWarning,
        stacklevel=1,
    )


class Linearized(NamedTuple):
    """The start of a Newton step, and the Gaussian pseudo-observations there."""

    site: GPSite  # with all inputs
    family: Any
    params: dict[str, Any]  # of the guide
    mean: Float[Array, "*batch n"]  # of f
    targets: Float[Array, "*batch n"]
    precision: Float[Array, "*batch n"]  # of the targets


class NewtonStep(NamedTuple):
    """The weights of the mean before and after a full Newton step."""

    old: Float[Array, "*batch M"]
    new: Float[Array, "*batch M"]
    mean: Float[Array, "*batch n"]  # of f after the full step
    # From the prior, up to a constant, after the given fraction of the step.
    divergence: Callable[[Array], Array]
    solve: tuple[Array, Array, Array]  # residual, iterations and convergence
    # Maps weights to the guide's parameters for them, by short names.
    parameters: Callable[[Array], dict[str, Array]]


class AbstractSolvingGuide(AbstractGPGuide):
    """Guides that set the weights of their mean to the optimum; see `solve_mean`."""

    @abc.abstractmethod
    def newton_step(self, start: Linearized, **options: Any) -> NewtonStep:
        """Solve for the weights under Gaussian pseudo-observations.

        Args:
            start: the start of the step.
            **options: options of the linear solve.
        """

    def _newton(
        self,
        params: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_newton_steps: int,
        num_nodes: int,
        **options: Any,
    ) -> SolvedMean:
        """Take Newton steps, each shortened until it does not lower the bound."""
        if num_newton_steps < 1:
            raise ValueError(f"`num_newton_steps` must be positive, got {num_newton_steps}.")
        set_up(self, params, args, kwargs)
        solve = compiled_unless_traced(self._newton_steps)
        params, report = solve(params, args, kwargs, num_newton_steps, num_nodes, **options)
        return solved_mean(params, *report)

    def _newton_steps(
        self,
        params: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_newton_steps: int,
        num_nodes: int,
        **options: Any,
    ) -> tuple[dict[str, Any], tuple[Array, Array, Array]]:
        """The parameters after all steps; residual, iterations and convergence of the last."""
        site, likelihood = self._site_and_likelihood(params, args, kwargs, num_nodes)
        if site.partial:
            names = ", ".join(f"`{name}`" for name in site.partial)
            raise ValueError(
                f"`solve_mean` solves for all rows at once, but the plate {names} takes a "
                "mini-batch: give the model all rows, or random rows as if they were all."
            )
        prior_mean = 0.0 if site.prior.mean_function is None else site.prior.mean
        for number in range(num_newton_steps):
            family, mean, variance = self._marginals(params, site, prior_mean)
            if number == 0:
                likelihood.check_rows(mean)
            targets, precision = pseudo_observations(mean, *likelihood.derivatives(mean, variance))
            start = Linearized(site, family, params, mean, targets - prior_mean, precision)
            step = self.newton_step(start, **options)
            length = likelihood.step_length((mean, step.mean), variance, step.divergence)
            new = jnp.where(length == 1.0, step.new, step.old + length * (step.new - step.old))
            values = {self.param_name(site, k): v for k, v in step.parameters(new).items()}
            params = {**params, **values}
        return params, step.solve

    def _site_and_likelihood(
        self, params: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], num_nodes: int
    ) -> tuple[GPSite, ExpectedLikelihood]:
        """The site and the likelihood, with the other sites at their medians and means."""
        values = self.rest_values(params, *args, **kwargs)
        site = self._site(params, values, None, args, kwargs)
        if isinstance(self.model, WithoutSite):
            raise ValueError(
                f"the guide of `{site.name}` is the `rest` of another guide, and does not see that "
                f"guide's function: to solve for `{site.name}`, build a guide with "
                f"site={site.name!r} and the other GP guide as its `rest`; parameters have the "
                "same names."
            )
        return site, ExpectedLikelihood(
            self.model, site.name, params, values, args, kwargs, num_nodes
        )

    def _marginals(
        self, params: dict[str, Any], site: GPSite, prior_mean: Array | float = 0.0
    ) -> tuple[Any, Array, Array]:
        """The family, and the mean and variance of f at the site's inputs."""
        with self._parameters(params, None):
            family = self.family(site, training=False)
        mean, variance = family.posterior().marginals(site.X)
        return family, prior_mean + mean, variance


class AbstractDecoupledGuide(AbstractSolvingGuide):
    """Guides with a large basis for the mean; see `solve_mean`."""

    weights_name: ClassVar[str]  # of the parameter that holds the weights, or their coordinates
    loc_name: ClassVar[str]  # of the parameter that holds their mean at the few points

    def __init__(
        self, model: Model, site: str | None, *, rest: Rest, num_columns: int | None, prefix: str
    ) -> None:
        super().__init__(model, site, rest=rest, prefix=prefix)
        self.num_columns = checks.count_or_none("num_columns", num_columns)

    def columns(self, size: int) -> dict[str, Any]:
        """Arguments by which a family of `size` weights subsamples columns for its divergence."""
        if self.num_columns is None:
            return {}
        return {"num_columns": min(self.num_columns, size), "key": numpyro.prng_key()}

    def grown(
        self, site: GPSite, sizes: dict[str, int], growth: int, *, begins: bool, training: bool
    ) -> dict[str, Basis]:
        """Bases of inputs from the mini-batches so far, each shifted by a parameter."""
        name = self.param_name(site, "bases")
        bases = growing_bases(name, site.X, sizes, growth, begins=begins, grows=training)

        def shifted(key: str, points: Array) -> Array:
            shift = self.param(site, f"{key}_shift", jnp.zeros_like(points))
            return hold_categories(points + shift, site.kernel)

        return {key: Basis(shifted(key, points), active) for key, (points, active) in bases.items()}

    @abc.abstractmethod
    def basis(self, site: GPSite, family: Any) -> tuple[Basis, Float[Array, "*batch M"]]:
        """The points whose weights `solve_mean` sets, and these weights."""

    @abc.abstractmethod
    def coordinates(self, site: GPSite, family: Any) -> MeanCoordinates | None:
        """The coordinates of the weights that gradients train; None for the weights themselves."""

    def fixed_mean(self, family: Any, X: Float[Array, "n d"]) -> Float[Array, "*batch n"]:
        """The terms of the mean at X that `solve_mean` leaves unchanged."""
        return jnp.zeros((*family.batch_shape, X.shape[0]), X.dtype)

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def solve_mean(
        self,
        params: dict[str, Any],
        *args: Any,
        num_newton_steps: int = 1,
        num_nodes: int = 20,
        tolerance: float = 3e-3,
        max_iterations: int = 50,
        **kwargs: Any,
    ) -> SolvedMean:
        """Set the weights of the large basis to their optimum, with everything else fixed.

        For `AutoHybridGP`, the inducing points' contribution to the mean is fixed as well, so that
        they can still be trained afterwards.

        For a Gaussian likelihood the evidence bound is quadratic in the weights, and one linear
        solve maximizes it over *all* observations. Other likelihoods take Newton steps, each
        shortened to the first of 1, 1/2, 1/4, ... of its length that does not lower the bound. SVI
        steps between solves train the other parameters.

        Args:
            params: the guide's parameters, as from `SVI.get_params`, with mutable state if any.
            *args: the model's positional arguments, for all observations and no mini-batch.
            num_newton_steps: positive; 1 is exact for a Gaussian likelihood.
            num_nodes: quadrature nodes for the likelihood's derivatives.
            tolerance: of the linear solve, see `representer_weights`.
            max_iterations: of the linear solve.
            **kwargs: the model's keyword arguments.

        Returns:
            The parameters with the new weights as `params`, and the `residual`, `iterations` and
            `converged` of the last solve, with a warning if it did not converge. The weights are
            optimal for other functions at their means and other sites at their medians, not for
            other hyperparameters that the `rest` guide may draw. Time O(iterations n M d + M^3) for
            each step; it may be jitted.

        Raises:
            ValueError: if the `rest` guide has no medians, a number is not positive, the likelihood
                combines function values of several rows, or a plate takes a mini-batch.

        References:
            Rudi et al. (2017) for the solve; Khan and Lin (2017), Conjugate-Computation Variational
            Inference, for the pseudo-observations of a Newton step.
        """
        options = {"tolerance": tolerance, "max_iterations": max_iterations}
        kwargs = of_model(kwargs)
        return self._newton(params, args, kwargs, num_newton_steps, num_nodes, **options)

    def newton_step(self, start: Linearized, **options: Any) -> NewtonStep:
        """Solve by conjugate gradients; see `AbstractSolvingGuide.newton_step`."""
        site = start.site
        with self._parameters(start.params, None):
            basis, old = self.basis(site, start.family)
            coordinates = self.coordinates(site, start.family)
        offset = [self.fixed_mean(start.family, inputs) for inputs in (site.X, basis.points)]
        solve = functools.partial(_solve, site, basis, options)
        systems = start.targets, start.precision, old, *offset
        new, *solved = batches.mapped(solve, 1, 1, 1, 1, 1)(*systems)
        kernel, points, size = site.kernel, basis.points, chunks.rows_per_chunk(len(basis.points))
        step = new - old
        at_rows = KernelFunctions(points, step).evaluate(kernel, site.X, chunk_size=size)
        # The divergence is a'K a / 2 + a'g(Z), for the fixed mean g.
        before, change = (
            KernelFunctions(points, weights).evaluate(kernel, points, chunk_size=size)
            for weights in (old, step)
        )

        def divergence(length: Array) -> Array:
            values = (0.5 * before + offset[1]) + length * (0.5 * change)
            return jnp.sum((old + length * step) * values)

        def parameters(weights: Array) -> dict[str, Array]:
            if coordinates is None:
                return {self.weights_name: weights * prior_scale(site, points)}
            residual = weights * coordinates.deviation
            return {self.weights_name: residual, self.loc_name: coordinates.loc(weights)}

        return NewtonStep(old, new, start.mean + at_rows, divergence, tuple(solved), parameters)


def _solve(
    site: GPSite,
    basis: Basis,
    options: dict[str, Any],
    targets: Float[Array, " n"],
    precision: Float[Array, " n"],
    guess: Float[Array, " M"],
    offset_at_rows: Float[Array, " n"],
    offset_at_points: Float[Array, " M"],
) -> RepresenterWeights:
    points, active = basis
    return representer_weights(
        site.kernel,
        points,
        site.X,
        targets,
        precision,
        offset=(offset_at_rows, offset_at_points),
        guess=guess,
        active=active,
        **options,
    )


def prior_scale(site: GPSite, points: Float[Array, "M d"]) -> Float[Array, ""]:
    """The prior standard deviation: times it, weights are as for a kernel of unit variance."""
    variance = site.kernel.each(lambda kernel, X: kernel.evaluate_diag(X), points)
    return jnp.sqrt(jnp.mean(variance))
