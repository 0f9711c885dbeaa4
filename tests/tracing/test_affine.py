"""What is affine by its operations, and what is not, or not known to be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.tracing.affine import is_affine

F = jnp.linspace(0.1, 1.0, 6)
WEIGHTS = jnp.arange(12.0).reshape(2, 6)

AFFINE = {
    "linear": lambda f: 2.0 * f - 1.0,
    "shared": lambda f: f + f.sum() / 3.0,
    "product": lambda f: WEIGHTS @ f,
    "rows": lambda f: f.reshape(2, 3)[1, ::-1],
    "taken": lambda f: f[jnp.array([3, 1])],
    "chosen": lambda f: jnp.where(WEIGHTS[0] > 2.0, f, 0.5),
    "jitted": lambda f: jax.jit(lambda g: 3.0 * g)(f),
    "slope of squares": jax.grad(lambda f: jnp.sum((1.0 - f) ** 2 / 0.3)),
    "constant": lambda f: jnp.exp(WEIGHTS),
}
OTHERS = {
    "square": lambda f: f**2,
    "product with itself": lambda f: f * f,
    "denominator": lambda f: 1.0 / f,
    "sign": jnp.sign,
    "absolute": jnp.abs,
    "kink": lambda f: jnp.where(f > 0.3, f, 0.0),
    "place": lambda f: WEIGHTS[0][f.astype(int)],
    "largest": lambda f: jnp.max(f),
    "jitted": lambda f: jax.jit(jnp.exp)(f),
    "softplus": jax.nn.softplus,
    "loop": lambda f: jax.lax.scan(lambda c, x: (c * x, x), 1.0, f)[0],
}


@pytest.mark.parametrize("name", AFFINE)
def test_affine_functions(name):
    function = AFFINE[name]
    assert is_affine(function, F)
    half = function(0.5 * (F + 2.0 * F**2))
    np.testing.assert_allclose(half, 0.5 * (function(F) + function(2.0 * F**2)), rtol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions(name):
    assert not is_affine(OTHERS[name], F)


def test_products_of_two_arguments_are_not():
    assert is_affine(lambda f, g: f + 2.0 * g, F, F)
    assert not is_affine(lambda f, g: f * g, F, F)


def test_traced_constants():
    @jax.jit
    def check(a):
        assert is_affine(lambda f: jnp.exp(a) * f, F)
        assert not is_affine(lambda f: jnp.exp(a * f), F)
        return a

    check(jnp.ones(()))
