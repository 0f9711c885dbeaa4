"""The guide for Gaussian processes in weight space."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks, chunks
from numpyro_scalegp.numerics.linalg import factorize, matmul
from numpyro_scalegp.programs.compiled import compiled_unless_traced
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.tracing.sites import GPSite, Model
from numpyro_scalegp.variational.guide import Rest, set_up
from numpyro_scalegp.variational.quadruply.chevron import ChevronGP, declare_weights
from numpyro_scalegp.variational.quadruply.chevron_features import (
    BLOCK,
    Chevron,
    blocks_of,
    projections,
)
from numpyro_scalegp.variational.quadruply.weight_space import WeightSpaceGP
from numpyro_scalegp.variational.solving import (
    AbstractSolvingGuide,
    Linearized,
    NewtonStep,
    SolvedMean,
)

# The largest residual with which a direct solve counts as converged.
_TOLERANCE = 3e-3


class AutoChevronGP(AbstractSolvingGuide):
    """A guide with a `ChevronGP` at a site with a `WeightSpaceGP` prior.

    Its parameters are `{site}_{prefix}_loc`, `..._scale_diag` and `..._scale_columns`, with a row
    for each of the m features; they start at zero, `init_scale` and zero. Train it with
    `QuadruplyStochasticELBO` and `RowSVI`, whose steps use a subset of the features; NumPyro's
    `TraceMeanField_ELBO` and `QuadratureELBO` work too, but use all features in each step.

    The site must be outside of all plates; `site`, `rest` and `prefix` are as in `AutoSparseGP`.

    Args:
        model: a NumPyro model with a `WeightSpaceGP` site.
        rank: number k of dense columns of the Cholesky factor. 0 is mean field, which is cheaper,
            and as accurate in the documentation's measurements.
        init_scale: initial diagonal, positive; `solve_diagonal` computes a better one.

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
        """Set `loc` to its optimum, with everything else fixed.

        Use it to initialize `RowSVI` from a few thousand random rows of the data, passed to the
        model as if they were all the data; steps on all the data then refine the fit. The
        arguments, and the steps for likelihoods that are not Gaussian, are as in
        `AutoDecoupledGP.solve_mean`.

        Returns:
            The parameters with the new `loc` as `params`, and the `residual` of the last solve,
            which is only rounding error, as the solve is direct. If the residual is more than 3e-3,
            `converged` is False and there is a warning. See `solve_diagonal` for passing the
            parameters to `RowSVI`. Other sites are at their medians. With n observations, each step
            takes O(n^2 m + n^3) time and O(n^2) memory besides blocks of features; if m < n, or the
            prior precision is dense, O(n m^2 + m^3) and O(m^2 + n m). It may be jitted.

        Raises:
            ValueError: if the `rest` guide has no medians, `num_newton_steps` is not positive, the
                likelihood combines function values of several rows, or a plate takes a mini-batch.

        References:
            Rasmussen and Williams (2006), eq. 2.11; Khan and Lin (2017), Conjugate-Computation
            Variational Inference, for the pseudo-observations of a Newton step.
        """
        return self._newton(params, args, of_model(kwargs), num_newton_steps, num_nodes)

    def newton_step(self, start: Linearized, **options: Any) -> NewtonStep:
        """Solve directly; see `AbstractSolvingGuide.newton_step`."""
        old, prior = start.family.loc, start.site.prior
        new, residual = optimal_loc(prior, start.targets, start.precision)
        step = new - old

        def divergence(length: Array) -> Array:
            return 0.5 * quadratic_form(prior, old + length * step)

        solved = residual, jnp.zeros((), int), residual <= _TOLERANCE
        mean = start.mean + projected(prior, step)
        return NewtonStep(old, new, mean, divergence, solved, lambda loc: {"loc": loc})

    @model_keywords_first(lambda guide, *_: (guide.model, 2))
    def solve_diagonal(
        self, params: dict[str, Any], *args: Any, num_nodes: int = 20, **kwargs: Any
    ) -> dict[str, Any]:
        """Set the diagonal of C to its optimum, with everything else fixed.

        Let l_i be minus the expected second derivative of the log-likelihood of observation i, S
        the prior precision, A = Phi'diag(l) Phi + S and c_r the r-th column of C without its
        diagonal. The r-th diagonal entry c solves a c^2 + b c = 1 with a = A_rr and b = (A c_r)_r;
        outside of the dense columns, b = 0 and c = a^(-1/2). For a Gaussian likelihood, where l_i
        is one over the noise variance, this maximizes the evidence bound; for other likelihoods,
        repeated calls lead to a fixed point.

        Args:
            params: the guide's parameters, as from `SVI.get_params`.
            *args: the model's positional arguments, for all observations; from a mini-batch the
                sums are estimated.
            num_nodes: quadrature nodes for the curvature.
            **kwargs: the model's keyword arguments.

        Returns:
            The parameters with the new diagonal, in O(n m (d + k)); it may be jitted. Other sites
            are at their medians. Pass the parameters to a running `RowSVI` by `replace_params`,
            then call its `refresh`.

        Raises:
            ValueError: if the `rest` guide has no medians.

        References:
            Evans and Nair (2020), proposition 1, for the columns that are not dense.
        """
        kwargs = of_model(kwargs)
        set_up(self, params, args, kwargs)
        diagonal = compiled_unless_traced(self._optimal_diagonal)
        return {**params, **diagonal(params, args, kwargs, num_nodes)}

    def _optimal_diagonal(
        self, params: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], num_nodes: int
    ) -> dict[str, Float[Array, " m"]]:
        site, likelihood = self._site_and_likelihood(params, args, kwargs, num_nodes)
        q, *moments = self._marginals(params, site)
        likelihood.check_rows(moments[0])
        _, curvature = likelihood.derivatives(*moments)
        # Where the log-likelihood is convex, zero curvature leads to the prior scale.
        optimum = optimal_diagonal(site.prior, q, jnp.maximum(-curvature, 0.0))
        name = self.param_name(site, "scale_diag")
        return {name: optimum.astype(q.scale_diag.dtype)}


