"""The page on the architecture names every layer, and its picture shows the tested layers."""

import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import numpyro_scalegp as sgp
from tests.files import ROOT, load
from tests.test_layers import LAYERS, LEAF

DOCS = ROOT / "docs"


def test_the_picture_is_not_stale() -> None:
    picture = (DOCS / "figures/layers.svg").read_text(encoding="utf-8")
    assert picture == load("docs/figures/layers.py").picture(), "run: python docs/figures/layers.py"


def test_the_table_has_the_layers_in_their_order() -> None:
    text = (DOCS / "develop/architecture.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `(\w+)` \|", text, re.M)) == (*LAYERS, LEAF)


def test_the_way_to_a_kernel_is_that_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "develop/architecture.md").read_text(encoding="utf-8")
    block = text.partition("### From a `GaussianProcess` to its kernel")[2].split("```")[1]
    page = [tuple(line.split()[:2]) for line in block.splitlines()[1:]]
    ways = set()
    evaluate = sgp.kernels.Matern32.evaluate

    def recorded(*args):
        frames = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
        package = Path(sgp.__file__).parent
        package_frames = [(path, name) for path, name in frames if package in path.parents]
        ways.add(tuple((str(path.relative_to(package)), name) for path, name in package_frames))
        return evaluate(*args)

    monkeypatch.setattr(sgp.kernels.Matern32, "evaluate", recorded)
    estimator = sgp.estimators.Pathwise(sgp.solvers.ConjugateGradients())
    X, key = jnp.ones((200, 2)), jax.random.key(0)
    gp = sgp.GaussianProcess(sgp.kernels.Matern32(1.0), X, 0.1, estimator=estimator, key=key)
    jax.eval_shape(gp.log_prob, jnp.ones(200))
    assert any(_is_within(page[:-1], way) for way in ways)


def _is_within(page: list[tuple[str, ...]], way: tuple[tuple[str, str], ...]) -> bool:
    """Whether a way has all steps of the page, in their order."""
    steps = iter(way)
    return all(step in steps for step in page)
