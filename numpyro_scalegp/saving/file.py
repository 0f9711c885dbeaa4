"""Read and write `.npz` files; a file is replaced only when the new one is complete."""

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


Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def as_path(value: Any, name: str = "path") -> str:
    """A path as a string.

    Raises:
        TypeError: if `value` is not a path; the message calls it `name`.
        ValueError: if it is empty, or holds a null character.
    """
    if not isinstance(value, str | bytes | os.PathLike):
        got = value if isinstance(value, int | float | None) else f"a `{type(value).__name__}`"
        raise TypeError(f'`{name}` must be a path, such as "fit.npz", got {got}.')
    path = os.fsdecode(value)
    if not path or "\0" in path:
        raise ValueError(f"`{name}` must be the name of a file, got {path!r}.")
    return path


def write(path: str, structure: Any, arrays: dict[str, np.ndarray]) -> None:
    """Write a file. An existing file at `path` stays until the new one is complete.

    Raises:
        ValueError: if the structure cannot be written as JSON.
        OSError: if the file cannot be written.
    """
    header = {"format": _FORMAT, "version": _VERSION, "structure": structure}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with put_in_place(path) as file:
        np.savez(file, **{_STRUCTURE: text, **arrays})  # type: ignore[arg-type]


def read(path: str) -> tuple[Any, dict[str, np.ndarray]]:
    """The structure and the arrays of a file.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if the file is cut short, damaged, or was not written by `write`.
        OSError: if the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            compressed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
            if compressed:
                raise ValueError(f"the entries {compressed} are compressed")
            if sum(entry.file_size for entry in entries) > os.path.getsize(path):
                raise ValueError("its entries overlap")
            arrays = {entry.filename: _read(archive, entry) for entry in entries}
        header = json.loads(arrays.pop(f"{_STRUCTURE}.npy").tobytes())
        made_by, version = header["format"], header["version"]
    except Exception as error:
        # The readers raise many types of errors for a damaged file, EINVAL among them: a damaged
        # archive directory makes `zipfile` seek to a negative position.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise _naming(error, path) from error
        raise ValueError(
            f"`{path}` is damaged, cut short or no file that `sgp.save` wrote "
            f"({type(error).__name__}: {error})."
        ) from error
    if made_by != _FORMAT or version != _VERSION:
        raise ValueError(
            f"`{path}` has the format {made_by!r}, version {version!r}; this release "
            f"reads {_FORMAT!r}, version {_VERSION}."
        )
    return header["structure"], {name.removesuffix(".npy"): arrays[name] for name in arrays}


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """An entry's array, read without unpickling and without trusting the size it claims."""
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


def _naming(error: OSError, path: str) -> OSError:
    """The error with the file's name in its message."""
    if error.filename is not None:
        return error
    if error.errno is None:
        return OSError(f"`{path}`: {error}")
    return OSError(error.errno, error.strerror, path)


def place_of(path: str) -> str:
    """The real path at which a file will be written, after checking that it can be.

    Raises:
        OSError: if it is a directory or a device, or its folder does not exist or is not writable.
    """
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise IsADirectoryError(f"`{path}` is a directory: give the name of a file.")
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(
            f"`{path}` is a device or a pipe, which a file would replace: give the name of a file."
        )
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder `{folder}` for `{path}`: create it.")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"the folder `{folder}` for `{path}` cannot be written to.")
    return target


@contextlib.contextmanager
def put_in_place(path: str) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when it is complete and on the disk.

    Raises:
        OSError: if the file cannot be written; the message names it, and an existing file stays.
    """
    target = place_of(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:40]}.{uuid.uuid4().hex}.tmp")
    # With the permissions of the user's umask, as by `open`, which `tempfile` ignores.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(target):
            os.chmod(temporary, os.stat(target).st_mode & 0o7777)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        if isinstance(error, OSError):
            raise _naming(error, path) from error
        raise
    _sync_folder(folder)


_BINARY = getattr(os, "O_BINARY", 0)


def _sync_folder(folder: str) -> None:
    """Flush the folder's new entry to the disk, if the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by some file systems
            raise
    finally:
        os.close(descriptor)
