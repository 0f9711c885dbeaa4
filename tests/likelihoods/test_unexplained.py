"""The tightened bound of sparse GPs against closed forms and the exact evidence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jaxtyping import Array
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence

import numpyro_scalegp as sgp
from numpyro_scalegp.infer import QuadratureELBO

N, M = 12, 4
KEY = jax.random.key(0)
SD = 0.3


def inputs() -> Array:
    return jnp.linspace(-2.0, 2.0, N)[:, None]


def observations() -> Array:
    return jnp.array(np.random.default_rng(0).normal(size=N))


def deviations() -> Array:
    return jnp.linspace(0.2, 0.6, N)


def prior(X: Array) -> sgp.LatentGP:
    return sgp.LatentGP(sgp.kernels.RBF(0.6, 1.3), X)


def family(X: Array, points: int = M, unexplained_scale: Any = None) -> sgp.SparseGP:
    rng = np.random.default_rng(1)
    scale = jnp.tril(jnp.array(0.2 * rng.normal(size=(points, points)))) + 0.5 * jnp.eye(points)
    Z = jnp.linspace(-1.5, 1.5, points)[:, None]
    loc = jnp.array(rng.normal(size=points))
    kernel = prior(X).kernel
    return sgp.SparseGP(kernel, X, Z, loc, scale, unexplained_scale=unexplained_scale)


def bound(
    likelihood: Callable[[Array], Any],
    *,
    around: Any = None,
    unexplained_scale: Any = None,
    **options: Any,
) -> Array:
    X, y = inputs(), observations()

    def model() -> None:
        f = numpyro.sample("f", prior(X))
        with numpyro.plate("rows", N):
            numpyro.sample("y", likelihood(f), obs=y)

    def guide() -> None:
        numpyro.sample("f", family(X, unexplained_scale=unexplained_scale))

    if around is not None:
        model, guide = around(model), around(guide)
    loss = QuadratureELBO(20, **options)
    return jax.jit(lambda: -loss.loss(KEY, {}, model, guide))()


def expected(sd: Any, factor: float = 1.0, shift: Any = 0.0, active: Any = 1.0) -> Array:
    """Titsias's bound for Normal(factor f + shift, sd)."""
    q = family(inputs())
    mean, inside, unexplained = q.split_marginals()
    density = dist.Normal(factor * mean + shift, sd).log_prob(observations())
    precision = (factor / sd) ** 2
    rows = density - 0.5 * precision * inside - 0.5 * jnp.log1p(precision * unexplained)
    return jnp.sum(active * rows) - kl_divergence(q, prior(inputs()))


@pytest.mark.slow
def test_gaussian_likelihoods_have_the_logarithm(x64):
    X, sds = inputs()[:, 0], deviations()
    active = jnp.arange(N) < 5
    cases = [
        (lambda f: dist.Normal(f, SD), expected(SD)),
        (lambda f: dist.Normal(f, sds), expected(sds)),
        (lambda f: dist.Normal(2.0 * f + X, sds), expected(sds, 2.0, X)),
        (lambda f: dist.Normal(f, SD).mask(active), expected(SD, active=active)),
        (lambda f: dist.Normal(f[::-1][::-1], SD), expected(SD)),
    ]
    for likelihood, value in cases:
        np.testing.assert_allclose(bound(likelihood), value, rtol=1e-10)
        assert bound(likelihood) > bound(likelihood, tight=False) + 0.1


@pytest.mark.slow
def test_both_bounds_lie_below_the_evidence(x64):
    H = prior(inputs()).covariance() + SD**2 * jnp.eye(N)
    evidence = dist.MultivariateNormal(jnp.zeros(N), H).log_prob(observations())

    def best(tight: bool) -> Array:
        """The bound at the optimal q(v) for these inducing points, in closed form."""
        kernel, X, Z = prior(inputs()).kernel, inputs(), jnp.linspace(-1.5, 1.5, M)[:, None]
        K = kernel.covariance(Z) + 1e-10 * jnp.eye(M)
        A = jnp.linalg.solve(jnp.linalg.cholesky(K), kernel(Z, X))
        B = jnp.eye(M) + A @ A.T / SD**2
        scale = jnp.linalg.cholesky(jnp.linalg.inv(B))
        loc = jnp.linalg.solve(B, A @ observations()) / SD**2

        def model() -> None:
            f = numpyro.sample("f", prior(X))
            numpyro.sample("y", dist.Normal(f, SD).to_event(1), obs=observations())

        def guide() -> None:
            numpyro.sample("f", sgp.SparseGP(kernel, X, Z, loc, scale, jitter=1e-10))

        return -QuadratureELBO(tight=tight).loss(KEY, {}, model, guide)

    assert best(False) < best(True) - 0.1
    assert best(True) < evidence


