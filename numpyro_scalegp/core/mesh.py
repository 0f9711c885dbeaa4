"""Rows of arrays, divided over the devices of a mesh.

An array that `shard_rows` has put on a mesh carries the mesh in its type, also while it is traced,
and so does what is computed from it. Most of a program XLA divides by itself, once it knows of an
array of each kind how it lies; what it would gather, such as a loop over rows, is written here as
work on each device's share.
"""

import functools
import json
import types
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from numpyro_scalegp.core import checks, precision, tables

T = TypeVar("T")
AnyMesh = Mesh | AbstractMesh


def mesh_of(*trees: Any) -> AnyMesh | None:
    """The mesh that arrays lie on; None on one device, and within the work on a share.

    Raises:
        ValueError: if the mesh has explicit axes.
    """
    for leaf in jax.tree.leaves(trees):
        if not isinstance(leaf, jax.Array):
            continue
        mesh = jax.typeof(leaf).sharding.mesh
        if mesh.size <= 1 or AxisType.Manual in mesh.axis_types:
            continue
        if AxisType.Explicit in mesh.axis_types:
            raise ValueError(
                f"an array of shape {leaf.shape} lies on the mesh {mesh} with explicit axes, along "
                "which every operation would have to say how its result lies: put rows on the "
                "mesh by `X, y = sgp.shard_rows(mesh, X, y)`, which makes the axes automatic."
            )
        return mesh if isinstance(leaf, jax.core.Tracer) else getattr(leaf.sharding, "mesh", mesh)
    return None


def divided(tree: T, mesh: AnyMesh | None, axis: int = 0) -> T:
    """Have an axis of each array divided over all devices of a mesh.

    Where it is no multiple of their number, the last ones have less; such an array is whole on each
    device wherever it is an argument or a result of a compiled program.
    """
    if mesh is None:
        return tree

    def of_leaf(leaf: Array) -> Array:
        if checks.is_concrete(leaf) and leaf.shape[axis] % mesh.size:
            return leaf
        return _placed(leaf, mesh, P(*[None] * (axis % leaf.ndim), mesh.axis_names))

    return jax.tree.map(of_leaf, tree)


def whole(tree: T, mesh: AnyMesh | None) -> T:
    """Have each array whole on each device of a mesh, as parameters are, and their derivatives."""
    return tree if mesh is None else jax.tree.map(lambda leaf: _placed(leaf, mesh, P()), tree)


def _placed(leaf: Array, mesh: AnyMesh, spec: P) -> Array:
    if not checks.is_concrete(leaf):
        return _constrained(leaf, NamedSharding(mesh, spec))
    # With an abstract mesh it is a constant of what is compiled.
    return (
        leaf if isinstance(mesh, AbstractMesh) else jax.device_put(leaf, NamedSharding(mesh, spec))
    )


@functools.partial(jax.jit, static_argnums=1)
def _constrained(leaf: Array, sharding: NamedSharding) -> Array:
    # A program of its own where derivatives are taken outside of one: there, JAX takes equal shares
    # alone, also of a cotangent.
    return jax.lax.with_sharding_constraint(leaf, sharding)


def placed_like(array: Array, like: Any) -> Array:
    """An array, put on the devices of a mesh as another one lies there, if that does."""
    sharding = getattr(like, "sharding", None)
    if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)):
        return array
    if not sharding.mesh.is_multi_process:
        return jax.device_put(array, sharding)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = placed_like(jax.random.key_data(array), jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    # `device_put` compares what the processes have, and takes NaN for a difference.
    own = np.asarray(array)
    return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])


def is_divisible(num: int, mesh: AnyMesh | None) -> bool:
    """Whether the devices of a mesh can hold equal shares of so many rows."""
    return mesh is not None and num % mesh.size == 0


def map_shares(mesh: AnyMesh, function: Callable[..., T], *rows: Any) -> T:
    """What a function makes of each device's rows, row by row, one after the other.

    Args:
        mesh: the devices.
        function: maps rows to a pytree of arrays with as many rows; the last device's may hold
            repetitions of the last row. What it closes over is whole on each device.
        *rows: pytrees of arrays with a leading axis of the same size.
    """
    num = jax.tree.leaves(rows)[0].shape[0]
    found = _of_shares(mesh, function, filled(mesh, rows, repeat=True))
    return jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2)[:num], found)


def sum_shares(mesh: AnyMesh, function: Callable[..., T], *rows: Any) -> T:
    """The sum over devices of what a function makes of each one's rows.

    Args:
        mesh: the devices.
        function: maps rows to a pytree of arrays, in which a row of zeros counts nothing.
        *rows: as of `map_shares`.
    """
    found = stack_shares(mesh, function, *rows)
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), found)


