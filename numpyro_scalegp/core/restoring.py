"""Objects that a failed call leaves as they were."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unchanged_on_failure(*owners: Any) -> Iterator[None]:
    """A context that, left by an exception or an interrupt, sets attributes back.

    Args:
        *owners: objects whose attributes may be set in the context, and their dicts changed.
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
    # Values by identity: a copy of a function made by `functools.partial` is another function.
    return {
        name: dict(value) if type(value) is dict else value for name, value in vars(owner).items()
    }
