"""The tables of words on the pages "coming from": each row is a number of the other package.

The other package's formula is written out in NumPy, after its source. Where a row has code for this
package, that code is evaluated as it stands on the page. Of HSGP, which is NumPyro's, the functions
themselves are called.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.hsgp import approximation as hsgp
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from scipy import special, stats

import numpyro_scalegp as sgp
from tests.files import ROOT, blocks

K = sgp.kernels
generator = np.random.default_rng(0)
X, Z = generator.uniform(-1.0, 1.0, (6, 3)), generator.uniform(-1.0, 1.0, (4, 3))
y = np.sin(3.0 * X[:, 0]) + 0.1 * generator.normal(size=6)
Xs, ys = generator.uniform(-1.0, 1.0, (2, 3)), np.array([0.3, -0.4])
# Values of hyperparameters, by their names in the rows.
ELL, VARIANCE, PERIOD, ALPHA, SIGMA, JITTER = 0.7, 1.7, 1.4, 0.8, 0.3, 1e-8
ARD = np.array([0.5, 0.8, 1.3])
W, KAPPA = generator.normal(size=(3, 2)), np.array([0.2, 0.5, 0.1])
NAMES = {
    "lengthscale": ELL, "lengthscales": ELL, "ls": ELL, "l": ELL, "alpha": ALPHA, "sigma": SIGMA,
    "variance": VARIANCE, "eta": np.sqrt(VARIANCE), "scale": np.sqrt(VARIANCE),
    "period": PERIOD, "period_length": PERIOD, "w0": 2.0 * np.pi / PERIOD, "pi": np.pi,
    "W": W, "covar_factor": W, "kappa": KAPPA, "var": KAPPA, "points": Z, "X": X[:, :1],
    "m": 5, "box": np.array([[-2.0], [3.0]]), "g": jnp.tanh, "jnp": jnp, "dist": dist, "sgp": sgp,
    "HilbertSpace": sgp.features.HilbertSpace, **{name: getattr(K, name) for name in K.__all__},
}  # fmt: skip
Numbers = tuple[Any, Any]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def rows() -> list[tuple[str, str, str]]:
    """The page, the name in the other package and the names in this one, for each row."""
    entries = []
    for page in sorted((ROOT / "docs").glob("**/coming_from*/*.md")):
        table = page.read_text(encoding="utf-8").partition("\n## Words\n")[2].partition("\n## ")[0]
        lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
        entries += [
            (page.stem, *(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines
        ]
    return entries


def evaluated(cell: str, place: int = 0, **names: Any) -> Any:
    """The value of a span of code in a cell."""
    return eval(spans(cell)[place], {**NAMES, **names})


# The formulas of the other packages.


def squares(A: np.ndarray, B: np.ndarray, lengthscale: Any = ELL) -> np.ndarray:
    return np.sum(np.square((A[:, None] - B[None]) / lengthscale), axis=2)


def rbf(A: np.ndarray, B: np.ndarray, lengthscale: Any = ELL) -> np.ndarray:
    return np.exp(-0.5 * squares(A, B, lengthscale))


def matern(nu: float, A: np.ndarray = X, B: np.ndarray = Z) -> np.ndarray:
    r = np.sqrt(2.0 * nu * squares(A, B))
    return {0.5: 1.0, 1.5: 1.0 + r, 2.5: 1.0 + r + r**2 / 3.0}[nu] * np.exp(-r)


def rational_quadratic(A: np.ndarray = X, B: np.ndarray = Z) -> np.ndarray:
    return (1.0 + squares(A, B) / (2.0 * ALPHA)) ** -ALPHA


def sines(A: np.ndarray = X, B: np.ndarray = Z) -> np.ndarray:
    return np.sum(np.square(np.sin(np.pi * (A[:, None] - B[None]) / PERIOD)), axis=2)


def of_gpflow_and_pymc(A: np.ndarray = X, B: np.ndarray = Z) -> np.ndarray:
    return np.exp(-0.5 * sines(A, B) / ELL**2)


def density(residual: np.ndarray, covariance: np.ndarray) -> float:
    return float(stats.multivariate_normal.logpdf(residual, np.zeros(len(residual)), covariance))


def moments(noise: Any, kernel: Callable[..., np.ndarray] = rbf) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of f at new inputs."""
    H = kernel(X, X) + np.diag(np.broadcast_to(noise, 6))
    weights = np.linalg.solve(H, kernel(X, Xs))
    return weights.T @ y, 1.0 - np.sum(kernel(X, Xs) * weights, axis=0)


