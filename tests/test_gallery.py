"""The gallery has every example, as it stands today."""

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
def test_what_is_kept_is_current(name: str) -> None:
    example = EXAMPLES[name]
    assert gallery.is_current(example), f"examples/{name}.py has changed: run `make gallery`"
    kept = {path.name for path in (gallery.KEPT / name).iterdir()}
    assert kept == {"output.txt", "digest.txt", *example.figures}
    assert (gallery.KEPT / name / "output.txt").read_text().strip()
    for figure in example.figures:
        assert (gallery.KEPT / name / figure).stat().st_size < 300_000


def test_nothing_is_kept_of_other_scripts() -> None:
    assert {path.name for path in gallery.KEPT.iterdir() if path.is_dir()} == set(EXAMPLES)


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
    script.write_text('"""Toy: it prints one.\n\nWords.\n"""\n\nprint(1)\n')
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
