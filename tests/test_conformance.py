"""What every kernel, solver, estimator, latent family and GP guide must do; see `registry.py`."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jaxtyping import Array
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.solvers import KernelOperator, StopReason
from numpyro_scalegp.tracing.runs import mutable_values
from numpyro_scalegp.variational.sparse.natural import NaturalSparseGP
from numpyro_scalegp.variational.state_space.family import NaturalStateSpaceGP
from tests.conformance import (
    Compiled,
    assert_all_finite,
    assert_one_line,
    assert_round_trip,
    each,
    inputs,
    large_batched_calls,
    of_columns,
    tolerance,
    with_neighbors,
)
from tests.registry import (
    ESTIMATORS,
    FEATURES,
    GUIDES,
    KERNELS,
    LATENT_FAMILIES,
    LOG_DETERMINANTS,
    NUM_COLUMNS,
    PRECONDITIONERS,
    SOLVERS,
)

# Kernels


@each("kernel", KERNELS)
def test_gram_is_a_covariance_matrix(kernel, dtype):
    k = kernel(1.0)
    X, Z = inputs(kernel=k), inputs(seed=1, kernel=k)
    K, C, variances = k(X, X), k(X, Z), k.diag(X)
    assert_one_line(k)
    assert (K.shape, variances.shape) == ((7, 7), (7,))
    assert K.dtype == C.dtype == variances.dtype == dtype

    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=tolerance(K, C))
    close(K, K.T)
    close(K[0], K[-1])
    close(jnp.diagonal(K), variances)
    for i, j in ((0, 0), (2, 5), (5, 2)):
        close(K[i, j], k(X[i][None], X[j][None])[0, 0])
        close(C[i, j], k(X[i][None], Z[j][None])[0, 0])
    assert np.linalg.eigvalsh(np.asarray(K, np.float64)).min() > -len(X) * tolerance(K)


@each("kernel", KERNELS)
def test_kernel_goes_through_transformations(kernel, dtype):
    X = inputs(kernel=kernel(1.0))
    compiled = Compiled(jax.vmap(lambda k: (k(X, X), k.diag(X))))
    for values in ((1.0, 1.4), (0.8, 1.2)):
        kernels = [kernel(value) for value in values]
        batch = compiled(jax.tree.map(lambda *leaves: jnp.stack(leaves), *kernels))
        for k, K, variances in zip(kernels, *batch, strict=True):
            expected = k(X, X)
            close = functools.partial(np.testing.assert_allclose, rtol=0, atol=tolerance(expected))
            close(K, expected)
            close(variances, jnp.diagonal(expected))
        assert not np.allclose(*batch[0]), "the factory must use its argument"
    assert compiled.traces == 1


@each("kernel", KERNELS)
def test_kernel_is_a_pytree_of_arrays(kernel, dtype):
    assert_round_trip(kernel(1.0))


@each("kernel", KERNELS)
def test_kernel_has_finite_derivatives(kernel):
    # In float32, where more overflows; `kernels/test_kernels.py` has exact values in float64.
    k = kernel(1.0)
    X = inputs(kernel=k)  # holds a duplicate row

    def total(k: AbstractKernel, X: Array, Z: Array) -> Array:
        return jnp.sum(jnp.sin(k(X, Z))) + jnp.sum(k.diag(X))

    def derivatives(*args: Any) -> Any:
        # All second derivatives enter the product with a vector that has no zeros.
        ones = jax.tree.map(jnp.ones_like, args)
        return jax.jvp(jax.grad(total, argnums=(0, 1, 2)), args, ones)

    gradient, product = derivatives(k, X, X)
    assert_all_finite((gradient, product))
    for leaf, derivative in zip(jax.tree.leaves(k), jax.tree.leaves(gradient[0]), strict=True):
        assert leaf.shape == derivative.shape
        assert np.any(derivative != 0)


@each("kernel", KERNELS)
def test_kernel_dtype_follows_its_arguments(kernel, x64):
    wide = kernel(1.0)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), wide)
    X = inputs(kernel=wide)
    for k in (wide, narrow):
        for rows in (X, X.astype(jnp.float32)):
            expected = jnp.result_type(rows, *jax.tree.leaves(k))
            assert jax.eval_shape(k, rows, rows).dtype == expected
            assert jax.eval_shape(k.diag, rows).dtype == expected


@each("kernel", KERNELS)
def test_kernel_promotes_no_types(kernel, x64):
    X = inputs(kernel=kernel(1.0))
    with jax.numpy_dtype_promotion("strict"):
        k = kernel(1.0)
        K, variances = jax.eval_shape(lambda k, X: (k(X, X), k.diag(X)), k, X)
    assert K.dtype == variances.dtype == jnp.float64


@each("kernel", KERNELS)
def test_kernel_rejects_bad_inputs(kernel, unchecked):
    k = kernel(1.0)
    X = inputs(kernel=k)
    with pytest.raises(ValueError, match=r"`X` must have shape \(n, d\), got \(7,\)"):
        k(X[:, 0], X)
    assert k.diag(X[None]).shape == (1, 7)
    with pytest.raises(ValueError, match=r"`Z` must have shape \(n, 4\), got \(7, 3\)"):
        k(X, X[:, :3])
    for bad in (jnp.nan, jnp.inf):
        broken = X.at[2, 1].set(bad)
        with pytest.raises(ValueError, match=r"`X` must be finite, got 1 .* index \(2, 1\)"):
            k(broken, X)
        with pytest.raises(ValueError, match="`Z` must be finite"):
            k(X, broken)
        with pytest.raises(ValueError, match="`X` must be finite"):
            k.diag(broken)


# Solvers


def system(lengthscale: float = 1.0) -> tuple[KernelOperator, Array]:
    operator = KernelOperator(sgp.kernels.Matern32(lengthscale, 1.5), inputs(), 0.5)
    return operator, jnp.stack([jnp.sin(jnp.arange(7.0)), jnp.ones(7), jnp.zeros(7)], axis=1)


@each("solver", SOLVERS)
def test_solver_goes_through_transformations(solver, dtype):
    # A solver has no leaves, unless it holds an object with arrays.
    leaves, structure = jax.tree.flatten(solver())
    assert jax.tree.unflatten(structure, leaves) == solver()
    assert hash(solver()) == hash(solver())
    assert_one_line(solver())
    key = jax.random.key(0)
    compiled = Compiled(
        lambda solver, operator, B, guess: solver.solve(operator, B, guess=guess, key=key)
    )
    for lengthscale in (1.0, 1.4):
        operator, B = system(lengthscale)
        solution = compiled(solver(), operator, B, jnp.zeros_like(B))
        assert solution.value.shape == B.shape
        assert solution.residual.shape == (3,)
        assert (solution.value.dtype, solution.residual.dtype) == (dtype, dtype)
        assert solution.epochs.dtype == dtype
        assert jnp.issubdtype(solution.iterations.dtype, jnp.integer)
        assert solution.converged.dtype == bool
        assert_all_finite(solution)
        assert solution.converged
        H = operator.kernel.covariance(operator.X) + 0.5 * jnp.eye(7)
        error = np.linalg.norm(B - H @ solution.value, axis=0)
        assert np.all(error <= 5e-3 * np.linalg.norm(B, axis=0))
    assert compiled.traces == 1


@each("solver", SOLVERS)
def test_solver_has_no_derivative(solver, dtype):
    def total(operator: KernelOperator, B: Array) -> Array:
        return jnp.sum(solver().solve(operator, B, key=jax.random.key(0)).value)

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))(*system())
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


@each("solver", SOLVERS)
def test_solver_promotes_no_types(solver, x64):
    with jax.numpy_dtype_promotion("strict"):
        operator, B = system()

        def solutions(operator: KernelOperator, B: Array) -> Any:
            key = jax.random.key(0)
            guesses = None, B, jnp.stack([B, 2 * B])
            return [solver().solve(operator, B, guess=guess, key=key) for guess in guesses]

        for solution in jax.eval_shape(solutions, operator, B):
            assert (
                solution.value.dtype
                == solution.residual.dtype
                == solution.epochs.dtype
                == jnp.float64
            )


def nearly_singular() -> list[Array]:
    """Inputs with every row twice, and one row many times."""
    X = inputs()
    return [jnp.concatenate([X, X]), jnp.broadcast_to(X[0], (14, NUM_COLUMNS))]


def assert_honest(solver: Any) -> None:
    """In float32 with little noise, the reported residual is the true one."""
    B = jnp.stack([jnp.sin(jnp.arange(14.0)), jnp.ones(14)], axis=1)
    kernel = sgp.kernels.Matern32(1.0, 1.5)
    compiled = Compiled(lambda solver, H: solver.solve(H, B, key=jax.random.key(0)))
    for X in nearly_singular():
        solution = compiled(solver, KernelOperator(kernel, X, 1e-4))
        H = np.asarray(kernel(X, X), np.float64) + 1e-4 * np.eye(14)
        value = np.asarray(solution.value, np.float64)
        assert np.all(np.isfinite(value))
        true = np.linalg.norm(B - H @ value, axis=0) / np.linalg.norm(B, axis=0)
        # A product in float32 has errors of this size itself.
        rounding = 1e-6 * 14 * 1.5 * np.linalg.norm(value, axis=0)
        assert np.all(np.abs(true - solution.residual) <= 1e-5 + rounding)
        within = np.all(solution.residual <= getattr(solver, "tolerance", np.inf))
        assert within or not solution.converged
        assert solution.converged == (solution.reason == StopReason.CONVERGED)
    assert compiled.traces == 1


@each("solver", SOLVERS)
def test_solver_is_honest_where_float32_ends(solver):
    assert_honest(solver())


@each("preconditioner", PRECONDITIONERS)
def test_preconditioner_serves_where_float32_ends(preconditioner):
    assert_honest(sgp.solvers.ConjugateGradients(1e-2, 50.0, preconditioner()))


# Estimators


def collapsed(estimator: Any, lengthscale: float = 1.0) -> sgp.GaussianProcess:
    kernel = of_columns(sgp.kernels.Matern32(lengthscale, 1.5), estimator)
    key = jax.random.key(0) if estimator.is_stochastic else None
    X = inputs()
    estimator = with_neighbors(estimator, X)
    return sgp.GaussianProcess(kernel, X, 0.1, mean=0.3, estimator=estimator, key=key)


@each("solver", SOLVERS)
def test_solver_makes_no_large_batched_calls(solver):
    """Also for more right-hand sides than share a Krylov space."""
    keys = jax.random.split(jax.random.key(0), 2)
    X, B = jax.random.normal(keys[0], (400, 4)), jax.random.normal(keys[1], (400, 300))
    H = sgp.solvers.KernelOperator(sgp.kernels.RBF(1.0), X, 0.5)
    solve = lambda B: solver().solve(H, B, key=keys[0])  # noqa: E731
    assert not large_batched_calls(jax.make_jaxpr(solve)(B).jaxpr)


def gradient_of(gp: sgp.GaussianProcess, y: Array) -> sgp.GaussianProcess:
    """The derivatives of the log marginal likelihood; None for the key, which is discrete."""
    parameters, static = eqx.partition(gp, eqx.is_inexact_array)
    return jax.jit(jax.grad(lambda p: eqx.combine(p, static).log_prob(y)))(parameters)


@pytest.mark.parametrize(
    "gp",
    [
        lambda kernel, X: sgp.GaussianProcess(
            kernel,
            X,
            0.1,
            estimator=sgp.estimators.Hutchinson(sgp.solvers.ConjugateGradients(), 200),
            key=jax.random.key(0),
        ),
        lambda kernel, X: sgp.LaplaceGP(kernel, X, lambda f: dist.Poisson(jnp.exp(f))),
    ],
    ids=["iterative", "laplace"],
)
def test_members_of_a_batch_make_no_large_calls(gp):
    X = jax.random.normal(jax.random.key(1), (300, 2))
    density = lambda lengthscale: gp(sgp.kernels.RBF(lengthscale), X).log_prob(jnp.ones(300))  # noqa: E731
    program = jax.make_jaxpr(jax.vmap(jax.value_and_grad(density)))(jnp.ones(8))
    assert not large_batched_calls(program.jaxpr)


@pytest.mark.slow
@each("estimator", ESTIMATORS)
def test_estimator_goes_through_transformations(estimator, dtype):
    gp, scaled = collapsed(estimator()), collapsed(estimator(), 1.4)
    y = jnp.sin(jnp.arange(7.0))
    assert_round_trip(gp)
    assert_one_line(gp)
    compiled = Compiled(lambda gp: gp.log_prob(y))
    # Rounding may decide whether an iterative solve takes one step more.
    rtol = 0.01 if gp.estimator.is_stochastic else 100 * jnp.finfo(dtype).eps
    close = functools.partial(np.testing.assert_allclose, rtol=rtol)
    expected = jnp.stack([compiled(gp), compiled(scaled)])
    assert compiled.traces == 1
    assert expected.dtype == dtype
    assert expected[0] != expected[1]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), gp, scaled)
    batch = jax.jit(jax.vmap(lambda gp: gp.log_prob(y)))(stacked)
    close(batch, expected)


@each("estimator", ESTIMATORS)
def test_estimator_has_finite_derivatives(estimator, dtype):
    y = jnp.sin(jnp.arange(7.0))
    gp = collapsed(estimator())
    gradient = gradient_of(gp, y)
    assert_all_finite(gradient)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradient))
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(gradient))
    shapes = [leaf.shape for leaf in jax.tree.leaves(gradient)]
    assert shapes == [leaf.shape for leaf in jax.tree.leaves(gp) if eqx.is_inexact_array(leaf)]


@each("estimator", ESTIMATORS)
def test_estimator_promotes_no_types(estimator, x64):
    with jax.numpy_dtype_promotion("strict"):
        gp = collapsed(estimator())
        value = jax.eval_shape(lambda gp: gp.log_prob(jnp.zeros(7)), gp)
    assert value.dtype == jnp.float64


def small(estimator: Any) -> Any:
    """The estimator with few probes and features, if it has such fields."""
    sizes = {"num_probes": 2, "num_features": 4, "num_logdet_probes": 2}
    fields = {field.name for field in dataclasses.fields(estimator)}
    return dataclasses.replace(estimator, **{k: v for k, v in sizes.items() if k in fields})


def estimators_and_solvers() -> list[Any]:
    params = []
    for name, factory in ESTIMATORS:
        if not hasattr(factory(), "solver"):
            params.append(pytest.param(factory, id=name))
            continue
        for solver_name, solver in SOLVERS:
            with_solver = functools.partial(
                lambda factory, solver: small(dataclasses.replace(factory(), solver=solver())),
                factory,
                solver,
            )
            params.append(pytest.param(with_solver, id=f"{name}-{solver_name}"))
    return params


@pytest.mark.one_interpreter
@pytest.mark.filterwarnings("ignore:a covariance matrix is not positive:RuntimeWarning")
@pytest.mark.parametrize("factory", estimators_and_solvers())
def test_bad_hyperparameters_under_jit_give_nan(factory):
    """Value, gradient and what a state records; never a number, nor a solution that is kept."""
    estimator = with_neighbors(factory(), inputs(11))
    site = "solver" if hasattr(estimator, "solver") else None
    good = {
        "lengthscale": jnp.asarray(1.0),
        "variance": jnp.asarray(1.5),
        "noise": jnp.asarray(0.5),
        "X": inputs(11),
        "y": jnp.sin(jnp.arange(12.0)),
    }

    def process(p: dict[str, Array], state: Any = None) -> sgp.GaussianProcess:
        kernel = of_columns(sgp.kernels.Matern32(p["lengthscale"], p["variance"]), estimator)
        options = {"estimator": estimator, "key": jax.random.key(0), "state": site}
        with numpyro.handlers.substitute(data={"solver": state}):
            return sgp.GaussianProcess(kernel, p["X"], p["noise"], **options)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def evaluate(p: dict[str, Array], state: Any) -> Any:
        gp = process(p, state)
        return gp.log_prob(p["y"]), gp.state

    (value, state), gradient = evaluate(good, process(good).state)
    assert_all_finite((value, gradient))
    bad = [(name, value) for name in list(good)[:3] for value in (-1.0, 0.0, jnp.nan, jnp.inf)]
    for name, number in (*bad, ("X", jnp.nan), ("y", jnp.nan)):
        broken = good[name].at[(3,) * good[name].ndim].set(number)
        (value, after), gradient = evaluate({**good, name: broken}, state)
        assert np.isnan(value), (name, number)
        # An estimator may evaluate the finite inputs and observations.
        for leaf in ("lengthscale", "variance", "noise", name):
            assert np.isnan(gradient[leaf]).any(), (name, number, leaf)
        if site is not None:
            history = after.history()
            assert not history["converged"][-1]
            assert history["epochs"][-1] <= 4, (name, number)
            np.testing.assert_array_equal(after.memory.solutions, state.memory.solutions)


# Features


@each("features", FEATURES)
def test_features_go_through_transformations(features, dtype):
    X, index = inputs(), jnp.array([2, 0, 2])
    phi = features(sgp.kernels.RBF(1.0), X)
    assert_round_trip(phi)
    assert_one_line(phi)
    compiled = Compiled(lambda phi, X: (phi(X), phi.columns(X, index)))
    values, columns = compiled(phi, X)
    assert values.shape == (7, phi.size(X))
    assert values.dtype == columns.dtype == dtype
    np.testing.assert_allclose(columns, values[:, index], rtol=0, atol=tolerance(values))
    again = compiled(features(sgp.kernels.RBF(1.4), X), X)[0]
    assert compiled.traces == 1
    assert not np.allclose(values, again)
    moved = phi.with_hyperparameters(features(sgp.kernels.RBF(1.4), X).hyperparameters())
    np.testing.assert_allclose(moved(X), again, rtol=0, atol=tolerance(values))
    gradient = eqx.filter_grad(lambda phi: jnp.sum(jnp.sin(phi.columns(X, index))))(phi)
    assert_all_finite(gradient)


# Log-determinants from mini-batches


@each("factory", LOG_DETERMINANTS)
def test_log_determinants_go_through_transformations(factory, dtype):
    X, y = inputs(), jnp.linspace(-1.0, 1.0, 7)

    def model(log_scale: Array) -> None:
        phi = lambda X: jnp.exp(log_scale) * jnp.sin(X)  # noqa: E731
        weights = numpyro.param("weights", jnp.linspace(0.0, 1.0, NUM_COLUMNS))
        gp = sgp.FeatureSpaceGP(phi, X, jnp.asarray(0.5), weights, num_data=20, logdet=factory())
        numpyro.sample("y", gp, obs=y)

    def loss(log_scale: Array, mutable: Any) -> tuple[Array, Any]:
        substituted = numpyro.handlers.substitute(model, data=mutable)
        trace = numpyro.handlers.trace(substituted).get_trace(log_scale)
        return trace["y"]["fn"].log_prob(y), mutable_values(trace)

    step = Compiled(jax.value_and_grad(loss, has_aux=True))
    (_, state), _ = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(0.1), {})
    for i in range(3):
        (value, state), gradient = step(jnp.asarray(0.1 * i), state)
        assert value.dtype == gradient.dtype == dtype
        assert_all_finite((value, gradient, state))
    assert step.traces == 1
    for leaf in jax.tree.leaves(state):
        assert leaf.dtype in (dtype, jnp.int32)


# Latent families


def prior_and_family(factory: Any, lengthscale: float = 1.0) -> tuple[Any, Any]:
    kernel, X = sgp.kernels.Matern52(lengthscale, 1.5), inputs()
    q = factory(kernel, X)
    if isinstance(q, sgp.ChevronGP):
        return sgp.WeightSpaceGP(q.features, X), q
    if isinstance(q, NaturalStateSpaceGP):
        kernel = kernel.on((0,))
    return sgp.LatentGP(kernel, X), q


@each("family", LATENT_FAMILIES)
def test_family_goes_through_transformations(family, dtype):
    prior, q = prior_and_family(family)
    for distribution in (prior, q):
        assert_round_trip(distribution)
    key = jax.random.key(0)
    compiled = Compiled(lambda q: (q.mean, q.variance, q.sample(key), q.sample(key, (3, 2))))
    results = compiled(q)
    assert [leaf.shape for leaf in results] == [(7,), (7,), (7,), (3, 2, 7)]
    assert all(leaf.dtype == dtype for leaf in results)
    assert_all_finite(results)
    assert np.all(results[1] > 0)
    again = compiled(prior_and_family(family, 1.4)[1])
    assert compiled.traces == 1
    assert not np.allclose(results[1], again[1])


@pytest.mark.slow
@each("family", LATENT_FAMILIES)
def test_family_has_a_divergence_with_finite_derivatives(family, dtype):
    def objective(q: Any, prior: Any) -> Array:
        # Raises where no rule for the pair is registered.
        # Without derivatives of draws.
        is_natural = isinstance(q, NaturalSparseGP | NaturalStateSpaceGP)
        values = jnp.stack(q.marginals()) if is_natural else q.sample(jax.random.key(0))
        return kl_divergence(q, prior) + jnp.sum(jnp.square(values))

    prior, q = prior_and_family(family)
    assert kl_divergence(q, prior) > 0
    assert_all_finite(eqx.filter_jit(eqx.filter_grad(objective))(q, prior))


@each("family", LATENT_FAMILIES)
def test_family_promotes_no_types(family, x64):
    with jax.numpy_dtype_promotion("strict"):
        prior, q = prior_and_family(family)
        draw, divergence = jax.eval_shape(
            lambda p, q: (q.sample(jax.random.key(0)), kl_divergence(q, p)), prior, q
        )
    assert draw.dtype == divergence.dtype == jnp.float64


# Guides


def regression(X: Array, y: Array, prior: Any = sgp.LatentGP) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", prior(sgp.kernels.Matern32(lengthscale), X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def in_weight_space(kernel: AbstractKernel, X: Array) -> sgp.WeightSpaceGP:
    return sgp.WeightSpaceGP(sgp.features.RandomFourier(kernel, 6, seed=0), X)


def in_time(kernel: AbstractKernel, X: Array) -> sgp.LatentGP:
    return sgp.LatentGP(kernel.on((0,)), X)


def model_of(guide: Any) -> Any:
    """The regression with the prior that a guide is for."""
    made = guide(regression)
    if made.prior is sgp.WeightSpaceGP:
        return functools.partial(regression, prior=in_weight_space)
    if isinstance(made, sgp.guides.AutoStateSpaceGP):
        return functools.partial(regression, prior=in_time)
    return regression


@pytest.mark.slow
@each("guide", GUIDES)
def test_guide_takes_part_in_svi(guide, dtype):
    X, y = inputs(), jnp.sin(jnp.arange(7.0))
    model = model_of(guide)
    guide = guide(model)
    assert_one_line(guide)
    optimizer, objective = optax.adam(0.01), TraceMeanField_ELBO()
    if guide.follows_hyperparameters:
        optimizer = sgp.infer.natural_gradients(optimizer)
        objective = sgp.infer.QuadratureELBO()
    svi = SVI(model, guide, optimizer, objective)
    state = svi.init(jax.random.key(0), X, y)
    state, loss = jax.jit(svi.update)(state, X, y)
    params = svi.get_params(state)
    assert loss.dtype == dtype
    assert_all_finite((loss, params))

    def inspect(params: dict[str, Array]) -> Any:
        posterior = guide.posterior(params, X, y)
        draws = guide.sample_posterior(jax.random.key(1), params, X, y, sample_shape=(3,))
        return draws, posterior.mean(X[:2]), posterior.variance(X[:2])

    draws, mean, variance = jax.jit(inspect)(params)
    assert {name: value.shape for name, value in draws.items()} == {
        "lengthscale": (3,),
        "f": (3, 7),
    }
    assert mean.shape == variance.shape == (2,)
    assert_all_finite((draws, mean, variance))
    assert np.all(variance > 0)


@each("guide", GUIDES)
def test_guide_names_the_parameter_that_is_missing(guide):
    """In each method that takes parameters, with or without a key for a draw."""
    X, y, key = inputs(), jnp.sin(jnp.arange(7.0)), jax.random.key(0)
    model = model_of(guide)
    guide = guide(model)
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
    params = svi.get_params(svi.init(key, X, y))
    of_rest = {name for name in params if name.startswith("lengthscale")}
    of_median = {name for name in of_rest if not name.endswith("scale")}
    training_alone = {"f_auto_unexplained_scale"}  # no part of the fitted process
    assert of_median

    def predicted(less: dict[str, Array]) -> Any:
        return sgp.infer.Predictive(model, guide=guide, params=less, num_samples=2)(key, X, y)

    entries: list[tuple[set[str], Any]] = [
        (of_median, lambda less: guide.median(less)),
        (of_rest, lambda less: guide.rest_values(less, X, y, key=key)),
        (set(params), lambda less: guide.sample_posterior(key, less, X, y)),
        (set(params), lambda less: guide.posterior(less, X, y, key=key)),
        (set(params), lambda less: sgp.posterior(model, guide, less, X, y, key=key)),
        (set(params) - of_rest | of_median, lambda less: sgp.posterior(model, guide, less, X, y)),
        (set(params) - of_rest | of_median, lambda less: guide.function_means(less, X, y)),
        (set(params), predicted),
    ]
    for name in params.keys() - training_alone:
        less = {site: value for site, value in params.items() if site != name}
        for names, entry in entries:
            if name in names:
                with pytest.raises(ValueError, match=f"`params` lacks `{name}`: give all"):
                    entry(less)
