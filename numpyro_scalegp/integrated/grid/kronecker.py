"""Normal densities whose covariance is a Kronecker product plus noise, by its eigenvectors.

The covariance of an array R of shape (n_1, ..., n_d) is H = K_1 x ... x K_d + noise, with noise
variances a along one axis. With diag(a)^-1/2 K_j diag(a)^-1/2 = U diag(lambda_j) U' for that axis,
V_j = diag(a)^-1/2 U, and the eigenvectors of K_j for the others, the entries of R, multiplied by
V_j' along each axis, are independent, with variances 1 + the product of their lambda_j.

Eigenvectors have no derivative if eigenvalues are equal, though the density has one. So they are
held fixed, and the derivatives are computed from H.

References:
    Saatci (2011), Scalable Inference for Structured Gaussian Process Models, chapter 5; Rakitsch,
    Lippert, Borgwardt and Stegle (2013), It is all in the noise.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics import rounding
from numpyro_scalegp.numerics.axes import along_all, outer, unfolded
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders, refuse_derivatives
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.programs.float64 import in_float64

_NO_THIRD_DERIVATIVES = (
    "the density of a grid has no third derivatives, only first and second derivatives."
)


class Rotation(NamedTuple):
    """The V_j and lambda_j; see the module."""

    vectors: tuple[Float[Array, "_n_j _n_j"], ...]
    values: tuple[Float[Array, " _n_j"], ...]  # not negative

    @property
    def precisions(self) -> Float[Array, "*shape"]:
        """One over the variances of the independent entries."""
        return 1.0 / (1.0 + outer(self.values))

    @property
    def rounding(self) -> Float[Array, ""]:
        """The relative rounding errors of solutions; see `numerics.rounding.relative_rounding`."""
        largest = jnp.prod(jnp.stack([jnp.max(values) for values in self.values]))
        return rounding.unit(largest.dtype) * (1.0 + largest)


class _Traces(NamedTuple):
    """The terms of the gradient."""

    weights: Float[Array, "*shape"]  # H^-1 R
    covariances: tuple[Float[Array, "_n_j _n_j"], ...]  # the derivative of log|H| in each K_j
    noise: Float[Array, " n_a"]  # its derivative in the noise


def rotation(
    factors: Sequence[AbstractKernel],
    inputs: Sequence[Float[Array, "_n_j _d_j"]],
    noise: Float[Array, " n_a"],
    axis: int,
) -> Rotation:
    """The `Rotation`, without a derivative, in O(sum_j n_j^3).

    Kernels and eigenvectors are computed in float64: rounding errors of small eigenvalues are
    relative to the largest, and eigenvalues of all axes multiply.
    """

    def of_arrays(factors: Any, inputs: Any, noise: Array) -> Rotation:
        vectors, values = [], []
        for j, (kernel, X) in enumerate(zip(factors, inputs, strict=True)):
            covariance = kernel.evaluate_covariance(X)
            scale = noise**-0.5 if j == axis else jnp.ones(len(X), covariance.dtype)
            of_axis, U = jnp.linalg.eigh(scale[:, None] * covariance * scale)
            vectors.append(scale[:, None] * U)
            values.append(jnp.maximum(of_axis, 0.0))
        return Rotation(tuple(vectors), tuple(values))

    return in_float64(of_arrays, tuple(factors), tuple(inputs), noise)


def solve(rotation: Rotation, R: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """H^-1 R, in O(n sum_j n_j) for n entries."""
    white = along_all([V.T for V in rotation.vectors], R)
    return along_all(rotation.vectors, rotation.precisions * white)


def inverse_diagonal(rotation: Rotation) -> Float[Array, "*shape"]:
    """The diagonal of H^-1, in O(n sum_j n_j)."""
    return along_all([jnp.square(V) for V in rotation.vectors], rotation.precisions)


def log_density(
    covariances: Sequence[Float[Array, "_n_j _n_j"]],
    noise: Float[Array, " n_a"],
    R: Float[Array, "*batch_and_shape"],
    axis: int,
    fixed: Rotation,
) -> Float[Array, "*batch"]:
    """The log density of each array R under N(0, K_1 x ... x K_d + noise).

    d log p = (a'dH a - tr(H^-1 dH)) / 2 - a'dR with a = H^-1 R. It has first and second derivatives
    in forward and reverse mode; third derivatives raise a TypeError.

    Args:
        covariances: the K_j.
        noise: noise variances along `axis`, shape (n_axis,).
        R: arrays of shape (..., n_1, ..., n_d).
        axis: the axis along which the noise varies.
        fixed: the rotation.

    Returns:
        Log densities, in O(n sum_j n_j) for n entries.
    """
    num_axes = len(covariances)

    @custom_jvp_all_orders
    def density(Ks: tuple, noise: Array, R: Array, rotation: Rotation) -> Array:
        white = along_all([V.T for V in rotation.vectors], R)
        log_det = jnp.sum(jnp.log1p(outer(rotation.values)))
        log_det += R.size / len(noise) * jnp.sum(jnp.log(noise))
        fit = jnp.sum(jnp.square(white) * rotation.precisions)
        return -0.5 * (fit + log_det + R.size * math.log(2.0 * math.pi))

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
        (Ks, noise, R, rotation), (dKs, dnoise, dR, _) = primals, tangents
        A, covariance_traces, noise_traces = traces(Ks, noise, R, rotation)
        tangent = -jnp.sum(A * dR)
        for j, (K, dK, trace) in enumerate(zip(Ks, dKs, covariance_traces, strict=True)):
            # A multiplied by all covariances but K_j.
            matrices = [jnp.eye(len(K), dtype=K.dtype) if i == j else k for i, k in enumerate(Ks)]
            product = unfolded(along_all(matrices, A), j)
            tangent += 0.5 * jnp.sum((matmul(unfolded(A, j), product.T) - trace) * dK)
        squares = jnp.sum(jnp.square(unfolded(A, axis)), axis=1)
        return density(*primals), tangent + 0.5 * jnp.sum((squares - noise_traces) * dnoise)

    @custom_jvp_all_orders
    def traces(Ks: tuple, noise: Array, R: Array, rotation: Rotation) -> _Traces:
        precisions = rotation.precisions
        of_covariances = []
        for j, V in enumerate(rotation.vectors):
            sums = jnp.sum(unfolded(precisions * _others(rotation.values, (j,)), j), axis=1)
            of_covariances.append(matmul(V * sums, V.T))
        of_noise = jnp.square(rotation.vectors[axis])
        of_noise = matmul(of_noise, jnp.sum(unfolded(precisions, axis), axis=1)[:, None])[:, 0]
        return _Traces(solve(rotation, R), tuple(of_covariances), of_noise)

    def traces_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[_Traces, _Traces]:
        """The rule from d(H^-1) = -H^-1 dH H^-1, in the coordinates in which H is diagonal.

        In these dH is a sum of terms that change one axis each and scale the others.
        """
        Ks, noise, R, fixed = primals
        Ks, noise, R = refuse_derivatives(_NO_THIRD_DERIVATIVES, (Ks, noise, R))
        dKs, dnoise, dR, _ = tangents
        value = traces(Ks, noise, R, fixed)
        A, V, values, D = value.weights, fixed.vectors, fixed.values, fixed.precisions
        change = dR - _shaped(dnoise, axis, num_axes) * A
        for j, dK in enumerate(dKs):
            change -= along_all([dK if i == j else K for i, K in enumerate(Ks)], A)
        rotated = [matmul(matmul(v.T, dK), v) for v, dK in zip(V, dKs, strict=True)]
        terms = [(j, F, _others(values, (j,))) for j, F in enumerate(rotated)]
        terms.append((axis, matmul(V[axis].T * dnoise, V[axis]), jnp.ones(())))

        def of_axis(j: int, weight: Array, dweight: Array | float) -> Array:
            """The change of the sum over other axes of the entries of H^-1, times a weight."""
            block = jnp.zeros_like(rotated[j])
            diagonal = jnp.broadcast_to(dweight * D, D.shape)
            for i, F, scale in terms:
                weights = jnp.broadcast_to(weight * scale, D.shape)
                if i == j:
                    left, right = unfolded(D * weights, j), unfolded(D, j)
                    block -= F * matmul(left, right.T)
                else:
                    of_F = _shaped(jnp.diagonal(F), i, num_axes)
                    diagonal = diagonal - D * D * weights * of_F
            return block + jnp.diag(jnp.sum(unfolded(diagonal, j), axis=1))

        of_covariances = []
        for j in range(num_axes):
            changes = [
                _shaped(jnp.diagonal(F), i, num_axes) * _others(values, (i, j))
                for i, F in enumerate(rotated)
                if i != j
            ]
            block = of_axis(j, _others(values, (j,)), sum(changes, 0.0))
            of_covariances.append(matmul(matmul(V[j], block), V[j].T))
        block = of_axis(axis, jnp.ones((), D.dtype), 0.0)
        of_noise = jnp.sum(matmul(V[axis], block) * V[axis], axis=1)
        return value, _Traces(solve(fixed, change), tuple(of_covariances), of_noise)

    density.defjvp(rule)
    traces.defjvp(traces_rule)
    arguments = tuple(covariances), noise
    flat = R.reshape(-1, *R.shape[R.ndim - num_axes :])
    densities = jax.vmap(lambda residual: density(*arguments, residual, fixed))(flat)
    return densities.reshape(R.shape[: R.ndim - num_axes])


def _shaped(vector: Float[Array, " _n_j"], axis: int, num_axes: int) -> Float[Array, "*shape"]:
    """A vector along one axis of an array."""
    return vector.reshape([-1 if j == axis else 1 for j in range(num_axes)])


def _others(values: Sequence[Float[Array, " _n_j"]], left_out: Sequence[int]) -> Array:
    """The products of the eigenvalues of all axes but some, which have length one."""
    return outer([jnp.ones(1, v.dtype) if j in left_out else v for j, v in enumerate(values)])