@pytest.mark.slow
def test_other_likelihoods_have_the_bound_that_they_had(x64):
    likelihoods = [
        lambda f: dist.StudentT(4.0, f, SD),
        lambda f: dist.Normal(f**2, SD),
        lambda f: dist.Normal(jnp.abs(f), SD),
        lambda f: dist.Normal(jnp.where(f > 0.0, f, 2.0 * f), SD),
        # Zero curvature except at one value; and zero gradient, too.
        lambda f: dist.Laplace(f, SD),
        lambda f: dist.Normal(jnp.where(f > 0.0, 1.0, -1.0), SD),
        lambda f: dist.Normal(jnp.floor(f), SD),
    ]
    for likelihood in likelihoods:
        assert bound(likelihood) == bound(likelihood, tight=False)


@pytest.mark.slow
def test_one_scale_for_all_rows_of_other_likelihoods(x64):
    """Against the definition; the best value raises the bound, but not above the evidence."""

    def likelihood(f: Array) -> Any:
        return dist.StudentT(4.0, f, SD)

    mean, inside, unexplained = family(inputs()).split_marginals()
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)

    def expected(v: float) -> Array:
        deviation = jnp.sqrt(inside + v * unexplained)
        rows = [likelihood(mean + x * deviation).log_prob(observations()) for x in nodes]
        fit = jnp.sum(jnp.asarray(weights / weights.sum()) @ jnp.stack(rows))
        divergence = kl_divergence(family(inputs()), prior(inputs()))
        return fit - divergence - 0.5 * N * (v - 1.0 - jnp.log(v))

    bounds = {v: bound(likelihood, unexplained_scale=jnp.array(v)) for v in (0.1, 0.5, 1.0, 2.0)}
    for v, value in bounds.items():
        np.testing.assert_allclose(value, expected(v), rtol=1e-10)
    assert bounds[0.5] > bounds[1.0] + 0.1
    np.testing.assert_allclose(bounds[1.0], bound(likelihood, tight=False), rtol=1e-12)
    # The optimal factor of each row is used if it is known.
    gaussian = [
        bound(lambda f: dist.Normal(f, SD), unexplained_scale=v) for v in (None, jnp.array(0.5))
    ]
    assert gaussian[0] == gaussian[1]
    # The evidence by importance sampling from the prior.
    draws = dist.MultivariateNormal(jnp.zeros(N), prior(inputs()).covariance()).sample(
        KEY, (200_000,)
    )
    densities = jnp.sum(likelihood(draws).log_prob(observations()), axis=1)
    evidence = jax.scipy.special.logsumexp(densities) - jnp.log(len(draws))
    assert bounds[0.5] < evidence


def test_scales_of_the_bound_and_of_the_likelihood(x64):
    half = bound(lambda f: dist.Normal(f, SD), around=lambda run: handlers.scale(run, scale=0.5))
    np.testing.assert_allclose(half, 0.5 * bound(lambda f: dist.Normal(f, SD)), rtol=1e-10)

    X, y, q = inputs(), observations(), family(inputs())
    mean, inside, unexplained = q.split_marginals()

    def value(scale: float) -> Array:
        def model() -> None:
            f = numpyro.sample("f", prior(X))
            with numpyro.plate("rows", N), handlers.scale(scale=scale):
                numpyro.sample("y", dist.Normal(f, SD), obs=y)

        return -QuadratureELBO().loss(KEY, {}, model, lambda: numpyro.sample("f", family(X)))

    def total(scale: float, weight: float) -> Array:
        rows = scale * (dist.Normal(mean, SD).log_prob(y) - 0.5 * inside / SD**2)
        cost = 0.5 * weight * jnp.log1p(scale * unexplained / SD**2 / weight)
        return jnp.sum(rows - cost) - kl_divergence(q, prior(X))

    # A tempered likelihood; and a scaled one, as in mini-batches without plates.
    np.testing.assert_allclose(value(0.25), total(0.25, 1.0), rtol=1e-10)
    np.testing.assert_allclose(value(5.0), total(5.0, 5.0), rtol=1e-10)


