"""Random subsets of indices: their distribution, their type, their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_scalegp.core.index_sampling import stratified_indices

KEY = jax.random.key(0)


def draws(size, subsample_size, num):
    keys = jax.random.split(jax.random.key(0), num)
    draw = jax.jit(jax.vmap(lambda key: stratified_indices(key, size, subsample_size)))
    return np.asarray(draw(keys))


@pytest.mark.parametrize(("size", "subsample_size"), [(23, 7), (10, 3), (12, 11), (9, 1)])
def test_each_index_is_drawn_equally_often(size, subsample_size):
    num = 20_000
    indices = draws(size, subsample_size, num)
    frequencies = np.bincount(indices.ravel(), minlength=size) / num
    share = subsample_size / size
    assert frequencies.size == size
    error = np.sqrt(share * (1 - share) / num)
    assert np.max(np.abs(frequencies - share)) < 4 * error


def test_unequal_strata_without_the_shift_are_detected():
    # One index from each of three strata of 3, 3 and 4: the same check must fail.
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
    # All of the range is used, including the lowest and the highest tenth.
    assert indices.min() < size / 10 or size < 20
    assert indices.max() > 0.9 * size - 1


def test_random_bits_are_drawn_once():
    traced = str(jax.make_jaxpr(lambda key: stratified_indices(key, 23, 7))(KEY))
    assert traced.count("random_bits") == 1
    assert "random_split" not in traced


def test_all_indices_are_in_order():
    np.testing.assert_array_equal(stratified_indices(KEY, 10, 10), np.arange(10))


def test_indices_have_one_type_and_need_no_promotion(dtype):
    with jax.numpy_dtype_promotion("strict"):
        assert stratified_indices(KEY, 23, 7).dtype == jnp.int32
        assert stratified_indices(KEY, 23, 23).dtype == jnp.int32


# Bad input


@pytest.mark.parametrize("num", [0, -1, 11])
def test_bad_number(num, unchecked):
    with pytest.raises(ValueError, match="`num` must be from 1 to `size`, here 10, got"):
        stratified_indices(KEY, 10, num)


def test_too_many(unchecked):
    for size in (2**31, 2**32 + 7):
        with pytest.raises(ValueError, match=r"`size` must be .*2\^31"):
            stratified_indices(KEY, size, 5)
