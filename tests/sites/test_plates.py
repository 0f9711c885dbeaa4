"""`sgp.plate`: the distribution of its indices, its place in a model, its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive
from numpyro.infer.util import log_density

import numpyro_scalegp as sgp
from tests.compilation import largest_array


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
    # Another key gives other rows.
    again = handlers.seed(nested, jax.random.key(1))()
    assert not np.array_equal(rows, again[0])


# Rows of data


def rows_of_batch(X, y=None, subsample_size=5):
    """The results of `take` before, within and after the plate, and the indices."""
    rows = sgp.plate("rows", len(X), subsample_size)
    before = rows.take(X, y)
    with rows as index:
        within = rows.take(X, y)
    return before, within, rows.take(X, y), index


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("compile", [jax.jit, lambda f: f])
def test_rows_of_the_batch(convert, compile):
    X, y = convert(np.arange(46.0).reshape(23, 2)), {"a": convert(np.arange(23)), "b": None}

    @compile
    def run(key):  # the data are not arguments: under jit only the indices are traced
        return handlers.seed(rows_of_batch, key)(X, y)

    *places, index = run(jax.random.key(0))
    for X_batch, y_batch in places:
        np.testing.assert_array_equal(X_batch, X[np.asarray(index)])
        np.testing.assert_array_equal(y_batch["a"], y["a"][np.asarray(index)])
        assert y_batch["b"] is None
    keys = jax.random.split(jax.random.key(1), 4)
    (batches, _), *_, indices = jax.vmap(run)(keys)
    np.testing.assert_array_equal(batches, X[np.asarray(indices)])


def test_all_rows_are_the_arrays_themselves():
    X, y = np.ones((6, 2)), jnp.arange(6)
    for subsample_size in (None, 6):
        rows = sgp.plate("rows", 6, subsample_size)
        taken = rows.take(X, y, None)
        assert taken[0] is X and taken[1] is y and taken[2] is None
        assert rows.take(X) is X


def test_the_rows_follow_handlers_of_the_plate():
    X, y = np.arange(20.0)[:, None], np.arange(20.0)
    drawn = handlers.trace(handlers.seed(rows_of_batch, 0)).get_trace(X, y)
    index = drawn["rows"]["value"]
    replayed = handlers.replay(handlers.seed(rows_of_batch, 1), drawn)
    substituted = handlers.substitute(handlers.seed(rows_of_batch, 1), data={"rows": index})
    for run in (replayed, substituted):
        (X_batch, y_batch), *_ = run(X, y)
        np.testing.assert_array_equal(X_batch[:, 0], index)
        np.testing.assert_array_equal(y_batch, index)


def regression(X, y=None, batch_size=None):
    rows = sgp.plate("rows", len(X), batch_size)
    X_batch, y_batch = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X_batch))
    with rows as index:
        numpyro.deterministic("mismatch", jnp.sum(jnp.abs(X_batch[:, 0] - index)))
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y_batch)


@pytest.mark.slow
def test_guides_and_objectives_see_the_same_rows():
    X = jnp.arange(12.0)[:, None]
    y = jnp.sin(X[:, 0])
    guide = sgp.guides.AutoSparseGP(regression, num_inducing=3)
    svi = SVI(regression, guide, optax.adam(0.1), sgp.infer.QuadratureELBO(2))
    result = svi.run(jax.random.key(0), 3, X, y, 4, progress_bar=False)
    assert np.isfinite(result.losses).all()
    drawn = handlers.trace(handlers.seed(handlers.substitute(guide, result.params), 0)).get_trace(
        X, y, 4
    )
    replayed = handlers.replay(handlers.seed(regression, 1), drawn)
    trace = handlers.trace(replayed).get_trace(X, y, 4)
    np.testing.assert_array_equal(trace["rows"]["value"], drawn["rows"]["value"])
    assert trace["mismatch"]["value"] == 0.0
    predictive = Predictive(regression, guide=guide, params=result.params, num_samples=2)
    assert predictive(jax.random.key(0), X)["y"].shape == (2, 12)
    assert np.all(predictive(jax.random.key(0), X, y, 4)["mismatch"] == 0.0)


# Cost


def test_no_array_has_the_size_of_the_data():
    size, subsample_size = 1_000_003, 16

    def draw(plate):
        def run(key):
            with handlers.seed(rng_seed=key), plate("rows", size, subsample_size) as index:
                return index

        return jax.make_jaxpr(run)(jax.random.key(0))

    assert largest_array(draw(sgp.plate)) <= 4 * subsample_size
    # `numpyro.plate` permutes all rows: the check must detect it.
    assert largest_array(draw(numpyro.plate)) >= size


# Bad input


@pytest.mark.parametrize("subsample_size", [None, 3])
def test_rows_of_another_length(subsample_size, unchecked):
    with handlers.seed(rng_seed=0):
        rows = sgp.plate("rows", 10, subsample_size)
    message = (
        r"`argument 2 of take` must have the 10 rows of the plate `rows` .* got shape \(9, 1\)"
    )
    with pytest.raises(ValueError, match=message):
        rows.take(jnp.ones(10), np.ones((9, 1)))
    with pytest.raises(ValueError, match=r"`argument 1 of take` must have .* got shape \(\)"):
        rows.take({"a": jnp.ones(10), "b": 1.0})
    with pytest.raises(ValueError, match=r"`argument 1 of take` has masked entries"):
        rows.take(np.ma.masked_equal(np.arange(10), 3))


def test_no_key(unchecked):
    with pytest.raises(ValueError, match=r"needs a random key: use handlers\.seed"):
        sgp.plate("rows", 10, 3)


@pytest.mark.parametrize("taken", [None, 4])
def test_indices_have_the_default_type(taken, dtype):
    """Kernels that exchange indices, such as HMCECS, expect it."""
    with numpyro.handlers.seed(rng_seed=0), sgp.plate("rows", 10, taken) as index:
        assert index.dtype == jnp.arange(1).dtype
