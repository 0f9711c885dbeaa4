"""Features of networks of several libraries: training, posterior, export; kernels on top."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen, nnx
from jax.flatten_util import ravel_pytree
from jax.scipy.stats import multivariate_normal
from jaxtyping import Array
from numpyro.contrib.module import eqx_module, flax_module, nnx_module
from numpyro.handlers import seed, substitute
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

import numpyro_scalegp as sgp
from numpyro_scalegp.log_determinants import Compositional, MiniBatch, Variational

N, WIDTH, NOISE = 40, 6, 0.2
KEY = jax.random.key(0)


class Linen(linen.Module):
    """One layer."""

    @linen.compact
    def __call__(self, X: Array) -> Array:
        return jnp.tanh(linen.Dense(WIDTH)(X))


class Nnx(nnx.Module):
    """One layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(2, WIDTH, rngs=rngs)

    def __call__(self, X: Array) -> Array:
        return jnp.tanh(self.layer(X))


def equinox_network() -> eqx.nn.MLP:
    return eqx.nn.MLP(2, WIDTH, 8, 1, key=KEY)


# Library, and a function that makes the network within a model.
NETWORKS: dict[str, Callable[[], Callable[[Array], Array]]] = {
    "linen": lambda: flax_module("network", Linen(), input_shape=(1, 2)),
    "nnx": lambda: nnx_module("network", Nnx(nnx.Rngs(0))),
    "equinox": lambda: eqx.filter_vmap(eqx_module("network", equinox_network())),
}


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, 2))
    return jnp.array(X), jnp.array(np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=N))


def model(X: Array, y: Array, kind: str, batch_size: int | None = None) -> Any:
    """A GP of a network's features, with priors on a scale and on the noise."""
    network = NETWORKS[kind]()
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    weights = numpyro.param("weights", jnp.zeros(WIDTH))
    X_batch, y_batch = sgp.plate("rows", len(X), batch_size).take(X, y)
    features = lambda X: scale * network(X)  # noqa: E731
    logdet = Variational()
    gp = sgp.FeatureSpaceGP(features, X_batch, noise, weights, num_data=len(X), logdet=logdet)
    numpyro.sample("y", gp, obs=y_batch)
    return gp


def left_out(Phi: Array, noise: Array, y: Array) -> dist.Normal:
    """Each observation given the others, by dense algebra."""
    inverse = jnp.linalg.inv(Phi @ Phi.T + noise * jnp.eye(len(y)))
    variance = 1.0 / jnp.diagonal(inverse)
    return dist.Normal(y - variance * (inverse @ y), jnp.sqrt(variance))


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_with_priors_in_svi_and_arviz(kind, x64):
    X, y = data()
    guide = AutoNormal(model)
    svi = SVI(model, guide, optax.adam(0.02), Trace_ELBO())
    result = svi.run(KEY, 400, X, y, kind, 8, progress_bar=False)
    assert np.mean(result.losses[-100:]) < np.mean(result.losses[:100]) - 3.0
    inference_data = sgp.to_arviz(
        result, model, guide, key=KEY, model_args=(X, y, kind), num_samples=30
    )
    assert {str(name) for name in inference_data["posterior"].data_vars} == {"scale", "noise"}
    density = np.asarray(inference_data["log_likelihood"]["y"])[0]
    for draw in (0, 29):
        sites = {
            name: jnp.array(inference_data["posterior"][name][0, draw])
            for name in ("scale", "noise")
        }
        conditioned = substitute(seed(model, 0), data={**result.params, **sites})
        gp = conditioned(X, y, kind)
        expected = left_out(gp.features(X), gp.noise_variance, y).log_prob(y)
        np.testing.assert_allclose(density[draw], expected, rtol=1e-6)
        posterior = gp.condition(y)
        np.testing.assert_allclose(posterior.leave_one_out().log_prob(y), expected, rtol=1e-6)
    # Replicates come from the posterior, not from the prior, whose mean is zero.
    replicates = np.asarray(inference_data["posterior_predictive"]["y"])[0]
    assert np.corrcoef(np.mean(replicates, axis=0), posterior.mean(X))[0, 1] > 0.95
    assert np.asarray(inference_data["sample_stats"]["jitter"]).shape == (1, 30)


