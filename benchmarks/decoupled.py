"""A hybrid GP with a solved mean, streams, and what a step costs as the mean grows.

    python benchmarks/evidence.py decoupled decoupled-kin40k decoupled-steps
    python benchmarks/decoupled.py stream --data kin40k
    python benchmarks/decoupled.py sinc

`sinc` draws shared bases of 10 and of 100 points, and 100 points for the mean with 10 for the
covariance. The declared runs train a sparse GP of 512 points for some steps, then add residual
points for the mean: their weights by `solve_mean`, the noise at its optimum given the mean and the
variances, twice over. With `subset`, all hyperparameters come from an exact GP on as many
neighboring rows, and stay: then there is one solve.

`stream`: epochs of a data set as one stream of batches. A hybrid GP whose residual points grow
holds the last batches and solves for its mean on them now and then, its hyperparameters from an
exact fit of the first batch; beside it a sparse GP that starts from the same values and
trains them, on the same stream. Times include compilation. `stream` and the runs need SCALEGP_DATA.
"""

import argparse
import functools
import time
from collections import deque

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
    made_up,
    model,
    number_in,
    score,
)

import numpyro_scalegp as sgp


def exact_model(X, y):
    """An exact GP regression with the priors of the others."""
    lengthscale, variance, noise = hyperparameters(X.shape[1])
    kernel = sgp.kernels.RBF(lengthscale, variance)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise**2), obs=y)


