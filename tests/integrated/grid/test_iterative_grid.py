"""Grids with gaps by iterative solvers, against dense algebra."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import numpyro_scalegp as sgp
from tests.integrated.grid.test_grid import (
    NEW_PLACES,
    NEW_ROWS,
    NEW_TIMES,
    OBSERVED,
    PLACES,
    RNG,
    TIMES,
    Dense,
    Y,
    product,
    products,
    rows_of,
    same,
)

EXACT = sgp.solvers.ConjugateGradients(
    1e-8, max_epochs=300, preconditioner=sgp.preconditioners.PivotedCholesky(2)
)
NOISE = RNG.uniform(0.1, 0.5, (6, 4))
KEY = jax.random.key(0)


def gp_of(
    estimator: Any, scale: Any = 1.0, *, observed: Any = OBSERVED, key: Array = KEY
) -> sgp.GridGP:
    return sgp.GridGP(
        products(scale),
        [TIMES, PLACES],
        scale * NOISE,
        mean=lambda rows: 0.3 * rows[:, 1],
        observed=observed,
        estimator=estimator,
        key=key,
    )


@pytest.mark.slow
def test_products_and_gradients_are_those_of_the_rows(x64: None) -> None:
    for is_traced in (False, True):

        def operators(scale: Any, observed: Any) -> tuple[Any, Any]:
            gp = gp_of(sgp.estimators.Hutchinson(EXACT), scale, observed=observed)
            of_grid = gp._solved_rows()[0].operator
            of_rows = sgp.solvers.KernelOperator(of_grid.kernel, of_grid.X, of_grid.noise_variance)
            return of_grid, of_rows

        def results(observed: Any) -> Any:
            n = operators(1.0, observed)[0].size
            U, V = jnp.asarray(np.random.default_rng(1).normal(size=(2, n, 3)))

            def forms(scale: Any, place: int) -> Array:
                return jnp.sum(U * operators(scale, observed)[place].matmul(V))

            def gradient(scale: Any, place: int) -> Array:
                operator, pull_back = jax.vjp(lambda s: operators(s, observed)[place], scale)
                arrays = operator.bilinear_gradient(U, V)
                return pull_back(arrays)[0]

            return [
                (forms(1.1, place), jax.grad(forms)(1.1, place), gradient(1.1, place))
                for place in (0, 1)
            ]

        of_grid, of_rows = (jax.jit(results) if is_traced else results)(OBSERVED)
        jax.tree.map(same, of_grid, of_rows)
        same(of_grid[1], of_grid[2])


@pytest.mark.monte_carlo
@pytest.mark.parametrize("kind", ["Pathwise", "Hutchinson"])
def test_gradients_are_unbiased(kind: str, x64: None) -> None:
    estimator = getattr(sgp.estimators, kind)(EXACT, 8, num_logdet_probes=8)
    num = 300

    def estimate(scale: Any, key: Array, observed: Any = OBSERVED) -> Array:
        return gp_of(estimator, scale, observed=observed, key=key).log_prob(Y)

    keys = jax.random.split(jax.random.key(1), num)
    values, gradients = jax.jit(
        lambda keys: jax.lax.map(lambda key: jax.value_and_grad(estimate)(1.0, key), keys)
    )(keys)
    exact = jax.value_and_grad(lambda scale: Dense(gp_of(None, scale), Y).log_density())(1.0)
    for draws, expected in zip((values, gradients), exact, strict=True):
        error = jnp.std(draws, ddof=1) / num**0.5
        assert 0.0 < abs(jnp.mean(draws) - expected) < 4.0 * error
        assert error < 0.05 * abs(expected)
    if kind == "Pathwise":
        traced = jax.jit(lambda mask: estimate(1.0, KEY, mask))(OBSERVED)
        assert abs(traced - exact[0]) < 5.0 * jnp.std(values)


@pytest.mark.slow
def test_moments_and_draws(x64: None) -> None:
    num = 1000
    estimator = sgp.estimators.Pathwise(EXACT, num, num_features=400)
    gp = gp_of(estimator)
    posterior, dense = gp.condition(Y), Dense(gp, Y)
    axes = [NEW_TIMES, NEW_PLACES]
    for inputs, rows in ((axes, rows_of(*axes)), (NEW_ROWS, NEW_ROWS)):
        mean, covariance = dense.moments(rows)
        scale = jnp.sqrt(jnp.diag(covariance))
        same(posterior.mean(inputs).ravel(), mean, 1e-6)
        np.testing.assert_allclose(
            posterior.variance(inputs).ravel(), scale**2, rtol=6.0 * (2.0 / num) ** 0.5
        )
        draws = posterior.sample(jax.random.key(3), inputs, num).reshape(num, -1)
        assert jnp.max(jnp.abs(jnp.mean(draws, axis=0) - mean) / scale) < 4.5 / num**0.5
        functions = posterior.sample_functions(jax.random.key(3), num)
        same(functions(rows), draws, 1e-7)
    np.testing.assert_allclose(
        posterior.covariance(NEW_ROWS), covariance, atol=6.0 * jnp.max(covariance) / num**0.5
    )
    component = posterior.component(lambda kernel: kernel.right)
    mean, covariance = dense.moments(NEW_ROWS, gp.kernel.component(gp.kernel.right))
    same(component.mean(NEW_ROWS), mean, 1e-6)
    same(component.mean(axes).shape, (4, 3))
    more = posterior.sample(jax.random.key(4), axes, num + 1)
    assert more.shape == (num + 1, 4, 3)
    loo, inverse = posterior.leave_one_out(), jnp.linalg.inv(dense.H)
    precision = jnp.diag(inverse)
    np.testing.assert_allclose(
        loo.scale.ravel()[dense.index], precision**-0.5, rtol=6.0 * (0.5 / num) ** 0.5
    )
    at_data = posterior.at_data()
    same(at_data.loc.ravel()[dense.index], dense.moments(gp.X)[0][dense.index], 1e-6)


@pytest.mark.slow
def test_a_traced_mask_gives_the_same_posterior(x64: None) -> None:
    estimator = sgp.estimators.Pathwise(EXACT, 500, num_features=200)

    def moments(observed: Any) -> tuple[Array, Array]:
        posterior, axes = gp_of(estimator, observed=observed).condition(Y), [NEW_TIMES, NEW_PLACES]
        return posterior.mean(axes), posterior.variance(axes)

    (mean, variance), expected = jax.jit(moments)(OBSERVED), moments(OBSERVED)
    same(mean, expected[0], 1e-6)
    np.testing.assert_allclose(variance, expected[1], rtol=8.0 * (2.0 / 500) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["AutoSolver", "AlternatingProjections", "ADASAP", "Cholesky"])
def test_any_solver(solver: str, x64: None) -> None:
    options = {} if solver == "Cholesky" else {"tolerance": 1e-4, "max_epochs": 2000}
    estimator = sgp.estimators.Pathwise(getattr(sgp.solvers, solver)(**options), 4)
    gp = gp_of(estimator)
    mean = Dense(gp, Y).moments(NEW_ROWS)[0]
    same(gp.condition(Y).mean(NEW_ROWS), mean, 1e-2)


@pytest.mark.slow
def test_options(x64: None) -> None:
    gp = sgp.GridGP(product(), [TIMES, PLACES], 0.2, estimator=sgp.estimators.Pathwise(), key=KEY)
    assert gp.condition(Y, num_samples=3, max_epochs=2).process.num_samples == 3
    with pytest.raises(ValueError, match="num_samples"):
        sgp.GridGP(product(), [TIMES, PLACES], 0.2).condition(Y, num_samples=3)
    with pytest.raises(ValueError, match="draws at random"):
        sgp.GridGP(product(), [TIMES, PLACES], 0.2, estimator=sgp.estimators.Pathwise()).log_prob(Y)
