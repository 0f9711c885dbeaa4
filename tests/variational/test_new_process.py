"""A guide that has not run yet uses parameters that were fitted in another process."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal

import numpyro_scalegp as sgp

KEY = jax.random.key(0)
X = jnp.linspace(0.0, 1.0, 6)[:, None]
Y = jnp.sin(6.0 * X[:, 0])


def model(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def new(inner: Any = AutoNormal, model: Any = model) -> sgp.guides.AutoSparseGP:
    return sgp.guides.AutoSparseGP(model, "f", rest=inner, inducing_points=X[::2])


def fitted(guide: Any) -> dict[str, Any]:
    svi = SVI(guide.model, guide, optax.adam(0.1), sgp.infer.QuadratureELBO(num_nodes=2))
    params = svi.get_params(svi.init(KEY, X, Y))
    return {name: value + 0.1 * (jnp.ndim(value) < 2) for name, value in params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("inner", [AutoNormal, AutoDelta, AutoMultivariateNormal])
def test_a_new_guide_uses_loaded_parameters(inner):
    old = new(inner)
    params = fitted(old)
    median = old.median(params)
    fresh = new(inner)
    with pytest.raises(ValueError, match=r"not run yet in this process.*guide\.median\(params, X"):
        fresh.median(params)
    mean = fresh.posterior(params, X[:2], Y[:2]).mean(X)
    np.testing.assert_array_equal(mean, old.posterior(params, X, Y).mean(X))
    for name, value in new(inner).median(params, X[:2], Y[:2]).items():
        np.testing.assert_array_equal(value, median[name])


def test_under_jit_a_guide_stores_nothing_traced():
    params = fitted(new())
    fresh = new()
    mean = jax.jit(lambda params: fresh.posterior(params, X, Y).mean(X))(params)
    np.testing.assert_allclose(fresh.posterior(params, X, Y).mean(X), mean, rtol=1e-5)
    assert fresh.median(params).keys() == {"lengthscale", "noise"}


@pytest.mark.slow
def test_draws_and_predictions():
    old, fresh = new(), new()
    params = fitted(old)
    draws = [g.sample_posterior(KEY, params, X, Y, sample_shape=(2,)) for g in (old, new())]
    jax.tree.map(np.testing.assert_array_equal, *draws)
    predictive = [
        sgp.infer.Predictive(model, guide=guide, params=params, num_samples=2)
        for guide in (old, fresh)
    ]
    # Without observations y would be one of the sites that the guide has parameters for.
    with pytest.raises(
        ValueError, match=r"`y_auto_loc` has shape \(6,\), but no value in `params`"
    ):
        predictive[1](KEY, X)
    fresh.median(params, X, Y)
    jax.tree.map(np.testing.assert_array_equal, *(predict(KEY, X) for predict in predictive))


@pytest.mark.slow
def test_arguments_of_other_shapes_are_refused():
    def local(X: Array, y: Array | None = None) -> None:
        model(X, y)
        with numpyro.plate("more", X.shape[0]):
            numpyro.sample("level", dist.Normal())

    params = fitted(new(model=local))
    fresh = new(model=local)
    with pytest.raises(ValueError, match=r"`level_auto_loc` has shape \(2,\), but \(6,\) in"):
        fresh.posterior(params, X[:2], Y[:2])
    # The failure leaves the guide unchanged.
    assert fresh.posterior(params, X, Y).mean(X).shape == (6,)


@pytest.mark.slow
def test_nested_guides_and_missing_parameters():
    def two(X: Array, y: Array | None = None) -> None:
        numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        model(X, y)

    def nested() -> sgp.guides.AutoSparseGP:
        inner = functools.partial(sgp.guides.AutoSparseGP, site="g", inducing_points=X[:2])
        return new(inner, two)

    params = fitted(nested())
    mean = nested().rest.posterior(params, X, Y).mean(X)
    assert mean.shape == (6,)
    without = {name: value for name, value in params.items() if name != "f_auto_loc"}
    for use in (
        lambda: nested().posterior(without, X, Y),
        lambda: nested().sample_posterior(KEY, without, X, Y),
    ):
        with pytest.raises(ValueError, match="`params` lacks `f_auto_loc`: give all parameters"):
            use()
