"""Programs as ONNX files, which need no JAX.

`jax2onnx` converts a jaxpr operation by operation, and only some operations. So a program is
simplified first: calls are replaced by their equations, everything that does not depend on the
inputs is computed, random numbers included, and a few operations are replaced by others.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from numpyro_scalegp.programs.equations import bound, called, evaluate, parts, scanned

MISSING = (
    "An ONNX file needs jax2onnx: install `numpyro_scalegp[onnx]`, or write an `.npz`, which JAX "
    "reads."
)


def write(
    file: str | os.PathLike[str],
    name: str,
    closed: ClosedJaxpr,
    leaves: Sequence[Array],
    outputs: Sequence[str],
) -> None:
    """Write a program of the last argument of a jaxpr as an ONNX model with the input `Xs`.

    Args:
        file: path of the file.
        name: what error messages and the model are named by.
        closed: a jaxpr whose arguments are the leaves and a matrix of inputs.
        leaves: arrays, which the model holds as constants.
        outputs: the names of the results.

    Raises:
        ImportError: if jax2onnx is not installed.
        ValueError: if an operation cannot be converted.
    """
    try:
        import jax2onnx
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ImportError(MISSING) from error
    rows = closed.in_avals[-1]
    try:
        model = jax2onnx.to_onnx(
            lambda Xs: simplified(closed, [*leaves, Xs]),
            inputs=[jax.ShapeDtypeStruct(rows.shape, rows.dtype)],
            model_name=name,
            input_names=["Xs"],
            output_names=list(outputs),
            enable_double_precision=rows.dtype == jnp.float64,
        )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # no warnings
        onnxruntime.InferenceSession(model.SerializeToString(), options)  # raises if not valid
    except Exception as error:
        raise ValueError(
            f"`{name}` cannot be written as an ONNX file, since jax2onnx does not convert one of "
            "its operations. Give `num_rows`, or write an `.npz`, which JAX reads. What it says: "
            f"{error}"
        ) from error
    onnx.save(model, file)


def simplified(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr in few kinds of operations, for arguments that may be traced."""
    return evaluate(closed, args, _results)


def _results(equation: Any, inputs: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if (closed := called(equation)) is not None:
        return simplified(closed, inputs)
    if name == "host_call":
        return []  # a file makes no warnings
    if not any(map(_is_traced, inputs)) and _has_fixed_shapes(equation):
        if name == "platform_index":
            return [_of_default_platform(equation)]
        with jax.ensure_compile_time_eval():
            return bound(equation, inputs)
    return _RULES.get(name, bound)(equation, inputs)


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _has_fixed_shapes(equation: Any) -> bool:
    """Whether no result has the number of rows in its shape, or is that number."""
    shapes = (getattr(variable.aval, "shape", ()) for variable in equation.outvars)
    is_fixed = all(isinstance(size, int) for shape in shapes for size in shape)
    return is_fixed and equation.primitive.name != "dim_as_value"


def _of_default_platform(equation: Any) -> int:
    """The number of the platform with no name, or of the CPU: a file is for all platforms."""
    platforms = equation.params["platforms"]
    is_default = [names is None or "cpu" in names for names in platforms]
    return is_default.index(True)


def _of_linear_solve(equation: Any, inputs: list[Any]) -> list[Any]:
    lengths, solve = equation.params["const_lengths"], equation.params["jaxprs"].solve
    first = lengths.matvec + lengths.vecmat
    constants = inputs[first : first + lengths.solve]
    right = inputs[first + lengths.solve + lengths.transpose_solve :]
    return simplified(solve, [*constants, *right])


def _of_triangular_solve(equation: Any, inputs: list[Any]) -> list[Any]:
    """A product with the inverse of a constant factor, computed in float64."""
    (factor, right), params = inputs, equation.params
    if _is_traced(factor):
        return bound(equation, inputs)
    triangle = (np.tril if params["lower"] else np.triu)(np.asarray(factor, np.float64))
    if params["unit_diagonal"]:
        diagonal = np.arange(triangle.shape[-1])
        triangle[..., diagonal, diagonal] = 1.0
    inverse = np.linalg.inv(triangle).astype(factor.dtype)
    if params["transpose_a"]:
        inverse = inverse.swapaxes(-1, -2)
    pair = (inverse, right) if params["left_side"] else (right, inverse)
    return [jnp.matmul(*pair, precision="highest")]


def _of_cond(equation: Any, inputs: list[Any]) -> list[Any]:
    """Nested pairs of branches, since jax2onnx has no more than two."""
    (index, *operands), branches = inputs, equation.params["branches"]
    if not _is_traced(index):
        return simplified(branches[int(index)], operands)

    def of_branch(number: int, *traced: Array) -> list[Any]:
        values = iter(traced)
        args = [next(values) if _is_traced(operand) else operand for operand in operands]
        return simplified(branches[number], args)

    def from_branch(number: int, *traced: Array) -> list[Any]:
        if number + 1 == len(branches):
            return of_branch(number, *traced)
        branch = functools.partial(of_branch, number)
        next_branches = functools.partial(from_branch, number + 1)
        return jax.lax.cond(index.astype(int) <= number, branch, next_branches, *traced)

    # Constants remain constants in each branch.
    return from_branch(0, *filter(_is_traced, operands))


def _of_scan(equation: Any, inputs: list[Any]) -> list[Any]:
    params, body = equation.params, equation.params["jaxpr"]
    consts, carry, xs = scanned(equation, inputs)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = simplified(body, [*consts, *carry, *x])
        return results[: len(carry)], results[len(carry) :]

    if not (any(map(_is_key, inputs)) and isinstance(params["length"], int)):
        # Without a length where it is the number of rows, which JAX takes from `xs` alone.
        length = None if xs else params["length"]
        carry, ys = jax.lax.scan(step, carry, xs, length, reverse=params["reverse"])
        return [*carry, *ys]
    # Step by step, so that random numbers are constants.
    numbers = list(range(params["length"]))[:: -1 if params["reverse"] else 1]
    results = dict[int, list[Any]]()
    for number in numbers:
        carry, results[number] = step(carry, [_row(values, number) for values in xs])
    rows = (results[number] for number in sorted(numbers))
    return [*carry, *map(jnp.stack, zip(*rows, strict=True))]


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.prng_key)


