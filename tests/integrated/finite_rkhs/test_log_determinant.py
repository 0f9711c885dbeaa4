"""Log-determinants from mini-batches: unbiased gradients, and states that find F."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jaxtyping import Array
from numpyro.infer import Trace_ELBO

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.finite_rkhs import minimax
from numpyro_scalegp.integrated.finite_rkhs.compositional import RunningAverage
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import Batch
from numpyro_scalegp.integrated.finite_rkhs.minimax import Saddle
from numpyro_scalegp.integrated.finite_rkhs.state import FitRecord, norms
from numpyro_scalegp.integrated.finite_rkhs.variational import Whitening, exponential_update
from numpyro_scalegp.log_determinants import Compositional, MiniBatch, Minimax, Variational
from tests.feature_problem import BATCH, D, N, best_weights, data, exact, features

KEY = jax.random.key(0)


def errors(logdet: Any, state: Any, num: int = 5000) -> float:
    """The difference of the mean gradient over batches and the full one, in standard errors.

    The state is far from F, so that the full gradient belongs to a loose bound.
    """
    X, y = data()
    at = (jnp.linspace(-1.0, 0.5, D), jnp.array(0.4), jnp.linspace(-1.0, 1.0, D))

    def log_prob(at: Any, index: Array) -> Array:
        log_scale, noise, weights = at
        batch = Batch(features(log_scale, X[index]), noise, N)
        return logdet.log_prob(batch, weights, y[index], state)

    index = jax.random.randint(KEY, (num, BATCH), 0, N)
    by_batch = jax.jit(jax.vmap(functools.partial(jax.grad(log_prob), at)))(index)
    full_gradient = jax.grad(log_prob)(at, jnp.arange(N))
    largest = 0.0
    for draws, expected in zip(by_batch, full_gradient, strict=True):
        spread = np.std(draws, axis=0) / np.sqrt(len(draws))
        difference = np.abs(np.mean(draws, axis=0) - expected)
        # The gradient may be constant, such as the gradient of the weights under `MiniBatch`.
        largest = max(largest, float(np.max(difference / (spread + 1e-10))))
    return largest


def far_off() -> Array:
    """A whitening W that is far from whitening F."""
    rng = np.random.default_rng(2)
    return jnp.array(np.tril(0.01 * rng.normal(size=(D, D))) + 0.2 * np.eye(D))


def state_of(kind: str) -> tuple[Any, Any]:
    """A log-determinant, and its state with A^-1 = W'W for the same W."""
    W, num_batches = far_off(), jnp.array(1)
    if kind == "Variational":
        return Variational(), Whitening(W, num_batches)
    if kind == "Compositional":
        return Compositional(), RunningAverage(jnp.linalg.inv(W.T @ W), W, num_batches)
    return Minimax(), Saddle(W, 0.5 * jnp.eye(D) + W + W.T, jnp.array(1.0), num_batches)


@pytest.mark.parametrize("kind", ["Variational", "Compositional", "Minimax"])
def test_gradients_of_batches_are_unbiased(kind, x64):
    assert errors(*state_of(kind)) < 4.0


@pytest.mark.slow
def test_the_same_check_detects_the_bias_of_mini_batches(x64):
    assert errors(MiniBatch(), None, num=500) > 10.0


