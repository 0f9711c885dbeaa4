"""Benchmarks as data: what runs.py declares, its stored results, and tables of them for the pages.

    make evidence                       # run what is missing, one unit at a time
    make evidence RUNS="sparse-small"   # these runs only
    make evidence MINUTES=10            # runs declared with ten minutes at most
    python benchmarks/evidence.py sparse-small --force --json elsewhere.json

A unit is one data set, split, seed and method of a run. Each is stored as soon as it is done, in
docs/evidence/results/NAME.json, so an interrupted run goes on with what is missing. A script takes
part by a function `record(data, split, seed, method, **options)` that returns a dict of numbers, or
of a mean with its standard error; a list of another length is for `draw(path)`, which makes the
script's figure from a file of results. A page shows runs where it says
`<!-- evidence: NAME,OTHER by=data,method columns=rmse,nll -->`, or, for a cell for each method,
`<!-- evidence: NAME by=data across=method columns=epochs -->`; `data=A,B` shows these sets alone.
mkdocs replaces that by a table,
since this file is one of its hooks. Only running needs more than Python's standard library.
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
HEADS = {
    "rmse": "RMSE",
    "nll": "NLL",
    "nlml": "NLML a row",
    "solve_epochs": "epochs of the solve",
    "hyperparameters_seconds": "seconds for hyperparameters",
    "solve_seconds": "seconds for the solve",
    "residual": "residual of y",
    "probe_residual": "of the probes, mean",
    "noise_variance": "noise variance",
    "best_epoch": "best epoch",
    "best_nlml": "its NLML a row",
    "best_rmse": "its RMSE",
    "sparse_rmse": "RMSE before",
    "sparse_nll": "NLL before",
    "sparse_seconds": "seconds before",
    "ratio": "lengthscale / exact",
    "error": "error of log p(y) a row",
    "expected_error": "expected error of log p(y) a row",
    "off": "largest difference of a mean, in exact deviations",
    "gradient_error": "of its gradient",
    "memory": "MiB at once",
    "most_memory": "GiB of the process, at most",
    "compile_seconds": "seconds to compile",
    "value": "log p(y) a row",
    "exact": "by Cholesky",
    "off_cholesky": "and by how much that is off",
    "half_seconds": "seconds to half of the batches",
    "half_nmse": "nMSE there",
    "nmse": "nMSE",
    "nanoseconds_a_pair": "ns for each n²",
    "bare_ratio": "of that with K in memory",
    "quadratic_ratio": "quadratic gradient, products",
    "bilinear_ratio": "bilinear gradient, products",
    "milliseconds": "ms a step",
    **{f"1e{power}": f"ms at 10^{power}" for power in range(4, 8)},
    "search_seconds": "seconds to find neighbors",
    "predict_seconds": "seconds to predict",
    "mae": "MAE",
    "crps": "CRPS",
    "interval": "interval score",
    "autodiff_seconds": "seconds of autodiff",
    "autodiff_ratio": "autodiff / ours",
    "value_seconds": "seconds of the value",
    "factor_seconds": "seconds of the factorization",
    "difference": "gradients differ by",
    "gradient": "ms a gradient",
    "exact_gradient": "ms of an exact GP's",
    "exact_ratio": "ours / exact",
    "f": "the function in July",
    "seconds_each": "seconds for each",
    "minutes": "RMSE, minutes",
    "log_density": "log density",
    "within_half": "in the 50 % interval",
    "within_most": "in the 90 % interval",
    "mebibytes": "MiB of the file",
    "in_memory": "1,000 rows a second in memory",
    "streamed_ratio": "streamed / in memory",
    "lower": "lower quartile",
    "upper": "upper quartile",
    "waited": "ms a step waits, mean",
    "waited_most": "at most",
    "resident": "MiB of memory",
    "stream_only": "1,000 rows a second without training",
    "imports": "seconds of imports",
    "init": "of `SVI.init`",
    "init_programs": "its programs",
    "step": "of the first step, compiled",
    "step_programs": "programs of the step",
    "first_step": "seconds to the first step",
    "posterior": "to a posterior",
    "floor": "ms of its products alone",
    "gradients": "leapfrog steps",
    "least_effective": "least effective size",
    "most_effective": "largest",
    "end": "log p(y) at the end",
    "below": "below exact, %",
    "plain_iterations": "of plain CG",
    "plain_seconds": "seconds of plain CG",
    "plain_ratio": "an iteration: roulette / plain",
    "ignored": "mean, spread ignored",
    "batches": "mean by batches",
    "dense_gradient": "ms by the dense matrix",
    "dense_ratio": "dense / ours",
    "factorization": "ms of a batched Cholesky",
    "batched_ratio": "ours / that",
    "loop": "ms of a loop",
    "loop_ratio": "loop / ours",
    "product_work": "operations of a product",
    "gradient_work": "of a gradient",
    "sweep_work": "of a sweep",
    "product_sent": "sent for a product, multiples of n",
    "gradient_sent": "for a gradient",
    "sweep_sent": "for a sweep",
    "product_memory": "MiB, product",
    "product_formula": "/ formula",
    "cg_memory": "MiB, conjugate gradients",
    "cg_formula": "/ formula",
    "ap_memory": "MiB, alternating projections",
    "ap_formula": "/ formula",
    "whole": "largest whole array, multiples of n",
    "step_work": "operations of a device",
    "megabytes_sent": "MB that each sends",
    "state_alone": "MiB of state on one",
    "state_each": "on each of eight",
    "loss_difference": "losses differ by, relative",
    "gathered_seconds": "gathered",
    "gathered_ratio": "gathered / symmetric",
    "processes_seconds": "two processes",
    "processes_ratio": "two processes / one",
    "unbiased_seconds": "seconds without bias",
    "least_ratio": "least ratio of deviations",
    "most_ratio": "largest",
    "variance_ratio": "of the variance",
    "noise_in_whitened": "variance a coordinate",
    "divergent": "divergent, %",
    "matters_low": "column that matters, 5 %",
    "matters_median": "50 %",
    "matters_high": "95 %",
    "matters_draws": "effective draws",
    "matters_rhat": "R-hat",
    "other_low": "column that does not, 5 %",
    "other_median": "50 %",
    "other_high": "95 %",
    "other_draws": "effective draws",
    "log_determinant": "log\\|H\\|",
    "quadratic_form": "y'H⁻¹y",
}
PEERS = ("gpytorch", "torch")
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
    said = subprocess.run(
        [sys.executable, ROOT / ".ci" / "machine.py"], capture_output=True, text=True, check=True
    ).stdout
    rate = re.search(r"(\d+) GFLOP/s", said)
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
    """What git says."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def rounded(mean: float, error: float | None) -> str:
    """A mean +- its standard error, rounded to two digits of the error where there is one."""
    if error is not None and not math.isfinite(error):
        return "not finite"
    if error is None or error <= 1e-9 * abs(mean):
        return f"{mean:,.0f}" if 1e4 <= abs(mean) < 1e9 else f"{mean:.4g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{round(mean, digits) + 0.0:.{digits}f}\u00a0±\u00a0{error:.{digits}f}"  # on one line


