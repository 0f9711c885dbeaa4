"""Posteriors over hyperparameters by unbiased gradients: accuracy against NUTS, noise and cost.

    python benchmarks/evidence.py hyperparameters hyperparameters-noise hyperparameters-cost

Model, data, estimators and methods are from examples/bayesian_hyperparameters.py. Needs
SCALEGP_DATA.
"""

import functools
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from iterative import seconds
from jax.flatten_util import ravel_pytree
from numpyro.handlers import seed as seeded
from numpyro.infer.util import potential_energy
from sparse import number_in

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import bayesian_hyperparameters as example

import numpyro_scalegp as sgp


def gradient_seconds(keys, n, *estimator):
    """Seconds of a gradient for each key but the first; by Cholesky without an estimator."""
    X, y, *_ = example.load_data(n)
    logs = {
        "lengthscale": jnp.ones(X.shape[1]),
        "noise": jnp.array(-1.0),
        "variance": jnp.zeros(()),
    }

    def potential(logs, key):
        return potential_energy(seeded(example.model, key), (X, y, *estimator), {}, logs)

    gradient = jax.jit(jax.grad(potential)).lower(logs, keys[0]).compile()
    times = [seconds(gradient, logs, key, repeats=1, warm=True)[0] for key in keys]
    return times[1:]  # the first call also allocates memory


def record_cost(data, split, seed, method, *, most_exact=4000, repeats=5):
    """Seconds of a gradient, for "1,000 rows, 10 iterations, rank 20, 2,000 features".

    The unbiased gradient has a random number of iterations, so its mean over keys has a standard
    error. The exact gradient is computed for at most `most_exact` data points.
    """
    n, iterations, rank, features = map(number_in, method.split(", "))
    keys = jax.random.split(jax.random.key(seed), 1 + repeats)
    took = gradient_seconds(keys, n, example.unbiased(n, iterations, rank, features))
    result = {"unbiased_seconds": [np.mean(took), np.std(took, ddof=1) / repeats**0.5]}
    if n <= most_exact:
        with jax.enable_x64(True):
            result["exact_seconds"] = float(np.median(gradient_seconds(keys, n)))
    return result


@functools.cache
def against_nuts(num_rows, num_steps, num_draws):
    """The example's comparison with NUTS, and the guide with its parameters."""
    with tempfile.TemporaryDirectory() as folder:
        return example.against_nuts(num_rows, num_steps, num_draws, folder)


SIZES = {"num_rows": 500, "num_steps": 1000, "num_draws": 500}


def record(data, split, seed, method, **sizes):
    """The record of a unit: means and deviations of log hyperparameters compared with NUTS."""
    shift, ratio = against_nuts(**SIZES | sizes)[0][method]
    return {
        "off": float(np.abs(shift).max()),
        "least_ratio": float(ratio.min()),
        "most_ratio": float(ratio.max()),
        "variance_ratio": float(ratio[-1]),
    }


def record_noise(data, split, seed, method, *, repeats=60, **sizes):
    """The variance of a gradient in coordinates where the posterior is about standard normal.

    It is averaged over the coordinates, at the guide's mean, with 16 probe vectors.
    """
    sizes = SIZES | sizes
    _, guide, params = against_nuts(**sizes)
    X, y, *_ = example.load_data(sizes["num_rows"])
    posterior, (_, unravel) = guide.get_posterior(params), ravel_pytree(guide.median(params))
    unbiased = functools.partial(example.unbiased, len(y), mean_iterations=10, rank=20)
    if method == "Hutchinson":
        estimator = sgp.estimators.Hutchinson(unbiased().solver, 16, num_logdet_probes=0)
    else:
        estimator = unbiased(num_features=number_in(method))

    def potential(z, key):
        logs = unravel(posterior.mean + posterior.scale_tril @ z)
        return potential_energy(seeded(example.model, key), (X, y, estimator), {}, logs)

    gradient = jax.jit(jax.grad(potential))
    zeros, keys = jnp.zeros_like(posterior.mean), jax.random.split(jax.random.key(seed), repeats)
    variances = np.var([np.asarray(gradient(zeros, key)) for key in keys], axis=0, ddof=1)
    return {"noise_in_whitened": float(np.mean(variances))}
