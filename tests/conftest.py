"""Setup and fixtures for all tests."""

import functools
import gc
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

# Two processes whose thread pools both span all cores wait for each other: with several workers,
# each keeps to its own core. XLA sizes its pools by the affinity it finds.
worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if worker and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
# LAPACK's threads do so as well, and threads of several devices wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# On a GPU every worker would otherwise claim most of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Compilation is most of the time that tests take, and LLVM's optimization most of compilation.
flags = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # there is one core for each process
    "--xla_force_host_platform_device_count=8",  # for meshes; other arrays are on the first device
]
# JAX 0.10 can also disable the slow emitters; later versions end the process at an unknown flag.
if version("jaxlib").startswith("0.10."):
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

# The same examples in every run, and few: each new structure takes compilations.
hypothesis.settings.register_profile(
    "bounded", derandomize=True, max_examples=20, deadline=None, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
hypothesis.settings.load_profile("bounded")

# What was compiled once is loaded from here when another function, or the same one after the caches
# were cleared, is lowered to the same program. A folder for each process, since JAX may read what
# another process has half written.
compiled_programs = tempfile.mkdtemp(prefix="compiled_programs_")
jax.config.update("jax_compilation_cache_dir", compiled_programs)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# JAX makes a context for each program that it lowers, which takes 5 ms, a quarter of what a small
# program takes in all, and more than 1 MiB. Programs that are lowered in turn share one.
make_context = mlir.make_ir_context
shared_context = functools.cache(make_context)


def context_for_program() -> ir.Context:
    try:
        ir.Context.current  # noqa: B018
    except ValueError:
        return shared_context()
    return make_context()  # a program within the lowering of another


mlir.make_ir_context = context_for_program

# Shapes and types of signatures are checked at run time in the tests only. Functions within other
# functions are left out: their checks would be compiled at each call of the outer one, which took
# as long as tracing it. The hook must stand before the first import of the package.
check_types = jaxtyping.jaxtyped


def check_types_unless_local(*args: Any, **kwargs: Any) -> Any:
    """Replaces `jaxtyping.jaxtyped`, which the hook puts before each function and class."""
    if args:
        return check_types(*args, **kwargs)

    def decorate(annotated: Any) -> Any:
        is_local = "<locals>" in getattr(annotated, "__qualname__", "")
        return annotated if is_local else check_types(annotated, **kwargs)

    return decorate


jaxtyping.jaxtyped = check_types_unless_local
jaxtyping.install_import_hook("numpyro_scalegp", "beartype.beartype")

import numpyro_scalegp as sgp


def pytest_sessionfinish() -> None:
    """Remove the compiled programs of this process."""
    shutil.rmtree(compiled_programs, ignore_errors=True)


# What was imported stays: the garbage collector, which tracing calls often, need not look at it.
gc.freeze()
gc.set_threshold(50_000, 20, 20)

num_compiled = 0


def count_compiled(event: str, duration: float, **_: object) -> None:
    global num_compiled
    num_compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(count_compiled)


class MonkeyPatch(pytest.MonkeyPatch):  # type: ignore[misc]
    """A `monkeypatch` that clears compiled programs before and after its replacements."""

    def setattr(self, *args: Any, **kwargs: Any) -> None:
        super().setattr(*args, **kwargs)
        jax.clear_caches()

    def undo(self) -> None:
        replaced = bool(self._setattr)
        super().undo()
        if replaced:
            jax.clear_caches()


@pytest.fixture
def monkeypatch() -> Iterator[MonkeyPatch]:
    """Replaces pytest's fixture."""
    patch = MonkeyPatch()
    yield patch
    patch.undo()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip long tests after the time TEST_UNTIL, in seconds since 1970."""
    sgp.warn_in_jit(True)  # although compiled programs are stored
    until = float(os.environ.get("TEST_UNTIL", "inf"))
    long = {"slow", "monte_carlo", "one_interpreter"}
    if time.time() > until and long & {mark.name for mark in item.iter_markers()}:
        pytest.skip("a long test, left out since the time for tests is over")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free what was compiled, after each module and now and then within a long one.

    A process may only map so many regions of memory.
    """
    global num_compiled
    if num_compiled > 600 or nextitem is None or nextitem.path != item.path:
        jax.clear_caches()
        shared_context.cache_clear()
        num_compiled = 0


seconds_by_file: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Sum the durations of each file, since many fast tests can be slow together."""
    seconds_by_file[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the slowest files if the slowest tests are requested."""
    if terminalreporter.config.getoption("durations"):
        terminalreporter.section("slowest files")
        for name, seconds in seconds_by_file.most_common(30):
            terminalreporter.line(f"{seconds:7.1f} s  {name}")


@pytest.fixture
def x64() -> Iterator[None]:
    """Run the test with 64-bit types enabled."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["float32", pytest.param("float64", marks=pytest.mark.one_interpreter)])
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
