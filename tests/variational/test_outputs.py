"""Independent functions in a plate: a batch agrees with separate fits of each function."""

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
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_scalegp as sgp
from numpyro_scalegp.guides import AutoDecoupledGP, AutoHybridGP, AutoSparseGP

N, P = 20, 3
KEY = jax.random.key(0)
KERNEL = sgp.kernels.RBF(0.7, 1.3)


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(N, 1))
    Y = np.stack([np.sin(2 * X[:, 0]), X[:, 0], np.cos(X[:, 0])])
    return jnp.array(X), jnp.array(Y + 0.3 * rng.normal(size=(P, N)))


def several(X: Array, Y: Array | None = None) -> None:
    with numpyro.plate("outputs", P):
        f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
    with numpyro.plate("each", P, dim=-2), numpyro.plate("rows", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=Y)


def alone(X: Array, y: Array | None = None) -> None:
    f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def guide(name: str, model: Any, X: Array) -> Any:
    if name == "sparse":
        return AutoSparseGP(model, inducing_points=X[:5])
    if name == "hybrid":
        return AutoHybridGP(
            model, inducing_points=X[:5], residual_points=X[5:12], num_columns=None, jitter=1e-10
        )
    return AutoDecoupledGP(model, mean_points=X[:9], cov_points=X[:4], num_columns=None)


def loss_of(model: Any, guide: Any) -> Any:
    svi = SVI(model, guide, optax.adam(0.1), sgp.infer.QuadratureELBO(4))
    return svi, lambda params, *args: svi.loss.loss(KEY, params, model, guide, *args)


def perturbed(params: dict[str, Array]) -> dict[str, Array]:
    """Parameters whose weights differ between functions."""
    keys = jax.random.split(KEY, len(params))
    return {
        name: value
        if "points" in name
        else jnp.tril(value + 0.1 * jax.random.normal(key, value.shape))
        if "tril" in name
        else value + 0.5 * jax.random.normal(key, value.shape)
        for key, (name, value) in zip(keys, params.items(), strict=True)
    }


def of_function(params: dict[str, Array], index: int) -> dict[str, Array]:
    return {name: v if "points" in name else v[index] for name, v in params.items()}


every_guide = pytest.mark.parametrize("name", ["sparse", "hybrid", "decoupled"])


@every_guide
def test_a_batch_is_each_function_alone(name, x64):
    X, Y = data()
    together, single = guide(name, several, X), guide(name, alone, X)
    svi, loss = loss_of(several, together)
    params = perturbed(svi.get_params(jax.jit(svi.init)(KEY, X, Y)))
    _, loss_alone = loss_of(alone, single)
    alones = [jax.jit(loss_alone)(of_function(params, i), X, Y[i]) for i in range(P)]
    np.testing.assert_allclose(jax.jit(loss)(params, X, Y), sum(alones), rtol=1e-10)
    gradient = jax.jit(jax.grad(loss))(params, X, Y)
    gradients = [jax.jit(jax.grad(loss_alone))(of_function(params, i), X, Y[i]) for i in range(P)]
    for key, value in gradient.items():
        separate = [gradient[key] for gradient in gradients]
        expected = sum(separate) if "points" in key else jnp.stack(separate)
        np.testing.assert_allclose(value, expected, rtol=1e-7, atol=1e-9)

    Xs = jnp.linspace(-2.5, 2.5, 6)[:, None]
    posterior = together.posterior(params, X, Y)
    draws = posterior.sample(KEY, Xs, 4000)
    assert draws.shape == (4000, P, 6)
    assert posterior.batch_shape == (P,)
    mean, variance = posterior.mean(Xs), posterior.variance(Xs, chunk_size=4)
    for i in range(P):
        alone_posterior = single.posterior(of_function(params, i), X, Y[i])
        np.testing.assert_allclose(mean[i], alone_posterior.mean(Xs), rtol=1e-10)
        np.testing.assert_allclose(variance[i], alone_posterior.variance(Xs), rtol=1e-8)
    scores = (draws.mean(axis=0) - mean) / jnp.sqrt(variance / 4000)
    assert np.max(np.abs(scores)) < 4
    correlations = np.corrcoef(draws[:, :, 0].T) - np.eye(P)
    assert np.max(np.abs(correlations)) < 4 / np.sqrt(4000)


@pytest.mark.parametrize("name", ["hybrid", "decoupled"])
def test_solves_for_every_mean(name, x64):
    X, Y = data()
    together, single = guide(name, several, X), guide(name, alone, X)
    svi, _ = loss_of(several, together)
    params = perturbed(svi.get_params(jax.jit(svi.init)(KEY, X, Y)))
    jax.eval_shape(loss_of(alone, single)[0].init, KEY, X, Y[0])  # sets the guide up
    solved = together.solve_mean(params, X, Y, tolerance=1e-7).params
    for i in range(P):
        solved_alone = single.solve_mean(of_function(params, i), X, Y[i], tolerance=1e-7).params
        for key, value in solved_alone.items():
            np.testing.assert_allclose(of_function(solved, i)[key], value, atol=1e-6)


