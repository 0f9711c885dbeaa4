"""The quadruply stochastic ELBO against the whole one, its bounds, and its errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jaxtyping import Array
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import QuadratureELBO, QuadruplyStochasticELBO
from numpyro_scalegp.infer import quadruply_stochastic as module
from tests.compilation import optimised

pytestmark = pytest.mark.usefixtures("x64")

N, M, BATCH = 12, 10, 4
KEY = jax.random.key(0)
RANKS = (0, 3, M)


def inputs() -> Array:
    return jnp.array(np.random.default_rng(0).normal(size=(N, 2)))


def observations() -> Array:
    return jnp.array(np.random.default_rng(1).normal(size=N))


def features(kind: str, kernel: sgp.kernels.RBF) -> Any:
    if kind == "identity":
        return sgp.features.RandomFourier(kernel, M, seed=0)
    return sgp.features.InducingPoints(kernel, inputs()[:M] + 0.3, jitter=1e-3)


def model(
    X: Array, y: Array, kind: str, *, batch: int | None = None, likelihood: Any = None
) -> None:
    """A mean affine in f, a learned noise, and a prior precision of one of three kinds."""
    kernel = sgp.kernels.RBF(numpyro.param("lengthscale", 0.9), 1.3)
    precision = numpyro.param("precision", jnp.ones(M)) if kind == "diagonal" else None
    noise = numpyro.param("noise", 0.6)
    slope = numpyro.sample("slope", dist.Normal(1.0, 1.0))
    rows = sgp.plate("rows", N, batch)
    with rows as index:
        X_rows, y_rows = X[index], y[index]
    f = numpyro.sample("f", sgp.WeightSpaceGP(features(kind, kernel), X_rows, precision))
    law = dist.Normal(0.2 + slope * f, noise) if likelihood is None else likelihood(f)
    with rows:
        numpyro.sample("y", law, obs=y_rows)


def slope_at_a_point(*args: Any, **kwargs: Any) -> None:
    """A guide for all but f that does not draw: the noise of the features alone remains."""
    numpyro.sample("slope", dist.Delta(jnp.array(0.8)))


def parameters(kind: str, rank: int) -> dict[str, Array]:
    rng = np.random.default_rng(2)
    params = {
        "lengthscale": jnp.array(0.9),
        "noise": jnp.array(0.6),
        "f_auto_loc": jnp.array(rng.normal(size=M)),
        "f_auto_scale_diag": jnp.array(rng.uniform(0.3, 1.2, size=M)),
        "f_auto_scale_columns": jnp.array(0.5 * rng.normal(size=(M, rank))),
    }
    if kind == "diagonal":
        params["precision"] = jnp.array(rng.uniform(0.5, 2.0, size=M))
    return params


def guide(rank: int) -> sgp.guides.AutoChevronGP:
    return sgp.guides.AutoChevronGP(model, rank=rank, rest=slope_at_a_point)


def errors(
    loss: Any, exact: Any, kind: str, rank: int, num: int, **kwargs: Any
) -> dict[str, float]:
    """How many standard errors the mean of value and gradient is off, at the worst entry."""
    given = inputs(), observations(), kind
    params = parameters(kind, rank)

    def objective(loss: Any, params: Any, key: Array, **kwargs: Any) -> Array:
        return loss.loss(key, params, model, guide(rank), *given, **kwargs)

    wanted = jax.jit(jax.value_and_grad(functools.partial(objective, exact)))(params, KEY)
    draw = jax.value_and_grad(functools.partial(objective, loss, **kwargs))
    found = jax.jit(jax.vmap(draw, in_axes=(None, 0)))(params, jax.random.split(KEY, num))

    def off(found: Array, wanted: Array) -> float:
        if found[0].size == 0:
            return 0.0
        error = jnp.std(found, axis=0) / np.sqrt(num) + 1e-10
        return float(jnp.max(jnp.abs(jnp.mean(found, axis=0) - wanted) / error))

    return {
        "value": off(found[0], wanted[0]),
        **{name: off(found[1][name], wanted[1][name]) for name in params},
    }


# Unbiased


@pytest.mark.monte_carlo
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", ["identity", "diagonal", "dense"])
@pytest.mark.parametrize("support", [0, 5])
def test_value_and_gradient_are_unbiased(kind, rank, support):
    points = inputs()[:support] if support else None
    loss = QuadruplyStochasticELBO(4, support_points=points)
    off = errors(loss, QuadratureELBO(2), kind, rank, 4000, batch=BATCH)
    assert max(off.values()) < 4, off


@pytest.mark.monte_carlo
def test_some_dense_columns_stand_for_all():
    loss = QuadruplyStochasticELBO(4, num_columns=2, support_points=inputs()[:5])
    off = errors(loss, QuadratureELBO(2), "dense", 6, 4000)
    assert max(off.values()) < 4, off


@pytest.mark.monte_carlo
@pytest.mark.parametrize("kind", ["identity", "dense"])
def test_one_set_used_twice_is_biased(kind, monkeypatch):
    def same(key: Array, size: int, num: int, num_sets: int = 2) -> Array:
        one = module.stratified_indices(key, size, num)
        return jnp.stack([one] * num_sets)

    monkeypatch.setattr(module, "draw_sets", same)
    off = errors(QuadruplyStochasticELBO(4), QuadratureELBO(2), kind, 3, 4000)
    assert off["value"] > 10
    assert off["f_auto_loc"] > 4
    assert off["f_auto_scale_columns"] > 4


@pytest.mark.parametrize("kind", ["identity", "diagonal", "dense"])
def test_with_all_features_nothing_is_random(kind):
    params = parameters(kind, 3)
    args = params, model, guide(3), inputs(), observations(), kind
    exact = QuadratureELBO(2).loss(KEY, *args)
    for num in (M, M + 5):
        found = QuadruplyStochasticELBO(num, control_variate_rank=3).loss(KEY, *args)
        np.testing.assert_allclose(found, exact, rtol=1e-10)


def test_stock_objective_agrees():
    params = parameters("identity", 3)
    args = params, model, guide(3), inputs(), observations(), "identity"
    values = optimised(jax.vmap(lambda key: TraceMeanField_ELBO().loss(key, *args)))(
        jax.random.split(KEY, 4000)
    )
    off = (jnp.mean(values) - QuadratureELBO(2).loss(KEY, *args)) / jnp.std(values) * 4000**0.5
    assert abs(off) < 4


def test_control_variate_lowers_the_variance():
    params = parameters("identity", 3)

    def draw(loss: Any, key: Array) -> Any:
        args = model, guide(3), inputs(), observations(), "identity"
        return jax.value_and_grad(lambda params: loss.loss(key, params, *args))(params)

    def variance(points: Array | None) -> tuple[float, float, float]:
        loss = QuadruplyStochasticELBO(4, support_points=points)
        draws = jax.jit(jax.vmap(functools.partial(draw, loss)))(jax.random.split(KEY, 500))
        value, grads = draws
        names = "f_auto_loc", "f_auto_scale_columns"
        return (float(jnp.var(value)), *(float(jnp.sum(jnp.var(grads[n], axis=0))) for n in names))

    without, with_points = variance(None), variance(inputs())  # all rows: nothing is left but y
    assert with_points[1] < 0.5 * without[1]
    assert with_points[2] < 0.3 * without[2]


def test_masked_observations_count_nothing():
    mask = jnp.arange(N) < 7
    y = jnp.where(mask, observations(), jnp.nan)

    def masked(X: Array, y: Array) -> None:
        phi = features("identity", sgp.kernels.RBF(0.9, 1.3))
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        seen = jnp.arange(len(X)) < 7
        with numpyro.plate("rows", len(X)), numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=jnp.where(seen, y, 0.0))

    params = {k: v for k, v in parameters("identity", 2).items() if k.startswith("f_")}
    loss = QuadruplyStochasticELBO(4)
    q = sgp.guides.AutoChevronGP(masked, rank=2)
    values = [loss.loss(KEY, params, masked, q, inputs()[:n], y[:n]) for n in (7, N)]
    np.testing.assert_allclose(*values)


# Bounds

LIKELIHOODS = {
    "logistic": (lambda f: dist.Bernoulli(logits=0.3 + 1.2 * f), 1.0),
    "laplace": (lambda f: dist.Laplace(0.1 + 1.5 * f, 0.7), 0.4),
    "poisson": (lambda f: dist.Poisson(jnp.exp(0.3 * f)), 2.0),
}


def bound_of(kind: str, bound: str, num: int, keys: Array) -> Array:
    """Estimates of the expected log-likelihood, less the divergence, which is the same for all."""
    law, value = LIKELIHOODS[kind]
    params = parameters("identity", 3)
    y = jnp.full(N, value)
    loss = QuadruplyStochasticELBO(num, bound=bound, num_nodes=40)

    def draw(key: Array) -> Array:
        args = params, model, guide(3), inputs(), y, "identity"
        return -loss.loss(key, *args, likelihood=law)

    return optimised(jax.vmap(draw))(keys)


def exact_of(kind: str) -> Array:
    law, value = LIKELIHOODS[kind]
    params = parameters("identity", 3)
    args = params, model, guide(3), inputs(), jnp.full(N, value), "identity"
    return -QuadratureELBO(180 if kind == "laplace" else 40).loss(KEY, *args, likelihood=law)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_bound_is_below_and_exact_with_all_features(kind):
    exact = exact_of(kind)
    whole = bound_of(kind, "strict", M, KEY[None])[0]
    # Quadrature has a kink to cross for Laplace, whose bound is in closed form.
    np.testing.assert_allclose(whole, exact, rtol=5e-3 if kind == "laplace" else 1e-7)
    np.testing.assert_allclose(bound_of(kind, "plug_in", M, KEY[None])[0], whole)
    keys = jax.random.split(KEY, 3000)
    strict, plug_in = bound_of(kind, "strict", 5, keys), bound_of(kind, "plug_in", 5, keys)
    error = jnp.std(strict) / len(keys) ** 0.5
    assert jnp.mean(strict) + 4 * error < exact
    # Closer, since the variance of the diagonal part is not counted twice.
    assert jnp.mean(strict) < jnp.mean(plug_in)


def test_variance_in_place_of_the_standard_deviation_is_no_bound(monkeypatch):
    # As theorem 3 is printed: with all features it should be exact, and is not.
    exact = exact_of("logistic")
    original = module.Problem.bound

    def printed(self: Any, means: Array, variances: Array, *args: Any) -> Array:
        return original(self, means, jnp.square(variances), *args)

    monkeypatch.setattr(module.Problem, "bound", printed)
    found = bound_of("logistic", "strict", M, KEY[None])[0]
    assert abs(found - exact) > 0.5


def test_bound_of_dense_precision_takes_two_sets():
    loss = QuadruplyStochasticELBO(4, bound="strict")
    assert loss.index_sets(KEY, M, dense_precision=False).shape == (1, 4)
    assert loss.index_sets(KEY, M, dense_precision=True).shape == (2, 4)
    assert QuadruplyStochasticELBO(4).index_sets(KEY, M, dense_precision=False).shape == (2, 4)
    assert QuadruplyStochasticELBO(99).index_sets(KEY, M, dense_precision=True).shape == (1, M)


def test_fixed_prior_leaves_the_constant_out_and_holds_the_kernel():
    params = parameters("dense", 2)

    def value(loss: Any, params: Any) -> Array:
        return loss.loss(KEY, params, model, guide(2), inputs(), observations(), "dense")

    free = QuadruplyStochasticELBO(4)
    held = QuadruplyStochasticELBO(4, fixed_prior=True)
    prior = sgp.WeightSpaceGP(features("dense", sgp.kernels.RBF(0.9, 1.3)), inputs())
    np.testing.assert_allclose(
        value(free, params) - value(held, params), -0.5 * prior.log_determinant(), rtol=1e-8
    )
    gradient = jax.grad(functools.partial(value, held))(params)
    assert gradient["lengthscale"] == 0.0
    assert gradient["noise"] != 0.0
    np.testing.assert_allclose(
        gradient["f_auto_loc"], jax.grad(functools.partial(value, free))(params)["f_auto_loc"]
    )


# Errors


def step(likelihood: Any, loss: Any) -> None:
    args = inputs(), jnp.ones(N), "identity"
    loss.loss(KEY, parameters("identity", 2), model, guide(2), *args, likelihood=likelihood)


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda f: dist.Bernoulli(logits=f),
        lambda f: dist.Normal(jnp.sin(f), 1.0),
        lambda f: dist.Normal(f * f, 1.0),
        lambda f: dist.Normal(f, jnp.exp(f)),
    ],
    ids=["bernoulli", "sine", "square", "scale"],
)
def test_no_gaussian_with_an_affine_mean(likelihood):
    with pytest.raises(ValueError, match="no Gaussian with a mean affine in f"):
        step(likelihood, QuadruplyStochasticELBO(4))


@pytest.mark.parametrize(
    "likelihood",
    [lambda f: dist.StudentT(3.0, f), lambda f: dist.Bernoulli(logits=f * f)],
    ids=["student", "square"],
)
def test_not_log_concave(likelihood):
    loss = QuadruplyStochasticELBO(4, bound="strict")
    with pytest.raises(ValueError, match="not known to be log-concave"):
        step(likelihood, loss)
    step(likelihood, QuadruplyStochasticELBO(4, bound="strict", log_concave=("y",)))


def test_bad_numbers(unchecked):
    with pytest.raises(ValueError, match="`num_features` must be at least 1, got 0"):
        QuadruplyStochasticELBO(0)
    with pytest.raises(ValueError, match="`control_variate_rank` must be at least 0, got -1"):
        QuadruplyStochasticELBO(5, -1)
    with pytest.raises(ValueError, match='`bound` must be None, "strict" or "plug_in"'):
        QuadruplyStochasticELBO(5, bound="loose")


def test_no_support_rows():
    with pytest.raises(ValueError, match="train with `SparseSVI`, which draws them"):
        step(None, QuadruplyStochasticELBO(4, control_variate_rank=3))


def test_another_guide():
    def other(X: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=jnp.zeros(len(X)))

    q = sgp.guides.AutoSparseGP(other, inducing_points=inputs()[:3])
    svi = SVI(other, q, numpyro.optim.Adam(0.1), QuadruplyStochasticELBO(4))
    state = svi.init(KEY, inputs())
    with pytest.raises(ValueError, match=r"needs a guide with one GP site.*'f': 'SparseGP'"):
        svi.update(state, inputs())
