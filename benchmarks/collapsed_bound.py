"""NUTS over hyperparameters with the collapsed bound of inducing points, `estimators.SGPR`.

    python benchmarks/evidence.py collapsed-bound

With an RBF kernel with ARD, in float32: NUTS, the time of a value with its gradient compared with
the time of its matrix products alone, and the test error of the posterior. Needs SCALEGP_DATA.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from iterative import interleaved_seconds
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_median
from sparse import hyperparameters, load, number_in

import numpyro_scalegp as sgp


def density(lengthscale, variance, noise, X, points):
    """A GP whose log density is the bound."""
    kernel = sgp.kernels.RBF(lengthscale, variance)
    return sgp.GaussianProcess(kernel, X, noise**2, estimator=sgp.estimators.SGPR(points))


def model(X, y, points):
    """A GP regression by the bound, with priors."""
    numpyro.sample("y", density(*hyperparameters(X.shape[1]), X, points), obs=y)


def gradient_and_floor(X, y, points):
    """Median seconds of a value with its gradient, and of its products alone."""
    n, d = X.shape
    num_points = len(points)

    def bound(values):
        lengthscale, variance, noise = jnp.exp(values[:d]), *jnp.exp(values[d:])
        return density(lengthscale, variance, noise, X, points).log_prob(y)

    # Phi and Phi.T Phi; their gradients with respect to two arguments cost twice as much.
    products = jax.jit(lambda A, B: (A @ B, A.T @ A))
    tasks = {
        "gradient": (jax.jit(jax.value_and_grad(bound)), jnp.zeros(d + 2).at[-1].set(-1.0)),
        "floor": (products, jnp.ones((n, num_points)), jnp.ones((num_points, num_points))),
    }
    gradient, floor = map(np.median, interleaved_seconds(tasks, 5).values())
    return gradient, 3 * floor


def record(data, split, seed, method, *, rows=10_000, num_warmup=200, num_samples=200):
    """The record of a unit for a method such as "SGPR, 200 points"."""
    loaded = load(data, split)
    X, y = (jnp.asarray(a[:rows], jnp.float32) for a in (loaded.X_train, loaded.y_train))
    points = sgp.features.kmeans_points(jax.random.key(1 + seed), X, number_in(method))
    gradient, floor = gradient_and_floor(X, y, points)
    kernel = NUTS(model, init_strategy=init_to_median)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    start = time.perf_counter()
    fields = ("num_steps", "diverging")
    mcmc.run(jax.random.key(2 + seed), X, y, points, extra_fields=fields)
    samples = jax.block_until_ready(mcmc.get_samples())
    took = time.perf_counter() - start
    effective = [effective_sample_size(np.asarray(draws)[None]) for draws in samples.values()]
    posterior = sgp.posterior(model, samples, X, y, points)
    mean = np.asarray(posterior.mean(jnp.asarray(loaded.X_test, jnp.float32)))
    fields = mcmc.get_extra_fields()
    return {
        "gradient": 1e3 * gradient,
        "floor": 1e3 * floor,
        "seconds": took,
        "gradients": int(fields["num_steps"].sum()),
        "divergences": int(fields["diverging"].sum()),
        "least_effective": float(min(map(np.min, effective))),
        "most_effective": float(max(map(np.max, effective))),
        "rmse": float(np.sqrt(np.mean((mean - loaded.y_test) ** 2))),
        "noise": float(np.mean(samples["noise"])),
        "rows": len(X),
    }
