"""Observations whose likelihood has a normal variable each, which is integrated out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float, Num

from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.core.quadrature import normal_nodes

_NUM_NODES = 32


class LikelihoodUnderNormal(dist.Distribution):
    """Observations each of which depends on a normal variable: p(y) = E[p(y | f)].

    Args:
        likelihood: maps values of f to a distribution of one observation for each.
        f: the normal variables.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("likelihood", "f")

    def __init__(self, likelihood: RowsFunction, f: dist.Normal) -> None:
        self.likelihood, self.f = likelihood, f
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
        """Log densities, shape (..., n), by Gauss-Hermite quadrature at 32 nodes."""
        y = jnp.asarray(value)
        densities, weights = self._at_nodes(lambda likelihood: likelihood.log_prob(y))
        return jax.nn.logsumexp(densities, axis=0, b=weights)

    @property
    def mean(self) -> Float[Array, "..."]:
        """The mean, by quadrature."""
        means, weights = self._at_nodes(lambda likelihood: likelihood.mean)
        return jnp.sum(weights * means, axis=0)

    @property
    def variance(self) -> Float[Array, "..."]:
        """The variance, by quadrature."""
        means, weights = self._at_nodes(lambda likelihood: likelihood.mean)
        variances, _ = self._at_nodes(lambda likelihood: likelihood.variance)
        spread = jnp.square(means - jnp.sum(weights * means, axis=0))
        return jnp.sum(weights * (variances + spread), axis=0)

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
