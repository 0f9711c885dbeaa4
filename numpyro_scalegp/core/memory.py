"""Whether dense matrices fit into memory, checked before they are made."""

import os
import warnings

import jax
import jax.numpy as jnp

# Matrices of n x n that a dense factorization has at once, as XLA plans it for large n.
_COPIES = 3.5


def warn_of_size(owner: str, n: int, dtype: jnp.dtype, remedy: str) -> None:
    """Warn if factorizing an n x n matrix takes more memory than there is.

    Shapes are known while a function is traced, so the warning comes before the matrix does.
    """
    planned, present = _COPIES * n * n * jnp.dtype(dtype).itemsize, _device_memory()
    if present is not None and planned > present:
        warnings.warn(
            f"`{owner}` factorizes a matrix of {n:,} rows, about {planned / 2**30:,.0f} GiB in "
            f"{jnp.dtype(dtype).name}, more than the {present / 2**30:,.0f} GiB of this device: "
            f"{remedy}.",
            RuntimeWarning,
            stacklevel=2,
        )


def _device_memory() -> int | None:
    """Bytes of memory of one of this process's devices, None where that is unknown."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # as on Windows
        return None
