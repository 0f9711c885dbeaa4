"""Restoring objects after a failed call."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unchanged_on_failure(*owners: Any) -> Iterator[None]:
    """A context that restores attributes after an exception or an interrupt.

    Args:
        *owners: objects whose attributes, including dicts, may change in the context.
    """
    before = [_attributes(owner) for owner in owners]
    try:
        yield
    except BaseException:
        for owner, attributes in zip(owners, before, strict=True):
            vars(owner).clear()
            vars(owner).update(attributes)
        raise


def _attributes(owner: Any) -> dict[str, Any]:
    # Values are not copied, since a copy of a `functools.partial` would be a different function.
    return {
        name: dict(value) if type(value) is dict else value for name, value in vars(owner).items()
    }
