"""Whether marginals of a function are enough: a check of how a likelihood depends on its rows."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Float

from numpyro_scalegp.core import checks, programs
from numpyro_scalegp.core.host import as_numpy

# What a term may be off by: part of what it varies by, and of its size in units of rounding.
_TOLERANCE = 1e-3


_ROUNDING = 100.0


# Sizes of f at which it is probed: rows may be combined for negative or large values alone, and
# beside large observations small values leave no trace.
_SCALES = (1.0, -1.0, 30.0, -30.0, 1e3, 3e4)

# Sizes of f at which entries have any sign and size at once: one may switch what becomes of others.
_MIXED = (1.0, 4.0, 16.0, 64.0)

# With more axes than these, further functions have an axis of their own, which is always right.
_MANY_AXES = 30

# Whole numbers below these stand in for traced data and indices.
_BOUNDS = (3, 10, 100)


def check_additive(
    terms: Callable[[Float[Array, "*batch n"]], dict[str, Array]],
    like: Float[Array, "*batch n"],
    site: str,
) -> None:
    """Raise unless each term is a sum of functions of single values of f.

    Only then its expectation follows from the marginals of f. With f = p in some rows and q in the
    others, and the converse, such a term adds up to what it is at p and at q. Rows are parted by
    the binary digits of their indices, of which any two differ. Both signs and several sizes of p
    and q are tried, the same for all entries and mixed.

    It runs on the host, once where a step is compiled, with `standing_in`.

    Args:
        terms: log densities and the like, by the name of their site, given f.
        like: an f, of which shape and type count.
        site: the name of the function site.

    Raises:
        ValueError: if a term combines values of f. Time O(log2(n)) evaluations of the terms.
    """
    names: list[str] = []
    evaluate = standing_in(lambda f: _listed(terms(f), names), like)

    def at(f: Any, size: float | None) -> list[np.ndarray]:
        return evaluate(f)

    for place in sorted(_combining(at, np.arange(like.size).reshape(like.shape))):
        what = f"rows of the function `{site}`, or functions of its plate"
        other = " Where functions alone are combined, sgp.infer.QuadratureELBO trains as well."
        _refuse(names[place], what, "value", other)


def function_axes(
    terms: Callable[[dict[str, Array]], dict[str, Array]],
    like: dict[str, Float[Array, "..."]],
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Which functions of a plate each term combines.

    A term is a sum of terms of single rows, and these may combine functions. Those on one axis are
    not combined with each other, so that nodes for one do for all of them. As `check_additive`, it
    runs on the host.

    Args:
        terms: log densities and the like, by the name of their site, given all functions.
        like: functions by name, each of shape (*batch, n), of which shapes and types count.

    Returns:
        For each term and each site of functions, a number from zero for each function of its
        plate, flattened. All are zero if none are combined.

    Raises:
        ValueError: if a term combines rows. Time O(log2(n)) evaluations of the terms, and one for
            each two functions that are combined.
    """
    names: list[str] = []

    def values(*functions: Array) -> list[Array]:
        return _listed(terms(dict(zip(like, functions, strict=True))), names)

    evaluate = standing_in(values, *like.values())
    axes: dict[str, dict[str, tuple[int, ...]]] = {}
    for site, f in like.items():
        at = _along(evaluate, list(like).index(site), list(like.values()))

        size = math.prod(f.shape[:-1])
        for place in sorted(_combining(at, np.broadcast_to(np.arange(f.shape[-1]), f.shape))):
            _refuse(names[place], f"rows of the function `{site}`", "row")
        number = np.broadcast_to(np.arange(size).reshape(*f.shape[:-1], 1), f.shape)
        combined = _combining(at, number)
        colors = _colors(at, number, combined)
        for place, name in enumerate(names):
            axes.setdefault(name, {})[site] = colors if place in combined else (0,) * size
    return axes


def separable(
    terms: Callable[..., list[Array]], like: Sequence[Float[Array, "..."]]
) -> list[set[int]]:
    """For each argument, the places of the terms that are sums of functions of single entries.

    Args:
        terms: log densities and the like, given all arguments.
        like: arguments, of which shapes and types count.
    """
    evaluate = standing_in(terms, *like)
    num_terms = len(evaluate(*(np.zeros(array.shape) for array in like)))
    found = []
    for place, array in enumerate(like):
        number = np.arange(array.size).reshape(array.shape)
        combining = _combining(_along(evaluate, place, like), number)
        found.append(set(range(num_terms)) - combining)
    return found


def _listed(terms: dict[str, Array], names: list[str]) -> list[Array]:
    names[:] = list(terms)
    return list(terms.values())


# Values given one argument, and the size of the others where signs and sizes are mixed.
At = Callable[[Any, float | None], list[np.ndarray]]


def _along(
    evaluate: Callable[..., list[np.ndarray]], place: int, like: Sequence[Float[Array, "..."]]
) -> At:
    """The values as a function of one argument, at some values of the others."""

    @functools.cache
    def others(size: float | None) -> list[np.ndarray]:
        generator = np.random.default_rng(2)
        # Not at zero: beside zeros of the others, a product shows nothing.
        ends = (0.2, 0.8) if size is None else (-size, size)
        return [generator.uniform(*ends, array.shape) for array in like]

    def at(values: Any, size: float | None) -> list[np.ndarray]:
        given = others(size)
        return evaluate(*given[:place], values, *given[place + 1 :])

    return at


def _ends(shape: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray, float | None]]:
    """Pairs of values of f that differ everywhere, and their size where signs are mixed."""
    generator = np.random.default_rng(0)
    low, high = (generator.uniform(*ends, shape) for ends in ((0.1, 0.4), (0.6, 0.9)))
    mixed = [(size, generator.uniform(-size, size, (2, *shape))) for size in _MIXED]
    return [
        *((scale * low, scale * high, None) for scale in _SCALES),
        *((*pair, size) for size, pair in mixed),
    ]


