"""State-space forms against their kernels, and against matrix exponentials in many digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels.state_space import array

K = sgp.kernels
# For each: a kernel with a state-space form.
KERNELS = {
    "matern12": lambda: K.Matern12(0.7, 1.3),
    "matern32": lambda: K.Matern32(0.7, 1.3),
    "matern52": lambda: K.Matern52(0.7, 1.3),
    "harmonic": lambda: K.Harmonic(4.0, 3.0, 0.8),
    "critical": lambda: K.Harmonic(4.0, 0.5, 0.8),
    "overdamped": lambda: K.Harmonic(2.0, 0.2, 0.8),
    "cosine": lambda: K.Cosine(3.0, 0.4),
    "constant": lambda: K.Constant(0.6),
    "linear": lambda: K.Linear(0.3, 0.5),
    "wiener": lambda: K.Wiener(0.3, origin=1.0),
    "integrated_wiener": lambda: K.IntegratedWiener(0.3, origin=-0.5),
    "periodic": lambda: K.Periodic(1.2, period=2.0),
    "periodic_without_constant": lambda: K.Periodic(1.2, period=2.0, constant=False),
    "sum": lambda: 2.0 * (K.Matern32(1.0) + K.Harmonic(3.0, 0.7)) + K.Matern12(2.0),
    "product": lambda: K.Matern32(1.0) * K.Cosine(3.0) + K.Linear(0.1) * K.Matern12(1.0),
    "large_product": lambda: (
        K.Periodic(1.2, period=2.0) * K.Matern52(5.0) + K.Wiener(0.2) * K.Matern32(2.0)
    ),
}
TIMES = np.array([[-1.0], [-0.5], [0.2], [1.0], [1.0], [1.3], [4.0], [11.0]])


def full(matrices: tuple) -> np.ndarray:
    return jax.scipy.linalg.block_diag(*map(array, matrices))


@pytest.mark.parametrize("name", KERNELS)
def test_form_is_the_kernel(name, x64):
    kernel = KERNELS[name]()
    form = kernel.state_space(num_harmonics=20)
    assert form.size == sum(form.block_sizes)
    h = np.asarray(form.observation(jnp.asarray(TIMES)))
    times = TIMES[:, 0]
    covariances = [full(form.covariance(jnp.asarray(time))) for time in times]
    expected = kernel(TIMES, TIMES)
    for i, start in enumerate(times):
        for j in range(i, len(times)):
            elapsed = jnp.asarray(times[j] - start)
            A, Q = map(full, form.transition(jnp.asarray(start), elapsed))
            np.testing.assert_allclose(
                h[i] @ covariances[i] @ A.T @ h[j], expected[i, j], atol=1e-12
            )
            moved = A @ covariances[i] @ A.T + Q
            scale = np.abs(covariances[j]).max()
            np.testing.assert_allclose(moved, covariances[j], atol=1e-12 * scale)
            assert np.linalg.eigvalsh(Q).min() >= -1e-12 * scale


# The drift and the covariance of the state, for numbers of any precision.
DRIFTS = {
    "matern12": lambda rate, v: ([[-rate]], [[v]]),
    "matern32": lambda rate, v: ([[0, 1], [-(rate**2), -2 * rate]], [[v, 0], [0, v * rate**2]]),
    "matern52": lambda rate, v: (
        [[0, 1, 0], [0, 0, 1], [-(rate**3), -3 * rate**2, -3 * rate]],
        [
            [v, 0, -v * rate**2 / 3],
            [0, v * rate**2 / 3, 0],
            [-v * rate**2 / 3, 0, v * rate**4],
        ],
    ),
    "harmonic": lambda rate, v, quality: (
        [[0, 1], [-(rate**2), -rate / quality]],
        [[v, 0], [0, v * rate**2]],
    ),
}


@pytest.mark.parametrize(
    ("name", "quality"),
    [("matern12", None), ("matern32", None), ("matern52", None)]
    + [("harmonic", quality) for quality in (0.3, 0.5, 0.5001, 0.6, 3.0, 100.0)],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_is_accurate_relative_to_its_size(name, quality, dtype, x64):
    """Over short times it is a high power of them, which P - A P A' would lose by cancellation."""
    kernel = KERNELS[name]()
    if quality is not None:
        kernel = K.Harmonic(4.0, quality, 0.8)
    form = jax.tree.map(lambda leaf: leaf.astype(dtype), kernel.state_space())
    rate = form.frequency if quality is not None else form.rate
    numbers = [np.longdouble(float(value)) for value in (rate, form.variance)]
    if quality is not None:
        numbers.append(np.longdouble(float(form.quality)))
    F, P = (np.array(rows, np.longdouble) for rows in DRIFTS[name](*numbers))
    diffusion = -(F @ P + P @ F.T)
    for time in (1e-5, 1e-3, 0.05, 0.2, 0.6, 2.0):
        elapsed = dtype(time / float(rate))
        # The integral of exp(F s) D exp(F s)' by its Taylor series, of terms s^k / k!.
        term, total = diffusion * np.longdouble(elapsed), np.zeros_like(F)
        for k in range(2, 200):
            total = total + term
            term = (F @ term + term @ F.T) * np.longdouble(elapsed) / k
        Q = np.asarray(full(form.transition(jnp.zeros((), dtype), jnp.asarray(elapsed)).noise))
        size = np.sqrt(np.diag(total))
        error = np.abs(Q - total) / np.outer(size, size)
        assert error.max() < 50 * np.finfo(dtype).eps * max(1.0, 1.0 / (quality or 1.0)) ** 2


def test_custom_equation(x64):
    drift, covariance = np.array([[0.0, 1.0], [-4.0, -1.2]]), np.diag([0.8, 3.2])
    equation = K.LinearSDE(drift, covariance, np.array([1.0, 0.3]))
    A, Q = map(full, equation.transition(jnp.zeros(()), jnp.asarray(0.3)))
    expected = jax.scipy.linalg.expm(0.3 * equation.drift)
    np.testing.assert_allclose(A, expected, atol=1e-14)
    P = equation.stationary
    np.testing.assert_allclose(Q, P - expected @ P @ expected.T, atol=1e-13)
    # Over a short time the noise keeps its digits.
    short = full(equation.transition(jnp.zeros(()), jnp.asarray(1e-7)).noise)
    diffusion = -(equation.drift @ P + P @ equation.drift.T)[1, 1]
    np.testing.assert_allclose(short[0, 0], diffusion * 1e-21 / 3.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "d", "message"),
    [
        (lambda: K.RBF(1.0), 1, "`RBF` has no state-space form: take `Matern52`"),
        (lambda: K.Matern32(1.0) + K.RBF(1.0), 1, "`RBF` has no state-space form"),
        (lambda: K.Matern32(jnp.ones(2)), 2, r"got `lengthscale` of shape \(2,\)"),
        (lambda: K.Matern32(1.0), 2, r"inputs of one column, the time, got 2: .* `kernel.on\(\(0,"),
        (lambda: K.Matern32(1.0).on((0,)) * K.Matern32(1.0).on((1,)), 2, "of column 0 and 1"),
    ],
)
def test_kernels_without_a_form_say_so(kernel, d, message):
    with pytest.raises(ValueError, match=message):
        kernel().state_space().time_column(d)
