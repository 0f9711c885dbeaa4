"""A variational family in weight space, with a chevron covariance of the weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Key
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import checks, chunks
from numpyro_scalegp.core.linalg import matmul
from numpyro_scalegp.core.mesh import is_divisible, mesh_of
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.rows import Rows, as_rows_or_array
from numpyro_scalegp.distributions.chevron_normal import check_chevron
from numpyro_scalegp.families.family import AbstractVariationalGP
from numpyro_scalegp.families.relevance import relevance_vectors
from numpyro_scalegp.families.same import one_if_same
from numpyro_scalegp.families.weight_space import WeightSpaceGP
from numpyro_scalegp.features import AbstractFeatures, InducingPoints
from numpyro_scalegp.features.chevron import (
    BLOCK,
    Chevron,
    blocks_of,
    prior_divergence,
    projections,
    weight_rows,
)
from numpyro_scalegp.features.learned import as_features
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.posteriors.function_samples import AbstractFunctionSamples
from numpyro_scalegp.posteriors.variational import AbstractVariationalPosterior


class _Augmentation(eqx.Module):
    """What a kernel function centered on each test point adds to the variance there."""

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    noise_variance: Float[Array, ""]


class ChevronPosterior(AbstractVariationalPosterior):
    """A Gaussian process f(x) = phi(x)'w with w ~ N(loc, C C') for m features.

    The fields are the arguments of `ChevronGP`. Moments at n inputs cost O(n m (d + k)), and so do
    draws of functions; features are made in blocks, never all at once.

    References:
        Evans and Nair (2020), Quadruply Stochastic Gaussian Processes, section 2.2 and appendix G.
    """

    features: AbstractFeatures
    loc: Float[Array, " m"]
    scale_diag: Float[Array, " m"]
    scale_columns: Float[Array, "m k"]
    augmentation: _Augmentation | None = None
    noise_variance: Float[Array, "..."] | None = None

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "ChevronPosterior":
        """The posterior of a part of f; see `AbstractPosterior.restrict`."""
        return dataclasses.replace(self, features=self.features.restrict(change), augmentation=None)

    @property
    def _num_columns(self) -> int | None:
        if isinstance(self.features, InducingPoints):
            return self.features.points.shape[1]
        return None

    @property
    def _row_width(self) -> int:
        return min(BLOCK, self.loc.shape[0]) + self.scale_columns.shape[1]

    def _weights(self) -> tuple[Any, ...]:
        return self.loc, self.scale_diag, self.scale_columns

    @property
    def _chevron(self) -> Chevron:
        return Chevron(self.loc, self.scale_diag, self.scale_columns)

    def augmented(
        self, X: Float[ArrayLike, "n d"], noise_variance: Float[ArrayLike, ""]
    ) -> "ChevronPosterior":
        """The same with a variance that goes back to the prior's far from the data.

        A basis function k(., x) at each test point x, independent of the others a posteriori, adds
        s k(x, x)^2 / (||k(X, x)||^2 + s k(x, x)) for noise variance s. Draws of functions
        (`sample`) leave it out: it is no part of one function.

        Args:
            X: the training inputs, shape (n, d).
            noise_variance: of the observations, shape ().

        Returns:
            A posterior whose `variance` costs O(n d) more for each row.

        Raises:
            ValueError: if the features are not `InducingPoints`.

        References:
            Evans and Nair (2020), proposition 4.
        """
        if not isinstance(self.features, InducingPoints):
            raise ValueError(
                "`augmented` needs features that are `InducingPoints`, got "
                f"`{type(self.features).__name__}`."
            )
        X = checks.inputs("X", X, width=self._num_columns)
        noise = checks.as_positive(noise_variance, "noise_variance")
        checks.shape("noise_variance", noise, ())
        checks.positive("noise_variance", noise)
        augmentation = _Augmentation(self.features.kernel, X, noise)
        return dataclasses.replace(self, augmentation=augmentation)

    def pruned(
        self, active: Bool[ArrayLike, " m"] | Float[ArrayLike, " m"], threshold: float = 1e4
    ) -> "ChevronPosterior":
        """The same with the weights of inactive features at zero for certain.

        Args:
            active: the prior precisions of the weights, of which `relevance_vectors` finds the
                active ones; or True for each active feature, shape (m,).
            threshold: precisions from here on are switched off.

        Returns:
            A posterior of the same shapes.

        Raises:
            ValueError: if `active` has another shape, or a precision is not positive.
        """
        active = jnp.asarray(active)
        checks.shape("active", active, self.loc.shape, why="one entry for each feature")
        if active.dtype != bool:
            active = relevance_vectors(active, threshold)
        # The covariance C C' loses rows and columns when C loses rows.
        return dataclasses.replace(
            self,
            loc=jnp.where(active, self.loc, 0.0),
            scale_diag=jnp.where(active, self.scale_diag, 0.0),
            scale_columns=jnp.where(active[:, None], self.scale_columns, 0.0),
        )

    @property
    def _shares_rows(self) -> bool:
        return not is_divisible(self.loc.shape[0], mesh_of(self.loc))

    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        projected, variance = projections(self.features, X, self._chevron)
        variance = variance + jnp.sum(jnp.square(projected[:, 1:]), axis=1)
        if self.augmentation is not None:
            variance = variance + self._added(self.augmentation, X)
        return projected[:, 0], variance

    def _added(self, augmentation: _Augmentation, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        kernel, noise = augmentation.kernel, augmentation.noise_variance

        def squares(rows: Array) -> Array:
            return jnp.sum(jnp.square(kernel(rows, augmentation.X)), axis=1)

        sums = chunks.map_rows(squares, X, chunks.rows_per_chunk(augmentation.X.shape[0]))
        prior = kernel.diag(X)
        return noise * jnp.square(prior) / (sums + noise * prior)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        if self.augmentation is not None:
            raise ValueError(
                "an `augmented` posterior has no `covariance`: what is added to the variance is no "
                "part of one function. Take that of the posterior without it."
            )
        index = jnp.arange(self.loc.shape[0], dtype=jnp.int32)
        directions, diagonal = self._chevron.rows(index)

        def of_weights(weights: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            index, columns, diagonal = weights
            Phi = self.features.columns(Xs, index)
            return matmul(Phi, columns), matmul(Phi * jnp.square(diagonal), Phi.T)

        weights = index, directions[:, 1:], diagonal
        projected, covariance = chunks.sum_rows(of_weights, weights, BLOCK)
        return covariance + matmul(projected, projected.T)

    def _sample(self, key: Array, Xs: Array, num_samples: int) -> Array:
        """Draw weights; the same key gives the same functions at other inputs."""
        return self._functions(key, num_samples)._values(Xs, None)

    def _functions(
        self, key: Array, num_samples: int, num_features: int | None = None
    ) -> "ChevronFunctionSamples":
        return ChevronFunctionSamples(self, key, num_samples)


class ChevronFunctionSamples(AbstractFunctionSamples):
    """Functions f_j(x) = phi(x)'w_j, whose m weights are drawn block by block at each call."""

    posterior: ChevronPosterior
    key: Key[Array, ""]
    num_samples: int = eqx.field(static=True)

    @property
    def _num_columns(self) -> int | None:
        return self.posterior._num_columns

    @compiled
    def _values(self, Xs: Array, chunk_size: int | None) -> Array:
        features, weights = self.posterior.features, self.posterior._chevron
        size, dtype, num = weights.loc.shape[0], weights.loc.dtype, self.num_samples
        dense_key, sparse_key = jax.random.split(self.key)
        shared = jax.random.normal(dense_key, (weights.rank, num), dtype)

        def draw(rows: Array) -> Array:
            def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
                number, index = block
                inside = index < size
                index = jnp.minimum(index, size - 1)
                directions, diagonal = weights.rows(index)
                own_key = jax.random.fold_in(sparse_key, number)
                own = jax.random.normal(own_key, (index.shape[0], num), dtype)
                drawn = directions[:, :1] + matmul(directions[:, 1:], shared)
                drawn = drawn + diagonal[:, None] * own
                Phi = jnp.where(inside, features.columns(rows, index), 0.0)
                return total + matmul(Phi, drawn), None

            blocks = blocks_of(size)
            zero = jnp.zeros((rows.shape[0], num), jnp.result_type(Xs, weights.loc))
            # Features are made once more on the way back.
            return jax.lax.scan(jax.checkpoint(add), zero, (jnp.arange(len(blocks)), blocks))[0]

        chunk_size = chunk_size or self.posterior.rows_per_chunk()
        return chunks.map_rows(draw, Xs, chunk_size, share=self.posterior._shares_rows).T


