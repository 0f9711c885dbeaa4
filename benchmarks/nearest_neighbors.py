"""Densities and predictions with nearest neighbors: error, cost, and maps against a sparse GP.

    python benchmarks/evidence.py neighbors-density neighbors-cost neighbors-field satellite
    python benchmarks/nearest_neighbors.py --data satellite --methods "Vecchia 30"

`density`: the error of log p(y) against the exact density, in nats per observation, for 5,000
inputs in a square and a lengthscale of a tenth of its side: its expectation, its value for a draw
of y, and the error of the gradient in the logarithms of lengthscale, variance and noise.
`sampling`: means of hyperparameters under NUTS compared with Cholesky, on 500 such observations.
`cost`: seconds of a value with its gradient, for up to a million inputs, excluding the neighbor
search. `search`: seconds of the search, up to ten million inputs. `field`: hyperparameters by SVI
in mini-batches, then predictions at 10,000 new inputs of a field with 100,000 observations,
compared with the true function; a sparse GP with 512 points trains for the same time. `satellite`:
the same for the land surface temperatures of Heaton et al. (2019), with their four scores, in
degrees; it needs SCALEGP_DATA. `counts`: 20,000 Poisson counts given such a field, by whitened
values of a 10-neighbor GP with independent normals as the guide, by 4,096 inducing values in
mini-batches, and by a sparse GP that trains as long as the first method. `batches`: 200,000 counts,
by inducing values, and by a sparse GP that trains for the same time. In float32, except for
densities and samplers.
"""

import argparse
import functools
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
from scipy.spatial import cKDTree
from sparse import number_in

import numpyro_scalegp as sgp

KERNELS = {"matern12": sgp.kernels.Matern12, "matern32": sgp.kernels.Matern32}


def density_and_gradient(X, y, parameters, estimator):
    """Log densities of y and of zeros, and the gradient of the first in log parameters."""

    def values(parameters):
        scale, variance, noise = jnp.exp(parameters)
        kernel = sgp.kernels.Matern32(scale, variance)
        gp = sgp.GaussianProcess(kernel, X, noise, estimator=estimator)
        densities = gp.log_prob(jnp.stack([y, jnp.zeros_like(y)]))
        return densities[0], densities[1]

    (value, zeros), gradient = jax.jit(jax.value_and_grad(values, has_aux=True))(parameters)
    return value, zeros, gradient


@functools.lru_cache(1)
def exact_density(seed, rows, lengthscale, noise):
    """Inputs, a draw of y from the model, log parameters, and the exact density."""
    key = jax.random.key(seed)
    X = jax.random.uniform(key, (rows, 2))
    parameters = jnp.log(jnp.array([lengthscale, 1.0, noise]))
    process = sgp.GaussianProcess(sgp.kernels.Matern32(lengthscale), X, noise)
    arguments = X, process.sample(jax.random.fold_in(key, 1)), parameters
    return arguments, density_and_gradient(*arguments, sgp.estimators.Cholesky())


def record_density(data, split, seed, method, *, rows=5000, lengthscale=0.1, noise=0.1):
    """The record of a unit: errors of log density and gradient, in nats per observation."""
    with jax.enable_x64(True):
        arguments, (truth, of_zeros, of_truth) = exact_density(seed, rows, lengthscale, noise)
        groups = {"group_size": 1} if method.endswith("without groups") else {}
        estimator = sgp.estimators.Vecchia(number_in(method), **groups)
        value, zeros, gradient = density_and_gradient(*arguments, estimator)
        return {
            # The quadratic forms have the same expectation, so zeros give the expected error.
            "expected_error": float(of_zeros - zeros) / rows,
            "error": float(abs(value - truth)) / rows,
            "gradient_error": float(jnp.linalg.norm(gradient - of_truth)) / rows,
        }


def sampled_model(X, y, estimator):
    """A GP regression with priors of three hyperparameters."""
    scale = numpyro.sample("lengthscale", dist.LogNormal(-2.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    kernel = sgp.kernels.Matern32(scale, variance)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise, estimator=estimator), obs=y)


