"""Properties of every kernel expression, at inputs and hyperparameters that Hypothesis chooses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import AbstractKernel, FeatureMapped
from tests.registry import KERNELS

# Beartype picks the entries that it checks at random.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
kernels = sgp.kernels
NUM_ROWS, NUM_FEATURES = 5, 4000
# The error of float32 in units of the prior standard deviations: squared distances from a product
# may be off by 1e-2.
CLOSE = 2e-2


def powers(low, high):
    return st.integers(low, high).map(lambda exponent: np.float32(2.0) ** exponent)


def leaves(unit):
    """Kernels without parts, with lengthscales from far below to far above a unit of the inputs."""
    length, scale = powers(-7, 7).map(lambda power: unit * power), powers(-8, 8)
    return st.one_of(
        *(
            st.builds(kind, length, scale)
            for kind in (kernels.RBF, kernels.Matern12, kernels.Matern32, kernels.Matern52)
        ),
        st.builds(kernels.Matern, length, powers(-2, 4), scale),
        st.builds(kernels.Wendland, length, scale, st.sampled_from([0, 1, 2])),
        st.builds(
            lambda length, great_circle, variance: FeatureMapped(
                kernels.OnSphere(
                    kernels.Matern12(length / unit, variance),
                    radius=57.3,
                    great_circle=great_circle,
                ),
                lambda X: jnp.array([180.0, 90.0], jnp.float32) * jnp.tanh(X[:, [0, -1]] / unit),
            ),
            length,
            st.booleans(),
            scale,
        ),
        st.builds(
            lambda length, time, interaction, power, variance: FeatureMapped(
                kernels.Gneiting(
                    kernels.Matern32(length, variance), time, interaction, time_power=power
                ),
                lambda X: X[:, [0, -1]],
            ),
            length,
            length,
            st.sampled_from([0.0, 0.5, 1.0]),
            st.sampled_from([0.5, 1.0]),
            scale,
        ),
        st.builds(kernels.RationalQuadratic, length, powers(-3, 6), scale),
        st.builds(kernels.Periodic, powers(-4, 4), length, scale),
        st.builds(kernels.Constant, scale),
        st.builds(kernels.Linear, scale, st.just(np.float32(0.0)) | scale),
        st.builds(
            lambda length, quality, variance: kernels.Harmonic(1.0 / length, quality, variance).on(
                (0,)
            ),
            length,
            powers(-3, 3),
            scale,
        ),
        st.builds(
            lambda period, variance: kernels.Cosine(period, variance).on((0,)), length, scale
        ),
        *(
            st.builds(kind, scale, st.just(-(2.0**13) * unit)).map(lambda kernel: kernel.on((0,)))
            for kind in (kernels.Wiener, kernels.IntegratedWiener)
        ),
        st.builds(
            lambda length, variance: kernels.OrthogonalAdditive(
                length, variance * jnp.array([0.5, 1.0, 0.3], jnp.float32), 0.0, unit
            ),
            length,
            scale,
        ),
        st.builds(kernels.MultiscaleRBF, length, scale).map(
            lambda kernel: FeatureMapped(kernel, kernels.MultiscaleRBF.with_unit_scales)
        ),
    )


def larger(parts):
    return st.one_of(
        st.builds(lambda left, right: left + right, parts, parts),
        st.builds(lambda left, right: left * right, parts, parts),
        st.builds(lambda scale, kernel: scale * kernel, powers(-6, 6), parts),
        st.builds(lambda kernel: kernel.on((0,)), parts),
        st.builds(lambda kernel: FeatureMapped(kernel, jnp.tanh), parts),
    )


@st.composite
def problems(draw):
    """A kernel and points on a grid, with a repeated point, near the origin or far from it."""
    unit, d = draw(powers(-8, 8)), draw(st.sampled_from([1, 3]))
    grid = st.lists(st.integers(-8, 8), min_size=NUM_ROWS * d, max_size=NUM_ROWS * d)
    X = 0.25 * np.array(draw(grid), np.float64).reshape(NUM_ROWS, d)
    X[-1] = X[draw(st.integers(0, NUM_ROWS - 2))]
    X = unit * (X + draw(st.sampled_from([0.0, 0.0, -(2.0**12), 2.0**20])))
    return draw(st.recursive(leaves(unit), larger, max_leaves=3)), X.astype(np.float32)


def grams(kernel, X):
    """K(X, X) in float32 and in float64, of the same hyperparameters."""
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), kernel)
    X_wide = X.astype(np.float64)
    return np.asarray(kernel(X, X), np.float64), np.asarray(wide(X_wide, X_wide))


def scales(kernel, X):
    deviations = np.sqrt(np.asarray(kernel.diag(X), np.float64))
    return np.outer(deviations, deviations) + 1e-30


@pytest.mark.slow
@given(problems())
def test_covariances(problem):
    kernel, X = problem
    with jax.enable_x64(True):
        narrow, exact = grams(kernel, X)
        relative = scales(kernel, X)
        assert kernel(X, X).dtype == jnp.float32
        np.testing.assert_array_less(np.abs(narrow - exact) / relative, CLOSE)
        np.testing.assert_allclose(exact / relative, exact.T / relative, atol=1e-12)
        np.testing.assert_allclose(narrow / relative, narrow.T / relative, atol=1e-5)
        np.testing.assert_allclose(np.diagonal(exact / relative), 1.0, atol=1e-5)
        assert np.linalg.eigvalsh(exact / relative).min() > -1e-6
        covariance = kernel.covariance(X)
        np.testing.assert_array_equal(np.diagonal(covariance), kernel.diag(X))


@pytest.mark.slow
@given(problems())
def test_gradients_are_finite(problem):
    kernel, X = problem
    weights = np.linspace(-1.0, 2.0, NUM_ROWS**2, dtype=np.float32).reshape(NUM_ROWS, NUM_ROWS)

    def weighed(kernel, X):
        return jnp.sum(weights * kernel(X, X))

    gradient = jax.grad(weighed, argnums=(0, 1))(kernel, jnp.asarray(X))
    for leaf in jax.tree.leaves(gradient):
        assert np.isfinite(leaf).all()


@pytest.mark.slow
@given(problems())
def test_random_features_rebuild_the_kernel(problem):
    kernel, X = problem
    with jax.enable_x64(True):
        exact = grams(kernel, X)[1] / scales(kernel, X)
        try:
            Phi = np.asarray(kernel.random_features(jax.random.key(0), X, NUM_FEATURES), float)
        except ValueError as error:
            assert re.search("has no spectral density|does not define how its freq", str(error))
            return
        rebuilt = Phi @ Phi.T / scales(kernel, X)
        # Products of features are sums of squares of products of two normal variables.
        assert np.max(np.abs(rebuilt - exact)) < 12 / NUM_FEATURES**0.5


def test_every_kernel_is_drawn():
    """The classes of the registry, each of which the strategies above must be able to make."""
    made = {"RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic", "Periodic", "Constant"}
    made |= {"Linear", "MultiscaleRBF", "Sum", "Product", "Scaled", "ActiveDims", "FeatureMapped"}
    made |= {
        "Matern",
        "Wendland",
        "OnSphere",
        "Gneiting",
        "Harmonic",
        "Cosine",
        "Wiener",
        "IntegratedWiener",
        "OrthogonalAdditive",
    }
    made |= {"Coregion", "WithDerivatives"}  # of categories, tested separately
    registered = {type(factory(1.0)) for name, factory in KERNELS if not name.startswith("own")}
    assert {kind.__name__ for kind in registered} <= made
    public = {
        name
        for name in kernels.__all__
        if issubclass(getattr(kernels, name), AbstractKernel) and not name.startswith("Abstract")
    }
    assert public <= made
