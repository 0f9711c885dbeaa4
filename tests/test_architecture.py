"""The page on the architecture names every layer, and its picture is that of the layer test."""

import re

from tests.files import ROOT, load
from tests.test_layers import LAYERS, LEAF

DOCS = ROOT / "docs"


def test_the_picture_is_not_stale() -> None:
    found = (DOCS / "figures/layers.svg").read_text(encoding="utf-8")
    assert found == load("docs/figures/layers.py").picture(), "run: python docs/figures/layers.py"


def test_the_table_has_the_layers_in_their_order() -> None:
    text = (DOCS / "develop/architecture.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `(\w+)` \|", text, re.M)) == (*LAYERS, LEAF)
