"""Saving and loading of fitted objects."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from numpyro_scalegp.saving import file
from numpyro_scalegp.saving.decoding import Decoder
from numpyro_scalegp.saving.encoding import Encoder
from numpyro_scalegp.saving.names import Trusted


def save(path: file.Path, fitted: Any) -> None:
    """Save a posterior, a kernel, parameters, a result or state of SVI, or a container of these.

    One `.npz` file holds everything: hyperparameters, data, representer weights, posterior samples,
    seeds, the optimizer's state. A loaded posterior predicts without another solve, and training
    resumes from a loaded state as if it had not been interrupted. A temporary file is
    written to the same folder and then replaces `path`, so that `path` is always complete: the old
    file or the new one. A process that is killed while it saves may leave a file `.NAME.*.tmp`,
    which can be deleted.

    Code is not stored. The file holds the names of functions and classes. For a function that
    cannot be looked up by name, such as a lambda or a closure, it holds the arrays that the
    function captures, and `load` takes the code from `like=`. For functions and classes of yours,
    the file also holds their values at a few inputs (for a posterior that holds a model, its
    moments given two draws), which `load` compares with the values of the current code.

    If several processes share an array, all of them must call `save`; the first one writes the
    file. During the call, each host holds a full copy of these arrays.

    Args:
        path: the file, by convention `*.npz`; it is replaced. A string, bytes or a `pathlib.Path`.
        fitted: the object: arrays, typed keys, numbers, strings, dicts, lists, tuples, named
            tuples, Equinox modules, NumPyro distributions, other pytrees, functions.

    Raises:
        ValueError: if part of `fitted` cannot be restored; the message gives the path to it, such
            as `.kernel.lengthscale`, and nothing is written.
        TypeError: if `path` is not a path.
        OSError: if the file cannot be written; the message names it, and an existing file is left
            unchanged.

    Example:
        >>> import pathlib, tempfile
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> posterior = sgp.GaussianProcess(sgp.kernels.RBF(0.3), X, 0.1).condition(jnp.ones(5))
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "fit.npz"
        >>> sgp.save(file, posterior)
        >>> bool(jnp.all(sgp.load(file).mean(X) == posterior.mean(X)))
        True
    """
    path = file.as_path(path)
    encoder = Encoder()
    try:
        structure = encoder.encode(fitted, "")
    except RecursionError as error:
        raise ValueError(
            "cannot save an object that contains itself or is nested too deeply."
        ) from error
    if encoder.is_shared:
        _write_by_first(path, structure, encoder.arrays)
    else:
        file.write(path, structure, encoder.arrays)


def _write_by_first(path: str, structure: Any, arrays: dict[str, np.ndarray]) -> None:
    """Write the file in the first process while the other processes wait."""
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            file.write(path, structure, arrays)
        except Exception as error:
            failure = error
    is_written = multihost_utils.broadcast_one_to_all(np.array(failure is None))
    if failure is not None:
        raise failure
    if not is_written:
        raise OSError(f"the first process could not write `{path}`: see its error.")


_NO_TEMPLATE = object()


def load(
    path: file.Path,
    *,
    like: Any = _NO_TEMPLATE,
    trusted: Iterable[str | type | Callable[..., Any]] = (),
) -> Any:
    """Load an object from a file that `save` wrote.

    A file cannot run arbitrary code: the classes that it names are looked up in this package,
    Equinox, JAX, NumPyro, optax and Flax, the functions in a short list of array functions, and
    nothing is unpickled.

    Args:
        path: the file.
        like: a template, which is an object of the same structure, such as
            `svi.init(key, *args)`. Classes and functions are taken from the template; arrays, keys,
            numbers and strings come from the file. The template's arrays may be
            `jax.ShapeDtypeStruct`, as `equinox.filter_eval_shape` returns them; if they lie on a
            mesh, the loaded arrays are placed there in the same way, regardless of the number of
            devices when they were saved. A template is required if the object holds lambdas or
            closures; with a template, no name in the file is looked up. `...` as a part of the
            template accepts anything.
        trusted: further packages whose classes and functions the file may name, or these classes
            and functions themselves, such as `("my_package", MyNetwork, my_mean)`. Packages are
            imported.

    Returns:
        The object. JAX arrays are on the default device or placed as in `like`; NumPy arrays stay
        NumPy arrays. 64-bit arrays become 32-bit, with a warning, unless 64-bit types are enabled.

    Raises:
        TypeError: if `path` is not a path.
        FileNotFoundError: if there is no file.
        OSError: if the file cannot be read; the message names it.
        ValueError: if the file is damaged; if it names a class or function that is not trusted; if
            the fields of an object are not the fields of its class, or hold invalid values; if it
            does not match `like`; or if a function or class of yours computes other values than
            when the object was saved. The message names the file and the path in the object.
    """
    trusted_names = Trusted(trusted)
    path = file.as_path(path)
    structure, arrays = file.read(path)
    template = () if like is _NO_TEMPLATE else (like,)
    decoder = Decoder(arrays, trusted_names, path)
    return decoder.load(structure, template)
