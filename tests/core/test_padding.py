"""Data padded to a fixed number of rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from jaxtyping import Array
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from tests.compilation import programs


def rows(n: int) -> tuple[Array, Array]:
    X = jax.random.uniform(jax.random.key(0), (n, 2))
    return X, jnp.sin(4.0 * X[:, 0]) + X[:, 1]


def model(X: Array, y: Array | None = None, observed: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal().expand([2]).to_event(1))
    kernel = sgp.kernels.Matern52(lengthscale)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, 0.01, observed=observed), obs=y)


def test_arrays_of_any_kind():
    table = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    X, pair, nothing, observed = sgp.pad_rows(4, table, {"y": [1, 2]}, None)
    np.testing.assert_array_equal(X, [[1.0, 3.0], [2.0, 4.0], [2.0, 4.0], [2.0, 4.0]])
    np.testing.assert_array_equal(pair["y"], [1, 2, 2, 2])
    assert nothing is None
    assert observed.tolist() == [True, True, False, False]
    assert sgp.pad_rows(3, np.ones(2, np.float32))[0].dtype == np.float32
    (same, all_rows), y = sgp.pad_rows(2, np.ones((2, 3))), jnp.arange(2.0)
    assert same.shape == (2, 3)
    assert all_rows.all()
    np.testing.assert_array_equal(jax.jit(lambda y: sgp.pad_rows(3, y)[0])(y), [0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sgp.pad_rows(1, np.ones(2)), "`size` must be at least 2, the number of rows"),
        (lambda: sgp.pad_rows(4, np.ones((0, 2))), "`array` must have at least one row"),
        (lambda: sgp.pad_rows(4, np.ones(2), np.ones(3)), "the same number of rows"),
        (lambda: sgp.pad_rows(4, 1.0), "rows as their leading axis"),
        (lambda: sgp.pad_rows(4.0, np.ones(2)), "`size` must be an integer"),
        (
            lambda: sgp.pad_rows(4, np.ma.masked_equal([1.0, 2.0], 2.0)),
            "has masked entries",
        ),
        (lambda: sgp.pad_rows(4, pd.DataFrame({"a": ["b"]})), "`array` must hold numbers"),
    ],
)
def test_bad_input(call, message, unchecked):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    [
        sgp.estimators.Cholesky(),
        sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients(1e-8, 500), 4),
    ],
    ids=["exact", "iterative"],
)
def test_padding_changes_nothing(estimator, x64):
    X, y = rows(20)
    new = X[:7] + 0.01

    def process(X: Array, observed: Any = None) -> sgp.GaussianProcess:
        kernel, key = sgp.kernels.Matern52(0.4), jax.random.key(1)
        return sgp.GaussianProcess(kernel, X, 0.01, observed=observed, estimator=estimator, key=key)

    @jax.jit
    def padded(X: Array, y: Array, observed: Array) -> Any:
        gp = process(X, observed)
        posterior = gp.condition(y)
        return gp.log_prob(y), posterior.mean(new), posterior.variance(new)

    exact = sgp.GaussianProcess(sgp.kernels.Matern52(0.4), X, 0.01)
    posterior = exact.condition(y)
    density, mean, variance = padded(*sgp.pad_rows(33, X, y.at[3].set(y[3])))
    np.testing.assert_allclose(mean, posterior.mean(new), rtol=0, atol=1e-6)
    if not estimator.is_stochastic:
        np.testing.assert_allclose(density, exact.log_prob(y), rtol=1e-8)
        np.testing.assert_allclose(variance, posterior.variance(new), rtol=1e-6)


@pytest.mark.slow
def test_a_growing_loop_compiles_once():
    guide = AutoDelta(model)
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())

    @jax.jit
    def next_input(key: Array, state: Any, *data: Array) -> Any:
        state, _ = svi.update(state, *data)
        posterior = sgp.posterior(model, guide, svi.get_params(state), *data)
        candidates = jax.random.uniform(key, (50, 2))
        drawn = posterior.sample_functions(key, num_features=32)(candidates)[0]
        score = drawn + posterior.predictive(candidates).variance
        return state, candidates[jnp.argmax(score)]

    X, y = map(np.asarray, rows(5))
    state = svi.init(jax.random.key(0), *sgp.pad_rows(64, X, y))
    counts = []
    for key in jax.random.split(jax.random.key(1), 50):
        state, x = next_input(key, state, *sgp.pad_rows(64, X, y))
        X, y = np.vstack([X, x]), np.append(y, np.float32(np.sin(4.0 * x[0]) + x[1]))
        counts.append(programs.number)
    assert len(X) == 55
    assert counts[1] == counts[-1]


@pytest.mark.slow
def test_a_state_serves_growing_data():
    """If it has all rows from the start; a state of the first rows alone warns."""
    estimator = sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients(), 4)

    def with_state(X: Array, y: Array, observed: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
        kernel = sgp.kernels.Matern52(lengthscale)
        gp = sgp.GaussianProcess(
            kernel, X, 0.1, observed=observed, estimator=estimator, state="solver"
        )
        numpyro.sample("y", gp, obs=y)

    svi = SVI(with_state, AutoDelta(with_state), optax.adam(0.05), Trace_ELBO())
    data = [sgp.pad_rows(16, *(array[:n] for array in rows(12))) for n in (8, 9, 10)]
    state, update = jax.jit(svi.init)(jax.random.key(0), *data[0]), jax.jit(svi.update)
    for each in data:
        state, loss = update(state, *each)
        assert np.isfinite(loss)
    svi = SVI(with_state, AutoDelta(with_state), optax.adam(0.05), Trace_ELBO())
    state, update = svi.init(jax.random.key(0), *data[0]), jax.jit(svi.update)
    state, loss = update(state, *data[0])
    assert np.isfinite(loss)
    with pytest.warns(RuntimeWarning, match="a `state` is for another number of observed rows"):
        loss = jax.block_until_ready(update(state, *data[1])[1])
        jax.effects_barrier()
    assert np.isnan(loss)
