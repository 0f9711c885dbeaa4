"""Preconditioners as matrices: solves, determinants and samples against dense algebra."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.kernels import RBF, Constant, Matern32
from numpyro_scalegp.linear.pivoted_cholesky import pivoted_cholesky
from numpyro_scalegp.linear.preconditioners import (
    Identity,
    Nystrom,
    PivotedCholesky,
    PreconditionerFactor,
    RandomlyPivotedCholesky,
)
from numpyro_scalegp.solvers import KernelOperator

N = 40


def rows(n=N, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=(n, 2)))


def operator(noise, n=N):
    """A covariance with quickly decreasing eigenvalues; `noise` is a number or "per_row"."""
    noise = jnp.geomspace(1e-3, 10.0, n) if noise == "per_row" else jnp.array(noise)
    return KernelOperator(RBF(0.9, 1.7), rows(n), noise)


def dense(H, rank):
    """P = L'L + D in float64."""
    L, _ = pivoted_cholesky(H.kernel, H.X, rank)
    L = np.asarray(L, np.float64)
    return L.T @ L + np.diag(np.broadcast_to(np.asarray(H.noise_variance, np.float64), (H.size,)))


@eqx.filter_jit
def work(preconditioner, H, R, key):
    factor = preconditioner.factorize(H)
    return factor.solve(R), factor.log_determinant(), factor.sample(key, 20_000)


def run(rank, H, R):
    return work(PivotedCholesky(rank), H, R, jax.random.key(3))


NOISES = [1e-6, 1e-4, 1e-2, 1.0, 10.0, "per_row"]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rank", [1, 12])
def test_dense_algebra_agrees(rank, noise, x64):
    H, R = operator(noise), np.random.default_rng(1).normal(size=(N, 3))
    P = dense(H, rank)
    solved, log_determinant, _ = run(rank, H, jnp.array(R))
    exact = np.linalg.solve(P, R)
    bound = 100 * np.finfo(np.float64).eps * np.linalg.cond(P)
    assert np.linalg.norm(solved - exact) < bound * np.linalg.norm(exact)
    np.testing.assert_allclose(log_determinant, np.linalg.slogdet(P)[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 1.0])
def test_float32(noise):
    H, R = operator(noise), np.random.default_rng(1).normal(size=(N, 3))
    P = dense(H, 12)
    solved, log_determinant, samples = run(12, H, jnp.array(R))
    dtypes = {solved.dtype, log_determinant.dtype, samples.dtype}
    assert dtypes == {jnp.dtype("float32")}
    exact = np.linalg.solve(P, R)
    assert np.linalg.norm(solved - exact) < 1e-2 * np.linalg.norm(exact)
    np.testing.assert_allclose(log_determinant, np.linalg.slogdet(P)[1], rtol=0, atol=0.02)
    # Conjugate gradients need P^-1 to be symmetric and positive definite.
    inverse, _, _ = run(12, H, jnp.eye(N))
    inverse = np.asarray(inverse, np.float64)
    assert np.max(np.abs(inverse - inverse.T)) < 1e-3 * np.max(np.abs(inverse))
    assert np.min(np.linalg.eigvalsh(inverse + inverse.T)) > 0


def covariance_standard_errors_off(samples, P):
    """The largest error of the sample covariance, with var(x_i x_j) = P_ii P_jj + P_ij^2."""
    samples = np.asarray(samples, np.float64)
    covariance = samples @ samples.T / samples.shape[1]
    variances = np.diagonal(P)
    error = np.sqrt((np.outer(variances, variances) + P**2) / samples.shape[1])
    return np.max(np.abs(covariance - P) / error)


@pytest.mark.parametrize("noise", [1e-6, 1.0, "per_row"])
def test_covariance_of_samples(noise, x64):
    H, R = operator(noise), jnp.ones((N, 3))
    _, _, samples = run(12, H, R)
    assert samples.shape == (N, 20_000)
    P = dense(H, 12)
    # The largest of N^2 / 2 errors may well exceed 4 by chance.
    assert covariance_standard_errors_off(samples, P) < 4.5
    assert covariance_standard_errors_off(samples, P + 0.2 * np.eye(N)) > 8


def test_identity(x64):
    H, R = operator(1e-2), jnp.array(np.random.default_rng(1).normal(size=(N, 3)))
    solved, log_determinant, samples = work(Identity(), H, R, jax.random.key(3))
    np.testing.assert_array_equal(solved, R)
    assert log_determinant == 0
    assert samples.shape == (N, 20_000)
    assert covariance_standard_errors_off(samples, np.eye(N)) < 4.5


@pytest.mark.parametrize("rank", [N, N + 1, 1000])
def test_a_rank_beyond_the_size_gives_the_operator_itself(rank, x64):
    H = KernelOperator(Matern32(0.5), rows(), 1e-3)
    factor = PivotedCholesky(rank).factorize(H)
    assert factor.low_rank.shape == (N, N)
    A = np.asarray(H.kernel.covariance(H.X)) + 1e-3 * np.eye(N)
    np.testing.assert_allclose(factor.solve(jnp.array(A)), np.eye(N), rtol=0, atol=1e-9)
    np.testing.assert_allclose(factor.log_determinant(), np.linalg.slogdet(A)[1], rtol=1e-10)


def test_condition_improves_with_the_rank(x64):
    H = operator(1e-3)
    A = np.asarray(H.kernel.covariance(H.X)) + 1e-3 * np.eye(N)

    def condition(rank):
        solved, _, _ = run(rank, H, jnp.array(A))
        eigenvalues = np.linalg.eigvals(np.asarray(solved)).real
        return np.max(eigenvalues) / np.min(eigenvalues)

    assert np.linalg.cond(A) > 2 * condition(5) > 20 * condition(25)


