"""A GP on the features of a network, trained by its marginal likelihood from mini-batches.

    python benchmarks/feature_space.py fit --data bike --batch-size 32
    python benchmarks/feature_space.py steps

`fit` is the setting of Shoham and Avron (2025): two layers of 128 rectified linear units, a linear
kernel on top. For each treatment of the log-determinant it trains with Adam, decayed by a cosine,
and prints the exact negative log marginal likelihood of all training rows per row, and errors at
the test rows, in standardised units; `--logdet sparse` is a sparse GP with as many inducing points
as the batch has rows, on an RBF kernel of the same network. `steps` times a step against b and d,
alternating between treatments. Needs SCALEGP_DATA for `fit`.
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
from numpyro.infer import SVI, Trace_ELBO
from sparse import score

import numpyro_scalegp as sgp

WIDTH = 128
TREATMENTS = {
    "variational": sgp.estimators.Variational(),
    "compositional": sgp.estimators.Compositional(decay=0.98),
    "compositional-0.9": sgp.estimators.Compositional(),
    "minimax": sgp.estimators.Minimax(),
    "mini-batch": sgp.estimators.MiniBatch(),
}


def layer(name, num_in, num_out, seed):
    """Parameters of a dense layer, by He's rule."""
    normal = jax.random.normal(jax.random.key(seed), (num_in, num_out), jnp.float32)
    return (
        numpyro.param(f"{name}_weight", normal * jnp.sqrt(2.0 / num_in)),
        numpyro.param(f"{name}_bias", jnp.zeros(num_out, jnp.float32)),
    )


def network(X, width=WIDTH, seed=0):
    """Two layers of rectified linear units."""
    for i in range(2):
        weight, bias = layer(f"layer{i}", X.shape[1], width, 2 * seed + i)
        X = jax.nn.relu(X @ weight + bias)
    return X / jnp.sqrt(float(width))


def positive(name, value):
    """A positive parameter."""
    return numpyro.param(name, jnp.float32(value), constraint=dist.constraints.positive)


def model(X, y, batch_size, logdet, width=WIDTH, seed=0):
    """A linear kernel of the network's outputs."""
    noise = positive("noise", 0.3)
    weights = numpyro.param("weights", jnp.zeros(width, jnp.float32))
    with sgp.plate("rows", len(X), batch_size) as index:
        X_batch, y_batch = X[index], y[index]
    features = network(X_batch, width, seed)
    gp = sgp.FeatureSpaceGP(features, jnp.square(noise), weights, num_data=len(X), logdet=logdet)
    numpyro.sample("y", gp, obs=y_batch)


def trained(svi, state, num_steps, *args):
    """Take so many steps in one compiled loop."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, *args):
        def step(state, _):
            return svi.update(state, *args, **static)

        return jax.lax.scan(step, state, length=num_steps)

    X, y, batch_size, logdet = args
    static = {"batch_size": batch_size, "logdet": logdet}
    state, losses = run(state, X, y)
    return state, jax.block_until_ready(losses)


def exact(params, data):
    """The exact negative log marginal likelihood per row, and the score at the test rows."""
    given = numpyro.handlers.substitute(network, data=params)
    X, y, Xs = (np.asarray(a, np.float64) for a in (data.X_train, data.y_train, data.X_test))
    Z, Zs = (np.asarray(given(jnp.asarray(a, jnp.float32)), np.float64) for a in (X, Xs))
    noise = float(params["noise"]) ** 2
    n, d = Z.shape
    L = np.linalg.cholesky(Z.T @ Z + noise * np.eye(d))
    white = np.linalg.solve(L, Z.T @ y)
    fit = (y @ y - white @ white) / noise
    log_determinant = 2.0 * np.log(np.diagonal(L)).sum() + (n - d) * np.log(noise)
    nlml = 0.5 * (fit + log_determinant + n * np.log(2.0 * np.pi)) / n
    at_test = np.linalg.solve(L, Zs.T)
    variance = noise * (1.0 + np.sum(at_test**2, axis=0))
    return nlml, score(at_test.T @ white, variance, data.y_test)


def fit(arguments):
    """Train with each treatment, and print what was reached."""
    data = sgp.datasets.load_uci(arguments.data, split=arguments.split)
    X, y = jnp.asarray(data.X_train, jnp.float32), jnp.asarray(data.y_train, jnp.float32)
    n, b = len(X), arguments.batch_size
    num_steps = arguments.epochs * -(-n // b)
    print(f"{data.name}: n = {n}, batches of {b}, {num_steps} steps, {jax.devices()[0]}")
    for name in arguments.logdet:
        began = time.perf_counter()
        schedule = optax.cosine_decay_schedule(arguments.learning_rate, num_steps)
        svi = SVI(model, lambda *args, **kwargs: None, optax.adam(schedule), Trace_ELBO())
        state = svi.init(
            jax.random.key(arguments.seed), X, y, batch_size=b, logdet=TREATMENTS[name]
        )
        for _ in range(arguments.parts):
            state, losses = trained(
                svi, state, num_steps // arguments.parts, X, y, b, TREATMENTS[name]
            )
            spent = time.perf_counter() - began
            params = svi.get_params(state)
            nlml, reached = exact(params, data)
            print(
                f"{name:18s} {spent:6.1f} s: NLML {nlml:.4f} a row, RMSE {reached.rmse:.4f}, "
                f"NLL {reached.nll:.4f}, noise {float(params['noise']):.4f}, "
                f"loss {float(losses[-500:].mean()) / n:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["fit", "steps"])
    parser.add_argument("--data", default="bike")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--logdet", nargs="+", choices=list(TREATMENTS), default=list(TREATMENTS))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    fit(arguments)
