"""The export to ArviZ, in assertions that hold for `InferenceData` and for `DataTree`."""

import functools
from typing import Any

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from jaxtyping import Array
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_scalegp as sgp

# During warmup a sampler tries hyperparameters for which the Cholesky factorization fails.
pytestmark = pytest.mark.filterwarnings("ignore:a covariance matrix:RuntimeWarning")

N, CHAINS, DRAWS = 10, 2, 30
KEY = jax.random.key(0)
NOISE = 0.05


def data() -> tuple[Array, Array]:
    X = jnp.linspace(-1.5, 1.5, N)[:, None]
    return X, jnp.sin(2 * X[:, 0]) + 0.1 * jnp.cos(20 * X[:, 0])


def collapsed(X: Array, y: Array | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    numpyro.deterministic("logarithm", jnp.log(lengthscale))
    numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(lengthscale), X, NOISE), obs=y)


def latent(X: Array, y: Array | None = None, batch: int | None = None) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    rows = sgp.plate("rows", X.shape[0], batch)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(lengthscale), X))
    with rows:
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@functools.cache
def sampled(model: Any) -> MCMC:
    mcmc = MCMC(
        NUTS(model, max_tree_depth=4),
        num_warmup=60,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(KEY, *data(), extra_fields=("potential_energy", "num_steps", "diverging"))
    return mcmc


@functools.cache
def trained() -> tuple[Any, Any]:
    guide = sgp.guides.AutoSparseGP(latent, inducing_points=data()[0][::2])
    svi = SVI(latent, guide, optax.adam(0.05), sgp.infer.QuadratureELBO(2))
    return guide, svi.run(KEY, 40, *data(), progress_bar=False)


@functools.cache
def exported(kind: str) -> Any:
    X, y = data()
    options = {"key": jax.random.key(1), "constant_data": {"X": X}}
    if kind == "svi":
        guide, result = trained()
        args = {"model_args": (X, y), "num_samples": CHAINS * DRAWS}
        return sgp.to_arviz(result, latent, guide, **args, **options)
    return sgp.to_arviz(sampled({"collapsed": collapsed, "latent": latent}[kind]), **options)


def groups(data: Any) -> set[str]:
    names = data.groups() if callable(data.groups) else data.groups
    return {name.strip("/") for name in names} - {""}


def values(data: Any, group: str, name: str) -> np.ndarray:
    return np.asarray(data[group][name])


KINDS = ["collapsed", "latent", "svi"]


@pytest.mark.slow
def test_says_where_draws_of_hyperparameters_vary_too_little():
    X, y = data()

    def attribute(**options: Any) -> str:
        guide = sgp.guides.AutoSparseGP(latent, inducing_points=X[::2], **options)
        optimizer = optax.adam(0.05)
        if guide.natural:
            optimizer = sgp.infer.natural_gradients(optimizer)
        svi = SVI(latent, guide, optimizer, sgp.infer.QuadratureELBO(2))
        result = svi.run(KEY, 1, X, y, progress_bar=False)
        args = {"model_args": (X, y), "num_samples": 2}
        exported_data = sgp.to_arviz(result, latent, guide, key=KEY, **args)
        return str(exported_data["posterior"].attrs.get("hyperparameters", ""))

    assert "vary too little, often by a factor of several: the function of Auto" in attribute()
    assert attribute(natural=True) == attribute(rest=AutoDelta) == ""
    assert "hyperparameters" not in exported("collapsed")["posterior"].attrs


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_groups_shapes_and_dimensions(kind):
    exported_data = exported(kind)
    assert groups(exported_data) == {
        "posterior",
        "posterior_predictive",
        "log_likelihood",
        "observed_data",
        "constant_data",
        "sample_stats",
    }
    shape = (1, CHAINS * DRAWS) if kind == "svi" else (CHAINS, DRAWS)
    posterior = exported_data["posterior"]
    expected = {"lengthscale", "logarithm"} if kind == "collapsed" else {"lengthscale", "f"}
    assert {str(name) for name in posterior.data_vars} == expected
    assert posterior["lengthscale"].dims == ("chain", "draw")
    assert posterior["lengthscale"].shape == shape
    if kind != "collapsed":
        assert posterior["f"].dims == ("chain", "draw", "f_dim_0")
        assert posterior["f"].shape == (*shape, N)
    for group in ("posterior_predictive", "log_likelihood"):
        variable = exported_data[group]["y"]
        assert variable.dims == ("chain", "draw", "y_dim_0")
        assert variable.shape == (*shape, N)
        assert np.isfinite(variable).all()
        assert set(exported_data[group].data_vars) == {"y"}
    X, y = data()
    assert exported_data["observed_data"]["y"].dims == ("y_dim_0",)
    np.testing.assert_array_equal(values(exported_data, "observed_data", "y"), y)
    np.testing.assert_array_equal(values(exported_data, "constant_data", "X"), X)
    assert exported_data["constant_data"]["X"].dims == ("X_dim_0", "X_dim_1")
    np.testing.assert_array_equal(posterior["draw"], np.arange(shape[1]))


@pytest.mark.parametrize("kind", ["collapsed", "latent"])
def test_posterior_is_that_of_the_sampler(kind):
    mcmc = sampled({"collapsed": collapsed, "latent": latent}[kind])
    for name, chains in mcmc.get_samples(group_by_chain=True).items():
        draws = values(exported(kind), "posterior", name)
        np.testing.assert_allclose(draws, chains, rtol=1e-6, atol=1e-7, err_msg=name)


def test_statistics_of_the_sampler():
    statistics = exported("collapsed")["sample_stats"]
    fields = sampled(collapsed).get_extra_fields(group_by_chain=True)
    np.testing.assert_array_equal(statistics["diverging"], fields["diverging"])
    np.testing.assert_array_equal(statistics["n_steps"], fields["num_steps"])
    np.testing.assert_array_equal(statistics["lp"], -fields["potential_energy"])
    assert statistics["diverging"].dims == ("chain", "draw")
    for name in ("jitter", "jitter_to_noise"):
        np.testing.assert_array_equal(statistics[name], np.zeros((CHAINS, DRAWS)))
    assert "jitter" not in exported("latent")["sample_stats"]


def test_jitter_beside_the_noise():
    def duplicates(X: Array, y: Array) -> None:
        numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(1.0), X, 1e-9), obs=y)

    X, y = jnp.zeros((4, 1)), jnp.zeros(4)
    with pytest.warns(RuntimeWarning, match="about 1000 times the noise variance"):
        result = sgp.to_arviz(
            {}, duplicates, lambda *_: None, key=KEY, model_args=(X, y), num_samples=1
        )
    statistics = result["sample_stats"]
    jitter = 10.0 * float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(statistics["jitter"], [[jitter]], rtol=1e-5)
    np.testing.assert_allclose(statistics["jitter_to_noise"], [[jitter / 1e-9]], rtol=1e-5)


