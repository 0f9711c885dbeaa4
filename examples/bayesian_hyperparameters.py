"""Unbiased gradients: the posterior over all hyperparameters of an exact GP.

The gradient of the log marginal likelihood is estimated without bias: its trace by random probe
vectors, and its linear solves by conjugate gradients with Russian roulette, which stop at a random
iteration and reweight the terms. NumPyro's guides and BlackJAX's stochastic gradient Langevin
dynamics use this estimate. On a few hundred observations the results are compared with NUTS on the
exact density; then the same code runs on thousands of observations. The data are flights from New
York or, if the environment variable `SCALEGP_DATA` names a folder of UCI data sets, elevators.

The printed table compares the means and standard deviations of the log hyperparameters with those
from NUTS. The figures show the intervals of all methods, first for the small data set, then for the
large one.
"""

import argparse
import os
from pathlib import Path

import arviz
import blackjax
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import potential_energy

import numpyro_scalegp as sgp

matplotlib.use("Agg")


def model(X, y, estimator=None):
    # In alphabetical order, so that guides, NUTS and `ravel_pytree` flatten them to one vector.
    num_inputs = X.shape[1]
    values = {
        "lengthscale": numpyro.sample(
            "lengthscale", dist.LogNormal(1.0, 1.0).expand([num_inputs]).to_event(1)
        ),
        "noise": numpyro.sample("noise", dist.LogNormal(-1.0, 1.0)),
        "variance": numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
    }
    kernel = sgp.kernels.Matern32(values["lengthscale"], values["variance"])
    gp = sgp.GaussianProcess(kernel, X, values["noise"] ** 2, estimator=estimator)
    numpyro.sample("y", gp, obs=y)


def unbiased(num_rows, mean_iterations, rank, num_features=2000, num_probes=16):
    """An estimator whose gradient has no bias, at a chosen expected number of iterations."""
    solver = sgp.solvers.RussianRouletteCG.with_mean(
        mean_iterations, num_rows, preconditioner=sgp.preconditioners.PivotedCholesky(rank)
    )
    return sgp.estimators.Pathwise(solver, num_probes, num_features, num_logdet_probes=0)


