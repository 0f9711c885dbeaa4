"""Compiled programs that are known by what they compute, not by the functions that a user passed.

`jax.jit` keeps a program for each function; but a mean function, a likelihood or a model may read
something else at its next call. Here such functions are traced at each call, what they read becomes
an argument of the program, and only a program that is new is compiled. So what a function reads is
what it computes with, functions that are written again compile nothing, and no program keeps a
user's function, model or data alive.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend import core as extend
from jax.extend.core import ClosedJaxpr, Jaxpr

from numpyro_scalegp.core.fingerprints import NotComparable, fingerprint, is_pure

Run = Callable[..., list[Any]]  # of constants, and of arguments one by one

_pure_structures: set[Any] = set()


class _Store:
    """Programs by what they compute; the least recently used one makes room for a new one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.programs: OrderedDict[Hashable, Run] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Run]) -> Run:
        """The program of a key, made if there is none."""
        with self.lock:
            if key in self.programs:
                self.programs.move_to_end(key)
                return self.programs[key]
        program = make()
        with self.lock:
            self.programs[key] = program
            if len(self.programs) > self.size:
                self.programs.popitem(last=False)
        return program


_executables = _Store(256)  # of a few MiB each
# These are differentiated, and hold derivative rules, by which users' functions stay alive.
_differentiable = _Store(8)


class Traced(eqx.Module):
    """A function of pytrees as it was traced; the constants that it read are leaves.

    Called with arguments of the structure, shapes and types of those that it was traced with, it
    returns what the function would have returned for them then.
    """

    constants: list[Any]
    program: Run = eqx.field(static=True)
    structure: Any = eqx.field(static=True)  # of the arrays in the result
    others: Any = eqx.field(static=True)  # what else is in the result, a pytree

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        leaves = jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))
        results = self.program(self.constants, *leaves)
        return eqx.combine(jax.tree.unflatten(self.structure, results), self.others)