def gaussian_process(noise: Any = SIGMA**2, **options: Any) -> sgp.GaussianProcess:
    return sgp.GaussianProcess(K.RBF(ELL), X, noise, **options)


def of_marginal(cell: str) -> Numbers:
    return gaussian_process().log_prob(y), density(y, rbf(X, X) + SIGMA**2 * np.eye(6))


def of_titsias(cell: str) -> Numbers:
    """The bound of Titsias (2009), as in GPflow's `SGPR` and PyMC's "VFE"."""
    code = re.search(r"estimator=(sgp\.estimators\.SGPR\(.*?\))", cell)
    assert code is not None
    Q = rbf(X, Z) @ np.linalg.solve(rbf(Z, Z), rbf(Z, X))
    bound = density(y, Q + SIGMA**2 * np.eye(6)) - 0.5 * np.trace(rbf(X, X) - Q) / SIGMA**2
    return gaussian_process(estimator=eval(code[1], NAMES)).log_prob(y), bound


def of_svgp(cell: str) -> Numbers:
    """GPflow's bound, sum_i E[log N(y_i | f_i)] - KL, at q(v) = N(loc, scale^2 I)."""
    loc, scale = np.linspace(-1.0, 1.0, 4), 0.6

    def model() -> None:
        f = numpyro.sample("f", sgp.LatentGP(K.RBF(ELL), X))
        with numpyro.plate("rows", 6):
            numpyro.sample("y", dist.Normal(f, SIGMA), obs=y)

    guide = sgp.guides.AutoSparseGP(model, inducing_points=Z)
    elbo = sgp.infer.QuadratureELBO(4, tight=False)
    values = {"inducing_points": Z, "loc": loc, "scale_tril": scale * np.eye(4)}
    params = {f"f_auto_{name}": jnp.asarray(value) for name, value in values.items()}
    bound = -elbo.loss(jax.random.key(0), params, model, guide)
    A = np.linalg.solve(np.linalg.cholesky(rbf(Z, Z)), rbf(Z, X))
    variance = 1.0 - np.sum(A**2, axis=0) + scale**2 * np.sum(A**2, axis=0)
    terms = stats.norm.logpdf(y, A.T @ loc, SIGMA) - 0.5 * variance / SIGMA**2
    divergence = 0.5 * (4 * scale**2 + loc @ loc - 4) - 4 * np.log(scale)
    return bound, np.sum(terms) - divergence


def of_latent(cell: str) -> Numbers:
    prior = sgp.LatentGP(K.RBF(ELL), X, jitter=JITTER)
    return prior.log_prob(y), density(y, rbf(X, X) + JITTER * np.eye(6))


def of_ard(cell: str) -> Numbers:
    return K.RBF(**{"lengthscale": ARD})(X, Z), rbf(X, Z, ARD)


def of_moments(cell: str) -> Numbers:
    posterior = gaussian_process().condition(y)
    return (posterior.mean(Xs), posterior.variance(Xs)), moments(SIGMA**2)


def of_values(cell: str) -> Numbers:
    """By `sgp.posterior` with fixed hyperparameters."""

    def model(X: Any, y: Any = None) -> None:
        ls = numpyro.sample("ls", dist.LogNormal())
        numpyro.sample("y", sgp.GaussianProcess(K.RBF(ls), X, SIGMA**2), obs=y)

    posterior = sgp.posterior(model, sgp.infer.Hyperparameters({"ls": ELL}), X, y)
    return (posterior.mean(Xs), posterior.variance(Xs)), moments(SIGMA**2)


def of_predictive(cell: str) -> Numbers:
    mean, variance = moments(SIGMA**2)
    predictive = gaussian_process().condition(y).predictive(Xs)
    theirs = mean, variance + SIGMA**2, stats.norm.logpdf(ys, mean, np.sqrt(variance + SIGMA**2))
    return (predictive.mean, predictive.variance, predictive.log_prob(ys)), theirs


def of_parts(cell: str) -> Numbers:
    """The conditional of one of two independent processes given the sum of both."""
    noise, total = SIGMA**2, lambda A, B: rbf(A, B) + matern(1.5, A, B)
    posterior = sgp.GaussianProcess(K.RBF(ELL) + K.Matern32(ELL), X, noise).condition(y)
    component = posterior.component(lambda kernel: kernel.left)
    weights = np.linalg.solve(total(X, X) + noise * np.eye(6), rbf(X, Xs))
    theirs = weights.T @ y, 1.0 - np.sum(rbf(X, Xs) * weights, axis=0)
    return (component.mean(Xs), component.variance(Xs)), theirs


