"""Matrices that do not fit into memory raise a warning before they are allocated."""

import jax
import jax.numpy as jnp
import pytest

import numpyro_scalegp as sgp

# Far more rows than fit: traced, never computed.
X = jax.ShapeDtypeStruct((1_000_000, 2), jnp.float32)
y = jax.ShapeDtypeStruct((1_000_000,), jnp.float32)
KERNEL = sgp.kernels.RBF(1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda X: sgp.GaussianProcess(KERNEL, X, 0.1), "`Cholesky` .*=sgp.estimators.Pathwise"),
        (lambda X: sgp.LatentGP(KERNEL, X), "`LatentGP` .* sgp.guides.AutoSparseGP"),
    ],
    ids=["collapsed", "latent"],
)
def test_a_matrix_that_does_not_fit(build, message):
    with pytest.warns(RuntimeWarning, match=message) as warned:
        jax.eval_shape(lambda X, y: build(X).log_prob(y), X, y)
    assert "1,000,000 rows, about 13,039 GiB in float32" in str(warned[0].message)
    assert len(warned) == 1
