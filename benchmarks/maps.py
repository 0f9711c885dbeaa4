"""Maps with nearest neighbors: gamma likelihoods beside GPBoost, and prices beside the exact GP.

    python benchmarks/evidence.py water-vapor water-vapor-large house-prices
    python benchmarks/maps.py water_vapor --methods "LaplaceGP, 20 neighbors" --rows 20000

`water-vapor`: the amount of water vapor at random places among 100,000, under a gamma likelihood
with an unknown shape; Laplace's approximation with 20 neighbors, hyperparameters at the optimum,
and predictions at 5,000 other places. GPBoost has the same model and as many neighbors, its
hyperparameters by its own optimizer, and is scored by the same functions; both start from a
lengthscale of a tenth of the map. `house-prices`: logarithms of prices, with 30 neighbors and our
hyperparameters, beside the exact GP of the original study at its own; a gain is the difference of
mean log scores, with a standard error from 20 blocks of places. Both need SCALEGP_DATA.
"""

import argparse
import functools
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from nearest_neighbors import function_scores
from scipy.optimize import minimize
from sparse import number_in

import numpyro_scalegp as sgp

NUM_NODES = 40
NUM_DRAWS = 400
NUM_BLOCKS = 20  # of test places, by their first coordinate


def table(name):
    """The columns of a table of the data, without the head."""
    path = Path(os.environ["SCALEGP_DATA"]) / name
    return np.loadtxt(path, delimiter=",", skiprows=1, unpack=True)


def water_vapor(split, rows, new_rows=5_000):
    """Places and amounts, for estimation and for predictions."""
    vapor, *places = table("water_vapor/water_vapor.csv.gz")
    order = np.random.default_rng(split).permutation(len(vapor))
    train, test = order[:rows], order[rows : rows + new_rows]
    X = np.column_stack(places).astype(np.float32)
    y = vapor.astype(np.float32)
    return X[train], y[train], X[test], y[test]


def gamma(shape, f):
    return dist.Gamma(shape, shape * jnp.exp(-f))


def amounts(parameters, X, estimator):
    """Positive observations of a function that is integrated out by Laplace's approximation."""
    lengthscale, variance, shape = jnp.exp(parameters[:3])
    kernel = sgp.kernels.Matern32(lengthscale, variance)
    likelihood = functools.partial(gamma, shape)
    return sgp.LaplaceGP(kernel, X, likelihood, mean=parameters[3], estimator=estimator)


def prices(parameters, X, estimator):
    """Noisy observations of a function of mean zero, of smoothness 1.5 or a fourth parameter."""
    lengthscale, variance, noise_variance, *smoothness = jnp.exp(parameters)
    if smoothness:
        kernel = sgp.kernels.Matern(lengthscale, *smoothness, variance)
    else:
        kernel = sgp.kernels.Matern32(lengthscale, variance)
    return sgp.GaussianProcess(kernel, X, noise_variance, estimator=estimator)


def optimum(process, start, X, y, estimator):
    """The parameters with the largest density, by L-BFGS; the probes are the same at each step."""

    @jax.jit
    @jax.value_and_grad
    def loss(parameters):
        return -process(parameters, X, estimator).log_prob(y) / len(X)

    def evaluate(parameters):
        value, gradient = loss(jnp.asarray(parameters, jnp.float32))
        return float(value), np.asarray(gradient, np.float64)

    # Few steps of a line search, which fails at the end: there rounding errors are larger.
    options = {"ftol": 1e-5, "maxls": 6}
    result = minimize(evaluate, start, jac=True, method="L-BFGS-B", options=options)
    return jnp.asarray(result.x, jnp.float32)


def fit_amounts(X, y, X_new, num_neighbors):
    """Moments of f at new places and hyperparameters, with seconds, by `LaplaceGP`."""
    start = time.perf_counter()
    extent = float(np.ptp(X, axis=0).mean())
    estimator = sgp.estimators.Vecchia(num_neighbors).find_neighbors(X)
    initial = [np.log(0.1 * extent), 0.0, 0.0, np.log(y.mean())]
    parameters = optimum(amounts, initial, X, y, estimator)
    fitted = time.perf_counter()
    posterior = amounts(parameters, X, estimator).condition(y)
    moments = jax.block_until_ready((posterior.mean(X_new), posterior.variance(X_new)))
    estimates = dict(zip(("lengthscale", "variance", "shape"), jnp.exp(parameters), strict=False))
    return moments, estimates, (fitted - start, time.perf_counter() - fitted)