def _row(values: Array, number: int) -> Array:
    with contextlib.nullcontext() if _is_traced(values) else jax.ensure_compile_time_eval():
        return values[number]


def _of_while(equation: Any, inputs: list[Any]) -> list[Any]:
    params = equation.params
    num_consts = params["cond_nconsts"], params["body_nconsts"]
    of_condition, of_body, start = parts(inputs, *num_consts)
    return jax.lax.while_loop(
        lambda carry: simplified(params["cond_jaxpr"], [*of_condition, *carry])[0],
        lambda carry: simplified(params["body_jaxpr"], [*of_body, *carry]),
        start,
    )


def _of_pad(equation: Any, inputs: list[Any]) -> list[Any]:
    """Blocks of the padding value beside the array."""
    array, value = inputs
    for axis, (low, high, interior) in enumerate(equation.params["padding_config"]):
        if low < 0 or high < 0 or interior:
            return bound(equation, inputs)
        if low or high:
            shapes = ((*array.shape[:axis], n, *array.shape[axis + 1 :]) for n in (low, high))
            left, right = (jnp.broadcast_to(value, shape) for shape in shapes)
            array = jnp.concatenate([left, array, right], axis)
    return [array]


def _of_remainder(equation: Any, inputs: list[Any]) -> list[Any]:
    """The remainder without rounding, up to 2^24 periods: jax2onnx needs a fixed shape for it."""
    dividend, divisor = inputs
    if not jnp.issubdtype(dividend.dtype, jnp.floating):
        return bound(equation, inputs)
    x, y = jnp.abs(dividend), jnp.abs(divisor)
    quotient = jnp.floor(x / y)
    product = quotient * y
    # The product's rounding error, from halves of the digits of each factor (Dekker, 1971).
    high, low = _halves(quotient)
    y_high, y_low = _halves(y)
    error = ((high * y_high - product) + high * y_low + low * y_high) + low * y_low
    remainder = (x - product) - error
    # The quotient may have been rounded to the next integer.
    remainder = jnp.where(remainder < 0.0, remainder + y, remainder)
    remainder = jnp.where(remainder >= y, remainder - y, remainder)
    return [jnp.where(dividend < 0.0, -remainder, remainder)]


def _halves(value: Array) -> tuple[Array, Array]:
    """Two numbers of half of the digits, whose sum is the value."""
    scaled = value * (2.0 ** ((jnp.finfo(value.dtype).nmant + 2) // 2) + 1.0)
    high = scaled - (scaled - value)
    return high, value - high


def _of_split(equation: Any, inputs: list[Any]) -> list[Any]:
    (array,), axis, start = inputs, equation.params["axis"], 0
    blocks = []
    for size in equation.params["sizes"]:
        blocks.append(jax.lax.slice_in_dim(array, start, start + size, axis=axis))
        start += size
    return blocks


def _of_shift(equation: Any, inputs: list[Any]) -> list[Any]:
    """A shift of bits in an unsigned type: ONNX has no others."""
    dtype = equation.outvars[0].aval.dtype
    unsigned = jnp.uint64 if dtype.itemsize == 8 else jnp.uint32
    pair = (jax.lax.convert_element_type(value, unsigned) for value in inputs)
    return [equation.primitive.bind(*pair).astype(dtype)]


_RULES: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "cond": _of_cond,
    "custom_linear_solve": _of_linear_solve,
    "pad": _of_pad,
    "rem": _of_remainder,
    "scan": _of_scan,
    "shift_left": _of_shift,
    "shift_right_logical": _of_shift,
    "split": _of_split,
    "triangular_solve": _of_triangular_solve,
    "while": _of_while,
}
