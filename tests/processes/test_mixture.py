"""Posteriors averaged over draws of the hyperparameters."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats

import numpyro_scalegp as sgp

K = sgp.kernels
generator = np.random.default_rng(0)
X = np.sort(generator.uniform(0.0, 3.0, (9, 1)), axis=0)
y = np.sin(2.0 * X[:, 0]) + 0.1 * generator.normal(size=9)
GRID = np.linspace(0.4, 1.2, 60)  # of the lengthscale, with equal prior probabilities
NOISE = 0.1


def model(X: Any, y: Any = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.Uniform(0.1, 2.1))
    numpyro.sample("y", sgp.GaussianProcess(K.RBF(lengthscale), X, NOISE), obs=y)


def covariance(lengthscale: float) -> np.ndarray:
    return np.exp(-0.5 * np.square((X - X.T) / lengthscale)) + NOISE * np.eye(len(X))


def given_others(i: int, lengthscale: float) -> tuple[float, float]:
    """Mean and standard deviation of y_i given the other observations."""
    H, is_other = covariance(lengthscale), np.arange(len(X)) != i
    weights = np.linalg.solve(H[is_other][:, is_other], H[is_other, i])
    return weights @ y[is_other], np.sqrt(H[i, i] - weights @ H[is_other, i])


def density_of_others(i: int, lengthscale: float) -> float:
    is_other = np.arange(len(X)) != i
    zero = np.zeros(is_other.sum())
    return stats.multivariate_normal.logpdf(
        y[is_other], zero, covariance(lengthscale)[is_other][:, is_other]
    )


@pytest.mark.usefixtures("x64")
def test_leave_one_out_is_a_fit_without_the_row() -> None:
    """Draws at quantiles of the posterior, against sums over a grid."""
    zero = np.zeros(len(X))
    log_posterior = [
        stats.multivariate_normal.logpdf(y, zero, covariance(lengthscale)) for lengthscale in GRID
    ]
    cumulative = np.cumsum(special.softmax(log_posterior))
    places = np.searchsorted(cumulative, (np.arange(400) + 0.5) / 400)
    draws = {"lengthscale": jnp.asarray(GRID[places])}
    predictive = sgp.posterior(model, draws, X, y).leave_one_out()
    assert predictive.batch_shape == (9,)
    at, expected, equal, at_y = y + 0.1, [], [], []
    for i in range(len(X)):
        weights = special.softmax([density_of_others(i, lengthscale) for lengthscale in GRID])
        moments = np.transpose([given_others(i, lengthscale) for lengthscale in GRID])
        expected.append(np.log(weights @ stats.norm.pdf(at[i], *moments)))
        equal.append(np.log(np.mean(stats.norm.pdf(at[i], *moments[:, places]))))
        at_y.append(-np.log(np.mean(1.0 / stats.norm.pdf(y[i], *moments[:, places]))))
    np.testing.assert_allclose(predictive.log_prob(at), expected, rtol=0, atol=1e-3)
    assert np.max(np.abs(np.subtract(equal, expected))) > 0.1
    # At the observations themselves, the harmonic mean.
    np.testing.assert_allclose(predictive.log_prob(y), at_y, rtol=1e-6)


def test_few_draws_that_carry_the_weight_of_a_row_are_warned_of() -> None:
    draws = {"lengthscale": jnp.concatenate([jnp.full(30, 0.1), jnp.array([1.0])])}
    outlier = np.where(np.arange(9) == 4, y + 3.0, y)
    with pytest.warns(RuntimeWarning, match="few draws carry the weight"):
        sgp.posterior(model, draws, X, outlier).leave_one_out()
        jax.effects_barrier()


def test_draws_with_function_values_have_no_leave_one_out() -> None:
    def latent(X: Any, y: Any = None) -> None:
        f = numpyro.sample("f", sgp.LatentGP(K.RBF(0.5), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    posterior = sgp.posterior(latent, {"f": jnp.stack([y, y + 0.1])}, X, y)
    assert posterior.covariance(X[:3]).shape == (3, 3)
    single = sgp.posterior(latent, sgp.infer.Hyperparameters({"f": jnp.asarray(y)}), X, y)
    for process in (posterior, single):
        with pytest.raises(ValueError, match=r"needs noisy observations, .* `sgp\.to_arviz"):
            process.leave_one_out()


def test_a_value_that_is_no_category_raises() -> None:
    """Like a single posterior, in each method of the mixture and of its components."""
    rows = np.column_stack([X, np.arange(9) % 2])

    def groups(X: Any, y: Any = None) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
        kernel = K.RBF(lengthscale).on((0,)) * K.Coregion(np.eye(2), np.ones(2)).on((1,))
        numpyro.sample("y", sgp.GaussianProcess(kernel, X, NOISE), obs=y)

    posterior = sgp.posterior(groups, {"lengthscale": jnp.array([0.5, 1.0])}, rows, y)
    wrong = np.array([[0.5, 7.0]])
    for call in (
        posterior.mean,
        posterior.variance,
        posterior.covariance,
        posterior.predictive,
        lambda Xs: posterior.sample(jax.random.key(0), Xs),
        posterior.component(lambda kernel: kernel).mean,
    ):
        with pytest.raises(ValueError, match="`Xs` must hold the kernel's categories in column 1"):
            call(wrong)
    with pytest.raises(ValueError, match=r"`Xs` must have shape \(n, 2\), got"):
        posterior.mean(wrong[:, :1])


def test_quantiles_of_new_observations(dtype: jnp.dtype) -> None:
    rows, values = jnp.asarray(X, dtype), jnp.asarray(y, dtype)
    posterior = sgp.posterior(model, {"lengthscale": jnp.array([0.3, 1.0], dtype)}, rows, values)
    predictive = posterior.predictive(rows[:4] + 1.0)
    quantiles = predictive.icdf(0.975)
    assert quantiles.shape == (4,)
    np.testing.assert_allclose(predictive.cdf(quantiles), 0.975, rtol=1e-5)


@pytest.mark.slow
def test_posteriors_are_evaluated_in_threads() -> None:
    """As docs/troubleshooting.md says: no method runs a model."""
    posterior = sgp.posterior(model, {"lengthscale": jnp.array([0.5, 1.0])}, X, y)
    with ThreadPoolExecutor(4) as pool:
        means = list(pool.map(lambda i: posterior.mean(X[: 3 + i % 2]), range(8)))
    for i, mean in enumerate(means):
        np.testing.assert_allclose(mean, posterior.mean(X[: 3 + i % 2]), rtol=1e-6)
