"""Benchmarks as data: declared runs, their stored results, and the tables that pages show of them.

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
import dataclasses
import functools
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
    "rmse": "RMSE",
    "nll": "NLL",
    "nlml": "NLML a row",
    "solve_epochs": "epochs of the solve",
    "hyperparameters_seconds": "seconds for hyperparameters",
    "solve_seconds": "seconds for the solve",
    "residual": "residual of y",
    "probe_residual": "of the probes, mean",
    "noise_variance": "noise variance",
    "above": "steps above tolerance",
    "best_epoch": "best epoch",
    "best_nlml": "its NLML a row",
    "best_rmse": "its RMSE",
    "best_nll": "its NLL",
    "sparse_rmse": "RMSE before",
    "sparse_nll": "NLL before",
    "sparse_seconds": "seconds before",
    "ratio": "lengthscale / exact",
    "error": "error of log p(y) a row",
    "expected_error": "expected error of log p(y) a row",
    "off": "largest difference of a mean, in exact deviations",
    "gradient_error": "of its gradient",
    "memory": "MiB at once",
    "nanoseconds_a_pair": "ns for each n²",
    "bare_ratio": "of that with K in memory",
    "quadratic_ratio": "quadratic gradient, products",
    "bilinear_ratio": "bilinear gradient, products",
    "milliseconds": "ms a step",
    "growth": "largest over smallest",
    **{f"1e{power}": f"ms at 10^{power}" for power in range(4, 8)},
    "search_seconds": "seconds to find neighbors",
    "predict_seconds": "seconds to predict",
    "mae": "MAE",
    "crps": "CRPS",
    "interval": "interval score",
    "log_determinant": "log\\|H\\|",
    "quadratic_form": "y'H⁻¹y",
}
PEERS = ("gpytorch", "torch")
PACKAGES = ("numpyro_scalegp", "jax", "numpyro", "optax", "numpy", *PEERS)


@dataclasses.dataclass(frozen=True)
class Run:
    """A declared run: what is called for each unit, and what that needs.

    `minutes` is a rough figure for two cores at 400 GFLOP/s, or for the GPU that a run is declared
    for. Runs whose data are not "made up" need the folder in SCALEGP_DATA. Methods whose names have
    "gpytorch" need the peer.
    """

    name: str
    script: str
    minutes: float
    data: tuple[str, ...]
    methods: tuple[str, ...]
    splits: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = (0,)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    function: str = "record"
    device: str = "cpu"

    def on_gpu(self, minutes: float, **changes: Any) -> "Run":
        """The same run on a GPU, under a name of its own."""
        changes = {"name": f"{self.name}-gpu", "minutes": minutes, "device": "gpu", **changes}
        return dataclasses.replace(self, **changes)

    def units(self) -> Iterator[dict[str, Any]]:
        """Each unit, in the order in which they run."""
        for unit in itertools.product(self.data, self.splits, self.seeds, self.methods):
            yield dict(zip(UNIT, unit, strict=True))


SMALL = ("yacht", "energy", "concrete", "airfoil", "wine", "skillcraft", "parkinsons")
LARGE = ("pol", "elevators", "bike")
LARGER = ("kin40k", "keggdirected")
SPLITS = (0, 1, 2)
SPARSE = ("adam", "natural", "gpytorch")
STARTS = tuple(
    f"{kind}, {start}"
    for kind in ("standard", "pathwise")
    for start in ("cold", "warm", "extrapolated")
)
SOLVERS = (
    "CG, greedy 100",
    "CG, random 500",
    "CG, random, default rank",
    "CG, Nystrom 500",
    "AP 1000",
    "SGD",
    "SDD",
    "ADASAP, rank 100",
    "ADASAP",
    "AutoSolver (default)",
)
BIASES = (
    *(f"CG {number}" for number in (3, 4, 6, 8, 10, 12)),
    *(f"RR-CG {number}" for number in (4, 6, 8)),
    *(f"RFF {number}" for number in (20, 40, 80, 160)),
    *(f"SS-RFF {number}" for number in (20, 40, 80)),
)
LENGTHSCALES = (
    *(f"CG {number}" for number in (3, 4, 5, 6)),
    *(f"RR-CG {number}" for number in (6, 8)),
    *(f"RFF {number}" for number in (20, 40, 80, 160)),
)
PRODUCTS = tuple(f"{rows} rows" for rows in ("15,000", "50,000", "100,000"))
MEAN_POINTS = tuple(f"{1000 * 2**power:,} mean points" for power in range(5))
NEIGHBORS = (
    *(f"{number} neighbors" for number in (5, 10, 20, 30, 60)),
    *(f"{number} neighbors, without groups" for number in (30, 40)),
)
ERRORS = ("exact gradients", "Russian roulette", "conjugate gradients, cut")
TREATMENTS = ("variational", "compositional", "compositional-0.9", "mini-batch", "sparse")


def starts(name: str, minutes: float, **options: Any) -> Run:
    """A run of `record_epochs`: what warm starts save of a solver's epochs."""
    return Run(
        name, "iterative", minutes, ("pol", "elevators"), STARTS, SPLITS, options=options,
        function="record_epochs",
    )  # fmt: skip


