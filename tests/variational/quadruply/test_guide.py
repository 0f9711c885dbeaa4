"""The guide of weight-space GPs: solves for its mean and diagonal, other sites, and errors."""

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
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import QuadratureELBO

N, M, RANK = 12, 8, 3
KEY = jax.random.key(0)


def inputs() -> Array:
    return jnp.array(np.random.default_rng(0).normal(size=(N, 2)))


def model(X: Array, y: Array, kind: str = "identity", likelihood: Any = None) -> None:
    noise = numpyro.param("noise", 0.4)
    kernel = sgp.kernels.RBF(0.9, 1.3)
    phi: Any = sgp.features.RandomFourier(kernel, M, seed=0)
    if kind == "dense":
        phi = sgp.features.InducingPoints(kernel, inputs()[:M] + 0.3, jitter=1e-3)
    precision = jnp.linspace(0.5, 2.0, M) if kind == "diagonal" else None
    f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X, precision))
    with numpyro.plate("rows", len(X)):
        distribution = dist.Normal(2.0 * f, noise) if likelihood is None else likelihood(f)
        numpyro.sample("y", distribution, obs=y)


def parameters() -> dict[str, Array]:
    rng = np.random.default_rng(2)
    return {
        "noise": jnp.array(0.4),
        "f_auto_loc": jnp.array(rng.normal(size=M)),
        "f_auto_scale_diag": jnp.array(rng.uniform(0.3, 1.2, size=M)),
        "f_auto_scale_columns": jnp.array(0.5 * rng.normal(size=(M, RANK))),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["identity", "diagonal", "dense"])
def test_the_diagonal_is_at_the_maximum_of_the_bound(kind, x64):
    X, y = inputs(), jnp.sin(jnp.arange(float(N)))
    guide = sgp.guides.AutoChevronGP(model, rank=RANK)

    def bound(params: dict[str, Array]) -> Array:
        return QuadratureELBO(2).loss(KEY, params, model, guide, X, y, kind)

    start = parameters()
    assert np.abs(jax.grad(bound)(start)["f_auto_scale_diag"]).max() > 1.0
    solved = jax.jit(lambda params: guide.solve_diagonal(params, X, y, kind))(start)
    assert set(solved) == set(start)
    gradient = jax.grad(bound)(solved)
    np.testing.assert_allclose(gradient["f_auto_scale_diag"], 0.0, atol=1e-9)
    if kind == "identity":  # proposition 1, with f scaled by two
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.9, 1.3), M, seed=0)(X)
        variance = 0.4**2 / 4.0
        expected = jnp.sqrt(variance / (jnp.sum(jnp.square(phi), axis=0) + variance))
        np.testing.assert_allclose(solved["f_auto_scale_diag"][RANK:], expected[RANK:])


@pytest.mark.slow
def test_the_diagonal_for_counts_is_a_fixed_point(x64):
    X, y = inputs(), jnp.arange(N) % 3
    distribution = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
    guide = sgp.guides.AutoChevronGP(model, rank=RANK)

    def bound(params: dict[str, Array]) -> Array:
        return QuadratureELBO(20).loss(KEY, params, model, guide, X, y, likelihood=distribution)

    params = parameters()
    assert np.abs(jax.grad(bound)(params)["f_auto_scale_diag"]).max() > 0.1
    solve = jax.jit(lambda params: guide.solve_diagonal(params, X, y, likelihood=distribution))
    for _ in range(30):
        params = solve(params)
    np.testing.assert_allclose(jax.grad(bound)(params)["f_auto_scale_diag"], 0.0, atol=1e-6)


@pytest.mark.parametrize("rows", [5, N])  # fewer rows than features, and more
@pytest.mark.parametrize("kind", ["identity", "diagonal", "dense"])
def test_the_mean_is_at_the_maximum_of_the_bound(rows, kind, x64):
    X, y = inputs()[:rows], jnp.sin(jnp.arange(float(rows)))
    guide = sgp.guides.AutoChevronGP(model, rank=RANK)

    def bound(params: dict[str, Array]) -> Array:
        return QuadratureELBO(2).loss(KEY, params, model, guide, X, y, kind)

    start = parameters()
    assert np.abs(jax.grad(bound)(start)["f_auto_loc"]).max() > 1.0
    solved = jax.jit(lambda params: guide.solve_mean(params, X, y, kind))(start).params
    assert {name for name in start if np.any(solved[name] != start[name])} == {"f_auto_loc"}
    np.testing.assert_allclose(jax.grad(bound)(solved)["f_auto_loc"], 0.0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "count"), [(5, 1), (N, 1), (N, 200)])
