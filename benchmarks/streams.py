"""Training from a file that is larger than memory: rows a second and memory beside the same steps.

    python benchmarks/streams.py --rows 20000000

Writes a Parquet file of 8 inputs and a target, float32, in order of its first input, and trains a
sparse GP on it for one epoch. Prints the largest resident memory above that before the stream
began (after compilation), rows a second, those of the same steps on batches in memory, and how long
steps waited for a batch. Blocks of steps on the stream and in memory alternate, so that a noisy
machine disturbs both alike.
"""

import argparse
import functools
import tempfile
import threading
import time
from pathlib import Path

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
from numpyro.infer import SVI

import numpyro_scalegp as sgp

SETTLING = 8  # steps after which a block is timed: none is left from before
INPUTS = [f"x{column}" for column in range(8)]


def write(file, rows, chunk=2**20):
    """Rows in order of their first input."""
    generator, writer = np.random.default_rng(0), None
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
    """The largest resident memory, looked at every 20 ms."""

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
        """Rows a second, with two steps in the queue as in `run`."""
        start, losses = time.perf_counter(), []
        for number in range(steps):
            self.state, loss = self.step(self.state, *self.batches[number % len(self.batches)])
            losses.append(loss)
            jax.block_until_ready(losses[max(0, number - 2)])
        jax.block_until_ready(loss)
        return steps * len(self.batches[0][1]) / (time.perf_counter() - start)


class Alternating:
    """Puts batches on the device; after each block of them, times a block in memory."""

    def __init__(self, memory, block):
        self.memory, self.block = memory, block
        self.number, self.began = 0, 0.0
        self.streamed, self.in_memory = [], [memory.rate(2), memory.rate(20)][1:]

    def __call__(self, X, y):
        """A batch on the device; in the thread that prefetches."""
        if self.number % self.block == 0:
            seconds = time.perf_counter() - self.began
            if self.number:
                self.streamed.append((self.block - SETTLING) * len(y) / seconds)
            time.sleep(2 * SETTLING * len(y) / self.in_memory[-1])  # steps in the queue
            self.in_memory.append(self.memory.rate(self.block))
        if self.number % self.block == SETTLING:
            self.began = time.perf_counter()
        self.number += 1
        return jax.device_put((X, y))


def main():
    """Write, train and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--num-inducing", type=int, default=128)
    parser.add_argument("--block", type=int, default=30, help="steps in a block")
    parser.add_argument("--file", help="a file that is there, or is kept")
    arguments = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    file = Path(arguments.file or f"{folder.name}/rows.parquet")
    if not file.exists():
        write(file, arguments.rows)
    batch_size, target = arguments.batch_size, "y"
    stream = sgp.streams.parquet(file, inputs=INPUTS, target=target, batch_size=batch_size, seed=0)
    rows, steps = stream.num_rows, stream.num_rows // batch_size
    print(f"{rows} rows, {file.stat().st_size / 2**20:.0f} MiB, {steps} steps of {batch_size}")

    iterator = iter(stream)
    batches = [jax.device_put(next(iterator)) for _ in range(8)]
    iterator.close()
    points = sgp.features.kmeans_points(jax.random.key(1), batches[0][0], arguments.num_inducing)
    guide = sgp.guides.AutoSparseGP(model, inducing_points=points)
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(num_nodes=2))
    state = svi.init(jax.random.key(0), *batches[0], size=rows)
    put = Alternating(InMemory(svi, state, batches, rows), arguments.block)

    # What a first run compiles and imports is the program's own; it reads another stream.
    small = sgp.streams.arrays(*map(np.asarray, batches[0]), batch_size=batch_size, seed=0)
    options = {"size": rows, "progress_bar": False}
    sgp.streams.run(svi, jax.random.key(0), 2, small, **options)
    waits = []
    count_waits(waits)
    base, watch = psutil.Process().memory_info().rss, Watch()
    watch.start()
    checkpoint = f"{folder.name}/checkpoint.npz"
    losses = sgp.streams.run(
        svi, jax.random.key(0), steps, stream, checkpoint=checkpoint, every=500, place=put,
        **options,
    ).losses  # fmt: skip
    watch.going = False
    print(f"loss a row: {losses[0] / rows:.3f}, at the end {losses[-1] / rows:.3f}")
    around = (np.array(put.in_memory[1:-1]) + np.array(put.in_memory[2:])) / 2
    streamed = np.array(put.streamed)
    print("rows a second, medians of blocks:")
    print(f"  in memory {np.median(around):.0f}, streamed {np.median(streamed):.0f}")
    low, middle, high = np.quantile(streamed / around, [0.25, 0.5, 0.75])
    print(f"  streamed / in memory {middle:.3f}, quartiles {low:.3f} and {high:.3f}")
    waits = 1e3 * np.sort(waits[SETTLING:])[: -len(streamed)]  # without those for other blocks
    print(f"a step waited for its batch: mean {waits.mean():.2f} ms, at most {waits[-1]:.0f} ms")
    print(f"resident memory: {base / 2**20:.0f} MiB, and {(watch.most - base) / 2**20:.0f} more")


def count_waits(waits):
    """Note how long the training loop waits for each batch that is prefetched."""
    iterator = grain.experimental.ThreadPrefetchDatasetIterator
    plain = iterator.__next__

    def timed(self):
        start = time.perf_counter()
        batch = plain(self)
        waits.append(time.perf_counter() - start)
        return batch

    iterator.__next__ = timed


if __name__ == "__main__":
    main()
