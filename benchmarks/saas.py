"""A sparsity prior over 20 lengthscales under NUTS, with 2,000 observations.

    python benchmarks/evidence.py saas

The Hartmann function of six inputs among twenty, standardized, with noise 0.1. The lengthscales
have the sparse axis-aligned subspace prior (SAAS) of Eriksson and Jankowiak (2021), with a
Matern-5/2 kernel in float32; NUTS draws all hyperparameters, in trajectories of at most 63 steps.
"exact" has 100 steps of warm-up and 50 draws by the exact density. "random features" has the same
by the density with as many features as it says. "then exact" continues from their median and mass
matrix by the exact density: 40 steps that adapt the step size alone, and 50 draws, in trajectories
of at most 31 steps. Predictions average over ten of the draws, each with the exact posterior.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median, init_to_value

import numpyro_scalegp as sgp

ALPHA = np.array([1.0, 1.2, 3.0, 3.2])
A = np.array(
    [
        [10, 3, 17, 3.5, 1.7, 8],
        [0.05, 10, 17, 0.1, 8, 14],
        [3, 3.5, 1.7, 10, 17, 8],
        [17, 8, 0.05, 10, 0.1, 14],
    ]
)
P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)


def simulated(seed, n, d=20, noise=0.1):
    """Inputs in the unit cube, the function and observations, standardized by the function."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(size=(n, d))
    squared = np.sum(A * (X[:, None, :6] - P) ** 2, axis=-1)
    f = np.log1p(np.exp(-squared) @ ALPHA)
    f = (f - f.mean()) / f.std()
    y = f + noise * generator.normal(size=n)
    return X.astype(np.float32), f, y.astype(np.float32)


def saas(X, y=None, estimator=None):
    """The SAAS prior, with densities by an estimator."""
    d = X.shape[1]
    shrinkage = numpyro.sample("shrinkage", dist.HalfCauchy(0.1))
    inverse = numpyro.sample("inverse", dist.HalfCauchy(1.0).expand([d]).to_event(1))
    lengthscale = numpyro.deterministic("lengthscale", 1.0 / jnp.sqrt(1e-6 + shrinkage * inverse))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    kernel = sgp.kernels.Matern52(lengthscale, variance)
    key = None if estimator is None else jax.random.key(0)  # the same features in each density
    gp = sgp.GaussianProcess(kernel, X, noise**2, estimator=estimator, key=key)
    numpyro.sample("y", gp, obs=y)


def draws_of(kernel, seed, arguments, num_warmup):
    """The run of NUTS."""
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(seed), *arguments, extra_fields=("num_steps", "diverging"))
    return mcmc


def record(data, split, seed, method, *, n=2000):
    """The record of a unit."""
    X, f, y = simulated(seed, n + 500)
    X_test, f_test = X[n:], f[n:]
    X, y = X[:n], y[:n]
    start = time.perf_counter()
    if method == "exact":
        kernel = NUTS(saas, init_strategy=init_to_median, max_tree_depth=6)
        mcmc = draws_of(kernel, seed, (X, y), 100)
    else:
        features = sgp.estimators.RandomFourier(int(method.split()[0]))
        kernel = NUTS(saas, init_strategy=init_to_median, max_tree_depth=6)
        mcmc = draws_of(kernel, seed, (X, y, features), 100)
        if method.endswith("then exact"):
            medians = {name: jnp.median(values, 0) for name, values in mcmc.get_samples().items()}
            del medians["lengthscale"]
            adapted = mcmc.last_state.adapt_state
            kernel = NUTS(
                saas,
                init_strategy=init_to_value(values=medians),
                step_size=float(adapted.step_size),
                inverse_mass_matrix=adapted.inverse_mass_matrix,
                adapt_mass_matrix=False,
                max_tree_depth=5,
            )
            mcmc = draws_of(kernel, seed, (X, y), 40)
    draws = mcmc.get_samples()
    seconds = time.perf_counter() - start
    posterior = sgp.posterior(saas, {name: values[::5] for name, values in draws.items()}, X, y)
    mean, variance = posterior.mean(X_test), posterior.variance(X_test)
    inside = jnp.abs(mean - f_test) < 1.96 * jnp.sqrt(variance)
    lengthscales = np.median(draws["lengthscale"], axis=0)
    extra = mcmc.get_extra_fields()
    return {
        "seconds": seconds,
        "rmse": float(jnp.sqrt(jnp.mean((mean - f_test) ** 2))),
        "coverage": float(jnp.mean(inside)),
        "gradients_a_draw": float(np.mean(extra["num_steps"])),
        "divergent": 100.0 * float(np.mean(extra["diverging"])),
        "relevant": float(lengthscales[:6].max()),
        "irrelevant": float(lengthscales[6:].min()),
    }
