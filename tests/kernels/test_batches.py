"""Kernels with leading axes: one for each member of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from tests.conformance import each

kernels = sgp.kernels
G, N, D = 3, 5, 2


def hyperparameters():
    rng = np.random.default_rng(0)
    return tuple(jnp.array(rng.uniform(0.5, 2.0, shape)) for shape in ((G, D), (G,), (G, 1)))


def expression(lengthscale, variance, period):
    smooth = kernels.RBF(lengthscale, variance) * kernels.Matern32(period)
    rough = kernels.RationalQuadratic(0.7, variance, 2.0) + kernels.Linear(variance).on((1,))
    scaled = variance * (kernels.MultiscaleRBF(period) + kernels.Constant(0.3))
    mapped = kernels.FeatureMapped(scaled, kernels.MultiscaleRBF.with_unit_scales)
    return (smooth + rough) * kernels.Periodic(1.0, period=period) + mapped


def of_member(g):
    return expression(*(array[g] for array in hyperparameters()))


def rows(*shape):
    return jnp.array(np.random.default_rng(1).normal(size=(*shape, N, D)))


@pytest.mark.slow
@each("shape", [("shared", lambda: ()), ("own", lambda: (G,))])
def test_a_batch_is_its_members(shape, dtype):
    kernel, X = expression(*hyperparameters()), rows(*shape())
    assert kernel.batch_shape == (G,)
    batched = jax.jit(lambda kernel, X: (kernel.covariance(X), kernel.diag(X)))(kernel, X)
    for g in range(G):
        Xg = X if X.ndim == 2 else X[g]
        np.testing.assert_allclose(batched[0][g], of_member(g).covariance(Xg), rtol=1e-4)
        np.testing.assert_allclose(batched[1][g], of_member(g).diag(Xg), rtol=1e-4)


@pytest.mark.slow
def test_derivatives_are_those_of_the_members(x64):
    def total(lengthscale, variance):
        return jnp.sum(jnp.sin(kernels.RBF(lengthscale, variance)(rows(), rows()[:3])))

    lengthscale, variance, _ = hyperparameters()
    gradients = jax.grad(total, (0, 1))(lengthscale, variance)
    for g in range(G):
        expected = jax.grad(total, (0, 1))(lengthscale[g], variance[g])
        np.testing.assert_allclose(gradients[0][g], expected[0], rtol=1e-10)
        np.testing.assert_allclose(gradients[1][g], expected[1], rtol=1e-10)


def test_axes_broadcast():
    lengthscale, variance, _ = hyperparameters()
    kernel = kernels.RBF(lengthscale[:, None], variance[:2]) + kernels.Constant(1.0)
    assert kernel(rows(), rows(2)[:, :4]).shape == (G, 2, N, 4)
    assert kernels.RBF(1.0)(rows(G), rows()).shape == (G, N, N)


def test_categories_have_loadings_of_their_own(x64):
    W, diag = jnp.ones((G, 2, 1)) * jnp.arange(1.0, G + 1)[:, None, None], jnp.ones(2)
    X = jnp.array([[0.0], [1.0]])
    K = kernels.Coregion(W, diag)(X, X)
    for g in range(G):
        np.testing.assert_allclose(K[g], kernels.Coregion(W[g], diag)(X, X))


def test_shapes_that_do_not_fit_raise():
    with pytest.raises(ValueError, match=r"leading axes that fit together, got .*\(3,\).*\(2,\)"):
        kernels.RBF(jnp.ones((3, 1)), jnp.ones(2))
    with pytest.raises(ValueError, match=r"leading axes that fit together, got .*left.*\(3,\)"):
        kernels.RBF(1.0, jnp.ones(3)) + kernels.Constant(jnp.ones(2))
    with pytest.raises(ValueError, match=r"leading axes of a batch must fit together"):
        kernels.RBF(1.0, jnp.ones(3))(jnp.ones((2, N, D)), jnp.ones((2, N, D)))
    # One lengthscale a column, or one a member: both would do.
    with pytest.raises(ValueError, match=r"write lengthscale\[None, :\] for the former"):
        kernels.RBF(jnp.ones(2), jnp.ones(2))(rows(), rows())


def test_where_one_kernel_is_wanted_a_batch_raises():
    kernel = kernels.RBF(1.0, jnp.ones(3))
    uses = [
        lambda: sgp.solvers.KernelOperator(kernel, rows(), 0.1),
        lambda: sgp.features.InducingPoints(kernel, rows()),
        lambda: sgp.features.RandomFourier(kernel, 10, seed=0),
        lambda: sgp.DecoupledGP(kernel, rows(), rows(), jnp.ones(N), rows(), jnp.eye(N)),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=r"must be one kernel, got a batch of shape \(3,\)"):
            use()
