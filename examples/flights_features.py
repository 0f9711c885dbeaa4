"""Flights with random features: a step uses two sets of 2,000 features out of 100,000.

The delays of flights from New York in 2013 are modeled with a Matern-3/2 kernel and a normal
likelihood. A step uses 1,000 of 295,000 flights and two random sets of 2,000 features, so that its
cost does not depend on their total numbers; a control variate (a term with mean zero) reduces the
variance of the estimated objective. The hyperparameters stay fixed during the warmup steps and are
then trained together with the weights.

The script prints the errors of the GP and of linear regression on test flights. The figure shows
the mean delay over the hours of a day.
"""

import argparse
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flights_report import HOURS, hour_grid
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.initialization import init_to_value

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def model(X, y, features, batch_size=None):
    """A GP in weight space with normal noise; lengthscales show which inputs matter."""
    prior = dist.LogNormal(jnp.log(3.0), 1.0).expand([X.shape[1]]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", prior)
    variance = numpyro.sample("variance", dist.LogNormal(-0.7, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-0.2, 0.5))
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    phi = features.with_kernel(sgp.kernels.Matern32(lengthscale, variance))
    f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def main(num_steps=10_000, num_features=100_000, rows=None, folder="outputs/flights_features"):
    """Train, score and draw; returns the errors of GP and linear regression, in minutes."""
    data = sgp.datasets.load_flights()
    X, y = jnp.asarray(data.X_train[:rows], jnp.float32), jnp.asarray(data.y_train[:rows])
    X_test, y_test = jnp.asarray(data.X_test[:rows], jnp.float32), data.y_test[:rows]
    y = y.astype(X.dtype)
    d = X.shape[1]
    features = sgp.features.RandomFourier(sgp.kernels.Matern32(1.0), num_features, seed=0).stored(d)

    values = {"lengthscale": jnp.full(d, 2.0), "variance": 0.3, "noise": 0.9}
    hyperparameter_guide = functools.partial(AutoDelta, init_loc_fn=init_to_value(values=values))
    guide = sgp.guides.AutoChevronGP(model, rest=hyperparameter_guide, rank=0)
    loss = sgp.infer.QuadruplyStochasticELBO(num_features=2000, control_variate_rank=500)
    svi = sgp.infer.RowSVI(
        model,
        guide,
        optax.adam(optax.cosine_decay_schedule(0.01, num_steps)),
        loss,
        row_optim=sgp.infer.row_adam(optax.cosine_decay_schedule(0.02, num_steps)),
        warmup_steps=num_steps // 10,
    )
    began = time.perf_counter()
    state = svi.init(jax.random.key(0), X, y, features, 1000)
    params = guide.solve_diagonal(svi.get_params(state), X, y, features, 1000)
    state = sgp.infer.replace_params(svi, state, params)
    result = svi.run(
        jax.random.key(1), num_steps, X, y, features, 1000, init_state=state, progress_bar=False
    )
    posterior = sgp.posterior(model, guide, result, X[:10], y[:10], features)
    print(f"{len(X):,} rows, {num_features:,} features: {time.perf_counter() - began:.0f} s")

    minutes = data.y_scale
    error = minutes * float(np.sqrt(np.mean((np.asarray(posterior.mean(X_test)) - y_test) ** 2)))
    line = np.linalg.lstsq(np.c_[X, np.ones(len(X))], np.asarray(y), rcond=None)[0]
    linear = minutes * np.sqrt(np.mean((np.c_[X_test, np.ones(len(X_test))] @ line - y_test) ** 2))
    print(f"test RMSE {error:.2f} minutes, linear regression {linear:.2f} minutes")

    delays = data.y_mean + minutes * np.asarray(posterior.mean(hour_grid(data).astype(X.dtype)))
    figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
    ax.plot(HOURS, delays.reshape(len(HOURS), -1).mean(axis=1))
    ax.set(xlabel="scheduled hour of departure", ylabel="mean arrival delay, minutes")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "hours.svg")
    return error, float(linear)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=10_000)
    parser.add_argument("--num-features", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=None, help="use this many rows only")
    main(**vars(parser.parse_args()))
