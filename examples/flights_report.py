"""Scores and figures for the flights example."""

from typing import NamedTuple

import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro.distributions as dist

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LEVELS = (0.5, 0.9)


class Score(NamedTuple):
    """Scores at the test flights."""

    name: str
    rmse: float  # minutes
    crps: float  # minutes
    log_density: float  # mean over flights, of standardized delays
    coverage: tuple[float, ...]  # of the central 50 % and 90 % intervals


def score(name, data, predictive, mean, log_density, rows=None):
    """Score a predictive distribution, or draws of it, of shape (draws, flights)."""
    y = jnp.asarray(data.y_test[:rows], jnp.float32)
    rmse = data.y_scale * jnp.sqrt(jnp.mean(jnp.square(mean - y)))
    crps = data.y_scale * sgp.scores.crps(predictive, y).mean()
    coverage = tuple(float(sgp.scores.coverage(predictive, y, level=level)) for level in LEVELS)
    return Score(name, float(rmse), float(crps), float(log_density.mean()), coverage)


def baselines(data, rows=None):
    """Linear regression and the constant predictor, each with Gaussian noise."""
    scores = []
    y = jnp.asarray(data.y_test[:rows], jnp.float32)
    for name, width in (("linear regression", data.X_train.shape[1]), ("constant", 0)):
        X, Xs = (np.c_[np.ones(len(A)), A[:, :width]] for A in (data.X_train, data.X_test[:rows]))
        weights, *_ = np.linalg.lstsq(X, data.y_train, rcond=None)
        noise = np.std(data.y_train - X @ weights)
        normal = dist.Normal(jnp.asarray(Xs @ weights, jnp.float32), float(noise))
        scores.append(score(name, data, normal, normal.loc, normal.log_prob(y), rows))
    return scores


def print_scores(scores):
    """Print a table."""
    print()
    print(f"{'':18s} {'RMSE':>10s} {'CRPS':>11s} {'log density':>12s} {'in 90 % interval':>17s}")
    for row in scores:
        print(
            f"{row.name:18s} {row.rmse:6.2f} min {row.crps:7.2f} min "
            f"{row.log_density:12.3f} {100 * row.coverage[1]:15.1f} %"
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