class _Trace(NamedTuple):
    closed: ClosedJaxpr
    leaves: list[Any]  # the arrays among the arguments
    structure: Any
    others: Any

    def with_program(self, program: Run) -> Traced:
        return Traced(_constants(self.closed), program, self.structure, self.others)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of pytrees, as `equinox.filter_jit`, and read users' functions each time.

    Arrays are traced; all else is static. Where the arguments hold no function, class or object but
    this package's and its dependencies', it is `equinox.filter_jit`. Elsewhere the function is
    traced at each call, which takes milliseconds, and compiled if no program is equal to it.
    """
    by_structure = eqx.filter_jit(function)
    is_own = is_pure(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_own and _has_pure_structure((args, kwargs)):
            return by_structure(*args, **kwargs)
        if _is_inside_of_jit():
            return function(*args, **kwargs)
        return _loaded(function, args, kwargs)(*args, **kwargs)

    return call


def compiled_unless_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled` for functions that compiled loops call, too: among these no program of its own."""
    program = compiled(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_inside = _any_traced(jax.tree.leaves((args, kwargs)))
        return (function if is_inside else program)(*args, **kwargs)

    return call


class CompiledForLoop:
    """A compiled function that reads users' functions once, when a loop calls it first.

    Args:
        function: of pytrees, free of side effects.
        donates: whether the arrays of all arguments but the first are donated.
    """

    def __init__(self, function: Callable[..., Any], *, donates: bool = False) -> None:
        self.function = function
        self.donates = donates
        self._traced: dict[Hashable, Traced] = {}

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        arrays, static = eqx.partition(args, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        types = tuple(jax.typeof(leaf) for leaf in leaves)
        signature = (structure, types, tuple(map(_Itself, jax.tree.leaves(static))))
        if signature not in self._traced:
            self._traced[signature] = _loaded(self.function, args, {}, donates=self.donates)
        return self._traced[signature](*args)


class _Itself:
    """An argument by which calls are told apart: equal ones or, without a hash, the very same."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.is_hashable = isinstance(value, Hashable)

    def __hash__(self) -> int:
        return hash(self.value) if self.is_hashable else id(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Itself):
            return False
        is_same = self.value is other.value
        return is_same or bool(self.is_hashable and other.is_hashable and self.value == other.value)


def trace(function: Callable[..., Any], *args: Any) -> Traced:
    """Trace a function of pytrees, free of side effects, with arguments of some shapes and types.

    Unlike what `compiled` makes, the result can be called under transformations of any kind, and
    keeps derivative rules, and so the function, alive.
    """
    found = _trace(function, args, {})
    return found.with_program(_jitted(found.closed.jaxpr))


def _loaded(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    donates: bool = False,
) -> Traced:
    """A function as traced, with the program that computes the same, compiled if there is none."""
    found = _trace(function, args, kwargs)
    constants = _constants(found.closed)
    if not _any_traced((*found.leaves, *constants)):
        num_kept = len(jax.tree.leaves(eqx.filter(args[:1], eqx.is_array)))
        num_leaves = len(found.leaves)
        donated = range(num_kept, num_leaves) if donates else range(0)
        return found.with_program(executable(found.closed, found.leaves, donated=donated))
    jaxpr = found.closed.jaxpr
    try:
        key = fingerprint(jaxpr, differentiable=True)
    except NotComparable:
        return found.with_program(_jitted(jaxpr))
    return found.with_program(_differentiable.get(key, lambda: _jitted(jaxpr)))


def executable(
    closed: ClosedJaxpr,
    leaves: list[Any],
    *,
    donated: range = range(0),
    options: dict[str, Any] | None = None,
) -> Run:
    """The compiled program that computes what a jaxpr computes, of values.

    Args:
        closed: the jaxpr, with constants of the shapes and types that the program takes.
        leaves: arguments of these, on the devices of those that the program takes.
        donated: indices of the arguments whose memory the results may take.
        options: of the compiler.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return functools.partial(jax.core.eval_jaxpr, closed.jaxpr)
    constants = list(closed.consts)

    def compile_it() -> Run:
        return _jitted(closed.jaxpr, donated, options).lower(constants, *leaves).compile()

    compiler = tuple(sorted((options or {}).items()))
    places = tuple(map(_place, (*constants, *leaves)))
    try:
        description = fingerprint(closed.jaxpr, differentiable=False)
    except NotComparable:
        return compile_it()
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    key = (description, donated, compiler, places, device)
    return _executables.get(key, compile_it)


def _trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Trace:
    arrays, static = eqx.partition((args, kwargs), eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    outputs: list[tuple[Any, Any]] = []

    # A function of its own for each call: JAX keeps what it traced of one that it has seen.
    def of_leaves(*leaves: Any) -> list[Any]:
        args, kwargs = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        result, others = eqx.partition(function(*args, **kwargs), eqx.is_array)
        results, result_structure = jax.tree.flatten(result)
        outputs.append((result_structure, others))
        return results

    return _Trace(jax.make_jaxpr(of_leaves)(*leaves), leaves, *outputs[-1])


def _jitted(jaxpr: Jaxpr, donated: range = range(0), options: dict[str, Any] | None = None) -> Any:
    def run(constants: list[Any], *leaves: Any) -> list[Any]:
        return jax.core.eval_jaxpr(jaxpr, constants, *leaves)

    argnums = tuple(1 + index for index in donated)
    return jax.jit(run, donate_argnums=argnums, compiler_options=options)


def _constants(closed: ClosedJaxpr) -> list[Any]:
    return list(map(jnp.asarray, closed.consts))


def _place(array: Any) -> Hashable:
    """Where an array lies, if it must lie there."""
    is_bound = isinstance(array, jax.Array) and array.committed
    return array.sharding if is_bound else None


def _is_inside_of_jit() -> bool:
    """Whether another program is being traced, or none is to be compiled."""
    is_tracing: Any = extend.unsafe_am_i_under_a_jit_DO_NOT_USE  # type: ignore[attr-defined]
    return bool(is_tracing() or jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def _any_traced(leaves: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _has_pure_structure(arguments: Any) -> bool:
    leaves, structure = jax.tree.flatten(arguments)
    if not all(map(is_pure, leaves)):
        return False
    try:
        is_known = structure in _pure_structures
    except TypeError:  # a structure with something in it that has no hash
        return is_pure(structure)
    if not is_known:
        if not is_pure(structure):
            return False
        _pure_structures.add(structure)
    return True
