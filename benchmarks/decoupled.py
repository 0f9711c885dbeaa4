"""A hybrid GP with a solved mean, streams, and the cost of a step as the mean grows.

    python benchmarks/evidence.py decoupled decoupled-kin40k decoupled-steps
    python benchmarks/evidence.py decoupled-subset decoupled-stream decoupled-sinc
    python benchmarks/evidence.py decoupled-gradients

The declared runs train a sparse GP with 512 points for some steps, then add residual points for the
mean. They solve for the weights with `solve_mean` and set the noise to its optimum given mean and
variances, twice. With `subset`, all hyperparameters come from an exact GP on that many neighboring
data points and stay fixed, so that one solve is enough.

`decoupled-stream`: several epochs of a data set as one stream of batches. A hybrid GP adds residual
points, keeps the last batches and solves for its mean on them at intervals; its hyperparameters
come from an exact fit to the first batch. For comparison, a sparse GP starts from the same values
and trains them on the same stream. Times include compilation. `decoupled-sinc` compares a shared
basis of 10 points, a shared basis of 100 points, and 100 points for the mean with 10 for the
covariance. `decoupled-gradients` trains all families by Adam on mini-batches, without a solve. All
but the simulated data need SCALEGP_DATA.
"""

import dataclasses
import functools
import json
import time
from collections import deque
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.initialization import init_to_value
from sparse import (
    LEARNING_RATE,
    NUM_INDUCING,
    Ours,
    hyperparameters,
    model,
    number_in,
    score,
    simulated_data,
)

import numpyro_scalegp as sgp


def exact_model(X, y):
    """An exact GP regression with the same priors as the other models."""
    lengthscale, variance, noise = hyperparameters(X.shape[1])
    kernel = sgp.kernels.RBF(lengthscale, variance)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise**2), obs=y)


def fit_exactly(X, y, subset_size):
    """The hyperparameters of an exact fit to the nearest neighbors of a random data point."""
    return sgp.infer.initial_hyperparameters(
        jax.random.key(0),
        exact_model,
        X,
        y,
        num_subsets=1,
        subset_size=subset_size,
        num_refinements=0,
    )


class Hybrid:
    """A fit by `AutoSparseGP`, with many more points for the mean; `noise` None is optimized."""

    def __init__(self, fit, num_residual, noise=None, seed=0):
        self.fit = fit
        self.noise = noise
        n = fit.X.shape[0]
        rows = np.random.default_rng(seed).permutation(n)[: min(num_residual, n)]
        self.guide = sgp.guides.AutoHybridGP(
            fit.guide.model,
            rest=fit.guide.rest,
            inducing_points=fit.points,
            residual_points=fit.X[rows],
            train_residual=False,
        )
        self.params = {
            **fit.svi.get_params(fit.state),
            "f_auto_residual_points": fit.X[rows],
            "f_auto_residual_weights": jnp.zeros(len(rows), jnp.float32),
        }

    @functools.cached_property
    def _refine(self):
        guide = self.guide

        @jax.jit
        def refine(params, X, y):
            params = guide.solve_mean(params, X, y, None).params
            if self.noise is not None:
                return params
            posterior = guide.posterior(params, X, y, None)
            misfit = jnp.square(y - posterior.mean(X)) + posterior.variance(X)
            # The maximum of the bound over the noise, without its weak prior.
            return {**params, "noise_auto_loc": jnp.sqrt(jnp.mean(misfit))}

        return refine

    def refine(self):
        """Solve for the weights, then for the noise."""
        self.params = jax.block_until_ready(self._refine(self.params, self.fit.X, self.fit.y))

    def score(self):
        """Score the posterior at the test rows."""
        fit, params = self.fit, self.params
        posterior = self.guide.posterior(params, fit.X[:10], fit.y[:10], None)
        Xs = jnp.asarray(fit.test.X_test, jnp.float32)
        noise = params["noise_auto_loc"] if self.noise is None else self.noise
        variance = posterior.variance(Xs) + noise**2
        return score(np.asarray(posterior.mean(Xs)), np.asarray(variance), fit.test.y_test)


