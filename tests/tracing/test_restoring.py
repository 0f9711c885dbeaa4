"""Failed and interrupted calls, and copies, leave a guide unchanged."""

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoMultivariateNormal, AutoNormal

import numpyro_scalegp as sgp
from numpyro_scalegp.variational.fitted import components

KEY = jax.random.key(0)
X = 100.0 * jnp.linspace(-3.0, 3.0, 20)[:, None]
Y = jnp.sin(0.02 * X[:, 0])


class Interrupt(KeyboardInterrupt):
    pass


class Model:
    """A model that raises in the run with a chosen number."""

    def __init__(self, number: int = 0, error: type[BaseException] = Interrupt) -> None:
        self.runs, self.number, self.error = 0, number, error

    def __call__(self, X: Array, y: Array | None = None) -> None:
        self.runs += 1
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X))
        if self.runs == self.number:
            raise self.error
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)


def listed(model: Callable) -> AutoGuideList:
    guide = AutoGuideList(model)
    guide.append(AutoNormal(handlers.block(model, hide=["noise"])))
    guide.append(AutoDelta(handlers.block(model, hide=["lengthscale"])))
    return guide


def attributes(guide: Any) -> dict[int, dict[str, Any]]:
    """The attributes of a guide and of its components."""
    by_component = {}
    for component in components(guide):
        for name, value in vars(component).items():
            items = list(value.items()) if type(value) is dict else [(name, value)]
            by_component[id(component), name] = [(key, id(item)) for key, item in items]
    return by_component


def started(guide: Any) -> dict[str, Array]:
    svi = SVI(guide.model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
    return svi.get_params(svi.init(KEY, X, Y))


def new(model: Callable, rest: Any = AutoNormal) -> sgp.guides.AutoSparseGP:
    return sgp.guides.AutoSparseGP(model, rest=rest, inducing_points=X[::5])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rest", "error"),
    (
        (AutoNormal, Interrupt),
        (AutoMultivariateNormal, ZeroDivisionError),
        pytest.param(functools.partial(listed), Interrupt, marks=pytest.mark.slow),
    ),
)
def test_a_call_that_ends_in_any_run_of_the_model_changes_nothing(rest, error):
    model = Model(error=error)
    expected = started(new(model, rest))
    num_runs, num_unchanged = model.runs, 0
    for number in range(1, num_runs + 1):
        guide = new(model, rest)
        before = attributes(guide)
        model.runs, model.number = 0, number
        with contextlib.suppress(error):
            started(guide)
        if guide.rest.prototype_trace is not None:
            break  # SVI makes the later runs, after the guide's
        assert attributes(guide) == before
        num_unchanged += 1
    assert num_unchanged > 1
    model.number = 0
    for name, value in started(guide).items():
        assert jnp.array_equal(value, expected[name])


def test_observations_with_nan_lose_no_start():
    guide, model = new(Model()), Model()
    svi = SVI(guide.model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
    with pytest.raises(ValueError, match="the observations of `y` hold NaN"):
        svi.init(KEY, X, Y.at[3].set(jnp.nan))
    params, expected = started(guide), started(new(model))
    assert jnp.exp(params["lengthscale_auto_loc"]) > 20.0
    for name, value in expected.items():
        assert jnp.array_equal(params[name], value)


@pytest.mark.parametrize(
    "duplicate",
    (copy.copy, copy.deepcopy, lambda guide: pickle.loads(pickle.dumps(guide))),
    ids=("copy", "deepcopy", "pickle"),
)
def test_a_copy_of_a_guide_starts_as_the_guide_does(duplicate):
    guide = duplicate(new(Model()))
    params, expected = started(guide), started(new(Model()))
    for name, value in expected.items():
        assert jnp.array_equal(params[name], value)


@pytest.mark.slow
def test_a_set_up_of_loaded_parameters_that_fails_changes_nothing():
    params = started(new(Model()))
    for rest in (AutoNormal, AutoMultivariateNormal):
        guide = new(Model(), rest)
        before = attributes(guide)
        less = {name: value for name, value in params.items() if name.startswith("f_")}
        with pytest.raises(ValueError, match="has not run yet in this process"):
            guide.median(less, X, Y)
        assert attributes(guide) == before