def in_order(kind: str) -> np.ndarray:
    """Rows of five columns whose order tells their size."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 5)) @ rng.normal(size=(5, 5))
    if kind == "sorted by length":
        return X[np.argsort(np.sum(X**2, axis=1))]
    return np.concatenate([X[:1000] * [3, 1, 1, 1, 1], X[1000:] * [1, 1, 1, 1, 3]])


def gradients_relative_to_exact(logdet: Any, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of d log|F| / d gain over mini-batches of `sgp.plate`, and its standard error."""
    (n, d), noise = X.shape, 0.3
    params = {"gain": jnp.ones(d)}

    def model() -> None:
        gain = numpyro.param("gain", jnp.ones(d))
        rows = sgp.plate("rows", n, 32)
        prior = sgp.FeatureSpaceGP(
            lambda X: X * gain,
            rows.take(jnp.array(X)),
            noise,
            jnp.zeros(d),
            num_data=n,
            logdet=logdet,
        )
        numpyro.sample("y", prior, obs=jnp.zeros(32))

    def loss(params: Any, mutable: Any, key: Array) -> Any:
        result = Trace_ELBO().loss_with_mutable_state(
            key, {**params, **mutable}, model, lambda: None
        )
        return result["loss"], result["mutable_state"]

    def step(mutable: Any, key: Array) -> tuple[Any, Array]:
        gradient, mutable = jax.grad(loss, has_aux=True)(params, mutable, key)
        return mutable, gradient["gain"]

    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        model()
    mutable = {name: site["value"] for name, site in trace.items() if site["type"] == "mutable"}
    _, draws = jax.lax.scan(step, mutable, jax.random.split(KEY, 12_000))
    exact = 1.0 - noise * np.diag(np.linalg.inv(X.T @ X + noise * np.eye(d)))
    means = np.asarray(draws[2000:] / exact).reshape(100, -1, d).mean(axis=1)
    return means.mean(axis=0), means.std(axis=0) / np.sqrt(len(means))


