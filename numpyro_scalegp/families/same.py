"""Whether two priors are the same, so that the divergence from one is that from the other."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks

# Hyperparameters are computed twice, by guide and model; of large arrays some entries will do.
_TOLERANCE = 1e-3


_ENTRIES = 64


def one_if_same(name: str, own: eqx.Module, prior: eqx.Module) -> Float[Array, ""]:
    """What to multiply the divergence from a prior with: 1, or NaN where that is another one.

    A divergence between processes of other kernels is infinite, and formulas that take the kernels
    to be the same do not apply. Functions, such as networks that are closures, are taken to be
    the same.

    Args:
        name: what is compared, for the error.
        own: kernel or features of the guide's process.
        prior: those of the prior.

    Raises:
        ValueError: if classes, shapes, options or concrete values differ.
    """
    pairs = list(_parts(name, own)), list(_parts(name, prior))
    same = jnp.ones((), bool)
    for place in range(max(map(len, pairs))):
        (path, one), (other_path, other) = (
            parts[place] if place < len(parts) else ("nothing", None) for parts in pairs
        )
        equal = path == other_path and _equal(one, other)
        if checks.is_concrete(equal):
            if not equal:
                raise ValueError(
                    f"the guide's process and the model's prior differ: `{path}` is {one} in the "
                    f"guide, `{other_path}` is {other} in the model. Give both the same {name}, as "
                    "sgp.guides do."
                )
        else:
            same &= equal
    return jnp.where(same, 1.0, jnp.nan)


def _parts(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Classes, arrays and options, each with its place."""
    if isinstance(node, eqx.Module):
        yield path, type(node).__name__
        for field in dataclasses.fields(node):
            yield from _parts(f"{path}.{field.name}", getattr(node, field.name))
    elif isinstance(node, tuple | list):
        for place, item in enumerate(node):
            yield from _parts(f"{path}[{place}]", item)
    elif isinstance(node, dict):
        for key, item in node.items():
            yield from _parts(f"{path}[{key!r}]", item)
    elif callable(node):  # what a partial holds besides its function
        arrays = filter(eqx.is_array_like, jax.tree.leaves(node))
        yield from ((f"{path}[{place}]", leaf) for place, leaf in enumerate(arrays))
    else:
        yield path, node


def _equal(one: Any, other: Any) -> Any:
    """Whether two parts are equal: an array where one of them is traced."""
    if one is other:
        return True
    if not (eqx.is_array_like(one) and eqx.is_array_like(other)):
        return one == other
    one, other = (_plain(array) for array in (one, other))
    if jnp.shape(one) != jnp.shape(other):
        return False
    concrete = checks.is_concrete((one, other))
    numpy = np if concrete else jnp
    some = [numpy.reshape(array, -1)[:: max(1, array.size // _ENTRIES)] for array in (one, other)]
    close = numpy.isclose(*some, rtol=_TOLERANCE, atol=0.0, equal_nan=True).all()
    return bool(close) if concrete else close


def _plain(array: Any) -> Any:
    """On the host where that is possible, without a derivative elsewhere."""
    if jnp.issubdtype(getattr(array, "dtype", float), jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array) if checks.is_concrete(array) else jax.lax.stop_gradient(array)
