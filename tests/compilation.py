"""How a test asks for the optimizations that `conftest.py` leaves out, and for array sizes."""

import functools
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
