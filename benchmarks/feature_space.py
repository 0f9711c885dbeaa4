"""A GP on the features of a network, trained by its marginal likelihood from mini-batches.

    python benchmarks/evidence.py finite-rkhs finite-rkhs-minimax finite-rkhs-rbf
    python benchmarks/evidence.py finite-rkhs-16 finite-rkhs-128      # rows of a batch
    python benchmarks/evidence.py finite-rkhs-steps finite-rkhs-bias

The first five are the setting of Shoham and Avron (2025): two layers of 128 rectified linear
units, and a linear kernel on top, or an RBF kernel by random Fourier features (`rbf`). Each
treatment of the log-determinant trains with Adam, at a rate of 0.01 (b / 32)^(1/2) for batches of
b, decayed by a cosine; stored are the exact negative log marginal likelihood of all training rows
per row, and errors at the test rows, in standardized units: at the last step, and after the epoch
whose likelihood is best (it is measured after each). `sparse` is a sparse GP with as many inducing
points as the batch has rows, on the linear kernel, whose hyperparameters are scored in the same way
(at a rate of 0.002, since it fails at 0.01); these need SCALEGP_DATA. `finite-rkhs-steps` times a
step against b and d. `finite-rkhs-bias` measures the eigenvalues of E[A^-1] F in the steady state,
for rows of similar and of very different lengths.
"""

import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from iterative import seconds_in_turn
from numpyro.infer import SVI, Trace_ELBO
from sparse import score

import numpyro_scalegp as sgp
from numpyro_scalegp.log_determinants.log_determinant import Batch
from numpyro_scalegp.log_determinants.state import FitRecord, norms

WIDTH = 128
TREATMENTS = {
    "variational": sgp.log_determinants.Variational(),
    "compositional": sgp.log_determinants.Compositional(decay=0.98),
    "compositional-0.9": sgp.log_determinants.Compositional(),
    "minimax": sgp.log_determinants.Minimax(),
    "mini-batch": sgp.log_determinants.MiniBatch(),
}


def network(num_in, width=WIDTH):
    """Parameters of two dense layers, by He's rule."""
    layers = []
    for i, size in enumerate((num_in, width)):
        normal = jax.random.normal(jax.random.key(i), (size, width), jnp.float32)
        weight = numpyro.param(f"layer{i}_weight", normal * jnp.sqrt(2.0 / size))
        layers.append((weight, numpyro.param(f"layer{i}_bias", jnp.zeros(width, jnp.float32))))
    return layers


def outputs(layers, X):
    """Rectified linear units, of squares whose sum is about one at the start."""
    for weight, bias in layers:
        X = jax.nn.relu(X @ weight + bias)
    return X / jnp.sqrt(float(X.shape[1]))


def positive(name, value):
    """A positive parameter."""
    return numpyro.param(name, jnp.float32(value), constraint=dist.constraints.positive)


def feature_map(num_in, width, rbf):
    """The network's outputs, or random features of an RBF kernel on top of them."""
    mapped = functools.partial(outputs, network(num_in, width))
    if not rbf:
        return mapped
    kernel = positive("amplitude", 1.0) ** 2 * sgp.kernels.RBF(positive("lengthscale", 1.0))
    waves = sgp.features.RandomFourier(kernel, rbf, seed=0)
    return lambda X: waves(mapped(X))


def model(X, y, batch_size, logdet, width=WIDTH, rbf=0):
    """A GP of those features."""
    noise = positive("noise", 0.3)
    weights = numpyro.param("weights", jnp.zeros(rbf or width, jnp.float32))
    phi = feature_map(X.shape[1], width, rbf)
    X_batch, y_batch = sgp.plate("rows", len(X), batch_size).take(X, y)
    noise_variance = jnp.square(noise)
    gp = sgp.FeatureSpaceGP(phi, X_batch, noise_variance, weights, num_data=len(X), logdet=logdet)
    numpyro.sample("y", gp, obs=y_batch)


def sparse_model(X, y, batch_size, logdet):
    """The linear kernel for a sparse GP."""
    noise = positive("noise", 0.3)
    phi = feature_map(X.shape[1], WIDTH, 0)
    kernel = sgp.kernels.FeatureMapped(sgp.kernels.Linear(1.0), phi)
    rows = sgp.plate("rows", len(X), batch_size)
    X_batch, y_batch = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(kernel, X_batch))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)


def nothing(*args, **kwargs):
    """The guide of a model without latent sites."""


@functools.partial(jax.jit, static_argnums=(0, 1, 5, 6), donate_argnums=2)
def trained(svi, num_steps, state, X, y, batch_size, logdet):
    """Take the steps in one compiled loop."""

    def step(state, _):
        return svi.update(state, X, y, batch_size=batch_size, logdet=logdet)

    return jax.lax.scan(step, state, length=num_steps)


def exact(params, data, rbf):
    """The exact negative log marginal likelihood per row, and the score at the test rows."""
    given = numpyro.handlers.substitute(feature_map, data=params)
    phi = jax.jit(given(data.X_train.shape[1], WIDTH, rbf))
    X, y, Xs = (np.asarray(a, np.float64) for a in (data.X_train, data.y_train, data.X_test))
    Z, Zs = (np.asarray(phi(jnp.asarray(a, jnp.float32)), np.float64) for a in (X, Xs))
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


