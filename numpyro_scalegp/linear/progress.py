"""A progress bar for a solve, from reports of the solver's loop."""

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

from numpyro_scalegp.linear.solver import Solution, StopReason

# A bar appears once a solve takes longer than this, in seconds.
_DELAY = 3.0
# Solves of fewer rows have no bar: their programs compile without reports, and a compilation cache
# can store them.
_LEAST_ROWS = 1000

# With a budget of at least this many epochs, only text is shown: a bar would not move.
_MANY_EPOCHS = 1e5

# A compiled program reports to the bar of the current call, by the number of the bar.
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

    In the main thread Ctrl-C ends the solve at the next report, about an epoch later: without a
    report a running XLA program does not react to it.

    Args:
        solve: maps the number of the bar, for `Options.progress`, to the solution; it gets None
            if there is no bar.
        num_rows: number of rows of the system.
        progress_bar: whether there may be a bar; then nothing may be traced.
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
    """Report to a bar from within a compiled loop.

    Args:
        progress: the number of the bar.
        epochs: number of epochs so far.
        size: the largest relative residual.
        budget: maximum number of epochs.
        tolerance: the relative residual to reach.
    """
    jax.debug.callback(_report, progress, epochs, size, budget, tolerance)


def _report(number: ArrayLike, *values: ArrayLike) -> None:
    bar = _bars.get(int(np.asarray(number)))
    if bar is None:  # the last report may arrive after the solve
        return
    try:
        bar.report(*(float(np.asarray(value)) for value in values))
    except KeyboardInterrupt:
        bar.was_interrupted = True
        raise


class _Report(NamedTuple):
    seconds: float
    epochs: float
    size: float


class _Bar:
    """The reports of one solve, and the bar that shows them."""

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


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Detect Ctrl-C from other threads.

    Python's handler runs in the main thread only, after the compiled program has ended.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)

        def is_interrupted() -> bool:
            try:
                return signal.SIGINT in receiver.recv(64)
            except BlockingIOError:
                return False

        previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield is_interrupted
        finally:
            signal.set_wakeup_fd(previous)
