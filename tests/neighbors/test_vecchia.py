"""Densities given nearest neighbors, against dense algebra and exact densities."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from tests.conformance import each

N, D = 60, 2
RNG = np.random.default_rng(0)
X = RNG.uniform(size=(N, D))
Y = np.sin(6.0 * X[:, 0]) + 0.3 * RNG.normal(size=N)
NEW = RNG.uniform(size=(7, D))
PARAMETERS = np.array([-1.0, -0.5, 0.3, -3.0])
Vecchia, Cholesky = sgp.estimators.Vecchia, sgp.estimators.Cholesky


def process(estimator, parameters=PARAMETERS, rows=X):
    kernel = sgp.kernels.Matern32(jnp.exp(parameters[:2]), jnp.exp(parameters[2]))
    noise = jnp.exp(parameters[3])
    return sgp.GaussianProcess(kernel, rows, noise, mean=0.3, estimator=estimator)


def density(estimator, y=Y):
    return lambda parameters: process(estimator, parameters).log_prob(y)


# The density


@pytest.mark.slow
def test_with_all_rows_before_it_is_exact(x64):
    exact, approximate = density(Cholesky()), density(Vecchia(N - 1))
    np.testing.assert_allclose(approximate(PARAMETERS), exact(PARAMETERS), rtol=1e-12)
    gradient, second = jax.jit(jax.grad(approximate)), jax.jit(jax.hessian(approximate))
    np.testing.assert_allclose(gradient(PARAMETERS), jax.grad(exact)(PARAMETERS), rtol=1e-10)
    np.testing.assert_allclose(second(PARAMETERS), jax.hessian(exact)(PARAMETERS), rtol=1e-9)
    several = np.stack([Y, 2.0 * Y, Y[::-1]])
    value = process(Vecchia(200)).log_prob(several)  # more than there are
    np.testing.assert_allclose(value, process(Cholesky()).log_prob(several), rtol=1e-12)


def given_each(graph):
    """The rows that each row is conditioned on: all before it in its group."""
    rows, places, slots = (np.asarray(leaf) for leaf in jax.tree.leaves(graph.groups))
    group, place = np.divmod(slots, places.shape[1])
    before = [rows[i, : places[i, j]] for i, j in zip(group, place, strict=True)]
    members = [rows[i, places[i, j]] for i, j in zip(group, place, strict=True)]
    np.testing.assert_array_equal(members, np.arange(len(slots)))
    return before


@each("size", [(str(size), lambda size=size: size) for size in (1, 8)])
@each("ordering", [(name, lambda name=name: name) for name in ("maxmin", "random", "given")])
def test_it_is_the_density_of_a_sparse_inverse_factor(ordering, size, x64):
    estimator = Vecchia(5, ordering=ordering(), group_size=size()).find_neighbors(X)
    assert estimator.graph is not None
    gp = process(estimator)
    H = gp.kernel.covariance(gp.X) + gp.noise_variance * np.eye(N)
    U = np.zeros((N, N))  # columns of the inverse factor
    place = np.argsort(estimator.graph.order)
    nearest = np.asarray(estimator.graph.nearest)
    for i, near in enumerate(given_each(estimator.graph)):
        own_neighbors = nearest[i][nearest[i] < N]
        assert len(own_neighbors) == min(5, place[i])
        assert set(own_neighbors) <= set(near)
        assert size() > 1 or len(near) == len(own_neighbors)
        assert (place[near] < place[i]).all()
        b = np.linalg.solve(H[np.ix_(near, near)], H[near, i])
        U[i, i], U[near, i] = 1.0, -b
        U[:, i] /= np.sqrt(H[i, i] - b @ H[near, i])
    expected = dist.MultivariateNormal(0.3 * np.ones(N), precision_matrix=U @ U.T)
    np.testing.assert_allclose(gp.log_prob(Y), expected.log_prob(Y), rtol=1e-10)
    draws = gp.sample(jax.random.key(0), (40_000,))
    covariance = np.asarray(expected.covariance_matrix)
    variances = np.diagonal(covariance)
    error = np.sqrt((np.outer(variances, variances) + covariance**2) / 40_000)
    assert np.all(np.abs(np.cov(draws.T) - covariance) < 5.0 * error)


@pytest.mark.slow
def test_the_bias_falls_with_the_number_of_neighbors(x64):
    exact = density(Cholesky())(PARAMETERS)
    errors = [abs(density(Vecchia(m))(PARAMETERS) - exact) for m in (1, 4, 16)]
    assert errors[0] > 4.0 * errors[1] > 16.0 * errors[2]


def test_groups_bring_the_density_closer(x64):
    """Compares expected log densities, the divergences from the exact model, without draws of y."""
    rows = np.random.default_rng(4).uniform(size=(600, 2))
    gp = sgp.GaussianProcess(sgp.kernels.Matern32(0.1), rows, 0.1)
    H = np.asarray(gp.kernel.covariance(gp.X)) + 0.1 * np.eye(len(rows))
    exact = np.linalg.slogdet(H)[1]
    divergences = []
    for size in (1, 8):
        graph = Vecchia(10, group_size=size).find_neighbors(rows).graph
        near = enumerate(given_each(graph))
        left = [H[i, i] - H[i, g] @ np.linalg.solve(H[np.ix_(g, g)], H[g, i]) for i, g in near]
        divergences.append(0.5 * (np.sum(np.log(left)) - exact))
    assert 0.0 < divergences[1] < 0.75 * divergences[0]


@each("size", [(str(size), lambda size=size: size) for size in (1, 8)])
def test_mini_batches_are_unbiased(size, x64):
    estimator = Vecchia(8, group_size=size()).find_neighbors(X)
    batches = [estimator.on(np.arange(start, N, 6)) for start in range(6)]
    value = jax.jit(lambda estimator, p: jax.value_and_grad(density(estimator))(p))
    full = value(estimator, PARAMETERS)
    of_batches = [value(batch, PARAMETERS) for batch in batches]
    np.testing.assert_allclose(np.mean([value for value, _ in of_batches]), full[0], rtol=1e-12)
    np.testing.assert_allclose(
        np.mean([gradient for _, gradient in of_batches], axis=0), full[1], rtol=1e-10
    )


def test_batches_that_cannot_be_are_refused(x64, unchecked):
    estimator = Vecchia(5).find_neighbors(X)
    for rows in ([N], [-1], [3, N + 7]):
        with pytest.raises(ValueError, match=f"`index` must be in 0\\.\\.{N - 1}"):
            density(estimator.on(rows))(PARAMETERS)
        value = jax.jit(lambda rows: density(estimator.on(rows))(PARAMETERS))
        assert np.isnan(value(jnp.array(rows)))
    for rows in (np.ones(N, bool), [0.5]):
        with pytest.raises(TypeError, match="`index` must hold integers"):
            estimator.on(rows)
    with pytest.raises(ValueError, match="at least one row"):
        estimator.on(np.zeros(0, int))
    observed = np.arange(N) > 3
    gp = sgp.GaussianProcess(
        sgp.kernels.RBF(1.0), X, 0.1, observed=observed, estimator=Vecchia(5).on([2, 3])
    )
    with pytest.raises(ValueError, match="`observed` and a mini-batch of rows"):
        gp.log_prob(Y)

    def inside(X, y):
        with sgp.plate("rows", N, 6) as index:
            gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1, estimator=estimator.on(index))
            numpyro.sample("y", gp, obs=y)

    with pytest.raises(ValueError, match="must stand outside of the plate"):
        numpyro.handlers.seed(inside, 0)(X, Y)


def test_rows_may_be_named_in_bytes(x64):
    places = np.arange(300.0)[:, None]
    estimator = Vecchia(2).find_neighbors(places)
    rows = np.arange(0, 125, 25)
    values = [
        sgp.GaussianProcess(
            sgp.kernels.RBF(2.0), places, 0.1, estimator=estimator.on(rows.astype(kind))
        ).log_prob(np.sin(places[:, 0]))
        for kind in ("int8", "int64")
    ]
    assert values[0] == values[1]


def test_neighbors_are_found_by_one_kernel(x64, unchecked):
    with pytest.raises(ValueError, match="`kernel` must be one kernel, got a batch of shape"):
        Vecchia(2).find_neighbors(np.arange(6.0)[:, None], sgp.kernels.RBF(np.ones((6, 1))))


@pytest.mark.parametrize("kind", ["Vecchia", "FullScale"])
def test_new_inputs_of_another_dtype_are_not_rounded(kind, x64):
    """Some of these inputs are equal in float32, where draws would be equal."""
    places = (2000.0 + np.linspace(0.0, 0.01, 8))[:, None].astype(np.float32)
    new = 2000.0 + np.array([[0.02], [0.02004], [0.02008]])
    kernel = sgp.kernels.Matern32(1e-4)
    points = jnp.asarray(places[:2], jnp.float64)
    estimator = Vecchia(30) if kind == "Vecchia" else sgp.estimators.FullScale(points, 30)
    gp = sgp.GaussianProcess(kernel, places, 0.1, estimator=estimator)
    drawn = gp.condition(np.zeros(8)).sample(jax.random.key(0), new, 20_000)
    # Far from the data, the posterior is the prior.
    np.testing.assert_allclose(np.cov(drawn.T), kernel(new, new), atol=0.04)


def test_few_digits_are_warned_of():
    rows = np.linspace(0.0, 1.0, 200, dtype=np.float32)[:, None]
    gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0), rows, 1e-6, estimator=Vecchia(8))
    with pytest.warns(RuntimeWarning, match="few digits left"):
        gp.log_prob(np.sin(rows[:, 0])).block_until_ready()
        jax.effects_barrier()


def test_what_fills_a_chunk_is_not_warned_of():
    rows = np.linspace(0.0, 1e5, 700, dtype=np.float32)[:, None]
    gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0), rows, 1e-9, estimator=Vecchia(8))
    expected = dist.Normal(0.0, 1.0).log_prob(np.sin(rows[:, 0])).sum()
    np.testing.assert_allclose(gp.log_prob(np.sin(rows[:, 0])), expected, rtol=1e-5)
    jax.effects_barrier()


def test_neighbors_of_other_rows_are_refused(x64, unchecked):
    estimator = Vecchia(5).find_neighbors(X)
    for rows in (X[:-1], X + 1.0):
        with pytest.raises(ValueError, match="is not the `X` whose neighbors"):
            process(estimator, rows=rows).log_prob(Y[: len(rows)])
    value = jax.jit(lambda rows: process(estimator, rows=rows).log_prob(Y))
    assert np.isfinite(value(X))
    assert np.isnan(value(X + 1.0))
    with pytest.raises(ValueError, match="find them beforehand"):
        jax.jit(lambda rows: process(Vecchia(5), rows=rows).log_prob(Y))(X)
    with pytest.raises(ValueError, match="find them beforehand"):
        jax.jit(Vecchia(5).find_neighbors)(X)


def test_neighbors_are_found_in_lengthscales():
    rows = np.stack([np.repeat(np.arange(5.0), 5), np.tile(np.arange(5.0), 5)], axis=1)
    wide = sgp.kernels.RBF([100.0, 1.0])
    total = wide + sgp.kernels.RBF(0.01)
    for kernel, expected in ((wide, {14, 19}), (total, {19, 23})):
        graph = Vecchia(2, ordering="given").find_neighbors(rows, kernel).graph
        assert graph is not None
        assert set(np.asarray(graph.nearest)[24]) == expected


def test_hidden_rows_drop_out(x64):
    observed = RNG.uniform(size=N) < 0.7
    kernel, y = sgp.kernels.Matern32(0.4), np.where(observed, Y, np.nan)
    gp = functools.partial(sgp.GaussianProcess, kernel, noise_variance=0.1, estimator=Vecchia(6))
    masked, without = gp(X=X, observed=observed), gp(X=X[observed])
    expected = without.log_prob(Y[observed])
    np.testing.assert_allclose(masked.log_prob(y), expected, rtol=1e-12)
    # The mask is known, and X as well.
    np.testing.assert_allclose(jax.jit(lambda y: masked.log_prob(y))(y), expected, rtol=1e-12)
    np.testing.assert_allclose(
        masked.condition(y).mean(NEW), without.condition(Y[observed]).mean(NEW), rtol=1e-12
    )
    with pytest.raises(ValueError, match="must know `observed`"):
        jax.jit(lambda observed: gp(X=X, observed=observed).log_prob(Y))(observed)


@pytest.mark.slow
def test_rows_that_are_the_same_need_noise_alone(dtype):
    rows = np.repeat(X[:20], 3, axis=0)
    exact, approximate = (
        process(estimator, rows=rows).log_prob(Y) for estimator in (Cholesky(), Vecchia(59))
    )
    np.testing.assert_allclose(approximate, exact, rtol=1e-4 if dtype == jnp.float32 else 1e-11)
    loo = [
        process(estimator, rows=rows).condition(Y).leave_one_out()
        for estimator in (Cholesky(), Vecchia(60))
    ]
    for name in ("loc", "scale"):
        left, right = (getattr(normal, name) for normal in loo)
        rtol, atol = (2e-3, 1e-5) if dtype == jnp.float32 else (1e-9, 0.0)
        np.testing.assert_allclose(left, right, rtol=rtol, atol=atol)


# The posterior


def test_with_all_observations_the_posterior_is_exact(x64):
    exact, approximate = (
        process(estimator).condition(Y) for estimator in (Cholesky(), Vecchia(N + len(NEW)))
    )
    np.testing.assert_allclose(approximate.mean(NEW), exact.mean(NEW), rtol=1e-10)
    np.testing.assert_allclose(approximate.variance(NEW), exact.variance(NEW), rtol=1e-9)
    compiled = jax.jit(lambda rows: approximate.variance(rows, chunk_size=3))(NEW)
    np.testing.assert_allclose(compiled, exact.variance(NEW), rtol=1e-9)
    for name in ("loc", "scale"):
        left, right = (
            getattr(posterior.leave_one_out(), name) for posterior in (approximate, exact)
        )
        np.testing.assert_allclose(left, right, rtol=1e-9)
    assert_covariance(approximate.sample(jax.random.key(0), NEW, 40_000), exact)


def assert_covariance(draws, exact):
    """Draws have the exact moments, within 5 standard errors."""
    covariance = np.asarray(exact.covariance(NEW))
    variances = np.diagonal(covariance)
    error = np.sqrt((np.outer(variances, variances) + covariance**2) / len(draws))
    assert np.all(np.abs(np.cov(draws.T) - covariance) < 5.0 * error)
    error = np.sqrt(variances / len(draws))
    assert np.all(np.abs(np.mean(draws, axis=0) - exact.mean(NEW)) < 5.0 * error)


@pytest.mark.slow
def test_a_part_of_a_sum_is_that_of_the_exact_posterior(x64):
    kernel = sgp.kernels.RBF(0.4) + sgp.kernels.Matern12(1.0)
    estimators = Cholesky(), Vecchia(N + len(NEW))
    exact, approximate = (
        sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator)
        .condition(Y)
        .component(lambda k: k.left)
        for estimator in estimators
    )
    np.testing.assert_allclose(approximate.mean(NEW), exact.mean(NEW), rtol=1e-9)
    np.testing.assert_allclose(approximate.variance(NEW), exact.variance(NEW), rtol=1e-9)
    assert_covariance(approximate.sample(jax.random.key(1), NEW, 40_000), exact.process)


@pytest.mark.slow
def test_functions_have_the_posterior_moments(x64):
    posterior = process(Vecchia(N)).condition(Y)
    functions = posterior.sample_functions(jax.random.key(2), 2_000, num_features=200)
    draws, variance = functions(NEW), posterior.variance(NEW)
    error = np.sqrt(variance / 2_000)
    assert np.all(np.abs(np.mean(draws, axis=0) - posterior.mean(NEW)) < 5.0 * error)
    np.testing.assert_allclose(np.var(draws, axis=0), variance, rtol=0.2)
    np.testing.assert_allclose(functions(NEW, chunk_size=2), draws, rtol=1e-10)


def test_few_neighbors_come_close(x64):
    exact = process(Cholesky()).condition(Y)
    errors = []
    for num in (4, 12, 36):
        posterior = process(Vecchia(num)).condition(Y)
        difference = np.abs(posterior.mean(NEW) - exact.mean(NEW)) / np.sqrt(exact.variance(NEW))
        errors.append(
            [difference.max(), np.max(posterior.variance(NEW) / exact.variance(NEW)) - 1.0]
        )
    assert np.all(np.diff(errors, axis=0) < 0.0)
    assert errors[-1][0] < 0.1
    assert 0.0 < errors[-1][1] < 0.01


# In models


def model(X, y=None, estimator=None, batch_size=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 1.0))
    kernel = sgp.kernels.Matern32(lengthscale)
    if batch_size is not None:
        with sgp.plate("rows", len(X), batch_size) as index:
            estimator = estimator.on(index)
    gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator)
    return numpyro.sample("y", gp, obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 20])
def test_svi_and_the_posterior_after_it(batch_size, x64):
    guide = AutoDelta(model)
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    result = svi.run(jax.random.key(0), 200, X, Y, Vecchia(N - 1), batch_size, progress_bar=False)
    lengthscale = guide.median(result.params)["lengthscale"]
    exact = AutoDelta(model)
    svi = SVI(model, exact, optax.adam(0.05), Trace_ELBO())
    result_of_exact = svi.run(jax.random.key(0), 200, X, Y, Cholesky(), progress_bar=False)
    expected = exact.median(result_of_exact.params)["lengthscale"]
    np.testing.assert_allclose(lengthscale, expected, rtol=1e-6 if batch_size is None else 0.1)
    posterior = sgp.posterior(model, guide, result, X, Y, Vecchia(N))
    direct = sgp.GaussianProcess(sgp.kernels.Matern32(lengthscale), X, 0.1).condition(Y)
    np.testing.assert_allclose(posterior.mean(NEW), direct.mean(NEW), rtol=1e-8)


@pytest.mark.slow
def test_nuts_and_the_posterior_after_it(x64):
    results = []
    for estimator in (Cholesky(), Vecchia(N - 1)):
        mcmc = MCMC(NUTS(model), num_warmup=20, num_samples=10, progress_bar=False)
        mcmc.run(jax.random.key(0), X, Y, estimator)
        results.append(mcmc.get_samples())
    # The same chain.
    np.testing.assert_allclose(results[1]["lengthscale"], results[0]["lengthscale"], rtol=1e-6)
    posterior = sgp.posterior(model, results[1], X, Y, Vecchia(N))
    exact = sgp.posterior(model, results[0], X, Y, Cholesky())
    np.testing.assert_allclose(posterior.mean(NEW), exact.mean(NEW), rtol=1e-6)


TOGETHER = """
import jax
import numpyro_scalegp as sgp

X = jax.random.uniform(jax.random.key(0), (2000, 2))
estimators = [sgp.estimators.Vecchia(m).find_neighbors(X) for m in (20, 19, 18)]

@jax.jit
def total(scale):
    kernel = sgp.kernels.Matern32(scale)
    processes = [sgp.GaussianProcess(kernel, X, 0.1, estimator=one) for one in estimators]
    return sum(gp.condition(X[:, 0]).variance(X[:600]).sum() for gp in processes)

print(all(float(total(0.1 + 0.01 * i)) > 0.0 for i in range(30)))
"""


@pytest.mark.one_interpreter
def test_several_in_one_program_do_not_wait_for_each_other():
    # With two threads, jaxlib 0.10 splits larger batches among them. Without the options
    # of the tests, whose devices bring enough threads to avoid the deadlock.
    environment = {**os.environ, "NPROC": "2", "XLA_FLAGS": ""}
    command = [sys.executable, "-W", "error", "-c", TOGETHER]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["True"], done.stderr