def test_duplicate_rows(x64):
    X = jnp.concatenate([rows(12), rows(12)])
    H = KernelOperator(RBF(0.9), X, 1e-4)
    R = np.random.default_rng(1).normal(size=(24, 2))
    solved, log_determinant, _ = run(20, H, jnp.array(R))
    A = np.asarray(H.kernel.covariance(X)) + 1e-4 * np.eye(24)
    np.testing.assert_allclose(A @ np.asarray(solved), R, rtol=0, atol=1e-8)
    np.testing.assert_allclose(log_determinant, np.linalg.slogdet(A)[1], rtol=1e-9)


def count_equations(jaxpr):
    """The number of equations of a program, including inner programs."""
    total = len(jaxpr.eqns)
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            total += count_equations(inner) if hasattr(inner, "eqns") else 0
    return total


def test_no_loop_is_unrolled():
    H = operator(0.1)

    def equations(rank):
        def solve(R):
            factor = PivotedCholesky(rank).factorize(H)
            return factor.solve(R), factor.log_determinant(), factor.sample(jax.random.key(0), 2)

        return count_equations(jax.make_jaxpr(solve)(jnp.ones((N, 1))).jaxpr)

    assert 20 < equations(3) == equations(35)


RANDOM = [RandomlyPivotedCholesky, Nystrom]


@pytest.mark.slow
@pytest.mark.parametrize("family", RANDOM)
def test_random_preconditioners_are_close_to_the_operator(family, x64):
    H = operator(1e-3)
    A = np.asarray(H.kernel.covariance(H.X)) + 1e-3 * np.eye(N)

    def condition(rank):
        solved, log_determinant, _ = work(family(rank), H, jnp.array(A), jax.random.key(3))
        eigenvalues = np.linalg.eigvals(np.asarray(solved)).real
        return np.max(eigenvalues) / np.min(eigenvalues), log_determinant

    few, many, full = (condition(rank) for rank in (5, 25, 10 * N))
    assert np.linalg.cond(A) > 2 * few[0] > 20 * many[0]
    np.testing.assert_allclose(full[0], 1.0, rtol=1e-4)
    np.testing.assert_allclose(full[1], np.linalg.slogdet(A)[1], rtol=1e-6)


@pytest.mark.parametrize("family", RANDOM)
def test_random_preconditioners_of_a_constant_kernel(family):
    # The rank is one: all other directions are rounding errors of float32.
    H = KernelOperator(Constant(2.0), rows(), 1e-4)
    R = np.random.default_rng(1).normal(size=(N, 3))
    solved, _, _ = work(family(8), H, jnp.array(R), jax.random.key(3))
    exact = np.linalg.solve(2.0 + 1e-4 * np.eye(N), R)
    assert np.linalg.norm(solved - exact) < 5e-2 * np.linalg.norm(exact)


def test_another_seed_draws_another_factor():
    H = operator(1e-2)
    for family in RANDOM:
        factor, again, another = (family(3, seed).factorize(H).low_rank for seed in (0, 0, 1))
        np.testing.assert_array_equal(factor, again)
        assert not np.allclose(factor, another)


@pytest.mark.parametrize(("n", "rank"), [(4, 4), (30, 30), (900, 300), (22_500, 1500)])
def test_the_rank_follows_from_the_size(n, rank):
    H = jax.eval_shape(lambda X: KernelOperator(RBF(0.9), X, 1e-2), jnp.zeros((n, 1)))
    factor = jax.eval_shape(RandomlyPivotedCholesky().factorize, H)
    assert factor.low_rank.shape == (rank, n)


def test_the_rank_stays_within_memory():
    n = 1_000_000
    H = jax.eval_shape(lambda X: KernelOperator(RBF(0.9), X, 1e-2), jnp.zeros((n, 1)))
    factor = jax.eval_shape(RandomlyPivotedCholesky().factorize, H)
    assert factor.low_rank.size * 4 <= 2**28 < (factor.low_rank.shape[0] + 1) * n * 4


def test_the_triangle_of_several_chunks(x64):
    # Chunks of four times the rank, the last one shorter.
    low_rank = jnp.array(np.random.default_rng(0).normal(size=(3, N)))
    R = np.asarray(PreconditionerFactor(low_rank, jnp.full(N, 1e-3)).triangle)
    A = np.asarray(low_rank) / np.sqrt(1e-3)
    np.testing.assert_allclose(R.T @ R, np.eye(3) + A @ A.T, rtol=1e-12, atol=1e-9)


def test_stays_positive_definite_where_the_noise_is_below_rounding():
    # The largest eigenvalue is 10^12 times the noise: float32 has seven digits.
    X = jax.random.normal(jax.random.key(0), (400, 3), jnp.float32)
    kernel = Matern32(jnp.full(3, 8.0, jnp.float32), jnp.float32(12.0))
    H = KernelOperator(kernel, X, jnp.float32(5e-9))
    factor = RandomlyPivotedCholesky(200).factorize(H)
    _, vectors = np.linalg.eigh(np.asarray(kernel(X, X), np.float64))
    V = jnp.asarray(vectors, jnp.float32)
    energy = np.asarray(jnp.sum(V * factor.solve(V), axis=0))
    assert np.all(energy > 0)
    # With the noise alone, it is not.
    alone = PreconditionerFactor(factor.low_rank, H.noise())
    assert np.any(np.asarray(jnp.sum(V * alone.solve(V), axis=0)) <= 0)
