"""Mini-batches and row-sharded weights on eight devices, compared with one device."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import Array
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from numpyro_scalegp.core.index_sampling import stratified_indices

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
DEVICES = 8
EVEN, UNEVEN = 96, 101
POINTS = np.random.default_rng(1).normal(size=(12, 2))

Data = tuple[Array, Array]


def mesh(num: int = DEVICES) -> jax.sharding.Mesh:
    return jax.make_mesh((num,), ("rows",), devices=jax.devices()[:num])


def data(n: int) -> Data:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(n, 2))
    return jnp.asarray(X), jnp.asarray(np.sin(X[:, 0]) + 0.3 * generator.normal(size=n))


def model(X: Array, y: Array, batch: int | None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    rows = sgp.plate("rows", len(X), batch)
    X_batch, y_batch = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(lengthscale), X_batch))
    with rows:
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y_batch)


def weights_model(X: Array, y: Array, batch: int | None, m: int) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    rows = sgp.plate("rows", len(X), batch)
    X_batch, y_batch = rows.take(X, y)
    phi = sgp.features.RandomFourier(sgp.kernels.RBF(lengthscale), m, seed=0)
    positive = dist.constraints.positive
    precision = numpyro.param("precision", jnp.ones(m), constraint=positive, rows=True)
    f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X_batch, precision))
    with rows:
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y_batch)


sparse = functools.partial(sgp.guides.AutoSparseGP, inducing_points=POINTS)
GUIDES: dict[str, Callable[..., Any]] = {
    "sparse": sparse,
    "natural": functools.partial(sparse, natural=True),
    "neighbors": functools.partial(
        sgp.guides.AutoNearestNeighborGP, inducing_points=POINTS, num_neighbors=3
    ),
    "decoupled": functools.partial(
        sgp.guides.AutoDecoupledGP, mean_size=24, cov_size=12, growth=8, num_columns=8
    ),
    "hybrid": functools.partial(
        sgp.guides.AutoHybridGP,
        inducing_points=POINTS,
        residual_points=POINTS[::-1] + 0.2,
        num_columns=8,
    ),
}
QUADRATURE = sgp.infer.QuadratureELBO(num_nodes=3)


def svi_of(kind: str, loss: Any = QUADRATURE) -> SVI:
    guide = GUIDES[kind](model, rest=AutoDelta)
    adam = optax.adam(0.01)
    return SVI(model, guide, sgp.infer.natural_gradients(adam) if kind == "natural" else adam, loss)


def row_svi(m: int) -> sgp.infer.RowSVI:
    model_with_m = functools.partial(weights_model, m=m)
    guide = sgp.guides.AutoChevronGP(model_with_m, rest=AutoDelta, rank=2)
    loss = sgp.infer.QuadruplyStochasticELBO(num_features=10, control_variate_rank=5)
    return sgp.infer.RowSVI(model_with_m, guide, optax.adam(0.01), loss)


def on_device_and_mesh(n: int) -> list[Data]:
    """The data on one device and on the mesh."""
    return [data(n), sgp.shard_rows(mesh(), *data(n))]


def equal(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    def of_leaf(a: Array, b: Array) -> None:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(of_leaf, *jax.device_get((actual, expected)))


def collectives(text: str) -> list[tuple[str, list[tuple[int, ...]]]]:
    """The collective operations of a compiled program: kinds and shapes."""
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    matches = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
    return [
        (
            kind,
            [tuple(map(int, filter(None, s.split(",")))) for s in re.findall(r"\[([\d,]*)\]", t)],
        )
        for t, kind in matches
    ]


@pytest.mark.parametrize(("n", "batch"), [(96, 24), (96, 19), (97, 24), (97, 3), (96, 1)])
def test_takes_the_rows_that_one_device_takes(n: int, batch: int) -> None:
    arrays = np.arange(2.0 * n).reshape(n, 2), np.arange(n), np.arange(n) % 2 == 0

    def taken(index: Array, tree: Any) -> Any:
        with numpyro.handlers.substitute(data={"rows": index}), numpyro.handlers.seed(rng_seed=0):
            return sgp.plate("rows", n, batch).take(tree)

    on_mesh = sgp.shard_rows(mesh(), *arrays)
    jitted = jax.jit(taken)
    drawn = stratified_indices(KEY, n, batch)
    anywhere = jax.random.permutation(KEY, n)[:batch]
    for index in (drawn, anywhere):
        for rows, array in zip(jitted(index, on_mesh), arrays, strict=True):
            np.testing.assert_array_equal(rows, array[np.asarray(index)])
    if batch == 24:
        rows = jitted(drawn, on_mesh)[0]
        assert rows.sharding.spec == jax.sharding.PartitionSpec("rows")
        sent = collectives(jitted.lower(drawn, on_mesh).compile().as_text())
        assert all(shape[0] < n for _, shapes in sent for shape in shapes if shape)
        assert n % DEVICES == 0 or not sent


@pytest.mark.parametrize(("size", "num"), [(96, 24), (1000, 32), (2**20, 4096)])
def test_drawn_rows_lie_on_their_devices(size: int, num: int) -> None:
    drawn = jax.vmap(lambda key: stratified_indices(key, size, num))(jax.random.split(KEY, 200))
    owners = (drawn // (size // DEVICES)).reshape(200, DEVICES, -1)
    inner = owners[:, :, 1:-1] - jnp.arange(DEVICES)[:, None]
    assert (np.asarray(inner) == 0).all() and (np.diff(drawn, axis=1) > 0).all()


@pytest.mark.parametrize("kind", list(GUIDES))
@pytest.mark.parametrize(("n", "batch"), [(EVEN, 24), (UNEVEN, 19)])
def test_steps_are_those_of_one_device(kind: str, n: int, batch: int, x64: None) -> None:
    results = []
    for X, y in on_device_and_mesh(n):
        svi = svi_of(kind)
        state = svi.init(KEY, X, y, batch)
        step = jax.jit(svi.stable_update, static_argnums=3)
        losses = []
        for _ in range(3):
            state, loss = step(state, X, y, batch)
            losses.append(loss)
        results.append((losses, svi.get_params(state)))
    equal(results[1], results[0])
    # Parameters are replicated on each device.
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    text = step.lower(state, X, y, batch).compile().as_text()
    for what, shapes in collectives(text):
        for shape in shapes:
            assert what == "all-reduce" or n % DEVICES or batch not in shape, (what, shape)
            assert n not in shape
            assert not (batch in shape and len(POINTS) in shape), (what, shape)


@pytest.mark.parametrize(
    ("loss", "tolerance"),
    # The factor of a joint draw's covariance, which is nearly singular, amplifies rounding.
    [(TraceMeanField_ELBO(), 1e-9), (sgp.infer.JointELBO(), 1e-6)],
)
def test_other_objectives(loss: Any, tolerance: float, x64: None) -> None:
    results = []
    for X, y in on_device_and_mesh(EVEN):
        result = svi_of("sparse", loss).run(KEY, 3, X, y, 24, progress_bar=False)
        results.append((result.losses, result.params))
    equal(results[1], results[0], tolerance=tolerance)


def test_the_loss_of_batches_is_unbiased(x64: None) -> None:
    X, y = sgp.shard_rows(mesh(), *data(UNEVEN))
    svi = svi_of("sparse")
    params = svi.get_params(svi.init(KEY, X, y, 16))

    @functools.partial(jax.jit, static_argnums=1)
    def losses(keys: Array, batch: int | None) -> Array:
        def loss(key: Array) -> Array:
            return svi.loss.loss(key, params, model, svi.guide, X, y, batch)

        return jax.lax.map(loss, keys)

    values = np.asarray(losses(jax.random.split(KEY, 400), 16))
    (exact,) = np.asarray(losses(jax.random.split(KEY, 1), None))
    assert abs(values.mean() - exact) < 4.0 * values.std() / len(values) ** 0.5
    assert values.std() > 0.0


@pytest.mark.parametrize("kind", ["sparse", "natural", "hybrid"])
def test_posteriors(kind: str, x64: None) -> None:
    new, results = jnp.asarray(POINTS[:5]) + 0.1, []
    for X, y in on_device_and_mesh(UNEVEN):
        svi = svi_of(kind)
        result = svi.run(KEY, 3, X, y, 24, progress_bar=False)
        posterior = sgp.posterior(model, svi.guide, result, X, y, 24)
        drawn = posterior.sample(KEY, new, num_samples=2)
        results.append((posterior.marginals(new), posterior.marginals(X), drawn))
    equal(results[1], results[0], tolerance=1e-9)


def test_solved_means(x64: None) -> None:
    means = []
    for X, y in on_device_and_mesh(UNEVEN):
        svi = svi_of("hybrid")
        params = svi.run(KEY, 3, X, y, 24, progress_bar=False).params
        solved = svi.guide.solve_mean(params, X, y, None, tolerance=1e-12, max_iterations=200)
        assert solved.converged
        means.append(svi.guide.posterior(solved.params, X, y, None).mean(X))
    equal(means[1], means[0], tolerance=1e-7)


@pytest.mark.parametrize("m", [400, 404])
def test_each_device_owns_the_rows_of_its_features(m: int, tmp_path: Path, x64: None) -> None:
    results, svis = [], []
    for X, y in on_device_and_mesh(EVEN):
        svi = row_svi(m)
        state = svi.init(KEY, X, y, 24)
        first = jax.tree.map(jnp.copy, state)
        update = jax.jit(svi.update, static_argnums=3, donate_argnums=0)
        program = update.lower(state, X, y, 24).compile()
        for _ in range(3):
            state, loss = update(state, X, y, 24)
        posterior = sgp.posterior(svi.model, svi.guide, svi.get_params(state), X, y, 24)
        refreshed = svi.refresh(state, X, y, 24)
        moments = posterior.marginals(X)
        results.append((loss, svi.get_params(state), refreshed.mutable_state, moments))
        svis.append(svi)
    equal(results[1], results[0])

    of_rows = [leaf for leaf in jax.tree.leaves(state) if leaf.shape[:1] == (m,)]
    held = m // DEVICES if m % DEVICES == 0 else m
    assert len(of_rows) == 4 * 4
    assert {leaf.addressable_shards[0].data.shape[0] for leaf in of_rows} == {held}
    lies = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), first, state)
    assert jax.tree.all(lies)
    if held == m:
        return
    text = program.as_text()
    for what, shapes in collectives(text):
        assert what == "all-reduce" and all(m not in s and held not in s for s in shapes), shapes
    # No copy of the rows: each is updated in place.
    memory: Any = program.memory_analysis()
    assert memory.alias_size_in_bytes > 0.99 * sum(leaf.nbytes for leaf in of_rows) / DEVICES

    path = tmp_path / "state.npz"
    sgp.save(path, state)
    expected = svi.run(KEY, 3, X, y, 24, init_state=state, progress_bar=False).losses
    for inputs in (data(EVEN), sgp.shard_rows(mesh(4), *data(EVEN))):
        resumed = row_svi(m)
        fresh = resumed.init(jax.random.key(5), *inputs, 24)
        loaded = sgp.load(path, like=fresh)
        place = [leaf.sharding for leaf in jax.tree.leaves(loaded)]
        assert place == [leaf.sharding for leaf in jax.tree.leaves(fresh)]
        result = resumed.run(KEY, 3, *inputs, 24, init_state=loaded, progress_bar=False)
        equal(result.losses, expected)
