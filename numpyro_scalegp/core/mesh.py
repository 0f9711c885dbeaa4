"""Arrays whose rows are divided over the devices of a mesh.

The type of an array that `shard_rows` has put on a mesh carries the mesh, also while it is traced,
and so do the types of results. XLA divides most of a program by itself, once it knows the sharding
of some arrays. Operations for which XLA would gather all rows, such as a loop over rows, are
written here as functions of each device's share.
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
    """The mesh that arrays lie on; None for one device, and in a function of a device's share.

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
    """Divide an axis of each array over all devices of a mesh.

    If the number of devices does not divide the axis, the last devices have fewer entries. As an
    argument or a result of a compiled program, such an array is replicated instead.
    """
    if mesh is None:
        return tree

    def divide(leaf: Array) -> Array:
        if checks.is_concrete(leaf) and leaf.shape[axis] % mesh.size:
            return leaf
        return _placed(leaf, mesh, P(*[None] * (axis % leaf.ndim), mesh.axis_names))

    return jax.tree.map(divide, tree)


def replicated(tree: T, mesh: AnyMesh | None) -> T:
    """Copy each array to all devices of a mesh, as for parameters and their derivatives."""
    return tree if mesh is None else jax.tree.map(lambda leaf: _placed(leaf, mesh, P()), tree)


def _placed(leaf: Array, mesh: AnyMesh, spec: P) -> Array:
    if not checks.is_concrete(leaf):
        return _constrained(leaf, NamedSharding(mesh, spec))
    # With an abstract mesh, the array is a constant of the program that is compiled.
    return (
        leaf if isinstance(mesh, AbstractMesh) else jax.device_put(leaf, NamedSharding(mesh, spec))
    )


@functools.partial(jax.jit, static_argnums=1)
def _constrained(leaf: Array, sharding: NamedSharding) -> Array:
    # Compiled, because outside of compiled code JAX accepts only equal shares, also of cotangents.
    return jax.lax.with_sharding_constraint(leaf, sharding)


def placed_like(array: Array, like: Any) -> Array:
    """Put an array on the devices of a mesh with the sharding of `like`, if `like` is on one."""
    sharding = getattr(like, "sharding", None)
    if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)):
        return array
    if not sharding.mesh.is_multi_process:
        return jax.device_put(array, sharding)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = placed_like(jax.random.key_data(array), jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    # `device_put` compares the values of all processes, and NaN differs from NaN.
    values = np.asarray(array)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def is_divisible(num: int, mesh: AnyMesh | None) -> bool:
    """Whether the devices of a mesh can hold equal shares of `num` rows."""
    return mesh is not None and num % mesh.size == 0


def map_shares(mesh: AnyMesh, function: Callable[..., T], *rows: Any) -> T:
    """Apply a function of rows to each device's rows, and concatenate the results.

    Args:
        mesh: the devices.
        function: maps rows to a pytree of arrays with as many rows, row by row. The last device's
            rows may end with copies of the last row. Arrays in its closure are replicated.
        *rows: pytrees of arrays with a leading axis of the same size.
    """
    num = jax.tree.leaves(rows)[0].shape[0]
    results = _apply_to_shares(mesh, function, filled(mesh, rows, repeat=True))
    return jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2)[:num], results)


def sum_shares(mesh: AnyMesh, function: Callable[..., T], *rows: Any) -> T:
    """Apply a function to each device's rows, and sum the results over the devices.

    Args:
        mesh: the devices.
        function: maps rows to a pytree of arrays, to which a row of zeros contributes nothing.
        *rows: as for `map_shares`.
    """
    results = stack_shares(mesh, function, *rows)
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), results)


def stack_shares(mesh: AnyMesh, function: Callable[..., T], *rows: Any) -> T:
    """Apply a function to each device's rows, and stack the results along a new leading axis.

    Args:
        mesh: the devices.
        function: maps rows, the last of which may be zeros, to a pytree of arrays.
        *rows: as for `map_shares`.
    """
    return _apply_to_shares(mesh, function, filled(mesh, rows, repeat=False))


def _apply_to_shares(mesh: AnyMesh, function: Callable[..., T], rows: tuple[Any, ...]) -> T:
    return on_each(mesh, function, *shares_of(mesh, rows))


