"""The classes of docs/develop/extending.md, as the page defines them."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs/develop/extending.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def _run() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": __name__}
    exec("\n".join(BLOCKS), found)
    return found


CLASSES = _run()
globals().update(CLASSES)  # what is saved is found again by its name