def rbf_on_network(network: eqx.nn.MLP, lengthscale: Array) -> Callable[[Array], Array]:
    waves = sgp.features.RandomFourier(sgp.kernels.RBF(lengthscale), 2000, seed=0)
    return lambda X: waves(jax.vmap(network)(X))


@pytest.mark.slow
def test_random_features_of_a_network_make_a_deep_kernel(x64):
    X, y = data()
    at = (equinox_network(), jnp.array(0.7))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def ours(at: Any) -> Array:
        network, lengthscale = at
        phi, zero = rbf_on_network(network, lengthscale), jnp.zeros(2000)
        return sgp.FeatureSpaceGP(phi, X, NOISE, zero, num_data=N, logdet=MiniBatch()).log_prob(y)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def exact(at: Any) -> Array:
        network, lengthscale = at
        Z = jax.vmap(network)(X)
        K = sgp.kernels.RBF(lengthscale)(Z, Z) + NOISE * jnp.eye(N)
        return multivariate_normal.logpdf(y, jnp.zeros(N), K)

    (value, gradient), (expected, derivatives) = ours(at), exact(at)
    np.testing.assert_allclose(value, expected, rtol=0.03)
    ours_flat, wanted_flat = (ravel_pytree(g)[0] for g in (gradient, derivatives))
    error = jnp.linalg.norm(ours_flat - wanted_flat) / jnp.linalg.norm(wanted_flat)
    assert error < 0.2


def test_posteriors_of_networks_are_saved(x64, tmp_path):
    X, y = data()
    # An Equinox network maps one row, and is saved with its posterior.
    network, zero = equinox_network(), jnp.zeros(WIDTH)
    gp = sgp.FeatureSpaceGP(network, X, NOISE, zero, num_data=N, logdet=MiniBatch())
    posterior = gp.condition(y)
    sgp.save(tmp_path / "fit.npz", posterior)
    np.testing.assert_array_equal(sgp.load(tmp_path / "fit.npz").mean(X), posterior.mean(X))


def sampled(X: Array, y: Array, logdet: Any) -> None:
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    phi = lambda X: scale * jnp.cos(X[:, :1] * jnp.arange(1.0, 4.0))  # noqa: E731
    gp = sgp.FeatureSpaceGP(phi, X, NOISE, jnp.zeros(3), num_data=len(X), logdet=logdet)
    numpyro.sample("y", gp, obs=y)


def share_of(logdet: Any, X: Array, y: Array, scale: Array) -> Array:
    return log_density(sampled, (X, y, logdet), {}, {"scale": scale})[0]


@pytest.mark.slow
def test_hyperparameters_are_sampled_with_all_rows(x64):
    """`MiniBatch` integrates the weights out; the bound of the others is loose at zero weights."""
    X, y = data()
    Phi = 1.3 * jnp.cos(X[:, :1] * jnp.arange(1.0, 4.0))
    prior = dist.LogNormal(0.0, 0.5).log_prob(1.3)
    K = Phi @ Phi.T + NOISE * jnp.eye(N)
    expected = prior + multivariate_normal.logpdf(y, jnp.zeros(N), K)

    scale = jnp.array(1.3)
    np.testing.assert_allclose(share_of(MiniBatch(), X, y, scale), expected, rtol=1e-8)
    for logdet in (Variational(), Compositional()):
        assert share_of(logdet, X, y, scale) < expected - 0.1
        mcmc = MCMC(NUTS(sampled), num_warmup=4, num_samples=4, progress_bar=False)
        with pytest.raises(ValueError, match=r"takes `logdet=MiniBatch.*` and all rows, got"):
            mcmc.run(KEY, X, y, logdet)
        with pytest.raises(TypeError, match="second derivatives would be wrong"):
            jax.hessian(functools.partial(share_of, logdet, X, y))(scale)
    mcmc = MCMC(NUTS(sampled, max_tree_depth=2), num_warmup=4, num_samples=4, progress_bar=False)
    mcmc.run(KEY, X, y, MiniBatch())
    assert jnp.all(jnp.isfinite(mcmc.get_samples()["scale"]))