def fit_by_gpboost(X, y, X_new, num_neighbors):
    """The same by GPBoost, with its own optimizer and number of probes."""
    import gpboost

    start = time.perf_counter()
    extent = float(np.ptp(X, axis=0).mean())
    model = gpboost.GPModel(
        gp_coords=X,
        cov_function="matern",
        cov_fct_shape=1.5,
        likelihood="gamma",
        gp_approx="vecchia",
        num_neighbors=num_neighbors,
        matrix_inversion_method="iterative",
        seed=1,
    )
    ones = np.ones((len(X), 1))
    model.fit(y=y, X=ones, params={"init_cov_pars": np.array([1.0, 0.1 * extent])})
    fitted = time.perf_counter()
    predicted = model.predict(
        gp_coords_pred=X_new,
        X_pred=np.ones((len(X_new), 1)),
        predict_var=True,
        predict_response=False,
    )
    predicting = time.perf_counter() - fitted
    variance, lengthscale = np.asarray(model.get_cov_pars()).ravel()
    estimates = {
        "lengthscale": lengthscale,
        "variance": variance,
        "shape": np.asarray(model.get_aux_pars()).ravel()[0],
    }
    return (predicted["mu"], predicted["var"]), estimates, (fitted - start, predicting)


def scores_of_amounts(mean, variance, shape, y):
    """Mean negative log density and CRPS of gamma predictions, f being normal."""
    mean, deviation = jnp.asarray(mean), jnp.sqrt(jnp.asarray(variance))
    nodes, weights = np.polynomial.hermite_e.hermegauss(NUM_NODES)
    densities = gamma(shape, mean[:, None] + deviation[:, None] * nodes).log_prob(y[:, None])
    logs = jax.scipy.special.logsumexp(densities, b=weights / weights.sum(), axis=1)
    keys = jax.random.split(jax.random.key(0))
    f = mean + deviation * jax.random.normal(keys[0], (NUM_DRAWS, len(mean)))
    draws = gamma(shape, f).sample(keys[1])
    return {"nll": -float(logs.mean()), "crps": float(sgp.scores.crps(draws, y).mean())}


def record_water_vapor(data, split, seed, method, *, rows=20_000):
    """The record of a unit: scores at new places, and seconds."""
    X, y, X_new, y_new = water_vapor(split, rows)
    fit = fit_by_gpboost if method.startswith("GPBoost") else fit_amounts
    moments, estimates, seconds = fit(X, y, X_new, number_in(method))
    estimates = {name: float(value) for name, value in estimates.items()}
    return {
        **scores_of_amounts(*moments, estimates["shape"], y_new),
        **{name: estimates[name] for name in ("lengthscale", "variance", "shape")},
        "seconds": seconds[0],
        "predict_seconds": seconds[1],
    }


def record_house_prices(data, split, seed, method, *, num_neighbors=30):
    """The record of a unit: scores at new places, and divergences from the exact process.

    `method` is the kind of places, and with "any smoothness" that is estimated, too.
    """
    kind, *any_smoothness = method.split(", ")
    X, y = _places_and_prices("train")
    X_new, y_new = _places_and_prices(kind)
    exact = table(f"house_prices/exact_{kind}.csv.gz")
    level = y.mean()
    start = time.perf_counter()
    estimator = sgp.estimators.Vecchia(num_neighbors).find_neighbors(X)
    initial = np.log([1.0, 0.4, 0.1, *(1.0 for _ in any_smoothness)])
    parameters = optimum(prices, initial, X, y - level, estimator)
    posterior = prices(parameters, X, estimator).condition(y - level)
    predicted = posterior.predictive(X_new)
    seconds = time.perf_counter() - start
    mean, variance = (np.asarray(a, np.float64) for a in (predicted.mean, predicted.variance))
    truth = y_new - level
    ratio = (variance + (mean - exact[0]) ** 2) / exact[1]
    divergence = 0.5 * (np.log(exact[1] / variance) + ratio - 1.0)
    of_exact = function_scores(exact[0], exact[1], truth)
    gain = _log_score(mean, variance, truth) - _log_score(exact[0], exact[1], truth)
    # Gains at near places go together.
    blocks = np.array_split(gain[np.argsort(X_new[:, 0])], NUM_BLOCKS)
    smoothness = {"smoothness": float(jnp.exp(parameters[3]))} if any_smoothness else {}
    return {
        **smoothness,
        "gain": float(np.mean(gain)),
        "gain_error": float(np.std([*map(np.mean, blocks)], ddof=1) / np.sqrt(NUM_BLOCKS)),
        **function_scores(mean, variance, truth),
        **{f"exact_{name}": score for name, score in of_exact.items()},
        "divergence": float(np.mean(divergence)),
        "seconds": seconds,
    }


def _log_score(mean, variance, f):
    return np.asarray(dist.Normal(mean, np.sqrt(variance)).log_prob(f), np.float64)


def _places_and_prices(kind):
    east, north, price = table(f"house_prices/{kind}.csv.gz")
    return np.column_stack([east, north]) / 1e3, price  # in kilometers


def main():
    """Print a record for each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {"water_vapor": record_water_vapor, "house_prices": record_house_prices}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--split", type=int, default=0)
    args = parser.parse_args()
    options = {} if args.rows is None else {"rows": args.rows}
    for method in args.methods:
        print(method, kinds[args.kind](args.kind, args.split, 0, method, **options), flush=True)


if __name__ == "__main__":
    main()
