"""Programs as ONNX files, and the few kinds of operations that they have."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import numpyro_scalegp as sgp
from numpyro_scalegp.programs import onnx
from tests.conformance import by_python, each, inputs
from tests.registry import KERNELS, POSTERIORS

# They know no number of columns, or need the number of rows.
REFUSED = ("mixture", "outputs", "grid_in_time")
# jax2onnx has no valid conversion of a search in sorted float64.
IN_TIME = ("state_space", "laplace_in_time", "natural_in_time")
EXPORTED = [pair for pair in POSTERIORS if pair[0] not in REFUSED]
# One of each way to compute moments.
QUICK = [pair for pair in EXPORTED if pair[0] in ("exact", "pathwise", "sparse", "state_space")]
# What jax2onnx does not convert, or only for a fixed number of rows.
NOT_CONVERTED = {
    "call_with_jvp", "custom_linear_solve", "custom_vmap_call", "host_call", "pad",
    "platform_index", "pure_callback", "random_bits", "random_fold_in", "random_gamma",
    "random_split", "random_wrap", "scatter", "split",
}  # fmt: skip


def kernel() -> sgp.kernels.Matern52:
    return sgp.kernels.Matern52(1.2, 1.5)


def traced(posterior: Any) -> Any:
    """The jaxpr of the mean and the variance, for any number of rows."""
    (m,) = jax.export.symbolic_shape("m")
    rows = jax.ShapeDtypeStruct((m, posterior._num_columns), jnp.result_type(float))
    return jax.make_jaxpr(lambda Xs: posterior._mean_and_variance(Xs, None))(rows), rows


def primitives(jaxpr: Any) -> set[str]:
    names = {equation.primitive.name for equation in jaxpr.eqns}
    inner = (inner for equation in jaxpr.eqns for inner in jaxprs_in_params(equation.params))
    return names.union(*map(primitives, inner))


def check_simplified(factory: Any) -> None:
    posterior = factory(kernel(), inputs())
    closed, rows = traced(posterior)
    simple = jax.make_jaxpr(lambda Xs: onnx.simplified(closed, [Xs]))(rows)
    assert not primitives(simple.jaxpr) & NOT_CONVERTED
    for num in (1, 5):
        X = inputs()[:num] + 0.1
        with_rows = jax.make_jaxpr(lambda Xs: posterior._mean_and_variance(Xs, None))(X)
        results = jax.jit(lambda Xs, closed=with_rows: onnx.simplified(closed, [Xs]))(X)
        for values, expected in zip(results, posterior._mean_and_variance(X, None), strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.slow
@each("factory", QUICK)
def test_simplified_programs_have_the_same_results(factory, x64):
    check_simplified(factory)


@pytest.mark.slow
@each("factory", [pair for pair in EXPORTED if pair not in QUICK])
def test_simplified_programs_of_any_posterior_have_the_same_results(factory, x64):
    check_simplified(factory)


def test_remainders_are_exact():
    generator = np.random.default_rng(0)
    period = generator.uniform(0.01, 100.0, 10_000).astype(np.float32)
    x = (generator.normal(size=10_000) * 10.0 ** generator.uniform(-3, 5, 10_000)).astype(
        np.float32
    )
    x[:1000] = np.round(generator.uniform(0.0, 1000.0, 1000)).astype(np.float32) * period[:1000]
    closed = jax.make_jaxpr(jnp.fmod)(x, period)
    result = jax.jit(lambda *inputs: onnx.simplified(closed, inputs)[0])(x, period)
    np.testing.assert_array_equal(result, np.fmod(x, period))


def check_model(owner: Any, function: Any, file: Path, tolerance: float) -> None:
    """An ONNX model has the outputs of a function, for any number of rows."""
    onnxruntime = pytest.importorskip("onnxruntime")
    onnxruntime.set_default_logger_severity(3)
    pytest.importorskip("jax2onnx")
    owner.export(file)
    session = onnxruntime.InferenceSession(file)
    names = [output.name for output in session.get_outputs()]
    for num in (1, 5):
        X = np.asarray(inputs()[:num] + 0.1)
        results = dict(zip(names, session.run(None, {"Xs": X}), strict=True))
        for name, expected in function(X).items():
            assert results[name].dtype == X.dtype and results[name].shape == expected.shape
            np.testing.assert_allclose(results[name], expected, rtol=tolerance, atol=tolerance)


def moments(posterior: Any) -> Any:
    return lambda X: {"mean": posterior.mean(X), "variance": posterior.variance(X)}


@each("factory", QUICK)
def test_models_equal_the_posterior_in_float32(factory, tmp_path):
    posterior = factory(kernel(), inputs())
    check_model(posterior, moments(posterior), tmp_path / "moments.onnx", 1e-5)


@pytest.mark.slow
@each("factory", [pair for pair in EXPORTED if pair[0] not in IN_TIME])
def test_models_of_any_posterior(factory, tmp_path, x64):
    posterior = factory(kernel(), inputs())
    check_model(posterior, moments(posterior), tmp_path / "moments.onnx", 1e-7)
    functions = posterior.sample_functions(jax.random.key(0), 3, num_features=32)
    check_model(functions, lambda X: {"values": functions(X)}, tmp_path / "draws.onnx", 1e-7)


@pytest.mark.slow
@each("make", KERNELS)
def test_models_with_any_kernel(make, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("jax2onnx")
    X = inputs(20, kernel=make(1.2))
    posterior = sgp.GaussianProcess(make(1.2), X, 0.1).condition(jnp.sin(X[:, 0]))
    posterior.export(tmp_path / "moments.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "moments.onnx")
    mean, _, variance = session.run(None, {"Xs": np.asarray(X[:7])})
    np.testing.assert_allclose(mean, posterior.mean(X[:7]), atol=1e-5)
    np.testing.assert_allclose(variance, posterior.variance(X[:7]), atol=1e-5)


@pytest.mark.slow
@each("factory", [pair for pair in EXPORTED if pair[0] in IN_TIME])
def test_invalid_models_are_not_written(factory, tmp_path, x64):
    pytest.importorskip("jax2onnx")
    posterior = factory(kernel(), inputs())
    with pytest.raises(ValueError, match="cannot be written as an ONNX file"):
        posterior.export(tmp_path / "moments.onnx")
    assert not list(tmp_path.iterdir())


def test_no_platforms(tmp_path):
    posterior = dict(POSTERIORS)["exact"](kernel(), inputs())
    with pytest.raises(ValueError, match="`platforms` must be None for an ONNX file"):
        posterior.export(tmp_path / "moments.onnx", platforms=("cpu",))


def test_noise_and_fixed_number_of_rows(tmp_path):
    posterior = dict(POSTERIORS)["exact"](kernel(), inputs())
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("jax2onnx")
    posterior.export(tmp_path / "moments.onnx", num_rows=3)
    session = onnxruntime.InferenceSession(tmp_path / "moments.onnx")
    X = np.asarray(inputs()[:3])
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(None, {"Xs": X}), strict=True))
    total = results["variance"] + results["noise_variance"]
    np.testing.assert_allclose(total, posterior.predictive(X).variance, rtol=1e-5)


def test_calls_of_python_are_refused(tmp_path):
    pytest.importorskip("jax2onnx")
    X = inputs()

    gp = sgp.GaussianProcess(kernel(), X, 0.1, mean=by_python)
    with pytest.raises(ValueError, match="cannot be written as an ONNX file"):
        gp.condition(X[:, 0]).export(tmp_path / "posterior.onnx")


def test_without_the_converter(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    posterior = dict(POSTERIORS)["exact"](kernel(), inputs())
    with pytest.raises(ImportError, match=r"install `numpyro_scalegp\[onnx\]`"):
        posterior.export(tmp_path / "moments.onnx")
