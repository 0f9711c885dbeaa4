"""The solver state in NumPyro's SVI: warm starts, saving, and recovery from failures."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import Hutchinson, Pathwise, SolverState
from numpyro_scalegp.linear.preconditioners import PivotedCholesky
from numpyro_scalegp.solvers import (
    AlternatingProjections,
    ConjugateGradients,
    KernelOperator,
    StochasticGradientDescent,
)

N, PROBES, TOLERANCE = 20, 4, 1e-4
KEY = jax.random.PRNGKey(0)  # a raw key: NumPy can save it

pytestmark = pytest.mark.usefixtures("x64")

SOLVERS = {
    "cg": ConjugateGradients(TOLERANCE, 40, PivotedCholesky(3)),
    "ap": AlternatingProjections(5, TOLERANCE, 400),
    "sgd": StochasticGradientDescent(10, tolerance=TOLERANCE, max_epochs=1000),
}
ESTIMATORS: dict[str, Any] = {"hutchinson": Hutchinson, "pathwise": Pathwise}


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, size=(N, 1))
    return jnp.array(X), jnp.array(np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=N))


def make(
    estimator: str = "pathwise", solver: str = "cg", num_probes: int = PROBES, **options: Any
) -> Any:
    # The value is not tested here.
    options = {"num_features": 16, "num_logdet_probes": 0, **options}
    return ESTIMATORS[estimator](SOLVERS[solver], num_probes, **options)


def latents(*_: Any) -> tuple[Array, Array]:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    return lengthscale, numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))


def model_with(estimator: Any) -> Any:
    def model(X: Array, y: Array) -> None:
        lengthscale, noise = latents()
        kernel = sgp.kernels.Matern32(lengthscale)
        gp = sgp.GaussianProcess(kernel, X, noise, estimator=estimator, state="solver")
        numpyro.sample("y", gp, obs=y)

    return model


class Fit(NamedTuple):
    svi: SVI
    init: Any
    update: Any  # compiled


@functools.cache
def fit(estimator: str = "pathwise", solver: str = "cg", **options: Any) -> Fit:
    return fit_of(make(estimator, solver, **options))


def fit_of(estimator: Any, guide: Any = AutoDelta, loss: Any = None) -> Fit:
    model = model_with(estimator)
    # A guide for the latent sites only is fast to initialize.
    guide = guide(latents, init_loc_fn=numpyro.infer.init_to_value(values=START))
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO() if loss is None else loss)
    return Fit(svi, svi.init(KEY, *data()), jax.jit(svi.update))


START = {"lengthscale": 1.3, "noise": 0.5}


def steps(fit: Fit, num_steps: int, state: Any = None) -> Any:
    state = fit.init if state is None else state
    for _ in range(num_steps):
        state, _ = fit.update(state, *data())
    return state


def solver(state: Any) -> SolverState:
    return state.mutable_state["solver"]


def assert_close(tree: Any, expected: Any, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """Equal up to rounding, including keys and the NaN of empty records."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_same(tree: Any, expected: Any) -> None:
    assert_close(tree, expected, rtol=0, atol=0)


def dense(memory: Any) -> np.ndarray:
    X = data()[0]
    return np.asarray(memory.kernel.covariance(X)) + float(memory.noise_variance) * np.eye(N)


# Steps


