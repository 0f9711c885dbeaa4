"""Filter, smoother and their gradient, at many places in time at once.

The rows, in order of time, are cut into as many parts as there are lanes. Each step of a loop works
on one row of every part. Three passes follow each other:

1. `summaries`: what each part does to the state before it, for any such state;
2. `starts`: the distribution of the state before each part, one part after the other;
3. `filter`: the filter within each part.

The smoother goes the same way backward. With the log density L, the filtered mean m and covariance
P, it computes r = dL/dm and N with dL/dP = (r r' - N) / 2, so that the smoothed mean is m + P r and
the smoothed covariance P - P N P. These are also the derivatives with respect to every transition
and observation, by the chain rule: nothing is differentiated through the loop.

References:
    Kitagawa (1987); de Jong (1988), A Cross-Validation Filter for Time Series Models; Koopman and
    Shephard (1992), Exact Score for Time Series Models in State Space Form; Sarkka and
    Garcia-Fernandez (2021), Temporal Parallelization of Bayesian Smoothers.
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_scalegp.integrated.state_space.matrices import Arrays, Entries
from numpyro_scalegp.integrated.state_space.parts import Parts, each_after_the_other
from numpyro_scalegp.kernels.state_space import MOST_ENTRIES, AbstractStateSpace, single_lane
from numpyro_scalegp.numerics import linalg, rounding
from numpyro_scalegp.numerics.rounding import remaining_variance


class Rows(NamedTuple):
    """Rows in order of time, shape (n,), or (steps, lanes) when they are cut into parts."""

    start: Float[Array, "*rows"]  # the time of the row before
    elapsed: Float[Array, "*rows"]  # the time since then, zero for the first row
    y: Float[Array, "*rows"]
    noise: Float[Array, "*rows"]
    weight: Any  # 1 if observed, 0 otherwise
    h: Any  # shape (*rows, s), or (s,), the same for all rows
    transition: Any = None  # the matrices of the form, if they are stored


class Moments(NamedTuple):
    """Mean and covariance of the state, or r and N, for each row."""

    mean: Any
    covariance: Any


class AtRows(NamedTuple):
    """What the observations say about the function at their rows."""

    weights: Float[Array, " n"]  # H^-1 y, with H = K + noise
    means: Float[Array, " n"]  # K H^-1 y
    variances: Any  # the diagonal of K - K H^-1 K, or None
    log_ratio: Float[Array, ""]  # log|H| - log|noise|
    loss: Float[Array, ""]  # the largest relative rounding error of a variance


class Derivatives(NamedTuple):
    """Derivatives of the log density; of the entries of `Rows`, with shapes of those."""

    form: Any  # with the structure of the form's arrays
    first_time: Float[Array, ""]
    rows: Rows


class Smoothed(NamedTuple):
    """What filter and smoother know about each row, in arrays whose first axis is the row."""

    mean: Float[Array, "n s"]  # of the state, given the rows up to this one
    covariance: Float[Array, "n p"]  # packed; see `matrices`
    score: Float[Array, "n s"]  # r, of this row and later ones, for the state before observing it
    information: Float[Array, "n p"]  # N, packed
    weights: Float[Array, " n"]  # H^-1 y, with H the covariance of the observations
    precisions: Float[Array, " n"]  # the diagonal of H^-1


def algebra_of(form: AbstractStateSpace) -> Any:
    """The algebra for matrices of the size of a form's state."""
    return Entries if form.size <= MOST_ENTRIES else Arrays


def transition(
    form: AbstractStateSpace, start: Float[Array, " lanes"], elapsed: Float[Array, " lanes"]
) -> tuple[Any, Any]:
    """The matrices A and Q of transitions in many lanes."""
    ops = algebra_of(form)
    mapped = jax.vmap(form.transition, out_axes=-1)
    A, Q = mapped(start, elapsed)
    return ops.from_blocks(A), ops.from_blocks(Q)


def rows_at(
    times: Float[Array, " n"],
    y: Float[Array, " n"],
    noise: Float[Array, " n"],
    h: Any,
) -> Rows:
    """The rows at sorted times, all of them observed."""
    before = jnp.concatenate([times[:1], times[:-1]])
    return Rows(before, times - before, y, noise, jnp.ones_like(y), h)


@jax.custom_jvp
def _share_of_noise(noise: Array, explained: Array) -> Array:
    """The share of a row's variance that is noise."""
    return noise / (explained + noise)


