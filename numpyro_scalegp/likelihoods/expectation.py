"""Expectations of a model's terms over independent normal functions.

A term is a sum over rows. With f_1, f_2, ... the functions at a row, there are three cases:

- sum_q g_q(f_q): a one-dimensional Gauss-Hermite rule, whose nodes all functions share;
- g(a_0 + a_1 f_1 + a_2 f_2 + ...), or a sum of such terms, as over outputs mixed by a matrix: the
  same rule for each affine combination, which is normal with mean a_0 + sum_q a_q m_q and variance
  sum_q a_q^2 v_q;
- otherwise: all pairs of nodes for two variables, and randomized quasi-Monte Carlo for more.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from numpyro_scalegp.likelihoods.dependence import (
    AffineInputs,
    Axes,
    Degree,
    DependenceTable,
)
from numpyro_scalegp.likelihoods.quadrature import (
    Nodes,
    normal_expectation,
    product_nodes,
    shifted_nodes,
)
from numpyro_scalegp.numerics.rounding import at_least
from numpyro_scalegp.tracing.runs import TracedProgram

# The number of nodes if no number is exact.
_NUM_NODES = 20

Moments = tuple[Float[Array, "..."], Float[Array, "..."]]


class _Rule(NamedTuple):
    """Normal variables that determine a term, and their axes among the quadrature nodes."""

    inputs: AffineInputs
    axes: tuple[Axes, ...]

    def num_axes(self) -> int:
        return 1 + max(map(max, self.axes), default=-1)


class ExpectedTerms:
    """The terms of a bound, in expectation over independent normal functions.

    Their dependence on the functions is determined on the host, once, when a step is compiled.

    Args:
        run: the model, from the functions to results of which the first is a dict of terms.
        means: the functions' means, by name, each of shape (*batch, n).

    Raises:
        ValueError: if a term combines rows of a function, or no term depends on a function.
    """

    def __init__(self, run: TracedProgram, means: dict[str, Float[Array, "..."]]) -> None:
        self.table = DependenceTable(run, run.variables()[0], means)
        dependent = self.table.dependent
        if not dependent:
            sites = ", ".join(f"`{name}`" for name in means)
            raise ValueError(
                f"no term of the model depends on a function of its guide ({sites}): give what "
                "`numpyro.sample` returns for it to the likelihood, as in dist.Normal(f, noise)."
            )
        axes = self.table.axes()
        rules = {name: self._by_function(name, axes[name]) for name in dependent}
        affine = {name: self.table.affine_inputs(name) for name in dependent}
        fewer = {
            name: inputs
            for name, inputs in affine.items()
            if len(inputs.variables) < rules[name].num_axes()
        }
        for name in self.table.separable(fewer):
            one_axis_each = tuple((axis,) for axis in range(len(fewer[name].variables)))
            rules[name] = _Rule(fewer[name], one_axis_each)
        self.groups: dict[_Rule, list[str]] = {}
        for name, rule in rules.items():
            self.groups.setdefault(rule, []).append(name)
        # Terms that depend on no function are constant over nodes, so any rule works for them.
        constant = [name for name in self.table.terms if name not in rules]
        next(iter(self.groups.values())).extend(constant)
        self.axes = {site: max(axes[name][site] for name in dependent) for site in means}

    def _by_function(self, name: str, axes: dict[str, Axes]) -> _Rule:
        """The rule whose variables are the functions, with as few axes as their plates allow."""
        places = sorted(self.table.of(self.table.terms[name]).arguments)
        shifted: list[Axes] = []
        start = 0
        for place in places:
            of_site = list(axes.values())[place]
            shifted.append((start,) if not any(of_site) else tuple(start + a for a in of_site))
            start = 1 + max(shifted[-1])
        variables = tuple(self.table.inputs[place] for place in places)
        inputs = AffineInputs(variables, tuple(frozenset([place]) for place in places))
        return _Rule(inputs, tuple(shifted))

    def num_nodes(self, names: list[str]) -> int:
        """The number of nodes for these terms: two, which is exact, if all are quadratic."""
        degree = self.table.of([self.table.terms[name] for name in names]).degree
        return _NUM_NODES if degree > Degree.QUADRATIC else 2

    def __call__(
        self,
        key: Key[Array, ""],
        moments: dict[str, Moments],
        num_nodes: int | None,
        num_points: int,
    ) -> Float[Array, ""]:
        """The expectation of the sum of all terms.

        Args:
            key: a typed JAX key for terms that combine more than two variables.
            moments: means and variances of the functions.
            num_nodes: nodes of the Gauss-Hermite rules; None for 2 if all terms of a rule are
                quadratic in the functions, and 20 otherwise.
            num_points: points of quasi-Monte Carlo.
        """
        pairs = list(moments.values())
        means = dict(zip(self.table.inputs, (mean for mean, _ in pairs), strict=True))
        total = jnp.zeros(())
        for number, (rule, names) in enumerate(self.groups.items()):
            outputs = [self.table.terms[name] for name in names]

            def summed(
                *values: Array, rule: _Rule = rule, outputs: list[Any] = outputs
            ) -> Float[Array, ""]:
                typed = {
                    variable: jnp.asarray(value, variable.aval.dtype)
                    for variable, value in zip(rule.inputs.variables, values, strict=True)
                }
                terms = self.table.evaluated({**means, **typed}, outputs)
                return sum(map(jnp.sum, terms), jnp.zeros(()))

            of_inputs = [
                self._moments(variable, sorted(places), pairs)
                for variable, places in zip(*rule.inputs, strict=True)
            ]
            nodes: Nodes
            if rule.num_axes() <= 2:
                num = self.num_nodes(names) if num_nodes is None else num_nodes
                nodes = product_nodes(num, rule.num_axes())
            else:
                dtype = jnp.result_type(*(mean for mean, _ in of_inputs))
                rule_key = jax.random.fold_in(key, number)
                nodes = shifted_nodes(rule_key, num_points, rule.num_axes(), dtype)
            total += normal_expectation(summed, of_inputs, nodes, rule.axes)
        return total

    def _moments(self, variable: Any, places: list[int], pairs: list[Moments]) -> Moments:
        """Mean and variance of each entry of a variable that is affine in the functions."""
        inputs = [self.table.inputs[place] for place in places]
        if variable in inputs:
            return pairs[places[0]]

        def of_functions(*functions: Array) -> Array:
            values = dict(zip(inputs, functions, strict=True))
            return self.table.evaluated(values, [variable])[0]

        of_inputs = [pairs[place] for place in places]
        means = [mean for mean, _ in of_inputs]
        mean, linear = jax.linearize(of_functions, *means)
        zeros = [jnp.zeros_like(input_mean) for input_mean in means]
        variance = jnp.zeros_like(mean)
        for place, (input_mean, var) in enumerate(of_inputs):
            # All rows of a function at once, since each entry depends on a single row.
            dtype, members = input_mean.dtype, input_mean.shape[:-1]
            size = math.prod(members)
            unit = jnp.eye(size, dtype=dtype).reshape(size, *members, 1)
            scale = jnp.sqrt(at_least(var, jnp.finfo(var.dtype).tiny)).astype(dtype)

            def contribution(values: Array, place: int = place) -> Array:
                return linear(*zeros[:place], values, *zeros[place + 1 :])

            variance += jnp.sum(jnp.square(jax.vmap(contribution)(unit * scale)), axis=0)
        return mean, variance
