"""The guide for Gaussian processes in weight space."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoNormal

from numpyro_scalegp.core import checks, chunks
from numpyro_scalegp.core.linalg import factorise, matmul
from numpyro_scalegp.families import ChevronGP, WeightSpaceGP
from numpyro_scalegp.features.chevron import BLOCK, Chevron, blocks_of, projections
from numpyro_scalegp.guides.guide import AbstractGPGuide, Rest
from numpyro_scalegp.guides.mean import SolvedMean, check_all_rows, check_steps, report
from numpyro_scalegp.tracing.likelihood import ExpectedLikelihood, pseudo_observations
from numpyro_scalegp.tracing.sites import GPSite, Model

# The residual at which a direct solve counts as one.
_TOLERANCE = 3e-3


class AutoChevronGP(AbstractGPGuide):
    """A guide with a `ChevronGP` at a site with a `WeightSpaceGP` prior.

    Its parameters are `{site}_{prefix}_loc`, `..._scale_diag` and `..._scale_columns`, with a row
    for each of the m features; they start at zero, `init_scale` and zero. Train it with
    `QuadruplyStochasticELBO` and `SparseSVI`, whose steps touch some of the rows only; NumPyro's
    `TraceMeanField_ELBO` and `QuadratureELBO` work too, and go through all features.

    Args:
        model: a NumPyro model with a `WeightSpaceGP` site outside of all plates.
        site: the name of that site; None if the model has only one.
        rest: what guides the other sites, as for `AutoSparseGP`.
        rank: the number k of dense columns of the Cholesky factor; 0 is mean field.
        init_scale: where the diagonal starts, positive; `solve_diagonal` has a better one.
        prefix: part of the parameters' names.

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

    prior_kind = WeightSpaceGP

    def __init__(
        self,
        model: Model,
        site: str | None = None,
        *,
        rest: Rest = AutoNormal,
        rank: int = 100,
        init_scale: float = 0.1,
        prefix: str = "auto",
    ) -> None:
        super().__init__(model, site, rest=rest, prefix=prefix)
        self.rank = checks.count("rank", rank, 0)
        self.init_scale = checks.number("init_scale", init_scale, "(0, inf)")

    def _family(self, site: GPSite, *, training: bool = True) -> ChevronGP:
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
        dtype = site.X.dtype
        loc = self._param(site, "loc", lambda _: jnp.zeros(m, dtype), rows=True)
        scale_diag = self._param(
            site,
            "scale_diag",
            lambda _: jnp.full(m, self.init_scale, dtype),
            constraint=constraints.positive,
            rows=True,
        )
        scale_columns = self._param(
            site, "scale_columns", lambda _: jnp.zeros((m, self.rank), dtype), rows=True
        )
        return ChevronGP(site.prior.features, site.X, loc, scale_diag, scale_columns)

    def solve_mean(
        self,
        params: dict[str, Any],
        *args: Any,
        num_newton_steps: int = 1,
        num_nodes: int = 20,
        **kwargs: Any,
    ) -> SolvedMean:
        """Set `loc` to its optimum, all else held fixed.

        A start for `SparseSVI` from a few thousand random rows: give the model these rows as if
        there were no others. What few rows leave open, steps on all of them then fill in.

        Args:
            params: the guide's parameters, as from `SVI.get_params`.
            *args: the model's positional arguments, without mini-batches.
            num_newton_steps: 1 is exact for a Gaussian likelihood; positive. Each step is cut to
                the first of 1, 1/2, 1/4, ... of its length that does not lower the bound.
            num_nodes: quadrature nodes for the likelihood's derivatives.
            **kwargs: the model's keyword arguments.

        Returns:
            The parameters with the new `loc`, as `params`, with the `residual` that rounding left
            to the last, direct solve; `converged` is False, and there is a warning, where it is
            more than 3e-3. `solve_diagonal` says how `SparseSVI` takes the parameters. With n rows,
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
        check_steps(num_newton_steps)
        site = self._site(params, None, args, kwargs)
        check_all_rows(site)
        name = f"{site.name}_{self.prefix}_loc"
        few = site.prior.features.size(site.X) < site.X.shape[0] or site.prior.has_dense_precision
        solve = _mean_by_features if few else _mean_by_rows
        for number in range(num_newton_steps):
            site, q, (mean, variance), likelihood = self._expanded(params, args, kwargs, num_nodes)
            if number == 0:
                likelihood.check_rows(mean)
            targets = pseudo_observations(mean, *likelihood.slopes(mean, variance))
            loc, residual = solve(site, *targets)
            step = loc - q.loc
            means = mean, mean + _projected(site, step)
            divergence = functools.partial(_squared_norm, site, q.loc, step)
            part = likelihood.step_length(means, variance, divergence)
            loc = jnp.where(part == 1.0, loc, q.loc + part * step)
            params = {**params, name: loc.astype(q.loc.dtype)}
        return report(params, residual, jnp.zeros((), int), residual <= _TOLERANCE)

    def _expanded(
        self, params: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], num_nodes: int
    ) -> tuple[GPSite, ChevronGP, tuple[Array, Array], ExpectedLikelihood]:
        """Site and family, moments of f at the rows, and the likelihood."""
        values = self._values(params, None, args, kwargs)
        site = self._site(params, None, args, kwargs)
        with self._parameters(params, None):
            q = self._family(site, training=False)
        posterior = q.posterior()
        moments = posterior.marginals(site.X, chunk_size=posterior.rows_per_chunk())
        likelihood = ExpectedLikelihood(
            self.model, site.name, params, values, args, kwargs, num_nodes
        )
        return site, q, moments, likelihood

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
            *args: the model's positional arguments, such that it sees all rows; with mini-batches
                the sums are estimated from one of them.
            num_nodes: quadrature nodes for the curvature.
            **kwargs: the model's keyword arguments.

        Returns:
            The parameters with the new diagonal, in O(n m (d + k)); it may be jitted. Other sites
            stand at their medians. A running `SparseSVI` takes them by `replace_params`, and then
            needs a `refresh`.

        Raises:
            ValueError: if the rest's guide has no medians.

        References:
            Evans and Nair (2020), proposition 1, for the columns that are not dense.
        """
        site, q, moments, likelihood = self._expanded(params, args, kwargs, num_nodes)
        likelihood.check_rows(moments[0])
        _, curvature = likelihood.slopes(*moments)
        # Where the likelihood is not concave, the prior's own scale is the limit.
        weights = jnp.maximum(-curvature, 0.0)
        a = _prior_precision(site) + _weighted_squares(site, weights)
        k = self.rank
        b = jnp.zeros_like(a).at[:k].set(_below_diagonal(site, q, weights))
        root = jnp.sqrt(jnp.square(b) + 4.0 * a)
        # Whichever form does not take the difference of two large numbers.
        optimum = jnp.where(b < 0.0, (root - b) / (2.0 * a), 2.0 / (jnp.abs(b) + root))
        name = f"{site.name}_{self.prefix}_scale_diag"
        return {**params, name: optimum.astype(q.scale_diag.dtype)}


