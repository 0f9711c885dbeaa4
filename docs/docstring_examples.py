"""Show a docstring's `Example:` as code on the API pages.

griffe recognizes a section of examples by its plural only, and reads `Example:` as prose.
"""

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Writes `Examples:` before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute after it is read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )
