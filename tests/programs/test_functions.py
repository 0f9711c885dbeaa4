"""User functions become pytrees whose leaves are their parameters."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from numpyro_scalegp.programs import functions

X = jnp.arange(6.0).reshape(3, 2)


def scaled_sum(scale, X, *, power=1.0):
    return scale * jnp.sum(X, axis=1) ** power


def test_plain_functions_have_no_leaves():
    function = functions.as_pytree(jnp.tanh, "mean")
    assert jax.tree.leaves(function) == []
    np.testing.assert_allclose(jax.jit(lambda f: f(X))(function), jnp.tanh(X), rtol=1e-6)
    assert functions.as_pytree(function, "mean") is function


def test_the_arguments_of_a_partial_are_leaves():
    function = functions.as_pytree(
        functools.partial(scaled_sum, jnp.array(2.0), power=jnp.array(3.0)), "mean"
    )
    assert len(jax.tree.leaves(function)) == 2
    gradient = jax.grad(lambda f: jnp.sum(f(X)))(function)
    expected = [jnp.sum(jnp.sum(X, axis=1) ** 3)]
    np.testing.assert_allclose(jax.tree.leaves(gradient)[:1], expected)


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(lambda: eqx.nn.Linear(2, 3, key=jax.random.key(0)), id="equinox_linear"),
        pytest.param(lambda: eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)), id="equinox_mlp"),
        pytest.param(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), id="flax_nnx"),
        pytest.param(lambda: jax.tree_util.Partial(scaled_sum, jnp.array(2.0)), id="jax_partial"),
    ],
)
def test_the_weights_of_a_network_are_leaves(network):
    function = functions.as_pytree(network(), "feature_map")
    leaves = jax.tree.leaves(function)
    assert leaves
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)


def test_functions_of_single_rows():
    network = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    assert functions.as_pytree(network, "mean").maps_single_rows
    assert not functions.as_pytree(jnp.tanh, "mean").maps_single_rows
    flax = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert not functions.as_pytree(flax, "mean").maps_single_rows


def test_constant_function():
    function = functions.constant_function(jnp.array(1.5))
    np.testing.assert_array_equal(function(X), jnp.full(3, 1.5))
    assert jax.tree.leaves(jax.grad(lambda f: jnp.sum(f(X)))(function)) == [3.0]


def column(weights, shift=None, *, power=2, mask=None):
    """A function that closes over all of these."""
    inner = lambda X: X if mask is None else X[:, mask]  # noqa: E731
    shift = {"by": 0.0} if shift is None else shift
    return lambda X, shift=shift: shift["by"] + jnp.sum((inner(X) @ weights) ** power, axis=1)


def test_floating_arrays_in_a_closure_are_leaves():
    weights, shift, mask = jnp.array([[2.0]]), {"by": jnp.array(0.5)}, np.array([True, False])
    indicator = jnp.array(mask)
    plain = column(weights, shift, power=3, mask=mask)
    function = functions.as_pytree(plain, "mean")
    assert sorted(leaf.shape for leaf in jax.tree.leaves(function)) == [(), (1, 1)]
    # The mask is concrete even where everything else is traced.
    np.testing.assert_allclose(jax.jit(lambda f: f(X))(function), plain(X), rtol=1e-6)

    def loss(weights):
        function = functions.as_pytree(column(weights, shift, mask=indicator), "mean")
        assert sorted(leaf.shape for leaf in jax.tree.leaves(function)) == [(), (1, 1)]
        return jnp.sum(function(X))

    expected = jnp.sum(2.0 * weights * X[:, 0] ** 2)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(weights), [[expected]], rtol=1e-6)


def test_functions_with_traced_arrays_leave_a_trace():
    def made(weights):
        return functions.as_pytree(column(weights[:, None], power=3, mask=[0, 1]), "mean")

    weights = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    batch = jax.vmap(made)(weights)
    for row, values in zip(weights, jax.vmap(lambda f: f(X))(batch), strict=True):
        np.testing.assert_allclose(values, (X @ row) ** 3, rtol=1e-6)


def test_functions_that_call_themselves_or_count_their_calls():
    calls = 0

    def powers(weights):
        def power(X, count=3):
            return jnp.ones(len(X)) if count == 0 else (X @ weights) * power(X, count - 1)

        return functions.as_pytree(power, "mean")

    def counted(X):
        nonlocal calls
        calls += 1
        return X[:, 0]

    weights = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(powers(weights)(X), (X @ weights) ** 3)
    gradient = jax.jit(jax.grad(lambda weights: jnp.sum(powers(weights)(X))))(weights)
    np.testing.assert_allclose(gradient, 3.0 * (X @ weights) ** 2 @ X)
    np.testing.assert_allclose(functions.as_pytree(counted, "mean")(X), X[:, 0])
    assert calls == 1


@pytest.mark.parametrize("value", [1.0, "tanh", None])
def test_not_callable(value, unchecked):
    with pytest.raises(TypeError, match=f"`mean` must be callable, got {value!r}"):
        functions.as_pytree(value, "mean")


num_calls = 0


def test_arrays_beside_a_count_in_the_module_are_parameters():
    slope = jnp.asarray(2.0)

    def counted(X):
        global num_calls
        num_calls += 1
        return slope * X[:, 0]

    function = functions.as_pytree(counted, "mean")
    assert [float(leaf) for leaf in jax.tree.leaves(function)] == [2.0]
    before = num_calls
    np.testing.assert_array_equal(function(jnp.ones((3, 1))), 2.0 * jnp.ones(3))
    assert num_calls == before + 1
