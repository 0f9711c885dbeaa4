"""A distribution over all rows refuses to stand inside a plate over them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_scalegp as sgp
from numpyro_scalegp.sites.rows import counted

X = jnp.linspace(0.0, 1.0, 5)[:, None]
KERNEL = sgp.kernels.RBF(0.3)
SITES = {
    "collapsed": lambda: sgp.GaussianProcess(KERNEL, X, 0.1),
    "latent": lambda: sgp.LatentGP(KERNEL, X),
    "sparse": lambda: sgp.SparseGP(KERNEL, X, X[:2], jnp.zeros(2), jnp.eye(2)),
}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("size", [5, 50])
def test_a_plate_over_the_rows_raises(site, size):
    def model():
        with numpyro.plate("rows", size, subsample_size=5):
            numpyro.sample("f", SITES[site]())

    with pytest.raises(
        ValueError, match=r"got the batch shape \(5,\) with 5 rows .* take the site"
    ):
        handlers.seed(model, 0)()


@pytest.mark.parametrize("site", ["collapsed", "latent"])
def test_a_plate_over_outputs_makes_independent_copies(site):
    copies = SITES[site]().expand((3,))
    values = copies.sample(jax.random.key(0))
    assert values.shape == (3, 5)
    expected = jnp.stack([SITES[site]().log_prob(value) for value in values])
    np.testing.assert_allclose(copies.log_prob(values), expected, rtol=1e-5)


def batch(observed=None):
    return sgp.GaussianProcess(sgp.kernels.RBF(0.3, jnp.ones(3)), X, 0.1, observed=observed)


GROUPS, SHOWN = np.array([True, False, True]), np.array([True, True, False, True, True])
COUNTED = {
    "rows": (lambda: dist.Normal(jnp.zeros(5), 1.0), np.ones(5, bool)),
    "masked": (lambda: dist.Normal(jnp.zeros(5), 1.0).mask(SHOWN), SHOWN),
    "any of an event": (
        lambda: dist.Normal(jnp.zeros((3, 5)), 1.0).mask(GROUPS[:, None] & SHOWN).to_event(1),
        GROUPS,
    ),
    "expanded": (lambda: dist.Normal(0.0, 1.0).mask(False).expand((2,)), np.zeros(2, bool)),
    "collapsed": (SITES["collapsed"], np.ones(5, bool)),
    "batch": (batch, np.ones((3, 5), bool)),
    "batch of gaps": (lambda: batch(SHOWN), np.tile(SHOWN, (3, 1))),
    "masked batch": (lambda: batch(SHOWN).mask(GROUPS), GROUPS[:, None] & SHOWN),
    "copies": (lambda: SITES["collapsed"]().expand((2,)), np.ones((2, 5), bool)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_entries_that_count(name):
    make, expected = COUNTED[name]
    np.testing.assert_array_equal(counted(make()), expected)
