"""Shares of the variance of effects of an orthogonal additive kernel."""

import itertools
from typing import Any

import jax.numpy as jnp
from jaxtyping import ArrayLike, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.kernel import AbstractKernel, ActiveDims
from numpyro_scalegp.kernels.orthogonal import OrthogonalAdditive


def variance_shares(
    posterior: Any, X: Float[ArrayLike, "n d"], *, max_order: int | None = None
) -> dict[tuple[int, ...], float]:
    """The share of each main effect and interaction in the variance of the posterior mean.

    The variance of each effect's posterior mean over the rows of X, divided by the sum of the
    variances of all effects: for inputs from the kernel's normal distribution, Sobol indices.

    Args:
        posterior: a posterior whose kernel is `OrthogonalAdditive`, or a sum that contains one.
        X: inputs, shape (n, d), such as the training inputs.
        max_order: the largest order of interactions; None for the kernel's.

    Returns:
        The share of each set of columns of X, largest first; the shares add up to 1.

    Raises:
        ValueError: if the kernel has no orthogonal additive kernel or more than one, or the
            posterior mean is constant.

    References:
        Lu, Boukouvalas and Hensman (2022), section 3.2, with the rows of X in place of the normal
        distribution. A prediction at n rows for each of the effects.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_scalegp as sgp
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> kernel = sgp.kernels.OrthogonalAdditive(jnp.ones(3), jnp.ones(2))
        >>> posterior = sgp.GaussianProcess(kernel, X, 0.01).condition(np.sin(X[:, 1]))
        >>> next(iter(sgp.infer.variance_shares(posterior, X)))
        (1,)
    """
    X = checks.inputs("X", X)
    kernels: list[tuple[OrthogonalAdditive, tuple[int, ...]]] = []

    def select_constant(kernel: AbstractKernel) -> AbstractKernel:
        additive, columns = _orthogonal(kernel, X.shape[1])
        kernels.append((additive, columns))
        return additive.select(jnp.zeros(len(columns), X.dtype))

    posterior.component(select_constant).mean(X[:1])
    additive, names = kernels[0]
    most = additive.max_order
    if max_order is not None:
        most = min(most, checks.count("max_order", max_order))
    d, variances = len(names), {}
    for order in range(1, min(most, d) + 1):
        for dims in itertools.combinations(range(d), order):
            selected = jnp.zeros(d, X.dtype).at[jnp.array(dims)].set(1.0)

            def select(kernel: AbstractKernel, selected: Any = selected) -> AbstractKernel:
                return _orthogonal(kernel, X.shape[1])[0].select(selected)

            mean = posterior.component(select).mean(X)
            columns = tuple(names[i] for i in dims)
            variances[columns] = float(jnp.mean(jnp.var(mean, axis=-1)))
    total = sum(variances.values())
    if not total > 0.0:
        raise ValueError("`X` must have rows over which the posterior mean varies, got a constant.")
    largest_first = sorted(variances, key=lambda columns: -variances[columns])
    return {columns: variances[columns] / total for columns in largest_first}


def _orthogonal(
    kernel: AbstractKernel, num_columns: int
) -> tuple[OrthogonalAdditive, tuple[int, ...]]:
    """The orthogonal additive kernel within a kernel, and its columns of X."""
    kernels = list(_within(kernel, tuple(range(num_columns))))
    if len(kernels) != 1:
        raise ValueError(
            "`posterior` must have a kernel with one `OrthogonalAdditive` in it, got "
            f"{len(kernels)} in {kernel!r}."
        )
    return kernels[0]


def _within(kernel: AbstractKernel, columns: tuple[int, ...]) -> Any:
    if isinstance(kernel, OrthogonalAdditive):
        yield kernel, columns
    if isinstance(kernel, ActiveDims):
        columns = tuple(columns[dim] for dim in kernel.dims)
    for term in kernel.parts.values():
        yield from _within(term, columns)
