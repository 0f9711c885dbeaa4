"""Russian-roulette conjugate gradients, compared with exact gradients and plain truncation.

    python benchmarks/evidence.py truncation-bias truncation-lengthscale truncation-errors
    python benchmarks/evidence.py truncation-training truncation-cut truncation-step
    python benchmarks/evidence.py truncation-sets truncation-features

The first two runs measure the biases of log|H| and y'H^-1 y with the audit, and the lengthscale
that each estimator learns, for y = x sin(5 pi x) + noise, as in the paper. The next runs train an
RBF kernel with ARD by 100 steps of Adam from hyperparameters of 1.0. They measure test errors in
float32, from a posterior by Cholesky, as in tables S1 and S2 of Potapczynski et al. (2021), and in
float64 the exact log marginal likelihood at the fitted hyperparameters, also with more probes and
with textbook iterations, in which right-hand sides do not share a Krylov space. The last run
measures the time of a gradient. All but the first two need SCALEGP_DATA.
"""

import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from iterative import load, seconds
from matplotlib.figure import Figure
from sparse import score_of

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.audit import TERMS, Audit, AuditRow
from numpyro_scalegp.integrated.truncated import stopping

EXACT = "exact gradients"
FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"


def parts_of(method):
    """The kind and the numbers by name of a method such as "cut, 37 iterations, textbook"."""
    kind, *options = method.split(", ")
    counts = [option.replace(",", "").split() for option in options if option != "textbook"]
    return kind, {name: int(number) for number, name in counts}


def estimator_of(method, n):
    """The estimator of a name: "roulette" is Russian-roulette CG, "cut" truncated CG.

    "RFF" has random Fourier features, and "SS-RFF" at least so many in a single-sample estimate.
    """
    kind, numbers = parts_of(method)
    if kind == EXACT:
        return sgp.estimators.Cholesky()
    if kind == "RFF":
        return sgp.estimators.RandomFourier(numbers["features"])
    if kind == "SS-RFF":
        return sgp.estimators.SingleSampleRFF(numbers["features"])
    group_size, share = (1, 0.5) if "textbook" in method else (128, 0.8)
    preconditioner, iterations = sgp.preconditioners.PivotedCholesky(100), numbers["iterations"]
    if kind == "roulette":
        start = stopping.decay_and_minimum(iterations, n, share=share)
        solver = sgp.solvers.RussianRouletteCG(*start, n, preconditioner, group_size)
    else:
        solver = sgp.solvers.ConjugateGradients(0.0, iterations, preconditioner, group_size)
    return sgp.estimators.Hutchinson(solver, numbers.get("probes", 16), num_logdet_probes=0)


def objective(estimator, X, y):
    """The loss per observation as a function of unconstrained values and key, with iterations."""

    def loss(raw, key):
        values = jax.tree.map(jax.nn.softplus, raw)
        kernel = sgp.kernels.RBF(values["lengthscale"], values["variance"])
        # As in `GaussianProcess.log_prob`, but with the solution.
        operator = sgp.solvers.KernelOperator(kernel, X, values["noise"])
        value, solution = estimator.evaluate(operator, y, key=key)
        return -value / len(y), 0.0 if solution is None else solution.epochs

    return loss


def unconstrained(d, noise=1.0):
    """Inverse softplus of hyperparameters of 1.0 and of the noise."""
    values = {"lengthscale": jnp.ones(d), "variance": 1.0, "noise": noise}
    return jax.tree.map(lambda value: jnp.log(jnp.expm1(value)), values)


def train(X, y, estimator, steps):
    """A compiled function from a key to the hyperparameters and iterations of each step."""
    loss = jax.value_and_grad(objective(estimator, X, y), has_aux=True)
    optimizer = optax.adam(0.1)

    def step(carry, key):
        raw, state = carry
        (_, epochs), gradient = loss(raw, key)
        updates, state = optimizer.update(gradient, state)
        raw = optax.apply_updates(raw, updates)
        return (raw, state), (raw, epochs)

    @jax.jit
    def run(key):
        raw = unconstrained(X.shape[1])
        keys = jax.random.split(key, steps)
        path, epochs = jax.lax.scan(step, (raw, optimizer.init(raw)), keys)[1]
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), raw, path), epochs

    return run


@functools.cache
def training(data, split, seed, method, n, steps):
    """The exact log marginal likelihood after every ten steps, and the mean of iterations."""
    X, y, *_ = load(data, split, n)
    path, epochs = train(X, y, estimator_of(method, len(y)), steps)(jax.random.key(seed))
    exact = objective(sgp.estimators.Cholesky(), X, y)
    score = jax.jit(lambda path: jax.lax.map(lambda raw: -exact(raw, None)[0], path))
    curve = len(y) * score(jax.tree.map(lambda a: a[::10], path))
    return curve.tolist(), float(epochs.mean())


