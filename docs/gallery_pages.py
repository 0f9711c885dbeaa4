"""The gallery: renders the scripts of `examples/`, and writes a page for each.

    python docs/gallery_pages.py [--all] [--quick] [NAME ...]     # make gallery
    python docs/gallery_pages.py --pages                          # make gallery-pages

The first runs the scripts whose code or arguments have changed since they were rendered, each in a
separate process and in an empty folder, and stores what they printed and drew in
`docs/gallery/NAME/`. Both then write the pages `docs/gallery/NAME.md` and the cards of the
gallery's first page. A page links to its script; when the documentation is built, a hook of mkdocs
puts the code in the place of the link.
"""

import argparse
import ast
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
STORED = ROOT / "docs/gallery"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
CARDS = re.compile(r"(?<=<!-- examples -->\n).*(?=<!-- end -->)", re.S)
CODE = re.compile(r"\[examples/(\w+)\.py\]\(\.\./\.\./examples/\1\.py\)")

log = logging.getLogger("mkdocs.hooks.gallery")


class Example(NamedTuple):
    """A script, its arguments, and the descriptions of its figures."""

    name: str
    figures: dict[str, str] = {}  # file -> alt text, in the order of the page
    related: tuple[str, ...] = ()  # pages below docs/
    arguments: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()  # modules of examples/ that it imports
    quick: bool = False  # takes less than a minute on two cores


SUBJECTS: dict[str, tuple[Example, ...]] = {
    "Time series": (
        Example(
            "co2",
            {
                "forecast.svg": "The CO2 record, and a ten-year forecast whose band widens",
                "parts.svg": "Three curves with bands: a rising trend, a yearly cycle, deviations",
            },
            related=("howto/inspecting.md", "howto/priors.md"),
        ),
        Example(
            "seasons",
            {"parts.svg": "Temperature, and its seasons, daily cycle and weather, with bands"},
            related=("howto/inspecting.md",),
        ),
        Example(
            "delays",
            {"delays.svg": "A week of delayed flights with bands, and four components of the year"},
            related=("howto/time_series.md", "howto/inspecting.md"),
        ),
        Example(
            "births_by_state",
            {"filled.svg": "Births in three states by day, shown, filled and forecast, with bands"},
            related=("howto/grids.md", "howto/time_series.md"),
        ),
        Example(
            "births",
            {"parts.svg": "Births with a trend, a season, a weekly pattern, and special days"},
            related=("howto/time_series.md", "howto/inspecting.md"),
        ),
        Example(
            "robust",
            {"wind.svg": "Readings and three means: with normal noise it is flat, with a spike"},
            related=("choosing.md",),
        ),
    ),
    "Space": (
        Example(
            "space",
            {"map.svg": "A map of rates: low in the north-east, higher in the west"},
            related=("howto/groups.md",),
        ),
        Example(
            "altitudes",
            {"map.svg": "Two maps: altitudes, higher in the west, and their uncertainty"},
            related=("methods/nearest_neighbors.md", "howto/space.md"),
        ),
        Example(
            "temperatures",
            {"map.svg": "Three maps: temperatures with gaps, without gaps, and their uncertainty"},
            related=("methods/nearest_neighbors.md", "evidence/nearest_neighbors.md"),
        ),
        Example(
            "house_prices",
            {"map.svg": "Three maps: prices at places, the mean between them, and uncertainty"},
            related=("methods/nearest_neighbors.md", "kernels.md"),
        ),
        Example(
            "vapor",
            {"map.svg": "Three maps: amounts at scattered places, their medians, and uncertainty"},
            related=("methods/nearest_neighbors.md", "methods/families.md"),
        ),
        Example(
            "thompson",
            {"yield.svg": "The true yield with two hills, and a function drawn after all rounds"},
            related=("howto/inspecting.md",),
        ),
    ),
    "Counts, classes and changing noise": (
        Example(
            "counts",
            {"replicates.svg": "Share of people with each number of visits, observed and modeled"},
            related=("methods/families.md", "howto/groups.md"),
        ),
        Example(
            "digits_classes",
            {"most_wrong.svg": "Twelve images of digits that the model classifies wrongly"},
            related=("howto/groups.md",),
        ),
        Example(
            "heteroscedastic",
            {"bands.svg": "Expenditure against income: a band of constant width, one that widens"},
            related=("choosing.md", "methods/families.md"),
            quick=True,
        ),
    ),
    "Several outputs, groups and latent inputs": (
        Example(
            "weather",
            {"gaps.svg": "Temperatures at three airports, and predictions where they are hidden"},
            related=("howto/outputs.md",),
        ),
        Example(
            "carriers",
            {"carriers.svg": "Sixteen curves of delays over the day, most of them rising"},
            related=("howto/groups.md",),
        ),
        Example(
            "air_times",
            {"air_times.svg": "Six series of air times with bands, and the seasons of all series"},
            related=("howto/groups.md", "howto/time_series.md"),
        ),
        Example(
            "latent_inputs",
            {"maps.svg": "Two maps of irises in three colors, and a curve with corrected inputs"},
            related=("howto/outputs.md",),
        ),
    ),
    "Large data": (
        Example(
            "flights",
            {
                "hour.svg": "Predicted delays by hour of departure: bands widen over the day",
                "lengthscales.svg": "Intervals of the lengthscale of each input",
                "calibration.svg": "Shares of flights below predicted quantiles, near the diagonal",
                "loss.svg": "The negative ELBO over the steps of training",
            },
            related=("choosing.md", "evidence/index.md"),
            helpers=("flights_report",),
        ),
        Example(
            "exact_large",
            {"fit.svg": "A slice of the posterior: mean, band and sampled functions"},
            related=("methods/iterative.md", "howto/saving.md"),
        ),
        Example(
            "streaming",
            {"errors.svg": "Test errors of a sparse and a decoupled GP, by number of batches"},
            related=("methods/decoupled.md",),
        ),
    ),
    "Features and networks": (
        Example(
            "digits",
            {"most_wrong.svg": "Twelve images of digits, with their probability of being odd"},
            related=("methods/many_features.md",),
            quick=True,
        ),
        Example(
            "flights_features",
            {"hours.svg": "Mean delay by hour of departure"},
            related=("methods/many_features.md",),
            arguments=("--num-steps", "4000"),
            helpers=("flights_report",),
        ),
        Example(
            "relevance_vectors",
            {"fit.svg": "A sinc function, noisy data and the data points whose functions remain"},
            related=("methods/many_features.md",),
            quick=True,
        ),
        Example(
            "network_features",
            {"training.svg": "The log marginal likelihood per observation, rising with the steps"},
            related=("methods/network_features.md",),
            quick=True,
        ),
        Example(
            "deep_kernel",
            {"fits.svg": "A jump and a wave, fitted with a plain kernel and a deep kernel"},
            related=("choosing.md", "methods/network_features.md"),
            quick=True,
        ),
    ),
    "Posteriors over hyperparameters": (
        Example(
            "bayesian_hyperparameters",
            {
                "small.svg": "Intervals of each hyperparameter under four methods, on few data",
                "large.svg": "Intervals of each hyperparameter under two methods, on more data",
            },
            related=("howto/hyperparameters.md",),
        ),
        Example(
            "sparse_hyperparameters",
            {
                "measurements.svg": "Draws for each pair of hyperparameters, by three methods",
                "counts.svg": "Draws for each pair of hyperparameters and the level of counts",
            },
            related=("howto/hyperparameters.md", "howto/checking.md"),
        ),
    ),
    "Infrastructure": (
        Example("checkpoint", related=("howto/saving.md",), quick=True),
        Example("more_than_memory", related=("howto/streams.md",)),
        Example("many_devices", related=("howto/devices.md",)),
    ),
}


