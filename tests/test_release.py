"""The files of a release agree on versions and requirements."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]


def matches(file: str, pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / file).read_text(), re.M)


def test_version() -> None:
    assert matches("CITATION.cff", r"^version: (.*)$") == [VERSION]
    assert matches("CHANGELOG.md", r"^## \[(.*?)\]")[0] == VERSION
    assert matches("recipe/recipe.yaml", r'^  version: "(.*)"$') == [VERSION]


def test_requirements_of_the_recipe() -> None:
    recipe = [line.replace(" ", "") for line in matches("recipe/recipe.yaml", r"^    - (\w.* .*)$")]
    needed = [*PYPROJECT["build-system"]["requires"], *PYPROJECT["project"]["dependencies"]]
    assert {line for line in recipe if not line.startswith("python")} == set(needed)
    (lowest,) = matches("recipe/recipe.yaml", r'^  python_min: "(.*)"$')
    (above,) = matches("recipe/recipe.yaml", r"^    - python >=\$\{\{ python_min \}\},(.*)$")
    assert f">={lowest},{above}" == PYPROJECT["project"]["requires-python"]


def test_the_hooks_run_the_pinned_ruff() -> None:
    (pinned,) = (
        each
        for each in PYPROJECT["project"]["optional-dependencies"]["test"]
        if each.startswith("ruff")
    )
    assert set(matches(".pre-commit-config.yaml", r"additional_dependencies: \[(.*)\]$")) == {
        pinned
    }


def test_python_versions() -> None:
    prefix = "Programming Language :: Python :: 3."
    classified = [
        each.removeprefix("Programming Language :: Python :: ")
        for each in PYPROJECT["project"]["classifiers"]
        if each.startswith(prefix)
    ]
    (tested,) = matches(".github/workflows/tests.yml", r"^        python: \[(.*)\]$")
    assert tested.replace('"', "").split(", ") == classified


def test_badges() -> None:
    versions = matches(".github/workflows/tests.yml", r"^        python: \[(.*)\]$")[0].split(", ")
    lowest, highest = versions[0].strip('"'), versions[-1].strip('"')
    assert matches("README.md", r"badge/python-(.*)-blue") == [f"{lowest}_to_{highest}"]
    (jax,) = (line for line in PYPROJECT["project"]["dependencies"] if line.startswith("jax>="))
    assert matches("README.md", r"badge/JAX-(.*)_and_later-blue") == [jax.removeprefix("jax>=")]