def of_noise(noise: Any, place: int | None = None) -> Callable[[str], Numbers]:
    """The density with the other package's noise, and with a noise or a span of code here."""

    def numbers(cell: str) -> Numbers:
        variance = noise if place is None else evaluated(cell, place)
        matrix = rbf(X, X) + np.diag(np.broadcast_to(noise, 6))
        return gaussian_process(variance).log_prob(y), density(y, matrix)

    return numbers


def of_active(cell: str) -> Numbers:
    place = next(i for i, span in enumerate(spans(cell)) if span.startswith("kernel.on"))
    kernel = evaluated(cell, place, kernel=K.RBF(ELL))
    return kernel(X, Z), rbf(X[:, [0, 2]], Z[:, [0, 2]])


def of_kernels(*theirs: Any, options: dict[str, Any] | None = None) -> Callable[[str], Numbers]:
    """Kernel matrices of a cell, where classes get the lengthscale ELL, and their expectations."""

    def numbers(cell: str) -> Numbers:
        values = [evaluated(cell, place) for place in range(len(theirs))]
        kernels = [kernel(ELL) if isinstance(kernel, type) else kernel for kernel in values]
        return [kernel(X, Z) for kernel in kernels], theirs

    return numbers


def of_outputs(cell: str) -> Numbers:
    """B = W W' + diag(kappa), and B x K(X, X) of all outputs at all rows."""
    B = W @ W.T + np.diag(KAPPA)
    coregion = evaluated(cell) if "Coregion" in cell else K.Coregion(W, KAPPA)
    Y = np.stack([y, y**2, np.cos(y)], axis=1)
    gp = sgp.MultiOutputGP(K.RBF(ELL), coregion, X, SIGMA**2)
    covariance = np.kron(rbf(X, X), B) + SIGMA**2 * np.eye(18)
    index = np.arange(3.0)[:, None]
    return (coregion(index, index), gp.log_prob(Y)), (B, density(Y.ravel(), covariance))


def of_grid(cell: str) -> Numbers:
    """The Kronecker product of the covariances of two axes."""
    axes, kernels = [X, X[:2, :1]], [K.RBF(ELL), K.Matern32(0.5)]
    Y = np.stack([y, y**2], axis=1)
    covariance = np.kron(rbf(X, X), kernels[1](axes[1], axes[1])) + SIGMA**2 * np.eye(12)
    gp = sgp.GridGP(kernels, axes, SIGMA**2)
    return (gp.log_prob(Y),), (density(Y.ravel(), covariance),)


def of_mixing(cell: str) -> Numbers:
    """GPflow: f = W g with independent g_l, cov = sum_l W_jl W_il k_l."""
    parts = [K.RBF(ELL), K.Matern32(ELL)]
    total = sum(
        kernel.on((0, 1, 2)) * K.Coregion(W[:, [j]], np.zeros(3)).on((3,))
        for j, kernel in enumerate(parts[1:], 1)
    ) + parts[0].on((0, 1, 2)) * K.Coregion(W[:, [0]], np.zeros(3)).on((3,))
    outputs = np.array([0.0, 1.0, 2.0, 0.0, 1.0, 2.0])
    index = outputs.astype(int)
    theirs = sum(
        np.outer(W[index, j], W[index, j]) * matrix
        for j, matrix in enumerate([rbf(X, X), matern(1.5, X, X)])
    )
    return total.covariance(np.column_stack([X, outputs])), theirs


def of_derivatives(cell: str) -> Numbers:
    """GPyTorch's blocks: values, and derivatives in each column."""
    kernel, d = evaluated(cell), 3
    gap = (X[:, None] - Z[None]) / ELL**2  # (n, m, d)
    base = rbf(X, Z)[..., None, None]
    blocks = np.zeros((6, 4, d + 1, d + 1))
    blocks[..., 0, 0] = 1.0
    blocks[..., 0, 1:], blocks[..., 1:, 0] = gap, -gap
    blocks[..., 1:, 1:] = np.eye(d) / ELL**2 - gap[..., :, None] * gap[..., None, :]
    interleaved = (base * blocks).transpose(0, 2, 1, 3).reshape(24, 16)

    def rows_of(A: np.ndarray) -> np.ndarray:
        return np.column_stack([np.repeat(A, d + 1, axis=0), np.tile(np.arange(d + 1.0), len(A))])

    return kernel(rows_of(X), rows_of(Z)), interleaved


