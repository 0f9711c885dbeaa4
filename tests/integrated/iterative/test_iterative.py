"""Stochastic log marginal likelihoods: means over many keys against the exact ones."""

import dataclasses
import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from jaxtyping import Array
from numpyro import handlers
from numpyro.contrib.module import nnx_module
from numpyro.infer import AIES, HMC, MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import Hutchinson, Pathwise
from numpyro_scalegp.integrated.iterative.iterative import warn_unless_converged
from numpyro_scalegp.linear.preconditioners import Identity, PivotedCholesky
from numpyro_scalegp.solvers import (
    AlternatingProjections,
    ConjugateGradients,
    KernelOperator,
    StochasticGradientDescent,
    StopReason,
)

N, D, NUM_KEYS = 60, 2, 200
KEY = jax.random.key(0)

ESTIMATORS: dict[str, Any] = {"hutchinson": Hutchinson, "pathwise": Pathwise}
# Pairs of a solver with a small tolerance, and a noise at which it converges fast.
SOLVERS = {
    "cg": (ConjugateGradients(1e-9, 60, PivotedCholesky(10)), 0.05),
    "ap": (AlternatingProjections(20, 1e-8, 1000), 0.5),
    "sgd": (StochasticGradientDescent(20, tolerance=1e-8, max_epochs=1000), 0.5),
}
CG: Any = SOLVERS["cg"][0]

every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
every_solver = pytest.mark.parametrize("solver", SOLVERS)


