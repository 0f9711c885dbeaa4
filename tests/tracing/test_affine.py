"""What is affine or quadratic by its operations, and what is not, or not known to be."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_scalegp.tracing.affine import Degree, affine_cut, degree, evaluated

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
    "stacked": lambda f: jnp.stack([f, 2.0 * f[::-1]]).mean(axis=0),
    "solved": lambda f: jax.lax.linalg.triangular_solve(
        jnp.tril(jnp.ones((6, 6))), f[:, None], left_side=True, lower=True
    ),
}
QUADRATIC = {
    "square": lambda f: f**2,
    "product with itself": lambda f: f * f,
    "product of sums": lambda f: (f @ WEIGHTS.T).sum() * (1.0 - f),
    "form": lambda f: f @ jnp.outer(WEIGHTS[0], WEIGHTS[1]) @ f,
    "density": lambda f: dist.Normal(f[::-1] - 1.0, jnp.exp(WEIGHTS[0])).log_prob(2.0),
    "event": lambda f: dist.MultivariateNormal(f, 0.5 + jnp.eye(6)).log_prob(jnp.ones(6)),
    "masked": lambda f: dist.Normal(f, 1.0).mask(WEIGHTS[0] > 2.0).log_prob(WEIGHTS[1]),
}
OTHERS = {
    "cube": lambda f: f**3,
    "fourth power": lambda f: jnp.square(f * f),
    "third degree": lambda f: f**2 * f,
    "step": lambda f: jnp.where(f > 0.0, 1.0, 2.0),
    "denominator": lambda f: 1.0 / f,
    "sign": jnp.sign,
    "absolute": jnp.abs,
    "kink": lambda f: jnp.where(f > 0.3, f, 0.0),
    "place": lambda f: WEIGHTS[0][f.astype(int)],
    "largest": lambda f: jnp.max(f),
    "jitted": lambda f: jax.jit(jnp.exp)(f),
    "softplus": jax.nn.softplus,
    "held": jax.lax.stop_gradient,
    "rounded": jnp.round,
    "cast to whole numbers": lambda f: f.astype(int) * 2.0,
    "cast to bool": lambda f: f.astype(bool) * 2.0,
    "solved by itself": lambda f: jax.lax.linalg.triangular_solve(
        jnp.tril(jnp.ones((6, 6))) * f, jnp.ones((6, 1)), left_side=True, lower=True
    ),
    "loop": lambda f: jax.lax.scan(lambda c, x: (c * x, x), 1.0, f)[0],
}


@pytest.mark.parametrize("name", AFFINE)
def test_affine_functions(name):
    function = AFFINE[name]
    assert degree(function, F) <= Degree.AFFINE
    half = function(0.5 * (F + 2.0 * F**2))
    np.testing.assert_allclose(half, 0.5 * (function(F) + function(2.0 * F**2)), rtol=1e-5)


@pytest.mark.parametrize("name", QUADRATIC)
def test_quadratic_functions(name):
    function = QUADRATIC[name]
    assert degree(function, F) == Degree.QUADRATIC
    of_slope = jax.jacobian(function)
    np.testing.assert_allclose(of_slope(2.0 * F), 2.0 * of_slope(F) - of_slope(0.0 * F), atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions(name):
    assert degree(OTHERS[name], F) == Degree.OTHER


def test_products_of_two_arguments_are_not():
    assert degree(lambda f, g: f + 2.0 * g, F, F) == Degree.AFFINE
    assert degree(lambda f, g: f * g, F, F) == Degree.QUADRATIC


def test_traced_constants():
    @jax.jit
    def check(a):
        assert degree(lambda f: jnp.exp(a) * f, F) == Degree.AFFINE
        assert degree(lambda f: jnp.exp(a * f), F) == Degree.OTHER
        return a

    check(jnp.ones(()))


def test_cut_and_evaluation():
    """As few variables as decide a result, each of its own arguments, as late as there are."""

    def function(f, g, h):
        return jnp.exp((2.0 * f + g - 1.0) * jnp.sin(3.0 * h)), f + h

    closed = jax.make_jaxpr(function)(F, 2.0 * F, F)
    result, total = closed.jaxpr.outvars
    cut = affine_cut(closed.jaxpr, result)
    assert set(cut.arguments) == {frozenset([0, 1]), frozenset([2])}
    values = {frozenset([0, 1]): 4.0 * F - 1.0, frozenset([2]): 3.0 * F}
    given = dict(zip(closed.jaxpr.invars, (F, 2.0 * F, F), strict=True))
    found = evaluated(closed, given, cut.variables)
    for own, array in zip(cut.arguments, found, strict=True):
        np.testing.assert_allclose(array, values[own], rtol=1e-6)
    again = evaluated(closed, dict(zip(cut.variables, found, strict=True)), [result])[0]
    np.testing.assert_allclose(again, function(F, 2.0 * F, F)[0], rtol=1e-6)
    assert affine_cut(closed.jaxpr, total).arguments == (frozenset([0, 2]),)
    # Two combinations of the same arguments are not independent: these count one by one.
    closed = jax.make_jaxpr(lambda f, g: (f + g) * jnp.exp(f - g))(F, F)
    assert affine_cut(closed.jaxpr, closed.jaxpr.outvars[0]).variables == tuple(closed.jaxpr.invars)
