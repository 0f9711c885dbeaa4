"""The gallery: renders the scripts of `examples/`, and makes a page of each.

    python docs/gallery_pages.py [--all] [--quick] [NAME ...]

runs those whose code or arguments have changed since they were rendered, each in a process of its
own and in an empty folder, and keeps what they printed and drew in `docs/gallery/NAME/`. When the
documentation is built, the hooks at the end make pages of the scripts and of what is kept, so that
no page repeats a script's code.
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
KEPT = ROOT / "docs/gallery"

log = logging.getLogger("mkdocs.hooks.gallery")


class Example(NamedTuple):
    """A script, how it is run, and what its figures show."""

    name: str
    figures: dict[str, str] = {}  # file -> alt text, in the order of the page
    related: tuple[str, ...] = ()  # pages below docs/
    arguments: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()  # modules of examples/ that it imports
    quick: bool = False  # ends in less than a minute on two cores


SUBJECTS: dict[str, tuple[Example, ...]] = {
    "Time series": (
        Example(
            "co2",
            {
                "forecast.svg": "The record, and a forecast of ten years whose band widens",
                "parts.svg": "Three curves with bands: a rising trend, a yearly cycle, deviations",
            },
            related=("howto/inspecting.md", "howto/priors.md"),
        ),
        Example(
            "seasons",
            {"parts.svg": "Temperature, course of the year, daily cycle and weather, with bands"},
            related=("howto/inspecting.md",),
        ),
        Example(
            "births",
            {"parts.svg": "A trend, the course of a year, the depth of the week, and its days"},
            related=("methods/hilbert_space.md", "howto/inspecting.md"),
        ),
        Example(
            "robust",
            {"wind.svg": "Readings and three means: the normal one is flat with a spike"},
            related=("choosing.md",),
        ),
    ),
    "Space": (
        Example(
            "space",
            {"map.svg": "Rates over the land: low in the north-east, higher in the west"},
            related=("howto/groups.md",),
        ),
        Example(
            "altitudes",
            {"map.svg": "Two maps: the land rises in the west, and is uncertain between airports"},
            related=("methods/nearest_neighbors.md", "howto/space.md"),
        ),
        Example(
            "temperatures",
            {"map.svg": "Three maps: temperatures with holes, without, and how sure these are"},
            related=("methods/nearest_neighbors.md", "evidence/nearest_neighbors.md"),
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
            {"replicates.svg": "Shares of each number of visits: observed and under two models"},
            related=("methods/families.md", "howto/groups.md"),
        ),
        Example(
            "digits_classes",
            {"most_wrong.svg": "Twelve images of digits that the model takes for others"},
            related=("howto/groups.md",),
        ),
        Example(
            "heteroscedastic",
            {"bands.svg": "Expenditure against income, with a band of one width and a growing one"},
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
            "latent_inputs",
            {"maps.svg": "Two maps of irises in three colors, and a curve with moved inputs"},
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
            {"fit.svg": "A slice of the posterior: mean, band and functions"},
            related=("methods/iterative.md", "howto/saving.md"),
        ),
        Example(
            "streaming",
            {"errors.svg": "Test errors over batches of a sparse and a decoupled GP"},
            related=("methods/decoupled.md",),
        ),
    ),
    "Features and networks": (
        Example(
            "digits",
            {"most_wrong.svg": "Twelve images of digits with their probability to be odd"},
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
            {"fit.svg": "A sinc function, noisy data and the rows whose functions are left"},
            related=("methods/many_features.md",),
            quick=True,
        ),
        Example(
            "network_features",
            {"training.svg": "The log marginal likelihood of a row, rising with the steps"},
            related=("methods/network_features.md",),
            quick=True,
        ),
        Example(
            "deep_kernel",
            {"fits.svg": "A step and a wave under a plain kernel and under a deep one"},
            related=("choosing.md", "methods/network_features.md"),
            quick=True,
        ),
    ),
    "Posteriors over hyperparameters": (
        Example(
            "bayesian_hyperparameters",
            {
                "small.svg": "Intervals of each hyperparameter under four methods, on few rows",
                "large.svg": "Intervals of each hyperparameter under two methods, on more rows",
            },
            related=("howto/hyperparameters.md",),
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
    return {one.name: one for examples in SUBJECTS.values() for one in examples}


def _parts(name: str) -> tuple[str, str]:
    """The module docstring of a script, and its code without that."""
    text = (ROOT / f"examples/{name}.py").read_text()
    docstring = ast.parse(text).body[0]
    code = "".join(text.splitlines(keepends=True)[docstring.end_lineno :])
    return ast.get_docstring(ast.parse(text)) or "", code.strip() + "\n"


def digest(example: Example) -> str:
    """Changes with the code and the arguments, and not with words about them."""
    parts = [_parts(name)[1] for name in (example.name, *example.helpers)]
    return hashlib.sha256("\0".join([*parts, *example.arguments]).encode()).hexdigest()


def is_current(example: Example) -> bool:
    """Whether what is kept was made by today's code and arguments."""
    path = KEPT / example.name / "digest.txt"
    return path.exists() and path.read_text().strip() == digest(example)