def data(n: int = N) -> tuple[Array, Array]:
    """Inputs whose last five rows repeat the first five, and observations."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n - 5, D))
    X = np.concatenate([X, X[:5]])
    return jnp.array(X), jnp.array(np.sin(2 * X.sum(axis=1)) + 0.3 * rng.normal(size=n))


def make(estimator: str, solver: Any = CG, num_probes: int = 6, **options: Any) -> Any:
    return ESTIMATORS[estimator](solver, num_probes, num_features=32, **options)


def ard() -> sgp.kernels.AbstractKernel:
    return sgp.kernels.Matern32(jnp.array([0.7, 1.3]), 1.4)


def parameters(noise: Any = 0.05, kernel: Any = None) -> dict[str, Any]:
    X, y = data()
    kernel = ard() if kernel is None else kernel
    return {
        "kernel": kernel, "noise": jnp.asarray(noise), "X": X, "y": y, "level": jnp.array(0.4),
    }  # fmt: skip


def log_prob(p: dict[str, Any], estimator: Any, key: Array | None = None) -> Array:
    gp = sgp.GaussianProcess(
        p["kernel"], p["X"], p["noise"], mean=p["level"], estimator=estimator, key=key
    )
    return gp.log_prob(p["y"])


def over_keys(p: dict[str, Any], estimator: str, solver: Any = CG) -> Any:
    """Gradients under many keys, with a leading axis of keys."""
    # The gradient is the same without the log-determinant: tested below.
    family = make(estimator, solver, num_logdet_probes=0)
    keys = jax.random.split(KEY, NUM_KEYS)
    gradient = jax.grad(log_prob)
    return jax.jit(lambda p: jax.lax.map(lambda key: gradient(p, family, key), keys))(p)


@jax.jit
def exact(p: dict[str, Any]) -> Any:
    return jax.grad(log_prob)(p, sgp.estimators.Cholesky())


def scores(draws: Any, expected: Any) -> dict[str, np.ndarray]:
    """Distances of means from what they should be, in standard errors, leaf by leaf."""

    def score(draws: Array, expected: Array) -> np.ndarray:
        spread = np.std(draws, axis=0, ddof=1)
        assert np.all(spread > 0)
        return (np.mean(draws, axis=0) - expected) / (spread / math.sqrt(len(draws)))

    paths = jax.tree_util.tree_leaves_with_path(expected)
    return {
        jax.tree_util.keystr(path): score(leaf_draws, leaf)
        for leaf_draws, (path, leaf) in zip(jax.tree.leaves(draws), paths, strict=True)
    }


def assert_unbiased(draws: Any, expected: Any) -> None:
    for name, score in scores(draws, expected).items():
        assert np.max(np.abs(score)) < 4.5, name
        # All entries together, too: their squares average to about one.
        assert np.mean(np.square(score)) < 1 + 6 * math.sqrt(2 / score.size), name


def stochastic(gradient: dict[str, Any]) -> dict[str, Any]:
    return {name: gradient[name] for name in ("kernel", "noise", "X")}


# The gradient


@pytest.mark.slow
@every_solver
@every_estimator
def test_gradient_is_unbiased(estimator, solver, x64):
    solver, noise = SOLVERS[solver]
    p = parameters(noise)
    draws = over_keys(p, estimator, solver)
    expected = exact(p)
    assert expected["kernel"].lengthscale.shape == (D,)
    assert_unbiased(stochastic(draws), stochastic(expected))
    # The term of the data is deterministic.
    for name in ("y", "level"):
        error = np.abs(draws[name] - expected[name]).max()
        assert error < 1e-6 * np.abs(expected[name]).max(), name


KERNELS = {
    "rbf": sgp.kernels.RBF,
    "matern12": sgp.kernels.Matern12,
    "matern32": sgp.kernels.Matern32,
    "matern52": sgp.kernels.Matern52,
    "rational_quadratic": functools.partial(sgp.kernels.RationalQuadratic, alpha=0.8),
    "periodic": functools.partial(sgp.kernels.Periodic, period=2.5),
    "sum_with_linear": lambda s: sgp.kernels.RBF(s) + sgp.kernels.Linear(0.3, bias=0.2),
    "mapped": lambda s: sgp.kernels.FeatureMapped(
        sgp.kernels.Matern52(1.0), functools.partial(lambda w, X: jnp.tanh(X @ w), jnp.eye(D) / s)
    ),
}


# Solvers do not depend on the kernel or the estimator, so that each pair tests only one solver.
TURNS = [
    (kernel, estimator, list(SOLVERS)[(i + j) % len(SOLVERS)])
    for i, kernel in enumerate(KERNELS)
    for j, estimator in enumerate(ESTIMATORS)
]


@pytest.mark.monte_carlo
@pytest.mark.parametrize(("kernel", "estimator", "solver"), TURNS)
def test_gradient_is_unbiased_for_every_kernel(estimator, solver, kernel, x64):
    solver, noise = SOLVERS[solver]
    p = parameters(noise, KERNELS[kernel](0.9))
    draws = over_keys(p, estimator, solver)
    assert_unbiased(stochastic(draws), stochastic(exact(p)))


@pytest.mark.slow
@every_estimator
def test_gradient_is_unbiased_with_noise_of_each_row(estimator, x64):
    p = parameters(np.linspace(0.05, 0.5, N))
    draws = over_keys(p, estimator)
    expected = exact(p)
    assert expected["noise"].shape == (N,)
    assert_unbiased(stochastic(draws), stochastic(expected))


@pytest.mark.filterwarnings("ignore:a linear solve ended above:RuntimeWarning")
@every_estimator
def test_the_check_detects_the_bias_of_truncated_solves(estimator, x64):
    p = parameters()
    draws = over_keys(p, estimator, ConjugateGradients(1e-9, 2, Identity(), group_size=1))
    hyperparameters = {name: draws[name] for name in ("kernel", "noise")}
    expected = {name: exact(p)[name] for name in hyperparameters}
    all_scores = np.concatenate([np.ravel(s) for s in scores(hyperparameters, expected).values()])
    assert np.max(np.abs(all_scores)) > 10


# The value


@functools.cache
def estimates(solver: str) -> tuple[Any, Array]:
    """Estimates under many keys and the exact value, where the preconditioner is not exact."""
    X, y = data(130)  # more rows than the 100 of the default preconditioner
    kernel, noise = sgp.kernels.Matern12(0.3, 1.4), jnp.array(0.5)
    solver = {
        "cg": ConjugateGradients(1e-5, 50, PivotedCholesky(5)),
        "ap": AlternatingProjections(45, 1e-5, 300),
        "sgd": StochasticGradientDescent(45, tolerance=1e-5, max_epochs=500),
    }[solver]
    estimator = make("hutchinson", solver, 1, num_logdet_probes=8)
    operator = KernelOperator(kernel, X, noise)

    def draw(key: Array) -> Any:
        estimate = estimator.estimate(operator, y[:, None], key=key)
        return estimate.value[0], estimate.standard_error

    draws = jax.jit(lambda keys: jax.lax.map(draw, keys))(jax.random.split(KEY, NUM_KEYS))
    return draws, sgp.GaussianProcess(kernel, X, noise).log_prob(y)


@pytest.mark.monte_carlo
@every_solver
def test_value_is_unbiased_and_its_standard_error_is_right(solver, x64):
    (values, errors), expected = estimates(solver)
    spread = np.std(values, ddof=1)
    assert spread > 1e-3  # otherwise the preconditioner is exact, and there is nothing to estimate
    assert abs(np.mean(values) - expected) < 4 * spread / math.sqrt(len(values))
    ratio = math.sqrt(np.mean(np.square(errors))) / spread
    assert 1 / 1.5 < ratio < 1.5


@every_estimator
def test_value_of_log_prob_is_that_of_the_estimate(estimator, x64):
    p = parameters()
    family = make(estimator)
    operator = KernelOperator(p["kernel"], p["X"], p["noise"])
    residual = p["y"] - p["level"]

    @jax.jit
    def results(p: dict[str, Any]) -> Any:
        return log_prob(p, family, KEY), family.estimate(operator, residual[:, None], key=KEY)

    value, estimate = results(p)
    assert estimate.value.shape == (1,)
    assert estimate.solution.value.shape == (N, 1 + family.num_probes)
    # The same computation, compiled twice: rounding may decide on one more step.
    np.testing.assert_allclose(value, estimate.value[0], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "solver"), [("pathwise", "cg"), *(("hutchinson", solver) for solver in SOLVERS)]
)
def test_without_probes_the_value_omits_the_log_determinant(estimator, solver, x64):
    solver, noise = SOLVERS[solver]
    p = parameters(noise)
    without, full = make(estimator, solver, num_logdet_probes=0), make(estimator, solver)
    operator = KernelOperator(p["kernel"], p["X"], p["noise"])
    residual = p["y"] - p["level"]

    @jax.jit
    def results(p: dict[str, Any]) -> Any:
        evaluate = jax.value_and_grad(log_prob)
        estimate = without.estimate(operator, residual[:, None], key=KEY)
        return evaluate(p, without, KEY), evaluate(p, full, KEY), estimate.standard_error

    (value, gradient), (complete, same), error = results(p)
    H = np.asarray(p["kernel"].covariance(p["X"])) + noise * np.eye(N)
    expected = -0.5 * (residual @ np.linalg.solve(H, residual) + N * math.log(2 * math.pi))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert abs(complete - value) > 0.1
    assert error == np.inf
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, gradient, same)


# Batches, keys and models


@pytest.mark.slow
@every_estimator
def test_batch_of_observations_equals_single_ones(estimator, x64):
    p = parameters()
    cotangents = jnp.array([1.0, 2.0, -0.5])
    batch = {**p, "y": jnp.stack([p["y"], jnp.cos(p["y"]), 3 * p["y"] - 1])}

    def weighted(p: dict[str, Any], cotangents: Array) -> tuple[Array, Array]:
        # A group shares its Krylov space: the number of steps would differ.
        family = make(estimator, dataclasses.replace(CG, group_size=1))
        values = log_prob(p, family, KEY)
        return jnp.sum(cotangents * values), values

    evaluate = jax.jit(jax.grad(weighted, has_aux=True))
    gradient, values = evaluate(batch, cotangents)
    assert values.shape == (3,)
    singles = [evaluate({**p, "y": batch["y"][i]}, cotangents[i]) for i in range(3)]
    np.testing.assert_allclose(values, [single[1] for single in singles], rtol=1e-8)
    for name in ("kernel", "noise", "X", "level"):
        total = jax.tree.map(lambda *g: sum(g), *(single[0][name] for single in singles))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8),
            gradient[name],
            total,
        )
    each = jnp.stack([single[0]["y"] for single in singles])
    np.testing.assert_allclose(gradient["y"], each, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_higher_batch_shapes(x64):
    p = parameters()
    batch = jnp.arange(1.0, 7.0).reshape(2, 3, 1) * p["y"]
    family = make("hutchinson", dataclasses.replace(CG, group_size=1))
    evaluate = jax.jit(lambda y: log_prob({**p, "y": y}, family, KEY))
    values = evaluate(batch)
    assert values.shape == (2, 3)
    np.testing.assert_allclose(values[1, 2], evaluate(batch[1, 2]), rtol=1e-8)


@pytest.mark.slow
@every_estimator
def test_a_key_fixes_the_value(estimator):
    p = parameters(0.1)
    family = make(estimator, ConjugateGradients(1e-3, 100, PivotedCholesky(10)))
    evaluate = jax.jit(lambda key: jax.value_and_grad(log_prob)(p, family, key))
    first, again, different = (evaluate(jax.random.key(seed)) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert first[0] != different[0]
    assert first[1]["noise"] != different[1]["noise"]


@every_estimator
def test_without_a_key(estimator):
    p = parameters(0.1)
    name = type(make(estimator)).__name__
    message = rf"`{name}` draws at random: give the `GaussianProcess`, or its `condition`, a `key=`"
    with pytest.raises(ValueError, match=message):
        log_prob(p, make(estimator))


def test_in_a_model_the_key_is_the_next_of_its_seed(x64):
    p = parameters()
    family = make("hutchinson")

    def model() -> None:
        gp = sgp.GaussianProcess(p["kernel"], p["X"], p["noise"], estimator=family)
        numpyro.sample("y", gp, obs=p["y"])

    @jax.jit
    def value(key: Array) -> Array:
        trace = handlers.trace(handlers.seed(model, key)).get_trace()
        return trace["y"]["fn"].log_prob(p["y"])

    assert value(jax.random.key(1)) == value(jax.random.key(1)) != value(jax.random.key(2))


@pytest.mark.slow
def test_a_raw_key_is_a_key_too(x64):
    evaluate = jax.jit(lambda key: log_prob(parameters(), make("hutchinson"), key))
    assert evaluate(jax.random.key_data(KEY)) == evaluate(KEY)


@pytest.mark.slow
@every_estimator
def test_gradient_of_an_svi_loss(estimator, x64):
    """With a constant key NumPyro's loss is a function of the parameters, so compare exactly."""
    p = parameters()
    prior = dist.LogNormal(0.0, 0.5)
    family = make(estimator)

    def model(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", prior)
        noise = numpyro.sample("noise", prior)
        kernel = sgp.kernels.Matern32(lengthscale, 1.4)
        gp = sgp.GaussianProcess(kernel, X, noise, mean=p["level"], estimator=family, key=KEY)
        numpyro.sample("y", gp, obs=y)

    guide = AutoDelta(model)
    with handlers.seed(rng_seed=0):
        guide(p["X"], p["y"])
    params = {"lengthscale_auto_loc": jnp.array(0.8), "noise_auto_loc": jnp.array(0.2)}

    @jax.jit
    @jax.value_and_grad
    def loss(params: dict[str, Array]) -> Array:
        return Trace_ELBO().loss(jax.random.key(9), params, model, guide, p["X"], p["y"])

    @jax.jit
    @jax.value_and_grad
    def expected(params: dict[str, Array]) -> Array:
        lengthscale, noise = params["lengthscale_auto_loc"], params["noise_auto_loc"]
        kernel = sgp.kernels.Matern32(lengthscale, 1.4)
        likelihood = log_prob({**p, "kernel": kernel, "noise": noise}, family, KEY)
        return -(likelihood + prior.log_prob(lengthscale) + prior.log_prob(noise))

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-8), loss(params), expected(params)
    )


