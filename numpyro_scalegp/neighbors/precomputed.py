"""Neighbors of the inputs of a model's GP sites, found before the model is compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpyro.primitives import Messenger

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.host import as_numpy
from numpyro_scalegp.integrated.gaussian_process import GaussianProcess
from numpyro_scalegp.integrated.laplace.laplace import LaplaceGP
from numpyro_scalegp.neighbors.graph import NeighborGraph
from numpyro_scalegp.neighbors.prior import NearestNeighborGP
from numpyro_scalegp.neighbors.vecchia import AbstractNeighbors
from numpyro_scalegp.sites.rows import unwrapped
from numpyro_scalegp.tracing.fitted_runs import is_gp
from numpyro_scalegp.tracing.runs import Trace


class PrecomputedNeighbors(Messenger):
    """Gives precomputed neighbor graphs to the estimators at the GP sites of a model.

    Args:
        graphs: neighbor graphs by the names of the sites, from `precompute_neighbors`.
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


def precompute_neighbors(run: Callable[[Any], Trace], *draws: Any) -> dict[str, NeighborGraph]:
    """The neighbor graphs of a model's GP sites whose estimators use neighbors.

    The neighbor search runs on the host, where a compiled model has no concrete inputs.

    Args:
        run: a run of the model with concrete arguments, given a draw of the latent sites.
        *draws: two or more draws. Sites whose inputs depend on the draw get no graph.
    """
    inputs: dict[str, Any] = {}
    jax.eval_shape(lambda draw: inputs.update(_estimators_and_inputs(run(draw))), draws[0])
    if not checks.is_concrete(inputs):
        # The model computes the inputs from its arguments or from what it samples.
        first, *later = [_estimators_and_inputs(run(draw)) for draw in draws]
        inputs = {
            name: (estimator, X)
            for name, (estimator, X) in first.items()
            if all(_are_equal(X, sites[name][1]) for sites in later)
        }
    return {name: estimator.find_neighbors(X).graph for name, (estimator, X) in inputs.items()}


def _are_equal(X: Any, Z: Any) -> bool:
    """Whether two arrays are concrete and equal."""
    return checks.is_concrete((X, Z)) and np.array_equal(as_numpy(X), as_numpy(Z))


def _estimators_and_inputs(trace: Trace) -> dict[str, tuple[AbstractNeighbors, Any]]:
    """For each GP site whose estimator lacks a neighbor graph, the estimator and its inputs."""
    sites = {}
    for name, site in trace.items():
        if not is_gp(site):
            continue
        fn: Any = unwrapped(site["fn"]).distribution
        estimator = getattr(fn, _attribute(fn), None) if _attribute(fn) else None
        if isinstance(estimator, AbstractNeighbors) and estimator.graph is None:
            if site["is_observed"] and isinstance(fn, GaussianProcess):
                fn = fn._shown()  # without masked observations
            sites[name] = estimator, fn.X
    return sites


def _attribute(fn: Any) -> str:
    """The name of the attribute that holds a distribution's nearest-neighbor estimator, or ""."""
    if isinstance(fn, GaussianProcess | LaplaceGP):
        return "estimator"
    return "neighbors" if isinstance(fn, NearestNeighborGP) else ""
