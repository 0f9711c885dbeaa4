"""Data frames, their columns, and lists as arrays, wherever a model takes data."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_scalegp as sgp

pytestmark = pytest.mark.usefixtures("unchecked")

GP = sgp.GaussianProcess
KEY = jax.random.key(0)
X = np.random.default_rng(0).uniform(-2.0, 2.0, (12, 2)).astype(np.float32)
y = np.sin(X[:, 0])
DRAWS = {"scale": jnp.array([0.8, 1.1])}


class Table:
    """A table as in other packages: `__array__`, a length, and no operators."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values if dtype is None else self.values.astype(dtype)

    def __len__(self) -> int:
        return len(self.values)


def pandas_tables() -> tuple[Any, Any]:
    pandas = pytest.importorskip("pandas")
    index = range(5, 17)  # labels other than row numbers
    return pandas.DataFrame(X, columns=["a", "b"], index=index), pandas.Series(y, index=index)


def polars_tables() -> tuple[Any, Any]:
    polars = pytest.importorskip("polars")
    return polars.DataFrame(X, schema=["a", "b"]), polars.Series(y)


FORMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "pandas": pandas_tables,
    "polars": polars_tables,
    "any_table": lambda: (Table(X), Table(y)),
    "lists": lambda: (X.tolist(), y.tolist()),
}


def taking(X: Any, y: Any = None, batch_size: int | None = None) -> None:
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(scale), X))
    with rows:
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def observing(X: Any, y: Any = None) -> None:
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(scale), X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def collapsed(X: Any, y: Any = None) -> None:
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(scale), X, 0.1), obs=y)


def losses(model: Any, X: Any, y: Any, **options: Any) -> Any:
    guide = sgp.guides.AutoSparseGP(model, num_inducing=3)
    svi = SVI(model, guide, optax.adam(0.1), sgp.infer.QuadratureELBO(2))
    return svi.run(KEY, 2, X, y, progress_bar=False, **options).losses


def taken(X: Any, y: Any, size: int | None) -> Any:
    def model() -> Any:
        return sgp.plate("rows", 12, size).take(X, {"y": y})

    return jax.tree.leaves(numpyro.handlers.seed(model, KEY)())


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "take": lambda X, y: taken(X, y, None),
    "take_a_part": lambda X, y: taken(X, y, 5),
    "shard_rows": lambda X, y: sgp.shard_rows(jax.make_mesh((2,), ("rows",)), X, y),
    "kernel": lambda X, y: sgp.kernels.RBF(1.0)(X, X),
    "condition": lambda X, y: (
        sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 0.1).condition(y).mean(X)
    ),
    "svi": lambda X, y: losses(taking, X, y),
    "svi_in_batches": lambda X, y: losses(taking, X, y, batch_size=5),
    "posterior": lambda X, y: sgp.posterior(collapsed, DRAWS, X, y).mean(X),
    "predictive": lambda X, y: sgp.infer.Predictive(
        collapsed, posterior_samples=DRAWS, data=(X, y)
    )(KEY, X)["y"],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", CALLS)
def test_tables_are_taken_for_arrays(call: str, form: str) -> None:
    tables = FORMS[form]()
    expected = jax.tree.leaves(CALLS[call](X, y))
    for a, b in zip(jax.tree.leaves(CALLS[call](*tables)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_table_that_a_distribution_of_numpyro_observes() -> None:
    with pytest.raises(TypeError, match=r"the observations of `y` are a `Table`.*`sgp.plate"):
        losses(observing, Table(X), Table(y))


def test_a_table_without_numbers() -> None:
    texts = Table(np.array(["a", "b", "c"], object))
    rows = sgp.plate("rows", 3)
    with pytest.raises(TypeError, match="`argument 2 of take` must hold numbers, got a `Table` of"):
        rows.take(np.ones(3), texts)
    with pytest.raises(TypeError, match="`argument 1 of take` must have rows of one length"):
        rows.take([[1.0], [2.0, 3.0], [4.0]])
    with pytest.raises(TypeError, match="`array` must hold numbers, got a `Table` of object"):
        sgp.shard_rows(jax.make_mesh((1,), ("rows",)), texts)
    with pytest.raises(ValueError, match=r"must have the 3 rows of the plate `rows`.*\(2, 1\)"):
        rows.take([[1.0], [2.0]])
