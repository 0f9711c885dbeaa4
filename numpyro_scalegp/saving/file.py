"""A file that is whole or not there: NumPy's `.npz`, written beside and then put in place."""

import contextlib
import errno
import json
import os
import uuid
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

_STRUCTURE = "structure"
_FORMAT = "numpyro_scalegp"
_VERSION = 1


def write(path: str | os.PathLike[str], structure: Any, arrays: dict[str, np.ndarray]) -> None:
    """Write a file; until it is whole, what stands at `path` stays.

    Raises:
        ValueError: if the structure cannot be written as JSON.
    """
    header = {"format": _FORMAT, "version": _VERSION, "structure": structure}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with put_in_place(path) as file:
        np.savez(file, **{_STRUCTURE: text, **arrays})  # type: ignore[arg-type]


def read(path: str | os.PathLike[str]) -> tuple[Any, dict[str, np.ndarray]]:
    """The structure and the arrays of a file.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if it is cut short, damaged, or not a file that `write` wrote.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            packed = [one.filename for one in entries if one.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise ValueError(f"the entries {packed} are compressed")
            if sum(entry.file_size for entry in entries) > os.path.getsize(path):
                raise ValueError("its entries overlap")
            arrays = {entry.filename: _read(archive, entry) for entry in entries}
        header = json.loads(arrays.pop(f"{_STRUCTURE}.npy").tobytes())
        made_by, version = header["format"], header["version"]
    except (
        zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError, RecursionError,
        NotImplementedError, OverflowError, RuntimeError,
    ) as error:  # fmt: skip
        raise ValueError(
            f"`{os.fspath(path)}` is damaged, cut short or no file that `sgp.save` wrote "
            f"({type(error).__name__}: {error})."
        ) from error
    if made_by != _FORMAT or version != _VERSION:
        raise ValueError(
            f"`{os.fspath(path)}` has the format {made_by!r}, version {version!r}; this release "
            f"reads {_FORMAT!r}, version {_VERSION}."
        )
    return header["structure"], {name.removesuffix(".npy"): arrays[name] for name in arrays}


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """An array, of which no more is read than the file holds, and nothing unpickled."""
    with archive.open(entry) as file:
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[np.lib.format.read_magic(file)]
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError(f"the entry {entry.filename!r} holds pickled objects")
        data = file.read()
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(data) != size:
        raise ValueError(f"the entry {entry.filename!r} has {len(data)} bytes and needs {size}")
    array = np.frombuffer(data, dtype) if size else np.empty(shape, dtype)
    return array.reshape(shape, order="F" if fortran else "C")


def place_of(path: str | os.PathLike[str]) -> str:
    """Where a file is to lie, if there can be one.

    Raises:
        TypeError: if `path` is no path.
        OSError: if it is a directory, or the folder is not there or cannot be written to.
    """
    target = os.path.realpath(os.fspath(path))
    if os.path.isdir(target):
        raise IsADirectoryError(f"`{os.fspath(path)}` is a directory: give the name of a file.")
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder `{folder}` for `{os.fspath(path)}`: make it.")
    if not os.access(folder, os.W_OK):
        raise PermissionError(
            f"the folder `{folder}` for `{os.fspath(path)}` cannot be written to."
        )
    return target


@contextlib.contextmanager
def put_in_place(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when it is whole and on the disk."""
    target = place_of(path)
    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".{name[:40]}.{uuid.uuid4().hex}.tmp")
    # As `open` would make it: the user's umask holds, unlike with `tempfile`.
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(target):
            os.chmod(beside, os.stat(target).st_mode & 0o7777)
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)
        raise
    _sync_folder(folder)


_BINARY = getattr(os, "O_BINARY", 0)


def _sync_folder(folder: str) -> None:
    """Put the folder's new entry on the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such thing
            raise
    finally:
        os.close(descriptor)
