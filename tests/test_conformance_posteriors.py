"""What every operator, preconditioner, distribution, posterior and ELBO must do.

See `registry.py`; `test_conformance.py` has the other layers.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jaxtyping import Array
from numpyro.distributions.kl import kl_divergence

import numpyro_scalegp as sgp
from numpyro_scalegp.neighbors.latent_posterior import NeighborValuesPosterior
from numpyro_scalegp.processes.posterior import AbstractPosterior
from tests.conformance import (
    Compiled,
    assert_all_finite,
    assert_one_line,
    assert_round_trip,
    each,
    inputs,
    tolerance,
)
from tests.files import ROOT
from tests.registry import (
    DISTRIBUTIONS,
    ELBOS,
    NUM_DRAWS,
    OPERATORS,
    POSTERIORS,
    PRECONDITIONERS,
)

LENGTHSCALES = 1.2, 1.7


def kernel(lengthscale: Array) -> sgp.kernels.Matern52:
    return sgp.kernels.Matern52(lengthscale, 1.5)


def evaluate(function: Any, *args: Any, promotion: str = "strict") -> list[Any]:
    """The results at both lengthscales, from one compilation."""
    compiled = Compiled(function)
    with jax.numpy_dtype_promotion(promotion):
        results = [compiled(jnp.asarray(value), *args) for value in LENGTHSCALES]
    assert compiled.traces == 1
    return results


def assert_moments(draws: Array, mean: Array, variance: Array, rounding: float) -> None:
    """Mean and mean square deviation of normal draws, within 4.5 standard errors."""
    draws, mean, variance = (np.asarray(a, np.float64) for a in (draws, mean, variance))
    slack = 4.5 * np.sqrt(variance / len(draws)) + np.sqrt(rounding / len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - mean) < slack)
    squares = np.square(draws - mean).mean(axis=0)
    assert np.all(np.abs(squares - variance) < 4.5 * np.sqrt(2 / len(draws)) * variance + rounding)


# Operators


@pytest.mark.slow
@each("factory", OPERATORS)
def test_operator_agrees_with_its_matrix(factory, dtype):
    X, index, columns = inputs(), jnp.array([6, 2, 0]), jnp.array([0, 6, 3, 1])
    V, W = jnp.sin(jnp.arange(14.0)).reshape(7, 2), jnp.cos(jnp.arange(6.0)).reshape(3, 2)

    def everything(lengthscale: Array) -> Any:
        H = factory(kernel(lengthscale), X)
        products = {
            "matmul": H.matmul(V),
            "rows": H.rows(index),
            "block": H.block(index, columns),
            "diagonal": H.diagonal(),
            "noise": H.noise(),
            "rows_matmul": H.rows_matmul(index, V),
            "columns_matmul": H.columns_matmul(index, W),
        }
        return H, products, H.bilinear_gradient(V, jnp.flip(V))

    def bilinear(H: Any) -> Array:
        A = H.kernel.covariance(H.X) + jnp.diag(H.noise())
        return jnp.sum(V * (A @ jnp.flip(V)))

    for H, products, gradient in evaluate(everything):
        assert_round_trip(H)
        assert_one_line(H)
        assert (H.size, H.dtype) == (7, dtype)
        A = np.asarray(H.kernel.covariance(X)) + np.diag(np.broadcast_to(H.noise_variance, 7))
        expected = {
            "matmul": A @ V,
            "rows": A[index],
            "block": A[index][:, columns],
            "diagonal": np.diagonal(A),
            "noise": np.broadcast_to(H.noise_variance, 7),
            "rows_matmul": A[index] @ V,
            "columns_matmul": A[:, index] @ W,
        }
        atol = 7 * tolerance(jnp.asarray(A))
        for name, value in products.items():
            assert value.dtype == dtype, name
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=atol, err_msg=name)
        leaves = zip(jax.tree.leaves(gradient), jax.tree.leaves(jax.grad(bilinear)(H)), strict=True)
        for leaf, dense in leaves:
            np.testing.assert_allclose(leaf, dense, rtol=0, atol=10 * atol)


# Preconditioners


@each("factory", PRECONDITIONERS)
def test_preconditioner_is_one_matrix(factory, dtype):
    preconditioner, X = factory(), inputs()
    assert factory() == preconditioner
    assert hash(factory()) == hash(preconditioner)

    def everything(lengthscale: Array) -> Any:
        H = sgp.solvers.KernelOperator(kernel(lengthscale), X, jnp.linspace(0.2, 0.9, 7))
        factor = preconditioner.factorize(H)
        samples = factor.sample(jax.random.key(0), 2000)
        A = H.kernel.covariance(X) + jnp.diag(H.noise())
        return factor, factor.solve(jnp.eye(7)), factor.log_determinant(), samples, A

    for factor, inverse, log_determinant, samples, A in evaluate(everything):
        assert_round_trip(factor)
        assert inverse.dtype == log_determinant.dtype == samples.dtype == dtype
        assert samples.shape == (7, 2000)
        inverse, samples, A = (np.asarray(a, np.float64) for a in (inverse, samples, A))
        eps = 100 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(inverse, inverse.T, rtol=0, atol=eps * np.abs(inverse).max())
        P = np.linalg.inv(inverse)
        sign, expected = np.linalg.slogdet(P)
        assert sign == 1
        np.testing.assert_allclose(log_determinant, expected, rtol=0, atol=10 * eps)
        # Never worse than no preconditioner at all.
        eigenvalues = np.linalg.eigvals(inverse @ A).real
        assert 0 < eigenvalues.max() / eigenvalues.min() < (1 + eps) * np.linalg.cond(A)
        # var(x_i x_j) = P_ii P_jj + P_ij^2
        covariance = samples @ samples.T / 2000
        error = np.sqrt((np.outer(np.diag(P), np.diag(P)) + P**2) / 2000)
        assert np.all(np.abs(covariance - P) < 4.5 * error)


# Distributions


@each("factory", DISTRIBUTIONS)
def test_distribution_is_one_of_numpyro(factory, dtype):
    X, key = inputs(), jax.random.key(0)

    def everything(lengthscale: Array) -> Any:
        d = factory(kernel(lengthscale), X)
        value = jnp.sin(jnp.arange(float(np.prod(d.event_shape)))).reshape(d.event_shape)
        parameters, static = eqx.partition(d, eqx.is_inexact_array)

        def log_prob(parameters: Any, value: Array) -> Array:
            return eqx.combine(parameters, static).log_prob(value)

        density, gradient = jax.value_and_grad(log_prob, argnums=(0, 1))(parameters, value)
        densities = d.log_prob(jnp.stack([value, value]))
        return d, d.mean, d.variance, d.sample(key, (2000,)), density, densities, gradient

    first, second = evaluate(everything)
    for d, mean, variance, draws, density, densities, gradient in (first, second):
        assert_round_trip(d)
        if not isinstance(d, sgp.ChevronNormal):  # shown as NumPyro's distributions are
            assert_one_line(d)
        assert (d.batch_shape, d.event_shape[0]) == ((), 7)
        event, all_draws = d.event_shape, (2000, *d.event_shape)
        for leaf, shape in ((mean, event), (variance, event), (draws, all_draws), (density, ())):
            assert (leaf.shape, leaf.dtype) == (shape, dtype)
        np.testing.assert_allclose(densities, [density, density], rtol=1e-4)
        assert_all_finite((mean, variance, draws, density, gradient))
        assert_moments(draws, mean, variance, 1000 * float(jnp.finfo(dtype).eps))
    assert first[4] != second[4]


# Posteriors


def jitter(dtype: Any) -> float:
    """A bound on the added jitter in variances of order one."""
    return 1000 * float(jnp.finfo(dtype).eps)


def entries_of(method: str) -> dict[str, str]:
    """The entries of the table in docs/howto/inspecting.md for each class."""
    page = (ROOT / "docs/howto/inspecting.md").read_text(encoding="utf-8")
    lines = page[page.index("| posterior | of |") :].partition("\n\n")[0].splitlines()
    header, _, *rows = [[cell.strip(" ") for cell in line.strip("|").split("|")] for line in lines]
    column = header.index(f"`{method}`")
    return {row[0].strip("`"): row[column] for row in rows}


def has(method: str, posterior: AbstractPosterior) -> bool:
    """Whether a posterior has the method by that table."""
    entry = entries_of(method)[type(posterior).__name__]
    assert entry in ("yes", "no", "not with `Vecchia`")
    process = getattr(posterior, "process", None)
    return entry == "yes" or ("not" in entry and not isinstance(process, NeighborValuesPosterior))


def assert_covariance(
    covariance: Array, variance: Array, draws: Array, rows: int, rounding: float
) -> None:
    """Variances on the diagonal, and the covariance of draws within five standard errors."""
    covariance, variance, draws = (np.asarray(a, np.float64) for a in (covariance, variance, draws))
    size = int(np.prod(variance.shape[rows:]))
    assert covariance.shape == variance.shape[:rows] + 2 * variance.shape[rows:]
    C = covariance.reshape(-1, size, size)
    diagonal = np.diagonal(C, axis1=1, axis2=2)
    np.testing.assert_allclose(C, C.swapaxes(1, 2), rtol=0, atol=rounding)
    np.testing.assert_allclose(diagonal, variance.reshape(-1, size), rtol=1e-4, atol=rounding)
    flat = draws.reshape(len(draws), -1, size)
    gaps = flat - flat.mean(axis=0)
    error = np.sqrt((diagonal[:, :, None] * diagonal[:, None] + C**2) / len(draws))
    off = np.abs(np.einsum("sbi,sbj->bij", gaps, gaps) / len(draws) - C)
    assert np.all(off < 5.0 * error + rounding)


ABSENT = {
    "covariance": "has no `covariance`: each input has separate neighbors",
    "leave_one_out": "leave_one_out",
    "cavity": "has no `cavity`: only `LaplaceGP",
}


@each("factory", POSTERIORS)
def test_posterior_has_what_the_page_says(factory):
    """A posterior has the method, or its error names an alternative."""
    X, posteriors = inputs(), []

    def call(method: str) -> Any:
        posterior = factory(kernel(jnp.asarray(1.2)), X)
        posteriors.append(posterior)
        assert_one_line(posterior)
        attribute = getattr(posterior, method)
        return attribute(X) if method == "covariance" else attribute()

    for method, message in ABSENT.items():
        try:
            jax.eval_shape(functools.partial(call, method))
            is_there = True
        except ValueError as error:
            assert message in str(error)
            is_there = False
        assert has(method, posteriors[-1]) == is_there


def test_the_page_has_every_posterior() -> None:
    X, classes = inputs(), set()
    for _, factory in POSTERIORS:
        made = lambda factory=factory: classes.add(type(factory(kernel(1.2), X)))  # noqa: E731
        jax.eval_shape(made)
    assert {cls.__name__ for cls in classes} == set(entries_of("covariance"))


@each("factory", POSTERIORS)
def test_posterior_has_moments_and_draws(factory, dtype):
    X = inputs()
    # The data, with a row that occurs twice, a row near them and one far off.
    Xs, key = jnp.concatenate([X, X[1:2] + 0.05, X[1:2] + 50.0]), jax.random.key(1)

    def everything(lengthscale: Array) -> Any:
        posterior = factory(kernel(lengthscale), X)

        def moments(p: AbstractPosterior, chunk_size: int | None = None) -> tuple[Array, Array]:
            return p.mean(Xs, chunk_size=chunk_size), p.variance(Xs, chunk_size=chunk_size)

        predictive = posterior.predictive(Xs, 0.2)
        has_covariance = has("covariance", posterior)
        return {
            "posterior": posterior,
            "covariance": posterior.covariance(Xs) if has_covariance else None,
            "moments": moments(posterior),
            "chunked": moments(posterior, 4),
            "predictive": (predictive.mean, predictive.variance),
            "draws": posterior.sample(key, Xs, NUM_DRAWS),
            "one": posterior.sample(key, Xs),
        }

    first, second = evaluate(everything)
    for results in (first, second):
        posterior, (mean, variance), draws = (
            results[name] for name in ("posterior", "moments", "draws")
        )
        assert_round_trip(posterior)
        assert_one_line(posterior)
        shape = mean.shape
        rows = shape.index(9)
        assert shape[:rows] == getattr(posterior, "batch_shape", ())
        assert variance.shape == shape
        assert draws.shape == (NUM_DRAWS, *shape)
        assert results["one"].shape == (1, *shape)
        results.pop("posterior")
        assert {leaf.dtype for leaf in jax.tree.leaves(results)} == {dtype}
        assert_all_finite(results)
        assert np.all(variance >= 0)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=jitter(dtype))
        close(results["chunked"][0], mean)
        close(results["chunked"][1], variance)
        close(results["predictive"][0], mean)
        close(results["predictive"][1], variance + 0.2)
        assert_moments(draws, mean, variance, jitter(dtype))
        if (covariance := results["covariance"]) is not None:
            assert_covariance(covariance, variance, draws, rows, jitter(dtype))
        # A function has one value at one input.
        drawn = np.moveaxis(np.asarray(draws), 1 + rows, 0)
        assert np.abs(drawn[0] - drawn[6]).max() < 6 * np.sqrt(2 * jitter(dtype))
        assert np.ptp(drawn[0]) > 0
    assert not np.allclose(first["moments"][1], second["moments"][1])


def both_terms(kernel: Any) -> tuple[Any, Any]:
    """The terms of the sum below, in it or in a sum with another kernel."""
    inner = getattr(kernel, "left", kernel)
    while hasattr(inner, "kernel"):
        inner = inner.kernel
    return inner.left, inner.right


# A mixture and functions in a plate condition at each call, to hold one posterior at a time; in
# the other posteriors each input has its own neighbors.
FACTORIZES_AT_EACH_CALL = (
    "mixture",
    "outputs",
    "vecchia",
    "laplace_with_neighbors",
    "full_scale",
    "nearest_neighbors",
    "grid_in_time",
)


@each("factory", [pair for pair in POSTERIORS if pair[0] not in FACTORIZES_AT_EACH_CALL])
def test_moments_factorize_nothing(factory):
    X = inputs()
    posterior = factory(kernel(jnp.asarray(LENGTHSCALES[0])), X)
    program, *_ = eqx.filter_make_jaxpr(lambda q, Xs: (q.mean(Xs), q.variance(Xs)))(posterior, X)
    assert "cholesky" not in str(program)


# Posteriors whose functions are of the class of another's here, and made in the same way.
SAME_FUNCTIONS = (
    "exact_without_noise",
    "natural",
    "batch_with_hidden_rows",
    "multi_output_with_gaps",
    "grid_in_time",
    "grid_with_gaps",
)


@pytest.mark.one_interpreter
@each("factory", [pair for pair in POSTERIORS if pair[0] not in SAME_FUNCTIONS])
def test_posterior_draws_functions(factory):
    X, key = inputs(), jax.random.key(1)
    Xs = jnp.concatenate([X, X[1:2] + 0.05, X[1:2] + 50.0])

    def everything(lengthscale: Array, X: Array, Xs: Array) -> Any:
        Matern52 = sgp.kernels.Matern52
        posterior = factory(0.5 * (Matern52(lengthscale, 2.0) + Matern52(2.0 * lengthscale)), X)
        functions = posterior.sample_functions(key, NUM_DRAWS, num_features=32)
        parts = [posterior.component(lambda k, i=i: both_terms(k)[i]) for i in (0, 1)]
        shares = [
            (component.sample_functions(key, NUM_DRAWS, num_features=32)(Xs), component.mean(Xs))
            for component in parts
        ]

        def values(Xs: Array) -> tuple[Array, Array]:
            drawn = functions(Xs)
            return jnp.sum(drawn), drawn

        gradient, drawn = jax.grad(values, has_aux=True)(Xs)
        moments = posterior.mean(Xs), posterior.variance(Xs)
        return functions, drawn, gradient, moments, shares

    args = jnp.asarray(LENGTHSCALES[0]), X, Xs
    with jax.numpy_dtype_promotion("strict"):
        functions, values, gradient, moments, shares = jax.jit(everything)(*args)
    assert_round_trip(functions)
    assert values.shape == (NUM_DRAWS, *moments[0].shape)
    assert gradient.shape == Xs.shape
    assert_all_finite((values, gradient))
    rounding = jitter(values.dtype)
    mean, variance = moments
    assert_moments(values, mean, variance, rounding)
    # Those of the parts, and the mean function, add up to the whole's.
    drawn, means = (sum(share) for share in zip(*shares, strict=True))
    np.testing.assert_allclose(
        values - drawn, jnp.broadcast_to(mean - means, values.shape), atol=2e-3
    )
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        wide = jax.eval_shape(everything, *jax.tree.map(jnp.float64, args))
    assert {leaf.dtype for leaf in jax.tree.leaves(wide[1:])} == {jnp.dtype("float64")}


# ELBOs


def model(lengthscale: Array, X: Array, y: Array) -> None:
    phi = sgp.features.RandomFourier(kernel(lengthscale), 6, seed=0)
    f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def guide(lengthscale: Array, X: Array, y: Array) -> None:
    phi = sgp.features.RandomFourier(kernel(lengthscale), 6, seed=0)
    loc = numpyro.param("loc", jnp.zeros(6))
    scale_diag = numpyro.param("scale_diag", jnp.ones(6))
    columns = numpyro.param("columns", jnp.zeros((6, 2)))
    numpyro.sample("f", sgp.ChevronGP(phi, X, loc, scale_diag, columns))


@pytest.mark.slow
@each("factory", ELBOS)
def test_elbo_agrees_with_the_closed_form(factory):
    X = inputs()
    elbo, keys = factory(), jax.random.split(jax.random.key(0), 3000)

    def everything(lengthscale: Array, X: Array) -> Any:
        y = jnp.sin(X[:, 0])
        params = {
            "loc": jnp.linspace(-1.0, 1.0, 6),
            "scale_diag": jnp.linspace(0.2, 0.5, 6),
            "columns": 0.1 * jnp.ones((6, 2)),
        }

        def loss(params: Any, key: Array) -> Array:
            return elbo.loss(key, params, model, guide, lengthscale, X, y)

        losses, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, keys)
        features = sgp.features.RandomFourier(kernel(lengthscale), 6, seed=0)
        q = sgp.ChevronGP(features, X, *params.values())
        mean, variance = q.marginals()
        likelihood = dist.Normal(mean, 0.5).log_prob(y) - variance / (2 * 0.5**2)
        exact = kl_divergence(q, sgp.WeightSpaceGP(features, X)) - jnp.sum(likelihood)
        return losses, gradients, exact

    for losses, gradients, exact in evaluate(everything, X, promotion="standard"):  # NumPyro's own
        assert_all_finite((losses, gradients))
        assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradients))
        error = np.asarray(losses, np.float64).std() / np.sqrt(len(losses))
        off = (np.asarray(losses, np.float64).mean() - exact) / (error + 1e-5 * np.abs(exact))
        assert off > -4
        if getattr(elbo, "bound", None) is None:
            assert off < 4
    with jax.enable_x64(True):
        wide = jax.eval_shape(everything, *jax.tree.map(jnp.float64, (1.0, X)))
        assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype("float64")}
