"""NUTS on a small exact GP with a flat prior of the lengthscale, a wide one, and one by two bounds.

Thirty noisy points of a function that does not depend on the second of its two columns: that
lengthscale is long, and the likelihood cannot tell how long. Prints, for each prior, divergent
transitions, and of each lengthscale quantiles, effective sample size and R-hat; draws
docs/figures/priors.svg.

    python benchmarks/priors.py
"""

import argparse
import warnings

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, init_to_value

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def data(seed, n=30):
    """Points of a function of the first column alone, both in (0, 1)."""
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


def choices():
    """Priors of the lengthscale."""
    return {
        "flat": dist.ImproperUniform(constraints.positive, (2,), ()),
        "log-normal(0, 3)": dist.LogNormal(0.0, 3.0).expand([2]),
        "by bounds": sgp.infer.lengthscale_prior(0.1, 2.0).expand([2]),
    }


def collected(mcmc):
    """The logarithms of the lengthscales, (chains, draws, 2), and the extra fields."""
    logs = np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["lengthscale"]))
    return logs, jax.tree.map(np.asarray, mcmc.get_extra_fields(group_by_chain=True))


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-samples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="docs/figures/priors.svg")
    arguments = parser.parse_args()
    X, y = data(arguments.seed)
    figure, panels = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for (name, prior), axes in zip(choices().items(), panels, strict=True):
        start = init_to_value(
            values={"lengthscale": np.full(2, 0.5), "variance": 1.0, "noise": 0.1}
        )
        mcmc = MCMC(
            NUTS(model, init_strategy=start, max_tree_depth=8),
            num_warmup=arguments.num_samples,
            num_samples=arguments.num_samples,
            num_chains=4,
            chain_method="sequential",
            progress_bar=False,
        )
        fields = {"extra_fields": ("diverging", "num_steps")}
        mcmc.warmup(jax.random.key(0), X, y, prior, collect_warmup=True, **fields)
        before, _ = collected(mcmc)
        mcmc.run(mcmc.post_warmup_state.rng_key, X, y, prior, **fields)
        logs, extra = collected(mcmc)
        diverging = extra["diverging"]
        print(f"{name}: {diverging.mean():.1%} divergent, {extra['num_steps'].mean():.0f} steps")
        for column in range(2):
            low, median, high = np.exp(np.quantile(logs[..., column], (0.05, 0.5, 0.95)))
            print(
                f"  column {column}: {low:.3g}, {median:.3g}, {high:.3g} (5, 50 and 95 %), "
                f"effective sample size {effective_sample_size(logs[..., column]):.0f}, "
                f"R-hat {split_gelman_rubin(logs[..., column]):.2f}",
                flush=True,
            )
        steps = np.arange(-before.shape[1], logs.shape[1])
        path = np.concatenate([before, logs], axis=1)[..., 1] / np.log(10.0)
        axes.plot(steps, path.T, linewidth=0.6)
        axes.set(title=f"{name}: {diverging.mean():.0%} divergent", xlabel="draw (warm-up below 0)")
    panels[0].set(ylabel="log10 lengthscale of column 1")
    figure.savefig(arguments.output, bbox_inches="tight")


if __name__ == "__main__":
    numpyro.enable_x64()
    warnings.simplefilter("ignore")  # of matrices that are close to singular
    main()
