"""A progress bar for a solve, from reports of the solver's loop."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import tqdm

from numpyro_scalegp.linear.solver import Solution, StopReason

# A bar appears once a solve takes longer than this, in seconds.
_DELAY = 3.0
# With a budget of at least this many epochs, only text is shown: a bar would not move.
_MANY_EPOCHS = 1e5

_ENDS = {
    StopReason.CONVERGED: "converged",
    StopReason.BUDGET: "the budget ended",
    StopReason.PRECISION: "rounding errors ended it",
    StopReason.FAILED: "failed",
}


def watched(solve: Callable[[Callable[..., None]], Solution]) -> Solution:
    """Run a solve with a progress bar, which appears if it takes longer than a few seconds.

    Args:
        solve: maps a function, which is to be called now and then with the number of epochs, the
            largest relative residual, the budget of epochs and the tolerance, to the solution.
    """
    bar = _Bar()
    try:
        solution = jax.block_until_ready(solve(bar.report))
        bar.finish(solution)
        return solution
    finally:
        bar.close()


class _Report(NamedTuple):
    seconds: float
    epochs: float
    size: float


class _Bar:
    """The reports of one solve, and the bar that shows them."""

    def __init__(self) -> None:
        self.reports: list[_Report] = []
        self.bar: tqdm.tqdm | None = None
        self.tolerance = 0.0

    def report(self, epochs: float, size: float, budget: float, tolerance: float) -> None:
        self.reports.append(_Report(time.monotonic(), epochs, size))
        self.tolerance = tolerance
        if self._seconds() < _DELAY:
            return
        total = budget if budget < _MANY_EPOCHS else None
        done = epochs if total is None else min(epochs, total)
        of = "" if total is None else f"/{total:.0f}"
        text = (
            f"{done:.0f}{of} epochs, residual {size:.2g} to {tolerance:.2g}{self._time_left(total)}"
        )
        if self.bar is None:
            form = "{desc}" if total is None else "{percentage:3.0f}%|{bar:10}| {desc}"
            self.bar = tqdm.tqdm(total=total, bar_format=form, desc=text, initial=done)
        else:
            self.bar.n = done
            self.bar.set_description_str(text)

    def _seconds(self) -> float:
        return self.reports[-1].seconds - self.reports[0].seconds

    def _time_left(self, total: float | None) -> str:
        """The time left: a bound from the budget, and an estimate from the decrease so far."""
        first, last = self.reports[0], self.reports[-1]
        if last.epochs == first.epochs:
            return ""
        epoch = self._seconds() / (last.epochs - first.epochs)
        # The final residual takes one epoch beyond the budget.
        bound = math.inf if total is None else epoch * max(total + 1 - last.epochs, 0.0)
        middle = min(self.reports, key=lambda report: abs(2 * report.epochs - last.epochs))
        decreases = 0 < last.size < middle.size < math.inf and self.tolerance > 0
        estimate = math.inf
        if decreases and last.epochs > middle.epochs:
            slope = math.log(middle.size / last.size) / (last.epochs - middle.epochs)
            estimate = epoch * (1 + max(math.log(last.size / self.tolerance), 0.0) / slope)
        if estimate < bound:
            most = "" if total is None else f", at most {bound:.0f}"
            return f", ~{estimate:.0f} s left{most}"
        return "" if total is None else f", at most {bound:.0f} s left"

    def finish(self, solution: Solution) -> None:
        """Show the outcome, if there is a bar."""
        if self.bar is None:
            return
        residual = np.asarray(solution.residual)
        samples = f", of samples {residual[1:].mean():.2g}" if residual.size > 1 else ""
        self.bar.bar_format = "{desc}"
        self.bar.set_description_str(
            f"residual {residual[0]:.2g}{samples} (tolerance {self.tolerance:.2g}): "
            f"{_ENDS[StopReason(int(solution.reason))]}, {float(solution.epochs):.0f} epochs in "
            f"{time.monotonic() - self.reports[0].seconds:.0f} s",
            refresh=False,
        )

    def close(self) -> None:
        """End the line of the bar, if there is one."""
        if self.bar is not None:
            self.bar.close()
