"""Observations whose likelihood has a normal variable each, which is integrated out."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float, Num

from numpyro_scalegp.core.functions import RowsFunction, as_pytree
from numpyro_scalegp.core.log_expectation import log_expectation
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.core.quadrature import normal_nodes

_NUM_NODES = 32


class LikelihoodUnderNormal(dist.Distribution):
    """Observations each of which depends on a normal variable: p(y) = E[p(y | f)].

    Args:
        likelihood: maps values of f, shape (*batch, n), to a distribution of one observation for
            each.
        f: the normal variables.
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
        """That of the likelihood."""
        return self.likelihood(self.f.loc).support

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Num[Array, "..."]:
        """Draw the normal variables, and observations given these."""
        function_key, key = jax.random.split(key)
        return self.likelihood(self.f.sample(function_key, sample_shape)).sample(key)

    def log_prob(
        self, value: Num[ArrayLike, "..."], intermediates: list | None = None
    ) -> Float[Array, "..."]:
        """Log densities, shape (..., n), by adaptive quadrature; see `log_expectation`.

        In some 1,000 to 5,000 evaluations of the likelihood for each of them.
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
        """What a function gives for the likelihood at each node, and the nodes' weights."""
        nodes, weights = normal_nodes(_NUM_NODES)
        loc, scale = self.f.loc, self.f.scale
        places = jnp.asarray(nodes, loc.dtype)
        found = jax.lax.map(lambda node: function(self.likelihood(loc + scale * node)), places)
        weights = weights.reshape(-1, *[1] * (found.ndim - 1))
        return found, jnp.asarray(weights, loc.dtype)


def as_likelihood(function: RowsFunction | Callable[[Array], dist.Distribution]) -> RowsFunction:
    """Wrap a likelihood, which takes the function's values at all rows, also if a network."""
    return dataclasses.replace(as_pytree(function, "likelihood"), maps_single_rows=False)


def _entries(f: Float[Array, "..."], data: Any) -> Float[Array, "..."]:
    likelihood, y = data
    return likelihood(f).log_prob(y)
