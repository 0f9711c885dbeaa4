"""Compiled programs, cached by what they compute and not by the functions that a user passed.

`jax.jit` caches a program for each function, but a mean function, a likelihood or a model may read
other values at its next call. Here such functions are traced at each call, the arrays that they
read become arguments of the program, and a program is compiled only if no equal one is cached. So a
function always computes with the current values of what it reads, a function that is defined again
compiles nothing, and no program keeps a user's function, model or data alive.
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

from numpyro_scalegp.programs import host_calls
from numpyro_scalegp.programs.fingerprints import NotComparable, fingerprint, is_pure

Run = Callable[..., list[Any]]  # maps a list of constants, and the arguments, to results

_pure_structures: set[Any] = set()


class _Store:
    """A cache of programs by what they compute, which drops the least recently used one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.programs: OrderedDict[Hashable, Run] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Run]) -> Run:
        """The program of a key, from `make` if there is none."""
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


_executables = _Store(256)  # a few MiB each
# Programs with derivative rules, which keep users' functions alive.
_differentiable = _Store(8)


class Traced(eqx.Module):
    """A traced function of pytrees, whose leaves are the constants that it read.

    Its arguments must have the structure, shapes and dtypes of those that it was traced with. It
    returns what the function would have returned at the time of the trace.
    """

    constants: list[Any]
    program: Run = eqx.field(static=True)
    structure: Any = eqx.field(static=True)  # of the arrays in the result
    static_result: Any = eqx.field(static=True)  # the result without its arrays

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        leaves = jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))
        results = self.program(self.constants, *leaves)
        return eqx.combine(jax.tree.unflatten(self.structure, results), self.static_result)


class TracedCall(NamedTuple):
    """A traced call of a function of pytrees."""

    closed: ClosedJaxpr
    leaves: list[Any]  # the arrays among the arguments
    structure: Any
    static_result: Any

    def result(self, arrays: list[Any]) -> Any:
        """The function's result, given its arrays, or numbers where the jaxpr has these."""
        pairs = zip(arrays, self.closed.out_avals, strict=True)
        arrays = [
            value
            if isinstance(value, jax.Array)
            else jnp.asarray(value, None if aval.weak_type else aval.dtype)
            for value, aval in pairs
        ]
        return eqx.combine(jax.tree.unflatten(self.structure, arrays), self.static_result)

    def with_program(self, program: Run) -> Traced:
        """The call with a program that runs it."""
        return Traced(_constants(self.closed), program, self.structure, self.static_result)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of pytrees like `equinox.filter_jit`, tracing users' functions each time.

    Arrays are traced; everything else is static. If all functions, classes and objects in the
    arguments are from this package and its dependencies, this is `equinox.filter_jit`. Otherwise
    the function is traced at each call, which takes milliseconds, and compiled unless an equal
    program is cached.
    """
    by_structure = eqx.filter_jit(function)
    with_calls = eqx.filter_jit(_returning_host_calls(function))
    is_pure_function = is_pure(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_pure_function and _has_pure_structure((args, kwargs)):
            if is_inside_of_jit() or _any_traced(jax.tree.leaves((args, kwargs))):
                return by_structure(*args, **kwargs)
            result, calls = with_calls(*args, **kwargs)
            for host_call in calls:
                host_call()
            return result
        if is_inside_of_jit():
            return function(*args, **kwargs)
        return _trace_and_compile(function, args, kwargs)(*args, **kwargs)

    return call


def compiled_unless_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, except for traced arguments: within a compiled loop the function is inlined."""
    program = compiled(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_traced = _any_traced(jax.tree.leaves((args, kwargs)))
        return (function if is_traced else program)(*args, **kwargs)

    return call


class CompiledForLoop:
    """A compiled function for a loop, which traces users' functions at its first call only.

    Args:
        function: a function of pytrees without side effects.
        donates: whether to donate the arrays of all arguments but the first.
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
        signature = (structure, types, tuple(map(_StaticLeaf, jax.tree.leaves(static))))
        if signature not in self._traced:
            program = _trace_and_compile(self.function, args, {}, donates=self.donates)
            self._traced[signature] = program
        return self._traced[signature](*args)


class _StaticLeaf:
    """A static argument, compared by value or, if it is not hashable, by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.is_hashable = isinstance(value, Hashable)

    def __hash__(self) -> int:
        return hash(self.value) if self.is_hashable else id(self.value)

    def __eq__(self, leaf: object) -> bool:
        if not isinstance(leaf, _StaticLeaf):
            return False
        is_same = self.value is leaf.value
        return is_same or bool(self.is_hashable and leaf.is_hashable and self.value == leaf.value)


def trace(function: Callable[..., Any], *args: Any) -> Traced:
    """Trace a function of pytrees without side effects, for the shapes and dtypes of `args`.

    Unlike the result of `compiled`, the result can be transformed in any way; its derivative rules
    keep the function alive.
    """
    traced = trace_call(function, args, {})
    return traced.with_program(_jitted(traced.closed.jaxpr))


def _trace_and_compile(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    donates: bool = False,
) -> Traced:
    """Trace a function, and compile it unless an equal program is cached."""
    traced = trace_call(function, args, kwargs)
    constants = _constants(traced.closed)
    if not _any_traced((*traced.leaves, *constants)):
        num_kept = len(jax.tree.leaves(eqx.filter(args[:1], eqx.is_array)))
        num_leaves = len(traced.leaves)
        donated = range(num_kept, num_leaves) if donates else range(0)
        return traced.with_program(executable(traced.closed, traced.leaves, donated=donated))
    jaxpr = traced.closed.jaxpr
    try:
        key = fingerprint(jaxpr, differentiable=True)
    except NotComparable:
        return traced.with_program(_jitted(jaxpr))
    return traced.with_program(_differentiable.get(key, lambda: _jitted(jaxpr)))


def _returning_host_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, list[host_calls.HostCall]]:
        traced = trace_call(function, args, kwargs)
        results, calls = host_calls.evaluated(traced.closed, traced.leaves)
        return traced.result(results), calls

    return run


