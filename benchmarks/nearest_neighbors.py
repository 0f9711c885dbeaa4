"""Densities and predictions given nearest neighbors: error, cost, and maps beside a sparse GP.

    python benchmarks/evidence.py neighbors-density neighbors-cost neighbors-field satellite
    python benchmarks/nearest_neighbors.py --data satellite --methods "Vecchia 30"

`density`: the error of log p(y) against the exact one, nats a row, for 5,000 places in a square and
a lengthscale of a tenth of its side, y drawn from the model, and of its gradient in the logarithms
of lengthscale, variance and noise. `sampling`: means of hyperparameters under NUTS beside those by
Cholesky, on 500 such rows. `cost`: seconds of a value with its
gradient, for up to a million places, neighbors found before. `field`: hyperparameters by SVI in
mini-batches of rows, then predictions at 10,000 other places of a field with 100,000 rows, against
the true function; a sparse GP with 512 points trains for as long. `satellite`: the same on the land
surface temperatures of Heaton et al. (2019), by their four scores, in degrees; it needs
SCALEGP_DATA. Float32, but for densities.
"""

import argparse
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_median, init_to_value
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

KERNELS = {"matern12": sgp.kernels.Matern12, "matern32": sgp.kernels.Matern32}


def number_in(method):
    """The number in a method's name, as of "30 neighbors" or "1,000,000 rows"."""
    return int("".join(filter(str.isdigit, method)))


def record_density(data, split, seed, method, *, rows=5000, lengthscale=0.1, noise=0.1):
    """The record of a unit: error of the log density, nats a row, and of its gradient."""
    with jax.enable_x64(True):
        key = jax.random.key(seed)
        X = jax.random.uniform(key, (rows, 2))
        parameters = jnp.log(jnp.array([lengthscale, 1.0, noise]))

        def process(parameters, estimator):
            scale, variance, noise = jnp.exp(parameters)
            kernel = sgp.kernels.Matern32(scale, variance)
            return sgp.GaussianProcess(kernel, X, noise, estimator=estimator)

        exact = sgp.estimators.Cholesky()
        y = process(parameters, exact).sample(jax.random.fold_in(key, 1))
        estimator = sgp.estimators.Vecchia(number_in(method))
        both = [
            jax.jit(jax.value_and_grad(lambda p, one=one: process(p, one).log_prob(y)))(parameters)
            for one in (exact, estimator)
        ]
        (truth, of_truth), (value, gradient) = both
        return {
            "error": float(abs(value - truth)) / rows,
            "gradient_error": float(jnp.linalg.norm(gradient - of_truth)) / rows,
        }


def sampled_model(X, y, estimator):
    """Three hyperparameters with priors."""
    scale = numpyro.sample("lengthscale", dist.LogNormal(-2.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    kernel = sgp.kernels.Matern32(scale, variance)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise, estimator=estimator), obs=y)


def record_sampling(data, split, seed, method, *, rows=500, num_warmup=300, num_samples=1000):
    """The record of a unit: how far means under NUTS are off, in deviations of the exact ones."""
    with jax.enable_x64(True):
        key = jax.random.key(seed)
        X = jax.random.uniform(key, (rows, 2))
        prior = sgp.GaussianProcess(sgp.kernels.Matern32(0.1), X, 0.1)
        y = prior.sample(jax.random.fold_in(key, 1))
        found, seconds = {}, {}
        names = {"exact": sgp.estimators.Cholesky()}
        names[method] = sgp.estimators.Vecchia(number_in(method))
        for name, estimator in names.items():
            mcmc = MCMC(
                NUTS(sampled_model, init_strategy=init_to_median),
                num_warmup=num_warmup,
                num_samples=num_samples,
                progress_bar=False,
            )
            start = time.perf_counter()
            mcmc.run(jax.random.fold_in(key, 2), X, y, estimator)
            draws = jax.block_until_ready(mcmc.get_samples())
            seconds[name] = time.perf_counter() - start
            found[name] = {k: (jnp.log(v).mean(), jnp.log(v).std()) for k, v in draws.items()}
        exact = found["exact"]
        differences = {
            name: float(abs(mean - exact[name][0]) / exact[name][1])
            for name, (mean, _) in found[method].items()
        }
        return {
            "off": max(differences.values()),
            "seconds": seconds[method],
            "exact_seconds": seconds["exact"],
        }