def of_mean(cell: str) -> Numbers:
    """A constant, and x'weights + bias."""
    weights = np.array([0.3, -0.2, 0.5])
    linear = gaussian_process(mean=lambda X: X @ weights + 0.4)
    H = rbf(X, X) + SIGMA**2 * np.eye(6)
    theirs = density(y - 0.4, H), density(y - X @ weights - 0.4, H)
    return (gaussian_process(mean=0.4).log_prob(y), linear.log_prob(y)), theirs


def of_jitter(cell: str) -> Numbers:
    """Theirs is of a matrix of mean diagonal VARIANCE, to which ours is relative."""
    prior = sgp.LatentGP(K.RBF(ELL, VARIANCE), X, jitter=0.01 / VARIANCE)
    return prior.log_prob(y), density(y, VARIANCE * rbf(X, X) + 0.01 * np.eye(6))


def of_objective(cell: str) -> Numbers:
    """GPyTorch's objective times the number of rows, plus the log priors."""

    def model() -> None:
        ls = numpyro.sample("ls", dist.LogNormal())
        numpyro.sample("y", sgp.GaussianProcess(K.RBF(ls), X, SIGMA**2), obs=y)

    guide, params = AutoDelta(model), {"ls_auto_loc": jnp.array(ELL)}
    loss = Trace_ELBO().loss(jax.random.key(0), params, model, guide)
    per_row = density(y, rbf(X, X) + SIGMA**2 * np.eye(6)) / 6
    return -loss, 6 * per_row + stats.lognorm.logpdf(ELL, 1.0)


def of_two_sites(cell: str) -> Numbers:
    f, g = y, np.cos(y)
    likelihood = evaluated(cell, f=f, g=g)
    return likelihood.log_prob(y**2), stats.norm.logpdf(y**2, f, np.exp(g))


def of_basis(cell: str) -> Numbers:
    """PyMC's HSGP: a sine basis for [-L, L] around the middle, scaled by the spectral density."""
    phi = evaluated(cell, kernel=K.RBF(ELL)).features
    L, x = 2.5, X[:, 0] - 0.5
    w = np.arange(1, 6) * np.pi / (2.0 * L)
    basis = np.sqrt(1.0 / L) * np.sin(w * (x[:, None] + L))
    psd = np.sqrt(2.0 * np.pi) * ELL * np.exp(-0.5 * (ELL * w) ** 2)
    return phi(X[:, :1]) @ phi(X[:, :1]).T, (basis * psd) @ basis.T


def of_series(cell: str) -> Numbers:
    """PyMC's HSGPPeriodic: cosines and sines with Bessel functions of 1 / ls^2."""
    phi = evaluated(cell)
    j = np.arange(5)
    amplitudes = np.where(j > 0, 2.0, 1.0) * special.iv(j, ELL**-2) / np.exp(ELL**-2)
    gap = 2.0 * np.pi / PERIOD * (X[:, 0][:, None] - X[:, 0])
    theirs = VARIANCE * np.sum(amplitudes * np.cos(gap[..., None] * j), axis=2)
    return phi(X[:, :1]) @ phi(X[:, :1]).T, theirs


def covariance_of(function: Callable[..., Any], m: int) -> np.ndarray:
    """Of a function of NumPyro's that is linear in independent normal weights `beta`."""

    def values(beta: Any) -> Any:
        with numpyro.handlers.substitute(data={"beta": beta}), numpyro.handlers.seed(rng_seed=0):
            return function()

    basis = jax.vmap(values)(jnp.eye(m))
    return np.asarray(basis.T @ basis)


def of_hsgp(name: str, kernel: Callable[[], Any], **options: Any) -> Callable[[str], Numbers]:
    """By a sine basis for [-2.5, 2.5], with the half width and number on the page."""

    def numbers(cell: str) -> Numbers:
        phi = sgp.features.HilbertSpace(kernel(), 5, np.array([[-2.5], [2.5]]))
        inputs = {"alpha": VARIANCE, "length": ELL, "ell": 2.5, "m": 5, **options}
        call = functools.partial(getattr(hsgp, name), X[:, :1], **inputs)
        return phi(X[:, :1]) @ phi(X[:, :1]).T, covariance_of(call, 5)

    return numbers


