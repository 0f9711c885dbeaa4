"""Checks that a guide's process and the model's prior have the same kernel and mean."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks

# Guide and model compute the hyperparameters separately, with different rounding errors.
_TOLERANCE = 1e-3

# Larger arrays are compared at a subset of about this many entries.
_ENTRIES = 64


def same_prior(process: Any, prior: Any) -> Float[Array, ""]:
    """`one_if_same` for the kernels of a process without a mean function and of a prior.

    Raises:
        ValueError: as `one_if_same`; if the prior has a mean function.
    """
    if prior.mean_function is not None:
        raise ValueError(
            "the guide's process and the model's prior differ: the prior has a mean function. Use "
            "a guide from sgp.guides, which adds that mean function, or a prior without one, and "
            "add the mean to the function in the model."
        )
    return one_if_same("kernel", process.kernel, prior.kernel)


def one_if_same(name: str, of_guide: Any, of_prior: Any) -> Float[Array, ""]:
    """The factor on the divergence of a guide from a prior: 1 if they agree, NaN otherwise.

    The divergence between processes with different kernels is infinite, and formulas that assume
    equal kernels do not apply. Functions, such as networks in closures, are assumed to be the same.

    Args:
        name: what is compared, for the error.
        of_guide: kernel, features or parameters of the guide's process.
        of_prior: kernel, features or parameters of the prior.

    Raises:
        ValueError: if classes, shapes, options or concrete values differ.
    """
    leaves = list(_leaves(name, of_guide)), list(_leaves(name, of_prior))
    same = jnp.ones((), bool)
    for index in range(max(map(len, leaves))):
        (guide_path, guide_leaf), (prior_path, prior_leaf) = (
            pairs[index] if index < len(pairs) else ("nothing", None) for pairs in leaves
        )
        equal = guide_path == prior_path and _equal(guide_leaf, prior_leaf)
        if checks.is_concrete(equal):
            if not equal:
                raise ValueError(
                    f"the guide's process and the model's prior differ: `{guide_path}` is "
                    f"{guide_leaf} in the guide, `{prior_path}` is {prior_leaf} in the model. Give "
                    f"both the same {name}, as sgp.guides do."
                )
        else:
            same &= equal
    return jnp.where(same, 1.0, jnp.nan)


def _leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Classes, arrays and options, each with its path."""
    if isinstance(node, eqx.Module):
        yield path, type(node).__name__
        for field in dataclasses.fields(node):
            yield from _leaves(f"{path}.{field.name}", getattr(node, field.name))
    elif isinstance(node, tuple | list):
        for index, item in enumerate(node):
            yield from _leaves(f"{path}[{index}]", item)
    elif isinstance(node, dict):
        for key, item in node.items():
            yield from _leaves(f"{path}[{key!r}]", item)
    elif callable(node):  # such as the arrays in a `jax.tree_util.Partial`
        arrays = filter(eqx.is_array_like, jax.tree.leaves(node))
        yield from ((f"{path}[{index}]", leaf) for index, leaf in enumerate(arrays))
    else:
        yield path, node


def _equal(leaf: Any, prior_leaf: Any) -> Any:
    """Whether two leaves are equal: an array if either is traced."""
    if leaf is prior_leaf:
        return True
    if not (eqx.is_array_like(leaf) and eqx.is_array_like(prior_leaf)):
        return leaf == prior_leaf
    arrays = _plain(leaf), _plain(prior_leaf)
    if jnp.shape(arrays[0]) != jnp.shape(arrays[1]):
        return False
    concrete = checks.is_concrete(arrays)
    numpy = np if concrete else jnp
    entries = [numpy.reshape(array, -1)[:: max(1, array.size // _ENTRIES)] for array in arrays]
    close = numpy.isclose(*entries, rtol=_TOLERANCE, atol=0.0, equal_nan=True).all()
    return bool(close) if concrete else close


def _plain(array: Any) -> Any:
    """The array in NumPy if it is concrete, otherwise without derivatives."""
    if jnp.issubdtype(getattr(array, "dtype", float), jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array) if checks.is_concrete(array) else jax.lax.stop_gradient(array)
