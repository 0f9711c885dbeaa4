"""How the terms of a likelihood depend on the functions of a model.

The operations of the traced program show which functions a term depends on, and its degree as a
polynomial in them. They do not show which rows of a function, or which functions of a plate, a term
combines: a loop, an indicator matrix or a traced index may select any rows. Numerical evaluations
on the host determine these (see `probing`), once, when a step is compiled.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, Float

from numpyro_scalegp.likelihoods.probing import Probes
from numpyro_scalegp.tracing.runs import TracedProgram

# Products; operations that are linear in all operands jointly; and those that are linear in the
# operands at these positions.
_PRODUCTS = ("mul", "dot_general")
_SUMS = {"add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "pad"}
_MOVES = {
    *("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "concatenate", "rev"),
    *("slice", "copy", "copy_p", "stack", "unstack", "split", "tile", "sharding_constraint"),
}
_PLACES: dict[str, tuple[int, ...]] = {
    "div": (0,),
    "triangular_solve": (1,),
    "gather": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
    "scatter_add": (0, 2),
    "select_n": tuple(range(1, 100)),
}
# Operations whose log result is affine in the logs of the operands.
_LOG_AFFINE = {*_MOVES, "mul", "div", "sqrt", "square", "integer_pow"}
_LOG_PLACES = ("gather", "dynamic_slice", "select_n")
# Without calls that have custom derivatives, such as `stop_gradient`, which may differ from the
# derivatives of their values.
_CALLS = ("pjit", "jit", "closed_call", "checkpoint")


class Degree(IntEnum):
    """The degree of a polynomial in the functions."""

    CONSTANT = 0
    AFFINE = 1
    QUADRATIC = 2
    OTHER = 3  # a higher degree, or not recognized as a polynomial


class Dependence(NamedTuple):
    """How a variable of a program depends on the program's arguments.

    A degree is an upper bound: an operation that is not recognized as a polynomial has the degree
    `OTHER`, even if its derivative is zero.
    """

    degree: Degree = Degree.CONSTANT  # in the entries of all arguments jointly
    log_degree: Degree = Degree.CONSTANT  # the degree of its logarithm
    arguments: frozenset[int] = frozenset()  # positions of the arguments that it depends on


class AffineInputs(NamedTuple):
    """Variables that determine a term, each of which is affine in separate arguments."""

    variables: tuple[Any, ...]
    arguments: tuple[frozenset[int], ...]  # positions of each variable's arguments


Axes = tuple[int, ...]  # the axis of each leading entry of a variable, flattened, or of all entries


class DependenceTable:
    """How terms depend on functions, from one trace.

    Args:
        run: a program of arrays, one for each function, of shape (*batch, n).
        terms: variables of its results, or trees of them, by the name of their site; see
            `TracedProgram.variables`.
        functions: the names of its arguments.
    """

    def __init__(self, run: TracedProgram, terms: dict[str, Any], functions: Iterable[str]) -> None:
        self.program: ClosedJaxpr = run.program
        self.terms = terms
        self.functions = tuple(functions)
        self._dependences = _forward(
            self._jaxpr,
            [
                Dependence(Degree.AFFINE, Degree.OTHER, frozenset([place]))
                for place in range(len(self.functions))
            ],
        )
        self.dependent = [name for name, leaves in terms.items() if self.of(leaves).arguments]

    @property
    def _jaxpr(self) -> Jaxpr:
        return self.program.jaxpr

    @property
    def inputs(self) -> list[Any]:
        """The variables of the functions."""
        return self._jaxpr.invars

    def of(self, leaves: Any) -> Dependence:
        """How a tree of variables depends on the functions: the largest degrees, all arguments."""
        dependences = [_of(leaf, self._dependences) for leaf in jax.tree.leaves(leaves)]
        return _joined([Dependence(), *dependences])

    def functions_of(self, name: str) -> set[str]:
        """The functions that a term depends on."""
        return {self.functions[place] for place in self.of(self.terms[name]).arguments}

    # Rows

    @functools.cached_property
    def _probes(self) -> tuple[Probes, list[str]]:
        """Probes of the terms that depend on a function, and the name of each term."""
        leaves = [
            (name, leaf) for name in self.dependent for leaf in jax.tree.leaves(self.terms[name])
        ]
        program = subprogram(self.program, self.inputs, [leaf for _, leaf in leaves])
        return Probes(program), [name for name, _ in leaves]

    def check_additive(self) -> None:
        """Raise unless each term is a sum of functions of single values of the only function.

        Only then do the marginals of f determine its expectation.

        Raises:
            ValueError: if a term combines values of f. Time O(log2(n)) evaluations of the terms.
        """
        probes, names = self._probes
        shape = self.inputs[0].aval.shape
        for place in sorted(probes.combining(0, np.arange(math.prod(shape)).reshape(shape))):
            what = f"rows of the function `{self.functions[0]}`, or functions of its plate"
            remedy = " Where only functions are combined, sgp.infer.QuadratureELBO also works."
            raise _refusal(names[place], what, "value", remedy)

    def axes(self) -> dict[str, dict[str, Axes]]:
        """Which functions of a plate each term combines.

        A term is a sum over rows, whose summands may combine several functions. Functions on the
        same axis are not combined with each other, so that they can share quadrature nodes.

        Returns:
            For each term that depends on a function, and each site, the axis of each function of
            its plate, flattened. All axes are zero if no functions are combined.

        Raises:
            ValueError: if a term combines rows. Time O(log2(n)) evaluations of the terms, and one
                for each pair of combined functions.
        """
        probes, names = self._probes
        axes: dict[str, dict[str, Axes]] = {name: {} for name in names}
        for argument, site in enumerate(self.functions):
            shape = self.inputs[argument].aval.shape
            size = math.prod(shape[:-1])
            for place in sorted(probes.combining(argument, _rows(shape))):
                raise _refusal(names[place], f"rows of the function `{site}`", "row")
            number = np.broadcast_to(np.arange(size).reshape(*shape[:-1], 1), shape)
            combined = probes.combining(argument, number)
            colors = probes.colors(argument, number, combined)
            for place, name in enumerate(names):
                axes[name][site] = colors if place in combined else (0,) * size
        return axes

    def combining_rows(self) -> list[str]:
        """The terms with an entry that depends on more than one row of the only function."""
        probes, names = self._probes
        number = _rows(self.inputs[0].aval.shape)
        return sorted({names[place] for place in probes.mixing(0, number)})

    # Affine combinations

    def affine_inputs(self, name: str) -> AffineInputs:
        """The fewest variables that determine a term, each affine in separate functions.

        A sum of two functions is a single variable. A product of two sums has two variables, if
        the sums share no function. The program is analyzed, not evaluated.

        Returns:
            The smallest such set, with at most as many variables as the term has functions; of
            several, the one latest in the program.
        """
        result = self.terms[name]
        if isinstance(result, Literal):
            return AffineInputs((), ())
        dependences = self._dependences
        equations = [
            equation
            for equation in _needed(self._jaxpr, [result], set())
            if any(variable in dependences for variable in _variables(equation.invars))
        ]
        # The number of operations that use each variable; the result counts as used.
        users: dict[Any, int] = {result: 1}
        for equation in equations:
            for variable in _variables(equation.invars) & dependences.keys():
                users[variable] = users.get(variable, 0) + 1
        live = [variable for variable in self.inputs if variable in users]
        best = live
        # Affine operations depend on affine ones only, so the others can be skipped.
        for equation in equations:
            outputs = _joined([_of(variable, dependences) for variable in equation.outvars])
            if outputs.degree > Degree.AFFINE:
                continue
            for variable in _variables(equation.invars) & dependences.keys():
                users[variable] -= 1
            live = [v for v in (*live, *equation.outvars) if users.get(v)]
            arguments = [_of(v, dependences).arguments for v in live]
            are_disjoint = sum(map(len, arguments)) == len(frozenset().union(*arguments))
            if are_disjoint and len(live) <= len(best):
                best = live
        return AffineInputs(tuple(best), tuple(_of(v, dependences).arguments for v in best))

    def separable(self, inputs: dict[str, AffineInputs]) -> list[str]:
        """The names in `inputs` whose terms are sums over the entries of each of their inputs."""
        if not inputs:
            return []
        owners = [name for name, affine in inputs.items() for _ in affine.variables]

        def of_variables(*values: Array) -> list[Array]:
            remaining = iter(values)
            terms = []
            for name, affine in inputs.items():
                by_variable = dict(zip(affine.variables, remaining, strict=False))
                terms.append(self.evaluated(by_variable, [self.terms[name]])[0])
            return terms

        avals = [variable.aval for affine in inputs.values() for variable in affine.variables]
        like = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        probes = Probes(jax.make_jaxpr(of_variables)(*like))
        failed = set()
        for argument, (name, aval) in enumerate(zip(owners, avals, strict=True)):
            number = np.arange(math.prod(aval.shape)).reshape(aval.shape)
            if list(inputs).index(name) in probes.combining(argument, number):
                failed.add(name)
        return [name for name in inputs if name not in failed]

    def evaluated(self, values: dict[Any, Any], outputs: Sequence[Any]) -> list[Any]:
        """Compute variables of the program from the values of others that determine them.

        Args:
            values: values by variable.
            outputs: the variables; only operations that they need are evaluated.
        """
        return jaxpr_as_fun(subprogram(self.program, list(values), outputs))(*values.values())


def table_of(
    function: Callable[[Float[Array, "*batch n"]], dict[str, Any]],
    like: Float[Array, "*batch n"],
    site: str = "f",
) -> DependenceTable:
    """The dependence table of terms of a single function f.

    Args:
        function: maps f to terms by name; it may close over traced values.
        like: an array with the shape and dtype of f.
        site: the name of the function site.
    """
    run = TracedProgram(function, like)
    return DependenceTable(run, run.variables(), [site])


def subprogram(closed: ClosedJaxpr, inputs: Sequence[Any], outputs: Sequence[Any]) -> ClosedJaxpr:
    """The part of a program that computes the variables `outputs` from the variables `inputs`."""
    jaxpr = closed.jaxpr
    equations = _needed(jaxpr, outputs, {*jaxpr.constvars, *inputs})
    used = _variables(outputs).union(*(_variables(equation.invars) for equation in equations))
    constants = {
        variable: value
        for variable, value in zip(jaxpr.constvars, closed.consts, strict=True)
        if variable in used
    }
    reduced = jaxpr.replace(
        constvars=list(constants), invars=list(inputs), outvars=list(outputs), eqns=equations
    )
    return ClosedJaxpr(reduced, list(constants.values()))


def _rows(shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[-1]), shape)


def _refusal(name: str, what: str, single: str, remedy: str = "") -> ValueError:
    return ValueError(
        f"the site `{name}` combines {what}: only if each term depends on one {single} do the "
        "marginals determine its expectation. Train with sgp.infer.JointELBO, which draws f "
        f"jointly, or run NUTS on the model.{remedy}"
    )


def _variables(operands: Iterable[Any]) -> set[Any]:
    variables = set()
    for operand in operands:
        if not isinstance(operand, Literal):
            variables.add(operand)
    return variables


def _needed(jaxpr: Jaxpr, outputs: Iterable[Any], inputs: set[Any]) -> list[Any]:
    """The operations that compute the variables `outputs` from the variables `inputs`."""
    needed = _variables(outputs) - inputs
    equations = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed |= _variables(equation.invars) - inputs
    return equations[::-1]


def _of(variable: Any, dependences: dict[Any, Dependence]) -> Dependence:
    if isinstance(variable, Literal):
        return Dependence()
    return dependences.get(variable, Dependence())


def _joined(several: Sequence[Dependence]) -> Dependence:
    degrees, log_degrees, arguments = zip(*several, strict=True)
    return Dependence(max(degrees), max(log_degrees), frozenset().union(*arguments))


def _forward(jaxpr: Jaxpr, inputs: Sequence[Dependence]) -> dict[Any, Dependence]:
    """The dependence of each variable that depends on an argument, by forward propagation."""
    pairs = zip(jaxpr.invars, inputs, strict=True)
    dependences = {variable: dependence for variable, dependence in pairs if dependence.arguments}
    for equation in jaxpr.eqns:
        if dependences.keys().isdisjoint(_variables(equation.invars)):
            continue
        operands = [_of(variable, dependences) for variable in equation.invars]
        results = _of_results(equation, operands)
        for variable, dependence in zip(equation.outvars, results, strict=True):
            if dependence.arguments:
                dependences[variable] = dependence
    return dependences


def _of_results(equation: Any, operands: list[Dependence]) -> list[Dependence]:
    name = equation.primitive.name
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if name in _CALLS:
        inner = getattr(inner, "jaxpr", inner)
        dependences = _forward(inner, operands)
        return [_of(variable, dependences) for variable in inner.outvars]
    largest = _joined(operands)
    varying = {place for place, operand in enumerate(operands) if operand.arguments}
    # A conversion to integers rounds.
    is_move = name in _MOVES or (
        name == "convert_element_type" and jnp.issubdtype(equation.params["new_dtype"], jnp.inexact)
    )
    is_in_place = name in _PLACES and varying <= set(_PLACES[name])
    is_square = name == "square" or (name == "integer_pow" and equation.params["y"] == 2)
    degree = log_degree = Degree.OTHER
    if name in _PRODUCTS:
        degree = Degree(min(sum(operand.degree for operand in operands), Degree.OTHER))
    elif is_move or name in _SUMS or is_in_place:
        degree = largest.degree
    elif is_square and largest.degree == Degree.AFFINE:
        degree = Degree.QUADRATIC
    elif name == "log":
        degree = largest.log_degree
    if name == "exp":
        log_degree = largest.degree
    elif is_move or name in _LOG_AFFINE or (name in _LOG_PLACES and is_in_place):
        log_degree = largest.log_degree
    return [Dependence(degree, log_degree, largest.arguments)] * len(equation.outvars)
