"""Each layer of the package imports only from those before it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "numpyro_scalegp"
ROOT = Path(__file__).parent.parent / PACKAGE

# These may import NumPyro's distributions, but not its handlers.
WITHOUT_HANDLERS = (
    "core",
    "programs",
    "numerics",
    "kernels",
    "linear",
    "features",
    "processes",
    "scores",
)
LAYERS = (
    *WITHOUT_HANDLERS,
    "sites",
    "tracing",
    "likelihoods",
    "integrated",
    "variational",
    "neighbors",
    "infer",
    "terms",
    "forecasts",
    "saving",
    "streams",
    "sklearn",
    "botorch",
    "export",
)
# Modules of public names, which no layer imports.
NAMESPACES = (
    "solvers",
    "preconditioners",
    "estimators",
    "log_determinants",
    "distributions",
    "families",
    "guides",
    "posteriors",
)
# A leaf: it imports no layer, and no layer but the last imports it.
LEAF = "datasets"
NUMPYRO = {LEAF: (), **dict.fromkeys(WITHOUT_HANDLERS, ("distributions",))}


def imported_names(source: str, parts: tuple[str, ...], is_package: bool) -> Iterator[str]:
    """The absolute dotted name of everything a module imports, wherever in it the import stands.

    Args:
        source: the module's text.
        parts: the module's own name, split at its dots.
        is_package: whether the module is an `__init__.py`, from which `.` means itself.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = node.level - is_package
            base = parts[: len(parts) - above] if node.level else ()
            prefix = ".".join((*base, *filter(None, [node.module])))
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the module named `module` imports against the rule, one sentence each."""
    parts = tuple(module.split("."))
    if len(parts) == 1:
        return []
    layer = parts[1]
    if layer in NAMESPACES:
        return []
    if layer not in (*LAYERS, LEAF):
        return [f"`{layer}` is no known layer: add it to `LAYERS` in {Path(__file__).name}"]

    allowed = {LEAF} if layer == LEAF else set(LAYERS[: LAYERS.index(layer) + 1])
    if layer == LAYERS[-1]:
        allowed.add(LEAF)
    sentences = []
    for name in imported_names(source, parts, is_package):
        top, _, below = name.partition(".")
        target = below.partition(".")[0]
        if top == PACKAGE and target not in allowed:
            sentences.append(
                f"{module} imports {name}: `{layer}` may import {sorted(allowed)} only"
            )
        elif top == "numpyro" and target not in NUMPYRO.get(layer, (target,)):
            sentences.append(
                f"{module} imports {name}: `{layer}` may not import NumPyro's handlers"
            )
    return sentences


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT.parent).with_suffix("")
        yield ".".join(name for name in relative.parts if name != "__init__"), path


def test_layers_import_only_earlier_ones() -> None:
    checked = [
        (module, violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"))
        for module, path in modules()
    ]
    assert checked, f"no modules found under {ROOT}"
    assert not [sentence for _, sentences in checked for sentence in sentences]


@pytest.mark.parametrize(
    ("module", "is_package", "source"),
    [
        ("kernels.rbf", False, "import numpyro_scalegp.linear"),
        ("kernels.rbf", False, "import numpyro_scalegp.linear.cg as cg"),
        ("kernels.rbf", False, "from numpyro_scalegp.linear import cg"),
        ("kernels.rbf", False, "from numpyro_scalegp import solvers"),
        ("kernels.rbf", False, "from numpyro_scalegp import RBF"),
        ("kernels.rbf", False, "import numpyro_scalegp as sgp"),
        ("kernels.rbf", False, "from numpyro_scalegp import *"),
        ("kernels.rbf", False, "from .. import linear"),
        ("kernels.rbf", False, "from ..linear.cg import solve"),
        ("kernels", True, "from ..linear import cg"),
        ("kernels", True, "from .. import linear"),
        ("linear", True, "from .. import features"),
        ("kernels.rbf", False, "def f():\n    from ..linear import cg"),
        ("kernels.rbf", False, "if TYPE_CHECKING:\n    from ..linear import cg"),
        ("kernels.rbf", False, "import numpyro"),
        ("processes.exact", False, "from numpyro import handlers"),
        ("processes.exact", False, "from numpyro.primitives import mutable"),
        ("sites.gp", False, "from ..variational import guide"),
        ("integrated.gp", False, "from ..guides import AutoSparseGP"),
        ("sites.gp", False, "from ..datasets import load_uci"),
        ("datasets", False, "from . import kernels"),
        ("datasets", False, "import numpyro"),
        ("helpers", False, ""),
    ],
)
def test_a_violation_is_caught(module: str, is_package: bool, source: str) -> None:
    assert len(violations(source, f"{PACKAGE}.{module}", is_package)) == 1


@pytest.mark.parametrize(
    ("module", "is_package", "source"),
    [
        ("kernels.rbf", False, "from . import base\nfrom .base import Kernel"),
        ("kernels", True, "from . import base\nfrom .base import Kernel"),
        ("kernels.rbf", False, "from ..core import checks\nfrom .. import core"),
        ("linear.cg", False, "import numpyro_scalegp.kernels.dense"),
        ("processes.exact", False, "import jax\nimport numpyro_extras\nfrom os import path"),
        ("processes.exact", False, "import numpyro.distributions as dist"),
        ("sites.gp", False, "import numpyro\nfrom ..processes import exact"),
        ("estimators", False, "from .integrated.cholesky import Cholesky"),
        ("export", False, "from . import datasets"),
        ("datasets", False, "import csv"),
    ],
)
def test_an_allowed_import_passes(module: str, is_package: bool, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}", is_package) == []


def test_the_package_itself_may_import_everything() -> None:
    assert violations("from . import kernels, export, datasets", PACKAGE, is_package=True) == []
