"""LAPACK factorizations and solves, with batched calls that cannot deadlock.

On CPUs, jaxlib 0.10 divides a batched call with many operations among the threads that run the
program, and waits for them. If as many such calls as threads run at once, they wait forever. Here
each batched call has too few operations to be divided; a call for a single matrix never is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.scipy.linalg import solve_triangular as lapack_solve
from jaxtyping import Array, Float

# A batched call with fewer operations is not divided; it is not slower.
MAX_OPERATIONS = 200_000


def _in_calls(function: Callable[..., Any], operations: Callable[..., int]) -> Callable:
    """Give a function a `vmap` that loops over calls with few operations each.

    Args:
        function: a function of arrays with any leading axes.
        operations: the number of operations for one member, from the arrays' shapes.
    """
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def _(num: Any, is_batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        members = [
            array if has_axis else jnp.broadcast_to(array, (num, *array.shape))
            for array, has_axis in zip(arrays, is_batched, strict=True)
        ]
        size = num
        if jax.default_backend() == "cpu" and not is_symbolic_dim(num):
            shapes = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in members]
            of_one = operations(*shapes)
            # In a program for any number of rows, one member at a time.
            at_most = 1 if is_symbolic_dim(of_one) else (MAX_OPERATIONS - 1) // max(1, of_one)
            size = min(num, max(1, at_most))
        if size == num:
            results = call(*members)
        else:
            num_calls = -(-num // size)
            index = (jnp.arange(num_calls * size) % num).reshape(num_calls, size)
            results = jax.lax.map(lambda rows: call(*[array[rows] for array in members]), index)
            results = jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2)[:num], results)
        return results, jax.tree.map(lambda _: True, results)

    return call


def _solve(trans: int) -> Callable:
    def solve(L: Array, B: Array) -> Array:
        return lapack_solve(L, B, lower=True, trans=trans)

    return _in_calls(solve, lambda L, B: L.shape[-1] * B.size)


_cholesky = _in_calls(
    lambda A: jax.lax.linalg.cholesky(A, symmetrize_input=False),
    lambda A: A.size * A.shape[-1] // 3,
)
_solves = _solve(0), _solve(1)
_qr_triangle = _in_calls(lambda A: jnp.linalg.qr(A, mode="r"), lambda A: 2 * A.size * A.shape[-1])
_eigh = _in_calls(lambda A: tuple(jnp.linalg.eigh(A)), lambda A: 4 * A.size * A.shape[-1])


def cholesky(A: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The lower Cholesky factor, NaN where A is not positive definite; without a derivative."""
    return _cholesky(A)


def qr_triangle(A: Float[Array, "m n"]) -> Float[Array, "n n"]:
    """R of A = Q R, for m of at least n."""
    return _qr_triangle(A)


def eigh(A: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """The eigenvalues of a symmetric A, in ascending order, and its eigenvectors as columns."""
    return _eigh(A)


def solve_lower(L: Float[Array, "n n"], B: Float[Array, "n *m"], trans: int = 0) -> Any:
    """L^-1 B, or with `trans=1` L^-T B, for a lower triangular L; has derivatives of any order."""
    dtype = jnp.result_type(L, B)
    L, columns = L.astype(dtype), (B if B.ndim == 2 else B[:, None]).astype(dtype)

    def product(X: Array) -> Array:
        return jnp.matmul(L.T if trans else L, X, precision="highest")

    fixed = jax.lax.stop_gradient(L)
    solution = jax.lax.custom_linear_solve(
        product,
        columns,
        lambda _, B: _solves[trans](fixed, B),
        lambda _, B: _solves[1 - trans](fixed, B),
    )
    return solution if B.ndim == 2 else solution[:, 0]


def cholesky_solve(L: Float[Array, "n n"], B: Float[Array, "n *m"]) -> Any:
    """(L L')^-1 B for a lower triangular L."""
    return solve_lower(L, solve_lower(L, B), trans=1)
