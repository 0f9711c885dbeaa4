"""Scripts of the repository as modules, and the code of its pages."""

import importlib.util
import json
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def load(path: str) -> ModuleType:
    """A script as a module, registered under its name so that its classes find it."""
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def blocks(page: str) -> list[str]:
    """The code of a page, also where it is indented, as in a tab, or of a notebook."""
    if page.endswith(".ipynb"):
        cells = json.loads((ROOT / page).read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    fenced = r"^( *)```python\n(.*?)^\1```"
    matches = re.findall(fenced, (ROOT / page).read_text(), re.M | re.S)
    return [textwrap.dedent(block) for _, block in matches]
