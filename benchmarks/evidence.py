"""Benchmarks as data: runs what runs.py declares, and stores the results.

    make evidence                       # run what is missing, one unit at a time
    make evidence RUNS="sparse-small"   # these runs only
    make evidence MINUTES=10            # runs declared with ten minutes at most
    python benchmarks/evidence.py sparse-small --force --json elsewhere.json

A unit is one data set, split, seed and method of a run. Each is stored as soon as it is done, in
docs/evidence/results/NAME.json, so an interrupted run resumes with what is missing. A script takes
part by a function `record(data, split, seed, method, **options)` that returns a dict of numbers, or
of a mean with its standard error; a list of another length is for `draw(path)`, which makes the
script's figure from a file of results. tables.py writes stored results into the pages.
"""

import argparse
import functools
import importlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runs import Run

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "evidence" / "results"
PEERS = (
    "gpytorch",
    "torch",
    "tinygp",
    "celerite2",
    "gpboost",
    "botorch",
    "jax2onnx",
    "onnxruntime",
)
PACKAGES = ("numpyro_scalegp", "jax", "numpyro", "optax", "numpy", *PEERS)


def complete(
    run: "Run",
    path: Path,
    call: Callable[..., dict[str, Any]],
    describe: Callable[[], dict[str, Any]],
    *,
    force: bool = False,
    skip: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Run the missing units of a run, store each as it ends, and return all stored records.

    Args:
        run: The declared run.
        path: Its file of results, which need not exist.
        call: Makes the record of a unit, from its parts and the options of the run.
        describe: The session of the new records: command, machine, versions, commit. It is called
            only if a unit is missing.
        force: Whether stored units are run again; the old records stay until a new one is there.
        skip: Methods that this machine cannot run.
    """
    stored = json.loads(path.read_text()) if path.exists() else {"sessions": [], "records": []}
    records = {run.key(record): record for record in stored["records"]}
    units = [unit for unit in run.units() if unit["method"] not in skip]
    missing = [unit for unit in units if force or tuple(unit.values()) not in records]
    if missing:
        stored["name"], stored["script"] = run.name, run.script
        if run.peers:
            stored["peers"] = list(run.peers)
        stored["sessions"].append(describe())
    for unit in missing:
        load, start = os.getloadavg()[0], time.perf_counter()
        results = call(**unit, **run.options)
        took = {"duration": round(time.perf_counter() - start, 2), "load": round(load, 2)}
        session = len(stored["sessions"]) - 1
        records[tuple(unit.values())] = {**unit, **results, **took, "session": session}
        stored["records"] = list(records.values())
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(stored, indent=1) + "\n")
        partial.replace(path)
    return list(records.values())


def session(command: str, device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions: what a record must be read beside."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        if util.find_spec(package) is not None:
            versions[package] = metadata.version(package)
    changed = git("status", "--porcelain", "--", ".", ":!docs/evidence/results", ":!docs/figures")
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        **(gpu() if device == "gpu" else {"gflops": cpu_rate()}),
        "versions": versions,
        "commit": git("rev-parse", "HEAD"),
        "clean": not changed,
    }


def backend() -> str:
    """The kind of device that JAX has here."""
    import jax

    return jax.default_backend()


def cpu_rate() -> int | None:
    """GFLOP/s in a float32 product of 4096-square matrices."""
    output = subprocess.run(
        [sys.executable, ROOT / ".ci" / "machine.py"], capture_output=True, text=True, check=True
    ).stdout
    rate = re.search(r"(\d+) GFLOP/s", output)
    return int(rate[1]) if rate else None


def gpu() -> dict[str, Any]:
    """The GPU's name, and GFLOP/s in a float32 product of 8192-square matrices without TF32."""
    import jax
    import jax.numpy as jnp

    A = jax.random.normal(jax.random.key(0), (8192, 8192))
    multiply = jax.jit(lambda A: jnp.matmul(A, A, precision="highest"))
    times = []
    for _ in range(6):
        start = time.perf_counter()
        multiply(A).block_until_ready()
        times.append(time.perf_counter() - start)
    rate = round(2e-9 * 8192**3 / min(times[1:]))
    return {"gpu": jax.devices()[0].device_kind, "gflops": rate}


def git(*arguments: str) -> str:
    """The output of a git command."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def main() -> None:
    """Run what is missing."""
    from runs import RUNS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help="names of runs; all, if none is given")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of a run, at most")
    parser.add_argument("--force", action="store_true", help="run stored units again")
    parser.add_argument("--json", type=Path, help="file for the results of a single run")
    parser.add_argument("--list", action="store_true", help="say what is declared")
    options = parser.parse_args()
    names = {run.name: run for run in RUNS}
    if unknown := set(options.runs) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: no such run; there are {', '.join(names)}")
    chosen = [names[name] for name in options.runs] or list(RUNS)
    chosen = [run for run in chosen if run.minutes <= options.minutes]
    if options.json and len(chosen) != 1:
        parser.error("--json takes the results of one run")
    if options.list:
        for run in chosen:
            print(f"{run.name}: {len(list(run.units()))} units, {run.minutes:g} minutes")
        return
    absent = [name for name in PEERS if util.find_spec(name) is None]
    for run in chosen:
        if run.device != (device := backend()):
            print(f"{run.name}: skipped, since it is for a {run.device} and here is a {device}")
            continue
        if not {"made up", "flights"}.issuperset(run.data) and "SCALEGP_DATA" not in os.environ:
            print(f"{run.name}: skipped, since SCALEGP_DATA is not set", flush=True)
            continue
        if needed := ", ".join(name for name in run.peers if name in absent):
            print(f"{run.name}: skipped, since {needed} is not installed", flush=True)
            continue
        skip = tuple(m for m in run.methods if "gpytorch" in m and "gpytorch" in absent)
        script = importlib.import_module(run.script)
        record = getattr(script, run.function)

        def call(record: Callable = record, **unit: Any) -> dict[str, Any]:
            results = record(**unit)
            shown = {name: value for name, value in results.items() if not isinstance(value, list)}
            print(unit, shown, flush=True)
            return results

        path = options.json or RESULTS / f"{run.name}.json"
        command = f"python benchmarks/evidence.py {run.name}"
        if flags := os.environ.get("XLA_FLAGS"):
            command = f'XLA_FLAGS="{flags}" {command}'
        if "JAX_COMPILATION_CACHE_DIR" in os.environ:
            command = f"JAX_COMPILATION_CACHE_DIR=... {command}"
        described = functools.partial(session, command, run.device)
        complete(run, path, call, described, force=options.force, skip=skip)
        if hasattr(script, "draw"):
            import matplotlib

            matplotlib.rc_file(ROOT / "docs" / "figures" / "matplotlibrc")
            script.draw(path)


if __name__ == "__main__":
    main()