def of_all_hsgp(cell: str) -> Numbers:
    kinds: list[Any] = [("hsgp_squared_exponential", {})]
    kinds += [("hsgp_matern", {"nu": nu}) for nu in (0.5, 1.5, 2.5)]
    pairs = []
    for place, (name, options) in enumerate(kinds):
        kind = evaluated(cell, place)
        pairs.append(of_hsgp(name, functools.partial(kind, ELL, VARIANCE), **options)(cell))
    # After its source: the function itself needs TensorFlow Probability.
    kernel = evaluated(cell, 4)(ELL, ALPHA, VARIANCE)
    phi = sgp.features.HilbertSpace(kernel, 5, np.array([[-2.5], [2.5]]))
    unit = np.sqrt(2.0 * ALPHA) * ELL
    w = np.arange(1, 6) * np.pi / 5.0
    bessel = (unit * w) ** (ALPHA - 0.5) * special.kv(ALPHA - 0.5, unit * w)
    psd = VARIANCE * np.sqrt(2.0 * np.pi) * 2.0 ** (1.0 - ALPHA) * unit * bessel
    psd /= special.gamma(ALPHA)
    basis = np.sqrt(1.0 / 2.5) * np.sin(w * (X[:, :1] + 2.5))
    pairs.append((phi(X[:, :1]) @ phi(X[:, :1]).T, (basis * psd) @ basis.T))
    return tuple(zip(*pairs, strict=True))


def of_periodic_hsgp(cell: str) -> Numbers:
    """Its `alpha` is the square root of the variance, as the row of `alpha` says.

    Cosines and sines, after its source: the function itself needs TensorFlow Probability.
    """
    code = "Periodic(lengthscale, period=2 * pi / w0)"
    phi = sgp.features.HilbertSpace(VARIANCE * evaluated(f"`{code}`"), 5)
    j, a, alpha = np.arange(5), ELL**-2, np.sqrt(VARIANCE)
    amplitudes = np.where(j > 0, 2.0, 1.0) * alpha**2 / np.exp(a) * special.iv(j, a)
    x, w0 = X[:, 0], NAMES["w0"]
    waves = np.cos(w0 * j * x[:, None]), np.sin(w0 * j * x[:, None])
    theirs = sum((basis * amplitudes) @ basis.T for basis in waves)
    return phi(X[:, :1]) @ phi(X[:, :1]).T, theirs


def of_laplace_and_latent(cell: str) -> Numbers:
    """With normal noise Laplace's approximation is exact."""
    gp = sgp.LaplaceGP(K.RBF(ELL), X, lambda f: dist.Normal(f, SIGMA))
    latent = of_latent(cell)
    return (gp.log_prob(y), latent[0]), (of_marginal(cell)[1], latent[1])


# Kernels of time, of the first column.
OMEGA, QUALITY = 3.1, 1.8
OF_TIME = {"omega": OMEGA, "quality": QUALITY, "sigma": SIGMA, "scale": ELL, "pi": np.pi}


def gaps() -> np.ndarray:
    return np.abs(X[:, :1] - Z[:, 0])


def oscillator(w0: float, Q: float, variance: float) -> np.ndarray:
    """celerite2's `SHOTerm`, from its coefficients a, b, c, d for Q > 1/2."""
    root, t = np.sqrt(4.0 * Q**2 - 1.0), gaps()
    c = 0.5 * w0 / Q
    wave = np.cos(c * root * t) + np.sin(c * root * t) / root
    return variance * np.exp(-c * t) * wave


def of_time(*theirs: Any, **names: float) -> Callable[[str], Numbers]:
    """Kernel matrices of a cell at times, by the form that `StateSpace` uses, and theirs."""

    def numbers(cell: str) -> Numbers:
        kernels = [evaluated(cell, place, **(OF_TIME | names)) for place in range(len(theirs))]
        return [kernel(X[:, :1], Z[:, :1]) for kernel in kernels], theirs

    return numbers