def record_sampling(data, split, seed, method, *, rows=500, num_warmup=300, num_samples=1000):
    """The record of a unit: errors of means under NUTS, in standard deviations of exact draws."""
    with jax.enable_x64(True):
        key = jax.random.key(seed)
        X = jax.random.uniform(key, (rows, 2))
        prior = sgp.GaussianProcess(sgp.kernels.Matern32(0.1), X, 0.1)
        y = prior.sample(jax.random.fold_in(key, 1))
        moments, seconds = {}, {}
        estimators = {"exact": sgp.estimators.Cholesky()}
        estimators[method] = sgp.estimators.Vecchia(number_in(method))
        for name, estimator in estimators.items():
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
            moments[name] = {k: (jnp.log(v).mean(), jnp.log(v).std()) for k, v in draws.items()}
        exact = moments["exact"]
        differences = {
            name: float(abs(mean - exact[name][0]) / exact[name][1])
            for name, (mean, _) in moments[method].items()
        }
        return {
            "off": max(differences.values()),
            "seconds": seconds[method],
            "exact_seconds": seconds["exact"],
        }


def record_cost(data, split, seed, method, *, num_neighbors=30, columns=2, repeats=5):
    """The record of a unit: seconds of the neighbor search, and of a value with its gradient."""
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

    arguments = jnp.log(jnp.array([0.1, 1.0, 0.1])), X, y, estimator
    start = time.perf_counter()
    jax.block_until_ready(value(*arguments))
    first = time.perf_counter() - start
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(value(*arguments))
        times.append(time.perf_counter() - start)
    seconds = float(np.median(times))
    return {
        "seconds": seconds,
        "microseconds_a_row": 1e6 * seconds / rows,
        "search_seconds": searching,
        "first_seconds": first,
    }


def record_search(data, split, seed, method, *, num_neighbors=30, columns=2):
    """The record of a unit: seconds of the search, and of a search without an order by scipy."""
    X = np.random.default_rng(seed).uniform(size=(number_in(method), columns)).astype(np.float32)
    start = time.perf_counter()
    jax.block_until_ready(sgp.estimators.Vecchia(num_neighbors).find_neighbors(X))
    searching = time.perf_counter() - start
    start = time.perf_counter()
    cKDTree(X).query(X, k=num_neighbors + 1, workers=-1)
    return {"search_seconds": searching, "tree_seconds": time.perf_counter() - start}


def vecchia_model(X, y, estimator, batch_size, kernel):
    """A GP regression by Vecchia's approximation, in mini-batches of conditional densities."""
    scales, variance, noise, level = hyperparameters(X.shape[1])
    if batch_size is not None:
        with sgp.plate("rows", len(X), batch_size) as index:
            estimator = estimator.on(index)
    gp = sgp.GaussianProcess(kernel(scales, variance), X, noise**2, mean=level, estimator=estimator)
    numpyro.sample("y", gp, obs=y)


def sparse_model(X, y, batch_size, kernel, counts=False):
    """A regression, or a model of counts, with the function as a latent site."""
    scales, variance, noise, level = hyperparameters(X.shape[1])
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(kernel(scales, variance), X))
    with rows:
        observed = dist.Poisson(jnp.exp(level + f)) if counts else dist.Normal(level + f, noise)
        numpyro.sample("y", observed, obs=y)


def counts_model(X, y, neighbors, kernel):
    """Counts, with a nearest-neighbor GP as a latent site."""
    scales, variance, _, level = hyperparameters(X.shape[1])
    prior = sgp.NearestNeighborGP(kernel(scales, variance), X, neighbors)
    f = numpyro.sample("f", prior)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)


def hyperparameters(d):
    """Priors for standardized inputs and targets."""
    return (
        numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([d]).to_event(1)),
        numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
        numpyro.sample("noise", dist.LogNormal(-1.0, 1.0)),
        numpyro.sample("level", dist.Normal(0.0, 1.0)),
    )


