"""The prior of a Gaussian process in weight space, f = Phi w."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.features.feature_map import AbstractFeatures
from numpyro_scalegp.features.learned import as_features
from numpyro_scalegp.features.linear_model import Weights
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.spectrum import Origin
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.processes.feature import FeaturePosterior
from numpyro_scalegp.processes.posterior import AbstractConditioned
from numpyro_scalegp.programs import functions
from numpyro_scalegp.sites.family import AbstractPriorGP
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.quadruply.rows import Rows, as_rows_or_array

# Beyond this many features, a dense precision is not factorized.
MAX_DENSE = 5000


class WeightSpaceGP(AbstractPriorGP):
    """A latent GP with finitely many features: the prior of f(X) = Phi w with w ~ N(0, S^-1).

    `LatentGP` is the latent GP with a kernel; `FeatureSpaceGP` integrates the function out. The
    precision S is the identity for random Fourier and learned features, K(Z, Z) for inducing
    points, or the diagonal `precision`. Learned precisions make a relevance vector machine.

    In variational inference use the guide `sgp.guides.AutoChevronGP`. Put the site outside the data
    plate.

    Args:
        features: phi, with m features: one of `sgp.features`, or any function from inputs (n, d) to
            features (n, m), such as a network; an Equinox module maps a single input.
        X: inputs, shape (n, d).
        precision: the diagonal of S, positive, shape (m,); None for the precision of `features`.
        jitter: added to the diagonal of Phi S^-1 Phi', relative to its mean; None for 100 times
            machine epsilon.

    Raises:
        TypeError: if `features` is a kernel, or not a function.
        ValueError: if `X` is not of rank 2, holds NaN or infinity, or `precision` has another shape
            or is not positive.

    References:
        Rasmussen and Williams (2006), section 2.1; Tipping (2001), Sparse Bayesian Learning and the
        Relevance Vector Machine. `sample`: O(n m); `log_prob`: O(n^2 m + n^3); a dense S adds
        O(m^3).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.3), 1000, seed=0)
        >>> prior = sgp.WeightSpaceGP(phi, jnp.linspace(0.0, 1.0, 20)[:, None])
        >>> prior.sample(jax.random.key(0), (3,)).shape
        (3, 20)
    """

    made_of = "features"
    arg_constraints: dict[str, Any] = {}
    reparametrized_params: list[str] = []
    pytree_data_fields = ("features", "X", "precision")
    pytree_aux_fields = ("jitter",)

    def __init__(
        self,
        features: AbstractFeatures | Callable[[Array], Array],
        X: Float[ArrayLike, "n d"],
        precision: Float[ArrayLike, " m"] | Rows | None = None,
        *,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.features = as_features(features)
        self.X = checks.inputs("X", X)
        self.precision: Any = None
        if precision is not None:
            self.precision = as_rows_or_array(precision, "precision")
            expected = (self.features.size(self.X),)
            checks.shape("precision", self.precision, expected, why="one for each feature")
            if not isinstance(self.precision, Rows):
                checks.positive("precision", self.precision)
        self.jitter = checks.jitter(jitter)
        super().__init__((), (self.X.shape[0],), validate_args=validate_args)

    @property
    def has_dense_precision(self) -> bool:
        """Whether S is a dense matrix."""
        return self.precision is None and self.features.has_dense_precision

    def _root(
        self, X: Float[Array, "n d"], features: AbstractFeatures | None = None
    ) -> Float[Array, "n m"]:
        """R with R R' = Phi S^-1 Phi', for the prior's features or `features` in their place."""
        Phi = self.features(X) if features is None else features(X)
        if self.has_dense_precision:
            return matmul(Phi, linalg.inverse_cholesky(self._dense_precision()).T)
        return Phi if self.precision is None else Phi / jnp.sqrt(self.precision)

    def _dense_precision(self) -> Float[Array, "m m"]:
        index = jnp.arange(self.features.size(self.X))
        return self.features.precision(index, index)

    def log_determinant(self) -> Float[Array, ""]:
        """The log-determinant of a dense S, in O(m^3).

        Raises:
            ValueError: if there are more than 5000 features.
        """
        m = self.features.size(self.X)
        if m > MAX_DENSE:
            raise ValueError(
                f"the log-determinant of the prior precision of {m} features would take O(m^3): "
                "fix the kernel and give QuadruplyStochasticELBO(fixed_prior=True), which leaves "
                "this constant out."
            )
        W = linalg.inverse_cholesky(self._dense_precision())
        return -2.0 * jnp.sum(jnp.log(jnp.diagonal(W)))

    @property
    def variance(self) -> Float[Array, " n"]:
        """The marginal variance, phi(x)'S^-1 phi(x)."""
        return jnp.sum(jnp.square(self._root(self.X)), axis=1)

    def covariance(self) -> Float[Array, "n n"]:
        """The covariance Phi S^-1 Phi', jitter included, shape (n, n)."""
        R = self._root(self.X)
        return linalg.add_jitter(matmul(R, R.T), self.jitter)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n"]:
        """Draw function values: shape (*sample_shape, n)."""
        shape = *sample_shape, self.num_white
        return self.of_white(jax.random.normal(checks.as_key(key), shape, self.variance.dtype))

    @property
    def num_white(self) -> int:
        """The number of features."""
        return self.features.size(self.X)

    def of_white(self, white: Float[Array, "... m"]) -> Float[Array, "... n"]:
        """Transform standard normal values S^(1/2) w to prior draws Phi w.

        Args:
            white: shape (..., m).
        """
        if self.has_dense_precision:
            return matmul(white, self._root(self.X).T)
        basis, amplitudes = self.features.basis_and_amplitudes(self.X)
        if self.precision is not None:
            amplitudes = amplitudes / jnp.sqrt(self.precision)
        return matmul(white * amplitudes, basis.T)

    def condition(self, f: Float[ArrayLike, " n"]) -> AbstractConditioned:
        """The posterior of the function given its values at X, such as one draw from NUTS.

        Args:
            f: function values, shape (n,).

        Returns:
            If n > m, a `FeaturePosterior` with the posterior of the weights, in O(n m^2 + m^3);
            otherwise an `ExactPosterior` with the kernel phi(x)'S^-1 phi(z), in O(n^2 m + n^3).
        """
        if self.num_white >= self.X.shape[0]:
            kernel = FeatureKernel(self, self.features)
            return LatentGP(kernel, self.X, jitter=self.jitter).condition(f)
        f = checks.as_float(f, "f")
        checks.shape("f", f, self.event_shape, why="one value for each row of `X`")
        checks.finite("f", f)
        R = self._root(self.X)
        num, m = R.shape
        jitter = linalg.default_jitter(R.dtype) if self.jitter is None else self.jitter
        scale = jnp.sqrt(jitter * jnp.mean(jnp.sum(jnp.square(R), axis=1)))
        # With T'T = R'R + scale^2 I, the weights are N(T^-1 Q'f, scale^2 T^-1 T^-T). QR of R keeps
        # twice the digits of a factorization of R'R.
        Q, T = jnp.linalg.qr(jnp.concatenate([R, scale * jnp.eye(m, dtype=R.dtype)]))
        mean = solve_triangular(T, matmul(Q[:num].T, f))
        whitening = scale * solve_triangular(T, jnp.eye(m, dtype=R.dtype)).T
        return FeaturePosterior(
            features=RootFeatures(self, self.features),
            X=self.X,
            y=f,
            noise_variance=None,
            mean_function=functions.constant_function(jnp.zeros((), f.dtype)),
            weights=Weights(mean, whitening, jnp.asarray(jitter, R.dtype)),
            of_values=True,
        )


