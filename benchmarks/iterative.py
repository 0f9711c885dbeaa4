"""The iterative marginal likelihood: products, gradients, values, solvers, warm starts, accuracy.

    python benchmarks/evidence.py product gradient value solvers warm-starts pathwise-training

All runs use Matern-3/2 with ARD, as in Lin et al. (2024), trained by Adam with a learning rate of
0.1 from hyperparameters of 1.0. The run `solvers` reads its hyperparameters from
published_hyperparameters.json in the folder of the data sets. Needs SCALEGP_DATA; GPyTorch needs
the `bench` extra.
"""

import functools
import json
import multiprocessing
import os
import resource
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO
from sparse import number_in, score_of

import numpyro_scalegp as sgp
from numpyro_scalegp.features.prior_draws import PriorDraws
from numpyro_scalegp.processes.pathwise import PathwisePosterior


def seconds(function, *arguments, repeats=5, warm=False):
    """Wall times of a function, after one call that compiles it unless `warm`."""
    if not warm:
        jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return times


def in_new_process(function, **arguments):
    """The result of a function that runs in a new process, and the process's peak memory in GiB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_with_memory, (function, arguments))


def _with_memory(function, arguments):
    result = function(**arguments)
    return result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def load(data, split, n=None):
    """Standardized training and test data, with at most `n` random training points."""
    data_set = sgp.datasets.load_uci(data, split)
    X, y = jnp.array(data_set.X_train), jnp.array(data_set.y_train)
    if n is not None and n < len(X):
        rows = np.random.default_rng(0).choice(len(X), n, replace=False)
        X, y = X[rows], y[rows]
    return X, y, jnp.array(data_set.X_test), jnp.array(data_set.y_test)


def make_solver(name, *, tolerance=0.01, max_epochs=100, rank=100, **options):
    """A solver by its short name; `rank` is of the preconditioner of conjugate gradients."""
    common = {"tolerance": tolerance, "max_epochs": max_epochs, **options}
    if name == "ap":
        return sgp.solvers.AlternatingProjections(**common)
    if name == "sgd":
        return sgp.solvers.StochasticGradientDescent(**common)
    preconditioners = sgp.preconditioners
    greedy = preconditioners.PivotedCholesky(rank) if rank else preconditioners.Identity()
    return sgp.solvers.ConjugateGradients(preconditioner=greedy, **common)


def make_model(estimator):
    """A GP with point estimates of all hyperparameters, which start at 1.0."""

    def positive(name, start):
        return numpyro.param(name, start, constraint=constraints.softplus_positive)

    def model(X, y):
        kernel = sgp.kernels.Matern32(
            positive("lengthscale", jnp.ones(X.shape[1])), positive("variance", jnp.ones(()))
        )
        noise = jnp.square(positive("noise", jnp.ones(())))
        gp = sgp.GaussianProcess(kernel, X, noise, estimator=estimator, state="solver")
        numpyro.sample("y", gp, obs=y)

    return model


def train(X, y, estimator, num_steps, *, cold=False, seed=0):
    """Train with NumPyro's SVI; returns the state, and seconds of compilation and of steps.

    With `cold`, the state's solution is set to zero before each step; the probe vectors stay.
    """
    svi = SVI(make_model(estimator), lambda X, y: None, optax.adam(0.1), Trace_ELBO())
    state = svi.init(jax.random.key(seed), X, y)
    start = time.perf_counter()
    update = jax.jit(svi.update).lower(state, X, y).compile()
    compiling = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(num_steps):
        if cold:
            memory = state.mutable_state["solver"].memory
            memory = memory._replace(solutions=jnp.zeros_like(memory.solutions))
            state = state._replace(mutable_state={"solver": sgp.estimators.SolverState(memory)})
        state, _ = update(state, X, y)
    jax.block_until_ready(state)
    return state, compiling, time.perf_counter() - start


def record_product(data, split, seed, method, *, columns=65, d=18):
    """The record of a unit: seconds of K(X, X) V, and of gradients of quadratic and bilinear forms.

    The timed calls alternate, so that noise of the machine disturbs all alike. The ratios are of
    minima: of the product to the product with K in memory, if K fits, and of the gradients of
    sum_c w_c v_c'H v_c and sum_c u_c'H v_c to the product. `memory` is the temporary memory of the
    product, without arguments and result, in MiB. "In passes" takes three passes of TF32;
    `error` is the relative difference of a product with 1,000 rows of K from float64.
    """
    passes = "TF32_TF32_F32_X3" if "in passes" in method else None
    with jax.default_matmul_precision(passes):
        return product_times(number_in(method), seed, columns, d)


def product_times(n, seed, columns, d):
    """See `record_product`."""
    keys = jax.random.split(jax.random.key(seed), 3)
    X, V = jax.random.normal(keys[0], (n, d)), jax.random.normal(keys[1], (n, columns))
    weights = jnp.linspace(-1.0, 1.0, columns)
    H = sgp.solvers.KernelOperator(sgp.kernels.Matern32(jnp.full(d, 2.0)), X, 0.1)
    multiply = jax.jit(lambda H, V: H.matmul(V)).lower(H, V).compile()
    square = jax.random.normal(keys[2], (4096, 4096))
    exactly = jax.jit(functools.partial(jnp.matmul, precision="highest"))  # no TF32
    tasks = {
        "product": (multiply, H, V),
        "quadratic": (jax.jit(lambda H, w, V: H.quadratic_gradient(w, V)), H, weights, V),
        "bilinear": (jax.jit(lambda H, U, V: H.bilinear_gradient(U, V)), H, V[::-1], V),
        "square": (exactly, square, square),
    }
    if n <= 20_000:
        tasks["bare"] = (exactly, jax.jit(lambda H: H.kernel(H.X, H.X))(H), V)
    times = interleaved_seconds(tasks, repeats=30 if n <= 20_000 else 3)
    least = {name: min(values) for name, values in times.items()}
    ours = least["product"]
    return {
        "seconds": ours,
        "nanoseconds_a_pair": 1e9 * ours / n**2,
        **({"bare_ratio": ours / least["bare"]} if "bare" in least else {}),
        "quadratic_ratio": least["quadratic"] / ours,
        "bilinear_ratio": least["bilinear"] / ours,
        "memory": multiply.memory_analysis().temp_size_in_bytes / 2**20,
        "error": product_error(H, V),
        "square_gflops": 2e-9 * 4096**3 / least["square"],
    }


def product_error(H, V):
    """The relative error of the first 1,000 rows of a product, less the diagonal's rounding."""
    rows = jnp.arange(min(1000, H.size))
    product = H.matmul(V)[rows]
    with jax.enable_x64(True):
        as_float64 = functools.partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, float))
        exact = sgp.solvers.KernelOperator(as_float64(H.kernel), as_float64(H.X), 0.1)
        expected = exact.rows_matmul(rows, as_float64(V))
        return float(jnp.linalg.norm(product - expected) / jnp.linalg.norm(expected))


