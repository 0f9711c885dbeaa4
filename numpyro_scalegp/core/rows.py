"""Some rows of a large array, in place of the array."""

from typing import Any, NoReturn

import equinox as eqx
from jaxtyping import Array, ArrayLike, Float, Int

from numpyro_scalegp.core import checks


class Rows(eqx.Module):
    """The rows of an array that one step touches: one value for each basis function drawn.

    A model or guide that is run for a step whose cost does not depend on the number of basis
    functions gets this in place of a parameter, and passes it on as it is.
    """

    values: Float[Array, "sets num *row"]
    index: Int[Array, "sets num"]
    size: int = eqx.field(static=True)  # rows of the whole array

    @classmethod
    def of(cls, array: "Float[Array, 'm *row'] | Rows", index: Int[Array, "sets num"]) -> "Rows":
        """Take rows out of an array; what are rows already must be the same ones."""
        if isinstance(array, Rows):
            return array
        return cls(array[index], index, array.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (self.size, *self.values.shape[2:])

    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            "in this step the parameter stands for some of its rows alone, so nothing can be "
            "computed from it: pass it to `WeightSpaceGP` or `ChevronGP` as it is, or declare it "
            "without `rows=True`."
        )

    def _refuse(self, *_: Any) -> NoReturn:
        self.__jax_array__()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __getitem__ = _refuse


def as_rows_or_array(value: "ArrayLike | Rows", name: str) -> "Float[Array, '...'] | Rows":
    """Convert to a floating-point array, unless it is `Rows`."""
    return value if isinstance(value, Rows) else checks.as_float(value, name)
