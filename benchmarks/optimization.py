"""Rounds of Bayesian optimization whose data grow, beside BoTorch.

    python benchmarks/evidence.py optimization

Two peaks over four inputs, of heights of about 2 and 1.5, observed with noise 0.05: 20 rounds. In
each round all hyperparameters are fitted by maximum a posteriori under a Matern-5/2 kernel, and the
expected improvement is maximized. Here the data are padded to 64 or 256 rows, and a round is one
program, in float32; the first round compiles it. BoTorch fits `SingleTaskGP` with the same kernel
by L-BFGS and maximizes `LogExpectedImprovement` from eight starts, in float64, as its documentation
shows. `round_seconds` is a median over the rounds after the first, `regret` the largest height less
the best evaluation's.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from scipy.optimize import minimize

import numpyro_scalegp as sgp

NUM_INPUTS, NUM_ROUNDS = 4, 20
PEAKS = np.array([[0.2, 0.3, 0.6, 0.1], [0.7, 0.8, 0.2, 0.6]])
SIZES = {"44 to 64 rows": (44, 64), "180 to 200 rows": (180, 256)}


def height(x):
    """Two peaks, of heights of about 2 and 1.5."""
    squared = np.sum((x[..., None, :] - PEAKS) ** 2, axis=-1)
    return 2.0 * np.exp(-4.0 * squared[..., 0]) + 1.5 * np.exp(-8.0 * squared[..., 1])


def model(X, y=None, observed=None):
    """A GP with a constant mean."""
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(-0.5, 1.0).expand([NUM_INPUTS]).to_event(1)
    )
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-3.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    kernel = sgp.kernels.Matern52(lengthscale, variance)
    gp = sgp.GaussianProcess(kernel, X, noise**2, mean=level, observed=observed)
    numpyro.sample("y", gp, obs=y)


def maximize(function, key):
    """The input between 0 and 1 with the largest value of a function of rows."""
    starts = jax.random.uniform(key, (2000, NUM_INPUTS))
    best = starts[jax.lax.top_k(function(starts), 8)[1]]
    gradient = jax.grad(lambda x: jnp.sum(function(x)))

    def climb(x, length):
        slope = gradient(x)
        unit = slope / (1e-12 + jnp.linalg.norm(slope, axis=1, keepdims=True))
        return jnp.clip(x + length * unit, 0.0, 1.0), None

    ends, _ = jax.lax.scan(climb, best, 0.05 * 0.93 ** jnp.arange(60))
    return ends[jnp.argmax(function(ends))]


class Padded:
    """The page's loop: one program for all rounds."""

    def __init__(self, size, seed, X, y):
        self.size = size
        self.svi = SVI(model, AutoDelta(model), optax.adam(0.05), Trace_ELBO())
        self.keys = jax.random.split(jax.random.key(seed), NUM_ROUNDS + 1)
        self.state = self.svi.init(self.keys[-1], *sgp.pad_rows(size, X, y))
        self.program = jax.jit(self.next_input)

    def next_input(self, key, state, X, y, observed):
        """The next state of the fit, and the next input."""

        def step(state, _):
            return self.svi.update(state, X, y, observed)

        state, _ = jax.lax.scan(step, state, length=50)
        params = self.svi.get_params(state)
        posterior = sgp.posterior(model, self.svi.guide, params, X, y, observed)
        best = jnp.max(jnp.where(observed, posterior.mean(X), -jnp.inf))

        def expected_improvement(x):
            mean, deviation = posterior.mean(x), jnp.sqrt(posterior.variance(x) + 1e-12)
            z = (mean - best) / deviation
            norm = jax.scipy.stats.norm
            return deviation * (z * norm.cdf(z) + norm.pdf(z))

        return state, maximize(expected_improvement, key)

    def __call__(self, number, X, y):
        """The next input, given the observations so far."""
        rows = sgp.pad_rows(self.size, X, y)
        self.state, x = self.program(self.keys[number], self.state, *rows)
        return np.asarray(x)


def botorch_input(number, X, y):
    """The next input by BoTorch."""
    import torch
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.utils.gpytorch_modules import get_matern_kernel_with_gamma_prior
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    torch.manual_seed(number)
    X, y = (torch.tensor(values, dtype=torch.float64) for values in (X, y[:, None]))
    gp = SingleTaskGP(X, y, covar_module=get_matern_kernel_with_gamma_prior(NUM_INPUTS))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(gp.likelihood, gp))
    acquisition = LogExpectedImprovement(gp, best_f=gp.posterior(X).mean.max())
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, NUM_INPUTS)
    x, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=8, raw_samples=2000)
    return x[0].numpy()


def record(data, split, seed, method):
    """The record of a unit."""
    rows, _, peer = method.partition(", ")
    first, size = SIZES[rows]
    generator = np.random.default_rng(seed)

    def measure(x):
        return height(x) + 0.05 * generator.normal(size=x.shape[:-1])

    X = generator.uniform(size=(first, NUM_INPUTS)).astype(np.float32)
    y = measure(X).astype(np.float32)
    next_input = botorch_input if peer else Padded(size, seed, X, y)
    seconds = []
    for number in range(NUM_ROUNDS):
        start = time.perf_counter()
        x = next_input(number, X, y)
        seconds.append(time.perf_counter() - start)
        X = np.vstack([X, x.astype(np.float32)])
        y = np.append(y, np.float32(measure(X[-1])))
    return {
        "first_round_seconds": seconds[0],
        "round_seconds": float(np.median(seconds[1:])),
        "regret": float(-minimize(lambda x: -height(x), PEAKS[0]).fun - height(X).max()),
    }
