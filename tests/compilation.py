"""Compiler options for tests, counts of compilations, and sizes of arrays in programs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# For loops of thousands of draws, which take longer than their compilation.
optimized = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    },
)


class Programs:
    """The number of compiled programs."""

    def __init__(self) -> None:
        self.number = 0
        jax.monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event: str, duration: float, **_: object) -> None:
        self.number += event == "/jax/core/compile/backend_compile_duration"


programs = Programs()


def assert_compiled_once(call: Callable[[float], Any]) -> None:
    """Assert that the third call, with other values of the same shapes, compiles nothing."""
    call(1.0)
    call(1.1)
    before = programs.number
    call(1.2)
    assert programs.number == before


def largest_array(closed: Any) -> int:
    """The number of entries of the largest array that a jaxpr computes, or holds as a constant."""
    sizes = [np.size(constant) for constant in closed.consts]

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            sizes.extend(np.prod(v.aval.shape, dtype=int) for v in equation.outvars)
            for parameter in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
            ):
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    visit(inner)
                    sizes.extend(np.size(c) for c in getattr(parameter, "consts", ()))

    visit(closed.jaxpr)
    return max(sizes)