def _prior_precision(p: WeightSpaceGP) -> Float[Array, " m"]:
    """The diagonal of the weights' prior precision."""
    if p.precision is not None:
        return p.precision
    features = p.features
    return features.precision_diagonal(jnp.arange(features.size(p.X)))


def projected(p: WeightSpaceGP, loc: Float[Array, " m"]) -> Float[Array, " n"]:
    """Phi loc, in blocks of features and chunks of rows."""
    zero = jnp.zeros_like(loc)
    return projections(p.features, p.X, Chevron(loc, zero, zero[:, None][:, :0]))[0][:, 0]


def quadratic_form(p: WeightSpaceGP, weights: Float[Array, " m"]) -> Float[Array, ""]:
    """The quadratic form w'S w, for the prior precision S."""
    if not p.has_dense_precision:
        return jnp.sum(_prior_precision(p) * jnp.square(weights))
    index = jnp.arange(weights.shape[0])
    return weights.dot(matmul(p.features.precision(index, index), weights))


@compiled_unless_traced
def optimal_loc(
    p: WeightSpaceGP, targets: Float[Array, " n"], precision: Float[Array, " n"]
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """The posterior mean of the weights given noisy values of f.

    Args:
        p: the prior, at the inputs of these values.
        targets: the noisy values.
        precision: l, the precision of the noise.

    Returns:
        The mean, and the residual of the direct solve, relative to its right-hand side. With n
        values, O(n^2 m + n^3) and memory O(n^2); if m < n or S is dense, O(n m^2 + m^3) and
        O(m^2 + n m).
    """
    few = p.features.size(p.X) < p.X.shape[0] or p.has_dense_precision
    return (_mean_by_features if few else _mean_by_rows)(p, targets, precision)


@compiled_unless_traced
def optimal_diagonal(
    p: WeightSpaceGP, q: ChevronGP, weights: Float[Array, " n"]
) -> Float[Array, " m"]:
    """The diagonal of C that maximizes the bound, with everything else as in q.

    Args:
        p: the prior.
        q: the family.
        weights: l, nonnegative; see `AutoChevronGP.solve_diagonal`.

    Returns:
        The diagonal, in O(n m (d + k)).
    """
    a = _prior_precision(p) + _weighted_squares(p, weights)
    k = q.scale_columns.shape[1]
    b = jnp.zeros_like(a).at[:k].set(_below_diagonal(p, q, weights))
    root = jnp.sqrt(jnp.square(b) + 4.0 * a)
    # The form of the root without cancellation.
    return jnp.where(b < 0.0, (root - b) / (2.0 * a), 2.0 / (jnp.abs(b) + root))


def _solve(
    A: Float[Array, "k k"], b: Float[Array, " k"]
) -> tuple[Float[Array, " k"], Float[Array, ""]]:
    """A^-1 b, and its residual relative to b."""
    x = cho_solve((factorize(A).tril, True), b)
    scale = jnp.linalg.norm(b)
    return x, jnp.linalg.norm(b - matmul(A, x)) / jnp.where(scale == 0, 1.0, scale)


def _mean_by_rows(
    p: WeightSpaceGP, targets: Float[Array, " n"], precision: Float[Array, " n"]
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """S^-1 Phi'(Phi S^-1 Phi' + diag(l)^-1)^-1 t for a diagonal S, in blocks of features."""
    features, X = p.features, p.X
    size, root = features.size(X), jnp.sqrt(precision)
    variance = 1.0 / _prior_precision(p)

    def columns(index: Array) -> Array:
        Phi = features.columns(X, jnp.minimum(index, size - 1))
        return jnp.where(index < size, root[:, None] * Phi, 0.0)

    def add(gram: Array, index: Array) -> tuple[Array, None]:
        Phi = columns(index)
        return gram + matmul(Phi * variance.at[index].get(mode="clip"), Phi.T), None

    blocks = blocks_of(size)
    gram = jax.lax.scan(add, jnp.eye(X.shape[0], dtype=X.dtype), blocks)[0]
    dual, residual = _solve(gram, root * targets)
    loc = jax.lax.map(lambda index: matmul(columns(index).T, dual), blocks).reshape(-1)[:size]
    return variance * loc, residual


def _mean_by_features(
    p: WeightSpaceGP, targets: Float[Array, " n"], precision: Float[Array, " n"]
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """(Phi'diag(l) Phi + S)^-1 Phi'diag(l) t, for any S."""
    features, X = p.features, p.X
    index = jnp.arange(features.size(X))
    Phi = features.columns(X, index)
    dense = p.has_dense_precision
    prior = features.precision(index, index) if dense else jnp.diag(_prior_precision(p))
    weighted = (precision[:, None] * Phi).T
    return _solve(matmul(weighted, Phi) + prior, matmul(weighted, targets))


def _weighted_squares(p: WeightSpaceGP, weights: Float[Array, " n"]) -> Float[Array, " m"]:
    """The sums over i of l_i phi_r(x_i)^2, in blocks of features and chunks of rows."""
    features, X = p.features, p.X
    size = features.size(X)

    def of_block(index: Array) -> Array:
        index = jnp.minimum(index, size - 1)

        def of_rows(rows: tuple[Array, Array]) -> Array:
            return matmul(rows[1], jnp.square(features.columns(rows[0], index)))

        return chunks.sum_rows(of_rows, (X, weights), chunks.rows_per_chunk(index.shape[0]))

    return jax.lax.map(of_block, blocks_of(size)).reshape(-1)[:size]


def _below_diagonal(
    p: WeightSpaceGP, q: ChevronGP, weights: Float[Array, " n"]
) -> Float[Array, " k"]:
    """The r-th entry of (Phi'diag(l) Phi + S) c_r, for dense columns c_r without the diagonal."""
    k, m = q.scale_columns.shape[1], q.loc.shape[0]
    index, dense = jnp.arange(m), jnp.arange(k)
    columns = jnp.where(index[:, None] > dense, q.scale_columns, 0.0)
    chevron = Chevron(q.loc, jnp.zeros_like(q.scale_diag), columns)

    def of_rows(rows: tuple[Array, Array]) -> Array:
        X, weights = rows
        projected = projections(q.features, X, chevron)[0][:, 1:]
        return matmul(weights, q.features.columns(X, dense) * projected)

    total = chunks.sum_rows(of_rows, (p.X, weights), chunks.rows_per_chunk(BLOCK + k))
    if p.has_dense_precision:
        total += jnp.sum(q.features.precision(dense, index) * columns.T, axis=1)
    return total
