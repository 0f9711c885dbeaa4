"""Tables of stored benchmark results, written into the pages between markers.

    make evidence-pages

A page shows stored runs where it has

    <!-- evidence: NAME,OTHER by=data,method columns=rmse,nll best=rmse -->
    <!-- end -->

`by` names what makes a table row, `columns` the metrics. The results of `best` are compared between
methods, or between runs where the table names no method. Options:

- `across=method` gives each method a column beside `by=data`;
- `data=pol,bike` and `methods=EXPRESSION` select records; the regular expression matches an entire
  method name, in which a dot stands for a space;
- `head=machine,number_of_rows` names the first columns.

Without `columns`, as under a figure, only the line on command and machine is written.
Python's standard library is enough.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "evidence" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = re.compile(
    r"(<!-- evidence: (\S+)((?: \w+=\S+)*) -->)\n(?:(?!<!-- evidence).)*?(?=<!-- end -->)", re.S
)
SHOWN_PACKAGES = ("jax", "numpyro")
COUNTED = re.compile(r"([\d,]+) (rows|probes|outputs|mean points|support points|devices)")


class Column(NamedTuple):
    """A metric: its head, and how its results are rounded.

    A "score" has its standard error, with one or two digits, or three digits where there is one
    result. A "count" is the same without digits after the point. A "time", as all that depends on
    the machine's load, and a "rough" result have two digits and no error.
    """

    head: str
    kind: Literal["score", "count", "time", "rough"] = "score"
    scale: float = 1.0
    largest_is_best: bool = False


class Cell(NamedTuple):
    """The results of a metric that a table shows in one place."""

    column: Column
    rival: tuple[Any, ...]  # equal for cells that compete
    results: dict[tuple[Any, ...], Any]  # (data, split, seed) -> a number, or a mean and its error


def times(head: str = "seconds") -> Column:
    """A column of times, or of ratios of times."""
    return Column(head, "time")


def rough(head: str) -> Column:
    """A column with two digits."""
    return Column(head, "rough")


TASKS = ("value", "gradient", "prediction")  # of the runs on functions of time
COLUMNS = {
    "rmse": Column("test RMSE"),
    "nll": Column("test NLL"),
    "nlml": Column("NLML an observation"),
    "seconds": times(),
    "grid_value_seconds": times("seconds, value"),
    "grid_gradient_seconds": times("gradient"),
    "grid_prediction_seconds": times("predictions"),
    "grid_dense_gradient_seconds": times("gradient, dense"),
    "epochs": Column("epochs", "count"),
    "steps": Column("steps", "count"),
    "iterations": Column("iterations", "count"),
    "residual": Column("residual of y"),
    "probe_residual": Column("mean residual of the probes"),
    "hyperparameters_seconds": times("seconds for hyperparameters"),
    "solve_seconds": times("seconds for the solve"),
    "noise": Column("noise deviation"),
    "noise_variance": Column("noise variance"),
    "best_epoch": Column("best epoch", "count"),
    "best_nlml": Column("NLML there"),
    "best_rmse": Column("test RMSE there"),
    "sparse_rmse": Column("test RMSE before"),
    "sparse_nll": Column("test NLL before"),
    "sparse_seconds": times("seconds before"),
    "expected_error": Column("divergence (0.001 nats)", scale=1e3),
    "gradient_error": Column("gradient error (0.001 nats)", scale=1e3),
    "off": Column("largest difference of a mean"),
    "memory": rough("MiB of working memory"),
    "most_memory": rough("peak GiB"),
    "spread": rough("relative deviation of the gradient"),
    "compile_seconds": times("seconds to compile"),
    "value": Column("estimate"),
    "standard_error": Column("its standard error"),
    "exact": Column("exact"),
    "off_cholesky": Column("estimate - exact"),
    "half_seconds": times("seconds, first half"),
    "half_nmse": Column("nMSE, first half"),
    "nmse": Column("nMSE"),
    "milliseconds": times("ms a step"),
    "deviation": Column("mean posterior deviation"),
    "nanoseconds_a_pair": times("ns for each entry of K"),
    "quadratic_ratio": times("quadratic gradient / product"),
    "bilinear_ratio": times("bilinear gradient / product"),
    **{f"1e{power}": times(f"ms at 10^{power}") for power in range(4, 8)},
    "search_seconds": times("seconds to find neighbors"),
    "tree_seconds": times("scipy, without an order"),
    "first_seconds": times("seconds of the first call"),
    "microseconds_a_row": times("µs an observation"),
    "exact_seconds": times("seconds, exact"),
    "exact_rmse": Column("RMSE, exact"),
    "exact_nll": Column("NLL, exact"),
    "divergence": Column("divergence"),
    "gain": Column("gain"),
    "gain_error": Column("its standard error"),
    "predict_seconds": times("seconds to predict"),
    "mae": Column("MAE"),
    "crps": Column("CRPS"),
    "coverage_90": Column("coverage of 90 % intervals"),
    "coverage": Column("coverage of 95 % intervals"),
    "lengthscale": Column("lengthscale"),
    "lengthscale_p": Column("p, lengthscale"),
    "variance_p": Column("p, variance"),
    "noise_p": Column("p, noise"),
    "amplitude": Column("amplitude"),
    "concentration": Column("concentration"),
    "effective_a_second": Column("effective draws a second", largest_is_best=True),
    "microseconds_a_gradient": times("µs a gradient"),
    "gradients_a_draw": rough("gradients a draw"),
    "seconds_each": times("seconds an effective draw"),
    "autodiff_seconds": times("seconds, autodiff"),
    "autodiff_ratio": times("autodiff / ours"),
    "factor_seconds": times("seconds, factorization alone"),
    "difference": rough("difference of the gradients"),
    "gradient": times("ms a gradient"),
    "exact_gradient": times("ms, exact GP"),
    "exact_ratio": times("ours / exact GP"),
    "dense_gradient": times("ms, dense matrix"),
    "dense_ratio": times("dense / ours"),
    "factorization": times("ms, Cholesky alone"),
    "batched_ratio": times("ours / Cholesky"),
    "loop": times("ms, loop"),
    "loop_ratio": times("loop / ours"),
    "product_sent": Column("sent for a product (multiples of n)"),
    "gradient_sent": Column("sent for a gradient (multiples of n)"),
    "sweep_sent": Column("sent for a sweep (multiples of n)"),
    "product_formula": Column("product: planned / formula"),
    "cg_memory": Column("MiB, CG"),
    "cg_formula": Column("CG: planned / formula"),
    "ap_memory": Column("MiB, AP"),
    "ap_formula": Column("AP: planned / formula"),
    "step_work": Column("operations, eight devices / one"),
    "megabytes_sent": Column("MB sent by each device"),
    "state_alone": Column("MiB of state on one device"),
    "state_each": Column("MiB on each of eight"),
    "loss_difference": rough("relative difference of losses"),
    "gathered_seconds": times("seconds, gathered"),
    "gathered_ratio": times("gathered / symmetric"),
    "processes_seconds": times("seconds, two processes"),
    "processes_ratio": times("two processes / one"),
    "in_memory": times("1,000 rows a second in memory"),
    "streamed_ratio": times("streamed / in memory"),
    "waited": times("mean ms a step waits"),
    "resident": rough("MiB of memory"),
    "stream_only": times("1,000 rows a second without training"),
    "minutes": Column("test RMSE (minutes)"),
    "log_density": Column("test log density"),
    "within_half": Column("share in 50 % intervals"),
    "within_most": Column("share in 90 % intervals"),
    "imports": times("seconds of imports"),
    "init": times("seconds of `SVI.init`"),
    "step": times("seconds of the first step"),
    "first_step": times("seconds to the first step"),
    "first_round_seconds": times("seconds, first round"),
    "round_seconds": times("seconds a round"),
    "regret": Column("regret"),
    "relevant": rough("longest that matters"),
    "irrelevant": rough("shortest of the others"),
    "start_seconds": times("seconds to the first answer"),
    "one_row_milliseconds": times("ms for one row"),
    "thousand_rows_milliseconds": times("ms for 1,000 rows"),
    "file_megabytes": rough("MB of the file"),
    "prediction_error": rough("largest error"),
    "posterior": times("seconds to a posterior"),
    "floor": times("ms of its matrix products"),
    "gradients": Column("leapfrog steps", "count"),
    "least_effective": Column("least effective sample size", "count"),
    "below": Column("below exact training (%)"),
    "plain_seconds": times("seconds, plain CG"),
    "plain_ratio": times("an iteration: roulette / plain"),
    **{name: times(f"{name} (ms)") for name in ("variational", "compositional", "minimax")},
    "mini-batch": times("mini-batch (ms)"),
    "ignored": Column("mean, spread ignored"),
    "mean": Column("mean"),
    "least": Column("least"),
    "largest": Column("largest"),
    "batches": Column("mean by batches"),
    "unbiased_seconds": times("seconds, unbiased estimate"),
    "least_ratio": Column("least ratio of deviations"),
    "most_ratio": Column("largest ratio"),
    "variance_ratio": Column("ratio of the variance"),
    "noise_in_whitened": Column("variance a coordinate"),
    "divergent": rough("divergent transitions (%)"),
    **{f"{name}_low": rough("5 % quantile") for name in ("matters", "other")},
    **{f"{name}_median": rough("median") for name in ("matters", "other")},
    **{f"{name}_high": rough("95 % quantile") for name in ("matters", "other")},
    **{f"{name}_draws": rough("effective draws") for name in ("matters", "other")},
    "matters_rhat": Column("R-hat"),
    **{f"{task}_seconds": Column("ms", "time", 1e3) for task in TASKS},
    **{
        f"{peer}_{task}_seconds": Column(f"ms, {peer}", "time", 1e3)
        for peer in ("tinygp", "celerite2")
        for task in TASKS
    },
    **{
        f"{peer}_{task}_ratio": Column(f"ours / {peer}")
        for peer in ("tinygp", "celerite2")
        for task in TASKS
    },
    "bytes_a_time": rough("bytes a time"),
    "tinygp_bytes_a_time": rough("bytes a time, tinygp"),
    "tinygp_first_seconds": times("seconds of the first call, tinygp"),
    "milliseconds_a_gradient": times("ms"),
    "cholesky_gradient_seconds": times("seconds, `Cholesky`"),
    "gpytorch_gradient_seconds": times("seconds, GPyTorch"),
    "gpytorch_ratio": times("GPyTorch / ours"),
    "variance": Column("variance"),
    "level": Column("level"),
    "scale": Column("scale"),
    "nuts_minutes": times("minutes"),
}

# Stored names -> names in the tables.
LABELS = {
    "method": {
        **{f"shared Krylov space, {number} probes": str(number) for number in (16, 64, 256)},
        "adam": "Adam",
        "natural": "natural gradients",
        "gpytorch": "GPyTorch",
        "gpytorch, its rate": "GPyTorch, constant 0.01",
        "gpytorch, natural": "GPyTorch, natural gradients",
        "gpytorch-exact": "GPyTorch, exact GP",
        "sparse": "sparse GP",
        "road": "exact GP",
        "road-quick": "exact GP, quick",
        "hybrid, 4,000 more points": "hybrid",
        "hybrid, 6,000 more points": "hybrid",
        "compositional-0.9": "compositional, decay 0.9",
        "compositional-0.1": "compositional, decay 0.1",
        "conjugate gradients, cut": "truncated CG",
        "coupled, 1,024 points": "sparse GP, 1,024 points",
        "gradients alone": "decoupled, gradients alone",
        "sparse, 128 points": "sparse GP, 128 points",
        "sparse, 512 points": "sparse GP, 512 points, 3,000 steps",
        "decoupled, 4,096 points more": "decoupled, 4,096 points for the mean",
        "hybrid, 4,096 points more": "hybrid, 4,096 points more",
        "features": "features m",
        "rows": "observations n",
        "AP 1000": "alternating projections",
        "neighbors 10": "`NearestNeighborGP`",
        "inducing 4096": "`AutoNearestNeighborGP`",
        "sparse 512": "sparse GP, 512 points",
        "Vecchia 30": "30 neighbors",
        "Vecchia 60": "60 neighbors",
        "over the function": "sampled",
    },
    "run": {
        "road-large": "two CPU cores",
        "road-gpu": "H200",
        "pathwise-training": "two CPU cores",
        "pathwise-training-gpu": "H200",
        "warm-starts": "AP",
        "warm-starts-sgd": "SGD",
        "warm-starts-cg": "CG, separate",
        "warm-starts-block-cg": "CG, shared",
        "finite-rkhs-16": "16 observations",
        "finite-rkhs": "32 observations",
        "finite-rkhs-64": "64 observations",
        "finite-rkhs-epochs": "300 epochs",
        "finite-rkhs-128": "128 observations",
        "features-cost": "two CPU cores",
        "features-cost-gpu": "H200",
        "gpytorch-svgp": "GPyTorch, 512 inducing points",
        "many-features-kin40k": "10,000 features",
        "many-features-rank": "10,000 features, 10 dense columns",
        "many-features-kin40k-gpu": "10,000 features, H200",
        "many-features-sets": "100,000 features, 10,000 a step",
        "decoupled-kin40k": "hybrid",
        "decoupled-kin40k-gpu": "hybrid, H200",
        "decoupled-subset": "hybrid, exact fit of a subset",
        "decoupled-steps": "two CPU cores",
        "decoupled-steps-gpu": "H200",
        "neighbors-density": "noise 0.1",
        "neighbors-density-quiet": "noise 0.01",
        "neighbors-cost": "two CPU cores",
        "neighbors-cost-gpu": "H200",
        "neighbors-batches": "two CPU cores",
        "neighbors-batches-gpu": "H200",
    },
}
HEADS = {"data": "data set", "run": "", "method": "method"}


def significant(value: float, digits: int) -> str:
    """A number with some significant digits."""
    if not math.isfinite(value):
        return "not finite"
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    for _ in range(2):  # 9.96 becomes 10
        places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
        value = round(value, places)
    return f"{value:,.{max(places, 0)}f}"


def rounded(column: Column, mean: float, error: float | None, *, least: float = 1.95) -> str:
    """A result as a cell shows it: the digits that its standard error supports.

    The error has two digits where its first digits are below `least`, and one digit otherwise.
    """
    mean = mean * column.scale
    if column.kind in ("time", "rough"):
        return significant(mean, 2)
    if error is not None and not math.isfinite(error):
        return "not finite"
    if error is None or error * column.scale <= 1e-9 * abs(mean):
        is_whole = column.kind == "count" and abs(mean) < 1e9
        return f"{mean:,.0f}" if is_whole else significant(mean, 3)
    error = error * column.scale
    places = -math.floor(math.log10(error))
    places += error * 10.0**places < least
    if column.kind == "count":
        places = min(places, 0)
    mean, error = round(mean, places) + 0.0, round(error, places)
    shown = [f"{number:,.{max(places, 0)}f}" for number in (mean, error)]
    return "\u00a0±\u00a0".join(shown) if error else shown[0]  # on one line


def mean_and_error(values: list[Any]) -> tuple[float, float | None]:
    """The mean of results with its standard error; a single result may be such a pair."""
    if len(values) == 1:
        return tuple(values[0]) if isinstance(values[0], list) else (values[0], None)
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def beats(cell: Cell, rival: Cell) -> bool:
    """Whether the paired difference of two cells is above two standard errors."""
    sign = -1.0 if cell.column.largest_is_best else 1.0
    units = cell.results.keys() & rival.results.keys()
    differences = [sign * (rival.results[unit] - cell.results[unit]) for unit in sorted(units)]
    if len(differences) < 2:
        return False
    mean, error = mean_and_error(differences)
    return mean > 2.0 * (error or 0.0)


def in_bold(cells: list[Cell]) -> list[Cell]:
    """The best of competing cells, and the next ones up to the first that it beats.

    None are in bold where the best one beats none. A single result does not compete.
    """
    cells = [cell for cell in cells if len(cell.results) > 1]
    cells.sort(key=lambda cell: mean_and_error([*cell.results.values()])[0])
    if cells and cells[0].column.largest_is_best:
        cells.reverse()
    beaten = [index for index, cell in enumerate(cells) if beats(cells[0], cell)]
    return cells[: beaten[0]] if beaten else []


def stored_runs(names: str, options: dict[str, str], results: Path) -> list[dict[str, Any]]:
    """The stored runs of a marker, with the records that it selects."""
    stored = []
    for name in names.split(","):
        path = results / f"{name}.json"
        if not path.exists():
            raise FileNotFoundError(f"no stored results of the run `{name}`: `make evidence`")
        run = json.loads(path.read_text())
        run["records"] = [
            {"run": name, **record}
            for record in run["records"]
            if "data" not in options or record["data"] in options["data"].split(",")
            if re.fullmatch(options.get("methods", ".*"), record["method"])
        ]
        stored.append(run)
    return stored


def labelled(record: dict[str, Any]) -> dict[str, Any]:
    """A record under the names that tables show, in which sizes are numbers without a unit."""
    labels = {key: LABELS[key].get(record[key], record[key]) for key in LABELS}
    method = labels["method"]
    size = COUNTED.fullmatch(method)
    method = size[1] if size else re.sub(r" rows\b", " observations", method)
    labels["method"] = re.sub(r"^cut,", "truncated CG,", method)
    return record | labels


def cell_of(records: list[dict[str, Any]], name: str, keys: list[str]) -> Cell:
    """The results of a metric in records that differ in split and seed alone."""
    records = [record for record in records if name in record]
    if len({(record["run"], record["data"], record["method"]) for record in records}) > 1:
        raise ValueError(f"a cell of `{name}` averages over data sets, methods or runs")
    rivals = "method" if "method" in keys else "run"
    place = tuple(records[0][key] for key in keys if key != rivals) if records else ()
    results = {(r["data"], r["split"], r["seed"]): r[name] for r in records}
    return Cell(COLUMNS[name], (name, *place), results)


def table(
    stored: list[dict[str, Any]],
    by: list[str],
    columns: list[str],
    across: str | None,
    best: list[str],
    first_heads: list[str],
) -> str:
    """Stored runs as a table: a row for each value of `by`, means over splits or seeds.

    Rows stand together by the first of `by`, in the order in which values come up. With `across`,
    there is a column for each metric and value of `across`; a single metric is named once, at the
    head of the rows.
    """
    records = [labelled(record) for run in stored for record in run["records"]]
    values = {key: list(dict.fromkeys(record[key] for record in records)) for key in by}
    rows = sorted(
        {tuple(record[key] for key in by) for record in records},
        key=lambda row: [values[key].index(value) for key, value in zip(by, row, strict=True)],
    )
    groups = list(dict.fromkeys(record[across] for record in records)) if across else [None]
    keys = [*by, across] if across else by
    grid: list[list[Cell]] = []
    heads: list[str] = []
    for name, group in itertools.product(columns, groups):
        chosen = [record for record in records if across is None or record[across] == group]
        cells = [
            cell_of([r for r in chosen if tuple(r[key] for key in by) == row], name, keys)
            for row in rows
        ]
        if any(cell.results for cell in cells):
            grid.append(cells)
            heads.append(COLUMNS[name].head if group is None else str(group))
            if across and len(columns) > 1:
                heads[-1] = f"{COLUMNS[name].head}: {group}"
    rivals: dict[tuple, list[Cell]] = {}
    for cell in itertools.chain(*grid):
        rivals.setdefault(cell.rival, []).append(cell)
    compared = [cells for (name, *_), cells in rivals.items() if name in best]
    bold = {id(cell) for cells in compared for cell in in_bold(cells)}
    shown = [[text_of(cell, id(cell) in bold) for cell in cells] for cells in grid]
    first = [*first_heads, *(HEADS[key] for key in by[len(first_heads) :])]
    if across and len(columns) == 1:
        first[-1] = COLUMNS[columns[0]].head
    lines = [[*first, *heads], ["---"] * (len(by) + len(heads))]
    lines += [[*row, *cells] for row, cells in zip(rows, zip(*shown, strict=True), strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def text_of(cell: Cell, is_bold: bool) -> str:
    """What a table shows of a cell."""
    if not cell.results:
        return ""
    results = [*cell.results.values()]
    digits = {"least": 10.0} if isinstance(results[0], list) else {}  # a mean and its deviation
    text = rounded(cell.column, *mean_and_error(results), **digits)
    return f"**{text}**" if is_bold else text


def between(values: list[Any], form: str = "{}") -> str:
    """The range of some values."""
    ends = dict.fromkeys(form.format(end) for end in (min(values), max(values)))
    return " to ".join(ends)


def repeats(stored: list[dict[str, Any]], columns: list[str]) -> str:
    """What the means of a table are over."""
    records = [record for run in stored for record in run["records"]]
    units: dict[tuple, int] = {}
    for record in records:
        unit = record["run"], record["data"], record["method"]
        units[unit] = units.get(unit, 0) + 1
    if max(units.values()) == 1:
        return ""
    over = "splits" if any(record["split"] for record in records) else "seeds"
    has_errors = any(COLUMNS[name].kind in ("score", "count") for name in columns)
    mean = "Mean ± standard error" if has_errors else "Mean"
    return f"{mean} of {between([*units.values()])} {over}. "


def origin(stored: list[dict[str, Any]], *, is_timed: bool) -> str:
    """The line under results: command, machine, versions, commit, and what disturbed times."""
    used = [
        run["sessions"][index]
        for run in stored
        for index in sorted({record["session"] for record in run["records"]})
    ]
    names: dict[str, list[str]] = {}
    for session in used:
        script, _, name = session["command"].rpartition(" ")
        names.setdefault(script, []).append(name)
    commands = [" ".join(dict.fromkeys([script, *names[script]])) for script in names]
    machines: dict[tuple, list[int]] = {}
    for session in used:
        machine = session.get("gpu"), session["cpu"], session["cores"]
        machines.setdefault(machine, []).append(session["gflops"])
    rates = [
        ", ".join(filter(None, [gpu, cpu, f"{cores} cores, {between(rates, '{:,}')} GFLOP/s"]))
        for (gpu, cpu, cores), rates in machines.items()
    ]
    has_peer = any("gpytorch" in record["method"] for run in stored for record in run["records"])
    peers = ["gpytorch"] if has_peer else []
    peers += [name for run in stored for name in run.get("peers", ())]
    versions = []
    for name in dict.fromkeys([*SHOWN_PACKAGES, *peers]):
        numbers = dict.fromkeys(session["versions"].get(name) for session in used)
        versions.append(f"{name} {' and '.join(filter(None, numbers))}")
    commits = dict.fromkeys(
        session["commit"][:9] + ("" if session["clean"] else " with uncommitted changes")
        for session in used
    )
    line = (
        f"`{'`, `'.join(commands)}`, {between([session['date'][:10] for session in used])}: "
        f"{'; '.join(rates)}; {', '.join(versions)}; commit {', '.join(commits)}."
    )
    # A unit that ran before leaves a load of the number of cores.
    loads = [record.get("load", 0.0) for run in stored for record in run["records"]]
    if is_timed and max(loads) > 1.1 * max(session["cores"] for session in used):
        line += f" Other programs ran at the same time (load up to {max(loads):.1f})."
    return line


def results_of(names: str, options: dict[str, str], results: Path = RESULTS) -> str:
    """What a marker shows: a table, and the line under it."""
    stored = stored_runs(names, options, results)
    lists = {name: value.split(",") for name, value in options.items()}
    columns = lists.get("columns", [])
    line = origin(stored, is_timed=any(COLUMNS[name].kind == "time" for name in columns))
    if not columns:
        return f"<small>{line}</small>"
    heads = [head.replace("_", " ") for head in lists.get("head", [])]
    by, best = lists.get("by", ["data", "method"]), lists.get("best", [])
    shown = table(stored, by, columns, options.get("across"), best, heads)
    return f"{shown}\n\n<small>{repeats(stored, columns)}{line}</small>"


def names_of(page: str) -> Iterator[str]:
    """The runs that a page shows."""
    for match in MARKER.finditer(page):
        yield from match[2].split(",")


def written(page: str, results: Path = RESULTS) -> str:
    """A page with the results of today between its markers."""

    def replaced(match: re.Match) -> str:
        options = dict(option.split("=", 1) for option in match[3].split())
        return f"{match[1]}\n\n{results_of(match[2], options, results)}\n\n"

    return MARKER.sub(replaced, page)


def main() -> None:
    """Write the results into the pages."""
    for path in PAGES:
        before = path.read_text()
        after = written(before)
        if after != before:
            path.write_text(after)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
