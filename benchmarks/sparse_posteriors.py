"""Posteriors over the hyperparameters of sparse GPs: beside NUTS, and calibration.

    python benchmarks/evidence.py sparse-posteriors sparse-posteriors-uci sparse-calibration
    python benchmarks/evidence.py sparse-coverage sparse-coverage-uci

Models, fits and methods are from examples/sparse_hyperparameters.py; each seed makes other data.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import stats
from sparse import score_of

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import sparse_hyperparameters as example

import numpyro_scalegp as sgp


@functools.cache
def against_nuts(data, kind, seed, num_rows, num_steps, num_draws, num_inducing):
    """The comparison of the example's methods with NUTS."""
    if data == "made up":
        X, y = example.made_up(kind, num_rows, seed)
    else:
        uci = sgp.datasets.load_uci(data)
        varies = np.mean(uci.X_train == np.median(uci.X_train, axis=0), axis=0) < 0.99
        rows = np.random.default_rng(seed).permutation(len(uci.X_train))[:num_rows]
        X, y = uci.X_train[rows][:, varies], uci.y_train[rows]
    draws = example.posteriors(
        kind, jnp.asarray(X), jnp.asarray(y), num_steps, 100, num_draws, num_inducing=num_inducing
    )
    return example.compare(draws)


def record(data, split, seed, method, *, num_rows=500, num_steps=2000, num_draws=500, inducing=60):
    """For such methods as "counts, natural=True": means and deviations compared with NUTS."""
    kind, method = method.split(", ")
    sizes = num_rows, num_steps, num_draws, inducing
    compared = np.array(list(against_nuts(data, kind, seed, *sizes)[method].values()))
    shifts, ratios = np.abs(compared[:, 0]), compared[:, 1]
    return {
        "off": float(shifts.max()),
        "least_ratio": float(ratios.min()),
        "most_ratio": float(ratios.max()),
    }


PRIORS = {
    "lengthscale": dist.LogNormal(0.0, 0.4),
    "noise": dist.LogNormal(-1.0, 0.4),
    "variance": dist.LogNormal(0.0, 0.5),
}


def latent(X, y, batch_size=None):
    values = {name: numpyro.sample(name, prior) for name, prior in PRIORS.items()}
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    kernel = sgp.kernels.Matern52(values["lengthscale"], values["variance"])
    f = numpyro.sample("f", sgp.LatentGP(kernel, X))
    with rows:
        numpyro.sample("y", dist.Normal(f, values["noise"]), obs=y)


def integrated(X, y, batch_size=None):
    values = {name: numpyro.sample(name, prior) for name, prior in PRIORS.items()}
    kernel = sgp.kernels.Matern52(values["lengthscale"], values["variance"])
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, values["noise"] ** 2), obs=y)


