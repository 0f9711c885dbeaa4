"""Filter and smoother of a function of time at p places, a matrix update for each time.

The covariance is a sum of products of a kernel of time, with a state of s_j numbers, and a kernel
of the places. The state of the sum is an (s, p) array x, s = sum_j s_j, and f = h'x at the places.
Transitions act on its first axis; each time has p observations or fewer. The smoother is the one of
`state_space.passes`, with p x p matrices in place of numbers.

Memory is for sqrt(n_t) states: what lies between is computed again.

References:
    Hartikainen and Sarkka (2011), Sequential Inference for Latent Force Models; Sarkka, Solin and
    Hartikainen (2013), Spatiotemporal Learning via Infinite-Dimensional Bayesian Filtering and
    Smoothing; de Jong (1989), Smoothing and Interpolation with the State-Space Model.
"""

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from numpyro_scalegp.integrated.state_space.matrices import Arrays
from numpyro_scalegp.kernels.state_space import AbstractStateSpace
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.linalg import matmul
from numpyro_scalegp.numerics.rounding import remaining_variance


class Prior(eqx.Module):
    """A sum of products of a process of time and a covariance of places."""

    forms: tuple[AbstractStateSpace, ...]
    places: tuple[Float[Array, "p p"], ...]  # the covariance of each term

    @property
    def terms(self) -> tuple[int, ...]:
        """The term of each state variable."""
        return tuple(j for j, form in enumerate(self.forms) for _ in range(form.size))

    @property
    def place_covariances(self) -> Float[Array, "s p p"]:
        """The covariance of the places for each state variable."""
        return jnp.stack([self.places[j] for j in self.terms])

    def covariance(self, time: Float[Array, ""]) -> Float[Array, "s s"]:
        """The covariance of the state variables at one place of variance one."""
        return Arrays.from_blocks(sum((form.covariance(time) for form in self.forms), ()))

    def transition(
        self, start: Float[Array, ""], elapsed: Float[Array, ""]
    ) -> tuple[Float[Array, "s s"], Float[Array, "s s"]]:
        """The matrices A and Q of a transition, as for `covariance`."""
        transitions = [form.transition(start, elapsed) for form in self.forms]
        blocks = (sum(parts, ()) for parts in zip(*transitions, strict=True))
        A, Q = map(Arrays.from_blocks, blocks)
        return A, Q

    def observation(self, times: Float[Array, "n_t one"]) -> Float[Array, "n_t s"]:
        """The vector h of each time."""
        return jnp.concatenate([form.observation(times) for form in self.forms], axis=1)


class Times(NamedTuple):
    """What happens at each time; the first axis of each array is time."""

    A: Float[Array, "*n_t s s"]
    Q: Float[Array, "*n_t s s"]
    h: Float[Array, "*n_t s"]
    y: Float[Array, "*n_t p k"]
    noise: Float[Array, "*n_t p"]
    weight: Float[Array, "*n_t p"]  # 1 if observed, 0 otherwise
    target_h: Float[Array, "*n_t s"]  # of the function whose moments are wanted


class State(NamedTuple):
    """Mean and covariance of the state, or r and N."""

    mean: Float[Array, "s p k"]
    covariance: Float[Array, "s p s p"]


class _Observed(NamedTuple):
    """A time's update, with L L' = F the covariance of its observations."""

    white: Float[Array, "p s_p"]  # L^-1 H P
    error: Float[Array, "p k"]  # L^-1 (y - H m)
    log_scale: Float[Array, ""]  # the sum of log diag(L)
    inverse: Float[Array, "p p"]  # L^-1, with zeros in columns without an observation


class Smoothed(NamedTuple):
    """Moments at each time, and what leave-one-out needs."""

    means: Float[Array, "n_t q k"]
    variances: Float[Array, "n_t q"] | None  # without what the places do not determine
    weights: Float[Array, "n_t p k"]  # H^-1 y
    precisions: Float[Array, "n_t p"] | None  # the diagonal of H^-1


