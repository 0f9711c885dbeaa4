"""The prior over a function's values of which each depends on its nearest ones before it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks, functions, linalg, rounding
from numpyro_scalegp.estimators import Vecchia
from numpyro_scalegp.families.family import AbstractPriorGP
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.kernels.kernel import as_single
from numpyro_scalegp.posteriors.vecchia import VecchiaPosterior
from numpyro_scalegp.solvers import KernelOperator


class NearestNeighborGP(AbstractPriorGP):
    """A latent GP in which each value depends on its nearest ones before it: O(n), for samplers.

    f_i given all before it is normal with the mean and the variance that its m nearest ones leave,
    from a coarse-to-fine ordering of the rows: the joint density is that of a Gaussian process
    whose precision has a sparse factor. Under any likelihood NUTS takes it in the coordinates of
    `sgp.infer.WhitenReparam`, for thousands of rows where `LatentGP` has hundreds. With a normal
    likelihood take `GaussianProcess` with `Vecchia`, where f is integrated out.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        neighbors: an `sgp.estimators.Vecchia`, with the number of neighbors, the ordering and,
            from its `find_neighbors`, the neighbors; None for its defaults.
        jitter: what each value gets as independent variance, relative to the mean of k(x, x); None
            for 100 `eps`.

    Raises:
        TypeError: if `neighbors` is something else.
        ValueError: if `X` is no matrix, or holds NaN or infinity; if `neighbors` are of a
            mini-batch, or, when used, of other rows.

    References:
        Datta et al. (2016), Hierarchical Nearest-Neighbor Gaussian Process Models for Large
        Geostatistical Datasets. `log_prob`: O(n m^3); a draw: O(n m) besides, one row after the
        other.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 200)[:, None]
        >>> prior = sgp.NearestNeighborGP(sgp.kernels.Matern32(0.3), X)
        >>> prior.sample(jax.random.key(0), (3,)).shape
        (3, 200)
    """

    made_of = "neighbors"
    arg_constraints: dict[str, Any] = {}
    reparametrized_params: list[str] = []
    pytree_data_fields = ("kernel", "X", "neighbors")
    pytree_aux_fields = ("jitter",)

    def __init__(
        self,
        kernel: AbstractKernel,
        X: Float[ArrayLike, "n d"],
        neighbors: Vecchia | None = None,
        *,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.kernel = as_single("kernel", kernel)
        self.X = checks.inputs("X", X)
        self.kernel.check_categories("X", self.X)
        self.neighbors = Vecchia() if neighbors is None else neighbors
        checks.instance("neighbors", self.neighbors, Vecchia)
        if self.neighbors.rows is not None:
            raise ValueError(
                "`neighbors` must be of all rows, got those of a mini-batch: a value of the "
                "function stands for each row, and none can be left out of its prior."
            )
        self.jitter = checks.jitter(jitter)
        super().__init__((), (self.X.shape[0],), validate_args=validate_args)

    @property
    def variance(self) -> Float[Array, " n"]:
        """The marginal variance k(x, x)."""
        return self.kernel.diag(self.X)

    @property
    def _operator(self) -> KernelOperator:
        noise = linalg.added_variance(self.variance, self.jitter)
        return KernelOperator(self.kernel, self.X, noise)

    def log_prob(
        self, value: Float[ArrayLike, "... n"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """The log density of function values, shape (..., n), in O(n m^3).

        Raises:
            ValueError: if `value` has the wrong length, or the rows are those of a mini-batch.
        """
        self.check_all_rows()
        value = checks.as_float(value, "value")
        if value.shape[-1:] != self.event_shape:
            raise ValueError(
                f"`value` must have shape (..., {self.event_shape[0]}), got {value.shape}: one "
                "value for each row of `X`."
            )
        return self.neighbors.log_density(self._operator, value, rounding.NO_DIGITS)

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape n"]:
        """Draw functions from the prior: shape (*sample_shape, n)."""
        shape = *sample_shape, *self.event_shape
        return self.of_white(jax.random.normal(checks.as_key(key), shape, self.variance.dtype))

    def of_white(self, white: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Make draws from the prior of standard normal values, one row after the other.

        Args:
            white: shape (..., n).
        """
        rows = white.reshape(math.prod(white.shape[:-1]), white.shape[-1])
        return self.neighbors.of_white(self._operator, rows).reshape(white.shape)

    def condition(self, f: Float[ArrayLike, " n"]) -> VecchiaPosterior:
        """The posterior of the function given its values at X, such as one draw of NUTS.

        Args:
            f: function values, shape (n,).

        Returns:
            A `VecchiaPosterior`, in which each input has its nearest values.
        """
        f = checks.as_float(f, "f")
        checks.shape("f", f, self.event_shape, why="one value for each row of `X`")
        checks.finite("f", f)
        zero = functions.constant_function(jnp.zeros((), f.dtype))
        found = self.neighbors.condition(self._operator, f, zero)
        return dataclasses.replace(found, noise_variance=None, of_values=True)