def interleaved_seconds(tasks, repeats):
    """Wall times of functions that are called alternately, after one call each to compile them."""
    for function, *arguments in tasks.values():
        jax.block_until_ready(function(*arguments))
    rounds = [
        {name: seconds(*task, repeats=1, warm=True)[0] for name, task in tasks.items()}
        for _ in range(repeats)
    ]
    return {name: [times[name] for times in rounds] for name in tasks}


def record_epochs(
    data,
    split,
    seed,
    method,
    *,
    solver="ap",
    steps=30,
    n=1000,
    max_epochs=10_000,
    dtype="float64",
    **options,
):
    """Solver epochs to tolerance, summed over steps, for an estimator and an initial guess.

    A method is the estimator, "standard" or "pathwise", and the initial guess: "cold" (zero),
    "warm" (the best multiple of the last solution) or "extrapolated" (the best combination of the
    last two). `curve` has the sums after each step, `noise` the last noise standard deviation.
    """
    with jax.enable_x64(dtype == "float64"):
        return epochs_of_training(
            data, split, seed, method, solver, steps, n, {"max_epochs": max_epochs, **options}
        )


def epochs_of_training(data, split, seed, method, solver, steps, n, options):
    """See `record_epochs`."""
    X, y, *_ = load(data, split, n)
    kind, start = method.split(", ")
    family = sgp.estimators.Pathwise if kind == "pathwise" else sgp.estimators.Hutchinson
    number = 2 if start == "extrapolated" else 1
    estimator = family(make_solver(solver, **options), num_logdet_probes=0, num_solutions=number)
    cold = start == "cold"
    state, _, elapsed = train(X, y, estimator, steps, cold=cold, seed=seed)
    history = state.mutable_state["solver"].history()
    # A cold start needs no product for the residual of its initial guess.
    curve = np.cumsum(np.asarray(history["epochs"]) - cold)
    return {
        "epochs": float(curve[-1]),
        "above": int(np.sum(~np.asarray(history["converged"]))),
        "seconds": elapsed,
        "noise": float(jnp.sqrt(state.mutable_state["solver"].memory.noise_variance)),
        "curve": curve.tolist(),
    }


