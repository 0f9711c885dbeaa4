"""The full-scale approximation, against its dense covariance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.numerics import linalg
from tests.conformance import each

N, D, M = 50, 3, 6
RNG = np.random.default_rng(0)
X = RNG.uniform(size=(N, D))
Y = np.sin(6.0 * X[:, 0]) + 0.3 * RNG.normal(size=N)
Z = RNG.uniform(size=(M, D))
NEW = RNG.uniform(size=(6, D))
PARAMETERS = np.array([-1.0, -0.5, 0.0, 0.3, -3.0])
FullScale, Cholesky = sgp.estimators.FullScale, sgp.estimators.Cholesky


def process(estimator, parameters=PARAMETERS):
    kernel = sgp.kernels.Matern32(jnp.exp(parameters[:3]), jnp.exp(parameters[3]))
    return sgp.GaussianProcess(kernel, X, jnp.exp(parameters[4]), mean=0.3, estimator=estimator)


def dense(gp, near):
    """The covariance: features, and the residual by a sparse inverse factor."""
    K_ZZ = linalg.add_jitter(gp.kernel.covariance(Z))
    Phi = np.linalg.solve(np.linalg.cholesky(K_ZZ), gp.kernel(Z, X)).T
    residual = np.asarray(gp.kernel.covariance(X)) - Phi @ Phi.T + gp.noise_variance * np.eye(N)
    B, variances = np.eye(N), np.zeros(N)
    for i, neighbors in enumerate(np.asarray(near)):
        neighbors = neighbors[neighbors < N]
        b = np.linalg.solve(residual[np.ix_(neighbors, neighbors)], residual[neighbors, i])
        B[i, neighbors], variances[i] = -b, residual[i, i] - b @ residual[neighbors, i]
    inverse = np.linalg.inv(B)
    return Phi @ Phi.T + inverse @ np.diag(variances) @ inverse.T


def test_it_is_the_density_of_its_matrix(x64):
    estimator = FullScale(Z, 5).find_neighbors(X)
    assert estimator.graph is not None
    gp = process(estimator)
    H = dense(gp, estimator.graph.nearest)
    expected = dist.MultivariateNormal(0.3 * np.ones(N), H)
    several = np.stack([Y, 2.0 * Y])
    np.testing.assert_allclose(gp.log_prob(several), expected.log_prob(several), rtol=1e-9)
    draws = gp.sample(jax.random.key(0), (40_000,))
    variances = np.diagonal(H)
    error = np.sqrt((np.outer(variances, variances) + H**2) / 40_000)
    assert np.all(np.abs(np.cov(draws.T) - H) < 5.0 * error)
    # The leave-one-out distributions of the approximation.
    P = np.linalg.inv(H)
    loo = gp.condition(Y).leave_one_out()
    np.testing.assert_allclose(loo.loc, Y - (P @ (Y - 0.3)) / np.diagonal(P), rtol=1e-7)
    np.testing.assert_allclose(loo.scale, np.diagonal(P) ** -0.5, rtol=1e-7)


@pytest.mark.slow
def test_with_all_rows_before_it_is_exact(x64):
    exact = lambda p: process(Cholesky(), p).log_prob(Y)  # noqa: E731
    approximate = lambda p: process(FullScale(Z, N - 1), p).log_prob(Y)  # noqa: E731
    np.testing.assert_allclose(approximate(PARAMETERS), exact(PARAMETERS), rtol=1e-8)
    gradient = jax.jit(jax.grad(approximate))(PARAMETERS)
    np.testing.assert_allclose(gradient, jax.grad(exact)(PARAMETERS), rtol=1e-5, atol=1e-6)
    second = jax.jit(jax.hessian(approximate))(PARAMETERS)
    np.testing.assert_allclose(second, jax.hessian(exact)(PARAMETERS), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_both_together_are_closer_than_either(x64):
    rows = np.random.default_rng(1).uniform(size=(300, 5))
    kernel = sgp.kernels.Matern32(0.8)
    exact = sgp.GaussianProcess(kernel, rows, 0.05)
    Y = exact.sample(jax.random.key(0), (50,))
    points = sgp.features.kmeans_points(jax.random.key(1), rows, 40)
    divergence = {
        name: np.mean(
            exact.log_prob(Y)
            - sgp.GaussianProcess(kernel, rows, 0.05, estimator=estimator).log_prob(Y)
        )
        for name, estimator in (
            ("points", sgp.estimators.SGPR(points)),
            ("neighbors", sgp.estimators.Vecchia(8)),
            ("both", FullScale(points, 8)),
        )
    }
    assert divergence["both"] < 0.5 * min(divergence["points"], divergence["neighbors"])


@pytest.mark.slow
def test_the_posterior_is_exact_with_all_neighbors(x64):
    exact, approximate = (
        process(estimator).condition(Y) for estimator in (Cholesky(), FullScale(Z, N + len(NEW)))
    )
    np.testing.assert_allclose(approximate.mean(NEW), exact.mean(NEW), rtol=1e-6)
    np.testing.assert_allclose(approximate.variance(NEW), exact.variance(NEW), rtol=1e-5)
    compiled = jax.jit(lambda rows: approximate.variance(rows, chunk_size=4))(NEW)
    np.testing.assert_allclose(compiled, exact.variance(NEW), rtol=1e-5)
    covariance = np.asarray(exact.covariance(NEW))
    variances = np.diagonal(covariance)
    for draws in (
        approximate.sample(jax.random.key(0), NEW, 40_000),
        approximate.sample_functions(jax.random.key(1), 4_000, num_features=400)(NEW),
    ):
        error = np.sqrt((np.outer(variances, variances) + covariance**2) / len(draws))
        slack = 5.0 * error + (0.1 * variances.max() if len(draws) < 10_000 else 0.0)
        assert np.all(np.abs(np.cov(draws.T) - covariance) < slack)
        error = np.sqrt(variances / len(draws))
        assert np.all(np.abs(np.mean(draws, axis=0) - exact.mean(NEW)) < 5.0 * error)


@pytest.mark.slow
@each("num", [("few", lambda: 4), ("all", lambda: N + len(NEW))])
def test_parts_of_a_sum_add_up(num, x64):
    kernel = sgp.kernels.RBF(0.6) + sgp.kernels.Matern12(1.0)
    make = functools.partial(sgp.GaussianProcess, kernel, X, 0.1)
    posterior = make(estimator=FullScale(Z, num())).condition(Y)
    components = posterior.component(lambda k: k.left), posterior.component(lambda k: k.right)
    np.testing.assert_allclose(
        sum(component.mean(NEW) for component in components), posterior.mean(NEW), rtol=1e-9
    )
    if num() > N:
        exact = make().condition(Y).component(lambda k: k.left)
        np.testing.assert_allclose(components[0].mean(NEW), exact.mean(NEW), rtol=1e-5)
        np.testing.assert_allclose(components[0].variance(NEW), exact.variance(NEW), rtol=1e-5)
        draws = components[0].sample(jax.random.key(0), NEW, 40_000)
        np.testing.assert_allclose(np.var(draws, axis=0), exact.variance(NEW), rtol=0.05)


@each(
    "estimator",
    [("neighbors", lambda: sgp.estimators.Vecchia(8)), ("both", lambda: FullScale(Z, 8))],
)
def test_a_small_part_of_a_sum_is_drawn_with_nuggets_of_its_own(estimator):
    kernel = sgp.kernels.RBF(0.6, 1e3) + sgp.kernels.Matern32(1.0, 1e-3)
    gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator())
    component = gp.condition(Y).component(lambda k: k.right)
    rows = jnp.repeat(NEW[:3], 2, axis=0)  # each of them twice
    draws = component.sample(jax.random.key(0), rows, 400)
    deviation = jnp.std(draws[:, ::2])
    assert jnp.max(jnp.abs(draws[:, ::2] - draws[:, 1::2])) < 0.05 * deviation


def test_what_it_refuses(x64, unchecked):
    with pytest.raises(ValueError, match=r"`inducing_points` must have shape \(n, 3\)"):
        process(FullScale(Z[:, :2])).log_prob(Y)
    with pytest.raises(ValueError, match="is not the `X` whose neighbors"):
        process(FullScale(Z, 5).find_neighbors(X[:-1])).log_prob(Y)
    with pytest.raises(ValueError, match="`FullScale` must know `observed`"):
        jax.jit(
            lambda observed: sgp.GaussianProcess(
                sgp.kernels.RBF(1.0), X, 0.1, observed=observed, estimator=FullScale(Z)
            ).log_prob(Y)
        )(np.ones(N, bool))


@pytest.mark.slow
def test_points_of_another_dtype_have_the_same_functions(x64):
    draws = []
    for kind in ("float32", "float64"):
        points = jnp.asarray(Z.astype(np.float32), kind)
        estimator = FullScale(points, 3)
        gp = sgp.GaussianProcess(sgp.kernels.Matern32(0.5), X, 0.1, estimator=estimator)
        draws.append(gp.condition(Y).sample_functions(jax.random.key(3), 3, num_features=16)(NEW))
    np.testing.assert_allclose(draws[0], draws[1], atol=1e-3)
