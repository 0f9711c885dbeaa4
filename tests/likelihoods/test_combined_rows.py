"""Likelihoods that are sums over rows of a function, and likelihoods that combine rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_scalegp.likelihoods.dependence import table_of
from numpyro_scalegp.likelihoods.probing import standing_in

N = 6
Y = np.linspace(-1.0, 1.0, N)
GROUP = np.arange(9) % N
SUMS = {
    "own_rows": lambda f: dist.Normal(f, 0.1).log_prob(Y),
    "summed": lambda f: dist.StudentT(4.0, f, 0.1).to_event(1).log_prob(Y),
    "scale": lambda f: dist.Normal(0.0, jnp.exp(f)).log_prob(Y),
    "groups": lambda f: dist.Bernoulli(logits=f[GROUP]).log_prob(GROUP % 2),
    "indicators": lambda f: dist.Normal(jnp.eye(N)[GROUP] @ f, 0.1).log_prob(GROUP),
    "masked": lambda f: dist.Normal(f, 0.1).mask(Y > 0).log_prob(np.where(Y > 0, Y, np.nan)),
    "large": lambda f: dist.Poisson(1e6 * jnp.exp(f)).log_prob(10**6),
    "beyond_range": lambda f: jnp.finfo(f.dtype).max * jnp.sin(10.0 * f),
    "mean": lambda f: f.mean(),
    "none": lambda f: dist.Normal(0.0, 1.0).log_prob(Y),
}
COMBINED = {
    "centered": lambda f: dist.Normal(f - f.mean(), 0.1).log_prob(Y),
    "held": lambda f: dist.Normal(f - jax.lax.stop_gradient(f.mean()), 0.1).log_prob(Y),
    "cumulative": lambda f: dist.Normal(jnp.cumsum(f), 0.1).log_prob(Y),
    "sorted": lambda f: dist.Normal(jnp.sort(f), 0.1).log_prob(Y),
    "largest": lambda f: dist.Normal(f.max(), 0.1).log_prob(1.0),
    "square": lambda f: -jnp.square(f.mean()),
    "two_of_many": lambda f: dist.Normal(f.at[4].add(0.1 * f[5]), 0.1).log_prob(Y),
    "neighbor_scale": lambda f: dist.Normal(f, jnp.exp(jnp.roll(f, 1))).log_prob(Y),
    "covariance": lambda f: dist.MultivariateNormal(f, 0.5 + jnp.eye(N)).log_prob(Y),
    "large": lambda f: dist.Poisson(1e6 * jnp.exp(f + f.mean())).log_prob(10**6),
    # Not visible at small positive values of f.
    "negative": lambda f: dist.Normal(jnp.minimum(f, 0.0).sum(), 1.0).log_prob(Y),
    "beyond_two": lambda f: dist.Normal(jnp.maximum(f - 2.0, 0.0).sum(), 1.0).log_prob(Y),
    # Not visible at values of one sign, or of one size.
    "switch": lambda f: dist.Normal(jnp.where(f[0] > 0.0, f, 0.0), 1.0).log_prob(Y),
    "far switch": lambda f: dist.Normal(jnp.where(f[0] > 3.0, f, 0.0), 1.0).log_prob(Y),
    "two signs": lambda f: jax.nn.relu(f) * jax.nn.relu(-jnp.roll(f, 1)),
    "kink of sums": lambda f: jax.nn.relu(jnp.cumsum(f)),
    "noisy": lambda f: dist.Normal(f - f.mean(), 100.0).log_prob(Y),
    "far_off": lambda f: dist.Normal(f - f.mean(), 1.0).log_prob(300.0 + Y),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_rows_pass(name, dtype):
    table_of(lambda f: {"y": SUMS[name](f)}, jnp.zeros(N)).check_additive()


@pytest.mark.parametrize("name", COMBINED)
def test_combined_rows_are_refused(name):
    message = r"the site `y` combines rows of the function `f`.*Train with sgp.infer.JointELBO"
    with pytest.raises(ValueError, match=message):
        table_of(lambda f: {"x": f, "y": COMBINED[name](f)}, jnp.zeros(N)).check_additive()


def test_combined_functions_are_refused():
    separate = lambda f: {"y": dist.Normal(f, 0.1).log_prob(Y)}  # noqa: E731
    table_of(separate, jnp.zeros((2, N))).check_additive()
    with pytest.raises(ValueError, match="or functions of its plate"):
        terms = lambda f: {"y": dist.Normal(f[0] - f[1], 0.1).log_prob(Y)}  # noqa: E731
        table_of(terms, jnp.zeros((2, N))).check_additive()


@pytest.mark.parametrize("n", [0, 1])
def test_there_is_nothing_to_combine(n):
    table_of(lambda f: {"y": jnp.square(f.sum())}, jnp.zeros(n)).check_additive()


def test_what_is_traced_is_stood_in_for():
    @jax.jit
    def step(scale, covariance, key, mixed):
        noise = jax.random.normal(key, (N,))
        terms = lambda f: {  # noqa: E731
            "a": dist.Normal(f, scale).log_prob(noise),
            "b": dist.MultivariateNormal(f - mixed * f.mean(), covariance).log_prob(Y),
        }
        table_of(terms, jnp.zeros(N)).check_additive()

    with pytest.raises(ValueError, match="the site `b` combines rows"):
        step(1.0, jnp.zeros((N, N)), jax.random.key(0), 0.0)


def test_values_on_the_host(dtype):
    @jax.jit
    def step(scale, y):
        program = jax.make_jaxpr(lambda f: [f, 0.0 * scale + 1.0, y + 0.0 * f])(jnp.zeros(2))
        evaluate = standing_in(program)
        same, ones, data = evaluate(np.array([1.0, 2.0]))
        np.testing.assert_array_equal(same, [[1.0, 2.0]] * len(data))
        np.testing.assert_array_equal(ones, np.ones(len(data)))
        assert same.dtype == dtype
        # Once between 0.2 and 0.8, then as counts, including zeros.
        assert np.all((data[0] > 0.0) & (data[0] < 1.0))
        assert np.all(data[1:] == np.round(data[1:]))

    step(3.0, jnp.zeros(2))


def test_entries_of_single_rows():
    """A sum of rows is additive over rows, but has an entry that depends on several."""

    def values(f: jax.Array) -> dict[str, list[jax.Array]]:
        return {
            "own": [jnp.exp(f), jnp.eye(N)[GROUP] @ f, jnp.arange(3)],
            "sum": [f, f.sum()],
            "difference": [jnp.diff(f)],
            "counted": [jnp.sum(f > 0.0)],
        }

    assert table_of(values, jnp.zeros(N)).combining_rows() == ["counted", "difference", "sum"]
    one_row = table_of(lambda f: {"y": [jnp.exp(f), f.sum()]}, jnp.zeros(1))
    assert not one_row.combining_rows()
