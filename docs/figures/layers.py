"""The picture of the layers, from the layer test and the first line of each layer's docstring.

    python docs/figures/layers.py

writes docs/figures/layers.svg; `tests/test_architecture.py` compares.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.test_layers import LAYERS, LEAF, PACKAGE, WITHOUT_HANDLERS  # noqa: E402

WIDTH, HEIGHT, NAME = 780, 26, 190
INK = "#222222"


def purpose(layer: str) -> str:
    """The first line of a layer's docstring."""
    folder = ROOT / PACKAGE / layer
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].replace("`", "")


def picture() -> str:
    """The layers from the last, above, to the first, below, with the line that NumPyro crosses."""
    layers, lines, top = [*reversed(LAYERS)], [], 10
    for layer in layers:
        if layer == WITHOUT_HANDLERS[-1]:
            lines.append(
                f'<line x1="0" y1="{top + 7}" x2="{WIDTH}" y2="{top + 7}" stroke="{INK}" '
                'stroke-dasharray="6 4"/>'
            )
            note = "below this line, of NumPyro only its distributions"
            lines.append(f'<text x="{WIDTH}" y="{top + 22}" text-anchor="end">{note}</text>')
            top += 30
        lines.append(
            f'<rect x="0.5" y="{top}.5" width="{NAME}" height="{HEIGHT - 5}" fill="none" '
            f'stroke="{INK}"/>'
        )
        lines.append(f'<text x="10" y="{top + 16}">{layer}</text>')
        lines.append(f'<text x="{NAME + 14}" y="{top + 16}">{purpose(layer)}</text>')
        top += HEIGHT
    top += 8
    lines.append(
        f'<rect x="0.5" y="{top}.5" width="{NAME}" height="{HEIGHT - 5}" fill="none" '
        f'stroke="{INK}" stroke-dasharray="3 3"/>'
    )
    lines.append(f'<text x="10" y="{top + 16}">{LEAF}</text>')
    leaf = f"{purpose(LEAF)} Only {LAYERS[-1]} may import it."
    lines.append(f'<text x="{NAME + 14}" y="{top + 16}">{leaf}</text>')
    style = f'font-family="Helvetica, Arial, sans-serif" font-size="12.5" fill="{INK}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + HEIGHT}" '
            f"{style}>",
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs/figures/layers.svg").write_text(picture(), encoding="utf-8")
