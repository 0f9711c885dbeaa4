"""Training on a stream, with checkpoints from which it goes on."""

import collections
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jaxtyping import Array, Float, Key
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.mesh import texts_of_processes
from numpyro_scalegp.core.programs import CompiledForLoop
from numpyro_scalegp.infer import RowSVI
from numpyro_scalegp.saving import load, save
from numpyro_scalegp.saving.file import Path, as_path, place_of
from numpyro_scalegp.streams.extra import imported
from numpyro_scalegp.streams.stream import Stream, parts_of
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model

# Batches on the device that wait for their step, and steps that wait for the device.
_AHEAD = 2


class Progress(NamedTuple):
    """What a checkpoint holds."""

    state: SVIState
    losses: Any  # of the steps so far
    position: Any  # of the stream's iterator, in front of the next batch
    order: Any  # of the stream
    data: Any  # a fingerprint of the stream's rows; None where processes share the state


@model_keywords_first(lambda svi, *_: (svi.model, 4))
def run(
    svi: SVI,
    key: Key[Array, ""],
    num_steps: int,
    stream: Stream,
    *,
    checkpoint: Path | None = None,
    every: int = 1000,
    place: Callable[..., Any] | None = None,
    stable_update: bool = False,
    progress_bar: bool = True,
    init_params: dict[str, Any] | None = None,
    **kwargs: Any,
) -> SVIRunResult:
    """Train on a stream: `SVI.run`, with another batch in each step.

    The model gets the arrays of a batch as its positional arguments, (X, y). Steps are compiled
    once and work on donated buffers; the next two batches are on the device while a step runs.
    `RowSVI` refits its control variate each `refresh_every` steps, as in its own `run`.

    If the file `checkpoint` is there, training goes on from it, to the same result to the last
    bit, however the process that wrote it has ended. `num_steps` counts those steps too, and may be
    larger than it was.

    Args:
        svi: an `SVI` or `RowSVI`.
        key: a typed JAX key, for `svi.init` with the first batch.
        num_steps: number of steps, each with `stream.batch_size` rows.
        stream: of `sgp.streams.parquet` or `sgp.streams.arrays`.
        checkpoint: the file, by convention `*.npz`; None for no checkpoints.
        every: steps from one checkpoint to the next. There is one at the end as well.
        place: a function that puts the arrays of a batch, its arguments, on devices, and returns
            them in a tuple; `jax.device_put` by default. It runs in another thread.
        stable_update: whether a step whose loss or gradient is not finite is left out, as by
            `SVI.stable_update`.
        progress_bar: whether to show one.
        init_params: initial values of parameters, as for `SVI.init`.
        **kwargs: the model's keyword arguments, such as `size=stream.num_rows` for the plate.

    Returns:
        Parameters, state and the losses of all steps, shape (num_steps,).

    Raises:
        ValueError: if `num_steps` or `every` is not positive, the checkpoint belongs to another
            model, to a stream of other arrays or to another order, or has more steps; in several
            processes, if one checkpoint cannot be for all of them.
        TypeError: if `checkpoint` is no path.
        OSError: if `checkpoint` cannot be written, such as in a folder that is not there; if it was
            made with other files, or the stream's files have changed.

    Example:
        >>> import jax, numpy as np, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y=None, size=None):
        ...     f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.3), X))
        ...     with sgp.plate("rows", size, len(X)):
        ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> X = np.linspace(0.0, 1.0, 1000)[:, None]
        >>> stream = sgp.streams.arrays(X, np.sin(6.0 * X[:, 0]), batch_size=100, seed=0)
        >>> guide = sgp.guides.AutoSparseGP(model, num_inducing=10)
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
        >>> result = sgp.streams.run(
        ...     svi, jax.random.key(0), 20, stream, size=stream.num_rows, progress_bar=False
        ... )
        >>> result.losses.shape
        (20,)
    """
    kwargs = of_model(kwargs)
    checks.instance("svi", svi, SVI, "an `SVI` or `RowSVI`")
    checks.instance("stream", stream, Stream, "of `sgp.streams.parquet` or `sgp.streams.arrays`")
    checks.count("num_steps", num_steps)
    checks.count("every", every)
    if place is not None:
        checks.function("place", place)
    checkpoint = None if checkpoint is None else as_path(checkpoint, "checkpoint")
    if checkpoint is not None and jax.process_count() == 1:
        place_of(checkpoint)  # now, and not after the steps to the first checkpoint
    batches = _on_device(stream, place)
    try:
        with contextlib.closing(iter(stream)) as first:  # the batch of the first step as well
            batch = next(first)
        state = svi.init(
            checks.as_key(key), *_placed(batch, place), init_params=init_params, **kwargs
        )
        # Copies: steps donate them, and they may be arrays of the model.
        state = jax.tree.map(jnp.copy, state)
        data: int | None = stream.rows.fingerprint
        if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(state)):
            _check_processes(stream, checkpoint)
            data = None
        progress = Progress(state, np.zeros(0), batches.get_state(), tuple(stream.order), data)
        if checkpoint is not None and os.path.exists(checkpoint):
            progress = _resumed(checkpoint, progress, num_steps, stream)
        batches.set_state(progress.position)
        steps = _Steps(svi, kwargs, stable_update)
        with tqdm.tqdm(
            total=num_steps, initial=len(progress.losses), disable=not progress_bar
        ) as bar:
            while (done := len(progress.losses)) < num_steps:
                stop = done - done % every + every
                progress = steps.until(min(stop, num_steps), progress, batches, bar)
                if checkpoint is not None:
                    save(checkpoint, progress)
    finally:
        batches.close()
    return SVIRunResult(
        svi.get_params(progress.state), progress.state, jnp.asarray(progress.losses)
    )


