"""Has the API pages show a docstring's `Example:` as code.

griffe knows a section of examples by its plural only, and takes `Example:` for a remark in prose.
"""

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Writes the plural before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Run for every module, class, function and attribute once it is read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )
