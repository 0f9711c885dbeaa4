"""The moments of a whitened sparse GP against dense algebra and its derivatives by autodiff."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array

from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.processes.whitening import Whitening, whitened_moments

NAMES = ("K_ZZ", "K_ZX", "diagonal", "loc", "scale_tril")


def moments(K_ZZ: Array, K_ZX: Array, diagonal: Array, loc: Array, S: Array) -> Any:
    return whitened_moments(Whitening.of(K_ZZ), K_ZX, diagonal, loc, S)


def dense(K_ZZ: Array, K_ZX: Array, diagonal: Array, loc: Array, S: Array) -> Any:
    """The definition, for JAX to differentiate; K_ZZ is symmetrized as the rule assumes."""
    L = jnp.linalg.cholesky(0.5 * (K_ZZ + K_ZZ.T), symmetrize_input=False)
    A = solve_triangular(L, K_ZX, lower=True)
    return A.T @ loc, jnp.sum((S.T @ A) ** 2, axis=0), diagonal - jnp.sum(A * A, axis=0)


def arguments(M: int, n: int) -> tuple[Array, ...]:
    """Draw blocks of a positive definite matrix, so that all variances are positive."""
    rng = np.random.default_rng(M + 10 * n)
    root = rng.normal(size=(M + n, 2 * (M + n)))
    K = jnp.array(root @ root.T / (M + n) + 0.1 * np.eye(M + n))
    scale_tril = jnp.tril(jnp.array(rng.normal(size=(M, M)))) + 2.0 * jnp.eye(M)
    loc = jnp.array(rng.normal(size=M))
    return K[:M, :M], K[:M, M:], jnp.diagonal(K)[M:], loc, scale_tril


def weigher(n: int) -> Callable[[Any], Array]:
    """A scalar function of all moments, with nonzero second derivatives."""
    rng = np.random.default_rng(7)
    g, v, u = jnp.array(rng.normal(size=(3, n)))

    def weigh(moments: Any) -> Array:
        mean, from_values, unexplained = moments
        terms = (
            g * jnp.sin(mean)
            + v * jnp.cos(from_values) * mean
            + u * jnp.sin(unexplained) * from_values
        )
        return jnp.sum(terms)

    return weigh


def symmetric(gradient: Array, name: str) -> Array:
    """The gradient with respect to a symmetric matrix is unique up to an antisymmetric part."""
    return 0.5 * (gradient + gradient.T) if name == "K_ZZ" else gradient


EVERYTHING = tuple(range(5))


@pytest.mark.parametrize(("M", "n"), [(5, 7), (1, 4), (4, 1)])
def test_values_and_gradients_of_all_arguments(M, n, x64):
    args, weigh = arguments(M, n), weigher(n)

    @jax.jit
    def compare(*args: Array) -> Any:
        def with_gradients(function: Callable[..., Any]) -> Any:
            return function(*args), jax.grad(lambda *a: weigh(function(*a)), EVERYTHING)(*args)

        return with_gradients(moments), with_gradients(dense)

    (values, gradients), (expected_values, expected) = compare(*args)
    for value, target in zip(values, expected_values, strict=True):
        assert value.shape == (n,)
        np.testing.assert_allclose(value, target, rtol=1e-11)
    for name, gradient, target in zip(NAMES, gradients, expected, strict=True):
        np.testing.assert_allclose(
            symmetric(gradient, name), symmetric(target, name), rtol=1e-9, atol=1e-10, err_msg=name
        )
        assert np.any(gradient != 0)


def test_gradients_of_what_several_functions_share(x64):
    K_ZZ, K_ZX, diagonal, loc, S = arguments(4, 5)
    locs, scales, weigh = jnp.stack([loc, -loc, 0.5 * loc]), jnp.stack([S, 2 * S, S]), weigher(5)

    def total(function: Callable[..., Any], K_ZX: Array, diagonal: Array) -> Array:
        each = jax.vmap(lambda loc, S: weigh(function(K_ZZ, K_ZX, diagonal, loc, S)))
        return jnp.sum(each(locs, scales))

    gradients, expected = (
        jax.jit(jax.grad(lambda *args, f=f: total(f, *args), (0, 1)))(K_ZX, diagonal)
        for f in (moments, dense)
    )
    for gradient, target in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, target, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("over", ["forward", "reverse"])
def test_second_derivatives(over, x64):
    M, n = 4, 5
    args, weigh = arguments(M, n), weigher(n)
    rng = np.random.default_rng(3)
    direction = tuple(jnp.array(rng.normal(size=a.shape)) for a in args)
    direction = (direction[0] + direction[0].T, *direction[1:])

    def product(function: Callable[..., Any], args: tuple[Array, ...]) -> Any:
        gradient = jax.grad(lambda *a: weigh(function(*a)), EVERYTHING)
        if over == "forward":
            return jax.jvp(gradient, args, direction)[1]

        def derivative(*a: Array) -> Array:
            return sum(jnp.vdot(g, d) for g, d in zip(gradient(*a), direction, strict=True))

        return jax.grad(derivative, EVERYTHING)(*args)

    products, expected = jax.jit(lambda a: (product(moments, a), product(dense, a)))(args)
    for name, actual, target in zip(NAMES, products, expected, strict=True):
        np.testing.assert_allclose(
            symmetric(actual, name), symmetric(target, name), rtol=1e-8, atol=1e-9, err_msg=name
        )


def test_forward_mode_alone_is_refused(x64):
    args = arguments(3, 2)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(moments, args, args)


def test_variance_that_rounding_made_negative_is_clipped():
    """The unexplained part is zero there, not negative, and the derivative ignores the clipping."""
    K = jnp.eye(2)
    across = jnp.array([[1.0, 0.6], [1e-3, 0.0]])  # the first column explains more than all
    diagonal, loc = jnp.ones(2), jnp.array([0.5, -0.5])
    assert K.dtype == jnp.float32

    @jax.jit
    def compare(S: Array) -> Any:
        derivative = jax.grad(lambda d: sum(moments(K, across, d, loc, S)[1:]).sum())(diagonal)
        return (
            sum(moments(K, across, diagonal, loc, S)[1:]),
            sum(dense(K, across, diagonal, loc, S)[1:]),
            derivative,
        )

    variance, unclipped, derivative = compare(jnp.zeros((2, 2)))
    assert unclipped[0] < 0
    assert variance[0] == 0
    np.testing.assert_allclose(variance[1], 1 - 0.36, rtol=1e-6)
    np.testing.assert_array_equal(derivative, np.ones(2))
    np.testing.assert_allclose(compare(0.1 * jnp.eye(2))[0][0], 0.01 * (1 + 1e-6), rtol=1e-5)


def test_moments_at_the_inducing_points_survive_float32():
    """With S = 0 the variance at Z is zero: rounding must not make it negative."""
    Z = np.linspace(0.0, 1.0, 30, dtype=np.float32)[:, None]
    K = jnp.array(np.exp(-0.5 * ((Z - Z.T) / 0.5) ** 2))

    @jax.jit
    def compare(K: Array) -> Any:
        jittered, zeros = linalg.add_jitter(K), jnp.zeros((30, 30))
        variance = sum(moments(jittered, K, jnp.diagonal(K), zeros[0], zeros)[1:])
        A = linalg.inverse_cholesky(jittered) @ K
        return variance, jnp.diagonal(K) - jnp.sum(A**2, axis=0)

    variance, unclipped = compare(K)
    assert unclipped.min() < 0, "no variance to clip"
    assert variance.min() >= 0
    assert variance.max() < 1e-3
