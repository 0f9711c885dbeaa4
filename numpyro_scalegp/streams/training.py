"""Training on a stream, with checkpoints from which it resumes."""

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
from numpyro_scalegp.programs.compiled import CompiledForLoop
from numpyro_scalegp.saving.api import load, save
from numpyro_scalegp.saving.file import Path, as_path, place_of
from numpyro_scalegp.streams.extra import imported
from numpyro_scalegp.streams.stream import Stream, parts_of
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.variational.quadruply.row_svi import RowSVI

# Number of batches on the device that wait for a step, and of steps that wait for the device.
_AHEAD = 2


class Progress(NamedTuple):
    """The content of a checkpoint."""

    state: SVIState
    losses: Any  # of the steps so far
    position: Any  # state of the stream's iterator before the next batch
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
    """Train on a stream: `SVI.run`, with a new batch in each step.

    The model receives the arrays of a batch as positional arguments, (X, y). Steps are compiled
    once and donate their buffers; the next two batches are on the device while a step runs.
    `RowSVI` refits its control variate every `refresh_every` steps, as in `RowSVI.run`.

    If the file `checkpoint` exists, training resumes from it, even if the process that wrote it
    was killed. The result is bit for bit the same as without interruption. `num_steps` includes
    the steps before the checkpoint and may be larger than in the earlier call.

    Args:
        svi: an `SVI` or `RowSVI`.
        key: a typed JAX key, for `svi.init` with the first batch.
        num_steps: number of steps, each with `stream.batch_size` rows.
        stream: a stream of `sgp.streams.parquet` or `sgp.streams.arrays`.
        checkpoint: the file, by convention `*.npz`; None for no checkpoints.
        every: number of steps between checkpoints. There is also one after the last step.
        place: a function that puts the arrays of a batch, which are its arguments, on devices and
            returns them in a tuple; `jax.device_put` by default. It runs in another thread.
        stable_update: whether to skip a step whose loss or gradient is not finite, as
            `SVI.stable_update` does.
        progress_bar: whether to show a progress bar.
        init_params: initial values of parameters, as for `SVI.init`.
        **kwargs: the model's keyword arguments, such as `size=stream.num_rows` for the plate.

    Returns:
        Parameters, state and the losses of all steps, shape (num_steps,).

    Raises:
        ValueError: if `num_steps` or `every` is not positive; if the checkpoint belongs to another
            model, other arrays or another order, or has more steps; if several processes cannot
            share one checkpoint.
        TypeError: if `checkpoint` is not a path.
        OSError: if `checkpoint` cannot be written, for example because its folder does not exist;
            if it was made with other files; if the stream's files have changed.

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
        place_of(checkpoint)  # raises now instead of at the first checkpoint
    batches = _on_device(stream, place)
    try:
        with contextlib.closing(iter(stream)) as iterator:
            batch = next(iterator)  # also the batch of the first step
        state = svi.init(
            checks.as_key(key), *_placed(batch, place), init_params=init_params, **kwargs
        )
        # Copies, because steps donate the arrays, which may belong to the model.
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
    """Raise if processes that share a state could not resume from one checkpoint."""
    if checkpoint is None:
        return
    descriptions = texts_of_processes(f"{tuple(stream.order)}, {os.path.exists(checkpoint)}")
    if len({*descriptions}) > 1:
        raise ValueError(
            f"the checkpoint `{checkpoint}` holds one position in the stream for all "
            "processes: their streams must have the same number of rows and the same arguments, "
            "and the file must exist for all of them or for none. Rows, batch size, window, "
            f"ranges, seed and whether the file exists: {'; '.join(descriptions)}."
        )


def _on_device(stream: Stream, place: Callable[..., Any] | None) -> Any:
    """An iterator that prefetches batches to devices."""
    placed = stream.batches.map(lambda batch: _placed(batch, place))
    prefetch = imported("grain.experimental").ThreadPrefetchIterDataset
    return iter(prefetch(placed, prefetch_buffer_size=_AHEAD))


def _resumed(checkpoint: str, start: Progress, num_steps: int, stream: Stream) -> Progress:
    """The progress in a checkpoint, if it belongs to this model and stream."""
    # `losses` has any length, since it is the number of steps.
    progress = load(checkpoint, like=start._replace(losses=..., data=...))
    if None not in (progress.data, start.data):
        stream.rows.check_fingerprint(progress.data, f"the checkpoint `{checkpoint}`")
    if progress.order != start.order:
        raise ValueError(
            f"`{checkpoint}` belongs to another stream: its rows, batch size, window, "
            f"ranges and seed are {progress.order}, but `stream` has {start.order}."
        )
    if len(progress.losses) > num_steps:
        raise ValueError(
            f"`{checkpoint}` has {len(progress.losses)} steps, and `num_steps` is "
            f"{num_steps}: ask for at least as many, or delete the file."
        )
    return progress


class _Steps:
    """Compiled training steps."""

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
        """Run steps until `stop` steps are done."""
        state, losses, pending = progress.state, list(progress.losses), collections.deque[Array]()
        for done in range(len(losses), stop):
            batch = next(batches)
            if isinstance(self.svi, RowSVI) and done and done % self.svi.refresh_every == 0:
                state = self.svi.refresh(state, *batch, **self.kwargs)
            state, loss = self.step((batch, self.kwargs), state)
            pending.append(loss)
            # Otherwise batches that wait for their steps would fill the device.
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
