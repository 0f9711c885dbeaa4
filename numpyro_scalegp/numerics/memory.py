"""A warning, before they are allocated, for dense matrices that do not fit into memory."""

import os
import warnings

import jax
import jax.numpy as jnp

# Number of n x n matrices that a dense factorization allocates at once, as XLA plans for large n.
_COPIES = 3.5


def warn_of_size(owner: str, n: int, dtype: jnp.dtype, remedy: str) -> None:
    """Warn if factorizing an n x n matrix takes more memory than the device has.

    Shapes are known while a function is traced, so the warning precedes the allocation.
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
    """Bytes of memory of one of this process's devices; None if unknown."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # as on Windows
        return None
