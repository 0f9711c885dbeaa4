"""Russian-roulette conjugate gradients beside exact gradients and beside a plain cut.

    python benchmarks/evidence.py truncation-bias truncation-lengthscale truncation-errors
    python benchmarks/truncation.py pol --out pol.npz         # training on a subset of pol
    python benchmarks/truncation.py plot pol.npz --out figure.svg  # what pol wrote
    python benchmarks/truncation.py step --data pol           # a gradient step beside plain CG

The declared runs: biases of log|H| and y'H^-1 y by the audit, and the lengthscale that each
estimator learns, both for y = x sin(5 pi x) + noise, as in the paper; and test errors after 100
steps of each in float32, from a posterior by Cholesky, as in tables S1 and S2 of Potapczynski et
al. (2021). `pol` trains an RBF kernel with ARD by Adam from hyperparameters of 1.0, in float64, and
scores each method by the exact log marginal likelihood at the hyperparameters that it has reached.
Plain CG makes as many iterations a step as Russian roulette did in the mean. `pol`, `step` and the
errors need SCALEGP_DATA.
"""

import argparse
import json
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from iterative import load
from matplotlib.figure import Figure
from sparse import score_of

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators.audit import TERMS, Audit, AuditRow

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"


def preconditioner(arguments):
    """The preconditioner that the arguments ask for."""
    if arguments.rank:
        return sgp.preconditioners.PivotedCholesky(arguments.rank)
    return sgp.preconditioners.Identity()


def roulette(arguments, expected, n):
    """Russian-roulette CG with E[J] = `expected`, as `with_mean` makes it but for the share."""
    decay, minimum = sgp.solvers.stopping.decay_and_minimum(expected, n, share=arguments.share)
    solver = sgp.solvers.RussianRouletteCG(
        decay, minimum, n, preconditioner(arguments), arguments.group_size
    )
    return sgp.estimators.Hutchinson(solver, arguments.num_probes, num_logdet_probes=0)


def truncated(arguments, iterations):
    """Plain CG that stops after a given number of iterations, converged or not."""
    solver = sgp.solvers.ConjugateGradients(
        0.0, iterations, preconditioner(arguments), arguments.group_size
    )
    return sgp.estimators.Hutchinson(solver, arguments.num_probes, num_logdet_probes=0)


def objective(estimator, X, y):
    """The loss per row of unconstrained hyperparameters and a key, and a solve's iterations."""

    def loss(raw, key):
        values = jax.tree.map(jax.nn.softplus, raw)
        kernel = sgp.kernels.RBF(values["lengthscale"], values["variance"])
        # What `log_prob` of a GaussianProcess calls, with the solution beside it.
        operator = sgp.solvers.KernelOperator(kernel, X, values["noise"])
        value, solution = estimator.evaluate(operator, y, key=key)
        return -value / len(y), 0.0 if solution is None else solution.epochs

    return loss


def start_values(d):
    """Unconstrained hyperparameters of 1.0."""
    one = jnp.log(jnp.expm1(jnp.ones(())))
    return {"lengthscale": jnp.full(d, one), "variance": one, "noise": one}


def train(X, y, estimator, arguments, steps):
    """A compiled function from a key to the hyperparameters, iterations and gradients of a run."""
    loss = jax.value_and_grad(objective(estimator, X, y), has_aux=True)
    rate = (
        optax.cosine_decay_schedule(arguments.rate, steps) if arguments.cosine else arguments.rate
    )
    optimizer = optax.adam(rate)

    def step(carry, key):
        raw, state = carry
        (_, epochs), gradient = loss(raw, key)
        updates, state = optimizer.update(gradient, state)
        raw = optax.apply_updates(raw, updates)
        return (raw, state), (raw, epochs, optax.global_norm(gradient))

    @jax.jit
    def run(key):
        raw = start_values(X.shape[1])
        keys = jax.random.split(key, steps)
        path, epochs, norms = jax.lax.scan(step, (raw, optimizer.init(raw)), keys)[1]
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), raw, path), epochs, norms

    return run


