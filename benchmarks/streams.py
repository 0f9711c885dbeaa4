"""Training from a file that is larger than memory: rows a second and memory beside the same steps.

    python benchmarks/streams.py --rows 20000000

Writes a Parquet file of 8 inputs and a target, float32, in order of its first input, and trains a
sparse GP on it for one epoch. Prints the largest resident memory above that before the stream
began (after compilation), rows a second, those of the same compiled steps on a batch in memory, and
how long steps waited for a batch. Steps in memory run before and after, so that a noisy machine
shows.
"""

import argparse
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


def in_memory(svi, state, batches, steps, size):
    """Rows a second of compiled steps on batches that are on the device."""
    step = jax.jit(lambda state, X, y: svi.update(state, X, y, size=size), donate_argnums=0)
    state = jax.tree.map(jnp.copy, state)
    state, loss = step(state, *batches[0])
    jax.block_until_ready(loss)
    start = time.perf_counter()
    for number in range(steps):
        state, loss = step(state, *batches[number % len(batches)])
        if number % 3 == 0:
            jax.block_until_ready(loss)
    jax.block_until_ready(loss)
    return steps * len(batches[0][1]) / (time.perf_counter() - start)


def main():
    """Write, train and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--num-inducing", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100, help="steps on data in memory")
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
    before = in_memory(svi, state, batches, arguments.steps, rows)

    # What a first run compiles and imports is the program's own; it reads another stream.
    small = sgp.streams.arrays(*map(np.asarray, batches[0]), batch_size=batch_size, seed=0)
    options = {"size": rows, "progress_bar": False}
    sgp.streams.run(svi, jax.random.key(0), 2, small, **options)
    started, waits = [], []

    def put(*arrays):
        started.append(time.perf_counter())
        return jax.device_put(arrays)

    count_waits(waits)
    base, watch = psutil.Process().memory_info().rss, Watch()
    watch.start()
    checkpoint = f"{folder.name}/checkpoint.npz"
    result = sgp.streams.run(
        svi, jax.random.key(0), steps, stream, checkpoint=checkpoint, every=500, place=put,
        **options,
    )  # fmt: skip
    watch.going = False
    first = min(10, steps // 2)  # after compilation
    streamed = (steps - first) * batch_size / (started[-1] - started[-1 - steps + first])
    after = in_memory(svi, state, batches, arguments.steps, rows)
    print(f"loss a row: {result.losses[0] / rows:.3f}, at the end {result.losses[-1] / rows:.3f}")
    print(f"rows a second: in memory {before:.0f}, streamed {streamed:.0f}, in memory {after:.0f}")
    print(f"streamed / in memory: {2 * streamed / (before + after):.3f}")
    print(f"a step waited for its batch: mean {1e3 * np.mean(waits[first:]):.2f} ms")
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
