"""The ELBO of a weight-space GP from some rows of the data and some of its features."""

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
from numpyro_scalegp.core.rows import Rows
from numpyro_scalegp.families import WeightSpaceGP
from numpyro_scalegp.features.chevron import Chevron, prior_divergence, views, weight_rows
from numpyro_scalegp.quadruply_stochastic import likelihood
from numpyro_scalegp.quadruply_stochastic.control_variate import ControlVariate
from numpyro_scalegp.quadruply_stochastic.problem import Problem, find_family, trace_problem
from numpyro_scalegp.tracing.elbo import AbstractParticleELBO, Pair
from numpyro_scalegp.tracing.runs import flat_provenance


class QuadruplyStochasticELBO(AbstractParticleELBO):
    """The ELBO of a `ChevronGP` from a mini-batch of rows and two random sets of its features.

    With q of m features in a set, s = m / q, f_i = s Phi_i loc_i and G_i = s Phi_i C_i at the rows,
    E[<y - f_i, y - f_j> + <G_i, G_j>] = ||y - Phi loc||^2 + ||Phi C||_F^2 for independent sets i
    and j: so value and gradient are unbiased for a Gaussian likelihood whose mean is affine in f,
    at a cost that depends neither on the number of rows nor on m. The divergence from the prior is
    estimated from the same sets; other sites are sampled, with their analytic divergences. Single
    losses vary far more than they change in training: compare their means.

    A likelihood that is no such Gaussian has no unbiased estimate, and needs `bound`: given one set
    i, f is N(f_i, v_i) with v_i = ||G_i||^2, and where log p(y | f) is concave the mean over sets
    of E[log p(y | f) | i] is a lower bound, by Jensen's inequality (`"strict"`). The diagonal of C
    counts s times in v_i; `"plug_in"` takes it once, which is closer to the variance of f, and no
    bound. With hyperparameters to learn and an s of more than a few, take `"plug_in"`: the strict
    bound then pulls the kernel's variance down. Expectations over f are
    Gauss-Hermite sums, and in closed form for a Laplace likelihood.

    Control variates: from r support points, the means of f^2 and of the variance over all rows are
    predicted, once from i and j and once from all features, whose values there `RowSVI` keeps up
    to date; by how much these differ is taken, times n, from the estimate. For inducing points, the
    Nystrom approximation on the support does the same for the prior's precision.

    Args:
        num_features: the number q of features in a set; all of them where there are fewer.
        control_variate_rank: number of support points; 0 for no control variate. Where nothing
            varies with sets (all features in one), and for a bound with independent weights, there
            is none.
        support_points: the support points, shape (r, d), in place of the cluster centers of rows
            that `RowSVI` draws from the model's mini-batches. Without `RowSVI`, a step with
            them costs O(r m (d + k)).
        num_columns: dense columns of C that a step draws, at most k; None for all.
        bound: for likelihoods that are not Gaussian, `"strict"` or `"plug_in"`.
        log_concave: names of observed sites whose log-likelihood is concave in f, besides
            Bernoulli and binomial ones with affine logits, Laplace and Gaussian ones with an affine
            location, and Poisson ones (the logarithm of whose rate must be affine in f).
        fixed_prior: whether the constant log|K(Z, Z)| of inducing points, which takes O(m^3), is
            left out: for a kernel with nothing to learn.
        num_nodes: quadrature nodes.
        num_particles: draws of the other sites.
        vectorize_particles: as in NumPyro's ELBOs.

    Raises:
        ValueError: if a number is out of range; in a step, if the guide's GP site is not one
            `ChevronGP`, an observed site depends on f in a way that the above does not allow, or
            there should be a control variate, and neither support points nor `RowSVI`.

    References:
        Evans and Nair (2020), Quadruply Stochastic Gaussian Processes, theorems 1 to 3. The
        standard deviation in theorem 3 is the root of what is printed there. A step costs
        O((b + r) q (d + k)) for b rows, and O(q^2 (d + k)) more for inducing points with their own
        precision.

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
        self.likelihood: dict[str, likelihood.Dependence] | None = None
        super().__init__(num_particles, vectorize_particles)

    def index_sets(
        self, key: Key[Array, ""], size: int, *, dense_precision: bool
    ) -> Int[Array, "sets q"]:
        """Draw the sets of features for one step.

        Args:
            key: a typed JAX key.
            size: the number m of features.
            dense_precision: whether the prior's precision is a matrix, which takes two sets.

        Returns:
            Two independent sets, shape (2, q), or one where that is enough: for a bound, and where
            it has all features.
        """
        num = min(self.num_features, size)
        enough = num == size or (self.bound is not None and not dense_precision)
        return draw_sets(key, size, num, 1 if enough else 2)

    def particle(self, key: Array, pair: Pair) -> tuple[Float[Array, ""], dict[str, Any]]:
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
        some, inflation = rows, 1.0
        rank = q.scale_columns.shape[-1]
        if self.num_columns is not None and self.num_columns < rank:
            columns = stratified_indices(keys[3], rank, self.num_columns)
            some = rows.some_columns(columns)
            inflation = rank / self.num_columns
            control = None if control is None else control.some_columns(columns)
        seen = views(q.features, q.X, some)
        at_support = None if control is None else control.views(q.features, some)

        total = problem.at_zero.other_terms
        found = self.likelihood
        if found is None:
            found = self._analyzed(problem, keys[0], pair)
        if self.bound is None:
            expected, precision = likelihood.gaussian(problem, found, seen)
            total += expected
            if control is not None and at_support is not None:
                total -= 0.5 * precision * control.of_residuals(at_support)
        else:
            variances = jnp.sum(jnp.square(seen.projected[..., 1:]), axis=-1)
            if self.bound == "strict":
                variances = inflation * variances + rows.share * seen.diagonal
            else:
                variances = variances + seen.diagonal
            moments = seen.projected[..., 0], variances
            total += likelihood.bound(problem, found, *moments, self.num_nodes, self.log_concave)

        log_determinant = jnp.zeros(())
        if p.has_dense_precision and not self.fixed_prior:
            log_determinant = p.log_determinant()
        kl = prior_divergence(
            p.features, rows if not p.has_dense_precision else some, p.precision, log_determinant
        )
        if p.has_dense_precision and control is not None and at_support is not None:
            kl += 0.5 * control.of_precision(at_support)
        return total - problem.at_zero.scale * kl, problem.at_zero.mutable

    def analyze(self, key: Key[Array, ""], pair: Pair) -> dict[str, likelihood.Dependence]:
        """Find how the observed sites depend on f, as the first step would.

        Args:
            key: a JAX key.
            pair: the model and the guide.

        Returns:
            What `for_likelihood` takes.

        Raises:
            ValueError: as in a step.
        """
        keys = jax.random.split(key)
        params, model, guide, args, kwargs = pair
        problem = trace_problem(params, model, guide, keys, args, kwargs)
        return self._analyzed(problem, keys[0], pair)

    def for_likelihood(
        self, found: dict[str, likelihood.Dependence] | None
    ) -> "QuadruplyStochasticELBO":
        """The same objective for a likelihood that is analyzed already; None for one that is not.

        Args:
            found: what `analyze` has found for the same model and arguments of the same shapes.
        """
        if found is self.likelihood:
            return self
        new = copy.copy(self)
        new.likelihood = found
        return new

    def _analyzed(
        self, problem: Problem, key: Array, pair: Pair
    ) -> dict[str, likelihood.Dependence]:
        if self.fixed_prior:
            _check_fixed(problem.p, key, pair)
        return likelihood.analyzed(problem)

    def _control_variate(self, params: dict[str, Any], problem: Problem) -> ControlVariate | None:
        site, q, p = problem.site, problem.q, problem.p
        if self.control_variate_rank == 0 or self.num_features >= q.loc.shape[0]:
            return None  # without sets, nothing varies
        if self.bound is not None and not p.has_dense_precision:
            return None
        if control_variate_name(site) in params:
            return params[control_variate_name(site)]
        if self.support_points is None or isinstance(q.loc, Rows):
            raise ValueError(
                "a control variate needs support rows: train with `RowSVI`, which draws them, "
                "or give `support_points`."
            )
        X = checks.inputs("support_points", self.support_points, width=q.X.shape[1])
        weights = Chevron(q.loc, q.scale_diag, q.scale_columns)
        zero = jnp.zeros(q.X.shape[0], X.dtype)
        dense = p.has_dense_precision
        return ControlVariate.fit(q.features, X, q.X, zero, weights, dense_precision=dense)


def _check_fixed(p: WeightSpaceGP, key: Array, pair: Pair) -> None:
    """Raise unless the prior is that of features without learned parameters."""

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
    """The name under which a control variate is kept among mutable state."""
    return f"{site}_control_variate"


def draw_sets(
    key: Key[Array, ""], size: int, num: int, num_sets: int = 2
) -> Int[Array, "sets num"]:
    """Draw independent stratified sets of `num` of `size` features, in O(num)."""
    keys = jax.random.split(key, num_sets)
    return jnp.stack([stratified_indices(key, size, num) for key in keys])
