"""Whether marginals of a function are enough: a check of how a likelihood depends on its rows."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks

# What a term may be off by: part of what it varies by, and of its size in units of rounding.
_TOLERANCE = 1e-3


_ROUNDING = 100.0


# Sizes of f at which it is probed: rows may be combined for negative or large values alone, and
# beside large observations small values leave no trace.
_SCALES = (1.0, -1.0, 30.0, -30.0, 1e3, 3e4)


def check_additive(
    terms: Callable[[Float[Array, "*batch n"]], dict[str, Array]],
    like: Float[Array, "*batch n"],
    site: str,
) -> None:
    """Raise unless each term is a sum of functions of single values of f.

    Only then its expectation follows from the marginals of f. With f = p in some rows and q in the
    others, and the converse, such a term adds up to what it is at p and at q. Rows are parted by
    the binary digits of their indices, of which any two differ. Both signs and several sizes of p
    and q are tried.

    It runs on the host, once where a step is compiled, with `standing_in`.

    Args:
        terms: log densities and the like, by the name of their site, given f.
        like: an f, of which shape and type count.
        site: the name of the function site.

    Raises:
        ValueError: if a term combines values of f. Time O(log2(n)) evaluations of the terms.
    """
    generator = np.random.default_rng(0)
    p, q = (generator.uniform(*ends, like.shape) for ends in ((0.1, 0.4), (0.6, 0.9)))
    number = np.arange(like.size).reshape(like.shape)
    names: list[str] = []

    def values(f: Array) -> list[Array]:
        found = terms(f)
        names[:] = list(found)
        return list(found.values())

    evaluate = standing_in(values, like)
    for scale in _SCALES:
        at_p, at_q = evaluate(scale * p), evaluate(scale * q)
        for digit in range(max(like.size - 1, 0).bit_length()):
            half = (number >> digit & 1).astype(bool)
            parts = np.where(half, p, q), np.where(half, q, p)
            mixed = [evaluate(scale * f) for f in parts]
            for name, *of_one in zip(names, at_p, at_q, *mixed, strict=True):
                if _combines(*of_one):
                    _refuse(name, site)


def _refuse(name: str, site: str) -> NoReturn:
    raise ValueError(
        f"the site `{name}` combines rows of the function `{site}`, or functions of its plate: "
        "only of terms that each depend on one value is the expectation known from the "
        "marginals. Train with sgp.infer.JointELBO, which draws f jointly, or run NUTS on the "
        "model. Several functions may also be sites of their own, outside of plates, with "
        "nested guides."
    )


def _combines(at_p: np.ndarray, at_q: np.ndarray, one: np.ndarray, other: np.ndarray) -> bool:
    """Whether an entry is no sum over rows; what is not finite is no evidence."""
    eps = float(np.finfo(at_p.dtype).eps)
    at_p, at_q, one, other = (array.astype(float) for array in (at_p, at_q, one, other))
    with np.errstate(invalid="ignore", over="ignore"):
        varied = np.abs(at_q - at_p) + np.abs(one - at_p) + np.abs(other - at_p)
        rounding = _ROUNDING * eps * np.maximum(np.abs(at_p), np.abs(at_q))
        excess = np.abs((one - at_p) + (other - at_q))
        return bool(np.any(excess > _TOLERANCE * varied + rounding))


def affine_names(
    values: Callable[[Float[Array, "*batch n"]], dict[str, Array]],
    like: Float[Array, "*batch n"],
    scales: Sequence[float] | None = None,
) -> set[str]:
    """The names of what is affine in f: half way between two f, half way between their values.

    Args:
        values: arrays by name, given f; it may close over traced values.
        like: an f, of which shape and type count.
        scales: sizes of f at which it is probed; None for many, of both signs.

    Returns:
        The names, from evaluations on the host.
    """
    generator = np.random.default_rng(0)
    names: list[str] = []

    def flat(f: Array) -> list[Array]:
        found = values(f)
        names[:] = list(found)
        return list(found.values())

    evaluate = standing_in(flat, like)
    curved = set()
    for scale in _SCALES if scales is None else scales:
        p, q = scale * generator.uniform(-1.0, 1.0, (2, *like.shape))
        of_three = map(evaluate, (p, q, 0.5 * (p + q)))
        for name, at_p, at_q, half in zip(names, *of_three, strict=True):
            # An entry that is affine is the sum of its parts at p / 2 and at q / 2.
            if _combines(at_p, at_q, half, half):
                curved.add(name)
    return set(names) - curved


def combining_rows(
    values: Callable[[Float[Array, "*batch n"]], dict[str, list[Array]]],
    like: Float[Array, "*batch n"],
) -> list[str]:
    """The names of what has an entry that depends on more than one row of f.

    With f = p in some rows and q in the others, an entry that depends on one row is what it is at p
    or what it is at q.

    Args:
        values: arrays by name, given f; it may close over traced values.
        like: an f, of which shape and type count.

    Returns:
        The names, from O(log2(n)) evaluations on the host.
    """
    generator = np.random.default_rng(0)
    p, q = generator.normal(size=(2, *like.shape))
    number = np.arange(like.shape[-1])
    names: list[str] = []

    def flat(f: Array) -> list[Array]:
        found = [(name, leaf) for name, leaves in values(f).items() for leaf in leaves]
        names[:] = [name for name, _ in found]
        return [leaf for _, leaf in found]

    evaluate = standing_in(flat, like)
    combining = set()
    for scale in (1.0, 30.0):
        at_p, at_q = evaluate(scale * p), evaluate(scale * q)
        for digit in range(max(len(number) - 1, 0).bit_length()):
            mixed = evaluate(scale * np.where(number >> digit & 1, p, q))
            for name, one, other, both in zip(names, at_p, at_q, mixed, strict=True):
                near = [
                    np.isclose(both, end, rtol=_TOLERANCE, atol=0.0, equal_nan=True)
                    for end in (one, other)
                ]
                if not np.all(near[0] | near[1]):
                    combining.add(name)
    return sorted(combining)


def standing_in(
    function: Callable[[Float[Array, "*batch n"]], list[Array]], like: Float[Array, "*batch n"]
) -> Callable[[Any], list[np.ndarray]]:
    """A function of f that can be evaluated now, though it depends on traced values.

    These stand in it as random ones, from 0.2 to 0.8 or 0 and 1, square matrices positive definite.

    Args:
        function: of f; it may close over traced values.
        like: an f, of which shape and type count.

    Returns:
        The function of a concrete f, compiled, with results on the host.
    """

    def floating(f: Array) -> list[Array]:
        return [jnp.asarray(leaf, jnp.result_type(leaf, float)) for leaf in function(f)]

    closed = jax.make_jaxpr(floating)(jax.ShapeDtypeStruct(like.shape, like.dtype))
    generator = np.random.default_rng(1)
    # On the host, and called as compiled: JAX would compile operations one by one here.
    constants = [_stand_in(value, generator) for value in closed.consts]

    def evaluate(constants: list[Any], f: Array) -> list[Array]:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, constants))(f)

    program = jax.jit(evaluate).lower(constants, np.zeros(like.shape, like.dtype)).compile()

    def now(f: Any) -> list[np.ndarray]:
        # Whatever warns of a covariance would warn of one that is made of random numbers, in a
        # callback, which reads what it gets.
        with jax.ensure_compile_time_eval(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = jax.device_get(program(constants, np.asarray(f, like.dtype)))
            jax.effects_barrier()
        return [np.asarray(leaf) for leaf in found]

    return now


def _stand_in(value: Any, generator: np.random.Generator) -> Any:
    """A value in the place of a traced one; others as they are."""
    if checks.is_concrete(value):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        shape = jax.eval_shape(jax.random.key_data, value).shape
        bits = generator.integers(0, 2**32, shape, np.uint32)
        with jax.ensure_compile_time_eval():
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return generator.integers(0, 2, value.shape).astype(value.dtype)
    some = generator.uniform(0.2, 0.8, value.shape)
    if value.ndim >= 2 and value.shape[-1] == value.shape[-2]:
        some = (some + some.swapaxes(-1, -2)) / value.shape[-1] + np.eye(value.shape[-1])
    return some.astype(value.dtype)
