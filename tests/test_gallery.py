"""The gallery has every example, as it stands today, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.files import ROOT, load

gallery = load("docs/gallery_pages.py")
EXAMPLES = gallery.listed()
HELPERS = {helper for example in EXAMPLES.values() for helper in example.helpers}


def test_every_script_is_listed_once() -> None:
    scripts = {path.stem for path in ROOT.glob("examples/*.py")}
    assert scripts == set(EXAMPLES) | HELPERS
    assert len(EXAMPLES) == sum(map(len, gallery.SUBJECTS.values()))


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_what_is_stored_is_current(name: str) -> None:
    example = EXAMPLES[name]
    assert gallery.is_current(example), f"examples/{name}.py has changed: run `make gallery`"
    stored = {path.name for path in (gallery.STORED / name).iterdir()}
    assert stored == {"output.txt", "digest.txt", *example.figures}
    assert (gallery.STORED / name / "output.txt").read_text().strip()
    for figure in example.figures:
        assert (gallery.STORED / name / figure).stat().st_size < 300_000


def test_nothing_is_stored_of_other_scripts() -> None:
    assert {path.name for path in gallery.STORED.iterdir() if path.is_dir()} == set(EXAMPLES)


def test_pages_are_current() -> None:
    for path, text in gallery.pages().items():
        assert path.read_text() == text, f"{path.name} is behind: make gallery-pages"
    written = {path.name for path in gallery.STORED.glob("*.md")}
    assert written == {"index.md", *(f"{name}.md" for name in EXAMPLES)}


def test_the_site_shows_the_code_in_place_of_links() -> None:
    shown = gallery.on_page_markdown(gallery.page(EXAMPLES["flights"]))
    assert 'python title="examples/flights.py"' in shown
    assert 'python title="examples/flights_report.py"' in shown
    assert "../../examples" not in shown


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs"])
def test_links_between_files_work_in_the_repository(page: str) -> None:
    path = ROOT / page
    for file in path.rglob("*.md") if path.is_dir() else [path]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", file.read_text()):
            assert "://" in target or (file.parent / target).exists(), f"{file}: {target}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstrings_begin_with_title_and_sentence(name: str) -> None:
    title, sentence, introduction = gallery.words(name)
    assert title and sentence.endswith(".") and introduction


@pytest.mark.parametrize("name", EXAMPLES)
def test_helpers_are_those_imported(name: str) -> None:
    code = (ROOT / f"examples/{name}.py").read_text()
    imported = {helper for helper in HELPERS if f"from {helper} import" in code}
    assert imported == set(EXAMPLES[name].helpers)


def test_digest_follows_code_and_arguments_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    script = tmp_path / "examples/toy.py"
    script.parent.mkdir()
    script.write_text('"""A toy: it prints."""\n\nprint(1)\n')
    example = gallery.Example("toy")
    before = gallery.digest(example)
    script.write_text('"""Toy: it prints one.\n\nWords.\n"""\n\n# One.\nprint( 1 )\n')
    assert gallery.digest(example) == before
    assert gallery.digest(example._replace(arguments=("--rows", "3"))) != before
    script.write_text('"""A toy: it prints."""\n\nprint(2)\n')
    assert gallery.digest(example) != before


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_a_quick_example_renders(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example = EXAMPLES["relevance_vectors"]
    gallery.render(example, tmp_path / example.name)
    drawn = {path.name for path in (tmp_path / example.name).iterdir()}
    assert drawn == {"output.txt", "digest.txt", *example.figures}
