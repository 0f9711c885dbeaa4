"""Natural gradients of a normal distribution against gradients in its expectation parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from numpyro_scalegp.core.natural import natural_divergence, natural_moments, normal_of
from numpyro_scalegp.core.whitening import Whitening, whitened_moments

M, N = 5, 7


def parameters() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(M, M))
    return jnp.array(rng.normal(size=M)), jnp.array(root @ root.T)


def system() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(1)
    root = rng.normal(size=(M + N, M + N))
    K = jnp.array(root @ root.T + np.eye(M + N))
    return K[:M, :M], K[:M, M:], jnp.diagonal(K)[M:]


def divergence(m: Array, S: Array) -> Array:
    trace = jnp.sum(S * S) + m.dot(m)
    return 0.5 * (trace - len(m)) - jnp.sum(jnp.log(jnp.diagonal(S)))


def fit(mean: Array, inside: Array, unexplained: Array) -> Array:
    return jnp.sum(jnp.cos(mean) + inside**1.5 + jnp.sqrt(unexplained) * mean)


def ordinary(K_ZZ: Array, K_ZX: Array, diagonal: Array, m: Array, S: Array) -> Array:
    return fit(*whitened_moments(Whitening.of(K_ZZ), K_ZX, diagonal, m, S)) + divergence(m, S)


def natural(K_ZZ: Array, K_ZX: Array, diagonal: Array, b: Array, P: Array) -> Array:
    normal = normal_of(b, P)[:2]
    found = natural_moments(Whitening.of(K_ZZ), K_ZX, diagonal, b, P, normal)
    return fit(*found) + natural_divergence(b, P, normal)


def test_the_normal_has_these_natural_parameters(x64):
    b, P = parameters()
    m, S, _ = normal_of(b, P)
    np.testing.assert_allclose(S, jnp.tril(S))
    np.testing.assert_allclose(S @ S.T @ (P + jnp.eye(M)), jnp.eye(M), atol=1e-12)
    np.testing.assert_allclose((P + jnp.eye(M)) @ m, b, rtol=1e-10)


def test_derivatives_are_those_in_the_expectation_parameters(x64):
    b, P = parameters()
    m, S, _ = normal_of(b, P)

    def by_expectations(first: Array, second: Array) -> Array:
        covariance = second - jnp.outer(first, first)
        return ordinary(*system(), first, jnp.linalg.cholesky(0.5 * (covariance + covariance.T)))

    first, second = jax.grad(by_expectations, (0, 1))(m, S @ S.T + jnp.outer(m, m))
    for function in (
        functools.partial(natural, *system()),
        lambda b, P: ordinary(*system(), *normal_of(b, P)[:2]),
    ):
        np.testing.assert_allclose(function(b, P), ordinary(*system(), m, S), rtol=1e-12)
        d_b, d_P = jax.grad(function, (0, 1))(b, P)
        np.testing.assert_allclose(d_b, first, rtol=1e-9)
        # Half of the precision, with its sign changed, goes with the second moment.
        np.testing.assert_allclose(d_P, -2.0 * second, rtol=1e-9, atol=1e-9)


def test_derivatives_of_hyperparameters_are_ordinary(x64):
    b, P = parameters()
    expected = jax.grad(ordinary, (0, 1, 2))(*system(), *normal_of(b, P)[:2])
    found = jax.grad(natural, (0, 1, 2))(*system(), b, P)
    for one, other in zip(found, expected, strict=True):
        if one.shape == (M, M):
            one, other = one + one.T, other + other.T  # of a symmetric matrix
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_a_negative_weight_makes_no_indefinite_step(x64):
    K_ZZ, K_ZX, diagonal = system()
    b, P = parameters()

    def spread(P: Array) -> Array:
        normal = normal_of(b, P)[:2]
        found = natural_moments(Whitening.of(K_ZZ), K_ZX, diagonal, b, P, normal)
        return jnp.sum(jnp.linspace(-1.0, 1.0, N) * found[1])

    eigenvalues = jnp.linalg.eigvalsh(jax.grad(spread)(P))
    assert eigenvalues.max() <= 1e-12
