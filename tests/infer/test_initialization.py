"""Hyperparameters from exact fits on neighborhoods."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.spatial
from jaxtyping import Array
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

ESTIMATOR = sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients(), num_probes=4)


def model(X: Array, y: Array, level: Any = 0.0) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 2.0))
    noise = numpyro.param("noise", jnp.ones(()), constraint=dist.constraints.positive)
    gp = sgp.GaussianProcess(
        sgp.kernels.RBF(lengthscale), X, noise**2, mean=level, estimator=ESTIMATOR, state="solver"
    )
    numpyro.sample("y", gp, obs=y)


def data() -> tuple[Array, Array]:
    """400 points of a function of lengthscale 0.5, standard deviation 1, with noise 0.2."""
    X = jax.random.uniform(jax.random.key(0), (400, 1), minval=-10.0, maxval=10.0)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(0.5), X, 0.04)
    return X, gp.sample(jax.random.key(1))


@functools.cache
def found() -> dict[str, Any]:
    X, y = data()
    return sgp.infer.initial_hyperparameters(
        jax.random.key(2), model, X, y + 3.0, 3.0, num_subsets=4, subset_size=80, num_steps=120
    )


def test_finds_the_hyperparameters():
    assert set(found()) == {"lengthscale", "noise"}
    assert 0.3 < found()["lengthscale"] < 0.8
    assert 0.15 < found()["noise"] < 0.27


def test_averages_on_the_unconstrained_scale():
    X, y = data()
    fit = functools.partial(sgp.infer.initial_hyperparameters, num_steps=20)
    whole = functools.partial(fit, jax.random.key(3), model, X[:60], y[:60], subset_size=60)
    one, three = whole(num_subsets=1), whole(num_subsets=3)
    # Neighborhoods that are all rows give the same fit, and so does their mean.
    for name in one:
        np.testing.assert_allclose(three[name], one[name], rtol=1e-2)


def test_values_start_a_guide():
    X, y = data()
    X, y = X[:50], y[:50]
    values = {"lengthscale": found()["lengthscale"]}
    guide = AutoDelta(model, init_loc_fn=init_to_value(values=values))
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    state = svi.init(jax.random.key(0), X, y, init_params={"noise": found()["noise"]})
    params = svi.get_params(state)
    np.testing.assert_allclose(params["lengthscale_auto_loc"], values["lengthscale"], rtol=1e-5)
    np.testing.assert_allclose(params["noise"], found()["noise"], rtol=1e-5)


def test_rejects_bad_data():
    X, y = map(jnp.asarray, data())
    with pytest.raises(ValueError, match="`y` must be finite, got 1 NaN or infinite"):
        sgp.infer.initial_hyperparameters(jax.random.key(0), model, X, y.at[-1].set(jnp.nan))
    with pytest.raises(ValueError, match="`X` must be finite, got 1 NaN or infinite"):
        sgp.infer.initial_hyperparameters(jax.random.key(0), model, X.at[-1].set(jnp.inf), y)


def test_median_distance():
    X = np.random.default_rng(0).normal(size=(60, 5))
    expected = np.median(scipy.spatial.distance.pdist(X))
    np.testing.assert_allclose(sgp.infer.median_distance(X), expected, rtol=1e-5)
    # Squares of these are no numbers of float32.
    far = sgp.infer.median_distance(1e25 * jnp.asarray(X, "float32"))
    np.testing.assert_allclose(far / 1e25, expected, rtol=1e-5)
    # A few rows come from all over X: the first of a sorted X lie close together.
    X = np.sort(X, axis=0)
    some = sgp.infer.median_distance(X, max_rows=12)
    np.testing.assert_allclose(some, np.median(scipy.spatial.distance.pdist(X)), rtol=0.3)
    assert sgp.infer.median_distance(X[:12]) < 0.6 * some
    with pytest.raises(ValueError, match="`max_rows` must be at least 2, got 1"):
        sgp.infer.median_distance(X, max_rows=1)
    with pytest.raises(ValueError, match="`X` must have two rows or more, got 1"):
        sgp.infer.median_distance(X[:1])


def test_warns_where_the_start_is_never_left():
    X, y = data()
    # The square of the gradient overflows, so that Adam divides by infinity.
    with pytest.warns(RuntimeWarning, match="on 2 of 2 subsets never left their start.*Standardi"):
        sgp.infer.initial_hyperparameters(
            jax.random.key(0), model, X, 1e17 * y, num_subsets=2, subset_size=5, num_steps=2
        )
