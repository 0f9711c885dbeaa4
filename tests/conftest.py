"""Set-up and fixtures that every test can use."""

import os
from collections.abc import Iterator

# Two processes whose thread pools both span all cores wait for each other: with several workers,
# each keeps to a core of its own. XLA sizes its pools by the affinity it finds.
worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if worker and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
# On a GPU every worker would otherwise claim most of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

# Shapes and types of public signatures are checked at run time in the tests only. The hook must
# stand before the first import of the package.
jaxtyping.install_import_hook("numpyro_scalegp", "beartype.beartype")


@pytest.fixture
def x64() -> Iterator[None]:
    """Run the test with 64-bit types enabled."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[jnp.dtype]:
    """Run the test once per floating-point type; the default type follows."""
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch the run-time checks off, so that bad shapes reach the package's own error messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