def fit_exactly(X, y, subset_size):
    """The hyperparameters of an exact fit of the rows around a random one."""
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
    """A fit by `AutoSparseGP`, with a mean of many more points on top, its noise given or not."""

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
            # The bound's maximum over the noise, its weak prior left aside.
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
    """The record of a unit, for benchmarks/evidence.py: a sparse fit, then solves for its mean.

    What is reached before the solves and after the first one is beside it. With `subset`, all
    hyperparameters come from an exact fit of as many rows, and stay: then there is one solve.
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
    reached = [{"seconds": seconds, **fit.score()._asdict()}]
    hybrid = Hybrid(fit, num_residual, noise, seed)
    for _ in range(1 if subset else 2):
        began = time.perf_counter()
        hybrid.refine()
        seconds += time.perf_counter() - began
        reached.append({"seconds": seconds, **hybrid.score()._asdict()})
    found = {f"sparse_{name}": value for name, value in reached[0].items()}
    found |= {f"first_{name}": value for name, value in reached[1].items()}
    return found | reached[-1]


def record_steps(data, split, seed, method, *, rows=100_000, repeats=4):
    """The record of a unit: milliseconds and MiB of a step of SVI with as many mean points."""
    made, size = made_up(rows), number_in(method)
    X, y = jnp.asarray(made.X_train, jnp.float32), jnp.asarray(made.y_train, jnp.float32)
    guide = sgp.guides.AutoDecoupledGP(
        model, rest=AutoDelta, mean_points=X[:size], cov_points=X[:128], num_columns=128
    )
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(2))
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


def follow(data, model, guide, arguments, solve_every=None):
    """Train on a stream; the time and the test error, as a part of the variance, on the way."""
    n, size = len(data.y_train), arguments.batch_size
    held = min(arguments.held, n // size)
    X_train, y_train = data.X_train.astype(np.float32), data.y_train.astype(np.float32)
    X_test, variance = jnp.asarray(data.X_test, jnp.float32), np.var(data.y_test)
    generator = np.random.default_rng(0)
    schedule = optax.cosine_decay_schedule(arguments.learning_rate, arguments.steps)
    svi = SVI(model, guide, optax.adam(schedule), sgp.infer.QuadratureELBO(2))
    update = jax.jit(svi.update, static_argnums=3, donate_argnums=0)

    @jax.jit
    def error_of(params, X, y):
        mean = guide.posterior(params, X, y, n).mean(X_test)
        return jnp.mean(jnp.square(data.y_test - mean)) / variance

    # Each row held stands for n / held of the stream's.
    solve = jax.jit(lambda params, X, y: guide.solve_mean(params, X, y, n).params)
    rows, recent, state, found = np.array([], int), deque(maxlen=held), None, []
    began = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        if len(rows) < size:
            rows = np.concatenate([rows, generator.permutation(n)])
        batch, rows = rows[:size], rows[size:]
        X, y = jnp.asarray(X_train[batch]), jnp.asarray(y_train[batch])
        if state is None:
            state = jax.jit(svi.init, static_argnums=3)(jax.random.key(0), X, y, n)
        state, _ = update(state, X, y, n)
        recent.append((X, y))
        last = step == arguments.steps
        fitted = {**svi.get_params(state), **(state.mutable_state or {})}
        solves = solve_every is not None and (last or step % solve_every == 0)
        if solves:
            # The last batches as one: each row counts for n rows over their number.
            fitted = solve(fitted, *map(jnp.concatenate, zip(*recent, strict=True)))
            state = sgp.infer.replace_params(svi, state, fitted)
        if last or solves or step % 100 == 0:
            jax.block_until_ready(state)
            spent = time.perf_counter() - began
            found.append((spent, float(error_of(fitted, X, y))))
            print(f"{step:6d} batches, {spent:6.1f} s: nMSE {found[-1][1]:.4f}", flush=True)
            began += time.perf_counter() - began - spent
    return found


def stream(arguments):
    """Follow a stream with a hybrid GP and with a sparse one, and draw their errors."""
    from matplotlib.figure import Figure

    data = sgp.datasets.load_uci(arguments.data, split=arguments.split)
    first = np.random.default_rng(0).permutation(len(data.y_train))[: arguments.batch_size]
    X, y = (jnp.asarray(part[first], jnp.float32) for part in (data.X_train, data.y_train))
    began = time.perf_counter()
    hyper = fit_exactly(X, y, len(y))
    print(f"hyperparameters: {time.perf_counter() - began:.1f} s")
    rest = functools.partial(AutoDelta, init_loc_fn=init_to_value(values=hyper))
    pinned = numpyro.handlers.condition(stream_model, data=hyper)
    hybrid = sgp.guides.AutoHybridGP(
        pinned,
        rest=AutoDelta,
        inducing_points=sgp.features.kmeans_points(jax.random.key(1), X, 128),
        num_residual=arguments.num_residual,
        growth=128,
        train_residual=False,
    )
    points = sgp.features.kmeans_points(jax.random.key(1), X, arguments.num_inducing)
    sparse = sgp.guides.AutoSparseGP(stream_model, rest=rest, inducing_points=points)
    print(f"hybrid, {arguments.num_residual} and 128 points")
    found = {"decoupled": follow(data, pinned, hybrid, arguments, arguments.solve_every)}
    print(f"sparse, {arguments.num_inducing} points")
    found["coupled"] = follow(data, stream_model, sparse, arguments)
    figure = Figure(figsize=(5.0, 3.0), layout="constrained")
    panel = figure.subplots()
    for name, errors in found.items():
        panel.plot(*zip(*errors, strict=True), marker=".", label=name)
    panel.set(xlabel="seconds", ylabel="test nMSE", yscale="log", title=data.name)
    panel.legend()
    figure.savefig(arguments.output or "docs/figures/decoupled_stream.svg")


def sinc_model(X, y=None):
    """A GP with given hyperparameters, so that the families alone differ."""
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.7), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def sinc(arguments):
    """Draw what shared and decoupled bases of several sizes make of 500 noisy rows of a sinc."""
    from matplotlib.figure import Figure

    generator = np.random.default_rng(0)
    X = generator.uniform(-4, 4, size=(500, 1))
    y = jnp.asarray(np.sinc(X[:, 0]) + 0.1 * generator.normal(size=500))
    X, Xs = jnp.asarray(X), jnp.linspace(-4.0, 4.0, 300)[:, None]
    truth = jnp.sinc(Xs[:, 0])
    few, many = (jnp.linspace(-4.0, 4.0, size)[:, None] for size in (10, 100))
    guides = {
        "shared basis of 10": sgp.guides.AutoSparseGP(sinc_model, inducing_points=few),
        "100 for the mean, 10 for the covariance": sgp.guides.AutoDecoupledGP(
            sinc_model, mean_points=many, cov_points=few, train_mean=False, num_columns=None
        ),
        "shared basis of 100": sgp.guides.AutoSparseGP(sinc_model, inducing_points=many),
    }
    figure = Figure(figsize=(10.0, 3.0), layout="constrained")
    for (title, guide), panel in zip(
        guides.items(), figure.subplots(1, 3, sharey=True), strict=True
    ):
        schedule = optax.cosine_decay_schedule(0.1, 3000)
        svi = SVI(sinc_model, guide, optax.adam(schedule), sgp.infer.QuadratureELBO(2))
        result = svi.run(jax.random.key(0), 3000, X, y, progress_bar=False)
        params = result.params
        if isinstance(guide, sgp.guides.AutoDecoupledGP):
            params = guide.solve_mean(params, X, y).params
        bound = -svi.loss.loss(jax.random.key(1), params, sinc_model, guide, X, y)
        posterior = guide.posterior(params, X, y)
        mean, sd = posterior.mean(Xs), jnp.sqrt(posterior.variance(Xs))
        error = jnp.sqrt(jnp.mean(jnp.square(mean - truth)))
        print(f"{title}: RMSE to the sinc {error:.4f}, mean deviation {sd.mean():.4f}, {bound:.1f}")
        panel.plot(X[:, 0], y, ".", color="0.7", markersize=2)
        panel.fill_between(Xs[:, 0], mean - 2 * sd, mean + 2 * sd, alpha=0.3)
        panel.plot(Xs[:, 0], mean)
        panel.plot(Xs[:, 0], truth, "k--", linewidth=0.8)
        panel.set_title(title, fontsize=9)
    figure.savefig(arguments.output or "docs/figures/decoupled_sinc.svg")


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["stream", "sinc"])
    parser.add_argument("--data", default="kin40k")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200, help="of the sparse GP")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--num-inducing", type=int, default=NUM_INDUCING)
    parser.add_argument("--num-residual", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=1024, help="of `stream`")
    parser.add_argument("--held", type=int, default=32, help="batches that `stream` holds")
    parser.add_argument("--solve-every", type=int, default=500, help="batches of `stream`")
    parser.add_argument("--output", help="the figure; by default in docs/figures")
    arguments = parser.parse_args()
    {"stream": stream, "sinc": sinc}[arguments.what](arguments)


if __name__ == "__main__":
    main()
