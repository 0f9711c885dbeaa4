"""Hyperparameters from exact fits to subsets."""

import functools
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.spatial
from jaxtyping import Array
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from numpyro_scalegp.infer.fits import Fits, _log_density_given_neighbors
from numpyro_scalegp.infer.initialization import _Subsets

ESTIMATOR = sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients(), num_probes=4)


def model(X: Array, y: Array, level: Any = 0.0) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 2.0))
    noise = numpyro.param("noise", jnp.ones(()), constraint=dist.constraints.positive)
    gp = sgp.GaussianProcess(
        sgp.kernels.RBF(lengthscale), X, noise**2, mean=level, estimator=ESTIMATOR, state="solver"
    )
    numpyro.sample("y", gp, obs=y)


def data() -> tuple[Array, Array]:
    """400 points of a function of lengthscale 0.5, standard deviation 1, with noise 0.2."""
    X = jax.random.uniform(jax.random.key(0), (400, 1), minval=-10.0, maxval=10.0)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(0.5), X, 0.04)
    return X, gp.sample(jax.random.key(1))


@functools.cache
def found() -> Any:
    X, y = data()
    return sgp.infer.initial_hyperparameters(
        jax.random.key(2),
        model,
        X,
        y + 3.0,
        3.0,
        num_subsets=2,
        subset_size=80,
        num_steps=120,
        num_refinements=8,
    )


@pytest.mark.slow
def test_finds_the_hyperparameters():
    assert set(found()) == {"lengthscale", "noise"}
    assert 0.3 < found()["lengthscale"] < 0.8
    assert 0.15 < found()["noise"] < 0.27


@pytest.mark.slow
def test_picks_the_best_score_and_says_so():
    scores = {name: mean for name, mean, _ in found().scores}
    assert {"random rows", "random rows with neighbors", "neighborhoods"} <= set(scores)
    assert found().picked == max(scores, key=lambda name: scores[name])
    assert scores[found().picked] >= scores["random rows"]
    assert any(name.endswith(", then all rows") for name in scores)
    for name, mean in scores.items():
        assert f"{name} {mean:.3f} +- " in found().report
    assert found().report.startswith(f"hyperparameters from {found().picked}: ")


@pytest.mark.slow
def test_steps_on_all_rows_raise_the_score_of_a_poor_fit():
    X, y = data()
    poor = functools.partial(
        sgp.infer.initial_hyperparameters, jax.random.key(2), model, X, y,
        num_subsets=1, subset_size=80, num_steps=5,
    )  # fmt: skip
    before, after = poor(num_refinements=0), poor(num_refinements=16)
    first = re.sub(r", \d+ of them$", "", before.picked)
    assert after.picked == f"{first}, then all rows"
    means = {name: mean for name, mean, _ in after.scores}
    assert means[after.picked] > means[first] + 0.1


@pytest.mark.slow
def test_steps_on_all_rows_need_no_random_features():
    class Squared(sgp.kernels.AbstractKernel):
        lengthscale: Array

        def evaluate(self, X: Array, Z: Array) -> Array:
            return jnp.exp(-jnp.square(X / self.lengthscale - Z.T / self.lengthscale))

        def evaluate_diag(self, X: Array) -> Array:
            return jnp.ones(len(X), X.dtype)

    def own(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 2.0))
        numpyro.sample("y", sgp.GaussianProcess(Squared(lengthscale), X, 0.04), obs=y)

    values = sgp.infer.initial_hyperparameters(
        jax.random.key(2), own, *data(), num_subsets=1, subset_size=80, num_refinements=4
    )
    assert any(name.endswith(", then all rows") for name, *_ in values.scores)
    assert 0.5 < values["lengthscale"] < 1.0


def test_scores_are_leave_one_out_densities():
    X, y = data()
    noise = jnp.linspace(0.02, 0.1, 60)
    kernel = sgp.kernels.Matern32(0.7, 1.3)
    rows = jnp.array([3, 0, 59])
    scores = _log_density_given_neighbors(kernel, X[:60], noise, y[:60], rows, 59)
    posterior = sgp.GaussianProcess(kernel, X[:60], noise).condition(y[:60])
    expected = posterior.leave_one_out().log_prob(y[:60])[rows]
    np.testing.assert_allclose(scores, expected, rtol=2e-3, atol=2e-3)
    # In one dimension with this lengthscale, the 20 nearest rows suffice.
    few = _log_density_given_neighbors(kernel, X[:60], noise, y[:60], rows, 20)
    np.testing.assert_allclose(few, expected, atol=0.05)