def of_page(name: str) -> Callable[[str], Numbers]:
    """A kernel that the page defines, as a matrix and by its state-space form."""

    def numbers(cell: str) -> Numbers:
        namespace: dict[str, Any] = {"sgp": sgp, "jax": jax, "jnp": jnp, "eqx": eqx}
        code = next(block for block in blocks("docs/coming_from/tinygp.md") if name in block)
        exec(code.partition("\n\n\nkernel = ")[0], namespace)
        if name == "class Celerite":
            a, b, c, d = 1.3, 0.4, 0.9, 2.1
            kernel, t = namespace["Celerite"](a, b, c, d), gaps()
            theirs = np.exp(-c * t) * (a * np.cos(d * t) + b * np.sin(d * t))
        else:
            sigma, period, Q0, dQ, f = 0.8, 1.3, 0.9, 0.4, 0.6
            kernel = namespace["rotation"](sigma, period, Q0, dQ, f)
            theirs = np.zeros((6, 4))
            for w, Q, share in ((4.0, 0.5 + Q0 + dQ, 1.0), (8.0, 0.5 + Q0, f)):
                w0 = w * np.pi * Q / (period * np.sqrt(4.0 * Q**2 - 1.0))
                theirs += oscillator(w0, Q, share * sigma**2 / (1.0 + f))
        times = X[:, :1]
        linear = sgp.GaussianProcess(kernel, times, 0.1, estimator=sgp.estimators.StateSpace())
        covariance = kernel(times, times) + 0.1 * np.eye(6)
        ours = kernel(times, Z[:, :1]), linear.log_prob(y)
        return ours, (theirs, density(y, covariance))

    return numbers


def of_seasonality(cell: str) -> Numbers:
    """Prophet: cosines and sines, whose coefficients are normal with one scale."""
    kernel = evaluated(cell, P=PERIOD, N=3, s=SIGMA)
    angles = [2.0 * np.pi * n * X[:, :1] / PERIOD for n in (1, 2, 3)]
    basis = np.concatenate([wave(angle) for angle in angles for wave in (np.cos, np.sin)], axis=1)
    return kernel.covariance(X[:, :1]), SIGMA**2 * basis @ basis.T


def of_straight_line(cell: str) -> Numbers:
    """Prophet's trend without changepoints, and the integral of its changes of slope."""
    names = {"slope_variance": 0.5, "level_variance": 2.0, "variance": 0.3}
    kernel, t = evaluated(cell, **names), np.array([[0.5], [1.5], [2.0]])
    changes = np.linspace(0.0, 2.0, 20_001)[:-1] + 5e-5
    ramps = np.maximum(t - changes, 0.0)  # a change of slope at each of these times
    theirs = 0.5 * t @ t.T + 2.0 + 0.3 * 1e-4 * ramps @ ramps.T
    return np.round(kernel.covariance(t), 6), np.round(theirs, 6)