# Warnings and errors


@pytest.mark.slow
@every_estimator
def test_solves_that_end_above_the_tolerance_warn_once(estimator):
    p = parameters(0.1)  # in float32 a tolerance of 1e-3 is within reach
    for max_epochs, expected in ((2, 1), (60, 0)):
        family = make(estimator, ConjugateGradients(1e-3, max_epochs, PivotedCholesky(5)))
        evaluate = jax.jit(lambda key, family=family: log_prob(p, family, key))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for seed in range(3):
                assert np.isfinite(evaluate(jax.random.key(seed)))
            jax.effects_barrier()
        assert len(caught) == expected
        for warning in caught:
            assert warning.category is RuntimeWarning
            text = str(warning.message)
            assert text.startswith("a linear solve ended above its tolerance")
            for remedy in ("`max_epochs`", "`state=`", "preconditioner", "noise var"):
                assert remedy in text


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (StopReason.BUDGET, "the budget ended first. Raise the solver's `max_epochs`"),
        (StopReason.PRECISION, "rounding errors prevent further progress.*work in float64"),
        (StopReason.FAILED, "a linear solve failed: .* not positive definite or not finite"),
    ],
)
def test_warnings_say_why_a_solve_ended(reason, text):
    solution = sgp.solvers.Cholesky().solve(
        KernelOperator(ard(), data()[0], 0.5), data()[1][:, None]
    )
    assert solution.reason == StopReason.CONVERGED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unless_converged(solution)
        jax.effects_barrier()
    with pytest.warns(RuntimeWarning, match=text):
        warn_unless_converged(
            solution._replace(converged=jnp.array(False), reason=jnp.array(int(reason)))
        )
        jax.effects_barrier()


