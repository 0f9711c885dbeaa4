"""The page of warnings and errors quotes the messages in the package's code.

The page has the first sentence of every warning, and of every error in the layers of `LAYERS`,
which models, guides and objectives use. Errors that explain themselves, "`name` must ...", are left
out; test_bad_inputs.py tests them. Formatted values are "..." on the page.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import PACKAGE
from tests.test_layers import ROOT as SOURCE

PAGE = SOURCE.parent / "docs/troubleshooting.md"
LAYERS = (
    "processes",
    "sites",
    "tracing",
    "likelihoods",
    "integrated",
    "variational",
    "neighbors",
    "infer",
)


def template(node: ast.expr) -> str:
    """The text of an expression, with "..." for formatted values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) for value in node.values)
    return "..."


def first_sentence(text: str) -> str:
    """Up to the first colon, semicolon or full stop that ends a clause."""
    text = re.sub(r"(\.\.\.)+", "\0", text)
    return re.split(r"[:;.](?:\s|$)", text, maxsplit=1)[0].replace("\0", "...")


def plain(text: str) -> str:
    """Text without Markdown."""
    return " ".join(text.replace("`", "").replace("\\|", "|").split())


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """The kind, "warning" or "error", and the text of each message of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            yield "warning", template(node.args[0])
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            if ast.unparse(node.exc.func) != "NotImplementedError":
                yield "error", template(node.exc.args[0])
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_WARNINGS":
            assert isinstance(node.value, ast.Dict)
            yield from (("warning", template(value)) for value in node.value.values)


def sentences(kind: str) -> list[tuple[str, str]]:
    """The file and the first sentence of each text of a kind that the page should have."""
    entries = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for of_kind, text in texts(path):
            sentence = plain(first_sentence(text))
            is_listed = kind == "warning" or name.partition("/")[0] in LAYERS
            explains_itself = kind == "error" and re.match(r"`[^`]*` must ", text)
            if of_kind == kind and is_listed and not explains_itself and len(sentence) > 3:
                entries.append((name, sentence))
    return entries


@pytest.mark.parametrize(("kind", "least"), [("warning", 24), ("error", 60)])
def test_the_page_has_all_texts(kind: str, least: int) -> None:
    page = plain(PAGE.read_text(encoding="utf-8"))
    entries = sentences(kind)
    assert len(entries) >= least, f"where are the {kind}s of {PACKAGE}?"
    missing = [f"{name}: {sentence}" for name, sentence in entries if sentence not in page]
    assert not missing, "docs/troubleshooting.md lacks:\n" + "\n".join(missing)


def test_each_warning_says_what_to_do() -> None:
    """A warning has more than one sentence or clause: the later ones are the remedy."""
    bare = [
        f"{path.name}: {text}"
        for path in SOURCE.rglob("*.py")
        for kind, text in texts(path)
        if kind == "warning" and text != "..." and first_sentence(text) == text.rstrip(".")
    ]
    assert not bare
