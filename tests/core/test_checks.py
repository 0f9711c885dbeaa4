"""Argument checks: what passes, and the messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.core import checks

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("number", [2.0, 2])
def test_python_numbers_widen_no_type(number, x64):
    narrow = jnp.ones(3, jnp.float32)
    value = checks.as_float(number)
    assert jnp.issubdtype(value.dtype, jnp.floating)
    assert (narrow * value).dtype == jnp.float32


@pytest.mark.parametrize("kind", [jnp.float32, jnp.float64])
def test_arrays_keep_their_type(kind, x64):
    assert checks.as_float(np.ones(3, kind)).dtype == kind


def test_sequences_and_integers_become_floats(dtype):
    for value in ([1, 2], np.arange(3), [0.5, 2.0]):
        assert checks.as_float(value).dtype == dtype


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_positive(bad):
    with pytest.raises(ValueError, match=f"`scale` must be positive and finite, got {bad}"):
        checks.positive("scale", jnp.asarray(bad))
    with pytest.raises(ValueError, match=r"`scale` must be positive and finite, got \[ ?1\. "):
        checks.positive("scale", jnp.array([1.0, bad]))
    checks.positive("scale", jnp.array([1.0, 1e-30]))


def test_finite_names_the_first_bad_entry():
    value = jnp.zeros((3, 2)).at[1, 1].set(jnp.nan).at[2, 0].set(-jnp.inf)
    with pytest.raises(ValueError, match=r"`y` must be finite, got 2 NaN .* at index \(1, 1\)"):
        checks.finite("y", value)
    checks.finite("y", jnp.zeros((3, 2)))


def test_inputs():
    assert checks.inputs("X", [[1, 2], [3, 4]]).shape == (2, 2)
    with pytest.raises(ValueError, match=r"`X` .* \(n, d\), got \(3,\)\. Write X\[:, None\]"):
        checks.inputs("X", np.zeros(3))
    with pytest.raises(ValueError, match=r"`X` must have shape \(n, d\), got \(\)\.$"):
        checks.inputs("X", 1.0)
    with pytest.raises(ValueError, match=r"`Z` must have shape \(n, 2\), got \(4, 3\)"):
        checks.inputs("Z", np.zeros((4, 3)), width=2)


@pytest.mark.parametrize("kind", [np.float64, np.int64, np.int32])
def test_rows_that_merge_in_float32(kind):
    seconds = (1_700_000_000 + 10 * np.arange(12)).astype(kind)[:, None]
    message = r"`X` has 12 distinct rows, of which 2 are left in float32.*Subtract an origin"
    for value in (seconds, np.concatenate([seconds, seconds]), seconds.tolist()):
        with pytest.warns(RuntimeWarning, match=message):
            checks.inputs("X", value)
    # Rows that differ in another column, equal ones, and what loses digits but no rows, are fine:
    # warnings are errors here.
    checks.inputs("X", np.concatenate([seconds, np.arange(12)[:, None]], axis=1))
    checks.inputs("X", np.repeat(seconds[:1], 12, axis=0))
    checks.inputs("X", seconds - seconds[0])
    checks.inputs("X", seconds[0] + 1000 * np.arange(12, dtype=kind)[:, None])
    checks.inputs("X", np.array([[0.0], [-0.0]]))
    # So are a few pairs that agree by chance.
    checks.inputs("X", np.random.default_rng(0).normal(size=(100_000, 1)))


def test_rows_do_not_merge_in_float64(x64):
    checks.inputs("X", 1.7e9 + 10.0 * np.arange(12)[:, None])


def test_count():
    assert checks.count("num_samples", np.int64(3)) == 3
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"`num_samples` must be at least 1, got {bad}"):
            checks.count("num_samples", bad)
    for bad in (1.0, True, "3", None):
        with pytest.raises(TypeError, match=f"`num_samples` must be an integer, got {bad!r}"):
            checks.count("num_samples", bad)


def test_shape():
    checks.shape("loc", jnp.zeros(3), (), (3,))
    with pytest.raises(ValueError, match=r"`loc` .* \(\) or \(3,\), got \(2,\): one a row\.$"):
        checks.shape("loc", jnp.zeros(2), (), (3,), why="one a row")


def test_values_of_traced_arrays_are_not_read():
    @jax.jit
    def function(value):
        assert not checks.is_concrete({"a": 1.0, "b": value})
        checks.positive("value", value)
        checks.finite("value", value)
        return checks.inputs("X", value[None, None])

    assert np.isnan(function(jnp.nan)).all()
    assert checks.is_concrete({"a": 1.0, "b": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"`X` must have shape"):
        jax.jit(lambda X: checks.inputs("X", X))(jnp.ones(3))


def test_traced_values_that_are_not_positive_become_nan():
    convert = jax.jit(checks.as_positive)
    values = jnp.array([-1.0, 0.0, jnp.inf, jnp.nan, 2.0])
    expected = np.array([np.nan, np.nan, np.nan, np.nan, 2.0])
    np.testing.assert_array_equal(convert(values), expected)
    # A gradient of zero would look like a maximum.
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(checks.as_positive(v))))(values)
    np.testing.assert_array_equal(gradient, np.where(np.isnan(expected), np.nan, 1.0))
    zero_too = jax.jit(lambda v: checks.as_positive(v, or_zero=True))(values)
    np.testing.assert_array_equal(zero_too, np.where(values == 0.0, 0.0, expected))
    np.testing.assert_array_equal(
        jax.jit(lambda v: checks.inputs("X", v[:, None]))(values)[:, 0],
        [-1.0, 0.0, np.nan, np.nan, 2.0],
    )
    # Outside of `jit` the sign is left to `positive`, which raises.
    assert checks.as_positive(-1.0) == -1.0


def test_large_integers_are_not_wrapped():
    # JAX's default integers have 32 bits: seconds since 1970 in milliseconds do not fit.
    for value in (np.array([1_600_000_000_000]), [1_600_000_000_000], 1_600_000_000_000):
        np.testing.assert_allclose(checks.as_float(value), 1.6e12)


def test_frames_and_parts_of_arrays_are_converted():
    frame = pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})
    np.testing.assert_array_equal(checks.inputs("X", frame), frame.to_numpy())
    traced = jax.jit(lambda a: checks.as_positive([a, 2.0]))(-1.0)
    np.testing.assert_array_equal(traced, [np.nan, 2.0])


def test_counts_and_numbers_of_numpy_pass():
    assert checks.count("num", np.int64(3)) == 3
    assert type(checks.count("num", np.int64(3))) is int
    assert checks.number("rate", np.float32(0.5), "[0, 1)") == 0.5
    assert checks.count_or_none("num", None) is None
    assert sgp.estimators.Pathwise(sgp.solvers.Cholesky(), np.int32(4)).num_probes == 4


def test_keys():
    raw = jax.random.PRNGKey(0)
    assert checks.as_key(jax.random.key(0)) == checks.as_key(raw)
    draw = jax.vmap(lambda key: jax.random.normal(checks.as_key(key)))
    np.testing.assert_array_equal(
        draw(jax.random.split(jax.random.key(0), 3)), draw(jax.random.split(raw, 3))
    )
