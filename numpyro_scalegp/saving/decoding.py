"""Decode the object from a JSON value and named arrays."""

import dataclasses
import inspect
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution

from numpyro_scalegp.core.mesh import placed_like
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.compiled import Traced
from numpyro_scalegp.saving import names, recorded_values, schema
from numpyro_scalegp.saving.encoding import (
    DICTS,
    KEY_IMPLEMENTATIONS,
    PARTIALS,
    PLAIN,
    SEQUENCES,
    at,
    check,
    fields_of,
    flatten,
    is_node,
)

Template = tuple[Any, ...]  # (object,), or () without a template


class Decoder:
    """Rebuilds an object.

    Classes and functions are taken from the template if there is one, and looked up by name
    otherwise.

    Args:
        arrays: the file's arrays.
        trusted: the classes and functions that the file may name.
        file: the name of the file, for errors and warnings.
    """

    def __init__(self, arrays: dict[str, np.ndarray], trusted: names.Trusted, file: str) -> None:
        self.arrays = arrays
        self.trusted = trusted
        self.file = file
        self.narrowed: set[str] = set()

    def load(self, code: Any, like: Template) -> Any:
        """The object. Every error names the file."""
        try:
            value = self.decode(code, like, "")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"cannot load `{self.file}`: {error}") from error
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(
                f"cannot load `{self.file}`: `sgp.save` does not write such a file "
                f"({type(error).__name__}: {error})."
            ) from error
        if self.narrowed:
            warnings.warn(
                f"`{self.file}` holds {' and '.join(sorted(self.narrowed))} arrays, which have "
                "become 32-bit ones: enable 64-bit types, with "
                '`jax.config.update("jax_enable_x64", True)`, to load them as they are.',
                UserWarning,
                stacklevel=3,
            )
        return value

    def decode(self, code: Any, like: Template, path: str) -> Any:
        """The object that `code` encodes."""
        if like and like[0] is ...:
            like = ()
        if like and isinstance(like[0], Traced):
            like = (None,)  # not saved: the function that was traced is a separate field
        if type(code) in PLAIN:
            _require_type(type(code), like, path)
            return code
        return _DECODERS[code["kind"]](self, code, like, path)

    def _decode_array(self, code: Any, like: Template, path: str) -> Any:
        stored = self.arrays[code["name"]]
        if list(stored.shape) != code["shape"]:
            raise ValueError(f"the array at {at(path)} has shape {stored.shape} in the file.")
        # Types that NumPy lacks are stored as unsigned integers.
        is_numpy = code["dtype"][0] in "<>|="
        dtype = np.dtype(code["dtype"]) if is_numpy else jnp.dtype(code["dtype"])
        array = stored if is_numpy else stored.view(dtype)
        if array.dtype != dtype:
            raise ValueError(f"the array at {at(path)} has the dtype {array.dtype} in the file.")
        _require_array(array.shape, dtype, like, path)
        if code["form"] == "numpy":
            return array.copy()
        if code["form"] == "scalar":
            return array[()]
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            self.narrowed.add(dtype.name)
            array = _narrowed(array, path)
        if code.get("weak") and dtype in _weak_dtypes():
            # A weak type, from a Python number, does not widen the dtype of a result.
            loaded = jnp.full(array.shape, dtype.type(0).item()).at[...].set(array)
        else:
            loaded = jnp.array(array)
        return placed_like(loaded, like[0]) if like else loaded

    def _decode_key(self, code: Any, like: Template, path: str) -> Any:
        if code["implementation"] not in KEY_IMPLEMENTATIONS:
            raise ValueError(f"there are no keys of {code['implementation']!r}.")
        data = self._decode_array(code["data"], (), path)
        key = jax.random.wrap_key_data(data, impl=code["implementation"])
        _require_array(key.shape, key.dtype, like, path)
        return placed_like(key, like[0]) if like else key

    def _decode_dict(self, code: Any, like: Template, path: str) -> Any:
        of = DICTS[code["kind"]]
        _require_type(of, like, path)
        keys = [self.decode(key, (), path) for key, _ in code["items"]]
        for template in like:
            _require_names(keys, list(template), path)
        return of(
            (key, self.decode(item, tuple(t[key] for t in like), f"{path}[{key!r}]"))
            for key, (_, item) in zip(keys, code["items"], strict=True)
        )

    def _decode_sequence(self, code: Any, like: Template, path: str) -> Any:
        of = SEQUENCES[code["kind"]]
        _require_type(of, like, path)
        items = code["items"]
        for template in like:
            if len(template) != len(items):
                raise ValueError(
                    f"`like` has {len(template)} entries at {at(path)}, and the file {len(items)}."
                )
        return of(
            self.decode(item, tuple(t[i] for t in like), f"{path}[{i}]")
            for i, item in enumerate(items)
        )

    def _class(self, code: Any, like: Template, path: str, of: type) -> type:
        """The class of an object, which must be a subclass of `of`."""
        for template in like:
            if type(template).__qualname__ != code["class"].partition(":")[2]:
                raise ValueError(
                    f"`like` has a `{type(template).__qualname__}` at {at(path)}, and the file a "
                    f"`{code['class']}`."
                )
        cls = type(like[0]) if like else self.trusted.find_class(code["class"])
        if not issubclass(cls, of):
            raise ValueError(f"{code['class']} at {at(path)} is not a `{of.__name__}`.")
        return cls

    def _fields(
        self, code: Any, like: Template, path: str, expected: Iterable[str]
    ) -> dict[str, Any]:
        """The fields of an object, which must have these names."""
        _require_names(list(code["fields"]), list(expected), path, code["class"])
        return {
            name: self.decode(field, tuple(getattr(t, name) for t in like), f"{path}.{name}")
            for name, field in code["fields"].items()
            if field is None or type(field) is not dict or field["kind"] != "default"
        }

    def _check(self, code: Any, value: Any, path: str) -> None:
        """Run the checks that the object passed when it was saved: of all fields, or of types."""
        try:
            if code.get("unchecked"):
                schema.check_kinds(value)
                return
            check(value)
            if isinstance(value, AbstractPosterior):
                recorded_values.check_moments(value)
        except Exception as error:
            raise ValueError(f"{at(path)}, a `{type(value).__qualname__}`: {error}") from error

    def _decode_namedtuple(self, code: Any, like: Template, path: str) -> Any:
        of: Any = self._class(code, like, path, tuple)
        fields = self._fields(code, like, path, of._fields)
        value = tuple.__new__(of, [fields[name] for name in of._fields])
        self._check(code, value, path)
        return value

    def _decode_module(self, code: Any, like: Template, path: str) -> Any:
        of = self._class(code, like, path, eqx.Module)
        fields = self._fields(code, like, path, schema.saved_fields(of))
        for name in code["fields"].keys() - fields.keys():
            default = inspect.signature(of).parameters[name].default
            if not callable(default):
                raise ValueError(f"the field {at(path)}.{name} has no function as its default.")
            if like and getattr(like[0], name) is not default:
                raise ValueError(
                    f"`like` does not have the default at {at(path)}.{name}, and the file does."
                )
            fields[name] = default
        module: Any = object.__new__(of)
        for field in dataclasses.fields(of):
            object.__setattr__(module, field.name, fields.get(field.name, field.default))
        self._check(code, module, path)
        if "answers" in code:
            self._compare_values(code, module, path)
        return module

    def _compare_values(self, code: Any, module: Any, path: str) -> None:
        """Raise if users' code in an object computes other values than when it was saved."""
        inputs, values = self.decode(code["answers"], (), path)
        recorded = recorded_values.RecordedValues(inputs, values)
        functions = ", ".join(f"`{name}`" for name in dict.fromkeys(code["code"]))
        try:
            differs = recorded_values.differs(module, recorded)
        except Exception as error:
            raise ValueError(
                f"{at(path)}, a `{type(module).__qualname__}`, cannot be computed as it was when "
                f"it was saved: does {functions} take other arguments now? "
                f"({type(error).__name__}: {error})"
            ) from error
        if differs:
            raise ValueError(
                f"{at(path)}, a `{type(module).__qualname__}`, gives other values than when it was "
                f"saved: {functions}, or code that it calls, was edited since. A file holds the "
                "names of functions and classes but not their code: load it with the code that it "
                "was saved with, or fit again."
            )

    def _decode_distribution(self, code: Any, like: Template, path: str) -> Any:
        of: Any = self._class(code, like, path, Distribution)
        data_names, static_names = fields_of(of)
        fields = self._fields(code, tuple(map(_Fields, like)), path, {*data_names, *static_names})
        static = tuple(fields[name] for name in static_names)
        value = of.tree_unflatten(static, tuple(fields[name] for name in data_names))
        self._check(code, value, path)
        return value

    def _decode_node(self, code: Any, like: Template, path: str) -> Any:
        of: Any = self._class(code, like, path, object)
        if not is_node(of):
            raise ValueError(f"{code['class']} at {at(path)} is no pytree.")
        templates = tuple(list(flatten(template)) for template in like)
        children, static = self.decode(code["parts"], templates, path)
        value = of.tree_unflatten(static, children)
        if type(value) is not of:
            raise ValueError(f"{code['class']} at {at(path)} is no pytree.")
        return value

    def _decode_partial(self, code: Any, like: Template, path: str) -> Any:
        of = PARTIALS[code["of"]]
        _require_type(of, like, path)
        parts = tuple((t.func, t.args, t.keywords) for t in like)
        function, args, keywords = self.decode(code["parts"], parts, path)
        return of(function, *args, **keywords)

    def _decode_treedef(self, code: Any, like: Template, path: str) -> Any:
        structure = jax.tree.structure(self.decode(code["example"], (), path))
        if like and like[0] != structure:
            raise ValueError(f"`like` has another structure at {at(path)} than the file.")
        return structure

    def _decode_dtype(self, code: Any, like: Template, path: str) -> Any:
        dtype = jnp.dtype(code["name"])
        return {"dtype": dtype, "numpy": dtype.type, "jax": getattr(jnp, dtype.name, None)}[
            code["form"]
        ]

    def _decode_class(self, code: Any, like: Template, path: str) -> Any:
        return like[0] if like else self.trusted.find_class(code["name"])

    def _decode_function(self, code: Any, like: Template, path: str) -> Any:
        if not like:
            return self.trusted.find_function(code["name"])
        plain = isinstance(like[0], types.FunctionType)
        name = names.name_of(like[0]) or (names.full_name(like[0]) if plain else repr(like[0]))
        # The module of a function is `__main__` in a script and has another name when imported.
        if name.partition(":")[2] != code["name"].partition(":")[2]:
            raise ValueError(f"`like` has {name} at {at(path)}, and the file {code['name']}.")
        return like[0]

    def _decode_code(self, code: Any, like: Template, path: str) -> Any:
        if not like:
            _needs_template(path)
        if type(like[0]).__qualname__ != code["of"]:
            raise ValueError(
                f"`like` has {like[0]!r} at {at(path)}, and the file a `{code['of']}`."
            )
        return like[0]

    def _decode_method(self, code: Any, like: Template, path: str) -> Any:
        if not like:
            _needs_template(path)
        _require_type(types.MethodType, like, path)
        if like[0].__name__ != code["name"]:
            raise ValueError(
                f"`like` has {like[0]!r} at {at(path)}, and the file `{code['name']}`."
            )
        owner = self.decode(code["self"], (like[0].__self__,), f"{path}.__self__")
        return types.MethodType(like[0].__func__, owner)

    def _decode_closure(self, code: Any, like: Template, path: str) -> Any:
        if not like:
            _needs_template(path)
        _require_type(types.FunctionType, like, path)
        (function,) = like
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        captured = dict(zip(function.__code__.co_freevars, cells, strict=True))
        template = [captured, function.__defaults__, function.__kwdefaults__]
        parts = self.decode(code["parts"], (template,), path)
        if _is_same(parts, template):
            return function  # itself, so that nothing is compiled again
        captured, defaults, keywords = parts
        closure = tuple(types.CellType(captured[name]) for name in function.__code__.co_freevars)
        rebuilt = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, defaults, closure
        )
        rebuilt.__kwdefaults__ = keywords
        rebuilt.__qualname__, rebuilt.__module__ = function.__qualname__, function.__module__
        return rebuilt

    def _decode_pytree(self, code: Any, like: Template, path: str) -> Any:
        if not like:
            _needs_template(path)
        self._class(code, like, path, object)
        leaves, structure = jax.tree_util.tree_flatten_with_path(like[0])
        leaf_names = [jax.tree_util.keystr(leaf_path) for leaf_path, _ in leaves]
        _require_names([name for name, _ in code["leaves"]], leaf_names, path)
        codes = dict(code["leaves"])
        return jax.tree.unflatten(
            structure,
            [
                self.decode(codes[name], (leaf,), path + name)
                for name, (_, leaf) in zip(leaf_names, leaves, strict=True)
            ],
        )


