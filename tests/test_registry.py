"""Every public class goes through the conformance tests, or is listed as an exception."""

import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import jax

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import AbstractKernel
from tests import registry
from tests.conformance import inputs

# Public classes that no registry makes, by the reason.
EXCEPTIONS = {
    "what others return": (
        "forecasts.Impact",
        "forecasts.RollingScores",
        "datasets.Dataset",
        "estimators.Audit",
        "estimators.SolverState",
        "infer.Draws",
        "infer.Hyperparameters",
        "infer.LogDeterminantDiagnostics",
        "infer.RefinedHyperparameters",
        "preconditioners.PreconditionerFactor",
        "solvers.Solution",
        "solvers.StopReason",
    ),
    "the only one of its kind, with separate tests": (
        "infer.Predictive",
        "kernels.LinearSDE",
        "posteriors.FilteredPosterior",
        "infer.RowOptimizer",
        "plate",
        "infer.RowSVI",
        "infer.WhitenReparam",
        "sklearn.ScalableGPClassifier",
        "sklearn.ScalableGPRegressor",
        "streams.Stream",
        "terms.HilbertSpaceTerm",
        "terms.SparseTerm",
    ),
}


def public_classes() -> dict[str, type]:
    """The public classes of the package and its modules, by their shortest names."""
    names: dict[type, str] = {}
    modules = [""] + [module.name for module in pkgutil.iter_modules(sgp.__path__)]
    for name in modules:
        if name == "botorch" and importlib.util.find_spec(name) is None:
            continue
        module = importlib.import_module(f"numpyro_scalegp.{name}".rstrip("."))
        for each in getattr(module, "__all__", ()) or public_names(module):
            if inspect.isclass(value := getattr(module, each)):
                names.setdefault(value, f"{name}.{each}".lstrip("."))
    return {name: value for value, name in names.items()}


def public_names(module: Any) -> list[str]:
    """The names that a module without `__all__` defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def made_classes() -> set[type]:
    """The classes of the objects that the registries make."""
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

    instances = [make(name, f) for name, entries in registries.items() for _, f in entries]
    return {type(member) for instance in instances for member in (instance, *parts(instance))}


def parts(instance: Any) -> list[AbstractKernel]:
    """The kernels within a kernel."""
    kernels = list(instance.parts.values()) if isinstance(instance, AbstractKernel) else []
    return [*kernels, *(deeper for kernel in kernels for deeper in parts(kernel))]


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
        and not value.__name__.startswith("Abstract")  # has no instances of its exact class
    ]
    assert not missing, f"{missing}: add a line to tests/registry.py"
    stale = [name for name in exceptions if name not in classes or classes[name] in made]
    assert not stale, f"{stale}: take them out of EXCEPTIONS"
