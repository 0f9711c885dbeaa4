"""The guide for Gaussian processes in weight space."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks
from numpyro_scalegp.families import ChevronGP, WeightSpaceGP
from numpyro_scalegp.families.chevron import declare_weights
from numpyro_scalegp.families.chevron_optimum import (
    optimal_diagonal,
    optimal_loc,
    projected,
    quadratic_form,
)
from numpyro_scalegp.guides.guide import Rest
from numpyro_scalegp.guides.solving import AbstractSolvingGuide, Linearized, NewtonStep, SolvedMean
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.tracing.sites import GPSite, Model

# The residual at which a direct solve counts as one.
_TOLERANCE = 3e-3


class AutoChevronGP(AbstractSolvingGuide):
    """A guide with a `ChevronGP` at a site with a `WeightSpaceGP` prior.

    Its parameters are `{site}_{prefix}_loc`, `..._scale_diag` and `..._scale_columns`, with a row
    for each of the m features; they start at zero, `init_scale` and zero. Train it with
    `QuadruplyStochasticELBO` and `RowSVI`, whose steps touch some of the rows only; NumPyro's
    `TraceMeanField_ELBO` and `QuadratureELBO` work too, and go through all features.

    The site is outside of all plates; `site`, `rest` and `prefix` are as of `AutoSparseGP`.

    Args:
        model: a NumPyro model with a `WeightSpaceGP` site.
        rank: the number k of dense columns of the Cholesky factor; 0 is mean field, as accurate in
            the measurements of the documentation, and cheaper.
        init_scale: where the diagonal starts, positive; `solve_diagonal` has a better one.

    Raises:
        ValueError: if `rank` is negative or `init_scale` not positive; when called, if `rank` is
            larger than m, or the model has no such site, several, or one in a plate.

    References:
        Evans and Nair (2020), Quadruply Stochastic Gaussian Processes. m (k + 2) parameters.

    Example:
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        ...     phi = sgp.features.RandomFourier(sgp.kernels.RBF(lengthscale), 10_000, seed=0)
        ...     f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        ...     with numpyro.plate("rows", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> guide = sgp.guides.AutoChevronGP(model, rank=20)
    """

    prior = WeightSpaceGP
    weights_name = "loc"

    def __init__(
        self,
        model: Model,
        site: str | None = None,
        *,
        rest: Rest = AutoNormal,
        rank: int = 0,
        init_scale: float = 0.1,
        prefix: str = "auto",
    ) -> None:
        super().__init__(model, site, rest=rest, prefix=prefix)
        self.rank = checks.count("rank", rank, 0)
        self.init_scale = checks.number("init_scale", init_scale, "(0, inf)")

    def family(self, site: GPSite, *, training: bool = True) -> ChevronGP:
        """The chevron GP at the model's features; see `AbstractGPGuide.family`."""
        if site.plates:
            raise ValueError(
                f"the GP site `{site.name}` stands inside a plate: `AutoChevronGP` is for one "
                "function. Write a site for each, and nest the guides."
            )
        m = site.prior.features.size(site.X)
        if self.rank > m:
            raise ValueError(
                f"`rank` must be at most {m}, the number of features, got {self.rank}."
            )
        param = functools.partial(self.param, site)
        weights = declare_weights(param, m, self.rank, self.init_scale, site.X.dtype)
        return ChevronGP(site.prior.features, site.X, *weights)

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def solve_mean(
        self,
        params: dict[str, Any],
        *args: Any,
        num_newton_steps: int = 1,
        num_nodes: int = 20,
        **kwargs: Any,
    ) -> SolvedMean:
        """Set `loc` to its optimum, all else held fixed.

        A start for `RowSVI` from a few thousand random rows: give the model these rows as if
        there were no others. What few rows leave open, steps on all of them then fill in. The
        arguments, and the steps for likelihoods that are not Gaussian, are as of
        `AutoDecoupledGP.solve_mean`.

        Returns:
            The parameters with the new `loc`, as `params`, with the `residual` that rounding left
            to the last, direct solve; `converged` is False, and there is a warning, where it is
            more than 3e-3. See `solve_diagonal` for how `RowSVI` takes the parameters. With n rows,
            each step takes O(n^2 m + n^3) and memory O(n^2) besides blocks of features; where
            m < n, or the prior's precision is dense, O(n m^2 + m^3) and O(m^2 + n m). It may be
            jitted. Other sites stand at their medians.

        Raises:
            ValueError: if the rest's guide has no medians, `num_newton_steps` is not positive, the
                likelihood combines rows of the function, or a plate takes a mini-batch.

        References:
            Rasmussen and Williams (2006), eq. 2.11; Khan and Lin (2017), Conjugate-Computation
            Variational Inference, for the pseudo-observations of a Newton step.
        """
        return self._newton(params, args, of_model(kwargs), num_newton_steps, num_nodes)

    def newton_step(self, at: Linearized, **options: Any) -> NewtonStep:
        """Solve directly; see `AbstractSolvingGuide.newton_step`."""
        old, prior = at.family.loc, at.site.prior
        new, residual = optimal_loc(prior, at.targets, at.precision)
        step = new - old

        def divergence(part: Array) -> Array:
            return 0.5 * quadratic_form(prior, old + part * step)

        solved = residual, jnp.zeros((), int), residual <= _TOLERANCE
        return NewtonStep(old, new, at.mean + projected(prior, step), divergence, solved)

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def solve_diagonal(
        self, params: dict[str, Any], *args: Any, num_nodes: int = 20, **kwargs: Any
    ) -> dict[str, Any]:
        """Set the diagonal of C to its optimum, all else held fixed.

        With l_i the likelihood's expected curvature at row i (one over the noise variance of a
        Gaussian likelihood, for which this is the maximum of the evidence bound; otherwise a fixed
        point when repeated), S the prior's precision, A = Phi'diag(l) Phi + S and c_r the r-th
        column of C without its diagonal: a c^2 + b c = 1 with a = A_rr and b = (A c_r)_r. Outside
        of the dense columns b = 0 and c = a^(-1/2).

        Args:
            params: the guide's parameters, as from `SVI.get_params`.
            *args: the model's positional arguments, such that it gets all rows; with mini-batches
                the sums are estimated from one of them.
            num_nodes: quadrature nodes for the curvature.
            **kwargs: the model's keyword arguments.

        Returns:
            The parameters with the new diagonal, in O(n m (d + k)); it may be jitted. Other sites
            stand at their medians. A running `RowSVI` takes them by `replace_params`, and then
            needs a `refresh`.

        Raises:
            ValueError: if the rest's guide has no medians.

        References:
            Evans and Nair (2020), proposition 1, for the columns that are not dense.
        """
        site, likelihood = self._around(params, args, of_model(kwargs), num_nodes)
        q, *moments = self._marginals(params, site)
        likelihood.check_rows(moments[0])
        _, curvature = likelihood.derivatives(*moments)
        # Where the likelihood is not concave, the prior's own scale is the limit.
        optimum = optimal_diagonal(site.prior, q, jnp.maximum(-curvature, 0.0))
        name = self.param_name(site, "scale_diag")
        return {**params, name: optimum.astype(q.scale_diag.dtype)}
