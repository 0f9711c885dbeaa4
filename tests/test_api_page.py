"""Each public name has a line on the API page, and is used on another page or in an example."""

import importlib
import re
from types import ModuleType

import pytest

import numpyro_scalegp as sgp
from tests.test_layers import ROOT

REPOSITORY = ROOT.parent
PAGE = REPOSITORY / "docs/api.md"
# Without modules, which are sections of the page.
NAMESPACES = [name for name in sgp.__all__ if isinstance(getattr(sgp, name), ModuleType)]
MODULES = ["", *NAMESPACES]


def public_names(module: str) -> list[str]:
    """The public names of a module: its `__all__`, or the names that it defines."""
    package = importlib.import_module(f"numpyro_scalegp.{module}".rstrip("."))
    names = getattr(package, "__all__", None) or [
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == package.__name__
    ]
    return [name for name in names if type(getattr(package, name)) is not type(sgp)]


@pytest.mark.parametrize("module", MODULES)
def test_a_name_is_on_the_page(module: str) -> None:
    tables = set(re.findall(r"^\| \[`(\w+)`\]", PAGE.read_text(encoding="utf-8"), re.M))
    missing = [name for name in public_names(module) if name not in tables]
    # Functions that stand on the page by themselves, not in a table of a namespace.
    text = PAGE.read_text(encoding="utf-8")
    assert not [name for name in missing if not re.search(rf"^::: .*\.{name}$", text, re.M)]


@pytest.mark.parametrize("module", MODULES)
def test_a_name_is_used(module: str) -> None:
    files = [*REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("examples/*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if path != PAGE)
    unused = [name for name in public_names(module) if not re.search(rf"\b{name}\b", text)]
    assert not unused, f"{unused} of `{module}` are on no page and in no example"


def test_each_section_begins_with_a_choice() -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) > len(NAMESPACES)
    for section in sections:
        assert re.search(r"^\*\*If unsure,\*\* (?:.+\n)+\n\| name \|", section, re.M), section[:40]


def test_the_tables_have_public_names_only() -> None:
    tables = re.findall(r"^\| \[`(\w+)`\]", PAGE.read_text(encoding="utf-8"), re.M)
    public = {name for module in MODULES for name in public_names(module)}
    assert not set(tables) - public
