"""Fitted objects in a file, and back."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import Hutchinson, Pathwise, SolverState
from numpyro_scalegp.preconditioners import PivotedCholesky
from numpyro_scalegp.solvers import ConjugateGradients
from tests.registry import ESTIMATORS, KERNELS, NUM_COLUMNS

N = 20
KEY = jax.random.key(0)
CG = ConjugateGradients(1e-3, 40, PivotedCholesky(10))


def trend(X: Array) -> Array:
    return 0.5 + X[:, 0]


def slope(weight: Array, X: Array) -> Array:
    return weight * X[:, 0]


def data() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    X = jnp.array(rng.normal(size=(N, 2)))
    return X, jnp.sin(2 * X[:, 0]), jnp.array(rng.normal(size=(4, 2)))


def deep() -> sgp.kernels.AbstractKernel:
    # `test_kernels` has one with the final activation of Equinox, which is a lambda.
    activations = {"activation": jnp.tanh, "final_activation": jnp.tanh}
    network = eqx.nn.MLP(2, 2, 4, 1, **activations, key=jax.random.key(1))
    return 1.5 * sgp.kernels.FeatureMapped(sgp.kernels.Matern32([0.8, 1.2]), network)


@functools.cache
def pathwise() -> tuple[sgp.predict.PathwisePosterior, SolverState]:
    """A posterior with a deep kernel, and the state that its fit left."""
    X, y, _ = data()
    estimator = Pathwise(CG, 4, num_features=16, num_logdet_probes=0)

    @jax.jit
    def fit(kernel: Any, y: Array) -> Any:
        state = SolverState(5, num_solutions=3)
        gp = sgp.GaussianProcess(
            kernel, X, 0.1, mean=trend, estimator=estimator, key=KEY, state=state
        )
        gp.log_prob(y)
        return gp.condition(y), state

    return fit(deep(), y)


def round_trip(tmp_path: Any, value: Any) -> Any:
    sgp.save(tmp_path / "fitted.npz", value)
    return sgp.load(tmp_path / "fitted.npz")


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if eqx.is_array(a):
            assert a.dtype == b.dtype
            assert isinstance(b, jax.Array)
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


# Posteriors


def test_pathwise_posterior(tmp_path, monkeypatch):
    one, _ = pathwise()
    Xs = data()[2]

    def predictions(one: Any) -> Any:
        parts = one.mean(Xs), one.variance(Xs), one.sample(KEY, Xs, 3)
        return parts, one.at_data().mean, one.leave_one_out().variance, one.diagnostics

    again = round_trip(tmp_path, one)
    assert_same(one, again)
    with monkeypatch.context() as patch:
        # No solve is needed, not even traced.
        patch.setattr(ConjugateGradients, "solve_with_probes", None)
        found = predictions(again)
        with pytest.raises(TypeError, match="not callable"):
            again.sample(KEY, Xs, 5)  # more than are stored take a solve
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, predictions(one))


@pytest.mark.parametrize("mean", [None, 0.3, trend, functools.partial(slope, jnp.array(0.7))])
def test_exact_posterior(mean, tmp_path):
    X, y, Xs = data()
    one = sgp.GaussianProcess(sgp.kernels.RBF(0.8), X, 0.1, mean=mean).condition(y)
    again = round_trip(tmp_path, one)
    assert_same(one, again)
    np.testing.assert_array_equal(again.mean(Xs), one.mean(Xs))
    np.testing.assert_array_equal(again.variance(Xs), one.variance(Xs))
    assert again.diagnostics == one.diagnostics


def test_sparse_posterior(tmp_path):
    X, _, Xs = data()
    kernel = sgp.kernels.Matern52(0.7, 1.2)
    family = sgp.SparseGP(kernel, X, X[:3], jnp.ones(3), 0.5 * jnp.eye(3))
    one = family.posterior()
    again = round_trip(tmp_path, one)
    assert_same(one, again)
    np.testing.assert_array_equal(again.variance(Xs), one.variance(Xs))


# States, kernels, estimators and plain containers


def test_solver_state(tmp_path):
    _, state = pathwise()
    again = round_trip(tmp_path, state)
    assert_same(state, again)
    assert (again.num_records, again.fresh_probes, again.num_solutions) == (5, False, 3)
    for name, values in state.history().items():
        np.testing.assert_array_equal(again.history()[name], values)
    assert np.all(again.history()["converged"])
    empty = round_trip(tmp_path, SolverState(7, fresh_probes=True))
    assert empty.begin is None
    assert (empty.num_records, empty.fresh_probes) == (7, True)


def test_a_loaded_state_is_gone_on_from(tmp_path):
    X, y, _ = data()
    _, state = pathwise()
    again = round_trip(tmp_path, state)
    estimator = Pathwise(CG, 4, num_features=16, num_logdet_probes=0)

    @jax.jit
    def condition(kernel: Any, y: Array, state: SolverState) -> Any:
        gp = sgp.GaussianProcess(kernel, X, 0.1, mean=trend, estimator=estimator, state=state)
        return gp.condition(y)

    found = condition(deep(), y, again)
    assert found.diagnostics["epochs"] == 0
    np.testing.assert_array_equal(found.solution.value, pathwise()[0].solution.value)


@pytest.mark.parametrize(
    "kernel", [pytest.param(f, id=name) for name, f in KERNELS if name != "mapped_flax_nnx"]
)
def test_kernels(kernel, tmp_path, dtype):
    X = jnp.array(np.random.default_rng(0).normal(size=(5, NUM_COLUMNS)))
    one = kernel(0.9)
    again = round_trip(tmp_path, one)
    assert_same(one, again)
    np.testing.assert_array_equal(again(X, X), one(X, X))


@pytest.mark.parametrize("estimator", [pytest.param(f, id=name) for name, f in ESTIMATORS])
def test_estimators(estimator, tmp_path):
    one = estimator()
    again = round_trip(tmp_path, one)
    assert again == one
    assert hash(again) == hash(one)


def test_estimators_with_every_option(tmp_path):
    for solver in (
        sgp.solvers.AlternatingProjections(7, 1e-3, 12.5),
        sgp.solvers.StochasticGradientDescent(5, learning_rate=0.1, momentum=0.5),
        ConjugateGradients(preconditioner=sgp.preconditioners.Identity()),
    ):
        one = Hutchinson(solver, 3, num_logdet_probes=2, logdet_epochs=4, num_features=6)
        assert round_trip(tmp_path, one) == one


class Pair(NamedTuple):
    one: Any
    other: Any


def test_containers(tmp_path):
    fitted = {
        "params": {3: jnp.array([0.5, 0.7]), 1: jnp.arange(4)},
        "list": [1, 2.5, "text", None, True, (jnp.ones((2, 0)), Pair(jnp.array(True), "b"))],
        "numpy": np.linspace(0.0, 1.0, 3, dtype=np.float32),
        "kernel": sgp.kernels.RBF(1.0),
    }
    again = round_trip(tmp_path, fitted)
    assert_same({**fitted, "numpy": jnp.asarray(fitted["numpy"])}, again)
    assert again["list"][:5] == [1, 2.5, "text", None, True]
    assert isinstance(again["list"][4], bool)
    assert isinstance(again["list"][5][1], Pair)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys(impl, tmp_path):
    key = jax.random.key(7, impl=impl)
    again = round_trip(tmp_path, {"key": key, "keys": jax.random.split(key, 3)})
    assert str(jax.random.key_impl(again["key"])) == impl
    np.testing.assert_array_equal(
        jax.random.normal(again["key"], (3,)), jax.random.normal(key, (3,))
    )
    assert again["keys"].shape == (3,)


def test_double_precision(tmp_path):
    with jax.enable_x64(True):
        one = sgp.kernels.RBF(jnp.array([0.1, 0.2]))
        again = round_trip(tmp_path, one)
        assert_same(one, again)
        assert again.lengthscale.dtype == jnp.float64
    narrow = sgp.load(tmp_path / "fitted.npz")
    assert narrow.lengthscale.dtype == jnp.float32
    np.testing.assert_allclose(narrow.lengthscale, [0.1, 0.2], rtol=1e-6)


def test_file_name_is_kept_and_the_file_overwritten(tmp_path):
    path = str(tmp_path / "fitted.model")
    sgp.save(path, sgp.kernels.RBF(1.0))
    sgp.save(path, sgp.kernels.Constant(2.0))
    assert [file.name for file in tmp_path.iterdir()] == ["fitted.model"]
    assert isinstance(sgp.load(path), sgp.kernels.Constant)


# What cannot be found again by its name


def test_lambdas_are_refused(tmp_path):
    X, y, _ = data()
    gp = sgp.GaussianProcess(sgp.kernels.RBF(0.8), X, 0.1, mean=lambda X: X[:, 0])
    message = r"cannot save <function .*it cannot be found again by its name.*Give it a name"
    with pytest.raises(ValueError, match=message):
        sgp.save(tmp_path / "fitted.npz", gp.condition(y))

    def local(X: Array) -> Array:
        return X[:, 0]

    with pytest.raises(ValueError, match=message):
        sgp.save(tmp_path / "fitted.npz", {"mean": local})
    assert not list(tmp_path.iterdir())


def test_other_objects_are_refused(tmp_path):
    kernel = dict(KERNELS)["mapped_flax_nnx"](1.0)
    for bad in (kernel, {1, 2}, object()):
        with pytest.raises(ValueError, match="cannot save"):
            sgp.save(tmp_path / "fitted.npz", bad)
    assert not list(tmp_path.iterdir())
