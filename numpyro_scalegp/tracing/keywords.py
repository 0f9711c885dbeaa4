"""Positional and keyword arguments of models."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks

F = TypeVar("F", bound=Callable[..., Any])

# The keyword under which a decorated function receives the model's keywords as a dict.
_OF_MODEL = "keywords of the model"


class Arguments(NamedTuple):
    """Positional and keyword arguments of one run of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, name: str, value: Any) -> "Arguments":
        """Arguments from a tuple, a dict of keywords, or a pair (tuple, dict).

        Args:
            name: the name of the argument that holds them, for errors.
            value: a tuple, a mapping with string keys, or (tuple, mapping).

        Raises:
            TypeError: if it is anything else.
        """
        if isinstance(value, Mapping):
            return cls((), dict(value))
        expected = "the model's arguments: a tuple, a dict of keywords, or (args, kwargs)"
        checks.instance(name, value, tuple, expected)
        if len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], Mapping):
            return cls(value[0], dict(value[1]))
        return cls(value, {})

    def names(self, model: Callable[..., Any]) -> frozenset[str]:
        """The names of the model's parameters that have a value here."""
        filled = _by_position(_parameters(model))[: len(self.args)]
        return frozenset(filled) | frozenset(self.kwargs)

    def check(self, model: Callable[..., Any], name: str) -> None:
        """Raise a TypeError if the model cannot be called with these arguments.

        Args:
            model: the model.
            name: a name for these arguments, for the error.
        """
        try:
            signature = inspect.signature(_inside(model))
        except (TypeError, ValueError):  # a callable without a signature
            return
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise TypeError(
                f"{name} must have the arguments of the model, {signature}: {error}."
            ) from None


def model_keywords_first(model_of: Callable[..., tuple[Any, int]]) -> Callable[[F], F]:
    """Decorate a function that runs a model, so that the model's keywords take precedence.

    A keyword of a call goes to the model if the model has a parameter of that name that no
    positional argument fills. Otherwise it is an option of the function, if the function has one of
    that name. So an option never hides an argument of the model; to set both, pass the model's by
    position. The `**kwargs` of a model do not take keywords from the options.

    Args:
        model_of: maps the positional arguments of a call to the model, and to the number of
            arguments before the model's own.

    Returns:
        A decorator. The function receives the model's keywords in its `**kwargs`, from which
        `of_model` extracts them.
    """

    def decorated(function: F) -> F:
        names = inspect.signature(function).parameters
        options = {
            name for name, parameter in names.items() if parameter.kind is parameter.KEYWORD_ONLY
        }
        leading = _by_position(names)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            by_name = {name: kwargs[name] for name in leading[len(args) :] if name in kwargs}
            try:
                model, num_leading = model_of(*args, **by_name)
            except (TypeError, AttributeError):
                model, num_leading = None, 0  # the function will raise
            parameters = _parameters(model)
            positional = _by_position(parameters)
            filled = positional[: max(0, len(args) - num_leading)]
            of_model = parameters.keys() - set(filled)
            own_names = {*(options - of_model), *leading[len(args) :]}
            own_kwargs = {name: kwargs[name] for name in kwargs if name in own_names}
            model_kwargs = {name: kwargs[name] for name in kwargs if name not in own_names}
            return function(*args, **own_kwargs, **{_OF_MODEL: model_kwargs})

        return cast(F, call)

    return decorated


def of_model(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The model's keywords, from the `**kwargs` of a decorated function."""
    return kwargs[_OF_MODEL]


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """The named parameters of a model within handlers; empty if it has no signature."""
    try:
        parameters = inspect.signature(_inside(model)).parameters
    except (TypeError, ValueError):
        return {}
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {name: p for name, p in parameters.items() if p.kind not in variable}


def _by_position(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]


def handlers_around(model: Any) -> list[Messenger]:
    """The handlers wrapped around a model, the outermost first."""
    around = []
    while isinstance(model, Messenger) and model.fn is not None:
        around.append(model)
        model = model.fn
    return around


def _inside(model: Any) -> Any:
    around = handlers_around(model)
    return around[-1].fn if around else model
