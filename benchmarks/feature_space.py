"""A GP on the features of a network, trained by its marginal likelihood from mini-batches.

    python benchmarks/evidence.py finite-rkhs finite-rkhs-minimax
    python benchmarks/feature_space.py steps
    python benchmarks/feature_space.py bias --steps 5000

The declared runs are the setting of Shoham and Avron (2025): two layers of 128 rectified linear
units, and a linear kernel on top, or an RBF kernel by random Fourier features (`rbf`). Each
treatment of the log-determinant trains with Adam, at a rate of 0.01 (b / 32)^(1/2) for batches of
b, decayed by a cosine; stored are the exact negative log marginal likelihood of all training rows
per row, and errors at the test rows, in standardized units: at the last step, and after the epoch
whose likelihood is best (it is measured after each). `sparse` is a sparse GP with as many inducing
points as the batch has rows, on the linear kernel, whose hyperparameters are scored in the same way
(at a rate of 0.002, since it fails at 0.01). `steps` times a step against b and d, alternating
between treatments. `bias` measures the mean eigenvalue of E[A^-1] F in the steady state, for rows
of similar and of very different lengths. The declared runs need SCALEGP_DATA.
"""

import argparse
import functools
import itertools
import math
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


def steps(arguments):
    """Time a step against the width of the features and the rows of a batch."""
    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.normal(size=(100_000, 8)), jnp.float32)
    y = jnp.sin(X[:, 0])
    names = [name for name in TREATMENTS if name != "compositional-0.9"]
    print(f"{jax.devices()[0]}: ms a step of " + ", ".join(names))
    for width, b in ((64, 32), (128, 16), (128, 32), (128, 128), (128, 512), (256, 32), (512, 32)):
        runs = []
        for name in names:
            wide = functools.partial(model, width=width)
            svi = SVI(wide, nothing, optax.adam(1e-3), Trace_ELBO())
            logdet = TREATMENTS[name]
            state = svi.init(jax.random.key(0), X, y, batch_size=b, logdet=logdet)
            step = functools.partial(trained, svi, arguments.steps)
            state = step(state, X, y, b, logdet)[0]
            runs.append([step, state, logdet, []])
        for _ in range(arguments.repeats):
            for run in runs:
                began = time.perf_counter()
                run[1] = jax.block_until_ready(run[0](run[1], X, y, b, run[2])[0])
                run[3].append((time.perf_counter() - began) / arguments.steps)
        medians = [1e3 * float(np.median(run[3])) for run in runs]
        print(f"d = {width}, b = {b}: " + ", ".join(f"{one:.2f}" for one in medians), flush=True)


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


def bias(arguments):
    """Measure the eigenvalues of E[Q] F at fixed features, which are one without bias."""
    jax.config.update("jax_enable_x64", True)
    n, d, b = 2000, 20, 16
    kinds = {"Gaussian": 0.0, "lognormal lengths, sigma 1.5": 1.5}
    names = ("variational", "compositional-0.9", "minimax")
    for (kind, sigma), name, heeded in itertools.product(kinds.items(), names, (0.0, 1.0)):
        found = []
        for seed in range(arguments.seeds):
            rng = np.random.default_rng(seed)
            lengths = np.exp(sigma * rng.normal(size=(n, 1)))
            Z = jnp.asarray(rng.normal(size=(n, d)) * lengths)
            key = jax.random.key(seed)
            args = (TREATMENTS[name], Z, b, heeded, key, arguments.steps)
            Q, record = steady_state(*args)
            L = np.linalg.cholesky(Z.T @ Z + 0.1 * np.eye(d))
            values = np.linalg.eigvalsh(L.T @ np.asarray(Q) @ L)
            found.append([values.mean(), values[0], values[-1], record.eigenvalue, record.spread])
        means = np.mean(found, axis=0)
        error = np.std(found, axis=0, ddof=1)[0] / np.sqrt(arguments.seeds)
        print(
            f"{kind}, {name}, spread {'heeded' if heeded else 'ignored'}: mean eigenvalue "
            f"{means[0]:.3f} +- {error:.3f}, least {means[1]:.2f}, largest {means[2]:.2f}, by "
            f"batches {means[3]:.3f}, spread {means[4]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["steps", "bias"])
    parser.add_argument("--steps", type=int, default=100, help="timed, or averaged over")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=6, help="of `bias`")
    arguments = parser.parse_args()
    {"steps": steps, "bias": bias}[arguments.command](arguments)