@functools.cache
def exact_value(data, split, lengthscale, noise):
    """log p(y) per observation by Cholesky in float64."""
    with jax.enable_x64(True):
        X, y, *_ = load(data, split)
        gp = sgp.GaussianProcess(sgp.kernels.Matern32(lengthscale), X, noise)
        return float(jax.jit(lambda gp, y: gp.log_prob(y))(gp, y)) / len(y)


def record_value(data, split, seed, method, *, lengthscale=2.0, noise=0.01):
    """log p(y) per observation by stochastic Lanczos quadrature, and its error."""
    X, y, *_ = load(data, split)
    estimator = sgp.estimators.Pathwise(make_solver("cg"), num_logdet_probes=number_in(method))
    operator = sgp.solvers.KernelOperator(sgp.kernels.Matern32(lengthscale), X, noise)
    run = jax.jit(lambda H, y, key: estimator.estimate(H, y[:, None], key=key))
    estimate = run(operator, y, jax.random.key(seed))
    value, exact = float(estimate.value[0]) / len(y), exact_value(data, split, lengthscale, noise)
    return {
        "value": value,
        "exact": exact,
        "off_cholesky": value - exact,
        "standard_error": float(estimate.standard_error) / len(y),
        "iterations": float(estimate.solution.epochs),
        "residual": float(estimate.solution.residual.max()),
    }


def record_gradient(data, split, seed, method, *, lengthscale, noise, repeats=3):
    """Median seconds of a value and gradient with a cold start, in a new process.

    Compilation is excluded. All methods have a pivoted Cholesky preconditioner of rank 100 and a
    tolerance of 0.01.
    """
    run = gpytorch_gradient if method == "gpytorch" else our_gradient
    options = {"data": data, "split": split, "seed": seed, "lengthscale": lengthscale}
    if method != "gpytorch":
        options["group_size"] = 1 if "textbook" in method else 128
        options["probes"] = number_in(method) if "probes" in method else 64
    result, memory = in_new_process(run, noise=noise, repeats=repeats, **options)
    return {**result, "most_memory": memory}


