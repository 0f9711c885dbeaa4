"""A distribution over all rows refuses to stand inside a plate over them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import handlers

import numpyro_scalegp as sgp

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
