"""Notebooks of pages: each page of NOTEBOOKS as notebooks/NAME.ipynb, to open in Colab.

    python docs/notebooks.py            # or make notebooks

A page is the text form of its notebook: its prose becomes Markdown cells, its Python blocks code
cells. Links become absolute, since a notebook is read far from the other pages. The blocks of pages
are run by the tests, and so are the notebooks without a page.
"""

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/OWNER/numpyro_scalegp"
COLAB = "https://colab.research.google.com/github/OWNER/numpyro_scalegp/blob/main"
INSTALL = f"# %pip install -q 'numpyro_scalegp[examples] @ git+{REPOSITORY}'"
NOTEBOOKS = {
    f"docs/{page}.md": f"notebooks/{PurePosixPath(page).name}.ipynb"
    for page in (
        "start/first_fit",
        "howto/regression",
        "howto/counts",
        "howto/classes",
        "howto/time_series",
        "howto/space",
        "howto/groups",
        "howto/missing",
        "howto/workflow",
        "howto/checking",
    )
}
# Those for the documentation of NumPyro and for ArviZ's gallery have no page.
NOTEBOOKS |= {
    f"notebooks/{name}.md": f"notebooks/{name}.ipynb"
    for name in ("numpyro_sparse_gp", "arviz_gaussian_process")
}


def cell(kind: str, number: int, source: str) -> dict[str, Any]:
    """A cell of nbformat 4.5."""
    fields: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        fields |= {"execution_count": None, "outputs": []}
    return fields | {"source": source.strip("\n").splitlines(keepends=True)}


def with_absolute_links(text: str, page: PurePosixPath) -> str:
    """Markdown whose links to files lead to the repository."""

    def absolute(match: re.Match[str]) -> str:
        opening, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        parts: list[str] = []
        for name in (page.parent / target).parts:
            parts = parts[:-1] if name == ".." else [*parts, name]
        kind = "raw" if opening.startswith("!") else "blob"
        return f"{opening}{REPOSITORY}/{kind}/main/{'/'.join(parts)})"

    return re.sub(r"(!?\[[^\]]*\]\()([^)\s]+)\)", absolute, text)


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a page."""
    text = (ROOT / page).read_text()
    text = re.sub(r"^\[!\[Open in Colab\].*\n\n?", "", text, flags=re.M)
    parts = re.split(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
    cells = []
    for number, source in enumerate(parts):
        if not source.strip():
            continue
        if number % 2:
            cells.append(cell("code", len(cells), source))
            continue
        source = with_absolute_links(source, PurePosixPath(page))
        cells.append(cell("markdown", len(cells), source))
        if number == 0:
            cells.append(cell("code", len(cells), INSTALL))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def badge(file: str) -> str:
    """The link of a page that opens its notebook."""
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    return f"[![Open in Colab]({image})]({COLAB}/{file})"


def written(page: str) -> str:
    """The file of a page's notebook."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for page, file in NOTEBOOKS.items():
        (ROOT / file).write_text(written(page))
