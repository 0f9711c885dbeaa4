"""Components of a kernel: what each term of a sum contributes to kernel, features and draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.kernels import RBF, FeatureMapped, Linear, Matern32, Matern52, Periodic

KEY = jax.random.key(3)


def rows(n=5, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=(n, 2)))


def stationary():
    """2 (a + b) c + e, whose waves have discrete frequencies in one term."""
    a, b, c, e = RBF(0.5), Periodic(1.0, 0.7, 0.4), Matern32(2.0), Matern52(1.5, 2.0)
    return 2.0 * (a + b) * c + e, (a, b, e), (2.0 * a * c, 2.0 * b * c, e)


def with_exact_features():
    """(a + b) c + g(e), where b has exact features."""
    a, b, c, e = RBF(0.5), Linear(0.8, 0.1), Matern32(2.0).on((1,)), Matern52(1.5, 0.3)
    mapped = FeatureMapped(e, jnp.tanh)
    return (a + b) * c + mapped, (a, b, e), (a * c, b * c, mapped)


def nested():
    """A product of sums: a component of one keeps all terms of the other."""
    a, b, c, e = RBF(0.5), Matern32(0.9, 0.4), Matern52(2.0), RBF(3.0, 0.2)
    return (a + b) * (c + e), (a, b), (a * (c + e), b * (c + e))


each = pytest.mark.parametrize("kernel", [stationary, with_exact_features, nested])


@each
def test_components_are_the_expanded_kernels(kernel, dtype):
    kernel, parts, expected = kernel()
    X, Z = rows(), rows(3, seed=1)
    total, variance = 0.0, 0.0
    for term, by_hand in zip(parts, expected, strict=True):
        component = kernel.component(term)
        assert component.is_component
        np.testing.assert_allclose(component(X, Z), by_hand(X, Z), rtol=1e-6)
        np.testing.assert_allclose(component.diag(X), by_hand.diag(X), rtol=1e-6)
        total, variance = total + component(X, Z), variance + component.diag(X)
    np.testing.assert_allclose(total, kernel(X, Z), rtol=1e-6)
    np.testing.assert_allclose(variance, kernel.diag(X), rtol=1e-6)


@pytest.mark.slow
@each
def test_features_and_draws_add_up_to_the_whole(kernel, x64):
    kernel, parts, _ = kernel()
    components, X = [kernel.component(term) for term in parts], rows()
    features = kernel.random_features(KEY, X, 32, origin=X[0])
    shares = [component.random_features(KEY, X, 32, origin=X[0]) for component in components]
    assert [share.shape for share in shares] == len(parts) * [features.shape]
    np.testing.assert_allclose(sum(shares), features, atol=1e-12)
    assert all(np.any(np.abs(share - features) > 1e-3) for share in shares)
    draws = PriorDraws.from_key(KEY, 3, 32, X)
    total = sum(draws(component, X) for component in components)
    np.testing.assert_allclose(total, draws(kernel, X), atol=1e-12)


@pytest.mark.slow
@each
def test_component_features_have_its_kernel_as_mean(kernel, x64):
    kernel, parts, expected = kernel()
    X, keys = rows(3), jax.random.split(KEY, 4000)
    for term, by_hand in zip(parts, expected, strict=True):
        component = kernel.component(term)
        drawn = jax.vmap(lambda key, k=component: k.random_features(key, X, 16))(keys)
        products = np.asarray(drawn @ jnp.swapaxes(drawn, 1, 2))
        error = np.std(products, axis=0) / np.sqrt(len(keys))
        off = np.abs(np.mean(products, axis=0) - by_hand(X, X))
        assert np.all(off < 4 * np.maximum(error, 1e-11))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [stationary, nested])
def test_fourier_columns_are_those_of_the_whole_or_zero(kernel, x64):
    kernel, parts, _ = kernel()
    X, index = rows(), jnp.arange(24)
    phi = sgp.features.RandomFourier(kernel, 24, seed=5)
    all_columns = phi.columns(X, index)
    by_component = [phi.with_kernel(kernel.component(term)).columns(X, index) for term in parts]
    np.testing.assert_allclose(sum(by_component), all_columns, atol=1e-12)
    for columns in by_component:
        nonzero = np.any(columns != 0, axis=0)
        assert 0 < nonzero.sum() < 24
        np.testing.assert_array_equal(columns[:, nonzero], all_columns[:, nonzero])

    def total(component):
        return jnp.sum(phi.with_kernel(component).columns(X, index) ** 2)

    gradient = jax.grad(total)(kernel.component(parts[0]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_component_of_the_whole_and_of_a_component():
    a, b, c = RBF(0.5), RBF(1.0), RBF(2.0)
    kernel = a + b + c
    assert kernel.component(kernel) is kernel
    partial_sum = kernel.component(kernel.left)
    np.testing.assert_allclose(partial_sum(rows(), rows()), (a + b)(rows(), rows()), rtol=1e-6)
    np.testing.assert_allclose(
        partial_sum.component(a)(rows(), rows()), a(rows(), rows()), rtol=1e-6
    )
    with pytest.raises(ValueError, match=r"`part` must occur once .* occurs 0 times"):
        partial_sum.component(c)


def test_component_is_selected_differentiated_and_saved_under_jit(tmp_path):
    kernel = 1.5 * (RBF(0.5) + Matern32(1.0))

    @jax.jit
    def value(kernel, X):
        return jnp.sum(kernel.component(kernel.kernel.left)(X, X))

    X = rows()
    np.testing.assert_allclose(value(kernel, X), jnp.sum(1.5 * RBF(0.5)(X, X)), rtol=1e-5)
    gradient = jax.grad(value)(kernel, X)
    assert gradient.kernel.left.lengthscale != 0
    assert gradient.kernel.right.lengthscale == 0
    component = kernel.component(kernel.kernel.left)
    sgp.save(tmp_path / "kernel", component)
    loaded = sgp.load(tmp_path / "kernel")
    assert loaded.kernel.active == (True, False)
    np.testing.assert_array_equal(loaded(X, X), component(X, X))


def test_bad_parts_are_refused():
    a = RBF(0.5)
    kernel = a + Matern32(1.0)
    with pytest.raises(ValueError, match="got a `RBF` that occurs 0 times: take it from this"):
        kernel.component(RBF(0.5))
    with pytest.raises(ValueError, match="got a `RBF` that occurs 2 times"):
        (a + a).component(a)
    with pytest.raises(TypeError, match="`part` must be"):
        kernel.component("left")
    with pytest.raises(ValueError, match="a component shares the random waves"):
        kernel.component(a).sample_frequencies(KEY, 3, 2)
