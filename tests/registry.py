"""Every object of a layer that the conformance suite runs: adding one means adding one line here.

Each list holds pairs of an id and a factory, which builds a new object at each call, so that the
default type of the running test applies.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from flax import nnx
from jaxtyping import Array
from numpyro.distributions import Distribution

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import AbstractEstimator
from numpyro_scalegp.features import AbstractFeatures
from numpyro_scalegp.guides import AbstractGPGuide
from numpyro_scalegp.integrated.finite_rkhs.log_determinant import AbstractLogDeterminant
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.likelihoods.elbo import AbstractParticleELBO
from numpyro_scalegp.linear.preconditioners import AbstractPreconditioner
from numpyro_scalegp.processes.expansion import ExpansionPosterior, WhitenedNormal
from numpyro_scalegp.processes.mixture import MixturePosterior
from numpyro_scalegp.processes.outputs import OutputsPosterior
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.functions import constant_function
from numpyro_scalegp.solvers import AbstractSolver, KernelOperator
from numpyro_scalegp.variational.shifted import ShiftedGP
from numpyro_scalegp.variational.sparse.natural import NaturalSparseGP
from numpyro_scalegp.variational.state_space.family import NaturalStateSpaceGP
from tests.extending import CLASSES

# Input columns that the kernels below expect.
NUM_COLUMNS = 4
# Number of posterior draws for tests of moments.
NUM_DRAWS = 400
ARD = (0.7, 1.1, 1.6, 2.3)


def _ard(scale: float) -> Array:
    return scale * jnp.array(ARD)


def _loadings(scale: float) -> Array:
    return scale * jnp.array([[1.0, 0.2], [-0.4, 0.3], [0.7, 0.6]])


def _curve(X: Array) -> Array:
    return jnp.stack([jnp.sin(X[:, 0]), X[:, 1] * X[:, 2], X[:, 3]], axis=1)


def _power(weights: Array, X: Array) -> Array:
    return jnp.tanh(X @ weights)


def _linear(scale: float) -> eqx.Module:
    network = eqx.nn.Linear(NUM_COLUMNS, 2, key=jax.random.key(0))
    return eqx.tree_at(lambda net: net.weight, network, scale * network.weight)


def _mlp(scale: float) -> eqx.Module:
    network = eqx.nn.MLP(NUM_COLUMNS, 2, 5, 1, activation=jnp.tanh, key=jax.random.key(1))
    return eqx.tree_at(lambda net: net.layers[0].weight, network, scale * network.layers[0].weight)


class _FlaxNetwork(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        dtype = jnp.zeros(()).dtype
        self.first = nnx.Linear(NUM_COLUMNS, 5, param_dtype=dtype, rngs=rngs)
        self.second = nnx.Linear(5, 2, param_dtype=dtype, rngs=rngs)

    def __call__(self, X: Array) -> Array:
        return self.second(jnp.tanh(self.first(X)))


def _flax(scale: float) -> nnx.Module:
    network = _FlaxNetwork(nnx.Rngs(0))
    network.first.kernel[...] = scale * network.first.kernel[...]
    return network


# A kernel's factory takes the value of a hyperparameter, so that a test can ask for the same
# structure with other numbers.
KERNELS: list[tuple[str, Callable[[float], AbstractKernel]]] = [
    ("rbf", lambda s: sgp.kernels.RBF(s, 1.3)),
    ("rbf_ard", lambda s: sgp.kernels.RBF(_ard(s), 2.0)),
    ("matern12", lambda s: sgp.kernels.Matern12(s, 0.7)),
    ("matern12_ard", lambda s: sgp.kernels.Matern12(_ard(s))),
    ("matern32", lambda s: sgp.kernels.Matern32(s, 0.7)),
    ("matern32_ard", lambda s: sgp.kernels.Matern32(_ard(s), s)),
    ("matern52", lambda s: sgp.kernels.Matern52(s)),
    ("matern52_ard", lambda s: sgp.kernels.Matern52(_ard(s), 1.5)),
    ("rational_quadratic", lambda s: sgp.kernels.RationalQuadratic(s, alpha=0.8)),
    ("rational_quadratic_ard", lambda s: sgp.kernels.RationalQuadratic(_ard(s), s, 1.5)),
    ("matern", lambda s: sgp.kernels.Matern(s, 1.2, 0.7)),
    ("matern_by_smoothness", lambda s: sgp.kernels.Matern(_ard(1.0), s)),
    ("wendland", lambda s: sgp.kernels.Wendland(2.0 * s, 0.7, max_dims=NUM_COLUMNS)),
    ("wendland_twice_smooth", lambda s: sgp.kernels.Wendland(3.0 * s, smoothness=2).on((1, 3))),
    (
        "on_sphere",
        lambda s: sgp.kernels.OnSphere(sgp.kernels.Matern32(s, 0.7), radius=57.3).on((0, 1)),
    ),
    (
        "great_circle",
        lambda s: sgp.kernels.OnSphere(
            sgp.kernels.Wendland(3.0 * s), radius=57.3, great_circle=True
        ).on((1, 2)),
    ),
    (
        "gneiting",
        lambda s: sgp.kernels.Gneiting(sgp.kernels.Matern32([s, 1.2, 2.0]), 1.4, 0.6, 0.8, 0.9),
    ),
    ("periodic", lambda s: sgp.kernels.Periodic(1.2, period=s)),
    (
        "periodic_without_constant",
        lambda s: sgp.kernels.Periodic(1.2, period=s, constant=False).on((0,)),
    ),
    ("periodic_ard", lambda s: sgp.kernels.Periodic(_ard(s), 2.0 * _ard(1.0), 0.6)),
    ("multiscale", lambda s: sgp.kernels.MultiscaleRBF(jnp.array([s, 2.0]), 1.5)),
    (
        "orthogonal_additive",
        lambda s: sgp.kernels.OrthogonalAdditive(_ard(s), [0.5, 1.0, 0.4], 0.2, 0.9),
    ),
    ("constant", lambda s: sgp.kernels.Constant(s)),
    ("linear", lambda s: sgp.kernels.Linear(s, bias=0.3)),
    ("coregion", lambda s: sgp.kernels.Coregion(_loadings(s), jnp.array([0.5, s, 0.1])).on((2,))),
    (
        "derivatives",
        lambda s: sgp.kernels.WithDerivatives(
            sgp.kernels.Matern52(s).on((0, 1)) * sgp.kernels.RationalQuadratic(1.3, alpha=0.7)
            + sgp.kernels.Matern32([1.0, 2.0, s])
        ),
    ),
    ("harmonic", lambda s: sgp.kernels.Harmonic(s, quality=3.0, variance=0.7).on((1,))),
    ("overdamped", lambda s: sgp.kernels.Harmonic(1.5, quality=0.2 * s).on((1,))),
    ("cosine", lambda s: sgp.kernels.Cosine(s, 0.7).on((0,))),
    ("wiener", lambda s: sgp.kernels.Wiener(s, origin=-0.5).on((0,))),
    ("integrated_wiener", lambda s: sgp.kernels.IntegratedWiener(s, origin=-0.5).on((3,))),
    ("sum", lambda s: sgp.kernels.RBF(s) + sgp.kernels.Linear(0.5)),
    ("product", lambda s: sgp.kernels.Matern52(s) * sgp.kernels.Periodic(1.0, period=2.0)),
    ("scaled", lambda s: s * sgp.kernels.Matern32(1.2)),
    ("active_dims", lambda s: sgp.kernels.Matern32([s, 2.0]).on((0, 3))),
    (
        "nested",
        lambda s: (
            2.0 * (sgp.kernels.RBF(s).on((1,)) + sgp.kernels.Constant(0.5))
            + sgp.kernels.Matern12(1.0).on((0, 2)) * sgp.kernels.RationalQuadratic(2.0, alpha=1.0)
        ),
    ),
    ("mapped_function", lambda s: sgp.kernels.FeatureMapped(sgp.kernels.RBF(s), _curve)),
    (
        "mapped_partial",
        lambda s: sgp.kernels.FeatureMapped(
            sgp.kernels.Matern52(1.0), functools.partial(_power, s * jnp.eye(NUM_COLUMNS)[:, :2])
        ),
    ),
    (
        "mapped_equinox_linear",
        lambda s: sgp.kernels.FeatureMapped(sgp.kernels.Matern32(1.0), _linear(s)),
    ),
    (
        "mapped_equinox_mlp",
        lambda s: sgp.kernels.FeatureMapped(sgp.kernels.RBF(1.0), _mlp(s)),
    ),
    (
        "mapped_flax_nnx",
        lambda s: sgp.kernels.FeatureMapped(sgp.kernels.RBF(1.0), _flax(s)),
    ),
    ("own", lambda s: CLASSES["NeuralNetwork"](s)),
    ("own_stationary", lambda s: CLASSES["Cauchy"](_ard(s), 1.5)),
]  # fmt: skip

# operator = factory(kernel, X): covariances of noisy observations, in blocks.
OPERATORS: list[tuple[str, Callable[[AbstractKernel, Array], KernelOperator]]] = [
    ("one_block", lambda kernel, X: KernelOperator(kernel, X, 0.5)),
    ("single_rows", lambda kernel, X: KernelOperator(kernel, X, 0.5, memory_budget=1)),
    (
        "noise_per_row",
        lambda kernel, X: KernelOperator(kernel, X, jnp.linspace(0.1, 1.0, len(X))),
    ),
]

# preconditioner = factory(): approximate inverses of an operator with few rows.
PRECONDITIONERS: list[tuple[str, Callable[[], AbstractPreconditioner]]] = [
    ("identity", sgp.preconditioners.Identity),
    ("pivoted_cholesky", lambda: sgp.preconditioners.PivotedCholesky(3)),
    ("pivoted_cholesky_of_all", sgp.preconditioners.PivotedCholesky),
    ("randomly_pivoted_cholesky", lambda: sgp.preconditioners.RandomlyPivotedCholesky(3)),
    ("nystrom", lambda: sgp.preconditioners.Nystrom(3)),
    ("own", CLASSES["Jacobi"]),
]

# solver = factory(): solutions of linear systems with few rows.
SOLVERS: list[tuple[str, Callable[[], AbstractSolver]]] = [
    ("cholesky", lambda: sgp.solvers.Cholesky(1e-3)),
    (
        "conjugate_gradients",
        lambda: sgp.solvers.ConjugateGradients(1e-3, 50, sgp.preconditioners.PivotedCholesky(3)),
    ),
    (
        "plain_conjugate_gradients",
        lambda: sgp.solvers.ConjugateGradients(1e-3, 50, sgp.preconditioners.Identity()),
    ),
    (
        "russian_roulette",  # with so few rows, every term is evaluated
        lambda: sgp.solvers.RussianRouletteCG(
            0.1, 50, preconditioner=sgp.preconditioners.PivotedCholesky(3)
        ),
    ),
    ("alternating_projections", lambda: sgp.solvers.AlternatingProjections(3, 1e-3, 500)),
    (
        "stochastic_gradient_descent",
        lambda: sgp.solvers.StochasticGradientDescent(4, tolerance=1e-3, max_epochs=1000),
    ),
    (
        "stochastic_dual_descent",
        lambda: sgp.solvers.StochasticDualDescent(4, tolerance=1e-3, max_epochs=1000),
    ),
    ("adasap", lambda: sgp.solvers.ADASAP(4, tolerance=1e-3, max_epochs=500)),
    ("sketched_adasap", lambda: sgp.solvers.ADASAP(4, 2, tolerance=1e-3, max_epochs=500)),
    ("auto", lambda: sgp.solvers.AutoSolver(1e-3, 500)),
    ("own", lambda: CLASSES["Richardson"](1e-3)),
]


def _tight() -> AbstractSolver:
    # A tolerance that float32 can reach.
    return sgp.solvers.ConjugateGradients(1e-5, 50, sgp.preconditioners.PivotedCholesky(4))


# estimator = factory(): log marginal likelihoods for `sgp.GaussianProcess`.
ESTIMATORS: list[tuple[str, Callable[[], AbstractEstimator]]] = [
    ("cholesky", sgp.estimators.Cholesky),
    ("cholesky_with_jitter", lambda: sgp.estimators.Cholesky(jitter=1e-6)),
    ("hutchinson", lambda: sgp.estimators.Hutchinson(_tight(), 4)),
    ("pathwise", lambda: sgp.estimators.Pathwise(_tight(), 4, num_features=32)),
    ("random_fourier", lambda: sgp.estimators.RandomFourier(6)),
    ("sgpr", lambda: sgp.estimators.SGPR(jnp.linspace(-1.0, 1.0, 4 * NUM_COLUMNS).reshape(4, -1))),
    ("single_sample_rff", lambda: sgp.estimators.SingleSampleRFF(2, 2)),
    ("state_space", sgp.estimators.StateSpace),
    ("vecchia", lambda: sgp.estimators.Vecchia(3)),
    (
        "full_scale",
        lambda: sgp.estimators.FullScale(
            jnp.linspace(-1.0, 1.0, 3 * NUM_COLUMNS).reshape(3, -1), num_neighbors=3
        ),
    ),
    ("own", CLASSES["Dense"]),
]


def _sparse(kernel: AbstractKernel, X: Array) -> sgp.SparseGP:
    M = 4
    scale_tril = jnp.tril(0.1 * jnp.ones((M, M))) + 0.5 * jnp.eye(M)
    return sgp.SparseGP(kernel, X, X[:M] + 0.1, jnp.linspace(-1.0, 1.0, M), scale_tril)


def _natural(kernel: AbstractKernel, X: Array) -> NaturalSparseGP:
    sparse = _sparse(kernel, X)
    M = sparse.loc.size
    precision = jnp.eye(M) + 0.5 * jnp.ones((M, M))
    return NaturalSparseGP(kernel, X, sparse.inducing_points, sparse.loc, precision)


def _natural_in_time(kernel: AbstractKernel, X: Array) -> NaturalStateSpaceGP:
    loc, precision = jnp.linspace(-1.0, 1.0, len(X)), jnp.linspace(0.3, 0.9, len(X))
    return NaturalStateSpaceGP(kernel.on((0,)), X, loc, precision)


def _hybrid(kernel: AbstractKernel, X: Array) -> sgp.HybridGP:
    sparse = _sparse(kernel, X)
    parts = sparse.inducing_points, sparse.loc, sparse.scale_tril
    return sgp.HybridGP(kernel, X, *parts, X[4:] - 0.1, jnp.array([0.4, -0.3, 0.2]))


def _decoupled(kernel: AbstractKernel, X: Array) -> sgp.DecoupledGP:
    sparse = _sparse(kernel, X)
    weights = jnp.array([0.4, -0.3, 0.2, 0.1, -0.5])
    return sgp.DecoupledGP(
        kernel, X, X[:5] - 0.1, weights, sparse.inducing_points, sparse.scale_tril,
        num_columns=3, key=jax.random.key(0),
    )  # fmt: skip


def _neighbors(kernel: AbstractKernel, X: Array) -> sgp.VariationalNearestNeighborGP:
    loc, scale = jnp.linspace(-1.0, 1.0, 6), jnp.linspace(0.3, 0.9, 6)
    return sgp.VariationalNearestNeighborGP(kernel, X, X[:6] + 0.1, loc, scale, num_neighbors=2)


def _chevron(features: AbstractFeatures, X: Array) -> sgp.ChevronGP:
    m = features.size(X)
    columns = 0.1 * jnp.ones((m, 2))
    return sgp.ChevronGP(features, X, jnp.linspace(-1.0, 1.0, m), 0.5 * jnp.ones(m), columns)


def _sines(kernel: AbstractKernel, dims: tuple[int, ...], num: Any) -> AbstractFeatures:
    box = jnp.array([[-9.0], [9.0]]) * jnp.ones(len(dims))
    return sgp.features.HilbertSpace(kernel.on(dims), num, box)


# features = factory(kernel, X): finite feature maps.
FEATURES: list[tuple[str, Callable[[AbstractKernel, Array], AbstractFeatures]]] = [
    ("random_fourier", lambda kernel, X: sgp.features.RandomFourier(kernel, 6, seed=0)),
    (
        "stored_random_fourier",
        lambda kernel, X: sgp.features.RandomFourier(kernel, 6, seed=0).stored(NUM_COLUMNS),
    ),
    ("inducing_points", lambda kernel, X: sgp.features.InducingPoints(kernel, X[:4] + 0.1)),
    ("hilbert_space", lambda kernel, X: _sines(kernel, (0, 2), (3, 2))),
    ("sum_of_features", lambda kernel, X: _sines(kernel, (0,), 4) + _sines(kernel, (1,), 3)),
    ("product_of_features", lambda kernel, X: _sines(kernel, (0,), 3) * _sines(kernel, (3,), 2)),
    (
        "learned",
        lambda kernel, X: sgp.features.Learned(
            functools.partial(_power, kernel.lengthscale * jnp.eye(NUM_COLUMNS))
        ),
    ),
    ("own", lambda kernel, X: CLASSES["Cosines"](kernel.lengthscale, 5)),
]

# logdet = factory(): treatments of a log-determinant from mini-batches.
LOG_DETERMINANTS: list[tuple[str, Callable[[], AbstractLogDeterminant]]] = [
    ("variational", sgp.log_determinants.Variational),
    (
        "variational_schedule",
        lambda: sgp.log_determinants.Variational(lambda step: 1.0 / (step + 2)),
    ),
    ("compositional", sgp.log_determinants.Compositional),
    ("minimax", sgp.log_determinants.Minimax),
    ("mini_batch", sgp.log_determinants.MiniBatch),
]

# family = factory(kernel, X): variational families for a function site.
LATENT_FAMILIES: list[tuple[str, Callable[[AbstractKernel, Array], Distribution]]] = [
    ("sparse", _sparse),
    ("natural", _natural),
    ("natural_in_time", _natural_in_time),
    ("hybrid", _hybrid),
    ("decoupled", _decoupled),
    ("neighbors", _neighbors),
    ("chevron", lambda kernel, X: _chevron(sgp.features.RandomFourier(kernel, 6, seed=0), X)),
    (
        "chevron_inducing",
        lambda kernel, X: _chevron(sgp.features.InducingPoints(kernel, X[:4] + 0.1), X),
    ),
    (
        "own",
        lambda kernel, X: CLASSES["PseudoDataGP"](kernel, X, X[:4] + 0.1, X[:4, 0], jnp.ones(4)),
    ),
]


def _observed(
    kernel: AbstractKernel, X: Array, estimator: AbstractEstimator
) -> sgp.GaussianProcess:
    key = jax.random.key(0) if estimator.is_stochastic else None
    return sgp.GaussianProcess(kernel, X, 0.1, mean=0.3, estimator=estimator, key=key)


def _conditioned(estimator: Callable[[], AbstractEstimator], **options: int) -> Callable:
    def factory(kernel: AbstractKernel, X: Array) -> AbstractPosterior:
        return _observed(kernel, X, estimator()).condition(jnp.sin(X[:, 0]), **options)

    return factory


def _with_neighbors(estimator: sgp.estimators.Vecchia) -> AbstractEstimator:
    from tests.conformance import inputs  # its inputs, of which a test may have a traced copy

    with jax.ensure_compile_time_eval():
        return estimator.find_neighbors(inputs())


def _with_points(X: Array) -> AbstractEstimator:
    return _with_neighbors(sgp.estimators.FullScale(X[:3] + 0.1, num_neighbors=30))


def _counts(f: Array) -> Distribution:
    return dist.Poisson(jnp.exp(f))


def _heavier(f: Array) -> Distribution:
    return dist.Logistic(f, 0.5)


def _feature_space(kernel: AbstractKernel, X: Array) -> sgp.FeatureSpaceGP:
    phi = sgp.features.RandomFourier(kernel, 4, seed=0)
    logdet = sgp.log_determinants.MiniBatch()
    return sgp.FeatureSpaceGP(phi, X, 0.5, jnp.ones(4), num_data=20, logdet=logdet)


def _outputs(kernel: AbstractKernel, X: Array, **options: Any) -> sgp.MultiOutputGP:
    """Three outputs, of which two are the same but for the noise."""
    W = jnp.array([[1.0], [-0.5], [1.0]], X.dtype)
    outputs = sgp.kernels.Coregion(W, jnp.zeros(3, X.dtype))
    noise = jnp.array([0.1, 0.2, 0.3], X.dtype)
    means = jnp.array([0.3, 0.0, -0.2], X.dtype)
    return sgp.MultiOutputGP(kernel, outputs, X, noise, mean=means, **options)


def _of_outputs(kernel: AbstractKernel, X: Array, observed: Any = None) -> AbstractPosterior:
    return _outputs(kernel, X, observed=observed).condition(jnp.sin(X[:, :3]))


def _grid(kernel: AbstractKernel, X: Array, **options: Any) -> sgp.GridGP:
    """The first column of all rows, times the other columns of three."""
    return sgp.GridGP([kernel, kernel], [X[:, :1], X[:3, 1:]], 0.1, mean=0.3, **options)


def _of_grid(
    kernel: AbstractKernel, X: Array, num_samples: int | None = None, **options: Any
) -> AbstractPosterior:
    return _grid(kernel, X, **options).condition(jnp.sin(X[:, :3]), num_samples=num_samples)


# distribution = factory(kernel, X): distributions other than variational families.
DISTRIBUTIONS: list[tuple[str, Callable[[AbstractKernel, Array], Distribution]]] = [
    ("gaussian_process", lambda kernel, X: _observed(kernel, X, sgp.estimators.Cholesky())),
    ("multi_output", _outputs),
    ("grid", _grid),
    ("feature_space", _feature_space),
    ("laplace", lambda kernel, X: sgp.LaplaceGP(kernel, X, _heavier, mean=0.3)),
    ("latent", sgp.LatentGP),
    ("latent_with_mean", functools.partial(sgp.LatentGP, mean=0.3)),
    (
        "nearest_neighbors",  # with all rows before each, its variances are the kernel's
        lambda kernel, X: sgp.NearestNeighborGP(
            kernel, X, sgp.estimators.Vecchia(6).find_neighbors(X), jitter=1e-3
        ),
    ),
    (
        "weight_space",
        lambda kernel, X: sgp.WeightSpaceGP(sgp.features.RandomFourier(kernel, 6, seed=0), X),
    ),
    (
        "chevron_normal",
        lambda kernel, X: sgp.ChevronNormal(
            X[:, 0], kernel.lengthscale * jnp.exp(X[:, 1]), X[:, 2:]
        ),
    ),
]


def _of_sum(kernel: AbstractKernel, X: Array) -> AbstractPosterior:
    total = kernel + sgp.kernels.Linear(0.3)
    return sgp.GaussianProcess(total, X, 0.1).condition(jnp.sin(X[:, 0]))


def _of_groups(kernel: AbstractKernel, X: Array, observed: Array | None = None) -> Any:
    """Two functions with different variances, data points and means."""
    kernels = jnp.array([1.0, 0.5], X.dtype) * kernel
    if observed is not None:
        observed = jnp.stack([observed, ~observed])
    means = jnp.array([0.3, -0.2], X.dtype)
    rows = jnp.stack([X, 0.5 * X])
    gp = sgp.GaussianProcess(kernels, rows, 0.1, mean=means, observed=observed)
    return gp.condition(jnp.sin(rows[..., 0]))


def _lower_half(X: Array) -> Array:
    """Which rows are below the median in the first column: neither all nor none."""
    return X[:, 0] < jnp.median(X[:, 0])


# Draws of a hyperparameter, as from a sampler.
NOISES = (0.1, 0.2)


def _two_normals() -> WhitenedNormal:
    return WhitenedNormal(jnp.eye(2, 3), jnp.stack([0.5 * jnp.eye(3), 0.2 * jnp.eye(3)]))


class _GivenNoise(eqx.Module):
    kernel: AbstractKernel
    X: Array

    def __call__(self, noise: Array) -> AbstractPosterior:
        noise = noise.astype(self.X.dtype)
        return sgp.GaussianProcess(self.kernel, self.X, noise).condition(jnp.sin(self.X[:, 0]))


# posterior = factory(kernel, X): posteriors over a function.
POSTERIORS: list[tuple[str, Callable[[AbstractKernel, Array], AbstractPosterior]]] = [
    ("exact", _conditioned(sgp.estimators.Cholesky)),
    (
        "exact_without_noise",
        lambda kernel, X: sgp.LatentGP(kernel, X).condition(jnp.sin(X[:, 0])),
    ),
    # As many samples as the tests draw: its variance is theirs.
    (
        "pathwise",
        _conditioned(
            lambda: sgp.estimators.Pathwise(sgp.solvers.Cholesky(), 4, num_features=16),
            num_samples=NUM_DRAWS,
        ),
    ),
    ("feature", _conditioned(lambda: sgp.estimators.RandomFourier(6))),
    (
        "collapsed",
        lambda kernel, X: _conditioned(lambda: sgp.estimators.SGPR(X[:3]))(kernel, X),
    ),
    (
        "state_space",
        lambda kernel, X: _conditioned(sgp.estimators.StateSpace)(kernel.on((0,)), X),
    ),
    # With all rows for neighbors, and those that are drawn, its samples have its moments.
    ("vecchia", _conditioned(lambda: sgp.estimators.Vecchia(30))),
    (
        "full_scale",
        lambda kernel, X: _conditioned(lambda: _with_points(X))(kernel, X),
    ),
    (
        "laplace",
        lambda kernel, X: sgp.LaplaceGP(kernel, X, _counts, mean=0.3).condition(
            jnp.arange(len(X)) % 4
        ),
    ),
    (
        "laplace_in_time",
        lambda kernel, X: sgp.LaplaceGP(
            kernel.on((0,)), X, _counts, estimator=sgp.estimators.StateSpace()
        ).condition(jnp.arange(len(X)) % 4),
    ),
    (
        "laplace_with_neighbors",
        lambda kernel, X: sgp.LaplaceGP(
            kernel, X, _counts, mean=0.3, estimator=_with_neighbors(sgp.estimators.Vecchia(30))
        ).condition(jnp.arange(len(X)) % 4),
    ),
    ("sparse", lambda kernel, X: _sparse(kernel, X).posterior()),
    (
        "with_mean",
        lambda kernel, X: ShiftedGP(
            _sparse(kernel, X), constant_function(jnp.array(0.3))
        ).posterior(),
    ),
    ("natural", lambda kernel, X: _natural(kernel, X).posterior()),
    ("natural_in_time", lambda kernel, X: _natural_in_time(kernel, X).posterior()),
    # With all inducing values and inputs for neighbors, its samples have its moments.
    (
        "nearest_neighbors",
        lambda kernel, X: sgp.VariationalNearestNeighborGP(
            kernel, X, X[:4] + 0.1, jnp.linspace(-1.0, 1.0, 4), 0.5 * jnp.ones(4), num_neighbors=30
        ).posterior(),
    ),
    (
        "sparse_batch",
        lambda kernel, X: ExpansionPosterior.of_inducing_values(kernel, X[:3], _two_normals()),
    ),
    ("component", lambda kernel, X: _of_sum(kernel, X).component(lambda total: total.left)),
    (
        "mixture",
        lambda kernel, X: MixturePosterior(_GivenNoise(kernel, X), jnp.array(NOISES)),
    ),
    (
        "outputs",
        lambda kernel, X: OutputsPosterior(
            jax.tree_util.Partial(sgp.LatentGP.condition, sgp.LatentGP(kernel, X)),
            jnp.stack([jnp.sin(X[:, 0]), jnp.cos(X[:, 0])]),
        ),
    ),
    ("batch", lambda kernel, X: _of_groups(kernel, X)),
    ("batch_with_hidden_rows", lambda kernel, X: _of_groups(kernel, X, observed=_lower_half(X))),
    ("multi_output", _of_outputs),
    ("multi_output_with_gaps", lambda kernel, X: _of_outputs(kernel, X, observed=X[:, :3] < 1.0)),
    ("grid", _of_grid),
    (
        "grid_in_time",
        lambda kernel, X: _of_grid(
            kernel, X, estimator=sgp.estimators.StateSpace(), observed=X[:, :3] < 1.0
        ),
    ),
    # As many samples as the tests draw: its variance is theirs.
    (
        "iterative_grid",
        lambda kernel, X: _of_grid(
            kernel,
            X,
            NUM_DRAWS,
            observed=X[:, :3] < 1.0,
            estimator=sgp.estimators.Pathwise(sgp.solvers.Cholesky(), 4, num_features=16),
            key=jax.random.key(0),
        ),
    ),
    ("grid_with_gaps", lambda kernel, X: _of_grid(kernel, X, observed=X[:, :3] < 1.0)),
    (
        "sparse_with_own_kernels",
        lambda kernel, X: ExpansionPosterior.of_inducing_values(
            jnp.ones(2, X.dtype) * kernel, jnp.stack([X[:3], X[1:4]]), _two_normals()
        ),
    ),
    ("hybrid", lambda kernel, X: _hybrid(kernel, X).posterior()),
    ("decoupled", lambda kernel, X: _decoupled(kernel, X).posterior()),
    (
        "chevron",
        lambda kernel, X: _chevron(sgp.features.InducingPoints(kernel, X[:4] + 0.1), X).posterior(),
    ),
]

# elbo = factory(): objectives for a weight-space GP with six features.
ELBOS: list[tuple[str, Callable[[], AbstractParticleELBO]]] = [
    ("quadrature", lambda: sgp.infer.QuadratureELBO(3)),
    ("joint", lambda: sgp.infer.JointELBO(num_particles=2)),
    ("quadruply_stochastic", lambda: sgp.infer.QuadruplyStochasticELBO(3)),
    (
        "quadruply_stochastic_bound",
        lambda: sgp.infer.QuadruplyStochasticELBO(3, bound="strict"),
    ),
]

# guide = factory(model): guides that own the GP site of a model.
GUIDES: list[tuple[str, Callable[[Callable], AbstractGPGuide]]] = [
    ("sparse", lambda model: sgp.guides.AutoSparseGP(model, num_inducing=4)),
    ("natural", lambda model: sgp.guides.AutoSparseGP(model, num_inducing=4, natural=True)),
    ("hybrid", lambda model: sgp.guides.AutoHybridGP(model, num_inducing=4, num_residual=5)),
    (
        "decoupled",
        lambda model: sgp.guides.AutoDecoupledGP(
            model, mean_points=jnp.eye(5, NUM_COLUMNS), cov_points=jnp.eye(3, NUM_COLUMNS)
        ),
    ),
    ("neighbors", lambda model: sgp.guides.AutoNearestNeighborGP(model, num_inducing=5)),
    ("chevron", lambda model: sgp.guides.AutoChevronGP(model, rank=2)),
    ("state_space", sgp.guides.AutoStateSpaceGP),
    ("own", lambda model: CLASSES["AutoPseudoDataGP"](model, jnp.eye(4, NUM_COLUMNS))),
]
