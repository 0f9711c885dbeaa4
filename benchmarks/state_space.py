"""Exact GPs of one input, time, in linear time: beside tinygp, celerite2, GPyTorch, and NUTS.

    python benchmarks/evidence.py state-space-speed state-space-memory state-space-dense
    python benchmarks/evidence.py state-space-nuts

All runs are in float64, on unequally spaced times with exponential gaps, and y is a draw from the
model. `speed`: the log density, its gradient in the logarithms of the hyperparameters, and the
posterior mean and variance at all times; seconds are the least of several calls, which alternate
between the packages. tinygp is told that the times are sorted, since it is faster then. celerite2
is called through JAX; its `Matern32Term` is an approximation, `SHOTerm` is exact. `memory`: the
first call of a function in a new process, and the memory that it takes. `dense`: the gradient
beside the exact GP of GPyTorch and `Cholesky`. `sampling`: NUTS. Peers need the `bench` extra.
"""

import functools
import math
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import psutil
from iterative import gpytorch_exact, in_new_process, interleaved_seconds
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS, init_to_median
from sparse import number_in

import numpyro_scalegp as sgp

GAP = 0.02  # the mean time between observations
# The logarithms of kernel hyperparameters, then of the noise variance.
TRUTH = {
    "Matern32": np.log([1.0, 1.0, 0.1]),  # lengthscale, variance
    "Harmonic": np.log([2 * math.pi, 3.0, 1.0, 0.1]),  # frequency, quality, variance
}
NAMES = ("lengthscale", "variance", "noise_variance")


def ours(kernel, parameters, times, estimator=None):
    """The GP of this package."""
    *hyperparameters, noise = jnp.exp(parameters)
    estimator = estimator or sgp.estimators.StateSpace()
    function = getattr(sgp.kernels, kernel)(*hyperparameters)
    return sgp.GaussianProcess(function, times[:, None], noise, estimator=estimator)


def of_tinygp(kernel, parameters, times):
    """The same GP by tinygp."""
    import tinygp

    *hyperparameters, variance, noise = jnp.exp(parameters)
    family = {"Matern32": "Matern32", "Harmonic": "SHO"}[kernel]
    function = getattr(tinygp.kernels.quasisep, family)(*hyperparameters, jnp.sqrt(variance))
    return tinygp.GaussianProcess(function, times, diag=noise, assume_sorted=True)


def of_celerite2(kernel, parameters, times):
    """The same GP by celerite2, approximate for `Matern32`."""
    import celerite2.jax

    *hyperparameters, variance, noise = jnp.exp(parameters)
    names = {"Matern32": ("rho",), "Harmonic": ("w0", "Q")}[kernel]
    family = {"Matern32": "Matern32Term", "Harmonic": "SHOTerm"}[kernel]
    options = dict(zip(names, hyperparameters, strict=True))
    term = getattr(celerite2.jax.terms, family)(sigma=jnp.sqrt(variance), **options)
    process = celerite2.jax.GaussianProcess(term)
    process.compute(times, diag=jnp.full(times.shape, noise))
    return process


def density(package, kernel, parameters, times, y):
    """The log density by a package."""
    if package == "tinygp":
        return of_tinygp(kernel, parameters, times).log_probability(y)
    if package == "celerite2":
        return of_celerite2(kernel, parameters, times).log_likelihood(y)
    return ours(kernel, parameters, times).log_prob(y)


def prediction(package, kernel, parameters, times, y):
    """The posterior mean and variance of the function at all times."""
    if package == "tinygp":
        posterior = of_tinygp(kernel, parameters, times).condition(y).gp
        return posterior.loc, posterior.variance
    posterior = ours(kernel, parameters, times).condition(y)
    return posterior.mean(times[:, None]), posterior.variance(times[:, None])


def task(name, package, kernel):
    """A compiled function of parameters, times and y: "value", "gradient" or "prediction"."""
    function = functools.partial(prediction if name == "prediction" else density, package, kernel)
    return jax.jit(jax.value_and_grad(function) if name == "gradient" else function)


