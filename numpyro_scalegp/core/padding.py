"""Data that grow within arrays of one shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_scalegp.core import checks, tables


def pad_rows(size: int, array: Any, /, *more_arrays: Any) -> tuple[Any, ...]:
    """Pad data that grow to a fixed number of rows, so that compiled programs serve all of them.

    A program compiled for `size` rows serves as many observations, which a mask tells from the
    padding: `X, y, observed = sgp.pad_rows(size, X, y)`, then
    `sgp.GaussianProcess(kernel, X, noise, observed=observed)`. Call the model, `SVI.update` and
    `sgp.posterior` within a function under `jax.jit` that takes the three arrays: outside of one, a
    known mask removes the padding, and each number of observations is compiled again. With a
    `state`, this holds for `SVI.init` too: `jax.jit(svi.init)`. The computations are those for
    `size` rows. `Vecchia` and `FullScale` search for neighbors, and need a known mask.

    Args:
        size: the number of rows with padding, at least n.
        array: an array with a leading axis of n rows, a data frame or a list of numbers; or a
            pytree of these, or None.
        *more_arrays: arrays with the same number of rows.

    Returns:
        The arrays with their last row repeated, and the mask of the first n rows, shape (size,), as
        NumPy arrays, unless an array is traced; None stays None.

    Raises:
        TypeError: if `size` is not an integer, or a table holds anything but numbers.
        ValueError: if an array has masked entries, `size` is below n, there are no rows, the
            numbers of rows differ, or an array has no axes.

    Example:
        >>> import numpy as np
        >>> import numpyro_scalegp as sgp
        >>> X, y, observed = sgp.pad_rows(4, np.ones((2, 3)), np.ones(2))
        >>> X.shape, y.shape, observed.tolist()
        ((4, 3), (4,), [True, True, False, False])
    """
    for leaf in jax.tree.leaves((array, *more_arrays)):
        checks.not_masked("array", leaf)
    arrays = tables.as_arrays((array, *more_arrays), "array")
    n = tables.num_rows(arrays)
    if n == 0:
        raise ValueError("`array` must have at least one row, which the padding repeats.")
    if checks.count("size", size) < n:
        raise ValueError(f"`size` must be at least {n}, the number of rows, got {size}.")

    def pad(leaf: Any) -> Any:
        module = jnp if isinstance(leaf, jax.core.Tracer) else np
        rows = module.asarray(leaf)
        return module.concatenate([rows, module.repeat(rows[-1:], size - n, axis=0)])

    return *jax.tree.map(pad, arrays), np.arange(size) < n