@pytest.mark.slow
def test_epochs_include_the_log_determinant(x64):
    p = parameters(0.5)
    operator = KernelOperator(p["kernel"], p["X"], p["noise"])

    def epochs(**options: Any) -> float:
        family = make("hutchinson", sgp.solvers.Cholesky(), 2, **options)
        return float(family.estimate(operator, p["y"][:, None], key=KEY).solution.epochs)

    assert epochs(num_logdet_probes=0) == 1
    # The default preconditioner is exact here, so that a single step will do.
    assert epochs(num_logdet_probes=2) == 2


def noisy(estimator: Any, X: Array, y: Array, noise: Array) -> Array:
    gp = sgp.GaussianProcess(ard(), X, noise, estimator=estimator, key=KEY)
    return gp.log_prob(y)


@every_estimator
@pytest.mark.parametrize("derivative", [jax.hessian, jax.jacfwd, lambda f: jax.grad(jax.grad(f))])
def test_derivatives_that_would_be_wrong_are_refused(estimator, derivative):
    """The gradient holds the solutions fixed, so that its derivative would omit theirs."""
    X, y = data(12)
    density = functools.partial(noisy, make(estimator, num_probes=2), X, y)
    with pytest.raises(TypeError, match=r"only first derivatives in reverse mode.*`sgp.estimators"):
        jax.jit(derivative(density))(0.5)


