"""Set-up and fixtures that every test can use."""

import os
from collections.abc import Iterator
from importlib.metadata import version

# Two processes whose thread pools both span all cores wait for each other: with several workers,
# each keeps to a core of its own. XLA sizes its pools by the affinity it finds.
worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if worker and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
# On a GPU every worker would otherwise claim most of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Compilation is most of the time that tests take, and LLVM's optimisation most of compilation.
flags = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # there is one core for each process
]
# The emitters that take long, too, can still be done without on JAX 0.10; newer lines end the
# process at a flag that they do not know.
if version("jaxlib").startswith("0.10."):
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import pytest

# The same examples in every run, and few: each new structure takes compilations.
hypothesis.settings.register_profile(
    "bounded", derandomize=True, max_examples=20, deadline=None, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
hypothesis.settings.load_profile("bounded")

# Shapes and types of public signatures are checked at run time in the tests only. The hook must
# stand before the first import of the package.
jaxtyping.install_import_hook("numpyro_scalegp", "beartype.beartype")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled() -> Iterator[None]:
    """Free what a module has compiled: a process may only map so many regions of memory."""
    yield
    jax.clear_caches()


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
