"""Posteriors and functions as programs in files, which JAX runs alone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from tests.conformance import by_python, each, inputs
from tests.registry import POSTERIORS

# One of each way to compute moments.
QUICK = ("exact", "feature", "pathwise", "sparse", "vecchia", "batch_with_hidden_rows", "grid")
# These know no number of columns, or need the number of rows.
REFUSED = {
    "mixture": "cannot be exported: it does not know its number of inputs",
    "outputs": "cannot be exported: it does not know its number of inputs",
    "grid_in_time": "cannot be exported for any number of rows, .* give `num_rows`",
}


def kernel() -> sgp.kernels.Matern52:
    return sgp.kernels.Matern52(1.2, 1.5)


def read(file: Path) -> Any:
    """The program of a file, with its arrays."""
    contents = np.load(file)
    arrays = [contents[name] for name in sorted(contents) if name.startswith("array")]
    program = jax.jit(jax.export.deserialize(bytearray(contents["program"])).call)
    return lambda Xs: program(arrays, Xs)


def assert_equal(results: Any, expected: Any) -> None:
    for name, values in expected.items():
        assert results[name].dtype == values.dtype
        single = values.dtype == np.float32
        rtol, atol = (1e-4, 2e-5) if single else (1e-7, 1e-8)
        np.testing.assert_allclose(results[name], values, rtol=rtol, atol=atol)


def check_export(factory: Any, file: Path) -> None:
    posterior = factory(kernel(), inputs())
    functions = posterior.sample_functions(jax.random.key(0), 3, num_features=32)
    posterior.export(file)
    functions.export(file.with_suffix(".draws"))
    of_moments, of_draws = read(file), read(file.with_suffix(".draws"))
    for num in (1, 5):
        X = inputs()[:num] + 0.1
        moments = {"mean": posterior.mean(X), "variance": posterior.variance(X)}
        assert_equal(of_moments(X), moments)
        assert_equal(of_draws(X), {"values": functions(X)})


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_program_equals_the_posterior(name, tmp_path):
    check_export(dict(POSTERIORS)[name], tmp_path / "posterior.npz")


@pytest.mark.slow
@each("factory", [pair for pair in POSTERIORS if pair[0] not in (*QUICK, *REFUSED)])
def test_program_equals_any_posterior(factory, tmp_path, x64):
    check_export(factory, tmp_path / "posterior.npz")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    posterior = dict(POSTERIORS)[name](kernel(), inputs())
    with pytest.raises(ValueError, match=REFUSED[name]):
        posterior.export(tmp_path / "posterior.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_fixed_number_of_rows(tmp_path):
    posterior = dict(POSTERIORS)["grid_in_time"](kernel(), inputs())
    posterior.export(tmp_path / "posterior.npz", num_rows=4)
    X = inputs()[:4] + 0.1
    assert_equal(read(tmp_path / "posterior.npz")(X), {"mean": posterior.mean(X)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_rows": 0}, "`num_rows` must be at least 1"),
        ({"platforms": "cpu"}, "`platforms` must be a list of some of"),
        ({"platforms": ()}, "`platforms` must be a list of some of"),
        ({"platforms": ("gpu",)}, r"`platforms` must be a list of some of .* got \('gpu',\)"),
    ],
)
def test_bad_options(options, message, tmp_path, unchecked):
    X = inputs()
    posterior = sgp.GaussianProcess(kernel(), X, 0.1).condition(X[:, 0])
    for owner in (posterior, posterior.sample_functions(jax.random.key(0))):
        with pytest.raises(ValueError, match=message):
            owner.export(tmp_path / "posterior.npz", **options)


@pytest.mark.slow
def test_noise_mean_function_and_float64(tmp_path, x64):
    X = inputs()
    slope = jnp.array([1.0, -2.0, 0.5, 0.0])
    gp = sgp.GaussianProcess(kernel(), X, 0.3, mean=lambda X: X @ slope)
    posterior = gp.condition(jnp.sin(X[:, 0]))
    posterior.export(tmp_path / "posterior.npz")
    results = read(tmp_path / "posterior.npz")(X + 0.1)
    new = posterior.predictive(X + 0.1)
    assert results["mean"].dtype == np.float64
    np.testing.assert_allclose(results["mean"], new.mean, rtol=1e-12)
    total = results["variance"] + results["noise_variance"]
    np.testing.assert_allclose(total, new.variance, rtol=1e-12)
    # With a noise variance for each training row there is none for new rows.
    rows = sgp.GaussianProcess(kernel(), X, jnp.linspace(0.1, 0.2, 7)).condition(X[:, 0])
    rows.export(tmp_path / "rows.npz")
    assert "noise_variance" not in read(tmp_path / "rows.npz")(X)


@pytest.mark.slow
def test_noise_of_each_output(tmp_path):
    X, noise = inputs(), jnp.array([0.1, 0.2])
    Y = jnp.stack([X[:, 0], jnp.sin(X[:, 1])], axis=1)
    gp = sgp.MultiOutputGP(kernel(), sgp.kernels.Coregion(jnp.ones((2, 1)), jnp.ones(2)), X, noise)
    posterior = gp.condition(Y)
    posterior.export(tmp_path / "posterior.npz")
    results = read(tmp_path / "posterior.npz")(X)
    total = results["variance"] + results["noise_variance"]
    np.testing.assert_allclose(total, posterior.predictive(X).variance, rtol=1e-4)


def test_what_cannot_be_exported(tmp_path):
    X = inputs()

    gp = sgp.GaussianProcess(kernel(), X, 0.1, mean=by_python)
    with pytest.raises(ValueError, match="since it calls Python"):
        gp.condition(X[:, 0]).export(tmp_path / "posterior.npz", num_rows=3)

    @jax.jit
    def within(y):
        posterior = sgp.GaussianProcess(kernel(), X, 0.1).condition(y)
        posterior.export(tmp_path / "posterior.npz")

    with pytest.raises(ValueError, match="is traced: export it outside"):
        within(X[:, 0])
    assert not list(tmp_path.iterdir())


ALONE = """
import sys

import jax
import jax.export
import numpy as np

file = np.load(sys.argv[1])
arrays = [file[name] for name in sorted(file) if name.startswith("array")]
program = jax.jit(jax.export.deserialize(bytearray(file["program"])).call)
moments = program(arrays, np.full((2, 4), 0.3, np.float32))
assert not any("numpyro" in name for name in sys.modules)
print(*moments["mean"], *moments["variance"])
"""


def test_process_without_the_package(tmp_path):
    X = inputs()
    posterior = sgp.GaussianProcess(kernel(), X, 0.1).condition(X[:, 0])
    posterior.export(tmp_path / "posterior.npz", platforms=("cpu", "cuda"))
    command = [sys.executable, "-c", ALONE, str(tmp_path / "posterior.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    rows = jnp.full((2, 4), 0.3)
    expected = [*posterior.mean(rows), *posterior.variance(rows)]
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(list(map(float, done.stdout.split())), expected, rtol=1e-4)
