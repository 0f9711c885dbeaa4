"""Test error against seconds of training, for the figure of README.

    python benchmarks/evidence.py time-against-error kernels

The sparse GP with Adam and GPyTorch's SVGP are from benchmarks/sparse.py, with 512 inducing points
and 50 epochs, scored eight times during training; seconds include k-means and compilation but not
scoring. The exact GP is from benchmarks/road.py, with its defaults and with shorter settings: one
point in the figure each, after hyperparameters and solve. The run `kernels` has the sparse GPs and
the exact GP, with its defaults, each with an RBF and with a Matern-3/2 kernel.
"""

import functools
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
    """Seconds, RMSE and NLL of a method; `curve` has their values during training."""
    if method.startswith("road"):
        scores = road.record(data, split, seed, method)
        return scores | {"curve": [[scores[name] for name in ("seconds", "rmse", "nll")]]}
    loaded = sgp.datasets.load_uci(data, split=split)
    X = jnp.asarray(loaded.X_train, jnp.float32)
    total = sparse.EPOCHS * -(-len(X) // sparse.BATCH_SIZE)
    start = time.perf_counter()
    points = sgp.features.kmeans_points(jax.random.key(1 + seed), X, sparse.NUM_INDUCING)
    kind = {"sparse": sparse.Ours, "gpytorch": sparse.GPyTorch}[method]
    fit = kind(loaded, points, sparse.BATCH_SIZE, total, sparse.LEARNING_RATE)
    seconds, curve = time.perf_counter() - start, []
    for _ in range(8):
        start = time.perf_counter()
        fit.run(total // 8)
        seconds += time.perf_counter() - start
        curve.append([seconds, *fit.score()])
    return {"seconds": seconds, "rmse": curve[-1][1], "nll": curve[-1][2], "curve": curve}


def record_kernels(data, split, seed, method):
    """Seconds, RMSE and NLL of a method such as "exact GP, RBF": inference and kernel."""
    inference, name = method.split(", ")
    kernel = {"RBF": sgp.kernels.RBF, "Matern-3/2": sgp.kernels.Matern32}[name]
    if inference == "exact GP":
        model = functools.partial(road.model, kernel=kernel)
        return road.fit(data, split, seed, None, quick=False, model=model)
    loaded = sgp.datasets.load_uci(data, split=split)
    X = jnp.asarray(loaded.X_train, jnp.float32)
    total = sparse.EPOCHS * -(-len(X) // sparse.BATCH_SIZE)
    start = time.perf_counter()
    points = sgp.features.kmeans_points(jax.random.key(1 + seed), X, sparse.NUM_INDUCING)
    arguments = loaded, points, sparse.BATCH_SIZE, total, sparse.LEARNING_RATE
    if inference == "GPyTorch":
        kind = sparse.GPyTorch if name == "RBF" else GPyTorchMatern
        fit = kind(*arguments)
    else:
        fit = sparse.Ours(*arguments, functools.partial(sparse.model, kernel=kernel))
    fit.run(total - 1)
    return {"seconds": time.perf_counter() - start, **fit.score()._asdict()}


class GPyTorchMatern(sparse.GPyTorch):
    """GPyTorch's sparse GP with a Matern-3/2 kernel."""

    is_matern = True


LABELS = {
    "sparse": ("sparse GP, this package", "o-"),
    "gpytorch": ("sparse GP, GPyTorch", "s--"),
    "road-quick": ("exact GP, shorter settings", "^"),
    "road": ("exact GP, defaults", "D"),
}


def draw(path):
    """Draw the figure from stored results."""
    from matplotlib import pyplot as plt

    records = json.loads(path.read_text())["records"]
    figure, axes = plt.subplots(figsize=(5.6, 4.0))
    for record in records:
        label, style = LABELS[record["method"]]
        seconds, errors, _ = zip(*record["curve"], strict=True)
        axes.plot(seconds, errors, style, label=label)
    axes.set(xscale="log", xlabel="seconds of training", ylabel="test RMSE, standardized")
    axes.set_ylim(bottom=0)
    ticks = [t for t in (5, 10, 20, 50, 100, 200, 500, 1000) if _within(t, axes.get_xlim())]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=12)
    # README is shown on dark and light pages.
    figure.savefig(FIGURE, metadata={"Date": None}, transparent=False, facecolor="white")


def _within(value, limits):
    return limits[0] <= value <= limits[1]