def _prior_precision(site: GPSite) -> Float[Array, " m"]:
    """The diagonal of the weights' prior precision."""
    if site.prior.precision is not None:
        return site.prior.precision
    features = site.prior.features
    return features.precision_diagonal(jnp.arange(features.size(site.X)))


def _projected(site: GPSite, loc: Float[Array, " m"]) -> Float[Array, " n"]:
    """Phi loc, in blocks of features and chunks of rows."""
    zero = jnp.zeros_like(loc)
    return projections(site.prior.features, site.X, Chevron(loc, zero, zero[:, None][:, :0]))[0][
        :, 0
    ]


def _squared_norm(
    site: GPSite, loc: Float[Array, " m"], step: Float[Array, " m"], part: Float[Array, ""]
) -> Float[Array, ""]:
    """W'S w / 2 after a part of a step."""
    weights = loc + part * step
    if not site.prior.has_dense_precision:
        return 0.5 * jnp.sum(_prior_precision(site) * jnp.square(weights))
    index = jnp.arange(loc.shape[0])
    return 0.5 * weights.dot(matmul(site.prior.features.precision(index, index), weights))


def _solved(
    A: Float[Array, "k k"], b: Float[Array, " k"]
) -> tuple[Float[Array, " k"], Float[Array, ""]]:
    """A^-1 b, and the residual of it, relative to b."""
    x = cho_solve((factorise(A).tril, True), b)
    scale = jnp.linalg.norm(b)
    return x, jnp.linalg.norm(b - matmul(A, x)) / jnp.where(scale == 0, 1.0, scale)


