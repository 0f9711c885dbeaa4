"""GP sites in NumPyro's `scan` and `cond`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from jaxtyping import Array
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan

import numpyro_scalegp as sgp
from numpyro_scalegp.sites.rows import role_of
from tests.conformance import each, inputs
from tests.registry import DISTRIBUTIONS

X = inputs()
KERNEL = sgp.kernels.RBF(0.7)


@each("distribution", DISTRIBUTIONS)
def test_a_process_in_scan_is_named(distribution):
    fn = distribution(KERNEL, X)
    if role_of(fn) not in ("prior", "collapsed"):
        pytest.skip("no Gaussian process")

    def model(steps: Array) -> None:
        def body(carry: Array, step: Array) -> tuple[Array, None]:
            numpyro.sample("y", distribution(KERNEL, X), obs=jnp.zeros(fn.shape()))
            return carry + step, None

        scan(body, jnp.zeros(()), steps)

    with pytest.raises(ValueError, match=f"a `{type(fn).__name__}` stands in a `scan`.*as a batch"):
        handlers.trace(handlers.seed(model, 0)).get_trace(jnp.arange(2.0))


def test_a_function_in_cond_is_named():
    def branch(lengthscale: float) -> Any:
        kernel = sgp.kernels.RBF(lengthscale)
        return lambda _: numpyro.sample("f", sgp.LatentGP(kernel, X))

    def model(X: Array, y: Array) -> None:
        f = cond(True, branch(1.0), branch(2.0), None)
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    guide = sgp.guides.AutoSparseGP(model, num_inducing=3)
    with pytest.raises(ValueError, match=r"`f` stands in a `cond` of .*: write it outside"):
        handlers.seed(guide, jax.random.key(0))(X, X[:, 0])
