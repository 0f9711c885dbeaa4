"""The page on the architecture names every layer, and its picture is that of the layer test."""

import importlib.util
import re

from tests.test_layers import LAYERS, LEAF, ROOT

DOCS = ROOT.parent / "docs"


def test_the_picture_is_not_stale() -> None:
    path = DOCS / "figures/layers.py"
    spec = importlib.util.spec_from_file_location("layers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = (DOCS / "figures/layers.svg").read_text(encoding="utf-8")
    assert found == module.picture(), "run: python docs/figures/layers.py"


def test_the_table_has_the_layers_in_their_order() -> None:
    text = (DOCS / "develop/architecture.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `(\w+)` \|", text, re.M)) == (*LAYERS, LEAF)