RBF, PERIODIC = rbf(X, Z), of_gpflow_and_pymc()
CHECKS: dict[str, dict[str, Callable[[str], Numbers]]] = {
    "gpflow": {
        "`GPR`": of_marginal,
        "`SGPR`": of_titsias,
        "`SVGP`": of_svgp,
        "`VGP`": of_laplace_and_latent,
        "`GPMC`": of_latent,
        "`SquaredExponential`": of_kernels(RBF),
        "`lengthscales=`, a scalar or one for each column": of_ard,
        "`kernel.variance`, `likelihood.variance`": of_noise(VARIANCE),
        "`active_dims=`": of_active,
        "`Periodic(SquaredExponential(variance, lengthscales), period)`": of_kernels(
            VARIANCE * PERIODIC
        ),
        "`Bias(variance)`, `White(variance)`": of_kernels(np.full((6, 4), VARIANCE)),
        "`Coregion(output_dim, rank)`, its `W` and `kappa`": of_outputs,
        "`LinearCoregionalization`, `SharedIndependent`": of_mixing,
        "`HeteroskedasticTFPConditional`": of_two_sites,
        "`training_loss`, `elbo`": of_objective,
        "`predict_f`, `predict_f_samples`": of_moments,
        "`predict_y`, `predict_log_density`": of_predictive,
    },
    "gpytorch": {
        "`ExactGP` with `GaussianLikelihood`": of_marginal,
        "`likelihood.noise` (a variance)": of_noise(0.4),
        "`FixedNoiseGaussianLikelihood`": of_noise(np.linspace(0.1, 0.6, 6)),
        "`ScaleKernel(RBFKernel())`, its `outputscale`": of_kernels(VARIANCE * RBF),
        "`RBFKernel(ard_num_dims=d)`": of_ard,
        "`MaternKernel(nu=0.5)`, `1.5`, `2.5`": of_kernels(*map(matern, (0.5, 1.5, 2.5))),
        "`RQKernel`, `LinearKernel`": of_kernels(rational_quadratic(), VARIANCE * X @ Z.T),
        "`PeriodicKernel`": of_kernels(np.exp(-2.0 * sines() / ELL)),
        "`active_dims=`": of_active,
        "`IndexKernel`, `MultitaskKernel`": of_outputs,
        "`RBFKernelGrad`": of_derivatives,
        "`ConstantMean`, `LinearMean`": of_mean,
        "`ExactMarginalLogLikelihood`, `VariationalELBO`, divided by the number of rows": (
            of_objective
        ),
        "`model.eval()` and `model(X_new)`": of_moments,
        "`likelihood(model(X_new))`": of_predictive,
        "`settings.cholesky_jitter`, an absolute value": of_jitter,
    },
    "pymc": {
        "`pm.gp.Marginal`": of_marginal,
        '`pm.gp.MarginalApprox(approx="VFE")`': of_titsias,
        "`pm.gp.Latent`": of_laplace_and_latent,
        "`pm.gp.MarginalKron`": of_grid,
        "`pm.gp.HSGP(m, L)`": of_basis,
        "`pm.gp.HSGPPeriodic(m, scale)` of `Periodic(1, period, ls)`": of_series,
        "`sigma=` (a standard deviation)": of_noise(SIGMA**2, 1),
        "`ExpQuad`, `RatQuad`, `Exponential`": of_kernels(
            RBF, rational_quadratic(), np.exp(-0.5 * np.sqrt(squares(X, Z)))
        ),
        "`Periodic(1, period, ls)`": of_kernels(PERIODIC),
        "`eta**2 * Matern52(1, ls=l)`": of_kernels(VARIANCE * matern(2.5)),
        "`input_dim`, `active_dims=`": of_active,
        "`WarpedInput(..., warp_func=g)`": lambda cell: (
            evaluated(cell, kernel=K.RBF(ELL))(X, Z), rbf(np.tanh(X), np.tanh(Z))
        ),
        "`Coregion(1, W=, kappa=)`": of_outputs,
        "`WhiteNoise(sigma)`": of_noise(SIGMA**2, 0),
        "`gp.conditional(name, X_new)`, `sample_posterior_predictive`": of_moments,
        "`gp.predict(X_new, point=...)`": of_values,
        '`gp1 + gp2`, `given={"gp": ...}`': of_parts,
        "`mean_func=`": of_mean,
    },
    "hsgp": {
        "`alpha`": of_periodic_hsgp,
        "`length`": of_hsgp("hsgp_squared_exponential", lambda: K.RBF(ELL, VARIANCE)),
        "`ell`, the half width of the box around zero": of_hsgp(
            "hsgp_matern", lambda: K.Matern32(ELL, VARIANCE), nu=1.5
        ),
        "`m`": of_hsgp("hsgp_matern", lambda: K.Matern52(ELL, VARIANCE), nu=2.5),
        "`hsgp_squared_exponential`, `hsgp_matern(nu=...)`, `hsgp_rational_quadratic`": of_all_hsgp,
        "`hsgp_periodic_non_centered(w0=...)`": of_periodic_hsgp,
    },
    "tinygp": {
        "`quasisep.SHO(omega, quality, sigma)`": of_time(oscillator(OMEGA, QUALITY, SIGMA**2)),
        "`quasisep.Matern32(scale, sigma)`, `quasisep.Matern52`, `quasisep.Exp`": of_time(
            *(SIGMA**2 * matern(nu, X[:, :1], Z[:, :1]) for nu in (1.5, 2.5, 0.5))
        ),
        "`quasisep.Cosine(scale, sigma)`": of_time(SIGMA**2 * np.cos(2.0 * np.pi * gaps() / ELL)),
        "`quasisep.Celerite(a, b, c, d)`, `terms.ComplexTerm`": of_page("class Celerite"),
        "`terms.SHOTerm(S0=, w0=, Q=)`": of_time(
            oscillator(OMEGA, QUALITY, 0.2 * OMEGA * QUALITY), S0=0.2, w0=OMEGA, Q=QUALITY
        ),
        "`terms.SHOTerm(sigma=, rho=, tau=)`": of_time(
            oscillator(OMEGA, QUALITY, SIGMA**2), rho=2.0 * np.pi / OMEGA, tau=2.0 * QUALITY / OMEGA
        ),
        "`terms.RealTerm(a=, c=)`": of_time(1.3 * np.exp(-0.9 * gaps()), a=1.3, c=0.9),
        "`terms.Matern32Term(sigma=, rho=)`": of_time(
            SIGMA**2 * matern(1.5, X[:, :1], Z[:, :1]), rho=ELL
        ),
        "`terms.RotationTerm(sigma=, period=, Q0=, dQ=, f=)`": of_page("def rotation"),
        "`ExpSineSquared(scale, gamma)`": of_time(
            np.exp(-1.6 * np.sin(np.pi * gaps() / ELL) ** 2), gamma=1.6, sqrt=np.sqrt
        ),
        "`GaussianProcess(kernel, t, diag=)`, `gp.compute(t, yerr=)`": of_noise(0.4),
        "`gp.log_probability(y)`, `gp.log_likelihood(y)`": of_marginal,
        "`gp.condition(y, t_new)`, `gp.predict(y, t_new)`": of_moments,
        "`gp.predict(y, kernel=)`": of_parts,
    },
    "prophet": {
        "`add_seasonality(period=P, fourier_order=N, prior_scale=s)`": of_seasonality,
        '`growth="linear"`, `changepoint_prior_scale`': of_straight_line,
    },
}  # fmt: skip