def _combining(at: At, number: np.ndarray) -> set[int]:
    """The places of the terms that are no sum over groups of entries, those of one number."""
    found: set[int] = set()
    num_digits = int(number.max(initial=0)).bit_length()
    for p, q, size in _ends(number.shape) if num_digits else ():
        at_p, at_q = at(p, size), at(q, size)
        for digit in range(num_digits):
            half = (number >> digit & 1).astype(bool)
            mixed = [at(f, size) for f in (np.where(half, p, q), np.where(half, q, p))]
            for place, of_one in enumerate(zip(at_p, at_q, *mixed, strict=True)):
                if place not in found and _combines(*of_one):
                    found.add(place)
    return found


def _colors(at: At, number: np.ndarray, combined: set[int]) -> tuple[int, ...]:
    """For each number, the first axis of which no entries are combined with its own."""
    ends = _ends(number.shape)

    @functools.cache
    def moved(pair: int, members: frozenset[int]) -> list[np.ndarray]:
        p, q, size = ends[pair]
        return at(np.where(np.isin(number, list(members)), q, p), size)

    def combines(one: frozenset[int], other: frozenset[int]) -> bool:
        def of(pair: int) -> bool:
            four = (moved(pair, s) for s in (frozenset[int](), one | other, one, other))
            return any(
                _combines(*arrays)
                for place, arrays in enumerate(zip(*four, strict=True))
                if place in combined
            )

        return any(map(of, range(len(ends))))

    axes: list[frozenset[int]] = []
    for new in range(int(number.max(initial=0)) + 1 if combined else 0):
        one = frozenset([new])
        # Of many axes, one more costs less than to look for one that is there.
        for axis, members in enumerate(axes if len(axes) <= _MANY_AXES else ()):
            if not combines(one, members):
                axes[axis] |= one
                break
        else:
            axes.append(one)
    places = {one: axis for axis, members in enumerate(axes) for one in members}
    return tuple(places[one] for one in sorted(places))


def _refuse(name: str, what: str, one: str, other: str = "") -> NoReturn:
    raise ValueError(
        f"the site `{name}` combines {what}: only of terms that each depend on one {one} is the "
        "expectation known from the marginals. Train with sgp.infer.JointELBO, which draws f "
        f"jointly, or run NUTS on the model.{other}"
    )


def _combines(at_p: np.ndarray, at_q: np.ndarray, one: np.ndarray, other: np.ndarray) -> bool:
    """Whether an entry is no sum over rows; what is not finite is no evidence."""
    eps = float(np.finfo(at_p.dtype).eps)
    values = np.array([at_p, at_q, one, other], float)
    at_p, at_q, one, other = values
    with np.errstate(invalid="ignore", over="ignore"):
        varied = np.abs(at_q - at_p) + np.abs(one - at_p) + np.abs(other - at_p)
        rounding = _ROUNDING * eps * np.max(np.abs(values), axis=0)
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
    function: Callable[..., list[Array]], *like: Float[Array, "..."]
) -> Callable[..., list[np.ndarray]]:
    """A function of arrays that can be evaluated now, though it depends on traced values.

    These stand in it as random ones, from 0.2 to 0.8 or 0 and 1, square matrices positive definite;
    if there are arrays among them, also as whole numbers, on which a likelihood's form may depend.

    Args:
        function: of arrays; it may close over traced values.
        *like: its arguments, of which shapes and types count.

    Returns:
        The function of concrete arrays, compiled, with results on the host, where those for each
        choice of what stands in are stacked.
    """

    def floating(*arrays: Array) -> list[Array]:
        return [jnp.asarray(leaf, jnp.result_type(leaf, float)) for leaf in function(*arrays)]

    closed = jax.make_jaxpr(floating)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in like))
    generator = np.random.default_rng(1)
    has_arrays = any(np.ndim(value) and not checks.is_concrete(value) for value in closed.consts)
    # On the host: JAX would compile operations one by one here.
    choices = [
        [_stand_in(value, generator, bound) for value in closed.consts]
        for bound in (None, *(_BOUNDS if has_arrays else ()))
    ]

    zeros = [np.zeros(array.shape, array.dtype) for array in like]
    run = programs.executable(ClosedJaxpr(closed.jaxpr, choices[0]), zeros)

    def now(*arrays: Any) -> list[np.ndarray]:
        # Whatever warns of a covariance would warn of one that is made of random numbers, in a
        # callback, which reads what it gets.
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            typed = [np.asarray(a, one.dtype) for a, one in zip(arrays, like, strict=True)]
            found = [list(map(as_numpy, run(constants, *typed))) for constants in choices]
            jax.effects_barrier()
        return list(map(np.stack, zip(*found, strict=True)))

    return now


def _stand_in(value: Any, generator: np.random.Generator, bound: int | None) -> Any:
    """A value in the place of a traced one; others as they are. In arrays, integers to a bound."""
    if checks.is_concrete(value):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        shape = jax.eval_shape(jax.random.key_data, value).shape
        bits = generator.integers(0, 2**32, shape, np.uint32)
        with jax.ensure_compile_time_eval():
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return generator.integers(0, bound or 2, value.shape).astype(value.dtype)
    some = generator.uniform(0.2, 0.8, value.shape)
    is_matrix = value.ndim >= 2 and value.shape[-1] == value.shape[-2]
    if bound and value.ndim and not is_matrix:
        some = generator.integers(0, bound, value.shape).astype(float)
    if is_matrix:
        some = (some + some.swapaxes(-1, -2)) / value.shape[-1] + np.eye(value.shape[-1])
    return some.astype(value.dtype)
