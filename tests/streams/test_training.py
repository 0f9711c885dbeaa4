"""Training on a stream takes the steps of `update`, also after it was killed."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
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

import numpyro_scalegp as sgp
from tests.test_resuming import assert_same

pytest.importorskip("grain")

ROOT = Path(__file__).parent.parent.parent
KEY = jax.random.key(0)
ROWS = 500


def stream(seed: int = 0, batch_size: int = 64) -> sgp.streams.Stream:
    X = np.random.default_rng(0).uniform(-2, 2, size=(ROWS, 1)).astype(np.float32)
    y = np.sin(3 * X[:, 0])
    return sgp.streams.arrays(X, y, batch_size=batch_size, seed=seed, window=200, num_ranges=8)


def model(X: Array, y: Array | None = None, size: int = ROWS) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with sgp.plate("rows", size, X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def weights(X: Array, y: Array | None = None, size: int = ROWS) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.1))
    features = sgp.features.RandomFourier(sgp.kernels.RBF(lengthscale), 100, seed=0)
    f = numpyro.sample("f", sgp.WeightSpaceGP(features, X))
    with sgp.plate("rows", size, X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def sparse() -> SVI:
    points = jnp.linspace(-2.0, 2.0, 8)[:, None]
    guide = sgp.guides.AutoSparseGP(model, inducing_points=points)
    return SVI(model, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(num_nodes=2))


def rows() -> SVI:
    guide = sgp.guides.AutoChevronGP(weights, rank=2)
    loss = sgp.infer.QuadruplyStochasticELBO(20, control_variate_rank=10)
    return sgp.infer.RowSVI(weights, guide, optax.adam(0.01), loss, refresh_every=5)


def decoupled() -> SVI:
    guide = sgp.guides.AutoDecoupledGP(model, mean_size=24, cov_size=8, growth=4)
    return SVI(model, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(num_nodes=2))


def train(svi: SVI, num_steps: int, file: Path | None = None, **options: Any) -> Any:
    options = {"every": 4, "progress_bar": False, **options}
    return sgp.streams.run(svi, KEY, num_steps, stream(), checkpoint=file, **options)


@pytest.mark.slow
def test_steps_are_those_of_update() -> None:
    svi, batches = sparse(), iter(stream())
    state, losses = svi.init(KEY, *map(jnp.asarray, next(iter(stream())))), []
    update = jax.jit(svi.update)
    for _ in range(11):
        state, loss = update(state, *next(batches))
        losses.append(loss)
    result = train(sparse(), 11)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    for name, value in svi.get_params(state).items():
        np.testing.assert_allclose(result.params[name], value, rtol=1e-4, atol=1e-5)


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("make", "at"), [(sparse, 4), (sparse, 13), (rows, 6)])
def test_a_run_that_ended_goes_on_bit_for_bit(make: Any, at: int, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.npz"
    through = train(make(), 14)
    calls = 0

    def put(*arrays: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > at + 1:  # one for `init`
            raise Killed
        return jax.device_put(arrays)

    with pytest.raises(Killed):
        train(make(), 14, file, place=put)
    assert_same(train(make(), 14, file), through)


@pytest.mark.slow
def test_a_file_with_fewer_steps_or_all_of_them(tmp_path: Path) -> None:
    file, through = tmp_path / "checkpoint.npz", train(sparse(), 9)
    assert len(train(sparse(), 6, file).losses) == 6
    assert_same(train(sparse(), 9, file), through)
    assert_same(train(sparse(), 9, file), through)


TRAINS = """
import sys
import numpyro_scalegp as sgp
from tests.streams.test_training import sparse, train
train(sparse(), 10**6, sys.argv[1], every=5)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_trains(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.npz"
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", TRAINS, str(file)], cwd=ROOT, env=path) as process:
        while not file.exists():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.3)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    done = len(sgp.load(file).losses)
    assert done % 5 == 0
    steps = done + 7
    resumed, through = (
        train(sparse(), steps, checkpoint, every=steps) for checkpoint in (file, None)
    )
    assert len(resumed.losses) == steps
    assert_same(resumed, through)


