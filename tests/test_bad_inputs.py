"""The errors of every public name for invalid arguments: a table of calls and messages.

A row is a name, a call and a pattern that its message must match, with the argument in backticks.
The calls run nothing: a check comes before any work.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.integrated.truncated import stopping as truncation
from numpyro_scalegp.kernels import kernel as C
from numpyro_scalegp.numerics.linalg import Factor

pytestmark = pytest.mark.usefixtures("unchecked")

E, F, G, I, K = sgp.estimators, sgp.features, sgp.guides, sgp.infer, sgp.kernels  # noqa: E741
L = sgp.log_determinants
P, S = sgp.preconditioners, sgp.solvers
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 3)
X = np.linspace(0.0, 1.0, 6, dtype=np.float32)[:, None]
Z, y, eye, nan = X[:3], np.sin(X[:, 0]), np.eye(3, dtype=np.float32), float("nan")
half = X.astype(np.float16)
text = np.array([["a"], ["b"]])
missing = pd.Series([1, pd.NA])
box = np.array([[-1.0], [2.0]], dtype=np.float32)
gap = X.copy()
gap[2, 0] = np.nan
rbf = K.RBF(0.5)
phi = F.RandomFourier(rbf, 4, seed=0)
Operator = sgp.solvers.KernelOperator
H = Operator(rbf, X, 0.1)
CG = S.ConjugateGradients(preconditioner=P.Identity())

Row = tuple[str, Callable[[], Any], str]


def model(X: Any, y: Any = None) -> None:
    f = numpyro.sample("f", sgp.LatentGP(rbf, X))
    numpyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)


def mesh(num: int = 2) -> Any:
    return jax.make_mesh((num,), ("rows",), devices=jax.devices()[:num])


def explicit() -> Any:
    axes = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec("rows"))
    return jax.device_put(X, axes)


gp = functools.partial(sgp.GaussianProcess, rbf)
coregion = K.Coregion(eye[:2, :1], eye[0, :2])
Y = np.stack([y, y], axis=1)
counts = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731
outputs = functools.partial(sgp.MultiOutputGP, rbf, coregion, X)
decoupled = functools.partial(sgp.DecoupledGP, rbf, X)


def near(Z=Z, loc=y[:3], scale=np.ones(3), **options):  # noqa: B008
    return sgp.VariationalNearestNeighborGP(rbf, X, Z, loc, scale, **options)


hybrid = functools.partial(sgp.HybridGP, rbf, X, Z, np.zeros(3), eye)
collapsed = functools.partial(sgp.FeatureSpaceGP, num_data=6, logdet=L.MiniBatch())
weights = functools.partial(collapsed, lambda X: X, X)
chevron = functools.partial(sgp.ChevronGP, phi, X)
sparse = sgp.SparseGP(rbf, X, Z, np.zeros(3), eye).posterior()
audit = functools.partial(E.audit, E.Cholesky(), rbf, X, y, 0.1, key=KEY)
start = functools.partial(I.initial_hyperparameters, KEY, model, X, y)
svi = functools.partial(I.RowSVI, model, model, optax.adam(0.1), I.QuadruplyStochasticELBO(2))
exact = sgp.posteriors.ExactPosterior(
    kernel=rbf,
    X=jnp.asarray(X),
    y=jnp.asarray(y),
    noise_variance=jnp.asarray(0.1),
    mean_function=gp(X, 0.1).mean_function,
    factor=Factor(jnp.eye(6), jnp.zeros(())),
    representer_weights=jnp.asarray(y),
)

ARRAYS: list[Row] = [
    ("text", lambda: rbf("abc", X), "`X` must be a number or an array of numbers, got 'abc'"),
    ("none", lambda: rbf.diag(None), "`X` must be a number or an array of numbers, got None"),
    ("dict", lambda: rbf.diag({"a": 1}), "`X` must be a number or an array .* got a `dict`"),
    ("a kernel", lambda: rbf.diag(rbf), "`X` must be a number or an array .* got a `RBF`"),
    ("a class", lambda: rbf.diag(K.RBF), "`X` must be a number or .* got the class `RBF`"),
    (
        "a function",
        lambda: rbf.diag(len),
        "`X` must be a number or an array of numbers, got a `bui",
    ),
    ("ragged rows", lambda: rbf.diag([[1.0], [1.0, 2.0]]), "`X` must be .* got a `list`"),
    ("rows of text", lambda: rbf.diag(text), r"`X` must hold numbers, got 'a' at index \(0, 0\)"),
    (
        "an object array",
        lambda: rbf.diag(X.astype(object)),
        "`X` must be of type float32 .* object",
    ),
    ("None within", lambda: rbf.diag([[1.0], [None]]), r"`X` must .* got None at index \(1, 0\)"),
    ("NA of pandas", lambda: gp(X[:2], 1.0).log_prob(missing), r"`y` .* <NA>|NAType.* at index"),
    ("NA in a frame", lambda: rbf.diag(missing.to_frame()), r"`X` must hold .* index \(1, 0\)"),
    ("dates", lambda: rbf.diag(np.array([["2020-01-01"]], "M8[D]")), "`X` must hold numbers"),
    ("float16", lambda: rbf.diag(half), "`X` must be of type float32 or float64, got float16"),
    ("bfloat16", lambda: rbf.diag(jnp.asarray(X, jnp.bfloat16)), "`X` must be .* got bfloat16"),
    ("complex", lambda: rbf.diag(1j * X), "`X` must be of type float32 or float64, got complex"),
    ("booleans", lambda: rbf.diag(X > 0.5), "`X` must be of type float32 .* got bool"),
    ("keys", lambda: rbf.diag(KEYS), "`X` must be of type float32 or float64, got key"),
    ("a mask", lambda: rbf.diag(np.ma.masked_array(X, X > 0.5)), "`X` has masked entries"),
    ("no column", lambda: rbf.diag(np.ones((6, 0))), r"`X` must have at least one column, got .*6"),
    ("one axis", lambda: rbf(X[:, 0], X), r"`X` must have shape \(n, d\), got \(6,\)\. Write X\["),
    ("no axis", lambda: rbf(1.0, X), r"`X` must have shape \(n, d\), got \(\)\.$"),
    ("nan", lambda: rbf(gap, X), r"`X` must be finite, got 1 NaN .* at index \(2, 0\)"),
    ("infinity", lambda: rbf(X, X + np.inf), "`Z` must be finite"),
    ("nan in Z", lambda: rbf(X, gap), "`Z` must be finite, got 1"),
    (
        "another width",
        lambda: rbf(X, np.ones((2, 3))),
        r"`Z` must have shape \(n, 1\), got \(2, 3\)",
    ),
    ("features of a key", lambda: rbf.random_features(0, X, 4), "`key` must be a JAX key.* 0"),
    ("features of none", lambda: rbf.random_features(KEY, X, 0), "`num_features` must be at le"),
    ("frequencies", lambda: rbf.sample_frequencies(0, 2, 1), "`key` must be a JAX key.* got 0"),
    ("covariance of text", lambda: rbf.covariance("a"), "`X` must be a number or an array"),
    ("features of None", lambda: rbf.random_features(KEY, None, 4), "`X` must be a number or"),
    ("half, traced", lambda: jax.eval_shape(rbf.diag, jnp.asarray(half)), "`X` must .* float16"),
]

KERNELS: list[Row] = [
    ("lengthscale text", lambda: K.RBF("a"), "`lengthscale` must be a number or .* got 'a'"),
    ("lengthscale None", lambda: K.Matern12(None), "`lengthscale` must be a number or .* None"),
    ("lengthscale True", lambda: K.RBF(True), "`lengthscale` must be of type .* got bool"),
    ("lengthscale half", lambda: K.Matern32(np.float16(1)), "`lengthscale` must be .* float16"),
    ("lengthscale complex", lambda: K.Matern52(1 + 1j), "`lengthscale` must be .* complex"),
    ("lengthscale zero", lambda: K.RBF(0.0), r"`lengthscale` must be positive and finite, got 0"),
    (
        "lengthscale negative",
        lambda: K.RBF([1.0, -1.0]),
        r"`lengthscale` must be pos.* \[ 1. -1.\]",
    ),
    ("lengthscale nan", lambda: K.RBF(nan), "`lengthscale` must be positive and finite, got nan"),
    (
        "lengthscale batch",
        lambda: K.RBF(np.ones((3, 2)), np.ones(2)),
        r"leading axes that fit together, got .*`?lengthscale.*\(3,\)",
    ),
    ("lengthscale width", lambda: K.RBF([1.0, 2.0]).diag(X), r"`lengthscale` .* \(\) or \(1,\)"),
    ("lengthscale kernel", lambda: K.RBF(rbf), "`lengthscale` must be a number or .* a `RBF`"),
    ("variance text", lambda: K.RBF(1.0, "a"), "`variance` must be a number or an array"),
    ("variance zero", lambda: K.Matern52(1.0, 0), "`variance` must be positive and finite, got 0"),
    ("variance infinite", lambda: K.Constant(np.inf), "`variance` must be positive and finite"),
    (
        "alpha text",
        lambda: K.RationalQuadratic(1.0, alpha="a"),
        "`alpha` must be a number or an array",
    ),
    (
        "alpha negative",
        lambda: K.RationalQuadratic(1.0, alpha=-1),
        "`alpha` must be positive and finite",
    ),
    ("period None", lambda: K.Periodic(1.0, period=None), "`period` must be a number or an array"),
    (
        "period zero",
        lambda: K.Periodic(1.0, period=0.0),
        "`period` must be positive and finite, got 0",
    ),
    ("bias text", lambda: K.Linear(1.0, "a"), "`bias` must be a number or an array of numbers"),
    (
        "bias negative",
        lambda: K.Linear(1.0, -1.0),
        "`bias` must be finite and not negative, got -1",
    ),
    ("linear batch", lambda: K.Linear(np.ones(2), np.ones(3)), "leading axes that fit together"),
    ("multiscale text", lambda: K.MultiscaleRBF("a"), "`lengthscale` must be a number or"),
    ("scales of text", lambda: K.MultiscaleRBF.with_unit_scales("a"), "`X` must be a number or"),
    ("odd columns", lambda: K.MultiscaleRBF(1.0).diag(X), "`MultiscaleRBF` needs inputs with"),
    ("scale text", lambda: rbf * "a", "`scale` must be a number or an array of numbers, got 'a'"),
    ("scale negative", lambda: -2.0 * rbf, "`scale` must be positive and finite, got -2"),
    (
        "scale batch",
        lambda: np.ones(2) * K.RBF(1.0, np.ones(3)),
        "leading axes that fit together",
    ),
    ("scaled text", lambda: C.Scaled("a", 1.0), "`kernel` must be one of `sgp.kernels`"),
    ("scaled class", lambda: C.Scaled(K.RBF, 1.0), r"`kernel` must .* `RBF`: write `RBF\(...\)`"),
    ("left None", lambda: C.Sum(None, rbf), "`left` must be one of `sgp.kernels` .* got None"),
    ("right class", lambda: C.Sum(rbf, K.RBF), "`right` must be an instance, got the class `RBF`"),
    ("left number", lambda: C.Product(2.0, rbf), "`left` must be one of `sgp.kernels` .* got 2.0"),
    ("right solver", lambda: C.Product(rbf, CG), "`right` must be one of `sgp.kernels`"),
    ("dims of a class", lambda: C.ActiveDims(K.RBF, (0,)), "`kernel` must be an instance"),
    ("mask of dims", lambda: rbf.on((True, False)), "`dims` must be a sequence of integers"),
    ("text of dims", lambda: rbf.on("a"), "`dims` must be a sequence of integers"),
    ("no dims", lambda: rbf.on(()), "`dims` must name at least one column"),
    ("negative dims", lambda: rbf.on((-1,)), "`dims` must name at least one column"),
    ("dims beyond", lambda: rbf.on((1,)).diag(X), r"`dims` must lie in 0\.\.0"),
    ("swapped", lambda: K.FeatureMapped(jnp.tanh, rbf), "`kernel` must be one of `sgp.kernels`"),
    ("two kernels", lambda: K.FeatureMapped(rbf, rbf), "`feature_map` must be .* the kernel `RBF`"),
    ("map text", lambda: K.FeatureMapped(rbf, "a"), "`feature_map` must be callable, got 'a'"),
    ("map class", lambda: K.FeatureMapped(rbf, K.RBF), "`feature_map` must be callable, got the"),
    ("map rows", lambda: K.FeatureMapped(rbf, jnp.sum).diag(X), r"`feature_map` .* \(6, p\)"),
]

FEATURES: list[Row] = [
    ("kernel class", lambda: F.RandomFourier(K.RBF, 4, 0), "`kernel` must be an instance"),
    ("kernel number", lambda: F.RandomFourier(1.0, 4, 0), "`kernel` must be one of `sgp.kernels`"),
    ("odd features", lambda: F.RandomFourier(rbf, 3, 0), "`num_features` must be even .* got 3"),
    ("features float", lambda: F.RandomFourier(rbf, 4.0, 0), "`num_features` must be an integer"),
    ("no box", lambda: F.HilbertSpace(rbf, 4), r"`box` must have shape \(2, d\), .* got None"),
    (
        "box",
        lambda: F.HilbertSpace(rbf, 4, [1.0, 0.0]),
        r"`box` must have .* got shape \(2,\). For one column write box=\[\[lower\], \[upper\]\]",
    ),
    (
        "box upside down",
        lambda: F.HilbertSpace(rbf, 4, [[1.0], [0.0]]),
        "upper ends above the .* got a lower end of 1.0 and an upper one of 0.0 in column 0",
    ),
    ("box nan", lambda: F.HilbertSpace(rbf, 4, [[0.0], [nan]]), "`box` must be finite"),
    ("no sines", lambda: F.HilbertSpace(rbf, 0, box), "`num_basis` must be at least 1, got 0"),
    ("sines", lambda: F.HilbertSpace(rbf, (4, 4), box), "`num_basis` must be one number, or one"),
    (
        "box of waves",
        lambda: F.HilbertSpace(K.Periodic(1.0, period=1.0), 4, box),
        "`box` must be None",
    ),
    ("no density", lambda: F.HilbertSpace(K.Linear(1.0), 4, box)(X), "no spectral density in clos"),
    ("columns of box", lambda: F.HilbertSpace(rbf, 4, box)(eye), "`box` must have an end for each"),
    (
        "lengthscales",
        lambda: F.HilbertSpace.box_and_num_basis(X, (2.0, 1.0)),
        "`lengthscales` must be positive, the shortest first",
    ),
    ("seed float", lambda: F.RandomFourier(rbf, 4, 0.5), "`seed` must be a JAX key.* got 0.5"),
    ("seed True", lambda: F.RandomFourier(rbf, 4, True), "`seed` must be a JAX key.* got True"),
    ("seed None", lambda: F.RandomFourier(rbf, 4, None), "`seed` must be a JAX key.* got None"),
    ("seeds", lambda: F.RandomFourier(rbf, 4, KEYS), r"`seed` must be one key, got .* \(3,\)"),
    ("stored", lambda: phi.stored(1.5), "`num_columns` must be an integer, got 1.5"),
    ("stored none", lambda: phi.stored(0), "`num_columns` must be at least 1, got 0"),
    ("another kernel", lambda: phi.with_kernel("a"), "`kernel` must be one of `sgp.kernels`"),
    ("inputs", lambda: phi("a"), "`X` must be a number or an array of numbers, got 'a'"),
    ("inputs of one axis", lambda: phi(y), r"`X` must have shape \(n, d\), got \(6,\)"),
    ("no rows", lambda: phi(X[:0]), r"`X` must have at least one row, got shape \(0, 1\)"),
    ("index text", lambda: phi.columns(X, ["a"]), "`index` must hold integers, got <U1"),
    ("index float", lambda: phi.columns(X, [0.5]), "`index` must hold integers, got float64"),
    ("points text", lambda: F.InducingPoints(rbf, "a"), "`points` must be a number or an array"),
    ("points vector", lambda: F.InducingPoints(rbf, y), r"`points` must have shape \(n, d\)"),
    ("no points", lambda: F.InducingPoints(rbf, X[:0]), "`points` must have at least one row"),
    ("points nan", lambda: F.InducingPoints(rbf, gap), "`points` must be finite, got 1"),
    ("swapped", lambda: F.InducingPoints(Z, rbf), "`points` must be a number or an array of"),
    ("points of None", lambda: F.InducingPoints(None, Z), "`kernel` must be one of `sgp.kernels`"),
    ("jitter", lambda: F.InducingPoints(rbf, Z, "a"), "`jitter` must be a number, got 'a'"),
    ("no map", lambda: F.Learned(3.0), "`feature_map` must be callable, got 3.0"),
    ("map class", lambda: F.Learned(K.RBF), "`feature_map` must be callable, got the class"),
    (
        "columns map",
        lambda: F.Learned(jnp.tanh, 1),
        "`columns_map` must be callable, got 1",
    ),
    ("map kernel", lambda: F.Learned(rbf), "`feature_map` must be .* the kernel `RBF`"),
    ("map of vectors", lambda: F.Learned(jnp.sum)(X), "`feature_map` must map inputs of shape"),
    ("kmeans key", lambda: F.kmeans_points(0, X, 2), "`key` must be a JAX key.* got 0"),
    ("kmeans X", lambda: F.kmeans_points(KEY, y, 2), r"`X` must have shape \(n, d\), got \(6,\)"),
    ("kmeans points", lambda: F.kmeans_points(KEY, X, 2.0), "`num_points` must be an integer"),
    ("kmeans too many", lambda: F.kmeans_points(KEY, X, 7), r"`num_points` must be in 1\.\.6"),
    ("kmeans steps", lambda: F.kmeans_points(KEY, X, 2, num_steps=-1), "`num_steps` must be at le"),
    (
        "kmeans rows",
        lambda: F.kmeans_points(KEY, X, 2, max_rows=0),
        "`max_rows` must be at least 1",
    ),
    (
        "kmeans categories",
        lambda: F.kmeans_points(KEY, X, 2, categories=1),
        r"`categories` must be a tuple of columns such as \(1,\), got 1",
    ),
    (
        "kmeans category",
        lambda: F.kmeans_points(KEY, X, 2, categories=(7,)),
        r"`categories` must lie in 0\.\.\d, got 7",
    ),
    ("greedy swapped", lambda: F.greedy_points(X, rbf, 2), "`kernel` must be one of `sgp.kernels`"),
    (
        "greedy None",
        lambda: F.greedy_points(rbf, X, None),
        "`num_points` must be an integer, got N",
    ),
    (
        "greedy too few",
        lambda: F.greedy_points(rbf, X, 0),
        "`num_points` must be at least 1, got 0",
    ),
]

SOLVERS: list[Row] = [
    ("operator kernel", lambda: Operator("a", X, 0.1), "`kernel` must be one of"),
    ("operator X", lambda: Operator(rbf, y, 0.1), r"`X` must have shape \(n, d\)"),
    ("operator empty", lambda: Operator(rbf, X[:0], 0.1), "`X` must have at least one"),
    ("operator noise", lambda: Operator(rbf, X, "a"), "`noise_variance` must be a num"),
    ("noise shape", lambda: Operator(rbf, X, y[:2]), "`noise_variance` must have shape"),
    ("noise sign", lambda: Operator(rbf, X, -1.0), "`noise_variance` must be finite an"),
    ("noise nan", lambda: Operator(rbf, X, nan), "`noise_variance` .* got nan"),
    (
        "operator budget",
        lambda: Operator(rbf, X, 0.1, memory_budget=0),
        "`memory_budget` must be at least 1, got 0",
    ),
    ("rank zero", lambda: P.PivotedCholesky(0), "`rank` must be at least 1, got 0"),
    ("rank float", lambda: P.PivotedCholesky(1.5), "`rank` must be an integer, got 1.5"),
    (
        "random rank zero",
        lambda: P.RandomlyPivotedCholesky(0),
        "`rank` must be at least 1, got 0",
    ),
    ("seed", lambda: P.RandomlyPivotedCholesky(seed=-1), "`seed` must be at least 0, got -1"),
    ("Nystrom None", lambda: P.Nystrom(None), "`rank` must be an integer, got None"),
    ("Nystrom seed", lambda: P.Nystrom(3, 0.5), "`seed` must be an integer, got 0.5"),
    ("rank True", lambda: P.PivotedCholesky(True), "`rank` must be an integer, got True"),
    ("tolerance one", lambda: S.ConjugateGradients(1.0), r"`tolerance` must be in \[0, 1\), got 1"),
    ("tolerance nan", lambda: S.Cholesky(nan), r"`tolerance` must be in \[0, 1\), got nan"),
    ("tolerance text", lambda: S.Cholesky("a"), "`tolerance` must be a number, got 'a'"),
    ("epochs zero", lambda: S.ConjugateGradients(max_epochs=0), "`max_epochs` must be positive"),
    ("epochs None", lambda: S.ConjugateGradients(max_epochs=None), "`max_epochs` must be a number"),
    (
        "no preconditioner",
        lambda: S.ConjugateGradients(0.1, 9, None),
        "`preconditioner` .* got None",
    ),
    (
        "preconditioner class",
        lambda: S.ConjugateGradients(preconditioner=P.PivotedCholesky),
        "`preconditioner` must be an instance, got the class `PivotedCholesky`",
    ),
    (
        "roulette survival",
        lambda: S.RussianRouletteCG(preconditioner=CG),
        "`preconditioner` must be one of",
    ),
    ("group zero", lambda: S.ConjugateGradients(group_size=0), "`group_size` must be at least 1"),
    ("group half", lambda: S.RussianRouletteCG(group_size=0.5), "`group_size` must be an integer"),
    ("decay text", lambda: S.RussianRouletteCG("a"), "`decay` must be a number, got 'a'"),
    (
        "decay negative",
        lambda: S.RussianRouletteCG(-1.0),
        "`decay` must be finite and not negative",
    ),
    (
        "least zero",
        lambda: S.RussianRouletteCG(0.1, 0),
        "`min_iterations` must be at least 1, got 0",
    ),
    ("least float", lambda: S.RussianRouletteCG(0.1, 8.0), "`min_iterations` must be an integer"),
    ("most float", lambda: S.RussianRouletteCG(0.1, 8, 9.0), "`max_iterations` must be an integer"),
    (
        "most below",
        lambda: S.RussianRouletteCG(0.1, 8, 7),
        "`max_iterations` must be at least 8, got 7",
    ),
    ("roulette", lambda: S.RussianRouletteCG.with_mean(5, 9.5), "`max_iterations` must be an inte"),
    ("block zero", lambda: S.AlternatingProjections(0), "`block_size` must be at least 1, got 0"),
    ("block text", lambda: S.AlternatingProjections("a"), "`block_size` must be an integer"),
    ("tolerance of auto", lambda: S.AutoSolver(1.0), r"`tolerance` must be in \[0, 1\), got 1"),
    ("blocks of zero", lambda: S.ADASAP(0), "`block_size` must be at least 1, got 0"),
    ("rank of blocks", lambda: S.ADASAP(9, 1.5), "`rank` must be an integer, got 1.5"),
    ("damping", lambda: S.ADASAP(9, 3, -1.0), "`damping` must be finite and not negative, got -1"),
    ("damping text", lambda: S.ADASAP(9, 3, "a"), "`damping` must be a number, got 'a'"),
    ("dual batch", lambda: S.StochasticDualDescent(0), "`batch_size` must be at least 1, got 0"),
    ("batch negative", lambda: S.StochasticGradientDescent(-2), "`batch_size` must be at least 1"),
    ("rate zero", lambda: S.StochasticGradientDescent(9, 0.0), "`learning_rate` must be positive"),
    ("rate nan", lambda: S.StochasticGradientDescent(9, nan), "`learning_rate` must .* got nan"),
    ("rate text", lambda: S.StochasticGradientDescent(9, "a"), "`learning_rate` must be a number"),
    (
        "momentum",
        lambda: S.StochasticGradientDescent(9, 0.1, 1.0),
        r"`momentum` must be in \[0, 1\)",
    ),
    (
        "operand",
        lambda: S.Cholesky().solve(rbf, np.ones((6, 1))),
        "`operator` must be one of `sgp.solvers`",
    ),
    (
        "rows of B",
        lambda: CG.solve(H, np.ones((5, 1))),
        r"`B` must have shape \(6, k\), got \(5, 1",
    ),
    ("rank of B", lambda: CG.solve(H, y), r"`B` must have shape \(6, k\), got \(6,\)"),
    ("B of halves", lambda: S.Cholesky().solve(H, half), "`B` must be of type float32 .* float16"),
    ("guess", lambda: CG.solve(H, X, guess=np.ones((6, 2))), r"`guess` must have shape \(6, 1\)"),
    ("no key", lambda: S.StochasticGradientDescent().solve(H, X), "`key` must be given"),
    ("no key to stop", lambda: S.RussianRouletteCG(0.1, 2).solve(H, X), "`key` must be given"),
    ("mean text", lambda: truncation.decay_and_minimum("a", 9), "`mean` must be a number, got 'a'"),
    ("mean too large", lambda: truncation.decay_and_minimum(90, 100), "`mean` must lie above"),
    (
        "share one",
        lambda: truncation.decay_and_minimum(9, 99, share=1),
        r"`share` must be in \(0, 1",
    ),
    ("maximum", lambda: truncation.decay_and_minimum(9, 99.5), "`maximum` must be an integer"),
    ("no terms", lambda: truncation.StoppingTime([]), r"`probabilities` must have shape \(N,\)"),
    ("text terms", lambda: truncation.StoppingTime("a"), "`probabilities` must be a number or"),
    (
        "negative terms",
        lambda: truncation.StoppingTime([0.5, -0.1]),
        "`probabilities` must be finite",
    ),
    ("zero terms", lambda: truncation.StoppingTime([0.0, 0.0]), "`probabilities` must be finite"),
    ("matrix of terms", lambda: truncation.StoppingTime(eye), "`probabilities` must have shape"),
    (
        "stopping decay",
        lambda: truncation.StoppingTime.exponential(-1, 1, 5),
        "`decay` must be finite",
    ),
    (
        "stopping least",
        lambda: truncation.StoppingTime.exponential(1, 0, 5),
        "`minimum` must be at least",
    ),
    (
        "stopping order",
        lambda: truncation.StoppingTime.exponential(1, 6, 5),
        "`minimum` and `maximum` must",
    ),
    (
        "stopping key",
        lambda: truncation.StoppingTime([1.0]).sample(0),
        "`key` must be a JAX key.* got 0",
    ),
]

ESTIMATORS: list[Row] = [
    ("jitter negative", lambda: E.Cholesky(-1e-6), "`jitter` must be finite and not negative"),
    ("jitter nan", lambda: E.Cholesky(nan), "`jitter` must be finite and not negative, got nan"),
    ("jitter text", lambda: E.Cholesky("a"), "`jitter` must be a number, got 'a'"),
    ("solver text", lambda: E.Hutchinson("cg"), "`solver` must be one of `sgp.solvers` .* 'cg'"),
    ("solver class", lambda: E.Pathwise(S.Cholesky), r"`solver` must be .* `Cholesky\(...\)`"),
    ("solver estimator", lambda: E.Pathwise(E.Cholesky()), "`solver` must be one of `sgp.solvers`"),
    ("solver None", lambda: E.Pathwise(None), "`solver` must be one of `sgp.solvers` .* got None"),
    ("no probes", lambda: E.Hutchinson(CG, 0), "`num_probes` must be at least 1, got 0"),
    ("half a probe", lambda: E.Pathwise(CG, 0.5), "`num_probes` must be an integer, got 0.5"),
    ("probes True", lambda: E.Pathwise(CG, True), "`num_probes` must be an integer, got True"),
    ("odd features", lambda: E.Pathwise(CG, 2, 7), "`num_features` must be even .* got 7"),
    (
        "probes",
        lambda: E.Pathwise(CG, num_logdet_probes=-1),
        "`num_logdet_probes` must be at least",
    ),
    ("epochs", lambda: E.Hutchinson(CG, logdet_epochs=0), "`logdet_epochs` must be at least 1"),
    ("features", lambda: E.RandomFourier(0), "`num_features` must be even and at least 2, got 0"),
    ("float features", lambda: E.RandomFourier(4.0), "`num_features` must be an integer"),
    ("points", lambda: E.SGPR(X[:, 0]), r"`inducing_points` must have shape \(n, d\)"),
    ("points NaN", lambda: E.SGPR(gap), "`inducing_points` must be finite, got 1 NaN"),
    ("tight", lambda: E.SGPR(X, tight=1), "`tight` must be True or False, got 1"),
    ("points jitter", lambda: E.SGPR(X, jitter=-1.0), "`jitter` must be"),
    (
        "points width",
        lambda: sgp.GaussianProcess(rbf, X, 1.0, estimator=E.SGPR(eye)).log_prob(y),
        r"`inducing_points` must have shape \(n, 1\), got \(3, 3\)",
    ),
    ("no neighbors", lambda: E.Vecchia(0), "`num_neighbors` must be at least 1, got 0"),
    ("no groups", lambda: E.Vecchia(5, group_size=0), "`group_size` must be at least 1, got 0"),
    ("ordering", lambda: E.Vecchia(5, "maximin"), "`ordering` must be one of .* 'maximin'"),
    ("neighbors of", lambda: E.Vecchia(5).find_neighbors(X, 1.0), "`kernel` must be"),
    ("least features", lambda: E.SingleSampleRFF(0), "`min_features` must be even and at least 2"),
    ("odd step", lambda: E.SingleSampleRFF(50, 5), "`step` must be even and at least 2, got 5"),
    (
        "average",
        lambda: L.Compositional(1.0),
        r"`decay` must be in \[0, 1\), got 1.0",
    ),
    (
        "average text",
        lambda: L.Compositional("a"),
        "`decay` must be a number, got 'a'",
    ),
    (
        "average class",
        lambda: L.Compositional(K.RBF),
        "`decay` must be a number, got the class",
    ),
    (
        "average name",
        lambda: L.Compositional(name=3),
        "`name` must be a string, got 3",
    ),
    (
        "step zero",
        lambda: L.Variational(0.0),
        r"`step_size` must be in \(0, 1\], got 0.0",
    ),
    (
        "step None",
        lambda: L.Variational(None),
        "`step_size` must be a number, got None",
    ),
    (
        "step name",
        lambda: L.Variational(name=None),
        "`name` must be a string, got None",
    ),
    (
        "penalty",
        lambda: L.Minimax(0.0),
        "`penalty` must be positive and finite, got 0.0",
    ),
    (
        "growth",
        lambda: L.Minimax(growth=-1.0),
        "`growth` must be finite and not negative",
    ),
    (
        "minimax step",
        lambda: L.Minimax(step_size=2.0),
        r"`step_size` must be in \(0, 1\], got 2.0",
    ),
    (
        "multiplier",
        lambda: L.Minimax(multiplier_step_size="a"),
        "`multiplier_step_size` must be a number, got 'a'",
    ),
    ("records", lambda: E.Pathwise(CG, num_records=0), "`num_records` must be at least 1, got 0"),
    (
        "records float",
        lambda: E.Hutchinson(CG, num_records=1e4),
        "`num_records` must be an int",
    ),
    (
        "solutions",
        lambda: E.Pathwise(CG, num_solutions=0),
        "`num_solutions` must be at least 1",
    ),
    (
        "fresh text",
        lambda: E.Hutchinson(CG, fresh_probes="no"),
        "`fresh_probes` must be True or False",
    ),
    ("audit text", lambda: E.audit("a", rbf, X, y, 0.1, key=KEY), "`estimators` must be one of"),
    ("audit kernel", lambda: E.audit(E.Cholesky(), X, X, y, 1, key=KEY), "`kernel` must be one of"),
    (
        "audit y",
        lambda: E.audit(E.Cholesky(), rbf, X, y[1:], 1, key=KEY),
        r"`y` must have shape \(6",
    ),
    (
        "audit y nan",
        lambda: E.audit(E.Cholesky(), rbf, X, y + nan, 1, key=KEY),
        "`y` must be finite",
    ),
    (
        "audit noise",
        lambda: E.audit(E.Cholesky(), rbf, X, y, 0, key=KEY),
        "`noise_variance` must be",
    ),
    ("audit key", lambda: audit(key=0), "`key` must be a JAX key.* got 0"),
    ("audit draws", lambda: audit(num_draws=1), "`num_draws` must be at least 2, got 1"),
    ("audit rows", lambda: audit(max_rows=2.5), "`max_rows` must be an integer, got 2.5"),
]

COLLAPSED: list[Row] = [
    ("kernel class", lambda: sgp.GaussianProcess(K.RBF, X, 1.0), r"`kernel` .* write `RBF\(...\)`"),
    ("kernel None", lambda: sgp.GaussianProcess(None, X, 1.0), "`kernel` must be .* got None"),
    ("swapped", lambda: sgp.GaussianProcess(X, rbf, 1.0), "`kernel` must be one of `sgp.kernels`"),
    ("features", lambda: sgp.GaussianProcess(phi, X, 1.0), "`kernel` must be .* `RandomFourier`"),
    ("X vector", lambda: gp(y, 0.1), r"`X` must have shape \(n, d\), got \(6,\)\. Write X\["),
    ("X nan", lambda: gp(gap, 0.1), r"`X` must be finite, got 1 NaN .* index \(2, 0\)"),
    ("X empty", lambda: gp(X[:0], 0.1), r"`X` must have at least one row, got shape \(0, 1\)"),
    ("X text", lambda: gp(text, 0.1), r"`X` must hold numbers, got 'a' at index \(0, 0\)"),
    ("X half", lambda: gp(half, 0.1), "`X` must be of type float32 or float64, got float16"),
    ("noise zero", lambda: gp(X, 0), "`noise_variance` must be positive and finite, got 0"),
    ("noise negative", lambda: gp(X, -0.1), "`noise_variance` must be positive and finite, got -0"),
    ("noise nan", lambda: gp(X, nan), "`noise_variance` must be positive and finite, got nan"),
    ("noise infinite", lambda: gp(X, np.inf), "`noise_variance` must be positive .* got inf"),
    ("noise text", lambda: gp(X, "a"), "`noise_variance` must be a number or an array"),
    ("noise None", lambda: gp(X, None), "`noise_variance` must be a number or an array"),
    ("noise of rows", lambda: gp(X, y[:5]), r"`noise_variance` must have shape \(\) or \(6,\)"),
    ("noise column", lambda: gp(X, X + 1), r"`noise_variance` must have shape \(\) or \(6,\)"),
    ("mean text", lambda: gp(X, 1.0, mean="a"), "`mean` must be a number or an array"),
    (
        "mean vector",
        lambda: gp(X, 1.0, mean=y[1:]),
        r"`mean` .* \(6,\), got \(5,\): .* row",
    ),
    ("mean nan", lambda: gp(X, 1.0, mean=nan), "`mean` must be finite"),
    ("mean kernel", lambda: gp(X, 1.0, mean=rbf), "`mean` must be a function .* the kernel"),
    (
        "mean class",
        lambda: gp(X, 1.0, mean=dict),
        "`mean` must be callable, got the class `dict`",
    ),
    ("mean matrix", lambda: gp(X, 1.0, mean=jnp.tanh).mean, "`mean` must map inputs of shape"),
    ("estimator text", lambda: gp(X, 1.0, estimator="cg"), "`estimator` must be one of .* 'cg'"),
    ("estimator solver", lambda: gp(X, 1.0, estimator=CG), "`estimator` .* `ConjugateGradients`"),
    (
        "estimator class",
        lambda: gp(X, 1.0, estimator=E.Cholesky),
        "`estimator` must be an instance",
    ),
    (
        "estimator logdet",
        lambda: gp(X, 1.0, estimator=L.MiniBatch()),
        "`estimator` .* `MiniBatch`",
    ),
    ("estimator features", lambda: gp(X, 1.0, estimator=phi), "`estimator` must be one of"),
    ("key zero", lambda: gp(X, 1.0, key=0), "`key` must be a JAX key.* got 0"),
    ("key text", lambda: gp(X, 1.0, key="a"), "`key` must be a JAX key.* got 'a'"),
    ("key of numbers", lambda: gp(X, 1.0, key=y), r"`key` .* got an array of float32\[6\]"),
    ("keys", lambda: gp(X, 1.0, key=KEYS), r"`key` must be one key, got an array of shape \(3,\)"),
    ("state three", lambda: gp(X, 1.0, state=3), "`state` must be the name of a mutable .* got 3"),
    (
        "state itself",
        lambda: gp(X, 1.0, estimator=E.Pathwise(CG), key=KEY, state=E.SolverState()),
        "`state` must be the name of a mutable .* got a `SolverState`",
    ),
    (
        "state of Cholesky",
        lambda: gp(X, 1.0, state="solver"),
        "`Cholesky` is not one: leave `state` out",
    ),
    ("no key for probes", lambda: gp(X, 1.0, estimator=E.Pathwise(CG)).log_prob(y), "a `key=`"),
    ("y text", lambda: gp(X, 1.0).log_prob("a"), "`y` must be a number or an array of numbers"),
    ("y None", lambda: gp(X, 1.0).log_prob(None), "`y` must be a number or an array of numbers"),
    ("y short", lambda: gp(X, 1.0).log_prob(y[1:]), r"`y` must have shape \(6,\), got \(5,\)"),
    ("y column", lambda: gp(X, 1.0).log_prob(X), r"`y` must have shape \(6,\), got \(6, 1\)"),
    ("y nan", lambda: gp(X, 1.0).log_prob(gap[:, 0]), r"`y` must be finite, got 1 .* \(2,\)"),
    ("y boolean", lambda: gp(X, 1.0).log_prob(y > 0), "`y` must be of type .* got bool"),
    ("y batch", lambda: gp(X, 1.0).condition([y, y]), r"`y` must have shape \(6,\), got \(2, 6\)"),
    ("condition text", lambda: gp(X, 1.0).condition("a"), "`y` must be a number or an array"),
    ("condition key", lambda: gp(X, 1.0).condition(y, key=0), "`key` must be a JAX key.* got 0"),
    ("samples", lambda: gp(X, 1.0).condition(y, num_samples=0), "`num_samples` must be at least 1"),
    ("epochs", lambda: gp(X, 1.0).condition(y, max_epochs="a"), "`max_epochs` must be a number"),
    ("sample key", lambda: gp(X, 1.0).sample(0), "`key` must be a JAX key.* got 0"),
    ("laplace kernel", lambda: sgp.LaplaceGP(X, rbf, counts), "`kernel` must be one of"),
    (
        "laplace distribution",
        lambda: sgp.LaplaceGP(rbf, X, dist.Poisson(1.0)),
        r"`likelihood` must be a function .* dist.Poisson",
    ),
    ("laplace no function", lambda: sgp.LaplaceGP(rbf, X, 1.0), "`likelihood` must be"),
    ("laplace rate", lambda: sgp.LaplaceGP(rbf, X, jnp.exp), "`likelihood` must map values"),
    (
        "laplace scalar",
        lambda: sgp.LaplaceGP(rbf, X, lambda f: dist.Poisson(jnp.exp(f[0]))),
        r"`likelihood` must give a distribution of batch shape \(6,\)",
    ),
    (
        "laplace event",
        lambda: sgp.LaplaceGP(rbf, X, lambda f: dist.Normal(f, 1.0).to_event(1)),
        r"`likelihood` must give .* event shape \(6,\)",
    ),
    ("laplace y", lambda: sgp.LaplaceGP(rbf, X, counts).log_prob(y[:2]), r"`y` must have shape"),
    (
        "laplace mean",
        lambda: sgp.LaplaceGP(rbf, X, counts, mean=np.ones(2)),
        "`mean` must have shape",
    ),
    (
        "outputs kernels",
        lambda: sgp.MultiOutputGP(0.5 * rbf * np.ones(2, np.float32), coregion, X, 0.1),
        r"`kernel` must be one kernel, got a batch of shape \(2,\)",
    ),
    (
        "outputs swapped",
        lambda: sgp.MultiOutputGP(coregion, rbf, X, 0.1),
        "`outputs` must be a `sgp.kernels.Coregion`, got a `RBF`",
    ),
    (
        "outputs batch",
        lambda: sgp.MultiOutputGP(rbf, K.Coregion(np.ones((3, 2, 1)), eye[0, :2]), X, 0.1),
        r"`outputs` must be one kernel, got a batch of shape \(3,\)",
    ),
    ("outputs X", lambda: sgp.MultiOutputGP(rbf, coregion, y, 0.1), r"`X` must have shape \(n, d"),
    (
        "outputs noise",
        lambda: outputs(y + 1.0),
        r"`noise_variance` must have shape \(\) or \(2,\) or \(6, 2\), got \(6,\): one value, or",
    ),
    ("outputs noise zero", lambda: outputs(0.0), "`noise_variance` must be positive and finite"),
    (
        "outputs mean",
        lambda: outputs(0.1, mean=y),
        r"`mean` must have shape \(\) or \(2,\) or \(6, 2\), got \(6,\): a number, one for each",
    ),
    ("outputs mean kernel", lambda: outputs(0.1, mean=rbf), "`mean` must be a function .* kernel"),
    (
        "outputs mean of rows",
        lambda: outputs(0.1, mean=lambda X: X).log_prob(Y),
        r"`mean` must map inputs of shape \(6, 1\) to shape \(6, 2\), got \(6, 1\)",
    ),
    (
        "outputs observed",
        lambda: outputs(0.1, observed=Y[:, 0] > 0),
        r"`observed` must have shape \(6, 2\), got \(6,\): one entry for each of `Y`",
    ),
    (
        "outputs observed numbers",
        lambda: outputs(0.1, observed=Y),
        "`observed` must be boolean, True where an entry has a target, got float32",
    ),
    (
        "outputs unobserved",
        lambda: outputs(0.1, observed=Y > 9.0),
        "`observed` must be True for at least one entry",
    ),
    ("outputs Y", lambda: outputs(0.1).log_prob(y), r"`Y` must have shape \(6, 2\), got \(6,\)"),
    (
        "outputs Ys",
        lambda: outputs(0.1).condition(np.stack([Y, Y])),
        r"`Y` must have shape \(6, 2\), got \(2, 6, 2\): a column for each output",
    ),
    (
        "outputs gap",
        lambda: outputs(0.1).log_prob(np.where(Y > 0.5, nan, Y)),
        r"`Y` must be finite, got .* give `observed=~jnp.isnan\(Y\)`",
    ),
    ("outputs key", lambda: outputs(0.1).sample(0), "`key` must be a JAX key.* got 0"),
    (
        "features kernel",
        lambda: collapsed(rbf, X, 1, y),
        "`features` must be features or .* got the kernel `RBF`: a kernel is an argument of",
    ),
    (
        "features array",
        lambda: collapsed(X, X, 1, y),
        r"`features` must be features .* such as `lambda X: X`, got a `nd",
    ),
    (
        "features of points",
        lambda: collapsed(F.InducingPoints(rbf, Z), X, 1, y),
        "`features` must have independent weights a priori, got `InducingPoints`",
    ),
    (
        "features of one column",
        lambda: collapsed(lambda X: X[:, 0], X, 1, y),
        r"`feature_map` must map inputs of shape \(6, 1\) to features of shape \(6, m\)",
    ),
    ("features inputs", lambda: collapsed(jnp.sin, y, 1, y), r"`X` must have shape \(n, d\), got"),
    ("features inputs nan", lambda: collapsed(jnp.sin, gap, 1, y), "`X` must be finite"),
    (
        "features nan",
        lambda: collapsed(jnp.log, -abs(X) - 1, 1, [1.0]).log_prob(y),
        "`features` must be finite",
    ),
    ("weights shape", lambda: weights(0.1, y), r"`weights` must have shape \(1,\), got \(6,\)"),
    ("weights text", lambda: weights(0.1, "a"), "`weights` must be a number or an array"),
    ("weights nan", lambda: weights(0.1, [nan]), "`weights` must be finite"),
    ("features noise", lambda: weights(0.0, [1.0]), "`noise_variance` must be positive and finite"),
    ("noise rows", lambda: weights(y, [1.0]), r"`noise_variance` must have shape \(\), got \(6,\)"),
    ("too few data", lambda: weights(0.1, [1.0], num_data=5), "`num_data` must be at least 6"),
    ("float data", lambda: weights(0.1, [1.0], num_data=6.0), "`num_data` must be an integer"),
    (
        "logdet estimator",
        lambda: weights(0.1, [1.0], logdet=E.Cholesky()),
        "`logdet` must be one of",
    ),
    (
        "logdet class",
        lambda: weights(0.1, [1.0], logdet=L.MiniBatch),
        "`logdet` must be",
    ),
    ("features y", lambda: weights(0.1, [1.0]).log_prob(y[1:]), r"`y` must have shape \(6,\)"),
    ("features y nan", lambda: weights(0.1, [1.0]).log_prob(gap[:, 0]), "`y` must be finite"),
    ("features key", lambda: weights(0.1, [1.0]).sample(0), "`key` must be a JAX key.* got 0"),
    (
        "part of the rows",
        lambda: weights(0.1, [1.0], num_data=8).condition(y),
        "`X` must have all 8 rows for a posterior, got 6",
    ),
]

LATENT: list[Row] = [
    (
        "negative scale",
        lambda: sgp.SparseGP(rbf, X, Z, np.zeros(3), -np.ones((3, 3))),
        "`scale_tril` must be lower triangular .* up to 1.0 above the diagonal and down to -1.0",
    ),
    (
        "hybrid scale",
        lambda: sgp.HybridGP(rbf, X, Z, np.zeros(3), -eye, Z, np.zeros(3)),
        "`scale_tril` must be lower",
    ),
    (
        "kernel text",
        lambda: sgp.LatentGP("rbf", X),
        "`kernel` must be one of `sgp.kernels` .* 'rbf'",
    ),
    ("kernel class", lambda: sgp.LatentGP(K.RBF, X), "`kernel` must be an instance"),
    (
        "kernel of features",
        lambda: sgp.LatentGP(phi, X),
        r"got the feature map `RandomFourier`: .* `sgp.WeightSpaceGP\(features, X\)`",
    ),
    ("X vector", lambda: sgp.LatentGP(rbf, y), r"`X` must have shape \(n, d\), got \(6,\)"),
    ("X empty", lambda: sgp.LatentGP(rbf, X[:0]), "`X` must have at least one row"),
    ("jitter text", lambda: sgp.LatentGP(rbf, X, jitter="a"), "`jitter` must be a number, got 'a'"),
    ("jitter negative", lambda: sgp.LatentGP(rbf, X, jitter=-1), "`jitter` must be finite and not"),
    ("value text", lambda: sgp.LatentGP(rbf, X).log_prob("a"), "`value` must be a number or"),
    (
        "value short",
        lambda: sgp.LatentGP(rbf, X).log_prob(y[1:]),
        r"`value` must have shape .* 6\)",
    ),
    ("f short", lambda: sgp.LatentGP(rbf, X).condition(y[1:]), r"`f` must have shape \(6,\)"),
    ("f nan", lambda: sgp.LatentGP(rbf, X).condition(gap[:, 0]), "`f` must be finite"),
    ("sample key", lambda: sgp.LatentGP(rbf, X).sample("a"), "`key` must be a JAX key.* got 'a'"),
    ("sparse kernel", lambda: sgp.SparseGP(X, X, Z, y[:3], eye), "`kernel` must be one of"),
    (
        "sparse points",
        lambda: sgp.SparseGP(rbf, X, y, y[:3], eye),
        "`inducing_points` must have sh",
    ),
    (
        "points width",
        lambda: sgp.SparseGP(rbf, X, eye, y[:3], eye),
        r"`inducing_points` .* \(n, 1\)",
    ),
    (
        "points nan",
        lambda: sgp.SparseGP(rbf, X, gap, y, np.eye(6)),
        "`inducing_points` must be fini",
    ),
    (
        "no points",
        lambda: sgp.SparseGP(rbf, X, X[:0], y, eye),
        "`inducing_points` must have at leas",
    ),
    (
        "loc shape",
        lambda: sgp.SparseGP(rbf, X, Z, y, eye),
        r"`loc` must have shape \(3,\), got \(6",
    ),
    ("loc text", lambda: sgp.SparseGP(rbf, X, Z, "a", eye), "`loc` must be a number or an array"),
    ("loc nan", lambda: sgp.SparseGP(rbf, X, Z, [nan] * 3, eye), "`loc` must be finite, got 3"),
    (
        "scale shape",
        lambda: sgp.SparseGP(rbf, X, Z, y[:3], y),
        r"`scale_tril` must have .* \(3, 3\)",
    ),
    (
        "scale None",
        lambda: sgp.SparseGP(rbf, X, Z, y[:3], None),
        "`scale_tril` must be a number or",
    ),
    ("scale nan", lambda: sgp.SparseGP(rbf, X, Z, y[:3], nan * eye), "`scale_tril` must be finite"),
    ("no neighbors", lambda: near(num_neighbors=0), "`num_neighbors` must be at least 1, got 0"),
    ("neighbors loc", lambda: near(loc=y), r"`loc` must have shape \(3,\), got \(6"),
    ("neighbors scale", lambda: near(scale=0.0 * y[:3]), "`scale` must be positive"),
    ("scales", lambda: near(scale=y), r"`scale` must have shape \(3,\), got \(6,\)"),
    ("neighbors points", lambda: near(Z=gap[:3]), "`inducing_points` must be finite"),
    ("neighbors key", lambda: near(key="a"), "`key` must be a JAX key"),
    ("mean weights", lambda: decoupled(Z, y, Z, eye), r"`mean_weights` must have shape \(3,\)"),
    ("weights nan", lambda: decoupled(Z, [nan] * 3, Z, eye), "`mean_weights` must be finite"),
    ("mean points", lambda: decoupled(y, y[:3], Z, eye), "`mean_points` must have shape"),
    ("cov points", lambda: decoupled(Z, y[:3], eye, eye), r"`cov_points` must have shape \(n, 1\)"),
    ("cov scale", lambda: decoupled(Z, y[:3], Z, y), r"`cov_scale_tril` must have shape \(3, 3\)"),
    ("cov text", lambda: decoupled(Z, y[:3], Z, "a"), "`cov_scale_tril` must be a number or"),
    (
        "columns",
        lambda: decoupled(Z, y[:3], Z, eye, num_columns=0),
        "`num_columns` must be at least",
    ),
    ("key", lambda: decoupled(Z, y[:3], Z, eye, key=0), "`key` must be a JAX key.* got 0"),
    ("residual points", lambda: hybrid(eye, y[:3]), r"`residual_points` must have shape \(n, 1\)"),
    ("residual weights", lambda: hybrid(Z, y), r"`residual_weights` must have shape \(3,\)"),
    ("residual nan", lambda: hybrid(Z, [nan] * 3), "`residual_weights` must be finite"),
    ("residual columns", lambda: hybrid(Z, y[:3], num_columns=2.0), "`num_columns` must be an int"),
    ("hybrid jitter", lambda: hybrid(Z, y[:3], jitter=nan), "`jitter` must be finite and not"),
    ("features", lambda: sgp.WeightSpaceGP(rbf, X), "got the kernel `RBF`: .* `sgp.LatentGP`"),
    ("features class", lambda: sgp.WeightSpaceGP(F.Learned, X), "`features` must be an instance"),
    ("precision", lambda: sgp.WeightSpaceGP(phi, X, y), r"`precision` must have shape \(4,\)"),
    ("precision text", lambda: sgp.WeightSpaceGP(phi, X, "a"), "`precision` must be a number or"),
    (
        "precision zero",
        lambda: sgp.WeightSpaceGP(phi, X, np.zeros(4)),
        "`precision` must be positive",
    ),
    (
        "chevron features",
        lambda: sgp.ChevronGP("a", X, 0, 0, 0),
        "`features` must be features of .*, got 'a'",
    ),
    ("chevron loc", lambda: chevron(y, y, X), r"`loc` must have shape \(4,\), got \(6,\)"),
    ("chevron text", lambda: chevron("a", y, X), "`loc` must be a number or an array of numbers"),
    ("columns shape", lambda: chevron(X[:4, 0], np.ones(4), X), r"`scale_columns` .* \(4, k\)"),
    (
        "normal loc",
        lambda: sgp.ChevronNormal(X, y, X),
        r"`loc` must have shape \(m,\), got \(6, 1\)",
    ),
    (
        "normal diagonal",
        lambda: sgp.ChevronNormal(y, y[1:], X),
        r"`scale_diag` must have shape \(6,",
    ),
    (
        "diagonal zero",
        lambda: sgp.ChevronNormal(y, 0 * y, X),
        "`scale_diag` must be positive and fi",
    ),
    ("diagonal text", lambda: sgp.ChevronNormal(y, "a", X), "`scale_diag` must be a number or an"),
    ("normal columns", lambda: sgp.ChevronNormal(y, y + 1, y), r"`scale_columns` must .* \(6, k\)"),
    ("too many", lambda: sgp.ChevronNormal(y, y + 1, np.ones((6, 7))), "`scale_columns` must have"),
    ("columns nan", lambda: sgp.ChevronNormal(y, y + 1, gap), "`scale_columns` must be finite"),
    ("normal key", lambda: sgp.ChevronNormal(y, y + 1, X).sample(0), "`key` must be a JAX key"),
    (
        "normal value",
        lambda: sgp.ChevronNormal(y, y + 1, X).log_prob(0.0),
        r"`value` must have shape \(\.\.\., 6\), got \(\)",
    ),
    ("no mesh", lambda: sgp.shard_rows("rows", X), "`mesh` must be a mesh of devices"),
    ("rows apart", lambda: sgp.shard_rows(mesh(), X, y[:5]), "same number of rows.*(6, 1).*(5,)"),
    ("no rows", lambda: sgp.shard_rows(mesh(), 1.0), "must have rows.*a single number"),
    ("a list", lambda: sgp.shard_rows(mesh(), [1.0, 2.0], y), "same number of rows.*(2,).*(6,)"),
    ("few rows", lambda: sgp.shard_rows(mesh(8), X), "6 rows are too few for a mesh of 8 devices"),
    ("explicit", lambda: Operator(rbf, explicit(), 0.1), "with explicit axes.*`X, y = sgp.shard_"),
    ("plate name", lambda: sgp.plate(3, 6), "`name` must be a string, got 3"),
    ("plate size", lambda: sgp.plate("p", 6.0), "`size` must be an integer, got 6.0"),
    ("empty plate", lambda: sgp.plate("p", 0), "`size` must be at least 1, got 0"),
    ("subsample", lambda: sgp.plate("p", 6, 7), r"`subsample_size` must be in 1\.\.6, got 7"),
    ("no subsample", lambda: sgp.plate("p", 6, 0), "`subsample_size` must be at least 1, got 0"),
    ("half a row", lambda: sgp.plate("p", 6, 0.5), "`subsample_size` must be an integer, got 0.5"),
]

POSTERIORS: list[Row] = [
    ("mean text", lambda: exact.mean("a"), "`Xs` must be a number or an array of numbers"),
    ("mean vector", lambda: exact.mean(y), r"`Xs` must have shape \(n, d\), got \(6,\)"),
    ("mean width", lambda: exact.mean(eye), r"`Xs` must have shape \(n, 1\), got \(3, 3\)"),
    ("mean empty", lambda: exact.mean(X[:0]), "`Xs` must have at least one row"),
    ("variance nan", lambda: exact.variance(gap), "`Xs` must be finite, got 1"),
    ("covariance half", lambda: exact.covariance(half), "`Xs` must be of type .* got float16"),
    ("chunk zero", lambda: exact.mean(X, chunk_size=0), "`chunk_size` must be at least 1, got 0"),
    ("chunk float", lambda: exact.variance(X, chunk_size=2.0), "`chunk_size` must be an integer"),
    ("sample key", lambda: exact.sample(0, X), "`key` must be a JAX key.* got 0"),
    ("sample keys", lambda: exact.sample(KEYS, X), "`key` must be one key"),
    ("functions key", lambda: exact.sample_functions(0), "`key` must be a JAX key.* got 0"),
    ("no samples", lambda: exact.sample(KEY, X, 0), "`num_samples` must be at least 1, got 0"),
    (
        "samples float",
        lambda: exact.sample(KEY, X, 2.0),
        "`num_samples` must be an integer, got 2.0",
    ),
    (
        "sparse samples",
        lambda: sparse.sample(KEY, X, -1),
        "`num_samples` must be at least 1, got -1",
    ),
    ("noise text", lambda: exact.predictive(X, "a"), "`noise_variance` must be a number or an arr"),
    (
        "noise of other rows",
        lambda: exact.predictive(X, np.ones(2)),
        r"`noise_variance` must have shape \(\) or \(.*got \(2,\)",
    ),
    (
        "noise negative",
        lambda: exact.predictive(X, -1.0),
        "`noise_variance` must be finite and not",
    ),
    ("sparse text", lambda: sparse.mean("a"), "`Xs` must be a number or an array of numbers"),
    ("sparse vector", lambda: sparse.variance(y), r"`Xs` must have shape \(n, d\), got \(6,\)"),
    ("sparse width", lambda: sparse.mean(eye), r"`Xs` must have shape \(n, 1\), got \(3, 3\)"),
    (
        "sparse chunk",
        lambda: sparse.mean(X, chunk_size=-1),
        "`chunk_size` must be at least 1, got -",
    ),
    ("sparse key", lambda: sparse.sample(None, X), "`key` must be a JAX key.* got None"),
    ("sparse noise", lambda: sparse.predictive(X, nan), "`noise_variance` must be finite and not"),
    (
        "augmented",
        lambda: chevron(np.zeros(4), np.ones(4), np.zeros((4, 0))).posterior().augmented(X, 0.1),
        "`augmented` needs features that are `InducingPoints`",
    ),
    (
        "pruned",
        lambda: chevron(np.zeros(4), np.ones(4), np.zeros((4, 0))).posterior().pruned([True]),
        r"`active` must have shape \(4,\), got \(1,\)",
    ),
]

GUIDES: list[Row] = [
    ("model", lambda: G.AutoSparseGP("a"), "`model` must be callable, got 'a'"),
    ("site", lambda: G.AutoSparseGP(model, 3), "`site` must be a string, got 3"),
    ("prefix", lambda: G.AutoSparseGP(model, prefix=None), "`prefix` must be a string, got None"),
    (
        "rest",
        lambda: G.AutoSparseGP(model, rest="normal"),
        "`rest` must be a guide class.*'normal'",
    ),
    (
        "no points",
        lambda: G.AutoSparseGP(model, num_inducing=0),
        "`num_inducing` must be at least 1",
    ),
    ("half", lambda: G.AutoSparseGP(model, num_inducing=0.5), "`num_inducing` must be an integer"),
    ("points", lambda: G.AutoSparseGP(model, inducing_points=y), r"`inducing_points` .* \(n, d\)"),
    (
        "points nan",
        lambda: G.AutoSparseGP(model, inducing_points=gap),
        "`inducing_points` must be f",
    ),
    ("jitter", lambda: G.AutoSparseGP(model, jitter="a"), "`jitter` must be a number, got 'a'"),
    (
        "neighbors",
        lambda: G.AutoNearestNeighborGP(model, num_neighbors=1.5),
        "`num_neighbors` must be an integer",
    ),
    (
        "neighbors points",
        lambda: G.AutoNearestNeighborGP(model, inducing_points=gap),
        "`inducing_points` must be finite",
    ),
    ("mean size", lambda: G.AutoDecoupledGP(model, mean_size=0), "`mean_size` must be at least 1"),
    ("cov size", lambda: G.AutoDecoupledGP(model, cov_size=2.0), "`cov_size` must be an integer"),
    ("growth", lambda: G.AutoDecoupledGP(model, growth=0), "`growth` must be at least 1, got 0"),
    (
        "one of two",
        lambda: G.AutoDecoupledGP(model, mean_points=Z),
        "`mean_points` and `cov_points`",
    ),
    (
        "columns",
        lambda: G.AutoDecoupledGP(model, num_columns=0),
        "`num_columns` must be at least 1",
    ),
    (
        "residual",
        lambda: G.AutoHybridGP(model, num_residual=0),
        "`num_residual` must be at least 1",
    ),
    ("hybrid growth", lambda: G.AutoHybridGP(model, growth=1.5), "`growth` must be an integer"),
    (
        "both",
        lambda: G.AutoHybridGP(model, residual_points=Z, growth=2),
        "`growth` must be None where `residual_points` are given",
    ),
    ("rank", lambda: G.AutoChevronGP(model, rank=-1), "`rank` must be at least 0, got -1"),
    ("rank float", lambda: G.AutoChevronGP(model, rank=1.0), "`rank` must be an integer, got 1.0"),
    ("scale", lambda: G.AutoChevronGP(model, init_scale=0.0), "`init_scale` must be positive"),
    (
        "key",
        lambda: G.AutoSparseGP(model).sample_posterior(0, {}, X),
        "`rng_key` must be a JAX key",
    ),
    ("posterior", lambda: G.AutoSparseGP(model).posterior({}, X, key=0), "`key` must be a JAX key"),
]

INFER: list[Row] = [
    ("no nodes", lambda: I.QuadratureELBO(0), "`num_nodes` must be at least 1, got 0"),
    ("float nodes", lambda: I.QuadratureELBO(20.0), "`num_nodes` must be an integer, got 20.0"),
    ("points", lambda: I.QuadratureELBO(num_points=48), "`num_points` must be a power of two, at"),
    (
        "one point",
        lambda: I.QuadratureELBO(num_points=1),
        "must be a power of two, at least 2, got 1",
    ),
    ("particles", lambda: I.QuadratureELBO(num_particles=0), "`num_particles` must be at least 1"),
    ("joint particles", lambda: I.JointELBO(num_particles=0), "`num_particles` must be at least 1"),
    ("features", lambda: I.QuadruplyStochasticELBO(0), "`num_features` must be at least 1, got 0"),
    ("rank", lambda: I.QuadruplyStochasticELBO(5, -1), "`control_variate_rank` must be at least 0"),
    (
        "support",
        lambda: I.QuadruplyStochasticELBO(support_points=y),
        "`support_points` must have sh",
    ),
    (
        "columns",
        lambda: I.QuadruplyStochasticELBO(num_columns=0),
        "`num_columns` must be at least 1",
    ),
    ("bound", lambda: I.QuadruplyStochasticELBO(bound="loose"), '`bound` must be None, "strict"'),
    (
        "optim",
        lambda: I.RowSVI(model, model, 1, 2),
        "`optim` must be an optax optimizer, got 1",
    ),
    ("loss", lambda: I.RowSVI(model, model, optax.sgd(1), 2), "`loss` must be a `QuadruplySto"),
    ("row optim", lambda: svi(row_optim="adam"), "`row_optim` must be `row_adagrad.* got 'adam'"),
    ("hold", lambda: svi(warmup_steps=-1), "`warmup_steps` must be at least 0, got -1"),
    ("refresh", lambda: svi(refresh_every=0), "`refresh_every` must be at least 1, got 0"),
    ("rate", lambda: I.row_adagrad("a"), "`learning_rate` must be a number, got 'a'"),
    (
        "accumulator",
        lambda: I.row_adagrad(initial_accumulator=-1),
        "`initial_accumulator` must be f",
    ),
    ("rate zero", lambda: I.row_adam(0.0), "`learning_rate` must be positive and finite, got 0"),
    ("b1", lambda: I.row_adam(b1=1.0), r"`b1` must be in \[0, 1\), got 1.0"),
    ("b2", lambda: I.row_adam(b2="a"), "`b2` must be a number, got 'a'"),
    (
        "two kinds of draws",
        lambda: I.Predictive(model, guide=model, posterior_samples={"f": X}),
        "give either a `guide` with its `params`, or",
    ),
    ("model", lambda: I.Predictive("a", posterior_samples={"f": X}), "`model` must be callable"),
    (
        "samples",
        lambda: I.Predictive(model, guide=model, num_samples=0),
        "`num_samples` must be at",
    ),
    (
        "chunk",
        lambda: I.Predictive(model, guide=model, chunk_size=2.5),
        "`chunk_size` must be an in",
    ),
    ("draw key", lambda: I.Predictive(model, guide=model)(0, X), "`key` must be a JAX key.* got 0"),
    ("subsets", lambda: start(num_subsets=0), "`num_subsets` must be at least 1, got 0"),
    ("subset size", lambda: start(subset_size=1.5), "`subset_size` must be an integer, got 1.5"),
    ("steps", lambda: start(num_steps=0), "`num_steps` must be at least 1, got 0"),
    (
        "learning rate",
        lambda: start(learning_rate="a"),
        "`learning_rate` must be a number, got 'a'",
    ),
    ("refinements", lambda: start(num_refinements=-1), "`num_refinements` must be at least 0"),
    ("start key", lambda: I.initial_hyperparameters(0, model, X, y), "`key` must be a JAX key"),
    (
        "start y",
        lambda: I.initial_hyperparameters(KEY, model, X, y[1:]),
        r"`y` must have shape \(6",
    ),
    (
        "start batch",
        lambda: I.initial_hyperparameters(KEY, model, np.stack([X, X]), y),
        "`X` must have shape .* inputs of one member",
    ),
    ("start nan", lambda: I.initial_hyperparameters(KEY, model, X, y + nan), "`y` must be finite"),
    ("median X", lambda: I.median_distance(y), r"`X` must have shape \(n, d\), got \(6,\)"),
    ("median row", lambda: I.median_distance(X[:1]), "`X` must have two rows or more, got 1"),
    (
        "median rows",
        lambda: I.median_distance(X, max_rows=1),
        "`max_rows` must be at least 2, got 1",
    ),
    ("precision nan", lambda: sgp.relevance_vectors(gap), "`precision` must be positive, got"),
    ("precision", lambda: sgp.relevance_vectors("a"), "`precision` must be a number or an array"),
    (
        "threshold array",
        lambda: sgp.relevance_vectors(y, jnp.ones(())),
        r"`threshold` must be a number, got a `ArrayImpl`: write float\(...\)",
    ),
    ("threshold", lambda: sgp.relevance_vectors(y, 0), "`threshold` must be positive, got 0"),
    ("svi", lambda: I.replace_params("a", None, {}), "`svi` must be a numpyro.infer.SVI, got 'a'"),
    ("pass", lambda: I.initial_pass("a", None, 1), "`svi` must be a numpyro.infer.SVI, got 'a'"),
    ("result", lambda: sgp.to_arviz("a", model, model, key=KEY), "`result` must be an MCMC after"),
    ("arviz key", lambda: sgp.to_arviz({}, model, model, key=0), "`key` must be a JAX key.* got 0"),
    ("arviz model", lambda: sgp.to_arviz({}, key=KEY), "`model` and `guide` must be given"),
    (
        "fraction",
        lambda: sgp.datasets.load_flights(1.0),
        "`test_fraction` must be strictly between",
    ),
    ("values", lambda: I.Hyperparameters([1]), "`values` must be a dict .* got a `list`"),
    (
        "state",
        lambda: I.log_determinant_diagnostics(3),
        "`svi_state` must be the state of an SVI, such as `result.state`.* got 3",
    ),
    ("plate dim", lambda: sgp.plate("r", 5, dim=0), "`dim` must be negative, got 0: .* -1 is"),
    ("plate axis", lambda: sgp.plate("r", 5, dim="a"), "`dim` must be an integer, got 'a'"),
    ("years", lambda: sgp.datasets.load_co2(41), r"`test_years` must be in 1\.\.40, got 41"),
]

TABLE = [
    pytest.param(call, message, id=f"{module}: {name}")
    for module, rows in (
        ("arrays", ARRAYS),
        ("kernels", KERNELS),
        ("features", FEATURES),
        ("solvers", SOLVERS),
        ("estimators", ESTIMATORS),
        ("collapsed", COLLAPSED),
        ("latent", LATENT),
        ("posteriors", POSTERIORS),
        ("guides", GUIDES),
        ("infer", INFER),
    )
    for name, call, message in rows
]


@pytest.mark.parametrize(("call", "message"), TABLE)
def test_bad_input(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
