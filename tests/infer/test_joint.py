"""The bound at joint draws, for likelihoods that combine rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import JointELBO, QuadratureELBO

N, M, SD = 6, 3, 0.3
X = jnp.linspace(-1.0, 1.0, N)[:, None]
Y = jnp.sin(3.0 * X[:, 0])
KERNEL = sgp.kernels.RBF(0.7)


def model() -> None:
    f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
    numpyro.sample("y", dist.Normal(jnp.cumsum(f), SD), obs=Y)


def family() -> sgp.SparseGP:
    scale = 0.3 * jnp.eye(M) + jnp.tril(jnp.full((M, M), 0.2))
    return sgp.SparseGP(KERNEL, X, X[::2], jnp.array([0.3, -0.4, 0.2]), scale)


def guide() -> None:
    numpyro.sample("f", family())


@pytest.mark.slow
def test_agrees_with_the_closed_form():
    draws = jax.jit(
        lambda keys: jax.lax.map(lambda key: -JointELBO().loss(key, {}, model, guide), keys)
    )(jax.random.split(jax.random.key(0), 4000))
    posterior = family().posterior()
    mean, covariance = posterior._joint(X)
    A = np.tril(np.ones((N, N)))
    squares = np.sum((Y - A @ mean) ** 2) + np.trace(A @ covariance @ A.T)
    expected = -0.5 * N * np.log(2 * np.pi * SD**2) - squares / (2 * SD**2)
    expected -= kl_divergence(family(), sgp.LatentGP(KERNEL, X))
    error = draws.std() / np.sqrt(len(draws))
    assert abs(draws.mean() - expected) < 4 * error
    # Independent draws from the marginals are far from it.
    marginal = np.trace(A @ np.diag(np.diag(covariance)) @ A.T)
    off = (np.trace(A @ covariance @ A.T) - marginal) / (2 * SD**2)
    assert abs(off) > 20 * error


@pytest.mark.slow
def test_quadrature_refuses_the_model_and_joint_draws_fit_it():
    auto = sgp.guides.AutoSparseGP(model, inducing_points=X)
    refused = SVI(model, auto, optax.adam(0.1), QuadratureELBO())
    state = jax.jit(refused.init)(jax.random.key(0))
    with pytest.raises(ValueError, match="the site `y` combines rows of the function `f`"):
        jax.eval_shape(refused.update, state)
    rate = optax.cosine_decay_schedule(0.05, 500)
    svi = SVI(model, auto, optax.adam(rate), JointELBO(num_particles=8))
    params = svi.run(jax.random.key(0), 500, progress_bar=False).params
    A = np.tril(np.ones((N, N)))
    K = np.asarray(KERNEL(X, X))
    exact = K @ A.T @ np.linalg.solve(A @ K @ A.T + SD**2 * np.eye(N), Y)
    np.testing.assert_allclose(auto.posterior(params).mean(X), exact, atol=0.05)


def test_needs_a_gp_site():
    with pytest.raises(ValueError, match="`JointELBO` found no GP site in the guide"):
        JointELBO().loss(jax.random.key(0), {}, model, lambda: None)
