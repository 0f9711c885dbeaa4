import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from optax import adam

import numpyro_scalegp as sgp
from numpyro_scalegp.terms import HilbertSpaceTerm, SparseTerm

pytestmark = pytest.mark.usefixtures("x64")
TIMES = np.linspace(0.0, 10.0, 40)
FIXED = {"lengthscale": dist.LogNormal(np.log(2.0), 0.05)}


def prior_draws(term, X, num=4000, **arguments):
    """Draws of all sites, at a fixed lengthscale and amplitude."""
    values = {f"{term.name}_lengthscale": jnp.array(2.0), f"{term.name}_amplitude": 1.5}
    fixed = handlers.substitute(lambda: term(X, **arguments), data=values)
    return Predictive(fixed, num_samples=num)(jax.random.key(0))


@pytest.mark.parametrize("kind", [HilbertSpaceTerm, SparseTerm])
def test_prior_covariance_is_that_of_the_kernel(kind):
    term = kind("f", TIMES, **FIXED)
    values = prior_draws(term, TIMES[::8])["f"]
    kernel = sgp.kernels.Matern52(2.0, 1.5**2)
    expected = kernel(TIMES[::8, None], TIMES[::8, None])
    # The standard error of a covariance of normal draws is at most the variance times sqrt(2 / n).
    np.testing.assert_allclose(
        np.cov(values.T), expected, atol=0.03 + 4.0 * 2.25 * np.sqrt(2 / 4000)
    )


@pytest.mark.parametrize("constraint", [None, "positive", "increasing", "decreasing"])
@pytest.mark.parametrize("num_groups", [None, 3])
def test_values_at_new_inputs_use_the_basis_of_the_data(constraint, num_groups):
    """Predictions for a few rows are equal to the predictions for all rows."""
    term = HilbertSpaceTerm("f", TIMES, constraint=constraint, num_groups=num_groups)
    group = {} if num_groups is None else {"group": np.arange(40) % 3}
    draws = Predictive(lambda: term(TIMES, **group), num_samples=5)(jax.random.key(0))
    assert draws["f_weights"].shape == (5, term.num_basis)
    few = {name: value[7:9] for name, value in group.items()}
    at_few = term.values(draws, TIMES[7:9], **few)
    np.testing.assert_allclose(at_few, draws["f"][:, 7:9], rtol=1e-8, atol=1e-10)
    # Draws of the term alone equal a model's predictions.
    inside = Predictive(lambda: term(TIMES[7:9, None], **few), draws)(jax.random.key(1))["f"]
    np.testing.assert_allclose(inside, at_few, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_constraints_hold():
    positive, increasing, decreasing = (
        Predictive(lambda term=term: term(TIMES), num_samples=20)(jax.random.key(0))["f"]
        for term in (
            HilbertSpaceTerm("f", TIMES, constraint=name)
            for name in ("positive", "increasing", "decreasing")
        )
    )
    assert np.all(positive > 0.0)
    assert np.all(np.diff(increasing, axis=1) > 0.0)
    np.testing.assert_allclose(increasing[:, 0], 0.0, atol=1e-12)
    np.testing.assert_allclose(decreasing, -increasing, rtol=1e-6)
    assert np.all(
        prior_draws(SparseTerm("f", TIMES, positive=True, **FIXED), TIMES, num=20)["f"] > 0.0
    )


def test_an_increasing_term_is_an_integral():
    """Its slope is rise times exp(f) over the range, for f of the same weights."""
    term = HilbertSpaceTerm("f", TIMES, constraint="increasing", **FIXED)
    plain = HilbertSpaceTerm("f", TIMES, **FIXED)
    draws = prior_draws(term, TIMES, num=3)
    fine = np.linspace(0.0, 10.0, 5001)
    slopes = draws["f_rise"][:, None] / 10.0 * np.exp(plain.values(draws, fine))
    integral = np.cumsum((slopes[:, 1:] + slopes[:, :-1]) * 0.001, axis=1)
    values = term.values(draws, fine[1::50])
    np.testing.assert_allclose(values, integral[:, ::50], atol=1e-3 * integral.max())


@pytest.mark.parametrize("n", [30, 3000])
def test_the_default_basis_does_not_grow_with_the_data(n):
    x = np.random.default_rng(0).uniform(0.0, 10.0, n)
    assert HilbertSpaceTerm("f", x).num_basis < 300
    assert HilbertSpaceTerm("f", np.stack([x, x[::-1]], axis=1)).num_basis < 2000


def test_groups_share_a_function_and_deviate_by_their_amplitudes():
    term = HilbertSpaceTerm("f", TIMES, num_groups=2, **FIXED)
    group = np.array([0, 1, 1])
    draws = Predictive(lambda: term(TIMES[[3, 3, 3]], group), num_samples=4)(jax.random.key(0))
    np.testing.assert_allclose(draws["f"][:, 1], draws["f"][:, 2], rtol=1e-12)
    without = draws | {"f_group_amplitude": jnp.zeros((4, 2))}
    common = term.values(without, TIMES[[3, 3, 3]], group)
    np.testing.assert_allclose(common[:, 0], common[:, 1], rtol=1e-12)
    of_second = {"f_group_amplitude": draws["f_group_amplitude"].at[:, 0].set(0.0)}
    np.testing.assert_allclose(
        term.values(draws | of_second, TIMES[[3, 3, 3]], group)[:, 1], draws["f"][:, 1], rtol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [HilbertSpaceTerm, SparseTerm])
def test_a_fit_by_svi_in_float32(kind):
    """A varying coefficient is recovered, inside and outside of `jax.jit`."""
    with jax.enable_x64(False):
        generator = np.random.default_rng(0)
        time = generator.uniform(0.0, 10.0, 400).astype(np.float32)
        price = generator.normal(size=400).astype(np.float32)
        y = np.sin(time) * price + 0.1 * generator.normal(size=400)
        effect = kind("effect", time, **FIXED)

        def model(time, price, y=None):
            mean = effect(time) * price
            with numpyro.plate("rows", len(time)):
                numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)

        guide = AutoNormal(model)
        svi = SVI(model, guide, adam(0.02), Trace_ELBO())
        result = svi.run(jax.random.key(0), 1500, time, price, y, progress_bar=False)
        draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(100,))
        new = np.linspace(0.5, 9.5, 30, dtype=np.float32)
        values = jax.jit(lambda draws: effect.values(draws, new))(draws)
        assert values.dtype == np.float32
        assert np.sqrt(np.mean((values.mean(axis=0) - np.sin(new)) ** 2)) < 0.1


