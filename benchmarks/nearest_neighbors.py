"""Densities and predictions given nearest neighbors: error, cost, and maps beside a sparse GP.

    python benchmarks/evidence.py neighbors-density neighbors-cost neighbors-field satellite
    python benchmarks/nearest_neighbors.py --data satellite --methods "Vecchia 30"

`density`: the error of log p(y) against the exact one, nats a row, for 5,000 places in a square and
a lengthscale of a tenth of its side, expected and for y drawn from the model, and of its gradient
in the logarithms of lengthscale, variance and noise. `sampling`: means of hyperparameters under
NUTS beside those by Cholesky, on 500 such rows. `cost`: seconds of a value with its gradient, for
up to a million places, neighbors found before. `field`: hyperparameters by SVI in mini-batches of
rows, then predictions at 10,000 other places of a field with 100,000 rows, against the true
function; a sparse GP with 512 points trains for as long. `satellite`: the same on the land surface
temperatures of Heaton et al. (2019), by their four scores, in degrees; it needs SCALEGP_DATA.
`counts`: Poisson counts of such a field with 20,000 rows, by independent normals that make up the
function of 10 neighbors, by 4,096 inducing values in mini-batches, and by a sparse GP that trains
for as long as the first; `batches`: with 200,000 rows, by inducing values, and a sparse GP that
trains for as long. Float32, but for densities and samplers.
"""

import argparse
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_median, init_to_value
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from sparse import number_in

import numpyro_scalegp as sgp

KERNELS = {"matern12": sgp.kernels.Matern12, "matern32": sgp.kernels.Matern32}


def density_and_gradient(X, y, parameters, estimator):
    """Log densities of y and of zeros, and the gradient of the former in log parameters."""

    def values(parameters):
        scale, variance, noise = jnp.exp(parameters)
        kernel = sgp.kernels.Matern32(scale, variance)
        gp = sgp.GaussianProcess(kernel, X, noise, estimator=estimator)
        found = gp.log_prob(jnp.stack([y, jnp.zeros_like(y)]))
        return found[0], found[1]

    (value, zeros), gradient = jax.jit(jax.value_and_grad(values, has_aux=True))(parameters)
    return value, zeros, gradient


@functools.lru_cache(1)
def exact_density(seed, rows, lengthscale, noise):
    """Places, values that the model draws there, log parameters, and the exact density."""
    key = jax.random.key(seed)
    X = jax.random.uniform(key, (rows, 2))
    parameters = jnp.log(jnp.array([lengthscale, 1.0, noise]))
    process = sgp.GaussianProcess(sgp.kernels.Matern32(lengthscale), X, noise)
    given = X, process.sample(jax.random.fold_in(key, 1)), parameters
    return given, density_and_gradient(*given, sgp.estimators.Cholesky())


def record_density(data, split, seed, method, *, rows=5000, lengthscale=0.1, noise=0.1):
    """The record of a unit: error of the log density, nats a row, and of its gradient."""
    with jax.enable_x64(True):
        given, (truth, of_zeros, of_truth) = exact_density(seed, rows, lengthscale, noise)
        groups = {"group_size": 1} if method.endswith("without groups") else {}
        estimator = sgp.estimators.Vecchia(number_in(method), **groups)
        value, zeros, gradient = density_and_gradient(*given, estimator)
        return {
            # The quadratic forms are the same in expectation; zeros have none.
            "expected_error": float(of_zeros - zeros) / rows,
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


def sparse_model(X, y, batch_size, kernel, counts=False):
    """The same with the function as a latent site."""
    scales, variance, noise, level = hyperparameters(X.shape[1])
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(kernel(scales, variance), X))
    with rows:
        observed = dist.Poisson(jnp.exp(level + f)) if counts else dist.Normal(level + f, noise)
        numpyro.sample("y", observed, obs=y)


def counts_model(X, y, neighbors, kernel):
    """Counts, with a function of nearest neighbors."""
    scales, variance, _, level = hyperparameters(X.shape[1])
    prior = sgp.NearestNeighborGP(kernel(scales, variance), X, neighbors)
    f = numpyro.sample("f", prior)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)


def hyperparameters(d):
    """Priors of inputs and targets that are standardized."""
    return (
        numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([d]).to_event(1)),
        numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
        numpyro.sample("noise", dist.LogNormal(-1.0, 1.0)),
        numpyro.sample("level", dist.Normal(0.0, 1.0)),
    )


