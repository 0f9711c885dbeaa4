"""What stands in several files of a release is the same in all of them."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]


def found(file: str, pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / file).read_text(), re.M)


def test_version() -> None:
    assert found("CITATION.cff", r"^version: (.*)$") == [VERSION]
    assert found("CHANGELOG.md", r"^## \[(.*?)\]")[0] == VERSION
    assert found("recipe/recipe.yaml", r'^  version: "(.*)"$') == [VERSION]


def test_requirements_of_the_recipe() -> None:
    recipe = [line.replace(" ", "") for line in found("recipe/recipe.yaml", r"^    - (\w.* .*)$")]
    needed = [*PYPROJECT["build-system"]["requires"], *PYPROJECT["project"]["dependencies"]]
    assert {line for line in recipe if not line.startswith("python")} == set(needed)
    (lowest,) = found("recipe/recipe.yaml", r'^  python_min: "(.*)"$')
    (above,) = found("recipe/recipe.yaml", r"^    - python >=\$\{\{ python_min \}\},(.*)$")
    assert f">={lowest},{above}" == PYPROJECT["project"]["requires-python"]


def test_the_hooks_run_the_pinned_ruff() -> None:
    (pinned,) = (
        each
        for each in PYPROJECT["project"]["optional-dependencies"]["test"]
        if each.startswith("ruff")
    )
    assert set(found(".pre-commit-config.yaml", r"additional_dependencies: \[(.*)\]$")) == {pinned}


def test_python_versions() -> None:
    prefix = "Programming Language :: Python :: 3."
    classified = [
        each.removeprefix("Programming Language :: Python :: ")
        for each in PYPROJECT["project"]["classifiers"]
        if each.startswith(prefix)
    ]
    (tested,) = found(".github/workflows/tests.yml", r"^        python: \[(.*)\]$")
    assert tested.replace('"', "").split(", ") == classified


def test_badges() -> None:
    versions = found(".github/workflows/tests.yml", r"^        python: \[(.*)\]$")[0].split(", ")
    lowest, highest = versions[0].strip('"'), versions[-1].strip('"')
    assert found("README.md", r"badge/python-(.*)-blue") == [f"{lowest}_to_{highest}"]
    (jax,) = (one for one in PYPROJECT["project"]["dependencies"] if one.startswith("jax>="))
    assert found("README.md", r"badge/JAX-(.*)_and_later-blue") == [jax.removeprefix("jax>=")]
