"""The page of times shows what the stored runs measured."""

import json
import re

import pytest

from tests.files import ROOT

CELLS = re.findall(r"<!-- ([^>]*) -->([\d.]+)", (ROOT / "docs/timing.md").read_text())


@pytest.mark.parametrize(("source", "shown"), CELLS)
def test_times_are_of_stored_runs(source: str, shown: str) -> None:
    """A cell names run, method (after the data set, if there are several), field and unit."""
    run, *method, field, unit = source.split("; ") if source.count("; ") > 2 else (
        *source.split("; "), "1.0"
    )  # fmt: skip
    records = json.loads((ROOT / f"docs/evidence/results/{run}.json").read_text())["records"]
    values = [
        float(record[field]) * float(unit)
        for record in records
        if not method or f"{record['data']} {record['method']}".endswith(method[0])
        if field in record
    ]
    mean = sum(values) / len(values)
    digits = len(shown.replace(".", "").strip("0")) or 1
    assert float(shown) == pytest.approx(mean, rel=0.5 * 10.0 ** (1 - digits) + 1e-9)


def test_there_are_cells() -> None:
    assert len(CELLS) > 15
