"""A file larger than memory: training that is killed and resumed, and predictions.

The script writes a Parquet file of eight inputs and a target, sorted by the first input, and trains
a sparse GP on it for one epoch, with mini-batches that are read while steps run. A training process
is killed by SIGKILL; training resumes from its last checkpoint, and the parameters are compared
with the parameters of an uninterrupted run. Then predictions for all rows are written to another
file. Memory use does not depend on `--rows`, so the file may be larger than memory. The example
needs the extra `streams`.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pyarrow as pa
import pyarrow.parquet as pq
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

INPUTS = [f"x{column}" for column in range(8)]


def function(X):
    """A function of three of the eight inputs."""
    return np.sin(3 * X[:, 0]) + X[:, 1] * X[:, 2]


def write(file, rows, chunk=2**18):
    """Write noisy observations, a chunk at a time, sorted by the first input."""
    generator = np.random.default_rng(0)
    schema = pa.schema([(name, pa.float32()) for name in [*INPUTS, "y"]])
    with pq.ParquetWriter(file, schema) as writer:
        for start in range(0, rows, chunk):
            X = generator.uniform(-1, 1, size=(min(chunk, rows - start), 8))
            X[:, 0] = 2 * (start + np.arange(len(X))) / rows - 1
            y = function(X) + 0.1 * generator.normal(size=len(X))
            columns = dict(zip(schema.names, np.c_[X, y].T.astype(np.float32), strict=True))
            writer.write_table(pa.table(columns, schema))


def model(X, y=None, size=None):
    """A GP regression on one batch of a data set of `size` rows."""
    scales = dist.LogNormal(0.0, 1.0).expand([X.shape[1]]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", scales)
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    with sgp.plate("rows", size, X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def train(folder, batch_size, every, checkpoint=None):
    """Train for an epoch, from the checkpoint if any; returns guide, result, stream and a batch."""
    stream = sgp.streams.parquet(
        folder / "rows.parquet", inputs=INPUTS, target="y", batch_size=batch_size, seed=0
    )
    # The first batch has rows from all parts of the file, so that it can give inducing points.
    X, y = next(iter(stream))
    points = sgp.features.kmeans_points(jax.random.key(1), X, 64)
    guide = sgp.guides.AutoSparseGP(model, rest=AutoDelta, inducing_points=points)
    svi = SVI(model, guide, optax.adam(0.03), sgp.infer.QuadratureELBO(num_nodes=2))
    result = sgp.streams.run(
        svi, jax.random.key(0), stream.num_rows // batch_size, stream, size=stream.num_rows,
        checkpoint=checkpoint, every=every, progress_bar=False,
    )  # fmt: skip
    return guide, result, stream, (X, y)


def kill(folder, batch_size, every):
    """Train in another process, and kill it when it has saved its first checkpoint."""
    sizes = f"--batch-size={batch_size}", f"--every={every}"
    command = [sys.executable, __file__, "--train", f"--output={folder}", *sizes]
    with subprocess.Popen(command) as training:
        while training.poll() is None and not (folder / "checkpoint.npz").exists():
            time.sleep(0.02)
        training.kill()  # SIGKILL, which the process cannot catch
    done = len(sgp.load(folder / "checkpoint.npz").losses)
    print(f"killed; the checkpoint has {done} steps")
    return done


def errors(folder, chunk=2**16):
    """The RMSE of the predicted means against the function, computed in chunks."""
    total, rows = 0.0, pq.ParquetFile(folder / "rows.parquet")
    means = pq.ParquetFile(folder / "predictions.parquet").iter_batches(chunk, columns=["mean"])
    for batch, mean in zip(rows.iter_batches(chunk, columns=INPUTS), means, strict=True):
        X = np.stack([batch.column(name).to_numpy() for name in INPUTS], axis=1)
        total += np.sum((mean.column("mean").to_numpy() - function(X)) ** 2)
    return float(np.sqrt(total / rows.metadata.num_rows))


def main(rows=300_000, batch_size=2048, every=20, output="outputs/more_than_memory"):
    """Kill, resume, compare and predict; returns whether the parameters agree, and the error."""
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint.npz").unlink(missing_ok=True)
    write(folder / "rows.parquet", rows)
    kill(folder, batch_size, every)
    guide, resumed, stream, batch = train(folder, batch_size, every, folder / "checkpoint.npz")
    uninterrupted = train(folder, batch_size, every)[1]
    same = all(
        np.array_equal(resumed.params[name], uninterrupted.params[name])
        for name in uninterrupted.params
    )
    print("as without interruption, to the last bit:", same)
    posterior = sgp.posterior(model, guide, resumed, *batch, size=stream.num_rows)
    sgp.streams.predict(posterior, stream, folder / "predictions.parquet")
    error = errors(folder)
    print(f"RMSE of {rows} predicted means to the function: {error:.4f}")
    return same, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--output", default="outputs/more_than_memory")
    parser.add_argument("--train", action="store_true", help="only train, to be killed")
    options = vars(parser.parse_args())
    if options.pop("train"):
        folder = Path(options["output"])
        train(folder, options["batch_size"], options["every"], folder / "checkpoint.npz")
    else:
        main(**options)