@pytest.mark.parametrize("order", ["sorted by length", "two regimes"])
@pytest.mark.parametrize("logdet", [Variational(), Compositional(), Minimax()])
def test_ordered_rows_of_a_plate_leave_no_bias(logdet, order, x64):
    mean, error = gradients_relative_to_exact(logdet, in_order(order))
    # The step sizes leave errors in single directions, of about a hundredth.
    assert np.all(np.abs(mean - 1.0) < 4.0 * error + 0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the matrix A of:RuntimeWarning")
def test_the_same_check_detects_halves_in_the_order_of_the_rows(x64, monkeypatch):
    in_two = lambda key, rows: (rows[: len(rows) // 2], rows[len(rows) // 2 :])  # noqa: E731
    monkeypatch.setattr(minimax, "_halves", in_two)
    mean, error = gradients_relative_to_exact(Minimax(), in_order("sorted by length"))
    assert np.any(np.abs(mean - 1.0) > 0.3 + 4.0 * error)


@pytest.mark.parametrize("num", [2, 7, 8])
def test_halves_are_drawn_evenly(num):
    draw = jax.vmap(lambda key: minimax._halves(key, jnp.arange(float(num))[:, None]))
    first, second = draw(jax.random.split(KEY, 4000))
    together = jnp.sort(jnp.concatenate([first, second], axis=1)[..., 0], axis=1)
    np.testing.assert_array_equal(together, jnp.broadcast_to(jnp.arange(num), together.shape))
    frequencies = jnp.mean(jnp.any(first == jnp.arange(num), axis=1), axis=0)
    np.testing.assert_allclose(frequencies, (num // 2) / num, atol=4 * 0.5 / np.sqrt(4000))


@pytest.mark.parametrize("logdet", [Variational(), Minimax(), Minimax(penalty=0.3)])
def test_steps_with_all_rows_find_the_exact_value_and_gradient(logdet, x64):
    X, y = data()
    at = (jnp.linspace(-1.0, 0.5, D), jnp.array(0.3))
    weights = best_weights(features(at[0], X), 0.3, y)

    def log_prob(at: Any, state: Any) -> Array:
        batch = Batch(features(at[0], X), at[1], N)
        return logdet.log_prob(batch, weights, y, state)

    batch = Batch(features(at[0], X), at[1], N)
    start = logdet.start(jnp.linalg.inv(far_off().T @ far_off()))
    assert jnp.abs(log_prob(at, start) - exact(*at, X, y)) > 1.0
    if isinstance(logdet, Minimax):  # A and B each use half of the rows; here both use all
        batch = Batch(jnp.repeat(batch.features, 2, axis=0), at[1], N)
    advance = lambda _, state: logdet.advance(batch, state)  # noqa: E731
    state = jax.jit(lambda state: jax.lax.fori_loop(0, 6000, advance, state))(start)
    value, gradient = jax.value_and_grad(log_prob)(at, state)
    expected, derivatives = jax.value_and_grad(exact, argnums=(0, 1))(*at, X, y)
    np.testing.assert_allclose(value, expected, rtol=1e-8)
    np.testing.assert_allclose(gradient[0], derivatives[0], rtol=1e-8, atol=1e-6)
    np.testing.assert_allclose(gradient[1], derivatives[1], rtol=1e-8)
    if isinstance(logdet, Minimax) and logdet.penalty < 1.0:
        assert state.penalty > 0.99  # a smaller penalty would not hold A at F


@pytest.mark.parametrize("size", [1.0, 10.0])
def test_steps_are_limited_for_small_batches(size, x64):
    """At a rate of one, a batch's largest eigenvalue, at least d / b, would overshoot."""
    d, b = 200, 8
    Z = size * jnp.array(np.random.default_rng(0).normal(size=(b, d))) / jnp.sqrt(b)
    state = Variational().start(jnp.eye(d))
    after = Variational(step_size=1.0).advance(Batch(Z, jnp.array(1e-3), b), state)
    inverse = np.linalg.eigvalsh(after.W.T @ after.W)
    lowest = 0.5 if size == 1.0 else 0.0  # typical features, and longer features than in F
    assert abs(inverse[0] - lowest) < 0.3
    assert jnp.all(jnp.diagonal(after.W) > 0.0)
    # A direction of zero leaves W unchanged.
    np.testing.assert_array_equal(exponential_update(state.W, jnp.zeros((d, d)), 1.0, b), state.W)


def test_the_running_average_converges_to_the_mean(x64):
    X, _ = data()
    Phi, noise = features(jnp.zeros(D), X), jnp.array(0.3)
    index = jax.random.randint(KEY, (4000, BATCH), 0, N)
    equal = Compositional(decay=lambda step: 1.0)

    def step(state: RunningAverage, index: Array) -> tuple[RunningAverage, Array]:
        batch = Batch(Phi[index], noise, N)
        return equal.advance(batch, state), batch.gram()

    state, grams = jax.lax.scan(step, equal.start(jnp.eye(D)), index)
    mean = (jnp.eye(D) + jnp.sum(grams, axis=0)) / 4001.0
    np.testing.assert_allclose(state.average, mean, rtol=1e-10, atol=1e-10)
    spread = np.std(grams, axis=0) / np.sqrt(len(grams))
    F = Phi.T @ Phi + noise * jnp.eye(D)
    assert np.max(np.abs(state.average - F) / spread) < 4.5  # the largest of 210

    short = Compositional(decay=0.5)
    state = short.start(jnp.eye(D))
    for i in range(4):
        state = short.advance(Batch(Phi[index[i]], noise, N), state)
    expected = jnp.eye(D) / 16.0
    for i in range(4):
        expected = expected + grams[i] / 2.0 ** (4 - i)
    np.testing.assert_allclose(state.average, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [0.1, lambda count: 0.1])
def test_a_weight_that_is_given_is_used_as_it_is(decay, x64):
    X, _ = data()
    batch = Batch(features(jnp.zeros(D), X[:BATCH]), jnp.array(0.5), N)
    logdet = Compositional(decay=decay)
    state = logdet.start(jnp.eye(D), num_batches=63)
    with pytest.warns(RuntimeWarning, match="`decay` below 0.98 makes A.-1 too large.* 5.5"):
        after = logdet.advance(batch, state, spread=10.0)
    np.testing.assert_allclose(after.average, 0.1 * jnp.eye(D) + 0.9 * batch.gram())
    after = logdet.advance(batch, state, spread=0.2)  # no warning
    np.testing.assert_allclose(after.average, 0.1 * jnp.eye(D) + 0.9 * batch.gram())
    after = Compositional().advance(batch, state, spread=10.0)  # as many batches as needed
    np.testing.assert_allclose(after.average, 0.98 * jnp.eye(D) + 0.02 * batch.gram())


def test_too_short_an_average_warns_in_training(x64):
    X, y = data()

    def model() -> None:
        scale = numpyro.param("scale", 1.0)
        rows = sgp.plate("rows", N, BATCH)
        phi = lambda X: scale * features(jnp.zeros(D), X)  # noqa: E731
        logdet = Compositional(decay=0.1)
        prior = sgp.FeatureSpaceGP(phi, rows.take(X), 0.3, jnp.zeros(D), num_data=N, logdet=logdet)
        numpyro.sample("y", prior, obs=rows.take(y))

    svi = numpyro.infer.SVI(model, lambda: None, numpyro.optim.Adam(1e-3), Trace_ELBO())
    with pytest.warns(RuntimeWarning, match="`Compositional` averages over too few"):
        svi.run(KEY, 80, progress_bar=False)


def test_minimax_enforces_its_constraints(x64):
    X, _ = data()
    Phi = features(jnp.zeros(D), X[:BATCH])
    logdet = Minimax()
    # A far below the noise in one direction, and a multiplier at its limit.
    F = jnp.eye(D).at[0, 0].set(1e-3)
    state = logdet.start(F)._replace(multiplier=jnp.full((D, D), 5.0))
    after = logdet.advance(Batch(Phi, jnp.array(0.5), N), state)
    A = jnp.linalg.inv(after.W.T @ after.W)
    assert jnp.linalg.eigvalsh(A)[0] > 0.5 / 1.051
    np.testing.assert_array_equal(after.W, jnp.tril(after.W))
    assert jnp.all(jnp.diagonal(after.W) > 0.0)
    np.testing.assert_allclose(jnp.linalg.norm(after.multiplier), np.sqrt(D))
    np.testing.assert_allclose(after.penalty, 1.01)


@functools.partial(jax.jit, static_argnums=0)
def steady_state(logdet: Any, Z: Array, heeded: Array) -> tuple[Array, FitRecord]:
    """The mean of tr(Q F) / d over steps, for the gradient <Q, dF>, and its batch estimate."""
    (n, d), noise = Z.shape, jnp.array(0.1)
    full_batch = Batch(Z, noise, n)

    def step(carry: Any, key: Array) -> tuple[Any, Array]:
        state, record = carry
        batch = Batch(Z[jax.random.randint(key, (4,), 0, n)], noise, n)
        record_after = record.updated(logdet.trace(batch, state) / d, norms(batch, state.W), n / 4)
        after = logdet.advance(batch, state, heeded * record.spread)
        return (after, record_after), logdet.trace(full_batch, state) / d

    start = (logdet.start(full_batch.gram()), FitRecord.empty(Z.dtype))
    (_, record), eigenvalues = jax.lax.scan(step, start, jax.random.split(KEY, 8000))
    return jnp.mean(eigenvalues[1000:]), record


@pytest.mark.filterwarnings("ignore:the matrix A of:RuntimeWarning")
@pytest.mark.parametrize(
    ("logdet", "bias"), [(Variational(0.05), 0.1), (Compositional(), 0.2), (Minimax(), 0.15)]
)
def test_features_of_unequal_length_leave_little_bias(logdet, bias, x64):
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(200, 4)) * np.exp(1.5 * rng.normal(size=(200, 1)))
    mean_eigenvalue, record = steady_state(logdet, jnp.array(Z), jnp.array(1.0))
    assert jnp.abs(mean_eigenvalue - 1.0) < bias
    assert jnp.abs(record.eigenvalue - mean_eigenvalue) < 4.0 * record.standard_error + 0.05
    # If the spread between batches is ignored, the bias is large, and the record shows it.
    mean_eigenvalue, record = steady_state(logdet, jnp.array(Z), jnp.array(0.0))
    assert mean_eigenvalue > 2.0
    assert record.eigenvalue - 4.0 * record.standard_error > 1.2


def test_the_spread_of_batches_is_estimated_without_bias(x64):
    rng = np.random.default_rng(0)
    Z = jnp.array(rng.normal(size=(30, 3)) * np.exp(rng.normal(size=(30, 1))))
    noise, W = jnp.array(0.5), jnp.eye(3)
    F = Z.T @ Z + noise * jnp.eye(3)
    # F_batch = n / b sum_i z_i z_i' + noise I of independent draws i.
    variance = 30**2 * jnp.sum(jnp.var(jnp.einsum("ni,nj->nij", Z, Z), axis=0))
    for b in (2, 5):
        index = jax.random.randint(KEY, (4000, b), 0, 30)
        estimates = jax.vmap(lambda i: jnp.stack(norms(Batch(Z[i], noise, 30), W)))(index)
        expected = jnp.stack([variance / b, jnp.sum(jnp.square(F))]) / 3
        error = np.std(estimates, axis=0) / np.sqrt(len(estimates))
        assert np.all(np.abs(np.mean(estimates, axis=0) - expected) < 4.0 * error)
    variance, size = norms(Batch(Z[:1], noise, 30), W)  # a single row has no sample variance
    np.testing.assert_allclose(variance / size, 4.0)


def test_a_record_of_a_bad_fit_warns_once(x64):
    unit = jnp.ones(())
    near = FitRecord.empty(unit.dtype)._replace(num_batches=jnp.array(2046), eigenvalue=1.4 * unit)
    near = near._replace(square=1.97 * unit)
    update = jax.jit(lambda record: record.updated(1.4 * unit, (unit, unit), 10.0))
    record = update(near)
    jax.effects_barrier()  # not yet due
    with pytest.warns(RuntimeWarning, match=r"mean eigenvalue of A\^-1 F is 1\.40, where it must"):
        record = update(record)
        jax.effects_barrier()
    update(record)
    jax.effects_barrier()
    good = near._replace(num_batches=jnp.array(2047), eigenvalue=1.15 * unit)
    update(good)
    jax.vmap(lambda record: record.updated(unit, (unit, unit), 10.0))(
        jax.tree.map(lambda a: a[None], good)
    )
    jax.effects_barrier()
    np.testing.assert_allclose(record.standard_error, np.sqrt(0.01 / 2000), rtol=0.02)


def numbers(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.filterwarnings("ignore:a covariance matrix:RuntimeWarning")
@pytest.mark.parametrize("logdet", [Variational(), Compositional(), Minimax()])
def test_values_that_are_not_finite_do_not_change_the_state(logdet, x64):
    rng = np.random.default_rng(0)
    clean = [jnp.array(rng.normal(size=(6, 4))) for _ in range(4)]
    bad = clean[0].at[2, 1].set(jnp.nan)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def step(noise: Array, weights: Array, Z: Array, mutable: Any) -> tuple[Array, Any]:
        def model() -> None:
            gp = sgp.FeatureSpaceGP(lambda Z: Z, Z, noise, weights, num_data=20, logdet=logdet)
            numpyro.sample("y", gp, obs=jnp.ones(6))

        substituted = numpyro.handlers.substitute(model, data=jax.tree.map(lambda a: a, mutable))
        trace = numpyro.handlers.trace(substituted).get_trace()
        site = trace["log_determinant"]["value"]
        return trace["y"]["fn"].log_prob(jnp.ones(6)), {"log_determinant": site}

    def losses(batches: list[Array], noises: list[float]) -> tuple[list[float], Any]:
        mutable: Any = {}
        values = []
        for Z, noise in zip(batches, noises, strict=True):
            (value, mutable), gradients = step(jnp.array(noise), jnp.zeros(4), Z, mutable)
            assert all(np.isfinite(leaf).all() for leaf in numbers(mutable))
            good = np.isfinite(Z).all() and np.isfinite(noise) and noise > 0.0
            # A failure is NaN in the value and in all gradients.
            check = np.isfinite if good else np.isnan
            assert all(check(leaf).all() for leaf in numbers((value, gradients)))
            if good:
                values.append(float(value))
        return values, mutable

    expected, state = losses(clean, [0.3] * 4)
    dirty = [*clean[:2], bad, *clean[1:2] * 4, *clean[2:]]
    values, same = losses(dirty, [0.3, 0.3, 0.3, np.nan, np.inf, -1.0, 0.0, 0.3, 0.3])
    assert values == expected
    jax.tree.map(np.testing.assert_array_equal, state, same)
    # If the first batches are not finite, the next batch initializes the state.
    values, _ = losses([bad, bad, *clean], [0.3] * 6)
    np.testing.assert_allclose(values[-1], expected[-1], rtol=0.5)
