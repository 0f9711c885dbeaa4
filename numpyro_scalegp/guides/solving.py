"""Guides that set the weights of their mean to the optimum at once."""

import abc
import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from numpyro_scalegp.core import checks, chunks
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.core.programs import compiled_unless_traced
from numpyro_scalegp.families.bases import Basis, growing_bases, hold_categories
from numpyro_scalegp.families.decoupled import expansion
from numpyro_scalegp.guides.guide import AbstractGPGuide, Rest, set_up
from numpyro_scalegp.solvers.representer_weights import RepresenterWeights, representer_weights
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.tracing.likelihood import ExpectedLikelihood, pseudo_observations
from numpyro_scalegp.tracing.sites import GPSite, Model, WithoutSite


class SolvedMean(NamedTuple):
    """Parameters with a new mean, and how the linear solve of the last Newton step went.

    Arrays have the shape of the functions in a plate, () for one.
    """

    params: dict[str, Any]
    residual: Float[Array, "*batch"]  # relative to that of a mean of zero
    iterations: Int[Array, "*batch"]  # 0 where the solve is direct
    converged: Bool[Array, "*batch"]


def reported(
    params: dict[str, Any],
    residual: Float[Array, "*batch"],
    iterations: Int[Array, "*batch"],
    converged: Bool[Array, "*batch"],
) -> SolvedMean:
    """What `solve_mean` returns, with a warning on the host where the solve stopped short."""
    stopped_short = ~jnp.all(converged)
    call_where(stopped_short, _warn_of_residual, jnp.max(residual), jnp.max(iterations))
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
    """Where a Newton step starts, and the Gaussian pseudo-observations there."""

    site: GPSite  # at all rows
    family: Any  # there
    params: dict[str, Any]  # of the guide
    mean: Float[Array, "*batch n"]  # of f at each row
    targets: Float[Array, "*batch n"]
    precision: Float[Array, "*batch n"]  # of the targets


class NewtonStep(NamedTuple):
    """Where a Newton step for the weights of a mean leads."""

    old: Float[Array, "*batch M"]
    new: Float[Array, "*batch M"]
    mean: Float[Array, "*batch n"]  # of f at each row after the whole step
    divergence: Callable[[Array], Array]  # from the prior after a part of it, up to a constant
    solve: tuple[Array, Array, Array]  # residual, iterations and convergence
    scale: Float[Array, ""] | float = 1.0  # of the parameter, relative to the weights