class ChevronGP(AbstractVariationalGP):
    """A variational Gaussian process f(X) = Phi w with w ~ N(loc, C C'), C a chevron.

    C is lower triangular with k dense columns and a diagonal, as in `ChevronNormal`. How the site
    behaves in a model is described in `AbstractVariationalGP`; the prior is a `WeightSpaceGP`. Its
    moments and divergence cost O(n m (d + k)) and O(m k): with `QuadruplyStochasticELBO`, a step
    costs a fraction of that.

    Args:
        features: phi, with m features, or a function of inputs, as of `WeightSpaceGP`.
        X: inputs, shape (n, d).
        loc: as of `ChevronNormal`, shape (m,).
        scale_diag: as of `ChevronNormal`, shape (m,).
        scale_columns: as of `ChevronNormal`, shape (m, k).

    Raises:
        ValueError: if a shape does not fit, or `X` holds NaN or infinity.

    References:
        Evans and Nair (2020), Quadruply Stochastic Gaussian Processes, section 2.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 20)[:, None]
        >>> phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.3), 100, seed=0)
        >>> guide = sgp.ChevronGP(phi, X, jnp.zeros(100), jnp.ones(100), jnp.zeros((100, 3)))
        >>> guide.mean.shape, guide.variance.shape
        ((20,), (20,))
    """

    arg_constraints: dict[str, Any] = {}
    reparametrized_params: list[str] = []
    pytree_data_fields = ("features", "X", "loc", "scale_diag", "scale_columns")

    def __init__(
        self,
        features: AbstractFeatures | Callable[[Array], Array],
        X: Float[ArrayLike, "n d"],
        loc: Float[ArrayLike, " m"] | Rows,
        scale_diag: Float[ArrayLike, " m"] | Rows,
        scale_columns: Float[ArrayLike, "m k"] | Rows,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.features = as_features(features)
        self.X = checks.inputs("X", X)
        # Arrays, or `Rows` within a step of `RowSVI`.
        self.loc: Any = as_rows_or_array(loc, "loc")
        self.scale_diag: Any = as_rows_or_array(scale_diag, "scale_diag")
        self.scale_columns: Any = as_rows_or_array(scale_columns, "scale_columns")
        expected = (self.features.size(self.X),)
        checks.shape("loc", self.loc, expected, why="one weight for each feature")
        check_chevron(self.loc, self.scale_diag, self.scale_columns)
        super().__init__((), (self.X.shape[0],), validate_args=validate_args)

    def posterior(self) -> ChevronPosterior:
        """The process itself, for moments and joint samples at any inputs."""
        return ChevronPosterior(self.features, self.loc, self.scale_diag, self.scale_columns)


def declare_weights(
    param: Callable[..., Any], m: int, rank: int, init_scale: float, dtype: Any
) -> tuple[Any, Any, Any]:
    """Declare `loc`, `scale_diag` and `scale_columns`, by rows, at zero but for the diagonal.

    Args:
        param: as `numpyro.param`, with a short name.
        m: number of features.
        rank: number of dense columns.
        init_scale: where the diagonal starts.
        dtype: of the weights.
    """
    loc = param("loc", lambda _: jnp.zeros(m, dtype), rows=True)
    scale_diag = param(
        "scale_diag",
        lambda _: jnp.full(m, init_scale, dtype),
        constraint=constraints.positive,
        rows=True,
    )
    scale_columns = param("scale_columns", lambda _: jnp.zeros((m, rank), dtype), rows=True)
    return loc, scale_diag, scale_columns


@kl_divergence.register(ChevronGP, WeightSpaceGP)
def _kl_chevron_weight_space(q: ChevronGP, p: WeightSpaceGP) -> Float[Array, ""]:
    """The divergence between the weights' distributions, whatever rows the sites are at."""
    whole = jnp.arange(q.loc.shape[0], dtype=jnp.int32)[None]
    rows = weight_rows(whole, q.loc, q.scale_diag, q.scale_columns)
    log_determinant = p.log_determinant() if p.has_dense_precision else jnp.zeros(())
    divergence = prior_divergence(p.features, rows, p.precision, log_determinant)
    return one_if_same("features", q.features, p.features) * divergence