class RootFeatures(eqx.Module):
    """Features S^(-1/2) phi(x) with standard normal weights, for f or a part of f."""

    prior: WeightSpaceGP
    features: AbstractFeatures

    def __call__(self, X: Float[Array, "n d"]) -> Float[Array, "n m"]:
        """The features at each input."""
        return self.prior._root(X, self.features)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "RootFeatures":
        """The features of a part of f, with the same weights."""
        return RootFeatures(self.prior, self.features.restrict(change))


class FeatureKernel(AbstractKernel):
    """The kernel phi(x)'S^-1 phi(z) of f = Phi w, or of a part f_1 = Phi_1 w.

    For a part, `evaluate` gives the covariance phi_1(x)'S^-1 phi(z) of f_1(x) and f(z), while
    `evaluate_diag` and `evaluate_covariance` give the covariance of f_1 alone. The two agree if S
    is diagonal and each column of Phi_1 is a column of Phi or zero.
    """

    prior: WeightSpaceGP
    features: AbstractFeatures  # phi_1

    def _root(self, X: Float[Array, "n d"]) -> Float[Array, "n m"]:
        return self.prior._root(X, self.features)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        return matmul(self._root(X), self.prior._root(Z).T)

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances of f_1, shape (n,)."""
        return jnp.sum(jnp.square(self._root(X)), axis=1)

    def evaluate_covariance(self, X: Float[Array, "n d"]) -> Float[Array, "n n"]:
        """The covariance of f_1, shape (n, n)."""
        R = self._root(X)
        return matmul(R, R.T)

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The exact features of f_1."""
        return self._root(X)

    def restrict(self, change: Callable[[AbstractKernel], AbstractKernel]) -> "FeatureKernel":
        """The kernel of a part of f; `change` restricts the kernel of the features."""
        return FeatureKernel(self.prior, self.features.restrict(change))
