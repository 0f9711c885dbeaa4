"""Benchmarks as data: stored units are kept, tables are right, and pages show declared runs."""

import ast
import dataclasses
import json

import pytest

from tests.files import ROOT, load

evidence, runs = load("benchmarks/evidence.py"), load("benchmarks/runs.py")

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


def test_mean_and_standard_error_are_known_values():
    assert evidence.mean_and_error([1.0, 2.0, 3.0]) == "2.00\u00a0±\u00a00.58"
    assert evidence.mean_and_error([100.0, 140.0]) == "120\u00a0±\u00a020"
    assert evidence.mean_and_error([0.25]) == "0.25"
    assert evidence.mean_and_error([0.5, 0.5]) == "0.5"
    assert evidence.mean_and_error([1.0, float("nan")]) == "not finite"
    # A pair is a mean that was made elsewhere, with its standard error.
    assert evidence.mean_and_error([[-0.01, 1.1]]) == "0.0\u00a0±\u00a01.1"
    assert evidence.mean_and_error([[-153.2, 1e-13]]) == "-153.2"
    assert evidence.mean_and_error([12345.6]) == "12,346"


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


def test_a_marker_becomes_a_table_with_its_origin(tmp_path):
    def call(data, split, seed, method):
        return {"rmse": 1.0 + split}

    evidence.complete(RUN, tmp_path / "toy.json", call, lambda: SESSION)
    shown = evidence.replace_markers("<!-- evidence: toy columns=rmse -->", tmp_path)
    assert "| a | ours | 2 | 1.50\u00a0±\u00a00.50 |" in shown
    for part in ("python x.py", "180 GFLOP/s", "jax 0.10.0", "commit 012345678"):
        assert part in shown
    with pytest.raises(FileNotFoundError, match="no stored results of the run `other`"):
        evidence.replace_markers("<!-- evidence: other -->", tmp_path)


def test_runs_share_a_table_and_methods_its_columns(tmp_path):
    def call(data, split, seed, method):
        return {"rmse": 1.0 + split if method == "ours" else 4.0}

    other = dataclasses.replace(RUN, name="other", methods=("ours", "third"))
    for run in (RUN, other):
        evidence.complete(run, tmp_path / f"{run.name}.json", call, lambda: SESSION)
    shown = evidence.replace_markers("<!-- evidence: toy,other columns=rmse -->", tmp_path)
    assert "| a | ours | 4 |" in shown
    assert "| b | third | 2 | 4 |" in shown
    assert shown.index("| a | third") < shown.index("| b | ours")  # rows of a set stand together
    wide = evidence.replace_markers(
        "<!-- evidence: toy,other by=run,data across=method columns=rmse -->", tmp_path
    )
    assert "| run | data | ours | gpytorch | third |" in wide
    assert "| toy | b | 1.50\u00a0±\u00a00.50 | 4 |  |" in wide


@pytest.mark.parametrize("run", runs.RUNS, ids=lambda run: run.name)
def test_a_declared_run_has_a_function_with_its_options(run):
    tree = ast.parse((ROOT / "benchmarks" / f"{run.script}.py").read_text())
    found = [one for one in tree.body if getattr(one, "name", "") == run.function]
    assert len(found) == 1
    given = {one.arg for one in found[0].args.kwonlyargs}
    assert set(run.options) <= given or found[0].args.kwarg is not None


def test_each_marker_of_a_page_names_a_declared_run_with_results():
    names = {run.name for run in runs.RUNS}
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text()
        for match in evidence.MARKER.finditer(text):
            assert set(evidence.names_of(match)) <= names, page
        evidence.replace_markers(text)


def test_readme_quotes_the_stored_run():
    stored = json.loads((evidence.RESULTS / "time-against-error.json").read_text())["records"]
    found = {one["method"]: (f"{one['rmse']:.3f}", f"{one['seconds']:.0f} s") for one in stored}
    text = " ".join((ROOT / "README.md").read_text().split())
    for method in ("sparse", "gpytorch", "road-quick"):
        rmse, seconds = found[method]
        assert rmse in text, method
        assert seconds in text, method


def test_a_table_says_how_many_runs_and_what_disturbed_its_times_where_that_matters():
    records = [{"data": "a", "method": m, "rmse": 1.0, "seconds": 2.0} for m in ("ours", "other")]
    records = [{**one, "load": 5.0, "session": 0} for one in records]
    stored = {"name": "toy", "sessions": [SESSION], "records": records}
    shown = evidence.table([stored], ["method"], ["rmse"])
    assert "| method | RMSE |" in shown
    assert "Other programs" not in shown
    assert "Other programs" in evidence.table([stored], ["method"], ["seconds"])
    assert "| data | runs | RMSE |" in evidence.table([stored], ["data"], ["rmse"])
