"""Encode an object as a JSON value and named arrays."""

import dataclasses
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from numpyro.distributions import Distribution

from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.compiled import Traced
from numpyro_scalegp.saving import names, recorded_values, schema

PLAIN = (bool, int, float, str, type(None))
KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
NUMPY_KINDS = "biufcSUmM"
PARTIALS = {"functools": functools.partial, "jax": jax.tree_util.Partial}
SEQUENCES = {"list": list, "tuple": tuple}
DICTS = {"dict": dict, "OrderedDict": OrderedDict}


def at(path: str) -> str:
    """A path in the object that is saved or loaded, for messages."""
    return f"`fitted{path}`"


def check(value: Any) -> None:
    """Check an object's fields against their annotations, and run the checks of its constructor."""
    schema.check_fields(value)
    if isinstance(value, eqx.Module):
        for of in type(value).__mro__:
            if "__check_init__" in vars(of):
                vars(of)["__check_init__"](value)
    elif isinstance(value, Distribution) and value._validate_args is not False:
        value.validate_args(strict=False)


def fields_of(of: type[Distribution]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a distribution's data fields and of its static fields.

    NumPyro gathers them in sets, so that their order may differ between processes.
    """
    return of.gather_pytree_data_fields(), of.gather_pytree_aux_fields()


def is_node(of: type) -> bool:
    """Whether a class defines how its objects are flattened."""
    flattens = hasattr(of, "tree_flatten") or hasattr(of, "tree_flatten_with_keys")
    return flattens and hasattr(of, "tree_unflatten")


def flatten(node: Any) -> tuple[list[Any], Any]:
    """Children and static part of an object whose class defines how it is flattened."""
    if hasattr(node, "tree_flatten_with_keys"):
        children, static = node.tree_flatten_with_keys()
        return [child for _, child in children], static
    children, static = node.tree_flatten()
    return list(children), static


class Encoder:
    """Encodes an object; raises an error, with the path, for a part that cannot be restored."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.is_shared = False  # whether several processes hold an array together
        self.unrecorded: list[str] = []  # names of users' code whose values are not recorded yet
        self.inputs: Any = None  # those held by the innermost enclosing posterior or distribution

    def encode(self, value: Any, path: str) -> Any:
        """A JSON value for `value`; its arrays are added to `self.arrays`."""
        if type(value) in PLAIN:
            return value
        outer_inputs = self.inputs
        if isinstance(value, AbstractPosterior | Distribution):
            self.inputs = recorded_values.inputs_of(value)
        code = self._encode(value, path)
        self.inputs = outer_inputs
        return code

    def _encode(self, value: Any, path: str) -> Any:
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self._array(value, path)
        if isinstance(value, Traced):
            return None  # the function that was traced is saved as a separate field
        if isinstance(value, eqx.Module):
            return self._module(value, path)
        if isinstance(value, dict | list | tuple) and not is_node(type(value)):
            return self._container(value, path)
        if type(value) in PARTIALS.values():
            parts = self.encode((value.func, value.args, value.keywords), path)
            of = "jax" if isinstance(value, jax.tree_util.Partial) else "functools"
            return {"kind": "partial", "of": of, "parts": parts}
        if isinstance(value, jax.tree_util.PyTreeDef):
            example = jax.tree.unflatten(value, [0] * value.num_leaves)
            return {"kind": "treedef", "example": self.encode(example, path)}
        if (
            isinstance(value, Distribution)
            and type(value).tree_flatten is Distribution.tree_flatten
        ):
            present = {
                name: vars(value).get(name) for group in fields_of(type(value)) for name in group
            }
            return self._fields("distribution", value, present, path)
        if is_node(type(value)):
            children, static = flatten(value)
            parts = self.encode([children, static], path)
            return {"kind": "node", "class": names.full_name(type(value)), "parts": parts}
        return self._code(value, path)

    def _refused(self, value: Any, path: str, why: str) -> ValueError:
        of = type(value)
        name = f"{of.__module__}.{of.__qualname__}"
        return ValueError(f"cannot save {at(path)}, a `{name}`: {why}")

    def _array(self, value: Any, path: str) -> Any:
        if isinstance(value, jax.core.Tracer):
            raise self._refused(value, path, "it is being traced. Save outside of `jax.jit`.")
        form = "jax" if isinstance(value, jax.Array) else "numpy"
        plain = type(value) in (np.ndarray, np.memmap) or type(value).__module__.startswith("jax")
        if isinstance(value, np.ndarray) and not plain:
            raise self._refused(value, path, "a subclass of NumPy's arrays cannot be restored.")
        if form == "jax" and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            implementation = str(jax.random.key_impl(value))
            if implementation not in KEY_IMPLEMENTATIONS:
                why = f"only keys of {', '.join(KEY_IMPLEMENTATIONS)} can be restored."
                raise self._refused(value, path, why)
            data = self._array(jax.random.key_data(value), path)
            return {"kind": "key", "implementation": implementation, "data": data}
        self.is_shared |= isinstance(value, jax.Array) and not value.is_fully_addressable
        try:
            array = as_numpy(value)
        except RuntimeError as error:
            raise self._refused(value, path, f"{error}") from error
        dtype = array.dtype
        is_jax_dtype = _is_jax_dtype(dtype)
        if not is_jax_dtype and (dtype.kind not in NUMPY_KINDS or dtype.hasobject):
            raise self._refused(value, path, f"arrays of dtype {dtype} cannot be restored.")
        name = f"array_{len(self.arrays)}"
        self.arrays[name] = array.view(f"u{dtype.itemsize}") if is_jax_dtype else array
        if isinstance(value, np.generic):
            form = "scalar"
        code: dict[str, Any] = {"kind": "array", "name": name, "form": form}
        code["shape"] = list(array.shape)
        code["dtype"] = dtype.name if is_jax_dtype else dtype.str
        if form == "jax" and value.weak_type:
            code["weak"] = True
        return code

    def _container(self, value: Any, path: str) -> Any:
        if type(value) in DICTS.values():
            items = [
                [self.encode(k, path), self.encode(v, f"{path}[{k!r}]")] for k, v in value.items()
            ]
            return {"kind": type(value).__name__, "items": items}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            present = dict(zip(value._fields, value, strict=True))
            return self._fields("namedtuple", value, present, path)
        if type(value) in SEQUENCES.values():
            items = [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return {"kind": type(value).__name__, "items": items}
        raise self._refused(value, path, "a subclass of dict, list or tuple cannot be restored.")

    def _fields(self, kind: str, value: Any, present: Mapping[str, Any], path: str) -> Any:
        codes = {name: self.encode(field, f"{path}.{name}") for name, field in present.items()}
        code = {"kind": kind, "class": self._class_name(type(value)), "fields": codes}
        # A pytree that the constructor would reject: an optimizer's moments in the shape of a
        # kernel, or a stack of objects.
        return code if passes_checks(value) else {**code, "unchecked": True}

    def _class_name(self, of: type) -> str:
        name = names.full_name(of)
        if not names.is_of_packages(name):
            self.unrecorded.append(name)
        return name

    def _module(self, value: eqx.Module, path: str) -> Any:
        num_before = len(self.unrecorded)
        code = self._module_fields(value, path)
        if len(self.unrecorded) > num_before and recorded_values.can_be_evaluated(value):
            is_checked = "unchecked" not in code and not self.is_shared
            recorded = recorded_values.record(value, self.inputs) if is_checked else None
            if recorded is not None:
                code["answers"] = self.encode([recorded.inputs, recorded.values], path)
                code["code"] = self.unrecorded[num_before:]
                del self.unrecorded[num_before:]
        return code

    def _module_fields(self, value: eqx.Module, path: str) -> Any:
        present = {name: getattr(value, name) for name in schema.saved_fields(type(value))}
        parameters = inspect.signature(type(value)).parameters
        # Equinox's networks have lambdas as defaults.
        defaults = {
            name
            for name, field in present.items()
            if callable(field) and name in parameters and parameters[name].default is field
        }
        code = self._fields(
            "module", value, {n: f for n, f in present.items() if n not in defaults}, path
        )
        for name in defaults:
            code["fields"][name] = {"kind": "default", "name": name}
        return code

    def _code(self, value: Any, path: str) -> Any:
        """Code for functions, and for pytrees that can be rebuilt only from a template."""
        form = dtype_form(value)
        if form is not None:
            return {"kind": "dtype", "form": form, "name": np.dtype(value).name}
        name = names.name_of(value)
        if callable(value) and (name is None or not names.is_of_packages(name)):
            shown = getattr(value, "__qualname__", type(value).__qualname__)
            self.unrecorded.append(name or f"{getattr(value, '__module__', '')}:{shown}")
        if name is not None:
            return {"kind": "class" if isinstance(value, type) else "function", "name": name}
        if isinstance(value, type | types.ModuleType):
            return {"kind": "code", "of": type(value).__qualname__}
        if isinstance(value, types.MethodType):
            owner = self.encode(value.__self__, f"{path}.__self__")
            return {"kind": "method", "name": value.__name__, "self": owner}
        if isinstance(value, types.FunctionType):
            return self._closure(value, path)
        if dataclasses.is_dataclass(value) and not _holds_arrays([value]):
            # Such as a Flax module, whose parameters are kept outside of it.
            return {"kind": "code", "of": type(value).__qualname__}
        if jax.tree_util.all_leaves([value]):
            why = (
                "only numbers, strings, containers, arrays, functions and pytrees can be restored."
            )
            if callable(value):
                why = (
                    "give its arrays to `functools.partial` of a plain function or to an Equinox "
                    "module, or save the arrays alone."
                )
            raise self._refused(value, path, why)
        leaves, _ = jax.tree_util.tree_flatten_with_path(value)
        codes = [[jax.tree_util.keystr(at), self.encode(leaf, path)] for at, leaf in leaves]
        return {"kind": "pytree", "class": names.full_name(type(value)), "leaves": codes}

    def _closure(self, value: types.FunctionType, path: str) -> Any:
        """The captured variables and default arguments of a function that has no name."""
        for name, variable in _globals_of(value).items():
            if _holds_arrays(variable):
                why = (
                    f"it reads the global array `{name}`. Make that an argument, with "
                    "`functools.partial`."
                )
                raise self._refused(value, path, why)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        captured = dict(zip(value.__code__.co_freevars, cells, strict=True))
        parts = self.encode([captured, value.__defaults__, value.__kwdefaults__], path)
        return {"kind": "closure", "name": value.__qualname__, "parts": parts}


def passes_checks(value: Any) -> bool:
    """Whether an object passes the checks of its class."""
    try:
        check(value)
    except Exception:
        return False
    return True


def dtype_form(value: Any) -> str | None:
    """Which form of a dtype `value` is, if any: a dtype, a NumPy or a JAX scalar type."""
    if isinstance(value, np.dtype):
        return None if value.hasobject or value.names else "dtype"
    if isinstance(value, type) and issubclass(value, np.generic):
        return "numpy" if value in np.sctypeDict.values() and value is not np.object_ else None
    is_jax = isinstance(value, type(jax.numpy.float32)) and type(value) is not type
    return "jax" if is_jax else None


def _holds_arrays(value: Any) -> bool:
    return any(
        isinstance(leaf, jax.Array | np.ndarray)
        or (dataclasses.is_dataclass(leaf) and _holds_arrays(getattr(leaf, "__dict__", None)))
        for leaf in jax.tree.leaves(value)
    )


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """The global variables that a function and the functions within it may read."""
    codes, names_read = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names_read.update(code.co_names)
        codes.extend(const for const in code.co_consts if isinstance(const, types.CodeType))
    return {name: function.__globals__[name] for name in names_read & set(function.__globals__)}


def _is_jax_dtype(dtype: np.dtype) -> bool:
    """Whether a dtype is one that JAX adds to NumPy's, such as bfloat16."""
    return dtype.type.__module__ == "ml_dtypes"
