"""Sizes of arrays that follow the memory of the device."""

import jax
import jax.numpy as jnp
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.core import chunks, device
from numpyro_scalegp.linear.preconditioners import _default_rank

GIB = 2**30


@pytest.fixture
def accelerator(monkeypatch):
    """Sets the memory that the default device says it has."""

    def set_memory(size: int) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(device, "_memory", lambda platform: size)

    return set_memory


def operator(n: int) -> sgp.solvers.KernelOperator:
    X = jnp.zeros((n, 1), jnp.float32)
    return sgp.solvers.KernelOperator.from_checked(sgp.kernels.RBF(1.0), X, jnp.array(0.1))


def test_a_cpu_has_fixed_sizes():
    assert device.memory_share(0.5, 123) == 123
    assert operator(10).memory_budget == 2**28
    assert chunks.rows_per_chunk(2**10) == 2**14


def test_memory_of_a_device_that_does_not_say():
    assert device._memory("cpu") == 0


@pytest.mark.parametrize(("gib", "rows"), [(104, 17_052), (12, 5_792), (1, 4_096)])
def test_blocks_grow_with_the_memory(gib, rows, accelerator):
    accelerator(gib * GIB)
    H = operator(1_000_000)
    # Four copies in float32, in equal shares that are a multiple of the width of a tile.
    assert 16 * H.block_size**2 <= 1.05 * max(gib * GIB // 24, 2**28)
    assert 0.9 * rows < H.block_size <= rows + 128
    assert H.block_size % 128 == 0


def test_few_rows_are_one_block(accelerator):
    accelerator(104 * GIB)
    assert operator(1_001).block_size == 1_001


def test_ranks_and_chunks_grow_with_the_memory(accelerator):
    assert _default_rank(operator(1_000_000)) == 67
    before = chunks.rows_per_chunk(100)
    accelerator(104 * GIB)
    assert _default_rank(operator(1_000_000)) == 1744
    assert _default_rank(operator(10_000)) == 1_000
    assert 4 * before < chunks.rows_per_chunk(100) <= 104 * GIB // 1600
