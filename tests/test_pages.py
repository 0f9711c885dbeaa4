"""The code of each page, block after block, as a reader would paste it.

A page's blocks run in order in one namespace, in an empty folder. One thing is made small: training
takes few steps, samplers few draws, and first fits small subsets, by `_few` below; the notebook has
fewer rows, too. A block
that cannot run by itself, such as one for a cluster, is fenced as `py` instead of `python`.
"""

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from numpyro.infer import MCMC, SVI

import numpyro_scalegp as sgp
from tests.files import ROOT, blocks

STEPS = 3
DRAWS = 10
SUBSETS = {"subset_size": 100, "num_subsets": 1, "num_steps": STEPS, "num_scored": 50,
           "num_neighbors": 50, "num_refinements": 1}  # fmt: skip

ALL = {
    str(path.relative_to(ROOT))
    for place in ("docs", "notebooks")
    for path in (ROOT / place).rglob("*.md")
}
# Runs in a separate process in `test_the_first_page_runs_as_pasted`, as README's example.
ALL.remove("docs/index.md")
NOTEBOOK = "notebooks/scalable_gaussian_processes.ipynb"
PAGES = [*sorted(page for page in ALL if blocks(page)), NOTEBOOK]


def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """End training and sampling after a few steps."""
    for kind in (SVI, sgp.infer.RowSVI):
        monkeypatch.setattr(kind, "run", _with_few_steps(vars(kind)["run"]))
    monkeypatch.setattr(sgp.streams, "run", _with_few_steps(sgp.streams.run))
    find = sgp.infer.initial_hyperparameters
    small = lambda *args, **options: find(*args, **{**options, **SUBSETS})  # noqa: E731
    monkeypatch.setattr(sgp.infer, "initial_hyperparameters", small)
    begin = MCMC.__init__

    def init(self: MCMC, kernel: Any, *, num_warmup: int, num_samples: int, **options: Any) -> None:
        few = {"num_warmup": min(num_warmup, DRAWS), "num_samples": min(num_samples, DRAWS)}
        begin(self, kernel, **few, **options)

    monkeypatch.setattr(MCMC, "__init__", init)


def _with_few_steps(run: Any) -> Any:
    def few(svi: SVI, key: Any, num_steps: int, *args: Any, **options: Any) -> Any:
        return run(svi, key, min(num_steps, STEPS), *args, **options)

    return few


# The first steps of a sampler are large.
@pytest.mark.filterwarnings("ignore:a covariance matrix was not positive:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:a covariance matrix is not positive:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:a linear solve ended above:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Laplace.s approximation found no mode:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.one_interpreter
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_as_pasted(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    _few(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")  # what a page sets must not stay
    was_x64 = jax.config.read("jax_enable_x64")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number, block in enumerate(blocks(page)):
            block = block.replace("n, d = 10_000, 6", "n, d = 300, 6")
            block = block.replace("length=1000", f"length={STEPS}")
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
    finally:
        jax.config.update("jax_enable_x64", was_x64)
    assert not re.search(r"\bnan\b", capsys.readouterr().out)
