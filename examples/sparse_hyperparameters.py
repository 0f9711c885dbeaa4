"""Hyperparameters of a sparse GP: their posterior from mini-batches, beside NUTS.

The inducing values of a sparse guide usually do not depend on the hyperparameters. They fit at one
value of these only, so draws of the hyperparameters vary too little. Three fits of the same model
are compared with NUTS, which uses the exact density: the usual guide; the guide with
`natural=True`, whose distribution of the function follows the hyperparameters; and
`refine_hyperparameters` after the usual guide. The data are made up: measurements with normal
noise, and counts, whose level is the mean function of the Gaussian process, so that the function
follows it, too.

The printed tables compare the means and standard deviations of the logarithms with those from NUTS
(of the level, the value itself). Each figure shows the draws for all pairs of hyperparameters.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, init_to_value
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_scalegp as sgp

matplotlib.use("Agg")
COLORS = {"NUTS": "black", "natural=True": "tab:blue", "usual guide": "tab:red"}


def kernel(num_columns):
    lengthscales = dist.LogNormal(0.0, 1.0)
    if num_columns > 1:
        lengthscales = dist.LogNormal(1.0, 1.0).expand([num_columns]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", lengthscales)
    return sgp.kernels.Matern52(lengthscale, numpyro.sample("variance", dist.LogNormal(0.0, 1.0)))


def measurements(X, y, batch_size=None):
    covariance = kernel(X.shape[1])
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(covariance, X))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def integrated(X, y):
    covariance = kernel(X.shape[1])
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    numpyro.sample("y", sgp.GaussianProcess(covariance, X, noise**2), obs=y)


def counts(X, y, batch_size=None):
    covariance = kernel(X.shape[1])
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(covariance, X, mean=level))
    with rows:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


MODELS = {"measurements": measurements, "counts": counts}
NUM_ROWS = {"measurements": 500, "counts": 200}  # NUTS samples the function of counts, too


def made_up(kind, num_rows, seed=0):
    """A function from a Matern-5/2 prior, observed with normal noise or as rates of counts."""
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(0.0, num_rows / 25.0, num_rows))[:, None]
    distances = np.sqrt(5.0) * np.abs(X - X.T) / 1.5
    K = (1.0 + distances + distances**2 / 3.0) * np.exp(-distances)
    f = np.linalg.cholesky(K + 1e-8 * np.eye(num_rows)) @ rng.normal(size=num_rows)
    y = f + 0.3 * rng.normal(size=num_rows)
    if kind == "counts":
        y = rng.poisson(np.exp(1.0 + f))
    return X.astype(np.float32), y.astype(np.float32)


def fit(key, model, X, y, num_steps, batch_size, **options):
    """SVI with step sizes that decrease to zero; returns the guide and the result."""
    guide = sgp.guides.AutoSparseGP(model, rest=AutoMultivariateNormal, **options)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, num_steps))
    if guide.natural:
        step_size = optax.cosine_decay_schedule(0.1, num_steps)
        optimizer = sgp.infer.natural_gradients(optimizer, step_size)
    svi = SVI(model, guide, optimizer, sgp.infer.QuadratureELBO())
    return guide, svi.run(key, num_steps, X, y, batch_size, progress_bar=False)


def nuts(key, kind, X, y, guide, params, num_draws):
    """NUTS: on the density without the function for measurements, else with the function.

    The covariance of the guide is the inverse mass matrix of the hyperparameters.
    """
    with jax.enable_x64(True):
        X, y, params = jax.tree.map(lambda array: jnp.asarray(array, float), (X, y, params))
        start, normal = guide.median(params), guide.rest.get_posterior(params)
        model = integrated
        if kind == "counts":
            model = numpyro.handlers.reparam(counts, config={"f": sgp.infer.WhitenReparam()})
        names = tuple(sorted(start))
        kernel = NUTS(
            model,
            init_strategy=init_to_value(values=start),
            dense_mass=[names],
            inverse_mass_matrix={names: normal.covariance_matrix},
            adapt_mass_matrix=False,
        )
        mcmc = MCMC(kernel, num_warmup=num_draws // 3, num_samples=num_draws, progress_bar=False)
        mcmc.run(key, X, y)
        return {name: np.asarray(mcmc.get_samples()[name]) for name in names}


def posteriors(kind, X, y, num_steps=2000, batch_size=100, num_draws=500, **options):
    """Draws of the hyperparameters by method, from fits in mini-batches."""
    model, keys = MODELS[kind], jax.random.split(jax.random.key(0), 4)
    args = X, y, num_steps, batch_size
    guide, result = fit(keys[0], model, *args, **options)
    usual = guide.rest.sample_posterior(keys[1], result.params, sample_shape=(4000,))
    refined = sgp.infer.refine_hyperparameters(
        keys[2], model, guide, result, X, y, num_samples=num_draws, progress_bar=False
    )
    guide, result = fit(keys[0], model, *args, natural=True, **options)
    natural = guide.rest.sample_posterior(keys[1], result.params, sample_shape=(4000,))
    exact = nuts(keys[3], kind, X, y, guide, result.params, num_draws)
    draws = {
        "NUTS": exact,
        "usual guide": usual,
        "natural=True": natural,
        "refined": refined.mcmc.get_samples(),
    }
    return {method: {name: sample[name] for name in exact} for method, sample in draws.items()}


def columns(draws):
    """The logarithms of the draws, and the level, by the name of each scalar."""
    named = {}
    for name, values in sorted(draws.items()):
        values = np.asarray(values, np.float64)
        values = values if name == "level" else np.log(values)
        parts = values.reshape(len(values), -1).T
        labels = [name] if len(parts) == 1 else [f"{name} {i + 1}" for i in range(len(parts))]
        named |= dict(zip(labels, parts, strict=True))
    return named


def compare(draws):
    """Differences of means in standard deviations of NUTS, and ratios of the deviations."""
    exact = columns(draws["NUTS"])
    return {
        method: {
            name: ((values.mean() - exact[name].mean()) / exact[name].std(),
                   values.std() / exact[name].std())
            for name, values in columns(sample).items()
        }
        for method, sample in draws.items()
        if method != "NUTS"
    }  # fmt: skip


def print_table(kind, table):
    names = list(next(iter(table.values())))
    print(f"{kind + ': mean, deviation':30}" + "".join(f"{method:>22}" for method in table))
    for name in names:
        cells = (f"{row[name][0]:+13.2f} sd {row[name][1]:5.2f}" for row in table.values())
        print(f"{name:30}" + "".join(cells))


def plot(path, draws):
    """Scatter plots of the draws, for each pair of hyperparameters."""
    shown = {method: columns(draws[method]) for method in COLORS}
    names = list(shown["NUTS"])
    figure, axes = plt.subplots(
        len(names) - 1, len(names) - 1, figsize=(7, 7), squeeze=False, sharex="col", sharey="row"
    )
    for i, j in np.ndindex(axes.shape):
        axis = axes[i, j]
        if j > i:
            axis.set_axis_off()
            continue
        for method, values in shown.items():
            points = values[names[j]][:500], values[names[i + 1]][:500]
            options = {"color": COLORS[method], "label": method, "rasterized": True}
            axis.scatter(*points, s=4, alpha=0.4, lw=0, **options)
        if i == len(names) - 2:
            axis.set_xlabel(names[j] if names[j] == "level" else f"log {names[j]}")
        if j == 0:
            axis.set_ylabel(f"log {names[i + 1]}" if names[i + 1] != "level" else "level")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="upper right", markerscale=4)
    for handle in legend.legend_handles:
        handle.set_alpha(1.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=150)


def main(
    num_rows=None,
    num_steps=2000,
    batch_size=100,
    num_draws=500,
    num_inducing=None,
    kinds=tuple(MODELS),
    folder="outputs/sparse_hyperparameters",
):
    """Run it all; returns the comparison with NUTS for each kind of data."""
    tables = {}
    for kind in kinds:
        X, y = made_up(kind, num_rows or NUM_ROWS[kind])
        num_points = num_inducing or len(X) // 8
        sizes = num_steps, batch_size, num_draws
        draws = posteriors(kind, X, y, *sizes, num_inducing=num_points)
        tables[kind] = compare(draws)
        print_table(kind, tables[kind])
        plot(Path(folder) / f"{kind}.svg", draws)
    return tables


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-rows", type=int, help=f"by default {NUM_ROWS}")
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--num-draws", type=int, default=500)
    parser.add_argument("--num-inducing", type=int, help="by default one for eight rows")
    main(**vars(parser.parse_args()))