def by_neighbors(X, y, num_neighbors, kernel, steps=400, batch_size=128, rate=0.03):
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


def by_points(
    X, y, kernel, seconds, batch_size=1024, num_inducing=512, rate=0.03, nodes=2, **options
):
    """The posterior of a sparse GP that trains for so many seconds, and medians."""
    guide = sgp.guides.AutoSparseGP(sparse_model, rest=AutoDelta, num_inducing=num_inducing)
    loss, given = sgp.infer.QuadratureELBO(nodes), (X, y, batch_size, kernel)

    def run(num, key, repeats=1):
        optimizer = optax.adam(optax.cosine_decay_schedule(rate, num))
        svi = SVI(sparse_model, guide, optimizer, loss)
        state = svi.init(key, *given, **options)

        @jax.jit
        def steps(state):
            return jax.lax.scan(lambda s, _: svi.update(s, *given, **options), state, length=num)

        steps = steps.lower(state).compile()
        for _ in range(repeats):
            start = time.perf_counter()
            last = jax.block_until_ready(steps(state))[0]
            taken = time.perf_counter() - start
        return svi.get_params(last), taken

    _, taken = run(50, jax.random.key(1), repeats=2)
    params, taken = run(max(100, int(seconds * 50 / taken)), jax.random.key(0))
    posterior = sgp.posterior(sparse_model, guide, params, X, y, None, kernel, **options)
    return (posterior, guide.median(params)), taken


def by_inducing_values(X, y, kernel, num_inducing=4096, steps=1000, batch_size=512, rate=0.03):
    """The posterior of a function of counts and medians, and all seconds."""
    start = time.perf_counter()
    guide = sgp.guides.AutoNearestNeighborGP(
        sparse_model, rest=AutoDelta, num_inducing=num_inducing, num_neighbors=10
    )
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    svi = SVI(sparse_model, guide, optimizer, sgp.infer.QuadratureELBO())
    given = X, y, batch_size, kernel, True
    result = svi.run(jax.random.key(0), steps, *given, progress_bar=False)
    posterior = sgp.posterior(sparse_model, guide, result, X, y, None, kernel, True)
    taken = time.perf_counter() - start
    return (posterior, guide.median(result.params)), taken


def by_white_values(X, y, num_neighbors, kernel, key, steps=300, rate=0.05, num_draws=30):
    """Draws of the function behind counts, its level included, and all seconds.

    The values that make up the function are independent normals, a priori and in the guide.
    """
    start = time.perf_counter()
    neighbors = sgp.estimators.Vecchia(num_neighbors).find_neighbors(X)
    whitened = handlers.reparam(counts_model, config={"f": sgp.infer.WhitenReparam()})
    values = {"f_white": jnp.zeros(len(X)), "lengthscale": jnp.std(X, axis=0) / 3.0}
    guide = AutoNormal(whitened, init_loc_fn=init_to_value(values=values), init_scale=0.5)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    svi = SVI(whitened, guide, optimizer, Trace_ELBO())
    given = X, y, neighbors, kernel
    result = svi.run(jax.random.key(0), steps, *given, progress_bar=False)
    draws = guide.sample_posterior(key, result.params, *given, sample_shape=(num_draws,))
    jax.block_until_ready(draws)
    return draws, time.perf_counter() - start


def moments_of_draws(draws, X, num_neighbors, kernel, X_new):
    """Mean and variance of level and function at other places, over draws."""

    def of_one(draw):
        prior = sgp.NearestNeighborGP(
            kernel(draw["lengthscale"], draw["variance"]),
            X,
            sgp.estimators.Vecchia(num_neighbors),
        )
        posterior = prior.condition(draw["f"])
        return draw["level"] + posterior.mean(X_new), posterior.variance(X_new)

    num = len(draws["level"])
    found = [of_one(jax.tree.map(lambda leaf, i=i: leaf[i], draws)) for i in range(num)]
    means, variances = (jnp.stack(part) for part in zip(*found, strict=True))
    return means.mean(axis=0), means.var(axis=0) + variances.mean(axis=0)


