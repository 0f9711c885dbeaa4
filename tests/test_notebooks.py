"""The notebooks are made from the pages, and open in Colab."""

import json
from types import ModuleType

import pytest

from tests.files import ROOT, blocks, load

notebooks: ModuleType = load("docs/notebooks.py")


@pytest.mark.parametrize("page", notebooks.NOTEBOOKS)
def test_a_notebook_is_not_behind_its_page(page: str) -> None:
    file = notebooks.NOTEBOOKS[page]
    assert (ROOT / file).read_text() == notebooks.written(page), "run `make notebooks`"
    cells = json.loads((ROOT / file).read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code[0].startswith("# %pip install")
    assert code[1:] == [block.strip("\n") for block in blocks(page)]
    assert page.startswith("notebooks/") or notebooks.badge(file) in (ROOT / page).read_text()


def test_links_become_absolute() -> None:
    page = notebooks.PurePosixPath("docs/howto/counts.md")
    text = "[a](../methods/families.md#latent) [b](#part) [c](https://x.y) ![d](../figures/e.svg)"
    start = notebooks.REPOSITORY
    assert notebooks.with_absolute_links(text, page) == (
        f"[a]({start}/blob/main/docs/methods/families.md#latent) [b](#part) [c](https://x.y) "
        f"![d]({start}/raw/main/docs/figures/e.svg)"
    )