def record(data, split, seed, method, *, steps=500, num_residual=4000, subset=None):
    """The record of a unit: scores of a sparse fit, and after each solve for its mean.

    With `subset`, the hyperparameters come from an exact fit to that many data points and stay
    fixed, and there is one solve.
    """
    loaded = sgp.datasets.load_uci(data, split)
    X = jnp.asarray(loaded.X_train, jnp.float32)
    began = time.perf_counter()
    points = sgp.features.kmeans_points(jax.random.key(1 + seed), X, NUM_INDUCING)
    start, noise = model, None
    if subset:
        hyper = fit_exactly(X, jnp.asarray(loaded.y_train, jnp.float32), subset)
        start, noise = numpyro.handlers.condition(model, data=hyper), hyper["noise"]
    fit = Ours(loaded, points, 1024, steps, LEARNING_RATE, start, noise)
    fit.run(steps - 1)
    seconds = time.perf_counter() - began
    scores = [{"seconds": seconds, **fit.score()._asdict()}]
    hybrid = Hybrid(fit, num_residual, noise, seed)
    for _ in range(1 if subset else 2):
        began = time.perf_counter()
        hybrid.refine()
        seconds += time.perf_counter() - began
        scores.append({"seconds": seconds, **hybrid.score()._asdict()})
    earlier = {f"sparse_{name}": value for name, value in scores[0].items()}
    earlier |= {f"first_{name}": value for name, value in scores[1].items()}
    return earlier | scores[-1]


def record_gradients(data, split, seed, method, *, steps=1000, num_cov=128, multiscale=False):
    """The record of a unit: scores after steps of Adam on mini-batches, without a linear solve.

    The methods "sparse, 128 points", "decoupled, 4,096 points more" and "hybrid, 4,096 points more"
    have the same points for the covariance at the start. With `multiscale`, each point of a basis
    has lengthscales, which are learned.
    """
    loaded = sgp.datasets.load_uci(data, split)
    X = jnp.asarray(loaded.X_train, jnp.float32)
    began = time.perf_counter()
    kind, size = method.split(", ", 1)[0], number_in(method)
    num_points = size if kind == "sparse" else num_cov
    points = sgp.features.kmeans_points(jax.random.key(1 + seed), X, num_points)
    mean_points = X[np.random.default_rng(seed).permutation(len(X))[:size]]
    regression = model
    if multiscale:
        scaled = sgp.kernels.MultiscaleRBF.with_unit_scales
        points, mean_points = scaled(points), scaled(mean_points)
        inputs = {name: np.asarray(scaled(getattr(loaded, name))) for name in ("X_train", "X_test")}
        loaded = dataclasses.replace(loaded, **inputs)
        regression = functools.partial(model, kernel=sgp.kernels.MultiscaleRBF)
    guides = {
        "decoupled": functools.partial(
            sgp.guides.AutoDecoupledGP, mean_points=mean_points, cov_points=points
        ),
        "hybrid": functools.partial(
            sgp.guides.AutoHybridGP, inducing_points=points, residual_points=mean_points
        ),
    }
    fit = Ours(loaded, points, 1024, steps, LEARNING_RATE, model=regression, guide=guides.get(kind))
    fit.run(steps - 1)
    seconds = time.perf_counter() - began
    return {**fit.score()._asdict(), "seconds": seconds}


def record_steps(data, split, seed, method, *, rows=100_000, repeats=4):
    """The record of a unit such as "1024 points": milliseconds and MiB of a step of SVI."""
    simulated, size = simulated_data(rows), number_in(method)
    X = jnp.asarray(simulated.X_train, jnp.float32)
    y = jnp.asarray(simulated.y_train, jnp.float32)
    guide = sgp.guides.AutoDecoupledGP(
        model, rest=AutoDelta, mean_points=X[:size], cov_points=X[:128], num_columns=128
    )
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
    state = jax.jit(svi.init, static_argnums=3)(jax.random.key(seed), X, y, 1024)

    @jax.jit
    def update(state, X, y):
        step = lambda state, _: svi.update(state, X, y, 1024)  # noqa: E731
        return jax.lax.scan(step, state, length=20)

    compiled = update.lower(state, X, y).compile()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, X, y))
        times.append((time.perf_counter() - began) / 20)
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return {"milliseconds": 1e3 * min(times), "memory": memory}