@jax.enable_x64(True)
def record_training(data, split, seed, method, *, n=2000, steps=100):
    """The exact log marginal likelihood at the end of a method's training, in float64.

    `below` is the difference to training with exact gradients, in percent.
    """
    curve, iterations = training(data, split, seed, method, n, steps)
    result = {"end": curve[-1], "curve": curve}
    if method == EXACT:
        return result
    best = training(data, split, 0, EXACT, n, steps)[0][-1]
    return {**result, "below": 100 * (best - curve[-1]) / abs(best), "iterations": iterations}


def record_errors(data, split, seed, method, *, expected=20, n=2000, steps=100):
    """Test errors after training by a method, in float32."""
    X, y, X_test, y_test = load(data, split, n)
    name = {
        EXACT: EXACT,
        "Russian roulette": f"roulette, {expected} iterations",
        "conjugate gradients, cut": f"cut, {expected} iterations",
    }[method]
    key = jax.random.key(seed)
    run = train(X, y, estimator_of(name, len(y)), steps).lower(key).compile()
    start = time.perf_counter()
    path, epochs = jax.block_until_ready(run(key))
    elapsed = time.perf_counter() - start
    values = jax.tree.map(lambda a: jax.nn.softplus(a[-1]), path)
    kernel = sgp.kernels.RBF(values["lengthscale"], values["variance"])
    predictive = sgp.GaussianProcess(kernel, X, values["noise"]).condition(y).predictive(X_test)
    return {
        **score_of(predictive, y_test),
        "noise_variance": float(values["noise"]),
        "iterations": float(jnp.mean(epochs)),
        "seconds": elapsed,
    }


def record_step(data, split, seed, method, *, n=5000, repeats=7):
    """Seconds of a value with its gradient, such as "30 iterations, 64 probes", in float32.

    Medians over keys, alternating with plain CG with the mean number of iterations of the roulette;
    the ratio is per iteration. As in all records, one of the iterations is the product for the
    final residual.
    """
    X, y, *_ = load(data, split, n)
    raw = unconstrained(X.shape[1], noise=0.01)
    keys = jax.random.split(jax.random.key(seed), repeats)

    def compiled(name):
        loss = jax.value_and_grad(objective(estimator_of(name, len(y)), X, y), has_aux=True)
        return jax.jit(loss).lower(raw, keys[0]).compile()

    roulette = compiled(f"roulette, {method}")
    iterations = np.array([float(roulette(raw, key)[0][1]) for key in keys])
    probes = method.split(", ")[1]
    plain = compiled(f"cut, {round(iterations.mean()) - 1} iterations, {probes}")
    plain_iterations = float(plain(raw, keys[0])[0][1])
    times = [
        [seconds(run, raw, key, repeats=1, warm=True)[0] for run in (roulette, plain)]
        for key in keys
    ]
    ours, theirs = np.array(times).T
    return {
        "iterations": float(iterations.mean()),
        "plain_iterations": plain_iterations,
        "seconds": float(np.median(ours)),
        "plain_seconds": float(np.median(theirs)),
        "plain_ratio": float(np.median(ours / iterations) / np.median(theirs / plain_iterations)),
    }


def toy_data():
    """y = x sin(5 pi x) + noise at 200 points, and the variances of function and noise."""
    x = np.linspace(0.0, 1.0, 200)
    y = x * np.sin(5.0 * np.pi * x) + 0.1 * np.random.default_rng(0).normal(size=200)
    return jnp.array(x[:, None]), jnp.array(y), 0.25, 0.01


def toy_roulette(expected):
    """Textbook iterations without a preconditioner; they have converged after 16 iterations."""
    decay, minimum = stopping.decay_and_minimum(expected, 16, share=0.17)
    return sgp.solvers.RussianRouletteCG(decay, minimum, 16, group_size=1)


def toy_truncated(iterations):
    """Truncated textbook conjugate gradients."""
    identity = sgp.preconditioners.Identity()
    return sgp.solvers.ConjugateGradients(0.0, iterations, identity, group_size=1)


def toy_estimator(method, num_probes, num_logdet_probes):
    """The estimator of a name such as "CG 6", "RR-CG 6", "RFF 80" or "SS-RFF 20"."""
    family, number = method.rsplit(" ", 1)
    number = int(number)
    if family == "RFF":
        return sgp.estimators.RandomFourier(number)
    if family == "SS-RFF":
        return sgp.estimators.SingleSampleRFF(number, 20)
    solver = {"CG": toy_truncated, "RR-CG": toy_roulette}[family](number)
    return sgp.estimators.Hutchinson(solver, num_probes, num_logdet_probes=num_logdet_probes)


