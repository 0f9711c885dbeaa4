"""Which noise variance `sgp.posterior` uses for new observations, and when it uses none."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import mask

import numpyro_scalegp as sgp

X = jnp.linspace(0.0, 2.0, 5)[:, None]
NEW = X[:3] + 0.1
SHOWN = jnp.array([True, True, False, True, False])


def normal(f, X, y, extra):
    numpyro.sample("y", dist.Normal(f, 0.2).to_event(1), obs=y)


def in_a_plate(f, X, y, extra):
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(f, 0.2), obs=y)


def masked(f, X, y, extra):
    with numpyro.plate("rows", len(X)), mask(mask=jnp.resize(SHOWN, len(X))):
        numpyro.sample("y", dist.Normal(f, 0.2), obs=y)


def beside_a_likelihood_that_is_left_out(f, X, y, extra):
    normal(f, X, y, extra)
    with mask(mask=False):
        numpyro.sample("z", dist.Bernoulli(logits=f).to_event(1), obs=jnp.ones(len(X), int))


def beside_another_function(f, X, y, extra):
    normal(f, X, y, extra)
    g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
    numpyro.sample("z", dist.Normal(g, 0.7).to_event(1), obs=y)


def with_a_factor_of_the_prior(f, X, y, extra):
    normal(f, X, y, extra)
    numpyro.factor("prior", -jnp.sum(extra**2))


def repeated(f, X, y, extra):
    numpyro.sample("y", dist.Normal(f, 0.2).to_event(1), obs=jnp.stack([y, y]))


def scale_of_one_entry(f, X, y, extra):
    numpyro.sample("y", dist.Normal(f, jnp.full(1, 0.2)).to_event(1), obs=y)


RECOGNIZED = [
    normal,
    in_a_plate,
    masked,
    beside_a_likelihood_that_is_left_out,
    beside_another_function,
    with_a_factor_of_the_prior,
    repeated,
    scale_of_one_entry,
]


def two_masks(f, X, y, extra):
    """Real observations of some rows, and binary ones of the others."""
    with numpyro.plate("rows", len(X)):
        with mask(mask=jnp.resize(SHOWN, len(X))):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)
        with mask(mask=~jnp.resize(SHOWN, len(X))):
            numpyro.sample("yes", dist.Bernoulli(logits=f), obs=jnp.ones(len(X), int))


def two_scales(f, X, y, extra):
    normal(f, X, y, extra)
    numpyro.sample("z", dist.Normal(f, 0.4).to_event(1), obs=y)


def a_part_of_the_rows_has_another_likelihood(f, X, y, extra):
    normal(f, X, y, extra)
    numpyro.sample("z", dist.Normal(jnp.sum(f), 0.4), obs=1.0)


def with_a_factor_of_the_function(f, X, y, extra):
    normal(f, X, y, extra)
    numpyro.factor("counts", jnp.sum(dist.Poisson(jnp.exp(f)).log_prob(1)))


def student_t(f, X, y, extra):
    numpyro.sample("y", dist.StudentT(4.0, f, 0.2).to_event(1), obs=y)


def log_normal(f, X, y, extra):
    numpyro.sample("y", dist.LogNormal(f, 0.2).to_event(1), obs=jnp.exp(y))


def transformed(f, X, y, extra):
    fn = dist.TransformedDistribution(
        dist.Normal(f, 0.2), dist.transforms.AffineTransform(0.0, 9.0)
    )
    numpyro.sample("y", fn.to_event(1), obs=y)


def shifted(f, X, y, extra):
    numpyro.sample("y", dist.Normal(f + 1.0, 0.2).to_event(1), obs=y)


def scale_of_rows(f, X, y, extra):
    numpyro.sample("y", dist.Normal(f, 0.1 + X[:, 0]).to_event(1), obs=y)


def scale_given_for_rows(f, X, y, extra):
    numpyro.sample("y", dist.Normal(f, extra).to_event(1), obs=y)


def scale_of_groups(f, X, y, extra):
    scales = jnp.array([0.2, 0.3]) + 0.0 * extra[0]
    group = (X[:, 0] > 1.0).astype(int)
    numpyro.sample("y", dist.Normal(f, scales[group]).to_event(1), obs=y)


def scale_of_the_function(f, X, y, extra):
    numpyro.sample("y", dist.Normal(f, jnp.exp(f)).to_event(1), obs=y)


def one_scale_of_the_function(f, X, y, extra):
    numpyro.sample("y", dist.Normal(f, 0.1 + jnp.std(f)).to_event(1), obs=y)


def scale_of_another_function(f, X, y, extra):
    g = numpyro.sample("g", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
    numpyro.sample("y", dist.Normal(f, jnp.exp(g)).to_event(1), obs=y)


REFUSED = [
    two_masks,
    two_scales,
    a_part_of_the_rows_has_another_likelihood,
    with_a_factor_of_the_function,
    student_t,
    log_normal,
    transformed,
    shifted,
    scale_of_rows,
    scale_given_for_rows,
    scale_of_groups,
    scale_of_the_function,
    one_scale_of_the_function,
    scale_of_another_function,
]


def posterior_of(likelihood, rows):
    """The posterior of a model with a further argument, an array over rows."""

    def model(X, y, extra):
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.7), X))
        likelihood(f, X, y, extra)

    f = jnp.sin(X[:rows, 0])
    values = sgp.infer.Hyperparameters({"f": f, "g": 0.5 * f})
    return sgp.posterior(model, values, X[:rows], f, jnp.full(rows, 0.2), site="f")


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("likelihood", RECOGNIZED, ids=lambda function: function.__name__)
def test_noise_of_new_observations(likelihood, rows):
    posterior = posterior_of(likelihood, rows)
    variance = posterior.predictive(NEW).variance - posterior.variance(NEW)
    np.testing.assert_allclose(variance, 0.04, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("likelihood", REFUSED, ids=lambda function: function.__name__)
def test_noise_that_no_model_says(likelihood, rows):
    with pytest.raises(ValueError, match="this posterior has no Gaussian noise"):
        posterior_of(likelihood, rows).predictive(NEW)


@pytest.mark.parametrize("rows", [1, 5])
def test_noise_of_each_row_of_a_collapsed_gp(rows):
    gp = sgp.GaussianProcess(sgp.kernels.RBF(0.7), X[:rows], jnp.full(rows, 0.2))
    with pytest.raises(ValueError, match="the model has one noise variance for each training row"):
        gp.condition(X[:rows, 0]).predictive(NEW)


def test_two_likelihoods_after_nuts():
    def model(X, y):
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(0.7), X))
        two_masks(f, X, y, None)

    posterior = sgp.posterior(model, {"f": jnp.zeros((2, 5))}, X, X[:, 0])
    with pytest.raises(ValueError, match="this posterior has no Gaussian noise"):
        posterior.predictive(NEW)