class AbstractSolvingGuide(AbstractGPGuide):
    """Guides that set the weights of their mean to the optimum; see `solve_mean`."""

    weights_name: ClassVar[str]  # of the parameter that holds the weights

    @abc.abstractmethod
    def newton_step(self, at: Linearized, **options: Any) -> NewtonStep:
        """Solve for the weights under Gaussian pseudo-observations.

        Args:
            at: where the step starts.
            **options: of the linear solve.
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
        """Take Newton steps, each cut to a length that does not lower the bound."""
        if num_newton_steps < 1:
            raise ValueError(f"`num_newton_steps` must be positive, got {num_newton_steps}.")
        set_up(self, params, args, kwargs)
        solve = compiled_unless_traced(self._newton_steps)
        params, report = solve(params, args, kwargs, num_newton_steps, num_nodes, **options)
        return reported(params, *report)

    def _newton_steps(
        self,
        params: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_newton_steps: int,
        num_nodes: int,
        **options: Any,
    ) -> tuple[dict[str, Any], tuple[Array, Array, Array]]:
        """The parameters after all steps, and how the solve of the last one went."""
        site, likelihood = self._around(params, args, kwargs, num_nodes)
        if site.partial:
            names = ", ".join(f"`{name}`" for name in site.partial)
            raise ValueError(
                f"`solve_mean` solves for all rows at once, and the plate {names} takes a part of "
                "its elements: give the model all of them, or random rows as if there were no "
                "others."
            )
        for number in range(num_newton_steps):
            family, mean, variance = self._marginals(params, site)
            if number == 0:
                likelihood.check_rows(mean)
            observations = pseudo_observations(mean, *likelihood.derivatives(mean, variance))
            at = Linearized(site, family, params, mean, *observations)
            step = self.newton_step(at, **options)
            part = likelihood.step_length((mean, step.mean), variance, step.divergence)
            new = jnp.where(part == 1.0, step.new, step.old + part * (step.new - step.old))
            params = {**params, self.param_name(site, self.weights_name): new * step.scale}
        return params, step.solve

    def _around(
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
        given = params, values, args, kwargs
        return site, ExpectedLikelihood(self.model, site.name, *given, num_nodes)

    def _marginals(self, params: dict[str, Any], site: GPSite) -> tuple[Any, Array, Array]:
        """The family, and the moments of f at the rows."""
        with self._parameters(params, None):
            family = self.family(site, training=False)
        posterior = family.posterior()
        return family, *posterior.marginals(site.X)


class AbstractDecoupledGuide(AbstractSolvingGuide):
    """Guides with a large basis for the mean; see `solve_mean`."""

    def __init__(
        self, model: Model, site: str | None, *, rest: Rest, num_columns: int | None, prefix: str
    ) -> None:
        super().__init__(model, site, rest=rest, prefix=prefix)
        self.num_columns = checks.count_or_none("num_columns", num_columns)

    def columns(self, size: int) -> dict[str, Any]:
        """What a family of `size` weights needs to draw columns for its divergence."""
        if self.num_columns is None:
            return {}
        return {"num_columns": min(self.num_columns, size), "key": numpyro.prng_key()}

    def grown(
        self, site: GPSite, sizes: dict[str, int], growth: int, *, begins: bool, training: bool
    ) -> dict[str, Basis]:
        """Bases of rows of the mini-batches so far, each shifted by a parameter."""
        name = self.param_name(site, "bases")
        bases = growing_bases(name, site.X, sizes, growth, begins=begins, grows=training)

        def shifted(key: str, points: Array) -> Array:
            shift = self.param(site, f"{key}_shift", jnp.zeros_like(points))
            return hold_categories(points + shift, site.kernel)

        return {key: Basis(shifted(key, points), active) for key, (points, active) in bases.items()}

    @abc.abstractmethod
    def basis(self, site: GPSite, family: Any) -> tuple[Basis, Float[Array, "*batch M"]]:
        """The points whose weights `solve_mean` sets, and these weights."""

    def rest_of_mean(self, family: Any, X: Float[Array, "n d"]) -> Float[Array, "*batch n"]:
        """What other parameters add to the mean."""
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
        """Set the weights of the large basis to their optimum, everything else held fixed.

        For `AutoHybridGP` that leaves what the inducing points add to the mean where it is, so that
        they may go on moving.

        For a Gaussian likelihood the evidence bound is quadratic in the weights, and one linear
        solve finds its maximum over *all* rows; other likelihoods take Newton steps, each cut to
        the first of 1, 1/2, 1/4, ... of its length that does not lower the bound. Steps of SVI
        between solves then train the rest.

        Args:
            params: the guide's parameters, as from `SVI.get_params`, with mutable state if any.
            *args: the model's positional arguments, such that it gets all rows: no mini-batch.
            num_newton_steps: 1 is exact for a Gaussian likelihood; positive.
            num_nodes: quadrature nodes for the likelihood's derivatives.
            tolerance: of the linear solve, see `representer_weights`.
            max_iterations: of the linear solve.
            **kwargs: the model's keyword arguments.

        Returns:
            The parameters with the new weights, as `params`, with the `residual`, `iterations` and
            `converged` of the last solve; a warning where it stopped short. Other function sites
            stand at their means, other sites at their medians: where the rest's guide draws other
            hyperparameters of the kernel, the weights do not fit them. Time O(iterations n M d +
            M^3) for each step; it may be jitted.

        Raises:
            ValueError: if the rest's guide has no medians, a number is not positive, the likelihood
                combines rows of the function, or a plate takes a mini-batch.

        References:
            Rudi et al. (2017) for the solve; Khan and Lin (2017), Conjugate-Computation Variational
            Inference, for the pseudo-observations of a Newton step.
        """
        options = {"tolerance": tolerance, "max_iterations": max_iterations}
        kwargs = of_model(kwargs)
        return self._newton(params, args, kwargs, num_newton_steps, num_nodes, **options)

    def newton_step(self, at: Linearized, **options: Any) -> NewtonStep:
        """Solve by conjugate gradients; see `AbstractSolvingGuide.newton_step`."""
        site = at.site
        with self._parameters(at.params, None):
            basis, old = self.basis(site, at.family)
        rests = [self.rest_of_mean(at.family, one) for one in (site.X, basis.points)]
        solve = functools.partial(_solve, site, basis, options)
        new, *solved = jnp.vectorize(solve, signature="(n),(n),(m),(n),(m)->(m),(),(),()")(
            at.targets, at.precision, old, *rests
        )
        kernel, points, size = site.kernel, basis.points, chunks.rows_per_chunk(len(basis.points))
        step = new - old
        at_rows = expansion(kernel, site.X, points, step, chunk_size=size)
        # The divergence is a'K a / 2 + a'r, for what else the mean is at the points, r.
        starts, change = (
            expansion(kernel, points, points, one, chunk_size=size) for one in (old, step)
        )

        def divergence(part: Array) -> Array:
            gradient = (0.5 * starts + rests[1]) + part * (0.5 * change)
            return jnp.sum((old + part * step) * gradient)

        scale = prior_scale(site, points)
        return NewtonStep(old, new, at.mean + at_rows, divergence, tuple(solved), scale)


def _solve(
    site: GPSite,
    basis: Basis,
    options: dict[str, Any],
    targets: Float[Array, " n"],
    precision: Float[Array, " n"],
    guess: Float[Array, " M"],
    rest_at_rows: Float[Array, " n"],
    rest_at_points: Float[Array, " M"],
) -> RepresenterWeights:
    points, active = basis
    return representer_weights(
        site.kernel,
        points,
        site.X,
        targets,
        precision,
        offset=(rest_at_rows, rest_at_points),
        guess=guess,
        active=active,
        **options,
    )


def prior_scale(site: GPSite, points: Float[Array, "M d"]) -> Float[Array, ""]:
    """The prior's standard deviation: with it, weights suit a kernel of unit variance."""
    return jnp.sqrt(jnp.mean(site.kernel.diag(points[:1])))