def _mean_by_rows(
    site: GPSite, targets: Float[Array, " n"], precision: Float[Array, " n"]
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """S^-1 Phi'(Phi S^-1 Phi' + diag(l)^-1)^-1 t for a diagonal S, in blocks of features."""
    features, X = site.prior.features, site.X
    size, root = features.size(X), jnp.sqrt(precision)
    variance = 1.0 / _prior_precision(site)

    def columns(index: Array) -> Array:
        Phi = features.columns(X, jnp.minimum(index, size - 1))
        return jnp.where(index < size, root[:, None] * Phi, 0.0)

    def add(gram: Array, index: Array) -> tuple[Array, None]:
        Phi = columns(index)
        return gram + matmul(Phi * variance.at[index].get(mode="clip"), Phi.T), None

    blocks = blocks_of(size)
    gram = jax.lax.scan(add, jnp.eye(X.shape[0], dtype=X.dtype), blocks)[0]
    dual, residual = _solved(gram, root * targets)
    loc = jax.lax.map(lambda index: matmul(columns(index).T, dual), blocks).reshape(-1)[:size]
    return variance * loc, residual


def _mean_by_features(
    site: GPSite, targets: Float[Array, " n"], precision: Float[Array, " n"]
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """(Phi'diag(l) Phi + S)^-1 Phi'diag(l) t, for any S."""
    features, X = site.prior.features, site.X
    index = jnp.arange(features.size(X))
    Phi = features.columns(X, index)
    dense = site.prior.has_dense_precision
    prior = features.precision(index, index) if dense else jnp.diag(_prior_precision(site))
    weighted = (precision[:, None] * Phi).T
    return _solved(matmul(weighted, Phi) + prior, matmul(weighted, targets))


def _weighted_squares(site: GPSite, weights: Float[Array, " n"]) -> Float[Array, " m"]:
    """The sums over rows of l_i phi_r(x_i)^2, in blocks of features and chunks of rows."""
    features, X = site.prior.features, site.X
    size = features.size(X)

    def of_block(index: Array) -> Array:
        index = jnp.minimum(index, size - 1)

        def of_rows(rows: tuple[Array, Array]) -> Array:
            return matmul(rows[1], jnp.square(features.columns(rows[0], index)))

        return chunks.sum_rows(of_rows, (X, weights), chunks.rows_per_chunk(index.shape[0]))

    return jax.lax.map(of_block, blocks_of(size)).reshape(-1)[:size]


def _below_diagonal(site: GPSite, q: ChevronGP, weights: Float[Array, " n"]) -> Float[Array, " k"]:
    """Of each dense column without its diagonal, the r-th entry of (Phi'diag(l) Phi + S) c_r."""
    k, m = q.scale_columns.shape[1], q.loc.shape[0]
    index, dense = jnp.arange(m), jnp.arange(k)
    columns = jnp.where(index[:, None] > dense, q.scale_columns, 0.0)
    law = Chevron(q.loc, jnp.zeros_like(q.scale_diag), columns)

    def of_rows(rows: tuple[Array, Array]) -> Array:
        X, weights = rows
        projected = projections(q.features, X, law)[0][:, 1:]
        return matmul(weights, q.features.columns(X, dense) * projected)

    total = chunks.sum_rows(of_rows, (site.X, weights), chunks.rows_per_chunk(BLOCK + k))
    if site.prior.has_dense_precision:
        total += jnp.sum(q.features.precision(dense, index) * columns.T, axis=1)
    return total
