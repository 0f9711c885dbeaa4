"""Expectations of a model's terms under independent normal functions: what is integrated, and how.

A term is a sum over rows. With f_1, f_2, ... the functions at a row, it is one of three kinds:

- a sum of g_q(f_q): a one-dimensional Gauss-Hermite rule, whose nodes all functions share;
- g(a_0 + a_1 f_1 + a_2 f_2 + ...), or a sum of such, as over outputs that a matrix mixes: the same
  rule for each combination, which is normal with mean a_0 + sum_q a_q m_q and variance
  sum_q a_q^2 v_q;
- anything else: all pairs of nodes if it combines two, and otherwise randomized quasi-Monte Carlo.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core.additivity import function_axes, separable
from numpyro_scalegp.core.quadrature import (
    Nodes,
    normal_expectation,
    product_nodes,
    shifted_nodes,
)
from numpyro_scalegp.tracing.affine import Cut, affine_cut, evaluated
from numpyro_scalegp.tracing.runs import Staged

Moments = tuple[Float[Array, "..."], Float[Array, "..."]]
Axes = tuple[int, ...]  # of a variable's leading dimensions, flattened, or of all its entries


class _Rule(NamedTuple):
    """Normal variables that decide a term, and the axes of nodes on which they vary."""

    cut: Cut
    axes: tuple[Axes, ...]

    def num_axes(self) -> int:
        return 1 + max(map(max, self.axes), default=-1)


class ExpectedTerms:
    """The terms of a bound, in expectation over independent normal functions.

    How they depend on the functions is found on the host, once where a step is compiled.

    Args:
        run: the model; its first result is a dict of terms, its arguments are the functions.
        means: the functions' means, by name, each of shape (*batch, n).

    Raises:
        ValueError: if a term combines rows of a function, or none depends on one.
    """

    def __init__(self, run: Staged, means: dict[str, Float[Array, "..."]]) -> None:
        self.program = run.program
        self.terms = run.variables()[0]
        cuts = {name: affine_cut(self.program.jaxpr, term) for name, term in self.terms.items()}
        dependent = [name for name, cut in cuts.items() if cut.variables]

        def of_functions(functions: dict[str, Array]) -> dict[str, Array]:
            given = dict(zip(self._inputs, functions.values(), strict=True))
            found = evaluated(self.program, given, [self.terms[name] for name in dependent])
            return dict(zip(dependent, found, strict=True))

        if not dependent:
            sites = ", ".join(f"`{name}`" for name in means)
            raise ValueError(
                f"no term of the model depends on a function of its guide ({sites}): give what "
                "`numpyro.sample` returns for it to the likelihood, as in dist.Normal(f, noise)."
            )
        axes = function_axes(of_functions, means)
        rules = {name: self._by_function(cuts[name], axes[name]) for name in dependent}
        fewer = {n: cuts[n] for n in dependent if len(cuts[n].variables) < rules[n].num_axes()}
        for name in self._separable(fewer):
            each = tuple((axis,) for axis in range(len(fewer[name].variables)))
            rules[name] = _Rule(fewer[name], each)
        self.groups: dict[_Rule, list[str]] = {}
        for name, rule in rules.items():
            self.groups.setdefault(rule, []).append(name)
        # What depends on no function has the same value at all nodes.
        next(iter(self.groups.values())).extend(name for name in cuts if name not in rules)
        self.axes = {site: max(axes[name][site] for name in dependent) for site in means}

    @property
    def _inputs(self) -> list[Any]:
        return self.program.jaxpr.invars

    def _by_function(self, cut: Cut, axes: dict[str, Axes]) -> _Rule:
        """Each function that a term depends on, on an axis with others as far as it may be."""
        places = sorted(frozenset().union(*cut.arguments))
        found: list[Axes] = []
        start = 0
        for place in places:
            own = list(axes.values())[place]
            found.append((start,) if not any(own) else tuple(start + axis for axis in own))
            start = 1 + max(found[-1])
        variables = tuple(self._inputs[place] for place in places)
        return _Rule(Cut(variables, tuple(frozenset([place]) for place in places)), tuple(found))

    def _separable(self, cuts: dict[str, Cut]) -> list[str]:
        """The terms that are sums over the entries of each variable of their cuts."""
        if not cuts:
            return []
        owners = [name for name, cut in cuts.items() for _ in cut.variables]

        def of_variables(*values: Array) -> list[Array]:
            rest = iter(values)
            given = [dict(zip(cut.variables, rest, strict=False)) for cut in cuts.values()]
            return [
                evaluated(self.program, one, [self.terms[name]])[0]
                for name, one in zip(cuts, given, strict=True)
            ]

        like = [jnp.zeros(v.aval.shape, v.aval.dtype) for c in cuts.values() for v in c.variables]
        sums = separable(of_variables, like)
        failed = {
            name
            for name, own in zip(owners, sums, strict=True)
            if list(cuts).index(name) not in own
        }
        return [name for name in cuts if name not in failed]

    def __call__(
        self, key: Key[Array, ""], moments: dict[str, Moments], num_nodes: int, num_points: int
    ) -> Float[Array, ""]:
        """The expectation of the sum of all terms.

        Args:
            key: for the terms that combine more than two variables.
            moments: means and variances of the functions.
            num_nodes: of the Gauss-Hermite rules.
            num_points: of quasi-Monte Carlo.
        """
        pairs = list(moments.values())
        means = dict(zip(self._inputs, (mean for mean, _ in pairs), strict=True))
        total = jnp.zeros(())
        for number, (rule, names) in enumerate(self.groups.items()):
            wanted = [self.terms[name] for name in names]

            def summed(
                *values: Array, rule: _Rule = rule, wanted: list[Any] = wanted
            ) -> Float[Array, ""]:
                typed = {
                    variable: jnp.asarray(value, variable.aval.dtype)
                    for variable, value in zip(rule.cut.variables, values, strict=True)
                }
                terms = evaluated(self.program, {**means, **typed}, wanted)
                return sum(map(jnp.sum, terms), jnp.zeros(()))

            own = [
                self._moments(variable, sorted(places), pairs)
                for variable, places in zip(*rule.cut, strict=True)
            ]
            nodes: Nodes
            if rule.num_axes() <= 2:
                nodes = product_nodes(num_nodes, rule.num_axes())
            else:
                dtype = jnp.result_type(*(mean for mean, _ in own))
                of_rule = jax.random.fold_in(key, number)
                nodes = shifted_nodes(of_rule, num_points, rule.num_axes(), dtype)
            total += normal_expectation(summed, own, nodes, rule.axes)
        return total

    def _moments(self, variable: Any, places: list[int], pairs: list[Moments]) -> Moments:
        """Mean and variance of each entry of a variable that is affine in some functions."""
        inputs = [self._inputs[place] for place in places]
        if variable in inputs:
            return pairs[places[0]]

        def of_functions(*functions: Array) -> Array:
            given = dict(zip(inputs, functions, strict=True))
            return evaluated(self.program, given, [variable])[0]

        own = [pairs[place] for place in places]
        means = [mean for mean, _ in own]
        mean, linear = jax.linearize(of_functions, *means)
        zeros = [jnp.zeros_like(one) for one in means]
        variance = jnp.zeros_like(mean)
        for place, (one, var) in enumerate(own):
            # All rows of a function at once: an entry depends on one of them.
            size = math.prod(one.shape[:-1])
            alone = jnp.eye(size, dtype=one.dtype).reshape(size, *one.shape[:-1], 1)
            scale = jnp.sqrt(jnp.maximum(var, jnp.finfo(var.dtype).tiny)).astype(one.dtype)

            def contribution(values: Array, place: int = place) -> Array:
                return linear(*zeros[:place], values, *zeros[place + 1 :])

            variance += jnp.sum(jnp.square(jax.vmap(contribution)(alone * scale)), axis=0)
        return mean, variance
