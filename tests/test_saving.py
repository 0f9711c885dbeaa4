"""Saving and loading of fitted objects."""

import functools
from collections import OrderedDict
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import Hutchinson, Pathwise, SolverState
from numpyro_scalegp.linear.preconditioners import PivotedCholesky
from numpyro_scalegp.processes.pathwise import PathwisePosterior
from numpyro_scalegp.solvers import ConjugateGradients
from tests.conformance import inputs
from tests.registry import ESTIMATORS, KERNELS, NUM_COLUMNS

N = 20
KEY = jax.random.key(0)
WEIGHTS = jnp.eye(2)
LAMBDA = lambda X: X[:, 0]  # noqa: E731
CG = ConjugateGradients(1e-3, 40, PivotedCholesky(10))
PATHWISE = Pathwise(CG, 4, num_features=16, num_logdet_probes=0, num_solutions=3, num_records=5)


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
def pathwise() -> tuple[PathwisePosterior, SolverState]:
    """A posterior with a deep kernel, and the state that its fit left."""
    X, y, _ = data()

    @jax.jit
    def fit(kernel: Any, y: Array) -> Any:
        gp = sgp.GaussianProcess(
            kernel, X, 0.1, mean=trend, estimator=PATHWISE, key=KEY, state="solver"
        )
        gp.log_prob(y)
        return gp.condition(y), gp.state

    return fit(deep(), y)


def round_trip(tmp_path: Any, value: Any) -> Any:
    sgp.save(tmp_path / "fitted.npz", value)
    return sgp.load(tmp_path / "fitted.npz", trusted=("tests",))


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(a):
            assert a.dtype == b.dtype
            assert isinstance(b, jax.Array if isinstance(a, jax.Array) else type(a))
            assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


# Posteriors


@pytest.mark.slow
def test_pathwise_posterior(tmp_path, monkeypatch):
    posterior, _ = pathwise()
    Xs = data()[2]

    def predictions(posterior: Any) -> Any:
        parts = posterior.mean(Xs), posterior.variance(Xs), posterior.sample(KEY, Xs, 3)
        return (
            parts,
            posterior.at_data().mean,
            posterior.leave_one_out().variance,
            posterior.diagnostics,
        )

    again = round_trip(tmp_path, posterior)
    assert_same(posterior, again)
    with monkeypatch.context() as patch:
        # No solve is needed, not even traced.
        patch.setattr(ConjugateGradients, "run", None)
        actual = predictions(again)
        with pytest.raises(TypeError, match="not callable"):
            again.sample(KEY, Xs, 5)  # more than are stored take a solve
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), actual, predictions(posterior)
    )


@pytest.mark.parametrize("mean", [None, 0.3, trend, functools.partial(slope, jnp.array(0.7))])
def test_exact_posterior(mean, tmp_path):
    X, y, Xs = data()
    posterior = sgp.GaussianProcess(sgp.kernels.RBF(0.8), X, 0.1, mean=mean).condition(y)
    again = round_trip(tmp_path, posterior)
    assert_same(posterior, again)
    np.testing.assert_array_equal(again.mean(Xs), posterior.mean(Xs))
    np.testing.assert_array_equal(again.variance(Xs), posterior.variance(Xs))
    assert again.diagnostics == posterior.diagnostics


def test_sparse_posterior(tmp_path):
    X, _, Xs = data()
    kernel = sgp.kernels.Matern52(0.7, 1.2)
    family = sgp.SparseGP(kernel, X, X[:3], jnp.ones(3), 0.5 * jnp.eye(3))
    posterior = family.posterior()
    again = round_trip(tmp_path, posterior)
    assert_same(posterior, again)
    np.testing.assert_array_equal(again.variance(Xs), posterior.variance(Xs))


# States, kernels, estimators and plain containers


@pytest.mark.slow
def test_solver_state(tmp_path):
    _, state = pathwise()
    again = round_trip(tmp_path, state)
    assert_same(state, again)
    assert (again.memory.num_records, len(again.memory.solutions)) == (5, 3)
    for name, values in state.history().items():
        np.testing.assert_array_equal(again.history()[name], values)
    assert np.all(again.history()["converged"])
    assert round_trip(tmp_path, SolverState()).begin is None


