"""The iterative estimators on eight devices, compared with one device."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import Array
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from numpyro_scalegp.linear import products

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
DEVICES = 8
EVEN, UNEVEN = 96, 101

NOISE = 0.5  # well conditioned, so that rounding is not amplified

# Conjugate gradients amplify rounding errors before they converge.
SOLVERS = {
    "conjugate gradients": sgp.solvers.ConjugateGradients(1e-6),
    "pivoted": sgp.solvers.ConjugateGradients(
        1e-12, preconditioner=sgp.preconditioners.PivotedCholesky(10)
    ),
    "nystrom": sgp.solvers.ConjugateGradients(
        1e-12, preconditioner=sgp.preconditioners.Nystrom(10)
    ),
    "roulette": sgp.solvers.RussianRouletteCG(0.3, 5, 20),
    "projections": sgp.solvers.AlternatingProjections(block_size=20, tolerance=1e-6),
    "gradient": sgp.solvers.StochasticGradientDescent(batch_size=20, max_epochs=3),
    "dual": sgp.solvers.StochasticDualDescent(batch_size=20, max_epochs=3),
    "sketch": sgp.solvers.ADASAP(block_size=20, max_epochs=30),
    "rank": sgp.solvers.ADASAP(block_size=20, rank=5, max_epochs=3),
    "auto": sgp.solvers.AutoSolver(1e-6),
    "cholesky": sgp.solvers.Cholesky(),
}


def assert_same(actual: Any, expected: Any) -> None:
    """Assert equality to 1e-10, absolute for small values."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), actual, expected
    )


def kernel(scale: Any = 1.0) -> sgp.kernels.AbstractKernel:
    return sgp.kernels.Matern32(scale * jnp.array([0.5, 0.6, 0.7])) + sgp.kernels.RBF(0.8)


def mesh(num: int = DEVICES) -> jax.sharding.Mesh:
    return jax.make_mesh((num,), ("rows",), devices=jax.devices()[:num])