def record(data, split, seed, method, *, batch_size=32, epochs=30, rbf=0):
    """The record of a unit, for benchmarks/evidence.py: the last step, and the best epoch."""
    loaded = sgp.datasets.load_uci(data, split)
    X, y = jnp.asarray(loaded.X_train, jnp.float32), jnp.asarray(loaded.y_train, jnp.float32)
    per_epoch = -(-len(X) // batch_size)
    rate = 0.002 if method == "sparse" else 0.01 * (batch_size / 32) ** 0.5
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, epochs * per_epoch))
    if method == "sparse":
        guide = sgp.guides.AutoSparseGP(sparse_model, num_inducing=batch_size)
        svi = SVI(sparse_model, guide, optimizer, sgp.infer.QuadratureELBO(2))
    else:
        svi = SVI(functools.partial(model, rbf=rbf), nothing, optimizer, Trace_ELBO())
    logdet = TREATMENTS.get(method)
    state = svi.init(jax.random.key(seed), X, y, batch_size=batch_size, logdet=logdet)
    seconds, reached = 0.0, []
    for epoch in range(epochs):
        start = time.perf_counter()
        state, _ = trained(svi, per_epoch, state, X, y, batch_size, logdet)
        params = jax.block_until_ready(svi.get_params(state))
        seconds += time.perf_counter() - start
        nlml, at_test = exact(params, loaded, rbf)
        reached.append({"nlml": nlml, **at_test._asdict(), "epoch": epoch + 1})
    best = min(reached, key=lambda one: one["nlml"] if one["nlml"] == one["nlml"] else math.inf)
    last = reached[-1] | {"noise": float(params["noise"]), "seconds": seconds}
    return last | {f"best_{name}": value for name, value in best.items()}


def record_steps(data, split, seed, method, *, n=100_000, num_steps=50, repeats=7):
    """Milliseconds a step of each treatment, of "d = 128, b = 32": features, and rows of a batch.

    Medians of blocks of steps, timed in turn.
    """
    width, b = (int(part.split(" = ")[1]) for part in method.split(", "))
    X = jnp.asarray(np.random.default_rng(seed).normal(size=(n, 8)), jnp.float32)
    y = jnp.sin(X[:, 0])

    def block(logdet):
        svi = SVI(functools.partial(model, width=width), nothing, optax.adam(1e-3), Trace_ELBO())
        state = svi.init(jax.random.key(seed), X, y, batch_size=b, logdet=logdet)

        def run():
            nonlocal state
            state, _ = trained(svi, num_steps, state, X, y, b, logdet)
            return state

        return run

    names = ("variational", "compositional", "minimax", "mini-batch")
    tasks = {name: (block(TREATMENTS[name]),) for name in names}
    found = seconds_in_turn(tasks, repeats)
    return {name: 1e3 * float(np.median(times)) / num_steps for name, times in found.items()}


@functools.partial(jax.jit, static_argnums=(0, 2, 5))
def steady_state(logdet, Z, b, heeded, key, num_steps):
    """The mean over steps of Q, with <Q, dF> the gradient, and the record of the batches."""
    (n, d), noise = Z.shape, jnp.asarray(0.1)

    def step(carry, key):
        state, record, total = carry
        batch = Batch(Z[jax.random.randint(key, (b,), 0, n)], noise, n)
        new = record.updated(logdet.trace(batch, state) / d, norms(batch, state.W), batch.scale)
        Q = state.W.T @ getattr(state, "multiplier", jnp.eye(d)) @ state.W
        return (logdet.advance(batch, state, heeded * record.spread), new, total + Q), None

    start = logdet.start(Batch(Z, noise, n).gram())
    carry = (start, FitRecord.empty(Z.dtype), jnp.zeros((d, d)))
    first, second = jax.random.split(key)
    state, record, _ = jax.lax.scan(step, carry, jax.random.split(first, num_steps))[0]
    carry = (state, record, jnp.zeros((d, d)))
    _, record, total = jax.lax.scan(step, carry, jax.random.split(second, num_steps))[0]
    return total / num_steps, record


@jax.enable_x64(True)
def record_bias(data, split, seed, method, *, steps=5000, n=2000, d=20, b=16):
    """Eigenvalues of E[Q] F at fixed features, of "Gaussian, variational": one without bias.

    Rows are Gaussian, or "lognormal" in their lengths, with sigma = 1.5. `ignored` is the mean
    where steps do not heed the spread, `batches` the mean as the batches tell it.
    """
    rows, treatment = method.split(", ")
    rng = np.random.default_rng(seed)
    lengths = np.exp({"Gaussian": 0.0, "lognormal": 1.5}[rows] * rng.normal(size=(n, 1)))
    Z = jnp.asarray(rng.normal(size=(n, d)) * lengths)
    L = np.linalg.cholesky(Z.T @ Z + 0.1 * np.eye(d))

    def measured(heeded):
        Q, record = steady_state(TREATMENTS[treatment], Z, b, heeded, jax.random.key(seed), steps)
        return np.linalg.eigvalsh(L.T @ np.asarray(Q) @ L), record

    (ignored, _), (values, record) = measured(0.0), measured(1.0)
    return {
        "ignored": float(ignored.mean()),
        "mean": float(values.mean()),
        "least": float(values[0]),
        "largest": float(values[-1]),
        "batches": float(record.eigenvalue),
        "spread": float(record.spread),
    }