def record_cost(data, split, seed, method, *, num_neighbors=30, columns=2, repeats=5):
    """The record of a unit: seconds of neighbors, and of a value with its gradient."""
    rows = number_in(method)
    keys = jax.random.split(jax.random.key(seed))
    X, y = jax.random.uniform(keys[0], (rows, columns)), jax.random.normal(keys[1], (rows,))
    start = time.perf_counter()
    estimator = sgp.estimators.Vecchia(num_neighbors).find_neighbors(X)
    searching = time.perf_counter() - start

    @jax.jit
    @jax.value_and_grad
    def value(parameters, X, y, estimator):
        scale, variance, noise = jnp.exp(parameters)
        kernel = sgp.kernels.Matern32(scale, variance)
        return sgp.GaussianProcess(kernel, X, noise, estimator=estimator).log_prob(y)

    given = jnp.log(jnp.array([0.1, 1.0, 0.1])), X, y, estimator
    start = time.perf_counter()
    jax.block_until_ready(value(*given))
    first = time.perf_counter() - start
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(value(*given))
        times.append(time.perf_counter() - start)
    seconds = float(np.median(times))
    return {
        "seconds": seconds,
        "microseconds_a_row": 1e6 * seconds / rows,
        "search_seconds": searching,
        "first_seconds": first,
    }


def vecchia_model(X, y, estimator, batch_size, kernel):
    """A GP regression whose hyperparameters come from mini-batches of conditional densities."""
    scales, variance, noise, level = hyperparameters(X.shape[1])
    if batch_size is not None:
        with sgp.plate("rows", len(X), batch_size) as index:
            estimator = estimator.on(index)
    gp = sgp.GaussianProcess(kernel(scales, variance), X, noise**2, mean=level, estimator=estimator)
    numpyro.sample("y", gp, obs=y)


def sparse_model(X, y, batch_size, kernel):
    """The same with the function as a latent site."""
    scales, variance, noise, level = hyperparameters(X.shape[1])
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(kernel(scales, variance), X))
    with rows:
        numpyro.sample("y", dist.Normal(level + f, noise), obs=y)


def hyperparameters(d):
    """Priors of inputs and targets that are standardized."""
    return (
        numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([d]).to_event(1)),
        numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
        numpyro.sample("noise", dist.LogNormal(-1.0, 1.0)),
        numpyro.sample("level", dist.Normal(0.0, 1.0)),
    )