def test_subsets_are_groups_of_neighbors():
    X = jnp.sort(jax.random.normal(jax.random.key(0), (200, 1)), axis=0)
    subsets = _Subsets(jax.random.key(1), X, jnp.arange(20, 200))
    for group in (1, 8, 40):
        rows = np.sort(np.asarray(subsets.draw(40, group)))
        assert len(set(rows.tolist())) == 40 and rows.min() >= 20
        blocks = 1 + int(np.sum(np.diff(rows) > 1))
        assert blocks <= (40 if group == 1 else 40 // group)
        assert group > 1 or blocks > 10


@pytest.mark.slow
def test_all_rows_are_fitted_at_once_where_they_are_few():
    X, y = data()
    fit = functools.partial(sgp.infer.initial_hyperparameters, num_steps=20)
    fit_all = functools.partial(fit, jax.random.key(3), model, X[:60], y[:60], subset_size=60)
    single, three = fit_all(num_subsets=1), fit_all(num_subsets=3)
    assert single.scores == () and single.report == "hyperparameters from a fit of all 60 rows"
    for name in single:
        np.testing.assert_allclose(three[name], single[name], rtol=1e-5)


def test_copies_and_changes_of_values_are_values():
    values = sgp.infer.Hyperparameters({"noise": 0.1}, "random rows", (("random rows", 1.0, 0.1),))
    assert values.copy().report == values.report
    changed = values | {"noise": 0.2}
    assert isinstance(changed, sgp.infer.Hyperparameters)
    assert (changed["noise"], changed.report) == (0.2, "hyperparameters from given values")
    assert values["noise"] == 0.1


def test_values_are_a_pytree_that_keeps_its_report():
    doubled = jax.jit(lambda values: jax.tree.map(lambda leaf: 2.0 * leaf, values))(found())
    assert doubled.report == found().report
    np.testing.assert_allclose(doubled["noise"], 2.0 * found()["noise"], rtol=1e-6)


@pytest.mark.slow
def test_posterior_of_the_values():
    X, y = data()
    posterior = sgp.posterior(model, found(), X, y + 3.0, 3.0)
    gp = sgp.GaussianProcess(
        sgp.kernels.RBF(found()["lengthscale"]), X, found()["noise"] ** 2, mean=3.0
    )
    expected = gp.condition(y + 3.0).mean(X[:5])
    np.testing.assert_allclose(posterior.mean(X[:5]), expected, atol=0.05)


def scaled(model: Any, X: Array, y: Array) -> dict[str, Array]:
    fits = Fits(jax.random.key(0), model, X, y, (), {}, 0.1)
    return fits.values(fits.starts(jnp.arange(len(y)))[0])


@pytest.mark.slow
def test_starts_from_distances_in_the_data():
    X = jax.random.normal(jax.random.key(0), (200, 6)) * jnp.array([100.0, 1, 1, 1, 1, 0.01])
    y = 50.0 * jax.random.normal(jax.random.key(1), (200,)) + 7.0

    def ard(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1).expand([6]).to_event(1))
        shared = numpyro.sample("shared", dist.LogNormal(0, 1))
        variance = numpyro.sample("variance", dist.LogNormal(0, 1))
        kernel = sgp.kernels.Matern32(lengthscale, variance) + sgp.kernels.RBF(shared).on((0, 1))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise**2, mean=7.0), obs=y)

    values = scaled(ard, X, y)
    deviation = jnp.std(X, axis=0)
    expected = deviation * sgp.infer.median_distance(X / deviation) / np.sqrt(2)
    np.testing.assert_allclose(values["lengthscale"], expected, rtol=0.02)
    of_two = sgp.infer.median_distance(X[:, :2]) / np.sqrt(2)
    np.testing.assert_allclose(values["shared"], of_two, rtol=0.02)
    np.testing.assert_allclose(values["variance"] + 1.0, jnp.var(y), rtol=0.02)
    np.testing.assert_allclose(values["noise"] ** 2, 0.1 * jnp.var(y), rtol=0.02)


