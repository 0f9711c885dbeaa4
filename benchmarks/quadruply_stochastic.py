"""Weight-space GPs: what a step costs, what control variates save, and what a fit reaches.

    python benchmarks/evidence.py many-features many-features-sets features-cost control-variate

The declared runs are fits, their times with compilation; the cost of steps of `RowSVI` against the
number of features and of rows; and 1000 draws of the objective <f_i, f_j> / noise and of its
gradient at a draw of the weights from the prior, under hyperparameters of an exact GP on 1000
random rows, as in figure 1 of Evans and Nair (2020). All need SCALEGP_DATA.
"""

import functools
import json
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from decoupled import fit_exactly
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.initialization import init_to_value
from sparse import made_up, number_in, score

import numpyro_scalegp as sgp
from numpyro_scalegp.features.chevron import Chevron, views, weight_rows
from numpyro_scalegp.quadruply_stochastic.control_variate import ControlVariate
from numpyro_scalegp.quadruply_stochastic.elbo import draw_sets

BATCH = 500


def regression(X, y, phi, batch_size, lengthscale=None, variance=None):
    """A GP regression in weight space, mini-batched in the model, of a given or unknown kernel."""
    if lengthscale is None:
        lengthscale = numpyro.sample(
            "lengthscale", dist.LogNormal(0.0, 1.0).expand([X.shape[1]]).to_event(1)
        )
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    rows = sgp.plate("rows", len(X), batch_size)
    X_batch, y_batch = rows.take(X, y)
    phi = phi.with_kernel(sgp.kernels.RBF(lengthscale, variance))
    f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X_batch))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)


def features(d, num, lengthscale=1.0, *, stored=True):
    """Random Fourier features of an RBF kernel, kept unless they are too many."""
    phi = sgp.features.RandomFourier(sgp.kernels.RBF(lengthscale), num, seed=0)
    return phi.stored(d) if stored else phi


def scaled(schedule):
    """Lazy Adam, with smaller steps for the dense columns, whose entries are small numbers."""
    shares = {"loc": 1.0, "diag": 1.0, "columns": 0.03}

    def choose(name):
        share = shares[name.rsplit("_", 1)[-1]]
        return sgp.infer.row_adam(lambda step: share * schedule(step))

    return choose


def record(
    data,
    split,
    seed,
    method,
    *,
    num_features=10_000,
    num_set=10_000,
    rank=0,
    steps=3000,
    learning_rate=0.02,
    noise=0.1,
    dense_rate=0.003,
    learn_kernel=True,
    start_rows=5000,
):
    """The record of a unit, for benchmarks/evidence.py: training with lazy Adam.

    It starts from the hyperparameters of an exact GP on 1000 neighboring rows, which it holds but
    for the noise unless it is to `learn_kernel`, and from a mean that fits `start_rows` random
    rows. Where a step has all features, `num_set` of them, there is no control variate.
    """
    loaded = sgp.datasets.load_uci(data, split)
    parts = loaded.X_train, loaded.y_train, loaded.X_test
    X, y, Xs = (jnp.asarray(part, jnp.float32) for part in parts)
    n, d = X.shape
    began = time.perf_counter()
    start = fit_exactly(X, y, 1000)
    held = () if learn_kernel else (start["lengthscale"], start["variance"])
    phi = features(d, num_features, start["lengthscale"])
    values = {**start, "noise": jnp.float32(noise)}
    rest = functools.partial(AutoDelta, init_loc_fn=init_to_value(values=values))
    guide = sgp.guides.AutoChevronGP(regression, rest=rest, rank=rank)
    svi = sgp.infer.RowSVI(
        regression,
        guide,
        optax.adam(optax.cosine_decay_schedule(dense_rate, steps)),
        sgp.infer.QuadruplyStochasticELBO(num_set, 0 if num_set == num_features else 500),
        row_optim=scaled(optax.cosine_decay_schedule(learning_rate, steps)),
    )
    state = svi.init(jax.random.key(seed), X, y, phi, BATCH, *held)
    solve = jax.jit(guide.solve_diagonal, static_argnums=4)
    params = solve(svi.get_params(state), X, y, phi, min(n, 5000), *held)
    if start_rows:
        some = jax.random.permutation(jax.random.key(1 + seed), n)[:start_rows]
        solve = jax.jit(guide.solve_mean, static_argnums=4)
        params = solve(params, X[some], y[some], phi, None, *held).params
    state = sgp.infer.replace_params(svi, state, params)
    result = svi.run(
        jax.random.key(seed),
        steps,
        *(X, y, phi, BATCH, *held),
        init_state=state,
        progress_bar=False,
    )
    jax.block_until_ready(result.losses)
    seconds = time.perf_counter() - began
    posterior = guide.posterior(result.params, X[:10], y[:10], phi, None, *held)
    sd = guide.median(result.params)["noise"]
    predicted = np.asarray(posterior.mean(Xs)), np.asarray(posterior.variance(Xs) + sd**2)
    found = score(*predicted, loaded.y_test)
    return {**found._asdict(), "noise": float(sd), "seconds": seconds}