def test_loss_of_svi():
    loss = exported("svi")["sample_stats"]["loss"]
    assert loss.dims == ("chain", "step")
    np.testing.assert_array_equal(np.asarray(loss)[0], trained()[1].losses)


@pytest.mark.parametrize("kind", KINDS)
def test_arviz_takes_it(kind):
    summary = arviz.summary(exported(kind), var_names=["lengthscale"])
    mean = values(exported(kind), "posterior", "lengthscale").mean()
    assert abs(float(summary["mean"].iloc[0]) - mean) < 0.01
    loo = arviz.loo(exported(kind))
    assert np.isfinite(loo.elpd_loo if hasattr(loo, "elpd_loo") else loo.elpd)


@pytest.mark.parametrize("chain", [0, 1])
def test_pointwise_log_likelihood_of_a_collapsed_site(chain):
    """For each draw the density of each observation given all others, by leaving it out."""
    X, y = (np.asarray(a, np.float64) for a in data())
    lengthscale = values(exported("collapsed"), "posterior", "lengthscale")[chain, 5]
    H = np.exp(-0.5 * (X - X.T) ** 2 / lengthscale**2) + NOISE * np.eye(N)
    pointwise = values(exported("collapsed"), "log_likelihood", "y")[chain, 5]
    for i in range(N):
        train = np.arange(N) != i
        gain = np.linalg.solve(H[np.ix_(train, train)], H[train, i])
        held_out = scipy.stats.norm(gain @ y[train], np.sqrt(H[i, i] - gain @ H[train, i]))
        np.testing.assert_allclose(pointwise[i], held_out.logpdf(y[i]), rtol=2e-3)


@pytest.mark.parametrize("kind", ["latent", "svi"])
def test_pointwise_log_likelihood_of_a_latent_site(kind):
    f = values(exported(kind), "posterior", "f")
    expected = scipy.stats.norm(f, 0.3).logpdf(np.asarray(data()[1]))
    np.testing.assert_allclose(
        values(exported(kind), "log_likelihood", "y"), expected, rtol=1e-3, atol=1e-6
    )


