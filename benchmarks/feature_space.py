"""A GP on the features of a network, trained on its marginal likelihood with mini-batches.

    python benchmarks/evidence.py finite-rkhs finite-rkhs-minimax finite-rkhs-rbf
    python benchmarks/evidence.py finite-rkhs-16 finite-rkhs-64 finite-rkhs-128  # batch sizes
    python benchmarks/evidence.py finite-rkhs-decay  # the old average has the weight of the paper
    python benchmarks/evidence.py finite-rkhs-steps finite-rkhs-bias

All but the last two have the setting of Shoham and Avron (2025): two layers of 128 rectified linear
units with a linear kernel on top, or an RBF kernel by random Fourier features (`rbf`). Each
treatment of the log-determinant trains with Adam, with a learning rate of 0.01 (b / 32)^(1/2) for a
batch size b and cosine decay. The exact negative log marginal likelihood per training observation
and the test errors, in standardized units, are stored for the last step and for the epoch with the
best likelihood, which is computed after each epoch. `sparse` is a sparse GP with the linear kernel
and b inducing points, whose hyperparameters are scored in the same way (with a learning rate of
0.002, since it fails at 0.01). These runs need SCALEGP_DATA. `finite-rkhs-steps` times a step for
several b and d. `finite-rkhs-bias` measures the eigenvalues of E[A^-1] F in the steady state, for
feature vectors of similar and of very different norms.
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
from iterative import interleaved_seconds
from numpyro.infer import SVI, Trace_ELBO
from sparse import score

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import Batch
from numpyro_scalegp.integrated.finite_rkhs.state import FitRecord, norms

WIDTH = 128
TREATMENTS = {
    "variational": sgp.log_determinants.Variational(),
    "compositional": sgp.log_determinants.Compositional(decay=0.98),
    "compositional-0.9": sgp.log_determinants.Compositional(),
    "compositional-0.1": sgp.log_determinants.Compositional(decay=0.1),
    "minimax": sgp.log_determinants.Minimax(),
    "mini-batch": sgp.log_determinants.MiniBatch(),
}


def network(num_in, width=WIDTH):
    """Parameters of two dense layers, with He initialization."""
    layers = []
    for i, size in enumerate((num_in, width)):
        normal = jax.random.normal(jax.random.key(i), (size, width), jnp.float32)
        weight = numpyro.param(f"layer{i}_weight", normal * jnp.sqrt(2.0 / size))
        layers.append((weight, numpyro.param(f"layer{i}_bias", jnp.zeros(width, jnp.float32))))
    return layers


def outputs(layers, X):
    """Rectified linear units, scaled to a squared norm of about one at initialization."""
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
    """A GP on the features of the network."""
    noise = positive("noise", 0.3)
    weights = numpyro.param("weights", jnp.zeros(rbf or width, jnp.float32))
    phi = feature_map(X.shape[1], width, rbf)
    X_batch, y_batch = sgp.plate("rows", len(X), batch_size).take(X, y)
    noise_variance = jnp.square(noise)
    gp = sgp.FeatureSpaceGP(phi, X_batch, noise_variance, weights, num_data=len(X), logdet=logdet)
    numpyro.sample("y", gp, obs=y_batch)


def sparse_model(X, y, batch_size, logdet):
    """A sparse GP with the linear kernel on the features of the network."""
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
    """Run `num_steps` steps in one compiled loop."""

    def step(state, _):
        return svi.update(state, X, y, batch_size=batch_size, logdet=logdet)

    return jax.lax.scan(step, state, length=num_steps)


def exact(params, data, rbf):
    """The exact negative log marginal likelihood per observation, and the test score."""
    fitted_map = numpyro.handlers.substitute(feature_map, data=params)
    phi = jax.jit(fitted_map(data.X_train.shape[1], WIDTH, rbf))
    X, y, Xs = (np.asarray(a, np.float64) for a in (data.X_train, data.y_train, data.X_test))
    Z, Zs = (np.asarray(phi(jnp.asarray(a, jnp.float32)), np.float64) for a in (X, Xs))
    noise = float(params["noise"]) ** 2
    n, d = Z.shape
    L = np.linalg.cholesky(Z.T @ Z + noise * np.eye(d))
    white = np.linalg.solve(L, Z.T @ y)
    fit = (y @ y - white @ white) / noise
    log_determinant = 2.0 * np.log(np.diagonal(L)).sum() + (n - d) * np.log(noise)
    nlml = 0.5 * (fit + log_determinant + n * np.log(2.0 * np.pi)) / n
    white_test = np.linalg.solve(L, Zs.T)
    variance = noise * (1.0 + np.sum(white_test**2, axis=0))
    return nlml, score(white_test.T @ white, variance, data.y_test)


def record(data, split, seed, method, *, batch_size=32, epochs=30, rbf=0):
    """The record of a unit: scores at the last step and at the best epoch."""
    loaded = sgp.datasets.load_uci(data, split)
    X, y = jnp.asarray(loaded.X_train, jnp.float32), jnp.asarray(loaded.y_train, jnp.float32)
    per_epoch = -(-len(X) // batch_size)
    rate = 0.002 if method == "sparse" else 0.01 * (batch_size / 32) ** 0.5
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, epochs * per_epoch))
    if method == "sparse":
        guide = sgp.guides.AutoSparseGP(sparse_model, num_inducing=batch_size)
        svi = SVI(sparse_model, guide, optimizer, sgp.infer.QuadratureELBO())
    else:
        svi = SVI(functools.partial(model, rbf=rbf), nothing, optimizer, Trace_ELBO())
    logdet = TREATMENTS.get(method)
    state = svi.init(jax.random.key(seed), X, y, batch_size=batch_size, logdet=logdet)
    seconds, scores = 0.0, []
    for epoch in range(epochs):
        start = time.perf_counter()
        state, _ = trained(svi, per_epoch, state, X, y, batch_size, logdet)
        params = jax.block_until_ready(svi.get_params(state))
        seconds += time.perf_counter() - start
        nlml, test_score = exact(params, loaded, rbf)
        scores.append({"nlml": nlml, **test_score._asdict(), "epoch": epoch + 1})
    best = min(scores, key=lambda s: math.inf if math.isnan(s["nlml"]) else s["nlml"])
    last = scores[-1] | {"noise": float(params["noise"]), "seconds": seconds}
    return last | {f"best_{name}": value for name, value in best.items()}


def record_steps(data, split, seed, method, *, n=100_000, num_steps=50, repeats=7):
    """Milliseconds per step of each treatment, for "d = 128, b = 32": features and batch size.

    Medians over blocks of steps; the treatments alternate.
    """
    width, b = (int(term.split(" = ")[1]) for term in method.split(", "))
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
    seconds = interleaved_seconds(tasks, repeats)
    return {name: 1e3 * float(np.median(times)) / num_steps for name, times in seconds.items()}


@functools.partial(jax.jit, static_argnums=(0, 2, 5))
def steady_state(logdet, Z, b, spread_factor, key, num_steps):
    """The mean of Q over steps, where <Q, dF> is the gradient, and the record of the batches."""
    (n, d), noise = Z.shape, jnp.asarray(0.1)

    def step(carry, key):
        state, record, total = carry
        batch = Batch(Z[jax.random.randint(key, (b,), 0, n)], noise, n)
        new = record.updated(logdet.trace(batch, state) / d, norms(batch, state.W), batch.scale)
        Q = state.W.T @ getattr(state, "multiplier", jnp.eye(d)) @ state.W
        return (logdet.advance(batch, state, spread_factor * record.spread), new, total + Q), None

    start = logdet.start(Batch(Z, noise, n).gram())
    carry = (start, FitRecord.empty(Z.dtype), jnp.zeros((d, d)))
    first, second = jax.random.split(key)
    state, record, _ = jax.lax.scan(step, carry, jax.random.split(first, num_steps))[0]
    carry = (state, record, jnp.zeros((d, d)))
    _, record, total = jax.lax.scan(step, carry, jax.random.split(second, num_steps))[0]
    return total / num_steps, record


@jax.enable_x64(True)
def record_bias(data, split, seed, method, *, steps=5000, n=2000, d=20, b=16):
    """Eigenvalues of E[Q] F at fixed features, such as "Gaussian, variational"; 1 without bias.

    Feature vectors are Gaussian, or scaled by "lognormal" factors with sigma = 1.5. `ignored` is
    the mean if the steps ignore the spread, `batches` the mean as estimated from the batches.
    """
    rows, treatment = method.split(", ")
    rng = np.random.default_rng(seed)
    lengths = np.exp({"Gaussian": 0.0, "lognormal": 1.5}[rows] * rng.normal(size=(n, 1)))
    Z = jnp.asarray(rng.normal(size=(n, d)) * lengths)
    L = np.linalg.cholesky(Z.T @ Z + 0.1 * np.eye(d))

    def measured(spread_factor):
        Q, record = steady_state(
            TREATMENTS[treatment], Z, b, spread_factor, jax.random.key(seed), steps
        )
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