class Steps:
    """Steps of `RowSVI` on some rows and a given number of features."""

    def __init__(self, X, y, num_features, rank, num_set):
        d = X.shape[1]
        phi = features(d, num_features, stored=False)
        self.args = X, y, phi, BATCH, jnp.full(d, 2.0, jnp.float32), jnp.float32(1.0)
        guide = sgp.guides.AutoChevronGP(regression, rest=AutoDelta, rank=rank)
        loss = sgp.infer.QuadruplyStochasticELBO(num_set, 500)
        svi = sgp.infer.RowSVI(regression, guide, optax.adam(1e-3), loss)
        state = svi.init(jax.random.key(0), *self.args)

        @functools.partial(jax.jit, donate_argnums=0, static_argnums=(4,))
        def step(state, X, y, phi, batch, lengthscale, variance):
            def one(state, _):
                return svi.update(state, X, y, phi, batch, lengthscale, variance)

            return jax.lax.scan(one, state, length=20)

        # What a step needs beside its state, of which nothing is copied.
        memory = step.lower(state, *self.args).compile().memory_analysis()
        self.temporary = memory.temp_size_in_bytes if memory else math.nan
        self.step, self.state, self.times = step, state, []
        self.run()
        self.times.clear()

    def run(self):
        """Time twenty steps."""
        began = time.perf_counter()
        self.state, losses = self.step(self.state, *self.args)
        jax.block_until_ready(losses)
        self.times.append((time.perf_counter() - began) / 20)

    @property
    def milliseconds(self):
        """The median time of a step."""
        return 1e3 * float(np.median(self.times))


def record_cost(data, split, seed, method, *, rank=0, num_set=2000, repeats=15):
    """The record of a unit: milliseconds of a step, for numbers of features or of rows.

    The method says which of them grows. Sizes take turns, so that a noisy machine disturbs all
    alike. `memory` is what a step takes beside its state, in MiB, at most.
    """
    if method == "features":
        loaded = sgp.datasets.load_uci(data, split)
        X, y = (jnp.asarray(part, jnp.float32) for part in (loaded.X_train, loaded.y_train))
        sizes = [10**power for power in range(4, 8)]
        runs = [Steps(X, y, size, rank, num_set) for size in sizes]
    else:
        sizes = [10**power for power in range(4, 7)]
        made = made_up(sizes[-1])
        X, y = (jnp.asarray(part, jnp.float32) for part in (made.X_train, made.y_train))
        runs = [Steps(X[:size], y[:size], 10**5, rank, num_set) for size in sizes]
    for _ in range(repeats):
        for one in runs:
            one.run()
    times = [one.milliseconds for one in runs]
    return {
        **{f"{size:.0e}".replace("+0", ""): time for size, time in zip(sizes, times, strict=True)},
        "memory": max(one.temporary for one in runs) / 2**20,
    }


FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures"


def draw(path):
    """The figures of `features-cost` and `control-variate`."""
    from matplotlib.figure import Figure

    run = json.loads(path.read_text())
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    if run["name"] == "features-cost":
        labels = {"features": "features m, at n = 36,000", "rows": "rows n, at m = 1e5"}
        for one, style in zip(run["records"], ["o-", "s--"], strict=True):
            found = {float(name): time for name, time in one.items() if name[:2] == "1e"}
            axes.loglog(list(found), list(found.values()), style, label=labels[one["method"]])
        axes.set(xlabel="number", ylabel="milliseconds a step", ylim=(1.0, 100.0))
        axes.legend()
        figure.savefig(FIGURE / "quadruply_stochastic_cost.svg", metadata={"Date": None})
    if run["name"] == "control-variate":
        ranks = [0, *(number_in(one["method"]) for one in run["records"])]
        for name, style in zip(COMPARED, ["o-", "s--"], strict=True):
            shares = [1.0, *(one[name] for one in run["records"])]
            axes.semilogy(ranks, shares, style, label=name.split("_")[0])
        axes.set(xlabel="support points", ylabel="variance, of that without")
        axes.legend()
        figure.savefig(FIGURE / "control_variate.svg", metadata={"Date": None})


COMPARED = ("objective_variance", "gradient_variance")


@functools.cache
def variances(data, split, rank, draws=1000, num_features=10_000, num=500):
    """Variances of the objective and, in the mean over weights, of its gradient."""
    loaded = sgp.datasets.load_uci(data, split)
    X, y = (jnp.asarray(part, jnp.float32) for part in (loaded.X_train, loaded.y_train))
    n, m = len(X), num_features
    some = jax.random.permutation(jax.random.key(5), n)[:1000]
    start = fit_exactly(X[some], y[some], 1000)
    phi = features(X.shape[1], m, start["lengthscale"])
    phi = phi.with_kernel(sgp.kernels.RBF(start["lengthscale"], start["variance"]))
    mu_key, p_key, draw_key = jax.random.split(jax.random.key(0), 3)
    weights = Chevron(jax.random.normal(mu_key, (m,)), jnp.ones(m), jnp.zeros((m, 0)))
    noise, control = start["noise"] ** 2, None
    if rank:
        rows = X[jax.random.permutation(p_key, n)][: 5 * rank]
        points = sgp.features.kmeans_points(jax.random.key(1), rows, rank)
        zero = jnp.zeros(len(rows))
        control = ControlVariate.fit(phi, points, rows, zero, weights, dense_precision=False)

    def objective(loc, key):
        row_key, set_key = jax.random.split(key)
        batch = X[jax.random.randint(row_key, (num,), 0, n)]
        rows = weight_rows(draw_sets(set_key, m, num), loc, *weights[1:])
        i, j = views(phi, batch, rows).projected[..., 0]
        total = (n / num) * i.dot(j)
        if control is not None:
            total += n * control.of_residuals(control.views(phi, rows))
        return total / noise

    one = jax.jit(jax.value_and_grad(objective))
    values, total, squares = [], np.zeros(m), np.zeros(m)
    for key in jax.random.split(draw_key, draws):
        value, gradient = one(weights.loc, key)
        values.append(float(value))
        gradient = np.asarray(gradient, np.float64)
        total, squares = total + gradient, squares + gradient**2
    return np.var(values), np.mean(squares / draws - (total / draws) ** 2)


def record_variance(data, split, seed, method):
    """The record of a unit: variances with a control variate, of those without one."""
    with_one, without = variances(data, split, number_in(method)), variances(data, split, 0)
    shares = np.array(with_one) / np.array(without)
    return dict(zip(COMPARED, shares.tolist(), strict=True))