@pytest.mark.parametrize("kernel", [NUTS, HMC, AIES])
def test_samplers_raise_for_a_value_without_its_log_determinant(kernel):
    X, y = data(12)

    def model(num_logdet_probes: int) -> None:
        noise = numpyro.sample("noise", dist.LogNormal())
        estimator = make("pathwise", num_probes=2, num_logdet_probes=num_logdet_probes)
        gp = sgp.GaussianProcess(ard(), X, noise, estimator=estimator)
        numpyro.sample("y", gp, obs=y)

    chains = 2 if kernel is AIES else 1
    mcmc = MCMC(
        kernel(model), num_warmup=1, num_samples=1, progress_bar=False, num_chains=chains,
        chain_method="vectorized",
    )  # fmt: skip
    with pytest.raises(ValueError, match="`num_logdet_probes=0` of `Pathwise` omits the log-det"):
        mcmc.run(KEY if chains == 1 else jax.random.split(KEY, 2), 0)


def test_a_line_search_warns_of_one_draw_and_refuses_a_value_without_its_log_determinant():
    X = data(12)[0]

    def loss(noise, num_logdet_probes=2):
        estimator = make("pathwise", num_probes=2, num_logdet_probes=num_logdet_probes)
        sgp.GaussianProcess(ard(), X, noise[0] ** 2 + 1.0, estimator=estimator, key=KEY)
        return jnp.sum(noise**2)

    with pytest.warns(RuntimeWarning, match=r"`Pathwise` draws at random.*optim.Minimize"):
        jax.scipy.optimize.minimize(loss, jnp.ones(1), method="BFGS", options={"maxiter": 1})

    def model():
        noise = numpyro.param("noise", jnp.ones(1))
        numpyro.factor("loss", -loss(noise, num_logdet_probes=0))

    svi = SVI(model, lambda: None, numpyro.optim.Minimize(), Trace_ELBO())
    state = svi.init(KEY)
    with pytest.raises(ValueError, match=r"omits the log-det.*optim.Minimize` would"):
        svi.update(state)


@pytest.mark.slow
def test_an_autoguide_is_initialized_without_a_warning():
    """Its initialization evaluates a potential energy, but does not use it."""
    X, y = data(12)

    def model() -> None:
        noise = numpyro.sample("noise", dist.LogNormal())
        estimator = make("pathwise", num_probes=2, num_logdet_probes=0)
        numpyro.sample("y", sgp.GaussianProcess(ard(), X, noise, estimator=estimator), obs=y)

    svi = SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a linear solve", RuntimeWarning)
        warnings.filterwarnings("error", "`Pathwise` draws at random", RuntimeWarning)
        state = svi.init(KEY)
        assert np.isfinite(svi.update(state)[1])