def test_a_loaded_state_is_gone_on_from(tmp_path):
    X, y, _ = data()
    _, state = pathwise()
    again = round_trip(tmp_path, state)

    @jax.jit
    def condition(kernel: Any, y: Array, state: SolverState) -> Any:
        with numpyro.handlers.substitute(data={"solver": state}):
            options = {"estimator": PATHWISE, "state": "solver"}
            return sgp.GaussianProcess(kernel, X, 0.1, mean=trend, **options).condition(y)

    posterior = condition(deep(), y, again)
    assert posterior.diagnostics["epochs"] == 0
    np.testing.assert_array_equal(posterior.solution.value, pathwise()[0].solution.value)


@pytest.mark.parametrize(
    "kernel", [pytest.param(f, id=name) for name, f in KERNELS if name != "mapped_flax_nnx"]
)
def test_kernels(kernel, tmp_path, dtype):
    original = kernel(0.9)
    X = inputs(kernel=original)
    again = round_trip(tmp_path, original)
    assert_same(original, again)
    np.testing.assert_array_equal(again(X, X), original(X, X))


@pytest.mark.parametrize("estimator", [pytest.param(f, id=name) for name, f in ESTIMATORS])
def test_estimators(estimator, tmp_path):
    original = estimator()
    again = round_trip(tmp_path, original)
    assert_same(original, again)
    if not jax.tree.leaves(original):
        assert again == original
        assert hash(again) == hash(original)


def test_estimators_with_every_option(tmp_path):
    for solver in (
        sgp.solvers.AlternatingProjections(7, 1e-3, 12.5),
        sgp.solvers.StochasticGradientDescent(5, learning_rate=0.1, momentum=0.5),
        ConjugateGradients(preconditioner=sgp.preconditioners.Identity()),
    ):
        original = Hutchinson(solver, 3, num_logdet_probes=2, logdet_epochs=4, num_features=6)
        assert round_trip(tmp_path, original) == original


class Labeled(NamedTuple):
    value: Any
    label: Any


def test_containers(tmp_path):
    fitted: dict[str, Any] = {
        "params": {3: jnp.array([0.5, 0.7]), 1: jnp.arange(4)},
        "list": [1, 2.5, "text\0", None, True, (jnp.ones((2, 0)), Labeled(jnp.array(True), "b"))],
        "numpy": np.linspace(0.0, 1.0, 3, dtype=np.float32),
        "scalars": [np.float64(0.1), np.int8(3), jnp.asarray(2.0), float("inf"), 10**30],
        "weak": jnp.full(3, 0.1),
        "ordered": OrderedDict(b=1, a=2),
        "dtypes": (np.dtype("f4"), jnp.bfloat16),
        "kernel": sgp.kernels.RBF(1.0),
    }
    again = round_trip(tmp_path, fitted)
    assert_same(fitted, again)
    assert again["list"][:5] == [1, 2.5, "text\0", None, True]
    for name in ("scalars", "ordered", "dtypes"):
        assert again[name] == fitted[name]
    assert list(map(type, again["scalars"])) == list(map(type, fitted["scalars"]))
    assert isinstance(again["list"][4], bool)
    assert isinstance(again["list"][5][1], Labeled)


def test_hyperparameters(tmp_path):
    scores = (("random rows", 1.25, 0.1), ("neighborhoods", 1.0, 0.2))
    values = sgp.infer.Hyperparameters({"noise": jnp.array(0.1)}, "random rows", scores)
    sgp.save(tmp_path / "values.npz", values)
    again = sgp.load(tmp_path / "values.npz")
    assert isinstance(again, sgp.infer.Hyperparameters)
    assert (again.report, list(again)) == (values.report, ["noise"])
    assert again["noise"] == values["noise"]


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
        original = sgp.kernels.RBF(jnp.array([0.1, 0.2]))
        again = round_trip(tmp_path, original)
        assert_same(original, again)
        assert again.lengthscale.dtype == jnp.float64
    with pytest.warns(UserWarning, match=r"fitted.npz` holds float64 arrays.*jax_enable_x64"):
        narrow = sgp.load(tmp_path / "fitted.npz")
    assert narrow.lengthscale.dtype == jnp.float32
    np.testing.assert_allclose(narrow.lengthscale, [0.1, 0.2], rtol=1e-6)
    with jax.enable_x64(True):
        large = [{"a": jnp.array(2**40)}, {"a": jnp.array([1e300, jnp.inf])}]
    for original in large:
        sgp.save(tmp_path / "fitted.npz", original)
        with pytest.raises(ValueError, match=r"64 array at `fitted\['a'\]` does not fit into .*32"):
            sgp.load(tmp_path / "fitted.npz")


