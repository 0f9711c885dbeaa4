"""Programs that return their host calls, against the same functions one operation at a time."""

import os
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import numpyro_scalegp as sgp
from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.programs import host_calls
from numpyro_scalegp.programs.compiled import compiled, executable

CALLS: list[float] = []


def record(value: Any) -> None:
    CALLS.append(float(value))


def checked(x: Array, limit: float = 1.0) -> Array:
    """Twice the value, with a call where it is above the limit."""
    call_where(x > limit, record, x)
    return 2.0 * x


def in_cond(x: Array) -> Array:
    return jax.lax.cond(x > 0.0, checked, lambda x: checked(-x, 3.0), x)


def in_switch(x: Array) -> Array:
    return jax.lax.switch(jnp.int32(x > 0.0), [lambda x: x, checked, jnp.sin], x)


def in_scan(x: Array) -> Array:
    def step(carry: Array, y: Array) -> tuple[Array, Array]:
        return carry + y, checked(carry)

    end, ys = jax.lax.scan(step, x, jnp.array([0.25, 0.5, 1.0]), reverse=True)
    return end + jnp.sum(ys * jnp.arange(3.0))


def in_while(x: Array) -> Array:
    return jax.lax.while_loop(lambda x: jnp.abs(x) < 20.0, lambda x: checked(x, 1.5) + 0.5, x)


def in_fori(x: Array) -> Array:
    return jax.lax.fori_loop(0, 3, lambda i, x: in_cond(x) - i, x)


@jax.jit
def in_jit(x: Array) -> Array:
    return checked(x) + 1.0


@jax.custom_jvp
def with_jvp(x: Array) -> Array:
    return checked(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 2.0 * tangents[0]))


@jax.custom_vjp
def with_vjp(x: Array) -> Array:
    return checked(x)


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (2.0 * g,))


@jax.custom_batching.custom_vmap
def with_vmap(x: Array) -> Array:
    return checked(x)


with_vmap.def_vmap(lambda _, batched, x: (2.0 * x, batched[0]))


def in_gradient(x: Array) -> Array:
    return jax.grad(lambda x: jnp.sin(with_jvp(x)) + with_vjp(x) * jax.checkpoint(checked)(x))(x)


def in_map(x: Array) -> Array:
    return jnp.sum(jax.lax.map(in_cond, jnp.stack([x, 2.0 * x, -x])))


def under_vmap(x: Array) -> Array:
    return jnp.sum(jax.vmap(checked)(jnp.stack([-3.0 * x, x, -x])))


def by_platform(x: Array) -> Array:
    return jax.lax.platform_dependent(x, cpu=checked, default=lambda x: 2.0 * x)


FUNCTIONS = (
    checked, in_cond, in_switch, in_scan, in_while, in_fori, in_jit, with_jvp, with_vjp, with_vmap,
    in_gradient, in_map, under_vmap, by_platform,
)  # fmt: skip


def called(function: Any, x: float) -> tuple[float, list[float]]:
    CALLS.clear()
    value = function(jnp.array(x))
    jax.effects_barrier()
    return float(value), list(CALLS)


@pytest.mark.parametrize("x", (-4.0, 0.5, 2.0))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_and_calls_are_those_of_jax(function, x, x64):
    """Python calls of `jax.jit`; of a loop the first of each call that is due."""
    value, calls = called(jax.jit(lambda x: function(x)), x)
    result, returned = called(compiled(lambda x: function(x)), x)
    np.testing.assert_allclose(result, value, rtol=1e-12)
    assert set(returned) <= set(calls)
    assert bool(returned) == bool(calls)
    assert len(returned) <= 2 or function in (in_gradient,)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_program_holds_a_call(function):
    closed = jax.make_jaxpr(function)(1.0)
    returned = host_calls.returned(closed)
    assert returned is not None
    text = str(returned.closed)
    assert "host_call" in str(closed)
    assert "host_call" not in text or function is in_gradient
    assert "callback" not in text


def test_constants_and_arguments_of_all_kinds(x64):
    matrix, names = np.arange(4.0).reshape(2, 2), ("a", "b")

    @compiled
    def function(key: Array, tree: dict[str, Any], flag: bool) -> dict[str, Any]:
        call_where(jnp.sum(tree["a"]) > 0, record, jnp.sum(matrix))
        return {"names": names, "sum": matrix @ tree["a"], "key": key, "flag": flag}

    for scale in (1.0, -1.0):
        CALLS.clear()
        key = jax.random.key(3)
        result = function(key, {"a": scale * jnp.ones(2), "b": None}, True)
        assert (result["names"], result["flag"]) == (names, True)
        np.testing.assert_array_equal(result["sum"], scale * matrix.sum(1))
        assert result["key"] == key
        assert [6.0] * int(scale > 0) == CALLS


def test_other_constants_of_the_same_program(x64):
    """As when a likelihood is evaluated with stand-ins for the arrays that it reads."""
    matrix, zeros = jnp.arange(4.0).reshape(2, 2), [np.zeros(2)]
    closed = jax.make_jaxpr(lambda x: matrix @ x + checked(jnp.sum(matrix)))(*zeros)
    (constant,) = closed.consts
    run = executable(closed, zeros)
    for scale in (1.0, 2.0, -1.0):
        CALLS.clear()
        (result,) = run([scale * constant], np.ones(2))
        expected = scale * (matrix.sum(1) + 2.0 * matrix.sum())
        np.testing.assert_allclose(result, expected, rtol=1e-12)
        assert [6.0 * scale] * int(scale > 0) == CALLS