def test_replicates_follow_the_function():
    f = values(exported("svi"), "posterior", "f")[0]
    noise = values(exported("svi"), "posterior_predictive", "y")[0] - f
    assert abs(noise.mean()) < 4 * 0.3 / np.sqrt(noise.size)
    assert abs(noise.std() - 0.3) < 4 * 0.3 / np.sqrt(2 * noise.size)


STEPS = 7


def iterative(X: Array, y: Array) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    solver = sgp.solvers.ConjugateGradients(1e-3, 30, sgp.preconditioners.PivotedCholesky(4))
    estimator = sgp.estimators.Pathwise(solver, 8, num_features=32)
    kernel = sgp.kernels.Matern32(lengthscale)
    gp = sgp.GaussianProcess(kernel, X, NOISE, estimator=estimator, state="solver")
    numpyro.sample("y", gp, obs=y)


@pytest.mark.slow
def test_iterative_estimator_with_a_state():
    """Records of each step of the fit, and of the solve of each draw."""
    guide = AutoNormal(iterative)
    svi = SVI(iterative, guide, optax.adam(0.05), Trace_ELBO())
    result = svi.run(KEY, STEPS, *data(), progress_bar=False)
    tree = sgp.to_arviz(
        result, iterative, guide, key=jax.random.key(1), model_args=data(), num_samples=5
    )
    history = result.state.mutable_state["solver"].history()
    statistics = tree["sample_stats"]
    assert statistics["loss"].shape == (1, STEPS)
    for name in ("residual", "probe_residual", "epochs", "converged", "standard_error"):
        assert statistics[name].dims == ("chain", "solver_step")
        assert statistics[name].shape == (1, STEPS)
        np.testing.assert_array_equal(np.asarray(statistics[name])[0], history[name])
        assert np.isfinite(np.asarray(statistics[name])).all()
    assert np.asarray(statistics["converged"]).all()
    for name in ("residual", "sample_residual", "epochs", "converged"):
        assert statistics[f"draw_{name}"].dims == ("chain", "draw")
        assert statistics[f"draw_{name}"].shape == (1, 5)
    assert np.asarray(statistics["draw_converged"]).all()
    # Each draw has its own lengthscale, and takes a solve.
    assert np.all(np.asarray(statistics["draw_epochs"]) >= 1)
    assert np.all(values(tree, "sample_stats", "draw_residual") <= 1e-3)
    for group in ("log_likelihood", "posterior_predictive"):
        assert values(tree, group, "y").shape == (1, 5, N)
        assert np.isfinite(values(tree, group, "y")).all()
    np.testing.assert_array_equal(values(tree, "observed_data", "y"), data()[1])
    assert {str(name) for name in tree["posterior"].data_vars} == {"lengthscale"}


def test_sites_to_keep():
    guide, result = trained()
    options = {"key": KEY, "model_args": data(), "num_samples": 3}
    tree = sgp.to_arviz(result.params, latent, guide, sites=["lengthscale"], **options)
    assert {str(name) for name in tree["posterior"].data_vars} == {"lengthscale"}
    assert "sample_stats" not in groups(tree)  # parameters alone have no losses
    with pytest.raises(ValueError, match=r"`sites` has \['g'\], the model has \['f', 'length"):
        sgp.to_arviz(result, latent, guide, sites=["g", "f"], **options)


def test_model_arguments_by_name_and_without_constants():
    guide, result = trained()
    X, y = data()
    kwargs = {"X": X, "y": y}
    by_name = sgp.to_arviz(result, latent, guide, key=KEY, model_kwargs=kwargs, num_samples=3)
    by_place = sgp.to_arviz(result, latent, guide, key=KEY, model_args=(X, y), num_samples=3)
    np.testing.assert_array_equal(
        values(by_name, "posterior", "f"), values(by_place, "posterior", "f")
    )
    assert "constant_data" not in groups(by_name)


def test_mini_batches_cannot_be_exported():
    guide, result = trained()
    with pytest.raises(ValueError, match=r"the plate `rows` takes 4 of 10 rows: pass `model_args`"):
        sgp.to_arviz(result, latent, guide, key=KEY, model_args=(*data(), 4))


def test_svi_needs_model_and_guide():
    guide, result = trained()
    for missing in ((None, guide), (latent, None)):
        with pytest.raises(ValueError, match="`model` and `guide` must be given with a result"):
            sgp.to_arviz(result, *missing, key=KEY, model_args=data())


# Families, labels and masks


