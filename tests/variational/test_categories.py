"""Guides for functions of categories: points keep their categories, and predictions are right."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro import handlers
from numpyro.infer import SVI

import numpyro_scalegp as sgp
from numpyro_scalegp.guides import AutoDecoupledGP, AutoHybridGP, AutoSparseGP

KEY = jax.random.key(0)


def data() -> tuple[Array, Array]:
    """Two outputs, of which the second has a gap, with noise of 0.1."""
    random = np.random.default_rng(0)
    x, category = random.uniform(-2.0, 2.0, size=160), np.repeat([0.0, 1.0], 80)
    observed = (category == 0) | (x < 0.0)
    X = np.stack([x, category], axis=1)[observed]
    y = mean(X) + 0.1 * random.normal(size=len(X))
    return jnp.array(X), jnp.array(y)


def mean(X: Array) -> Array:
    wave = np.sin(2.0 * X[:, 0])
    return np.where(X[:, 1] == 0, wave, -0.7 * wave)


def model(X: Array, y: Array | None = None, batch: int | None = None) -> None:
    W = numpyro.sample("W", dist.Normal(jnp.eye(2, 1), 1.0).to_event(2))
    diag = numpyro.sample("diag", dist.LogNormal(-4.0, 1.0).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-1.5, 1.0))
    rows = sgp.plate("rows", X.shape[0], batch)
    X_batch, y_batch = rows.take(X, y)
    kernel = sgp.kernels.RBF(0.7).on((0,)) * sgp.kernels.Coregion(W, diag).on((1,))
    f = numpyro.sample("f", sgp.LatentGP(kernel, X_batch))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)


GUIDES: dict[str, Callable[[Array], Any]] = {
    "sparse": lambda X: AutoSparseGP(model, num_inducing=16),
    "hybrid": lambda X: AutoHybridGP(
        model, num_inducing=16, residual_points=X[::3], num_columns=None
    ),
    "decoupled": lambda X: AutoDecoupledGP(
        model, mean_points=X[::3], cov_points=X[::8], num_columns=None
    ),
    "growing": lambda X: AutoDecoupledGP(
        model, mean_size=40, cov_size=16, growth=20, num_columns=None
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_points_keep_their_categories(name: str) -> None:
    """Also, the first output predicts the second in its gap."""
    X, y = data()
    guide = GUIDES[name](X)
    schedule = optax.cosine_decay_schedule(0.05, 300)
    svi = SVI(model, guide, optax.adam(schedule), sgp.infer.QuadratureELBO(2))
    Xs = jnp.stack([jnp.linspace(0.2, 1.6, 15), jnp.ones(15)], axis=1)

    @jax.jit
    def run(key: Array) -> Any:
        def step(state: Any, _: None) -> Any:
            return svi.update(state, X, y)

        state = jax.lax.scan(step, svi.init(key, X, y), length=300)[0]
        params = {**svi.get_params(state), **(state.mutable_state or {})}
        if name != "sparse":
            params = guide.solve_mean(params, X, y).params
        posterior = guide.posterior(params, X, y)
        return posterior, posterior.mean(Xs)

    posterior, predicted = run(KEY)
    error = predicted - mean(Xs)
    assert np.sqrt(np.mean(error**2)) < 0.25  # a prediction of zero has an error of 0.5
    further = [] if posterior.further is None else [posterior.further.points]
    for points in (posterior.points, *further):
        assert set(np.unique(points[:, 1])) == {0.0, 1.0}


def test_mini_batches_of_rows(x64: None) -> None:
    X, y = data()
    points = sgp.features.kmeans_points(KEY, X, 12, categories=(1,))
    svi = SVI(
        model,
        AutoSparseGP(model, inducing_points=points),
        optax.adam(0.02),
        sgp.infer.QuadratureELBO(2),
    )
    result = svi.run(KEY, 20, X, y, 30, progress_bar=False)
    assert np.isfinite(result.losses).all()
    moved = result.params["f_auto_inducing_points"]
    assert np.any(moved[:, 0] != points[:, 0])
    np.testing.assert_array_equal(moved[:, 1], points[:, 1])


def test_points_without_a_valid_category() -> None:
    X, y = data()
    points = X[:6].at[3, 1].set(0.5)
    message = r"`{}` must hold the kernel's categories in column 1, 0, 1, got 0.5 in row 3"
    for name, guide in (
        ("inducing_points", AutoSparseGP(model, inducing_points=points)),
        ("residual_points", AutoHybridGP(model, num_inducing=4, residual_points=points)),
        ("cov_points", AutoDecoupledGP(model, mean_points=X, cov_points=points)),
    ):
        with pytest.raises(ValueError, match=message.format(name)):
            jax.eval_shape(lambda key, guide=guide: handlers.seed(guide, key)(X, y), KEY)
    with pytest.raises(ValueError, match=message.format("points")):
        kernel = sgp.kernels.Coregion(jnp.ones((2, 1)), jnp.ones(2)).on((1,))
        sgp.features.InducingPoints(kernel, points)


def test_a_column_of_two_kernels_is_held() -> None:
    """Also if another kernel has a derivative with respect to the categorical column."""
    X, y = data()

    def both(X: Array, y: Array) -> None:
        W = numpyro.sample("W", dist.Normal(jnp.eye(2, 1), 1.0).to_event(2))
        outputs = sgp.kernels.Coregion(W, jnp.ones(2)).on((1,))
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0) * outputs, X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    guide = AutoSparseGP(both, num_inducing=8)
    svi = SVI(both, guide, optax.adam(0.05), sgp.infer.QuadratureELBO(2))
    Z = svi.run(KEY, 5, X, y, progress_bar=False).params["f_auto_inducing_points"]
    assert set(np.unique(Z[:, 1])) == {0.0, 1.0}