@pytest.mark.parametrize("family", [sgp.estimators.Pathwise, sgp.estimators.Hutchinson])
def test_an_estimator_without_arguments_solves(family):
    assert family().solver == sgp.solvers.AutoSolver()
    estimator = family(num_probes=2, num_features=16, num_logdet_probes=0)
    X = jnp.linspace(0.0, 1.0, 30)[:, None]
    kernel = sgp.kernels.Matern32(0.3)
    gp = sgp.GaussianProcess(kernel, X, 1e-2, estimator=estimator, key=jax.random.key(0))
    posterior = gp.condition(jnp.sin(9.0 * X[:, 0]))
    assert posterior.diagnostics["converged"]
    assert posterior.diagnostics["residual"] <= 1e-2


def scaled_inputs(weights: Array, X: Array) -> Array:
    return X * weights


@pytest.mark.slow
@every_estimator
def test_maps_of_inputs_have_gradients(estimator: str, x64: None) -> None:
    X, y = data()

    def loss(weights: Array, mapping: Any, estimator: Any) -> Array:
        kernel = sgp.kernels.FeatureMapped(sgp.kernels.RBF(1.0), mapping(weights))
        return sgp.GaussianProcess(kernel, X, 0.3, estimator=estimator, key=KEY).log_prob(y)

    def gradient(mapping: Any, estimator: Any) -> Array:
        return jax.jit(jax.grad(lambda w: loss(w, mapping, estimator)))(jnp.array([0.7, 1.5]))

    def of_partial(weights: Array) -> Any:
        return jax.tree_util.Partial(scaled_inputs, weights)

    def of_closure(weights: Array) -> Any:
        return lambda X: scaled_inputs(weights, X)

    def of_nested_default(weights: Array) -> Any:
        inner = jax.jit(of_closure(weights))
        return lambda X, inner=inner: inner(X)

    stochastic = make(estimator, num_probes=400)
    exact = gradient(of_partial, sgp.estimators.Cholesky())
    assert float(jnp.linalg.norm(exact)) > 1.0
    for mapping in (of_partial, of_closure, of_nested_default):
        np.testing.assert_allclose(gradient(mapping, stochastic), exact, rtol=0.1, atol=1.0)


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_posteriors_in_extreme_units(scale: float) -> None:
    # Squares of such numbers are not in the range of float32.
    X, y = data()
    X, y = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1, estimator=Pathwise(num_probes=4))
    plain, scaled = (gp.condition(unit * y, key=KEY) for unit in (1.0, jnp.float32(scale)))
    assert bool(scaled.diagnostics["converged"])
    np.testing.assert_allclose(scaled.mean(X) / scale, plain.mean(X), atol=0.02)


def of_flax() -> Any:
    # NumPyro's module function closes over traced values, which its arguments replace.
    return nnx_module("network", nnx.Linear(D, 1, rngs=nnx.Rngs(0)))


def of_lambda() -> Any:
    weights = numpyro.param("weights", jnp.ones((D, 1)))
    return lambda X: X @ weights


@pytest.mark.slow
@pytest.mark.parametrize("of", [of_flax, of_lambda])
def test_functions_made_in_a_model_are_learned(of: Any) -> None:
    X, y = data()
    X, y = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)

    def model(X: Array, y: Array) -> None:
        kernel = sgp.kernels.FeatureMapped(sgp.kernels.RBF(1.0), of())
        gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=Pathwise(num_probes=4), state="solver")
        numpyro.sample("y", gp, obs=y)

    guide = AutoDelta(model)
    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    state = svi.init(KEY, X, y)
    step = jax.jit(svi.update)
    result, _ = step(step(state, X, y)[0], X, y)
    assert result.mutable_state["solver"].memory.step == 2
    params = {**svi.get_params(result), **result.mutable_state}
    posterior = sgp.posterior(model, guide, params, X, y)
    again = sgp.posterior(model, guide, params, X, y)
    assert posterior.diagnostics["epochs"] > 0
    assert again.diagnostics["epochs"] == 1  # for the residual: the function may have changed
    before, after = svi.get_params(state), svi.get_params(result)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (np.abs(old - new) > 0.01).all()
