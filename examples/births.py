"""Births by day: several Hilbert-space GPs under NUTS.

The number of births on each day of two years is modeled as the sum of a slow trend, a yearly cycle,
a weekly pattern whose strength changes, and noise, as in chapter 21 of Gelman et al. (2013),
Bayesian Data Analysis. The data are simulated to resemble the American births; `--csv` reads the
real data (columns year, month, day and births).

The trend and the strength of the weekly pattern have a Hilbert-space basis (a finite sum of sines);
the yearly cycle has the series expansion of a periodic kernel. Each of the three functions is a
`WeightSpaceGP` site, whose weights NUTS samples as independent normals, and has its own posterior.
The cost is linear in the number of days, with about eighty multiplications per day. The trend is
also predicted beyond the data, within the box on which its basis is defined.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The interval in years on which the bases of the slow functions are defined.
BOX = (-2.0, 6.0)


def load(csv, num_years):
    """Times in years, the day of the week, and standardized births."""
    if csv is not None:
        import pandas

        table = pandas.read_csv(csv)
        days = pandas.to_datetime(table[["year", "month", "day"]], errors="coerce")
        table = table.assign(date=days).dropna().sort_values("date")
        births = table["births"].to_numpy(float)[: int(365.25 * num_years)]
        weekday = table["date"].dt.weekday.to_numpy()[: len(births)]
    else:
        generator = np.random.default_rng(0)
        t = np.arange(int(365.25 * num_years)) / 365.25
        weekday = np.arange(len(t)) % 7
        year = 0.6 * np.cos(2 * np.pi * (t - 0.7)) + 0.3 * np.sin(4 * np.pi * t)
        trend = 0.8 * np.sin(0.8 * t) + 0.15 * t
        week = np.array([0.1, 0.4, 0.2, 0.2, 0.3, -0.4, -0.8])[weekday] * (1.0 + 0.15 * t)
        births = trend + year + week + 0.25 * generator.normal(size=len(t))
    t = np.arange(len(births)) / 365.25
    return t[:, None], weekday, (births - births.mean()) / births.std()


def model(t, weekday, births=None):
    slow = np.array([[BOX[0]], [BOX[1]]])

    def function(name, kernel, num_basis, box):
        features = sgp.features.HilbertSpace(kernel, num_basis, box)
        return numpyro.sample(name, sgp.WeightSpaceGP(features, t))

    length = numpyro.sample("trend length", dist.LogNormal(0.5, 0.4))
    size = numpyro.sample("trend size", dist.HalfNormal(1.0))
    trend = function("trend", sgp.kernels.RBF(length, size**2), 25, slow)
    smoothness = numpyro.sample("year smoothness", dist.LogNormal(0.0, 0.5))
    size = numpyro.sample("year size", dist.HalfNormal(1.0))
    kernel = sgp.kernels.Periodic(smoothness, period=1.0, variance=size**2)
    year = function("year", kernel, 12, None)
    length = numpyro.sample("depth length", dist.LogNormal(1.0, 0.4))
    size = numpyro.sample("depth size", dist.HalfNormal(0.5))
    depth = function("depth", sgp.kernels.RBF(length, size**2), 25, slow)
    with numpyro.plate("weekdays", 7):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    mean = trend + year + jnp.exp(depth) * effect[weekday]
    with numpyro.plate("days", len(t)):
        numpyro.sample("births", dist.Normal(mean, noise), obs=births)


def main(num_years=2, csv=None, num_warmup=100, num_samples=100, folder="outputs/births"):
    """Sample, print and draw; returns the standard deviations of the residuals and the noise."""
    t, weekday, births = load(csv, num_years)
    white = {name: sgp.infer.WhitenReparam() for name in ("trend", "year", "depth")}
    mcmc = MCMC(
        NUTS(numpyro.handlers.reparam(model, config=white), init_strategy=init_to_median),
        num_warmup=num_warmup,
        num_samples=num_samples,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), t, weekday, births)
    draws = mcmc.get_samples()
    scalars = {name: value for name, value in draws.items() if value.ndim == 1}
    for name, value in scalars.items():
        print(f"{name:16} {value.mean():.3f} ± {value.std():.3f}")
    steps = mcmc.get_extra_fields()
    print(f"{int(steps['diverging'].sum())} divergences")

    parts = {
        name: sgp.posterior(model, draws, t, weekday, births, site=name)
        for name in ("trend", "year", "depth")
    }
    draw(folder, t, parts, draws["effect"])
    mean = draws["trend"] + draws["year"] + jnp.exp(draws["depth"]) * draws["effect"][:, weekday]
    residual = float(jnp.std(births - mean.mean(axis=0)))
    print(f"deviation of the residuals {residual:.3f}, noise {float(draws['noise'].mean()):.3f}")
    return {"residual": residual, "noise": float(draws["noise"].mean())}


def draw(folder, t, parts, effect):
    """Draw the three functions with bands, and the effects of the days of the week."""
    ahead = np.linspace(0.0, t[-1, 0] + 2.0, 200)[:, None]
    times = {"trend": ahead, "year": np.linspace(0.0, 1.0, 150)[:, None], "depth": ahead}
    titles = {
        "trend": "trend, and two years ahead",
        "year": "course of the year",
        "depth": "depth of the week, log",
    }
    figure, panels = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
    for panel, (name, posterior) in zip(panels.ravel(), parts.items(), strict=False):
        mean, scale = posterior.mean(times[name]), jnp.sqrt(posterior.variance(times[name]))
        panel.plot(times[name], mean)
        panel.fill_between(times[name][:, 0], mean - 2 * scale, mean + 2 * scale, alpha=0.3)
        panel.set(title=titles[name], xlabel="years")
    panels[1, 1].errorbar(range(7), effect.mean(axis=0), 2 * effect.std(axis=0), fmt="o", capsize=3)
    panels[1, 1].set(title="days of the week", xlabel="Monday to Sunday")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "parts.svg")
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-years", type=int, default=2)
    parser.add_argument("--csv", help="a file of births by day")
    main(**vars(parser.parse_args()))
