"""Logarithms of expectations of densities under normal distributions, by adaptive quadrature.

A rule with fixed nodes steps over a density that is narrow beside the normal distribution, such as
that of a large count, and is inaccurate where it has several modes, heavy tails, corners or jumps.
Here the axis is cut into panels that are divided where two nested rules disagree.

References:
    Clenshaw and Curtis (1960), A method for numerical integration on an automatic computer; Liu and
    Pierce (1994), A note on Gauss-Hermite quadrature, for what a rule around the mode needs: a
    likelihood that is log-concave.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_scalegp.core.derivatives import lasting_jvp
from numpyro_scalegp.core.float64 import in_float64
from numpyro_scalegp.core.host import call_where

# Ends of the first panels, in standard deviations: narrow where the normal distribution is, and
# beyond for data in conflict with it.
_TAIL = 8.0 * 4.0 ** np.arange(1, 9)
_CORE = np.concatenate([np.arange(-8.0, -4.0), np.arange(-4.0, 4.0, 0.5), np.arange(4.0, 9.0)])
_ENDS = np.concatenate([-_TAIL[::-1], _CORE, _TAIL])
_NUM_PANELS = 64  # that are kept for a row
_NUM_DIVIDED = 4  # panels that are divided in a step
_NUM_CHILDREN = 4  # into which each is divided
_MAX_STEPS = 30
# Of the estimated error, relative to the expectation. That of the finer rule is far smaller where
# the density is smooth.
_TOLERANCE = 1e-7
_POOR = 1e-3  # an error that is warned of

# Log densities of one observation for each entry of f, given f and a pytree of arrays.
Entries = Callable[[Array, Any], Array]


def log_expectation(
    entries: Entries, data: Any, mean: Float[Array, "*rows"], scale: Float[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """The logarithm of an expectation over normal f, log E[exp(l(f))], entry by entry.

    Args:
        entries: the log densities l, given f of shape (*rows,) and `data`; -inf where a density is
            zero, and NaN and infinity count as that where the mean of f gives a number.
        data: what `entries` takes besides; all of it may be differentiated.
        mean: of f.
        scale: standard deviations of f.

    Returns:
        The logarithms, with derivatives of every order, computed in float64 where the platform has
        it. In 680 evaluations of all densities, and 272 for each step, of which there are none to
        five for smooth densities and about ten where there is a jump; memory of 300 numbers a row.
        A peak narrower than a twentieth of the scale beside a wide one can be overlooked.
    """

    def value(data: Any, mean: Array, scale: Array) -> tuple[Array, Array]:
        panels = _refined(entries, data, mean, scale)
        return panels.total, jnp.exp(panels.relative_error)

    integral = lasting_jvp(lambda *arguments: in_float64(value, *arguments))

    @integral.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
        nodes = in_float64(lambda *arguments: _nodes(entries, *arguments), *primals)

        def logarithm(data: Any, mean: Array, scale: Array) -> Array:
            def at(f: Array) -> Array:
                z = (f - mean) / scale
                return entries(f, data) - 0.5 * jnp.square(z) - jnp.log(scale)

            logs = jax.vmap(at)(nodes.f)
            # Zero, and the derivative of the logs: their values are in the shares.
            change = logs - jax.lax.stop_gradient(logs)
            return jax.nn.logsumexp(nodes.log_share + change, axis=0)

        _, tangent = jax.jvp(logarithm, primals, tangents)
        values = integral(*primals)
        return values, (tangent, jnp.zeros_like(tangent))

    logarithm, error = integral(data, mean, scale)
    call_where(jnp.any(jax.lax.stop_gradient(error) > _POOR), _warn_of_error)
    return logarithm


def _warn_of_error() -> None:
    warnings.warn(
        "a log density that is integrated over the function is inaccurate: the likelihood changes "
        "faster with the function than quadrature can follow.",
        RuntimeWarning,
        stacklevel=1,
    )


def _rule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes on [0, 1] with weights of the Clenshaw-Curtis rules with all and every other of them.

    They share the ends of panels, so that a mode beyond the end of a panel shows in both.
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


_PLACES, _FINE, _COARSE = _rule()


class _Panels(NamedTuple):
    """Intervals of z, with f = mean + scale z, the integrals over them and estimates of errors."""

    left: Float[Array, "panels *rows"]
    width: Float[Array, "panels *rows"]
    log_integral: Float[Array, "panels *rows"]
    log_error: Float[Array, "panels *rows"]


class _Refined(NamedTuple):
    panels: _Panels
    log_dropped: Float[Array, "*rows"]  # the integral over panels that gave way to others
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
    log_share: Float[Array, "nodes *rows"]  # of the expectation, which sum to one


def _log_integrand(
    entries: Entries, data: Any, mean: Array, scale: Array, z: Float[Array, "nodes *rows"]
) -> Float[Array, "nodes *rows"]:
    logs = jax.vmap(lambda z: entries(mean + scale * z, data))(z)
    # Far from the mean, exp(f) overflows, and differences of infinite terms mean nothing.
    logs = jnp.where(jnp.isnan(logs) | jnp.isposinf(logs), -jnp.inf, logs)
    return logs - 0.5 * jnp.square(z) - 0.5 * math.log(2.0 * math.pi)


def _integrated(
    entries: Entries, data: Any, mean: Array, scale: Array, left: Array, width: Array
) -> _Panels:
    """The panels with their integrals, one after the other in memory of one."""
    eps = jnp.finfo(mean.dtype).eps

    def integrate(panel: tuple[Array, Array]) -> tuple[Array, Array]:
        left, width = panel
        z = jax.vmap(lambda place: left + width * place)(jnp.asarray(_PLACES, width.dtype))
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
    """Panels that were divided until the rules agree, or after the last step."""

    def of_rows(numbers: np.ndarray) -> Array:
        column = jnp.asarray(numbers, mean.dtype).reshape(-1, *[1] * mean.ndim)
        return jnp.broadcast_to(column, (len(numbers), *mean.shape))

    left, width = of_rows(_ENDS[:-1]), of_rows(np.diff(_ENDS))
    first = _integrated(entries, data, mean, scale, left, width)
    num_empty = _NUM_PANELS - len(width)
    empty = [of_rows(np.full(num_empty, value)) for value in (0.0, 0.0, -np.inf, -np.inf)]
    panels = _Panels(*(jnp.concatenate(pair) for pair in zip(first, empty, strict=True)))
    state = _Refined(panels, jnp.full_like(mean, -jnp.inf), jnp.zeros((), jnp.int32))

    def is_poor(state: _Refined) -> Array:
        is_large = state.relative_error > math.log(_TOLERANCE)
        return jnp.any(is_large) & (state.num_steps < _MAX_STEPS)

    def divide(state: _Refined) -> _Refined:
        panels = state.panels
        parent = _largest(panels.log_error, _NUM_DIVIDED)
        parents = jax.tree.map(lambda leaf: _take(leaf, parent), panels)
        least = math.log(_TOLERANCE / _NUM_PANELS)
        is_divided = parents.log_error - state.total > least
        steps = of_rows(np.arange(_NUM_CHILDREN))[:, None]
        width = parents.width / _NUM_CHILDREN
        left = (parents.left + steps * width).reshape(-1, *mean.shape)
        width = jnp.broadcast_to(width, (_NUM_CHILDREN, *width.shape)).reshape(left.shape)
        children = _integrated(entries, data, mean, scale, left, width)
        # Each parent gives way to its first child, and panels that matter least to the others.
        importance = jnp.maximum(panels.log_integral, panels.log_error)
        importance = _put(importance, parent, jnp.full_like(parents.width, jnp.inf))
        least_important = _largest(-importance, (_NUM_CHILDREN - 1) * _NUM_DIVIDED)
        place = jnp.concatenate([parent, least_important])
        is_new = jnp.tile(is_divided, (_NUM_CHILDREN, *[1] * mean.ndim))
        dropped = jnp.where(is_new, _take(panels.log_integral, place), -jnp.inf)[_NUM_DIVIDED:]
        log_dropped = jnp.logaddexp(state.log_dropped, jax.nn.logsumexp(dropped, axis=0))
        panels = jax.tree.map(
            lambda old, new: _put(old, place, jnp.where(is_new, new, _take(old, place))),
            panels,
            children,
        )
        return _Refined(panels, log_dropped, state.num_steps + 1)

    state = jax.lax.while_loop(is_poor, divide, state)
    # Where no f gives a number, or each an infinite one, that is what there is.
    at_mean = entries(mean + 0.0 * scale, data)
    is_nan = jnp.isneginf(state.total) & jnp.isnan(at_mean)
    is_infinite = jnp.isposinf(at_mean)
    log_dropped = jnp.where(is_nan | is_infinite, at_mean, state.log_dropped)
    return state._replace(log_dropped=log_dropped)


def _nodes(entries: Entries, data: Any, mean: Array, scale: Array) -> _Nodes:
    """All nodes of the refined panels, those of no weight in the place of the largest."""
    refined = _refined(entries, data, mean, scale)
    panels = refined.panels

    def of_panel(panel: tuple[Array, Array]) -> tuple[Array, Array]:
        left, width = panel
        z = jax.vmap(lambda place: left + width * place)(jnp.asarray(_PLACES, width.dtype))
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
    """Places of the largest values along the first axis."""
    _, places = jax.lax.top_k(jnp.moveaxis(values, 0, -1), num)
    return jnp.moveaxis(places, -1, 0)


def _take(values: Array, places: Array) -> Array:
    return jnp.take_along_axis(values, places, axis=0)


def _put(values: Array, places: Array, new: Array) -> Array:
    return jnp.put_along_axis(values, places, new, axis=0, inplace=False)