def test_newton_steps_find_the_mean_for_counts(rows, count, x64):
    """Also for large counts, for which a full step is too long."""
    X, y = inputs()[:rows], jnp.arange(rows) % 3 * count
    distribution = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
    guide = sgp.guides.AutoChevronGP(model, rank=RANK)

    def bound(params: dict[str, Array]) -> Array:
        return QuadratureELBO(20).loss(KEY, params, model, guide, X, y, likelihood=distribution)

    start = {**parameters(), "f_auto_loc": jnp.zeros(M)}
    before = bound(start)
    steps = 8 if count == 1 else 30
    solved = guide.solve_mean(start, X, y, likelihood=distribution, num_newton_steps=steps).params
    assert bound(solved) < before
    np.testing.assert_allclose(jax.grad(bound)(solved)["f_auto_loc"], 0.0, atol=1e-6)


@pytest.mark.slow
def test_two_kinds_of_function_in_one_model():
    def both(X: Array, y: Array) -> None:
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.9), M, seed=0)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(0.9), X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    inner = functools.partial(sgp.guides.AutoSparseGP, inducing_points=inputs()[:4], rest=AutoDelta)
    guide = sgp.guides.AutoChevronGP(both, rank=2, rest=inner)
    svi = SVI(both, guide, optax.adam(0.05), QuadratureELBO(6))
    X, y = inputs(), jnp.sin(jnp.arange(float(N)))
    result = svi.run(KEY, 30, X, y, progress_bar=False)
    assert result.losses[-1] < result.losses[0]
    assert guide.posterior(result.params, X, y).mean(X).shape == (N,)

    wrong = sgp.guides.AutoSparseGP(both, site="f", inducing_points=inputs()[:4])
    with pytest.raises(ValueError, match="has a `WeightSpaceGP` prior, and this guide is for a"):
        SVI(both, wrong, optax.adam(0.05), QuadratureELBO(6)).init(KEY, X, y)


@pytest.mark.slow
def test_other_function_sites_are_at_their_means(x64):
    def both(X: Array, y: Array) -> None:
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.9), M, seed=0)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(0.9), X))
        numpyro.sample("y", dist.Normal(f + g, 0.3), obs=y)

    X, y = inputs(), jnp.sin(jnp.arange(float(N)))
    inner = functools.partial(sgp.guides.AutoSparseGP, inducing_points=X[:3])
    guide = sgp.guides.AutoChevronGP(both, rank=RANK, rest=inner)
    inner_params = {
        "g_auto_inducing_points": X[:3],
        "g_auto_loc": jnp.array([1.0, -2.0, 0.5]),
        "g_auto_scale_tril": 0.5 * jnp.eye(3),
    }
    start = {**parameters(), **inner_params}
    solved = guide.solve_mean(start, X, y).params
    gradient = jax.grad(lambda params: QuadratureELBO(2).loss(KEY, params, both, guide, X, y))
    np.testing.assert_allclose(gradient(solved)["f_auto_loc"], 0.0, atol=1e-8)


def test_bad_arguments(unchecked):
    X, y = inputs(), jnp.zeros(N)

    def start(model: Any, **kwargs: Any) -> None:
        guide = sgp.guides.AutoChevronGP(model, **kwargs)
        SVI(model, guide, optax.adam(0.1), QuadratureELBO(2)).init(KEY, X, y)

    with pytest.raises(ValueError, match="`rank` must be at most 8, the number of features, got 9"):
        start(model, rank=9)

    def latent(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.9), X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    with pytest.raises(ValueError, match=r"no GP site: write .*sgp\.WeightSpaceGP\(features, X\)"):
        start(latent)

    def plated(X: Array, y: Array) -> None:
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.9), M, seed=0)
        with numpyro.plate("outputs", 3):
            f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        numpyro.sample("y", dist.Normal(f.sum(axis=0), 1.0).to_event(1), obs=y)

    with pytest.raises(ValueError, match="stands inside a plate: `AutoChevronGP` is for one"):
        start(plated, rank=2)