def simulated(kernel, seed, n):
    """Log parameters, times, and a draw of the observations."""
    gaps = np.random.default_rng(seed).exponential(GAP, n)
    times, parameters = jnp.cumsum(jnp.asarray(gaps)), jnp.asarray(TRUTH[kernel])
    return parameters, times, ours(kernel, parameters, times).sample(jax.random.key(seed))


def largest_difference(tree, reference):
    """The largest difference of arrays, relative to the largest entry of each."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


@jax.enable_x64(True)
def record_speed(data, split, seed, method, *, repeats=(21, 5)):
    """The record of a unit such as "Matern32, 100,000 times": least seconds, and their ratios.

    There are `repeats` calls of each function, up to a million times and beyond.
    """
    kernel, size = method.split(", ", 1)
    n = number_in(size)
    arguments = simulated(kernel, seed, n)
    names = {
        "value": ("ours", "tinygp", "celerite2"),
        "gradient": ("ours", "tinygp", "celerite2"),
        "prediction": ("ours", "tinygp"),
    }
    record = {}
    for name, packages in names.items():
        tasks = {package: (task(name, package, kernel), *arguments) for package in packages}
        took = interleaved_seconds(tasks, repeats[n > 1_000_000])
        least = {package: min(times) for package, times in took.items()}
        results = {package: function(*rest) for package, (function, *rest) in tasks.items()}
        record[f"{name}_seconds"] = least["ours"]
        record[f"{name}_nanoseconds_a_time"] = 1e9 * least["ours"] / n
        for package in packages[1:]:
            record[f"{package}_{name}_seconds"] = least[package]
            record[f"{package}_{name}_ratio"] = least["ours"] / least[package]
            difference = largest_difference(results[package], results["ours"])
            record[f"{package}_{name}_difference"] = difference
    return record


def peak_memory():
    """The largest resident memory in bytes since `forget_peak`, or since the process started."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def forget_peak():
    """Start the measurement of the largest resident memory again (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")


@jax.enable_x64(True)
def first_call(path, name, package, kernel):
    """Seconds and bytes of the first call in a process.

    Memory is the largest resident memory during the first run of the compiled function, less the
    resident memory before: results count, the compiler and the arguments do not.
    """
    file = np.load(path)
    arguments = [jax.block_until_ready(jnp.asarray(file[key])) for key in file.files]
    start = time.perf_counter()
    function = task(name, package, kernel).lower(*arguments).compile()
    compiled = time.perf_counter()
    before = psutil.Process().memory_info().rss
    forget_peak()
    jax.block_until_ready(function(*arguments))
    first = time.perf_counter() - start
    return {
        "first_seconds": first,
        "compile_seconds": compiled - start,
        "bytes_a_time": (peak_memory() - before) / len(arguments[1]),
    }


@jax.enable_x64(True)
def record_memory(data, split, seed, method, *, n=1_800_000):
    """The record of a unit such as "Matern32, value": `first_call` of both packages."""
    kernel, name = method.split(", ")
    record = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        np.savez(path, *map(np.asarray, simulated(kernel, seed, n)))
        for package in ("ours", "tinygp"):
            options = {"name": name, "package": package, "kernel": kernel}
            measured, _ = in_new_process(first_call, path=path, **options)
            prefix = "" if package == "ours" else f"{package}_"
            record |= {prefix + key: float(value) for key, value in measured.items()}
    return record


def of_gpytorch(parameters, times, y):
    """A function that returns the log density and its gradient by GPyTorch's Cholesky."""
    import gpytorch

    model, objective = gpytorch_exact(np.asarray(times)[:, None], np.asarray(y))
    model.double()
    lengthscale, variance, noise = (float(value) for value in jnp.exp(parameters))
    model.likelihood.noise = noise
    model.covar_module.base_kernel.lengthscale = lengthscale
    model.covar_module.outputscale = variance

    def value_and_gradient():
        model.zero_grad()
        with gpytorch.settings.fast_computations(False, False, False):
            value = objective()
            value.backward()
        return len(y) * value.item()

    return value_and_gradient