def rows(
    prior: Prior,
    times: Float[Array, " n_t"],
    y: Float[Array, "n_t p k"],
    noise: Float[Array, "n_t p"],
    weight: Float[Array, "n_t p"],
    h: Float[Array, "n_t s"],
    target_h: Float[Array, "n_t s"],
) -> tuple[State, Times]:
    """The state before the first of sorted times, and what follows, in about sqrt(n_t) parts."""
    n_t, p, k = y.shape
    length = math.isqrt(n_t - 1) + 1
    missing = -n_t % length

    def parts(values: Array, *, repeat: bool = False) -> Array:
        around = ((0, missing), *[(0, 0)] * (values.ndim - 1))
        padded = jnp.pad(values, around, mode="edge" if repeat else "constant")
        return padded.reshape(-1, length, *values.shape[1:])

    padded = parts(times, repeat=True).ravel()
    before = jnp.concatenate([padded[:1], padded[:-1]])
    A, Q = jax.vmap(prior.transition)(before, padded - before)
    A, Q = (values.reshape(-1, length, *values.shape[1:]) for values in (A, Q))
    first = prior.covariance(times[0])
    covariance = _spread(first, prior.place_covariances)
    state = State(jnp.zeros((len(first), p, k), y.dtype), covariance.astype(y.dtype))
    values = h, jnp.where(weight[..., None] > 0.0, y, 0.0), noise, weight, target_h
    return state, Times(A, Q, *map(parts, values))


def _spread(Q: Float[Array, "s s"], places: Float[Array, "s p p"]) -> Float[Array, "s p s p"]:
    """The covariance over places of a covariance of the state variables."""
    return Q[:, None, :, None] * places[:, :, None, :]


def _apply(A: Float[Array, "s s"], x: Float[Array, "s *rest"]) -> Float[Array, "s *rest"]:
    return matmul(A, x.reshape(len(A), -1)).reshape(x.shape)


def _congruence(A: Float[Array, "s s"], P: Float[Array, "s p s p"]) -> Float[Array, "s p s p"]:
    """A P A', on the state variables."""
    right = jnp.einsum("apcq,dc->apdq", P, A, precision="highest")
    return _apply(A, right)


def _predicted(state: State, row: Times, places: Float[Array, "s p p"]) -> State:
    covariance = _congruence(row.A, state.covariance) + _spread(row.Q, places)
    return State(_apply(row.A, state.mean), covariance)


def _observed(state: State, row: Times) -> _Observed:
    s, p, k = state.mean.shape
    of_f = matmul(row.h[None], state.covariance.reshape(s, -1)).reshape(p, s, p)
    F = jnp.einsum("psq,s->pq", of_f, row.h, precision="highest")
    weight = row.weight
    F = weight[:, None] * F * weight + jnp.diag(jnp.where(weight > 0.0, row.noise, 1.0))
    L = jnp.linalg.cholesky(F)
    error = row.y - matmul(row.h[None], state.mean.reshape(s, -1)).reshape(p, k)
    inverse = solve_triangular(L, jnp.diag(weight), lower=True)
    white = matmul(inverse, of_f.reshape(p, s * p))
    return _Observed(white, matmul(inverse, error), jnp.sum(jnp.log(jnp.diagonal(L))), inverse)


def _updated(state: State, observed: _Observed) -> State:
    shape = state.covariance.shape
    change = matmul(observed.white.T, observed.white)
    mean = state.mean + matmul(observed.white.T, observed.error).reshape(state.mean.shape)
    return State(mean, state.covariance - change.reshape(shape))


@jax.jit
def log_density(places: Float[Array, "s p p"], first: State, times: Times) -> Float[Array, " k"]:
    """The log density of each column of y, in O(n_t (s p)^3) at most.

    Differentiable to any order. A gradient passes twice over the times, with the memory of
    sqrt(n_t) states.

    Args:
        places: the covariance of the places for each state variable.
        first: the state before the first time.
        times: as `rows` makes them.
    """

    def step(carry: Any, row: Times) -> tuple[Any, None]:
        state, total = carry
        predicted = _predicted(state, row, places)
        observed = _observed(predicted, row)
        total = total - 0.5 * jnp.sum(jnp.square(observed.error), axis=0) - observed.log_scale
        return (_updated(predicted, observed), total), None

    @jax.checkpoint
    def steps(carry: Any, rows: Times) -> tuple[Any, None]:
        return jax.lax.scan(step, carry, rows)

    start = first, jnp.zeros(first.mean.shape[2], first.mean.dtype)
    (_, total), _ = jax.lax.scan(steps, start, times)
    total = total - 0.5 * jnp.sum(times.weight) * math.log(2.0 * math.pi)
    works = ~jnp.any(jnp.isnan(jax.lax.stop_gradient(total)))
    linalg.warn_of_steps(works, jnp.zeros((), jnp.int32))
    return total


