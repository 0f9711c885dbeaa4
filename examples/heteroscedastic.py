"""Noise that grows with income: two GPs in one model, for a mean and a log scale.

In Engel's data (235 Belgian households, included in statsmodels), the spread of food expenditure
grows with income. One GP is the mean, the other the log scale of the noise. Since the model has two
GP sites, two guides are nested: the outer guide handles the site `f`, the inner guide the site `g`
and all other sites.

For comparison, a model with constant noise predicts the same held-out households. Its band is too
wide for low incomes and too narrow for high incomes; the band of the model with two GPs follows the
data.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import statsmodels.api as sm
from numpyro.infer import SVI

import numpyro_scalegp as sgp
from numpyro_scalegp.guides import AutoSparseGP

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def load():
    """Log income and food expenditure in 1,000 francs; every fourth household is for testing."""
    data = sm.datasets.engel.load_pandas().data.sort_values("income").to_numpy() / 1000.0
    X, y = jnp.asarray(np.log(data[:, :1])), jnp.asarray(data[:, 1])
    test = jnp.arange(len(y)) % 4 == 3
    return (X[~test], y[~test]), (X[test], y[test])


def model(X, y=None, *, two_sites):
    slope = numpyro.sample("slope", dist.Normal(0.5, 0.5))
    level = numpyro.sample("level", dist.Normal(0.5, 0.5))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(-1.5, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale, scale**2), X))
    log_noise = numpyro.sample("log_noise", dist.Normal(-2.0, 1.0))
    if two_sites:
        log_noise += numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
    mean = level + slope * X[:, 0] + f
    with numpyro.plate("households", len(X)):
        numpyro.sample("y", dist.Normal(mean, jnp.exp(log_noise)), obs=y)


def main(num_inducing=20, num_steps=2000, num_draws=500, folder="outputs/heteroscedastic"):
    """Run it all; returns the mean log predictive density of the test data for both models."""
    train, test = load()
    points = sgp.features.kmeans_points(jax.random.key(0), train[0], num_inducing)
    inner = functools.partial(AutoSparseGP, site="g", inducing_points=points)
    Xs = jnp.linspace(train[0].min(), train[0].max(), 200)[:, None]

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    scores = {}
    for name, panel in zip(["one noise level", "two GP sites"], axes, strict=True):
        this = functools.partial(model, two_sites=name == "two GP sites")
        if name == "two GP sites":
            guide = AutoSparseGP(this, "f", rest=inner, inducing_points=points)
        else:
            guide = AutoSparseGP(this, inducing_points=points)
        svi = SVI(this, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(num_nodes=10))
        result = svi.run(jax.random.key(1), num_steps, *train, progress_bar=False)
        predictive = sgp.infer.Predictive(
            this, guide=guide, params=result.params, num_samples=num_draws
        )
        log_density = predictive.draws(jax.random.key(2), *test).log_predictive_density()["y"]
        scores[name] = float(log_density.mean())
        print(f"{name:16} mean log density of {len(test[1])} test rows: {scores[name]:.3f}")

        replicates = predictive(jax.random.key(3), Xs)["y"]
        low, middle, high = np.quantile(replicates, [0.05, 0.5, 0.95], axis=0)
        panel.plot(np.exp(train[0][:, 0]), train[1], ".", color="0.5", label="training")
        panel.plot(np.exp(test[0][:, 0]), test[1], "x", color="black", label="test")
        panel.plot(np.exp(Xs[:, 0]), middle, color="C0")
        panel.fill_between(np.exp(Xs[:, 0]), low, high, color="C0", alpha=0.3, label="90 % band")
        panel.set(title=name, xlabel="income")
    axes[0].set_ylabel("food expenditure")
    axes[0].legend()
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "bands.svg", bbox_inches="tight")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-inducing", type=int, default=20)
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--num-draws", type=int, default=500)
    main(**vars(parser.parse_args()))
