"""Guides whose mean has a basis of its own, and solves for its weights."""

import abc
import functools
import warnings
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from numpyro_scalegp.core import chunks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.guides.growth import Basis, growing_bases
from numpyro_scalegp.guides.guide import AbstractGPGuide
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.solvers import RepresenterWeights, representer_weights
from numpyro_scalegp.tracing.likelihood import ExpectedLikelihood, pseudo_observations
from numpyro_scalegp.tracing.sites import GPSite


class SolvedMean(NamedTuple):
    """Parameters with a new mean, and how the linear solve of the last Newton step went.

    Arrays have the shape of the functions in a plate, () for one.
    """

    params: dict[str, Any]
    residual: Float[Array, "*batch"]  # relative to that of a mean of zero
    iterations: Int[Array, "*batch"]  # 0 where the solve is direct
    converged: Bool[Array, "*batch"]


def report(
    params: dict[str, Any],
    residual: Float[Array, "*batch"],
    iterations: Int[Array, "*batch"],
    converged: Bool[Array, "*batch"],
) -> SolvedMean:
    """What `solve_mean` returns, with a warning on the host where the solve stopped short."""
    arguments = (jnp.max(residual), jnp.max(iterations), jnp.all(converged))
    jax.lax.cond(
        arguments[-1], lambda: None, lambda: jax.debug.callback(_warn_of_residual, *arguments)
    )
    return SolvedMean(params, residual, iterations, converged)


def _warn_of_residual(residual: ArrayLike, iterations: ArrayLike, converged: ArrayLike) -> None:
    if not converged:
        warnings.warn(
            f"`solve_mean` ended with a residual of {np.asarray(residual):.2g} after {iterations} "
            "iterations, above its tolerance: the mean is not the optimum. Raise `max_iterations`, "
            "spread the points over the inputs, or work in float64; with little noise, float32 "
            "may not get further. Check the inputs for NaN if the residual is NaN.",
            RuntimeWarning,
            stacklevel=1,
        )


class AbstractDecoupledGuide(AbstractGPGuide):
    """Guides with a large basis for the mean; see `solve_mean`."""

    num_columns: int | None
    weights_name: ClassVar[str]  # of the parameter that holds the weights

    def _columns(self, size: int) -> dict[str, Any]:
        """What a family of `size` weights needs to draw columns for its divergence."""
        if self.num_columns is None:
            return {}
        return {"num_columns": min(self.num_columns, size), "key": numpyro.prng_key()}

    def _grown(
        self, site: GPSite, sizes: dict[str, int], growth: int, *, begins: bool, training: bool
    ) -> dict[str, Basis]:
        """Bases of rows of the mini-batches so far, each moved by a parameter."""
        name = f"{site.name}_{self.prefix}_bases"
        bases = growing_bases(name, site.X, sizes, growth, begins=begins, grows=training)
        return {
            key: Basis(points + self._param(site, f"{key}_shift", jnp.zeros_like(points)), active)
            for key, (points, active) in bases.items()
        }

    @abc.abstractmethod
    def _basis(self, site: GPSite, family: Any) -> tuple[Basis, Float[Array, "*batch M"]]:
        """The points whose weights `solve_mean` sets, and these weights."""

    def _rest_of_mean(self, family: Any, X: Float[Array, "n d"]) -> Float[Array, "*batch n"]:
        """What other parameters add to the mean."""
        return jnp.zeros((*family.batch_shape, X.shape[0]), X.dtype)

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
            *args: the model's positional arguments, such that it sees all rows: no mini-batch.
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
        check_steps(num_newton_steps)
        values = self._values(params, None, args, kwargs)
        site = self._site(params, None, args, kwargs)
        check_all_rows(site)
        options = {"tolerance": tolerance, "max_iterations": max_iterations}
        likelihood = ExpectedLikelihood(
            self.model, site.name, params, values, args, kwargs, num_nodes
        )
        for number in range(num_newton_steps):
            with self._parameters(params, None):
                family = self._family(site, training=False)
                basis, weights = self._basis(site, family)
            posterior = family.posterior()
            mean, variance = posterior.marginals(site.X, chunk_size=posterior.rows_per_chunk())
            if number == 0:
                likelihood.check_rows(mean)
            targets, precision = pseudo_observations(mean, *likelihood.slopes(mean, variance))
            rests = [self._rest_of_mean(family, one) for one in (site.X, basis.points)]
            solve = functools.partial(_solve, site, basis, options)
            solved = jnp.vectorize(solve, signature="(n),(n),(m),(n),(m)->(m),(),(),()")(
                targets, precision, weights, *rests
            )
            line = _Line.between(site.kernel, basis.points, weights, solved[0], rests[1])
            means = mean, mean + _sum_of_bases(site.kernel, site.X, basis.points, line.step)
            part = likelihood.step_length(means, variance, line.divergence)
            name = f"{site.name}_{self.prefix}_{self.weights_name}"
            new = jnp.where(part == 1.0, solved[0], weights + part * line.step)
            params = {**params, name: new * prior_scale(site, basis.points)}
        return report(params, *solved[1:])


class _Line(NamedTuple):
    """Weights along a step, and the divergence from the prior there."""

    weights: Float[Array, "*batch M"]
    step: Float[Array, "*batch M"]
    slopes: tuple[Float[Array, "*batch M"], Float[Array, "*batch M"]]

    @classmethod
    def between(
        cls,
        kernel: AbstractKernel,
        points: Float[Array, "M d"],
        old: Float[Array, "*batch M"],
        new: Float[Array, "*batch M"],
        rest: Float[Array, "*batch M"],
    ) -> "_Line":
        """The line from old to new weights, with what else the mean is at the points."""
        step = new - old
        values = [_sum_of_bases(kernel, points, points, one) for one in (old, step)]
        return cls(old, step, (0.5 * values[0] + rest, 0.5 * values[1]))

    def divergence(self, part: Float[Array, ""]) -> Float[Array, ""]:
        """A'K a / 2 + a'r, for rest r, after a part of the step."""
        slope = self.slopes[0] + part * self.slopes[1]
        return jnp.sum((self.weights + part * self.step) * slope)


def _sum_of_bases(
    kernel: AbstractKernel,
    X: Float[Array, "n d"],
    points: Float[Array, "M d"],
    weights: Float[Array, "*batch M"],
) -> Float[Array, "*batch n"]:
    """K(X, Z) a, in chunks of rows."""
    functions = weights.reshape(-1, weights.shape[-1]).T
    values = chunks.map_rows(
        lambda rows: matmul(kernel(rows, points), functions),
        X,
        chunks.rows_per_chunk(points.shape[0]),
    )
    return values.T.reshape(*weights.shape[:-1], X.shape[0])


def check_all_rows(site: GPSite) -> None:
    """Raise where the model takes a mini-batch."""
    if site.partial:
        names = ", ".join(f"`{name}`" for name in site.partial)
        raise ValueError(
            f"`solve_mean` solves for all rows at once, and the plate {names} takes a part of its "
            "elements: give the model all of them, or random rows as if there were no others."
        )


def check_steps(num_newton_steps: int) -> None:
    """Raise unless there is a step."""
    if num_newton_steps < 1:
        raise ValueError(f"`num_newton_steps` must be positive, got {num_newton_steps}.")


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
