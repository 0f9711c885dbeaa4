"""Scores and figures for the flights example."""

from typing import NamedTuple

import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LEVELS = np.array([0.5, 0.9])


class Score(NamedTuple):
    """Errors at the test rows; RMSE in minutes, log density a row in standardized units."""

    name: str
    rmse: float
    log_density: float
    coverage: np.ndarray  # of the central 50 % and 90 % intervals


def score(name, data, replicates, log_density, rows=None):
    """Score draws of the predictive distribution, shape (draws, rows)."""
    y = data.y_test[:rows]
    low, high = (np.quantile(replicates, 0.5 + side * LEVELS / 2, axis=0) for side in (-1, 1))
    coverage = np.mean((low <= y) & (y <= high), axis=1)
    rmse = data.y_scale * np.sqrt(np.mean((replicates.mean(axis=0) - y) ** 2))
    return Score(name, float(rmse), float(log_density.mean()), coverage)


def baselines(data, rows=None):
    """Linear regression and the constant predictor, each with Gaussian noise."""
    scores = []
    for name, width in (("linear regression", data.X_train.shape[1]), ("constant", 0)):
        X, Xs = (np.c_[np.ones(len(A)), A[:, :width]] for A in (data.X_train, data.X_test[:rows]))
        weights, *_ = np.linalg.lstsq(X, data.y_train, rcond=None)
        sd = np.std(data.y_train - X @ weights)
        error = (data.y_test[:rows] - Xs @ weights) / sd
        half_widths = np.array([0.67449, 1.64485])  # central 50 % and 90 % of a normal
        scores.append(
            Score(
                name,
                float(data.y_scale * sd * np.sqrt(np.mean(error**2))),
                float(np.mean(-0.5 * error**2 - np.log(sd * np.sqrt(2 * np.pi)))),
                np.mean(np.abs(error) <= half_widths[:, None], axis=1),
            )
        )
    return scores


def print_scores(scores):
    """Print a table."""
    print(f"{'':18s} {'RMSE [min]':>10s} {'log density':>12s} {'in 50 %':>8s} {'in 90 %':>8s}")
    for s in scores:
        print(
            f"{s.name:18s} {s.rmse:10.2f} {s.log_density:12.3f} "
            f"{100 * s.coverage[0]:7.1f}% {100 * s.coverage[1]:7.1f}%"
        )


HOURS = np.linspace(5.0, 23.0, 37)


def hour_grid(data, num_flights=200):
    """Test flights, each at every hour of HOURS: shape (37 * num_flights, d)."""
    column = data.columns.index("scheduled_departure")
    grid = np.repeat(data.X_test[None, :num_flights], len(HOURS), axis=0)
    grid[:, :, column] = ((HOURS - data.X_mean[column]) / data.X_scale[column])[:, None]
    return jnp.asarray(grid.reshape(-1, grid.shape[-1]))


def draw_figures(folder, data, losses, lengthscales, replicates, hours, rows=None):
    """Write loss.svg, lengthscales.svg, calibration.svg and hour.svg."""
    blue, light = "C0", "C5"

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    losses = np.asarray(losses) / len(data.y_train[:rows])
    window = max(1, len(losses) // 100)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    axes.plot(losses, color=light, lw=0.4, rasterized=True)
    axes.plot(np.arange(len(smooth)) + window / 2, smooth, color=blue)
    low, high = np.quantile(losses[len(losses) // 20 :], [0.001, 0.999])
    axes.set(xlabel="step", ylabel="negative ELBO a row", ylim=(low, high))
    figure.savefig(folder / "loss.svg")

    figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
    low, middle, high = np.quantile(lengthscales, [0.05, 0.5, 0.95], axis=0)
    order = np.argsort(-middle)
    axes.hlines(range(len(order)), low[order], high[order], color=blue, lw=5, alpha=0.4)
    axes.plot(middle[order], range(len(order)), "o", color=blue)
    axes.set_yticks(range(len(order)), [data.columns[i].replace("_", " ") for i in order])
    axes.set(xscale="log", xlabel="lengthscale in standard deviations (short: matters), 90 %")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(folder / "lengthscales.svg")

    figure, axes = plt.subplots(figsize=(4.2, 4), layout="constrained")
    rank = np.mean(replicates < data.y_test[None, :rows], axis=0)
    levels = np.linspace(0, 1, 101)
    axes.plot([0, 1], [0, 1], color="0.7", lw=1)
    axes.plot(levels, [np.mean(rank <= level) for level in levels], color=blue)
    axes.set(xlabel="predicted probability", ylabel="share of test flights below", aspect=1)
    figure.savefig(folder / "calibration.svg")

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    minutes = data.unstandardize_y(hours.reshape(len(hours), len(HOURS), -1))
    pooled = minutes.transpose(1, 0, 2).reshape(len(HOURS), -1)
    bands = np.quantile(pooled, [0.05, 0.25, 0.5, 0.75, 0.95], axis=1)
    axes.fill_between(HOURS, bands[0], bands[4], color=light, alpha=0.5, label="90 % of flights")
    axes.fill_between(HOURS, bands[1], bands[3], color=light, label="50 % of flights")
    axes.plot(HOURS, bands[2], color=blue, label="median")
    axes.plot(HOURS, pooled.mean(axis=1), color=blue, ls="--", label="mean")
    axes.axhline(0, color="0.6", lw=0.8)
    axes.set(xlabel="scheduled hour of departure", ylabel="arrival delay [min]")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(folder / "hour.svg")
    plt.close("all")