def render(example: Example, into: Path) -> float:
    """Run a script; its output and figures go to a folder. Returns seconds."""
    began, what = time.perf_counter(), digest(example)
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
        done = subprocess.run(
            [sys.executable, script, *example.arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        (into / "output.txt").write_text(done.stdout.strip() + "\n")
        for path in sorted([*drawn.glob("*.svg"), *drawn.glob("*.png")]):
            shutil.copy(path, into / path.name)
        (into / "digest.txt").write_text(what + "\n")
    return time.perf_counter() - began


def words(name: str) -> tuple[str, str, str]:
    """Title, one sentence and introduction, as the script's docstring has them."""
    first, _, introduction = _parts(name)[0].partition("\n")
    title, _, sentence = first.partition(": ")
    return title, sentence[:1].upper() + sentence[1:], introduction.strip()


def _output(example: Example) -> str:
    path = KEPT / example.name / "output.txt"
    if not is_current(example):
        log.warning("examples/%s.py is not rendered as it stands: make gallery", example.name)
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
    command = " ".join(["python", f"examples/{name}.py", *example.arguments])
    parts = [f"# {title}", f"*{sentence}*", introduction]
    if example.related:
        parts.append("See also: " + ", ".join(map(_link, example.related)) + ".")
    parts += [f"![{alt}]({name}/{file})" for file, alt in example.figures.items()]
    parts += ["## What it prints", f"`{command}`", _fenced("text", output)]
    for script in (name, *example.helpers):
        parts += [f"## examples/{script}.py", _fenced("python", _parts(script)[1])]
    return "\n\n".join(parts) + "\n"


def _card(example: Example) -> str:
    title, sentence, _ = words(example.name)
    shown = _fenced("text", "\n".join(_output(example).splitlines()[:9]))
    for file, alt in list(example.figures.items())[:1]:
        shown = f"![{alt}]({example.name}/{file})"
    link = f"[{title}]({example.name}.md){{ .gallery-title }}"
    return f'<div class="gallery-card" markdown>\n\n{shown}\n\n{link}\n\n{sentence}\n\n</div>'


def cards() -> str:
    """What stands on the gallery's first page: a grid of cards for each subject."""
    parts = []
    for subject, examples in SUBJECTS.items():
        parts += [
            f"## {subject}",
            '<div class="gallery" markdown>',
            *map(_card, examples),
            "</div>",
        ]
    return "\n\n".join(parts)


def on_config(config: Any) -> Any:
    """mkdocs: put the pages into the navigation."""
    (section,) = (entry["Gallery"] for entry in config.nav if "Gallery" in entry)
    for subject, examples in SUBJECTS.items():
        section.append({subject: [f"gallery/{one.name}.md" for one in examples]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the pages."""
    from mkdocs.structure.files import File

    for one in listed().values():
        files.append(File.generated(config, f"gallery/{one.name}.md", content=page(one)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs: fill in the gallery's first page."""
    if page.file.src_uri == "gallery/index.md":
        return markdown.replace("<!-- examples -->", cards())
    return markdown


def main() -> None:
    """Render what has changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="examples to render")
    parser.add_argument("--all", action="store_true", help="also those that have not changed")
    parser.add_argument("--quick", action="store_true", help="only those marked as quick")
    options = parser.parse_args()
    for name, example in listed().items():
        chosen = name in (options.names or listed()) and (example.quick or not options.quick)
        if chosen and (options.all or not is_current(example)):
            print(f"{name}:", end=" ", flush=True)
            print(f"{render(example, KEPT / name):.0f} s", flush=True)


if __name__ == "__main__":
    main()
