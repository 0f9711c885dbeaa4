"""Hashable descriptions of what traced functions compute."""

import enum
import functools
import hashlib
from collections.abc import Callable, Hashable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend
from jax.extend import linear_util

from numpyro_scalegp.programs.reads import closed_over, is_users, named_variables

_PyTreeDef: Any = type(jax.tree.structure(0))
# Primitives with functions that define derivatives or batching of their jaxprs.
_WITH_RULES = (
    "custom_jvp_call", "custom_vjp_call", "custom_vmap_call",
    "call_with_jvp", "tangent_of_pullback",
)  # fmt: skip
_RULES = ("jvp", "fwd", "bwd", "vmap_rule")  # attributes of a function with such rules
# Functions and classes of these packages read no variable that changes.
_CONSTANT = frozenset(["jax", "jaxlib", "equinox", "numpy", "builtins", "math", "operator"])
_PURE = _CONSTANT | {"numpyro_scalegp", "numpyro", "optax", "functools", "collections", "types"}
_CHECKERS = frozenset(["jaxtyping", "beartype"])
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, np.dtype, np.generic, np.ndarray, jax.Array,
    enum.Enum, slice, type(...), jax.core.Tracer,
)  # fmt: skip
# Traces that have ended, placeholders for what a call will return, and sentinels.
_TRANSIENT = ("DynamicJaxprTrace", "Store", "EqualStore", "object")
_LARGE = 64  # bytes above which an array is described by its digest


class NotComparable(Exception):
    """A traced function contains an object that can only be compared by identity."""


def fingerprint(jaxpr: extend.Jaxpr, differentiable: bool) -> Hashable:
    """A value that is equal for functions of constants and arguments that compute the same.

    Args:
        jaxpr: the jaxpr of the function, of whose constants shapes and dtypes are compared.
        differentiable: whether to compare the rules of custom derivatives: their code and what it
            reads.

    Raises:
        NotComparable: if it calls a user's host callback, or a rule closes over a tracer.
    """
    return _Description(differentiable).of_jaxpr(jaxpr)


class Computation:
    """A description that is equal for traced functions that compute the same values.

    A description from another process, whose primitives are other objects, is equal to all.
    """

    def __init__(self, closed: extend.ClosedJaxpr | None) -> None:
        """Describe a jaxpr with its constants.

        Raises:
            NotComparable: as for `fingerprint`.
        """
        describe = _Description(differentiable=False).of_value
        self.description = None if closed is None else describe(closed)

    def __eq__(self, computation: object) -> bool:
        if not isinstance(computation, Computation):
            return False
        descriptions = self.description, computation.description
        return None in descriptions or descriptions[0] == descriptions[1]

    def __hash__(self) -> int:
        return 0  # one from another process is equal to all

    def __deepcopy__(self, _: dict[int, Any]) -> "Computation":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Computation, (None,)


def is_pure(value: Any) -> bool:
    """Whether the functions and objects in a pytree's structure read nothing that may change.

    A user's class or function may read a variable, an attribute or a mutable object.
    """
    return _is_pure(value, ())


def _is_pure(value: Any, outer: tuple[int, ...]) -> bool:
    """`is_pure`, within objects with the ids `outer`: a derivative rule may hold its function."""

    def recurse(inner: Any) -> bool:
        return _is_pure(inner, outer)

    if isinstance(value, _PyTreeDef):
        node = value.node_data()
        return node is None or (recurse(node) and all(map(recurse, value.children())))
    if isinstance(value, (*_PLAIN, Computation)):
        return True
    if isinstance(value, functools.partial):
        return recurse((value.func, value.args, value.keywords))
    if isinstance(value, MethodType):
        return recurse((value.__func__, value.__self__))
    if isinstance(value, FunctionType):
        value = _unchecked(value)
        return _has_code_of(_PURE, value) and recurse(closed_over(value))
    if isinstance(value, type | BuiltinFunctionType):
        return _is_from(_PURE, value)
    if isinstance(value, dict):
        return recurse(list(value.items()))
    if isinstance(value, tuple | list | set | frozenset):
        return recurse(type(value)) and all(map(recurse, value))
    if isinstance(value, eqx.Module):
        return recurse(jax.tree.flatten(value))
    if id(value) in outer:
        return True
    # An object that is not a pytree may change. JAX's objects, such as `jax.nn.relu`, do not, but
    # may hold users' functions: a wrapped function, or derivative rules.
    functions = [getattr(value, name, None) for name in ("__wrapped__", *_RULES)]
    return _is_from(_CONSTANT, type(value)) and _is_pure(functions, (*outer, id(value)))


