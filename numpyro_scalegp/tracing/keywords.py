"""Arguments of a model, by position and by name."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks

F = TypeVar("F", bound=Callable[..., Any])

# Under this name a decorated function gets the model's keywords, apart from its options.
_OF_MODEL = "keywords of the model"


class Arguments(NamedTuple):
    """Positional and keyword arguments of one run of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, name: str, value: Any) -> "Arguments":
        """From positional arguments, a dict of keywords, or a tuple of both.

        Args:
            name: of the argument that holds them, for errors.
            value: a tuple, a mapping with strings as keys, or (tuple, mapping).

        Raises:
            TypeError: if it is none of these.
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
            name: of what holds the arguments.
        """
        try:
            signature = inspect.signature(_inside(model))
        except (TypeError, ValueError):  # a callable that shows none
            return
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise TypeError(
                f"{name} must have the arguments of the model, {signature}: {error}."
            ) from None


def model_keywords_first(model_of: Callable[..., tuple[Any, int]]) -> Callable[[F], F]:
    """Let a function that runs a model leave the model's keywords to the model.

    A keyword of a call belongs to the model if the model has a parameter of that name which no
    positional argument fills; otherwise it is an option of the function, if there is one of that
    name. So an option never hides an argument of the model, and a model whose parameter has the
    name of an option takes it by position where both are wanted. Models that take any keywords
    (`**kwargs`) have none of these names.

    Args:
        model_of: from the positional arguments of a call to the model, and how many of the
            arguments come before the model's own.

    Returns:
        A decorator. The function gets all of the model's keywords as its `**kwargs`, which
        `of_model` takes out.
    """

    def decorated(function: F) -> F:
        names = inspect.signature(function).parameters
        options = {name for name, one in names.items() if one.kind is one.KEYWORD_ONLY}
        leading = _by_position(names)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            by_name = {name: kwargs[name] for name in leading[len(args) :] if name in kwargs}
            try:
                model, num_leading = model_of(*args, **by_name)
            except (TypeError, AttributeError):
                model, num_leading = None, 0  # the function itself raises
            parameters = _parameters(model)
            positional = _by_position(parameters)
            filled = positional[: max(0, len(args) - num_leading)]
            of_model = parameters.keys() - set(filled)
            own = {*(options - of_model), *leading[len(args) :]}
            mine = {name: value for name, value in kwargs.items() if name in own}
            others = {name: value for name, value in kwargs.items() if name not in own}
            return function(*args, **mine, **{_OF_MODEL: others})

        return cast(F, call)

    return decorated


def of_model(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The model's keywords, of the `**kwargs` that a decorated function gets."""
    return kwargs[_OF_MODEL]


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a model that have names, behind handlers; none if they do not show."""
    try:
        parameters = inspect.signature(_inside(model)).parameters
    except (TypeError, ValueError):
        return {}
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {name: one for name, one in parameters.items() if one.kind not in variable}


def _by_position(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, one in parameters.items() if one.kind in kinds]


def handlers_around(model: Any) -> list[Messenger]:
    """The handlers that are wrapped around a model, the outermost first."""
    around = []
    while isinstance(model, Messenger) and model.fn is not None:
        around.append(model)
        model = model.fn
    return around


def _inside(model: Any) -> Any:
    around = handlers_around(model)
    return around[-1].fn if around else model