def by_neighbors(X, y, num_neighbors, kernel, steps=400, batch_size=128, rate=0.03):
    """The posterior, and seconds including compilation."""
    start = time.perf_counter()
    estimator, init = sgp.estimators.Vecchia(num_neighbors), init_to_median()
    scales = jnp.std(X, axis=0)
    # A rough fit, then a fit with neighbors found by the fitted lengthscales.
    for num in (steps // 4, steps):
        estimator = estimator.find_neighbors(X, kernel(scales))
        guide = AutoDelta(vecchia_model, init_loc_fn=init)
        optimizer = optax.adam(optax.cosine_decay_schedule(rate, num))
        svi = SVI(vecchia_model, guide, optimizer, Trace_ELBO())
        arguments = X, y, estimator, batch_size, kernel
        result = svi.run(jax.random.key(0), num, *arguments, progress_bar=False)
        values = guide.median(result.params)
        scales, init = values["lengthscale"], init_to_value(values=values)
    posterior = sgp.posterior(vecchia_model, guide, result, X, y, estimator, None, kernel)
    return posterior, time.perf_counter() - start


def by_points(
    X, y, kernel, seconds, batch_size=1024, num_inducing=512, rate=0.03, nodes=2, **options
):
    """The posterior and medians of a sparse GP that trains for `seconds`, and its true seconds."""
    guide = sgp.guides.AutoSparseGP(sparse_model, rest=AutoDelta, num_inducing=num_inducing)
    loss, arguments = sgp.infer.QuadratureELBO(nodes), (X, y, batch_size, kernel)

    def run(num, key, repeats=1):
        optimizer = optax.adam(optax.cosine_decay_schedule(rate, num))
        svi = SVI(sparse_model, guide, optimizer, loss)
        state = svi.init(key, *arguments, **options)

        @jax.jit
        def steps(state):
            return jax.lax.scan(
                lambda state, _: svi.update(state, *arguments, **options), state, length=num
            )

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
    """The posterior of the function and medians for counts, and seconds."""
    start = time.perf_counter()
    guide = sgp.guides.AutoNearestNeighborGP(
        sparse_model, rest=AutoDelta, num_inducing=num_inducing, num_neighbors=10
    )
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    svi = SVI(sparse_model, guide, optimizer, sgp.infer.QuadratureELBO())
    arguments = X, y, batch_size, kernel, True
    result = svi.run(jax.random.key(0), steps, *arguments, progress_bar=False)
    posterior = sgp.posterior(sparse_model, guide, result, X, y, None, kernel, True)
    taken = time.perf_counter() - start
    return (posterior, guide.median(result.params)), taken


def by_white_values(X, y, num_neighbors, kernel, key, steps=300, rate=0.05, num_draws=30):
    """Draws of level and function for counts, and seconds.

    The whitened values of the function are independent normals in the prior and in the guide.
    """
    start = time.perf_counter()
    neighbors = sgp.estimators.Vecchia(num_neighbors).find_neighbors(X)
    whitened = handlers.reparam(counts_model, config={"f": sgp.infer.WhitenReparam()})
    values = {"f_white": jnp.zeros(len(X)), "lengthscale": jnp.std(X, axis=0) / 3.0}
    guide = AutoNormal(whitened, init_loc_fn=init_to_value(values=values), init_scale=0.5)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    svi = SVI(whitened, guide, optimizer, Trace_ELBO())
    arguments = X, y, neighbors, kernel
    result = svi.run(jax.random.key(0), steps, *arguments, progress_bar=False)
    draws = guide.sample_posterior(key, result.params, *arguments, sample_shape=(num_draws,))
    jax.block_until_ready(draws)
    return draws, time.perf_counter() - start


def moments_of_draws(draws, X, num_neighbors, kernel, X_new):
    """Mean and variance of level plus function at new inputs, over draws."""

    def of_draw(draw):
        prior = sgp.NearestNeighborGP(
            kernel(draw["lengthscale"], draw["variance"]),
            X,
            sgp.estimators.Vecchia(num_neighbors),
        )
        posterior = prior.condition(draw["f"])
        return draw["level"] + posterior.mean(X_new), posterior.variance(X_new)

    num = len(draws["level"])
    moments = [of_draw(jax.tree.map(lambda leaf, i=i: leaf[i], draws)) for i in range(num)]
    means, variances = map(jnp.stack, zip(*moments, strict=True))
    return means.mean(axis=0), means.var(axis=0) + variances.mean(axis=0)


def simulated_field(seed, rows, lengthscale=0.03, noise=0.3, num_features=4000):
    """Inputs in a square, function values and noise there, and new inputs and function values."""
    keys = jax.random.split(jax.random.key(seed), 4)
    X = jax.random.uniform(keys[0], (rows + 10_000, 2))
    phi = sgp.features.RandomFourier(sgp.kernels.Matern32(lengthscale), num_features, seed)
    weights = jax.random.normal(keys[1], (num_features,))
    f = jnp.concatenate([phi(chunk) @ weights for chunk in jnp.array_split(X, 50)])
    errors = noise * jax.random.normal(keys[2], f.shape)
    return X[:rows], f[:rows], errors[:rows], X[rows:], f[rows:]


def function_scores(mean, variance, f):
    """RMSE and NLL of normal predictions of the values f."""
    return {
        "rmse": float(jnp.sqrt(jnp.mean(jnp.square(mean - f)))),
        "nll": -float(jnp.mean(dist.Normal(mean, jnp.sqrt(variance)).log_prob(f))),
    }


def record_field(data, split, seed, method, *, rows=100_000):
    """The record of a unit: errors against the true function."""
    X, f, errors, X_new, f_new = simulated_field(seed, rows)
    y = f + errors
    posterior, seconds = by_neighbors(X, y, 30, sgp.kernels.Matern32)
    level = 0.0  # the posterior's mean includes it
    if not method.startswith("Vecchia"):
        (posterior, median), seconds = by_points(X, y, sgp.kernels.Matern32, seconds)
        level = median["level"]
    moments = level + posterior.mean(X_new), posterior.variance(X_new)
    return {**function_scores(*moments, f_new), "seconds": seconds}


def simulated_counts(seed, rows):
    """Counts given the field, the function at new inputs, and a key for further draws."""
    X, f, _, X_new, f_new = simulated_field(seed, rows)
    key = jax.random.key(seed + 100)
    return X, jax.random.poisson(key, jnp.exp(f)).astype(f.dtype), X_new, f_new, key


def record_counts(data, split, seed, method, *, rows=20_000):
    """The record of a unit: errors against the function behind the counts, level included."""
    if method.startswith("inducing"):
        return record_batches(data, split, seed, method, rows=rows)
    X, y, X_new, f_new, key = simulated_counts(seed, rows)
    draws, seconds = by_white_values(X, y, 10, sgp.kernels.Matern32, key)
    if method.startswith("neighbors"):
        moments = moments_of_draws(draws, X, 10, sgp.kernels.Matern32, X_new)
        return {**function_scores(*moments, f_new), "seconds": seconds}
    return of_sparse_counts(X, y, X_new, f_new, seconds)


def record_batches(data, split, seed, method, *, rows=200_000):
    """The record of a unit like `record_counts`, but in mini-batches."""
    X, y, X_new, f_new, _ = simulated_counts(seed, rows)
    (posterior, median), seconds = by_inducing_values(X, y, sgp.kernels.Matern32)
    if not method.startswith("inducing"):
        return of_sparse_counts(X, y, X_new, f_new, seconds)
    moments = median["level"] + posterior.mean(X_new), posterior.variance(X_new)
    return {**function_scores(*moments, f_new), "seconds": seconds}


def of_sparse_counts(X, y, X_new, f_new, seconds):
    """Errors of a sparse GP for counts that trains for `seconds`."""
    options = {"nodes": 20, "counts": True}
    (posterior, median), seconds = by_points(X, y, sgp.kernels.Matern32, seconds, **options)
    moments = median["level"] + posterior.mean(X_new), posterior.variance(X_new)
    return {**function_scores(*moments, f_new), "seconds": seconds}


def scores(mean, variance, y, scale):
    """The scores of Heaton et al. (2019), section 4: means over locations, in units of the data."""
    predictive, y = dist.Normal(mean, jnp.sqrt(variance)), jnp.asarray(y, mean.dtype)
    error = jnp.abs(y - mean)
    return {
        "mae": scale * float(error.mean()),
        "rmse": scale * float(jnp.sqrt(jnp.square(error).mean())),
        "crps": scale * float(sgp.scores.crps(predictive, y).mean()),
        "interval": scale * float(sgp.scores.interval_score(predictive, y, level=0.95).mean()),
        "coverage": float(sgp.scores.coverage(predictive, y, level=0.95)),
    }


def record_satellite(data, split, seed, method, *, kernel="matern12"):
    """The record of a unit: four scores, and the coverage of the 95 % interval."""
    image = sgp.datasets.load_uci(data, split)
    arrays = image.X_train, image.y_train, image.X_test
    X, y, X_new = (jnp.asarray(array, jnp.float32) for array in arrays)
    num = number_in(method) if method.startswith("Vecchia") else 30
    posterior, seconds = by_neighbors(X, y, num, KERNELS[kernel])
    level, noise = 0.0, None  # the posterior includes them
    if not method.startswith("Vecchia"):
        (posterior, median), seconds = by_points(X, y, KERNELS[kernel], seconds)
        level, noise = median["level"], jnp.square(median["noise"])
    start = time.perf_counter()
    predictive = posterior.predictive(X_new, noise)
    jax.block_until_ready((predictive.mean, predictive.variance))
    predicting = time.perf_counter() - start
    moments = level + predictive.mean, predictive.variance
    return {
        **scores(*moments, image.y_test, float(image.y_scale)),
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
    options = parser.parse_args()
    for method in options.methods:
        print(method, kinds[options.data](options.data, 0, 0, method), flush=True)


if __name__ == "__main__":
    main()