def _unchecked(function: FunctionType) -> FunctionType:
    """The function inside of jaxtyping's checks of its arguments and results."""
    while _has_code_of(_CHECKERS, function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _has_code_of(packages: frozenset[str], function: FunctionType) -> bool:
    # Not `__module__`, which `functools.wraps` copies.
    return str(function.__globals__.get("__name__")).partition(".")[0] in packages


def _is_from(packages: frozenset[str], value: Any) -> bool:
    return (value.__module__ or "").partition(".")[0] in packages


class _Description:
    """Describes jaxprs and the values in them, each jaxpr once."""

    def __init__(self, differentiable: bool) -> None:
        self.differentiable = differentiable
        self.described: dict[int, Hashable] = {}
        # Objects that are being described, by id: one may contain itself.
        self.open: dict[int, int] = {}

    def of_jaxpr(self, jaxpr: extend.Jaxpr) -> Hashable:
        """Describe the equations of a jaxpr, with numbers for its variables."""
        if id(jaxpr) in self.described:
            return self.described[id(jaxpr)]
        numbers: dict[Any, int] = {}

        def bound(variable: Any) -> Hashable:
            numbers[variable] = len(numbers)
            return variable.aval

        def read(atom: Any) -> Hashable:
            if isinstance(atom, extend.Literal):
                return atom.aval, np.asarray(atom.val).tobytes()
            return numbers[atom]

        inputs = tuple(map(bound, (*jaxpr.constvars, *jaxpr.invars)))
        equations = tuple(
            (
                equation.primitive,
                tuple(map(read, equation.invars)),
                self._of_params(equation.primitive.name, equation.params),
                self._of_context(equation.ctx),
                tuple(map(bound, equation.outvars)),
            )
            for equation in jaxpr.eqns
        )
        outputs = tuple(map(read, jaxpr.outvars))
        self.described[id(jaxpr)] = (len(jaxpr.constvars), inputs, equations, outputs)
        return self.described[id(jaxpr)]

    def _of_context(self, context: Any) -> Hashable:
        names = ("compute_type", "threefry_partitionable", "xla_metadata")
        return tuple(self.of_value(getattr(context, name, None)) for name in names)

    def _of_params(self, primitive: str, params: dict[str, Any]) -> Hashable:
        has_rules = primitive.startswith(_WITH_RULES)
        return tuple(
            (name, self.of_value(params[name], is_rule=has_rules))
            for name in sorted(params)
            if self.differentiable or not (has_rules and _is_function(params[name]))
        )

    def of_value(self, value: Any, *, is_rule: bool = False) -> Hashable:
        """Describe a parameter of an equation, or a value that a function in it closes over."""
        recurse = functools.partial(self.of_value, is_rule=is_rule)
        if isinstance(value, extend.ClosedJaxpr):
            return self.of_jaxpr(value.jaxpr), tuple(map(self.of_value, value.consts))
        if isinstance(value, extend.Jaxpr):
            return self.of_jaxpr(value)
        if isinstance(value, jax.core.Tracer):
            raise NotComparable
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return _of_array(value)
        if isinstance(value, tuple | list):
            return type(value), tuple(map(recurse, value))
        if isinstance(value, dict):
            return type(value), tuple((recurse(key), recurse(item)) for key, item in value.items())
        if not (is_rule or _is_function(value) or isinstance(value, (eqx.Module, _PyTreeDef))):
            return _by_value(value)
        if id(value) in self.open:
            return "open", self.open[id(value)]
        self.open[id(value)] = len(self.open)
        try:
            return self._of_structure(value, recurse, is_rule)
        finally:
            del self.open[id(value)]

    def _of_structure(self, value: Any, of: Callable[[Any], Hashable], is_rule: bool) -> Hashable:
        """Describe an object that may contain functions, or itself."""
        if isinstance(value, eqx.Module):
            return of(jax.tree.flatten(value))
        if isinstance(value, _PyTreeDef):
            return of(value.node_data()), tuple(map(of, value.children()))
        if isinstance(value, linear_util.WrappedFun):
            return of(value.f), of(value.transforms), of(value.params), of(value.in_type)
        if isinstance(value, functools.partial):
            return of((value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return of((value.__func__, value.__self__))
        if isinstance(value, FunctionType):
            value = _unchecked(value)
            if not (is_rule or _has_code_of(_PURE, value)):
                raise NotComparable
            defaults = (value.__defaults__, value.__kwdefaults__)
            return value.__code__, of(closed_over(value)), of(defaults), self._of_module(value)
        if not is_rule or isinstance(value, ModuleType):
            return _by_value(value)
        if isinstance(value, type):
            users = filter(is_users, value.__mro__)
            return value, tuple(of(_attributes(ancestor)) for ancestor in users)
        of_class: Any = type(value)
        is_by_identity = of_class.__hash__ is object.__hash__
        if is_by_identity and hasattr(value, "__dict__"):
            return of(of_class), of(vars(value))
        if is_by_identity and is_users(of_class):
            raise NotComparable
        return _by_value(value)

    def _of_module(self, rule: FunctionType) -> Hashable:
        """Describe the module variables that a user's rule reads."""
        if not is_users(rule):
            return None
        code = rule.__code__
        return tuple(
            (name, self._of_variable(value, code))
            for name, value in named_variables(code, rule.__globals__).items()
        )

    def _of_variable(self, value: Any, code: CodeType) -> Hashable:
        if isinstance(value, ModuleType) and is_users(value):
            inside = named_variables(code, vars(value)).values()
            return tuple(self.of_value(variable, is_rule=True) for variable in inside)
        return self.of_value(value, is_rule=True)


def _attributes(value: type) -> dict[str, Any]:
    """The attributes of a class, without dunder names except `__call__`."""
    attributes = vars(value).items()
    named = {name: attribute for name, attribute in attributes if not name.startswith("__")}
    return {**named, "__call__": vars(value).get("__call__")}


def _is_function(value: Any) -> bool:
    return callable(value) or isinstance(value, linear_util.WrappedFun)


def _of_array(array: Any) -> Hashable:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array.dtype, _of_array(jax.random.key_data(array))
    content = np.asarray(array)
    data = content.tobytes()
    digest = data if len(data) <= _LARGE else hashlib.blake2b(data).digest()
    return content.dtype, content.shape, bool(getattr(array, "weak_type", False)), digest


def _by_value(value: Any) -> Hashable:
    if (name := type(value).__name__) in _TRANSIENT:
        return name
    if isinstance(value, float):
        return value.hex()  # -0.0 is not 0.0
    try:
        hash(value)
    except TypeError:
        raise NotComparable from None
    return type(value), value