def _placed(batch: Any, place: Callable[..., Any] | None) -> tuple[Any, ...]:
    """A batch on devices."""
    parts = parts_of(batch)
    return jax.device_put(parts) if place is None else parts_of(place(*parts))


def _check_processes(stream: Stream, checkpoint: str | None) -> None:
    """Raise where processes that share a state could not go on from one checkpoint."""
    if checkpoint is None:
        return
    found = texts_of_processes(f"{tuple(stream.order)}, {os.path.exists(checkpoint)}")
    if len({*found}) > 1:
        raise ValueError(
            f"the checkpoint `{checkpoint}` holds one position in the stream for all "
            "processes: they must have streams of as many rows, with the same arguments, and all "
            "of them the file or none. Rows, batch size, window, ranges, seed and whether the file "
            f"is there: {'; '.join(found)}."
        )


def _on_device(stream: Stream, place: Callable[..., Any] | None) -> Any:
    """An iterator over batches on devices, which prefetches."""
    placed = stream.batches.map(lambda batch: _placed(batch, place))
    prefetch = imported("grain.experimental").ThreadPrefetchIterDataset
    return iter(prefetch(placed, prefetch_buffer_size=_AHEAD))


def _resumed(checkpoint: str, start: Progress, num_steps: int, stream: Stream) -> Progress:
    """The progress in a file, if it belongs to this training."""
    # The number of losses is that of the steps, whatever it is.
    found = load(checkpoint, like=start._replace(losses=..., data=...))
    if None not in (found.data, start.data):
        stream.rows.check_fingerprint(found.data, f"the checkpoint `{checkpoint}`")
    if found.order != start.order:
        raise ValueError(
            f"`{checkpoint}` belongs to another stream: its rows, batch size, window, "
            f"ranges and seed are {found.order}, and those of `stream` {start.order}."
        )
    if len(found.losses) > num_steps:
        raise ValueError(
            f"`{checkpoint}` has {len(found.losses)} steps, and `num_steps` is "
            f"{num_steps}: ask for at least as many, or delete the file."
        )
    return found


class _Steps:
    """Compiled steps."""

    def __init__(self, svi: SVI, kwargs: dict[str, Any], stable: bool) -> None:
        self.svi = svi
        self.kwargs = kwargs

        def step(inputs: Any, state: SVIState) -> tuple[SVIState, Float[Array, ""]]:
            batch, kwargs = inputs
            update = svi.stable_update if stable else svi.update
            return update(state, *batch, **kwargs)

        self.step = CompiledForLoop(step, donates=True)

    def until(
        self, stop: int, progress: Progress, batches: Iterator[Any], bar: tqdm.tqdm
    ) -> Progress:
        """Go on until `stop` steps are done."""
        state, losses, pending = progress.state, list(progress.losses), collections.deque[Array]()
        for done in range(len(losses), stop):
            batch = next(batches)
            if isinstance(self.svi, RowSVI) and done and done % self.svi.refresh_every == 0:
                state = self.svi.refresh(state, *batch, **self.kwargs)
            state, loss = self.step((batch, self.kwargs), state)
            pending.append(loss)
            # Or batches that wait for their steps would fill the device.
            if len(pending) > _AHEAD:
                losses.append(np.asarray(pending.popleft()))
            bar.update()
        losses.extend(map(np.asarray, pending))
        recent = losses[len(progress.losses) :]
        bar.set_postfix_str(
            f"avg. loss of {len(recent)} steps: {jnp.nanmean(jnp.array(recent)):.4f}"
        )
        return progress._replace(
            state=state,
            losses=np.array(losses),
            position=batches.get_state(),  # type: ignore[attr-defined]
        )
