"""`sgp.plate`: the law of its indices, its place in a model, its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density

import numpyro_scalegp as sgp


@pytest.mark.parametrize("subsample_size", [None, 6])
def test_a_full_plate_is_in_order(subsample_size):
    with sgp.plate("rows", 6, subsample_size) as index:
        np.testing.assert_array_equal(index, np.arange(6))


# In a model


def model(y, subsample_size):
    location = numpyro.sample("location", dist.Normal(0.0, 1.0))
    with sgp.plate("rows", y.shape[0], subsample_size) as index:
        numpyro.sample("y", dist.Normal(location, 1.0), obs=y[index])


def test_the_density_of_a_batch_is_scaled():
    y = jnp.sin(jnp.arange(23.0))
    seeded = handlers.seed(model, jax.random.key(1))
    trace = handlers.trace(seeded).get_trace(y, 7)
    index = trace["rows"]["value"]
    assert index.shape == (7,)
    assert trace["y"]["scale"] == pytest.approx(23 / 7)
    assert trace["location"]["scale"] is None

    replayed = handlers.replay(model, trace)
    value, _ = log_density(replayed, (y, 7), {}, {"location": jnp.array(0.3)})
    unit = dist.Normal(0.3, 1.0)
    expected = dist.Normal(0.0, 1.0).log_prob(0.3) + 23 / 7 * jnp.sum(unit.log_prob(y[index]))
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_the_batch_density_is_unbiased():
    y = jnp.sin(jnp.arange(23.0)) * jnp.arange(23.0)

    def density(key):
        seeded = handlers.seed(model, key)
        return log_density(seeded, (y, 7), {}, {"location": jnp.array(0.3)})[0]

    values = jax.jit(jax.vmap(density))(jax.random.split(jax.random.key(0), 4000))
    full, _ = log_density(model, (y, None), {}, {"location": jnp.array(0.3)})
    error = jnp.std(values) / jnp.sqrt(values.size)
    assert error > 0
    assert abs(jnp.mean(values) - full) < 4 * error


def test_the_model_replays_the_indices_of_the_guide():
    y = jnp.zeros(1000)

    def guide(y, subsample_size):
        numpyro.sample("location", dist.Normal(0.0, 0.1))
        with sgp.plate("rows", y.shape[0], subsample_size):
            pass

    drawn = handlers.trace(handlers.seed(guide, jax.random.key(0))).get_trace(y, 10)
    replayed = handlers.replay(handlers.seed(model, jax.random.key(1)), drawn)
    trace = handlers.trace(replayed).get_trace(y, 10)
    np.testing.assert_array_equal(trace["rows"]["value"], drawn["rows"]["value"])
    alone = handlers.trace(handlers.seed(model, jax.random.key(1))).get_trace(y, 10)
    assert not np.array_equal(alone["rows"]["value"], drawn["rows"]["value"])


def test_plates_nest_and_take_dimensions():
    def nested():
        with sgp.plate("rows", 100, 4, dim=-2) as rows, sgp.plate("columns", 50, 3) as columns:
            x = numpyro.sample("x", dist.Normal(0.0, 1.0))
            with numpyro.plate("inner", 2, dim=-3):
                z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        return rows, columns, x, z

    rows, columns, x, z = handlers.seed(nested, jax.random.key(0))()
    assert (rows.shape, columns.shape, x.shape, z.shape) == ((4,), (3,), (4, 3), (2, 4, 3))
    trace = handlers.trace(handlers.seed(nested, jax.random.key(0))).get_trace()
    assert trace["x"]["scale"] == pytest.approx(100 / 4 * 50 / 3)
    # Another key, other rows; and the two plates don't share one.
    again = handlers.seed(nested, jax.random.key(1))()
    assert not np.array_equal(rows, again[0])


# Cost


def largest_array(closed):
    """The number of entries of the largest array that a jaxpr computes, or holds as a constant."""
    sizes = [np.size(constant) for constant in closed.consts]

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            sizes.extend(np.prod(v.aval.shape, dtype=int) for v in equation.outvars)
            for parameter in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
            ):
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    visit(inner)
                    sizes.extend(np.size(c) for c in getattr(parameter, "consts", ()))

    visit(closed.jaxpr)
    return max(sizes)


def test_no_array_has_the_size_of_the_data():
    size, subsample_size = 1_000_003, 16

    def draw(plate):
        def run(key):
            with handlers.seed(rng_seed=key), plate("rows", size, subsample_size) as index:
                return index

        return jax.make_jaxpr(run)(jax.random.key(0))

    assert largest_array(draw(sgp.plate)) <= 4 * subsample_size
    # NumPyro's own permutes all rows: the check must see it.
    assert largest_array(draw(numpyro.plate)) >= size


# Bad input


def test_no_key(unchecked):
    with pytest.raises(ValueError, match=r"needs a random key: use handlers\.seed"):
        sgp.plate("rows", 10, 3)
