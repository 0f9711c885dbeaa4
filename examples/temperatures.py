"""A map with clouds: land surface temperatures where a satellite saw none.

A Gaussian process with a rough Matern-1/2 kernel on a grid of which clouds hide a part. Its density
is that of each cell given its thirty nearest ones before it (Vecchia's approximation), so that
hyperparameters come from mini-batches of cells, and predictions from the cells around.

Without data the map is made up, with 20,000 cells. Where the environment variable `SCALEGP_DATA`
names a folder that has it, the map is that of the competition of Heaton et al. (2019), with 105,569
cells to learn from and 42,740 to predict, and scores are theirs, in degrees.
"""

import argparse
import math
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
    """Cells that were seen and their temperatures, those of cells that were not, and the scale."""
    if "SCALEGP_DATA" in os.environ:
        data = sgp.datasets.load_uci("satellite", 0)
        seen, hidden = (data.X_train, data.y_train), (data.X_test, data.y_test)
        return *seen, *hidden, float(data.y_mean), float(data.y_scale)
    axis = np.linspace(-1.7, 1.7, side)
    X = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    kernel = sgp.kernels.Matern12(0.5)
    functions = sgp.GaussianProcess(kernel, X[:1], 1.0).condition(jnp.zeros(1))
    f = functions.sample_functions(jax.random.key(0), 2, num_features=4000)(X)
    y = np.asarray(f[0]) + 0.1 * np.random.default_rng(0).normal(size=len(X))
    hidden = np.asarray(f[1]) > 0.6  # another function's heights are the clouds
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
    """The posterior, from two runs: the second with neighbors in the first one's lengthscales."""
    estimator, start = sgp.estimators.Vecchia(num_neighbors=30), init_to_median()
    kernel = None
    for number in (steps // 4, steps):
        estimator = estimator.find_neighbors(X, kernel)
        guide = AutoDelta(model, init_loc_fn=start)
        optimizer = optax.adam(optax.cosine_decay_schedule(0.03, number))
        svi = SVI(model, guide, optimizer, Trace_ELBO())
        given = {"estimator": estimator, "batch_size": batch_size}
        result = svi.run(jax.random.key(0), number, X, y, progress_bar=False, **given)
        median = guide.median(result.params)
        kernel, start = sgp.kernels.Matern12(median["lengthscale"]), init_to_value(values=median)
    print({name: np.round(np.asarray(value), 3).tolist() for name, value in median.items()})
    return sgp.posterior(model, guide, result, X, y, estimator=estimator)


def score(predictive, y, scale):
    """Mean absolute error, RMSE, CRPS, interval score and coverage of 95 %."""
    mean, deviation = np.asarray(predictive.mean), np.sqrt(np.asarray(predictive.variance))
    error = y - mean
    normal = dist.Normal(0.0, 1.0)
    z = error / deviation
    density, cdf = np.exp(np.asarray(normal.log_prob(z))), np.asarray(normal.cdf(z))
    crps = deviation * (z * (2.0 * cdf - 1.0) + 2.0 * density - 1.0 / math.sqrt(math.pi))
    beyond = np.maximum(np.abs(error) - 1.96 * deviation, 0.0)
    return {
        "MAE": scale * float(np.abs(error).mean()),
        "RMSE": scale * float(np.sqrt(np.square(error).mean())),
        "CRPS": scale * float(crps.mean()),
        "interval score": scale * float((3.92 * deviation + 40.0 * beyond).mean()),
        "coverage": float((beyond == 0.0).mean()),
    }


def main(steps=400, batch_size=128, side=150, folder="outputs/temperatures"):
    """Fit, predict, score, draw; returns the scores."""
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
    seen, hidden = middle + scale * y, middle + scale * np.asarray(predictive.mean)
    deviation = scale * np.sqrt(np.asarray(predictive.variance))
    draw(folder, X, X_hidden, seen, hidden, deviation)
    return scores


def draw(folder, X, X_hidden, seen, hidden, deviation):
    """What was seen, what is predicted behind clouds, and how well that is known."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), sharex=True, sharey=True)
    figure.set_layout_engine("constrained")
    options = {"s": 1.5, "marker": "s", "linewidths": 0.0, "rasterized": True}
    limits = {"vmin": np.min(seen), "vmax": np.max(seen)}
    both = np.concatenate([X, X_hidden]), np.concatenate([seen, hidden])
    panels[0].scatter(*np.asarray(X).T, c=seen, **limits, **options)
    points = panels[1].scatter(*both[0].T, c=both[1], **limits, **options)
    spread = panels[2].scatter(*np.asarray(X_hidden).T, c=deviation, cmap="magma", **options)
    figure.colorbar(points, ax=list(panels[:2]), label="temperature")
    figure.colorbar(spread, ax=panels[2], label="standard deviation")
    for panel, title in zip(panels, ("seen", "with predictions", "uncertainty"), strict=True):
        panel.set(title=title, xticks=[], yticks=[])
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "map.svg", dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--side", type=int, default=150, help="cells of a side of a made-up map")
    main(**vars(parser.parse_args()))