def fit(key, guide, num_steps, step_size, *args, init_params=None):
    """SVI with a step size that decreases to zero, so that the gradient noise averages out."""
    optimizer = optax.adam(optax.cosine_decay_schedule(step_size, num_steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    return svi.run(key, num_steps, *args, progress_bar=False, init_params=init_params).params


def langevin(key, guide, params, num_steps, step_size, *args):
    """SGLD in whitened coordinates z: log hyperparameters are loc + L z, as in the guide."""
    posterior = guide.get_posterior(params)
    _, unravel = ravel_pytree(guide.median(params))

    def gradient(z, key):  # BlackJAX's minibatch is here the key of the probes
        def log_density(z):
            logs = unravel(posterior.mean + posterior.scale_tril @ z)
            return -potential_energy(numpyro.handlers.seed(model, key), args, {}, logs)

        return jax.grad(log_density)(z)

    algorithm = blackjax.sgld(gradient)

    def step(z, keys):
        z = algorithm.step(keys[0], z, keys[1], 0.5 * step_size)
        return z, z

    keys = jax.random.split(key, (num_steps, 2))
    _, path = jax.jit(lambda z: jax.lax.scan(step, z, keys))(jnp.zeros_like(posterior.mean))
    logs = posterior.mean + path[num_steps // 20 :] @ posterior.scale_tril.T
    return jax.tree.map(jnp.exp, jax.vmap(unravel)(logs))


def nuts(key, guide, params, num_draws, *args):
    """NUTS on the exact density, with the covariance of the guide as inverse mass matrix."""
    params = jax.tree.map(lambda value: jnp.asarray(value, float), params)
    kernel = NUTS(
        model,
        init_strategy=init_to_value(values=guide.median(params)),
        inverse_mass_matrix=guide.get_posterior(params).covariance_matrix,
        dense_mass=True,
        adapt_mass_matrix=False,
    )
    mcmc = MCMC(kernel, num_warmup=num_draws // 5, num_samples=num_draws, progress_bar=False)
    mcmc.run(key, *args)
    return mcmc.get_samples()


def logs(draws):
    """The draws' logarithms as a matrix: lengthscales, noise, variance."""
    names = ("lengthscale", "noise", "variance")
    return np.log(np.column_stack([np.asarray(draws[name], np.float64) for name in names]))


def compare(draws, reference):
    """For log values: differences of means in standard deviations, ratios of the deviations."""
    exact = logs(reference)
    center, scale = exact.mean(0), exact.std(0)
    return {
        name: ((logs(sample).mean(0) - center) / scale, logs(sample).std(0) / scale)
        for name, sample in draws.items()
    }


def print_table(table, columns):
    print(f"{'mean, deviation':20}" + "".join(f"{name:>24}" for name in table))
    for i, name in enumerate([*columns, "noise", "variance"]):
        cells = (f"{shift[i]:+14.2f} sd {ratio[i]:6.2f}" for shift, ratio in table.values())
        print(f"{name:20}" + "".join(cells))


def predict(draws, X, y, X_test, y_test):
    """RMSE and NLL of the mixture over draws of the hyperparameters."""
    estimator = sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients(max_epochs=200))
    predictive = sgp.posterior(model, draws, X, y, estimator).predictive(X_test)
    rmse = jnp.sqrt(jnp.mean((predictive.mean - y_test) ** 2))
    return {"rmse": float(rmse), "nll": -float(predictive.log_prob(y_test).mean())}


def plot(path, draws):
    """Draw the intervals of the log hyperparameters, with ArviZ 0.2x or 1.x."""
    is_new = int(arviz.__version__.split(".")[0]) >= 1
    count, data = min(len(values["noise"]) for values in draws.values()), {}
    for name, values in draws.items():
        index = np.linspace(0, len(values["noise"]) - 1, count).astype(int)
        posterior = {site: np.log(np.asarray(value))[None, index] for site, value in values.items()}
        data[name] = arviz.from_dict({"posterior": posterior} if is_new else posterior)
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_new:
        figure = arviz.plot_forest(data, combined=True, figure_kwargs={"figsize": (8, 9)})
        figure.add_legend("model")
        figure.savefig(path)
    else:
        options = {"model_names": list(data), "combined": True, "figsize": (8, 9)}
        axes = arviz.plot_forest(list(data.values()), **options)
        axes[0].figure.savefig(path, bbox_inches="tight")


def load_data(num_rows):
    """Random data points, without inputs that hardly vary or nearly repeat an earlier input."""
    if "SCALEGP_DATA" in os.environ:
        data = sgp.datasets.load_uci("elevators")
    else:
        data = sgp.datasets.load_flights()
    X, columns = data.X_train, []
    for column in range(X.shape[1]):
        varies = np.mean(X[:, column] == np.median(X[:, column])) < 0.99
        if varies and all(abs(np.mean(X[:, column] * X[:, k])) < 0.95 for k in columns):
            columns.append(column)
    rows = np.random.default_rng(0).permutation(len(X))[:num_rows]
    arrays = (
        X[rows][:, columns],
        data.y_train[rows],
        data.X_test[:2000, columns],
        data.y_test[:2000],
    )
    return *map(jnp.asarray, arrays), [data.columns[k] for k in columns]


def against_nuts(num_rows, num_steps, num_draws, folder):
    """Run all methods on few data; returns the comparison, the last guide and its parameters."""
    X, y, *_, columns = load_data(num_rows)
    start = AutoDelta(model)
    start = start.median(fit(jax.random.key(0), start, 100, 0.1, X, y))  # by Cholesky
    args, draws = (X, y, unbiased(num_rows, mean_iterations=10, rank=20)), {}
    for Guide in AutoNormal, AutoMultivariateNormal:
        guide = Guide(model, init_loc_fn=init_to_value(values=start), init_scale=0.1)
        params = fit(jax.random.key(1), guide, num_steps, 0.03, *args)
        draws[Guide.__name__] = guide.sample_posterior(
            jax.random.key(2), params, sample_shape=(4000,)
        )
    draws["SGLD"] = langevin(jax.random.key(3), guide, params, 2 * num_steps, 0.2, *args)
    with jax.enable_x64(True):
        exact = nuts(jax.random.key(4), guide, params, num_draws, *load_data(num_rows)[:2])
    table = compare(draws, exact)
    print_table(table, columns)
    plot(Path(folder) / "small.svg", {"NUTS": exact, **draws})
    return table, guide, params


def with_more_rows(guide, params, small_rows, num_rows, num_steps, folder):
    """Continue with more data from the fitted guide, its deviations scaled by 1 / sqrt(n)."""
    X, y, *test, _ = load_data(num_rows)
    args = X, y, unbiased(len(y), mean_iterations=15, rank=100, num_features=10_000)
    scale = params["auto_scale_tril"] * (small_rows / len(y)) ** 0.5
    params = {**params, "auto_scale_tril": scale}
    params = fit(jax.random.key(5), guide, num_steps, 0.03, *args, init_params=params)
    normal = guide.sample_posterior(jax.random.key(6), params, sample_shape=(4000,))
    chain = langevin(jax.random.key(7), guide, params, 2 * num_steps, 0.2, *args)
    plot(Path(folder) / "large.svg", {"AutoMultivariateNormal": normal, "SGLD": chain})
    points = {
        "mean": jax.tree.map(lambda v: v[None], guide.median(params)),
        "posterior": jax.tree.map(lambda v: v[:8], normal),
    }
    scores = {name: predict(p, X, y, *test) for name, p in points.items()}
    print(f"{len(y)} rows: {scores}")
    return scores


def main(
    num_rows=300,
    num_steps=1000,
    num_draws=300,
    large_rows=2000,
    large_steps=100,
    folder="outputs/bayesian_hyperparameters",
):
    """Run it all; returns the comparison with NUTS, and the test scores given more data."""
    table, guide, params = against_nuts(num_rows, num_steps, num_draws, folder)
    if not large_rows:
        return table, {}
    return table, with_more_rows(guide, params, num_rows, large_rows, large_steps, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-rows", type=int, default=300)
    parser.add_argument("--num-steps", type=int, default=1000)
    parser.add_argument("--num-draws", type=int, default=300)
    parser.add_argument("--large-rows", type=int, default=2000, help="0 for the small part alone")
    parser.add_argument("--large-steps", type=int, default=100)
    main(**vars(parser.parse_args()))
