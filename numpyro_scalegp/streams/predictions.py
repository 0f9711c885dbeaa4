"""Predictions for all rows of a stream, written as they are made."""

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
from numpyro_scalegp.core.programs import CompiledForLoop
from numpyro_scalegp.posteriors.posterior import AbstractPosterior
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

    The file is written beside and put in place when it is whole. Host memory holds a few chunks,
    whatever the number of rows.

    Args:
        posterior: of one function; or any function from inputs X, shape (m, d), to a dict of arrays
            of shape (m,), such as
            `lambda X: {"rate": jnp.exp(posterior.mean(X) + posterior.variance(X) / 2)}`. It is
            compiled.
        stream: of which X is taken, through its `map`s.
        file: `*.parquet`, with the columns `mean` and `variance` and a row group for each chunk; or
            `*.npy`, an array of shape (n, 2) with these columns, for `numpy.load` with `mmap_mode`.
            The columns of a function are in the order in which it gives them.
        chunk_size: rows worked on at a time.

    Raises:
        TypeError: if `posterior` is neither, or returns something else; if `file` is no path.
        OSError: if `file` cannot be written, with its name; what was there before stays.
        ValueError: if `file` has another ending, or an array another shape.
        ImportError: if grain is not installed or, for a Parquet file, pyarrow.

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
    # No more than there are, or a few rows would be padded to a large chunk.
    size = min(chunk_size, stream.num_rows)
    compute, function = CompiledForLoop(_columns), _function(posterior)
    with put_in_place(file) as out, _writer(file, out, stream.num_rows) as write:
        before: tuple[Any, int] | None = None
        for batch in stream.chunks(size):
            X = parts_of(batch)[0]
            now = compute(function, jnp.asarray(_padded(X, size))), len(X)
            if before is not None:  # the device works on one chunk while the last one is written
                write(_on_host(*before))
            before = now
        if before is not None:
            write(_on_host(*before))


def _function(posterior: Any) -> Callable[[Array], Columns]:
    if isinstance(posterior, AbstractPosterior):
        # An argument of what is compiled, and not a constant in it.
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
    """Names and columns at rows, checked; not a dict, whose keys JAX would put in order."""
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
    """Rows repeated up to the size of a chunk, so that the last one compiles nothing."""
    return X if len(X) >= size else np.concatenate([X, np.repeat(X[-1:], size - len(X), axis=0)])


def _on_host(columns: tuple[list[str], list[Array]], size: int) -> Columns:
    return {name: as_numpy(values)[:size] for name, values in zip(*columns, strict=True)}


@contextlib.contextmanager
def _writer(file: str, out: BinaryIO, num_rows: int) -> Iterator[Write]:
    """A function that appends columns to a file, of the kind that its name says."""
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
