"""Programs whose loops run in stretches, against the same programs in one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.programs import stretches
from tests.compilation import programs

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """One unit of progress for each stretch."""
    monkeypatch.setattr(stretches, "_SECONDS", 0.0)


def halved(x: Array, limit: Array) -> Array:
    """Halve an array until its sum is below a limit, and report the number of steps and the sum."""

    def measure(state: tuple[Array, Array]) -> Array:
        return jnp.stack([state[0].astype(x.dtype), jnp.sum(state[1])])

    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        return state[0] + 1, 0.5 * state[1]

    start = jnp.zeros((), int), x
    steps, x = stretches.while_loop(lambda s: jnp.sum(s[1]) > limit, body, start, measure)
    return x * steps


def once(x: Array, limit: Array) -> Array:
    return jnp.cumsum(halved(x + 1.0, limit))


def nested(x: Array, limit: Array) -> Array:
    return jax.jit(lambda x: jnp.sin(jax.jit(once)(2.0 * x, limit)) + x)(x - 0.5)


def twice(x: Array, limit: Array) -> tuple[Array, Array]:
    first = halved(x, limit)
    return halved(first + x, 0.5 * limit), first


def first_thing(x: Array, limit: Array) -> Array:
    return halved(x, limit)


def without_loop(x: Array, limit: Array) -> Array:
    return x + limit


def in_cond(x: Array, limit: Array) -> Array:
    return jax.lax.cond(limit > 0, lambda: halved(x, limit), lambda: x)


def nothing_to_do(x: Array, limit: Array) -> Array:
    return once(x, 1e9 * limit)


FUNCTIONS = (once, nested, twice, first_thing, without_loop, in_cond, nothing_to_do)


def args(scale: float = 1.0) -> tuple[Array, Array]:
    return jnp.array([3.0, 5.0, 8.0]) * scale, jnp.array(0.5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_is_the_function(function):
    reports: list[tuple[float, ...]] = []
    expected = jax.jit(function)(*args())
    silent = stretches.run(function, args(), None)
    reported = stretches.run(function, args(), lambda *measures: reports.append(measures))
    arrays = zip(*map(jax.tree.leaves, (silent, reported, expected)), strict=True)
    for in_one, in_many, exact in arrays:
        np.testing.assert_array_equal(in_one, in_many)
        np.testing.assert_allclose(in_one, exact, rtol=1e-14)
    numbers = [report[0] for report in reports]
    if function is nothing_to_do:
        assert numbers == [0.0]
    elif function in (without_loop, in_cond):
        assert not numbers
    else:
        assert numbers[:4] == [0.0, 1.0, 2.0, 3.0]
    if function is first_thing:
        assert [report[1] for report in reports] == [16.0 * 0.5**step for step in range(6)]


def test_a_report_ends_the_run():
    def report(step: float, total: float) -> None:
        if step == 2.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stretches.run(once, args(), report)


def test_a_second_run_compiles_nothing():
    def run(scale: float) -> None:
        stretches.run(nested, args(scale), lambda *_: None)

    run(1.0)
    number = programs.number
    run(3.0)
    assert programs.number == number


def test_what_a_function_reads_is_current():
    scale = {"scale": 1.0}

    def function(x: Array, limit: Array) -> Array:
        return halved(scale["scale"] * x, limit)

    for scale["scale"] in (1.0, 4.0):
        value = stretches.run(function, args(), lambda *_: None)
        np.testing.assert_array_equal(value, function(*args()))


def test_calls_of_a_loop(x64):
    calls: list[float] = []

    def function(x: Array, limit: Array) -> Array:
        def body(state: Array) -> Array:
            call_where(state > 3.0, lambda value: calls.append(float(value)), state)
            return state + 1.0

        return stretches.while_loop(lambda s: s < limit, body, x, lambda s: jnp.stack([s, s]))

    value = stretches.run(function, (jnp.array(0.0), jnp.array(6.0)), lambda *_: None)
    assert value == 6.0
    assert calls == [4.0, 5.0]


def test_keys_and_structures():
    def function(key: Array, tree: dict[str, Any]) -> dict[str, Any]:
        def body(state: Any) -> Any:
            key, x, flag = state
            key, draw_key = jax.random.split(key)
            return key, x + jax.random.uniform(draw_key), ~flag

        start = key, tree["x"], jnp.array(True)
        state = stretches.while_loop(lambda s: s[1] < 3.0, body, start, lambda s: s[1][None])
        return {"key": state[0], "x": state[1], "name": tree["name"]}

    inputs = jax.random.key(1), {"x": jnp.array(0.0), "name": "a"}
    result, expected = (stretches.run(function, inputs, report) for report in (print, None))
    assert result["name"] == "a"
    assert result["key"] == expected["key"]
    assert 3.0 <= result["x"] == expected["x"]
