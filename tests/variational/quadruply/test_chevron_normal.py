"""`ChevronNormal` against dense algebra, and in a model."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import numpyro_scalegp as sgp

pytestmark = pytest.mark.usefixtures("x64")

M = 7
KEY = jax.random.key(0)


def chevron(rank: int) -> sgp.ChevronNormal:
    rng = np.random.default_rng(0)
    loc, diag = rng.normal(size=M), rng.uniform(0.5, 1.5, size=M)
    # Entries on and above the diagonal must not count.
    return sgp.ChevronNormal(*map(jnp.array, (loc, diag, rng.normal(size=(M, rank)))))


def factor(q: sgp.ChevronNormal) -> Array:
    C = np.diag(np.asarray(q.scale_diag))
    for r in range(q.scale_columns.shape[1]):
        C[r + 1 :, r] = q.scale_columns[r + 1 :, r]
    return jnp.array(C)


@pytest.mark.parametrize("rank", [0, 3, M])
def test_agrees_with_the_dense_distribution(rank):
    q = chevron(rank)
    C = factor(q)
    dense = dist.MultivariateNormal(q.loc, scale_tril=C)
    np.testing.assert_allclose(q.scale_tril, C)
    np.testing.assert_allclose(q.variance, dense.variance)
    np.testing.assert_allclose(q.entropy(), dense.entropy())
    value = jnp.array(np.random.default_rng(1).normal(size=(4, M)))
    np.testing.assert_allclose(q.log_prob(value), dense.log_prob(value))
    np.testing.assert_allclose(q.log_prob(value[0]), dense.log_prob(value[0]))

    prior = dist.Normal(jnp.linspace(-1.0, 1.0, M), jnp.linspace(0.5, 2.0, M)).to_event(1)
    as_dense = dist.MultivariateNormal(prior.mean, jnp.diag(prior.variance))
    np.testing.assert_allclose(kl_divergence(q, prior), kl_divergence(dense, as_dense))
    standard = dist.Normal(0.0, 1.0).expand([M]).to_event(1)
    unit = dist.MultivariateNormal(jnp.zeros(M), jnp.eye(M))
    np.testing.assert_allclose(kl_divergence(q, standard), kl_divergence(dense, unit))


def test_draws_have_its_moments():
    q = chevron(3)
    draws = q.sample(KEY, (4, 10_000))
    assert draws.shape == (4, 10_000, M)
    draws = draws.reshape(-1, M)
    np.testing.assert_allclose(draws.mean(axis=0), q.loc, atol=0.05)
    C = factor(q)
    np.testing.assert_allclose(np.cov(draws.T), C @ C.T, atol=0.15)


@pytest.mark.parametrize("objective", [Trace_ELBO(num_particles=10), TraceMeanField_ELBO()])
def test_finds_the_posterior_of_a_linear_model(objective):
    rng = np.random.default_rng(2)
    Phi = jnp.array(rng.normal(size=(30, 3)))
    y = Phi @ jnp.array([1.0, -2.0, 0.5])

    def model() -> None:
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(Phi @ w, 1.0).to_event(1), obs=y)

    def guide() -> None:
        loc = numpyro.param("loc", jnp.zeros(3))
        diag = numpyro.param("diag", jnp.ones(3), constraint=constraints.positive)
        columns = numpyro.param("columns", jnp.zeros((3, 3)))
        numpyro.sample("w", sgp.ChevronNormal(loc, diag, columns))

    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.05, 1500)), objective)
    params = svi.run(KEY, 1500, progress_bar=False).params
    covariance = jnp.linalg.inv(Phi.T @ Phi + jnp.eye(3))
    q = sgp.ChevronNormal(params["loc"], params["diag"], params["columns"])
    np.testing.assert_allclose(q.loc, covariance @ Phi.T @ y, atol=0.03)
    np.testing.assert_allclose(q.scale_tril @ q.scale_tril.T, covariance, atol=0.01)


def test_goes_through_transformations():
    q = chevron(3)
    leaves, structure = jax.tree.flatten(q)
    assert len(leaves) == 3
    again = jax.tree.unflatten(structure, leaves)
    np.testing.assert_array_equal(again.scale_columns, q.scale_columns)
    gradient = jax.jit(jax.grad(lambda q: q.log_prob(jnp.ones(M))))(q)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    assert q.expand((2,)).sample(KEY).shape == (2, M)
