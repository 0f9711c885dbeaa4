"""Weight-space priors, their chevron families and posteriors, against dense algebra."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jaxtyping import Array
from numpyro.distributions.kl import kl_divergence

import numpyro_scalegp as sgp
from numpyro_scalegp.variational.quadruply import chevron_features as blocks
from numpyro_scalegp.variational.quadruply.rows import Rows

pytestmark = pytest.mark.usefixtures("x64")

N, M, K = 8, 14, 3
KEY = jax.random.key(0)
kernel = sgp.kernels.RBF


def inputs(n: int = N, seed: int = 0) -> Array:
    return jnp.array(np.random.default_rng(seed).normal(size=(n, 2)))


def features(kind: str) -> Any:
    if kind == "dense":
        return sgp.features.InducingPoints(kernel(0.9, 1.3), inputs(M, 1), jitter=1e-6)
    return sgp.features.RandomFourier(kernel(0.9, 1.3), M, seed=0)


def prior(kind: str) -> sgp.WeightSpaceGP:
    precision = jnp.linspace(0.5, 2.0, M) if kind == "diagonal" else None
    return sgp.WeightSpaceGP(features(kind), inputs(), precision)


def precision_matrix(kind: str) -> Array:
    if kind == "identity":
        return jnp.eye(M)
    if kind == "diagonal":
        return jnp.diag(jnp.linspace(0.5, 2.0, M))
    Z = inputs(M, 1)
    return kernel(0.9, 1.3)(Z, Z) + 1.3e-6 * jnp.eye(M)


def family(kind: str, X: Array) -> sgp.ChevronGP:
    rng = np.random.default_rng(3)
    distribution = rng.normal(size=M), rng.uniform(0.3, 1.0, size=M), 0.4 * rng.normal(size=(M, K))
    return sgp.ChevronGP(features(kind), X, *map(jnp.array, distribution))


def weights(q: sgp.ChevronGP) -> sgp.ChevronNormal:
    return sgp.ChevronNormal(q.loc, q.scale_diag, q.scale_columns)


every_kind = pytest.mark.parametrize("kind", ["identity", "diagonal", "dense"])


@every_kind
def test_the_prior_follows_from_the_weights(kind):
    p = prior(kind)
    Phi = p.features(p.X)
    expected = Phi @ jnp.linalg.inv(precision_matrix(kind)) @ Phi.T
    np.testing.assert_allclose(p.covariance(), expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(p.variance, jnp.diagonal(expected), rtol=1e-6)
    distribution = dist.MultivariateNormal(jnp.zeros(N), p.covariance())
    y = p.sample(KEY)
    np.testing.assert_allclose(p.log_prob(y), distribution.log_prob(y), rtol=1e-6)
    draws = p.sample(KEY, (20_000,))
    np.testing.assert_allclose(np.cov(draws.T), expected, atol=0.1)
    assert np.all(p.mean == 0.0)


@every_kind
def test_the_divergence_is_between_weights(kind):
    q, p = family(kind, inputs()), prior(kind)
    distribution = dist.MultivariateNormal(q.loc, scale_tril=weights(q).scale_tril)
    expected = kl_divergence(
        distribution, dist.MultivariateNormal(jnp.zeros(M), precision_matrix=precision_matrix(kind))
    )
    np.testing.assert_allclose(kl_divergence(q, p), expected, rtol=1e-6)


def test_posterior_has_the_moments_of_the_weights(monkeypatch):
    for block in (blocks.BLOCK, 4):  # one block of features, and several with a smaller last one
        monkeypatch.setattr(blocks, "BLOCK", block)
        q = family("identity", inputs())
        Phi, C = q.features(q.X), weights(q).scale_tril
        covariance = Phi @ C @ C.T @ Phi.T
        np.testing.assert_allclose(q.mean, Phi @ q.loc, rtol=1e-8)
        np.testing.assert_allclose(q.variance, jnp.diagonal(covariance), rtol=1e-8)
        posterior = q.posterior()
        np.testing.assert_allclose(posterior.mean(q.X, chunk_size=3), q.mean, rtol=1e-8)
        np.testing.assert_allclose(posterior.variance(q.X, chunk_size=3), q.variance, rtol=1e-8)
        draws = posterior.sample(KEY, q.X, 20_000)
        assert draws.shape == (20_000, N)
        np.testing.assert_allclose(draws.mean(axis=0), q.mean, atol=0.06)
        np.testing.assert_allclose(np.cov(draws.T), covariance, atol=0.12)
        gradient = jax.grad(lambda loc, q=q: jnp.sum(family_with(q, loc).mean))(q.loc)
        np.testing.assert_allclose(gradient, Phi.sum(axis=0), rtol=1e-8)


def family_with(q: sgp.ChevronGP, loc: Array) -> sgp.ChevronGP:
    return sgp.ChevronGP(q.features, q.X, loc, q.scale_diag, q.scale_columns)


def test_draws_are_the_same_functions_at_other_inputs():
    posterior = family("identity", inputs()).posterior()
    Xs = inputs(20, 5)
    draws = posterior.sample(KEY, Xs, 3)
    np.testing.assert_allclose(posterior.sample(KEY, Xs[5:9], 3), draws[:, 5:9], rtol=1e-8)


def test_augmentation_adds_the_variance_of_one_more_feature():
    # Proposition 4: k(., x) is an additional feature, uncorrelated with the others, whose weight
    # has the variance that maximizes the bound.
    q = family("dense", inputs())
    X, noise, x = inputs(30, 7), 0.2, inputs(4, 9)
    k = q.features.kernel
    added = []
    for point in x:
        squares = jnp.sum(jnp.square(k(X, point[None]))) / noise + k.diag(point[None])[0]
        added.append(k.diag(point[None])[0] ** 2 / squares)
    posterior = q.posterior()
    augmented = posterior.augmented(X, noise)
    np.testing.assert_allclose(
        augmented.variance(x) - posterior.variance(x), jnp.array(added), rtol=1e-8
    )
    np.testing.assert_array_equal(augmented.mean(x), posterior.mean(x))
    far = jnp.full((1, 2), 40.0)
    np.testing.assert_allclose(augmented.variance(far), 1.3)
    assert posterior.variance(far) < 1e-6
    with pytest.raises(ValueError, match="needs features that are `InducingPoints`"):
        family("identity", inputs()).posterior().augmented(X, noise)


def test_pruned_weights_are_zero(unchecked):
    q = family("diagonal", inputs())
    active = sgp.relevance_vectors(jnp.where(jnp.arange(M) % 3 == 0, 2.0, 1e5))
    assert active.sum() == 5
    posterior = q.posterior().pruned(active)
    Phi, C = jnp.where(active, q.features(q.X), 0.0), weights(q).scale_tril
    np.testing.assert_allclose(posterior.mean(q.X), Phi @ q.loc, rtol=1e-8)
    expected = jnp.diagonal(Phi @ C @ C.T @ Phi.T)
    np.testing.assert_allclose(posterior.variance(q.X), expected, rtol=1e-8)
    precision = jnp.where(active, 2.0, 1e5)
    for again in (q.posterior().pruned(precision), q.posterior().pruned(precision / 100, 100.0)):
        np.testing.assert_array_equal(again.mean(q.X), posterior.mean(q.X))
    with pytest.raises(ValueError, match=r"`precision` must be positive, got -2\.0 at 0"):
        q.posterior().pruned(-precision)
    with pytest.raises(ValueError, match=r"`active` must have shape \(14,\), got \(3,\)"):
        q.posterior().pruned(jnp.ones(3, bool))


def test_saved_and_loaded(tmp_path):
    posterior = family("identity", inputs()).posterior()
    sgp.save(tmp_path / "posterior.npz", posterior)
    again = sgp.load(tmp_path / "posterior.npz")
    np.testing.assert_array_equal(again.mean(inputs()), posterior.mean(inputs()))
    np.testing.assert_array_equal(again.sample(KEY, inputs()), posterior.sample(KEY, inputs()))


# Relevance vectors


def test_relevance_vectors():
    active = jax.jit(sgp.relevance_vectors)(jnp.array([1.0, jnp.inf, 9_999.0, 1e4]))
    assert active.tolist() == [True, False, True, False]
    assert sgp.relevance_vectors(jnp.array([1.0, 3.0]), threshold=2.0).tolist() == [True, False]
    with pytest.raises(ValueError, match="`threshold` must be positive, got 0"):
        sgp.relevance_vectors(jnp.ones(3), threshold=0.0)


def test_a_relevance_vector_machine_has_its_closed_form():
    # For features that do not overlap, the bound's maximum over weights and precision is
    # s = a^2 / (b^2 - a), with a = phi'phi / noise and b = phi'y / noise; infinite if b^2 < a.
    noise, y = 0.1, jnp.array([1.0, -0.7, 0.5])
    phi = sgp.features.Learned(lambda X: 2.0 * X)
    X = jnp.eye(3)
    a, b = 4.0 / noise, 2.0 * y / noise

    def bound(parts: tuple[Array, Array, Array]) -> Array:
        loc, log_diag, log_precision = parts
        q = sgp.ChevronGP(phi, X, loc, jnp.exp(log_diag), jnp.zeros((3, 0)))
        p = sgp.WeightSpaceGP(phi, X, jnp.exp(log_precision))
        misfit = jnp.sum(jnp.square(y - q.mean) + q.variance)
        return -0.5 * misfit / noise - kl_divergence(q, p)

    s = a**2 / (b**2 - a)
    optimum = b / (a + s), -0.5 * jnp.log(a + s), jnp.log(s)
    for gradient in jax.grad(bound)(optimum):
        np.testing.assert_allclose(gradient, 0.0, atol=1e-8)
    y = jnp.array([1.0, -0.7, 0.2])  # b^2 < a for the last
    for log_precision in (2.0, 5.0, 9.0):
        s = jnp.full(3, jnp.exp(log_precision))
        best = 2.0 * y / noise / (a + s), -0.5 * jnp.log(a + s), jnp.log(s)
        assert jax.grad(bound)(best)[2][2] > 0


# Errors


def test_a_large_dense_precision_is_not_factorized():
    phi = sgp.features.InducingPoints(kernel(1.0), jnp.zeros((6000, 1)))
    with pytest.raises(ValueError, match="fixed_prior=True"):
        sgp.WeightSpaceGP(phi, jnp.zeros((2, 1))).log_determinant()


def test_rows_refuse_to_be_computed_with():
    rows = Rows(jnp.ones((2, 3)), jnp.zeros((2, 3), jnp.int32), 10)
    assert rows.shape == (10,)
    for compute in (lambda: 1.0 / rows, lambda: rows * 2.0, lambda: jnp.exp(rows), lambda: rows[0]):
        with pytest.raises(TypeError, match="only some of the parameter's rows"):
            compute()


def test_any_function_of_inputs_is_a_feature_map():
    function = lambda X: jnp.concatenate([X, jnp.sin(X)], axis=1)  # noqa: E731
    wrapped, X = sgp.features.Learned(function), inputs()
    chevron = jnp.zeros(4), jnp.ones(4), jnp.zeros((4, 1))
    for make in (sgp.WeightSpaceGP, lambda features, X: sgp.ChevronGP(features, X, *chevron)):
        plain, same = make(function, X), make(wrapped, X)
        np.testing.assert_array_equal(plain.variance, same.variance)
        np.testing.assert_allclose(plain.variance, jnp.sum(jnp.square(function(X)), axis=1))
    divergence = kl_divergence(sgp.ChevronGP(function, X, *chevron), sgp.WeightSpaceGP(function, X))
    np.testing.assert_allclose(divergence, 0.0, atol=1e-12)
