"""Functions and degrees of terms, recognized from their operations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_scalegp.likelihoods.dependence import Degree, DependenceTable
from numpyro_scalegp.tracing.runs import TracedProgram

F = jnp.linspace(0.1, 1.0, 6)
WEIGHTS = jnp.arange(12.0).reshape(2, 6)


def table(function: Callable[..., Any], *args: Any) -> DependenceTable:
    run = TracedProgram(lambda *args: {"y": function(*args)}, *args)
    return DependenceTable(run, run.variables(), "fgh"[: len(args)])


def degree(function: Callable[..., Any], *args: Any) -> Degree:
    dependences = table(function, *args)
    return dependences.of(dependences.terms).degree


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
    "log of a rate": lambda f: jnp.log(3.0 * jnp.exp(f[::-1] - 1.0) / jnp.exp(WEIGHTS[0])),
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
    "log of a sum": lambda f: jnp.log(jnp.exp(f) + 1.0),
    "log": jnp.log,
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


def test_affine_inputs_and_evaluation():
    """The fewest variables that determine a result, of separate arguments."""

    def function(f, g, h):
        return jnp.exp((2.0 * f + g - 1.0) * jnp.sin(3.0 * h)), f + h

    dependences = table(lambda *args: function(*args)[0], F, 2.0 * F, F)
    inputs, result = dependences.affine_inputs("y"), dependences.terms["y"]
    assert set(inputs.arguments) == {frozenset([0, 1]), frozenset([2])}
    values = {frozenset([0, 1]): 4.0 * F - 1.0, frozenset([2]): 3.0 * F}
    by_variable = dict(zip(dependences.inputs, (F, 2.0 * F, F), strict=True))
    arrays = dependences.evaluated(by_variable, inputs.variables)
    for places, array in zip(inputs.arguments, arrays, strict=True):
        np.testing.assert_allclose(array, values[places], rtol=1e-6)
    again = dependences.evaluated(dict(zip(inputs.variables, arrays, strict=True)), [result])[0]
    np.testing.assert_allclose(again, function(F, 2.0 * F, F)[0], rtol=1e-6)
    total = table(lambda *args: function(*args)[1], F, 2.0 * F, F)
    assert total.functions_of("y") == {"f", "h"}
    assert total.affine_inputs("y").arguments == (frozenset([0, 2]),)
    # Two combinations of the same arguments are dependent, so the arguments count separately.
    dependences = table(lambda f, g: (f + g) * jnp.exp(f - g), F, F)
    assert dependences.affine_inputs("y").variables == tuple(dependences.inputs)


def test_one_result_of_several():
    """A result of a jitted function depends only on the arguments that it uses."""
    run = TracedProgram(
        jax.jit(lambda f, g: {"y": jnp.exp(f), "z": 2.0 * g, "other": WEIGHTS}), F, F
    )
    dependences = DependenceTable(run, run.variables(), "fg")
    assert dependences.dependent == ["y", "z"]
    assert [dependences.functions_of(name) for name in ("y", "z", "other")] == [{"f"}, {"g"}, set()]
    assert dependences.of(dependences.terms["z"]).degree == Degree.AFFINE
    assert dependences.of(dependences.terms).degree == Degree.OTHER
