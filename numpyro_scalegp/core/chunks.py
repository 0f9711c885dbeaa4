"""Functions of matrix rows, evaluated in chunks: memory grows with the chunk, not the matrix."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, PyTree

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.device import memory_share
from numpyro_scalegp.core.mesh import map_shares, mesh_of, sum_shares

Rows = TypeVar("Rows")
Result = TypeVar("Result")

# Entries of the largest intermediate matrix of a chunk on a CPU: 64 MiB in float32. On an
# accelerator it may take a share of the memory.
_MAX_ENTRIES = 2**24
_SHARE = 1 / 400


def rows_per_chunk(width: int) -> int:
    """How many rows of a `width`-column intermediate fit the memory budget, at least one."""
    entries = memory_share(_SHARE, 4 * _MAX_ENTRIES) // 4
    return max(1, entries // max(1, width))


def map_rows(
    function: Callable[[Rows], Result],
    X: Rows,
    chunk_size: int,
    *,
    share: bool = True,
) -> Result:
    """Apply `function` to `chunk_size` rows of X at a time; on a mesh, each device to its rows.

    Args:
        function: maps a chunk of rows to a pytree of arrays with a leading axis of the chunk's
            size. The result for a row must not depend on other rows.
        X: inputs, shape (n, d), or a pytree of arrays with a leading axis of size n.
        chunk_size: rows in a chunk, positive.
        share: whether devices share the rows. False if the function reads arrays that are sharded:
            each device would gather them.

    Returns:
        The results for all rows, leading axis n. The function is compiled once for all chunks. A
        program for any number of rows, as in an export, has one chunk.
    """
    checks.count("chunk_size", chunk_size)
    if share and (mesh := mesh_of(X)) is not None:
        return map_shares(mesh, lambda rows: map_rows(function, rows, chunk_size), X)
    n = jax.tree.leaves(X)[0].shape[0]
    if is_symbolic_dim(n) or n <= chunk_size:
        return function(X)
    num_chunks = -(-n // chunk_size)

    def split(leaf: Array) -> Array:
        # The last chunk is padded with copies of the last row, whose results are dropped.
        last = jnp.broadcast_to(leaf[-1:], (num_chunks * chunk_size - n, *leaf.shape[1:]))
        return jnp.concatenate([leaf, last]).reshape(num_chunks, chunk_size, *leaf.shape[1:])

    # A lambda, because JAX caches the trace of a function that it has seen before.
    results = jax.lax.map(lambda chunk: function(chunk), jax.tree.map(split, X))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:n], results)


def sum_rows(
    function: Callable[[Rows], Result],
    rows: Rows,
    chunk_size: int,
    *,
    share: bool = True,
    saved_names: tuple[str, ...] = (),
) -> Result:
    """Sum `function` over chunks of `chunk_size` rows; on a mesh, each device over its rows.

    The backward pass works in chunks, too, and computes the function of each chunk again.

    Args:
        function: maps a chunk of rows to a pytree of arrays: a sum over rows, in which a row of
            zeros contributes nothing.
        rows: a pytree of arrays with a leading axis of size n.
        chunk_size: rows in a chunk, positive.
        share: whether devices share the rows. False for rows of parameters, which are replicated:
            XLA would gather other arrays that are computed from them.
        saved_names: names (`jax.ad_checkpoint.checkpoint_name`) of values that the backward pass
            does not compute again.

    Returns:
        The sum over all rows. The function is compiled once for all chunks.
    """
    if share and (mesh := mesh_of(rows)) is not None:

        def sum_share(rows: Rows) -> Result:
            return sum_rows(function, rows, chunk_size, saved_names=saved_names)

        return sum_shares(mesh, sum_share, rows)
    n = jax.tree.leaves(rows)[0].shape[0]
    if n <= chunk_size:
        return function(rows)
    num_chunks = -(-n // chunk_size)

    def split(leaf: Array) -> Array:
        padding = [(0, num_chunks * chunk_size - n)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding).reshape(num_chunks, chunk_size, *leaf.shape[1:])

    def add(total: PyTree, chunk: Rows) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, function(chunk)), None

    chunks = jax.tree.map(split, rows)
    shapes = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], chunks))
    zero = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    policy = jax.checkpoint_policies.save_only_these_names(*saved_names)
    return jax.lax.scan(jax.checkpoint(add, policy=policy), zero, chunks)[0]
