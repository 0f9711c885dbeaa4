"""Rows of a large array, in place of the array."""

from typing import Any, NoReturn

import equinox as eqx
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks


class Rows(eqx.Module):
    """The rows of a parameter that a step of `RowSVI` uses: one for each basis function drawn.

    In a step, model and guide get this in place of the parameter, and pass it on unchanged.
    """

    values: Float[Array, "sets num *row"]
    index: Int[Array, "sets num"]
    size: int = eqx.field(static=True)  # number of rows of the full array

    @classmethod
    def of(cls, array: "Float[Array, 'm *row'] | Rows", index: Int[Array, "sets num"]) -> "Rows":
        """Take rows of an array; `Rows` must already have this index."""
        if isinstance(array, Rows):
            return array
        return cls(array[index], index, array.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full array."""
        return (self.size, *self.values.shape[2:])

    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            "in this step only some of the parameter's rows are available, so nothing can be "
            "computed from it: pass it to `WeightSpaceGP` or `ChevronGP` unchanged, or declare it "
            "without `rows=True`."
        )

    def _refuse(self, *_: Any) -> NoReturn:
        self.__jax_array__()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __getitem__ = _refuse


def as_rows_or_array(value: "ArrayLike | Rows", name: str) -> "Float[Array, '...'] | Rows":
    """Convert to a floating-point array, unless it is `Rows`."""
    return value if isinstance(value, Rows) else checks.as_float(value, name)
