"""Benchmarks as data: stored units last, and pages show declared runs as they are stored."""

import ast
import dataclasses
import json
import re

import pytest

from tests.files import ROOT, load

evidence, runs = load("benchmarks/evidence.py"), load("benchmarks/runs.py")
tables = load("benchmarks/tables.py")
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in tables.PAGES}
SHOWING = [name for name, page in PAGES.items() if "<!-- evidence:" in page]

SESSION = {
    "command": "python x.py",
    "date": "2026-01-02T03:04:05+00:00",
    "cpu": "a processor",
    "cores": 2,
    "gflops": 180,
    "versions": {"jax": "0.10.0"},
    "commit": "0123456789abcdef",
    "clean": True,
}
RUN = runs.Run("toy", "toy", 1, ("a", "b"), ("ours", "gpytorch"), splits=(0, 1))


SCORE, COUNT, TIME = (tables.Column("", kind) for kind in ("score", "count", "time"))


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        (SCORE, [1.0, 2.0, 3.0], "2.0\u00a0±\u00a00.6"),
        (SCORE, [0.1, 0.12, 0.15], "0.123\u00a0±\u00a00.015"),
        (SCORE, [100.0, 140.0], "120\u00a0±\u00a020"),
        (SCORE, [0.25381], "0.254"),
        (SCORE, [0.09996], "0.100"),
        (SCORE, [0.5, 0.5], "0.500"),
        (SCORE, [1.0, float("nan")], "not finite"),
        (SCORE, [float("nan")], "not finite"),
        (SCORE, [12345.6], "12,300"),
        (SCORE, [3.9e-15], "3.90e-15"),
        # A mean that was made elsewhere, with its standard error.
        (SCORE, [[-0.01, 1.1]], "0.0\u00a0±\u00a01.1"),
        (SCORE, [[-153.2, 1e-13]], "-153"),
        (COUNT, [12345], "12,345"),
        (COUNT, [51.0, 50.9], "51"),
        (COUNT, [40.0, 60.0, 47.0], "49\u00a0±\u00a06"),
        (TIME, [0.996, 1.0], "1.0"),
        (TIME, [110.0, 104.0], "110"),
        (TIME, [0.0], "0"),
    ],
)
def test_a_cell_has_the_digits_that_its_error_supports(column, values, text):
    results = {("a", split, 0): value for split, value in enumerate(values)}
    assert tables.text_of(tables.Cell(column, (), results), False) == text


def cell(*values, **options):
    column = tables.Column("RMSE", **options)
    return tables.Cell(column, (), {("a", split, 0): value for split, value in enumerate(values)})


def test_the_best_is_bold_where_paired_differences_tell_it():
    # Splits differ more than the methods do, but one method is better on each of them.
    better, worse = cell(1.0, 2.0, 3.0), cell(1.1, 2.12, 3.11)
    assert tables.in_bold([worse, better]) == [better]
    unlike = cell(1.3, 1.9, 3.1)
    assert tables.in_bold([better, unlike]) == []
    assert tables.in_bold([better, unlike, cell(9.0, 9.5, 9.1)]) == [better, unlike]
    # Of three, the second is told from the first, so the third is not bold, however it varies.
    assert tables.in_bold([better, worse, cell(1.0, 2.0, 30.0)]) == [better]
    assert tables.in_bold([cell(1.0), cell(2.0)]) == []
    most = cell(3.0, 3.1, largest_is_best=True)
    assert tables.in_bold([most, cell(1.0, 1.1, largest_is_best=True)]) == [most]
    elsewhere = tables.Cell(better.column, (), {("b", 0, 0): 9.0, ("b", 1, 0): 9.1})
    assert tables.in_bold([better, elsewhere]) == []


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path):
    path = tmp_path / "toy.json"
    called: list[tuple] = []

    def call(data, split, seed, method):
        if len(called) == 3:
            raise KeyboardInterrupt
        called.append((data, split, seed, method))
        return {"rmse": 1.0}

    with pytest.raises(KeyboardInterrupt):
        evidence.complete(RUN, path, call, lambda: SESSION)
    assert len(json.loads(path.read_text())["records"]) == 3
    stored = set(called)
    later: list[tuple] = []

    def go_on(**unit):
        later.append(tuple(unit.values()))
        return {}

    again = evidence.complete(RUN, path, go_on, lambda: SESSION)
    assert len(again) == 8 and len(later) == 5 and not set(later) & stored
    evidence.complete(RUN, path, go_on, lambda: SESSION)
    assert len(later) == 5
    evidence.complete(RUN, path, go_on, lambda: SESSION, force=True, skip=("gpytorch",))
    assert len(later) == 9


def shown(options, results):
    return tables.written(f"<!-- evidence: {options} -->\n<!-- end -->", results)


def test_a_marker_is_followed_by_a_table_with_its_origin(tmp_path):
    def call(data, split, seed, method):
        return {"rmse": 1.0 + split}

    evidence.complete(RUN, tmp_path / "toy.json", call, lambda: SESSION)
    page = shown("toy columns=rmse", tmp_path)
    assert page.startswith("<!-- evidence: toy columns=rmse -->\n\n| data set |")
    assert page.endswith("\n\n<!-- end -->")
    assert "| a | ours | 1.5\u00a0±\u00a00.5 |" in page
    for phrase in ("`python x.py`", "180 GFLOP/s", "jax 0.10.0", "commit 01234567", "of 2 splits"):
        assert phrase in page
    assert tables.written(page, tmp_path) == page
    assert "|" not in shown("toy", tmp_path)
    with pytest.raises(FileNotFoundError, match="no stored results of the run `other`"):
        shown("other columns=rmse", tmp_path)
    with pytest.raises(ValueError, match="averages over data sets, methods or runs"):
        shown("toy by=data columns=rmse", tmp_path)


