"""Functions that are computed in float64 while the default is float32."""

import functools
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from numpyro_scalegp.programs.float64 import in_float64

F = jnp.linspace(0.5, 2.0, 4, dtype=jnp.float32)
COUNTS = jnp.array([70_000, 80_000, 90_000, 100_000])


def log_density(f, count):
    """The log density of a Poisson distribution whose rate is near the count."""
    rate = count + 100.0 * f
    return count * jnp.log(rate) - rate - jax.scipy.special.gammaln(count + 1)


def expected():
    f, count = np.asarray(F, float), np.asarray(COUNTS)
    rate = count + 100.0 * f
    return count * np.log(rate) - rate - scipy.special.gammaln(count + 1.0)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, lambda f: jax.vmap(jax.jit(f)), lambda f: jax.jit(jax.vmap(f))],
)
def test_no_digits_are_lost(transform):
    value = transform(lambda f, count: in_float64(log_density, f, count))(F, COUNTS)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected(), rtol=1e-6)
    assert np.abs(log_density(F, COUNTS) - expected()).max() > 1e-2


def test_counts_of_32_bits_in_float64(x64):
    """Functions of integers compute in the floats of the same size."""
    value = in_float64(log_density, F.astype(jnp.float64), COUNTS.astype(jnp.int32))
    np.testing.assert_allclose(value, expected(), rtol=1e-9)


@pytest.mark.parametrize(
    "function",
    [
        lambda f: jax.scipy.special.betainc(f, 2.0, 0.3),  # lowered by tracing
        lambda f: jax.scipy.special.i0e(f),
        lambda f: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * f), (0, f))[1],
        lambda f: f[jnp.argsort(f)],
        # A function that accepts only float32 is computed in float32.
        lambda f: jax.lax.mul(f, jnp.ones(4, jnp.float32)),
    ],
)
def test_any_function(function):
    compiled = jax.jit(lambda f: in_float64(function, f))
    np.testing.assert_allclose(compiled(F), function(F), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(compiled)(F[None]), function(F)[None], rtol=1e-5)


def test_no_derivative():
    gradient = jax.jit(jax.grad(lambda f: jnp.sum(f * in_float64(jnp.exp, f))))(F)
    np.testing.assert_allclose(gradient, jnp.exp(F), rtol=1e-6)


EXPOSURES = np.array([0.1, 0.2, 0.3, 0.4])
settings = types.ModuleType("settings")
settings.EXPOSURES = EXPOSURES


@functools.cache
def loaded() -> np.ndarray:
    return np.array(EXPOSURES)


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("exposures",)

    def __init__(self) -> None:
        self.exposures = EXPOSURES


class Shared:
    """A class that holds an array for all of its objects."""

    exposures = EXPOSURES

    def __call__(self, f: Any) -> Any:
        return self.exposures * f


class Holder:
    """An object that holds an array."""

    def __init__(self) -> None:
        self.exposures = EXPOSURES

    def scaled(self, f: Any) -> Any:
        return self.exposures * f

    def __call__(self, f: Any) -> Any:
        return self.scaled(f)


class Module(eqx.Module):
    """The same as a pytree."""

    exposures: np.ndarray

    def __call__(self, f: Any) -> Any:
        return self.exposures * f


@jax.custom_jvp
def with_rule(f: Any) -> Any:
    return EXPOSURES * f


with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), EXPOSURES * tangents[0]))


def closing_over(exposures: np.ndarray, holder: Holder) -> list[Any]:
    parts = {"exposures": [(exposures,)]}
    space, slotted = types.SimpleNamespace(exposures=exposures), Slotted()
    return [
        lambda f: exposures * f,
        lambda f: EXPOSURES * f,
        lambda f: settings.EXPOSURES * f,
        lambda f: (lambda g: EXPOSURES * g)(f),
        lambda f, exposures=exposures: exposures * f,
        lambda f: parts["exposures"][0][0] * f,
        functools.partial(jnp.multiply, exposures),
        jax.tree_util.Partial(lambda g, f: g * f, exposures),
        jax.jit(lambda f: exposures * f),
        lambda f: space.exposures * f,
        lambda f: slotted.exposures * f,
        lambda f: loaded() * f,
        holder.scaled,
        holder,
        Shared(),
        Module(exposures),
        with_rule,
        lambda f: jax.lax.fori_loop(0, 1, lambda _, f: exposures * f, f),
    ]


@pytest.mark.parametrize("index", range(len(closing_over(EXPOSURES, Holder()))))
def test_arrays_of_numpy_keep_their_digits(index):
    """JAX keeps one array for each NumPy array, in the dtype in which it was first read."""
    function = closing_over(EXPOSURES, Holder())[index]
    f = jnp.array([3e7 + 2, 2e7 + 2, 1e7 + 1, 5e6 + 1])
    exact = EXPOSURES * np.asarray(f, float)
    remainder = lambda f: function(f) - exact.astype(np.float32)  # noqa: E731

    def evaluate(f: Any) -> Any:
        return function(f), in_float64(remainder, f), function(f)

    for call in (evaluate, jax.jit(evaluate)):
        first, difference, again = call(f)
        np.testing.assert_allclose(difference, exact - exact.astype(np.float32), rtol=1e-5)
        assert first.dtype == difference.dtype == again.dtype == jnp.float32
    assert jax.jit(lambda f: EXPOSURES * f)(f).dtype == jnp.float32


def test_a_hidden_array_only_loses_digits():
    arrays = iter([EXPOSURES] * 9)
    hidden = lambda f: next(arrays) * f  # noqa: E731
    results = jax.jit(lambda f: (hidden(f), in_float64(hidden, f)))(F)
    np.testing.assert_allclose(results[1], EXPOSURES * np.asarray(F), rtol=1e-6)