def test_calls_read_what_is_current():
    limits = {"limit": 1.0}
    function = compiled(lambda x: checked(x, limits["limit"]))
    assert called(function, 2.0)[1] == [2.0]
    limits["limit"] = 3.0
    assert called(function, 2.0)[1] == []


def test_a_call_that_raises_ends_in_the_caller():
    def fails(x: Array) -> Array:
        def refuse(value: Any) -> None:
            raise ValueError(f"{float(value)} is too large")

        call_where(x > 1.0, refuse, x)
        return x

    assert compiled(fails)(jnp.array(0.5)) == 0.5
    with pytest.raises(ValueError, match=r"2\.0 is too large"):
        compiled(fails)(jnp.array(2.0))


def test_transformations_of_compiled_functions(x64):
    function = compiled(checked)
    gradient = jax.jit(jax.grad(function))
    assert called(gradient, 2.0) == (2.0, [2.0])
    assert called(jax.grad(function), 2.0) == (2.0, [2.0])
    doubled = jax.vmap(function)(jnp.array([0.5, 2.0]))
    np.testing.assert_array_equal(doubled, [1.0, 4.0])


@pytest.mark.parametrize("enabled", (True, False, None))
def test_within_a_users_program(enabled):
    """Without a setting, JAX's cache decides, whose folder the tests set."""
    sgp.warn_in_jit(enabled)
    function = jax.jit(lambda x: checked(x) + float(bool(enabled)))
    assert called(function, 2.0)[1] == ([2.0] if enabled else [])


def test_a_setting_is_true_false_or_none(unchecked):
    with pytest.raises(TypeError, match="`enabled` must be"):
        sgp.warn_in_jit(1)


def test_results_that_are_constants():
    @compiled
    def function(x: Array) -> tuple[Array, Array, float]:
        return jnp.zeros(()), checked(x), 1.5

    zero, value, number = function(jnp.array(2.0))
    assert isinstance(zero, jax.Array)
    assert jax.typeof(zero) == jax.typeof(jnp.zeros(()))
    assert (float(value), number) == (4.0, 1.5)


def test_modules_whose_fields_change_nothing():
    class Model(eqx.Module):
        scale: Array

        @compiled
        def value(self, x: Array) -> Array:
            return checked(self.scale * x)

    model = Model(jnp.array(2.0))
    assert called(model.value, 1.0) == (4.0, [2.0])
    assert called(model.value, 1.0) == (4.0, [2.0])


ROAD = """
import sys

import jax

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO

import numpyro_scalegp as sgp

X = np.random.default_rng(0).normal(size=(1200, 2)).astype(np.float32)
y, key = np.sin(X[:, 0]), jax.random.key(0)

def hyperparameters():
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    return sgp.kernels.Matern32(lengthscale), numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))

def exact(X, y):
    kernel, noise = hyperparameters()
    numpyro.sample("y", sgp.GaussianProcess(kernel, X, noise), obs=y)

def by_features(X, y):
    kernel, noise = hyperparameters()
    features = sgp.features.RandomFourier(kernel, 50, seed=0)
    weights = numpyro.param("weights", np.zeros(50, np.float32))
    rows = sgp.plate("rows", len(X), 100)
    X_rows, y_rows = rows.take(X, y)
    logdet = sgp.log_determinants.Variational()
    gp = sgp.FeatureSpaceGP(features, X_rows, noise, weights, num_data=len(X), logdet=logdet)
    numpyro.sample("y", gp, obs=y_rows)

def latent(X, y):
    kernel, noise = hyperparameters()
    f = numpyro.sample("f", sgp.LatentGP(kernel, X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)

values = {"lengthscale": np.float32(1.0), "noise": np.float32(0.1)}
for estimator in (sgp.estimators.Pathwise(), sgp.estimators.Hutchinson(), None):
    gp = sgp.GaussianProcess(
        sgp.kernels.Matern32(1.0), X, 0.1, estimator=estimator, key=key
    )
    gp.condition(y).mean(X[:10])
    jax.value_and_grad(
        lambda noise: sgp.GaussianProcess(
            sgp.kernels.Matern32(1.0), X, noise, estimator=estimator, key=key
        ).log_prob(y)
    )(0.1)
sgp.posterior(exact, values, X, y).mean(X[:10])
for model, guide in (
    (exact, numpyro.infer.autoguide.AutoDelta(exact)),
    (by_features, numpyro.infer.autoguide.AutoDelta(by_features)),
    (latent, sgp.guides.AutoHybridGP(latent, num_inducing=10, num_residual=10)),
    (latent, sgp.guides.AutoSparseGP(latent, num_inducing=10)),
):
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    params = svi.run(key, 3, X, y, progress_bar=False).params
names = "cache_hits", "cache_misses"
print(*(events.count(f"/jax/compilation_cache/{name}") for name in names))
"""


@pytest.mark.one_interpreter
def test_a_second_process_compiles_nothing_anew(tmp_path):
    counts = []
    for _ in range(2):
        command = [sys.executable, "-c", ROAD, str(tmp_path)]
        # NumPyro's `Trace_ELBO` adds the terms of sites in the order of a set of strings.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr[-2000:]
        counts.append(list(map(int, done.stdout.split())))
    assert counts[0][1] > 50
    assert counts[1][0] > 50
    assert counts[1][1] == 0
