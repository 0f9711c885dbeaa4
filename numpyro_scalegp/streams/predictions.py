"""Predictions for all rows of a stream, written in chunks as they are computed."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.compiled import CompiledForLoop
from numpyro_scalegp.saving.file import Path, as_path, put_in_place
from numpyro_scalegp.streams.extra import imported
from numpyro_scalegp.streams.stream import Stream, parts_of

Columns = dict[str, Any]
Write = Callable[[Columns], None]


def predict(
    posterior: AbstractPosterior | Callable[[Float[Array, "m d"]], Columns],
    stream: Stream,
    file: Path,
    *,
    chunk_size: int = 2**16,
) -> None:
    """Write a posterior's mean and variance at all rows of a stream, in the order of the data.

    The file appears only when it is complete. Host memory holds a few chunks, regardless of the
    number of rows.

    Args:
        posterior: a posterior over one function; or any function from inputs X, shape (m, d), to a
            dict of arrays of shape (m,), such as
            `lambda X: {"rate": jnp.exp(posterior.mean(X) + posterior.variance(X) / 2)}`. The
            function is compiled.
        stream: the stream of the inputs X, after its `map`s.
        file: `*.parquet`, with the columns `mean` and `variance` and a row group for each chunk; or
            `*.npy`, an array of shape (n, 2) with these columns, for `numpy.load` with `mmap_mode`.
            The arrays of a function become columns in the order of its dict.
        chunk_size: number of rows predicted at a time.

    Raises:
        TypeError: if `posterior` is neither a posterior nor a function that returns such a dict, or
            `file` is not a path.
        OSError: if `file` cannot be written; the message names it, and an existing file is left
            unchanged.
        ValueError: if `file` does not end in .parquet or .npy, or an array has another shape.
        ImportError: if grain or, for a Parquet file, pyarrow is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> posterior = sgp.GaussianProcess(sgp.kernels.RBF(0.3), X, 0.1).condition(jnp.ones(5))
        >>> stream = sgp.streams.arrays(np.zeros((100, 1)), batch_size=10, seed=0)
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "predictions.npy"
        >>> sgp.streams.predict(posterior, stream, file)
        >>> np.load(file).shape
        (100, 2)
    """
    checks.instance("stream", stream, Stream, "of `sgp.streams.parquet` or `sgp.streams.arrays`")
    checks.count("chunk_size", chunk_size)
    file = as_path(file, "file")
    # At most the number of rows, so that a few rows are not padded to a large chunk.
    size = min(chunk_size, stream.num_rows)
    compute, function = CompiledForLoop(_columns), _function(posterior)
    with put_in_place(file) as out, _writer(file, out, stream.num_rows) as write:
        previous: tuple[Any, int] | None = None
        for batch in stream.chunks(size):
            X = parts_of(batch)[0]
            current = compute(function, jnp.asarray(_padded(X, size))), len(X)
            if previous is not None:  # written while the device computes the current chunk
                write(_on_host(*previous))
            previous = current
        if previous is not None:
            write(_on_host(*previous))


def _function(posterior: Any) -> Callable[[Array], Columns]:
    if isinstance(posterior, AbstractPosterior):
        # The posterior is an argument of the compiled program, not a constant in it.
        return eqx.Partial(_moments, posterior)
    if callable(posterior) and not isinstance(posterior, type):
        return posterior
    raise TypeError(
        "`posterior` must be a posterior or a function of inputs, got "
        f"{checks.described(posterior)}."
    )


def _moments(posterior: AbstractPosterior, X: Array) -> Columns:
    return {"mean": posterior.mean(X), "variance": posterior.variance(X)}


def _columns(function: Callable[[Array], Columns], X: Array) -> tuple[list[str], list[Array]]:
    """Names and columns at inputs, checked. JAX would sort the keys of a dict."""
    columns = function(X)
    if not (isinstance(columns, dict) and columns and all(isinstance(n, str) for n in columns)):
        raise TypeError(
            "`posterior` must return a dict of arrays by the names of columns, such as "
            f'{{"mean": posterior.mean(X)}}, got {checks.described(columns)}.'
        )
    for name, values in columns.items():
        if np.shape(values) != (len(X),):
            raise ValueError(
                f"`{name}` must have one value for each row, got shape {np.shape(values)} for "
                f"{len(X)} rows: for several functions or outputs pass a function that gives each "
                "a name."
            )
    return list(columns), list(columns.values())


def _padded(X: Num[np.ndarray, "m d"], size: int) -> Num[np.ndarray, "size d"]:
    """X padded with its last row to the size of a chunk, so that all chunks use one program."""
    return X if len(X) >= size else np.concatenate([X, np.repeat(X[-1:], size - len(X), axis=0)])


def _on_host(columns: tuple[list[str], list[Array]], size: int) -> Columns:
    return {name: as_numpy(values)[:size] for name, values in zip(*columns, strict=True)}


@contextlib.contextmanager
def _writer(file: str, out: BinaryIO, num_rows: int) -> Iterator[Write]:
    """A function that appends columns to a file in the format of its extension."""
    ending = os.path.splitext(file)[1]
    if ending == ".npy":
        yield _to_numpy(out, num_rows)
    elif ending == ".parquet":
        with contextlib.ExitStack() as stack:
            yield _to_parquet(out, stack)
    else:
        raise ValueError(f"`file` must end in .parquet or .npy, got {file!r}.")


def _to_numpy(out: BinaryIO, num_rows: int) -> Write:
    def write(columns: Columns) -> None:
        table = np.stack(list(columns.values()), axis=1)
        if out.tell() == 0:
            descr = np.lib.format.dtype_to_descr(table.dtype)
            shape = (num_rows, table.shape[1])
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(out, header)
        out.write(table.tobytes())

    return write


def _to_parquet(out: BinaryIO, stack: contextlib.ExitStack) -> Write:
    pyarrow, parquet = imported("pyarrow"), imported("pyarrow.parquet")
    writers: list[Any] = []

    def write(columns: Columns) -> None:
        table = pyarrow.table(columns)
        if not writers:
            writers.append(stack.enter_context(parquet.ParquetWriter(out, table.schema)))
        writers[0].write_table(table)

    return write