def mean_and_error(values: list[Any]) -> str:
    """The mean of numbers with its standard error; of one value, itself, or the pair that it is."""
    if len(values) == 1:
        pair = values[0] if isinstance(values[0], list) else (values[0], None)
        return rounded(*pair)
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return rounded(mean, math.sqrt(squares / (len(values) - 1) / len(values)))


def table(
    stored: list[dict[str, Any]], by: list[str], columns: list[str], across: str | None = None
) -> str:
    """Stored runs as a table: a row for each value of `by`, means over the other units.

    Rows stand together by the first of `by`, in the order in which values come up. The number of
    runs in a mean is shown where it is not one throughout. With `across`, there is one column, and
    a cell for each value of `across`.
    """
    records = [{"run": run["name"], **record} for run in stored for record in run["records"]]
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in by), []).append(record)
    places = [
        {value: i for i, value in enumerate(dict.fromkeys(part))}
        for part in zip(*groups, strict=True)
    ]
    rows = sorted(groups, key=lambda group: [one[v] for one, v in zip(places, group, strict=True)])
    counted = across is None and any(len(some) > 1 for some in groups.values())
    if across is None:
        heads = [HEADS.get(name, name.replace("_", " ")) for name in columns]
        heads = ["runs"] * counted + heads
    else:
        (column,) = columns
        heads = list(dict.fromkeys(str(record[across]) for record in records))
    lines = ["| " + " | ".join([*by, *heads]) + " |", "|" + "---|" * (len(by) + len(heads))]
    for group in rows:
        some = groups[group]
        if across is None:
            cells = [str(len(some))] * counted
            found = [[one[name] for one in some if name in one] for name in columns]
        else:
            cells = []
            found = [[one[column] for one in some if str(one[across]) == head] for head in heads]
        cells += [mean_and_error(values) if values else "" for values in found]
        lines.append("| " + " | ".join([*map(str, group), *cells]) + " |")
    timed = any(re.search(r"seconds|\bms\b", name) for name in heads)
    return "\n".join([*lines, "", *(footer(one, timed) for one in stored)])