def test_an_initial_state_is_empty_and_shaped():
    state = solver(fit().init)
    memory = state.memory
    assert memory.solutions.shape == (2, N, 1 + PROBES)
    assert memory.solutions.dtype == jnp.float64
    assert memory.step == 0
    assert not np.any(memory.solutions)
    history = state.history()
    assert set(history) == {
        "residual", "probe_residual", "epochs", "converged", "standard_error",
    }  # fmt: skip
    assert all(values.shape == (0,) for values in history.values())
    with pytest.raises(ValueError, match="the solver state is empty"):
        SolverState().history()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_updates_leave_solutions_and_records(estimator, name):
    fitted = fit(estimator, name)
    before = steps(fitted, 3)
    state = steps(fitted, 1, before)
    memory = solver(state).memory
    assert memory.step == 4
    history = solver(state).history()
    assert all(values.shape == (4,) for values in history.values())
    for entry in ("residual", "probe_residual"):
        assert np.all(history[entry] <= TOLERANCE)
        assert np.all(history[entry] > 0)
    assert np.all(history["converged"])
    assert np.all(history["epochs"] >= 1)

    # The newest solution is for the parameters at the start of the last step.
    params = fitted.svi.get_params(before)
    np.testing.assert_allclose(memory.kernel.lengthscale, params["lengthscale_auto_loc"])
    np.testing.assert_allclose(memory.noise_variance, params["noise_auto_loc"])
    X, y = data()
    np.testing.assert_array_equal(memory.target, y)
    operator = KernelOperator(memory.kernel, X, memory.noise_variance)
    targets = make(estimator, name).targets(operator, jax.random.split(memory.key(), 3)[0])
    B = np.concatenate([y[:, None], targets], axis=1)
    residual = np.linalg.norm(B - dense(memory) @ memory.solutions[0], axis=0)
    residual = residual / np.linalg.norm(B, axis=0)
    assert residual[0] <= 1.01 * TOLERANCE
    assert np.mean(residual[1:]) <= 1.01 * TOLERANCE
    # The solution before it is second.
    np.testing.assert_array_equal(memory.solutions[1], solver(before).memory.solutions[0])


@pytest.mark.slow
@pytest.mark.parametrize("stable", [False, True])
def test_run_carries_the_state(stable):
    fitted = fit()
    result = fitted.svi.run(KEY, 5, *data(), progress_bar=False, stable_update=stable)
    expected = steps(fitted, 5)
    assert result.losses.shape == (5,)
    assert np.isfinite(result.losses).all()
    assert solver(result.state).memory.step == 5
    assert_close(result.state, expected)