def pol(arguments):
    """Train by all methods and print a table."""
    X, y, *_ = load(arguments)
    exact = objective(sgp.estimators.Cholesky(), X, y)
    every = slice(None, None, arguments.every)

    @jax.jit
    def score(path):
        return len(y) * jax.lax.map(lambda raw: -exact(raw, None)[0], path)

    def evaluate(name, estimator, seeds, steps=arguments.steps):
        run, curves, made = train(X, y, estimator, arguments, steps), [], []
        for seed in range(seeds):
            start = time.perf_counter()
            path, epochs, norms = jax.block_until_ready(run(jax.random.key(seed)))
            elapsed = time.perf_counter() - start
            curves.append(np.asarray(score(jax.tree.map(lambda a: a[every], path))))
            made.append(float(epochs.mean()))
            end = jax.tree.map(lambda a: np.asarray(jax.nn.softplus(a[-1])), path)
            print(
                f"{name}, seed {seed}: {curves[-1][-1]:9.2f}, {made[-1]:6.1f} iterations "
                f"(most {int(epochs.max())}), noise {end['noise']:.5f}, variance "
                f"{end['variance']:.3f}, gradient norms: median {jnp.median(norms):.3f}, most "
                f"{norms.max():.3f}; {elapsed:.0f} s",
                flush=True,
            )
        results[name] = np.array(curves)
        if arguments.out:
            np.savez(arguments.out, every=arguments.every, **results)
        return np.mean(made)

    results = {}
    evaluate("Cholesky", sgp.estimators.Cholesky(), 1)
    if arguments.long:
        evaluate("Cholesky, long", sgp.estimators.Cholesky(), 1, arguments.long)
    for expected in arguments.expected:
        name = f"roulette, {expected}"
        made = evaluate(name, roulette(arguments, expected, len(y)), arguments.seeds)
        for budget in sorted({expected, round(made)}):
            evaluate(f"{budget}, cut, {expected}", truncated(arguments, budget), 1)
    best = results["Cholesky"][0, -1]
    for name, curves in results.items():
        gaps = ", ".join(f"{100 * (best - value) / abs(best):.2f} %" for value in curves[:, -1])
        print(f"{name:20s} below exact training: {gaps}")


def record_errors(data, split, seed, method, *, expected=20, n=2000):
    """Test errors after training by a method: a unit of benchmarks/evidence.py, in float32."""
    given = argparse.Namespace(data=data, split=split, n=n)
    arguments = make_parser().parse_args(["pol"], given)
    X, y, X_test, y_test = load(arguments)
    estimator = {
        "exact gradients": lambda: sgp.estimators.Cholesky(),
        "Russian roulette": lambda: roulette(arguments, expected, len(y)),
        "conjugate gradients, cut": lambda: truncated(arguments, expected),
    }[method]()
    key = jax.random.key(seed)
    run = train(X, y, estimator, arguments, arguments.steps).lower(key).compile()
    start = time.perf_counter()
    path, epochs, _ = jax.block_until_ready(run(key))
    seconds = time.perf_counter() - start
    values = jax.tree.map(lambda a: jax.nn.softplus(a[-1]), path)
    kernel = sgp.kernels.RBF(values["lengthscale"], values["variance"])
    predictive = sgp.GaussianProcess(kernel, X, values["noise"]).condition(y).predictive(X_test)
    return {
        **score_of(predictive, y_test),
        "noise_variance": float(values["noise"]),
        "iterations": float(jnp.mean(epochs)),
        "seconds": seconds,
    }


def step(arguments):
    """One value and gradient by both, in turn, plain CG with the roulette's mean of iterations."""
    X, y, *_ = load(arguments)
    values = {
        "lengthscale": jnp.full(X.shape[1], arguments.lengthscale),
        "variance": jnp.ones(()),
        "noise": jnp.array(arguments.noise),
    }
    raw = jax.tree.map(lambda value: jnp.log(jnp.expm1(value)), values)
    keys = [jax.random.key(i) for i in range(arguments.repeats)]

    def compiled(estimator):
        loss = jax.value_and_grad(objective(estimator, X, y), has_aux=True)
        return jax.jit(loss).lower(raw, keys[0]).compile()

    for expected in arguments.expected:
        functions = {"roulette": compiled(roulette(arguments, expected, len(y)))}
        made = np.array([float(functions["roulette"](raw, key)[0][1]) for key in keys])
        functions["plain"] = compiled(truncated(arguments, round(made.mean())))
        times = {name: [] for name in functions}
        for key in keys:
            for name, function in functions.items():
                start = time.perf_counter()
                jax.block_until_ready(function(raw, key))
                times[name].append(time.perf_counter() - start)
        steps = {name: np.array(seconds) for name, seconds in times.items()}
        each = {"roulette": steps["roulette"] / made, "plain": steps["plain"] / round(made.mean())}
        print(
            f"{arguments.data}, n = {len(y)}, {X.dtype}, E[J] = {expected}: {made.mean():.1f} "
            f"iterations in the mean, plain CG {round(made.mean())}"
        )
        for what, table in (("step", steps), ("iteration", each)):
            for center in (np.mean, np.median, np.min):
                one, other = center(table["roulette"]), center(table["plain"])
                print(
                    f"  seconds a {what}, {center.__name__}: {one:.4f} and {other:.4f}, ratio "
                    f"{one / other:.3f}",
                    flush=True,
                )


def toy_data():
    """y = x sin(5 pi x) + noise at 200 points, and the variances of function and noise."""
    x = np.linspace(0.0, 1.0, 200)
    y = x * np.sin(5.0 * np.pi * x) + 0.1 * np.random.default_rng(0).normal(size=200)
    return jnp.array(x[:, None]), jnp.array(y), 0.25, 0.01


def toy_roulette(expected):
    """Textbook iterations, without a preconditioner; after 16 of them nothing is left here."""
    decay, minimum = sgp.solvers.stopping.decay_and_minimum(expected, 16, share=0.17)
    return sgp.solvers.RussianRouletteCG(decay, minimum, 16, group_size=1)