ON_CPU = (
    Run(
        "time-against-error",
        "time_against_error",
        5,
        ("pol",),
        ("sparse", "gpytorch", "road-quick", "road"),
    ),
    Run("gpytorch-svgp", "sparse", 10, (*LARGE, *LARGER), ("gpytorch",), SPLITS),
    Run("road", "road", 20, LARGE, ("road-quick", "road"), SPLITS),
    Run("road-large", "road", 30, LARGER, ("road-quick", "road"), SPLITS),
    Run("road-small", "road", 10, SMALL, ("road",), SPLITS),
    Run("sparse", "sparse", 10, LARGE, SPARSE, SPLITS, options={"epochs": 30}),
    Run("sparse-large", "sparse", 10, LARGER, SPARSE, SPLITS, options={"epochs": 15}),
    Run(
        "sparse-small",
        "sparse",
        10,
        SMALL,
        SPARSE,
        SPLITS,
        options={"steps": 500, "num_inducing": 128, "batch_size": 256},
    ),
    Run("product", "iterative", 5, ("made up",), PRODUCTS, function="record_product"),
    Run("solvers", "iterative", 20, LARGE, SOLVERS, SPLITS, function="record_solve"),
    starts("warm-starts", 10, block_size=125),
    starts("warm-starts-sgd", 6, solver="sgd", batch_size=250),
    starts("warm-starts-cg", 3, solver="cg", rank=0, group_size=1),
    starts("warm-starts-block-cg", 2, solver="cg"),
    Run(
        "pathwise-training", "iterative", 15, LARGE, ("pathwise, warm",),
        function="record_training",
    ),
    Run(
        "truncation-bias", "truncation", 2, ("made up",), BIASES, function="record_bias",
        options={"draws": 600},
    ),
    Run(
        "truncation-lengthscale", "truncation", 5, ("made up",), LENGTHSCALES,
        function="record_lengthscale", options={"draws": 40_000},
    ),
    Run(
        "truncation-errors", "truncation", 8, (*LARGE, "kin40k"), ERRORS, SPLITS,
        function="record_errors",
    ),
    Run("finite-rkhs", "feature_space", 15, (*LARGE[1:], "kin40k"), TREATMENTS, seeds=(0, 1, 2)),
    Run("finite-rkhs-minimax", "feature_space", 4, (*LARGE[1:], "kin40k"), ("minimax",)),
    Run("many-features", "quadruply_stochastic", 10, LARGE, ("10,000 features",), SPLITS),
    Run(
        "many-features-kin40k", "quadruply_stochastic", 5, ("kin40k",), ("10,000 features",),
        SPLITS, options={"steps": 5000, "learn_kernel": False, "learning_rate": 0.05,
                         "dense_rate": 1e-3, "start_rows": 0},
    ),
    Run(
        "many-features-sets", "quadruply_stochastic", 10, ("kin40k",),
        ("100,000 features, 10,000 a step",), SPLITS,
        options={"num_features": 100_000, "steps": 6000, "learn_kernel": False,
                 "learning_rate": 0.01, "dense_rate": 0.0},
    ),
    Run(
        "features-cost", "quadruply_stochastic", 5, ("kin40k",), ("features", "rows"),
        function="record_cost",
    ),
    Run(
        "decoupled-steps", "decoupled", 2, ("made up",), MEAN_POINTS, function="record_steps",
    ),
    Run("decoupled", "decoupled", 8, LARGE, ("hybrid, 4,000 more points",), SPLITS),
    Run(
        "hilbert-space", "hilbert_space", 5, ("made up",),
        ("HilbertSpace", "numpyro.contrib.hsgp"), seeds=(0, 1, 2, 3),
    ),
    Run(
        "neighbors-density", "nearest_neighbors", 3, ("made up",), NEIGHBORS, seeds=(0, 1, 2),
        function="record_density",
    ),
    Run(
        "neighbors-density-quiet", "nearest_neighbors", 3, ("made up",), NEIGHBORS,
        seeds=(0, 1, 2), function="record_density", options={"noise": 0.01},
    ),
    Run(
        "neighbors-sampling", "nearest_neighbors", 10, ("made up",), ("30 neighbors",),
        seeds=(0, 1, 2), function="record_sampling",
    ),
    Run(
        "neighbors-cost", "nearest_neighbors", 3, ("made up",),
        ("10,000 rows", "100,000 rows", "1,000,000 rows"), function="record_cost",
    ),
    Run(
        "neighbors-field", "nearest_neighbors", 10, ("made up",), ("Vecchia 30", "sparse 512"),
        seeds=(0, 1, 2), function="record_field",
    ),
    Run(
        "neighbors-counts", "nearest_neighbors", 10, ("made up",), ("neighbors 10", "sparse 512"),
        seeds=(0, 1, 2), function="record_counts",
    ),
    Run(
        "satellite", "nearest_neighbors", 10, ("satellite",),
        ("Vecchia 30", "Vecchia 60", "sparse 512"), function="record_satellite",
    ),
    Run(
        "decoupled-kin40k", "decoupled", 4, ("kin40k",), ("hybrid, 6,000 more points",), SPLITS,
        options={"steps": 1200, "num_residual": 6000},
    ),
)  # fmt: skip
NAMED = {run.name: run for run in ON_CPU}
RUNS = (
    *ON_CPU,
    NAMED["product"].on_gpu(0.5, methods=(*PRODUCTS, "300,000 rows", "1,000,000 rows")),
    NAMED["neighbors-cost"].on_gpu(1),
    NAMED["features-cost"].on_gpu(1),
    NAMED["decoupled-steps"].on_gpu(1),
    NAMED["road"].on_gpu(5, data=(*LARGER, *LARGE), methods=("road",)),
    NAMED["sparse-large"].on_gpu(2, data=("kin40k",)),
    NAMED["decoupled-kin40k"].on_gpu(1),
    NAMED["many-features-kin40k"].on_gpu(1),
    NAMED["many-features-sets"].on_gpu(1),
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
        return f"{mean:.4g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{round(mean, digits) + 0.0:.{digits}f} ± {error:.{digits}f}"


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

    Rows stand together by the first of `by`, in the order in which values come up. With `across`,
    there is one column, and a cell for each value of `across`.
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
    if across is None:
        heads = ["runs", *(HEADS.get(name, name.replace("_", " ")) for name in columns)]
    else:
        (column,) = columns
        heads = list(dict.fromkeys(str(record[across]) for record in records))
    lines = ["| " + " | ".join([*by, *heads]) + " |", "|" + "---|" * (len(by) + len(heads))]
    for group in rows:
        some = groups[group]
        if across is None:
            cells = [str(len(some))]
            found = [[one[name] for one in some if name in one] for name in columns]
        else:
            cells = []
            found = [[one[column] for one in some if str(one[across]) == head] for head in heads]
        cells += [mean_and_error(values) if values else "" for values in found]
        lines.append("| " + " | ".join([*map(str, group), *cells]) + " |")
    return "\n".join([*lines, "", *map(footer, stored)])


def between(values: list[Any]) -> str:
    """The range of some values."""
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def footer(stored: dict[str, Any]) -> str:
    """The line under a table: command, machine, versions, commit."""
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
    # The units before have a load of the number of cores.
    loads = [record.get("load", 0.0) for record in stored["records"]]
    if max(loads) > 1.1 * max(one["cores"] for one in stored["sessions"]):
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
        if run.data != ("made up",) and "SCALEGP_DATA" not in os.environ:
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
        described = functools.partial(session, command, run.device)
        complete(run, path, call, described, force=given.force, skip=skip)
        if hasattr(script, "draw"):
            import matplotlib

            matplotlib.rc_file(ROOT / "docs" / "figures" / "matplotlibrc")
            script.draw(path)


if __name__ == "__main__":
    main()