@pytest.mark.slow
def test_eager_updates_do_the_same_and_change_no_earlier_state():
    fitted = fit()
    before = steps(fitted, 2)
    copy = jax.tree.map(np.array, before)
    state, loss = fitted.svi.update(before, *data())
    assert_same(jax.tree.map(np.array, before), copy)
    assert solver(before).memory.step == 2
    assert solver(state).memory.step == 3
    expected, expected_loss = fitted.update(before, *data())
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(state, expected)
    # Training resumes from it once more.
    assert_close(fitted.svi.stable_update(before, *data())[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_solutions", [1, 2, 3])
def test_number_of_solutions(num_solutions):
    fitted = fit(num_solutions=num_solutions)
    states = [fitted.init]
    for _ in range(4):
        states.append(steps(fitted, 1, states[-1]))
    memory = solver(states[-1]).memory
    assert memory.solutions.shape == (num_solutions, N, 1 + PROBES)
    for age in range(num_solutions):
        newest = solver(states[-1 - age]).memory.solutions[0]
        np.testing.assert_array_equal(memory.solutions[age], newest)
    y = data()[1]
    residual = np.linalg.norm(y - dense(memory) @ memory.solutions[0, :, 0])
    assert residual < 1.01 * TOLERANCE * np.linalg.norm(y)


# Warm starts


@functools.cache
def warm_and_cold(num_steps: int = 15) -> tuple[Any, Any]:
    """The same fit with every start at the last solutions, and with every start at zero."""
    fitted = fit("pathwise", "ap")
    warm = steps(fitted, num_steps)
    state = fitted.init
    for _ in range(num_steps):
        zeros = jnp.zeros_like(solver(state).memory.solutions)
        state = eqx.tree_at(lambda s: solver(s).memory.solutions, state, zeros)
        state = steps(fitted, 1, state)
    return warm, state


def test_solves_that_start_warm_take_fewer_epochs():
    warm, cold = (solver(state).history() for state in warm_and_cold())
    assert np.all(warm["converged"] & cold["converged"])
    assert warm["epochs"][0] == cold["epochs"][0]
    assert np.sum(warm["epochs"]) < 0.7 * np.sum(cold["epochs"])


def test_warm_and_cold_fits_reach_the_same_parameters():
    fitted = fit("pathwise", "ap")
    warm, cold = (fitted.svi.get_params(state) for state in warm_and_cold())
    assert set(warm) == {"lengthscale_auto_loc", "noise_auto_loc"}
    assert abs(warm["noise_auto_loc"] - START["noise"]) > 0.01  # it has moved
    for name in warm:
        np.testing.assert_allclose(warm[name], cold[name], rtol=1e-3)


@pytest.mark.slow
def test_a_fit_with_a_state_is_close_to_the_exact_fit():
    """Fixed probes give a small bias: with many of them, parameters agree with Cholesky's."""
    X, y = data()
    fitted = fit_of(Pathwise(SOLVERS["cg"], 64, num_features=200, num_logdet_probes=0))
    params = fitted.svi.get_params(steps(fitted, 60))

    def exact(X: Array, y: Array) -> None:
        lengthscale, noise = latents()
        gp = sgp.GaussianProcess(sgp.kernels.Matern32(lengthscale), X, noise)
        numpyro.sample("y", gp, obs=y)

    guide = AutoDelta(latents, init_loc_fn=numpyro.infer.init_to_value(values=START))
    svi = SVI(exact, guide, optax.adam(0.05), Trace_ELBO())
    expected = svi.run(KEY, 60, X, y, progress_bar=False).params
    for name in params:
        start = START[name.removesuffix("_auto_loc")]
        moved = abs(np.log(expected[name] / start))
        assert abs(np.log(params[name] / expected[name])) < max(0.1, 0.2 * moved), name
    assert abs(np.log(expected["noise_auto_loc"] / START["noise"])) > 0.3


# Probes


def signs(memory: Any) -> np.ndarray:
    """The right-hand sides of Hutchinson's probes, from their solutions."""
    images = dense(memory) @ memory.solutions[0][:, 1:]
    assert np.all(np.abs(np.abs(images) - 1) < 0.1)
    return np.sign(images)


def test_probes_stay_the_same_over_steps():
    fitted = fit("hutchinson")
    first = steps(fitted, 1)
    last = steps(fitted, 3, first)
    before, after = solver(first).memory, solver(last).memory
    np.testing.assert_array_equal(before.seed, after.seed)
    np.testing.assert_array_equal(signs(before), signs(after))
    np.testing.assert_array_equal(before.seed, solver(fitted.init).memory.seed)


@pytest.mark.slow
def test_fresh_probes_are_drawn_at_each_step():
    fitted = fit("hutchinson", fresh_probes=True)
    first = steps(fitted, 1)
    second = steps(fitted, 1, first)
    before, after = signs(solver(first).memory), signs(solver(second).memory)
    share = np.mean(before == after)
    assert 0.2 < share < 0.8
    assert solver(second).memory.step == 2
    assert np.all(solver(second).history()["converged"])
    assert np.all(solver(second).history()["residual"] <= TOLERANCE)


# Failures


def broken(state: Any, name: str) -> Any:
    """The state with NaN in a parameter."""
    return eqx.tree_at(
        lambda s: s.optim_state[1][0][f"{name}_auto_loc"], state, jnp.full((), jnp.nan)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cg", "ap", "sgd"])
@pytest.mark.parametrize("parameter", ["lengthscale", "noise"])
def test_a_failed_step_leaves_the_last_good_solutions(parameter, name):
    fitted = fit("pathwise", name)
    good = steps(fitted, 2)
    failed = steps(fitted, 1, broken(good, parameter))
    before, after = solver(good).memory, solver(failed).memory
    assert np.isnan(failed.optim_state[1][0][f"{parameter}_auto_loc"])
    for field in ("solutions", "target", "kernel", "noise_variance", "X", "estimator", "seed"):
        assert_same(getattr(after, field), getattr(before, field))
    assert after.step == 3
    history = solver(failed).history()
    assert not any(np.isnan(values).any() for values in history.values())
    assert history["residual"][-1] == history["probe_residual"][-1] == np.inf
    assert not history["converged"][-1]
    assert np.all(history["converged"][:-1])
    # With finite parameters, training resumes, and starts at the finite solutions.
    again = good._replace(mutable_state=failed.mutable_state)
    again = steps(fitted, 1, again)
    assert solver(again).history()["converged"][-1]
    assert solver(again).history()["epochs"][-1] <= solver(good).history()["epochs"][0]


@pytest.mark.slow
def test_stable_update_survives_a_failed_step():
    fitted = fit()
    X, y = data()
    update = jax.jit(fitted.svi.stable_update)
    good = steps(fitted, 2)
    failed, loss = update(good, X, y.at[0].set(jnp.nan))
    assert not np.isfinite(loss)
    assert_same(failed.optim_state[1], good.optim_state[1])
    assert_same(solver(failed).memory.solutions, solver(good).memory.solutions)
    after, loss = update(failed, X, y)
    assert np.isfinite(loss)
    np.testing.assert_array_equal(
        np.isinf(solver(after).history()["residual"]), [False, False, True, False]
    )


@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("guide", [AutoDelta, AutoNormal])
@pytest.mark.filterwarnings("ignore:mutable state is currently ignored")
def test_several_particles_are_refused(guide, loss):
    fitted = fit_of(make(), guide, loss(num_particles=2, vectorize_particles=True))
    message = r"a state is written by 2 computations at once.*`num_particles=1`"
    with pytest.raises(ValueError, match=message):
        fitted.update(fitted.init, *data())


def test_a_state_serves_one_data_set_and_one_estimator():
    X, y = data()
    fitted = fit()
    state = steps(fitted, 1)
    message = (
        r"the solver state holds a solution of shape \(20, 5\), but the data and the estimator "
        r"ask for \(19, 5\)"
    )
    with pytest.raises(ValueError, match=message):
        fitted.update(state, X[:-1], y[:-1])
    different = fit_of(make(num_probes=7))
    with pytest.raises(ValueError, match=r"ask for \(20, 8\) \(rows, 1 \+ num_probes\)"):
        different.update(different.init._replace(mutable_state=state.mutable_state), X, y)


@pytest.mark.slow
def test_a_state_takes_no_batch_of_observations():
    X, y = data()
    gp = sgp.GaussianProcess(
        sgp.kernels.RBF(1.0), X, 0.5, estimator=make(), key=KEY, state="solver"
    )
    with pytest.raises(ValueError, match=r"`y` must have shape \(20,\) where a solver state is us"):
        gp.log_prob(jnp.stack([y, y]))
    assert np.isfinite(gp.log_prob(y[None])).all()


def test_empty_states(unchecked):
    X, y = data()
    with pytest.raises(ValueError, match=r"a new solver state needs a `key` for its probes"):
        sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.5, estimator=make(), state="solver")
    operator = KernelOperator(sgp.kernels.RBF(1.0), X, 0.5)
    with pytest.raises(ValueError, match=r"the solver state is empty"):
        make().log_prob(operator, y, key=KEY, state=SolverState())


# Records and resumption


@pytest.mark.slow
def test_records_are_a_ring_of_the_last_steps():
    long, short = fit(), fit(num_records=4)
    for num_steps in (3, 4, 7):
        everything = solver(steps(long, num_steps)).history()
        history = solver(steps(short, num_steps)).history()
        assert len(np.unique(everything["residual"])) == num_steps
        for name, values in history.items():
            assert values.shape == (min(num_steps, 4),)
            np.testing.assert_allclose(values, everything[name][-4:], rtol=1e-6)


@pytest.mark.slow
def test_a_saved_state_resumes(tmp_path):
    first = fit("pathwise", "sgd")
    half = steps(first, 3)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(half)]
    np.savez(tmp_path / "state.npz", *leaves)

    fresh = fit_of(make("pathwise", "sgd"))
    structure = jax.tree.structure(fresh.init)
    with np.load(tmp_path / "state.npz") as file:
        restored = jax.tree.unflatten(structure, [jnp.asarray(file[name]) for name in file.files])
    assert_same(restored, jax.tree.unflatten(structure, leaves))
    assert_same(steps(fresh, 2, restored), steps(first, 2, half))
    result = fresh.svi.run(KEY, 2, *data(), progress_bar=False, init_state=restored)
    assert solver(result.state).history()["residual"].shape == (5,)
    assert_close(result.state, steps(first, 5), rtol=1e-5)


@pytest.mark.slow
def test_state_flattens_to_what_was_written():
    state = solver(steps(fit(num_records=4, num_solutions=3), 2))
    leaves, structure = jax.tree.flatten(state)
    again = jax.tree.unflatten(structure, leaves)
    assert (again.memory.num_records, len(again.memory.solutions)) == (4, 3)
    assert_same(again, state)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert ".memory.solutions" in paths


# Guides, samplers and repeated traces


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
def test_state_with_a_guide_that_samples(loss):
    fitted = fit_of(make(), AutoNormal, loss())
    state = steps(fitted, 3)
    memory = solver(state).memory
    assert memory.step == 3
    assert np.all(solver(state).history()["converged"])
    y = data()[1]
    residual = np.linalg.norm(y - dense(memory) @ memory.solutions[0, :, 0])
    assert residual < 1.01 * TOLERANCE * np.linalg.norm(y)


@pytest.mark.slow
def test_one_state_in_many_traces():
    """A step reads only the memory at its start, regardless of later writes."""
    fitted = fit()
    X, y = data()
    state = solver(steps(fitted, 2))
    guide = fitted.svi.guide
    params = {f"{name}_auto_loc": jnp.array(value) for name, value in START.items()}

    def loss(params: dict[str, Any]) -> Array:
        values = {**params, "solver": state}
        return Trace_ELBO().loss(jax.random.key(0), values, fitted.svi.model, guide, X, y)

    first = jax.jit(loss)(params)
    np.testing.assert_allclose(loss(params), first, rtol=1e-6)
    # A guide's set-up traces the model as well.
    substituted = handlers.substitute(fitted.svi.model, data={"solver": state})
    auto = AutoNormal(substituted)
    with handlers.seed(rng_seed=0):
        auto(X, y)
    trace = handlers.trace(handlers.seed(auto, 1)).get_trace(X, y)
    assert np.isfinite(trace["noise"]["value"])
    np.testing.assert_array_equal(jax.jit(lambda p: loss(p))(params), first)


@pytest.mark.slow
def test_evaluating_the_loss_changes_nothing():
    fitted = fit()
    state = steps(fitted, 2)
    copy = jax.tree.map(np.array, state)
    evaluate = jax.jit(fitted.svi.evaluate)
    values = [evaluate(state, *data()) for _ in range(2)]
    assert values[0] == values[1]
    assert_same(jax.tree.map(np.array, state), copy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a linear solve ended above:RuntimeWarning")
def test_nuts_over_a_model_with_a_state():
    X, y = (a[:10] for a in data())
    options = {"num_features": 64, "num_logdet_probes": 2, "num_records": 3}
    estimator = Pathwise(sgp.solvers.Cholesky(), 32, **options)

    def model(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        kernel = sgp.kernels.Matern32(lengthscale)
        gp = sgp.GaussianProcess(
            kernel, X, 0.5, estimator=estimator, key=jax.random.key(1), state="solver"
        )
        numpyro.sample("y", gp, obs=y)

    mcmc = MCMC(NUTS(model, max_tree_depth=2), num_warmup=3, num_samples=3, progress_bar=False)
    with pytest.warns(
        RuntimeWarning, match="`Pathwise` draws at random, but this model is evaluated"
    ):
        mcmc.run(KEY, X, y, extra_fields=("potential_energy",))
    # Value and gradient are from different probes, so whether a proposal is accepted does not
    # matter here.
    samples, energy = mcmc.get_samples()["lengthscale"], mcmc.get_extra_fields()["potential_energy"]
    assert samples.shape == (3,)
    assert np.isfinite(samples).all()
    assert np.isfinite(energy).all()
    # The traces leave no state behind in the model.
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(X, y)
    assert np.isfinite(trace["y"]["fn"].log_prob(y))
    assert trace["solver"]["value"].memory.step == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a linear solve failed:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:a `state` is for another number of:RuntimeWarning")
def test_a_traced_mask_of_another_number_of_rows_is_nan():
    """A mask with more or fewer rows than the state gives NaN, not a wrong number."""
    X, y = data()
    solver = AlternatingProjections(5, TOLERANCE, 400)
    estimator = Pathwise(solver, 2, num_features=4, num_logdet_probes=0)

    def process(observed: Any) -> sgp.GaussianProcess:
        options = {"estimator": estimator, "state": "solver", "key": KEY, "observed": observed}
        return sgp.GaussianProcess(sgp.kernels.Matern32(0.7), X, 0.1, **options)

    state = process(np.arange(N) < 12).state

    @eqx.filter_jit
    def conditioned(state: Any, observed: Array) -> tuple[Array, Array]:
        with handlers.substitute(data={"solver": state}):
            gp = process(observed)
        return gp.log_prob(y), gp.condition(y).mean(X[:2])

    for rows, is_known in ((np.arange(12), True), (np.arange(8), False), (np.arange(15), False)):
        value, mean = conditioned(state, jnp.isin(jnp.arange(N), jnp.asarray(rows)))
        assert bool(jnp.isfinite(value)) == bool(jnp.all(jnp.isfinite(mean))) == is_known
