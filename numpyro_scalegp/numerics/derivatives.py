"""Functions with custom derivatives, and errors in place of derivatives that would be wrong.

`jax.custom_jvp` and `jax.custom_vjp` do not suffice. `jax.lax.scan` and `jax.lax.map` silently drop
their rules when a gradient is differentiated again, so that second derivatives are wrong unless the
rule is the derivative of the function's body. In forward mode, the error of `custom_vjp` does not
say which function it is about. Here the rules belong to a primitive, which keeps them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, ArrayLike, Float

# Maps constants and flat primals to flat outputs by a jaxpr, with a JVP rule.
_call = Primitive("call_with_jvp")
_call.multiple_results = True


class custom_jvp_all_orders:
    """A `jax.custom_jvp` whose rule holds for derivatives of every order, also within loops.

    Args:
        function: maps positional pytrees of arrays to a pytree of arrays. Arrays in its closure are
            constants.
    """

    def __init__(self, function: Callable) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.rule: Callable | None = None

    def defjvp(self, rule: Callable) -> None:
        """Set the rule, (primals, tangents) -> (output, its tangent), as in `jax.custom_jvp`."""
        self.rule = rule

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        flat, structure = jax.tree.flatten(arguments)

        # A new function for each call, because JAX caches the traces of a function.
        def function(*flat: ArrayLike) -> Any:
            return self.function(*jax.tree.unflatten(structure, flat))

        program, shape = jax.make_jaxpr(function, return_shape=True)(*flat)

        def rule(primals: tuple, tangents: tuple) -> tuple[list, list]:
            assert self.rule is not None
            trees = (jax.tree.unflatten(structure, flat) for flat in (primals, tangents))
            output, tangent = self.rule(*trees)
            return jax.tree.leaves(output), jax.tree.leaves(tangent)

        outputs = _bind(program, rule, *flat)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)


def _bind(program: ClosedJaxpr, rule: Callable, *flat: ArrayLike) -> list:
    constants = program.consts
    return _call.bind(
        *constants, *flat, jaxpr=program.jaxpr, rule=rule, num_constants=len(constants)
    )


def _evaluate(*flat: ArrayLike, jaxpr: Jaxpr, num_constants: int, **_: Any) -> list:
    return jax.core.eval_jaxpr(jaxpr, flat[:num_constants], *flat[num_constants:])


def _types(*_: Any, jaxpr: Jaxpr, **__: Any) -> list:
    return [variable.aval.strip_weak_type() for variable in jaxpr.outvars]


_call.def_impl(_evaluate)
_call.def_abstract_eval(_types)
mlir.register_lowering(_call, mlir.lower_fun(_evaluate, multiple_results=True))


def _push_forward(
    primals: tuple, tangents: tuple, *, rule: Callable, num_constants: int, **_: Any
) -> tuple:
    tangents = tuple(ad.instantiate_zeros(tangent) for tangent in tangents[num_constants:])
    return rule(primals[num_constants:], tangents)


ad.primitive_jvps[_call] = _push_forward


def _batch_call(
    flat: tuple, dims: tuple, *, rule: Callable, num_constants: int, **params: Any
) -> tuple:
    function = functools.partial(_evaluate, num_constants=num_constants, **params)
    batched = jax.vmap(function, in_axes=dims)
    constants, primals = flat[:num_constants], flat[num_constants:]
    program = jax.make_jaxpr(lambda *primals: batched(*constants, *primals))(*primals)
    rule = jax.vmap(rule, in_axes=(dims[num_constants:], dims[num_constants:]))
    outputs = _bind(program, rule, *primals)
    return outputs, (0,) * len(outputs)


batching.primitive_batchers[_call] = _batch_call


def refuse_derivatives(refusal: str, tree: Any) -> Any:
    """Return a pytree, and raise a TypeError with the text `refusal` if it is differentiated.

    In a gradient that holds a value fixed, this refuses second derivatives.
    """
    identity = custom_jvp_all_orders(lambda tree: tree)
    identity.defjvp(functools.partial(_refuse, refusal=refusal))
    return identity(tree)


def _refuse(*_: Any, refusal: str, **__: Any) -> NoReturn:
    raise TypeError(refusal)


def once_differentiable(function: Callable, refusal: str) -> Callable:
    """Allow first derivatives of a function, in both modes; second derivatives raise a TypeError.

    Args:
        function: a function of positional pytrees of arrays. Arrays in its closure are constants.
        refusal: the error's text.
    """
    once = custom_jvp_all_orders(function)
    once.defjvp(
        lambda primals, tangents: jax.jvp(function, refuse_derivatives(refusal, primals), tangents)
    )
    return once


def with_pullback(
    pullback: Callable[[Any, Any, Array], Any],
    refusal: str,
    value: Float[Array, "..."],
    inputs: Any,
    fixed: Any,
) -> Float[Array, "..."]:
    """Give a value the gradient that `pullback` computes, in reverse mode only.

    Args:
        pullback: maps `inputs`, `fixed` and the cotangent of the value to the cotangents of
            `inputs`, in their structure.
        refusal: the error's text in forward mode.
        value: the value, whose other derivatives are ignored.
        inputs: a pytree of floating-point arrays.
        fixed: a pytree of other arrays that the pullback needs.

    Returns:
        The value.

    Raises:
        TypeError: in forward mode.
    """

    def rule(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        value, *arguments = primals
        residuals, structure = jax.tree.flatten(arguments)
        linear = jax.tree.leaves(tangents[1])

        def transpose(residuals: tuple, cotangent: Array) -> tuple[Array, ...]:
            inputs, fixed = jax.tree.unflatten(structure, residuals)
            return tuple(jax.tree.leaves(pullback(inputs, fixed, cotangent)))

        tangent = _tangent.bind(
            *linear,
            *residuals,
            num_linear=len(linear),
            transpose=transpose,
            refusal=refusal,
            output=jax.typeof(value),
        )
        return value, tangent

    identity = custom_jvp_all_orders(lambda value, inputs, fixed: value)
    identity.defjvp(rule)
    return identity(value, inputs, fixed)


# The tangent of a value with a pullback, linear in its first arguments; it can only be transposed.
_tangent = Primitive("tangent_of_pullback")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda *_, output, **__: output)
mlir.register_lowering(_tangent, _refuse)
ad.primitive_jvps[_tangent] = _refuse


def _transpose(
    cotangent: Any, *arguments: Any, num_linear: int, transpose: Callable, **_: Any
) -> list[Any]:
    no_gradients = [None] * len(arguments)
    if type(cotangent) is ad.Zero:
        return no_gradients
    gradients = transpose(arguments[num_linear:], cotangent)
    linear_gradients = [
        gradient if ad.is_undefined_primal(argument) else None
        for gradient, argument in zip(gradients, arguments[:num_linear], strict=True)
    ]
    return linear_gradients + no_gradients[num_linear:]


ad.primitive_transposes[_tangent] = _transpose


def _batch_tangent(
    arguments: tuple,
    dims: tuple,
    *,
    num_linear: int,
    transpose: Callable,
    output: Any,
    **params: Any,
) -> tuple[Array, int]:
    sizes = (a.shape[d] for a, d in zip(arguments, dims, strict=True) if d is not None)
    batched_output = output.update(shape=(next(sizes), *output.shape))

    def batched(residuals: tuple, cotangent: Array) -> tuple[Array, ...]:
        in_axes = (dims[num_linear:], 0)
        gradients = jax.vmap(transpose, in_axes=in_axes)(tuple(residuals), cotangent)
        return tuple(
            jnp.sum(gradient, axis=0) if dim is None else jnp.moveaxis(gradient, 0, dim)
            for gradient, dim in zip(gradients, dims[:num_linear], strict=True)
        )

    tangent = _tangent.bind(
        *arguments, num_linear=num_linear, transpose=batched, output=batched_output, **params
    )
    return tangent, 0


batching.primitive_batchers[_tangent] = _batch_tangent


@contextlib.contextmanager
def explained_forward_mode() -> Iterator[None]:
    """A context in which JAX's error for forward mode says what to do."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error) or "custom_vjp" not in str(error):
            raise
        raise TypeError(
            "the moments of a variational GP have derivatives in reverse mode alone: leave out "
            "`forward_mode_differentiation=True`, or take jax.grad or jax.jacrev in place of "
            "jax.jvp and jax.jacfwd."
        ) from error
