"""Fitted objects in one file: arrays in NumPy's format, their structure beside them as JSON."""

import dataclasses
import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

_STRUCTURE = "structure"
_PLAIN = (bool, int, float, str, type(None))


def save(path: str | os.PathLike[str], fitted: Any) -> None:
    """Save a posterior, a kernel, an estimator, a solver state or SVI parameters.

    One `.npz` file holds everything: hyperparameters, data, representer weights, posterior samples
    and the seeds of their prior draws. A loaded posterior predicts without another solve.

    Args:
        path: the file, by convention `*.npz`; it is overwritten.
        fitted: the object: this package's, Equinox modules, or dicts, lists and tuples of them and
            of arrays.

    Raises:
        ValueError: if it holds something that cannot be found again by name, such as a lambda as a
            mean function, or a Flax NNX network (save its parameters, and build the kernel anew).

    Example:
        >>> import pathlib, tempfile
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> posterior = sgp.GaussianProcess(sgp.kernels.RBF(0.3), X, 0.1).condition(jnp.ones(5))
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "fit.npz"
        >>> sgp.save(file, posterior)
        >>> bool(jnp.all(sgp.load(file).mean(X) == posterior.mean(X)))
        True
    """
    arrays: dict[str, np.ndarray] = {}
    structure = json.dumps(_encode(fitted, arrays))
    with open(path, "wb") as file:
        named: dict[str, Any] = {_STRUCTURE: np.array(structure), **arrays}
        np.savez(file, **named)


def load(path: str | os.PathLike[str]) -> Any:
    """Load what `save` wrote.

    The file names the classes and functions to import, so load only files that you trust.

    Args:
        path: the file.

    Returns:
        The object, with JAX arrays; in float32 unless 64-bit types are enabled.
    """
    with np.load(path) as arrays:
        return _decode(json.loads(arrays[_STRUCTURE].item()), arrays)


def _encode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A JSON value for `value`, which puts its arrays into `arrays`."""
    encode = functools.partial(_encode, arrays=arrays)
    if isinstance(value, _PLAIN):
        return value
    if eqx.is_array_like(value):
        name = f"array_{len(arrays)}"
        if eqx.is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            arrays[name] = np.asarray(jax.random.key_data(value))
            return {"kind": "key", "name": name, "impl": str(jax.random.key_impl(value))}
        arrays[name] = np.asarray(value)
        return {"kind": "array", "name": name}
    if isinstance(value, dict):
        return {"kind": "dict", "items": [[encode(k), encode(v)] for k, v in value.items()]}
    if hasattr(value, "tree_unflatten") and hasattr(value, "tree_flatten_with_keys"):
        children, static = value.tree_flatten_with_keys()
        parts = encode([child for _, child in children]), encode(static)
        return {"kind": "node", "class": _name(type(value)), "parts": parts}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {
            "kind": "namedtuple",
            "class": _name(type(value)),
            "items": list(map(encode, value)),
        }
    if isinstance(value, list | tuple):
        return {"kind": type(value).__name__, "items": list(map(encode, value))}
    if isinstance(value, functools.partial):
        parts = encode([value.func, list(value.args), value.keywords])
        return {"kind": "partial", "class": _name(type(value)), "parts": parts}
    if isinstance(value, eqx.Module):
        present = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        defaults = inspect.signature(type(value)).parameters
        fields = {}
        for name in present:
            field = getattr(value, name)
            # Equinox's networks have anonymous functions as defaults.
            is_default = name in defaults and defaults[name].default is field
            if callable(field) and is_default:
                fields[name] = {"kind": "default", "class": _name(type(value)), "name": name}
            else:
                fields[name] = encode(field)
        return {"kind": "module", "class": _name(type(value)), "fields": fields}
    if callable(value):
        return {"kind": "name", "name": _name(value)}
    raise ValueError(f"cannot save a `{type(value).__module__}.{type(value).__qualname__}`.")


def _decode(code: Any, arrays: Any) -> Any:
    """The inverse of `_encode`."""
    decode = functools.partial(_decode, arrays=arrays)
    if isinstance(code, _PLAIN):
        return code
    if isinstance(code, list):
        return [decode(item) for item in code]
    kind = code["kind"]
    if kind == "array":
        return jnp.asarray(arrays[code["name"]])
    if kind == "key":
        return jax.random.wrap_key_data(jnp.asarray(arrays[code["name"]]), impl=code["impl"])
    if kind == "dict":
        return {decode(k): decode(v) for k, v in code["items"]}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(decode, code["items"]))
    if kind == "name":
        return _find(code["name"])
    of = _find(code["class"])
    if kind == "namedtuple":
        return of(*map(decode, code["items"]))
    if kind == "default":
        return inspect.signature(of).parameters[code["name"]].default
    if kind == "partial":
        function, args, keywords = decode(code["parts"])
        return of(function, *args, **keywords)
    if kind == "node":
        children, static = code["parts"]
        return of.tree_unflatten(decode(static), decode(children))
    module = object.__new__(of)
    for name, field in code["fields"].items():
        object.__setattr__(module, name, decode(field))
    return module


def _name(value: Callable) -> str:
    """The importable name of a class or function."""
    module = getattr(value, "__module__", None)
    qualname = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    name = f"{module}:{qualname}"
    try:
        found = _find(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not value:
        raise ValueError(
            f"cannot save {value!r}: it cannot be found again by its name {name}. Give it a name "
            "at the top level of a module."
        )
    return name


def _find(name: str) -> Any:
    module, _, qualname = name.partition(":")
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
