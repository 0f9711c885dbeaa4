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
    """Save a posterior, a kernel, parameters, a result or state of SVI, or containers of them.

    One `.npz` file holds everything: hyperparameters, data, representer weights, posterior samples,
    seeds, an optimizer's state. A loaded posterior predicts without another solve; training goes on
    from a loaded state as if it had not been interrupted. The file is written beside and then put
    in place: at each moment `path` is the old file or the new one, whole. A process that is killed
    while it saves may leave a file `.NAME.*.tmp`, which can be deleted.

    Code is not stored. Of functions and classes the file has the names; where a function has none
    that can be found again, such as a lambda or a closure, it has the arrays in there, and `load`
    takes the code from `like=`. Of users' code the file keeps what it gave at a few rows, which
    `load` compares: for a posterior that holds a model, conditioning on two draws.

    Where several processes hold an array together, all of them save; the first one writes the file.
    Such arrays are whole in the memory of each host meanwhile.

    Args:
        path: the file, by convention `*.npz`; it is replaced. A string, bytes or a `pathlib.Path`.
        fitted: the object: arrays, typed keys, numbers, strings, dicts, lists, tuples, named
            tuples, Equinox modules, NumPyro distributions, other pytrees, functions.

    Raises:
        ValueError: if something in it cannot be restored, with the path to it, such as
            `.kernel.lengthscale`; nothing is written then.
        TypeError: if `path` is none.
        OSError: if the file cannot be written, with its name; what was there before stays.

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
        raise ValueError("cannot save what holds itself or is nested too deeply.") from error
    if encoder.is_shared:
        _write_by_first(path, structure, encoder.arrays)
    else:
        file.write(path, structure, encoder.arrays)


def _write_by_first(path: str, structure: Any, arrays: dict[str, np.ndarray]) -> None:
    """Write the file in the first process, for which the others wait."""
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
    """Load what `save` wrote.

    A file cannot run code of its choice: classes it names are looked up in this package, Equinox,
    JAX, NumPyro, optax and Flax, functions in a short list of functions of arrays, and nothing is
    unpickled.

    Args:
        path: the file.
        like: an object of the same structure, such as `svi.init(key, *args)`, from which classes
            and functions are taken, while arrays, keys, numbers and strings come from the file. Its
            arrays may be `jax.ShapeDtypeStruct`, as `equinox.filter_eval_shape` makes them; where
            they lie on a mesh, those of the file are put there alike, whatever number of devices
            had them. Needed where functions are lambdas or closures; with it, no name in the file
            is looked up. A part of it may be `...`, for whatever the file has there.
        trusted: other packages whose classes and functions the file may name, or these classes and
            functions themselves, such as `("my_package", MyNetwork, my_mean)`. Packages are
            imported.

    Returns:
        The object. Arrays are on JAX's default device or on the mesh of those of `like`, NumPy's
        stay NumPy's. 64-bit arrays become 32-bit ones, with a warning, unless 64-bit types are
        enabled.

    Raises:
        TypeError: if `path` is none.
        FileNotFoundError: if there is no file.
        OSError: if it cannot be read, with its name.
        ValueError: if the file is damaged; if it names what is not trusted, lacks a field of a
            class or has one too many, or holds what its class does not take; or if it does not fit
            `like`; or if a function or class of the user's gives other values than it did when the
            object was saved. The message names the file and the path in the object.
    """
    decoder_trust = Trusted(trusted)
    path = file.as_path(path)
    structure, arrays = file.read(path)
    template = () if like is _NO_TEMPLATE else (like,)
    decoder = Decoder(arrays, decoder_trust, path)
    return decoder.load(structure, template)