def test_the_line_under_a_table_has_the_versions_of_the_peers_of_its_run(tmp_path):
    def call(data, split, seed, method):
        return {"rmse": 1.0}

    described = SESSION | {"versions": {"jax": "0.10.0", "tinygp": "0.3.1", "torch": "2.0"}}
    for peers in ((), ("tinygp",)):
        run = dataclasses.replace(RUN, methods=("ours",), peers=peers)
        evidence.complete(run, tmp_path / "toy.json", call, lambda: described, force=True)
        page = shown("toy columns=rmse", tmp_path)
        assert ("tinygp 0.3.1" in page) == bool(peers)
        assert "torch" not in page


def test_runs_share_a_table_and_methods_its_columns(tmp_path):
    def call(data, split, seed, method):
        return {"rmse": 1.0 + split if method == "ours" else 4.0, "nll": 2.0}

    another = dataclasses.replace(RUN, name="other", methods=("third",))
    for run in (RUN, another):
        evidence.complete(run, tmp_path / f"{run.name}.json", call, lambda: SESSION)
    page = shown("toy,other columns=rmse", tmp_path)
    assert "| b | third | 4.00 |" in page
    assert page.index("| a | third") < page.index("| b | ours")  # rows of a set stand together
    page = shown("toy,other by=data across=method columns=rmse best=rmse", tmp_path)
    assert "| test RMSE | ours | GPyTorch | third |" in page
    assert "| b | **1.5\u00a0±\u00a00.5** | 4.00 | 4.00 |" in page
    page = shown("toy data=b methods=ours by=data across=method columns=rmse,nll", tmp_path)
    assert "| data set | test RMSE: ours | test NLL: ours |" in page
    assert "| a |" not in page
    page = shown("toy methods=ours by=data head=name_of_it columns=rmse", tmp_path)
    assert "| name of it | test RMSE |" in page


@pytest.mark.parametrize("run", runs.RUNS, ids=lambda run: run.name)
def test_a_declared_run_has_a_function_with_its_options(run):
    tree = ast.parse((ROOT / "benchmarks" / f"{run.script}.py").read_text())
    functions = [node for node in tree.body if getattr(node, "name", "") == run.function]
    assert len(functions) == 1
    keywords = {argument.arg for argument in functions[0].args.kwonlyargs}
    assert set(run.options) <= keywords or functions[0].args.kwarg is not None


@pytest.mark.parametrize("name", SHOWING)
def test_a_page_shows_its_stored_runs(name):
    page = PAGES[name]
    assert tables.written(page) == page, f"{name} is behind its runs: make evidence-pages"
    assert page.count("<!-- evidence:") == len(tables.MARKER.findall(page))
    assert set(tables.names_of(page)) <= {run.name for run in runs.RUNS}


@pytest.mark.parametrize("name", SHOWING)
def test_a_table_fits_a_page(name):
    for match in tables.MARKER.finditer(PAGES[name]):
        lines = [line for line in match[0].splitlines() if line.startswith("|")]
        assert len(lines) <= 2 + 12, match[1]
        assert all(line.count(" | ") < 6 for line in lines), match[1]


def test_every_stored_run_is_on_a_page():
    shown_runs = {run for page in PAGES.values() for run in tables.names_of(page)}
    assert shown_runs == {path.stem for path in evidence.RESULTS.glob("*.json")}


@pytest.mark.parametrize(
    ("run", "data", "method", "digits"),
    [
        ("sparse-large", "kin40k", "adam", "0.186 s 7.0"),
        ("sparse-large", "kin40k", "gpytorch", "0.205 s 21"),
        ("sparse", "pol", "adam", "0.129 s 5.6"),
        ("sparse", "pol", "gpytorch", "0.153 s 16"),
        ("road-exact-peer", "pol", "road", "0.072 s 89"),
        ("road-exact-peer", "pol", "gpytorch-exact", "0.231 s 103"),
    ],
)
def test_readme_quotes_stored_runs(run, data, method, digits):
    records = json.loads((evidence.RESULTS / f"{run}.json").read_text())["records"]
    records = [each for each in records if (each["data"], each["method"]) == (data, method)]
    rmse, seconds = digits.split(" s ")
    mean = {
        name: sum(each[name] for each in records) / len(records) for name in ("rmse", "seconds")
    }
    assert f"{mean['rmse']:.3f}" == rmse
    assert abs(mean["seconds"] - float(seconds)) < 0.03 * float(seconds)
    assert re.search(rf"{rmse}.*in {seconds} s", PAGES["README.md"])


def test_a_table_says_what_disturbed_its_times_where_that_matters(tmp_path):
    record = {"data": "a", "split": 0, "seed": 0, "load": 5.0, "session": 0}
    records = [{**record, "method": "ours", "rmse": 1.0, "seconds": 2.0}]
    stored = {"name": "toy", "sessions": [SESSION], "records": records}
    (tmp_path / "toy.json").write_text(json.dumps(stored))
    assert "Other programs" not in shown("toy columns=rmse", tmp_path)
    assert "Other programs" in shown("toy columns=seconds", tmp_path)
    assert "Mean" not in shown("toy columns=rmse", tmp_path)
