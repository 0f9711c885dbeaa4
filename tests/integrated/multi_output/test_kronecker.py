"""Densities with a Kronecker product as covariance, against the dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import multivariate_normal

from numpyro_scalegp.integrated.multi_output import kronecker
from tests.conformance import each

N, P = 5, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
SQUARED = np.sum((X[:, None] - X[None]) ** 2, axis=-1)
R = RNG.normal(size=(2, N, P))
NOISE = np.array([0.1, 0.3, 0.2])
W = RNG.normal(size=(P, 2))

# Parameters of B and of the noise: eigenvalues that are zero or equal, and outputs that are.
CASES = [
    ("full_rank", lambda: (W, np.ones(P), NOISE)),
    ("rank_one", lambda: (W[:, :1], np.zeros(P), NOISE)),
    ("equal_outputs", lambda: (W[[0, 0, 1]], np.full(P, 0.5), np.full(P, 0.1))),
    ("equal_eigenvalues", lambda: (np.zeros((P, 1)), np.full(P, 0.5), np.full(P, 0.1))),
    ("nothing", lambda: (np.zeros((P, 1)), np.zeros(P), NOISE)),
]


def parts(parameters):
    lengthscale, (W, diag, noise), R = parameters
    return jnp.exp(-0.5 * SQUARED / lengthscale**2), W @ W.T + jnp.diag(diag), noise, R


def structured(parameters):
    return jnp.sum(kronecker.log_density(*parts(parameters)))


def dense(parameters):
    K, B, noise, R = parts(parameters)
    H = jnp.kron(K, B) + jnp.diag(jnp.tile(noise, N))
    flat = R.reshape(-1, H.shape[0])
    return jnp.sum(multivariate_normal.logpdf(flat, jnp.zeros(H.shape[0]), H))


@jax.jit
def derivatives(parameters):
    """Value, gradient in reverse and forward mode, and Hessian, of both."""

    def of(function):
        gradient = jax.grad(function)
        forward = jax.jacfwd(function)(parameters)
        return function(parameters), gradient(parameters), forward, jax.jacfwd(gradient)(parameters)

    return of(structured), of(dense)


@each("case", CASES)
def test_derivatives_are_equal_to_the_dense_ones(case, x64):
    parameters = jax.tree.map(jnp.asarray, (0.8, case(), R))
    (value, *derivative_leaves), (expected_value, *expected) = derivatives(parameters)
    np.testing.assert_allclose(value, expected_value, rtol=1e-12)
    pairs = zip(jax.tree.leaves(derivative_leaves), jax.tree.leaves(expected), strict=True)
    for leaf, expected_leaf in pairs:
        scale = max(1.0, np.abs(expected_leaf).max())
        np.testing.assert_allclose(leaf, expected_leaf, rtol=0, atol=1e-9 * scale)


@pytest.mark.slow
def test_one_output_and_single_precision():
    noise = jnp.array([0.2])
    parameters = 0.8, (jnp.array([[1.5]]), jnp.array([0.3]), noise), jnp.asarray(R[..., :1])
    value, gradient = jax.value_and_grad(structured)(parameters)
    assert value.dtype == jnp.float32
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), parameters)
        expected, expected_gradient = jax.value_and_grad(dense)(wide)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True)
    for leaf, expected_leaf in pairs:
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-3, atol=1e-4)


def test_third_derivatives_are_refused():
    fixed = jax.tree.map(jnp.asarray, ((W, np.ones(P), NOISE), R))

    def of_lengthscale(lengthscale):
        return structured((lengthscale, *fixed))

    with pytest.raises(TypeError, match="no third derivatives, only first and second"):
        jax.eval_shape(jax.grad(jax.hessian(of_lengthscale)), 0.8)
