"""Every public class goes through the conformance tests, or is known not to."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import jax

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import AbstractKernel
from tests import registry
from tests.conformance import inputs

# Public classes that no registry makes, by why.
EXCEPTIONS = {
    "what others return": (
        "datasets.Dataset",
        "estimators.Audit",
        "estimators.SolverState",
        "infer.Draws",
        "infer.Hyperparameters",
        "infer.LogDeterminantDiagnostics",
        "solvers.Solution",
        "solvers.StopReason",
    ),
    "the only one of its kind, with tests of its own": (
        "infer.Predictive",
        "infer.RowOptimizer",
        "plate",
        "infer.RowSVI",
        "infer.WhitenReparam",
        "streams.Stream",
    ),
}


def public_classes() -> dict[str, type]:
    """The classes that the package and its modules offer, by their shortest names."""
    found: dict[type, str] = {}
    modules = [""] + [module.name for module in pkgutil.iter_modules(sgp.__path__)]
    for name in modules:
        module = importlib.import_module(f"numpyro_scalegp.{name}".rstrip("."))
        for each in getattr(module, "__all__", ()) or public_names(module):
            if inspect.isclass(value := getattr(module, each)):
                found.setdefault(value, f"{name}.{each}".lstrip("."))
    return {name: value for value, name in found.items()}


def public_names(module: Any) -> list[str]:
    """The names of a module without `__all__`: what it defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def made_classes() -> set[type]:
    """The classes of what the registries make."""
    X, kernel = inputs(), sgp.kernels.Matern52(1.0)
    arguments: dict[str, tuple[Any, ...]] = {
        "KERNELS": (1.0,),
        "OPERATORS": (kernel, X),
        "PRECONDITIONERS": (),
        "SOLVERS": (),
        "ESTIMATORS": (),
        "FEATURES": (kernel, X),
        "LOG_DETERMINANTS": (),
        "LATENT_FAMILIES": (kernel, X),
        "DISTRIBUTIONS": (kernel, X),
        "POSTERIORS": (kernel, X),
        "ELBOS": (),
        "GUIDES": (lambda: None,),
    }
    registries = {name: value for name, value in vars(registry).items() if type(value) is list}
    assert registries.keys() == arguments.keys()

    def make(name: str, factory: Callable[..., Any]) -> Any:
        if name == "POSTERIORS":  # without the work
            return jax.eval_shape(lambda: factory(*arguments[name]))
        return factory(*arguments[name])

    found = [make(name, f) for name, entries in registries.items() for _, f in entries]
    return {type(part) for one in found for part in (one, *parts(one))}


def parts(one: Any) -> list[AbstractKernel]:
    """The kernels within a kernel."""
    own = list(one.parts.values()) if isinstance(one, AbstractKernel) else []
    return [*own, *(deeper for part in own for deeper in parts(part))]


def test_every_public_class_is_in_a_registry():
    made = made_classes()
    exceptions = [name for names in EXCEPTIONS.values() for name in names]
    classes = public_classes()
    assert len(classes) > 60
    missing = [
        name
        for name, value in classes.items()
        if value not in made
        and name not in exceptions
        and not value.__name__.startswith("Abstract")  # nothing can be one and no more
    ]
    assert not missing, f"{missing}: add a line to tests/registry.py"
    stale = [name for name in exceptions if name not in classes or classes[name] in made]
    assert not stale, f"{stale}: take them out of EXCEPTIONS"
