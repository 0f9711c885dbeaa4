"""Forecasts and updates by new observations, against the posterior given all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp

K = sgp.kernels
N, M = 60, 45
RNG = np.random.default_rng(0)
TIMES = np.sort(RNG.uniform(0.0, 12.0, N))
TIMES[M - 1] = TIMES[M] = TIMES[M - 2]  # ties across the first update
X = np.stack([TIMES, np.arange(N) % 2], axis=1).astype(float)
Y = RNG.normal(size=N)
NOISE = RNG.uniform(0.05, 0.3, N)
LATER = np.array([[TIMES[-1], 0.0], [TIMES[-1] + 0.3, 1.0], [TIMES[-1] + 4.0, 0.0]])


def outputs() -> Any:
    return K.Coregion(jnp.array([[1.0], [0.5]]), jnp.array([0.2, 0.4])).on((1,))


KERNELS: dict[str, Any] = {
    "matern": lambda: K.Matern32(0.8).on((0,)),
    "sum": lambda: K.Matern52(2.0).on((0,)) + K.Harmonic(3.0, 2.0).on((0,)),
    "walk": lambda: K.IntegratedWiener(0.1).on((0,)) + K.Linear(0.3, 1.0).on((0,)),
    "outputs": lambda: K.Matern32(0.8).on((0,)) * outputs() + K.Constant(0.5).on((0,)),
}


def trend(X: Any) -> Any:
    return 0.3 * X[:, 0]


def process(name: str, rows: Any = slice(None), noise: Any = None) -> sgp.GaussianProcess:
    noise = 0.1 if noise is None else noise[rows]
    options = {"mean": trend, "estimator": sgp.estimators.StateSpace()}
    return sgp.GaussianProcess(KERNELS[name](), X[rows], noise, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("sum", "walk") else ())
        for name in KERNELS
    ],
)
def test_updates_give_the_posterior_of_all_observations(name, x64):
    """One row, none in order, and many at once."""
    smoothed = process(name).condition(Y)
    filtered = process(name, slice(M)).condition(Y[:M]).filtered()
    for rows in ([M], [M + 3, M + 1, M + 2], np.arange(M + 4, N)):
        filtered = filtered.update(X[rows], Y[rows])
    np.testing.assert_allclose(filtered.mean(LATER), smoothed.mean(LATER), rtol=1e-9)
    np.testing.assert_allclose(filtered.variance(LATER), smoothed.variance(LATER), rtol=1e-8)
    np.testing.assert_allclose(filtered.covariance(LATER), smoothed.covariance(LATER), atol=1e-10)
    predictive, expected = filtered.predictive(LATER), smoothed.predictive(LATER)
    np.testing.assert_allclose(predictive.scale, expected.scale, rtol=1e-8)
    if name in ("sum", "outputs"):
        left, right = (p.component(lambda kernel: kernel.left) for p in (filtered, smoothed))
        np.testing.assert_allclose(left.mean(LATER), right.mean(LATER), rtol=1e-8)
        np.testing.assert_allclose(left.variance(LATER), right.variance(LATER), rtol=1e-8)


@pytest.mark.slow
def test_noise_of_each_row(x64):
    smoothed = process("matern", noise=NOISE).condition(Y)
    filtered = process("matern", slice(M), NOISE).condition(Y[:M]).filtered()
    updated = filtered.update(X[M:], Y[M:], NOISE[M:])
    np.testing.assert_allclose(updated.mean(LATER), smoothed.mean(LATER), rtol=1e-9)
    with pytest.raises(ValueError, match="`noise_variance` must be given"):
        filtered.update(X[M:], Y[M:])


@pytest.mark.slow
def test_draws(x64):
    filtered = process("sum").condition(Y).filtered()
    draws = filtered.sample(jax.random.key(0), LATER, 20_000)
    exact = filtered.covariance(LATER)
    deviation = np.sqrt(np.diag(exact))
    errors = 5.0 / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - filtered.mean(LATER)) < errors * deviation)
    difference = np.abs(np.cov(draws, rowvar=False) - exact)
    assert np.all(difference < 1.5 * errors * np.outer(deviation, deviation))


@pytest.mark.slow
def test_one_program_serves_all_updates(x64):
    """In a loop of fifty, also within `jit` and `scan`."""
    filtered = process("matern", slice(5)).condition(Y[:5]).filtered()
    by_loop = filtered
    update = jax.jit(lambda filtered, x, y: filtered.update(x[None], y[None]))
    for i in range(5, N):
        by_loop = update(by_loop, X[i], Y[i])
    assert update._cache_size() == 1
    step = lambda carry, row: (carry.update(row[0][None], row[1][None]), None)  # noqa: E731
    by_scan = jax.lax.scan(step, filtered, (jnp.array(X[5:]), jnp.array(Y[5:])))[0]
    smoothed = process("matern").condition(Y)
    for posterior in (by_loop, by_scan):
        np.testing.assert_allclose(posterior.mean(LATER), smoothed.mean(LATER), rtol=1e-9)


@pytest.mark.slow
def test_saved_and_loaded(tmp_path, x64):
    filtered = process("sum", slice(M)).condition(Y[:M]).filtered()
    sgp.save(tmp_path / "filtered.npz", filtered)
    loaded = sgp.load(tmp_path / "filtered.npz", trusted=("tests",))
    expected = filtered.update(X[M:], Y[M:]).mean(LATER)
    again = loaded.update(X[M:], Y[M:]).mean(LATER)
    np.testing.assert_allclose(again, expected, rtol=1e-12)


@pytest.mark.slow
def test_float32():
    smoothed = process("sum").condition(Y)
    filtered = process("sum", slice(M)).condition(Y[:M]).filtered().update(X[M:], Y[M:])
    assert filtered.mean(LATER).dtype == jnp.float32
    np.testing.assert_allclose(filtered.mean(LATER), smoothed.mean(LATER), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_errors():
    filtered = process("matern", slice(M)).condition(Y[:M]).filtered()
    with pytest.raises(ValueError, match="`Xs` has a time before the last observation"):
        filtered.mean(X[:3])
    with pytest.raises(ValueError, match="`X` has a time before the last observation"):
        filtered.update(X[:3], Y[:3])
    assert np.all(np.isnan(jax.jit(lambda X: filtered.mean(X))(X[:3])))
    late = jax.jit(lambda X, y: filtered.update(X, y).mean(LATER))(X[:3], Y[:3])
    assert np.all(np.isnan(late))
    with pytest.raises(ValueError, match="`y` must have shape"):
        filtered.update(X[M:], Y[:2])
    with pytest.raises(ValueError, match="has no `sample_functions`: call `sample`"):
        filtered.sample_functions(jax.random.key(0))
    component = filtered.restrict(lambda kernel: kernel)
    with pytest.raises(ValueError, match="a component has no observations"):
        component.update(X[M:], Y[M:])
    with pytest.raises(ValueError, match="`FilteredPosterior` has no `leave_one_out`"):
        filtered.leave_one_out()
    values = sgp.GaussianProcess(
        KERNELS["matern"](), X, 0.1, mean=Y, estimator=sgp.estimators.StateSpace()
    )
    with pytest.raises(ValueError, match="`mean` was given as its values at the rows"):
        values.condition(Y).filtered().update(LATER, np.ones(3))
