"""A kernel of categorical inputs, such as the index of an output."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.kernel import NUM_HARMONICS, AbstractKernel
from numpyro_scalegp.kernels.spectrum import Origin
from numpyro_scalegp.kernels.state_space import AbstractStateSpace, Constants
from numpyro_scalegp.numerics.linalg import matmul


def long_format(X: Float[Array, "n d"], num_outputs: int) -> Float[Array, "n_times_p d_and_one"]:
    """Repeat each row of X for every output, with the output's index as the last column."""
    outputs = jnp.tile(jnp.arange(num_outputs, dtype=X.dtype), X.shape[0])
    return jnp.concatenate([jnp.repeat(X, num_outputs, axis=0), outputs[:, None]], axis=1)


class Coregion(AbstractKernel):
    """A covariance between categories, which one input column holds as integers 0, ..., p - 1.

    k(a, b) = B[a, b], with B = W W' + diag(diag): r factors shared by all categories, and an
    independent variance for each category.

    Its product with a kernel of the other columns is a model of several outputs, with one row for
    each observed value. `RBF(l).on((0,)) * Coregion(W, diag).on((1,))`, the intrinsic
    coregionalization model, is the covariance of f_a = sum_i W[a, i] g_i + sqrt(diag[a]) h_a with
    independent g_i and h_a of covariance RBF. A sum of such products, each with different
    lengthscales, is the linear model of coregionalization. A categorical input, such as a station,
    is modeled in the same way.

    For outputs that are all observed at the same inputs, `sgp.MultiOutputGP` takes the two kernels
    and a matrix of observations.

    W, -W and any other rotation of W's columns give the same kernel, and at W = 0 the derivative
    with respect to W is zero. A fit that starts at the prior medians therefore needs a prior with a
    different median for each column, such as `dist.Normal(jnp.eye(p, r), 1.0).to_event(2)`. B has
    the variances already: multiply by kernels of variance one.

    Args:
        W: loadings of the categories on the factors, in units of the function, shape (p, r), or
            (*batch, p, r) for a batch of kernels.
        diag: independent variance of each category, in squared units of the function, not negative,
            shape (p,). If it is zero and r < p, B is singular: some functions are linear
            combinations of others.

    Raises:
        ValueError: if a shape does not fit, `W` is not finite, `diag` is negative or, when called,
            the inputs have several columns, or hold anything but integers from 0 to p - 1. Inside
            `jit` the covariances with such a row are NaN.

    References:
        Goovaerts (1997), Geostatistics for Natural Resources Evaluation, section 4.2; Bonilla, Chai
        and Williams (2007), Multi-task Gaussian Process Prediction, eq. 1; Alvarez, Rosasco and
        Lawrence (2012), Kernels for Vector-Valued Functions, section 4.2. O(n m r) for n times m
        pairs, without the p x p matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> outputs = sgp.kernels.Coregion(jnp.array([[1.0], [0.5]]), jnp.array([0.0, 0.25]))
        >>> kernel = sgp.kernels.RBF(1.0).on((0,)) * outputs.on((1,))
        >>> X = jnp.array([[0.3, 0.0], [0.3, 1.0]])  # both outputs at 0.3
        >>> kernel(X, X).tolist()
        [[1.0, 0.5], [0.5, 0.5]]
    """

    hyperparameter_ndims = {"W": 2, "variances": 1}

    W: Float[Array, "... p r"]
    variances: Float[Array, "... p"]  # the argument `diag`; `diag` itself is a method

    def __init__(self, W: Float[ArrayLike, "... p r"], diag: Float[ArrayLike, "... p"]) -> None:
        self.W = checks.as_float(W, "W")
        self.variances = checks.as_positive(diag, "diag", or_zero=True)
        if self.W.ndim < 2 or 0 in self.W.shape:
            raise ValueError(
                f"`W` must have shape (p, r), got {self.W.shape}: a row for each category, and a "
                "column for each shared factor."
            )
        checks.finite("W", self.W)
        if self.variances.shape[-1:] != self.W.shape[-2:-1]:
            raise ValueError(
                f"`diag` must have shape ({self.W.shape[-2]},), got {self.variances.shape}: one "
                "value for each row of `W`."
            )
        checks.positive("diag", self.variances, or_zero=True)
        _ = self.batch_shape  # raises unless batch shapes fit together

    def categories(self, d: int) -> dict[int, tuple[int, ...]]:
        """The integers 0, ..., p - 1, in the only column."""
        if d != 1:
            raise ValueError(
                f"`Coregion` takes one column of categories, got {d} columns: name it, as in "
                "`Coregion(W, diag).on((1,))`."
            )
        return {0: tuple(range(self.W.shape[-2]))}

    def rough_columns(self, d: int) -> frozenset[int]:
        """The column of categories."""
        return frozenset(self.categories(d))

    def _categories_and_loadings(
        self, X: Float[Array, "n 1"]
    ) -> tuple[Int[Array, " n"], Float[Array, "n r"]]:
        """The category of each row and its loadings, which are NaN where a value is no category."""
        column = X[:, 0]
        is_category = (column >= 0) & (column < len(self.W)) & (column == jnp.round(column))
        index = jnp.where(is_category, column, 0.0).astype(int)
        loadings = self.W[index].astype(jnp.result_type(X, self.W, self.variances))
        return index, jnp.where(is_category[:, None], loadings, jnp.nan)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        (a, left), (b, right) = map(self._categories_and_loadings, (X, Z))
        variances = self.variances.astype(left.dtype)[a]
        return matmul(left, right.T) + jnp.where(a[:, None] == b[None, :], variances[:, None], 0.0)

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        index, loadings = self._categories_and_loadings(X)
        variances = self.variances.astype(loadings.dtype)[index]
        return jnp.sum(jnp.square(loadings), axis=1) + variances

    def state_space(self, *, num_harmonics: int = NUM_HARMONICS) -> AbstractStateSpace:
        """Constants of r factors and p categories, for a product with a kernel of time."""
        return Constants(self.W, self.variances)

    def evaluate_features(
        self, key: Key[Array, ""], X: Float[Array, "n d"], num_features: int, origin: Origin
    ) -> Float[Array, "n p"]:
        """The r + p exact features: r loadings, and p indicators times sqrt(diag)."""
        index, loadings = self._categories_and_loadings(X)
        scales = jnp.sqrt(self.variances).astype(loadings.dtype)
        indicators = index[:, None] == jnp.arange(len(scales))
        return jnp.concatenate([loadings, jnp.where(indicators, scales, 0.0)], axis=1)
