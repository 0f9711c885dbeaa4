"""Bias and noise of an estimator, measured against Cholesky on a subset of the data."""

import functools
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.cholesky import Cholesky
from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.kernels.kernel import AbstractKernel, as_single
from numpyro_scalegp.linear.operator import KernelOperator

# log p(y) = -(log|H| + y'H^-1 y + n log 2 pi) / 2.
TERMS = ("log_determinant", "quadratic_form")


class AuditRow(NamedTuple):
    """The error of one estimated quantity: log p(y), one of its terms or one of its derivatives."""

    estimator: str
    quantity: str  # "log_prob", one of its `TERMS`, or the path of a hyperparameter
    exact: float
    bias: float  # mean over draws minus exact
    standard_error: float  # of the bias
    standard_deviation: float  # of a single draw


class Cost(NamedTuple):
    """The cost of one evaluation of the value and gradient."""

    epochs: float  # of the solver, mean over draws; NaN if the estimator has no solver
    seconds: float
    converged: float  # fraction of the draws whose solves reached their tolerance


class Audit(NamedTuple):
    """The result of `audit`: print it for a table, or plot it."""

    rows: list[AuditRow]
    costs: dict[str, Cost]
    num_rows: int
    num_draws: int

    def __str__(self) -> str:
        """The table: for each estimator its cost, then one line per quantity."""
        lines = [f"{self.num_draws} draws on {self.num_rows} observations, compared with Cholesky"]
        header = f"  {'quantity':<24}{'exact':>12}{'bias':>12}{'std. error':>12}{'std. dev.':>12}"
        for name, cost in self.costs.items():
            solves = f"{cost.epochs:.1f} epochs, {cost.converged:.0%} converged, "
            solves = "" if np.isnan(cost.epochs) else solves
            lines.append(f"{name}: {solves}{cost.seconds:.3g} s per evaluation")
            lines.append(header)
            for row in self.rows:
                if row.estimator == name:
                    # A star marks a bias that neither sampling error nor rounding explains.
                    threshold = 4.0 * row.standard_error + 1e-5 * abs(row.exact)
                    star = " *" if abs(row.bias) > threshold else ""
                    lines.append(
                        f"  {row.quantity:<24}{row.exact:>12.5g}{row.bias:>12.3g}"
                        f"{row.standard_error:>12.3g}{row.standard_deviation:>12.3g}{star}"
                    )
        return "\n".join(lines)

    def plot(self) -> Any:
        """Plot each bias with four standard errors, and the standard deviation of a single draw.

        Returns:
            A matplotlib figure: one panel for the value, per observation, and one for the gradient,
            in units of the exact gradient's norm.
        """
        from matplotlib.figure import Figure

        names = list(self.costs)
        figure = Figure(figsize=(9.0, 1.5 + 0.5 * len(names)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        exact = [row.exact for row in self._gradient(names[0])]
        norm = float(np.linalg.norm(exact))
        for position, name in enumerate(names):
            value = [row for row in self.rows if row[:2] == (name, "log_prob")]
            for panel, rows, unit in (
                (panels[0], value, self.num_rows),
                (panels[1], self._gradient(name), norm),
            ):
                heights = position + 0.5 * (np.arange(len(rows)) + 1) / (len(rows) + 1) - 0.25
                bias, error, deviation = np.array([row[3:] for row in rows]).T / unit
                panel.errorbar(
                    bias, heights, xerr=deviation, fmt="none", ecolor="0.8", elinewidth=5
                )
                panel.errorbar(bias, heights, xerr=4.0 * error, fmt=".", color="C0", capsize=2)
        titles = ("error of log p(y) per observation", "error of the gradient / its norm")
        for panel, title in zip(panels, titles, strict=True):
            panel.axvline(0.0, color="k", linewidth=0.8)
            panel.set_xlabel(title)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        return figure

    def plot_terms(self) -> Any:
        """Plot the biases of log|H| and y'H^-1 y, with four standard errors, against a budget.

        The budget is the number at the end of an estimator's name, as in "CG 10" and "CG 20". Names
        that differ only in this number share a line.

        Returns:
            A matplotlib figure with a panel for each term, per observation.

        Raises:
            ValueError: if a name does not end with a number.

        References:
            Potapczynski et al. (2021), figure 1.
        """
        from matplotlib.figure import Figure

        lines: dict[str, list[tuple[float, str]]] = {}
        for name in self.costs:
            label, _, number = name.rpartition(" ")
            try:
                lines.setdefault(label, []).append((float(number), name))
            except ValueError:
                raise ValueError(
                    f"estimators' names must end with a space and a number, got '{name}'."
                ) from None
        figure = Figure(figsize=(9.0, 3.5), layout="constrained")
        panels = figure.subplots(1, 2)
        for panel, quantity, title in zip(panels, TERMS, ("log|H|", "y'H$^{-1}$y"), strict=True):
            panel.axhline(0.0, color="k", linewidth=0.8)
            for label, points in lines.items():
                budgets, names = zip(*sorted(points), strict=True)
                rows = [row for name in names for row in self.rows if row[:2] == (name, quantity)]
                bias, error, _ = np.array([row[3:] for row in rows]).T / self.num_rows
                panel.errorbar(budgets, bias, 4.0 * error, marker=".", capsize=2, label=label)
            panel.set_xlabel("mean number of iterations or features")
            panel.set_title(f"bias of {title} per observation")
        panels[0].legend()
        return figure

    def _gradient(self, name: str) -> list[AuditRow]:
        values = ("log_prob", *TERMS)
        return [row for row in self.rows if row.estimator == name and row.quantity not in values]


def audit(
    estimators: AbstractEstimator | Mapping[str, AbstractEstimator],
    kernel: AbstractKernel,
    X: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, " n"],
    noise_variance: Float[ArrayLike, "..."],
    *,
    key: Key[Array, ""],
    num_draws: int = 50,
    max_rows: int = 2000,
) -> Audit:
    """Measure bias, standard deviation and cost of estimators of log p(y) and its gradient.

    Each estimator is evaluated with `num_draws` independent keys on the same observations, and
    compared with the exact value and gradient from Cholesky. Run it before a long fit, at the
    hyperparameters that you expect at its end: solves are hardest when the noise is small.

    Args:
        estimators: one estimator, or a mapping of names to estimators.
        kernel: covariance function, with the hyperparameters to audit at.
        X: inputs, shape (n, d).
        y: observations minus their mean, shape (n,).
        noise_variance: shape () or (n,).
        key: a typed JAX key, for the subset and the draws.
        num_draws: number of evaluations of each estimator, at least 2.
        max_rows: size of the random subset of the observations; all are used if there are fewer.

    Returns:
        An `Audit`: print it for a table, call `.plot()` for a figure. Its quantities are log p(y),
        the terms log|H| and y'H^-1 y, and the derivatives with respect to each entry of the
        kernel's hyperparameters and of the noise variance. (An iterative estimator with
        `num_logdet_probes=0` omits log|H|.) The exact values take O(max_rows^3) time and
        O(max_rows^2) memory.

    Raises:
        ValueError: if `num_draws` is less than 2, or shapes do not match.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_scalegp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
        >>> estimator = sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients(), num_probes=8)
        >>> result = sgp.estimators.audit(
        ...     estimator, sgp.kernels.Matern32(0.3), X, jnp.sin(6.0 * X[:, 0]), 0.1,
        ...     key=jax.random.key(0), num_draws=4,
        ... )
        >>> [row.quantity for row in result.rows][:4]
        ['log_prob', 'log_determinant', 'quadratic_form', 'lengthscale']
    """
    key = checks.as_key(key)
    checks.count("num_draws", num_draws, 2)
    checks.count("max_rows", max_rows)
    as_single("kernel", kernel)
    if not isinstance(estimators, Mapping):
        estimators = {type(estimators).__name__: estimators}
    for estimator in estimators.values():
        checks.instance("estimators", estimator, AbstractEstimator)
    X, y = checks.inputs("X", X), checks.as_float(y, "y")
    noise = checks.as_float(noise_variance, "noise_variance")
    kernel.check_inputs("X", X)
    checks.shape("y", y, X.shape[:1], why="one value for each row of `X`")
    checks.finite("y", y)
    checks.shape("noise_variance", noise, (), X.shape[:1])
    checks.positive("noise_variance", noise)
    row_key, draw_key = jax.random.split(key)
    if X.shape[0] > max_rows:
        rows = jax.random.choice(row_key, X.shape[0], (max_rows,), replace=False)
        X, y, noise = X[rows], y[rows], noise if noise.ndim == 0 else noise[rows]
    parameters = eqx.filter((kernel, noise), eqx.is_inexact_array)
    evaluate = functools.partial(_evaluate, kernel, X, y, noise)
    truth = jax.jit(functools.partial(evaluate, Cholesky()))(draw_key)[0]
    names = ["log_prob", *TERMS, *_names(parameters)]
    audit_rows, costs = [], {}
    for name, estimator in estimators.items():
        draw = functools.partial(evaluate, estimator)
        keys = jax.random.split(draw_key, num_draws)
        compiled = jax.jit(lambda keys, draw=draw: jax.lax.map(draw, keys)).lower(keys).compile()
        start = time.perf_counter()
        draws, epochs, converged = jax.block_until_ready(compiled(keys))
        seconds = (time.perf_counter() - start) / num_draws
        costs[name] = Cost(float(jnp.mean(epochs)), seconds, float(jnp.mean(converged)))
        audit_rows += _audit_rows(name, names, np.asarray(truth), np.asarray(draws))
    return Audit(audit_rows, costs, X.shape[0], num_draws)


def _evaluate(
    kernel: AbstractKernel,
    X: Array,
    y: Array,
    noise: Array,
    estimator: AbstractEstimator,
    key: Array,
) -> tuple[Array, Array, Array]:
    """The log density, its terms and its gradient in one vector; epochs; whether it converged."""
    parameters, static = eqx.partition((kernel, noise), eqx.is_inexact_array)
    # The log density of zeros has no quadratic form, which leaves the log-determinant.
    targets = jnp.stack([y, jnp.zeros_like(y)])

    def value(parameters: Any) -> tuple[Array, tuple[Array, Array, Array]]:
        kernel, noise = eqx.combine(parameters, static)
        densities, solution = estimator.evaluate(
            KernelOperator.from_checked(kernel, X, noise), targets, key=key
        )
        cost = jnp.array(jnp.nan), jnp.array(True)
        if solution is not None:
            cost = solution.epochs, solution.converged
        log_determinant = -2.0 * densities[1] - y.size * math.log(2.0 * math.pi)
        terms = jnp.stack([log_determinant, 2.0 * (densities[1] - densities[0])])
        return densities[0], (terms, *cost)

    (result, (terms, *cost)), gradient = jax.value_and_grad(value, has_aux=True)(parameters)
    return _flat((result, terms, gradient)), *cost


def _audit_rows(
    name: str, names: list[str], truth: np.ndarray, draws: np.ndarray
) -> list[AuditRow]:
    """One row per quantity, from draws of shape (draws, quantities)."""
    errors = draws - truth
    deviations = errors.std(axis=0, ddof=1)
    columns = truth, errors.mean(axis=0), deviations / len(draws) ** 0.5, deviations
    return [
        AuditRow(name, quantity, *map(float, row))
        for quantity, *row in zip(names, *columns, strict=True)
    ]


def _flat(value_and_gradient: Any) -> Float[Array, " p"]:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(value_and_gradient)])


def _names(parameters: Any) -> list[str]:
    """One name for each entry of the leaves of the kernel and the noise variance."""
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        base = jax.tree_util.keystr(path[1:]).strip(".") or "noise_variance"
        indices = np.ndindex(leaf.shape)
        names += [base + (f"[{','.join(map(str, i))}]" if i else "") for i in indices]
    return names
