"""Sizes of arrays that follow the memory of the device."""

import functools

import jax


@functools.cache
def _memory(platform: str) -> int:
    """The bytes of memory of a device of this platform, or zero where it does not say."""
    statistics = jax.local_devices(backend=platform)[0].memory_stats() or {}
    return statistics.get("bytes_limit", 0)


def memory_share(share: float, least: int) -> int:
    """A share of the memory of an accelerator in bytes, at least `least`, which a CPU gets."""
    platform = jax.default_backend()
    return max(least, 0 if platform == "cpu" else int(share * _memory(platform)))
