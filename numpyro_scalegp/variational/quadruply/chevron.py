"""A variational family in weight space, with a chevron factor of the weights' covariance."""

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
from numpyro_scalegp.core.mesh import is_divisible, mesh_of
from numpyro_scalegp.features.feature_map import AbstractFeatures
from numpyro_scalegp.features.inducing_points import InducingPoints
from numpyro_scalegp.features.learned import as_features
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.function_samples import AbstractFunctionSamples
from numpyro_scalegp.processes.variational import AbstractVariationalPosterior
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.family import AbstractVariationalGP
from numpyro_scalegp.variational.quadruply.chevron_features import (
    BLOCK,
    Chevron,
    blocks_of,
    prior_divergence,
    projections,
    weight_rows,
)
from numpyro_scalegp.variational.quadruply.chevron_normal import check_chevron
from numpyro_scalegp.variational.quadruply.relevance import relevance_vectors
from numpyro_scalegp.variational.quadruply.rows import Rows, as_rows_or_array
from numpyro_scalegp.variational.quadruply.weight_space import WeightSpaceGP
from numpyro_scalegp.variational.same import one_if_same


class _Augmentation(eqx.Module):
    """A kernel function centered at each test point, which adds to the variance there."""

    kernel: AbstractKernel
    X: Float[Array, "n d"]
    noise_variance: Float[Array, ""]


class ChevronPosterior(AbstractVariationalPosterior):
    """A Gaussian process f(x) = phi(x)'w with w ~ N(loc, C C') for m features.

    The fields are the arguments of `ChevronGP`. Moments at n inputs cost O(n m (d + k)), and so do
    draws of functions; features are evaluated in blocks, never all at once.

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
        """The posterior of a component of f; see `AbstractPosterior.restrict`."""
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
        """This posterior, with a variance that reverts to the prior variance far from the data.

        A basis function k(., x) at each test point x, independent of the others a posteriori, adds
        s k(x, x)^2 / (||k(X, x)||^2 + s k(x, x)) to the variance, for noise variance s. Draws of
        functions (`sample`) do not include it, since it is not part of any single function.

        Args:
            X: the training inputs, shape (n, d).
            noise_variance: noise variance of the observations, shape ().

        Returns:
            A posterior whose `variance` costs O(n d) more for each input.

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
        """This posterior, with the weights of inactive features fixed at zero.

        Args:
            active: True for each active feature, shape (m,); or the prior precisions of the
                weights, from which `relevance_vectors` finds the active features.
            threshold: features with at least this precision are inactive.

        Returns:
            A posterior with arrays of the same shapes.

        Raises:
            ValueError: if `active` has another shape, or a precision is not positive.
        """
        active = jnp.asarray(active)
        checks.shape("active", active, self.loc.shape, why="one entry for each feature")
        if active.dtype != bool:
            active = relevance_vectors(active, threshold)
        # Zero rows of C give zero rows and columns of C C'.
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
            variance = variance + self._added_variance(self.augmentation, X)
        return projected[:, 0], variance

    def _added_variance(
        self, augmentation: _Augmentation, X: Float[Array, "n d"]
    ) -> Float[Array, " n"]:
        kernel, noise = augmentation.kernel, augmentation.noise_variance

        def squares(rows: Array) -> Array:
            return jnp.sum(jnp.square(kernel.evaluate(rows, augmentation.X)), axis=1)

        sums = chunks.map_rows(squares, X, chunks.rows_per_chunk(augmentation.X.shape[0]))
        prior = kernel.evaluate_diag(X)
        return noise * jnp.square(prior) / (sums + noise * prior)

    @compiled
    def _covariance(self, Xs: Array) -> Array:
        if self.augmentation is not None:
            raise ValueError(
                "an `augmented` posterior has no `covariance`: the added variance is not part of a "
                "single function. Use the posterior from before `augmented`."
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
        """Draw weights: the same key gives the same functions at any inputs."""
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
        features, chevron = self.posterior.features, self.posterior._chevron
        size, dtype, num = chevron.loc.shape[0], chevron.loc.dtype, self.num_samples
        dense_key, sparse_key = jax.random.split(self.key)
        dense_normals = jax.random.normal(dense_key, (chevron.rank, num), dtype)

        def draw(rows: Array) -> Array:
            def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
                number, index = block
                inside = index < size
                index = jnp.minimum(index, size - 1)
                directions, diagonal = chevron.rows(index)
                block_key = jax.random.fold_in(sparse_key, number)
                normals = jax.random.normal(block_key, (index.shape[0], num), dtype)
                weights = directions[:, :1] + matmul(directions[:, 1:], dense_normals)
                weights = weights + diagonal[:, None] * normals
                Phi = jnp.where(inside, features.columns(rows, index), 0.0)
                return total + matmul(Phi, weights), None

            blocks = blocks_of(size)
            zero = jnp.zeros((rows.shape[0], num), jnp.result_type(Xs, chevron.loc))
            # The backward pass evaluates the features again.
            return jax.lax.scan(jax.checkpoint(add), zero, (jnp.arange(len(blocks)), blocks))[0]

        chunk_size = chunk_size or self.posterior.rows_per_chunk()
        return chunks.map_rows(draw, Xs, chunk_size, share=self.posterior._shares_rows).T


class ChevronGP(AbstractVariationalGP):
    """A variational Gaussian process f(X) = Phi w with w ~ N(loc, C C'), C a chevron.

    C is lower triangular with k dense columns and a diagonal, as in `ChevronNormal`. The prior is a
    `WeightSpaceGP`; `AbstractVariationalGP` describes its use in a model. The moments cost O(n m
    (d + k)) and the KL divergence O(m k). With `QuadruplyStochasticELBO`, a step costs a fraction
    of that.

    Args:
        features: phi, with m features, or a function of inputs, as in `WeightSpaceGP`.
        X: inputs, shape (n, d).
        loc: as in `ChevronNormal`, shape (m,).
        scale_diag: as in `ChevronNormal`, shape (m,).
        scale_columns: as in `ChevronNormal`, shape (m, k).

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
        """The approximate posterior, with moments and joint samples at any inputs."""
        return ChevronPosterior(self.features, self.loc, self.scale_diag, self.scale_columns)


def declare_weights(
    param: Callable[..., Any], m: int, rank: int, init_scale: float, dtype: Any
) -> tuple[Any, Any, Any]:
    """Declare `loc`, `scale_diag` and `scale_columns` with `rows=True`.

    Args:
        param: like `numpyro.param`, with a short name.
        m: number of features.
        rank: number of dense columns.
        init_scale: the initial diagonal; the other parameters start at zero.
        dtype: dtype of the weights.
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
    """The divergence between the distributions of the weights."""
    index = jnp.arange(q.loc.shape[0], dtype=jnp.int32)[None]
    rows = weight_rows(index, q.loc, q.scale_diag, q.scale_columns)
    log_determinant = p.log_determinant() if p.has_dense_precision else jnp.zeros(())
    divergence = prior_divergence(p.features, rows, p.precision, log_determinant)
    return one_if_same("features", q.features, p.features) * divergence
