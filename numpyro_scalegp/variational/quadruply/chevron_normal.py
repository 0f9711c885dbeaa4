"""A normal distribution whose Cholesky factor has a few dense columns and a diagonal."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import (
    Distribution,
    ExpandedDistribution,
    Independent,
    Normal,
    constraints,
)
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.variational.quadruply.chevron_features import dense_columns, sparse_diagonal


class ChevronNormal(Distribution):
    """N(loc, C C') with C lower triangular: k dense columns, then a diagonal.

    k = 0 is mean field, k = m a full Cholesky factor. There are m (k + 2) parameters, and all
    correlations are through the first k weights. Use it in a guide with `numpyro.infer.Trace_ELBO`,
    or with `TraceMeanField_ELBO` and a prior `dist.Normal(...).to_event(1)`, for which the KL
    divergence is registered.

    Args:
        loc: the mean, shape (m,).
        scale_diag: the diagonal of C, positive, shape (m,).
        scale_columns: the first k columns of C, shape (m, k); only entries below the diagonal are
            used.

    Raises:
        ValueError: if a shape does not fit.

    References:
        Challis and Barber (2013), Gaussian Kullback-Leibler Approximate Inference; Evans and Nair
        (2020), section 2.2. Sampling, log density and KL divergence take O(m k + k^3).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> q = sgp.ChevronNormal(jnp.zeros(5), jnp.ones(5), 0.1 * jnp.ones((5, 2)))
        >>> q.sample(jax.random.key(0), (3,)).shape
        (3, 5)
    """

    arg_constraints = {
        "loc": constraints.real_vector,
        "scale_diag": constraints.independent(constraints.positive, 1),
        "scale_columns": constraints.real_matrix,
    }
    support = constraints.real_vector
    reparametrized_params = list(arg_constraints)

    def __init__(
        self,
        loc: Float[ArrayLike, " m"],
        scale_diag: Float[ArrayLike, " m"],
        scale_columns: Float[ArrayLike, "m k"],
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.loc = checks.as_float(loc, "loc")
        self.scale_diag = checks.as_float(scale_diag, "scale_diag")
        self.scale_columns = checks.as_float(scale_columns, "scale_columns")
        check_chevron(self.loc, self.scale_diag, self.scale_columns)
        super().__init__((), self.loc.shape, validate_args=validate_args)

    def _columns(self) -> Float[Array, "m k"]:
        index = jnp.arange(self.loc.shape[0], dtype=jnp.int32)
        return dense_columns(index, self.scale_diag, self.scale_columns)

    def _diagonal(self) -> Float[Array, " m"]:
        index = jnp.arange(self.loc.shape[0], dtype=jnp.int32)
        return sparse_diagonal(index, self.scale_diag, self.scale_columns.shape[1])

    @property
    def mean(self) -> Float[Array, " m"]:
        """The mean."""
        return self.loc

    @property
    def variance(self) -> Float[Array, " m"]:
        """The diagonal of C C'."""
        return jnp.sum(jnp.square(self._columns()), axis=1) + jnp.square(self._diagonal())

    @property
    def scale_tril(self) -> Float[Array, "m m"]:
        """The full matrix C."""
        k = self.scale_columns.shape[1]
        diagonal_columns = jnp.diag(self.scale_diag)[:, k:]
        return jnp.concatenate([self._columns(), diagonal_columns], axis=1)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape m"]:
        """Draw weights, shape (*sample_shape, m), in O(m k) each."""
        m, k = self.scale_columns.shape
        noise = jax.random.normal(checks.as_key(key), (*sample_shape, m), self.loc.dtype)
        dense = matmul(noise[..., :k], self._columns().T)
        return self.loc + dense + noise * self._diagonal()

    def log_prob(
        self, value: Float[ArrayLike, "*batch m"], intermediates: list | None = None
    ) -> Float[Array, "*batch"]:
        """The log density of weights of shape (..., m), in O(m k + k^3) each."""
        m, k = self.scale_columns.shape
        value = checks.as_float(value, "value")
        if value.shape[-1:] != (m,):
            raise ValueError(f"`value` must have shape (..., {m}), got {value.shape}.")
        residual = value - self.loc
        columns = self._columns()
        solve = functools.partial(jax.scipy.linalg.solve_triangular, columns[:k], lower=True)
        head = batches.mapped(solve, 1)(residual[..., :k])
        tail = (residual[..., k:] - matmul(head, columns[k:].T)) / self.scale_diag[k:]
        squares = jnp.sum(jnp.square(head), axis=-1) + jnp.sum(jnp.square(tail), axis=-1)
        return -0.5 * (squares + m * math.log(2.0 * math.pi)) - jnp.sum(jnp.log(self.scale_diag))

    def entropy(self) -> Float[Array, ""]:
        """The entropy, m (1 + log 2 pi) / 2 + sum log c_rr."""
        m = self.loc.shape[0]
        return 0.5 * m * (1.0 + math.log(2.0 * math.pi)) + jnp.sum(jnp.log(self.scale_diag))


def check_chevron(loc: Any, scale_diag: Any, scale_columns: Any) -> None:
    """Check shapes and values of a chevron distribution, with at most m dense columns."""
    if len(loc.shape) != 1:
        raise ValueError(f"`loc` must have shape (m,), got {loc.shape}.")
    m = loc.shape[0]
    for name, value in (("loc", loc), ("scale_columns", scale_columns)):
        if isinstance(value, Array):
            checks.finite(name, value)
    if scale_diag.shape != (m,):
        raise ValueError(f"`scale_diag` must have shape ({m},), got {scale_diag.shape}.")
    if isinstance(scale_diag, Array):
        checks.positive("scale_diag", scale_diag)
    shape = scale_columns.shape
    if len(shape) != 2 or shape[0] != m or shape[1] > m:
        raise ValueError(
            f"`scale_columns` must have shape ({m}, k) with k from 0 to {m}, got {shape}: a row "
            "for each entry of `loc`."
        )


@kl_divergence.register(ChevronNormal, Independent)
def _kl_chevron_independent(q: ChevronNormal, p: Independent) -> Float[Array, ""]:
    """The divergence from independent normals over the same weights."""
    base = p.base_dist
    while isinstance(base, ExpandedDistribution):
        base = base.base_dist
    if not isinstance(base, Normal) or p.batch_shape != () or p.event_shape != q.event_shape:
        raise NotImplementedError("no rule for this prior")
    precision = 1.0 / jnp.square(base.scale)
    squares = q.variance + jnp.square(q.loc - base.loc)
    logs = jnp.log(precision) + 2.0 * jnp.log(q.scale_diag)
    return 0.5 * jnp.sum(precision * squares - 1.0 - logs)
