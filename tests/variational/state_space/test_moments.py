"""Moments given Gaussian sites: values and derivatives against dense algebra."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.state_space.prior import Prior
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.variational.state_space import moments
from numpyro_scalegp.variational.state_space.moments import Moments, Sites, moments_given_sites

N = 12


def damped(t: Array) -> AbstractKernel:
    return sgp.kernels.Matern32(t[0], t[1]) + sgp.kernels.Harmonic(2.0, t[2], 0.5)


KERNELS: dict[str, Any] = {
    "matern": lambda t: sgp.kernels.Matern52(t[0], t[1]) * t[2],
    "damped": damped,
    "trend": lambda t: sgp.kernels.Linear(t[0], t[1]) + sgp.kernels.Matern12(t[2]),
}


def problem(seed: int = 0) -> tuple[Array, ...]:
    """Hyperparameters, inputs with ties, prior means and sites."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.0, 5.0, size=(N, 1))
    X[3] = X[7]
    arrays = [0.7, 1.3, 2.0], X, rng.normal(size=N), rng.normal(size=N), rng.uniform(0.1, 2.0, N)
    return tuple(map(jnp.array, arrays))


def dense(kernel: AbstractKernel, X: Array, m: Array, b: Array, p: Array) -> Moments:
    K, P = kernel(X, X), jnp.diag(p)
    inner = jnp.eye(len(K)) + K @ P
    S = jnp.linalg.solve(inner, K)
    means = S @ (b - p * m)
    # K^-1 (f - m) = b - P f, also for a K without an inverse.
    weights = b - p * (m + means)
    divergence = jnp.linalg.slogdet(inner)[1] - jnp.sum(p * jnp.diagonal(S)) + weights @ means
    return Moments(means, jnp.diagonal(S), 0.5 * divergence)


def fast(kernel: AbstractKernel, X: Array, m: Array, b: Array, p: Array) -> Moments:
    return moments_given_sites(Prior.of(kernel, X, 8, m), m, Sites(b, p))


def objective(q: Moments, seed: int = 1) -> Array:
    """A function whose derivatives in all moments are general numbers of both signs."""
    g, e = np.random.default_rng(seed).normal(size=(2, q.means.shape[-1]))
    means, variances, divergence = q
    terms = g * means + e * variances + jnp.sin(means) * variances
    return jnp.sum(terms) + 1.7 * jnp.sum(divergence)


@pytest.mark.parametrize("name", KERNELS)
def test_values_and_derivatives(name, x64):
    t, X, m, b, p = problem()

    def of(family: Any) -> Any:
        return lambda t, X, m: objective(family(KERNELS[name](t), X, m, b, p))

    kernel = KERNELS[name](t)
    for value, exact in zip(fast(kernel, X, m, b, p), dense(kernel, X, m, b, p), strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-9, atol=1e-11)
    computed = jax.jit(jax.grad(of(fast), (0, 1, 2)))(t, X, m)
    exact = jax.grad(of(dense), (0, 1, 2))(t, X, m)
    at_ties = np.isin(np.arange(N), (3, 7))  # where kernels have a kink
    for value, reference in zip(computed, exact, strict=True):
        keep = ~at_ties if value.shape[0] == N else slice(None)
        np.testing.assert_allclose(value[keep], reference[keep], rtol=1e-8, atol=1e-9)


def test_derivatives_where_sites_have_no_precision(x64):
    """As at the start, and at outliers of a likelihood that is not log-concave."""
    t, X, m, b, p = problem()
    p = p.at[::3].set(0.0)

    def of(family: Any, t: Array, b: Array, p: Array) -> Array:
        return objective(family(damped(t), X, m, b, p))

    zeros = jnp.zeros_like(p)
    for sites in ((b, p), (zeros, zeros)):
        computed, exact = (
            jax.jit(jax.grad(of, 1), static_argnums=0)(f, t, *sites) for f in (fast, dense)
        )
        np.testing.assert_allclose(computed, exact, rtol=1e-8, atol=1e-12)
    b, p = zeros, zeros
    means, variances, divergence = fast(damped(t), X, m, b, p)
    np.testing.assert_allclose(means, 0.0, atol=1e-12)
    np.testing.assert_allclose(variances, damped(t).evaluate_diag(X), rtol=1e-12)
    np.testing.assert_allclose(divergence, 0.0, atol=1e-12)


def test_derivatives_of_sites_are_natural(x64, monkeypatch):
    """Gradient descent at a rate of one puts the sites at the derivatives of the objective."""
    monkeypatch.setattr(moments, "_MOST_DEVIATIONS", 1e6)
    t, X, m, b, p = problem()
    kernel = damped(t)

    def expected(means: Array, variances: Array) -> Array:  # log-concave: counts
        f = m + means
        return jnp.sum(2.0 * f - jnp.exp(f + 0.5 * variances))

    def loss(sites: Sites) -> Array:
        q = moments_given_sites(Prior.of(kernel, X, 8, m), m, sites)
        return q.divergence - expected(q.means, q.variances)

    sites = Sites(b, p)
    step = jax.grad(loss)(sites)
    means, variances, _ = dense(kernel, X, m, b, p)
    g, e = jax.grad(expected, (0, 1))(means, variances)
    np.testing.assert_allclose(p - step.precision, -2.0 * e, rtol=1e-9)
    np.testing.assert_allclose(b - step.loc, g - 2.0 * e * (m + means), rtol=1e-8)


@pytest.mark.slow
def test_batch_of_functions(x64):
    """With common and with separate kernels and inputs."""
    _, X, m, _, _ = problem()
    rng = np.random.default_rng(3)
    b, p = jnp.array(rng.normal(size=(2, N))), jnp.array(rng.uniform(0.1, 1.0, size=(2, N)))
    m = jnp.stack([m, 2.0 * m])
    scales = jnp.array([[0.5], [1.5]])

    def of(family: Any, kind: str, scales: Array) -> Array:
        if family is fast:
            lengthscale = scales if kind == "kernels" else scales[0]
            inputs = X if kind != "inputs" else jnp.stack([X, scales[1] * X])
            return objective(fast(sgp.kernels.Matern32(lengthscale), inputs, m, b, p))
        members = []
        for i in range(2):
            kernel = sgp.kernels.Matern32(scales[i if kind == "kernels" else 0])
            inputs = X if kind != "inputs" or i == 0 else scales[1] * X
            members.append(dense(kernel, inputs, m[i], b[i], p[i]))
        return objective(jax.tree.map(lambda *each: jnp.stack(each), *members))

    for kind in ("common", "kernels", "inputs"):
        computed = jax.value_and_grad(of, 2)(fast, kind, scales)
        exact = jax.value_and_grad(of, 2)(dense, kind, scales)
        np.testing.assert_allclose(computed[0], exact[0], rtol=1e-10)
        np.testing.assert_allclose(computed[1], exact[1], rtol=1e-8, atol=1e-10)


def test_float32():
    t, X, m, b, p = problem()
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (t, X, m, b, p))
    p = p.at[::4].set(0.0)

    def gradient(family: Any, t: Array, *rest: Array) -> Array:
        return jax.grad(lambda t: objective(family(damped(t), *rest)))(t)

    computed = gradient(fast, t, X, m, b, p)
    with jax.enable_x64(True):
        t, X, m, b, _ = map(jnp.array, wide)
        exact = gradient(dense, t, X, m, b, jnp.array(np.asarray(p, np.float64)))
        np.testing.assert_allclose(np.asarray(computed), exact, rtol=2e-3, atol=2e-3)
