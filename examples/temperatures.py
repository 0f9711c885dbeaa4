"""A map with clouds: land surface temperatures where a satellite saw only clouds.

A Gaussian process with a rough Matern-1/2 kernel models the temperatures on a grid that is partly
hidden by clouds. Vecchia's approximation conditions each cell on the thirty nearest cells that
precede it in an ordering, so that the hyperparameters can be trained on mini-batches of cells, and
predictions use nearby cells.

The map is simulated, with 22,500 cells. If the environment variable `SCALEGP_DATA` names a folder
that contains them, the data are instead from the competition of Heaton et al. (2019), with 105,569
cells for training and 42,740 for testing, and the script prints the competition's scores, in
degrees.
"""

import argparse
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO, init_to_median, init_to_value
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def load(side):
    """Visible cells and their temperatures, hidden ones and theirs, and mean and scale."""
    if "SCALEGP_DATA" in os.environ:
        data = sgp.datasets.load_uci("satellite", 0)
        visible, hidden = (data.X_train, data.y_train), (data.X_test, data.y_test)
        return *visible, *hidden, float(data.y_mean), float(data.y_scale)
    axis = np.linspace(-1.7, 1.7, side)
    X = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    kernel = sgp.kernels.Matern12(0.5)
    functions = sgp.GaussianProcess(kernel, X[:1], 1.0).condition(jnp.zeros(1))
    f = functions.sample_functions(jax.random.key(0), 2, num_features=4000)(X)
    y = np.asarray(f[0]) + 0.1 * np.random.default_rng(0).normal(size=len(X))
    hidden = np.asarray(f[1]) > 0.6  # clouds are where a second function is large
    return X[~hidden], y[~hidden], X[hidden], y[hidden], 0.0, 1.0


def model(X, y=None, *, estimator, batch_size=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    if batch_size is not None:
        with sgp.plate("cells", len(X), batch_size) as index:
            estimator = estimator.on(index)
    kernel = sgp.kernels.Matern12(lengthscale, variance)
    gp = sgp.GaussianProcess(kernel, X, noise**2, mean=level, estimator=estimator)
    numpyro.sample("y", gp, obs=y)


def fit(X, y, steps, batch_size):
    """The posterior, from two runs: the second finds neighbors by the fitted lengthscales."""
    estimator, start = sgp.estimators.Vecchia(num_neighbors=30), init_to_median()
    kernel = None
    for number in (steps // 4, steps):
        estimator = estimator.find_neighbors(X, kernel)
        guide = AutoDelta(model, init_loc_fn=start)
        optimizer = optax.adam(optax.cosine_decay_schedule(0.03, number))
        svi = SVI(model, guide, optimizer, Trace_ELBO())
        options = {"estimator": estimator, "batch_size": batch_size}
        result = svi.run(jax.random.key(0), number, X, y, progress_bar=False, **options)
        median = guide.median(result.params)
        kernel, start = sgp.kernels.Matern12(median["lengthscale"]), init_to_value(values=median)
    print({name: np.round(np.asarray(value), 3).tolist() for name, value in median.items()})
    return sgp.posterior(model, guide, result, X, y, estimator=estimator)


def score(predictive, y, scale):
    """Mean absolute error, RMSE, CRPS, and score and coverage of 95 % intervals."""
    y = jnp.asarray(y, jnp.float32)
    error = jnp.abs(y - predictive.mean)
    interval = sgp.scores.interval_score(predictive, y, level=0.95)
    return {
        "MAE": scale * float(error.mean()),
        "RMSE": scale * float(jnp.sqrt(jnp.square(error).mean())),
        "CRPS": scale * float(sgp.scores.crps(predictive, y).mean()),
        "interval score": scale * float(interval.mean()),
        "coverage": float(sgp.scores.coverage(predictive, y, level=0.95)),
    }


def main(steps=400, batch_size=128, side=150, folder="outputs/temperatures"):
    """Fit, predict, score and draw; returns the scores."""
    X, y, X_hidden, y_hidden, middle, scale = load(side)
    X, X_hidden = jnp.asarray(X, jnp.float32), jnp.asarray(X_hidden, jnp.float32)
    print(f"{len(X)} cells that were seen, {len(X_hidden)} behind clouds")
    start = time.perf_counter()
    posterior = fit(X, jnp.asarray(y, jnp.float32), steps, batch_size)
    predictive = posterior.predictive(X_hidden)
    scores = score(predictive, y_hidden, scale)
    scores["deviation"] = scale * float(np.std(y_hidden))
    print(f"{time.perf_counter() - start:.0f} s to fit and predict; behind clouds")
    print(", ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    visible, hidden = middle + scale * y, middle + scale * np.asarray(predictive.mean)
    deviation = scale * np.sqrt(np.asarray(predictive.variance))
    draw(folder, X, X_hidden, visible, hidden, deviation)
    return scores


def draw(folder, X, X_hidden, visible, hidden, deviation):
    """Draw visible temperatures, predictions behind clouds, and their uncertainty."""
    cells = np.concatenate([X, X_hidden])
    (columns, column), (rows, row) = (np.unique(x, return_inverse=True) for x in cells.T)

    def on_grid(of_visible, of_hidden):
        grid = np.full((len(rows), len(columns)), np.nan)
        grid[row, column] = np.concatenate([of_visible, of_hidden])
        return grid

    figure, panels = plt.subplots(1, 3, figsize=(10, 3.0), layout="constrained")
    limits = {"vmin": np.min(visible), "vmax": np.max(visible)}
    no_visible, no_hidden = np.full(len(X), np.nan), np.full(len(X_hidden), np.nan)
    panels[0].imshow(on_grid(visible, no_hidden), origin="lower", **limits)
    completed = panels[1].imshow(on_grid(visible, hidden), origin="lower", **limits)
    spread = panels[2].imshow(on_grid(no_visible, deviation), origin="lower", cmap="magma")
    figure.colorbar(completed, ax=list(panels[:2]), label="temperature", shrink=0.85)
    figure.colorbar(spread, ax=panels[2], label="standard deviation", shrink=0.85)
    for panel, title in zip(panels, ("seen", "with predictions", "uncertainty"), strict=True):
        panel.set(title=title, xticks=[], yticks=[])
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "map.svg", dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--side", type=int, default=150, help="cells of a side of a simulated map")
    main(**vars(parser.parse_args()))