@functools.cache
def data(n: int) -> tuple[Array, Array, Array]:
    """Inputs, observations and further vectors."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(n, 3))
    y = np.sin(2 * X[:, 0]) + 0.5 * generator.normal(size=n)
    return jnp.array(X), jnp.array(y), jnp.array(generator.normal(size=(n, 4)))


def operators(n: int, num: int = DEVICES) -> tuple[Any, Any]:
    """H on one device and on several."""
    X = data(n)[0]
    return tuple(
        sgp.solvers.KernelOperator(kernel(), rows, NOISE)
        for rows in (X, sgp.shard_rows(mesh(num), X))
    )


def gathered(function: Any, *args: Any) -> list[int]:
    """The numbers of entries of all arrays that a program gathers or sums over devices."""
    text = jax.jit(function).lower(*args).compile().as_text()
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-reduce|all-to-all)\(", text)
    return [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("n", "num"), [(EVEN, 8), (UNEVEN, 2), (UNEVEN, 3), (UNEVEN, 8)])
def test_products_and_gradients_are_those_of_one_device(n, num, monkeypatch):
    monkeypatch.setattr(products, "_MAX_ROWS_ON_CPU", 5)
    V = data(n)[2]
    single, several = operators(n, num)

    @jax.jit
    def results(H: Any) -> Any:
        index = jnp.array([3, n - 1, 17])
        return (
            H.matmul(V),
            H.rows_matmul(index, V),
            H.columns_matmul(index, V[:3]),
            H.bilinear_gradient(V, V[::-1]),
            H.quadratic_gradient(jnp.arange(4.0), V),
        )

    assert_same(results(single), results(several))


def test_no_device_waits_for_the_branches_of_others():
    X = jnp.tile(data(EVEN)[0], 2)  # distances of more than 3 columns are computed in several ways

    def product(X: Array, V: Array) -> Array:
        kernel = sgp.kernels.Matern32(jnp.full(X.shape[1], 0.5))
        return sgp.solvers.KernelOperator(kernel, X, NOISE).matmul(V)

    assert gathered(product, *sgp.shard_rows(mesh(), X, data(EVEN)[2])) == []


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("solver", SOLVERS)
def test_solutions_are_those_of_one_device(solver):
    n = UNEVEN
    B = data(n)[2]
    solve = jax.jit(lambda H: SOLVERS[solver].solve(H, B, guess=0.1 * B[::-1], key=KEY))
    single, several = map(solve, operators(n))
    assert_same(single, several)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("estimator", ["Hutchinson", "Pathwise"])
@pytest.mark.parametrize("solver", ["nystrom", "projections", "roulette"])
def test_values_gradients_and_posteriors_are_those_of_one_device(estimator, solver):
    n = UNEVEN
    X, y, _ = data(n)
    make = getattr(sgp.estimators, estimator)
    chosen = make(SOLVERS[solver], num_probes=5, num_features=20)

    def gp(scale: Array, X: Array) -> sgp.GaussianProcess:
        return sgp.GaussianProcess(kernel(scale), X, NOISE, estimator=chosen, key=KEY)

    @jax.jit
    def results(X: Array, y: Array, Xs: Array) -> Any:
        value = jax.value_and_grad(lambda scale: gp(scale, X).log_prob(y))(jnp.ones(()))
        if solver == "roulette":  # conditions by conjugate gradients, which stop before rounding
            return value  # errors are lost: one ulp of y moves draws on one device by 1e-10
        posterior = gp(jnp.ones(()), X).condition(y)
        at_rows = posterior.mean(X), posterior.at_data().mean, posterior.leave_one_out().variance
        of_new = posterior.mean(Xs), posterior.variance(Xs), posterior.sample(KEY, Xs, 3)
        return value, at_rows, of_new, posterior.diagnostics

    single = results(X, y, X[:7] + 0.1)
    several = results(*sgp.shard_rows(mesh(), X, y), X[:7] + 0.1)
    assert_same(single, several)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("n", [EVEN, UNEVEN])
def test_derivatives_outside_of_a_program_are_those_of_one_device(n):
    def derivatives(X: Array, y: Array) -> Any:
        def log_prob(X: Array) -> Array:
            return sgp.GaussianProcess(kernel(), X, NOISE).log_prob(y)

        return jax.grad(log_prob)(X), jax.jvp(log_prob, (X,), (X,))[1]

    X, y, _ = data(n)
    assert_same(derivatives(X, y), derivatives(*sgp.shard_rows(mesh(), X, y)))


@pytest.mark.parametrize("solver", ["projections", "pivoted"])
def test_no_gradient_gathers_rows(solver):
    n, num_probes = 800, 15
    X, y, _ = data(n)
    # The log-determinant's preconditioner has a rank of 10 sqrt(n).
    estimator = sgp.estimators.Pathwise(
        SOLVERS[solver], num_probes=num_probes, num_features=20, num_logdet_probes=0
    )

    def value(scale: Array, X: Array, y: Array) -> Array:
        gp = sgp.GaussianProcess(kernel(scale), X, NOISE, estimator=estimator, key=KEY)
        return gp.log_prob(y)

    sizes = gathered(jax.grad(value), jnp.ones(()), *sgp.shard_rows(mesh(), X, y))
    assert max(sizes) <= n < X.size < n * num_probes


def test_conditioning_in_a_program_gathers_no_rows():
    n, num_probes = 800, 15
    X, y, _ = data(n)
    solver = sgp.solvers.AlternatingProjections(block_size=20)
    estimator = sgp.estimators.Pathwise(solver, num_probes=num_probes, num_features=20)

    def weights(X: Array, y: Array) -> Array:
        gp = sgp.GaussianProcess(kernel(), X, NOISE, estimator=estimator, key=KEY)
        return gp.condition(y).representer_weights

    assert max(gathered(weights, *sgp.shard_rows(mesh(), X, y))) <= n


def model(X: Array, y: Array) -> None:
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    solver = sgp.solvers.AlternatingProjections(block_size=20, max_epochs=30)
    estimator = sgp.estimators.Pathwise(solver, num_probes=5, num_features=20)
    gp = sgp.GaussianProcess(kernel(scale), X, noise, estimator=estimator, state="solver")
    numpyro.sample("y", gp, obs=y)


@pytest.mark.usefixtures("x64")
def test_warm_starts_go_on_through_svi():
    data_on_one, data_on_mesh = data(EVEN)[:2], sgp.shard_rows(mesh(), *data(EVEN)[:2])
    results, guide = [], AutoDelta(model)
    for X, y in (data_on_one, data_on_mesh):
        svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
        results.append(svi.run(KEY, 4, X, y, progress_bar=False, stable_update=True))
    single, several = results
    assert_same(
        (single.params, single.losses, single.state.mutable_state["solver"].memory.solutions),
        (several.params, several.losses, several.state.mutable_state["solver"].memory.solutions),
    )
    solutions = several.state.mutable_state["solver"].memory.solutions
    assert len({str(shard.index) for shard in solutions.addressable_shards}) == 8
    means = [
        sgp.posterior(model, guide, result, X, y).mean(data(EVEN)[0][:5])
        for result, (X, y) in zip(results, (data_on_one, data_on_mesh), strict=True)
    ]
    assert_same(*means)
