"""A progress bar over a solve: what the loop of a solver reports, and what is made of it."""

import contextlib
import itertools
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.solvers.solver import Solution, StopReason

# A bar appears once a solve runs for longer than this, in seconds. One of fewer rows than the other
# does not, so that its program is compiled without reports, and a compilation cache can keep it.
_DELAY = 3.0
_LEAST_ROWS = 1000

# From here on a budget is none: a bar would not move.
_MANY_EPOCHS = 1e5

# A program that is compiled once reports to the bar of each of its calls, by a number.
_bars: dict[int, "_Bar"] = {}
_numbers = itertools.count()

_ENDS = {
    StopReason.CONVERGED: "converged",
    StopReason.BUDGET: "the budget ended",
    StopReason.PRECISION: "rounding errors ended it",
    StopReason.FAILED: "failed",
}


def watched(
    solve: Callable[[Int[Array, ""] | None], Solution], num_rows: int, *, progress_bar: bool
) -> Solution:
    """Run a solve with a progress bar, which appears if it takes longer than a few seconds.

    In the main thread Ctrl-C ends it at the next report, about an epoch later: a program that XLA
    runs notices nothing by itself.

    Args:
        solve: maps the number of the bar, for `System.progress`, to the solution; it gets None
            where there is no bar.
        num_rows: of the system.
        progress_bar: whether there may be a bar; nothing may be traced then.
    """
    if not progress_bar or num_rows < _LEAST_ROWS:
        return solve(None)
    number, bar = next(_numbers), _Bar()
    _bars[number] = bar
    try:
        with _interrupts() as bar.is_interrupted:
            solution = jax.block_until_ready(solve(jnp.asarray(number)))
        bar.finish(solution)
        return solution
    except jax.errors.JaxRuntimeError:
        if bar.was_interrupted:  # an exception of a callback comes back as one of XLA
            raise KeyboardInterrupt from None
        raise
    finally:
        bar.close()
        del _bars[number]


def report(
    progress: Int[Array, ""],
    epochs: Float[Array, ""],
    size: Float[Array, ""],
    budget: float | Float[Array, ""],
    tolerance: float | Float[Array, ""],
) -> None:
    """Tell a bar from within a compiled loop how far it is.

    Args:
        progress: the bar's number.
        epochs: spent by now.
        size: the largest residual, to get down to `tolerance`.
        budget: epochs at most.
        tolerance: relative residual.
    """
    jax.debug.callback(_report, progress, epochs, size, budget, tolerance)


def _report(number: ArrayLike, *numbers: ArrayLike) -> None:
    bar = _bars.get(int(np.asarray(number)))
    if bar is None:  # the last report may come when all is over
        return
    try:
        bar.report(*(float(np.asarray(one)) for one in numbers))
    except KeyboardInterrupt:
        bar.was_interrupted = True
        raise


class _Report(NamedTuple):
    seconds: float
    epochs: float
    size: float


class _Bar:
    """What was reported of one solve, and the bar that shows it."""

    def __init__(self) -> None:
        self.is_interrupted: Callable[[], bool] = lambda: False
        self.was_interrupted = False
        self.reports: list[_Report] = []
        self.bar: tqdm.tqdm | None = None
        self.tolerance = 0.0

    def report(self, epochs: float, size: float, budget: float, tolerance: float) -> None:
        if self.is_interrupted():
            raise KeyboardInterrupt
        self.reports.append(_Report(time.monotonic(), epochs, size))
        self.tolerance = tolerance
        if self._seconds() < _DELAY:
            return
        total = budget if budget < _MANY_EPOCHS else None
        done = epochs if total is None else min(epochs, total)
        of = "" if total is None else f"/{total:.0f}"
        text = f"{done:.0f}{of} epochs, residual {size:.2g} to {tolerance:.2g}{self._left(total)}"
        if self.bar is None:
            form = "{desc}" if total is None else "{percentage:3.0f}%|{bar:10}| {desc}"
            self.bar = tqdm.tqdm(total=total, bar_format=form, desc=text, initial=done)
        else:
            self.bar.n = done
            self.bar.set_description_str(text)

    def _seconds(self) -> float:
        return self.reports[-1].seconds - self.reports[0].seconds

    def _left(self, total: float | None) -> str:
        """The time left: a bound from the budget, and how long it takes if it goes on like this."""
        first, last = self.reports[0], self.reports[-1]
        if last.epochs == first.epochs:
            return ""
        each = self._seconds() / (last.epochs - first.epochs)
        # The residual at the end takes one epoch more than the budget.
        bound = math.inf if total is None else each * max(total + 1 - last.epochs, 0.0)
        middle = min(self.reports, key=lambda one: abs(2 * one.epochs - last.epochs))
        falls = 0 < last.size < middle.size < math.inf and self.tolerance > 0
        guess = math.inf
        if falls and last.epochs > middle.epochs:
            slope = math.log(middle.size / last.size) / (last.epochs - middle.epochs)
            guess = each * (1 + max(math.log(last.size / self.tolerance), 0.0) / slope)
        if guess < bound:
            most = "" if total is None else f", at most {bound:.0f}"
            return f", ~{guess:.0f} s left{most}"
        return "" if total is None else f", at most {bound:.0f} s left"

    def finish(self, solution: Solution) -> None:
        """Say what was reached, where there is a bar."""
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
        """Leave what is shown, and end the line."""
        if self.bar is not None:
            self.bar.close()


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Find out in other threads whether Ctrl-C was pressed.

    Python's own handler runs in the main thread alone, after the compiled program has ended.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    ours, signals = socket.socketpair()
    with ours, signals:
        ours.setblocking(False)
        signals.setblocking(False)

        def is_interrupted() -> bool:
            try:
                return signal.SIGINT in ours.recv(64)
            except BlockingIOError:
                return False

        before = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        try:
            yield is_interrupted
        finally:
            signal.set_wakeup_fd(before)
