"""Numerical probes, on the host, of which entries of its arguments a program combines."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.likelihoods.rowwise import Kind, claims_of_results
from numpyro_scalegp.programs import compiled

# The tolerated error of a term, relative to its variation, and to its size in units of rounding.
_TOLERANCE = 1e-3
_ROUNDING = 100.0

# Scales of f for probes: a term may combine rows only for negative or for large values, and large
# observations can hide the effect of small values.
_SCALES = (1.0, -1.0, 30.0, -30.0, 1e3, 3e4)

# Scales for probes with mixed signs and sizes, where one entry may switch the role of others.
_MIXED = (1.0, 4.0, 16.0, 64.0)

# Beyond this many axes, each further function gets a separate axis, which is always valid.
_MANY_AXES = 30

# Upper bounds of random integers that replace traced data and indices.
_BOUNDS = (3, 10, 100)


# The results as a function of one argument, and of the size of the others (None: not mixed).
Evaluate = Callable[[Any, float | None], list[np.ndarray]]


class Probes:
    """A program's results at chosen arguments, on the host.

    Args:
        program: of arrays; its constants may be traced values, see `standing_in`.
    """

    def __init__(self, program: ClosedJaxpr) -> None:
        self.program = program
        self.shapes = [aval.shape for aval in program.in_avals]

    @functools.cached_property
    def evaluate(self) -> Callable[..., list[np.ndarray]]:
        """The program, compiled at the first call: often the operations show enough."""
        return standing_in(self.program)

    def _at_most(self, kind: Kind, argument: int, number: np.ndarray) -> list[bool]:
        """For each result, whether its operations show that it is of a kind, in these groups."""
        if not np.array_equal(number, np.broadcast_to(np.arange(number.shape[-1]), number.shape)):
            return [False] * len(self.program.out_avals)  # the groups are not rows
        claims = claims_of_results(self.program.jaxpr, (argument,))
        return [claim.kind <= kind for claim in claims]

    def _along(self, argument: int) -> Evaluate:
        """The results as a function of one argument, with random values of the others."""

        @functools.cache
        def random_arguments(size: float | None) -> list[np.ndarray]:
            generator = np.random.default_rng(2)
            # Nonzero, since a product with zero would hide the dependence.
            ends = (0.2, 0.8) if size is None else (-size, size)
            return [generator.uniform(*ends, shape) for shape in self.shapes]

        def evaluate(values: Any, size: float | None) -> list[np.ndarray]:
            arguments = random_arguments(size)
            return self.evaluate(*arguments[:argument], values, *arguments[argument + 1 :])

        return evaluate

    def combining(self, argument: int, number: np.ndarray) -> set[int]:
        """The positions of the results that combine groups of an argument's entries.

        A result that does not is a sum of functions of single groups. Let f be p in half of the
        groups and q in the other half, and g the converse: then the sum satisfies
        result(f) + result(g) = result(p) + result(q). The probes p and q have several scales, with
        equal and with mixed signs.

        Args:
            argument: the position of the argument.
            number: the group number of each entry.
        """
        at = self._along(argument)
        combining: set[int] = set()
        are_sums = self._at_most(Kind.SUM, argument, number)
        halves = [] if all(are_sums) else _halves(number)
        for p, q, size in _ends(number.shape) if halves else ():
            at_p, at_q = at(p, size), at(q, size)
            for half in halves:
                mixed = [at(f, size) for f in (np.where(half, p, q), np.where(half, q, p))]
                for place, results in enumerate(zip(at_p, at_q, *mixed, strict=True)):
                    if not are_sums[place] and place not in combining and _combines(*results):
                        combining.add(place)
        return combining

    def mixing(self, argument: int, number: np.ndarray) -> set[int]:
        """The positions of the results with an entry that depends on more than one group.

        With f = p in half of the groups and f = q in the other half, an entry that depends on one
        group has its value at p or its value at q. For the arguments, see `combining`.
        """
        if all(self._at_most(Kind.ROWS, argument, number)):
            return set()
        at = self._along(argument)
        p, q = np.random.default_rng(0).normal(size=(2, *number.shape))
        mixing: set[int] = set()
        for scale in (1.0, 30.0):
            ends = at(scale * p, scale), at(scale * q, scale)
            for half in _halves(number):
                results = zip(*ends, at(scale * np.where(half, p, q), scale), strict=True)
                mixing |= {place for place, arrays in enumerate(results) if _mixes(*arrays)}
        return mixing

    def colors(self, argument: int, number: np.ndarray, places: set[int]) -> tuple[int, ...]:
        """The axis of each group, such that no result in `places` combines groups of one axis.

        Greedy graph coloring: each group takes the first axis that it can share.
        """
        at, ends = self._along(argument), _ends(number.shape)

        @functools.cache
        def with_q_in(groups: frozenset[int], pair: int) -> list[np.ndarray]:
            p, q, size = ends[pair]
            return at(np.where(np.isin(number, list(groups)), q, p), size)

        def combines(left: frozenset[int], right: frozenset[int]) -> bool:
            sets = frozenset[int](), left | right, left, right
            return any(
                _combines(*arrays)
                for pair in range(len(ends))
                for place, arrays in enumerate(
                    zip(*(with_q_in(groups, pair) for groups in sets), strict=True)
                )
                if place in places
            )

        axes: list[frozenset[int]] = []
        for group in range(int(number.max(initial=0)) + 1 if places else 0):
            single = frozenset([group])
            # With many axes, a new axis costs less than the search for one to share.
            for axis, groups in enumerate(axes if len(axes) <= _MANY_AXES else ()):
                if not combines(single, groups):
                    axes[axis] |= single
                    break
            else:
                axes.append(single)
        axis_of = {group: axis for axis, groups in enumerate(axes) for group in groups}
        return tuple(axis_of[group] for group in sorted(axis_of))


def _ends(shape: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray, float | None]]:
    """Pairs (p, q) of values of f that differ in each entry, and their size if signs are mixed."""
    generator = np.random.default_rng(0)
    low, high = (generator.uniform(*ends, shape) for ends in ((0.1, 0.4), (0.6, 0.9)))
    mixed = [(size, generator.uniform(-size, size, (2, *shape))) for size in _MIXED]
    return [
        *((scale * low, scale * high, None) for scale in _SCALES),
        *((*pair, size) for size, pair in mixed),
    ]


def _halves(number: np.ndarray) -> list[np.ndarray]:
    """Masks by each binary digit of the group number; any two groups differ in one of them."""
    num_digits = int(number.max(initial=0)).bit_length()
    return [(number >> digit & 1).astype(bool) for digit in range(num_digits)]


def _combines(at_p: np.ndarray, at_q: np.ndarray, at_f: np.ndarray, at_g: np.ndarray) -> bool:
    """Whether an entry violates at_f + at_g = at_p + at_q; entries that are not finite do not."""
    eps = float(np.finfo(at_p.dtype).eps)
    values = np.array([at_p, at_q, at_f, at_g], float)
    at_p, at_q, at_f, at_g = values
    with np.errstate(invalid="ignore", over="ignore"):
        variation = np.abs(at_q - at_p) + np.abs(at_f - at_p) + np.abs(at_g - at_p)
        rounding = _ROUNDING * eps * np.max(np.abs(values), axis=0)
        excess = np.abs((at_f - at_p) + (at_g - at_q))
        return bool(np.any(excess > _TOLERANCE * variation + rounding))


def _mixes(at_p: np.ndarray, at_q: np.ndarray, mixed: np.ndarray) -> bool:
    """Whether an entry of `mixed` differs from its values at p and at q."""
    near = [
        np.isclose(mixed, end, rtol=_TOLERANCE, atol=0.0, equal_nan=True) for end in (at_p, at_q)
    ]
    return not np.all(near[0] | near[1])


def standing_in(program: ClosedJaxpr) -> Callable[..., list[np.ndarray]]:
    """A version of a program that runs immediately, with random values for traced constants.

    The random values are between 0.2 and 0.8, integers are 0 or 1, and square matrices are positive
    definite. If a traced constant is an array, the program also runs with random integers in its
    place, since the form of a likelihood may depend on counts.

    Args:
        program: of arrays.

    Returns:
        A compiled function of concrete arrays, with results on the host, stacked over the choices
        of random values.
    """
    generator = np.random.default_rng(1)
    has_arrays = any(np.ndim(value) and not checks.is_concrete(value) for value in program.consts)
    # On the host, since JAX would compile each operation separately here.
    choices = [
        [_stand_in(value, generator, bound) for value in program.consts]
        for bound in (None, *(_BOUNDS if has_arrays else ()))
    ]

    zeros = [np.zeros(aval.shape, aval.dtype) for aval in program.in_avals]
    fetch = jax.device_get if jax.process_count() == 1 else _of_all_processes
    run = compiled.executable(ClosedJaxpr(program.jaxpr, choices[0]), zeros)

    def now(*arrays: Any) -> list[np.ndarray]:
        # Suppress warnings about covariances of random values.
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            typed = [np.asarray(a, zero.dtype) for a, zero in zip(arrays, zeros, strict=True)]
            results = [fetch(run(constants, *typed)) for constants in choices]
            jax.effects_barrier()
        # As floats, since differences of integers may overflow.
        stacked = map(np.stack, zip(*results, strict=True))
        return [array if array.dtype.kind == "f" else array.astype(float) for array in stacked]

    return now


def _of_all_processes(arrays: list[Any]) -> list[np.ndarray]:
    return list(map(as_numpy, arrays))


def _stand_in(value: Any, generator: np.random.Generator, bound: int | None) -> Any:
    """A random value in place of a traced one; in arrays, integers below `bound` if it is given."""
    if checks.is_concrete(value):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        shape = jax.eval_shape(jax.random.key_data, value).shape
        bits = generator.integers(0, 2**32, shape, np.uint32)
        with jax.ensure_compile_time_eval():
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return generator.integers(0, bound or 2, value.shape).astype(value.dtype)
    draw = generator.uniform(0.2, 0.8, value.shape)
    is_matrix = value.ndim >= 2 and value.shape[-1] == value.shape[-2]
    if bound and value.ndim and not is_matrix:
        draw = generator.integers(0, bound, value.shape).astype(float)
    if is_matrix:
        draw = (draw + draw.swapaxes(-1, -2)) / value.shape[-1] + np.eye(value.shape[-1])
    return draw.astype(value.dtype)
