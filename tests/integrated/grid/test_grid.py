"""Grids against dense algebra: eigenvectors, the filter and rows."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.scipy.stats import multivariate_normal

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels.kernel import Sum

K = sgp.kernels
RNG = np.random.default_rng(0)
TIMES = np.array([0.0, 2.0, 0.7, 2.0, 5.5, 4.1])[:, None]  # not in order, and one twice
PLACES = RNG.uniform(0.0, 1.0, (4, 2))
LEVELS = np.array([0.0, 1.0, 3.0])[:, None]
Y = RNG.normal(size=(6, 4))
OBSERVED = RNG.uniform(size=(6, 4)) > 0.3
OBSERVED[4] = False
NEW_TIMES = np.array([3.0, -1.0, 2.0, 8.0])[:, None]
NEW_PLACES = np.concatenate([RNG.uniform(0.0, 1.0, (2, 2)), PLACES[2:3]])
NEW_ROWS = np.concatenate([NEW_TIMES, RNG.uniform(0.0, 1.0, (4, 2))], axis=1)


def product(scale: Any = 1.0) -> list[Any]:
    of_time = K.Matern32(2.0 * scale) + 0.5 * K.Harmonic(1.5, quality=3.0)
    return [of_time, K.Matern52(0.4 * scale, 0.8)]


def products(scale: Any = 1.0) -> list[Any]:
    return [product(scale), [K.Cosine(3.0, 0.5 * scale) * K.Matern12(9.0), K.RBF(0.7)]]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "eigenvectors": (product, {}),
    "eigenvectors, noise of places": (product, {"noise": 0.1 + 0.1 * np.arange(4.0)[None]}),
    "eigenvectors, noise of times": (product, {"noise": 0.1 + 0.1 * np.arange(6.0)[:, None]}),
    "filter": (products, {"estimator": sgp.estimators.StateSpace()}),
    "filter, gaps": (
        products,
        {
            "estimator": sgp.estimators.StateSpace(),
            "observed": OBSERVED,
            "noise": RNG.uniform(0.1, 0.5, (6, 4)),
        },
    ),
    "rows": (products, {}),
    "rows, gaps": (product, {"observed": OBSERVED, "noise": RNG.uniform(0.1, 0.5, (6, 4))}),
}


QUICK = ("eigenvectors, noise of places", "filter, gaps", "rows, gaps")
MARKED = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]


@pytest.fixture(params=MARKED)
def case(request: Any, x64: None) -> tuple[Any, dict[str, Any]]:
    return CASES[request.param]


def gp_of(case: tuple[Any, dict[str, Any]], scale: Any = 1.0, level: Any = 0.3) -> sgp.GridGP:
    kernels, options = case
    options = dict(options)
    noise = options.pop("noise", 0.2)
    mean = lambda rows: level * jnp.sin(rows[:, 0]) + rows[:, 2]  # noqa: E731
    return sgp.GridGP(kernels(scale), [TIMES, PLACES], scale * noise, mean=mean, **options)


@jax.jit
def _moments(kernel: Any, H: Array, residual: Array, X: Array, rows: Array) -> Any:
    between = kernel(rows, X)
    mean = between @ jnp.linalg.solve(H, residual)
    return mean, kernel(rows, rows) - between @ jnp.linalg.solve(H, between.T)


class Dense:
    """The same model by matrices of all cells."""

    def __init__(self, gp: sgp.GridGP, y: Array) -> None:
        observed = np.ones(y.shape, bool) if gp.observed is None else np.asarray(gp.observed)
        self.index, self.gp = np.flatnonzero(observed), gp
        noise = jnp.broadcast_to(gp.noise_variance, y.shape).ravel()[self.index]
        self.X = gp.X[self.index]
        self.H = gp.kernel(self.X, self.X) + jnp.diag(noise)
        self.residual = y.ravel()[self.index] - gp.mean_function(self.X)

    def log_density(self) -> Array:
        return multivariate_normal.logpdf(self.residual, jnp.zeros(len(self.index)), self.H)

    def moments(self, rows: Any, kernel: Any = None) -> tuple[Array, Array]:
        """Without the mean function, for a component."""
        rows = jnp.asarray(rows)
        mean = self.gp.mean_function(rows) if kernel is None else 0.0
        kernel = self.gp.kernel if kernel is None else kernel
        of_f, covariance = _moments(kernel, self.H, self.residual, self.X, rows)
        return mean + of_f, covariance


def rows_of(times: Any, places: Any) -> np.ndarray:
    return np.array([[*t, *p] for t, p in itertools.product(times, places)])


def same(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_density_and_derivatives(case: Any) -> None:
    arguments = 1.1, 0.4, jnp.asarray(Y)

    def ours(scale: Any, level: Any, y: Array) -> Array:
        return gp_of(case, scale, level).log_prob(y)

    def dense(scale: Any, level: Any, y: Array) -> Array:
        return Dense(gp_of(case, scale, level), y).log_density()

    actual, expected = (
        jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2)))(*arguments)
        for function in (ours, dense)
    )
    jax.tree.map(same, actual, expected)
    actual, expected = (
        jax.jit(jax.hessian(lambda x, function=function: function(x[0], x[1], jnp.asarray(Y))))(
            jnp.array([1.1, 0.4])
        )
        for function in (ours, dense)
    )
    same(actual, expected, 1e-7)
    several = gp_of(case).log_prob(jnp.stack([Y, 2.0 * Y])[None])
    same(several[0], [gp_of(case).log_prob(Y), gp_of(case).log_prob(2.0 * Y)])


@pytest.mark.slow
def test_moments(case: Any) -> None:
    gp = gp_of(case)
    posterior, dense = gp.condition(Y), Dense(gp, Y)
    for times, places in ((TIMES, PLACES), (NEW_TIMES, NEW_PLACES)):
        mean, covariance = dense.moments(rows_of(times, places))
        shape = len(times), len(places)
        same(posterior.mean([times, places]), mean.reshape(shape))
        same(posterior.variance([times, places]), jnp.diag(covariance).reshape(shape))
        rows = rows_of(times, places)
        same(posterior.mean(rows), mean)
        same(posterior.variance(rows), jnp.diag(covariance))
        same(jax.jit(lambda X: posterior.variance(X))(jnp.asarray(rows)), jnp.diag(covariance))
    mean, covariance = dense.moments(NEW_ROWS)
    same(posterior.mean(NEW_ROWS), mean)
    same(posterior.covariance(NEW_ROWS), covariance)
    same(posterior.predictive(NEW_ROWS, 0.3).variance, jnp.diag(covariance) + 0.3)
    at_data = posterior.at_data()
    mean, covariance = dense.moments(gp.X)
    same(at_data.loc, mean.reshape(Y.shape))
    same(at_data.variance, jnp.diag(covariance).reshape(Y.shape) + gp.noise_variance)


@pytest.mark.parametrize("name", ["time", "term"])
def test_components(case: Any, name: str) -> None:
    gp = gp_of(case)
    is_sum = isinstance(gp.kernel, Sum)
    if name == "term":
        if not is_sum:
            pytest.skip("the kernel has one product")
        select = lambda kernel: kernel.right  # noqa: E731
    elif is_sum:
        select = lambda kernel: kernel.left.left.kernel.right  # noqa: E731
    else:
        select = lambda kernel: kernel.left.kernel.right  # noqa: E731
    posterior, dense = gp.condition(Y).component(select), Dense(gp, Y)
    mean, covariance = dense.moments(NEW_ROWS, gp.kernel.component(select(gp.kernel)))
    same(posterior.mean(NEW_ROWS), mean)
    same(posterior.variance(NEW_ROWS), jnp.diag(covariance))
    same(posterior.covariance(NEW_ROWS), covariance)


@pytest.mark.slow
def test_leave_one_out(case: Any) -> None:
    gp = gp_of(case)
    loo, dense = gp.condition(Y).leave_one_out(), Dense(gp, Y)
    inverse = jnp.linalg.inv(dense.H)
    precision = jnp.diag(inverse)
    loc = Y.ravel()[dense.index] - inverse @ dense.residual / precision
    same(loo.loc.ravel()[dense.index], loc)
    same(loo.scale.ravel()[dense.index], precision**-0.5)
    at_data = gp.condition(Y).at_data()
    hidden = np.setdiff1d(np.arange(Y.size), dense.index)
    same(loo.loc.ravel()[hidden], at_data.loc.ravel()[hidden])


@pytest.mark.slow
def test_joint_draws(case: Any) -> None:
    gp, num = gp_of(case), 4000
    posterior, dense = gp.condition(Y), Dense(gp, Y)
    axes = [NEW_TIMES[:3], NEW_PLACES[1:]]
    mean, covariance = dense.moments(rows_of(*axes))
    for key, inputs in ((0, axes), (1, rows_of(*axes))):
        draws = posterior.sample(jax.random.key(key), inputs, num).reshape(num, -1)
        scale = jnp.sqrt(jnp.diag(covariance))
        assert jnp.max(jnp.abs(jnp.mean(draws, axis=0) - mean) / scale) < 4.5 / num**0.5
        error = jnp.cov(draws, rowvar=False) - covariance
        spread = jnp.sqrt((covariance**2 + jnp.outer(scale, scale) ** 2) / num)
        assert jnp.max(jnp.abs(error) / spread) < 4.5
    prior = gp.sample(jax.random.key(2), (num,)).reshape(num, -1)
    cells = gp.kernel(gp.X, gp.X) + jnp.diag(jnp.broadcast_to(gp.noise_variance, Y.shape).ravel())
    scale = jnp.sqrt(jnp.diag(cells))
    same(scale.reshape(Y.shape), jnp.sqrt(gp.variance))
    spread = jnp.sqrt((cells**2 + jnp.outer(scale, scale) ** 2) / num)
    assert jnp.max(jnp.abs(jnp.cov(prior, rowvar=False) - cells) / spread) < 4.5
    assert jnp.max(jnp.abs(jnp.mean(prior, axis=0) - gp.mean.ravel()) / scale) < 4.5 / num**0.5


@pytest.mark.slow
def test_functions(case: Any) -> None:
    gp, num = gp_of(case), 2000
    posterior, dense = gp.condition(Y), Dense(gp, Y)
    functions = posterior.sample_functions(jax.random.key(0), num, num_features=500)
    draws = functions(NEW_ROWS)
    mean, covariance = dense.moments(NEW_ROWS)
    scale = jnp.sqrt(jnp.diag(covariance))
    assert jnp.max(jnp.abs(jnp.mean(draws, axis=0) - mean) / scale) < 4.5 / num**0.5
    np.testing.assert_allclose(jnp.std(draws, axis=0), scale, rtol=0.15)


@pytest.mark.slow
def test_three_axes(x64: None) -> None:
    y = RNG.normal(size=(3, 6, 4))
    inputs = [LEVELS, TIMES, PLACES]
    kernels = [K.Coregion(np.eye(4)[:, :2], np.ones(4)), *product()]
    observed = RNG.uniform(size=y.shape) > 0.2
    filtered = sgp.GridGP(
        kernels, inputs, 0.3, observed=observed, estimator=sgp.estimators.StateSpace()
    )
    for gp in (sgp.GridGP(kernels, inputs, 0.3), filtered):
        posterior, dense = gp.condition(y), Dense(gp, y)
        same(gp.log_prob(y), dense.log_density())
        axes = [LEVELS[1:], NEW_TIMES, NEW_PLACES]
        rows = np.array([np.concatenate(cell) for cell in itertools.product(*axes)])
        mean, covariance = dense.moments(rows)
        same(posterior.mean(axes).ravel(), mean)
        same(posterior.variance(axes).ravel(), jnp.diag(covariance))
        same(posterior.variance(rows), jnp.diag(covariance))


@pytest.mark.slow
def test_one_axis_is_a_gaussian_process(x64: None) -> None:
    y = Y[:, 0]
    for estimator in (None, sgp.estimators.StateSpace()):
        grid = sgp.GridGP([K.Matern32(2.0)], [TIMES], 0.2, estimator=estimator)
        gp = sgp.GaussianProcess(K.Matern32(2.0), TIMES, 0.2)
        same(grid.log_prob(y), gp.log_prob(y))
        same(grid.condition(y).mean(NEW_TIMES), gp.condition(y).mean(NEW_TIMES))
        same(grid.condition(y).variance([NEW_TIMES]), gp.condition(y).variance(NEW_TIMES))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "rows" not in name])
def test_single_precision(name: str) -> None:
    results = []
    for enabled in (True, False):
        with jax.enable_x64(enabled):
            gp = gp_of(CASES[name])
            posterior = gp.condition(Y)
            mean = posterior.mean([NEW_TIMES, NEW_PLACES])
            assert mean.dtype == (jnp.float64 if enabled else jnp.float32)
            variance = posterior.variance([NEW_TIMES, NEW_PLACES])
            results.append([np.asarray(gp.log_prob(Y)), np.asarray(mean), np.asarray(variance)])
    for exact, rounded in zip(*results, strict=True):
        np.testing.assert_allclose(rounded, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_rows_in_parts(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gp = gp_of(CASES["filter, gaps"])
    rows = np.concatenate([NEW_ROWS, rows_of(TIMES, PLACES)])[::-1]
    expected = [gp.condition(Y).mean(rows), gp.condition(Y).variance(rows)]
    monkeypatch.setattr("numpyro_scalegp.integrated.grid.posterior._MOST_VALUES", 20)
    same([gp.condition(Y).mean(rows), gp.condition(Y).variance(rows)], expected)


@pytest.mark.slow
def test_observations_that_are_hidden_have_no_effect(x64: None) -> None:
    for name in ("filter, gaps", "rows, gaps"):
        gp = gp_of(CASES[name])
        changed = np.where(OBSERVED, Y, np.nan)
        same(gp.log_prob(changed), gp.log_prob(Y))
        same(gp.condition(changed).mean(NEW_ROWS), gp.condition(Y).mean(NEW_ROWS))
        hidden = jax.jit(lambda mask, gp=gp, name=name: gp_with(name, mask).log_prob(Y))(OBSERVED)
        same(hidden, gp.log_prob(Y))
    whole = sgp.GridGP(product(), [TIMES, PLACES], 0.2, observed=np.ones(Y.shape, bool))
    same(whole.log_prob(Y), sgp.GridGP(product(), [TIMES, PLACES], 0.2).log_prob(Y))


def gp_with(name: str, observed: Array) -> sgp.GridGP:
    kernels, options = CASES[name]
    return gp_of((kernels, {**options, "observed": observed}))


def test_a_row_at_a_time_is_a_model_of_the_same_noise(x64: None) -> None:
    values = np.arange(4.0)[None] + 0.1
    full = np.broadcast_to(values, Y.shape)
    along, each = (sgp.GridGP(product(), [TIMES, PLACES], noise) for noise in (values, full))
    same(along.log_prob(Y), each.log_prob(Y))


grid = functools.partial(sgp.GridGP, [K.RBF(1.0), K.Matern32(1.0)], [TIMES, PLACES])
outputs = K.Coregion(np.eye(3)[:, :1], np.ones(3))
BAD_CALLS: list[tuple[str, Any, str]] = [
    ("one kernel", lambda: sgp.GridGP(K.RBF(1.0), [TIMES], 0.1), "`kernels` must be a sequence"),
    ("an array", lambda: sgp.GridGP([K.RBF(1.0)], TIMES, 0.1), "`inputs` must be a sequence with"),
    ("few kernels", lambda: sgp.GridGP([K.RBF(1.0)], [TIMES, PLACES], 0.1), "each of the 2 axes"),
    ("few axes", lambda: grid(0.1).condition(Y).mean([TIMES]), "`Xs` must have the inputs of 2"),
    (
        "columns",
        lambda: grid(0.1).condition(Y).mean([PLACES, PLACES]),
        r"`Xs\[0\]` must have shape",
    ),
    (
        "vectors",
        lambda: sgp.GridGP([K.RBF(1.0)], [TIMES[:, 0]], 0.1),
        r"`inputs\[0\]` must have",
    ),
    ("NaN in inputs", lambda: sgp.GridGP([K.RBF(1.0)], [TIMES * np.nan], 0.1), r"`inputs\[0\]`"),
    ("shape of Y", lambda: grid(0.1).log_prob(Y.T), r"`Y` must have shape \(6, 4\), got \(4, 6\)"),
    ("NaN in Y", lambda: grid(0.1).log_prob(Y * np.nan), "observed=~jnp.isnan"),
    ("noise of places", lambda: grid(np.ones(4)), r"must have shape \(\) or \(1 or 6, 1 or 4\)"),
    ("negative noise", lambda: grid(-0.1), "`noise_variance` must be positive"),
    ("mask", lambda: grid(0.1, observed=np.ones((4, 6), bool)), "`observed` must have shape"),
    ("empty mask", lambda: grid(0.1, observed=np.zeros((6, 4), bool)), "at least one cell"),
    ("mean", lambda: grid(0.1, mean=np.ones(4)), "a number, one for each cell, or a callable"),
    ("mean of rows", lambda: grid(0.1, mean=lambda X: X).log_prob(Y), "`mean` must map inputs"),
    (
        "no time",
        lambda: sgp.GridGP([K.RBF(1.0)], [TIMES], 0.1, estimator=sgp.estimators.StateSpace()),
        "needs an axis whose kernel has a state-space form",
    ),
    (
        "category",
        lambda: sgp.GridGP([outputs], [TIMES], 0.1),
        r"`inputs\[0\]` must hold",
    ),
    (
        "new category",
        lambda: (
            sgp.GridGP([outputs], [np.arange(3.0)[:, None]], 0.1)
            .condition(np.ones(3))
            .mean([np.array([[3.0]])])
        ),
        r"`Xs\[0\]` must hold the kernel's categories",
    ),
    (
        "batch",
        lambda: sgp.GridGP([K.RBF(np.ones((2, 1)))], [TIMES], 0.1),
        r"`kernels\[0\]` must be one",
    ),
    ("noise at rows", lambda: grid(np.ones((6, 4))).condition(Y).predictive(NEW_ROWS), "must be g"),
    ("mini-batch", lambda: grid(0.1).condition(Y).predictive(NEW_ROWS, np.ones(3)), "must have sh"),
]


@pytest.mark.parametrize(
    ("call", "message"), [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS]
)
def test_bad_input(call: Any, message: str, unchecked: None) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.slow
def test_eigenvalues_keep_their_digits_in_single_precision() -> None:
    axis = np.linspace(0.0, 1.0, 40, dtype=np.float32)[:, None]
    noise = np.float32(1e-4)

    def density(noise: Any, y: Any) -> Array:
        kernel = K.RBF(np.float32(0.3))
        return sgp.GridGP([kernel, kernel], [axis, axis], noise).log_prob(y)

    with jax.enable_x64(True):
        kernel = K.RBF(np.float64(np.float32(0.3)))
        gp = sgp.GridGP([kernel, kernel], [axis.astype(float)] * 2, np.float64(noise))
        y = np.asarray(gp.sample(jax.random.key(0))).astype(np.float32)
        exact = jax.value_and_grad(
            lambda noise: sgp.GridGP([kernel, kernel], [axis.astype(float)] * 2, noise).log_prob(
                y.astype(float)
            )
        )(np.float64(noise))
    np.testing.assert_allclose(jax.value_and_grad(density)(noise, y), exact, rtol=1e-4)
    single = sgp.GridGP([K.RBF(np.float32(0.3))] * 2, [axis, axis], noise)
    with pytest.warns(RuntimeWarning, match="few digits left"):
        posterior = single.condition(y)
    assert posterior.diagnostics["digits"] < 1.0


def test_covariance_on_a_grid(x64: None) -> None:
    for name in ("eigenvectors, noise of places", "rows, gaps"):
        posterior = gp_of(CASES[name]).condition(Y)
        covariance = posterior.covariance([NEW_TIMES, NEW_PLACES])
        rows = posterior.covariance(rows_of(NEW_TIMES, NEW_PLACES))
        same(covariance.reshape(12, 12), rows)
        assert covariance.shape == (4, 3, 4, 3)


@pytest.mark.slow
def test_many_scattered_rows(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = gp_of(CASES["filter, gaps"]).condition(Y)
    monkeypatch.setattr("numpyro_scalegp.integrated.grid.posterior._MOST_VALUES", 20)
    draws = posterior.sample(jax.random.key(0), NEW_ROWS, 3000)
    scale = jnp.sqrt(posterior.variance(NEW_ROWS))
    error = jnp.mean(draws, axis=0) - posterior.mean(NEW_ROWS)
    assert jnp.max(jnp.abs(error) / scale) < 4.5 / 3000**0.5
    np.testing.assert_allclose(jnp.std(draws, axis=0), scale, rtol=0.08)


@pytest.mark.filterwarnings("error")
def test_equal_times_are_not_coarse(x64: None) -> None:
    times, places = np.full((2, 1), 2.0), np.zeros((2, 1))
    kernels = [K.Matern32(1.0), K.RBF(1.0)]
    filtered, rows = (
        sgp.GridGP(kernels, [times, places], 0.1, estimator=estimator).log_prob(np.ones((2, 2)))
        for estimator in (sgp.estimators.StateSpace(), sgp.estimators.Vecchia(3))
    )
    same(filtered, rows)
