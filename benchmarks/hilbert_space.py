"""NUTS with a Hilbert-space basis, compared with `numpyro.contrib.hsgp` in the same model.

    python benchmarks/evidence.py hilbert-space

Counts along a line with a Poisson likelihood: a Matern-5/2 function with 40 basis functions, whose
weights have standard normal priors (the non-centered parametrization), a lengthscale, an amplitude
and a level, in float64. Effective draws per second are for the worst of the three hyperparameters,
during sampling after warmup and compilation, with equally many draws.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.hsgp.approximation import hsgp_matern
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_median

import numpyro_scalegp as sgp

NUM_BASIS, HALF_WIDTH = 40, 4.0
SCALARS = ("lengthscale", "amplitude", "level")


def simulated_counts(seed, rows):
    """Inputs from -2.5 to 2.5, and counts."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(-2.5, 2.5, (rows, 1))
    return X, generator.poisson(np.exp(1.0 + np.sin(3.0 * X[:, 0])))


def model(X, y, ours):
    """The model with the basis of either package."""
    lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(5.0, 3.0))
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    if ours:
        kernel = sgp.kernels.Matern52(lengthscale, amplitude**2)
        box = np.array([[-HALF_WIDTH], [HALF_WIDTH]])
        f = numpyro.sample(
            "f", sgp.WeightSpaceGP(sgp.features.HilbertSpace(kernel, NUM_BASIS, box), X)
        )
    else:
        scales = {"alpha": amplitude**2, "length": lengthscale}
        f = hsgp_matern(X, nu=2.5, ell=HALF_WIDTH, m=NUM_BASIS, **scales)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)


def record(data, split, seed, method, *, rows=1000, num_warmup=500, num_samples=1000):
    """The record of a unit: posterior means, effective draws, and effective draws per second."""
    with jax.enable_x64(True):
        X, y = simulated_counts(seed, rows)
        ours = method == "HilbertSpace"
        sampled = model
        if ours:
            config = {"f": sgp.infer.WhitenReparam()}
            sampled = numpyro.handlers.reparam(model, config=config)
        mcmc = MCMC(
            NUTS(sampled, init_strategy=init_to_median),
            num_warmup=num_warmup,
            num_samples=num_samples,
            progress_bar=False,
        )
        mcmc.warmup(jax.random.key(seed), X, y, ours, extra_fields=("num_steps",))
        # One run compiles sampling, the next is timed.
        mcmc.run(jax.random.key(seed), X, y, ours, extra_fields=("num_steps",))
        start = time.perf_counter()
        mcmc.run(jax.random.key(seed + 100), X, y, ours, extra_fields=("num_steps",))
        draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
        seconds = time.perf_counter() - start
        effective = min(float(effective_sample_size(np.asarray(draws[n]))) for n in SCALARS)
        steps = float(mcmc.get_extra_fields()["num_steps"].sum())
        return {
            **{name: float(draws[name].mean()) for name in SCALARS},
            "effective": effective,
            "seconds": seconds,
            "effective_a_second": effective / seconds,
            "microseconds_a_gradient": 1e6 * seconds / steps,
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1000)
    options = parser.parse_args()
    for method in ("HilbertSpace", "numpyro.contrib.hsgp"):
        print(method, record("made up", 0, 0, method, rows=options.rows))
