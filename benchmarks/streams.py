"""Training from a file larger than memory: rows per second and memory, against data in memory.

    python benchmarks/evidence.py streams streams-smaller

Writes a Parquet file of 8 inputs and a target, float32, sorted by the first input, and trains a
sparse GP on it for one epoch. Blocks of steps on the stream and on batches in memory alternate, so
that noise of the machine disturbs both alike. Memory is the maximum resident memory minus the
resident memory before the stream starts, after compilation.
"""

import contextlib
import functools
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import grain.experimental
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from iterative import in_new_process
from numpyro.infer import SVI
from sparse import number_in

import numpyro_scalegp as sgp

SETTLING = 8  # steps after which a block is timed, when earlier steps have ended
INPUTS = [f"x{column}" for column in range(8)]


def write(file, rows, seed, chunk=2**20):
    """Write data sorted by the first input."""
    generator, writer = np.random.default_rng(seed), None
    for start in range(0, rows, chunk):
        X = generator.uniform(-1, 1, size=(min(chunk, rows - start), 8)).astype(np.float32)
        X[:, 0] = 2 * (start + np.arange(len(X))) / rows - 1
        y = np.sin(3 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.1 * generator.normal(size=len(X))
        table = pa.table({**dict(zip(INPUTS, X.T, strict=True)), "y": y.astype(np.float32)})
        writer = pq.ParquetWriter(file, table.schema) if writer is None else writer
        writer.write_table(table)
    writer.close()


def model(X, y=None, size=None):
    """A GP regression on one batch."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([8]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with sgp.plate("rows", size, X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


class Watch(threading.Thread):
    """Records the maximum resident memory, sampled every 20 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.process, self.most, self.going = psutil.Process(), 0, True

    def run(self):
        while self.going:
            self.most = max(self.most, self.process.memory_info().rss)
            time.sleep(0.02)


class InMemory:
    """Compiled steps on batches that are on the device."""

    def __init__(self, svi, state, batches, size):
        self.state, self.batches = jax.tree.map(jnp.copy, state), batches
        self.step = jax.jit(functools.partial(svi.update, size=size), donate_argnums=0)

    def rate(self, steps):
        """Rows per second, with two steps in the queue as in `run`."""
        start, losses = time.perf_counter(), []
        for number in range(steps):
            self.state, loss = self.step(self.state, *self.batches[number % len(self.batches)])
            losses.append(loss)
            jax.block_until_ready(losses[max(0, number - 2)])
        jax.block_until_ready(loss)
        return steps * len(self.batches[0][1]) / (time.perf_counter() - start)


class Alternating:
    """Puts batches on the device, and times a block in memory after each streamed block."""

    def __init__(self, memory, block):
        self.memory, self.block = memory, block
        self.number, self.began = 0, 0.0
        self.streamed, self.in_memory = [], [memory.rate(2), memory.rate(20)][1:]

    def __call__(self, X, y):
        """Put a batch on the device, in the thread that prefetches."""
        if self.number % self.block == 0:
            seconds = time.perf_counter() - self.began
            if self.number:
                self.streamed.append((self.block - SETTLING) * len(y) / seconds)
            time.sleep(2 * SETTLING * len(y) / self.in_memory[-1])  # let queued steps end
            self.in_memory.append(self.memory.rate(self.block))
        if self.number % self.block == SETTLING:
            self.began = time.perf_counter()
        self.number += 1
        return jax.device_put((X, y))


def count_waits(waits):
    """Record how long the training loop waits for each prefetched batch."""
    iterator = grain.experimental.ThreadPrefetchDatasetIterator
    original = iterator.__next__

    def timed(self):
        start = time.perf_counter()
        batch = original(self)
        waits.append(time.perf_counter() - start)
        return batch

    return mock.patch.object(iterator, "__next__", timed)


def stream_rate(stream, steps):
    """Rows per second without training."""
    start = time.perf_counter()
    with contextlib.closing(iter(stream)) as batches:
        for _ in range(steps):
            next(batches)
        return steps * stream.batch_size / (time.perf_counter() - start)


def train(file, folder, seed, batch_size, num_inducing, block):
    """Train for an epoch, and compare; rates are in thousands of rows per second."""
    stream = sgp.streams.parquet(file, inputs=INPUTS, target="y", batch_size=batch_size, seed=seed)
    size, steps = stream.num_rows, stream.num_rows // batch_size
    with contextlib.closing(iter(stream)) as iterator:
        batches = [jax.device_put(next(iterator)) for _ in range(8)]
    points = sgp.features.kmeans_points(jax.random.key(1 + seed), batches[0][0], num_inducing)
    guide = sgp.guides.AutoSparseGP(model, inducing_points=points)
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
    key, options = jax.random.key(seed), {"size": size, "progress_bar": False}
    put = Alternating(InMemory(svi, svi.init(key, *batches[0], size=size), batches, size), block)

    # A first run, on another stream, so that compilation and imports do not count.
    small = sgp.streams.arrays(*map(np.asarray, batches[0]), batch_size=batch_size, seed=0)
    sgp.streams.run(svi, key, 2, small, **options)
    options |= {"checkpoint": folder / "checkpoint.npz", "every": 500, "place": put}
    waits, base, watch = [], psutil.Process().memory_info().rss, Watch()
    watch.start()
    with count_waits(waits):
        losses = sgp.streams.run(svi, key, steps, stream, **options).losses
    watch.going = False
    around = (np.array(put.in_memory[1:-1]) + np.array(put.in_memory[2:])) / 2
    lower, ratio, upper = np.quantile(np.array(put.streamed) / around, [0.25, 0.5, 0.75])
    # Without the waits for blocks in memory.
    waits = 1e3 * np.sort(waits[SETTLING:])[: -len(around)]
    return {
        "in_memory": 1e-3 * np.median(around),
        "streamed_ratio": ratio,
        "lower": lower,
        "upper": upper,
        "waited": waits.mean(),
        "waited_most": waits[-1],
        "resident": (watch.most - base) / 2**20,
        "mebibytes": file.stat().st_size / 2**20,
        "stream_only": 1e-3 * stream_rate(stream, steps),
        "steps": steps,
        "first_loss": float(losses[0]) / size,
        "last_loss": float(losses[-1]) / size,
    }


def write_and_train(rows, seed, batch_size=8192, num_inducing=128, block=30):
    """Write a file and train on it, in a new process; a block has `block` steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "rows.parquet", rows, seed)
        return train(folder / "rows.parquet", folder, seed, batch_size, num_inducing, block)


def record(data, split, seed, method, **options):
    """The record of a unit such as "1,000,000 rows", in a new process to measure its memory."""
    result, _ = in_new_process(write_and_train, rows=number_in(method), seed=seed, **options)
    return result
