"""From a JSON value and named arrays back to the object."""

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
from numpyro_scalegp.core.programs import Traced
from numpyro_scalegp.posteriors.posterior import AbstractPosterior
from numpyro_scalegp.saving import answers, names, schema
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

Template = tuple[Any, ...]  # of one object, or none


class Decoder:
    """Rebuilds an object from names or, where there is a template, from its classes and functions.

    Args:
        arrays: the file's arrays.
        trusted: what the file may name.
        file: its name, for errors and warnings.
    """

    def __init__(self, arrays: dict[str, np.ndarray], trusted: names.Trusted, file: str) -> None:
        self.arrays = arrays
        self.trusted = trusted
        self.file = file
        self.narrowed: set[str] = set()

    def load(self, code: Any, like: Template) -> Any:
        """The object; all errors name the file."""
        try:
            value = self.decode(code, like, "")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"cannot load `{self.file}`: {error}") from error
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(
                f"cannot load `{self.file}`: it is not as `sgp.save` writes "
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
        """The object that `code` stands for."""
        if like and like[0] is ...:
            like = ()
        if like and isinstance(like[0], Traced):
            like = (None,)  # no program is saved; the function that was traced stands beside it
        if type(code) in PLAIN:
            _same(type(code), like, path)
            return code
        return _DECODERS[code["kind"]](self, code, like, path)

    def _decode_array(self, code: Any, like: Template, path: str) -> Any:
        stored = self.arrays[code["name"]]
        if list(stored.shape) != code["shape"]:
            raise ValueError(f"the array at {at(path)} has shape {stored.shape} in the file.")
        # Types that NumPy lacks are stored as unsigned integers.
        known = code["dtype"][0] in "<>|="
        dtype = np.dtype(code["dtype"]) if known else jnp.dtype(code["dtype"])
        array = stored if known else stored.view(dtype)
        if array.dtype != dtype:
            raise ValueError(f"the array at {at(path)} has the dtype {array.dtype} in the file.")
        _fits(array.shape, dtype, like, path)
        if code["form"] == "numpy":
            return array.copy()
        if code["form"] == "scalar":
            return array[()]
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            self.narrowed.add(dtype.name)
            array = _narrowed(array, path)
        if code.get("weak") and dtype in _weak_dtypes():
            # From a number of Python, and so never widening the type of a result.
            loaded = jnp.full(array.shape, dtype.type(0).item()).at[...].set(array)
        else:
            loaded = jnp.array(array)
        return placed_like(loaded, like[0]) if like else loaded

    def _decode_key(self, code: Any, like: Template, path: str) -> Any:
        if code["implementation"] not in KEY_IMPLEMENTATIONS:
            raise ValueError(f"there are no keys of {code['implementation']!r}.")
        data = self._decode_array(code["data"], (), path)
        key = jax.random.wrap_key_data(data, impl=code["implementation"])
        _fits(key.shape, key.dtype, like, path)
        return placed_like(key, like[0]) if like else key

    def _decode_dict(self, code: Any, like: Template, path: str) -> Any:
        of = DICTS[code["kind"]]
        _same(of, like, path)
        keys = [self.decode(key, (), path) for key, _ in code["items"]]
        for one in like:
            _same_names(keys, list(one), path)
        return of(
            (key, self.decode(item, tuple(one[key] for one in like), f"{path}[{key!r}]"))
            for key, (_, item) in zip(keys, code["items"], strict=True)
        )

    def _decode_sequence(self, code: Any, like: Template, path: str) -> Any:
        of = SEQUENCES[code["kind"]]
        _same(of, like, path)
        items = code["items"]
        for one in like:
            if len(one) != len(items):
                raise ValueError(
                    f"`like` has {len(one)} entries at {at(path)}, and the file {len(items)}."
                )
        return of(
            self.decode(item, tuple(one[i] for one in like), f"{path}[{i}]")
            for i, item in enumerate(items)
        )

    def _class(self, code: Any, like: Template, path: str, of: type) -> type:
        """The class of an object, which must be a kind of `of`."""
        for one in like:
            if type(one).__qualname__ != code["class"].partition(":")[2]:
                raise ValueError(
                    f"`like` has a `{type(one).__qualname__}` at {at(path)}, and the file a "
                    f"`{code['class']}`."
                )
        found = type(like[0]) if like else self.trusted.find_class(code["class"])
        if not issubclass(found, of):
            raise ValueError(f"{code['class']} at {at(path)} is no kind of `{of.__name__}`.")
        return found

    def _fields(
        self, code: Any, like: Template, path: str, wanted: Iterable[str]
    ) -> dict[str, Any]:
        """The fields of an object: all of them, and no others."""
        _same_names(list(code["fields"]), list(wanted), path, code["class"])
        return {
            name: self.decode(field, tuple(getattr(one, name) for one in like), f"{path}.{name}")
            for name, field in code["fields"].items()
            if field is None or type(field) is not dict or field["kind"] != "default"
        }

    def _check(self, code: Any, value: Any, path: str) -> None:
        """Run the checks of a class, of objects that had not passed them those of kinds alone."""
        try:
            if code.get("unchecked"):
                schema.check_kinds(value)
                return
            check(value)
            if isinstance(value, AbstractPosterior):
                answers.check_moments(value)
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
        wanted = schema.saved_fields(of)
        fields = self._fields(code, like, path, wanted)
        for name in code["fields"].keys() - fields.keys():
            default = inspect.signature(of).parameters[name].default
            if not callable(default):
                raise ValueError(f"the field {at(path)}.{name} has no function as its default.")
            if like and getattr(like[0], name) is not default:
                raise ValueError(f"`like` has no default at {at(path)}.{name}, and the file one.")
            fields[name] = default
        module: Any = object.__new__(of)
        for field in dataclasses.fields(of):
            object.__setattr__(module, field.name, fields.get(field.name, field.default))
        self._check(code, module, path)
        if "answers" in code:
            self._compare(code, module, path)
        return module

    def _compare(self, code: Any, module: Any, path: str) -> None:
        """Raise if users' code in an object gives other values than when it was saved."""
        rows, values = self.decode(code["answers"], (), path)
        named = ", ".join(f"`{name}`" for name in dict.fromkeys(code["code"]))
        try:
            differs = answers.differs(module, answers.Answers(rows, values))
        except Exception as error:
            raise ValueError(
                f"{at(path)}, a `{type(module).__qualname__}`, cannot be computed as it was when "
                f"it was saved: does {named} take other arguments now? "
                f"({type(error).__name__}: {error})"
            ) from error
        if differs:
            raise ValueError(
                f"{at(path)}, a `{type(module).__qualname__}`, gives other values than when it was "
                f"saved: {named}, or what that reads, was edited since. A file has the names of "
                "functions and classes and no code: load it with the code of then, or fit again."
            )

    def _decode_distribution(self, code: Any, like: Template, path: str) -> Any:
        of: Any = self._class(code, like, path, Distribution)
        data, others = fields_of(of)
        fields = self._fields(code, tuple(map(_Fields, like)), path, {*data, *others})
        static = tuple(fields[name] for name in others)
        value = of.tree_unflatten(static, tuple(fields[name] for name in data))
        self._check(code, value, path)
        return value

    def _decode_node(self, code: Any, like: Template, path: str) -> Any:
        of: Any = self._class(code, like, path, object)
        if not is_node(of):
            raise ValueError(f"{code['class']} at {at(path)} is no pytree.")
        templates = tuple(list(flatten(one)) for one in like)
        children, static = self.decode(code["parts"], templates, path)
        value = of.tree_unflatten(static, children)
        if type(value) is not of:
            raise ValueError(f"{code['class']} at {at(path)} is no pytree.")
        return value

    def _decode_partial(self, code: Any, like: Template, path: str) -> Any:
        of = PARTIALS[code["of"]]
        _same(of, like, path)
        parts = tuple((one.func, one.args, one.keywords) for one in like)
        function, args, keywords = self.decode(code["parts"], parts, path)
        return of(function, *args, **keywords)

    def _decode_treedef(self, code: Any, like: Template, path: str) -> Any:
        found = jax.tree.structure(self.decode(code["example"], (), path))
        if like and like[0] != found:
            raise ValueError(f"`like` has another structure at {at(path)} than the file.")
        return found

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
        # A script and a module that is imported have different names for the same function.
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
        _same(types.MethodType, like, path)
        if like[0].__name__ != code["name"]:
            raise ValueError(
                f"`like` has {like[0]!r} at {at(path)}, and the file `{code['name']}`."
            )
        owner = self.decode(code["self"], (like[0].__self__,), f"{path}.__self__")
        return types.MethodType(like[0].__func__, owner)

    def _decode_closure(self, code: Any, like: Template, path: str) -> Any:
        if not like:
            _needs_template(path)
        _same(types.FunctionType, like, path)
        (function,) = like
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        held = dict(zip(function.__code__.co_freevars, cells, strict=True))
        template = [held, function.__defaults__, function.__kwdefaults__]
        parts = self.decode(code["parts"], (template,), path)
        if _is_same(parts, template):
            return function  # the very same, so that nothing is compiled again
        held, defaults, keywords = parts
        closure = tuple(types.CellType(held[name]) for name in function.__code__.co_freevars)
        again = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, defaults, closure
        )
        again.__kwdefaults__ = keywords
        again.__qualname__, again.__module__ = function.__qualname__, function.__module__
        return again

    def _decode_pytree(self, code: Any, like: Template, path: str) -> Any:
        if not like:
            _needs_template(path)
        self._class(code, like, path, object)
        leaves, structure = jax.tree_util.tree_flatten_with_path(like[0])
        here = [jax.tree_util.keystr(at) for at, _ in leaves]
        _same_names([name for name, _ in code["leaves"]], here, path)
        given = dict(code["leaves"])
        return jax.tree.unflatten(
            structure,
            [
                self.decode(given[name], (leaf,), path + name)
                for name, (_, leaf) in zip(here, leaves, strict=True)
            ],
        )


