"""The sparse posterior: chunks, joint draws, memory and warnings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp
from numpyro_scalegp.processes.expansion import WhitenedNormal
from numpyro_scalegp.processes.posterior import AbstractPosterior
from tests.integrated.test_gaussian_process import assert_within_standard_errors, data
from tests.variational.test_latent import dense_sparse, sparse


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 9, 100])
def test_chunks_change_nothing(chunk_size, x64):
    X = data()[0]
    posterior = sparse().posterior()
    mean, covariance = dense_sparse(X)
    np.testing.assert_allclose(posterior.mean(jnp.array(X), chunk_size=chunk_size), mean, rtol=1e-9)
    np.testing.assert_allclose(
        posterior.variance(jnp.array(X), chunk_size=chunk_size),
        np.diagonal(covariance),
        rtol=1e-9,
    )


def test_joint_samples(dtype):
    X = data()[0]
    draws = sparse().posterior().sample(jax.random.key(4), jnp.array(X), 10_000)
    assert draws.shape == (10_000, len(X))
    assert draws.dtype == dtype
    assert_within_standard_errors(draws, *dense_sparse(X))


def test_memory_follows_the_chunk():
    """Moments at many inputs form neither n x n nor n x M arrays."""
    n, chunk_size = 20_000, 100
    posterior = sparse().posterior()
    M = len(posterior.points)

    def sizes(jaxpr: Any) -> list[int]:
        entries = []
        for equation in jaxpr.eqns:
            entries += [v.aval.size for v in equation.outvars]
            for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    entries += sizes(inner)
        return entries

    def largest(chunk_size: int) -> int:
        def moments(X: Any) -> Any:
            return (
                posterior.mean(X, chunk_size=chunk_size),
                posterior.variance(X, chunk_size=chunk_size),
            )

        return max(sizes(jax.make_jaxpr(moments)(jnp.zeros((n, 2))).jaxpr))

    assert largest(n) >= n * M, "the count must include what a single chunk forms"
    # The largest arrays are the padded inputs, and a chunk's differences in each dimension.
    assert largest(chunk_size) <= max(2 * (n + chunk_size), 2 * M * chunk_size)


def test_many_inputs_by_default(x64):
    X = jnp.linspace(-3.0, 3.0, 200_000).reshape(-1, 2)
    posterior = sparse().posterior()
    variance = posterior.variance(X)
    assert variance.shape == (100_000,)
    index = np.array([0, 17, 99_999])
    np.testing.assert_allclose(
        variance[index], np.diagonal(dense_sparse(np.asarray(X)[index])[1]), rtol=1e-9
    )


def test_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        AbstractPosterior()


def test_warns_from_the_host_and_never_from_compiled_code(x64):
    """JAX does not cache programs that call back to Python."""
    X, kernel = jnp.linspace(0.0, 1.0, 8)[:, None], sgp.kernels.RBF(0.5)

    def posterior(Z: Array) -> Any:
        q = sgp.SparseGP(kernel, X, Z, jnp.zeros(len(Z)), jnp.eye(len(Z)), jitter=0.0)
        return q.posterior()

    singular = posterior(jnp.zeros((3, 1)))
    for call in (lambda: singular.mean(X), lambda: singular.sample(jax.random.key(0), X, 2)):
        with pytest.warns(RuntimeWarning, match="jitter was added to its diagonal"):
            call()
    prior = WhitenedNormal(jnp.zeros(2), jnp.eye(2))
    lost = type(singular).of_inducing_values(kernel, X[:2].at[1].set(jnp.nan), prior)
    with pytest.warns(RuntimeWarning, match="the result is NaN"):
        assert jnp.isnan(lost.mean(X)).all()
    jaxpr = jax.make_jaxpr(lambda Z: posterior(Z).split_marginals(X))(X[:3])
    assert "callback" not in str(jaxpr)
