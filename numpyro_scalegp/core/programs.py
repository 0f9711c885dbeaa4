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
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from numpyro_scalegp.core.fingerprints import NotComparable, fingerprint, is_pure

_MAX_PROGRAMS = 512
_programs: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
_pure_structures: set[Any] = set()
_lock = threading.Lock()


class Traced(eqx.Module):
    """A function of pytrees as it was traced; the constants that it read are leaves.

    Called with arguments of the structure, shapes and types of those that it was traced with, it
    returns what the function would have returned for them then.
    """

    constants: list[Any]
    program: Callable[..., list[Any]] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)  # of the arrays in the result
    others: Any = eqx.field(static=True)  # what else is in the result, a pytree

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        leaves = jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))
        results = self.program(self.constants, *leaves)
        return eqx.combine(jax.tree.unflatten(self.structure, results), self.others)


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
        return trace(function, *args, **kwargs)(*args, **kwargs)

    return call


def compiled_unless_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled` for functions that compiled loops call, too: among these no program of its own."""
    program = compiled(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        return (function if is_traced else program)(*args, **kwargs)

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
        others = tuple(map(_Itself, jax.tree.leaves(static)))
        signature = (structure, types, others)
        if signature not in self._traced:
            self._traced[signature] = trace(self.function, *args, donates=self.donates)
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


def trace(function: Callable[..., Any], *args: Any, donates: bool = False, **kwargs: Any) -> Traced:
    """Trace a function of pytrees, and take the program that computes the same if there is one.

    Args:
        function: free of side effects.
        *args: arguments to trace with.
        donates: whether the arrays of all arguments but the first are donated.
        **kwargs: arguments to trace with.
    """
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

    closed = jax.make_jaxpr(of_leaves)(*leaves)
    donated = range(len(jax.tree.leaves(arrays[0][:1])) if donates else len(leaves), len(leaves))
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, *closed.consts))
    run = program(closed.jaxpr, differentiable=is_traced, donated=donated)
    return Traced(list(map(jnp.asarray, closed.consts)), run, *outputs[-1])


def program(
    jaxpr: Jaxpr,
    *,
    differentiable: bool = False,
    donated: range = range(0),
    options: dict[str, Any] | None = None,
) -> Callable[..., list[Any]]:
    """The compiled program that computes what a jaxpr computes: of constants, and of its arguments.

    Args:
        jaxpr: with constants as variables.
        differentiable: whether the program is called with tracers, by which derivative rules count.
        donated: indices of the arguments whose memory the results may take.
        options: of the compiler.
    """
    compiler = tuple(sorted((options or {}).items()))
    try:
        key = (fingerprint(jaxpr, differentiable), differentiable, donated, compiler)
    except NotComparable:
        return _compiled(jaxpr, donated, options)
    with _lock:
        if key not in _programs:
            _programs[key] = _compiled(jaxpr, donated, options)
            if len(_programs) > _MAX_PROGRAMS:
                _programs.popitem(last=False)
        _programs.move_to_end(key)
        return _programs[key]


def _compiled(
    jaxpr: Jaxpr, donated: range, options: dict[str, Any] | None
) -> Callable[..., list[Any]]:
    def run(constants: list[Any], *leaves: Any) -> list[Any]:
        return jax.core.eval_jaxpr(jaxpr, constants, *leaves)

    argnums = tuple(1 + index for index in donated)
    return jax.jit(run, donate_argnums=argnums, compiler_options=options)


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