def executable(
    closed: ClosedJaxpr,
    leaves: list[Any],
    *,
    donated: range = range(0),
    options: dict[str, Any] | None = None,
) -> Run:
    """Compile a jaxpr for concrete arguments, or return an equal program that is cached.

    The program makes its host calls once it has run; see `host_calls`.

    Args:
        closed: the jaxpr, with constants of the shapes and dtypes for which to compile.
        leaves: arguments of the shapes and dtypes, and on the devices, for which to compile.
        donated: indices of the arguments whose memory the results may take.
        options: options of the compiler.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return functools.partial(jax.core.eval_jaxpr, closed.jaxpr)
    returned = host_calls.returned(closed)
    if returned is None:
        return _executable(closed, leaves, donated, options)
    num_constants = len(closed.consts)  # which come first among its arguments
    shifted = range(donated.start + num_constants, donated.stop + num_constants)
    run = _executable(returned.closed, [*closed.consts, *leaves], shifted, options)
    own_constants = returned.closed.consts
    return lambda constants, *leaves: returned.call(run(own_constants, *constants, *leaves))


def _executable(
    closed: ClosedJaxpr, leaves: list[Any], donated: range, options: dict[str, Any] | None
) -> Run:
    constants = list(closed.consts)

    def compile_program() -> Run:
        return _jitted(closed.jaxpr, donated, options).lower(constants, *leaves).compile()

    compiler = tuple(sorted((options or {}).items()))
    shardings = tuple(map(_committed_sharding, (*constants, *leaves)))
    try:
        description = fingerprint(closed.jaxpr, differentiable=False)
    except NotComparable:
        return compile_program()
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    key = (description, donated, compiler, shardings, device)
    return _executables.get(key, compile_program)


def trace_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TracedCall:
    """Trace a call of a function without side effects."""
    arrays, static = eqx.partition((args, kwargs), eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    outputs: list[tuple[Any, Any]] = []

    # A new function for each call, because JAX caches the traces of a function.
    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        result, static_result = eqx.partition(function(*args, **kwargs), eqx.is_array)
        results, result_structure = jax.tree.flatten(result)
        outputs.append((result_structure, static_result))
        return results

    return TracedCall(jax.make_jaxpr(flat)(*leaves), leaves, *outputs[-1])


def _jitted(jaxpr: Jaxpr, donated: range = range(0), options: dict[str, Any] | None = None) -> Any:
    def run(constants: list[Any], *leaves: Any) -> list[Any]:
        return jax.core.eval_jaxpr(jaxpr, constants, *leaves)

    argnums = tuple(1 + index for index in donated)
    return jax.jit(run, donate_argnums=argnums, compiler_options=options)


def _constants(closed: ClosedJaxpr) -> list[Any]:
    return list(map(jnp.asarray, closed.consts))


def _committed_sharding(array: Any) -> Hashable:
    """The sharding of an array that is committed to its devices; else None."""
    is_committed = isinstance(array, jax.Array) and array.committed
    return array.sharding if is_committed else None


def is_inside_of_jit() -> bool:
    """Whether another program is being traced, or compilation is disabled."""
    is_tracing: Any = extend.unsafe_am_i_under_a_jit_DO_NOT_USE  # type: ignore[attr-defined]
    return bool(is_tracing() or jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def _any_traced(leaves: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _has_pure_structure(arguments: Any) -> bool:
    leaves, structure = jax.tree.flatten(arguments)
    if not all(map(is_pure, leaves)):
        return False
    try:
        is_cached = structure in _pure_structures
    except TypeError:  # a structure with an object that is not hashable
        return is_pure(structure)
    if not is_cached:
        if not is_pure(structure):
            return False
        _pure_structures.add(structure)
    return True