class _Fields:
    """The fields of a distribution as attributes, None for those that it has not computed."""

    def __init__(self, distribution: Distribution) -> None:
        self.distribution = distribution

    def __getattr__(self, name: str) -> Any:
        return vars(self.distribution).get(name)


def _needs_template(path: str) -> NoReturn:
    raise ValueError(
        f"the code at {at(path)} has no name under which it can be found: build an object of the "
        "same structure, such as the one that was saved as it was before training, and pass it as "
        "`like=`."
    )


def _is_same(one: Any, other: Any) -> bool:
    """Whether containers hold the same objects, or equal plain ones."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(_is_same, one, other))
    return one is other or (type(one) in PLAIN and one == other)


def _same(of: type, like: Template, path: str) -> None:
    for one in like:
        if type(one) is not of:
            raise ValueError(
                f"`like` has a `{type(one).__qualname__}` at {at(path)}, and the file a "
                f"`{of.__qualname__}`."
            )


def _same_names(found: list[Any], wanted: list[Any], path: str, of: str | None = None) -> None:
    """Raise unless both are the same up to their order."""
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    if missing or unknown or len(found) != len(wanted):
        raise ValueError(
            f"at {at(path)} the file lacks {missing} and has {unknown} besides what "
            f"{'`like`' if of is None else of} has."
        )


def _fits(shape: tuple[int, ...], dtype: Any, like: Template, path: str) -> None:
    for one in like:
        if not hasattr(one, "shape") or not hasattr(one, "dtype"):
            raise ValueError(
                f"`like` has a `{type(one).__qualname__}` at {at(path)}, and the file an array."
            )
        if one.shape != shape or one.dtype != dtype:
            raise ValueError(
                f"`like` has an array of shape {one.shape} and dtype {one.dtype} at {at(path)}, "
                f"and the file one of shape {shape} and dtype {dtype}."
            )


def _narrowed(array: np.ndarray, path: str) -> np.ndarray:
    """The array in the 32-bit type in which JAX keeps it."""
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
