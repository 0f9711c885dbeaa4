"""The words of code and pages: terms of the field, and local names that say what a value is."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = ["numpyro_scalegp", "tests", "examples", "benchmarks", "docs", ".ci"]
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]

# What a local name may not be, since it does not say what the value is.
FILLERS = {
    "both",
    "found",
    "given",
    "kept",
    "known",
    "one",
    "other",
    "others",
    "own",
    "part",
    "rest",
    "seen",
    "some",
    "wanted",
    "whole",
}
MOST_FILLERS = 60

# A phrase -> what to write.
PHRASES = {
    r"\bto some \d": "up to about 3,000",
    r"\bsome \d": "about 3,000",
    r"\bone's\b": "your, or the noun",
    r"\bof (its|their|one's|your|our|his|a) own\b": "its own x; separate; custom; for each",
    r"\bas of (?!\d|the date|version|Python)": "such as x's",
    r"\bthat of\b": "the noun again: the prior variance",
    r"\bthose of\b": "the noun again: the rows of X",
    r"\bgo(es|ing)? on\b|\bwent on\b": "continues, resumes",
    r"\bgets? on\b(?! with)": "is added to; makes progress",
    r"\blest\b": "so that ... not",
    r"\bbe (it|they)\b": "whether",
    r"\banew\b": "again, updated",
    r"\b(there|here)of\b": "its",
    r"\bof which none\b": "none of which",
    r"\bsines on\b": "a Hilbert-space basis",
    r"\bsays? nothing\b": "is irrelevant; is uninformative",
    r"\bfor nothing\b": "at no extra cost",
    r"\bwhatever\b": "any; regardless of",
    r"\bwhoever\b": "users who",
    r"\bWhat is (not|to be)\b": "the noun: what other packages lack",
    r"\blift(s|ed)?\b": "added jitter",
    r"\btwins?\b": "independent estimate; copy",
    r"\briders?\b": "probe vectors",
    r"\bnone of (its|their)\b": "not one of",
    r"\bis none of\b": "is not",
    r"\bknows? of\b": "are correlated; have",
    r"\bmade-up\b": "simulated",
    r"\bas far as\b": "if; where",
    r"\bat hand\b": "available",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\ba law\b": "a distribution",
    r"\bthe like\b": "such as x and y",
    r"\bdeal of\b": "much",
}


def bound_names(tree: ast.AST) -> Iterator[str]:
    """The names that a module binds to values: assigned, looped over, or arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_local_names_are_nouns() -> None:
    counts: Counter[str] = Counter()
    for path in MODULES:
        names = Counter(bound_names(ast.parse(path.read_text())))
        counts[str(path.relative_to(ROOT))] = sum(names[name] for name in FILLERS)
    assert counts.total() <= MOST_FILLERS, counts.most_common(30)


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrases_of_the_field(phrase: str) -> None:
    pattern = re.compile(phrase.replace(" ", r"\s+(?:#\s*)?"))
    places = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in PAGES + MODULES
        if path != Path(__file__)
        for text in [path.read_text()]
        for match in pattern.finditer(text)
    ]
    assert not places, f"{len(places)}, write {PHRASES[phrase]!r}: {places[:20]}"
