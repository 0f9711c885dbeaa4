"""Predictions for all rows, in files."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("grain")

ROWS = 250


def posterior() -> Any:
    X = jnp.linspace(-1.0, 1.0, 7)[:, None]
    return sgp.GaussianProcess(sgp.kernels.RBF(0.5), X, 0.1).condition(jnp.sin(3 * X[:, 0]))


def inputs() -> np.ndarray:
    return np.random.default_rng(0).uniform(-2, 2, size=(ROWS, 1)).astype(np.float32)


def stream(folder: Path) -> sgp.streams.Stream:
    file = folder / "inputs.parquet"
    pq.write_table(pa.table({"x": inputs()[:, 0]}), file, row_group_size=90)
    return sgp.streams.parquet(file, inputs=["x"], batch_size=7, seed=0)


@pytest.mark.parametrize("chunk_size", [1, 64, 125, 1000])
@pytest.mark.parametrize("ending", ["npy", "parquet"])
def test_they_are_those_of_the_posterior(ending: str, chunk_size: int, tmp_path: Path) -> None:
    file = tmp_path / f"predictions.{ending}"
    sgp.streams.predict(posterior(), stream(tmp_path), file, chunk_size=chunk_size)
    if ending == "npy":
        written = dict(zip(("mean", "variance"), np.load(file, mmap_mode="r").T, strict=True))
    else:
        table = pq.read_table(file)
        written = {name: table[name].to_numpy() for name in table.column_names}
    expected = {"mean": posterior().mean(inputs()), "variance": posterior().variance(inputs())}
    assert list(written) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(written[name], values, rtol=1e-4, atol=1e-5)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_a_function_and_a_map(tmp_path: Path) -> None:
    file = tmp_path / "double.parquet"
    mapped = stream(tmp_path).map(lambda X: 2 * X)
    sgp.streams.predict(lambda X: {"double": X[:, 0], "sign": X[:, 0] > 0}, mapped, file)
    table = pq.read_table(file)
    np.testing.assert_array_equal(table["double"].to_numpy(), 2 * inputs()[:, 0])
    np.testing.assert_array_equal(table["sign"].to_numpy(), inputs()[:, 0] > 0)


def test_columns_are_in_the_order_of_the_function_and_chunks_no_larger_than_the_data(
    tmp_path: Path,
) -> None:
    file, sizes = tmp_path / "columns.npy", []

    def columns(X: Any) -> dict[str, Any]:
        sizes.append(len(X))
        return {"b": X[:, 0], "a": X[:, 0] + 1}

    sgp.streams.predict(columns, stream(tmp_path), file)
    np.testing.assert_array_equal(np.load(file), inputs() + np.array([0, 1], np.float32))
    assert sizes == [ROWS]


@pytest.mark.parametrize("ending", ["npy", "parquet"])
def test_a_full_disk_names_the_file(ending: str, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / f"predictions.{ending}"
    file.write_text("old")
    made = stream(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=rf"No space left on device: .*predictions.{ending}"):
        sgp.streams.predict(lambda X: {"a": X[:, 0]}, made, file)
    assert file.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "predictions.npy"
    file.write_text("old")
    with pytest.raises(ValueError, match=r"`both` must have one value for each row, got shape"):
        sgp.streams.predict(lambda X: {"both": jnp.stack([X, X])}, stream(tmp_path), file)
    with pytest.raises(ValueError, match=r"`one` must have one .* got shape \(1,\) for 250 rows"):
        sgp.streams.predict(lambda X: {"one": X[:1, 0]}, stream(tmp_path), file)
    for returns in (lambda X: X[:, 0], lambda X: {}, lambda X: {0: X[:, 0]}):
        with pytest.raises(
            TypeError, match="`posterior` must return a dict of arrays by the names"
        ):
            sgp.streams.predict(returns, stream(tmp_path), file)
    fewer = stream(tmp_path).map(lambda X: X[X[:, 0] > 0])
    with pytest.raises(ValueError, match="function of `map` must return arrays with the 250 rows"):
        sgp.streams.predict(posterior(), fewer, file)
    assert file.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs.parquet", "predictions.npy"]


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`file` must end in .parquet or .npy, got '.*out.csv'"):
        sgp.streams.predict(posterior(), stream(tmp_path), tmp_path / "out.csv")
    for wrong in (5, None):
        with pytest.raises(TypeError, match=r"`file` must be a path, such as .*got"):
            sgp.streams.predict(posterior(), stream(tmp_path), wrong)
    with pytest.raises(TypeError, match="`posterior` must be a posterior or a function of inputs"):
        sgp.streams.predict(3, stream(tmp_path), tmp_path / "out.npy")
    with pytest.raises(TypeError, match=r"`stream` must be of `sgp.streams.parquet`"):
        sgp.streams.predict(posterior(), inputs(), tmp_path / "out.npy")
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1"):
        sgp.streams.predict(posterior(), stream(tmp_path), tmp_path / "out.npy", chunk_size=0)