def between(values: list[Any]) -> str:
    """The range of some values."""
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def footer(stored: dict[str, Any], timed: bool) -> str:
    """The line under a table: command, machine, versions, commit, and what disturbed its times."""
    used = [stored["sessions"][i] for i in sorted({one["session"] for one in stored["records"]})]
    alike: dict[tuple, list[dict[str, Any]]] = {}
    for one in used:
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        key = one["command"], one.get("gpu"), one["cpu"], one["cores"], versions
        alike.setdefault(key, []).append(one)
    lines = []
    for (command, gpu, cpu, cores, versions), some in alike.items():
        dates = between([one["date"][:10] for one in some])
        rates = between([one["gflops"] for one in some])
        commits = dict.fromkeys(
            one["commit"][:9] + ("" if one["clean"] else " with changes that were not committed")
            for one in some
        )
        machine, side = (f"{gpu}, {cpu}", 8192) if gpu else (cpu, 4096)
        lines.append(
            f"`{command}`, {dates}: {machine}, {cores} cores, {rates} GFLOP/s in a {side}-square "
            f"float32 product; {versions}; commit {', '.join(commits)}."
        )
    # The units before have a load of the number of cores; of one run it was lost.
    loads = [record.get("load", 0.0) for record in stored["records"]]
    if timed and max(loads) > 1.1 * max(one["cores"] for one in stored["sessions"]):
        lines.append(
            f"Other programs ran beside it (load {min(loads):.1f} to {max(loads):.1f} before a "
            "unit), so seconds are upper limits."
        )
    return "<small>" + " ".join(lines) + "</small>"


MARKER = re.compile(r"<!-- evidence: (\S+)((?: \w+=\S+)*) -->")


def names_of(match: re.Match) -> list[str]:
    """The runs that a marker names."""
    return match[1].split(",")


def replace_markers(text: str, results: Path = RESULTS) -> str:
    """A page with each marker replaced by the table of its run."""

    def shown(match: re.Match) -> str:
        given = dict(part.split("=") for part in match[2].split())
        stored = []
        for name in names_of(match):
            path = results / f"{name}.json"
            if not path.exists():
                raise FileNotFoundError(f"no stored results of the run `{name}`: `make evidence`")
            stored.append(json.loads(path.read_text()))
            if wanted := given.get("data"):
                kept = [r for r in stored[-1]["records"] if r["data"] in wanted.split(",")]
                stored[-1]["records"] = kept
        by, columns = given.get("by", "data,method"), given.get("columns", "rmse,nll")
        return table(stored, by.split(","), columns.split(","), given.get("across"))

    return MARKER.sub(shown, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The hook of mkdocs."""
    return replace_markers(markdown)


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
        if run.device != (found := backend()):
            print(f"{run.name}: skipped, since it is for a {run.device} and here is a {found}")
            continue
        if not {"made up", "flights"}.issuperset(run.data) and "SCALEGP_DATA" not in os.environ:
            print(f"{run.name}: skipped, since SCALEGP_DATA is not set", flush=True)
            continue
        skip = () if peers else tuple(one for one in run.methods if "gpytorch" in one)
        script = importlib.import_module(run.script)

        record = getattr(script, run.function)

        def call(record: Callable = record, **unit: Any) -> dict[str, Any]:
            found = record(**unit)
            shown = {name: value for name, value in found.items() if not isinstance(value, list)}
            print(unit, shown, flush=True)
            return found

        path = given.json or RESULTS / f"{run.name}.json"
        command = f"python benchmarks/evidence.py {run.name}"
        if flags := os.environ.get("XLA_FLAGS"):
            command = f'XLA_FLAGS="{flags}" {command}'
        described = functools.partial(session, command, run.device)
        complete(run, path, call, described, force=given.force, skip=skip)
        if hasattr(script, "draw"):
            import matplotlib

            matplotlib.rc_file(ROOT / "docs" / "figures" / "matplotlibrc")
            script.draw(path)


if __name__ == "__main__":
    main()
