"""NUTS on a small exact GP with flat, wide and two-sided priors of the lengthscale.

    python benchmarks/evidence.py priors

Thirty noisy observations of a function that does not depend on the second of its two inputs, whose
lengthscale is long and not identified by the likelihood. In float64.
"""

import json
import warnings
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from matplotlib.figure import Figure
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, init_to_value

import numpyro_scalegp as sgp

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "priors.svg"
THIN = 4  # the figure shows every fourth draw


def points(seed, n=30):
    """Observations of a function of the first input alone; both inputs are in (0, 1)."""
    random = np.random.default_rng(seed)
    X = random.uniform(0.0, 1.0, size=(n, 2))
    y = np.sin(6.0 * X[:, 0]) + 0.2 * random.normal(size=n)
    return X, (y - y.mean()) / y.std()


def model(X, y, prior):
    """A GP regression."""
    lengthscale = numpyro.sample("lengthscale", prior.to_event(1))
    variance = numpyro.sample("variance", sgp.infer.variance_prior(3.0))
    noise = numpyro.sample("noise", sgp.infer.variance_prior(1.0))
    kernel = sgp.kernels.RBF(lengthscale, variance)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise), obs=y)


def prior_of(method):
    """The prior of both lengthscales."""
    if method == "flat":
        return dist.ImproperUniform(constraints.positive, (2,), ())
    if method == "LogNormal(0, 3)":
        return dist.LogNormal(0.0, 3.0).expand([2])
    return sgp.infer.lengthscale_prior(0.1, 2.0).expand([2])


def collected(mcmc):
    """The logarithms of the lengthscales, (chains, draws, 2), and the extra fields."""
    logs = np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["lengthscale"]))
    return logs, jax.tree.map(np.asarray, mcmc.get_extra_fields(group_by_chain=True))


@jax.enable_x64(True)
def record(data, split, seed, method, *, num_samples=400):
    """The record of a unit: percent of divergent transitions, and quantiles of the lengthscales.

    `paths` has log10 of the second lengthscale for each chain, warmup included.
    """
    data = *points(seed), prior_of(method)
    values = {"lengthscale": np.full(2, 0.5), "variance": 1.0, "noise": 0.1}
    kernel = NUTS(model, init_strategy=init_to_value(values=values), max_tree_depth=8)
    draws = {"num_warmup": num_samples, "num_samples": num_samples, "num_chains": 4}
    mcmc = MCMC(kernel, chain_method="sequential", progress_bar=False, **draws)
    fields = {"extra_fields": ("diverging", "num_steps")}
    with warnings.catch_warnings(action="ignore"):  # about matrices that are close to singular
        mcmc.warmup(jax.random.key(seed), *data, collect_warmup=True, **fields)
        before, _ = collected(mcmc)
        mcmc.run(mcmc.post_warmup_state.rng_key, *data, **fields)
    logs, extra = collected(mcmc)
    result = {"divergent": 100.0 * extra["diverging"].mean(), "steps": extra["num_steps"].mean()}
    for name, column in zip(("matters", "other"), np.moveaxis(logs, -1, 0), strict=True):
        quantiles = np.exp(np.quantile(column, (0.05, 0.5, 0.95)))
        named = zip(("low", "median", "high"), quantiles, strict=True)
        result |= {f"{name}_{level}": float(value) for level, value in named}
        result[f"{name}_draws"] = float(effective_sample_size(column))
        result[f"{name}_rhat"] = float(split_gelman_rubin(column))
    paths = np.concatenate([before, logs], axis=1)[:, ::THIN, 1] / np.log(10.0)
    return {**result, "paths": paths.round(2).tolist()}


def draw(path):
    """Draw the chains of the irrelevant input's lengthscale."""
    records = json.loads(path.read_text())["records"]
    figure = Figure(figsize=(10, 3), layout="constrained")
    panels = figure.subplots(1, len(records), squeeze=False)[0]
    for record, panel in zip(records, panels, strict=True):
        paths = np.array(record["paths"]).T
        panel.plot(THIN * (np.arange(len(paths)) - len(paths) // 2), paths, linewidth=0.6)
        title = f"{record['method']}\n{record['divergent']:.0f} % divergent"
        panel.set(title=title, xlabel="draw (warm-up below 0)")
    panels[0].set(ylabel="log10 of the lengthscale")
    figure.savefig(FIGURE, metadata={"Date": None})
