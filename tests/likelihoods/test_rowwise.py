"""Proofs that likelihoods combine no rows, against perturbations of single rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_scalegp.likelihoods import probing
from numpyro_scalegp.likelihoods.rowwise import Kind, claims_of_results

N = 6
Y = np.arange(N) % 2
PLACES = np.array([3, 1, 1, 0, 5, 2])

# Likelihoods of single rows, which the proof covers.
OF_ROWS = {
    "normal": lambda f: dist.Normal(f, 0.3).log_prob(0.5 * Y),
    "poisson": lambda f: dist.Poisson(jnp.exp(f)).log_prob(Y),
    "student": lambda f: dist.StudentT(3.0, f, 0.2).log_prob(0.5 * Y),
    "bernoulli": lambda f: dist.Bernoulli(logits=f).log_prob(Y),
    "binomial": lambda f: dist.Binomial(5, logits=f).log_prob(Y),
    "negative binomial": lambda f: dist.NegativeBinomial2(jnp.exp(f), 3.0).log_prob(Y),
    "gamma": lambda f: dist.Gamma(2.0, jnp.exp(f)).log_prob(Y + 0.5),
    "beta": lambda f: dist.BetaProportion(jax.nn.sigmoid(f), 3.0).log_prob(0.3 * Y + 0.2),
    "zero inflated": lambda f: dist.ZeroInflatedPoisson(0.2, jnp.exp(f)).log_prob(Y),
    "log normal": lambda f: dist.LogNormal(f, 0.3).log_prob(Y + 0.5),
    "truncated": lambda f: dist.TruncatedNormal(f, 1.0, low=0.0).log_prob(Y + 0.1),
    "masked": lambda f: dist.Normal(f, 1.0).mask(Y > 0).log_prob(Y),
    "categories": lambda f: dist.Categorical(logits=jnp.stack([f, 2 * f], -1)).log_prob(Y),
    "transposed": lambda f: jnp.max(jnp.stack([f, 2 * f]).T, axis=1) ** 2,
    "reshaped": lambda f: jnp.exp(f.reshape(1, N, 1)).reshape(N),
    "cumulative over copies": lambda f: jnp.cumprod(jnp.stack([f, 2 * f]), axis=0)[1],
}
# Programs whose entries combine rows, some only by sums.
COMBINING = {
    "softmax": lambda f: dist.Categorical(logits=f).log_prob(Y),
    "differences": lambda f: (f[1:] - f[:-1]) ** 2,
    "center": lambda f: (f - jnp.mean(f)) ** 2,
    "cumulative": lambda f: jnp.exp(jnp.cumsum(f)),
    "sorted": jnp.sort,
    "reversed": lambda f: f * f[::-1],
    "outer": lambda f: f[:, None] * f[None],
    "rolled": lambda f: f * jnp.roll(f, 1),
    "matrix": lambda f: jnp.exp(np.ones((3, N)) @ f),
    "largest": jnp.max,
    "gathered": lambda f: f * f[PLACES],
    "chosen": lambda f: jnp.where(f[::-1] > 0, f, 0.0),
    "square of a sum": lambda f: jnp.sum(f) ** 2,
    "product of sums": lambda f: jnp.sum(f) * jnp.sum(jnp.exp(f)),
    "quotient": lambda f: f / jnp.sum(f),
    "log of a sum": lambda f: jnp.log(jnp.sum(jnp.exp(f))),
    "loop": lambda f: jax.lax.scan(lambda c, x: (c * x, c), 1.0, f)[1],
    "square of a dot product": lambda f: jnp.dot(f, f) ** 2,
    "reshaped": lambda f: jnp.prod(f.reshape(2, 3), axis=1),
    "in another order": lambda f: (f[:, None] + f[0] * np.eye(N)).reshape((N, N), order="F") * f,
    "in another order, without sums": lambda f: (
        jnp.exp(f[:, None] + np.arange(N)).reshape((N, N), order="F") * f[None]
    ),
    "halves of a count": lambda f: (jnp.sum(f > 0.5, dtype=int) // 2).astype(float),
    "a count that wraps around": lambda f: jnp.sum(
        (f > 0.5).astype(jnp.int8) * jnp.int8(100), dtype=jnp.int8
    ).astype(float),
    "chosen by rows": lambda f: (
        jnp.take_along_axis(
            np.arange(2.0 * N * N * 3).reshape(2, N, N, 3) ** 1.5,
            jnp.broadcast_to((3 * f).astype(int)[None, None, :, None], (1, N, N, 1)),
            axis=3,
        )
        * f[None, :, None, None]
    ),
    "rounded sum": lambda f: jnp.sum(f).astype(int),
}


def kinds(function):
    closed = jax.make_jaxpr(lambda f: (function(f), jnp.sum(function(f))))(jnp.full(N, 0.3))
    return [claim.kind for claim in claims_of_results(closed.jaxpr, (0,))]


@pytest.mark.parametrize("name", OF_ROWS)
def test_likelihoods_of_single_rows_are_proved(name):
    assert kinds(OF_ROWS[name]) == [Kind.ROWS, Kind.SUM]


@pytest.mark.parametrize("name", COMBINING)
def test_combinations_are_not_proved(name):
    assert kinds(COMBINING[name]) == [Kind.OTHER, Kind.OTHER]


@pytest.mark.parametrize("name", [*OF_ROWS, *COMBINING])
def test_claims_hold(name, x64):
    """A sum over rows has no mixed differences; an entry of rows changes with one row alone."""
    function = {**OF_ROWS, **COMBINING}[name]
    of_entries, of_sum = kinds(function)
    if of_sum == Kind.OTHER:
        return  # nothing is claimed
    rng = np.random.default_rng(0)
    f, g = rng.uniform(0.2, 0.8, size=(2, N))
    for i in range(N):
        with_i = np.where(np.arange(N) == i, g, f)
        if of_entries == Kind.ROWS:
            changed = np.asarray(function(with_i)) != np.asarray(function(f))
            assert changed.shape == (N,)
            assert not np.any(np.delete(changed, i))
        for j in range(i) if of_sum <= Kind.SUM else ():
            with_j = np.where(np.arange(N) == j, g, f)
            with_i_and_j = np.where(np.arange(N) == j, g, with_i)
            totals = [
                float(jnp.sum(function(values))) for values in (with_i_and_j, with_i, with_j, f)
            ]
            np.testing.assert_allclose(np.dot(totals, [1, -1, -1, 1]), 0.0, atol=1e-10)


def test_a_proof_saves_all_evaluations(monkeypatch):
    monkeypatch.setattr(probing, "standing_in", None)
    for name, function in OF_ROWS.items():
        closed = jax.make_jaxpr(function)(jnp.full(N, 0.3))
        assert probing.Probes(closed).combining(0, np.arange(N)) == set(), name
        assert probing.Probes(closed).mixing(0, np.arange(N)) == set(), name
