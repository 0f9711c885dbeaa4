"""Show the fields of an `equinox.Module` as its constructor's arguments on the API pages.

griffe, which reads the sources for mkdocstrings, does this for `dataclasses.dataclass` only.
"""

from collections.abc import Iterator
from typing import Any

import griffe

POSITIONAL = griffe.ParameterKind.positional_or_keyword


def _classes(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    for member in parent.members.values():
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _classes(member)
        if isinstance(member, griffe.Class):
            yield member


def _path(expression: Any) -> str:
    return getattr(expression, "canonical_path", "")


def _parameters(cls: griffe.Class) -> Iterator[griffe.Parameter]:
    for name, field in cls.members.items():
        if not isinstance(field, griffe.Attribute) or field.annotation is None:
            continue
        is_static = field.labels == {"class-attribute"}
        if is_static or "property" in field.labels or "AbstractVar" in str(field.annotation):
            continue
        default = field.value
        if isinstance(default, griffe.ExprCall) and _path(default).endswith(".field"):
            options = {a.name: a.value for a in default.arguments if hasattr(a, "name")}
            if str(options.get("init")) == "False":
                continue
            default = options.get("default", options.get("default_factory"))
        yield griffe.Parameter(name, annotation=field.annotation, kind=POSITIONAL, default=default)


def _lineage(cls: griffe.Class) -> list[griffe.Class]:
    return [*reversed(cls.mro()), cls]


def _without_constructor(cls: griffe.Class) -> bool:
    line = _lineage(cls)
    bases = {_path(base) for ancestor in line for base in ancestor.bases}
    return "equinox.Module" in bases and not any("__init__" in c.members for c in line)


class EquinoxFields(griffe.Extension):
    """Gives every `equinox.Module` without a constructor the constructor of its fields."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called after the whole package is read, so that base classes are available."""
        # List all classes first: a base class's new constructor must not hide its subclasses.
        for cls in [c for c in _classes(pkg) if _without_constructor(c)]:
            fields = {field.name: field for c in _lineage(cls) for field in _parameters(c)}
            cls.set_member(
                "__init__",
                griffe.Function(
                    "__init__",
                    lineno=cls.lineno,
                    endlineno=cls.lineno,
                    parent=cls,
                    parameters=griffe.Parameters(
                        griffe.Parameter("self", kind=POSITIONAL), *fields.values()
                    ),
                ),
            )
