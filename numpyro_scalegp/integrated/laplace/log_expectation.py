"""Logarithms of expectations of densities under normal distributions, by adaptive quadrature.

A rule with fixed nodes misses a density that is much narrower than the normal distribution, such as
the likelihood of a large count, and is inaccurate for several modes, heavy tails, corners or jumps.
This module divides the axis into panels, and divides panels further if two nested rules disagree.

References:
    Clenshaw and Curtis (1960), A method for numerical integration on an automatic computer; Liu and
    Pierce (1994), A note on Gauss-Hermite quadrature: a rule around the mode, which needs a
    log-concave likelihood.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float, Num

from numpyro_scalegp.core.host import call_where
from numpyro_scalegp.likelihoods.quadrature import normal_nodes
from numpyro_scalegp.numerics.derivatives import custom_jvp_all_orders
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.programs.float64 import in_float64
from numpyro_scalegp.programs.functions import RowsFunction, as_pytree

# Ends of the first panels, in standard deviations: narrow within the bulk of the normal
# distribution, and wide outside of it, for data in conflict with it.
_TAIL = 8.0 * 4.0 ** np.arange(1, 9)
_CORE = np.concatenate([np.arange(-8.0, -4.0), np.arange(-4.0, 4.0, 0.5), np.arange(4.0, 9.0)])
_ENDS = np.concatenate([-_TAIL[::-1], _CORE, _TAIL])
_NUM_PANELS = 64  # stored for a row
_NUM_DIVIDED = 4  # panels to divide in a step
_NUM_CHILDREN = 4  # of a divided panel
_MAX_STEPS = 30
# Tolerance of the estimated error, relative to the expectation. For smooth densities, the error of
# the finer rule is far smaller than the estimate.
_TOLERANCE = 1e-7
_WARN_ERROR = 1e-3  # estimated error above which to warn
_NUM_NODES = 32  # for the mean and variance of observations

# Log densities of one observation for each entry of f, given f and a pytree of arrays.
Entries = Callable[[Array, Any], Array]


def log_expectation(
    entries: Entries, data: Any, mean: Float[Array, "*rows"], scale: Float[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """The logarithm of an expectation over normal f, log E[exp(l(f))], entry by entry.

    Args:
        entries: the log densities l, given f of shape (*rows,) and `data`; -inf for a density of
            zero. NaN and +inf count as -inf if the value at the mean of f is finite.
        data: further argument of `entries`, differentiable.
        mean: of f.
        scale: standard deviations of f.

    Returns:
        The logarithms, with derivatives of every order, computed in float64 if the platform has it.
        Time: 680 evaluations of all densities, and 272 for each step: zero to five steps for smooth
        densities, about ten steps for a jump. Memory: 300 values per row. A peak narrower than a
        twentieth of the scale next to a wide peak can be missed.
    """

    def value(data: Any, mean: Array, scale: Array) -> tuple[Array, Array]:
        panels = _refined(entries, data, mean, scale)
        return panels.total, jnp.exp(panels.relative_error)

    integral = custom_jvp_all_orders(lambda *arguments: in_float64(value, *arguments))

    @integral.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
        nodes = in_float64(lambda *arguments: _nodes(entries, *arguments), *primals)

        def logarithm(data: Any, mean: Array, scale: Array) -> Array:
            def at(f: Array) -> Array:
                z = (f - mean) / scale
                return entries(f, data) - 0.5 * jnp.square(z) - jnp.log(scale)

            logs = jax.vmap(at)(nodes.f)
            # Zero, with the derivative of the logs; `log_share` has their values.
            change = logs - jax.lax.stop_gradient(logs)
            return jax.nn.logsumexp(nodes.log_share + change, axis=0)

        _, tangent = jax.jvp(logarithm, primals, tangents)
        values = integral(*primals)
        return values, (tangent, jnp.zeros_like(tangent))

    logarithm, error = integral(data, mean, scale)
    call_where(jnp.any(jax.lax.stop_gradient(error) > _WARN_ERROR), _warn_of_error)
    return logarithm


def _warn_of_error() -> None:
    warnings.warn(
        "a log density that is integrated over the function is inaccurate: the likelihood changes "
        "faster with the function than quadrature can follow.",
        RuntimeWarning,
        stacklevel=1,
    )


def _rule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """17 nodes on [0, 1], and the weights of the Clenshaw-Curtis rules with all and 9 of them.

    The ends of panels are nodes, so that a mode just outside of a panel affects its rules, too.
    """

    def weights(num: int) -> np.ndarray:
        angles, even = np.pi * np.arange(num + 1) / num, np.arange(1, num // 2 + 1)
        factors = np.where(even == num // 2, 1.0, 2.0) / (4.0 * even**2 - 1.0)
        sums = 1.0 - np.cos(2.0 * np.outer(angles, even)) @ factors
        return sums / num * np.where(np.arange(num + 1) % num == 0, 0.5, 1.0)

    nodes = 0.5 - 0.5 * np.cos(np.pi * np.arange(17) / 16)
    coarse = np.zeros(17)
    coarse[::2] = weights(8)
    return nodes, weights(16), coarse


_NODES, _FINE, _COARSE = _rule()


class _Panels(NamedTuple):
    """Intervals of z, with f = mean + scale z, and their integrals with error estimates."""

    left: Float[Array, "panels *rows"]
    width: Float[Array, "panels *rows"]
    log_integral: Float[Array, "panels *rows"]
    log_error: Float[Array, "panels *rows"]


class _Refined(NamedTuple):
    panels: _Panels
    log_dropped: Float[Array, "*rows"]  # the integral over panels replaced by others
    num_steps: Array

    @property
    def total(self) -> Float[Array, "*rows"]:
        panels = jax.nn.logsumexp(self.panels.log_integral, axis=0)
        return jnp.logaddexp(panels, self.log_dropped)

    @property
    def relative_error(self) -> Float[Array, "*rows"]:
        error = jax.nn.logsumexp(self.panels.log_error, axis=0)
        return jnp.where(jnp.isneginf(error), -jnp.inf, error - self.total)


class _Nodes(NamedTuple):
    f: Float[Array, "nodes *rows"]
    log_share: Float[Array, "nodes *rows"]  # log of the fraction of the expectation


def _log_integrand(
    entries: Entries, data: Any, mean: Array, scale: Array, z: Float[Array, "nodes *rows"]
) -> Float[Array, "nodes *rows"]:
    logs = jax.vmap(lambda z: entries(mean + scale * z, data))(z)
    # Far from the mean, exp(f) overflows, and the difference of infinite terms is NaN.
    logs = jnp.where(jnp.isnan(logs) | jnp.isposinf(logs), -jnp.inf, logs)
    return logs - 0.5 * jnp.square(z) - 0.5 * math.log(2.0 * math.pi)


def _integrated(
    entries: Entries, data: Any, mean: Array, scale: Array, left: Array, width: Array
) -> _Panels:
    """The panels with their integrals, computed one after the other to save memory."""
    eps = jnp.finfo(mean.dtype).eps

    def integrate(panel: tuple[Array, Array]) -> tuple[Array, Array]:
        left, width = panel
        z = jax.vmap(lambda node: left + width * node)(jnp.asarray(_NODES, width.dtype))
        logs = _log_integrand(entries, data, mean, scale, z)
        largest = jnp.max(logs, axis=0)
        base = jnp.where(jnp.isneginf(largest), 0.0, largest)
        values = jnp.exp(logs - base)
        fine, difference = (
            jnp.tensordot(jnp.asarray(weights, z.dtype), values, 1)
            for weights in (_FINE, _FINE - _COARSE)
        )
        log_width = base + jnp.log(width)
        is_resolved = width * scale > 1e3 * eps * jnp.abs(mean + scale * left)
        is_divisible = is_resolved & (width > 1e3 * eps * jnp.abs(left))
        log_error = jnp.where(is_divisible, jnp.log(jnp.abs(difference)) + log_width, -jnp.inf)
        return jnp.log(fine) + log_width, log_error

    return _Panels(left, width, *jax.lax.map(integrate, (left, width)))


def _refined(entries: Entries, data: Any, mean: Array, scale: Array) -> _Refined:
    """Divide panels until the rules agree, or the largest number of steps is reached."""

    def for_each_row(values: np.ndarray) -> Array:
        column = jnp.asarray(values, mean.dtype).reshape(-1, *[1] * mean.ndim)
        return jnp.broadcast_to(column, (len(values), *mean.shape))

    left, width = for_each_row(_ENDS[:-1]), for_each_row(np.diff(_ENDS))
    first = _integrated(entries, data, mean, scale, left, width)
    num_empty = _NUM_PANELS - len(width)
    empty = [for_each_row(np.full(num_empty, value)) for value in (0.0, 0.0, -np.inf, -np.inf)]
    panels = _Panels(*(jnp.concatenate(pair) for pair in zip(first, empty, strict=True)))
    state = _Refined(panels, jnp.full_like(mean, -jnp.inf), jnp.zeros((), jnp.int32))

    def is_poor(state: _Refined) -> Array:
        is_large = state.relative_error > math.log(_TOLERANCE)
        return jnp.any(is_large) & (state.num_steps < _MAX_STEPS)

    def divide(state: _Refined) -> _Refined:
        panels = state.panels
        parent = _largest(panels.log_error, _NUM_DIVIDED)
        parents = jax.tree.map(lambda leaf: _take(leaf, parent), panels)
        tolerance = math.log(_TOLERANCE / _NUM_PANELS)
        is_divided = parents.log_error - state.total > tolerance
        steps = for_each_row(np.arange(_NUM_CHILDREN))[:, None]
        width = parents.width / _NUM_CHILDREN
        left = (parents.left + steps * width).reshape(-1, *mean.shape)
        width = jnp.broadcast_to(width, (_NUM_CHILDREN, *width.shape)).reshape(left.shape)
        children = _integrated(entries, data, mean, scale, left, width)
        # The first child replaces its parent; the others replace the least important panels.
        importance = jnp.maximum(panels.log_integral, panels.log_error)
        importance = _put(importance, parent, jnp.full_like(parents.width, jnp.inf))
        least_important = _largest(-importance, (_NUM_CHILDREN - 1) * _NUM_DIVIDED)
        index = jnp.concatenate([parent, least_important])
        is_new = jnp.tile(is_divided, (_NUM_CHILDREN, *[1] * mean.ndim))
        dropped = jnp.where(is_new, _take(panels.log_integral, index), -jnp.inf)[_NUM_DIVIDED:]
        log_dropped = jnp.logaddexp(state.log_dropped, jax.nn.logsumexp(dropped, axis=0))
        panels = jax.tree.map(
            lambda old, new: _put(old, index, jnp.where(is_new, new, _take(old, index))),
            panels,
            children,
        )
        return _Refined(panels, log_dropped, state.num_steps + 1)

    state = jax.lax.while_loop(is_poor, divide, state)
    # The result is NaN or infinite if the entry at the mean is: NaN only if no node has a density.
    at_mean = entries(mean + 0.0 * scale, data)
    is_nan = jnp.isneginf(state.total) & jnp.isnan(at_mean)
    is_infinite = jnp.isposinf(at_mean)
    log_dropped = jnp.where(is_nan | is_infinite, at_mean, state.log_dropped)
    return state._replace(log_dropped=log_dropped)


def _nodes(entries: Entries, data: Any, mean: Array, scale: Array) -> _Nodes:
    """All nodes of the refined panels; nodes of negligible weight move to the largest one."""
    refined = _refined(entries, data, mean, scale)
    panels = refined.panels

    def of_panel(panel: tuple[Array, Array]) -> tuple[Array, Array]:
        left, width = panel
        z = jax.vmap(lambda node: left + width * node)(jnp.asarray(_NODES, width.dtype))
        weights = jnp.asarray(_FINE, z.dtype).reshape(-1, *[1] * mean.ndim)
        logs = _log_integrand(entries, data, mean, scale, z)
        return mean + scale * z, logs + jnp.log(width) + jnp.log(weights)

    f, logs = jax.lax.map(of_panel, (panels.left, panels.width))
    f, logs = (array.reshape(-1, *mean.shape) for array in (f, logs))
    log_share = logs - jax.nn.logsumexp(logs, axis=0)
    largest = jnp.take_along_axis(f, jnp.argmax(logs, axis=0)[None], axis=0)
    is_negligible = ~(log_share > math.log(jnp.finfo(jnp.float32).tiny))
    f = jnp.where(is_negligible, largest, f)
    return _Nodes(f, jnp.where(is_negligible, -jnp.inf, log_share))


def _largest(values: Float[Array, "panels *rows"], num: int) -> Array:
    """Indices of the largest values along the first axis."""
    _, indices = jax.lax.top_k(jnp.moveaxis(values, 0, -1), num)
    return jnp.moveaxis(indices, -1, 0)


def _take(values: Array, indices: Array) -> Array:
    return jnp.take_along_axis(values, indices, axis=0)


def _put(values: Array, indices: Array, new: Array) -> Array:
    return jnp.put_along_axis(values, indices, new, axis=0, inplace=False)


class LikelihoodUnderNormal(dist.Distribution):
    """Observations that each depend on a normal variable f: p(y) = E[p(y | f)].

    Args:
        likelihood: maps values of f, shape (*batch, n), to a distribution of one observation for
            each value.
        f: the distribution of the normal variables.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("likelihood", "f")

    def __init__(
        self, likelihood: RowsFunction | Callable[[Array], dist.Distribution], f: dist.Normal
    ) -> None:
        self.likelihood, self.f = as_likelihood(likelihood), f
        super().__init__(f.batch_shape, ())

    @property
    def support(self) -> Any:
        """The support of the likelihood."""
        return self.likelihood(self.f.loc).support

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Num[Array, "..."]:
        """Draw the normal variables, then observations given them."""
        function_key, key = jax.random.split(key)
        return self.likelihood(self.f.sample(function_key, sample_shape)).sample(key)

    def log_prob(
        self, value: Num[ArrayLike, "..."], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """Log densities, shape (..., n), by adaptive quadrature; see `log_expectation`.

        Each takes about 1,000 to 5,000 evaluations of the likelihood.
        """
        return self._log_density(jnp.asarray(value))

    @compiled
    def _log_density(self, y: Num[Array, "..."]) -> Float[Array, "..."]:
        loc, scale = jnp.broadcast_arrays(self.f.loc, self.f.scale)
        y = jnp.broadcast_to(y, jnp.broadcast_shapes(y.shape, loc.shape))

        def of_rows(y: Array) -> Array:
            return log_expectation(_entries, (self.likelihood, y), loc, scale)

        for _ in y.shape[: y.ndim - loc.ndim]:
            of_rows = jax.vmap(of_rows)
        return of_rows(y)

    @property
    def mean(self) -> Float[Array, "..."]:
        """The mean, by quadrature."""
        return self._moments()[0]

    @property
    def variance(self) -> Float[Array, "..."]:
        """The variance, by quadrature."""
        return self._moments()[1]

    @compiled
    def _moments(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        means, weights = self._at_nodes(lambda likelihood: likelihood.mean)
        variances, _ = self._at_nodes(lambda likelihood: likelihood.variance)
        mean = jnp.sum(weights * means, axis=0)
        return mean, jnp.sum(weights * (variances + jnp.square(means - mean)), axis=0)

    def _at_nodes(
        self, function: Callable[[dist.Distribution], Array]
    ) -> tuple[Float[Array, "nodes ..."], Float[Array, "nodes ..."]]:
        """The values of a function of the likelihood at quadrature nodes, and the weights."""
        nodes, weights = normal_nodes(_NUM_NODES)
        loc, scale = self.f.loc, self.f.scale
        z = jnp.asarray(nodes, loc.dtype)
        values = jax.lax.map(lambda node: function(self.likelihood(loc + scale * node)), z)
        weights = weights.reshape(-1, *[1] * (values.ndim - 1))
        return values, jnp.asarray(weights, loc.dtype)


def as_likelihood(function: RowsFunction | Callable[[Array], dist.Distribution]) -> RowsFunction:
    """Wrap a likelihood, which takes the function's values at all rows, even if it is a network."""
    return dataclasses.replace(as_pytree(function, "likelihood"), maps_single_rows=False)


def _entries(f: Float[Array, "..."], data: Any) -> Float[Array, "..."]:
    likelihood, y = data
    return likelihood(f).log_prob(y)