@pytest.mark.slow
def test_start_sees_mapped_inputs_and_stays_inside_of_bounds():
    X = jax.random.normal(jax.random.key(0), (100, 2))
    y = X[:, 0]

    def deep(X: Array, y: Array) -> None:
        weights = numpyro.param("weights", 30.0 * jnp.ones((2, 3)))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        bounded = numpyro.sample("bounded", dist.Uniform(0.01, 0.1))
        kernel = sgp.kernels.FeatureMapped(sgp.kernels.RBF(lengthscale), lambda X: X @ weights)
        kernel = kernel + sgp.kernels.Matern52(bounded)
        numpyro.sample("y", sgp.GaussianProcess(kernel, X, 0.1), obs=y)

    values = scaled(deep, X, y)
    np.testing.assert_array_equal(values["weights"], 30.0 * jnp.ones((2, 3)))
    target = sgp.infer.median_distance(X @ values["weights"]) / np.sqrt(2)
    np.testing.assert_allclose(values["lengthscale"], target, rtol=0.02)
    # The distances exceed the bound: the value is close to it, but its gradient does not vanish.
    assert 0.05 < values["bounded"] < 0.0995


@pytest.mark.slow
def test_finds_the_columns_that_matter_among_many():
    X = jax.random.normal(jax.random.key(4), (600, 24))
    y = jnp.sin(2.0 * X[:, 3]) + 0.5 * X[:, 7] + 0.1 * jax.random.normal(jax.random.key(5), (600,))

    def ard(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1).expand([24]).to_event(1))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        gp = sgp.GaussianProcess(sgp.kernels.Matern32(lengthscale), X, noise**2)
        numpyro.sample("y", gp, obs=y)

    values = sgp.infer.initial_hyperparameters(
        jax.random.key(6), ard, X, y, subset_size=200, num_subsets=1, num_refinements=0
    )
    assert set(np.argsort(values["lengthscale"])[:2].tolist()) == {3, 7}
    # Distances in 24 columns are far from the prior median of the lengthscale.
    assert "random rows, from the priors' medians" in [name for name, _, _ in values.scores]
    assert max(mean for _, mean, _ in values.scores) > -0.6


def test_needs_a_collapsed_gp():
    X, y = data()

    def latent(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        numpyro.sample("y", dist.Normal(f, numpyro.sample("noise", dist.LogNormal())), obs=y)

    with pytest.raises(ValueError, match="must have an observed `GaussianProcess` site"):
        sgp.infer.initial_hyperparameters(jax.random.key(0), latent, X, y, subset_size=10)


@pytest.mark.slow
def test_values_start_a_guide():
    X, y = data()
    X, y = X[:50], y[:50]
    values = {"lengthscale": found()["lengthscale"]}
    guide = AutoDelta(model, init_loc_fn=init_to_value(values=values))
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    state = svi.init(jax.random.key(0), X, y, init_params={"noise": found()["noise"]})
    params = svi.get_params(state)
    np.testing.assert_allclose(params["lengthscale_auto_loc"], values["lengthscale"], rtol=1e-5)
    np.testing.assert_allclose(params["noise"], found()["noise"], rtol=1e-5)


def test_rejects_bad_data():
    X, y = map(jnp.asarray, data())
    with pytest.raises(ValueError, match="`y` must be finite, got 1 NaN or infinite"):
        sgp.infer.initial_hyperparameters(jax.random.key(0), model, X, y.at[-1].set(jnp.nan))
    with pytest.raises(ValueError, match="`X` must be finite, got 1 NaN or infinite"):
        sgp.infer.initial_hyperparameters(jax.random.key(0), model, X.at[-1].set(jnp.inf), y)


@pytest.mark.slow
def test_median_distance():
    X = np.random.default_rng(0).normal(size=(60, 5))
    expected = np.median(scipy.spatial.distance.pdist(X))
    np.testing.assert_allclose(sgp.infer.median_distance(X), expected, rtol=1e-5)
    # The squares of these overflow or underflow in float32.
    far = sgp.infer.median_distance(1e25 * jnp.asarray(X, "float32"))
    np.testing.assert_allclose(far / 1e25, expected, rtol=1e-5)
    # The subset is spread over X: the first rows of a sorted X are close together.
    X = np.sort(X, axis=0)
    of_subset = sgp.infer.median_distance(X, max_rows=12)
    np.testing.assert_allclose(of_subset, np.median(scipy.spatial.distance.pdist(X)), rtol=0.3)
    assert sgp.infer.median_distance(X[:12]) < 0.6 * of_subset
    with pytest.raises(ValueError, match="`max_rows` must be at least 2, got 1"):
        sgp.infer.median_distance(X, max_rows=1)
    with pytest.raises(ValueError, match="`X` must have two rows or more, got 1"):
        sgp.infer.median_distance(X[:1])


@pytest.mark.slow
def test_warns_where_the_start_is_never_left():
    X, y = data()

    def loud(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 2.0))
        numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.1), obs=y)

    # The square of the gradient overflows, so that Adam divides by infinity.
    with pytest.warns(RuntimeWarning, match="on 3 of 3 subsets never left their start.*Standardi"):
        sgp.infer.initial_hyperparameters(
            jax.random.key(0),
            loud,
            X,
            1e17 * y,
            num_subsets=1,
            subset_size=5,
            num_steps=2,
            num_refinements=0,
        )


