"""The classes and functions that a file may name.

A file may come from an untrusted source. Classes are looked up in trusted packages, functions in a
list of functions of arrays that neither read nor write files.
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
# A function that is later called with the user's inputs must be harmless: some functions of
# jax.numpy write files, some of jax.debug call their arguments.
_FUNCTIONS: dict[str, str] = {
    "jax.nn": _NETWORKS,
    "jax.numpy": _ELEMENTWISE,
    "jax.lax": _ELEMENTWISE,
    "jax.scipy.special": _SPECIAL,
    "numpyro_scalegp.programs.functions": "_repeat _rows_of",
    "numpyro_scalegp.variational.latent": "LatentGP.condition",
    "numpyro_scalegp.neighbors.prior": "NearestNeighborGP.condition",
    "numpyro_scalegp.variational.quadruply.weight_space": "WeightSpaceGP.condition",
    "numpyro_scalegp.integrated.finite_rkhs.variational": "slowly_decaying",
}


class Trusted:
    """The classes and functions that a file may name.

    Args:
        more: names of packages, classes and functions to trust besides the packages above.

    Raises:
        TypeError: if an entry of `more` is not a string, class or function.
    """

    def __init__(self, more: Iterable[str | type | Callable[..., Any]] = ()) -> None:
        if isinstance(more, str):
            raise TypeError(f"`trusted` must be a tuple, got a string: write trusted=({more!r},).")
        self.packages: set[str] = set()
        self.objects: list[Any] = []
        for entry in more:
            if isinstance(entry, str):
                self.packages.add(entry)
            elif isinstance(entry, type | types.FunctionType):
                self.objects.append(entry)
            else:
                raise TypeError(
                    "`trusted` must hold names of packages, classes and functions, got "
                    f"{type(entry).__name__}."
                )

    def find_class(self, name: str) -> type:
        """The class with the name `module:qualname`."""
        cls = self._trusted_object(name) or _look_up(name, self._trusted_module(name, PACKAGES))
        if not isinstance(cls, type):
            raise ValueError(f"{name} is not a class.")
        return cls

    def find_function(self, name: str) -> Callable[..., Any]:
        """The function with the name `module:qualname`."""
        function = self._trusted_object(name) or _listed_functions().get(name)
        function = function or _look_up(name, self._trusted_module(name, ()))
        if not callable(function) or isinstance(function, type):
            raise ValueError(f"{name} is not a function.")
        return function

    def _trusted_object(self, name: str) -> Any:
        """The object of `trusted` with this name, if any; a script's module may be `__main__`."""
        module, _, qualname = name.partition(":")
        for candidate in self.objects:
            in_script = "__main__" in (module, candidate.__module__)
            same_module = in_script or candidate.__module__ == module
            if candidate.__qualname__ == qualname and same_module:
                return candidate
        return None

    def _trusted_module(self, name: str, packages: Iterable[str]) -> str:
        """The module of `name`, if its package is trusted."""
        module = name.partition(":")[0]
        parts = module.split(".")
        parents = {".".join(parts[: end + 1]) for end in range(len(parts))}
        is_dunder = any(component.startswith("__") for component in parts)
        is_private = is_dunder and module not in self.packages
        if is_private or not parents & {*packages, *self.packages}:
            raise ValueError(
                f"the file names {name}, which is not trusted: if you know the file, pass "
                f"trusted=({parts[0]!r},) or the class or function itself, or build an object of "
                "the same structure and pass it as `like=`."
            )
        return module


def name_of(value: Any) -> str | None:
    """The name under which a function or class can be looked up; None if it has no such name."""
    listed = _names_of_listed_functions()
    if _is_hashable(value) and value in listed:
        return listed[value]
    if not isinstance(value, types.FunctionType | type):
        return None
    name = full_name(value)
    module = name.partition(":")[0]
    try:
        return name if _look_up(name, module, load=False) is value else None
    except ValueError:
        return None


def is_of_packages(name: str) -> bool:
    """Whether a name belongs to one of the packages above, whose releases document changes."""
    return name.partition(":")[0].partition(".")[0] in {*PACKAGES, "jaxlib"}


def full_name(value: Any) -> str:
    """Module and qualified name of `value`, which may not be found under that name."""
    return f"{value.__module__}:{value.__qualname__}"


def _look_up(name: str, module: str, *, load: bool = True) -> Any:
    """The class or function that a module itself defines under a name, not one that it imports."""
    qualname = name.partition(":")[2]
    if module not in sys.modules and load:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueError(
                f"the file names {name}, but `{module}` cannot be imported: {error}."
            ) from error
    value: Any = sys.modules.get(module)
    for attribute in qualname.split("."):
        is_namespace = value is sys.modules.get(module) or isinstance(value, type)
        value = vars(value).get(attribute) if is_namespace and value is not None else None
    is_canonical = isinstance(value, type | types.FunctionType) and full_name(value) == name
    if not is_canonical:
        raise ValueError(
            f"there is no class or function {name}: build an object of the same structure and pass "
            "it as `like=`."
        )
    return value


@functools.cache
def _listed_functions() -> dict[str, Callable[..., Any]]:
    functions = {}
    for module, names in _FUNCTIONS.items():
        namespace = importlib.import_module(module)
        for name in names.split():
            with contextlib.suppress(AttributeError):  # another release of JAX may lack it
                functions[f"{module}:{name}"] = operator.attrgetter(name)(namespace)
    return functions


@functools.cache
def _names_of_listed_functions() -> dict[Any, str]:
    names: dict[Any, str] = {}
    for name, function in _listed_functions().items():
        names.setdefault(function, name)
    return names


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return not isinstance(value, jax.Array)
