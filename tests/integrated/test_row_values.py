"""A mean given by its values at the rows, such as a regression on other columns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_scalegp as sgp

generator = np.random.default_rng(0)
X = generator.uniform(0.0, 3.0, (8, 1))
X[5] = X[2]  # the same input, with another mean
Z = generator.normal(size=(8, 2))
MEAN = Z @ np.array([1.0, -0.5])
y = np.sin(X[:, 0]) + MEAN
rbf = sgp.kernels.RBF(0.5)
E = sgp.estimators
ESTIMATORS = {
    "cholesky": E.Cholesky(),
    "pathwise": E.Pathwise(sgp.solvers.Cholesky(), 4, num_features=16),
    "sgpr": E.SGPR(X[:3]),
    "vecchia": E.Vecchia(3),
    "full_scale": E.FullScale(X[:3], num_neighbors=3),
}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_posterior_is_equal_to_the_posterior_without_the_mean(name: str) -> None:
    options: dict[str, Any] = {"estimator": ESTIMATORS[name], "key": jax.random.key(0)}
    gp = sgp.GaussianProcess(rbf, X, 0.1, mean=MEAN, **options)
    without = sgp.GaussianProcess(rbf, X, 0.1, **options)
    np.testing.assert_allclose(gp.log_prob(y), without.log_prob(y - MEAN), rtol=1e-10)
    posterior, expected = gp.condition(y), without.condition(y - MEAN)
    np.testing.assert_allclose(posterior.mean(X), expected.mean(X) + MEAN, rtol=1e-8)
    np.testing.assert_allclose(posterior.mean(X, chunk_size=3), posterior.mean(X), rtol=1e-8)
    np.testing.assert_allclose(posterior.variance(X), expected.variance(X), rtol=1e-8)
    left_out = posterior.leave_one_out().log_prob(y)
    np.testing.assert_allclose(left_out, expected.leave_one_out().log_prob(y - MEAN), rtol=1e-8)
    for rows in (X[:3], X[::-1]):
        with pytest.raises(ValueError, match="is not known at other rows: give a callable"):
            posterior.mean(rows)
    with pytest.raises(ValueError, match="is not known at other rows"):
        posterior.sample_functions(jax.random.key(0))


@pytest.mark.usefixtures("x64")
def test_hidden_rows_have_a_mean_too() -> None:
    observed = np.arange(8) != 3
    gp = sgp.GaussianProcess(rbf, X, 0.1, mean=MEAN, observed=observed)
    shown = sgp.GaussianProcess(rbf, X[observed], 0.1)
    posterior = gp.condition(np.where(observed, y, np.nan))
    expected = shown.condition((y - MEAN)[observed]).mean(X) + MEAN
    np.testing.assert_allclose(posterior.mean(X), expected, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_batches_outputs_and_other_likelihoods() -> None:
    means = np.stack([MEAN, 2.0 * MEAN])
    kernels = jnp.ones(2) * rbf
    batch = sgp.GaussianProcess(kernels, X, 0.1, mean=means).condition(np.stack([y, y]))
    for member_mean, mean in zip(batch.mean(X), means, strict=True):
        single = sgp.GaussianProcess(rbf, X, 0.1).condition(y - mean)
        np.testing.assert_allclose(member_mean, single.mean(X) + mean, rtol=1e-8)
    outputs = sgp.kernels.Coregion(np.ones((2, 1)), np.ones(2))
    Y = np.stack([y, y**2], axis=1)
    gp = sgp.MultiOutputGP(rbf, outputs, X, 0.1, mean=means.T)
    without = sgp.MultiOutputGP(rbf, outputs, X, 0.1).condition(Y - means.T)
    np.testing.assert_allclose(gp.condition(Y).mean(X), without.mean(X) + means.T, rtol=1e-8)
    with pytest.raises(ValueError, match="is not known at other rows"):
        gp.condition(Y).mean(X[:2])
    likelihood = lambda f: dist.Normal(f, jnp.sqrt(0.1))  # noqa: E731
    laplace = sgp.LaplaceGP(rbf, X, likelihood, mean=MEAN)
    exact = sgp.GaussianProcess(rbf, X, 0.1, mean=MEAN)
    np.testing.assert_allclose(laplace.log_prob(y), exact.log_prob(y), rtol=1e-8)
    np.testing.assert_allclose(laplace.condition(y).mean(X), exact.condition(y).mean(X), rtol=1e-8)


@pytest.mark.usefixtures("x64")
def test_a_mean_with_draws_of_coefficients() -> None:
    def model(X: Any, Z: Any, y: Any = None) -> None:
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", sgp.GaussianProcess(rbf, X, 0.1, mean=Z @ beta), obs=y)

    betas = jnp.array([[1.0, -0.5], [0.8, 0.0]])
    posterior = sgp.posterior(model, {"beta": betas}, X, Z, y)
    each = [
        sgp.GaussianProcess(rbf, X, 0.1).condition(y - Z @ beta).mean(X) + Z @ beta
        for beta in betas
    ]
    np.testing.assert_allclose(posterior.mean(X), np.mean(each, axis=0), rtol=1e-8)
    for rows in (X[:3], X[::-1]):
        with pytest.raises(ValueError, match="is not known at other rows"):
            posterior.mean(rows)


@pytest.mark.usefixtures("unchecked")
def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`mean` must have shape \(\) or \(8,\), got \(7,\)"):
        sgp.GaussianProcess(rbf, X, 0.1, mean=MEAN[1:])
    with pytest.raises(ValueError, match="`mean` must be finite"):
        sgp.GaussianProcess(rbf, X, 0.1, mean=MEAN * np.nan)