@pytest.mark.slow
def test_starts_from_distances_beside_a_constant_column():
    X = jax.random.normal(jax.random.key(0), (200, 2)) * 1e4
    X = jnp.concatenate([X, jnp.full((200, 1), 0.1)], axis=1)

    def ard(X: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, 0.1), obs=y)

    lengthscale = scaled(ard, X, jnp.sin(X[:, 0]))["lengthscale"]
    assert (np.asarray(lengthscale[:2]) > 3e3).all()
    assert 0.1 < lengthscale[2] < 10.0


@pytest.mark.slow
def test_scores_leave_out_hidden_sites_and_sites_of_other_rows():
    X, y = data()

    def extended(X: Array, y: Array, extra: bool = False) -> None:
        model(X, y)
        if extra:
            with numpyro.handlers.mask(mask=False):
                hidden = sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.01)
                numpyro.sample("hidden", hidden, obs=-5.0 * y)
            unrelated = sgp.GaussianProcess(sgp.kernels.RBF(0.5), data()[0][:30], 0.04)
            numpyro.sample("other", unrelated, obs=data()[1][:30])

    def scores(extra: bool) -> np.ndarray:
        fits = Fits(jax.random.key(0), extended, X, y, (), {"extra": extra}, 0.1)
        params = fits.starts(jnp.arange(80))[0]
        return fits.score(params, jnp.arange(20), 50)

    np.testing.assert_allclose(scores(True), scores(False), rtol=1e-5)


@pytest.mark.slow
def test_steps_on_all_rows_learn_what_a_map_closes_over():
    X, y = data()

    def deep(X: Array, y: Array) -> None:
        slope = numpyro.param("slope", jnp.ones(1))
        kernel = sgp.kernels.FeatureMapped(sgp.kernels.RBF(0.5), lambda X: X * slope)
        numpyro.sample("y", sgp.GaussianProcess(kernel, X, 0.04), obs=y)

    fits = Fits(jax.random.key(0), deep, X, y, (), {}, 0.1)
    start = fits.starts(jnp.arange(60))[0]
    first = next(fits.refine(start, jnp.arange(80), 5))
    assert abs(float(first["slope"][0] - start["slope"][0])) > 0.01


IN_A_NEW_PROCESS = """
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_scalegp as sgp
from tests.compilation import programs

X = np.random.default_rng(0).normal(size=(600, 3)).astype(np.float32)
y = np.sin(X[:, 0])

def model(X, y):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    kernel = sgp.kernels.Matern32(lengthscale)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise**2), obs=y)

sizes = {"subset_size": 150, "num_scored": 50, "num_neighbors": 50, "num_steps": 5}
sgp.infer.initial_hyperparameters(jax.random.key(0), model, X, y, **sizes)
print(programs.number)
"""


@pytest.mark.one_interpreter
def test_few_programs_are_compiled():
    """Each operation that is not part of a larger program is a program that JAX compiles."""
    command = [sys.executable, "-c", IN_A_NEW_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert 0 < int(done.stdout) <= 30, done.stderr