def made_up_field(seed, rows, lengthscale=0.03, noise=0.3, num_features=4000):
    """Places in a square, a function's values there with a noise, and others with its own."""
    keys = jax.random.split(jax.random.key(seed), 4)
    X = jax.random.uniform(keys[0], (rows + 10_000, 2))
    phi = sgp.features.RandomFourier(sgp.kernels.Matern32(lengthscale), num_features, seed)
    weights = jax.random.normal(keys[1], (num_features,))
    f = jnp.concatenate([phi(some) @ weights for some in jnp.array_split(X, 50)])
    errors = noise * jax.random.normal(keys[2], f.shape)
    return X[:rows], f[:rows], errors[:rows], X[rows:], f[rows:]


def of_function(mean, variance, f):
    """RMSE and NLL of predictions of a function."""
    return {
        "rmse": float(jnp.sqrt(jnp.mean(jnp.square(mean - f)))),
        "nll": -float(jnp.mean(dist.Normal(mean, jnp.sqrt(variance)).log_prob(f))),
    }


def record_field(data, split, seed, method, *, rows=100_000):
    """The record of a unit: errors against the function."""
    X, f, errors, X_new, f_new = made_up_field(seed, rows)
    y = f + errors
    posterior, seconds = by_neighbors(X, y, 30, sgp.kernels.Matern32)
    level = 0.0  # in the posterior's mean already
    if not method.startswith("Vecchia"):
        (posterior, median), seconds = by_points(X, y, sgp.kernels.Matern32, seconds)
        level = median["level"]
    moments = level + posterior.mean(X_new), posterior.variance(X_new)
    return {**of_function(*moments, f_new), "seconds": seconds}


def made_up_counts(seed, rows):
    """Counts of the field, with its function at other places and a key for what is drawn next."""
    X, f, _, X_new, f_new = made_up_field(seed, rows)
    key = jax.random.key(seed + 100)
    return X, jax.random.poisson(key, jnp.exp(f)).astype(f.dtype), X_new, f_new, key


def record_counts(data, split, seed, method, *, rows=20_000):
    """The record of a unit: errors against the function behind counts, its level included."""
    if method.startswith("inducing"):
        return record_batches(data, split, seed, method, rows=rows)
    X, y, X_new, f_new, key = made_up_counts(seed, rows)
    draws, seconds = by_white_values(X, y, 10, sgp.kernels.Matern32, key)
    if method.startswith("neighbors"):
        moments = moments_of_draws(draws, X, 10, sgp.kernels.Matern32, X_new)
        return {**of_function(*moments, f_new), "seconds": seconds}
    return of_sparse_counts(X, y, X_new, f_new, seconds)


def record_batches(data, split, seed, method, *, rows=200_000):
    """The same in mini-batches."""
    X, y, X_new, f_new, _ = made_up_counts(seed, rows)
    (posterior, median), seconds = by_inducing_values(X, y, sgp.kernels.Matern32)
    if not method.startswith("inducing"):
        return of_sparse_counts(X, y, X_new, f_new, seconds)
    moments = median["level"] + posterior.mean(X_new), posterior.variance(X_new)
    return {**of_function(*moments, f_new), "seconds": seconds}


def of_sparse_counts(X, y, X_new, f_new, seconds):
    """Errors of a sparse GP of counts that trains for so many seconds."""
    options = {"nodes": 20, "counts": True}
    (posterior, median), seconds = by_points(X, y, sgp.kernels.Matern32, seconds, **options)
    moments = median["level"] + posterior.mean(X_new), posterior.variance(X_new)
    return {**of_function(*moments, f_new), "seconds": seconds}


def scores(mean, variance, y, scale):
    """The scores of Heaton et al. (2019), section 4: means over places, in units of the data."""
    mean, deviation = np.asarray(mean), np.sqrt(np.asarray(variance))
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
    level, noise = 0.0, None  # in the posterior already
    if not method.startswith("Vecchia"):
        (posterior, median), seconds = by_points(X, y, KERNELS[kernel], seconds)
        level, noise = median["level"], jnp.square(median["noise"])
    start = time.perf_counter()
    predictive = posterior.predictive(X_new, noise)
    jax.block_until_ready((predictive.mean, predictive.variance))
    predicting = time.perf_counter() - start
    moments = level + predictive.mean, predictive.variance
    return {
        **scores(*moments, found.y_test, float(found.y_scale)),
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
        "counts": record_counts,
    }
    parser.add_argument("--data", choices=kinds, default="field")
    parser.add_argument("--methods", nargs="+", default=["Vecchia 30", "sparse 512"])
    given = parser.parse_args()
    for method in given.methods:
        print(method, kinds[given.data](given.data, 0, 0, method), flush=True)


if __name__ == "__main__":
    main()
