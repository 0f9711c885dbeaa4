"""CO2 over Mauna Loa: a ten-year forecast with a composed kernel, sampled by NUTS.

The kernel is a sum of three components: a smooth trend, a yearly cycle that slowly changes its
shape, and deviations that last for months. Their hyperparameters and the noise have priors. NUTS
needs many gradients, each of which costs O(n^3), so the training data are the monthly means of 15
years (n = 180). The following ten years are held out.

The band of the forecast widens with time and contains most of the held-out months. A straight line
plus a sine wave forecasts the mean about as well; the advantage of the GP is its uncertainty. The
second figure decomposes the series into the three components, each with its band. The bands of the
trend and the cycle are wide because the data do not determine how a constant is divided between the
two.
"""

import argparse
from pathlib import Path

import arviz
import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def process(values, X):
    """The GP of observations at X given the hyperparameters; inputs are in years."""
    trend = sgp.kernels.RBF(values["trend_years"], values["trend_scale"] ** 2)
    yearly = sgp.kernels.Periodic(values["season_shape"], period=1.0)
    changing = sgp.kernels.RBF(values["season_years"], values["season_scale"] ** 2)
    short = sgp.kernels.Matern32(values["short_years"], values["short_scale"] ** 2)
    kernel = trend + yearly * changing + short
    return sgp.GaussianProcess(kernel, X, values["noise_scale"] ** 2, mean=values["level"])


PARTS = {
    "trend": lambda kernel: kernel.left.left,
    "yearly cycle": lambda kernel: kernel.left.right,
    "months": lambda kernel: kernel.right,
}


def model(X, y=None):
    priors = {
        "level": dist.Normal(0.0, 2.0),
        "trend_years": dist.LogNormal(np.log(40.0), 0.5),
        "trend_scale": dist.LogNormal(np.log(2.0), 0.5),
        "season_shape": dist.LogNormal(0.0, 0.5),
        "season_years": dist.LogNormal(np.log(50.0), 0.5),
        "season_scale": dist.LogNormal(np.log(0.3), 0.5),
        "short_years": dist.LogNormal(np.log(0.5), 0.7),
        "short_scale": dist.LogNormal(np.log(0.05), 0.7),
        "noise_scale": dist.LogNormal(np.log(0.02), 0.7),
    }
    values = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
    numpyro.sample("y", process(values, X), obs=y)


def main(years=15, num_warmup=300, num_samples=300, num_chains=2, folder="outputs/co2"):
    """Run it all; returns errors on the held-out years in ppm and the band's coverage."""
    data = sgp.datasets.load_co2(test_years=10)
    X, y = data.X_train[-12 * years :], data.y_train[-12 * years :]
    mcmc = MCMC(
        NUTS(model, init_strategy=init_to_median),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, y)
    result = sgp.to_arviz(mcmc, key=jax.random.key(1), constant_data={"X": X})
    print(arviz.summary(result).to_string())

    Xs = jax.numpy.asarray(data.X_test)
    posterior = sgp.posterior(model, mcmc.get_samples(), X, y)  # over all draws
    draws = posterior.predictive(Xs).sample(jax.random.key(2), (2000,))
    ppm, truth = data.unstandardize_y(np.asarray(draws)), data.unstandardize_y(data.y_test)
    low, mean, high = np.quantile(ppm, 0.025, 0), ppm.mean(0), np.quantile(ppm, 0.975, 0)
    # For comparison, a straight line and a sine wave fitted by least squares.
    line, line_test = (
        np.stack([np.ones(len(x)), x, np.sin(2 * np.pi * x), np.cos(2 * np.pi * x)], axis=1)
        for x in (X[:, 0], data.X_test[:, 0])
    )
    linear = data.unstandardize_y(line_test @ np.linalg.lstsq(line, y, rcond=None)[0])
    scores = {
        "rmse": float(np.sqrt(np.mean((mean - truth) ** 2))),
        "rmse_linear": float(np.sqrt(np.mean((linear - truth) ** 2))),
        "coverage": float(np.mean((low < truth) & (truth < high))),
    }
    print(
        f"RMSE over {len(truth)} held-out months: {scores['rmse']:.2f} ppm "
        f"(line and sine wave: {scores['rmse_linear']:.2f} ppm); "
        f"{scores['coverage']:.0%} of them lie in the 95 % band."
    )

    year, year_test = data.unstandardize_X(X)[:, 0], data.unstandardize_X(data.X_test)[:, 0]
    figure, axes = plt.subplots(figsize=(9, 4))
    axes.plot(year, data.unstandardize_y(y), color="black", linewidth=1, label="training")
    axes.fill_between(year_test, low, high, color="C0", alpha=0.3, label="95 % band")
    axes.plot(year_test, mean, color="C0", label="forecast")
    axes.plot(year_test, truth, ".", color="C1", markersize=3, label="held out")
    axes.set(xlabel="year", ylabel="CO2 in ppm")
    axes.legend(loc="upper left")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "forecast.svg", bbox_inches="tight")

    months = np.linspace(X[0], X[-1], 24 * years)
    figure, axes = plt.subplots(3, 1, figsize=(9, 7), sharex=True, layout="constrained")
    for (name, select), panel in zip(PARTS.items(), axes, strict=True):
        component = posterior.component(select)
        middle, band = component.mean(months), 2.0 * np.sqrt(component.variance(months))
        # Relative to the mean of the data: a component contains neither level nor noise.
        shown = [
            data.y_scale * np.asarray(curve) for curve in (middle, middle - band, middle + band)
        ]
        panel.plot(data.unstandardize_X(months), shown[0], color="C2")
        panel.fill_between(data.unstandardize_X(months)[:, 0], *shown[1:], color="C2", alpha=0.3)
        panel.set_ylabel(f"{name}, ppm")
    axes[-1].set_xlabel("year")
    figure.savefig(Path(folder) / "parts.svg")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--years", type=int, default=15, help="years of training data")
    parser.add_argument("--num-warmup", type=int, default=300)
    parser.add_argument("--num-samples", type=int, default=300)
    # The covariance of so smooth a kernel needs float64; set it before creating any array.
    numpyro.enable_x64()
    main(**vars(parser.parse_args()))
