"""Cosines and sines of turns against NumPy in float64, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.numerics.trigonometry import cos_sin_of_turns, turns_of

# From a fraction of a turn to so many turns that float32 cannot represent half of one.
SIZES = (1e-4, 1.0, 30.0, 1e4, 1e8)


def turns(size, dtype):
    """Scattered angles, and the multiples of an eighth turn where signs and branches change."""
    scattered = np.random.default_rng(0).uniform(-size, size, size=20_000)
    return jnp.array(np.concatenate([scattered, np.arange(-16, 17) / 8]), dtype)


def exact(angles):
    """The cosine and sine of the rounded angles in float64.

    Whole turns are subtracted exactly first: 2 pi t in float64 is off by 1e-8 for t = 1e8.
    """
    wide = np.asarray(angles, np.float64)
    fraction = 2 * np.pi * (wide - np.round(wide))
    return np.cos(fraction), np.sin(fraction)


@pytest.mark.parametrize("size", SIZES)
def test_values(size, dtype):
    angles = turns(size, dtype)
    bound = {"float32": 1e-6, "float64": 1e-14}[str(dtype)]
    values = jax.jit(cos_sin_of_turns)(angles)
    for value, expected in zip(values, exact(angles), strict=True):
        assert (value.dtype, value.shape) == (dtype, angles.shape)
        np.testing.assert_allclose(value, expected, rtol=0, atol=bound)


def test_small_sines_keep_their_digits():
    angles = jnp.geomspace(1e-12, 1e-2, 200, dtype=jnp.float32)
    _, sines = cos_sin_of_turns(angles)
    np.testing.assert_allclose(sines, exact(angles)[1], rtol=3e-7)


def test_whole_turns_change_nothing(dtype):
    fractions = jnp.arange(-31, 32, dtype=dtype) / 64  # exact, also after adding 1024 turns
    for shifted, original in zip(
        cos_sin_of_turns(fractions + 1024), cos_sin_of_turns(fractions), strict=True
    ):
        np.testing.assert_array_equal(shifted, original)


def test_any_shape(dtype):
    angles = turns(2.0, dtype)[:24]
    flat = cos_sin_of_turns(angles)
    for shape in ((), (4, 6), (2, 3, 4)):
        for value, expected in zip(
            cos_sin_of_turns(angles[: int(np.prod(shape))].reshape(shape)), flat, strict=True
        ):
            assert value.shape == shape
            np.testing.assert_allclose(
                value, expected[: value.size].reshape(shape), rtol=0, atol=1e-7
            )


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_derivatives(size, dtype):
    angles = turns(size, dtype)
    cosine, sine = exact(angles)
    bound = {"float32": 1e-5, "float64": 1e-12}[str(dtype)]
    ones = jnp.ones_like(angles)
    _, (dcos, dsin) = jax.jit(lambda t: jax.jvp(cos_sin_of_turns, (t,), (ones,)))(angles)
    np.testing.assert_allclose(dcos, -2 * np.pi * sine, rtol=0, atol=2 * np.pi * bound)
    np.testing.assert_allclose(dsin, 2 * np.pi * cosine, rtol=0, atol=2 * np.pi * bound)

    weights = np.random.default_rng(1).normal(size=angles.size)

    def weighed(t):
        cosines, sines = cos_sin_of_turns(t)
        return jnp.sum(jnp.array(weights, dtype) * (cosines + 2 * sines))

    gradient = jax.jit(jax.grad(weighed))(angles)
    expected = 2 * np.pi * weights * (2 * cosine - sine)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=100 * bound)


def test_with_an_origin_no_row_changes_the_turns_of_others():
    X = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    frequencies = np.random.default_rng(1).normal(size=(7, 2)).astype(np.float32)
    origin = np.array([0.5, -0.5], np.float32)
    far = np.concatenate([[[1e5, -1e5]], X]).astype(np.float32)
    phases = turns_of(*map(jnp.asarray, (far, frequencies, origin)))[1:]
    expected = (X.astype(float) - origin) @ frequencies.T.astype(float)
    np.testing.assert_allclose(phases, expected, atol=2e-6)