# Rows without a number, since they describe a way of working.
WORDS = {
    "gpflow": {
        "`GPLVM`", "`gpflow.Parameter`, transforms, `.prior`", "`set_trainable(parameter, False)`",
        "`inducing_variable=`", "`whiten=True`", "`NaturalGradient(gamma)`",
        "`posterior()`, with its cache", "`Y` of shape (n, 1)",
    },
    "gpytorch": {
        "`ApproximateGP` with a `VariationalStrategy`", "constraints, `register_prior`",
        "`DataLoader`", "`gpytorch.optim.NGD`", "batch shapes for several functions",
        "`settings.max_cg_iterations`, `settings.cg_tolerance`",
    },
    "pymc": {
        "`pm.find_MAP`", "`pm.sample`", "`pm.Minibatch` with `total_size`", "an `InferenceData`",
    },
    "hsgp": {"`Predictive` at new `x`", "the weights `beta`", "a rule for `ell` and `m`",
             "a term of a model"},
    "tinygp": {"`gp.numpyro_dist()`", "`gp.sample(key, shape=)`"},
    "prophet": {
        '`growth="flat"`', "`holidays=`, `holidays_prior_scale`",
        "`add_regressor(name, prior_scale=)`", '`seasonality_mode="multiplicative"`',
        "`interval_width=0.8`", "`mcmc_samples=300`", "`plot_components`",
        "`cross_validation`, `performance_metrics`", "`ds`, a column of dates",
    },
}  # fmt: skip
# Patterns of rows that have a number.
HAS_NUMBER = re.compile(
    r"[Kk]ernel|[Ll]ikelihood|[Nn]oise|[Ll]engthscale|variance|" + "|".join(K.__all__)
)


def test_each_row_has_a_check() -> None:
    expected = {(page, row) for page, checks in CHECKS.items() for row in checks}
    words = {(page, row) for page, names in WORDS.items() for row in names}
    on_page = {(page, theirs) for page, theirs, _ in rows()}
    assert on_page == expected | words
    assert not expected & words
    for page, theirs, ours in rows():
        assert (page, theirs) in expected or not HAS_NUMBER.search(theirs + ours), (page, theirs)


def test_each_name_of_here_exists() -> None:
    for page, _, ours in rows():
        for name in re.findall(r"\bsgp(?:\.\w+)+", ours):
            value: Any = sgp
            for attribute in name.split(".")[1:]:
                value = getattr(value, attribute)
                assert value is not None, (page, name)
        for span in spans(ours):
            for name in re.findall(r"(?<![\w.])([A-Z][a-z]\w+)\(", span):
                homes = [K, sgp, sgp.features, sgp.guides, sgp.infer, sgp.estimators]
                assert any(hasattr(home, name) for home in homes), (page, name)


@pytest.mark.one_interpreter
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("row", [row for row in rows() if row[1] in CHECKS[row[0]]], ids=str)
def test_a_row_is_the_number_of_the_other_package(row: tuple[str, str, str]) -> None:
    page, theirs, ours = row
    actual, expected = CHECKS[page][theirs](ours)
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert np.all(np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
