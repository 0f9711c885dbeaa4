"""Products of arrays with matrices along their axes: Kronecker products that are never formed."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.numerics.linalg import matmul


def along(A: Float[Array, "m _n_j"], R: Float[Array, "*shape"], axis: int) -> Float[Array, "*new"]:
    """The product of a matrix with an array along one axis."""
    moved = jnp.moveaxis(R, axis, 0)
    product = matmul(A, moved.reshape(len(moved), -1))
    return jnp.moveaxis(product.reshape(A.shape[0], *moved.shape[1:]), 0, axis)


def along_all(matrices: Sequence[Float[Array, "_m _n_j"]], R: Float[Array, "..."]) -> Array:
    """The product of the Kronecker product of matrices with an array, on its first axes."""
    return functools.reduce(
        lambda product, item: along(item[1], product, item[0]), enumerate(matrices), R
    )


def outer(vectors: Sequence[Float[Array, " _n_j"]]) -> Float[Array, "*shape"]:
    """The array of products of the entries of a vector for each axis."""
    return functools.reduce(lambda product, vector: product[..., None] * vector, vectors)


def unfolded(R: Float[Array, "*shape"], axis: int) -> Float[Array, "_n_j _m"]:
    """The array as a matrix with a row for each index of an axis."""
    moved = jnp.moveaxis(R, axis, 0)
    return moved.reshape(len(moved), -1)
