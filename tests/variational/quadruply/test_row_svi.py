"""Steps that update a few rows, against steps that update all rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import QuadruplyStochasticELBO, RowSVI, row_adagrad, row_adam
from numpyro_scalegp.variational.quadruply import likelihood, row_optimizers
from numpyro_scalegp.variational.quadruply.chevron_features import Chevron, projections
from numpyro_scalegp.variational.quadruply.rows import Rows
from tests.compilation import programs

pytestmark = pytest.mark.usefixtures("x64")

N, M, RANK = 30, 16, 3
KEY = jax.random.key(0)
ROWS = ("f_auto_loc", "f_auto_scale_diag", "f_auto_scale_columns", "precision")


def data() -> tuple[Array, Array]:
    X = jnp.linspace(-2.0, 2.0, N)[:, None]
    return X, jnp.sin(2.0 * X[:, 0]) + 0.5


def model(X: Array, y: Array, batch: int | None = None) -> None:
    kernel = sgp.kernels.RBF(numpyro.param("lengthscale", 0.6))
    ones = jnp.ones(M)
    precision = numpyro.param("precision", ones, constraint=constraints.positive, rows=True)
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    rows = sgp.plate("rows", N, batch)
    X_rows, y_rows = rows.take(X, y)
    phi = sgp.features.RandomFourier(kernel, M, seed=0)
    f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X_rows, precision))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y_rows)


def make(loss: QuadruplyStochasticELBO, optim: Any = None, **kwargs: Any) -> RowSVI:
    guide = sgp.guides.AutoChevronGP(model, rank=RANK)
    return RowSVI(model, guide, optax.adam(0.01) if optim is None else optim, loss, **kwargs)


def params_of(state: Any) -> dict[str, Array]:
    return state.optim_state[1][0]


class Scripted(QuadruplyStochasticELBO):
    """Fixed sets for alternating steps, with indices in both sets."""

    sets = jnp.array([[[1, 4, 8, 15], [4, 1, 9, 12]], [[0, 4, 9, 13], [2, 5, 9, 13]]])
    count = 0

    def index_sets(self, key: Array, size: int, *, dense_precision: bool) -> Array:
        self.count += 1
        return self.sets[(self.count - 1) % 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adagrad", "sgd"])
def test_sparse_updates_are_dense_updates_with_the_same_gradients(name):
    if name == "adagrad":
        row_optim, optimizer = row_adagrad(0.1), optax.adagrad(0.1)
    else:
        plain = lambda grads, state, params, step: (params - 0.01 * grads, state)  # noqa: E731
        row_optim, optimizer = sgp.infer.RowOptimizer(jnp.zeros_like, plain), optax.sgd(0.01)
    X, y = data()
    svi = make(Scripted(4), row_optim=row_optim)
    state = svi.init(KEY, X, y)
    dense = {name: params_of(state)[name] for name in ROWS}
    dense_state = optimizer.init(dense)
    for step in range(2):
        index, before = Scripted.sets[step], params_of(state)
        key = jax.random.split(state.rng_key, 3)[2]

        def loss(dense: Any, index: Array = index, before: Any = before, key: Array = key) -> Any:
            params = svi.constrain_fn({**before, **dense})
            params = {k: Rows.of(v, index) if k in ROWS else v for k, v in params.items()}
            return svi.loss.loss(key, params, model, svi.guide, X, y)

        grads = jax.grad(loss)(dense)
        assert np.all(grads["f_auto_loc"][jnp.array([3, 7])] == 0.0)
        updates, dense_state = optimizer.update(grads, dense_state, dense)
        dense = optax.apply_updates(dense, updates)
        state, _ = svi.update(state, X, y)
        for name in ROWS:
            np.testing.assert_allclose(params_of(state)[name], dense[name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_default_loss_and_row_optimizer():
    X, y = data()
    guide = sgp.guides.AutoChevronGP(model)
    written_out = RowSVI(
        model, guide, optax.adam(0.01), QuadruplyStochasticELBO(2000),
        row_optim=row_adam(lambda step: 0.01 / jnp.sqrt(1.0 + step / 1000)),
    )  # fmt: skip
    results = [
        svi.run(KEY, 3, X, y, progress_bar=False)
        for svi in (RowSVI(model, guide, optax.adam(0.01)), written_out)
    ]
    jax.tree.map(np.testing.assert_array_equal, results[0].params, results[1].params)
    assert results[0].params["f_auto_scale_columns"].shape == (M, 0)  # mean field


@pytest.mark.slow
def test_lazy_adam_on_all_rows_is_adam():
    X, y = data()
    loss = QuadruplyStochasticELBO(M)
    lazy = make(loss, optax.adam(0.05), row_optim=row_adam(0.05))
    plain = SVI(model, lazy.guide, optax.adam(0.05), loss)
    state = lazy.init(KEY, X, y)
    plain_state = plain.init(KEY, X, y)
    plain_state = sgp.infer.replace_params(plain, plain_state, lazy.get_params(state))
    # Only the draw of the noise is random: hold it fixed.
    for _ in range(3):
        held = numpyro.handlers.condition(model, {"noise": jnp.array(0.3)})
        lazy.model = plain.model = held
        state, _ = lazy.update(state, X, y)
        plain_state, _ = plain.update(plain_state, X, y)
    expected = plain.get_params(plain_state)
    for name, value in lazy.get_params(state).items():
        if name in ROWS:
            np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_lazy_adam_does_not_change_other_rows():
    X, y = data()
    svi = make(Scripted(4), row_optim=row_adam(0.05))
    state = svi.init(KEY, X, y)
    new, _ = svi.update(state, X, y)
    in_sets = jnp.isin(jnp.arange(M), Scripted.sets[0].reshape(-1))
    for name in ROWS[:2]:
        moved = params_of(new)[name] != params_of(state)[name]
        np.testing.assert_array_equal(moved, in_sets)
    moments = new.optim_state[1][1][1]["f_auto_loc"]
    np.testing.assert_array_equal(moments.count, in_sets.astype(int))


@pytest.mark.slow
def test_control_variate_follows_the_parameters():
    X, y = data()
    svi = make(QuadruplyStochasticELBO(5, 12), row_optim=row_adam(0.05))
    state = svi.run(KEY, 40, X, y, 10, progress_bar=False).state
    control = state.mutable_state["f_control_variate"]
    params = svi.get_params(state)
    distribution = Chevron(*(params[name] for name in ROWS[:3]))
    # Its features have the initial lengthscale, although the lengthscale has changed.
    assert abs(params["lengthscale"] - 0.6) > 0.01
    phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.6), M, seed=0)
    np.testing.assert_allclose(
        control.projected, projections(phi, control.X, distribution)[0], rtol=1e-8
    )
    targets = jnp.interp(control.data[:, 0], X[:, 0], y)
    np.testing.assert_allclose(control.targets, targets, rtol=1e-12)

    fresh = svi.refresh(state, X, y, 10).mutable_state["f_control_variate"]
    phi = phi.with_kernel(sgp.kernels.RBF(params["lengthscale"]))
    np.testing.assert_allclose(
        fresh.projected, projections(phi, control.X, distribution)[0], rtol=1e-8
    )


@pytest.mark.monte_carlo
def test_stays_unbiased_while_it_trains():
    # After steps, the hyperparameters differ from the control variate's.
    X, y = data()
    held = numpyro.handlers.condition(model, {"noise": jnp.array(0.4)})
    guide = sgp.guides.AutoChevronGP(held, rank=RANK)
    loss = QuadruplyStochasticELBO(5, 12)
    svi = RowSVI(held, guide, optax.adam(0.05), loss, row_optim=row_adam(0.05))
    state = svi.run(KEY, 20, X, y, 10, progress_bar=False).state
    params = svi.get_params(state)

    def value(loss: Any, params: Any, key: Array) -> Array:
        return loss.loss(key, params, held, guide, X, y, 10)

    mutable = state.mutable_state
    keys = jax.random.split(KEY, 4000)
    draw = jax.value_and_grad(lambda p, key: value(loss, {**mutable, **p}, key))
    losses, grads = jax.jit(jax.vmap(draw, in_axes=(None, 0)))(params, keys)
    exact = lambda p: exact_loss(held, guide, p, X, y)  # noqa: E731
    expected, expected_grads = jax.value_and_grad(exact)(params)
    assert abs(jnp.mean(losses) - expected) < 4 * jnp.std(losses) / len(keys) ** 0.5
    for name in params:
        error = jnp.std(grads[name], axis=0) / len(keys) ** 0.5 + 1e-10
        off = jnp.abs(jnp.mean(grads[name], axis=0) - expected_grads[name]) / error
        assert jnp.max(off) < 4, name


def exact_loss(model: Any, guide: Any, params: Any, X: Array, y: Array) -> Array:
    return sgp.infer.QuadratureELBO(2).loss(KEY, params, model, guide, X, y)


@pytest.mark.slow
def test_run_returns_what_svi_returns(capsys):
    X, y = data()
    svi = make(QuadruplyStochasticELBO(5, 12), refresh_every=7)
    result = svi.run(KEY, 25, X, y, 10, stable_update=True)
    assert "avg. loss [" in capsys.readouterr().err
    assert result.losses.shape == (25,)
    assert np.all(np.isfinite(result.losses))
    assert set(result.params) == {*ROWS, "lengthscale", "noise_auto_loc", "noise_auto_scale"}
    assert int(result.state.optim_state[0]) == 25

    again = make(QuadruplyStochasticELBO(5, 12), refresh_every=7)
    same = again.run(KEY, 25, X, y, 10, progress_bar=False)
    np.testing.assert_allclose(same.losses, result.losses, rtol=1e-10)

    # A run from a state leaves it usable, and compiles nothing new.
    svi.run(KEY, 25, X, y, 10, init_state=result.state, progress_bar=False)
    before = programs.number
    more = svi.run(KEY, 25, X, y, 10, init_state=result.state, progress_bar=False)
    assert programs.number == before
    assert int(more.state.optim_state[0]) == 50
    np.testing.assert_array_equal(
        svi.get_params(result.state)["precision"], result.params["precision"]
    )
    assert np.isfinite(svi.evaluate(more.state, X, y, 10))
    with pytest.raises(ValueError, match="num_steps must be a positive integer"):
        svi.run(KEY, 0, X, y)


@pytest.mark.slow
def test_arrays_of_the_model_are_not_donated():
    X, y = data()
    points, start = X[:M], jnp.ones(M)
    phi = sgp.features.InducingPoints(sgp.kernels.RBF(0.6), points)

    def holding(X: Array, y: Array) -> None:
        precision = numpyro.param("precision", start, rows=True)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X, precision))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = sgp.guides.AutoChevronGP(holding, rank=RANK)
    svi = RowSVI(holding, guide, optax.adam(0.1), QuadruplyStochasticELBO(5, 10))
    for _ in range(2):
        svi.run(KEY, 5, X, y, progress_bar=False)
    assert not any(array.is_deleted() for array in (X, y, points, start, phi.kernel.lengthscale))


@pytest.mark.slow
def test_trains_to_the_posterior():
    # Mean and variances of a linear model with fixed hyperparameters.
    X, y = data()

    def fixed(X: Array, y: Array) -> None:
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.6), M, seed=0)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = sgp.guides.AutoChevronGP(fixed, rank=M)
    optimizer = row_adam(optax.cosine_decay_schedule(0.1, 3000))
    svi = RowSVI(fixed, guide, optax.adam(0.1), QuadruplyStochasticELBO(6, N), row_optim=optimizer)
    params = svi.run(KEY, 3000, X, y, progress_bar=False).params
    Phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.6), M, seed=0)(X)
    covariance = jnp.linalg.inv(Phi.T @ Phi / 0.25 + jnp.eye(M))
    posterior = guide.posterior(params, X, y)
    np.testing.assert_allclose(posterior.mean(X), Phi @ covariance @ Phi.T @ y / 0.25, atol=0.03)
    variance = jnp.diagonal(Phi @ covariance @ Phi.T)
    np.testing.assert_allclose(posterior.variance(X), variance, rtol=0.25)


@pytest.mark.slow
def test_hyperparameters_wait():
    X, y = data()
    svi = make(QuadruplyStochasticELBO(5), warmup_steps=3)
    state = svi.init(KEY, X, y)
    start = params_of(state)
    step = jax.jit(svi.update)
    for number in range(5):
        state, _ = step(state, X, y)
        waits = params_of(state)["lengthscale"] == start["lengthscale"]
        assert waits == (number < 3)
        assert np.any(params_of(state)["f_auto_loc"] != start["f_auto_loc"])


@pytest.mark.slow
def test_a_step_that_fails_changes_nothing():
    X, y = data()
    svi = make(QuadruplyStochasticELBO(5, 12))
    state = svi.init(KEY, X, y)
    bad, loss = jax.jit(svi.stable_update)(state, X, jnp.full_like(y, jnp.nan))
    assert not np.isfinite(loss)
    assert int(bad.optim_state[0]) == 1
    before = state.optim_state[1], state.mutable_state
    after = bad.optim_state[1], bad.mutable_state
    jax.tree.map(np.testing.assert_array_equal, before, after)
    # With `update` the parameters are NaN, but the control variate is not.
    lost, _ = jax.jit(svi.update)(state, X, jnp.full_like(y, jnp.nan))
    assert not np.isfinite(params_of(lost)["f_auto_loc"]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(lost.mutable_state))


@pytest.mark.slow
def test_an_interrupted_init_changes_nothing(monkeypatch):
    svi = make(QuadruplyStochasticELBO(8, control_variate_rank=5))
    state = svi.init(KEY, *data())
    before = dict(vars(svi))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RowSVI, "_placed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            svi.init(KEY, *data(), batch=10)
    assert list(vars(svi)) == list(before)
    for name, value in vars(svi).items():
        assert value is before[name] or (type(value) is dict and value == before[name])
    assert jnp.isfinite(svi.update(state, *data())[1])


@pytest.mark.slow
def test_no_step_makes_an_array_as_long_as_the_parameters():
    X, y = data()
    m = 2**20

    def large(X: Array, y: Array) -> None:
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.6), m, seed=0)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = sgp.guides.AutoChevronGP(large, rank=0)
    svi = RowSVI(large, guide, optax.adam(0.1), QuadruplyStochasticELBO(50, 10))
    state = svi.init(KEY, X, y)
    compiled = jax.jit(svi.update, donate_argnums=0).lower(state, X, y).compile()
    memory: Any = compiled.memory_analysis()
    # Parameters and accumulators are not copied.
    assert memory.temp_size_in_bytes < m * 8 / 4
    assert memory.alias_size_in_bytes > 4 * m * 8


def test_bad_arguments(unchecked):
    X, y = data()
    guide = sgp.guides.AutoChevronGP(model, rank=RANK)
    with pytest.raises(ValueError, match="`control_variate_rank` is 31, and the model has 30 rows"):
        make(QuadruplyStochasticELBO(4, 31)).init(KEY, X, y)

    def wrong(X: Array, y: Array) -> None:
        numpyro.param("other", jnp.zeros(3), rows=True)
        model(X, y)

    svi = RowSVI(wrong, guide, optax.adam(0.1), QuadruplyStochasticELBO(4))
    with pytest.raises(ValueError, match=r"`other` is declared with rows=True.*16 features"):
        svi.init(KEY, X, y)


def test_a_control_variate_needs_rows():
    def by_hand(X: Array, y: Array, batch: int | None = None) -> None:
        numpyro.sample("noise", dist.Delta(jnp.array(0.5)))
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.6), M, seed=0)
        loc = numpyro.param("loc", jnp.zeros(M))
        diag = numpyro.param("diag", jnp.ones(M), constraint=constraints.positive, rows=True)
        numpyro.sample("f", sgp.ChevronGP(phi, X, loc, diag, jnp.zeros((M, 0))))

    X, y = data()
    svi = RowSVI(model, by_hand, optax.adam(0.1), QuadruplyStochasticELBO(4, 10))
    with pytest.raises(ValueError, match="declare all three with"):
        svi.init(KEY, X, y)


def test_constraints_must_act_by_rows():
    def ordered(X: Array, y: Array) -> None:
        start = jnp.linspace(0.5, 2.0, M)
        precision = numpyro.param(
            "precision", start, constraint=constraints.positive_ordered_vector, rows=True
        )
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.6), M, seed=0)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X, precision))
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = sgp.guides.AutoChevronGP(ordered, rank=0)
    svi = RowSVI(ordered, guide, optax.adam(0.1), QuadruplyStochasticELBO(4))
    with pytest.raises(ValueError, match="constraint of the parameter `precision`"):
        svi.init(KEY, *data())


@pytest.mark.slow
def test_new_weights_make_the_control_variate_void_until_it_is_refreshed():
    X, y = data()
    svi = make(QuadruplyStochasticELBO(5, 12))
    state = svi.init(KEY, X, y)
    params = svi.guide.solve_diagonal(svi.get_params(state), X, y)
    state = sgp.infer.replace_params(svi, state, params)
    assert np.isnan(svi.update(state, X, y)[1])
    assert np.isfinite(svi.update(svi.refresh(state, X, y), X, y)[1])
    assert np.isfinite(svi.run(KEY, 2, X, y, init_state=state, progress_bar=False).losses).all()


@pytest.mark.slow
def test_networks_made_in_the_model_train():
    X, y = data()

    def network(X: Array, y: Array, batch: int | None = None) -> None:
        W = numpyro.param("W", jax.random.normal(KEY, (1, M)))
        phi = sgp.features.Learned(functools.partial(lambda W, X: jnp.sin(X @ W), W))
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        count = numpyro.primitives.mutable("count", {"steps": jnp.zeros(())})
        count["steps"] = count["steps"] + 1.0
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = sgp.guides.AutoChevronGP(network, rank=2)
    svi = RowSVI(network, guide, optax.adam(0.01), QuadruplyStochasticELBO(6, 10))
    result = svi.run(KEY, 12, X, y, progress_bar=False)
    assert np.all(np.isfinite(result.losses))
    assert result.state.mutable_state["count"]["steps"] >= 12
    control = svi.refresh(result.state, X, y).mutable_state["f_control_variate"]
    assert control.projected.shape == (10, 3)


@pytest.mark.slow
def test_float32_rows_and_float64_hyperparameters():
    X, y = data()
    svi = make(QuadruplyStochasticELBO(5, 12))
    losses = svi.run(KEY, 3, X.astype(jnp.float32), y, progress_bar=False).losses
    assert np.all(np.isfinite(losses))


def test_no_forward_mode(unchecked):
    with pytest.raises(ValueError, match="`forward_mode_differentiation` is not for"):
        make(QuadruplyStochasticELBO(5)).run(KEY, 1, *data(), forward_mode_differentiation=True)


def test_a_parameter_with_rows_cannot_be_computed_with():
    def logs(X: Array, y: Array) -> None:
        log_precision = numpyro.param("log_precision", jnp.zeros(M), rows=True)
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.6), M, seed=0)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X, jnp.exp(log_precision)))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = sgp.guides.AutoChevronGP(logs, rank=0)
    svi = RowSVI(logs, guide, optax.adam(0.1), QuadruplyStochasticELBO(4))
    state = svi.init(KEY, *data())
    with pytest.raises(TypeError, match="pass it to `WeightSpaceGP`"):
        svi.update(state, *data())


def test_support_points_may_be_given():
    X, y = data()
    svi = make(QuadruplyStochasticELBO(5, support_points=X[:4]))
    control = svi.init(KEY, X, y).mutable_state["f_control_variate"]
    np.testing.assert_array_equal(control.X, X[:4])
    assert control.projected.shape == (4, 1 + RANK)


@pytest.mark.slow
def test_optimizer_by_name():
    still = sgp.infer.RowOptimizer(
        jnp.zeros_like, lambda grads, state, params, step: (params, state)
    )
    choose = lambda name: still if name == "precision" else row_adagrad()  # noqa: E731
    svi = make(QuadruplyStochasticELBO(5), row_optim=choose)
    params = svi.run(KEY, 3, *data(), progress_bar=False).params
    np.testing.assert_allclose(params["precision"], 1.0)
    assert np.any(params["f_auto_loc"] != 0.0)


def test_merged_gradients():
    merge = functools.partial(row_optimizers.merge_rows, size=10)
    index = jnp.array([[7, 1, 3], [3, 9, 7]])
    places, merged = jax.jit(merge)(index, jnp.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]))
    total = jnp.zeros(10).at[places].set(merged, mode="drop", unique_indices=True)
    np.testing.assert_array_equal(
        total, jnp.zeros(10).at[jnp.array([7, 1, 3, 9])].set(jnp.array([33.0, 2.0, 12.0, 16.0]))
    )
    assert len(set(places.tolist())) == 6


@pytest.mark.parametrize(
    ("loss", "most"),
    [
        (QuadruplyStochasticELBO(5, 12), 3),
        (QuadruplyStochasticELBO(5), 2),
        (QuadruplyStochasticELBO(5, bound="plug_in"), 2),
    ],
    ids=["control", "gaussian", "bound"],
)
def test_a_step_runs_the_model_a_few_times(loss, most):
    runs: list[int] = []

    def counted(*args: Any) -> None:
        runs.append(1)
        model(*args)

    svi = make(loss)
    svi.model = svi.guide.model = counted
    state = svi.init(KEY, *data())
    runs.clear()
    jax.eval_shape(svi.update, state, *data())
    assert 1 <= len(runs) <= most


@pytest.mark.slow
def test_the_likelihood_is_analyzed_in_init_and_again_where_it_changes(monkeypatch):
    calls: list[int] = []
    original = likelihood.analyzed

    def counted(problem: Any) -> Any:
        calls.append(1)
        return original(problem)

    monkeypatch.setattr(likelihood, "analyzed", counted)

    def switching(X: Array, y: Array, combine: bool = False) -> None:
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.6), M, seed=0)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        numpyro.sample("y", dist.Normal(f - f.mean() if combine else f, 0.5), obs=y)

    guide = sgp.guides.AutoChevronGP(switching, rank=0)
    svi = RowSVI(switching, guide, optax.adam(0.1), QuadruplyStochasticELBO(4))
    X, y = data()
    state = svi.init(KEY, X, y)
    jax.eval_shape(svi.update, state, X, y)
    assert len(calls) == 1
    combining = functools.partial(svi.update, combine=True)
    with pytest.raises(ValueError, match="`y` combines rows of the function `f`"):
        jax.eval_shape(combining, state, X, y)


@pytest.mark.slow
def test_few_programs_are_compiled():
    """A start, and solves by a guide that is not set up yet, as in a new process."""
    svi = make(QuadruplyStochasticELBO(num_features=M // 2, control_variate_rank=4))
    jax.clear_caches()
    number = programs.number
    params = params_of(svi.init(KEY, *data()))
    assert 0 < programs.number - number <= 30
    for solve in ("solve_mean", "solve_diagonal"):
        guide = sgp.guides.AutoChevronGP(model, rank=RANK)
        values = svi.constrain_fn(params)
        jax.clear_caches()
        number = programs.number
        getattr(guide, solve)(values, *data())
        assert 0 < programs.number - number <= 30


@pytest.mark.slow
def test_the_start_is_the_one_of_separate_operations():
    """With handlers around the call, which may replace values, `init` runs one at a time."""
    loss = QuadruplyStochasticELBO(num_features=M // 2, control_variate_rank=4)
    state = make(loss).init(KEY, *data(), N // 2)
    with numpyro.handlers.substitute(data={"nothing": 0.0}):
        expected = make(loss).init(KEY, *data(), N // 2)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for array, exact in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(array.dtype, jnp.inexact):
            np.testing.assert_allclose(array, exact, rtol=1e-8, atol=1e-10)
        else:
            assert jnp.array_equal(array, exact)


@pytest.mark.slow
def test_a_model_that_needs_values_of_its_arguments():
    def on_the_host(X: Array, y: Array) -> None:
        assert np.asarray(X).ndim == 2
        model(X, y)

    guide = sgp.guides.AutoChevronGP(on_the_host, rank=RANK)
    loss = QuadruplyStochasticELBO(num_features=M // 2, control_variate_rank=4)
    svi = RowSVI(on_the_host, guide, optax.adam(0.01), loss)
    state = svi.init(KEY, *data())
    expected = make(loss).init(KEY, *data())
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert jnp.isfinite(svi.evaluate(state, *data()))
