"""User functions become pytrees whose leaves are their parameters."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from numpyro_scalegp.core import functions

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


def test_what_maps_single_rows():
    network = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    assert functions.as_pytree(network, "mean").maps_single_rows
    assert not functions.as_pytree(jnp.tanh, "mean").maps_single_rows
    flax = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert not functions.as_pytree(flax, "mean").maps_single_rows


def test_constant_function():
    function = functions.constant_function(jnp.array(1.5))
    np.testing.assert_array_equal(function(X), jnp.full(3, 1.5))
    assert jax.tree.leaves(jax.grad(lambda f: jnp.sum(f(X)))(function)) == [3.0]


@pytest.mark.parametrize("value", [1.0, "tanh", None])
def test_not_callable(value, unchecked):
    with pytest.raises(TypeError, match=f"`mean` must be callable, got {value!r}"):
        functions.as_pytree(value, "mean")
