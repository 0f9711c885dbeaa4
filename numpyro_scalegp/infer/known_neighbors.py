"""Neighbors of the rows of a model's GP sites, found before its arguments are traced."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.distributions import GaussianProcess
from numpyro_scalegp.distributions.rows import unwrapped
from numpyro_scalegp.estimators.neighbor_graph import NeighborGraph
from numpyro_scalegp.estimators.vecchia import AbstractNeighbors
from numpyro_scalegp.families import NearestNeighborGP
from numpyro_scalegp.infer.fitted_runs import is_gp
from numpyro_scalegp.tracing.runs import Trace


class KnownNeighbors(Messenger):
    """Has the estimators at the GP sites of a model know the neighbors of their rows.

    Args:
        graphs: by the names of the sites, as `known_neighbors` finds them.
    """

    def __init__(self, graphs: dict[str, NeighborGraph]) -> None:
        super().__init__()
        self.graphs = graphs

    def process_message(self, msg: dict[str, Any]) -> None:
        """Replace the estimator of a site."""
        if (graph := self.graphs.get(msg.get("name", ""))) is not None and is_gp(msg):
            fn = unwrapped(msg["fn"]).distribution
            estimator = dataclasses.replace(getattr(fn, _attribute(fn)), graph=graph)
            setattr(fn, _attribute(fn), estimator)


def known_neighbors(run: Callable[[Any], Trace], *draws: Any) -> dict[str, NeighborGraph]:
    """The neighbors of the rows of a model's sites whose estimators look at them.

    What is compiled gets a model's arguments as traced arrays, and neighbors are found on the host.

    Args:
        run: a run of the model with arguments that are known, given what differs from one run to
            the next, such as a draw of the latent sites.
        *draws: some of these. Rows that depend on them have no neighbors beforehand.
    """
    rows: dict[str, Any] = {}
    jax.eval_shape(lambda draw: rows.update(_rows(run(draw))), draws[0])
    if not checks.is_concrete(rows):
        # Computed in the model, from its arguments or from what it samples.
        first, *others = [_rows(run(draw)) for draw in draws]
        rows = {
            name: (estimator, X)
            for name, (estimator, X) in first.items()
            if all(_is_same(X, other[name][1]) for other in others)
        }
    return {name: estimator.find_neighbors(X).graph for name, (estimator, X) in rows.items()}


def _is_same(X: Any, other: Any) -> bool:
    """Whether two matrices of rows are known, and equal."""
    return checks.is_concrete((X, other)) and np.array_equal(as_numpy(X), as_numpy(other))


def _rows(trace: Trace) -> dict[str, tuple[AbstractNeighbors, Any]]:
    """The estimators that know no neighbors yet, and the rows that they look at."""
    found = {}
    for name, site in trace.items():
        if not is_gp(site):
            continue
        fn: Any = unwrapped(site["fn"]).distribution
        estimator = getattr(fn, _attribute(fn), None) if _attribute(fn) else None
        if isinstance(estimator, AbstractNeighbors) and estimator.graph is None:
            shown = fn._shown() if site["is_observed"] and isinstance(fn, GaussianProcess) else fn
            found[name] = estimator, shown.X
    return found


def _attribute(fn: Any) -> str:
    """What a distribution calls its estimator that may look at neighbors."""
    if isinstance(fn, GaussianProcess):
        return "estimator"
    return "neighbors" if isinstance(fn, NearestNeighborGP) else ""
