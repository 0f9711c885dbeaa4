"""Rows padded to one of few numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.programs.padded import padded_size
from tests.compilation import programs
from tests.conformance import each, inputs
from tests.registry import POSTERIORS

# These trace the model, or look at the values of the inputs, at each call.
NOT_PADDED = ("mixture", "batch_with_hidden_rows", "multi_output_with_gaps", "grid_in_time")
QUICK = ("exact", "pathwise", "sparse", "vecchia", "state_space", "multi_output", "component")


def test_sizes():
    sizes = np.array([padded_size(number) for number in range(1, 10_000)])
    numbers = np.arange(1, 10_000)
    assert np.all(sizes >= numbers)
    assert np.all(sizes <= np.where(numbers <= 1024, 2 * numbers - 1, 1.125 * numbers))
    assert sizes[:9].tolist() == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert len(set(sizes)) < 40
    assert [padded_size(size) for size in set(sizes.tolist())] == list(set(sizes.tolist()))


def check_padding(factory):
    """Other numbers of rows compile nothing, and change no value."""
    posterior = factory(sgp.kernels.Matern52(1.2, 1.5), inputs())
    functions = posterior.sample_functions(jax.random.key(0), 2, num_features=32)
    X = inputs()[np.arange(15) % 7] + 0.01 * np.arange(15.0)[:, None]
    noise = 0.1 if posterior.noise_variance is None else None

    def values(X):
        new = posterior.predictive(X, noise)
        return posterior.mean(X), posterior.variance(X), new.mean, new.scale, functions(X)

    unpadded = jax.jit(values)(X[:11])
    values(X), values(X[:13])
    before = programs.number
    padded = values(X[:11])
    assert programs.number == before
    for value, expected in zip(padded, unpadded, strict=True):
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
        # Without noise the weights of a draw are large, and so is its rounding.
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_other_numbers_of_rows_compile_nothing(name):
    check_padding(dict(POSTERIORS)[name])


@pytest.mark.slow
@each("factory", [pair for pair in POSTERIORS if pair[0] not in (*NOT_PADDED, *QUICK)])
def test_any_posterior_is_padded(factory):
    check_padding(factory)


def test_inputs_that_are_not_padded():
    X = inputs()
    # Inputs that are traced.
    gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1)
    posterior = gp.condition(X[:, 0])
    assert jax.eval_shape(posterior.mean, X[:5]).shape == (5,)
    # Means of the training rows alone.
    shifted = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1, mean=jnp.arange(7.0))
    at_data = shifted.condition(X[:, 0]).mean(X)
    assert at_data.shape == (7,)
    with pytest.raises(ValueError, match="rows"):
        shifted.condition(X[:, 0]).mean(X[:5])


def test_devices():
    """Results are bound to a device only where the inputs or the posterior are."""
    X = inputs()
    posterior = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1).condition(X[:, 0])
    assert not posterior.mean(X[:5]).committed
    second = jax.devices()[1]
    on_second, rows = jax.device_put((posterior, X[:5]), second)
    for new in (rows, X[:5]):
        mean = on_second.mean(new)
        assert mean.devices() == {second}
        np.testing.assert_allclose(mean, posterior.mean(X[:5]), rtol=1e-5, atol=1e-6)