def features_site(X: Array, y: Array) -> None:
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    weights = numpyro.param("weights", jnp.zeros(2))
    logdet = sgp.log_determinants.MiniBatch()
    phi = lambda X: scale * jnp.concatenate([X, X**2], axis=1)  # noqa: E731
    gp = sgp.FeatureSpaceGP(phi, X, NOISE, weights, num_data=len(X), logdet=logdet)
    numpyro.sample("y", gp, obs=y)


def weight_space(X: Array, y: Array) -> None:
    f = numpyro.sample("f", sgp.WeightSpaceGP(lambda X: jnp.concatenate([X, X**2], axis=1), X))
    with sgp.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


FAMILIES = {
    "collapsed": (collapsed, AutoNormal),
    "features": (features_site, AutoNormal),
    "sparse": (latent, functools.partial(sgp.guides.AutoSparseGP, num_inducing=4)),
    "hybrid": (
        latent,
        functools.partial(sgp.guides.AutoHybridGP, num_inducing=3, num_residual=5),
    ),
    "weight space": (weight_space, functools.partial(sgp.guides.AutoChevronGP, rank=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_in_every_family(family):
    model, make_guide = FAMILIES[family]
    guide, (X, y) = make_guide(model), data()
    is_collapsed = family in ("collapsed", "features")
    loss = Trace_ELBO() if is_collapsed else sgp.infer.QuadratureELBO(2)
    result = SVI(model, guide, optax.adam(0.01), loss).run(KEY, 1, X, y, progress_bar=False)
    labels = [f"station {i}" for i in range(N)]
    tree = sgp.to_arviz(
        result,
        model,
        guide,
        key=KEY,
        model_args=(X, y),
        num_samples=25,
        constant_data={"X": X},
        coords={"row": labels, "unused": [1, 2]},
        dims={"y": ["row"], "X": ["row", None]} | ({} if is_collapsed else {"f": ["row"]}),
    )
    for group in ("posterior_predictive", "log_likelihood"):
        assert tree[group]["y"].dims == ("chain", "draw", "row")
        assert list(tree[group]["row"].values) == labels
    assert tree["observed_data"]["y"].dims == ("row",)
    assert tree["constant_data"]["X"].dims == ("row", "X_dim_1")
    assert tree["constant_data"].sizes["X_dim_1"] == 1
    if not is_collapsed:
        assert tree["posterior"]["f"].dims == ("chain", "draw", "row")
        assert list(tree["posterior"]["row"].values) == labels
    loo = arviz.loo(tree)
    assert np.isfinite(loo.elpd_loo if hasattr(loo, "elpd_loo") else loo.elpd)


def masked(X: Array, y: Array, observed: Array, way: str) -> None:
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    shared = dist.Normal(level + X[:, 0], 0.3)
    if way == "handler":
        with numpyro.handlers.mask(mask=observed), numpyro.plate("rows", len(X)):
            numpyro.sample("y", shared, obs=y)
    elif way == "site":
        numpyro.sample("y", shared.mask(observed).to_event(0), obs=y)
    elif way == "table":  # two outputs with different gaps
        table, observed_table = (
            jnp.stack([y, y], axis=1),
            jnp.stack([observed, observed[::-1]], axis=1),
        )
        wide = dist.Normal(level + X, jnp.array([0.3, 0.4]))
        numpyro.sample("y", wide.mask(observed_table), obs=table)
    else:
        numpyro.sample("y", shared.mask(observed & False), obs=y)


@pytest.mark.parametrize("way", ["handler", "site", "table", "all"])
def test_hidden_rows_are_left_out_of_loo(way):
    X, y = data()
    observed = jnp.arange(N) % 3 != 1
    y = jnp.where(observed, y, jnp.nan) if way in ("handler", "site") else y
    mcmc = MCMC(NUTS(masked), num_warmup=20, num_samples=25, progress_bar=False)
    mcmc.run(KEY, X, y, observed, way)
    options = {"coords": {"row": np.arange(100, 100 + N)}, "dims": {"y": ["row"]}}
    tree = sgp.to_arviz(mcmc, key=KEY, **options)
    assert tree["posterior_predictive"]["y"].shape[:3] == (1, 25, N)
    assert tree["observed_data"]["y"].shape[0] == N
    if way == "all":
        assert "log_likelihood" not in groups(tree)
        return
    pointwise = tree["log_likelihood"]["y"]
    assert pointwise.dims == ("chain", "draw", "y_counted")
    observed_mask = np.asarray(observed)
    level = values(tree, "posterior", "level")[..., None]
    if way == "table":
        observed_mask = np.stack([observed_mask, observed_mask[::-1]], axis=1)
        mean = level[..., None] + np.asarray(X)
        expected = scipy.stats.norm(mean, [0.3, 0.4]).logpdf(np.asarray(y)[:, None])[
            ..., observed_mask
        ]
        np.testing.assert_array_equal(pointwise["y_counted"], np.flatnonzero(observed_mask))
    else:
        expected = scipy.stats.norm(level + np.asarray(X[:, 0]), 0.3).logpdf(np.asarray(y))
        expected = expected[..., observed_mask]
        np.testing.assert_array_equal(pointwise["y_counted"], 100 + np.flatnonzero(observed_mask))
    np.testing.assert_allclose(pointwise, expected, rtol=1e-3, atol=1e-5)
    loo = arviz.loo(tree)
    assert loo.n_data_points == observed_mask.sum()
    assert np.isfinite(loo.elpd_loo if hasattr(loo, "elpd_loo") else loo.elpd)


@pytest.mark.slow
@pytest.mark.parametrize("gaps", [False, True])
def test_a_batch_has_leave_one_out_densities_of_each_member(gaps):
    """Rows without a target in any member are left out of all members."""
    X, y = data()
    y = jnp.stack([y, -y, 2.0 * y])
    shown = np.arange(N) % 3 != 1 if gaps else np.ones(N, bool)

    def model() -> None:
        with numpyro.plate("groups", 3):
            variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.3))
            kernel = sgp.kernels.RBF(0.7, variance)
            gp = sgp.GaussianProcess(kernel, X, NOISE, observed=shown if gaps else None)
            numpyro.sample("y", gp, obs=jnp.where(shown, y, jnp.nan))

    mcmc = MCMC(NUTS(model), num_warmup=5, num_samples=4, progress_bar=False)
    mcmc.run(KEY)
    tree = sgp.to_arviz(mcmc, key=KEY)
    assert tree["posterior_predictive"]["y"].shape == (1, 4, 3, N)
    variance = mcmc.get_samples()["variance"]
    for draw in range(4):
        each = [
            sgp.GaussianProcess(sgp.kernels.RBF(0.7, variance[draw, g]), X[shown], NOISE)
            .condition(y[g, shown])
            .leave_one_out()
            .log_prob(y[g, shown])
            for g in range(3)
        ]
        ours = np.asarray(tree["log_likelihood"]["y"])[0, draw].reshape(3, -1)
        np.testing.assert_allclose(ours, each, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_labels_that_do_not_fit():
    guide, result = trained()
    export = functools.partial(
        sgp.to_arviz, result, latent, guide, key=KEY, model_args=data(), num_samples=2
    )
    with pytest.raises(ValueError, match="`dims` has `g`, and there are"):
        export(dims={"g": ["row"]})
    with pytest.raises(ValueError, match=r"`dims` has \['a', 'b'\] for `f`, .* lengths \(10,\)"):
        export(dims={"f": ["a", "b"]})
    with pytest.raises(ValueError, match=r"`dims` has 'row' for `f`, .* give a list of names"):
        export(dims={"f": "row"})
    with pytest.raises(ValueError, match="`row` of `A`, of length 3, and of `B`, of length 4"):
        export(constant_data={"A": np.ones(3), "B": np.ones(4)}, dims={"A": ["row"], "B": ["row"]})
    with pytest.raises(ValueError, match=r"`coords` has labels of shape \(3,\) for the dimension"):
        export(dims={"f": ["row"]}, coords={"row": [1, 2, 3]})


def test_factor_terms_are_left_out():
    """For a model with data, and for a model whose likelihood is a factor."""

    def model(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        numpyro.factor("prior", -jnp.sum(jnp.square(f)))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    def by_factor(X: Array, y: Array) -> None:
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(1.0), X))
        numpyro.factor("likelihood", dist.Normal(f, 0.3).log_prob(y).sum())

    process = sgp.SparseGP(
        sgp.kernels.RBF(1.0), data()[0], data()[0][::3], jnp.zeros(4), jnp.eye(4)
    )
    for each, names in ((model, {"y"}), (by_factor, set())):
        tree = sgp.to_arviz(
            {},
            each,
            lambda *_: numpyro.sample("f", process),
            key=KEY,
            model_args=data(),
            num_samples=2,
        )
        for group in ("log_likelihood", "posterior_predictive", "observed_data"):
            present = set(tree[group].data_vars) if group in groups(tree) else set()
            assert present == names