def our_gradient(data, split, seed, lengthscale, noise, repeats, group_size, probes):
    """The gradient by `Pathwise(ConjugateGradients())`, including the value.

    `spread` is the standard deviation of its derivative in the noise variance over keys, relative
    to the mean.
    """
    X, y, *_ = load(data, split)
    solver = make_solver("cg", max_epochs=1000, group_size=group_size)
    estimator = sgp.estimators.Pathwise(solver, probes, num_logdet_probes=8)

    def value(parameters, X, y, key):
        kernel = sgp.kernels.Matern32(parameters["lengthscale"], parameters["variance"])
        operator = sgp.solvers.KernelOperator(kernel, X, parameters["noise"])
        return estimator.evaluate(operator, y, key=key)

    parameters = {
        "lengthscale": jnp.full(X.shape[1], lengthscale),
        "variance": jnp.ones(()),
        "noise": jnp.array(noise),
    }
    arguments = parameters, X, y, jax.random.key(seed)
    start = time.perf_counter()
    gradient = jax.jit(jax.value_and_grad(value, has_aux=True)).lower(*arguments).compile()
    compiling = time.perf_counter() - start
    times = seconds(gradient, *arguments, repeats=repeats)
    (_, solution), _ = gradient(*arguments)
    keys = jax.random.split(jax.random.key(1 + seed), 8)
    derivatives = [gradient(*arguments[:3], key)[1]["noise"] for key in keys]
    return {
        "seconds": float(np.median(times)),
        "spread": float(np.std(derivatives, ddof=1) / abs(np.mean(derivatives))),
        "iterations": float(solution.epochs),
        "compile_seconds": compiling,
    }


def gpytorch_exact(X, y):
    """GPyTorch's exact GP with a Matern-3/2 ARD kernel in training mode, and its objective."""
    import gpytorch
    import torch

    X, y = torch.tensor(X), torch.tensor(y)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(X, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            base = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=X.shape[1])
            self.covar_module = gpytorch.kernels.ScaleKernel(base)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    model = Model()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    model.train()
    return model, lambda: objective(model(X), y)


