"""How a test asks for the compiler's optimisations, which `conftest.py` leaves out."""

import functools

import jax

# For loops of thousands of draws, which take longer than their compilation.
optimised = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    },
)
