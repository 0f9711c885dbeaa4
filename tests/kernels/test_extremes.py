"""Hyperparameters and inputs of any size: the kernel's limit, never NaN, with finite gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.kernels import (
    RBF,
    Matern,
    Matern12,
    Matern32,
    Matern52,
    MultiscaleRBF,
    Periodic,
    RationalQuadratic,
    Wendland,
)

KINDS = {
    "rbf": RBF,
    "matern12": Matern12,
    "matern32": Matern32,
    "matern52": Matern52,
    "matern": lambda scale: Matern(scale, smoothness=1.2),
    "wendland": lambda scale: Wendland(scale, max_dims=5),
    "rational_quadratic": lambda scale: RationalQuadratic(scale, alpha=0.7),
    "periodic": lambda scale: Periodic(scale, period=1.7),
    "product": lambda scale: Matern32(scale) * Matern52(scale),
    "multiscale": MultiscaleRBF,
}
# Lengthscales and units of the inputs.
FAR = [(1e-30, 1.0), (1.0, 1e30), (1e-30, 1e30), (1e-5, 1.0)]
NEAR = [(1e30, 1.0), (1e30, 1e-30), (1.0, 1e-30)]


def rows(d, unit):
    """Three rows and the first one again."""
    return jnp.asarray(unit) * jnp.tile(jnp.array([[0.0], [1.0], [2.5], [0.0]]), (1, d))


@jax.jit
def evaluate(kernel, X):
    def weighed(kernel, X):
        gram = kernel(X, X)
        return jnp.sum(gram * jnp.arange(1.0, 17.0).reshape(4, 4)), gram

    gradient, gram = jax.grad(weighed, argnums=(0, 1), has_aux=True)(kernel, X)
    tangent = jax.jvp(lambda X: kernel(X, X), (X,), (jnp.ones_like(X),))[1]
    return gram, gradient, tangent


@pytest.mark.parametrize("d", [1, 5])
@pytest.mark.parametrize("name", KINDS)
def test_distances_of_any_size(name, d, dtype):
    for regime, expected in ((FAR, np.eye(4)), (NEAR, np.ones((4, 4)))):
        for scale, unit in regime:
            X = rows(d, unit)
            if name == "multiscale":
                X = MultiscaleRBF.with_unit_scales(X)
            gram, gradient, tangent = evaluate(KINDS[name](jnp.asarray(scale)), X)
            if expected[0, 1] == 0:
                expected[[0, 3], [3, 0]] = 1.0  # the same row
            if name == "periodic" and unit == 1e30:
                assert np.isfinite(gram).all()
            else:
                np.testing.assert_allclose(
                    gram, expected, rtol=0, atol=2e-4, err_msg=str((scale, unit))
                )
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient, tangent)))


@pytest.mark.parametrize("d", [1, 6])
@pytest.mark.parametrize("kind", [RBF, Matern32, Periodic])
def test_an_outlier_does_not_merge_the_others(kind, d):
    X = np.zeros((4, d), np.float32)
    X[:, 0] = [1.0, 2.0, 1.0, 1e9]
    kernel = kind(1.0, period=3.7) if kind is Periodic else kind(1.0)
    gram = np.asarray(kernel(X, X))
    alone = np.asarray(kernel(X[:3], X[:3]))
    np.testing.assert_allclose(gram[:3, :3], alone, atol=1e-6)
    assert alone[0, 1] < 0.9
    assert alone[0, 2] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("kind", [RBF, Matern52])
def test_rows_far_apart_in_many_columns(kind):
    # A matrix product would leave an error of 1 in the squared distance of the equal rows.
    X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    X[3:] = X[:3] + np.float32(2e-4)
    kernel = kind(1e-3)
    wide = X.astype(np.float64)
    with jax.enable_x64(True):
        exact = np.asarray(kind(1e-3)(wide, wide))
    np.testing.assert_allclose(kernel(X, X), exact, atol=2e-4)
    assert 0.5 < exact[0, 3] < 0.9


@pytest.mark.slow
def test_a_few_relevant_columns_among_many_leave_no_room_for_indefinite_kernels():
    # By a product alone, in float32, K has an eigenvalue of -2e-6.
    X = jax.random.normal(jax.random.key(0), (600, 12), jnp.float32)
    X = X.at[300:].set(X[:300] + 0.0003 * X[300:])
    scale = jnp.full(12, 200.0, jnp.float32).at[jnp.array([2, 5, 11])].set(0.3)

    @jax.jit
    def differentiate(scale, X):
        gram, pullback = jax.vjp(lambda s, X: Matern32(s, 0.2)(X, X[:200]), scale, X)
        return gram, pullback(jnp.sin(jnp.arange(gram.size, dtype=X.dtype)).reshape(gram.shape))

    single = differentiate(scale, X)
    K = np.asarray(Matern32(scale, 0.2)(X, X))
    with jax.enable_x64(True):
        exact = differentiate(
            *(jnp.asarray(np.asarray(array), jnp.float64) for array in (scale, X))
        )
    np.testing.assert_allclose(single[0], exact[0], atol=1e-7)
    for gradient, expected in zip(single[1], exact[1], strict=True):
        np.testing.assert_allclose(gradient, expected, atol=2e-5 * np.max(np.abs(expected)))
    assert np.linalg.eigvalsh(K.astype(np.float64))[0] > -1e-7


@pytest.mark.slow
def test_a_batch_of_lengthscales_uses_one_method_for_distances():
    X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    total = lambda scale: jnp.sum(Matern32(scale)(X, X))  # noqa: E731
    scales = jnp.array([0.7, 1e-4])
    batched = jax.vmap(jax.value_and_grad(total))
    # A condition that differs between members would evaluate both for each of them.
    assert " cond[" in str(jax.make_jaxpr(batched)(scales))
    for actual, expected in zip(
        batched(scales), zip(*map(jax.value_and_grad(total), scales), strict=True), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.slow
def test_second_derivatives_in_the_lengthscale(x64):
    """Distances have custom derivative rules; RBF in one dimension against its formula."""
    x = jnp.array([[0.0], [0.7]])

    def entry(lengthscale):
        return RBF(lengthscale)(x, x)[0, 1]

    def formula(lengthscale):
        return jnp.exp(-0.5 * jnp.square(0.7 / lengthscale))

    for derivative in (jax.grad, lambda f: jax.grad(jax.grad(f)), jax.hessian):
        value, expected = (derivative(f)(1.3) for f in (entry, formula))
        assert value == pytest.approx(float(expected), rel=1e-12)


# Spectra


@pytest.mark.parametrize("lengthscale", [1e-1, 1e-2, 1e-5, 1e-12])
def test_frequencies_of_a_periodic_kernel_with_a_small_lengthscale(lengthscale):
    kernel = Periodic(lengthscale, period=2.0)
    drawn = np.asarray(kernel.sample_frequencies(jax.random.key(0), 4000, 1), np.float64)
    harmonics = drawn[:, 0] * 2.0 / (2 * np.pi)
    np.testing.assert_allclose(harmonics, np.round(harmonics), rtol=1e-6)
    # Fourier weights exp(-c) I_j(c), c = lengthscale^-2: of variance c, and nearly normal.
    scaled = harmonics * lengthscale
    assert np.mean(scaled**2) == pytest.approx(1.0, abs=4 * (2 / 4000) ** 0.5)
    assert np.mean(scaled**4) == pytest.approx(3.0, abs=4 * (96 / 4000) ** 0.5)
    angles = np.array([0.5, 1.0, 2.0]) * lengthscale
    expected = np.exp(-2 * np.square(np.sin(angles / 2) / lengthscale))
    cosines = np.mean(np.cos(harmonics[:, None] * angles), axis=0)
    np.testing.assert_allclose(cosines, expected, atol=4 / 4000**0.5)


def test_close_rows_in_two_clusters_far_apart():
    """In single precision, a product of rows would take them for as much as 0.05 apart."""
    X = np.random.default_rng(0).uniform(0.0, 0.02, (20, 5)).astype(np.float32)
    X[:, 0] += np.where(np.arange(20) % 2, 100.0, -100.0).astype(np.float32)
    squared = np.sum(np.square(X[:, None].astype(float) - X[None]), axis=2)
    np.testing.assert_allclose(RBF(1.0)(X, X), np.exp(-0.5 * squared), atol=1e-6)
