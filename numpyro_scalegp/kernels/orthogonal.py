"""The orthogonal additive kernel: main effects and interactions of standardized inputs."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.kernel import AbstractKernel


class OrthogonalAdditive(AbstractKernel):
    """A sum of main effects and interactions, orthogonal to each other under normal inputs.

    k(x, z) = sum_r v_r e_r(c_1(x_1, z_1), ..., c_d(x_d, z_d)) for orders r = 0, ..., q, where e_r
    is the elementary symmetric polynomial: the sum over all sets of r input dimensions of the
    product of their c. Each c is an RBF kernel under the constraint that functions integrate to
    zero over N(loc, scale^2): c(x, z) = exp(-(x - z)^2 / (2 l^2)) - E_s[k(x, s)] E_s[k(s, z)] /
    E_st[k(s, t)]. So a main effect holds nothing of the constant, and an interaction nothing of the
    main effects: the decomposition of the function is unique.

    `kernel.effect((0, 2))` is the kernel of the interaction of inputs 0 and 2, which
    `posterior.component(lambda kernel: kernel.effect((0, 2)))` takes; `sgp.infer.variance_shares`
    computes each effect's share of the variance.

    Args:
        lengthscale: of each input dimension, in units of the inputs, positive; shape (d,) or (), or
            (*batch, d).
        variances: v, the variances of effects of order 0 (a constant), 1, ..., q; positive, shape
            (q + 1,) or (*batch, q + 1).
        loc: the mean of the inputs, shape () or (d,).
        scale: the standard deviation of the inputs, positive, shape () or (d,).

    Raises:
        ValueError: if a hyperparameter is not positive, or shapes do not fit together.

    References:
        Lu, Boukouvalas and Hensman (2022), Additive Gaussian Processes Revisited; the sum over sets
        is by the recursion e_r <- e_r + c_i e_(r-1). O(q d) operations for each pair of rows.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> kernel = sgp.kernels.OrthogonalAdditive(jnp.ones(4), jnp.array([1.0, 1.0, 0.3]))
        >>> kernel(jnp.zeros((2, 4)), jnp.ones((3, 4))).shape
        (2, 3)
    """

    hyperparameter_ndims = {"lengthscale": 1, "variances": 1, "loc": 1, "scale": 1}

    lengthscale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("lengthscale"))
    variances: Float[Array, "..."] = eqx.field(converter=checks.to_positive("variances"))
    loc: Float[Array, "..."] = eqx.field(
        converter=lambda loc: checks.as_float(loc, "loc"), default=0.0
    )
    scale: Float[Array, "..."] = eqx.field(converter=checks.to_positive("scale"), default=1.0)
    # For the kernel of a single effect: 1 for its inputs and 0 for the others, shape (d,).
    selected: Float[Array, " d"] | None = None

    def __check_init__(self) -> None:
        checks.positive("lengthscale", self.lengthscale)
        checks.positive("variances", self.variances)
        checks.positive("scale", self.scale)
        if self.variances.ndim == 0:
            raise ValueError(
                "`variances` must have shape (q + 1,), one for each order from 0 on, got shape ()."
            )
        _ = self.batch_shape  # raises unless batch shapes fit together

    @property
    def max_order(self) -> int:
        """The largest order of an interaction."""
        return self.variances.shape[-1] - 1

    @property
    def is_component(self) -> bool:
        """Whether this is the kernel of a single effect."""
        return self.selected is not None

    def effect(self, columns: Sequence[int]) -> "OrthogonalAdditive":
        """The kernel of the effect of these input dimensions; () is the constant.

        Args:
            columns: distinct input dimensions, at most `max_order`.

        Raises:
            ValueError: if there are too many, or they repeat or do not exist.
        """
        d = self.lengthscale.shape[-1] if self.lengthscale.ndim else None
        numbers = [checks.integer("columns", column) for column in columns]
        is_valid = all(number >= 0 and (d is None or number < d) for number in numbers)
        if not is_valid or len(set(numbers)) < len(numbers) or len(numbers) > self.max_order:
            inputs = "input dimensions" if d is None else f"input dimensions from 0 to {d - 1}"
            raise ValueError(
                f"`columns` must be at most {self.max_order} distinct {inputs}, got "
                f"{tuple(columns)}."
            )
        if d is None:
            raise ValueError("`effect` needs a lengthscale for each input dimension, shape (d,).")
        selected = jnp.zeros(d, self.lengthscale.dtype).at[jnp.array(numbers, int)].set(1.0)
        return self.select(selected)

    def select(self, selected: Float[Array, " d"]) -> "OrthogonalAdditive":
        """`effect` with 1 for the effect's inputs and 0 for the others, which may be traced."""
        # The hyperparameters stay the same objects, by which `component` knows them.
        return eqx.tree_at(
            lambda kernel: kernel.selected, self, selected, is_leaf=lambda leaf: leaf is None
        )

    def _components(self, term: AbstractKernel) -> list[AbstractKernel]:
        is_effect = (
            isinstance(term, OrthogonalAdditive)
            and term.is_component
            and term.lengthscale is self.lengthscale
            and term.variances is self.variances
        )
        return [term] if is_effect and not self.is_component else super()._components(term)

    def evaluate(self, X: Float[Array, "n d"], Z: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The matrix of k(x_i, z_j), shape (n, m)."""
        return self._combine(X[:, None, :], Z[None, :, :])

    def evaluate_diag(self, X: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variances k(x_i, x_i), shape (n,)."""
        return self._combine(X, X)

    def _combine(self, X: Float[Array, "... d"], Z: Float[Array, "... d"]) -> Array:
        d = X.shape[-1]
        shapes = (self.lengthscale, self.loc, self.scale)
        lengthscale, loc, scale = (jnp.broadcast_to(value, (d,)) for value in shapes)
        dtype = jnp.result_type(X, self.lengthscale)
        total = jnp.ones(jnp.broadcast_shapes(X.shape[:-1], Z.shape[:-1]), dtype)
        orders = [total] + [jnp.zeros_like(total)] * self.max_order
        for i in range(d):
            constrained = _constrained(
                X[..., i] - loc[i], Z[..., i] - loc[i], lengthscale[i], scale[i]
            )
            if self.selected is not None:
                total = total * jnp.where(self.selected[i] > 0, constrained, 1.0)
                continue
            for order in range(min(i + 1, self.max_order), 0, -1):
                orders[order] = orders[order] + constrained * orders[order - 1]
        if self.selected is not None:
            return self.variances[jnp.sum(self.selected).astype(int)] * total
        return jnp.tensordot(self.variances, jnp.stack(orders), 1)


def _constrained(x: Array, z: Array, lengthscale: Array, scale: Array) -> Array:
    """The RBF kernel of functions whose mean over N(0, scale^2) is zero."""
    l2, s2 = jnp.square(lengthscale), jnp.square(scale)
    share = s2 / (l2 + s2)
    log_factor = 0.5 * jnp.log1p(-jnp.square(share))
    rbf = jnp.exp(-0.5 * jnp.square((x - z) / lengthscale))
    means = jnp.exp(log_factor - 0.5 * (jnp.square(x) + jnp.square(z)) / (l2 + s2))
    # The logarithm of the quotient of means and rbf: while they are close, as for long
    # lengthscales, their difference has its digits in this form alone.
    log_quotient = log_factor + 0.5 * share * jnp.square((x - z) / lengthscale) - x * z / (l2 + s2)
    is_close = log_quotient < 1.0
    return jnp.where(
        is_close, -rbf * jnp.expm1(jnp.where(is_close, log_quotient, 0.0)), rbf - means
    )