@pytest.mark.slow
def test_a_decoupled_guide_takes_points_from_the_stream(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.npz"
    through = train(decoupled(), 8)
    train(decoupled(), 5, file)
    assert_same(train(decoupled(), 8, file), through)
    mutable = through.state.mutable_state
    assert mutable


@pytest.mark.slow
def test_a_step_that_is_not_finite() -> None:
    def spoil(X: np.ndarray, y: np.ndarray) -> Any:
        return X, np.where(y[0] < -0.9, np.nan, y)

    spoiled = stream().map(spoil)
    bad = [bool(np.isnan(y[0])) for (_, y), _ in zip(spoiled, range(12), strict=False)]
    assert 0 < sum(bad) < 12 and not bad[0]
    options = {"progress_bar": False}
    result = sgp.streams.run(sparse(), KEY, 12, spoiled, stable_update=True, **options)
    assert np.isnan(result.losses).tolist() == bad
    assert all(np.isfinite(value).all() for value in result.params.values())
    result = sgp.streams.run(sparse(), KEY, 12, spoiled, **options)
    assert not all(np.isfinite(value).all() for value in result.params.values())


def test_place_puts_batches_on_devices_from_another_thread() -> None:
    types = []

    def put(X: np.ndarray, y: np.ndarray) -> Any:
        types.append(type(X))
        return jnp.asarray(X), jnp.asarray(y)

    assert_same(train(sparse(), 6, place=put), train(sparse(), 6))
    assert set(types) == {np.ndarray}
    assert len(types) <= 10  # one for `init`, two that wait, one that is about to


@pytest.mark.slow
def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.npz"
    train(sparse(), 4, file)
    with pytest.raises(ValueError, match=r"checkpoint.npz` has 4 steps, and `num_steps` is 3"):
        train(sparse(), 3, file)
    with pytest.raises(ValueError, match=r"belongs to another stream.*\(500, 64, 200, 8, 0\)"):
        sgp.streams.run(sparse(), KEY, 8, stream(seed=1), checkpoint=file, progress_bar=False)
    with pytest.raises(ValueError, match="cannot load"):
        train(rows(), 8, file)
    # The same rows and order, with another target.
    X, y = stream().rows.read([(0, ROWS)])
    other_data = dataclasses.replace(
        stream(), rows=sgp.streams.arrays(X, -y, batch_size=1, seed=0).rows
    )
    with pytest.raises(ValueError, match=r"checkpoint.npz` belongs to another stream: it was made"):
        sgp.streams.run(sparse(), KEY, 4, other_data, checkpoint=file, progress_bar=False)


def test_a_checkpoint_of_a_file_that_was_rewritten(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    rows, file = tmp_path / "rows.parquet", tmp_path / "checkpoint.npz"
    X = np.random.default_rng(0).permutation(ROWS) / ROWS

    def train_on(rows: Path) -> Any:
        of_file = sgp.streams.parquet(rows, inputs=["X"], target="y", batch_size=64, seed=0)
        options = {"checkpoint": file, "progress_bar": False}
        return sgp.streams.run(sparse(), KEY, 2, of_file, **options)

    parquet.write_table(pyarrow.table({"X": X, "y": X}), rows)
    train_on(rows)
    parquet.write_table(pyarrow.table({"X": X[::-1], "y": X}), rows)
    with pytest.raises(OSError, match=r"the checkpoint `.*checkpoint.npz` belongs to another"):
        train_on(rows)


def test_where_no_checkpoint_can_be_is_known_before_the_first_step(tmp_path: Path) -> None:
    def put(*arrays: Any) -> Any:
        raise AssertionError

    with pytest.raises(FileNotFoundError, match="there is no folder"):
        train(sparse(), 4, tmp_path / "none" / "checkpoint.npz", place=put)
    with pytest.raises(IsADirectoryError, match="is a directory: give the name of a file"):
        train(sparse(), 4, tmp_path, place=put)


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments() -> None:
    good: dict[str, Any] = {"svi": sparse(), "key": KEY, "num_steps": 2, "stream": stream()}
    with pytest.raises(TypeError, match="`svi` must be an `SVI`"):
        sgp.streams.run(**{**good, "svi": model})
    with pytest.raises(TypeError, match=r"`stream` must be of `sgp.streams.parquet`"):
        sgp.streams.run(**{**good, "stream": [1]})
    with pytest.raises(ValueError, match="`num_steps` must be at least 1"):
        sgp.streams.run(**{**good, "num_steps": 0})
    with pytest.raises(ValueError, match="`every` must be at least 1"):
        sgp.streams.run(**good, every=0)
    with pytest.raises(TypeError, match=r"`checkpoint` must be a path, such as .*, got 3"):
        sgp.streams.run(**good, checkpoint=3)
    with pytest.raises(TypeError, match="`place` must be callable"):
        sgp.streams.run(**good, place=3)