def gpytorch_gradient(data, split, seed, lengthscale, noise, repeats):
    """The gradient by GPyTorch's conjugate gradients."""
    import gpytorch
    import torch

    torch.manual_seed(seed)
    X, y, *_ = load(data, split)
    model, objective = gpytorch_exact(np.asarray(X, np.float32), np.asarray(y, np.float32))
    model.likelihood.noise = noise
    model.covar_module.base_kernel.lengthscale = lengthscale
    model.covar_module.outputscale = 1.0
    times = []
    with (
        gpytorch.settings.max_cholesky_size(0),
        gpytorch.settings.num_trace_samples(64),
        gpytorch.settings.cg_tolerance(0.01),
        gpytorch.settings.max_preconditioner_size(100),
        gpytorch.settings.max_cg_iterations(1000),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for _ in range(1 + repeats):
            start = time.perf_counter()
            model.zero_grad()
            (-objective()).backward()
            times.append(time.perf_counter() - start)
    return {"seconds": float(np.median(times[1:]))}


def record_training(data, split, seed, method, *, steps=100, n=None):
    """Test error after training with a budget of epochs, predicting from the last solutions.

    Alternating projections, pathwise gradients and warm starts, as in Lin et al. (2024). A method
    is the budget of a step, such as "20 epochs", or "pathwise, warm" with 12.
    """
    X, y, X_test, y_test = load(data, split, n)
    max_epochs = number_in(method) if "epochs" in method else 12
    solver = make_solver("ap", max_epochs=max_epochs)
    estimator = sgp.estimators.Pathwise(solver, num_logdet_probes=0)
    state, compiling, elapsed = train(X, y, estimator, steps, seed=seed)
    # Predictions need no solve at the hyperparameters for which the state's solution was computed.
    memory = state.mutable_state["solver"].memory
    with numpyro.handlers.substitute(data=state.mutable_state):
        gp = sgp.GaussianProcess(
            memory.kernel, X, memory.noise_variance, estimator=estimator, state="solver"
        )
    return {
        **score_of(gp.condition(y).predictive(X_test), y_test),
        "noise": float(jnp.sqrt(memory.noise_variance)),
        "seconds": compiling + elapsed,
    }


def compared_solvers(options):
    """The solvers that the run `solvers` compares, by name."""
    greedy, random = (
        sgp.preconditioners.PivotedCholesky,
        sgp.preconditioners.RandomlyPivotedCholesky,
    )
    cg = functools.partial(sgp.solvers.ConjugateGradients, **options)
    return {
        "CG, greedy 100": cg(preconditioner=greedy(100)),
        "CG, random 500": cg(preconditioner=random(500)),
        "CG, random, default rank": cg(preconditioner=random()),
        "CG, Nystrom 500": cg(preconditioner=sgp.preconditioners.Nystrom(500)),
        "AP 1000": sgp.solvers.AlternatingProjections(1000, **options),
        "SGD": sgp.solvers.StochasticGradientDescent(**options),
        "SDD": sgp.solvers.StochasticDualDescent(**options),
        "ADASAP, rank 100": sgp.solvers.ADASAP(rank=100, **options),
        "ADASAP": sgp.solvers.ADASAP(**options),
        "AutoSolver (default)": sgp.solvers.AutoSolver(**options),
    }


def record_solve(data, split, seed, method, *, tolerance=0.01, max_epochs=50):
    """A solver on the right-hand sides of a pathwise posterior, at published hyperparameters."""
    file = Path(os.environ["SCALEGP_DATA"]) / "published_hyperparameters.json"
    values = json.loads(file.read_text())["sets"][data][str(split)]
    X, y, X_test, y_test = load(data, split)
    kernel = sgp.kernels.Matern32(jnp.array(values["lengthscale"]), values["amplitude"] ** 2)
    H = sgp.solvers.KernelOperator(kernel, X, values["noise"] ** 2)
    draws = PriorDraws.from_key(jax.random.key(split), 64, 2000, X)
    B = jnp.concatenate([y[:, None], draws.observations(kernel, X, H.noise())], axis=1)
    solver = compared_solvers({"tolerance": tolerance, "max_epochs": max_epochs})[method]

    def run(H, B):
        return solver.solve(H, B, key=jax.random.key(seed), num_averaged=64)

    compiled = jax.jit(run).lower(H, B).compile()
    start = time.perf_counter()
    solution = jax.block_until_ready(compiled(H, B))
    seconds = time.perf_counter() - start
    zero_mean = sgp.GaussianProcess(kernel, X, 1.0).mean_function
    posterior = PathwisePosterior(
        kernel, X, y, H.noise_variance, zero_mean, solver, solution, draws
    )
    return {
        "epochs": float(solution.epochs),
        "seconds": seconds,
        "residual": float(solution.residual[0]),
        "probe_residual": float(jnp.mean(solution.residual[1:])),
        **score_of(posterior.predictive(X_test), y_test),
    }


FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "warm_starts.svg"


def draw(path):
    """Draw the figure of `warm-starts`: cumulative epochs at each step, for the first split."""
    from matplotlib.figure import Figure

    run = json.loads(path.read_text())
    if run["name"] != "warm-starts":
        return
    colors = {"standard": "C0", "pathwise": "C1"}
    styles = {"cold": ":", "warm": "--", "extrapolated": "-"}
    records = [record for record in run["records"] if record["split"] == 0]
    sets = list(dict.fromkeys(record["data"] for record in records))
    figure = Figure(figsize=(4.4 * len(sets), 4.4), layout="constrained")
    panels = dict(zip(sets, figure.subplots(1, len(sets), squeeze=False)[0], strict=True))
    for record in records:
        kind, start = record["method"].split(", ")
        steps = np.arange(1, len(record["curve"]) + 1)
        panels[record["data"]].semilogy(
            steps, record["curve"], styles[start], color=colors[kind], label=record["method"]
        )
    for name, panel in panels.items():
        panel.set(title=name, xlabel="step")
    panel = panels[sets[0]]
    panel.set_ylabel("epochs so far")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(FIGURE, metadata={"Date": None})