class _Fields:
    """The fields of a distribution as attributes; None for fields that are not computed yet."""

    def __init__(self, distribution: Distribution) -> None:
        self.distribution = distribution

    def __getattr__(self, name: str) -> Any:
        return vars(self.distribution).get(name)


def _needs_template(path: str) -> NoReturn:
    raise ValueError(
        f"the code at {at(path)} has no name under which it can be found: build an object of the "
        "same structure, such as the saved one before its training, and pass it as `like=`."
    )


def _is_same(a: Any, b: Any) -> bool:
    """Whether containers of the same structure hold the same objects, or equal plain values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return all(map(_is_same, a, b))
    return a is b or (type(a) in PLAIN and a == b)


def _require_type(of: type, like: Template, path: str) -> None:
    for template in like:
        if type(template) is not of:
            raise ValueError(
                f"`like` has a `{type(template).__qualname__}` at {at(path)}, and the file a "
                f"`{of.__qualname__}`."
            )


def _require_names(
    actual: list[Any], expected: list[Any], path: str, of: str | None = None
) -> None:
    """Raise unless the names are the expected ones, in any order."""
    missing = [name for name in expected if name not in actual]
    unknown = [name for name in actual if name not in expected]
    if missing or unknown or len(actual) != len(expected):
        raise ValueError(
            f"at {at(path)} the file lacks {missing} and has {unknown} besides what "
            f"{'`like`' if of is None else of} has."
        )


def _require_array(shape: tuple[int, ...], dtype: Any, like: Template, path: str) -> None:
    for template in like:
        if not hasattr(template, "shape") or not hasattr(template, "dtype"):
            raise ValueError(
                f"`like` has a `{type(template).__qualname__}` at {at(path)}, and the file an "
                "array."
            )
        if template.shape != shape or template.dtype != dtype:
            raise ValueError(
                f"`like` has an array of shape {template.shape} and dtype {template.dtype} at "
                f"{at(path)}, and the file one of shape {shape} and dtype {dtype}."
            )


def _narrowed(array: np.ndarray, path: str) -> np.ndarray:
    """The array in the 32-bit dtype that JAX uses for it."""
    with np.errstate(over="ignore"):
        narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    exact = array.dtype.kind in "iu"
    fits = narrow == array if exact else np.isfinite(narrow) == np.isfinite(array)
    if not np.all(fits):
        raise ValueError(
            f"the {array.dtype} array at {at(path)} does not fit into {narrow.dtype}: enable "
            "64-bit types."
        )
    return narrow


def _weak_dtypes() -> list[Any]:
    return [jnp.asarray(number).dtype for number in (0, 0.0, 0j)]


_DECODERS: dict[str, Callable[[Decoder, Any, Template, str], Any]] = {
    "OrderedDict": Decoder._decode_dict,
    "array": Decoder._decode_array,
    "class": Decoder._decode_class,
    "closure": Decoder._decode_closure,
    "code": Decoder._decode_code,
    "dict": Decoder._decode_dict,
    "distribution": Decoder._decode_distribution,
    "dtype": Decoder._decode_dtype,
    "function": Decoder._decode_function,
    "key": Decoder._decode_key,
    "list": Decoder._decode_sequence,
    "method": Decoder._decode_method,
    "module": Decoder._decode_module,
    "namedtuple": Decoder._decode_namedtuple,
    "node": Decoder._decode_node,
    "partial": Decoder._decode_partial,
    "pytree": Decoder._decode_pytree,
    "treedef": Decoder._decode_treedef,
    "tuple": Decoder._decode_sequence,
}