@pytest.mark.parametrize("kind", ("normal", "student"))
def test_mini_batches_are_unbiased(kind, x64):
    X, y, size = inputs(), observations(), 4
    scale = jnp.array(0.05)

    def likelihood(f: Array) -> Any:
        return dist.Normal(f, SD) if kind == "normal" else dist.StudentT(4.0, f, SD)

    def model(X: Array, y: Array) -> None:
        rows = sgp.plate("rows", N, size)
        X_batch, y_batch = rows.take(X, y)
        f = numpyro.sample("f", prior(X_batch))
        with rows:
            numpyro.sample("y", likelihood(f), obs=y_batch)

    def guide(X: Array, y: Array) -> None:
        with sgp.plate("rows", N, size) as index:
            pass
        numpyro.sample("f", family(X[index], unexplained_scale=scale))

    loss = QuadratureELBO(20)
    keys = jax.random.split(KEY, 2000)
    values = np.asarray(-jax.lax.map(lambda key: loss.loss(key, {}, model, guide, X, y), keys))
    error = values.std() / np.sqrt(len(values))
    exact = expected(SD) if kind == "normal" else bound(likelihood, unexplained_scale=scale)
    assert abs(values.mean() - exact) < 4 * error
    untightened = bound(likelihood, tight=False)
    assert abs(values.mean() - untightened) > 4 * error


@pytest.mark.slow
def test_two_functions_of_one_gaussian_likelihood(x64):
    X, y = inputs(), observations()

    def value(second: Callable[[Array, Array], Any], tight: bool) -> Array:
        def model() -> None:
            f, g = numpyro.sample("f", prior(X)), numpyro.sample("g", prior(X))
            with numpyro.plate("rows", N):
                numpyro.sample("y", second(f, g), obs=y)

        def guide() -> None:
            numpyro.sample("f", family(X))
            numpyro.sample("g", family(X, 3))

        return jax.jit(lambda: -QuadratureELBO(4, tight=tight).loss(KEY, {}, model, guide))()

    def total(f: Array, g: Array) -> Any:
        return dist.Normal(f + g, SD)

    gains = [
        0.5 * jnp.sum(q.split_marginals()[2] / SD**2 - jnp.log1p(q.split_marginals()[2] / SD**2))
        for q in (family(X), family(X, 3))
    ]
    np.testing.assert_allclose(value(total, True), value(total, False) + sum(gains), rtol=1e-10)
    # The noise depends on another function.
    scaled = [value(lambda f, g: dist.Normal(f, jnp.exp(g)), tight) for tight in (True, False)]
    assert scaled[0] == scaled[1]


def test_functions_of_a_plate_that_one_gaussian_likelihood_mixes(x64):
    """Each function has a separate cost, with its precision summed over outputs."""
    X, rng = inputs(), np.random.default_rng(2)
    weights, sds = jnp.array(rng.normal(size=(5, 2))), jnp.linspace(0.2, 0.6, 5)
    Y = jnp.array(rng.normal(size=(N, 5)))
    process = family(X)
    loc, root = (
        jnp.array(rng.normal(size=(2, M))),
        jnp.stack([process.scale_tril, 0.5 * jnp.eye(M)]),
    )
    q = sgp.SparseGP(process.kernel, X, process.inducing_points, loc, root)

    def model() -> None:
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", prior(X))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal((weights @ f).T, sds).to_event(1), obs=Y)

    def guide() -> None:
        with numpyro.plate("functions", 2):
            numpyro.sample("f", q)

    value = jax.jit(lambda: -QuadratureELBO().loss(KEY, {}, model, guide))()
    mean, inside, unexplained = q.split_marginals()
    precision = jnp.sum((weights / sds[:, None]) ** 2, axis=0)[:, None]
    density = jnp.sum(dist.Normal((weights @ mean).T, sds).log_prob(Y))
    lost = 0.5 * jnp.sum(precision * inside + jnp.log1p(precision * unexplained))
    divergence = jnp.sum(kl_divergence(q, prior(X)))
    np.testing.assert_allclose(value, density - lost - divergence, rtol=1e-10)


@pytest.mark.parametrize("tight", [1, "yes", None])
def test_what_is_no_switch(tight, unchecked):
    with pytest.raises(TypeError, match="`tight` must be True or False"):
        QuadratureELBO(tight=tight)