@jax.enable_x64(True)
def record_dense(data, split, seed, method, *, repeats=5):
    """The record of a unit such as "5,000 times": least seconds of the value and gradient.

    The kernel is `Matern32`. GPyTorch's gradient is with respect to its own parameters.
    """
    arguments = simulated("Matern32", seed, number_in(method))

    def dense(parameters, times, y):
        return ours("Matern32", parameters, times, sgp.estimators.Cholesky()).log_prob(y)

    tasks = {
        "ours": (task("gradient", "ours", "Matern32"), *arguments),
        "cholesky": (jax.jit(jax.value_and_grad(dense)), *arguments),
        "gpytorch": (of_gpytorch(*arguments),),
    }
    least = {name: min(times) for name, times in interleaved_seconds(tasks, repeats).items()}
    results = {name: function(*rest) for name, (function, *rest) in tasks.items()}
    value = results["ours"][0]
    return {
        "milliseconds_a_gradient": 1e3 * least["ours"],
        "cholesky_gradient_seconds": least["cholesky"],
        "gpytorch_gradient_seconds": least["gpytorch"],
        "gpytorch_ratio": least["gpytorch"] / least["ours"],
        "cholesky_difference": largest_difference(results["ours"], results["cholesky"]),
        "gpytorch_difference": abs(float(results["gpytorch"] / value) - 1.0),
    }


def model(X, y):
    """A GP regression with priors of three hyperparameters."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise_variance", dist.LogNormal(-2.0, 1.0))
    kernel, estimator = sgp.kernels.Matern32(lengthscale, variance), sgp.estimators.StateSpace()
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise, estimator=estimator), obs=y)


@jax.enable_x64(True)
def record_sampling(data, split, seed, method, *, num_warmup=500, num_samples=500):
    """The record of a unit such as "100,000 times": minutes and draws of NUTS with one chain.

    Minutes include compilation; hyperparameters are pairs of a mean and a standard deviation.
    """
    parameters, times, y = simulated("Matern32", seed, number_in(method))
    mcmc = MCMC(
        NUTS(model, init_strategy=init_to_median),
        num_warmup=num_warmup,
        num_samples=num_samples,
        progress_bar=False,
    )
    key, fields = jax.random.key(seed + 1), ("num_steps", "diverging")
    start = time.perf_counter()
    mcmc.warmup(key, times[:, None], y, extra_fields=fields, collect_warmup=True)
    warmup_steps = int(mcmc.get_extra_fields()["num_steps"].sum())
    warmed = time.perf_counter()
    mcmc.run(key, times[:, None], y, extra_fields=fields)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    end = time.perf_counter()
    extra = mcmc.get_extra_fields()
    steps = int(extra["num_steps"].sum())
    statistics = summary({name: np.asarray(values) for name, values in draws.items()})
    effective = {name: float(each["n_eff"]) for name, each in statistics.items()}
    truth = dict(zip(NAMES, map(float, jnp.exp(parameters)), strict=True))
    moments = {name: [float(v["mean"]), float(v["std"])] for name, v in statistics.items()}
    return {
        **moments,
        **{f"{name}_effective": number for name, number in effective.items()},
        "most_deviations": max(abs(truth[n] - mean) / std for n, (mean, std) in moments.items()),
        "least_effective": min(effective.values()),
        "nuts_minutes": (end - start) / 60.0,
        "sampling_seconds": end - warmed,
        "gradients": float(warmup_steps + steps),
        "gradients_a_draw": steps / num_samples,
        "microseconds_a_gradient": 1e6 * (end - start) / (warmup_steps + steps),
        "divergences": float(extra["diverging"].sum()),
    }
