"""The axes of a grid: their inputs, and a kernel of rows made of a kernel for each axis."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.kernels.kernel import AbstractKernel, ActiveDims, Product, Sum, as_single

Axes = tuple[Float[Array, "_n_j _d_j"], ...]
Factors = tuple[AbstractKernel, ...]


def as_axes(name: str, inputs: Any, widths: Sequence[int] | None = None) -> Axes:
    """Checked inputs of each axis."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, str) or not len(inputs):
        raise TypeError(
            f"`{name}` must be a sequence with the inputs of each axis, such as [times, places], "
            f"got {checks.described(inputs)}."
        )
    if widths is not None and len(inputs) != len(widths):
        raise ValueError(
            f"`{name}` must have the inputs of {len(widths)} axes, got {len(inputs)} arrays."
        )
    return tuple(
        checks.inputs(f"{name}[{j}]", X, None if widths is None else widths[j])
        for j, X in enumerate(inputs)
    )


def shape_of(axes: Axes) -> tuple[int, ...]:
    """The shape of the grid."""
    return tuple(map(len, axes))


def widths_of(axes: Axes) -> tuple[int, ...]:
    """The number of columns of each axis."""
    return tuple(X.shape[1] for X in axes)


def rows_of(axes: Axes) -> Float[Array, "n d"]:
    """The inputs of all cells, the columns of all axes side by side, in the order of `ravel`."""
    shape = shape_of(axes)
    columns = []
    for j, X in enumerate(axes):
        index = [None] * len(axes) + [slice(None)]
        index[j] = slice(None)
        spread = jnp.broadcast_to(X[tuple(index)], (*shape, X.shape[1]))
        columns.append(spread.reshape(-1, X.shape[1]))
    return jnp.concatenate(columns, axis=1)


def columns_of(widths: Sequence[int]) -> list[tuple[int, ...]]:
    """The columns of each axis in rows."""
    ends = np.cumsum(widths)
    return [tuple(range(end - width, end)) for width, end in zip(widths, ends, strict=True)]


def axes_of_rows(rows: Float[Array, "m d"], widths: Sequence[int]) -> Axes:
    """The columns of each axis."""
    return tuple(rows[:, np.array(columns)] for columns in columns_of(widths))


def as_terms(kernels: Any, axes: Axes) -> tuple[Factors, ...]:
    """Checked kernels: a factor for each axis, for each term of a sum of products."""
    expected = (
        "a sequence with a kernel for each axis, such as [Matern32(5.0), RBF(0.3)], or a sequence "
        "of such sequences, whose products are added up"
    )
    if isinstance(kernels, AbstractKernel) or not isinstance(kernels, Sequence) or not kernels:
        raise TypeError(f"`kernels` must be {expected}, got {checks.described(kernels)}.")
    terms = kernels if isinstance(kernels[0], Sequence) else [kernels]
    for i, term in enumerate(terms):
        name = f"kernels[{i}]" if terms is kernels else "kernels"
        if not isinstance(term, Sequence):
            raise TypeError(f"`kernels` must be {expected}, got {checks.described(term)} in it.")
        if len(term) != len(axes):
            raise ValueError(
                f"`{name}` must have a kernel for each of the {len(axes)} axes of `inputs`, got "
                f"{len(term)}."
            )
        for j, (kernel, X) in enumerate(zip(term, axes, strict=True)):
            as_single(f"{name}[{j}]", kernel)
            kernel.check_inputs(f"inputs[{j}]", X)
    return tuple(map(tuple, terms))


def kernel_of(terms: Sequence[Factors], widths: Sequence[int]) -> AbstractKernel:
    """The kernel of rows, a sum of products of kernels of columns."""
    columns = columns_of(widths)

    def product(factors: Factors) -> AbstractKernel:
        parts = [kernel.on(dims) for kernel, dims in zip(factors, columns, strict=True)]
        return functools.reduce(operator.mul, parts)

    return functools.reduce(operator.add, map(product, terms))


def terms_of(kernel: AbstractKernel, num_axes: int) -> tuple[Factors | None, ...]:
    """The inverse of `kernel_of`, with None for a term that a component leaves out."""
    if isinstance(kernel, Sum):
        sides = zip((kernel.left, kernel.right), kernel.active, strict=True)
        return sum(
            (
                terms if is_active else (None,) * len(terms)
                for terms, is_active in ((terms_of(k, num_axes), active) for k, active in sides)
            ),
            (),
        )
    factors: list[AbstractKernel] = []
    for _ in range(num_axes - 1):
        assert isinstance(kernel, Product)
        factors.insert(0, _of_columns(kernel.right))
        kernel = kernel.left
    return ((_of_columns(kernel), *factors),)


def _of_columns(kernel: AbstractKernel) -> AbstractKernel:
    assert isinstance(kernel, ActiveDims)
    return kernel.kernel
