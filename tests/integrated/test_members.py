"""Batches of Gaussian processes, and rows without a target, against loops and dropped rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.members import SimilarSizeGroup
from tests.conformance import each

G, N, D = 3, 8, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(G, N, D))
Y = RNG.normal(size=(G, N))
LENGTHSCALE = RNG.uniform(0.5, 2.0, size=(G, D))
VARIANCE, NOISE = RNG.uniform(0.5, 2.0, size=G), RNG.uniform(0.1, 0.3, size=G)
MEAN = RNG.normal(size=G)
OBSERVED = RNG.uniform(size=(G, N)) < 0.7
NEW = RNG.normal(size=(G, 4, D))
POINTS = X[0, :3]

ESTIMATORS = [
    ("cholesky", sgp.estimators.Cholesky),
    ("sgpr", lambda: sgp.estimators.SGPR(jnp.array(POINTS))),
]


def process(g, estimator, key, rows=slice(None), observed=None):
    """The process of one group, or of all for g = slice(None)."""
    arrays = (jnp.array(array)[g] for array in (LENGTHSCALE, VARIANCE, NOISE, MEAN))
    lengthscale, variance, noise, mean = arrays
    noise = noise[:, None] if noise.ndim else noise
    options = {"mean": mean, "estimator": estimator, "key": key, "observed": observed}
    kernel = sgp.kernels.RBF(lengthscale, variance)
    return sgp.GaussianProcess(kernel, jnp.array(X)[g][..., rows, :], noise, **options)


@jax.jit
def gradient(gp, y):
    """The gradient in the hyperparameters."""

    def value(kernel, noise):
        gp.kernel, gp.noise_variance = kernel, noise
        return jnp.sum(gp.log_prob(y))

    return jax.tree.leaves(jax.grad(value, (0, 1))(gp.kernel, gp.noise_variance))


def everything(gp, y, new):
    posterior = gp.condition(y)
    loo = posterior.leave_one_out()
    return gp.log_prob(y), posterior.mean(new), posterior.variance(new), loo.loc, loo.scale


@pytest.mark.slow
@each("hidden", [("all", lambda: False), ("some", lambda: True)])
@each("factory", ESTIMATORS)
def test_a_batch_is_a_loop_without_its_hidden_rows(factory, hidden, x64):
    estimator, of_all = factory(), slice(None)
    observed = OBSERVED if hidden() else np.ones_like(OBSERVED)
    y = np.where(observed, Y, np.nan)
    gp = process(of_all, estimator, None, observed=OBSERVED if hidden() else None)
    assert (gp.batch_shape, gp.event_shape) == ((G,), (N,))
    results, derivative = jax.jit(everything)(gp, y, NEW), gradient(gp, y)
    for g in range(G):
        rows = np.flatnonzero(observed[g])
        member = process(g, estimator, None, rows)
        value, *moments, loc, scale = jax.jit(everything)(member, Y[g, rows], NEW[g])
        np.testing.assert_allclose(results[0][g], value, rtol=1e-9)
        for leaf, expected in zip(derivative, gradient(member, Y[g, rows]), strict=True):
            np.testing.assert_allclose(leaf[g].squeeze(), expected, rtol=1e-7, atol=1e-9)
        for moment, expected in zip(results[1:3], moments, strict=True):
            np.testing.assert_allclose(moment[g], expected, rtol=1e-8)
        np.testing.assert_allclose(results[3][g][rows], loc, rtol=1e-8)
        np.testing.assert_allclose(results[4][g][rows], scale, rtol=1e-8)


def test_a_mean_for_each_column_raises(unchecked):
    square = jnp.array(RNG.normal(size=(G, D, D)))
    kernel = sgp.kernels.RBF(jnp.ones((G, 1)))
    right = sgp.GaussianProcess(kernel, square, 0.1, mean=lambda X: X[..., 0])
    np.testing.assert_array_equal(right.mean, square[..., 0])
    with pytest.raises(ValueError, match="one value for each column"):
        _ = sgp.GaussianProcess(kernel, square, 0.1, mean=lambda X: X[:, 0]).mean
    held = jnp.ones((G, D))
    assert sgp.GaussianProcess(kernel, square, 0.1, mean=lambda X: held + X[..., 0]).mean.shape


@pytest.mark.slow
def test_members_are_grouped_by_size(x64):
    sizes = np.array([2, 20, 9, 1, 19, 8])
    observed = RNG.permuted(np.arange(20) < sizes[:, None], axis=1)
    groups = SimilarSizeGroup.of_masks(observed)
    assert [list(group.members) for group in groups] == [[1, 4], [2, 5, 0, 3]]
    assert [group.rows.shape[1] for group in groups] == [20, 9]
    rows, y = RNG.normal(size=(6, 20, D)), np.where(observed, RNG.normal(size=(6, 20)), np.nan)
    for noise in (0.1, sizes[:, None] / 20.0, np.linspace(0.1, 1.0, 20)[None]):

        def total(variance, lengthscale, observed, y=y, noise=noise):
            kernel = sgp.kernels.RBF(lengthscale, variance)
            return jnp.sum(sgp.GaussianProcess(kernel, rows, noise, observed=observed).log_prob(y))

        arguments = jnp.linspace(0.5, 1.5, 6), jnp.array([0.8, 1.3])
        of = jax.jit(jax.value_and_grad(total, (0, 1)))
        padded = of(*arguments, observed)
        concrete = jax.jit(jax.value_and_grad(lambda v, s: total(v, s, observed), (0, 1)))(
            *arguments
        )
        for leaf, expected in zip(jax.tree.leaves(concrete), jax.tree.leaves(padded), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-9)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(0.7), rows, 0.1, observed=observed)
    several = gp.log_prob(np.stack([y, 2.0 * y]))
    np.testing.assert_allclose(several, [gp.log_prob(y), gp.log_prob(2.0 * y)], rtol=1e-10)


@pytest.mark.slow
def test_an_iterative_batch_is_a_loop(x64):
    estimator = sgp.estimators.Pathwise(sgp.solvers.Cholesky(), 4, num_features=16)
    keys = jax.random.split(jax.random.key(0), (G,))
    gp = process(slice(None), estimator, jax.random.key(0))
    results = jax.jit(everything)(gp, Y, NEW)
    loop = jax.jit(
        lambda g: everything(process(g, estimator, keys[g]), jnp.array(Y)[g], jnp.array(NEW)[g])
    )
    for g in range(G):
        expected = loop(g)
        np.testing.assert_allclose(results[0][g], expected[0], rtol=1e-9)
        for place in (1, 2):
            np.testing.assert_allclose(results[place][g], expected[place], rtol=1e-8)


def test_hidden_rows_are_the_same_for_concrete_and_traced_masks(x64):
    y = np.where(OBSERVED[0], Y[0], np.nan)

    def everything(observed, y):
        gp = process(0, sgp.estimators.Cholesky(), None, observed=observed)
        posterior = gp.condition(y)
        return gp.log_prob(y), posterior.mean(NEW[0]), posterior.variance(NEW[0])

    concrete, traced = everything(OBSERVED[0], y), jax.jit(everything)(OBSERVED[0], y)
    rows = np.flatnonzero(OBSERVED[0])
    dropped = process(0, sgp.estimators.Cholesky(), None, rows)
    posterior = dropped.condition(Y[0, rows])
    expected = dropped.log_prob(Y[0, rows]), posterior.mean(NEW[0]), posterior.variance(NEW[0])
    for results in (concrete, traced):
        for leaf, expected_leaf in zip(results, expected, strict=True):
            np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-10)


def test_jitter_does_not_depend_on_hidden_rows():
    """Jitter with a traced mask is the same as without the hidden rows."""
    X = jnp.linspace(0.0, 3.0, 40)[:, None]
    y, observed = jnp.sin(X[:, 0]), np.arange(40) % 5 != 0

    def process(noise, rows=slice(None), **options):
        return sgp.GaussianProcess(sgp.kernels.RBF(1.0), X[rows], noise, **options)

    @jax.jit
    @jax.value_and_grad
    def traced(noise, observed):
        return process(noise, observed=observed).log_prob(y)

    rows = np.flatnonzero(observed)
    dropped = jax.value_and_grad(lambda noise: process(noise, rows).log_prob(y[rows]))
    noise = jnp.float32(1e-7)
    with pytest.warns(RuntimeWarning, match="jitter was added to its diagonal, about"):
        estimate, expected = traced(noise, observed), dropped(noise)
    np.testing.assert_allclose(estimate[0], expected[0], rtol=2e-3)
    np.testing.assert_allclose(noise * estimate[1], noise * expected[1], atol=0.2)
    with pytest.warns(RuntimeWarning, match="jitter was added to its diagonal, about"):
        posterior = jax.jit(lambda o: process(noise, observed=o).condition(y))(observed)
    ratio = posterior.diagnostics["jitter"] / noise
    np.testing.assert_allclose(posterior.diagnostics["jitter_to_noise"], ratio, rtol=1e-5)
    empty = jax.jit(lambda o: process(0.1, observed=o).log_prob(y))(observed & False)
    np.testing.assert_allclose(empty, 0.0, atol=1e-5)


def test_leave_one_out_of_a_hidden_row_is_its_prediction(x64):
    gp = process(slice(None), sgp.estimators.Cholesky(), None, observed=OBSERVED)
    posterior = gp.condition(np.where(OBSERVED, Y, np.nan))
    predictive, left_out = posterior.predictive(X, NOISE[:, None]), posterior.leave_one_out()
    np.testing.assert_allclose(left_out.loc[~OBSERVED], predictive.loc[~OBSERVED])
    np.testing.assert_allclose(left_out.scale[~OBSERVED], predictive.scale[~OBSERVED])
    assert np.all(left_out.scale[OBSERVED] > predictive.scale[OBSERVED])


def test_covariance_of_each_member(x64):
    """Its diagonal is the variance, and a traced mask gives the same."""
    gp = process(slice(None), sgp.estimators.Cholesky(), None, observed=OBSERVED)
    posterior = gp.condition(Y)
    covariance = posterior.covariance(NEW)
    np.testing.assert_allclose(
        jnp.diagonal(covariance, 0, 1, 2), posterior.variance(NEW), rtol=1e-9
    )
    rows = np.flatnonzero(OBSERVED[1])
    member = process(1, sgp.estimators.Cholesky(), None, rows).condition(Y[1, rows])
    np.testing.assert_allclose(covariance[1], member.covariance(NEW[1]), rtol=1e-8)

    @jax.jit
    def traced(observed):
        gp = process(1, sgp.estimators.Cholesky(), None, observed=observed)
        return gp.condition(Y[1]).covariance(NEW[1])

    np.testing.assert_allclose(traced(OBSERVED[1]), covariance[1], rtol=1e-8)


@pytest.mark.slow
def test_draws_have_sample_and_batch_axes():
    gp = process(slice(None), sgp.estimators.Cholesky(), None, observed=OBSERVED)
    assert gp.sample(jax.random.key(0), (2, 4)).shape == (2, 4, G, N)
    assert gp.log_prob(jnp.ones((5, G, N))).shape == (5, G)
    assert gp.log_prob(jnp.ones(N)).shape == (G,)
    assert gp.condition(Y).sample(jax.random.key(1), NEW, 6).shape == (6, G, 4)
    functions = gp.condition(Y).sample_functions(jax.random.key(1), 2, num_features=8)
    assert functions(NEW).shape == functions(NEW[0]).shape == (2, G, 4)


def test_parts_of_a_batch_add_up(x64):
    trend = sgp.kernels.Linear(jnp.array(VARIANCE))
    kernel = sgp.kernels.RBF(jnp.array(LENGTHSCALE)) + trend
    gp = sgp.GaussianProcess(kernel, X, NOISE[:, None], mean=MEAN, observed=OBSERVED)
    posterior = gp.condition(Y)
    parts = [posterior.component(lambda k: k.left), posterior.component(lambda k: k.right)]
    total = sum(component.mean(NEW) for component in parts) + MEAN[:, None]
    np.testing.assert_allclose(total, posterior.mean(NEW), rtol=1e-9)


def test_latent_functions_have_separate_hyperparameters(x64):
    kernel = sgp.kernels.RBF(jnp.array(LENGTHSCALE), jnp.array(VARIANCE))
    prior = sgp.LatentGP(kernel, X)
    assert prior.sample(jax.random.key(0), (2,)).shape == (2, G, N)
    results = prior.log_prob(jnp.stack([Y, 2.0 * Y])), prior.condition(Y).mean(NEW)
    for g in range(G):
        member = sgp.LatentGP(sgp.kernels.RBF(LENGTHSCALE[g], VARIANCE[g]), X[g])
        np.testing.assert_allclose(results[0][0, g], member.log_prob(Y[g]), rtol=1e-9)
        np.testing.assert_allclose(results[0][1, g], member.log_prob(2.0 * Y[g]), rtol=1e-9)
        np.testing.assert_allclose(results[1][g], member.condition(Y[g]).mean(NEW[g]), rtol=1e-6)


@each("points", [("own", lambda: X[:, :3]), ("shared", lambda: POINTS)])
def test_sparse_functions_have_separate_hyperparameters(points, x64):
    loc = RNG.normal(size=(G, 3))
    scale = 0.3 * np.tril(np.ones((G, 3, 3)))
    kernel = sgp.kernels.RBF(jnp.array(LENGTHSCALE), jnp.array(VARIANCE))
    q = sgp.SparseGP(kernel, X, points(), loc, scale)
    assert q.batch_shape == (G,)
    for g in range(G):
        Z = points() if points().ndim == 2 else points()[g]
        member = sgp.SparseGP(
            sgp.kernels.RBF(LENGTHSCALE[g], VARIANCE[g]), X[g], Z, loc[g], scale[g]
        )
        np.testing.assert_allclose(q.mean[g], member.mean, rtol=1e-9)
        np.testing.assert_allclose(q.variance[g], member.variance, rtol=1e-9)
        mean = q.posterior().mean(NEW)[g]
        np.testing.assert_allclose(mean, member.posterior().mean(NEW[g]), rtol=1e-9)


def test_missing_observations_need_a_mask():
    kernel, y = sgp.kernels.RBF(1.0), np.where(OBSERVED[0], Y[0], np.nan)
    with pytest.raises(ValueError, match=r"give `observed=~jnp.isnan\(y\)`"):
        sgp.GaussianProcess(kernel, X[0], 0.1).log_prob(y)
    with pytest.raises(ValueError, match="for at least one row of each member"):
        sgp.GaussianProcess(kernel, X[0], 0.1, observed=np.zeros(N, bool))
    estimator, key = sgp.estimators.SingleSampleRFF(), jax.random.key(0)
    options = {"estimator": estimator, "key": key, "observed": OBSERVED}
    with pytest.raises(ValueError, match="only if the mask is a NumPy array that all"):
        sgp.GaussianProcess(kernel, X, 0.1, **options).log_prob(Y)


def test_shapes_of_a_batch_must_fit():
    kernel = sgp.kernels.RBF(1.0, jnp.ones(3))
    with pytest.raises(ValueError, match=r"`mean` must have shape .* or \(3, 8\), got \(4,\)"):
        sgp.GaussianProcess(kernel, X[0], 0.1, mean=jnp.ones(4))
    with pytest.raises(ValueError, match=r"got \{'kernel': \(3,\), 'X': \(2,\)\}"):
        sgp.GaussianProcess(kernel, X[:2], 0.1)
    # Noise and mean do not make a batch: a column or a row of them is a mistake.
    single_kernel = sgp.kernels.RBF(1.0)
    with pytest.raises(ValueError, match=r"`noise_variance` must have shape \(\) or \(8,\)"):
        sgp.GaussianProcess(single_kernel, X[0], jnp.ones((N, 1)))
    with pytest.raises(ValueError, match=r"`mean` must have shape .*, got \(8, 1\)"):
        sgp.GaussianProcess(single_kernel, X[0], 0.1, mean=jnp.ones((N, 1)))
    with pytest.raises(
        ValueError, match=r"For one value per member write noise_variance\[:, None\]"
    ):
        sgp.GaussianProcess(kernel, X[0], jnp.ones(3))
    with pytest.raises(ValueError, match=r"For one value per row write noise_variance\[None, :\]"):
        sgp.GaussianProcess(sgp.kernels.RBF(1.0, jnp.ones(N)), X[0], jnp.ones(N))
    with pytest.raises(ValueError, match=r"`state` is for one Gaussian process, got a batch"):
        sgp.GaussianProcess(kernel, X[0], 0.1, state="solver")
    with pytest.raises(ValueError, match=r"`loc` must have shape \(3, 2\)"):
        sgp.SparseGP(kernel, X[0], X[0, :2], jnp.zeros(2), jnp.eye(2))
