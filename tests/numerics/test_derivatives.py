"""Values with custom gradients, and derivatives that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.numerics.derivatives import (
    custom_jvp_all_orders,
    once_differentiable,
    refuse_derivatives,
    with_pullback,
)

V = jnp.arange(3.0)


def pull_back(inputs, fixed, cotangent):
    a, b = refuse_derivatives("second derivatives", inputs)
    scale, _ = fixed
    return scale * cotangent * a, 3.0 * cotangent * b


def value(a, b):
    """10 a + b, with the gradient (5 a, 3 b)."""
    fixed = jnp.asarray(5.0), jax.random.key(0)
    return with_pullback(pull_back, "forward mode", 10.0 * a + b, (a, b), fixed)


@custom_jvp_all_orders
def cube(x, value):
    """x^3, passed as `value`: the body has no derivative in x."""
    return value


@cube.defjvp
def _(primals, tangents):
    x, value = primals
    return cube(x, value), 3.0 * square(x, jnp.sqrt(value / x)) ** 2 * tangents[0]


@custom_jvp_all_orders
def square(x, value):
    return value


@square.defjvp
def _(primals, tangents):
    return square(*primals), tangents[0]


def cubed(x):
    return cube(x, jax.lax.stop_gradient(x) ** 3)


once = once_differentiable(lambda x, key: x**3, "second derivatives")


def summed(over):
    return lambda x: jnp.sum(over(cubed, x * jnp.ones(2)))


@pytest.mark.parametrize("over", [jax.lax.map, lambda f, x: jax.vmap(f)(x), lambda f, x: f(x)])
def test_a_rule_holds_for_second_derivatives_inside_of_a_loop(over):
    """`jax.custom_jvp` loses its rule in a loop: the second derivative would be 0."""
    function = summed(over)
    assert function(2.0) == 16.0
    assert jax.grad(function)(2.0) == 24.0
    for second in (
        jax.hessian,
        lambda f: jax.grad(jax.grad(f)),
        lambda f: jax.jacfwd(jax.jacfwd(f)),
    ):
        np.testing.assert_allclose(jax.jit(second(function))(2.0), 24.0, rtol=1e-6)


def test_value_and_pullback():
    gradients = jax.jit(jax.value_and_grad(jax.jit(value), argnums=(0, 1)))(2.0, 1.0)
    assert jax.tree.map(float, gradients) == (21.0, (10.0, 3.0))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_batches_inside_and_outside_of_the_gradient(axes):
    args = [V if axis == 0 else jnp.array(2.0) for axis in axes]

    def total(a, b):
        return jnp.sum(jax.vmap(value, axes)(a, b))

    gradients = jax.grad(total, (0, 1))(*args)
    for gradient, scale, arg, axis in zip(gradients, (5.0, 3.0), args, axes, strict=True):
        np.testing.assert_allclose(gradient, scale * (arg if axis == 0 else 3 * arg))
    inside = jax.vmap(jax.grad(value, (0, 1)), axes)(*args)
    np.testing.assert_allclose(inside[0], jnp.broadcast_to(5.0 * args[0], (3,)))


def test_gradient_through_a_scan():
    def last(a):
        return jax.lax.scan(lambda total, x: (total + value(a, x), None), 0.0, V)[0]

    assert jax.grad(last)(2.0) == 30.0


# The error is raised at once, while a program is traced, and in both modes of differentiation.
REFUSED = {
    "forward": (lambda: jax.jvp(value, (1.0, 2.0), (1.0, 1.0)), "forward mode"),
    "forward_jit": (lambda: jax.jit(jax.jacfwd(jax.jit(value)))(1.0, 2.0), "forward mode"),
    "linearize": (lambda: jax.linearize(value, 1.0, 2.0)[1](1.0, 1.0), "forward mode"),
    "forward_twice": (lambda: jax.jacfwd(jax.jacfwd(value))(1.0, 2.0), "forward mode"),
    "reverse_twice": (lambda: jax.grad(jax.grad(value))(1.0, 2.0), "second derivatives"),
    "hessian": (lambda: jax.jit(jax.hessian(jax.jit(value)))(1.0, 2.0), "second derivatives"),
    "once_hessian": (lambda: jax.jit(jax.hessian(jax.jit(once)))(2.0, 0), "second derivatives"),
    "once_twice": (lambda: jax.grad(jax.grad(once))(2.0, 0), "second derivatives"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_derivatives_say_why(case):
    differentiate, message = REFUSED[case]
    with pytest.raises(TypeError, match=message):
        differentiate()


def test_refusals_hold_inside_of_a_loop():
    for function in (value, once):

        def total(x, function=function):
            return jnp.sum(jax.lax.map(lambda x: function(x, 1.0), x * V))

        with pytest.raises(TypeError, match="second derivatives"):
            jax.hessian(total)(2.0)


def test_derivatives_in_variables_on_which_the_rule_does_not_depend():
    """In another variable, or in the cotangent alone, second derivatives are right."""
    assert jax.grad(lambda t: t * jax.grad(value)(2.0, 1.0))(3.0) == 10.0
    assert jax.grad(lambda t: jax.grad(lambda a: t * value(a, 1.0))(2.0))(3.0) == 10.0


def test_once_differentiable_in_both_modes():
    assert jax.grad(once)(2.0, 0) == 12.0
    assert jax.jit(jax.jacfwd(once))(2.0, 0) == 12.0
    np.testing.assert_allclose(jax.vmap(jax.grad(once), (0, None))(V, jax.random.key(0)), 3 * V**2)
