"""Test error against seconds of training, for the figure of README.

    python benchmarks/evidence.py time-against-error

The sparse GP by Adam and GPyTorch's SVGP are those of benchmarks/sparse.py, 512 inducing points for
50 epochs, scored eight times on the way; their seconds have k-means and compilation, not scoring.
The exact GP is that of benchmarks/road.py, with its defaults and with the shorter settings of
the page on evidence: a point each, after hyperparameters and solve.
"""

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import road
import sparse

import numpyro_scalegp as sgp

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "time_against_error.svg"


def record(data, split, seed, method):
    """Seconds, RMSE and NLL of a method, with those on the way as `curve`."""
    if method.startswith("road"):
        found = road.record(data, split, seed, method)
        return found | {"curve": [[found["seconds"], found["rmse"], found["nll"]]]}
    loaded = sgp.datasets.load_uci(data, split=split)
    X = jnp.asarray(loaded.X_train, jnp.float32)
    total = sparse.EPOCHS * -(-len(X) // sparse.BATCH_SIZE)
    start = time.perf_counter()
    points = sgp.features.kmeans_points(jax.random.key(1 + seed), X, sparse.NUM_INDUCING)
    kind = {"sparse": sparse.Ours, "gpytorch": sparse.GPyTorch}[method]
    one = kind(loaded, points, sparse.BATCH_SIZE, total, sparse.LEARNING_RATE)
    seconds, curve = time.perf_counter() - start, []
    for _ in range(8):
        start = time.perf_counter()
        one.run(total // 8)
        seconds += time.perf_counter() - start
        curve.append([seconds, *one.score()])
    return {"seconds": seconds, "rmse": curve[-1][1], "nll": curve[-1][2], "curve": curve}


LABELS = {
    "sparse": ("sparse GP, this package", "o-"),
    "gpytorch": ("sparse GP, GPyTorch", "s--"),
    "road-quick": ("exact GP, shorter settings", "^"),
    "road": ("exact GP, defaults", "D"),
}


def draw(path):
    """The figure, from stored results."""
    from matplotlib import pyplot as plt

    records = json.loads(path.read_text())["records"]
    figure, axes = plt.subplots(figsize=(5.6, 4.0))
    for one in records:
        label, style = LABELS[one["method"]]
        seconds, errors, _ = zip(*one["curve"], strict=True)
        axes.plot(seconds, errors, style, label=label)
    axes.set(xscale="log", xlabel="seconds of training", ylabel="test RMSE, standardized")
    axes.set_ylim(bottom=0)
    ticks = [t for t in (5, 10, 20, 50, 100, 200, 500, 1000) if _within(t, axes.get_xlim())]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=12)
    # README is shown on pages of any color.
    figure.savefig(FIGURE, metadata={"Date": None}, transparent=False, facecolor="white")


def _within(value, limits):
    return limits[0] <= value <= limits[1]
