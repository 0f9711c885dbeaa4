"""Decoupled and hybrid families: moments, and divergences between processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jaxtyping import Array
from numpyro.distributions import biject_to
from numpyro.distributions.kl import kl_divergence

import numpyro_scalegp as sgp
from numpyro_scalegp.variational.bases import Basis
from numpyro_scalegp.variational.coordinates import MeanCoordinates
from numpyro_scalegp.variational.decoupled.decoupled import (
    noise_tril,
    scale_of_pseudo_observations,
    squared_norm,
)

pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(0)


def arguments() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    X = jnp.array(rng.normal(size=(30, 2)))
    return {
        "kernel": sgp.kernels.RBF(0.8, 1.7),
        "X": X,
        "Z": X[:6] + 0.1,
        "loc": jnp.array(rng.normal(size=6)),
        "tril": jnp.tril(jnp.array(0.2 * rng.normal(size=(6, 6)))) + 0.5 * jnp.eye(6),
        "R": jnp.array(rng.normal(size=(9, 2))),
        "a": jnp.array(rng.normal(size=9)),
    }


def hybrid(p: dict[str, Any], **kwargs: Any) -> sgp.HybridGP:
    arguments = p["kernel"], p["X"], p["Z"], p["loc"], p["tril"], p["R"], p["a"]
    return sgp.HybridGP(*arguments, jitter=1e-12, **kwargs)


def decoupled(p: dict[str, Any], **kwargs: Any) -> sgp.DecoupledGP:
    return sgp.DecoupledGP(p["kernel"], p["X"], p["R"], p["a"], p["Z"], p["tril"], **kwargs)


def dense_hybrid(p: dict[str, Any], G: Array) -> tuple[Array, Array]:
    k, Z = p["kernel"], p["Z"]
    A = jnp.linalg.solve(jnp.linalg.cholesky(k(Z, Z)), k(Z, G))
    S = p["tril"] @ p["tril"].T
    return A.T @ p["loc"] + k(G, p["R"]) @ p["a"], k(G, G) - A.T @ (jnp.eye(6) - S) @ A


def dense_decoupled(p: dict[str, Any], G: Array) -> tuple[Array, Array]:
    k, Z = p["kernel"], p["Z"]
    middle = jnp.linalg.inv(jnp.linalg.inv(p["tril"] @ p["tril"].T) + k(Z, Z))
    return k(G, p["R"]) @ p["a"], k(G, G) - k(G, Z) @ middle @ k(Z, G)


FAMILIES = {"hybrid": (hybrid, dense_hybrid), "decoupled": (decoupled, dense_decoupled)}
every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_moments_agree_with_dense_algebra(name):
    family, dense = FAMILIES[name]
    p = arguments()
    q = family(p)
    mean, covariance = dense(p, p["X"])
    np.testing.assert_allclose(q.mean, mean, rtol=1e-8)
    np.testing.assert_allclose(q.variance, jnp.diagonal(covariance), rtol=1e-8)
    posterior = q.posterior()
    np.testing.assert_allclose(posterior.mean(p["X"], chunk_size=7), mean, rtol=1e-8)
    variance = posterior.variance(p["X"], chunk_size=7)
    np.testing.assert_allclose(variance, jnp.diagonal(covariance), rtol=1e-8)
    draws = posterior.sample(KEY, p["X"][:4], 20_000)
    np.testing.assert_allclose(draws.mean(axis=0), mean[:4], atol=0.05)
    np.testing.assert_allclose(np.cov(draws.T), covariance[:4, :4], atol=0.06)


@every_family
def test_divergence_agrees_with_joint_gaussians(name):
    family, dense = FAMILIES[name]
    p = arguments()
    # Given their values at these points, the processes are the same.
    G = jnp.concatenate([p["X"], p["Z"], p["R"]])
    mean, covariance = dense(p, G)
    nugget = 1e-9 * jnp.eye(len(G))
    joint = dist.MultivariateNormal(mean, covariance + nugget)
    prior = dist.MultivariateNormal(jnp.zeros(len(G)), p["kernel"](G, G) + nugget)
    divergence = kl_divergence(family(p), sgp.LatentGP(p["kernel"], p["X"][:3]))
    np.testing.assert_allclose(divergence, kl_divergence(joint, prior), rtol=1e-6)


@pytest.mark.parametrize("half", ["hybrid", "decoupled"])
def test_sparse_gp_is_a_special_case(half):
    p = arguments()
    p["tril"] = 0.5 * p["tril"]
    kernel, X, Z, loc, S = (p[name] for name in ("kernel", "X", "Z", "loc", "tril"))
    sparse = sgp.SparseGP(kernel, X, Z, loc, S, jitter=1e-12)
    if half == "hybrid":
        same = hybrid({**p, "a": jnp.zeros(9)})
    else:
        # K^-1 - K^-1 L S S'L' K^-1 = (B^-1 + K)^-1, as long as S S' < I.
        inverse = jnp.linalg.inv(jnp.linalg.cholesky(kernel(Z, Z)))
        excess = jnp.linalg.inv(jnp.eye(6) - S @ S.T) - jnp.eye(6)
        scale = jnp.linalg.cholesky(inverse.T @ jnp.linalg.inv(excess) @ inverse)
        same = sgp.DecoupledGP(kernel, X, Z, inverse.T @ loc, Z, scale)
    np.testing.assert_allclose(same.mean, sparse.mean, rtol=1e-6)
    np.testing.assert_allclose(same.variance, sparse.variance, rtol=1e-6)
    prior = sgp.LatentGP(kernel, X)
    np.testing.assert_allclose(kl_divergence(same, prior), kl_divergence(sparse, prior), rtol=1e-6)


@every_family
def test_divergence_from_random_columns_is_unbiased(name):
    family = FAMILIES[name][0]
    p = arguments()
    prior = sgp.LatentGP(p["kernel"], p["X"])
    smooth = {key: p[key] for key in ("kernel", "a", "R", "loc")}

    def divergence(smooth: Any, **kwargs: Any) -> Array:
        return kl_divergence(family({**p, **smooth}, **kwargs), prior)

    def flat(value: Any) -> Array:
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(value)])

    def draw(key: Array) -> Array:
        return flat(jax.value_and_grad(divergence)(smooth, num_columns=4, key=key))

    exact = flat(jax.jit(jax.value_and_grad(divergence))(smooth))
    draws = jax.jit(jax.vmap(draw))(jax.random.split(KEY, 4000))
    error = draws.std(axis=0) / np.sqrt(len(draws))
    # Entries that no draw changes differ by rounding.
    assert np.max(np.abs(draws.mean(axis=0) - exact) / (error + 1e-9)) < 4.0
    # Without the weight M / num_columns the estimate would be biased.
    assert np.abs(draws[:, 0].mean() - exact[0]) < 0.1 * np.abs(exact[0]) < 10 * error[0] * 63


def test_without_covariance_points_it_is_kernel_ridge_regression():
    p, noise = arguments(), 0.1
    kernel, X = p["kernel"], p["X"]
    y = jnp.sin(X.sum(axis=1))
    none = jnp.zeros((0, 2)), jnp.zeros((0, 0))

    def bound(a: Array) -> Array:
        q = sgp.DecoupledGP(kernel, X, X, a, *none)
        np.testing.assert_allclose(q.variance, kernel.diag(X))
        misfit = jnp.sum(jnp.square(y - q.mean)) / noise
        return -0.5 * misfit - kl_divergence(q, sgp.LatentGP(kernel, X))

    ridge = jnp.linalg.solve(kernel(X, X) + noise * jnp.eye(30), y)
    np.testing.assert_allclose(jax.grad(bound)(ridge), jnp.zeros(30), atol=1e-6)


def test_a_scale_of_zero_leaves_the_prior():
    p = arguments()
    q = decoupled({**p, "tril": jnp.zeros((6, 6)), "a": jnp.zeros(9)})
    np.testing.assert_allclose(q.variance, p["kernel"].diag(p["X"]))
    assert kl_divergence(q, sgp.LatentGP(p["kernel"], p["X"])) == 0.0


def test_squared_norm():
    p = arguments()
    expected = p["a"] @ p["kernel"](p["R"], p["R"]) @ p["a"]
    np.testing.assert_allclose(squared_norm(p["kernel"], p["R"], p["a"]), expected)
    with pytest.raises(ValueError, match="`key` must be given"):
        squared_norm(p["kernel"], p["R"], p["a"], num_columns=3)


@pytest.mark.slow
def test_the_variance_is_split_as_for_inducing_points():
    p = arguments()
    k, X, Z = p["kernel"], p["X"], p["Z"]
    q = decoupled({**p, "tril": jnp.stack([p["tril"], 3.0 * p["tril"].T]), "a": jnp.ones((2, 9))})
    mean, inside, unexplained = q.split_marginals()
    expected = k.diag(X) - jnp.diagonal(k(X, Z) @ jnp.linalg.solve(k(Z, Z), k(Z, X)))
    np.testing.assert_allclose(unexplained, jnp.broadcast_to(expected, (2, 30)), atol=1e-9)
    np.testing.assert_allclose(inside + unexplained, q.variance, rtol=1e-7)
    np.testing.assert_allclose(mean, q.mean, rtol=1e-12)
    nothing = sgp.DecoupledGP(k, X, p["R"], p["a"], X[:0], jnp.zeros((0, 0)))
    assert len(nothing.split_marginals()) == 2


@pytest.mark.slow
def test_the_parts_of_the_variance_have_exact_gradients():
    p, rng = arguments(), np.random.default_rng(1)
    weights = jnp.array(rng.normal(size=(3, 30)))

    def value(lengthscale: Array, tril: Array, points: Array) -> Array:
        kernel = sgp.kernels.RBF(lengthscale, 1.7)
        q = decoupled({**p, "kernel": kernel, "tril": tril, "Z": points})
        return jnp.sum(weights * jnp.stack(q.split_marginals()))

    at = jnp.array(0.8), p["tril"], p["Z"]
    steps = [jnp.array(rng.normal(size=jnp.shape(argument))) for argument in at]
    gradients = jax.grad(value, argnums=(0, 1, 2))(*at)
    slope = sum(jnp.sum(g * step) for g, step in zip(gradients, steps, strict=True))
    beyond = [[a + h * step for a, step in zip(at, steps, strict=True)] for h in (1e-5, -1e-5)]
    np.testing.assert_allclose(slope, (value(*beyond[0]) - value(*beyond[1])) / 2e-5, rtol=1e-5)


def test_the_covariance_of_pseudo_observations():
    p = arguments()
    E, k, X, Z = p["tril"], p["kernel"], p["X"], p["Z"]
    q = decoupled({**p, "tril": scale_of_pseudo_observations(E)})
    expected = k(X, X) - k(X, Z) @ jnp.linalg.solve(k(Z, Z) + E @ E.T, k(Z, X))
    np.testing.assert_allclose(q.posterior().covariance(X), expected, atol=1e-9)
    transform = biject_to(noise_tril)
    E = jnp.tril(E).at[jnp.diag_indices(6)].set(jnp.linspace(0.01, 2.0, 6))
    np.testing.assert_allclose(transform(transform.inv(E)), E, rtol=1e-12)


@pytest.mark.slow
def test_coordinates_whiten_the_mean():
    """Prior draws of a have about independent coordinates, and the map back is exact."""
    rng = np.random.default_rng(0)
    k, P, Q = sgp.kernels.RBF(0.7, 1.7), jnp.array(rng.normal(size=(60, 2))), 8
    everything = jnp.ones(60, bool)
    bases = Basis(P, everything), Basis(P[:Q] + 0.05, everything[:Q])
    c = MeanCoordinates.at(k, *bases)
    a = jnp.array(rng.normal(size=(3, 60)))
    np.testing.assert_allclose(c.weights(a * c.deviation, c.loc(a)), a, rtol=1e-9, atol=1e-9)
    # m is the mean at Q, whitened, for any w.
    R = jnp.linalg.cholesky(k(bases[1].points, bases[1].points))
    m, w = jnp.array(rng.normal(size=Q)), jnp.array(0.01 * rng.normal(size=60))
    at_Q = jnp.linalg.solve(R, k(bases[1].points, P) @ c.weights(w, m))
    shrinkage = jnp.linalg.inv(jnp.eye(Q) + (c.features / c.deviation**2) @ c.features.T)
    np.testing.assert_allclose(at_Q, m + shrinkage @ (c.loc(w / c.deviation) - m), atol=1e-5)
    # The Hessian a'K a / 2 is far better conditioned than in the weights.
    linear = jax.jacobian(lambda z: c.weights(z[:60], z[60:]))(jnp.zeros(60 + Q))
    values = jnp.linalg.eigvalsh(linear.T @ k(P, P) @ linear)
    assert values[-1] < 0.1 * jnp.linalg.eigvalsh(k(P, P))[-1]


@pytest.mark.slow
def test_points_not_in_use_do_not_enter_coordinates():
    rng = np.random.default_rng(0)
    k, P = sgp.kernels.RBF(0.7), jnp.array(rng.normal(size=(12, 2)))
    used, few = jnp.arange(12) < 7, jnp.arange(4) < 3
    c = MeanCoordinates.at(k, Basis(P, used), Basis(P[:4], few))
    smaller = MeanCoordinates.at(k, Basis(P[:7], used[:7]), Basis(P[:3], few[:3]))
    w, m = jnp.array(rng.normal(size=12)) * used, jnp.array(rng.normal(size=4)) * few
    np.testing.assert_allclose(c.weights(w, m)[:7], smaller.weights(w[:7], m[:3]), rtol=1e-9)