def toy_truncated(iterations):
    """Textbook conjugate gradients cut short."""
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
    """Biases of log|H| and y'H^-1 y by the audit, on the made-up data, with standard errors.

    "SS-RFF m" has m features at least; `features` says how many in the mean.
    """
    X, y, variance, noise = toy_data()
    estimator = toy_estimator(method, 1, 1)
    kernel, key = sgp.kernels.RBF(0.1, variance), jax.random.key(seed)
    result = sgp.estimators.audit(
        {method: estimator}, kernel, X, y, noise, key=key, num_draws=draws
    )
    rows = [row for row in result.rows if row.quantity in TERMS]
    found = {row.quantity: [row.bias, row.standard_error] for row in rows}
    found |= {f"{row.quantity}_exact": row.exact for row in rows}
    if method.startswith("SS-RFF"):
        sizes = np.append(estimator.sizes(len(y))[1:], len(y))
        found["features"] = float(sizes @ np.asarray(estimator.distribution(len(y)).probabilities))
    return {**found, "audit": [row._asdict() for row in rows]}


@jax.enable_x64(True)
def record_lengthscale(data, split, seed, method, *, draws):
    """The lengthscale that a method learns on the made-up data, over that of exact gradients.

    Russian roulette takes `draws` steps, the others 1,000.
    """
    X, y, variance, noise = toy_data()

    def learn(estimator, steps):
        def loss(raw, key):
            kernel = sgp.kernels.RBF(jnp.exp(raw), variance)
            gp = sgp.GaussianProcess(kernel, X, noise, estimator=estimator, key=key)
            return -gp.log_prob(y) / len(y)

        # Steps that fall as 1 / t end where the mean of the gradient is zero; Adam would not, since
        # it divides by the size of noise that is not symmetric.
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
    """The figure of a stored run: biases, or the lengthscales learned."""
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


def plot(arguments):
    """Draw what `pol` wrote: the exact log marginal likelihood over the steps."""
    with np.load(arguments.files[0]) as file:
        curves = dict(file)
    every = int(curves.pop("every"))
    best = curves.pop("Cholesky")[0]
    figure = Figure(figsize=(3.2 * len(arguments.expected), 3.4), layout="constrained")
    panels = figure.subplots(1, len(arguments.expected), squeeze=False, sharey=True)[0]
    steps = every * np.arange(len(best))
    for panel, expected in zip(panels, arguments.expected, strict=True):
        panel.plot(steps, best, "k", label="Cholesky")
        cuts = sorted(
            int(name.split(", ")[0]) for name in curves if name.endswith(f"cut, {expected}")
        )
        for style, budget in zip(("C1:", "C1--"), cuts, strict=False):
            label = "CG, E[J] iterations" if budget == expected else "CG, as many as roulette"
            panel.plot(steps, curves[f"{budget}, cut, {expected}"][0], style, label=label)
        for number, curve in enumerate(curves[f"roulette, {expected}"]):
            label = "Russian roulette" if number == 0 else None
            panel.plot(steps, curve, "C0", alpha=0.6, label=label)
        panel.set(title=f"E[J] = {expected}", xlabel="step", ylim=arguments.limits)
        panel.set_xlim(left=arguments.first)
    panels[0].set_ylabel("exact log marginal likelihood")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(arguments.out)


def make_parser():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["pol", "step", "plot"])
    parser.add_argument("files", nargs="*", help="of plot: what pol wrote")
    parser.add_argument("--data", default="pol")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--n", type=int, default=2000, help="training rows; 0 for all")
    parser.add_argument("--expected", type=int, nargs="*", default=[10, 20, 30, 40, 60])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--long", type=int, default=0, help="steps of another exact run")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--cosine", action="store_true", help="the rate falls to zero by a cosine")
    parser.add_argument("--rank", type=int, default=100, help="of the preconditioner; 0 for none")
    parser.add_argument("--group-size", type=int, default=128, help="1 for textbook CG")
    parser.add_argument("--num-probes", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.8, help="the least J over its mean")
    parser.add_argument("--lengthscale", type=float, default=1.0, help="of step")
    parser.add_argument("--noise", type=float, default=0.01, help="variance, of step")
    parser.add_argument("--repeats", type=int, default=10, help="of step")
    parser.add_argument("--limits", type=float, nargs=2, help="of plot: the vertical axis")
    parser.add_argument("--first", type=int, default=0, help="of plot: the first step")
    parser.add_argument("--every", type=int, default=10, help="steps between exact evaluations")
    parser.add_argument("--out", help="file for the curves, or for the plot")
    return parser


def main():
    """Run a benchmark."""
    arguments = make_parser().parse_args()
    jax.config.update("jax_enable_x64", arguments.what == "pol")
    warnings.filterwarnings("ignore", "a linear solve ended above its tolerance")
    globals()[arguments.what](arguments)


if __name__ == "__main__":
    main()
