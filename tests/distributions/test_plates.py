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
from numpyro_scalegp.distributions.plates import stratified_indices


def draws(size, subsample_size, num):
    keys = jax.random.split(jax.random.key(0), num)
    draw = jax.jit(jax.vmap(lambda key: stratified_indices(size, subsample_size, key)))
    return np.asarray(draw(keys))


# The law of the indices


@pytest.mark.parametrize(("size", "subsample_size"), [(23, 7), (10, 3), (12, 11), (9, 1)])
def test_each_index_is_drawn_equally_often(size, subsample_size):
    num = 20_000
    indices = draws(size, subsample_size, num)
    frequencies = np.bincount(indices.ravel(), minlength=size) / num
    share = subsample_size / size
    assert frequencies.size == size
    error = np.sqrt(share * (1 - share) / num)
    assert np.max(np.abs(frequencies - share)) < 4 * error


def test_unequal_runs_without_the_shift_are_found_out():
    # One index from each of three runs of 3, 3 and 4: the same check must fail.
    num, edges = 20_000, np.array([0, 3, 6, 10])
    keys = jax.random.split(jax.random.key(0), num)
    draw = jax.vmap(lambda key: jax.random.randint(key, (3,), edges[:-1], edges[1:]))
    frequencies = np.bincount(np.asarray(draw(keys)).ravel(), minlength=10) / num
    assert np.max(np.abs(frequencies - 0.3)) > 4 * np.sqrt(0.3 * 0.7 / num)


@pytest.mark.parametrize(
    ("size", "subsample_size"),
    [(23, 7), (23, 22), (2, 1), (10**6, 1000), (2**31 - 1, 1000), (2**31 - 1, 3), (2**31 - 2, 1)],
)
def test_indices_are_distinct_and_in_range(size, subsample_size):
    indices = draws(size, subsample_size, 200)
    assert indices.shape == (200, subsample_size)
    assert np.issubdtype(indices.dtype, np.integer)
    assert indices.min() >= 0
    assert indices.max() < size
    ordered = np.sort(indices, axis=1)
    assert np.all(np.diff(ordered, axis=1) > 0)
    # All of the range is used: the lowest and the highest tenth are met.
    assert indices.min() < size / 10 or size < 20
    assert indices.max() > 0.9 * size - 1


def test_indices_have_one_type_and_need_no_promotion(dtype):
    with jax.numpy_dtype_promotion("strict"):
        drawn = stratified_indices(23, 7, jax.random.key(0))
    assert drawn.dtype == jnp.int32
    assert stratified_indices(23, None).dtype == jnp.int32
    assert stratified_indices(23, 23).dtype == jnp.int32


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


@pytest.mark.parametrize("subsample_size", [0, -1, 11])
def test_bad_subsample_size(subsample_size, unchecked):
    message = rf"`subsample_size` must be in 1\.\.10, got {subsample_size}"
    with pytest.raises(ValueError, match=message), handlers.seed(rng_seed=0):
        sgp.plate("rows", 10, subsample_size)
    with pytest.raises(ValueError, match=message):
        stratified_indices(10, subsample_size, jax.random.key(0))


def test_no_key(unchecked):
    with pytest.raises(ValueError, match=r"needs a random key: use handlers\.seed"):
        sgp.plate("rows", 10, 3)


def test_too_many_rows(unchecked):
    for size in (2**31, 2**32 + 7):
        with pytest.raises(ValueError, match=r"`size` must be .*2\^31"):
            stratified_indices(size, 5, jax.random.key(0))