@jax.enable_x64(True)
def record_bias(data, split, seed, method, *, draws):
    """Biases of log|H| and y'H^-1 y by the audit, on simulated data, with standard errors.

    "SS-RFF m" has at least m features; `features` is the mean number.
    """
    X, y, variance, noise = toy_data()
    estimator = toy_estimator(method, 1, 1)
    kernel, key = sgp.kernels.RBF(0.1, variance), jax.random.key(seed)
    result = sgp.estimators.audit(
        {method: estimator}, kernel, X, y, noise, key=key, num_draws=draws
    )
    rows = [row for row in result.rows if row.quantity in TERMS]
    biases = {row.quantity: [row.bias, row.standard_error] for row in rows}
    biases |= {f"{row.quantity}_exact": row.exact for row in rows}
    if method.startswith("SS-RFF"):
        sizes = np.append(estimator.sizes(len(y))[1:], len(y))
        biases["features"] = float(sizes @ np.asarray(estimator.distribution(len(y)).probabilities))
    return {**biases, "audit": [row._asdict() for row in rows]}


@jax.enable_x64(True)
def record_lengthscale(data, split, seed, method, *, draws):
    """The lengthscale that a method learns on simulated data, and its ratio to the exact one.

    Russian roulette takes `draws` steps, other methods take 1,000.
    """
    X, y, variance, noise = toy_data()

    def learn(estimator, steps):
        def loss(raw, key):
            kernel = sgp.kernels.RBF(jnp.exp(raw), variance)
            gp = sgp.GaussianProcess(kernel, X, noise, estimator=estimator, key=key)
            return -gp.log_prob(y) / len(y)

        # Step sizes proportional to 1 / t converge to a zero of the mean gradient. Adam does not,
        # since it divides by the size of the noise, which is not symmetric.
        def step(raw, scan):
            t, key = scan
            raw = raw - 4.0 / (t + steps // 40) * jax.grad(loss)(raw, key)
            return raw, raw

        keys = jax.random.split(jax.random.key(seed), steps)
        path = jax.jit(lambda raw: jax.lax.scan(step, raw, (jnp.arange(steps), keys))[1])
        return float(jnp.exp(path(jnp.log(0.15))[steps // 2 :].mean()))

    steps = draws if method.startswith("RR-CG") else 1000
    learned = learn(toy_estimator(method, 4, 0), steps)
    return {"lengthscale": learned, "ratio": learned / learn(sgp.estimators.Cholesky(), 1000)}


def draw(path):
    """Draw the figure of a stored run: biases, learned lengthscales, or training on pol."""
    run = json.loads(path.read_text())
    if run["name"] == "truncation-bias":
        rows, costs = [], {}
        for record in run["records"]:
            family, number = record["method"].rsplit(" ", 1)
            name = f"{family} {record.get('features', float(number)):.0f}"
            rows += [AuditRow(**{**row, "estimator": name}) for row in record["audit"]]
            costs[name] = None
        Audit(rows, costs, len(toy_data()[1]), 0).plot_terms().savefig(
            FIGURES / "truncation_bias.svg", metadata={"Date": None}
        )
    if run["name"] == "truncation-lengthscale":
        figure = Figure(figsize=(9.0, 3.5), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        lines = {}
        for record in run["records"]:
            family, number = record["method"].rsplit(" ", 1)
            lines.setdefault(family, []).append((int(number), record["ratio"]))
        for family, points in lines.items():
            panels[int(family == "RFF")].plot(*zip(*points, strict=True), ".-", label=family)
        for panel, label in zip(panels, ("iterations, in the mean", "features"), strict=True):
            panel.axhline(1.0, color="k", linewidth=0.8, label="exact")
            panel.set_xlabel(label)
            panel.legend()
        panels[0].set_ylabel("lengthscale learned / exact")
        figure.savefig(FIGURES / "truncation_toy.svg", metadata={"Date": None})
    if run["name"] == "truncation-cut":  # with the stored results of the roulette
        roulette = json.loads(path.with_stem("truncation-training").read_text())["records"]
        figure = Figure(figsize=(9.0, 3.5), layout="constrained")
        panels = dict(zip((20, 30, 40), figure.subplots(1, 3, sharey=True), strict=True))
        styles = {EXACT: "k", "cut": "C1:", "roulette": "C0"}
        for number, panel in panels.items():
            for record in run["records"] + roulette:
                kind = record["method"].split(", ")[0]
                if record["method"] in (EXACT, f"{kind}, {number} iterations"):
                    steps, label = range(50, 101, 10), None if record["seed"] else kind
                    panel.plot(steps, record["curve"][5:], styles[kind], label=label)
            panel.set(title=f"{number} iterations", xlabel="step")
        panels[20].set_ylabel("exact log marginal likelihood")
        figure.legend(*panels[20].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(FIGURES / "truncation_pol.svg", metadata={"Date": None})
