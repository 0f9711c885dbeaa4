"""Programs in files, which JAX or an ONNX runtime runs without this package."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.errors import InconclusiveDimensionOperation, JAXTypeError
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks
from numpyro_scalegp.programs import host_calls, onnx

Results = dict[str, Array]
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def write(
    file: str | os.PathLike[str],
    owner: Any,
    function: Callable[[Any, Float[Array, "m d"]], Results],
    num_columns: int | None,
    num_rows: int | None,
    platforms: Sequence[str] | None,
) -> None:
    """Write `function(owner, Xs)` to a file, compiled for the arrays of a module.

    Args:
        file: path of the file; an ONNX model if it ends with `.onnx`.
        owner: a module whose arrays are written beside the program, unless it does not read them.
        function: maps the module and m inputs to a dict of arrays.
        num_columns: the number of input columns, if it is known.
        num_rows: the number m of inputs; None for any number.
        platforms: the platforms for which the program is lowered; None for the current one.

    Raises:
        ImportError: if flatbuffers, or jax2onnx for an ONNX model, is not installed.
        ValueError: if an option is not valid, or the function cannot be exported.
    """
    checks.count_or_none("num_rows", num_rows)
    _check_platforms(platforms)
    is_onnx = os.fspath(file).endswith(".onnx")
    if is_onnx and platforms is not None:
        raise ValueError("`platforms` must be None for an ONNX file, which is for all.")
    name = type(owner).__name__
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(owner)):
        raise ValueError(f"`{name}` is traced: export it outside of `jax.jit`.")
    if num_columns is None:
        raise ValueError(f"`{name}` cannot be exported: it does not know its number of inputs.")
    (m,) = export.symbolic_shape("m") if num_rows is None else (num_rows,)
    rows = jax.ShapeDtypeStruct((m, num_columns), jnp.result_type(float))
    leaves, structure = jax.tree.flatten(eqx.filter(owner, eqx.is_array))
    static = eqx.filter(owner, eqx.is_array, inverse=True)

    def of_leaves(leaves: list[Array], Xs: Array) -> Results:
        return function(eqx.combine(jax.tree.unflatten(structure, leaves), static), Xs)

    try:
        traced = jax.make_jaxpr(of_leaves, return_shape=True)
        closed, shapes = traced(leaves, rows)
    except (JAXTypeError, TypeError, InconclusiveDimensionOperation) as error:
        if num_rows is not None:
            raise
        raise ValueError(
            f"`{name}` cannot be exported for any number of rows, since what it calls needs the "
            "number: give `num_rows`, and pad inputs to it."
        ) from error
    if is_onnx:
        onnx.write(file, name, closed, leaves, list(shapes))
        return
    jaxpr, is_read = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    *is_leaf_read, _ = is_read
    stored = [leaf for leaf, is_read in zip(leaves, is_leaf_read, strict=True) if is_read]
    # Keys are stored as integers.
    are_keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in stored]
    arrays = [
        jax.random.key_data(leaf) if is_key else leaf
        for leaf, is_key in zip(stored, are_keys, strict=True)
    ]
    constants, num_stored = list(map(jnp.asarray, closed.consts)), len(arrays)

    def run(arrays: list[Array], Xs: Array) -> Results:
        inputs = [
            jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key else array
            for array, leaf, is_key in zip(arrays[:num_stored], stored, are_keys, strict=True)
        ]
        # Without what only warns, since a program in a file cannot call Python.
        used = [*inputs, Xs] if is_read[-1] else inputs
        results, _ = host_calls.evaluated(ClosedJaxpr(jaxpr, arrays[num_stored:]), used)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    shapes_of_arrays = [
        jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (*arrays, *constants)
    ]
    try:
        exported = export.export(jax.jit(run), platforms=platforms)(shapes_of_arrays, rows)
        program = exported.serialize()
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"`{name}` cannot be exported, since it calls Python, as `jax.pure_callback` and "
            "`jax.debug.print` do."
        ) from error
    except ImportError as error:
        raise ImportError(
            "`export` needs flatbuffers: install `numpyro_scalegp[export]`."
        ) from error
    names = [f"array_{number:03d}" for number in range(len(shapes_of_arrays))]
    values: dict[str, Any] = dict(zip(names, map(np.asarray, (*arrays, *constants)), strict=True))
    with open(file, "wb") as stream:
        np.savez(stream, program=np.frombuffer(program, np.uint8), **values)


def _check_platforms(platforms: Any) -> None:
    if platforms is None:
        return
    is_list = isinstance(platforms, tuple | list) and len(platforms) > 0
    if not (is_list and all(platform in _PLATFORMS for platform in platforms)):
        raise ValueError(f"`platforms` must be a list of some of {_PLATFORMS}, got {platforms!r}.")