def test_a_box_of_two_columns_and_a_prior_for_each():
    X = np.random.default_rng(0).uniform(-1.0, 1.0, (50, 2)) * [1.0, 100.0]
    term = HilbertSpaceTerm(
        "f", X, lengthscale=dist.LogNormal(jnp.log(jnp.array([1.0, 100.0])), 0.1).to_event(1)
    )
    assert term.box[1, 1] > 100.0 > 10.0 > term.box[1, 0]
    assert handlers.seed(term, jax.random.key(0))(X).shape == (50,)


def test_errors():
    term = HilbertSpaceTerm("f", TIMES)
    in_groups = HilbertSpaceTerm("f", TIMES, num_groups=2)
    seeded, seeded_groups = (handlers.seed(each, jax.random.key(0)) for each in (term, in_groups))
    with pytest.raises(ValueError, match="outside of the box"):
        seeded(np.array([1e3]))
    with pytest.raises(ValueError, match="outside of the box"):
        handlers.seed(HilbertSpaceTerm("f", TIMES, constraint="increasing"), jax.random.key(0))(
            np.array([1e3])
        )
    with pytest.raises(ValueError, match="`group` needs a term with groups"):
        seeded(TIMES, np.zeros(40, int))
    with pytest.raises(ValueError, match="`group` must say the group"):
        seeded_groups(TIMES)
    with pytest.raises(ValueError, match="`group` must be 40 integers"):
        seeded_groups(TIMES, np.zeros(3, int))
    with pytest.raises(ValueError, match="`group` must lie from 0 to 1, got 0 to 2"):
        seeded_groups(TIMES, np.arange(40) % 3)
    with pytest.raises(ValueError, match="`constraint` must be one of"):
        HilbertSpaceTerm("f", TIMES, constraint="convex")
    with pytest.raises(ValueError, match="needs one input column, got 2"):
        HilbertSpaceTerm("f", np.random.default_rng(0).normal(size=(9, 2)), constraint="increasing")
    plate, error = numpyro.plate("rows", 40), "must be called outside of plates"
    with pytest.raises(ValueError, match=error), handlers.seed(rng_seed=0), plate:
        term(TIMES)
    with pytest.raises(ValueError, match="one leading axis of draws"):
        names = ("lengthscale", "amplitude", "weights")
        term.values({f"f_{name}": jnp.ones((2, 3)) for name in names}, TIMES)
    with pytest.raises(ValueError, match="more than 5000"):
        HilbertSpaceTerm("f", TIMES, lengthscale=dist.HalfCauchy(1.0))
    with pytest.raises(ValueError, match="needs an `X` that varies"):
        HilbertSpaceTerm("f", np.ones(9), constraint="increasing", **FIXED)
    with pytest.raises(ValueError, match="`X` must vary in each column"):
        HilbertSpaceTerm("f", np.ones(9))
    with pytest.raises(ValueError, match="`samples` has no draws of f_weights"):
        term.values({"f_lengthscale": jnp.ones(1), "f_amplitude": jnp.ones(1)}, TIMES)


def test_a_group_out_of_range_is_nan_in_a_compiled_program():
    term = HilbertSpaceTerm("f", TIMES, num_groups=2)
    draws = Predictive(lambda: term(TIMES, np.arange(40) % 2), num_samples=2)(jax.random.key(0))
    values = jax.jit(lambda group: term.values(draws, TIMES[:3], group))(jnp.array([1, 2, -1]))
    assert np.isnan(values).tolist() == [[False, True, True]] * 2


@pytest.mark.usefixtures("unchecked")
def test_series_of_pandas():
    term = HilbertSpaceTerm("f", pd.Series(TIMES))
    assert handlers.seed(term, jax.random.key(0))(pd.Series(TIMES)).shape == (40,)


@pytest.mark.usefixtures("unchecked")
def test_priors_must_be_distributions():
    with pytest.raises(TypeError, match="`lengthscale` must be a distribution"):
        SparseTerm("f", TIMES, lengthscale=1.0)
    with pytest.raises(TypeError, match="`amplitude` must be a distribution"):
        HilbertSpaceTerm("f", TIMES, amplitude=1.0)


@pytest.mark.usefixtures("unchecked")
def test_a_kernel_must_be_a_class():
    with pytest.raises(TypeError, match="`kernel` must be a class such as"):
        SparseTerm("f", TIMES, kernel=sgp.kernels.RBF(1.0))