@every_guide
@pytest.mark.parametrize("loss", ["quadrature", "stock"])
def test_works_in_svi_and_export(name, loss):
    pytest.importorskip("arviz")
    X, Y = data()
    guides = {
        "sparse": lambda: AutoSparseGP(several, num_inducing=4),
        "hybrid": lambda: AutoHybridGP(several, num_inducing=4, num_residual=8, growth=8),
        "decoupled": lambda: AutoDecoupledGP(several, mean_size=12, cov_size=4, growth=6),
    }
    together = guides[name]()
    objective = sgp.infer.QuadratureELBO(2) if loss == "quadrature" else TraceMeanField_ELBO()
    svi = SVI(several, together, optax.adam(0.1), objective)
    result = svi.run(KEY, 20, X, Y, progress_bar=False)
    assert np.mean(result.losses[-3:]) < np.mean(result.losses[:3])
    exported = sgp.to_arviz(result, several, together, key=KEY, model_args=(X, Y), num_samples=4)
    assert np.asarray(exported["posterior"]["f"]).shape == (1, 4, P, N)
    assert np.asarray(exported["posterior_predictive"]["y"]).shape == (1, 4, P, N)


def test_a_batch_can_be_saved(tmp_path):
    X, Y = data()
    together = guide("hybrid", several, X)
    svi, _ = loss_of(several, together)
    posterior = together.posterior(perturbed(svi.get_params(jax.jit(svi.init)(KEY, X, Y))), X, Y)
    sgp.save(tmp_path / "fit.npz", posterior)
    again = sgp.load(tmp_path / "fit.npz")
    assert again.batch_shape == (P,)
    np.testing.assert_array_equal(again.mean(X), posterior.mean(X))


def test_other_sites_share_the_plate_and_another_function_does_not():
    X, Y = data()

    def model(X: Array, Y: Array | None = None) -> None:
        with numpyro.plate("outputs", P, dim=-2):
            f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
            noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(2.0), X))
        with numpyro.plate("each", P, dim=-2), numpyro.plate("rows", X.shape[0], dim=-1):
            numpyro.sample("y", dist.Normal(f[:, 0] + g, noise), obs=Y)

    inner = functools.partial(AutoSparseGP, site="g", num_inducing=4)
    together = AutoHybridGP(model, "f", rest=inner, num_inducing=4, num_residual=9, growth=9)
    svi = SVI(model, together, optax.adam(0.05), sgp.infer.QuadratureELBO(3))
    state = jax.jit(svi.init)(KEY, X, Y)
    update = jax.jit(svi.update)
    losses = []
    for _ in range(30):
        state, loss = update(state, X, Y)
        losses.append(loss)
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    params = {**svi.get_params(state), **state.mutable_state}
    solved = jax.jit(together.solve_mean)(params, X, Y).params
    assert solved["f_auto_residual_weights"].shape == (P, 1, 9)
    mean = together.posterior(solved, X, Y).mean(X)
    assert mean.shape == (P, 1, N)
    error = jnp.mean(jnp.square(Y - mean[:, 0] - together.rest.posterior(solved, X, Y).mean(X)))
    assert error < 0.25 * jnp.var(Y)


COMBINING: dict[str, Any] = {
    "difference": lambda f: dist.Normal(f[0] - f[1], 0.3),
    "softmax": lambda f: dist.Categorical(logits=f.T),
    "mixed": lambda f: dist.Normal(jnp.ones((2, P)) @ f, 0.3),
}


@pytest.mark.parametrize("name", COMBINING)
def test_combined_functions_train_and_solve_mean_refuses_them(name):
    def model(X: Array) -> None:
        with numpyro.plate("outputs", P):
            f = numpyro.sample("f", sgp.LatentGP(KERNEL, X))
        distribution = COMBINING[name](f)
        numpyro.sample(
            "y",
            distribution,
            obs=jnp.zeros(distribution.batch_shape, distribution.sample(KEY).dtype),
        )

    X, _ = data()
    together = AutoHybridGP(model, num_inducing=4, num_residual=8)
    svi = SVI(model, together, optax.adam(0.1), sgp.infer.QuadratureELBO(2))
    state = jax.jit(svi.init)(KEY, X)
    assert jax.eval_shape(svi.update, state, X)[1].shape == ()
    message = "`y` combines rows .* or functions of its plate.*QuadratureELBO also works"
    with pytest.raises(ValueError, match=message):
        together.solve_mean(svi.get_params(state), X)


def test_an_observed_site_with_as_many_entries_as_functions_is_allowed():
    X, Y = data()

    def model(X: Array, Y: Array) -> None:
        several(X, Y)
        numpyro.sample("w", dist.Dirichlet(jnp.ones(P)), obs=jnp.full(P, 1 / P))

    svi, _ = loss_of(model, AutoSparseGP(model, num_inducing=4))
    jax.eval_shape(svi.update, jax.eval_shape(svi.init, KEY, X, Y), X, Y)


def test_a_mini_batch_of_functions_is_refused():
    def subsampled(X: Array, Y: Array | None = None) -> None:
        with numpyro.plate("outputs", P, subsample_size=2):
            numpyro.sample("f", sgp.LatentGP(KERNEL, X))

    X, Y = data()
    guide = AutoSparseGP(subsampled, num_inducing=4)
    svi = SVI(subsampled, guide, optax.adam(0.1), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match="inside the plate `outputs`, which subsamples"):
        svi.init(KEY, X, Y)
