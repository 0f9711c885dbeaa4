"""The nearest-neighbor prior of a latent function."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.neighbors.posterior import VecchiaPosterior
from numpyro_scalegp.neighbors.vecchia import Vecchia
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.programs import functions
from numpyro_scalegp.sites.family import AbstractPriorGP


class NearestNeighborGP(AbstractPriorGP):
    """A latent GP in which each value depends on its nearest neighbors before it, in O(n).

    In a coarse-to-fine ordering of the inputs, f_i given all values before it is normal, with the
    kernel's conditional mean and variance given the m nearest of them. The joint density is a
    Gaussian process whose precision has a sparse factor. Under any likelihood, sample it by NUTS
    with `sgp.infer.WhitenReparam`, for thousands of inputs where `LatentGP` allows hundreds. With a
    normal likelihood, prefer `GaussianProcess` with `Vecchia`, which integrates f out.

    Args:
        kernel: covariance function.
        X: inputs, shape (n, d).
        neighbors: an `sgp.estimators.Vecchia`, with the number of neighbors, the ordering and,
            after `find_neighbors`, the neighbors; None for its defaults.
        jitter: variance added to each value, relative to the mean of k(x, x); None for 100 times
            machine epsilon.

    Raises:
        TypeError: if `neighbors` is not a `Vecchia`.
        ValueError: if `X` is not a matrix, or holds NaN or infinity; if `neighbors` has a
            mini-batch, or, when used, was prepared for other inputs.

    References:
        Datta et al. (2016), Hierarchical Nearest-Neighbor Gaussian Process Models for Large
        Geostatistical Datasets. `log_prob` takes O(n m^3) time, and a draw a further O(n m), in n
        sequential steps.

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
        self.kernel.check_inputs("X", self.X)
        self.neighbors = Vecchia() if neighbors is None else neighbors
        checks.instance("neighbors", self.neighbors, Vecchia)
        if self.neighbors.rows is not None:
            raise ValueError(
                "`neighbors` must be of all rows, got a mini-batch: the prior is the joint density "
                "of the function values at all rows."
            )
        self.jitter = checks.jitter(jitter)
        super().__init__((), (self.X.shape[0],), validate_args=validate_args)

    @property
    def variance(self) -> Float[Array, " n"]:
        """The marginal variance k(x, x)."""
        return self.kernel.evaluate_diag(self.X)

    @property
    def _operator(self) -> KernelOperator:
        noise = linalg.added_variance(self.variance, self.jitter)
        return KernelOperator.from_checked(self.kernel, self.X, noise)

    def log_prob(
        self, value: Float[ArrayLike, "... n"], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """The log density of function values, shape (..., n), in O(n m^3).

        Raises:
            ValueError: if `value` has the wrong length, or X is a mini-batch.
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
        """Transform standard normal values, shape (..., n), to draws from the prior."""
        rows = white.reshape(math.prod(white.shape[:-1]), white.shape[-1])
        return self.neighbors.of_white(self._operator, rows).reshape(white.shape)

    def condition(self, f: Float[ArrayLike, " n"]) -> VecchiaPosterior:
        """The posterior of the function given its values at X, such as a draw of NUTS.

        Args:
            f: function values, shape (n,).

        Returns:
            A `VecchiaPosterior`, which conditions f at each input on the nearest of these values.
        """
        f = checks.as_float(f, "f")
        checks.shape("f", f, self.event_shape, why="one value for each row of `X`")
        checks.finite("f", f)
        zero = functions.constant_function(jnp.zeros((), f.dtype))
        posterior = self.neighbors.condition(self._operator, f, zero)
        return dataclasses.replace(posterior, noise_variance=None, of_values=True)
