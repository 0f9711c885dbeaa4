"""Gaussian sites and their natural gradients against gradients in the expectation parameters."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from numpyro_scalegp.processes.whitening import Whitening, whitened_moments
from numpyro_scalegp.variational.sparse.natural_parameters import (
    WhitenedSites,
    natural_divergence,
    natural_moments,
    whitened_sites,
)

M, N = 5, 7
# Sites on values whitened by the reference, and of a prior with a mean.
each_kind = pytest.mark.parametrize(
    ("has_reference", "has_mean"), ((True, False), (True, True), (False, True))
)


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


def fit(mean: Array, variance: Array, unexplained: Array) -> Array:
    return jnp.sum(jnp.cos(mean) + variance**1.5 + jnp.sqrt(unexplained) * mean)


def ordinary(K: Array, K_ZX: Array, diagonal: Array, m: Array, S: Array) -> Array:
    return fit(*whitened_moments(Whitening.of(K), K_ZX, diagonal, m, S)) + divergence(m, S)


class Sites:
    """The bound from sites, by this package and by explicit inverses.

    The sites are on values whitened by K_r, or by K itself, with a mean or without.
    """

    def __init__(self, has_reference: bool, has_mean: bool = True) -> None:
        self.has_reference, self.has_mean = has_reference, has_mean
        K, K_ZX, diagonal = system()
        self.rest = K_ZX, diagonal
        mean = jnp.linspace(-1.0, 2.0, M)
        self.arguments = K, K + jnp.diag(jnp.arange(1.0, M + 1)), mean, *parameters()

    def whitened(self, K: Array, K_r: Array, mean: Array, b: Array, P: Array) -> WhitenedSites:
        reference = Whitening.of(K_r) if self.has_reference else None
        return whitened_sites(b, P, Whitening.of(K), reference, mean if self.has_mean else None)

    def natural(self, K: Array, *others: Array) -> Array:
        sites = self.whitened(K, *others)
        moments = natural_moments(
            Whitening.of(K), *self.rest, *sites.natural, sites.held, sites.to_reference
        )
        return fit(*moments) + natural_divergence(*sites.natural, sites.held)

    def by_normal(self, K: Array, *others: Array) -> Array:
        sites = self.whitened(K, *others)
        return ordinary(K, *self.rest, sites.loc, sites.scale_tril)

    def factor(self, K: Array, K_r: Array) -> Array:
        return jnp.linalg.cholesky(K_r if self.has_reference else K)

    def dense(self, K: Array, K_r: Array, mean: Array, b: Array, P: Array) -> Array:
        (K_ZX, diagonal), K, K_r = self.rest, 0.5 * (K + K.T), 0.5 * (K_r + K_r.T)
        W = jnp.linalg.inv(self.factor(K, K_r))
        C = jnp.linalg.inv(jnp.linalg.inv(K) + W.T @ P @ W)
        A = jnp.linalg.solve(K, K_ZX)
        explained = jnp.einsum("mn,mk,kn->n", A, C, A)
        unexplained = diagonal - jnp.sum(A * K_ZX, axis=0)
        m = C @ W.T @ (b - P @ W @ mean if self.has_mean else b)
        kl = jnp.trace(jnp.linalg.solve(K, C)) + m @ jnp.linalg.solve(K, m) - M
        kl += jnp.linalg.slogdet(K)[1] - jnp.linalg.slogdet(C)[1]
        return fit(A.T @ m, explained, unexplained) + 0.5 * kl


@each_kind
def test_the_normal_is_the_prior_times_the_sites(has_reference, has_mean, x64):
    sites = Sites(has_reference, has_mean)
    K, K_r, mean, b, P = sites.arguments
    m, S, *_ = sites.whitened(*sites.arguments)
    np.testing.assert_allclose(S, jnp.tril(S))
    L, W = jnp.linalg.cholesky(K), jnp.linalg.inv(sites.factor(K, K_r))
    precision = jnp.linalg.inv(K) + W.T @ P @ W
    np.testing.assert_allclose(L @ S @ S.T @ L.T @ precision, jnp.eye(M), atol=1e-11)
    without_mean = b - P @ W @ mean if has_mean else b
    np.testing.assert_allclose(precision @ L @ m, W.T @ without_mean, rtol=1e-9)


@each_kind
def test_derivatives_are_with_respect_to_expectation_parameters(has_reference, has_mean, x64):
    sites = Sites(has_reference, has_mean)
    K, K_r, mean, *_ = sites.arguments
    m, S, *_ = sites.whitened(*sites.arguments)
    factor = sites.factor(K, K_r)
    # v = R (t - shift), and of t are `first` and `second` the moments.
    R = jnp.linalg.solve(jnp.linalg.cholesky(K), factor)
    shift = jnp.linalg.solve(factor, mean) * has_mean

    def by_expectations(first: Array, second: Array) -> Array:
        covariance = R @ (second - jnp.outer(first, first)) @ R.T
        scale = jnp.linalg.cholesky(0.5 * (covariance + covariance.T))
        return ordinary(K, *sites.rest, R @ (first - shift), scale)

    loc, scale = jnp.linalg.solve(R, m) + shift, jnp.linalg.solve(R, S)
    first, second = jax.grad(by_expectations, (0, 1))(loc, scale @ scale.T + jnp.outer(loc, loc))
    for function in (sites.natural, sites.by_normal):
        value = function(*sites.arguments)
        np.testing.assert_allclose(value, ordinary(K, *sites.rest, m, S), rtol=1e-12)
        d_b, d_P = jax.grad(function, (3, 4))(*sites.arguments)
        np.testing.assert_allclose(d_b, first, rtol=1e-8)
        # The natural parameter of the second moment is minus half the precision.
        np.testing.assert_allclose(d_P, -2.0 * second, rtol=1e-8, atol=1e-8)


@each_kind
def test_derivatives_of_hyperparameters_are_at_fixed_sites(has_reference, has_mean, x64):
    sites = Sites(has_reference, has_mean)
    *expected, of_mean = jax.grad(sites.dense, (0, 1, 2))(*sites.arguments)
    for function in (sites.natural, sites.by_normal):
        value = function(*sites.arguments)
        np.testing.assert_allclose(value, sites.dense(*sites.arguments), rtol=1e-10)
        *gradients, gradient_of_mean = jax.grad(function, (0, 1, 2))(*sites.arguments)
        for gradient, of_dense in zip(gradients, expected, strict=True):
            symmetric = 0.5 * (gradient + gradient.T)
            np.testing.assert_allclose(symmetric, of_dense, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(gradient_of_mean, of_mean, rtol=1e-8, atol=1e-12)


@pytest.mark.slow
@each_kind
def test_second_derivatives_of_hyperparameters(has_reference, has_mean, x64):
    sites = Sites(has_reference, has_mean)
    K, K_r, mean, *parameters = sites.arguments

    def along(function: Callable[..., Array]) -> tuple[Array, Array]:
        def path(t: Array) -> Array:
            return function(K + t * jnp.eye(M) + t**2 * K, K_r + t * K, mean + t**2, *parameters)

        return jax.jvp(jax.grad(path), (0.1,), (1.0,))[1], jax.grad(jax.grad(path))(0.1)

    expected = along(sites.dense)[0]
    for second in (*along(sites.natural), *along(sites.by_normal)):
        np.testing.assert_allclose(second, expected, rtol=1e-7)


def test_a_negative_weight_makes_no_indefinite_step(x64):
    sites = Sites(True)
    K, K_r, mean, b, P = sites.arguments

    def spread(P: Array) -> Array:
        *_, held, to_reference, natural = sites.whitened(K, K_r, mean, b, P)
        moments = natural_moments(Whitening.of(K), *sites.rest, *natural, held, to_reference)
        return jnp.sum(jnp.linspace(-1.0, 1.0, N) * moments[1])

    eigenvalues = jnp.linalg.eigvalsh(jax.grad(spread)(P))
    assert eigenvalues.max() <= 1e-12
