"""Benchmarks as data: declared runs, their stored results, and the tables that pages show of them.

    make evidence                       # run what is missing, one unit at a time
    make evidence RUNS="sparse-small"   # these runs only
    make evidence MINUTES=10            # runs declared with ten minutes at most
    python benchmarks/evidence.py sparse-small --force --json elsewhere.json

A unit is one data set, split, seed and method of a run. Each is stored as soon as it is done, in
docs/evidence/results/NAME.json, so an interrupted run goes on with what is missing. A script takes
part by a function `record(data, split, seed, method, **options)` that returns a dict of numbers. A
page shows a run where it says `<!-- evidence: NAME by=data,method columns=rmse,nll -->`; mkdocs
replaces that by a table, since this file is one of its hooks. Only running needs more than Python's
standard library.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "evidence" / "results"
UNIT = ("data", "split", "seed", "method")
HEADS = {
    "data": "data",
    "split": "split",
    "seed": "seed",
    "method": "method",
    "rmse": "RMSE",
    "nll": "NLL",
    "seconds": "seconds",
    "steps": "steps",
    "epochs": "epochs of the solve",
    "hyperparameters_seconds": "seconds for hyperparameters",
    "solve_seconds": "seconds for the solve",
}
PEERS = ("gpytorch", "torch")
PACKAGES = ("numpyro_scalegp", "jax", "numpyro", "optax", "numpy", *PEERS)


@dataclasses.dataclass(frozen=True)
class Run:
    """A declared run: what is called for each unit, and what that needs.

    `minutes` is a rough figure for two cores at 400 GFLOP/s. `needs` has words of "data" (the
    folder in SCALEGP_DATA), "gpytorch" and "gpu". Methods named "gpytorch..." need the peer.
    """

    name: str
    script: str
    minutes: float
    data: tuple[str, ...]
    methods: tuple[str, ...]
    splits: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = (0,)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ("data",)

    def units(self) -> Iterator[dict[str, Any]]:
        """Each unit, in the order in which they run."""
        for unit in itertools.product(self.data, self.splits, self.seeds, self.methods):
            yield dict(zip(UNIT, unit, strict=True))


SMALL = ("yacht", "energy", "concrete", "airfoil", "wine", "skillcraft", "parkinsons")

RUNS = (
    Run(
        "time-against-error",
        "time_against_error",
        5,
        ("pol",),
        ("sparse", "gpytorch", "road-quick", "road"),
        needs=("data", "gpytorch"),
    ),
    Run(
        "sparse-small",
        "sparse",
        10,
        SMALL,
        ("adam", "natural", "gpytorch"),
        splits=(0, 1, 2),
        options={"steps": 500, "num_inducing": 128, "batch_size": 256},
        needs=("data", "gpytorch"),
    ),
    Run("road-small", "road", 10, SMALL, ("road",), splits=(0, 1, 2)),
    Run("road", "road", 25, ("pol", "elevators", "bike"), ("road",), splits=(0, 1, 2)),
)


def unit_of(record: dict[str, Any]) -> tuple:
    """What tells a record from the others of its run."""
    return tuple(record[name] for name in UNIT)


def complete(
    run: Run,
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
    records = {unit_of(record): record for record in stored["records"]}
    units = [unit for unit in run.units() if unit["method"] not in skip]
    missing = [unit for unit in units if force or tuple(unit.values()) not in records]
    if missing:
        stored["name"], stored["script"] = run.name, run.script
        stored["sessions"].append(describe())
    for unit in missing:
        load, start = os.getloadavg()[0], time.perf_counter()
        found = call(**unit, **run.options)
        took = {"duration": round(time.perf_counter() - start, 2), "load": round(load, 2)}
        session = len(stored["sessions"]) - 1
        records[tuple(unit.values())] = {**unit, **found, **took, "session": session}
        stored["records"] = list(records.values())
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(stored, indent=1) + "\n")
        partial.replace(path)
    return list(records.values())


def session(command: str) -> dict[str, Any]:
    """The machine and the versions: what a record must be read beside."""
    said = subprocess.run(
        [sys.executable, ROOT / ".ci" / "machine.py"], capture_output=True, text=True, check=True
    ).stdout
    rate = re.search(r"(\d+) GFLOP/s", said)
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        if util.find_spec(package) is not None:
            versions[package] = metadata.version(package)
    changed = git("status", "--porcelain", "--", ".", ":!docs/evidence/results")
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "gflops": int(rate[1]) if rate else None,
        "versions": versions,
        "commit": git("rev-parse", "HEAD"),
        "clean": not changed,
    }


def git(*arguments: str) -> str:
    """What git says."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def mean_and_error(values: list[float]) -> str:
    """A mean +- its standard error, rounded to two digits of the error; of one value, itself."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.4g}"
    squares = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(squares / (len(values) - 1) / len(values))
    if not math.isfinite(error):
        return "not finite"
    if error == 0:
        return f"{mean:.4g} ± 0"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def table(stored: dict[str, Any], by: list[str], columns: list[str]) -> str:
    """Stored records as a table: a row for each value of `by`, means over the other units."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for record in stored["records"]:
        groups.setdefault(tuple(record[name] for name in by), []).append(record)
    lines = ["| " + " | ".join(HEADS.get(name, name) for name in [*by, "runs", *columns]) + " |"]
    lines.append("|" + "---|" * (len(by) + 1 + len(columns)))
    for group, records in groups.items():
        cells = [*map(str, group), str(len(records))]
        for name in columns:
            values = [record[name] for record in records if name in record]
            cells.append(mean_and_error(values) if values else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", footer(stored)])


def footer(stored: dict[str, Any]) -> str:
    """The line under a table: command, machine, versions, commit."""
    used = sorted({record["session"] for record in stored["records"]})
    lines = []
    for one in (stored["sessions"][i] for i in used):
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        state = "" if one["clean"] else " with changes that were not committed"
        lines.append(
            f"`{one['command']}`, {one['date'][:10]}: {one['cpu']}, {one['cores']} cores, "
            f"{one['gflops']} GFLOP/s in a 4096-square float32 product; {versions}; "
            f"commit {one['commit'][:9]}{state}."
        )
    loads = [record["load"] for record in stored["records"]]
    if max(loads) > 1:
        lines.append(
            f"The machine was busy (load {min(loads):.1f} to {max(loads):.1f} before a unit), so "
            "seconds are upper limits."
        )
    return "<small>" + " ".join(lines) + "</small>"


MARKER = re.compile(r"<!-- evidence: (\S+)((?: \w+=\S+)*) -->")


def replace_markers(text: str, results: Path = RESULTS) -> str:
    """A page with each marker replaced by the table of its run."""

    def shown(match: re.Match) -> str:
        given = dict(part.split("=") for part in match[2].split())
        path = results / f"{match[1]}.json"
        if not path.exists():
            raise FileNotFoundError(f"no stored results of the run `{match[1]}`: `make evidence`")
        by, columns = given.get("by", "data,method"), given.get("columns", "rmse,nll")
        return table(json.loads(path.read_text()), by.split(","), columns.split(","))

    return MARKER.sub(shown, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The hook of mkdocs."""
    return replace_markers(markdown)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help="names of runs; all, if none is given")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of a run, at most")
    parser.add_argument("--force", action="store_true", help="run stored units again")
    parser.add_argument("--json", type=Path, help="file for the results of a single run")
    parser.add_argument("--list", action="store_true", help="say what is declared")
    given = parser.parse_args()
    names = {run.name: run for run in RUNS}
    if unknown := set(given.runs) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: no such run; there are {', '.join(names)}")
    chosen = [names[name] for name in given.runs] or list(RUNS)
    chosen = [run for run in chosen if run.minutes <= given.minutes]
    if given.json and len(chosen) != 1:
        parser.error("--json takes the results of one run")
    if given.list:
        for run in chosen:
            print(f"{run.name}: {len(list(run.units()))} units, {run.minutes:g} minutes")
        return
    peers = util.find_spec("gpytorch") is not None
    for run in chosen:
        if "data" in run.needs and "SCALEGP_DATA" not in os.environ:
            print(f"{run.name}: skipped, since SCALEGP_DATA is not set", flush=True)
            continue
        skip = () if peers else tuple(m for m in run.methods if m.startswith("gpytorch"))
        script = importlib.import_module(run.script)

        def call(script: Any = script, **unit: Any) -> dict[str, Any]:
            found = script.record(**unit)
            print(unit, {k: v for k, v in found.items() if k != "curve"}, flush=True)
            return found

        path = given.json or RESULTS / f"{run.name}.json"
        command = f"python benchmarks/evidence.py {run.name}"
        described = lambda command=command: session(command)  # noqa: E731
        complete(run, path, call, described, force=given.force, skip=skip)
        if hasattr(script, "draw"):
            script.draw(path)


if __name__ == "__main__":
    main()
