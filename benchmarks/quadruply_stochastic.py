"""Weight-space GPs: cost of a step, effect of control variates, and accuracy of a fit.

    python benchmarks/evidence.py many-features many-features-sets features-cost control-variate

The declared runs are fits, with times including compilation; the cost of steps of `RowSVI` by the
numbers of features and observations; and 1000 draws of the objective <f_i, f_j> / noise and its
gradient, at a draw of the weights from the prior and the hyperparameters of an exact GP on 1000
random data points, as in figure 1 of Evans and Nair (2020). All need SCALEGP_DATA.
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
from sparse import number_in, score, simulated_data

import numpyro_scalegp as sgp
from numpyro_scalegp.variational.quadruply.chevron_features import (
    Chevron,
    set_projections,
    weight_rows,
)
from numpyro_scalegp.variational.quadruply.control_variate import ControlVariate
from numpyro_scalegp.variational.quadruply.elbo import draw_sets

BATCH = 500


def regression(X, y, phi, batch_size, lengthscale=None, variance=None):
    """A GP regression in weight space with mini-batches, with fixed or latent hyperparameters."""
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
    """Random Fourier features of an RBF kernel, with stored or recomputed frequencies."""
    phi = sgp.features.RandomFourier(sgp.kernels.RBF(lengthscale), num, seed=0)
    return phi.stored(d) if stored else phi


def scaled(schedule):
    """Lazy Adam, with a smaller learning rate for the dense columns, whose entries are small."""
    factors = {"loc": 1.0, "diag": 1.0, "columns": 0.03}

    def choose(name):
        factor = factors[name.rsplit("_", 1)[-1]]
        return sgp.infer.row_adam(lambda step: factor * schedule(step))

    return choose


def record(
    data,
    split,
    seed,
    method,
    *,
    steps=3000,
    learning_rate=0.02,
    noise=0.1,
    dense_rate=0.003,
    learn_kernel=True,
    start_rows=5000,
):
    """The record of a unit: scores after training with lazy Adam.

    A method names the number of features, and the features of a step ("10,000 a step"; without,
    all of them, and no control variate), the dense columns of the Cholesky factor ("rank 10"), and
    "from zero" where the mean starts there. Otherwise it starts as a fit to `start_rows` random
    data points. An exact GP on 1000 neighboring data points gives the hyperparameters, which
    stay fixed except for the noise unless `learn_kernel`.
    """
    size, *details = method.split(", ")
    num_features = num_set = number_in(size)
    rank = 0
    for detail in details:
        if detail.endswith("a step"):
            num_set = number_in(detail)
        elif detail.startswith("rank"):
            rank = number_in(detail)
        elif detail == "from zero":
            start_rows = 0
    loaded = sgp.datasets.load_uci(data, split)
    arrays = loaded.X_train, loaded.y_train, loaded.X_test
    X, y, Xs = (jnp.asarray(array, jnp.float32) for array in arrays)
    n, d = X.shape
    began = time.perf_counter()
    start = fit_exactly(X, y, 1000)
    fixed = () if learn_kernel else (start["lengthscale"], start["variance"])
    phi = features(d, num_features, start["lengthscale"])
    values = {**start, "noise": jnp.float32(noise)}
    hyperparameter_guide = functools.partial(AutoDelta, init_loc_fn=init_to_value(values=values))
    guide = sgp.guides.AutoChevronGP(regression, rest=hyperparameter_guide, rank=rank)
    svi = sgp.infer.RowSVI(
        regression,
        guide,
        optax.adam(optax.cosine_decay_schedule(dense_rate, steps)),
        sgp.infer.QuadruplyStochasticELBO(num_set, 0 if num_set == num_features else 500),
        row_optim=scaled(optax.cosine_decay_schedule(learning_rate, steps)),
    )
    state = svi.init(jax.random.key(seed), X, y, phi, BATCH, *fixed)
    solve = jax.jit(guide.solve_diagonal, static_argnums=4)
    params = solve(svi.get_params(state), X, y, phi, min(n, 5000), *fixed)
    if start_rows:
        subset = jax.random.permutation(jax.random.key(1 + seed), n)[:start_rows]
        solve = jax.jit(guide.solve_mean, static_argnums=4)
        params = solve(params, X[subset], y[subset], phi, None, *fixed).params
    state = sgp.infer.replace_params(svi, state, params)
    result = svi.run(
        jax.random.key(seed),
        steps,
        *(X, y, phi, BATCH, *fixed),
        init_state=state,
        progress_bar=False,
    )
    jax.block_until_ready(result.losses)
    seconds = time.perf_counter() - began
    posterior = guide.posterior(result.params, X[:10], y[:10], phi, None, *fixed)
    sd = guide.median(result.params)["noise"]
    predicted = np.asarray(posterior.mean(Xs)), np.asarray(posterior.variance(Xs) + sd**2)
    scores = score(*predicted, loaded.y_test)
    return {**scores._asdict(), "noise": float(sd), "seconds": seconds}


class Steps:
    """Steps of `RowSVI` with a number of features."""

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
            def update(state, _):
                return svi.update(state, X, y, phi, batch, lengthscale, variance)

            return jax.lax.scan(update, state, length=20)

        # The memory of a step without its state, which is donated.
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
    """The record of a unit: milliseconds of a step, by the number of features or of rows.

    The method says which of them grows. Sizes alternate, so that noise of the machine disturbs all
    alike. `memory` is the maximum memory of a step without its state, in MiB.
    """
    if method == "features":
        loaded = sgp.datasets.load_uci(data, split)
        X, y = (jnp.asarray(array, jnp.float32) for array in (loaded.X_train, loaded.y_train))
        sizes = [10**power for power in range(4, 8)]
        runs = [Steps(X, y, size, rank, num_set) for size in sizes]
    else:
        sizes = [10**power for power in range(4, 7)]
        data_set = simulated_data(sizes[-1])
        X, y = (jnp.asarray(a, jnp.float32) for a in (data_set.X_train, data_set.y_train))
        runs = [Steps(X[:size], y[:size], 10**5, rank, num_set) for size in sizes]
    for _ in range(repeats):
        for run in runs:
            run.run()
    times = [run.milliseconds for run in runs]
    return {
        **{f"{size:.0e}".replace("+0", ""): time for size, time in zip(sizes, times, strict=True)},
        "memory": max(run.temporary for run in runs) / 2**20,
    }


FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures"


def draw(path):
    """Draw the figures of `features-cost` and `control-variate`."""
    from matplotlib.figure import Figure

    run = json.loads(path.read_text())
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    if run["name"] == "features-cost":
        labels = {"features": "features m, at n = 36,000", "rows": "rows n, at m = 1e5"}
        for record, style in zip(run["records"], ["o-", "s--"], strict=True):
            times = {float(name): time for name, time in record.items() if name[:2] == "1e"}
            axes.loglog(list(times), list(times.values()), style, label=labels[record["method"]])
        axes.set(xlabel="number", ylabel="milliseconds a step", ylim=(1.0, 100.0))
        axes.legend()
        figure.savefig(FIGURE / "quadruply_stochastic_cost.svg", metadata={"Date": None})
    if run["name"] == "control-variate":
        ranks = [0, *(number_in(record["method"]) for record in run["records"])]
        for name, style in zip(COMPARED, ["o-", "s--"], strict=True):
            ratios = [1.0, *(record[name] for record in run["records"])]
            axes.semilogy(ranks, ratios, style, label=name.split("_")[0])
        axes.set(xlabel="support points", ylabel="variance, of that without")
        axes.legend()
        figure.savefig(FIGURE / "control_variate.svg", metadata={"Date": None})


COMPARED = ("objective_variance", "gradient_variance")


@functools.cache
def variances(data, split, rank, draws=1000, num_features=10_000, num=500):
    """Variances of the objective, and of its gradient in the mean over weights."""
    loaded = sgp.datasets.load_uci(data, split)
    X, y = (jnp.asarray(array, jnp.float32) for array in (loaded.X_train, loaded.y_train))
    n, m = len(X), num_features
    subset = jax.random.permutation(jax.random.key(5), n)[:1000]
    start = fit_exactly(X[subset], y[subset], 1000)
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
        i, j = set_projections(phi, batch, rows).projected[..., 0]
        total = (n / num) * i.dot(j)
        if control is not None:
            total += n * control.of_residuals(control.set_projections(phi, rows))
        return total / noise

    value_and_gradient = jax.jit(jax.value_and_grad(objective))
    values, total, squares = [], np.zeros(m), np.zeros(m)
    for key in jax.random.split(draw_key, draws):
        value, gradient = value_and_gradient(weights.loc, key)
        values.append(float(value))
        gradient = np.asarray(gradient, np.float64)
        total, squares = total + gradient, squares + gradient**2
    return np.var(values), np.mean(squares / draws - (total / draws) ** 2)


def record_variance(data, split, seed, method):
    """The record of a unit: variances with a control variate, relative to those without."""
    controlled, plain = variances(data, split, number_in(method)), variances(data, split, 0)
    ratios = np.array(controlled) / np.array(plain)
    return dict(zip(COMPARED, ratios.tolist(), strict=True))
