"""The classes of docs/develop/extending.md, as the page defines them."""

from typing import Any

from tests.files import blocks

BLOCKS = blocks("docs/develop/extending.md")


def _run() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": __name__}
    exec("\n".join(BLOCKS), namespace)
    return namespace


CLASSES = _run()
globals().update(CLASSES)  # what is saved is found again by its name