def stream_model(X, y, size):
    """A GP regression on one batch of a stream of `size` rows."""
    hyper = hyperparameters(X.shape[1])
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(*hyper[:2]), X))
    with sgp.plate("rows", size, len(X)):
        numpyro.sample("y", dist.Normal(f, hyper[2]), obs=y)


def follow(data, model, guide, steps, num_held, solve_every=None):
    """Train on a stream; returns batches, seconds and relative test errors during training."""
    n = len(data.y_train)
    held = min(num_held, n // STREAM_BATCH)
    X_train, y_train = data.X_train.astype(np.float32), data.y_train.astype(np.float32)
    X_test, variance = jnp.asarray(data.X_test, jnp.float32), np.var(data.y_test)
    generator = np.random.default_rng(0)
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    svi = SVI(model, guide, optax.adam(schedule), sgp.infer.QuadratureELBO())
    update = jax.jit(svi.update, static_argnums=3, donate_argnums=0)

    @jax.jit
    def error_of(params, X, y):
        mean = guide.posterior(params, X, y, n).mean(X_test)
        return jnp.mean(jnp.square(data.y_test - mean)) / variance

    # The kept batches are random, and the solve treats them as the whole data set.
    solve = jax.jit(lambda params, X, y: guide.solve_mean(params, X, y, len(X)).params)
    rows, recent, state, curve = np.array([], int), deque(maxlen=held), None, []
    began = time.perf_counter()
    for step in range(1, steps + 1):
        if len(rows) < STREAM_BATCH:
            rows = np.concatenate([rows, generator.permutation(n)])
        batch, rows = rows[:STREAM_BATCH], rows[STREAM_BATCH:]
        X, y = jnp.asarray(X_train[batch]), jnp.asarray(y_train[batch])
        if state is None:
            state = jax.jit(svi.init, static_argnums=3)(jax.random.key(0), X, y, n)
        state, _ = update(state, X, y, n)
        recent.append((X, y))
        last = step == steps
        fitted = {**svi.get_params(state), **(state.mutable_state or {})}
        solves = solve_every is not None and (last or step % solve_every == 0)
        if solves:
            fitted = solve(fitted, *map(jnp.concatenate, zip(*recent, strict=True)))
            state = sgp.infer.replace_params(svi, state, fitted)
        if last or solves or step % 100 == 0:
            jax.block_until_ready(state)
            spent = time.perf_counter() - began
            curve.append((step, spent, float(error_of(fitted, X, y))))
            began += time.perf_counter() - began - spent
    return curve


STREAM_BATCH = 1024


@functools.cache
def first_fit(data, split):
    """A data set, its first batch of inputs, and hyperparameters of an exact fit to the batch."""
    loaded = sgp.datasets.load_uci(data, split)
    first = np.random.default_rng(0).permutation(len(loaded.y_train))[:STREAM_BATCH]
    X, y = (jnp.asarray(a[first], jnp.float32) for a in (loaded.X_train, loaded.y_train))
    return loaded, X, fit_exactly(X, y, len(y))


def record_stream(data, split, seed, method, *, steps, num_residual, solve_every, num_held=32):
    """The record of a unit: nMSE and seconds at half of the batches, and at the end."""
    loaded, X, hyper = first_fit(data, split)
    kmeans = functools.partial(sgp.features.kmeans_points, jax.random.key(1), X)
    hyperparameter_guide = functools.partial(AutoDelta, init_loc_fn=init_to_value(values=hyper))
    if method.startswith("coupled"):
        points = kmeans(number_in(method))
        guide = sgp.guides.AutoSparseGP(
            stream_model, rest=hyperparameter_guide, inducing_points=points
        )
        curve = follow(loaded, stream_model, guide, steps, num_held)
    elif method == "gradients alone":
        guide = sgp.guides.AutoDecoupledGP(
            stream_model, rest=hyperparameter_guide, mean_size=num_residual
        )
        curve = follow(loaded, stream_model, guide, steps, num_held)
    else:
        pinned = numpyro.handlers.condition(stream_model, data=hyper)
        guide = sgp.guides.AutoHybridGP(
            pinned,
            rest=AutoDelta,
            inducing_points=kmeans(128),
            num_residual=num_residual,
            growth=128,
            train_residual=False,
        )
        curve = follow(loaded, pinned, guide, steps, num_held, solve_every)
    _, half_seconds, half_error = next(point for point in curve if point[0] >= steps // 2)
    _, seconds, error = curve[-1]
    return {
        "half_seconds": half_seconds,
        "half_nmse": half_error,
        "seconds": seconds,
        "nmse": error,
        "curve": [list(point[1:]) for point in curve],
    }


def sinc_model(X, y=None):
    """A GP with fixed hyperparameters, so that only the variational families differ."""
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.7), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def sinc_data():
    """500 noisy observations of a sinc function, and inputs for the figure."""
    generator = np.random.default_rng(0)
    X = generator.uniform(-4, 4, size=(500, 1))
    y = np.sinc(X[:, 0]) + 0.1 * generator.normal(size=500)
    return X, y, np.linspace(-4.0, 4.0, 300)[:, None]


def record_sinc(data, split, seed, method):
    """Error, standard deviation and bound for the sinc with a shared or a decoupled basis."""
    X, y, Xs = map(jnp.asarray, sinc_data())
    few, many = (jnp.linspace(-4.0, 4.0, size)[:, None] for size in (10, 100))
    guide = {
        "shared basis of 10": lambda: sgp.guides.AutoSparseGP(sinc_model, inducing_points=few),
        "100 for the mean, 10 for the covariance": lambda: sgp.guides.AutoDecoupledGP(
            sinc_model, mean_points=many, cov_points=few, train_mean=False, num_columns=None
        ),
        "shared basis of 100": lambda: sgp.guides.AutoSparseGP(sinc_model, inducing_points=many),
    }[method]()
    schedule = optax.cosine_decay_schedule(0.1, 3000)
    svi = SVI(sinc_model, guide, optax.adam(schedule), sgp.infer.QuadratureELBO())
    params = svi.run(jax.random.key(seed), 3000, X, y, progress_bar=False).params
    if isinstance(guide, sgp.guides.AutoDecoupledGP):
        params = guide.solve_mean(params, X, y).params
    bound = -svi.loss.loss(jax.random.key(1 + seed), params, sinc_model, guide, X, y)
    posterior = guide.posterior(params, X, y)
    mean, deviation = posterior.mean(Xs), jnp.sqrt(posterior.variance(Xs))
    return {
        "rmse": float(jnp.sqrt(jnp.mean(jnp.square(mean - jnp.sinc(Xs[:, 0]))))),
        "deviation": float(deviation.mean()),
        "bound": float(bound),
        "curve": [mean.tolist(), deviation.tolist()],
    }


FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"


def draw(path):
    """The figures of `decoupled-stream` and `decoupled-sinc`."""
    from matplotlib.figure import Figure

    run = json.loads(path.read_text())
    records = run["records"]
    if run["name"] == "decoupled-stream":
        figure = Figure(figsize=(5.0, 3.0), layout="constrained")
        panel = figure.subplots()
        for record in records:
            panel.plot(*zip(*record["curve"], strict=True), marker=".", label=record["method"])
        panel.set(xlabel="seconds", ylabel="test nMSE", yscale="log", title=records[0]["data"])
        panel.legend()
        figure.savefig(FIGURES / "decoupled_stream.svg", metadata={"Date": None})
    if run["name"] == "decoupled-sinc":
        X, y, Xs = sinc_data()
        figure = Figure(figsize=(10.0, 3.0), layout="constrained")
        panels = figure.subplots(1, len(records), sharey=True)
        for record, panel in zip(records, panels, strict=True):
            mean, deviation = map(np.array, record["curve"])
            panel.plot(X[:, 0], y, ".", color="0.7", markersize=2)
            band = mean - 2 * deviation, mean + 2 * deviation
            panel.fill_between(Xs[:, 0], *band, alpha=0.3)
            panel.plot(Xs[:, 0], mean)
            panel.plot(Xs[:, 0], np.sinc(Xs[:, 0]), "k--", linewidth=0.8)
            panel.set_title(record["method"], fontsize=9)
        figure.savefig(FIGURES / "decoupled_sinc.svg", metadata={"Date": None})
