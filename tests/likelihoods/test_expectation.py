"""Expectations of terms of several functions, against fine grids and Monte Carlo."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from jaxtyping import Array

from numpyro_scalegp.likelihoods.expectation import ExpectedTerms
from numpyro_scalegp.likelihoods.quadrature import normal_expectation, product_nodes
from numpyro_scalegp.tracing.runs import TracedProgram
from tests.compilation import largest_array

N = 5
KEY = jax.random.key(0)
WEIGHTS = np.random.default_rng(3).normal(size=(7, 3))
NOISE = np.array([0.6, 0.1, 0.1, 0.6, 0.5, 0.2, 0.4])


def moments(*shapes: tuple[int, ...]) -> dict[str, tuple[Array, Array]]:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=shape), rng.uniform(0.1, 1.0, shape)) for shape in shapes]
    return {
        name: (jnp.array(mean), jnp.array(variance))
        for name, (mean, variance) in zip("fgh", pairs, strict=False)
    }


def expected(term: Callable[..., Array], pairs: dict[str, tuple[Array, Array]]) -> ExpectedTerms:
    means = {name: mean for name, (mean, _) in pairs.items()}

    def run(*functions: Array) -> tuple[dict[str, Array]]:
        return ({"y": term(*functions), "other": jnp.ones(())},)

    return ExpectedTerms(TracedProgram(run, *means.values()), means)


def num_axes(terms: ExpectedTerms) -> int:
    (rule,) = terms.groups
    return rule.num_axes()


def value(terms: ExpectedTerms, pairs: dict[str, Any], num_nodes: int | None = 40) -> Array:
    return jax.jit(lambda pairs: terms(KEY, pairs, num_nodes, 64))(pairs) - 1.0


def on_a_grid(term: Callable[..., Array], pairs: dict[str, tuple[Array, Array]]) -> float:
    """The trapezoidal rule on a grid over all functions."""
    points = np.linspace(-8.0, 8.0, {1: 4001, 2: 161}.get(len(pairs), 41))
    weights = np.exp(-0.5 * points**2)
    weights /= weights.sum()
    grids = np.meshgrid(*[points] * len(pairs), indexing="ij")
    masses = np.prod(np.meshgrid(*[weights] * len(pairs), indexing="ij"), axis=0).ravel()
    at = [
        mean + jnp.sqrt(variance) * grid.reshape(-1, 1)
        for (mean, variance), grid in zip(pairs.values(), grids, strict=True)
    ]
    values = jax.jit(jax.vmap(term))(*at)
    return float(masses @ values.reshape(len(masses), -1).sum(axis=1))


Y = np.array([0, 1, 0, 3, 2])
INPUT = np.linspace(-1.0, 1.0, N)
SITES: dict[str, tuple[Callable[..., Array], int]] = {
    "sum": (lambda f, g: dist.Poisson(jnp.exp(f + g)).log_prob(Y), 1),
    "weighted": (lambda f, g: dist.Bernoulli(logits=1.0 + f - INPUT * g).log_prob(Y % 2), 1),
    "event": (lambda f, g: dist.StudentT(4.0, f + 2.0 * g, 3.0).to_event(1).log_prob(INPUT), 1),
    "masked": (lambda f, g: dist.Normal(f + g, 0.3).mask(INPUT > 0).log_prob(INPUT), 1),
    "chosen": (lambda f, g: dist.Poisson(jnp.exp(jnp.where(INPUT > 0, f, g))).log_prob(Y), 1),
    "other rows": (lambda f, g: dist.Poisson(jnp.exp(f + g[::-1])).log_prob(Y), 1),
    "product": (lambda f, g: dist.Normal(f * g, 0.5).log_prob(INPUT), 2),
    "exponential": (lambda f, g: dist.Normal(jnp.exp(0.5 * f) + g, 0.5).log_prob(INPUT), 2),
    "scale": (lambda f, g: dist.Normal(f, jnp.exp(0.5 * g)).log_prob(INPUT), 2),
    "inflated": (
        lambda f, g: dist.ZeroInflatedPoisson(jax.nn.sigmoid(g), jnp.exp(f)).log_prob(Y),
        2,
    ),
    "two sums": (lambda f, g: dist.Normal(f + g, jnp.exp(f - g)).log_prob(INPUT), 2),
    "held": (lambda f, g: dist.Normal(f + jax.lax.stop_gradient(g), 0.5).log_prob(INPUT), 2),
}


@pytest.mark.parametrize("name", SITES)
def test_two_functions_on_a_grid(name, x64):
    term, axes = SITES[name]
    pairs = moments((N,), (N,))
    terms = expected(term, pairs)
    assert num_axes(terms) == axes
    np.testing.assert_allclose(value(terms, pairs), on_a_grid(term, pairs), rtol=1e-6)


NODES: dict[str, tuple[Callable[..., Array], int, float]] = {
    "normal": (lambda f: dist.Normal(f, 0.3).log_prob(INPUT), 2, 1e-10),
    "normal event": (lambda f: dist.Normal(f, NOISE[:N]).to_event(1).log_prob(INPUT), 2, 1e-10),
    "masked normal": (lambda f: dist.Normal(2.0 * f, 0.3).mask(Y > 0).log_prob(INPUT), 2, 1e-10),
    "student": (lambda f: dist.StudentT(4.0, f, 0.5).log_prob(INPUT), 20, 1e-3),
    "poisson": (lambda f: dist.Poisson(jnp.exp(f)).log_prob(Y), 20, 1e-10),
    "bernoulli": (lambda f: dist.Bernoulli(logits=f).log_prob(Y % 2), 20, 1e-6),
    "scale": (lambda f, g: dist.Normal(f, jnp.exp(g)).log_prob(INPUT), 20, 1e-6),
    "sum": (lambda f, g: dist.Normal(f + INPUT * g, 0.3).log_prob(INPUT), 2, 1e-10),
    "product": (lambda f, g: dist.Normal(f * g, 0.3).log_prob(INPUT), 20, 1e-10),
}


@pytest.mark.parametrize("name", NODES)
def test_two_nodes_where_they_are_exact(name, x64):
    term, nodes, tolerance = NODES[name]
    pairs = moments((N,), (N,)) if term.__code__.co_argcount == 2 else moments((N,))
    terms = expected(term, pairs)
    assert [terms.num_nodes(names) for names in terms.groups.values()] == [nodes]
    result = value(terms, pairs, num_nodes=None)
    np.testing.assert_array_equal(result, value(terms, pairs, num_nodes=nodes))
    np.testing.assert_allclose(result, on_a_grid(term, pairs), rtol=tolerance)


# Not affine, although some have affine derivatives, or are piecewise affine.
FOOLING: dict[str, Callable[..., Array]] = {
    "rounded": lambda f, g: jnp.round(f) + g,
    "sign": lambda f, g: g + jnp.sign(f),
    "piecewise": lambda f, g: jnp.where(f > 0.0, f, 2.0 * f) + g,
    "branches": lambda f, g: jnp.where(f > 5.0, g, f + g),
    "larger": jnp.maximum,
    "far out": lambda f, g: f + g + jax.nn.relu(g - 4.0),
    "cast": lambda f, g: f.astype(int) + g,
}


@pytest.mark.parametrize("name", FOOLING)
def test_what_is_not_affine_is_not_taken_for_it(name):
    combined = FOOLING[name]
    pairs = moments((N,), (N,))
    assert num_axes(expected(lambda f, g: -jnp.square(combined(f, g) - 1.0), pairs)) == 2


def test_functions_of_other_numbers_of_rows(x64):
    """A function of groups and a function of rows; and a plate and a separate site."""
    group = np.array([0, 1, 1, 0, 2])
    pairs = moments((N,), (3,))
    terms = expected(lambda f, g: dist.Poisson(jnp.exp(f + g[group])).log_prob(Y), pairs)
    assert num_axes(terms) == 1
    taken = {"f": pairs["f"], "g": tuple(array[group] for array in pairs["g"])}
    truth = on_a_grid(lambda f, g: dist.Poisson(jnp.exp(f + g)).log_prob(Y), taken)
    np.testing.assert_allclose(value(terms, pairs), truth, rtol=1e-6)
    shared = expected(lambda f, g: dist.Normal(f, jnp.exp(g)).log_prob(0.0), moments((4, N), (N,)))
    assert num_axes(shared) == 2


def test_sums_are_one_function_each(x64):
    """Mean and log scale are sums, with two axes for three functions."""
    term = lambda f, g, h: dist.Normal(f + g, jnp.exp(0.5 * h)).log_prob(INPUT)  # noqa: E731
    pairs = moments((N,), (N,), (N,))
    terms = expected(term, pairs)
    assert num_axes(terms) == 2
    np.testing.assert_allclose(value(terms, pairs), on_a_grid(term, pairs), rtol=1e-6)


def mixed(f: Array) -> Array:
    return (WEIGHTS @ f).T


MIXED: dict[str, Callable[[Array], Array]] = {
    "outputs": lambda f: dist.Normal(mixed(f), NOISE).log_prob(0.3),
    "event": lambda f: dist.Normal(mixed(f), NOISE).to_event(2).log_prob(jnp.full((N, 7), 0.3)),
    "correlated": lambda f: dist.MultivariateNormal(mixed(f), jnp.diag(NOISE**2) + 0.05).log_prob(
        jnp.full((N, 7), 0.3)
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixing_matrix_is_dense_algebra(name, x64):
    pairs = moments((3, N))
    terms = expected(MIXED[name], pairs)
    assert num_axes(terms) == 1
    mean, variance = (np.asarray(array) for array in pairs["f"])
    off = (WEIGHTS @ mean).T - 0.3
    covariance = np.diag(NOISE**2) + (0.05 if name == "correlated" else 0.0)
    precision = np.linalg.inv(covariance)
    spread = sum(WEIGHTS @ np.diag(row) @ WEIGHTS.T for row in variance.T)
    quadratic = np.sum((off @ precision) * off) + np.trace(precision @ spread)
    constant = N * (np.linalg.slogdet(covariance)[1] + 7 * np.log(2 * np.pi))
    result = value(terms, pairs, num_nodes=2)
    np.testing.assert_allclose(result, -0.5 * (quadratic + constant), rtol=1e-10)


def test_mixing_costs_no_dense_jacobian():
    """Memory and time grow with the outputs, not with outputs times rows squared."""
    n, outputs = 200, 40
    weights = np.ones((outputs, 4))
    pairs = {"f": (jnp.zeros((4, n)), jnp.ones((4, n)))}
    terms = expected(lambda f: dist.StudentT(4.0, weights @ f, 1.0).log_prob(0.0), pairs)
    closed = jax.make_jaxpr(jax.grad(lambda pair: terms(KEY, {"f": pair}, 5, 64)))(pairs["f"])
    assert num_axes(terms) == 1
    assert largest_array(closed) <= 5 * n * outputs


IN_A_PLATE: dict[str, tuple[Callable[[Array], Array], tuple[int, ...]]] = {
    "apart": (lambda f: dist.Bernoulli(logits=f).log_prob(Y % 2), (0,)),
    "softmax": (lambda f: dist.Categorical(logits=f.T).log_prob(Y), (0, 1, 2, 3)),
    "pairs": (lambda f: dist.Normal(f[:2], jnp.exp(f[2:])).log_prob(INPUT), (0, 0, 1, 1)),
    "ends": (lambda f: dist.Normal(f[0] * f[3], 1.0).log_prob(INPUT), (0, 0, 0, 1)),
    # Values of one sign, or of one size, do not trigger the switch.
    "switch": (
        lambda f: dist.Normal(jnp.where(f[0] > 0.0, f[1], f[2] + f[3]), 1.0).log_prob(INPUT),
        (0, 1, 1, 2),
    ),
    "far switch": (
        lambda f: dist.Normal(jnp.where(f[0] > 3.0, f[1], f[2]), 1.0).log_prob(INPUT),
        (0, 1, 1, 0),
    ),
    "two signs": (
        lambda f: dist.Normal(jax.nn.relu(f[0]) * jax.nn.relu(-f[1]), 1.0).log_prob(INPUT),
        (0, 1, 0, 0),
    ),
}


@pytest.mark.parametrize("name", IN_A_PLATE)
def test_functions_of_a_plate_share_axes(name):
    term, axes = IN_A_PLATE[name]
    (rule,) = expected(term, moments((4, N))).groups
    assert rule.axes == (axes,)


def test_sums_that_are_cast_vary(x64):
    """A rounded sum has a derivative of zero, but is not constant."""
    pairs = moments((N,), (N,))
    term = lambda f, g: -jnp.square((2.0 * (f + g)).astype(int) - 1.0)  # noqa: E731
    result = value(expected(term, pairs), pairs, num_nodes=100)
    np.testing.assert_allclose(result, on_a_grid(term, pairs), rtol=0.02)


def test_a_switch_on_a_grid(x64):
    """The moments of a switched term are the weighted moments of both branches."""
    pairs = moments((3, N))
    mean, variance = pairs["f"]
    term = lambda f: -jnp.square(jnp.where(f[0] > 0.0, f[1], f[2]) - INPUT)  # noqa: E731
    share = scipy.stats.norm.cdf(mean[0] / jnp.sqrt(variance[0]))
    squares = jnp.square(mean[1:] - INPUT) + variance[1:]
    expect = -jnp.sum(share * squares[0] + (1.0 - share) * squares[1])
    result = value(expected(term, pairs), pairs, num_nodes=60)
    np.testing.assert_allclose(result, expect, rtol=0.02)


def test_pairs_in_a_plate_on_a_grid(x64):
    term = IN_A_PLATE["pairs"][0]
    pairs = moments((4, N))
    mean, variance = pairs["f"]
    apart = {"f": (mean[:2], variance[:2]), "g": (mean[2:], variance[2:])}
    flat = {name: tuple(a.reshape(-1) for a in pair) for name, pair in apart.items()}
    of_two = lambda f, g: dist.Normal(f, jnp.exp(g)).log_prob(jnp.tile(INPUT, 2))  # noqa: E731
    result = value(expected(term, pairs), pairs)
    np.testing.assert_allclose(result, on_a_grid(of_two, flat), rtol=1e-6)


@pytest.mark.parametrize("kind", [float, int])
@pytest.mark.parametrize("rows", [2, 8])
def test_zeros_among_traced_counts_are_thought_of(kind, rows):
    """Rate and probability are combined only where a count is zero."""

    @jax.jit
    def axes(y: Array) -> None:
        def term(f: Array) -> Array:
            return dist.ZeroInflatedPoisson(jax.nn.sigmoid(f[0]), jnp.exp(f[1])).log_prob(y)

        assert num_axes(expected(term, moments((2, rows)))) == 2

    axes(jnp.zeros(rows, kind))


def test_a_switch_by_the_function_of_another_site():
    """Probes vary g as well, since rows of f are combined only for some values of g."""

    def term(f: Array, g: Array) -> Array:
        return dist.Normal(jnp.where(g > 2.0, f[0] * f[1], f[0]), 1.0).log_prob(INPUT)

    assert num_axes(expected(term, moments((2, N), (N,)))) == 3


def test_rows_are_still_refused():
    for term in (
        lambda f, g: dist.Normal(jnp.cumsum(f) + g, 1.0).log_prob(INPUT),
        lambda f, g: dist.Normal(f + g - jnp.mean(g), 1.0).log_prob(INPUT),
    ):
        with pytest.raises(ValueError, match=r"the site `y` combines rows of the function `[fg]`:"):
            expected(term, moments((N,), (N,)))


# Quasi-Monte Carlo


def softmax(f: Array) -> Array:
    return dist.Categorical(logits=2.0 * f.T).log_prob(Y % 3)


def deviation(draws: Any, truth: Array) -> float:
    """The largest deviation of a mean from the truth, in standard errors."""
    return float(np.max(abs(np.mean(draws, 0) - truth) / (np.std(draws, 0) / len(draws) ** 0.5)))


@pytest.mark.slow
def test_many_functions_are_unbiased(x64):
    """Unbiased values and derivatives, even with few points, but not without random shifts."""
    pairs = moments((3, N))
    terms = expected(softmax, pairs)
    assert num_axes(terms) == 3

    def bound(pair: tuple[Array, Array], key: Array) -> Array:
        return terms(key, {"f": pair}, 20, 8)

    value_and_grad = jax.jit(jax.vmap(jax.value_and_grad(bound), (None, 0)))
    values, gradients = value_and_grad(pairs["f"], jax.random.split(KEY, 1000))

    by_function = {name: (m, v) for name, m, v in zip("fgh", *pairs["f"], strict=True)}
    grid = lambda pair: normal_expectation(  # noqa: E731
        lambda *f: jnp.sum(softmax(jnp.stack(f))),
        [(m, v) for m, v in zip(*pair, strict=True)],
        product_nodes(24, 3),
    )
    truth, exact_gradients = jax.jit(jax.value_and_grad(grid))(pairs["f"])
    of_three = lambda f, g, h: softmax(jnp.stack([f, g, h]))  # noqa: E731
    np.testing.assert_allclose(truth, on_a_grid(of_three, by_function), rtol=1e-5)
    assert deviation(values, truth + 1.0) < 4.0
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        assert deviation(gradient, exact) < 4.5

    # The error of a single shift for all steps.
    same = np.full(1000, value_and_grad(pairs["f"], KEY[None])[0])
    assert abs(np.mean(same) - (truth + 1.0)) > 4.0 * np.std(values) / len(values) ** 0.5
