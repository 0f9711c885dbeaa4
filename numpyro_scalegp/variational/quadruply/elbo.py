"""The ELBO of a weight-space GP from a mini-batch and random sets of features."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key
from numpyro.ops.provenance import eval_provenance

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.likelihoods.elbo import AbstractParticleELBO, ModelAndGuide
from numpyro_scalegp.tracing.runs import flat_provenance
from numpyro_scalegp.variational.quadruply import likelihood
from numpyro_scalegp.variational.quadruply.chevron_features import (
    Chevron,
    prior_divergence,
    set_projections,
    weight_rows,
)
from numpyro_scalegp.variational.quadruply.control_variate import ControlVariate
from numpyro_scalegp.variational.quadruply.problem import Problem, find_family, trace_problem
from numpyro_scalegp.variational.quadruply.rows import Rows
from numpyro_scalegp.variational.quadruply.weight_space import WeightSpaceGP


class QuadruplyStochasticELBO(AbstractParticleELBO):
    """The ELBO of a `ChevronGP` from a mini-batch and two random sets of its features.

    With q of m features in each set, s = m / q, f_i = s Phi_i loc_i and G_i = s Phi_i C_i at the
    mini-batch, E[<y - f_i, y - f_j> + <G_i, G_j>] = ||y - Phi loc||^2 + ||Phi C||_F^2 for
    independent sets i and j. So value and gradient are unbiased for a Gaussian likelihood whose
    mean is affine in f, at a cost independent of m and of the number of observations. The KL
    divergence from the prior is estimated from the same sets; other sites are sampled, with
    analytic KL divergences. Losses vary far more from step to step than they decrease: compare
    means over many steps.

    Other likelihoods have no unbiased estimate, and need `bound`. Given a set i, f is N(f_i, v_i)
    with v_i = ||G_i||^2; if log p(y | f) is concave, the mean over sets of E[log p(y | f) | i] is a
    lower bound, by Jensen's inequality (`"strict"`). In this bound the diagonal of C enters v_i
    with the factor s. `"plug_in"` leaves this factor out, which makes v_i closer to the variance of
    f but gives no bound. To learn hyperparameters when s is large, use `"plug_in"`: the strict
    bound then biases the kernel's variance downward. Expectations over f are in closed form for a
    Laplace likelihood, and Gauss-Hermite sums for others.

    A control variate reduces the variance of the estimate. From r support points it predicts the
    means of f^2 and of the variance over all data, once from i and j and once from all features,
    whose projections at the support points `RowSVI` keeps up to date; the estimate is corrected by
    n times the difference. For inducing points, a Nystrom approximation on the support points does
    the same for the prior precision.

    Args:
        num_features: number q of features in a set; all features if there are fewer.
        control_variate_rank: number of support points; 0 for no control variate. It is not used if
            a set has all features, or for a bound with a diagonal prior precision.
        support_points: the support points, shape (r, d); None for k-means centers of inputs that
            `RowSVI` draws from the model's mini-batches. Without `RowSVI`, a step with support
            points costs O(r m (d + k)).
        num_columns: number of dense columns of C that a step draws, at most k; None for all.
        bound: `"strict"` or `"plug_in"`, for likelihoods other than the Gaussian ones above.
        log_concave: names of observed sites whose log-likelihood is concave in f, in addition to
            Bernoulli and binomial with affine logits, Laplace and Gaussian with an affine location,
            and Poisson if the logarithm of its rate is affine in f.
        fixed_prior: whether to leave out the constant log|K(Z, Z)| of inducing points, which takes
            O(m^3). Use it only for a kernel without learned hyperparameters.
        num_nodes: quadrature nodes.
        num_particles: draws of the other sites.
        vectorize_particles: as in NumPyro's ELBOs.

    Raises:
        ValueError: if a number is out of range; in a step, if the guide's GP sites are not a single
            `ChevronGP`, an observed site depends on f in an unsupported way, or a control variate
            has neither support points nor `RowSVI`.

    References:
        Evans and Nair (2020), Quadruply Stochastic Gaussian Processes, theorems 1 to 3. The
        standard deviation in theorem 3 is the square root of the printed expression. A step costs
        O((b + r) q (d + k)) for b observations, and O(q^2 (d + k)) more for a dense prior precision
        of inducing points.

    Example:
        >>> import numpyro_scalegp as sgp
        >>> loss = sgp.infer.QuadruplyStochasticELBO(num_features=2000, control_variate_rank=500)
    """

    def __init__(
        self,
        num_features: int = 2000,
        control_variate_rank: int = 0,
        *,
        support_points: Float[ArrayLike, "r d"] | None = None,
        num_columns: int | None = None,
        bound: Literal["strict", "plug_in"] | None = None,
        log_concave: tuple[str, ...] = (),
        fixed_prior: bool = False,
        num_nodes: int = 20,
        num_particles: int = 1,
        vectorize_particles: bool | Callable = True,
    ) -> None:
        for name, number, least in (
            ("num_features", num_features, 1),
            ("control_variate_rank", control_variate_rank, 0),
            ("num_columns", 1 if num_columns is None else num_columns, 1),
            ("num_nodes", num_nodes, 1),
        ):
            checks.count(name, number, least)
        if bound not in (None, "strict", "plug_in"):
            raise ValueError(f'`bound` must be None, "strict" or "plug_in", got {bound!r}.')
        self.num_features = num_features
        # On the host, so that an optimizer that donates its state cannot delete this copy.
        self.support_points = (
            None
            if support_points is None
            else np.array(checks.inputs("support_points", support_points))
        )
        if self.support_points is not None:
            control_variate_rank = len(self.support_points)
        self.control_variate_rank = control_variate_rank
        self.num_columns = num_columns
        self.bound = bound
        self.log_concave = tuple(log_concave)
        self.fixed_prior = fixed_prior
        self.num_nodes = num_nodes
        self.likelihood: dict[str, likelihood.ObservedLikelihood] | None = None
        super().__init__(num_particles, vectorize_particles)

    def index_sets(
        self, key: Key[Array, ""], size: int, *, dense_precision: bool
    ) -> Int[Array, "sets q"]:
        """Draw the sets of features for one step.

        Args:
            key: a typed JAX key.
            size: number m of features.
            dense_precision: whether the prior precision is a dense matrix, which needs two sets.

        Returns:
            Two independent sets, shape (2, q), or one set if that suffices: for a bound, or with
            all features.
        """
        num = min(self.num_features, size)
        one_suffices = num == size or (self.bound is not None and not dense_precision)
        return draw_sets(key, size, num, 1 if one_suffices else 2)

    def particle(self, key: Array, pair: ModelAndGuide) -> tuple[Float[Array, ""], dict[str, Any]]:
        """The bound from one draw of the other sites and of the sets of features."""
        keys = jax.random.split(key, 4)
        params, model, guide, args, kwargs = pair
        problem = trace_problem(params, model, guide, keys[:2], args, kwargs)
        q, p = problem.q, problem.p
        index = (
            q.loc.index
            if isinstance(q.loc, Rows)
            else self.index_sets(keys[2], q.loc.shape[0], dense_precision=p.has_dense_precision)
        )
        rows = weight_rows(index, q.loc, q.scale_diag, q.scale_columns)
        control = self._control_variate(params, problem)
        sampled, inflation = rows, 1.0
        rank = q.scale_columns.shape[-1]
        if self.num_columns is not None and self.num_columns < rank:
            columns = stratified_indices(keys[3], rank, self.num_columns)
            sampled = rows.subsample_columns(columns)
            inflation = rank / self.num_columns
            control = None if control is None else control.subsample_columns(columns)
        of_sets = set_projections(q.features, q.X, sampled)
        at_support = None if control is None else control.set_projections(q.features, sampled)

        total = problem.at_zero.other_terms
        observed = self.likelihood
        if observed is None:
            observed = self._analyzed(problem, keys[0], pair)
        if self.bound is None:
            expected, precision = likelihood.gaussian(problem, observed, of_sets)
            total += expected
            if control is not None and at_support is not None:
                total -= 0.5 * precision * control.of_residuals(at_support)
        else:
            variances = jnp.sum(jnp.square(of_sets.projected[..., 1:]), axis=-1)
            if self.bound == "strict":
                variances = inflation * variances + rows.scale * of_sets.diagonal
            else:
                variances = variances + of_sets.diagonal
            moments = of_sets.projected[..., 0], variances
            total += likelihood.bound(problem, observed, *moments, self.num_nodes, self.log_concave)

        log_determinant = jnp.zeros(())
        if p.has_dense_precision and not self.fixed_prior:
            log_determinant = p.log_determinant()
        kl = prior_divergence(
            p.features, sampled if p.has_dense_precision else rows, p.precision, log_determinant
        )
        if p.has_dense_precision and control is not None and at_support is not None:
            kl += 0.5 * control.of_precision(at_support)
        return total - problem.at_zero.scale * kl, problem.at_zero.mutable

    def analyze(
        self, key: Key[Array, ""], pair: ModelAndGuide
    ) -> dict[str, likelihood.ObservedLikelihood]:
        """Find how the observed sites depend on f, as the first step would.

        Args:
            key: a JAX key.
            pair: the model and the guide.

        Returns:
            The likelihoods of the observed sites that depend on f, for `for_likelihood`.

        Raises:
            ValueError: as in a step.
        """
        keys = jax.random.split(key)
        params, model, guide, args, kwargs = pair
        problem = trace_problem(params, model, guide, keys, args, kwargs)
        return self._analyzed(problem, keys[0], pair)

    def for_likelihood(
        self, found: dict[str, likelihood.ObservedLikelihood] | None
    ) -> "QuadruplyStochasticELBO":
        """This objective with a likelihood that is analyzed already; None for a new analysis.

        Args:
            found: the result of `analyze`, for the same model and shapes of arguments, or None.
        """
        if found is self.likelihood:
            return self
        new = copy.copy(self)
        new.likelihood = found
        return new

    def _analyzed(
        self, problem: Problem, key: Array, pair: ModelAndGuide
    ) -> dict[str, likelihood.ObservedLikelihood]:
        if self.fixed_prior:
            _check_fixed(problem.p, key, pair)
        return likelihood.analyzed(problem)

    def _control_variate(self, params: dict[str, Any], problem: Problem) -> ControlVariate | None:
        site, q, p = problem.site, problem.q, problem.p
        if self.control_variate_rank == 0 or self.num_features >= q.loc.shape[0]:
            return None  # a set has all features
        if self.bound is not None and not p.has_dense_precision:
            return None
        if control_variate_name(site) in params:
            return params[control_variate_name(site)]
        if self.support_points is None or isinstance(q.loc, Rows):
            raise ValueError(
                "a control variate needs support points: train with `RowSVI`, which chooses them, "
                "or give `support_points`."
            )
        X = checks.inputs("support_points", self.support_points, width=q.X.shape[1])
        weights = Chevron(q.loc, q.scale_diag, q.scale_columns)
        zero = jnp.zeros(q.X.shape[0], X.dtype)
        dense = p.has_dense_precision
        return ControlVariate.fit(q.features, X, q.X, zero, weights, dense_precision=dense)


def _check_fixed(p: WeightSpaceGP, key: Array, pair: ModelAndGuide) -> None:
    """Raise if the prior's features have learned parameters."""

    def features(params: dict[str, Any]) -> list[Array]:
        q = find_family(params, pair.guide, key, pair.args, pair.kwargs)[1]
        return jax.tree.leaves(q.features.hyperparameters())

    if not p.has_dense_precision:
        raise ValueError(
            "`fixed_prior` leaves out log|S| of a dense S: this prior has no constant to leave out."
        )
    provenance = eval_provenance(features, params=pair.params)
    if any("params" in leaf for leaf in flat_provenance(provenance)):
        raise ValueError(
            "`fixed_prior` needs features that are fixed, and here hyperparameters of the features "
            "are learned: give them as constants."
        )


def control_variate_name(site: str) -> str:
    """The name of a site's control variate in the mutable state."""
    return f"{site}_control_variate"


def draw_sets(
    key: Key[Array, ""], size: int, num: int, num_sets: int = 2
) -> Int[Array, "sets num"]:
    """Draw independent stratified sets of `num` of `size` features, in O(num)."""
    keys = jax.random.split(key, num_sets)
    return jnp.stack([stratified_indices(key, size, num) for key in keys])