def listed() -> dict[str, Example]:
    """All examples, by name."""
    return {example.name: example for examples in SUBJECTS.values() for example in examples}


def _parts(name: str) -> tuple[str, str]:
    """The module docstring of a script, and the code below it."""
    text = (ROOT / f"examples/{name}.py").read_text()
    docstring = ast.parse(text).body[0]
    code = "".join(text.splitlines(keepends=True)[docstring.end_lineno :])
    return ast.get_docstring(ast.parse(text)) or "", code.strip() + "\n"


def _without_docstrings(node: Any) -> Any:
    """A syntax tree as nested tuples, without docstrings, positions and empty fields.

    `ast.dump` has empty fields that differ between versions of Python.
    """
    if isinstance(node, list):
        return tuple(map(_without_docstrings, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    filled = {name: value for name, value in fields.items() if value not in (None, [])}
    items = [(name, _without_docstrings(value)) for name, value in filled.items()]
    return type(node).__name__, *items


def digest(example: Example) -> str:
    """A checksum of the code's syntax tree and of the arguments.

    Comments, docstrings and formatting do not change it.
    """
    paths = [ROOT / f"examples/{name}.py" for name in (example.name, *example.helpers)]
    trees = [_without_docstrings(ast.parse(path.read_text())) for path in paths]
    return hashlib.sha256(repr((trees, example.arguments)).encode()).hexdigest()


def is_current(example: Example) -> bool:
    """Whether today's code and arguments made what is stored."""
    path = STORED / example.name / "digest.txt"
    return path.exists() and path.read_text().strip() == digest(example)


def render(example: Example, into: Path) -> float:
    """Run a script, and store its output and figures in a folder. Returns seconds."""
    began, checksum = time.perf_counter(), digest(example)
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "outputs" / example.name
        drawn.mkdir(parents=True)
        environment = {name: text for name, text in os.environ.items() if name != "SCALEGP_DATA"}
        environment |= {
            "MATPLOTLIBRC": str(ROOT / "docs/figures/matplotlibrc"),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
        }
        script = str(ROOT / f"examples/{example.name}.py")
        process = subprocess.run(
            [sys.executable, script, *example.arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        (into / "output.txt").write_text(process.stdout.strip() + "\n")
        for path in sorted([*drawn.glob("*.svg"), *drawn.glob("*.png")]):
            shutil.copy(path, into / path.name)
        (into / "digest.txt").write_text(checksum + "\n")
    return time.perf_counter() - began


def words(name: str) -> tuple[str, str, str]:
    """Title, one sentence and introduction, from the script's docstring."""
    first, _, introduction = _parts(name)[0].partition("\n")
    title, _, sentence = first.partition(": ")
    return title, sentence[:1].upper() + sentence[1:], introduction.strip()


def _output(example: Example) -> str:
    path = STORED / example.name / "output.txt"
    if not is_current(example):
        log.warning("examples/%s.py has changed since it was rendered: make gallery", example.name)
    return path.read_text() if path.exists() else ""


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _link(page: str) -> str:
    title = re.search(r"^# (.+)$", (ROOT / "docs" / page).read_text(), re.M)
    return f"[{title[1] if title else page}](../{page})"


def page(example: Example) -> str:
    """The page of an example, in Markdown."""
    title, sentence, introduction = words(example.name)
    name, output = example.name, _output(example)
    scripts = [f"examples/{script}.py" for script in (name, *example.helpers)]
    command = " ".join(["python", f"examples/{name}.py", *example.arguments])
    parts = [f"# {title}", f"*{sentence}*", introduction]
    if example.related:
        parts.append("See also: " + ", ".join(map(_link, example.related)) + ".")
    parts += [f"![{alt}]({name}/{file})" for file, alt in example.figures.items()]
    parts += ["## What it prints", f"`{command}`", _fenced("text", output)]
    parts += ["## Code", *(f"[{script}](../../{script})" for script in scripts)]
    return "\n\n".join(parts) + "\n"


def _card(example: Example) -> str:
    title, sentence, _ = words(example.name)
    shown = _fenced("text", "\n".join(_output(example).splitlines()[:9]))
    for file, alt in list(example.figures.items())[:1]:
        shown = f"![{alt}]({example.name}/{file})"
    link = f"**[{title}]({example.name}.md)**"
    return f'<div class="gallery-card" markdown>\n\n{shown}\n\n{link}\n\n{sentence}\n\n</div>'


def cards() -> str:
    """A grid of cards for each subject, for the gallery's first page."""
    parts = []
    for subject, examples in SUBJECTS.items():
        parts += [
            f"## {subject}",
            '<div class="gallery" markdown>',
            *map(_card, examples),
            "</div>",
        ]
    return "\n\n".join(parts)


def pages() -> dict[Path, str]:
    """The pages of the gallery, as they should be."""
    index = STORED / "index.md"
    written = {STORED / f"{name}.md": page(example) for name, example in listed().items()}
    return {index: CARDS.sub(lambda _: f"\n{cards()}\n\n", index.read_text()), **written}


def on_config(config: Any) -> Any:
    """Hook of mkdocs: add the pages to the navigation."""
    (section,) = (entry["Gallery"] for entry in config.nav if "Gallery" in entry)
    for subject, examples in SUBJECTS.items():
        section.append({subject: [f"gallery/{example.name}.md" for example in examples]})
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs: put the code of scripts in the place of links to them."""

    def code(match: re.Match) -> str:
        return _fenced(f'python title="examples/{match[1]}.py"', _parts(match[1])[1])

    return CODE.sub(code, markdown)


def main() -> None:
    """Render what has changed, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="examples to render")
    parser.add_argument("--all", action="store_true", help="also those that have not changed")
    parser.add_argument("--quick", action="store_true", help="only those marked as quick")
    parser.add_argument("--pages", action="store_true", help="write the pages and run nothing")
    options = parser.parse_args()
    for name, example in listed().items() if not options.pages else ():
        chosen = name in (options.names or listed()) and (example.quick or not options.quick)
        if chosen and (options.all or not is_current(example)):
            print(f"{name}:", end=" ", flush=True)
            print(f"{render(example, STORED / name):.0f} s", flush=True)
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