def by_neighbors(X, y, num_neighbors, kernel, steps=400, batch_size=512, rate=0.03):
    """The posterior, and the seconds that it took, compilation included."""
    start = time.perf_counter()
    estimator, init = sgp.estimators.Vecchia(num_neighbors), init_to_median()
    scales = jnp.std(X, axis=0)
    # Roughly, then with neighbors in the lengthscales that were found.
    for num in (steps // 4, steps):
        estimator = estimator.find_neighbors(X, kernel(scales))
        guide = AutoDelta(vecchia_model, init_loc_fn=init)
        optimizer = optax.adam(optax.cosine_decay_schedule(rate, num))
        svi = SVI(vecchia_model, guide, optimizer, Trace_ELBO())
        given = X, y, estimator, batch_size, kernel
        result = svi.run(jax.random.key(0), num, *given, progress_bar=False)
        values = guide.median(result.params)
        scales, init = values["lengthscale"], init_to_value(values=values)
    posterior = sgp.posterior(vecchia_model, guide, result, X, y, estimator, None, kernel)
    return posterior, time.perf_counter() - start


def by_points(X, y, kernel, seconds, batch_size=1024, num_inducing=512, rate=0.03):
    """The posterior of a sparse GP that trains for so many seconds, compilation on top."""
    guide = sgp.guides.AutoSparseGP(sparse_model, rest=AutoDelta, num_inducing=num_inducing)
    loss, given = sgp.infer.QuadratureELBO(2), (X, y, batch_size, kernel)

    def run(num, key):
        optimizer = optax.adam(optax.cosine_decay_schedule(rate, num))
        svi = SVI(sparse_model, guide, optimizer, loss)
        state = svi.init(key, *given)

        @jax.jit
        def steps(state):
            return jax.lax.scan(lambda s, _: svi.update(s, *given), state, length=num)

        steps = steps.lower(state).compile()
        start = time.perf_counter()
        state = jax.block_until_ready(steps(state))[0]
        return svi.get_params(state), time.perf_counter() - start

    params, taken = run(20, jax.random.key(1))
    params, taken = run(max(100, int(seconds * 20 / taken)), jax.random.key(0))
    return sgp.posterior(sparse_model, guide, params, X, y, None, kernel), taken


def made_up_field(seed, rows, lengthscale=0.03, noise=0.3, num_features=4000):
    """Places in a square with noisy values, and others with the function's own."""
    keys = jax.random.split(jax.random.key(seed), 4)
    X = jax.random.uniform(keys[0], (rows + 10_000, 2))
    phi = sgp.features.RandomFourier(sgp.kernels.Matern32(lengthscale), num_features, seed)
    weights = jax.random.normal(keys[1], (num_features,))
    f = jnp.concatenate([phi(some) @ weights for some in jnp.array_split(X, 50)])
    y = f + noise * jax.random.normal(keys[2], f.shape)
    return X[:rows], y[:rows], X[rows:], f[rows:]


def record_field(data, split, seed, method, *, rows=100_000):
    """The record of a unit: RMSE against the function."""
    X, y, X_new, f = made_up_field(seed, rows)
    posterior, seconds = by_neighbors(X, y, 30, sgp.kernels.Matern32)
    if not method.startswith("Vecchia"):
        posterior, seconds = by_points(X, y, sgp.kernels.Matern32, seconds)
    mean, variance = posterior.mean(X_new), posterior.variance(X_new)
    return {
        "rmse": float(jnp.sqrt(jnp.mean(jnp.square(mean - f)))),
        "nll": -float(jnp.mean(dist.Normal(mean, jnp.sqrt(variance)).log_prob(f))),
        "seconds": seconds,
    }


def scores(predictive, y, scale):
    """The scores of Heaton et al. (2019), section 4: means over places, in units of the data."""
    mean, deviation = np.asarray(predictive.mean), np.sqrt(np.asarray(predictive.variance))
    error = np.asarray(y) - mean
    z = error / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)
    cdf = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))
    crps = deviation * (z * (2.0 * cdf - 1.0) + 2.0 * density - 1.0 / math.sqrt(math.pi))
    half = 1.959964 * deviation
    beyond = np.maximum(np.abs(error) - half, 0.0)
    return {
        "mae": scale * float(np.mean(np.abs(error))),
        "rmse": scale * float(np.sqrt(np.mean(error**2))),
        "crps": scale * float(np.mean(crps)),
        "interval": scale * float(np.mean(2.0 * half + 40.0 * beyond)),
        "coverage": float(np.mean(beyond == 0.0)),
    }


def record_satellite(data, split, seed, method, *, kernel="matern12"):
    """The record of a unit, by the four scores and the coverage of the 95 % interval."""
    found = sgp.datasets.load_uci(data, split)
    parts = found.X_train, found.y_train, found.X_test
    X, y, X_new = (jnp.asarray(part, jnp.float32) for part in parts)
    num = number_in(method) if method.startswith("Vecchia") else 30
    posterior, seconds = by_neighbors(X, y, num, KERNELS[kernel])
    if not method.startswith("Vecchia"):
        posterior, seconds = by_points(X, y, KERNELS[kernel], seconds)
    start = time.perf_counter()
    predictive = posterior.predictive(X_new)
    jax.block_until_ready((predictive.mean, predictive.variance))
    predicting = time.perf_counter() - start
    return {
        **scores(predictive, found.y_test, float(found.y_scale)),
        "seconds": seconds,
        "predict_seconds": predicting,
    }


def main():
    """Print a record for each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {
        "density": record_density,
        "sampling": record_sampling,
        "cost": record_cost,
        "field": record_field,
        "satellite": record_satellite,
    }
    parser.add_argument("--data", choices=kinds, default="field")
    parser.add_argument("--methods", nargs="+", default=["Vecchia 30", "sparse 512"])
    given = parser.parse_args()
    for method in given.methods:
        print(method, kinds[given.data](given.data, 0, 0, method), flush=True)


if __name__ == "__main__":
    main()