def shares_of(mesh: AnyMesh, rows: T) -> T:
    """Split rows, a multiple of the number of devices, into shares along a new leading axis."""

    def split(leaf: Array) -> Array:
        return leaf.reshape(mesh.size, leaf.shape[0] // mesh.size, *leaf.shape[1:])

    return divided(jax.tree.map(split, rows), mesh)


def on_each(mesh: AnyMesh, function: Callable[..., T], *shares: Any) -> T:
    """Apply a function to each device's share; the results have a leading axis of devices, too.

    Each device runs the function by itself, and may take different branches. Arrays in the
    function's closure, also within functions and pytrees, are replicated.
    """
    arrays, static = eqx.partition(_with_closure_as_pytree(function), eqx.is_array)

    def apply_to_share(arrays: Any, shares: Any) -> T:
        function = eqx.combine(arrays, static)
        result = function(*jax.tree.map(lambda leaf: leaf[0], shares))
        return jax.tree.map(lambda leaf: leaf[None], result)

    rows = P(mesh.axis_names)
    compute = jax.shard_map(
        apply_to_share, mesh=mesh, in_specs=(P(), rows), out_specs=rows, check_vma=False
    )
    # Compiled, because `jax.shard_map` would otherwise run its operations one by one.
    return jax.jit(compute)(arrays, shares)


class _FunctionWithClosure(eqx.Module):
    """A function as a pytree of the values in its closure."""

    function: Any = eqx.field(static=True)
    closure: list[Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.function
        copy = types.FunctionType(
            original.__code__,
            original.__globals__,
            original.__name__,
            original.__defaults__,
            tuple(map(types.CellType, self.closure)),
        )
        copy.__kwdefaults__ = original.__kwdefaults__
        return copy(*args, **kwargs)


def _with_closure_as_pytree(value: Any) -> Any:
    """Replace the functions in a pytree by pytrees.

    `jax.shard_map` requires all arrays on the mesh, such as hyperparameters after a step, to be
    arguments.
    """
    recurse = _with_closure_as_pytree
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return _FunctionWithClosure(value, [recurse(cell.cell_contents) for cell in cells])
    if isinstance(value, types.MethodType):
        return eqx.Partial(recurse(value.__func__), recurse(value.__self__))
    if isinstance(value, functools.partial):
        function, args, kwargs = map(recurse, (value.func, value.args, value.keywords))
        return eqx.Partial(function, *args, **kwargs)
    if jax.tree_util.all_leaves([value]):
        return value
    return jax.tree.map(recurse, value)


def filled(mesh: AnyMesh, rows: T, *, repeat: bool) -> T:
    """Pad rows to a multiple of the number of devices, with copies of the last row or zeros."""

    def pad(leaf: Array) -> Array:
        missing = -leaf.shape[0] % mesh.size
        return with_more_rows(leaf, missing, repeat=repeat)

    return jax.tree.map(pad, rows)


def with_more_rows(array: Array, num: int, *, repeat: bool) -> Array:
    """Append `num` rows: copies of the last row, or zeros."""
    if not num:
        return array
    shape = (num, *array.shape[1:])
    padding = jnp.broadcast_to(array[-1:], shape) if repeat else jnp.zeros(shape, array.dtype)
    return jnp.concatenate([array, padding])


def shard_rows(mesh: Mesh, array: Any, /, *more_arrays: Any) -> Any:
    """Put the rows of arrays on the devices of a mesh, so that the package computes on all of them.

    Models, guides and `SVI` need no change: computations with these inputs are divided over the
    devices. Rows are divided over all axes of the mesh, in equal shares. If the number of devices
    does not divide the number of rows, the arrays are replicated, and computations are still
    divided, with padding.

    If there are several processes, each passes its own rows, which are concatenated in the order of
    the processes. If all processes pass the same number of rows, a multiple of the number of
    devices of each process, each row stays in its process.

    Args:
        mesh: made by `jax.make_mesh`; the types of its axes are ignored.
        array: an array with a leading axis of n rows, a data frame or a list of numbers; or a
            pytree of these, or None.
        *more_arrays: arrays with the same number of rows.

    Returns:
        The array on the mesh, of the same shape, or a tuple for several arguments; None stays None.
        The arrays are copies, O(n d) bytes.

    Raises:
        TypeError: if `mesh` is not a mesh, or a table holds anything but numbers.
        ValueError: if the numbers of rows differ, there are fewer rows than devices, or an array
            has no axes; in each of several processes, if their arrays differ in more than the
            number of rows.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> mesh = jax.make_mesh((jax.device_count(),), ("rows",))
        >>> X, y = sgp.shard_rows(mesh, jnp.ones((100, 2)), jnp.ones(100))
        >>> X.shape, y.shape
        ((100, 2), (100,))
    """
    checks.instance("mesh", mesh, Mesh, "a mesh of devices, made by `jax.make_mesh`")
    arrays = tables.as_arrays((array, *more_arrays), "array")
    counts = _rows_of_processes(arrays) if mesh.is_multi_process else [tables.num_rows(arrays)]
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    placed = jax.tree.map(_place_on(automatic, counts), arrays)
    return placed if more_arrays else placed[0]


def _rows_of_processes(arrays: Any) -> list[int]:
    """The number of rows of each process, all of which must pass arrays of the same types.

    Arrays are exchanged only after this check: otherwise a process might wait forever, or read
    bytes as another dtype.
    """
    num, refusal = 0, ""
    try:
        num = tables.num_rows(arrays)
    except ValueError as error:
        refusal = str(error)
    kinds = [] if refusal else [_kind(leaf) for leaf in jax.tree.leaves(arrays)]
    messages = texts_of_processes(json.dumps([num, refusal, kinds]))
    reports = [json.loads(text) for text in messages]
    for process, (_, why, _) in enumerate(reports):
        if why:
            raise ValueError(why if why == refusal else f"in process {process}: {why}")
    if any(kinds != reports[0][2] for _, _, kinds in reports):
        listed = "; ".join(
            f"{', '.join(kinds)} in process {process}"
            for process, (_, _, kinds) in enumerate(reports)
        )
        raise ValueError(
            "all processes must call `shard_rows` for the same arrays, in the same order, of which "
            f"only the numbers of rows n may differ, got {listed}."
        )
    return [count for count, _, _ in reports]


def _kind(leaf: Any) -> str:
    """Dtype and shape of an array, with "n" for the number of rows."""
    return f"{jnp.result_type(leaf).name}[{', '.join(map(str, ('n', *np.shape(leaf)[1:])))}]"


def texts_of_processes(text: str) -> list[str]:
    """The texts that all processes pass, in each of them."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = _gather_processes(np.array(len(data), np.int32))
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = data
    return [
        row[:size].tobytes().decode()
        for row, size in zip(_gather_processes(padded), sizes, strict=True)
    ]


def _place_on(mesh: Mesh, counts: list[int]) -> Callable[[Any], Array]:
    """A function that puts an array on a mesh; `counts` are the numbers of rows by process."""
    num = sum(counts)
    if num < mesh.size:
        raise ValueError(
            f"{num} rows are too few for a mesh of {mesh.size} devices: take a smaller mesh, or "
            "leave the arrays where they are."
        )
    is_even = num % mesh.size == 0
    sharding = NamedSharding(mesh, P(mesh.axis_names) if is_even else P())

    def place(array: Any) -> Array:
        original = np.asarray(array)
        local = original.astype(jax.dtypes.canonicalize_dtype(original.dtype))
        if local.ndim == 2:
            precision.warn_of_merged_rows("X", original, local)
        if not mesh.is_multi_process:
            return jax.device_put(local, sharding)
        shape = (num, *local.shape[1:])
        if is_even and len({*counts}) == 1:
            return jax.make_array_from_process_local_data(sharding, local, shape)
        padded = np.zeros((max(counts), *local.shape[1:]), local.dtype)
        padded[: len(local)] = local
        pairs = zip(_gather_processes(padded), counts, strict=True)
        rows = np.concatenate([block[:count] for block, count in pairs])
        return jax.make_array_from_callback(shape, sharding, lambda index: rows[index])

    return place


def _gather_processes(array: np.ndarray) -> np.ndarray:
    """The arrays of all processes, along a new leading axis."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array))