def test_file_name_is_kept_and_the_file_overwritten(tmp_path):
    path = str(tmp_path / "fitted.model")
    sgp.save(path, sgp.kernels.RBF(1.0))
    sgp.save(path, sgp.kernels.Constant(2.0))
    assert [file.name for file in tmp_path.iterdir()] == ["fitted.model"]
    assert isinstance(sgp.load(path), sgp.kernels.Constant)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "int4", "float16", "complex64", "uint8"]
)
def test_dtypes(dtype, tmp_path):
    value = {"a": jnp.arange(3).astype(dtype), "b": jnp.ones((), dtype), "c": jnp.ones((0, 2))}
    assert_same(value, round_trip(tmp_path, value))


def test_distributions(tmp_path):
    X = data()[0]
    for original in (
        dist.LogNormal(0.0, 1.0),
        dist.Normal(jnp.zeros(3), 2.0).to_event(1),
        dist.Normal(0.0, 1.0).expand([3]),
        sgp.LatentGP(sgp.kernels.RBF(1.0), X),
    ):
        assert_same(original, round_trip(tmp_path, original))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))),
        optax.masked(optax.inject_hyperparams(optax.sgd)(0.1), {"a": True, "b": False}),
        numpyro.optim.Adam(0.1),
    ],
    ids=["optax", "masked", "numpyro"],
)
def test_states_of_optimizers(optimizer, tmp_path):
    state = optimizer.init({"a": jnp.ones(3), "b": jnp.zeros(())})
    again = round_trip(tmp_path, state)
    assert_same(state, again)
    assert_same(state, sgp.load(tmp_path / "fitted.npz", like=state))


def test_what_is_only_shaped_like_a_kernel(tmp_path):
    kernel = sgp.kernels.RBF(jnp.array([0.5, 2.0]))
    moments = optax.adam(0.1).init(jax.tree.map(lambda leaf: -leaf, kernel))
    stack = jax.vmap(sgp.kernels.RBF)(jnp.ones((3, 2)))
    for original in (moments, jax.tree.map(lambda leaf: -leaf, kernel), stack):
        assert_same(original, round_trip(tmp_path, original))


