"""Smooth terms of a larger model, each one line: the basis is chosen from the data once."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float, Int
from numpyro import handlers

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.features.hilbert_space import HilbertSpace
from numpyro_scalegp.features.inducing_points import InducingPoints
from numpyro_scalegp.features.selection import kmeans_points
from numpyro_scalegp.infer.priors import lengthscale_prior
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.matern import Matern52
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul

__all__ = ["HilbertSpaceTerm", "SparseTerm"]

_CONSTRAINTS = (None, "positive", "increasing", "decreasing")
_MAX_BASIS = 5_000
# Nodes of the integral of an increasing term, for each basis function.
_NODES_EACH = 20


class _AbstractTerm(abc.ABC):
    """What samples the sites of a term with any basis."""

    def __init__(
        self,
        name: str,
        X: Float[Array, "n d"],
        lengthscale: dist.Distribution | None,
        amplitude: dist.Distribution | None,
        kernel: type[AbstractKernel],
        constraint: str | None,
        num_groups: int | None,
    ) -> None:
        if not (isinstance(kernel, type) and issubclass(kernel, AbstractKernel)):
            raise TypeError(
                "`kernel` must be a class such as sgp.kernels.Matern52, got "
                f"{checks.described(kernel)}: the term samples its hyperparameters."
            )
        self.name, self.kernel, self.constraint = name, kernel, constraint
        for prior_name, prior in (("lengthscale", lengthscale), ("amplitude", amplitude)):
            if not isinstance(prior, dist.Distribution | None):
                raise TypeError(
                    f"`{prior_name}` must be a distribution, its prior, got "
                    f"{checks.described(prior)}."
                )
        self.lengthscale = _default_prior(X) if lengthscale is None else lengthscale
        self.amplitude = dist.HalfNormal(1.0) if amplitude is None else amplitude
        self.num_groups = checks.count_or_none("num_groups", num_groups)

    @abc.abstractmethod
    def _basis(self, kernel: AbstractKernel, X: Float[Array, "n d"]) -> Float[Array, "n m"]:
        """Features whose weights are independent standard normals a priori."""

    @property
    @abc.abstractmethod
    def num_basis(self) -> int:
        """The number of weights."""

    def __call__(
        self, X: Float[ArrayLike, "n *d"], group: Int[ArrayLike, " rows"] | None = None
    ) -> Float[Array, " n"]:
        """Sample the term's sites in a NumPyro model, and return its values.

        Call it outside the plate of the observations. The sites are `{name}_lengthscale`,
        `{name}_amplitude` and `{name}_weights`; with groups also `{name}_group_amplitude` and
        `{name}_group_weights`; `{name}_rise` for an increasing or decreasing term. The values are
        the deterministic site `{name}`.

        Args:
            X: inputs, shape (n, d), or (n,) for one column: the data or new inputs, within the box.
            group: the group of each row, integers from 0 to `num_groups` - 1; only with groups.

        Returns:
            The values, shape (n,), in O(n m) for m basis functions.

        Raises:
            ValueError: if `X` has another number of columns or lies outside of the box, `group` is
                missing, out of range or not wanted, or the call is within a plate.
        """
        X = _as_inputs(X)
        group = self._checked_group(group, X.shape[0])
        lengthscale = numpyro.sample(f"{self.name}_lengthscale", self.lengthscale)
        kernel = self.kernel(lengthscale, 1.0)
        amplitude = numpyro.sample(f"{self.name}_amplitude", self.amplitude)
        weights = amplitude * self._normals("weights", (self.num_basis,))
        if self.num_groups is not None:
            spread = numpyro.sample(
                f"{self.name}_group_amplitude",
                dist.HalfNormal(1.0).expand([self.num_groups]).to_event(1),
            )
            deviations = self._normals("group_weights", (self.num_groups, self.num_basis))
            weights = weights + spread[:, None] * deviations
        values = self._values(kernel, weights, X, group)
        if group is not None and self.num_groups is not None:  # may be out of range if traced
            is_valid = (group >= 0) & (group < self.num_groups)
            values = jnp.where(is_valid, values, jnp.nan)
        return numpyro.deterministic(self.name, values)

    def _normals(self, name: str, shape: tuple[int, ...]) -> Array:
        prior = dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))
        values = numpyro.sample(f"{self.name}_{name}", prior)
        if jnp.shape(values) != shape:
            raise ValueError(
                f"the term {self.name!r} must be called outside of plates, and before "
                "`with numpyro.plate(...)` of the observations: the plate would give each "
                "observation its own function."
            )
        return values

    def _values(
        self,
        kernel: AbstractKernel,
        weights: Float[Array, "*groups m"],
        X: Float[Array, "n d"],
        group: Int[Array, " n"] | None,
    ) -> Float[Array, " n"]:
        basis = self._basis(kernel, X)
        if group is None:
            values = matmul(basis, weights)
        else:
            values = jnp.sum(basis * weights[group], axis=1)
        return jnp.exp(values) if self.constraint == "positive" else values

    def values(
        self,
        samples: dict[str, Array],
        X: Float[ArrayLike, "n *d"],
        group: Int[ArrayLike, " n"] | None = None,
    ) -> Float[Array, "draws n"]:
        """The term alone at new inputs, for each posterior draw.

        Args:
            samples: posterior draws by site, with one leading axis: `mcmc.get_samples()`, or a
                guide's `sample_posterior`.
            X: inputs, shape (n, d), or (n,) for one column.
            group: the group of each row, with groups.

        Returns:
            Values, shape (draws, n).

        Raises:
            ValueError: if a site of the term is missing.
        """
        sites = {name: samples[name] for name in self._site_names() if name in samples}
        if missing := sorted(set(self._site_names()) - sites.keys()):
            raise ValueError(f"`samples` has no draws of {', '.join(missing)}.")
        num_draws = jnp.shape(sites[f"{self.name}_amplitude"])
        if len(num_draws) != 1:
            raise ValueError(
                "`samples` must have one leading axis of draws, without `group_by_chain`, got "
                f"`{self.name}_amplitude` of shape {num_draws}."
            )
        X = _as_inputs(X)

        def at_draw(values: dict[str, Array]) -> Array:
            with handlers.block(), handlers.substitute(data=values):
                return self(X, group)

        return jax.lax.map(at_draw, sites)

    def _site_names(self) -> list[str]:
        names = ["lengthscale", "amplitude", "weights"]
        if self.num_groups is not None:
            names += ["group_amplitude", "group_weights"]
        return [f"{self.name}_{name}" for name in names]

    def _checked_group(self, group: Any, n: int) -> Int[Array, " n"] | None:
        if self.num_groups is None:
            if group is not None:
                raise ValueError("`group` needs a term with groups: num_groups=...")
            return None
        if group is None:
            raise ValueError("`group` must say the group of each row, since `num_groups` is set.")
        group = jnp.asarray(group)
        if group.shape != (n,) or not jnp.issubdtype(group.dtype, jnp.integer):
            raise ValueError(
                f"`group` must be {n} integers, one for each row, got {checks.described(group)}."
            )
        if checks.is_concrete(group):
            numbers = as_numpy(group)
            if n and not (numbers.min() >= 0 and numbers.max() < self.num_groups):
                raise ValueError(
                    f"`group` must lie from 0 to {self.num_groups - 1}, got "
                    f"{int(numbers.min())} to {int(numbers.max())}."
                )
        return group


class HilbertSpaceTerm(_AbstractTerm):
    """A smooth term with a Hilbert-space basis, for one or two inputs and NUTS or SVI.

    Constructed outside of the model, it takes the box and the size of the basis from the data and
    the range of the lengthscale's prior, and keeps them for new data. In the model, `term(x)`
    samples its hyperparameters and standard normal weights and returns its values, which may be
    added, multiplied by a regressor, or both: `trend(time) + effect(time) * price`.

    f(x) = a sum_j sqrt(S(w_j)) w_j sin_j(x), as in `sgp.features.HilbertSpace`, with amplitude a.
    With groups, f_g(x) = f(x) + a_g d_g(x) with an amplitude a_g and a function d_g for each group,
    of the same lengthscale. A positive term is exp(f). An increasing term is r times the integral
    of exp(f) over x, divided by the range of the data: zero at the least input of the data.

    Args:
        name: of the deterministic site of the values, and the prefix of the names of all sites.
        X: the inputs where the term is ever evaluated, shape (n, d), or (n,) for one column.
        lengthscale: its prior; None for `sgp.infer.lengthscale_prior` from a twentieth of the range
            of the inputs to the range; for each of several columns from 0.2 to 0.6 of it. The basis
            suits lengthscales between its 1 % and 99 % quantiles.
        amplitude: the prior of the standard deviation of f; None for `HalfNormal(1.0)`.
        kernel: a stationary kernel class with a lengthscale and a variance.
        constraint: "positive", "increasing", "decreasing", or None. The last two take one input.
        num_groups: the number of groups, for a function that is pooled over groups.

    Raises:
        TypeError: if `kernel` is not a class of kernels, or a prior not a distribution.
        ValueError: if `X` is not a matrix of finite numbers, `constraint` is invalid, or the basis
            would have more than 5,000 functions.

    References:
        Riutort-Mayol et al. (2023), Practical Hilbert Space Approximate Bayesian Gaussian Processes
        for Probabilistic Programming.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro import handlers
        >>> import numpyro_scalegp as sgp
        >>> time = np.linspace(0.0, 10.0, 50)
        >>> trend = sgp.terms.HilbertSpaceTerm("trend", time)
        >>> handlers.seed(trend, jax.random.key(0))(time).shape
        (50,)
    """

    def __init__(
        self,
        name: str,
        X: Float[ArrayLike, "n *d"],
        *,
        lengthscale: dist.Distribution | None = None,
        amplitude: dist.Distribution | None = None,
        kernel: type[AbstractKernel] = Matern52,
        constraint: str | None = None,
        num_groups: int | None = None,
    ) -> None:
        if constraint not in _CONSTRAINTS:
            raise ValueError(f"`constraint` must be one of {_CONSTRAINTS}, got {constraint!r}.")
        X = _as_inputs(X)
        super().__init__(name, X, lengthscale, amplitude, kernel, constraint, num_groups)
        if self._is_monotone and X.shape[1] != 1:
            raise ValueError(
                f"`constraint` {constraint!r} needs one input column, got {X.shape[1]} columns."
            )
        if self._is_monotone and not float(jnp.ptp(X)) > 0.0:
            raise ValueError(f"`constraint` {constraint!r} needs an `X` that varies.")
        box, self.sizes = HilbertSpace.box_and_num_basis(X, _quantiles(self.lengthscale), kernel)
        if self.num_basis > _MAX_BASIS:
            raise ValueError(
                f"the term would have {self.num_basis} basis functions, more than {_MAX_BASIS}: "
                "take a `lengthscale` prior with less mass on short lengthscales, relative to the "
                "range of `X` and to its longest ones, or `SparseTerm`."
            )
        self.box: Any = as_numpy(box)
        self.ends = float(jnp.min(X)), float(jnp.max(X))

    @property
    def num_basis(self) -> int:
        """The number of weights."""
        return int(np.prod(self.sizes))

    def _basis(self, kernel: AbstractKernel, X: Float[Array, "n d"]) -> Float[Array, "n m"]:
        return self._features(kernel)(X)

    def _features(self, kernel: AbstractKernel) -> HilbertSpace:
        return HilbertSpace(kernel, self.sizes, self.box)

    @property
    def _is_monotone(self) -> bool:
        return self.constraint in ("increasing", "decreasing")

    def _site_names(self) -> list[str]:
        return super()._site_names() + [f"{self.name}_rise"] * self._is_monotone

    def _values(
        self,
        kernel: AbstractKernel,
        weights: Float[Array, "*groups m"],
        X: Float[Array, "n d"],
        group: Int[Array, " n"] | None,
    ) -> Float[Array, " n"]:
        if not self._is_monotone:
            return super()._values(kernel, weights, X, group)
        rise = numpyro.sample(f"{self.name}_rise", dist.HalfNormal(1.0))
        features = self._features(kernel)
        x = features.inside_box(X)[:, 0]
        # Concrete nodes, so that their basis is computed once.
        num_nodes = _NODES_EACH * self.num_basis + 1
        nodes = np.linspace(self.box[0, 0], self.box[1, 0], num_nodes).astype(X.dtype)
        slopes = jnp.exp(matmul(features(nodes[:, None]), jnp.atleast_2d(weights).T))
        steps = 0.5 * (slopes[1:] + slopes[:-1]) * (nodes[1] - nodes[0])
        integrals = jnp.concatenate([jnp.zeros_like(steps[:1]), jnp.cumsum(steps, axis=0)])
        first, last = self.ends

        def value(x: Array, column: Array) -> Array:
            integral = integrals[:, column]
            return jnp.interp(x, nodes, integral) - jnp.interp(first, nodes, integral)

        column = jnp.zeros(X.shape[0], int) if group is None else group
        sign = 1.0 if self.constraint == "increasing" else -1.0
        return sign * rise / (last - first) * jax.vmap(value)(x, column)


class SparseTerm(_AbstractTerm):
    """A smooth term with inducing points, for more than two inputs or any kernel.

    f(x) = a k(x, Z) L^-T w with K(Z, Z) = L L' and standard normal weights w. The points are the
    centers of k-means on the data, and stay for new data. Far from all points the term is zero, and
    its variance is too small: for predictions there, and for many points, make it a site with
    `sgp.LatentGP` and `AutoSparseGP`. The rest is as for `HilbertSpaceTerm`.

    Args:
        name: of the deterministic site of the values, and the prefix of the names of all sites.
        X: the inputs of the data, shape (n, d), or (n,) for one column.
        lengthscale: its prior; None as for `HilbertSpaceTerm`.
        amplitude: the prior of the standard deviation of f; None for `HalfNormal(1.0)`.
        kernel: a kernel class with a lengthscale and a variance.
        num_inducing: the number of points, at most the number of distinct rows.
        positive: whether the term is exp(f).
        num_groups: the number of groups, for a function that is pooled over groups.

    Raises:
        TypeError: if `kernel` is not a class of kernels, or a prior not a distribution.
        ValueError: if `X` is not a matrix of finite numbers.

    References:
        Quinonero-Candela and Rasmussen (2005), A Unifying View of Sparse Approximate Gaussian
        Process Regression, section 4 (subset of regressors). O(n m^2 + m^3) a gradient.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro import handlers
        >>> import numpyro_scalegp as sgp
        >>> X = np.random.default_rng(0).normal(size=(100, 4))
        >>> surface = sgp.terms.SparseTerm("surface", X, num_inducing=20)
        >>> handlers.seed(surface, jax.random.key(0))(X).shape
        (100,)
    """

    def __init__(
        self,
        name: str,
        X: Float[ArrayLike, "n *d"],
        *,
        lengthscale: dist.Distribution | None = None,
        amplitude: dist.Distribution | None = None,
        kernel: type[AbstractKernel] = Matern52,
        num_inducing: int = 50,
        positive: bool = False,
        num_groups: int | None = None,
    ) -> None:
        X = _as_inputs(X)
        constraint = "positive" if positive else None
        super().__init__(name, X, lengthscale, amplitude, kernel, constraint, num_groups)
        X = as_numpy(X)
        scale = np.std(X, axis=0)
        scale = np.where(scale > 0.0, scale, 1.0)
        num_points = min(checks.count("num_inducing", num_inducing), len(np.unique(X, axis=0)))
        centers = kmeans_points(jax.random.key(0), X / scale, num_points)
        self.points: Any = as_numpy(centers) * scale

    @property
    def num_basis(self) -> int:
        """The number of weights."""
        return len(self.points)

    def _basis(self, kernel: AbstractKernel, X: Float[Array, "n d"]) -> Float[Array, "n m"]:
        features = InducingPoints(kernel, self.points.astype(X.dtype))
        index = jnp.arange(self.num_basis)
        whitening = linalg.inverse_cholesky(features.precision(index, index))
        return matmul(features(X), whitening.T)


def _as_inputs(X: Any) -> Float[Array, "n d"]:
    X = X if isinstance(X, jax.Array) else np.asarray(X)
    return checks.inputs("X", X[:, None] if X.ndim == 1 else X)


def _default_prior(X: Float[Array, "n d"]) -> dist.Distribution:
    """From a twentieth to the range of one input; in between for more of them."""
    ranges = np.ptp(as_numpy(X).astype(float), axis=0)
    if not np.all(ranges > 0.0):
        raise ValueError(
            "`X` must vary in each column, or `lengthscale` be given, got ranges of "
            f"{ranges.tolist()}."
        )
    lower, upper = (0.05, 1.0) if len(ranges) == 1 else (0.2, 0.6)
    return lengthscale_prior(lower * ranges, upper * ranges).to_event(1)


def _quantiles(prior: dist.Distribution) -> tuple[Any, Any]:
    """The 1 % and 99 % quantiles of a prior of lengthscales, from many draws."""
    draws = as_numpy(prior.sample(jax.random.key(0), (10_000,)))
    lower, upper = np.quantile(draws, [0.01, 0.99], axis=0)
    return lower, upper