def ranks(key, method, num_sets, num_rows, num_steps, num_draws):
    """The rank of each true hyperparameter among draws, for data sets from the prior."""
    Z = np.linspace(0.0, 8.0, 40, dtype=np.float32)[:, None]
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, num_steps))
    model, loss = latent, sgp.infer.QuadratureELBO()
    if method == "function integrated out":
        model, loss = integrated, Trace_ELBO()
        guide = rest = AutoMultivariateNormal(integrated)
    else:
        natural = method == "natural=True"
        guide = sgp.guides.AutoSparseGP(
            latent, rest=AutoMultivariateNormal, inducing_points=Z, natural=natural
        )
        rest = guide.rest
        if natural:
            step_size = optax.cosine_decay_schedule(0.1, num_steps)
            optimizer = sgp.infer.natural_gradients(optimizer, step_size)
    svi = SVI(model, guide, optimizer, loss)

    def of_one(key):
        keys = jax.random.split(key, 6)
        true = {
            name: prior.sample(key, ())
            for (name, prior), key in zip(PRIORS.items(), jax.random.split(keys[0], 3), strict=True)
        }
        X = jnp.sort(jax.random.uniform(keys[1], (num_rows, 1), maxval=8.0), axis=0)
        kernel = sgp.kernels.Matern52(true["lengthscale"], true["variance"])
        y = sgp.GaussianProcess(kernel, X, true["noise"] ** 2).sample(keys[2])
        state = svi.init(keys[3], X, y, num_rows // 2)
        step = lambda state, _: svi.update(state, X, y, num_rows // 2)  # noqa: E731
        state, _ = jax.lax.scan(step, state, length=num_steps)
        params = svi.get_params(state)
        draws = rest.sample_posterior(keys[4], params, sample_shape=(num_draws,))
        return {name: jnp.mean(draws[name] < true[name]) for name in PRIORS}

    keys = jax.random.split(key, num_sets)
    first = of_one(keys[0])  # outside of the program: guides look at the data in their first run
    rest_of = jax.jit(lambda keys: jax.lax.map(of_one, keys))(keys[1:])
    return {name: np.append(first[name], rest_of[name]) for name in PRIORS}


def record_calibration(
    data, split, seed, method, *, num_sets=100, num_rows=200, num_steps=2000, num_draws=999
):
    """The p-value of a chi-square test that the ranks are uniform, with ten cells, and counts."""
    sizes = num_sets, num_rows, num_steps, num_draws
    result = {}
    for name, rank in ranks(jax.random.key(seed), method, *sizes).items():
        cells, _ = np.histogram(rank, bins=10, range=(0.0, 1.0))
        result[f"{name}_p"] = float(stats.chisquare(cells).pvalue)
        result[f"{name}_ends"] = int(cells[0] + cells[-1])
    return result


def stations(X, y, batch_size=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    times = numpyro.sample("times", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    space = sgp.kernels.Matern52(lengthscale, variance).on((0, 1))
    kernel = space * sgp.kernels.Matern52(times).on((2,))
    f = numpyro.sample("f", sgp.LatentGP(kernel, X))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def stations_and_times(seed, num_stations=50, num_times=500):
    """A function of place and time from the prior, at each station at each time, with noise."""
    rng = np.random.default_rng(seed)
    places = rng.uniform(0.0, 3.0, (num_stations, 2))
    times = np.sort(rng.uniform(0.0, 25.0, num_times))[:, None]
    factors = [
        np.linalg.cholesky(sgp.kernels.Matern52(1.0)(Z, Z) + 1e-5 * np.eye(len(Z)))
        for Z in (places, times)
    ]
    f = factors[0] @ rng.normal(size=(num_stations, num_times)) @ factors[1].T
    X = np.hstack([np.repeat(places, num_times, axis=0), np.tile(times, (num_stations, 1))])
    y = f.reshape(-1) + 0.5 * rng.normal(size=f.size)
    return (array.astype(np.float32) for array in (X, y, f.reshape(-1)))


def record_coverage(data, split, seed, method, *, num_steps=2000, num_inducing=256, num_draws=50):
    """Coverage of 90 % intervals: of the function if made up, else of held-out observations.

    "natural=True, 50 draws" averages over the hyperparameters, other methods use their medians.
    """
    if data == "made up":
        model, (X, y, f), batch_size = stations, stations_and_times(seed), 1000
        X_test, y_test = X[::10], f[::10]
    else:
        uci = sgp.datasets.load_uci(data, split=split)
        model, batch_size = example.measurements, 100
        X, y, X_test, y_test = uci.X_train, uci.y_train, uci.X_test, uci.y_test
        num_inducing = min(num_inducing, len(X) // 2)
    X, y = jnp.asarray(X), jnp.asarray(y)
    guide, result = example.fit(
        jax.random.key(seed), model, X, y, num_steps, batch_size,
        natural="natural" in method, num_inducing=num_inducing,
    )  # fmt: skip
    options = {"key": jax.random.key(1), "num_draws": num_draws} if "draws" in method else {}
    posterior = sgp.posterior(model, guide, result, X, y, **options)
    if data == "made up":
        normal = dist.Normal(posterior.mean(X_test), jnp.sqrt(posterior.variance(X_test)))
        return {"coverage_90": float(sgp.scores.coverage(normal, y_test, level=0.9))}
    predictive = posterior.predictive(X_test)
    covered = sgp.scores.coverage(predictive, y_test, level=0.9, key=jax.random.key(2))
    return {**score_of(predictive, jnp.asarray(y_test)), "coverage_90": float(covered)}