def stack_shares(mesh: AnyMesh, function: Callable[..., T], *rows: Any) -> T:
    """What a function makes of each device's rows, along a new leading axis.

    Args:
        mesh: the devices.
        function: maps rows, the last of which may be zeros, to a pytree of arrays.
        *rows: as of `map_shares`.
    """
    return _of_shares(mesh, function, filled(mesh, rows, repeat=False))


def _of_shares(mesh: AnyMesh, function: Callable[..., T], rows: tuple[Any, ...]) -> T:
    return on_each(mesh, function, *shares_of(mesh, rows))


def shares_of(mesh: AnyMesh, rows: T) -> T:
    """Rows that all devices can share evenly, along a leading axis the share of each."""

    def split(leaf: Array) -> Array:
        return leaf.reshape(mesh.size, leaf.shape[0] // mesh.size, *leaf.shape[1:])

    return divided(jax.tree.map(split, rows), mesh)


def on_each(mesh: AnyMesh, function: Callable[..., T], *shares: Any) -> T:
    """What a function makes of each device's share, along a leading axis as shares are.

    Each device runs the function by itself, and takes its own branches. Arrays that the function
    holds are whole on each: those of its closure, of functions in it, and of pytrees there.
    """
    arrays, rest = eqx.partition(_opened(function), eqx.is_array)

    def of_share(arrays: Any, shares: Any) -> T:
        function = eqx.combine(arrays, rest)
        found = function(*jax.tree.map(lambda leaf: leaf[0], shares))
        return jax.tree.map(lambda leaf: leaf[None], found)

    rows = P(mesh.axis_names)
    compute = jax.shard_map(
        of_share, mesh=mesh, in_specs=(P(), rows), out_specs=rows, check_vma=False
    )
    # Outside of compiled programs JAX would go through its operations one by one.
    return jax.jit(compute)(arrays, shares)


class _Opened(eqx.Module):
    """A function as a pytree of what its closure holds."""

    function: Any = eqx.field(static=True)
    held: list[Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        one = self.function
        closure = tuple(map(types.CellType, self.held))
        copy = types.FunctionType(
            one.__code__, one.__globals__, one.__name__, one.__defaults__, closure
        )
        copy.__kwdefaults__ = one.__kwdefaults__
        return copy(*args, **kwargs)


def _opened(value: Any) -> Any:
    """The same with functions as pytrees.

    `jax.shard_map` wants all that lies on the mesh, such as hyperparameters after a step, as
    arguments.
    """
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return _Opened(value, [_opened(cell.cell_contents) for cell in cells])
    if isinstance(value, types.MethodType):
        return eqx.Partial(_opened(value.__func__), _opened(value.__self__))
    if isinstance(value, functools.partial):
        function, args, kwargs = map(_opened, (value.func, value.args, value.keywords))
        return eqx.Partial(function, *args, **kwargs)
    if jax.tree_util.all_leaves([value]):
        return value
    return jax.tree.map(_opened, value)


def filled(mesh: AnyMesh, rows: T, *, repeat: bool) -> T:
    """Rows in a number that all devices can share evenly: the last one repeated, or zeros."""

    def of_leaf(leaf: Array) -> Array:
        missing = -leaf.shape[0] % mesh.size
        return with_more_rows(leaf, missing, repeat=repeat)

    return jax.tree.map(of_leaf, rows)


def with_more_rows(array: Array, num: int, *, repeat: bool) -> Array:
    """The array with `num` rows after its own, the last one repeated, or zeros."""
    if not num:
        return array
    shape = (num, *array.shape[1:])
    more = jnp.broadcast_to(array[-1:], shape) if repeat else jnp.zeros(shape, array.dtype)
    return jnp.concatenate([array, more])


def shard_rows(mesh: Mesh, array: Any, /, *others: Any) -> Any:
    """Put the rows of arrays on the devices of a mesh, so that the package computes on all of them.

    Models, guides and `SVI` stay as they are: what is computed from such inputs is divided over the
    devices. Rows are divided over all axes of the mesh, in equal parts. Where their number is no
    multiple of that of the devices, the arrays themselves are whole on each device, and the work is
    divided all the same, in parts that are padded.

    In a run of several processes each gives its own rows, and the whole has those of the first
    process first; with as many rows from each, a multiple of its devices, no row leaves it.

    Args:
        mesh: made by `jax.make_mesh`; the types of its axes do not count.
        array: with a leading axis of n rows, a data frame or a list of numbers; or a pytree of
            such, or None.
        *others: further ones, with as many rows.

    Returns:
        For one argument the array on the mesh, of the same shape, for several a tuple; None where
        an argument is None. A copy: O(n d) bytes are moved.

    Raises:
        TypeError: if `mesh` is no mesh, or a table holds anything but numbers.
        ValueError: if the numbers of rows differ, there are fewer rows than devices, or a number
            stands by itself; in several processes also if these give
            different arrays, in each of them.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> mesh = jax.make_mesh((jax.device_count(),), ("rows",))
        >>> X, y = sgp.shard_rows(mesh, jnp.ones((100, 2)), jnp.ones(100))
        >>> X.shape, y.shape
        ((100, 2), (100,))
    """
    checks.instance("mesh", mesh, Mesh, "a mesh of devices, as `jax.make_mesh` makes it")
    arrays = tables.as_arrays((array, *others), "array")
    counts = _rows_of_processes(arrays) if mesh.is_multi_process else [_num_rows(arrays)]
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    placed = jax.tree.map(_placer(automatic, counts), arrays)
    return placed if others else placed[0]


def _num_rows(arrays: Any) -> int:
    """The number of rows that all arrays have."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(arrays)]
    if () in shapes:
        raise ValueError("all arrays must have rows as their leading axis, got a number by itself.")
    if len({shape[:1] for shape in shapes}) > 1:
        raise ValueError(
            f"all arrays must have the same number of rows as their leading axis, got {shapes}."
        )
    return shapes[0][0] if shapes else 0


def _rows_of_processes(arrays: Any) -> list[int]:
    """The number of rows of each process, all of which must have such arrays.

    Arrays are exchanged only after all processes know that they fit: otherwise some would wait for
    what does not come, or take the bytes of other types for their own.
    """
    num, refusal = 0, ""
    try:
        num = _num_rows(arrays)
    except ValueError as error:
        refusal = str(error)
    kinds = [] if refusal else [_kind(leaf) for leaf in jax.tree.leaves(arrays)]
    found = [json.loads(text) for text in texts_of_processes(json.dumps([num, refusal, kinds]))]
    for place, (_, why, _) in enumerate(found):
        if why:
            raise ValueError(why if why == refusal else f"in process {place}: {why}")
    if any(kinds != found[0][2] for _, _, kinds in found):
        given = "; ".join(
            f"{', '.join(kinds)} in process {place}" for place, (_, _, kinds) in enumerate(found)
        )
        raise ValueError(
            "all processes must call `shard_rows` for the same arrays, in the same order, of which "
            f"only the numbers of rows n may differ, got {given}."
        )
    return [count for count, _, _ in found]


def _kind(leaf: Any) -> str:
    """Type and shape of an array, whatever its number of rows."""
    return f"{jnp.result_type(leaf).name}[{', '.join(map(str, ('n', *np.shape(leaf)[1:])))}]"


def texts_of_processes(own: str) -> list[str]:
    """The texts of all processes."""
    data = np.frombuffer(own.encode(), np.uint8)
    sizes = _of_all_processes(np.array(len(data), np.int32))
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = data
    return [
        row[:size].tobytes().decode()
        for row, size in zip(_of_all_processes(padded), sizes, strict=True)
    ]


def _placer(mesh: Mesh, counts: list[int]) -> Callable[[Any], Array]:
    """What puts an array on a mesh, of whose rows each process has so many."""
    num = sum(counts)
    if num < mesh.size:
        raise ValueError(
            f"{num} rows are too few for a mesh of {mesh.size} devices: take a smaller mesh, or "
            "leave the arrays where they are."
        )
    is_even = num % mesh.size == 0
    sharding = NamedSharding(mesh, P(mesh.axis_names) if is_even else P())

    def place(array: Any) -> Array:
        own = np.asarray(array)
        given, own = own, own.astype(jax.dtypes.canonicalize_dtype(own.dtype))
        if own.ndim == 2:
            precision.warn_of_merged_rows("X", given, own)
        if not mesh.is_multi_process:
            return jax.device_put(own, sharding)
        shape = (num, *own.shape[1:])
        if is_even and len({*counts}) == 1:
            return jax.make_array_from_process_local_data(sharding, own, shape)
        padded = np.zeros((max(counts), *own.shape[1:]), own.dtype)
        padded[: len(own)] = own
        parts = _of_all_processes(padded)
        whole = np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])

    return place


def _of_all_processes(array: np.ndarray) -> np.ndarray:
    """The arrays of all processes, along a new leading axis."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array))
