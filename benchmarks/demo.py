"""The flights of `make demo` beside a linear regression and a constant: errors and coverage.

    python benchmarks/evidence.py flights

One fit by examples/flights.py, whose `main` scores all three.
"""

import functools
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import flights


@functools.cache
def fit(**options):
    """The scores, and seconds of the fit."""
    with tempfile.TemporaryDirectory() as folder:
        return flights.main(output=folder, **options)


def record(data, split, seed, method, **options):
    """The record of a unit, with the example's own seeds; RMSE is in minutes."""
    scores, seconds = fit(**options)
    (score,) = (score for score in scores if score.name == method)
    half, most = score.coverage
    fields = {"minutes": score.rmse, "log_density": score.log_density}
    fields |= {"within_half": half, "within_most": most}
    return fields | ({"seconds": seconds} if score is scores[0] else {})