@_share_of_noise.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    # The derivative of the quotient cancels where nearly all of the variance is noise.
    (noise, explained), (d_noise, d_explained) = primals, tangents
    inverse = 1.0 / (explained + noise)
    change = explained * inverse * (d_noise * inverse) - noise * inverse * (d_explained * inverse)
    return noise * inverse, change


class Passes:
    """The passes over rows that are cut into parts.

    Args:
        form: the process.
        rows: in order of time.
        first: the state at the first row's `start`, as a single lane; None for the prior.
    """

    def __init__(self, form: AbstractStateSpace, rows: Rows, first: Moments | None = None) -> None:
        self.form, self.size, self.first = form, form.size, first
        self.parts = Parts(len(rows.y), self.size)
        self.lanes = self.parts.lanes
        self.algebra = algebra_of(form)
        self.has_equal_h = rows.h.ndim == 1
        self.first_time = rows.start[0]
        self.rows = jax.tree.map(
            self.parts.cut, rows._replace(h=None if self.has_equal_h else rows.h)
        )
        self.has_known_h = isinstance(rows.h, np.ndarray)
        # Several parts of a state may cancel in their sum.
        self.may_cancel = not (self.has_known_h and np.count_nonzero(rows.h) == 1)
        if self.has_equal_h:
            self.h = self.algebra.equal(rows.h, self.lanes)
        self.lane = jnp.zeros(self.lanes, rows.y.dtype)
        if form.has_costly_transitions and self.algebra is Entries:
            start, elapsed = self.rows.start, self.rows.elapsed
            blocks = transition(form, start.reshape(-1), elapsed.reshape(-1))
            stored = jax.tree.map(lambda entry: entry.reshape(start.shape), blocks)
            self.rows = self.rows._replace(transition=stored)

    def _transition(self, row: Rows) -> tuple[Any, Any]:
        """The matrices A and Q of a row."""
        if row.transition is not None:
            return row.transition
        return transition(self.form, row.start, row.elapsed)

    def _h(self, row: Rows) -> Any:
        return self.h if self.has_equal_h else self.algebra.of(row.h.T)

    def _noise(self, row: Rows) -> Array:
        return jnp.where(row.weight > 0.0, row.noise, 1.0)

    def _observed(self, P: Any, g: Any, gain: Any, h: Any, row: Rows) -> Any:
        """The covariance P - gain g' after a row is observed, g = P h.

        With little noise the difference cancels in the direction of h, where the result is known:
        (P - gain g') h = gain noise.
        """
        ops = self.algebra
        observed = ops.add(P, ops.scale(ops.outer(gain, g), -1.0))
        known = ops.scale(g, _share_of_noise(self._noise(row), ops.dot(h, g)))
        error = ops.add(known, ops.scale(ops.times(observed, h), -1.0))
        square = ops.dot(h, h)
        inverse = jnp.where(square > 0.0, row.weight / jnp.where(square > 0.0, square, 1.0), 0.0)
        along = 0.5 * inverse * ops.dot(h, error)
        change = ops.scale(ops.add(error, ops.scale(h, -along)), inverse)
        return ops.add(observed, ops.outer(change, h), ops.outer(h, change))

    def prior(self) -> Moments:
        """The state at the first time, as a single lane."""
        if self.first is not None:
            return self.first
        blocks = single_lane(self.form.covariance(self.first_time))
        like = jnp.zeros_like(self.lane[:1])
        full = self.algebra.full(self.algebra.from_blocks(blocks), like)
        return Moments(self.algebra.zeros(self.size, like), self.algebra.pack(full))

    def summaries(self) -> Any:
        """What each part does to the state x before it.

        After the part the state has mean Phi x + b and covariance C, and the part's observations
        have a likelihood of x proportional to exp(x' eta - x' J x / 2).
        """
        ops = self.algebra
        zeros = ops.zeros(self.size, self.lane)
        none = ops.pack(ops.full(ops.outer(zeros, zeros), self.lane))

        def step(carry: Any, row: Rows) -> tuple[Any, None]:
            Phi, b, C, eta, J = carry
            C, J = ops.unpack(C), ops.unpack(J)
            A, Q = self._transition(row)
            h = self._h(row)
            Phi, b = ops.product(A, Phi), ops.times(A, b)
            C = ops.add(ops.congruence(A, C), Q)
            g, c = ops.times(ops.transpose(Phi), h), ops.times(C, h)
            inverse = row.weight / (ops.dot(h, c) + self._noise(row))
            error = row.y - ops.dot(h, b)
            gain = ops.scale(c, inverse)
            J = ops.add(J, ops.outer(ops.scale(g, inverse), g))
            eta = ops.add(eta, ops.scale(g, error * inverse))
            Phi = ops.add(Phi, ops.scale(ops.outer(gain, g), -1.0))
            b = ops.add(b, ops.scale(gain, error))
            C = self._observed(C, c, gain, h, row)
            return (Phi, b, ops.pack(C), eta, ops.pack(J)), None

        first = (ops.identity(self.size, self.lane), zeros, none, zeros, none)
        return jax.lax.scan(step, first, self.rows)[0]

    def starts(self) -> Moments:
        """The filtered state before each part."""
        ops, prior = self.algebra, self.prior()
        if self.lanes == 1:
            return prior

        def step(carry: Moments, summary: Any) -> Moments:
            m, P = carry.mean, ops.unpack(carry.covariance)
            Phi, b, C, eta, J = summary
            J = ops.unpack(J)
            G = ops.given_information(P, J)
            score = ops.add(eta, ops.scale(ops.times(J, m), -1.0))
            mean = ops.add(ops.times(Phi, ops.add(m, ops.times(G, score))), b)
            covariance = ops.add(ops.congruence(Phi, G), ops.unpack(C))
            return Moments(mean, ops.pack(covariance))

        return each_after_the_other(step, prior, self.summaries())

    def filter(self, starts: Moments) -> Float[Array, ""]:
        """The log density."""

        def step(carry: Any, row: Rows) -> tuple[Any, None]:
            moments, total, worst = carry
            after, variance, (*_, error, loss) = self._filtered(moments, row)
            total = total + self._log_density(row, variance, error)
            return (after, total, jnp.maximum(worst, loss)), None

        first = starts, self.lane, self.lane
        _, totals, worst = jax.lax.scan(step, first, self.rows)[0]
        return self._with_warning(jnp.sum(totals), jnp.max(worst))

    def last(self) -> Moments:
        """The filtered state after the last row, as a single lane."""

        def step(moments: Moments, row: Rows) -> tuple[Moments, None]:
            return self._filtered(moments, row)[0], None

        after = jax.lax.scan(step, self.starts(), self.rows)[0]
        return jax.tree.map(lambda leaf: leaf[..., -1:], after)

    def _with_warning(self, total: Float[Array, ""], loss: Float[Array, ""]) -> Float[Array, ""]:
        """The log density, with a warning if it has few digits, or is NaN for y without NaN."""
        value, worst, y = jax.lax.stop_gradient((total, loss, self.rows.y))
        works = ~jnp.isnan(value) | jnp.isnan(jnp.sum(y))
        linalg.warn_of_steps(works, jnp.zeros((), jnp.int32), few=worst > rounding.FEW_DIGITS)
        return total

    @staticmethod
    def _log_density(row: Rows, variance: Array, error: Array) -> Float[Array, " lanes"]:
        """The log density of a row given earlier ones."""
        term = error * error / variance + jnp.log(2.0 * math.pi * variance)
        return -0.5 * row.weight * term

    def _filtered(self, before: Moments, row: Rows) -> tuple[Moments, Array, Any]:
        """The moments after a row from those before, its variance, and what led there."""
        ops = self.algebra
        A, Q = self._transition(row)
        h = self._h(row)
        AP = ops.product(A, ops.unpack(before.covariance))
        m = ops.times(A, before.mean)
        P = ops.add(ops.symmetric_product(AP, ops.transpose(A)), Q)
        g = ops.times(P, h)
        variance = ops.dot(h, g) + self._noise(row)
        error = row.y - ops.dot(h, m)
        inverse = row.weight / variance
        gain = ops.scale(g, inverse)
        after = Moments(
            ops.add(m, ops.scale(gain, error)),
            ops.pack(self._observed(P, g, gain, h, row)),
        )
        # The rounding errors of the variance, relative to it.
        loss = jnp.zeros_like(variance)
        if self.may_cancel:
            size = ops.absolute_form(P, h)
            loss = row.weight * rounding.unit(size.dtype) * size / variance
        return after, variance, (A, AP, h, m, P, gain, inverse, error, loss)

    def filter_and_store(
        self, starts: Moments, *, with_information: bool = True
    ) -> tuple[Array, Array, Moments, Any]:
        """The log density, its loss, the moments before each row, each part's influence.

        The influence of a start is (Psi, delta, J): r = delta + Psi' r_end before the part, and
        N = J + Psi' N_end Psi. J is None without information.
        """
        ops = self.algebra
        zeros = ops.zeros(self.size, self.lane)
        none = ops.pack(ops.full(ops.outer(zeros, zeros), self.lane))

        def step(carry: Any, row: Rows) -> tuple[Any, Moments]:
            moments, total, worst, influence = carry
            after, variance, state = self._filtered(moments, row)
            A, _, h, _, _, gain, inverse, error, loss = state
            total = total + self._log_density(row, variance, error)
            worst = jnp.maximum(worst, loss)
            if influence is not None:
                Psi, delta, J = influence
                Psi = ops.product(A, Psi)
                q = ops.times(ops.transpose(Psi), h)
                delta = ops.add(delta, ops.scale(q, error * inverse))
                if with_information:
                    J = ops.pack(ops.add(ops.unpack(J), ops.outer(ops.scale(q, inverse), q)))
                influence = ops.add(Psi, ops.scale(ops.outer(gain, q), -1.0)), delta, J
            return (after, total, worst, influence), moments

        identity = ops.identity(self.size, self.lane)
        none = none if with_information else None
        influence = None if self.lanes == 1 else (identity, zeros, none)
        first = starts, self.lane, self.lane, influence
        (_, totals, worst, influence), stored = jax.lax.scan(step, first, self.rows)
        return jnp.sum(totals), jnp.max(worst), stored, influence

    def ends(self, influence: Any, *, with_information: bool = True) -> Moments:
        """The r and N after each part, N being None without information."""
        ops = self.algebra
        one = self.lane[:1]
        zeros = ops.zeros(self.size, one)
        last = Moments(zeros, None)
        if with_information:
            last = last._replace(covariance=ops.pack(ops.full(ops.outer(zeros, zeros), one)))
        if influence is None:
            return last

        def step(carry: Moments, influence: Any) -> Moments:
            Psi, delta, J = influence
            transposed = ops.transpose(Psi)
            r = ops.add(delta, ops.times(transposed, carry.mean))
            if J is None:
                return Moments(r, None)
            N = ops.congruence(transposed, ops.unpack(carry.covariance))
            return Moments(r, ops.pack(ops.add(N, ops.unpack(J))))

        return each_after_the_other(step, last, influence, backward=True)

    def with_derivatives(self) -> tuple[Float[Array, ""], Derivatives, Float[Array, " n"]]:
        """The log density, its derivatives, and the mean of the function at each row."""
        ops = self.algebra
        total, loss, stored, influence = self.filter_and_store(self.starts())
        # The arrays of the form, once for each lane, so that a step's derivatives are not summed.
        arrays, static = eqx.partition(self.form, eqx.is_inexact_array)
        of_lanes = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (self.lanes, *leaf.shape)), arrays
        )

        def blocks(arrays: Any, start: Array, elapsed: Array) -> Any:
            return tuple(eqx.combine(arrays, static).transition(start, elapsed))

        blocks_of_lanes = jax.vmap(blocks, out_axes=-1)

        def step(carry: Any, inputs: tuple[Rows, Moments]) -> tuple[Any, Any]:
            later, totals = carry
            row, before = inputs
            _, _, (A, AP, h, m, P, gain, inverse, error, _) = self._filtered(before, row)
            r, N, u, D, d_h = self._before_observing(later, h, m, P, gain, inverse, error)
            matrices, pull_back = jax.vjp(blocks_of_lanes, of_lanes, row.start, row.elapsed)
            S = ops.add(ops.outer(r, r), ops.scale(N, -1.0))
            d_A = ops.add(ops.outer(r, before.mean), ops.product(S, AP))
            derivatives = d_A, ops.scale(S, 0.5)
            d_form, d_start, d_elapsed = pull_back(tuple(map(ops.to_blocks, derivatives, matrices)))
            transposed = ops.transpose(A)
            earlier = Moments(ops.times(transposed, r), ops.pack(ops.congruence(transposed, N)))
            totals = jax.tree.map(jnp.add, totals, d_form)
            d_h = None if self.has_known_h else d_h
            d_row = Rows(d_start, d_elapsed, -u, 0.5 * (u * u - D), None, d_h)
            return (earlier, totals), (d_row, ops.dot(h, ops.add(m, ops.times(P, r))))

        first = self.ends(influence), jax.tree.map(jnp.zeros_like, of_lanes)
        rows = self.rows, stored
        (begin, totals), (d_rows, means) = jax.lax.scan(step, first, rows, reverse=True)
        if not self.has_known_h:
            d_rows = d_rows._replace(h=ops.by_row(d_rows.h))
        d_rows = jax.tree.map(self.parts.joined, d_rows)
        if self.has_equal_h and not self.has_known_h:
            d_rows = d_rows._replace(h=jnp.sum(d_rows.h, axis=0))

        def prior(arrays: Any, time: Array) -> Any:
            return single_lane(eqx.combine(arrays, static).covariance(time))

        matrices, pull_back = jax.vjp(prior, arrays, self.first_time)
        r, N = jax.tree.map(lambda leaf: leaf[..., :1], tuple(begin))
        S = ops.add(ops.outer(r, r), ops.scale(ops.unpack(N), -1.0))
        of_prior, d_time = pull_back(ops.to_blocks(ops.scale(S, 0.5), matrices))
        d_form = jax.tree.map(lambda a, b: jnp.sum(a, axis=0) + b, totals, of_prior)
        means = self.parts.joined(means)
        return self._with_warning(total, loss), Derivatives(d_form, d_time, d_rows), means

    def smoothed(self) -> Smoothed:
        """The moments of each row; see `Smoothed`."""
        ops = self.algebra
        total, loss, stored, influence = self.filter_and_store(self.starts())
        self._with_warning(total, loss)

        def step(later: Moments, inputs: tuple[Rows, Moments]) -> tuple[Moments, Any]:
            row, before = inputs
            after, _, (A, _, h, m, P, gain, inverse, error, _) = self._filtered(before, row)
            r, N, u, D, _ = self._before_observing(later, h, m, P, gain, inverse, error)
            transposed = ops.transpose(A)
            earlier = Moments(ops.times(transposed, r), ops.pack(ops.congruence(transposed, N)))
            return earlier, ((*after, r, ops.pack(N)), (u, D))

        rows = self.rows, stored
        vectors, numbers = jax.lax.scan(step, self.ends(influence), rows, reverse=True)[1]
        return Smoothed(*map(self.parts.joined, (*map(ops.by_row, vectors), *numbers)))

    def at_rows(self, *, variances: bool = True) -> AtRows:
        """Moments of the function at the rows; see `AtRows`."""
        ops = self.algebra
        starts = self.starts()
        _, loss, stored, influence = self.filter_and_store(starts, with_information=variances)

        def step(later: Moments, inputs: tuple[Rows, Moments]) -> tuple[Moments, Any]:
            row, before = inputs
            _, variance, (A, _, h, m, P, gain, inverse, error, _) = self._filtered(before, row)
            transposed, noise = ops.transpose(A), self._noise(row)
            log_ratio = row.weight * jnp.log(variance / noise)
            if variances:
                # Of f with the state, given this and earlier rows.
                g = ops.scale(gain, noise)
                reduction = ops.dot(g, ops.times(ops.unpack(later.covariance), g))
                of_f = remaining_variance(ops.dot(h, g), reduction)
                r, N, u, *_ = self._before_observing(later, h, m, P, gain, inverse, error)
                N = ops.pack(ops.congruence(transposed, N))
            else:
                u = error * inverse - ops.dot(gain, later.mean)
                r, N, of_f = ops.add(later.mean, ops.scale(h, u)), None, None
            mean = ops.dot(h, ops.add(m, ops.times(P, r)))
            return Moments(ops.times(transposed, r), N), (u, mean, of_f, log_ratio)

        rows = self.rows, stored
        last = self.ends(influence, with_information=variances)
        results = jax.lax.scan(step, last, rows, reverse=True)[1]
        weights, means, of_f, log_ratio = jax.tree.map(self.parts.joined, results)
        return AtRows(weights, means, of_f, jnp.sum(log_ratio), loss)

    def _before_observing(
        self, later: Moments, h: Any, m: Any, P: Any, gain: Any, inverse: Array, error: Array
    ) -> tuple[Any, Any, Array, Array, Any]:
        """The r and N before a row is observed, the derivatives of its y, noise and h."""
        ops = self.algebra
        r, N = later.mean, ops.unpack(later.covariance)
        Nk = ops.times(N, gain)
        u = error * inverse - ops.dot(gain, r)  # an entry of H^-1 y
        D = inverse + ops.dot(gain, Nk)  # a diagonal entry of H^-1
        r = ops.add(r, ops.scale(h, u))
        change = ops.add(ops.scale(h, 0.5 * D), ops.scale(Nk, -1.0))
        N = ops.add(N, ops.outer(h, change), ops.outer(change, h))
        smoothed = ops.add(m, ops.times(P, r))
        rest = ops.times(P, ops.add(ops.scale(h, D), ops.scale(Nk, -1.0)))
        d_h = ops.add(ops.scale(smoothed, u), ops.scale(rest, -1.0))
        return r, N, u, D, d_h
