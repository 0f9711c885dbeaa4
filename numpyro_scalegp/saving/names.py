"""The classes and functions that a file may name.

A file is data from elsewhere. What it names is looked up, never called as it comes: classes in
packages that are trusted, functions in a list of functions of arrays that read and write no files.
"""

import contextlib
import functools
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax

PACKAGES = ("numpyro_scalegp", "equinox", "jax", "numpyro", "optax", "flax")

_ELEMENTWISE = """abs arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil clip cos cosh exp exp2
expm1 floor log log10 log1p log2 maximum mean minimum negative sign sin sinc sinh sqrt square sum
tan tanh add divide matmul multiply power subtract erf logistic neg rsqrt stop_gradient"""
_SPECIAL = """entr erf erfc erfinv expit gammaln i0 i0e i1 i1e log_ndtr log_softmax logit logsumexp
ndtr ndtri softmax xlog1py xlogy"""
_NETWORKS = """celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu
log_sigmoid log_softmax logsumexp mish one_hot relu relu6 selu sigmoid silu soft_sign softmax
softplus sparse_plus sparse_sigmoid squareplus standardize swish tanh"""
# A function that is called with the user's inputs later must be harmless: jax.numpy has some that
# write files, jax.debug has some that call what they are given.
_FUNCTIONS: dict[str, str] = {
    "jax.nn": _NETWORKS,
    "jax.numpy": _ELEMENTWISE,
    "jax.lax": _ELEMENTWISE,
    "jax.scipy.special": _SPECIAL,
    "numpyro_scalegp.core.functions": "_repeat _rows_of",
    "numpyro_scalegp.families.latent": "LatentGP.condition",
    "numpyro_scalegp.families.nearest_neighbors": "NearestNeighborGP.condition",
    "numpyro_scalegp.families.weight_space": "WeightSpaceGP.condition",
    "numpyro_scalegp.log_determinants.variational": "slowly_decaying",
}


class Trusted:
    """What a file may name.

    Args:
        more: besides the packages above, names of packages, classes and functions.

    Raises:
        TypeError: if an entry of `more` is none of these.
    """

    def __init__(self, more: Iterable[str | type | Callable[..., Any]] = ()) -> None:
        if isinstance(more, str):
            raise TypeError(f"`trusted` must be a tuple, got a string: write trusted=({more!r},).")
        self.packages: set[str] = set()
        self.objects: list[Any] = []
        for one in more:
            if isinstance(one, str):
                self.packages.add(one)
            elif isinstance(one, type | types.FunctionType):
                self.objects.append(one)
            else:
                raise TypeError(
                    "`trusted` must hold names of packages, classes and functions, got "
                    f"{type(one).__name__}."
                )

    def find_class(self, name: str) -> type:
        """The class of a name `module:qualname`."""
        found = self._given(name) or _look_up(name, self._allow(name, PACKAGES))
        if not isinstance(found, type):
            raise ValueError(f"{name} is no class.")
        return found

    def find_function(self, name: str) -> Callable[..., Any]:
        """The function of a name `module:qualname`."""
        given = self._given(name) or _known_functions().get(name)
        found = given or _look_up(name, self._allow(name, ()))
        if not callable(found) or isinstance(found, type):
            raise ValueError(f"{name} is no function.")
        return found

    def _given(self, name: str) -> Any:
        """The object of `trusted` that has this name; a script's own module may have another."""
        module, _, qualname = name.partition(":")
        for one in self.objects:
            scripts = "__main__" in (module, one.__module__)
            if one.__qualname__ == qualname and (scripts or one.__module__ == module):
                return one
        return None

    def _allow(self, name: str, packages: Iterable[str]) -> str:
        """The module of `name`, if its package is trusted."""
        module = name.partition(":")[0]
        parts = module.split(".")
        names = {".".join(parts[: end + 1]) for end in range(len(parts))}
        private = any(part.startswith("__") for part in parts) and module not in self.packages
        if private or not names & {*packages, *self.packages}:
            raise ValueError(
                f"the file names {name}, which is not trusted: if you know the file, pass "
                f"trusted=({parts[0]!r},) or the class or function itself, or build an object of "
                "the same structure and pass it as `like=`."
            )
        return module


def name_of(value: Any) -> str | None:
    """The name under which `value`, a function or class, is found again; None if it is not."""
    known = _names_of_known_functions()
    if _is_hashable(value) and value in known:
        return known[value]
    if not isinstance(value, types.FunctionType | type):
        return None
    name = full_name(value)
    module = name.partition(":")[0]
    try:
        return name if _look_up(name, module, load=False) is value else None
    except ValueError:
        return None


def is_of_packages(name: str) -> bool:
    """Whether a name is one of the packages above, whose releases say what changed."""
    return name.partition(":")[0].partition(".")[0] in {*PACKAGES, "jaxlib"}


def full_name(value: Any) -> str:
    """Module and qualified name, whether or not `value` is found there."""
    return f"{value.__module__}:{value.__qualname__}"


def _look_up(name: str, module: str, *, load: bool = True) -> Any:
    """What a module defines under a name: never what it imports, nor what that imports."""
    qualname = name.partition(":")[2]
    if module not in sys.modules and load:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueError(
                f"the file names {name}, but `{module}` cannot be imported: {error}."
            ) from error
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        inside = found is sys.modules.get(module) or isinstance(found, type)
        found = vars(found).get(part) if inside and found is not None else None
    canonical = isinstance(found, type | types.FunctionType) and full_name(found) == name
    if not canonical:
        raise ValueError(
            f"there is no class or function {name}: build an object of the same structure and pass "
            "it as `like=`."
        )
    return found


@functools.cache
def _known_functions() -> dict[str, Callable[..., Any]]:
    known = {}
    for module, names in _FUNCTIONS.items():
        namespace = importlib.import_module(module)
        for name in names.split():
            with contextlib.suppress(AttributeError):  # another release of JAX may lack it
                known[f"{module}:{name}"] = operator.attrgetter(name)(namespace)
    return known


@functools.cache
def _names_of_known_functions() -> dict[Any, str]:
    names: dict[Any, str] = {}
    for name, function in _known_functions().items():
        names.setdefault(function, name)
    return names


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return not isinstance(value, jax.Array)