@functools.partial(jax.jit, static_argnames=("num_times", "variances"))
def smooth(
    places: Float[Array, "s p p"],
    first: State,
    times: Times,
    readout: Float[Array, "s q p"],
    num_times: int,
    *,
    variances: bool = True,
) -> Smoothed:
    """Moments at each time of values that are linear in the state at the places.

    Args:
        places: the covariance of the places for each state variable.
        first: the state before the first time.
        times: as `rows` makes them.
        readout: the coefficients of the values, for each state variable of h = 1.
        num_times: the number of times, before `rows` filled the last part.
        variances: whether to compute variances, which take most of the time.
    """
    s, p = places.shape[:2]

    def forward(state: State, row: Times) -> tuple[State, State]:
        predicted = _predicted(state, row, places)
        return _updated(predicted, _observed(predicted, row)), predicted

    def backward(later: Any, inputs: tuple[Times, State]) -> tuple[Any, Any]:
        row, predicted = inputs
        white, error, _, inverse = _observed(predicted, row)
        r, N = later
        G = (inverse[:, None, :] * row.h[None, :, None]).reshape(p, s * p)  # L^-1 H
        flat = r.reshape(s * p, -1)
        scores = error - matmul(white, flat)
        flat = flat + matmul(G.T, scores)
        weights = matmul(inverse.T, scores)
        C = (row.target_h[:, None, None] * readout).swapaxes(0, 1).reshape(-1, s * p)
        P = predicted.covariance.reshape(s * p, s * p)
        CP = matmul(C, P)
        means = matmul(C, predicted.mean.reshape(s * p, -1)) + matmul(CP, flat)
        of_f = precisions = None
        if N is not None:
            N = N.reshape(s * p, s * p)
            product = matmul(white, N)
            M = matmul(product, white.T) + jnp.eye(p, dtype=white.dtype)
            change = matmul(G.T, 0.5 * matmul(M, G) - product)
            N = N + change + change.T
            explained = jnp.sum(matmul(CP, N) * CP, axis=1)
            of_f = remaining_variance(jnp.sum(CP * C, axis=1), explained)
            precisions = jnp.sum(matmul(M, inverse) * inverse, axis=0)
            N = _congruence(row.A.T, N.reshape(s, p, s, p))
        earlier = _apply(row.A.T, flat.reshape(r.shape)), N
        return earlier, (means, of_f, weights, precisions)

    def part_forward(state: State, rows: Times) -> tuple[State, State]:
        return jax.lax.scan(forward, state, rows)[0], state

    def part_backward(later: Any, inputs: tuple[Times, State]) -> tuple[Any, Any]:
        rows, start = inputs
        predicted = jax.lax.scan(forward, start, rows)[1]
        return jax.lax.scan(backward, later, (rows, predicted), reverse=True)

    starts = jax.lax.scan(part_forward, first, times)[1]
    last = jnp.zeros_like(first.mean), jnp.zeros_like(first.covariance) if variances else None
    results = jax.lax.scan(part_backward, last, (times, starts), reverse=True)[1]

    def joined(values: Any) -> Any:
        return None if values is None else jax.lax.collapse(values, 0, 2)[:num_times]

    means, of_f, weights, precisions = results
    return Smoothed(joined(means), joined(of_f), joined(weights), joined(precisions))


def draw(
    key: Array,
    prior: Prior,
    times: Float[Array, " n_t"],
    h: tuple[Float[Array, "n_t s"], ...],
    factors: tuple[Float[Array, "p p"], ...],
    num_samples: int,
) -> tuple[Float[Array, "num_samples n_t p"], ...]:
    """Draw functions at sorted times and all places.

    Args:
        key: a typed JAX key.
        prior: of the function.
        times: shape (n_t,).
        h: the vectors of each of the functions that are wanted, such as the sum and a component.
        factors: the lower factor of the covariance of each term's places.
        num_samples: number of draws.

    Returns:
        The draws of each function, in O(n_t p^2 s) for each sample.
    """
    L = jnp.stack([factors[j] for j in prior.terms])
    shape, dtype = (len(L), L.shape[1], num_samples), L.dtype
    first_key, key = jax.random.split(key)

    def spread(C: Float[Array, "s s"], key: Array) -> Float[Array, "s p num_samples"]:
        """Draws with the covariance of state variables and places."""
        normal = jnp.einsum(
            "spq,sqk->spk", L, jax.random.normal(key, shape, dtype), precision="highest"
        )
        return _apply(Arrays.factor(C[..., None].astype(dtype))[..., 0], normal)

    def step(state: Array, row: Any) -> tuple[Array, tuple[Array, ...]]:
        start, elapsed, key, vectors = row
        A, Q = prior.transition(start, elapsed)
        state = _apply(A, state) + spread(Q, key)
        values = (jnp.einsum("s,spk->kp", vector, state, precision="highest") for vector in vectors)
        return state, tuple(values)

    before = jnp.concatenate([times[:1], times[:-1]])
    keys = jax.random.split(key, len(times))
    first = spread(prior.covariance(times[0]), first_key)
    values = jax.lax.scan(step, first, (before, times - before, keys, h))[1]
    return tuple(jnp.swapaxes(value, 0, 1) for value in values)