# Objects that cannot be saved


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"a": [0, {1, 2}]}, r"cannot save `fitted\['a'\]\[1\]`, a `builtins.set`"),
        (np.array([object()]), "arrays of dtype object cannot be restored"),
        ((b"bytes", 1), r"cannot save `fitted\[0\]`, a `builtins.bytes`"),
        (jax.jit(lambda X: X), "PjitFunction`: give its arrays to `functools.partial`"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "a subclass of NumPy's arrays"),
    ],
    ids=["set", "objects", "bytes", "jitted", "masked"],
)
def test_what_is_refused(bad, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sgp.save(tmp_path / "fitted.npz", bad)
    assert not list(tmp_path.iterdir())


def test_more_that_is_refused(tmp_path):
    file = tmp_path / "fitted.npz"
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(ValueError, match="contains itself or is nested too deeply"):
        sgp.save(file, itself)
    with pytest.raises(ValueError, match=r"`fitted\['x'\]`.*it is being traced"):
        jax.jit(lambda x: sgp.save(file, {"x": x}))(1.0)
    for reads in (lambda X: X @ WEIGHTS, lambda X: jax.vmap(lambda x: x @ WEIGHTS)(X)):
        with pytest.raises(ValueError, match=r"reads the global array `WEIGHTS`.*functools.part"):
            sgp.save(file, reads)
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(ValueError, match=r"`fitted\.value`.*deleted"):
        sgp.save(file, Labeled(gone, 1))
    assert not list(tmp_path.iterdir())


# Code taken from a template


def network(weights: Array, activation: Any = jnp.tanh) -> Any:
    return lambda X: activation(X @ weights)


def test_a_posterior_with_a_closure(tmp_path):
    X, y, Xs = data()

    def fit(weights: Array) -> Any:
        kernel = sgp.kernels.FeatureMapped(sgp.kernels.RBF(0.8), network(weights))
        gp = sgp.GaussianProcess(kernel, X, 0.1, mean=lambda X: X[:, 0])
        return gp.condition(y)

    posterior, start = fit(jnp.array([[1.0, 0.5], [0.2, -1.0]])), fit(jnp.eye(2))
    sgp.save(tmp_path / "fitted.npz", posterior)
    with pytest.raises(ValueError, match=r"fitted.npz`: the code at `fitted\..*pass it as `like="):
        sgp.load(tmp_path / "fitted.npz")
    again = sgp.load(tmp_path / "fitted.npz", like=start)
    # The arrays that the closure holds come from the file, not from the template.
    np.testing.assert_array_equal(again.mean(Xs), posterior.mean(Xs))
    np.testing.assert_array_equal(again.variance(Xs), posterior.variance(Xs))


def test_templates_of_other_kinds(tmp_path):
    X = jnp.ones((3, NUM_COLUMNS)) * jnp.arange(3.0)[:, None]
    for name in ("mapped_flax_nnx", "mapped_partial", "mapped_equinox_mlp"):
        make = dict(KERNELS)[name]
        sgp.save(tmp_path / "fitted.npz", make(0.7))
        again = sgp.load(tmp_path / "fitted.npz", like=make(1.0))
        np.testing.assert_array_equal(again(X, X), make(0.7)(X, X))
    shapes = eqx.filter_eval_shape(lambda: sgp.kernels.RBF([1.0, 2.0]))
    kernel = sgp.kernels.RBF([3.0, 4.0])
    sgp.save(tmp_path / "fitted.npz", kernel)
    assert_same(kernel, sgp.load(tmp_path / "fitted.npz", like=shapes))
    # The same function, so that what is compiled for the template serves the loaded object.
    sgp.save(tmp_path / "fitted.npz", [LAMBDA])
    assert sgp.load(tmp_path / "fitted.npz", like=[LAMBDA])[0] is LAMBDA
    # A part of any shape, next to one that must fit.
    sgp.save(tmp_path / "fitted.npz", {"function": LAMBDA, "losses": np.arange(5)})
    again = sgp.load(tmp_path / "fitted.npz", like={"function": LAMBDA, "losses": ...})
    assert again["function"] is LAMBDA
    np.testing.assert_array_equal(again["losses"], np.arange(5))
    with pytest.raises(ValueError, match=r"the code at `fitted\['function'\]` has no name"):
        sgp.load(tmp_path / "fitted.npz", like={"function": ..., "losses": ...})


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (sgp.kernels.Matern32(1.0), "`like` has a `Matern32` at `fitted`, and the file a .*:RBF"),
        (sgp.kernels.RBF([1.0, 2.0]), r"shape \(2,\) .* at `fitted.lengthscale`, and .*\(\)"),
        ({"a": 1}, "`like` has a `dict` at `fitted`"),
    ],
    ids=["class", "shape", "kind"],
)
def test_templates_that_do_not_fit(like, message, tmp_path):
    sgp.save(tmp_path / "fitted.npz", sgp.kernels.RBF(1.0))
    with pytest.raises(ValueError, match=message):
        sgp.load(tmp_path / "fitted.npz", like=like)


def test_templates_with_other_entries(tmp_path):
    sgp.save(tmp_path / "fitted.npz", {"a": (1, 2.0), "f": jnp.tanh})
    for like, message in (
        ({"b": (1, 2.0), "f": jnp.tanh}, r"lacks \['b'\] and has \['a'\]"),
        ({"a": (1,), "f": jnp.tanh}, r"`like` has 1 entries at `fitted\['a'\]`, and the file 2"),
        ({"a": (1, 2), "f": jnp.tanh}, r"a `int` at `fitted\['a'\]\[1\]`, and the file a `float`"),
        ({"a": (1, 2.0), "f": jnp.cos}, "jax.numpy:cos.* at .*, and the file jax.*:tanh"),
    ):
        with pytest.raises(ValueError, match=message):
            sgp.load(tmp_path / "fitted.npz", like=like)
