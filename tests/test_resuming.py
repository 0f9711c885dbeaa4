"""Training resumed from a file, in the same process and in another."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.svi import SVIRunResult

import numpyro_scalegp as sgp

ROOT = Path(__file__).parent.parent
X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
Y = np.sin(2 * X[:, 0])


def warm_model(X: Array, y: Array) -> None:
    """Parameters, draws of a guide, probes and a solver's state."""
    solver = sgp.solvers.ConjugateGradients(1e-2, 5, sgp.preconditioners.Identity())
    options = {"num_features": 8, "num_logdet_probes": 0, "num_records": 4}
    estimator = sgp.estimators.Pathwise(solver, 2, **options)
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    kernel = sgp.kernels.Matern32(lengthscale, numpyro.param("variance", 1.0))
    gp = sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator, state="solver")
    numpyro.sample("y", gp, obs=y)


def warm_guide(X: Array, y: Array) -> None:
    loc, scale = numpyro.param("loc", 0.0), numpyro.param("scale", 0.1)
    numpyro.sample("lengthscale", dist.LogNormal(loc, scale))


def warm() -> tuple[Any, Any]:
    optimizer = optax.chain(optax.clip(1.0), optax.adam(optax.cosine_decay_schedule(0.1, 10)))
    svi = SVI(warm_model, warm_guide, optimizer, Trace_ELBO())
    return svi, svi.init(jax.random.key(0), X, Y)


def go_on(svi: Any, state: Any, num_steps: int) -> SVIRunResult:
    step, losses = jax.jit(svi.update), []
    for _ in range(num_steps):
        state, loss = step(state, X, Y)
        losses.append(loss)
    return SVIRunResult(svi.get_params(state), state, jnp.array(losses))


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert jnp.asarray(a).aval == jnp.asarray(b).aval  # the type, weak or not, as well
        np.testing.assert_array_equal(a, b)


RESUMES = """
import sys
import numpyro_scalegp as sgp
from tests.test_resuming import go_on, warm

svi, state = warm()
for template in ({"like": state}, {}):
    loaded = sgp.load(sys.argv[1], **template)
sgp.save(sys.argv[2], go_on(svi, loaded, 3))
"""


@pytest.mark.slow
def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    half, end = tmp_path / "half.npz", tmp_path / "end.npz"
    svi, state = warm()
    first = go_on(svi, state, 3)
    sgp.save(half, first.state)
    through = go_on(svi, first.state, 3)
    done = subprocess.run(
        [sys.executable, "-c", RESUMES, str(half), str(end)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = sgp.load(end)
    assert isinstance(result, SVIRunResult)
    assert_same(result, through)
    assert len(result.state.mutable_state["solver"].history()["epochs"]) == 4


def latent(X: Array, y: Array, features: bool = False) -> None:
    kernel = sgp.kernels.RBF(numpyro.param("lengthscale", 1.0))
    phi = sgp.features.RandomFourier(kernel, 8, seed=0)
    f = sgp.WeightSpaceGP(phi, X) if features else sgp.LatentGP(kernel, X)
    f = numpyro.sample("f", f)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def growing() -> Any:
    guide = sgp.guides.AutoDecoupledGP(latent, mean_size=8, cov_size=4, growth=3)
    return SVI(latent, guide, numpyro.optim.Adam(0.1), sgp.infer.QuadratureELBO(num_nodes=2))


def controlled() -> Any:
    guide = sgp.guides.AutoChevronGP(latent, rank=2)
    loss = sgp.infer.QuadruplyStochasticELBO(num_features=4, control_variate_rank=4)
    return sgp.infer.RowSVI(latent, guide, optax.adam(0.1), loss, features=True)


def mini_batch() -> Any:
    def model(X: Array, y: Array) -> None:
        network = numpyro.param("network", jnp.eye(2))
        weights = numpyro.param("weights", jnp.ones(2))
        logdet = sgp.log_determinants.Minimax()
        phi = lambda X: jnp.tanh(X @ network)  # noqa: E731
        gp = sgp.FeatureSpaceGP(phi, X, 0.1, weights, num_data=30, logdet=logdet)
        numpyro.sample("y", gp, obs=y)

    return SVI(model, lambda X, y: None, optax.sgd(0.1), Trace_ELBO())


@pytest.mark.parametrize("make", [growing, controlled, mini_batch])
def test_states_come_back(make: Any, tmp_path: Path) -> None:
    svi = make()
    state = svi.init(jax.random.key(0), X, Y)
    assert state.mutable_state
    sgp.save(tmp_path / "state.npz", state)
    assert_same(state, sgp.load(tmp_path / "state.npz"))
    assert_same(state, sgp.load(tmp_path / "state.npz", like=state))


def test_sparse_svi_asks_for_init() -> None:
    svi = controlled()
    state = svi.init(jax.random.key(0), X, Y)
    fresh = controlled()
    for go_on in (
        lambda: fresh.update(state, X, Y),
        lambda: fresh.run(jax.random.key(0), 2, X, Y, init_state=state),
    ):
        with pytest.raises(ValueError, match=r"has not run `init` in this process: call `svi.init"):
            go_on()
