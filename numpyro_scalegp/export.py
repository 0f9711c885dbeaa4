"""Export of results to ArviZ: `InferenceData` in ArviZ 0.2x, an xarray `DataTree` from 1.0 on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, ArrayLike, Key
from numpyro import handlers
from numpyro.infer import MCMC, init_to_feasible
from numpyro.infer.autoguide import AutoDelta

from numpyro_scalegp.core import checks
from numpyro_scalegp.infer.predictive import Draws, Predictive
from numpyro_scalegp.integrated.iterative.solver_state import SolverState
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.sites.mini_batches import is_subsampled
from numpyro_scalegp.sites.rows import counted
from numpyro_scalegp.tracing.runs import is_data, is_latent, trace_of_call
from numpyro_scalegp.variational.fitted import components
from numpyro_scalegp.variational.guide import AbstractGPGuide

_STATISTICS = {"num_steps": "n_steps", "accept_prob": "acceptance_rate", "energy": "energy"}


def to_arviz(
    result: Any,
    model: Callable | None = None,
    guide: Callable | None = None,
    *,
    key: Key[Array, ""],
    model_args: Sequence[Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    num_samples: int = 1000,
    sites: Sequence[str] | None = None,
    constant_data: Mapping[str, ArrayLike] | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str | None]] | None = None,
) -> Any:
    """Export the result of SVI or MCMC to ArviZ.

    The groups are:

    - `posterior`; after a guide whose function does not follow the hyperparameters (see
      `AutoSparseGP`), its attribute `hyperparameters` says that their draws vary too little;
    - `posterior_predictive`: replicates of the observed sites;
    - `log_likelihood`: pointwise log densities of the observed sites, without `numpyro.factor`
      terms. For a `GaussianProcess`, `MultiOutputGP` or `FeatureSpaceGP` site these are the
      leave-one-out densities log p(y_i | y_-i, parameters), which PSIS leave-one-out expects.
      Masked entries are left out; the other entries of a site `y` have the dimension `y_counted`;
    - `observed_data` and `constant_data`;
    - `sample_stats`. For SVI: the `loss` of each step and, from solver states, `residual`,
      `probe_residual`, `epochs`, `converged` and `standard_error` of each step. For MCMC:
      divergences and other statistics. For each draw with an exact `GaussianProcess`, `jitter` and
      its ratio to the noise variance, `jitter_to_noise`; with an iterative estimator, diagnostics
      of the draw's solve such as `draw_residual` and `draw_epochs`.

    Args:
        result: an `MCMC` after its run, the result of `SVI.run`, or a dict of SVI parameters.
        model: the model; for MCMC the sampler's model by default.
        guide: for SVI, the guide.
        key: a typed JAX key.
        model_args: the model's positional arguments, including observations; for MCMC by default
            the arguments of its run. Pass all data to export, not mini-batches.
        model_kwargs: the model's keyword arguments, with the same default for MCMC.
        num_samples: for SVI, the number of draws from the guide.
        sites: latent and deterministic sites to include in `posterior`; None for all. A function at
            many inputs takes much space: leave it out.
        constant_data: other arrays to store, such as the inputs.
        coords: a dict from the names of dimensions to labels, as in ArviZ's converters; integers by
            default.
        dims: a dict from the names of sites and constant data to the names of their dimensions,
            without chains and draws. A dimension whose name is missing or None is `y_dim_0` and so
            on.

    Returns:
        An `arviz.InferenceData` (ArviZ 0.2x) or `xarray.DataTree` (ArviZ >= 1). The model runs once
        for each draw. A run costs a factorization for an exact Gaussian process, a solve that
        starts at the solver state for an iterative estimator, and O(n d^2) for features: export few
        draws of a large model.

    Raises:
        ImportError: if ArviZ is not installed.
        ValueError: if the model or the guide is missing, a name in `sites` or `dims` is unknown, a
            site has fewer axes than names in `dims`, a length differs from the labels in `coords`,
            or the model subsamples its data.

    References:
        Buerkner, Gabry and Vehtari (2021), Efficient leave-one-out cross-validation for Bayesian
        non-factorized normal and Student-t models.
    """
    key = checks.as_key(key)
    if isinstance(result, MCMC):
        model = result.sampler.model if model is None else model
        args = tuple(result._args if model_args is None else model_args)
        kwargs = dict(result._kwargs if model_kwargs is None else model_kwargs)
        chains = result.get_samples(group_by_chain=True)
        shape = next(iter(chains.values())).shape[:2]
        flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in chains.items()}
        predictive = Predictive(model, posterior_samples=flat)
    else:
        if not (isinstance(result, Mapping) or hasattr(result, "params")):
            raise TypeError(
                "`result` must be an MCMC after its run, what SVI.run returned or a dict of "
                f"parameters, got {checks.described(result)}."
            )
        if model is None or guide is None:
            raise ValueError("`model` and `guide` must be given with a result of SVI.")
        args, kwargs, shape = tuple(model_args or ()), dict(model_kwargs or {}), (1, num_samples)
        params = result if isinstance(result, Mapping) else {**result.params, **_states(result)}
        predictive = Predictive(model, guide=guide, params=dict(params), num_samples=num_samples)
    predictive._is_at_fit = True
    masks = _observed_masks(model, args, kwargs)
    draws = predictive.draws(key, *args, **kwargs)
    constants = {name: np.asarray(value) for name, value in (constant_data or {}).items()}
    axes = _Axes({k: np.asarray(v) for k, v in (coords or {}).items()}, dict(dims or {}))
    exported = sorted({*draws.sites, *draws.observed, *constants})
    for name in sorted(set(axes.dims) - set(exported)):
        raise ValueError(f"`dims` has `{name}`, and there are {exported} to export.")
    groups = _groups(draws, shape, sites, axes, masks)
    groups["sample_stats"] |= _statistics(result)
    groups["constant_data"] = {name: axes.labeled(name, v) for name, v in constants.items()}
    return _assemble(groups, {} if isinstance(result, MCMC) else _warning_of(guide))


def _warning_of(guide: Any) -> dict[str, str]:
    """What the `posterior` group says of hyperparameters whose draws vary too little."""
    *_, innermost = parts = list(components(guide))
    held = [
        type(part).__name__
        for part in parts
        if isinstance(part, AbstractGPGuide) and not part.follows_hyperparameters
    ]
    trace = getattr(innermost, "prototype_trace", None)
    has_draws = trace is None or any(map(is_latent, trace.values()))
    if not held or not has_draws or isinstance(innermost, AutoDelta):
        return {}
    return {
        "hyperparameters": (
            f"Their draws vary too little, often by a factor of several: the function of "
            f"{' and '.join(held)} does not follow them. Fit with AutoSparseGP(natural=True), or "
            "call sgp.infer.refine_hyperparameters."
        )
    }


class _Axes(NamedTuple):
    """Names of dimensions, and labels along dimensions."""

    coords: dict[str, np.ndarray]
    dims: dict[str, Sequence[str | None]]

    def labeled(
        self,
        name: str,
        values: np.ndarray,
        shape: tuple[int, int] | None = None,
        mask: np.ndarray | None = None,
    ) -> tuple[tuple[str, ...], np.ndarray, dict[str, np.ndarray]]:
        """Names of the dimensions, the values, and labels along the dimensions.

        Args:
            name: the variable's name.
            values: the values, with a leading axis of draws if `shape` is given.
            shape: the numbers of chains and draws.
            mask: entries to keep, without the axis of draws; None for all.
        """
        lengths = values.shape[0 if shape is None else 1 :]
        names = self.dims.get(name, ())
        if isinstance(names, str) or len(names) > len(lengths):
            raise ValueError(
                f"`dims` has {names!r} for `{name}`, whose axes have the lengths {lengths}: give a "
                "list of names, one for each axis."
            )
        padded = [*names, *[None] * (len(lengths) - len(names))]
        dims = tuple(dim or f"{name}_dim_{axis}" for axis, dim in enumerate(padded))
        labels = {}
        for dim, length in zip(dims, lengths, strict=True):
            labels[dim] = self.coords.get(dim, np.arange(length))
            if labels[dim].shape != (length,):
                raise ValueError(
                    f"`coords` has labels of shape {labels[dim].shape} for the dimension `{dim}`, "
                    f"along which `{name}` has the length {length}."
                )
        if mask is not None and not mask.all():
            indices = np.flatnonzero(mask)
            values = values.reshape(len(values), -1)[:, indices]
            labels = {f"{name}_counted": labels[dims[0]][indices] if len(dims) == 1 else indices}
            dims = tuple(labels)
        if shape is None:
            return dims, values, labels
        return ("chain", "draw", *dims), values.reshape(*shape, *values.shape[1:]), labels


def _groups(
    draws: Draws,
    shape: tuple[int, int],
    sites: Sequence[str] | None,
    axes: _Axes,
    masks: dict[str, np.ndarray],
) -> dict[str, dict[str, Any]]:
    """The variables of each group as (dimension names, values, labels)."""
    unknown = set(sites or ()) - set(draws.sites)
    if unknown:
        raise ValueError(f"`sites` has {sorted(unknown)}, the model has {sorted(draws.sites)}.")

    def by_chain(values: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {name: axes.labeled(name, v, shape) for name, v in values.items()}

    selected = {name: draws.sites[name] for name in (draws.sites if sites is None else sites)}
    return {
        "posterior": by_chain(selected),
        "posterior_predictive": by_chain(draws.predictive),
        "log_likelihood": {
            name: axes.labeled(name, v, shape, _as_mask(masks.get(name), v))
            for name, v in draws.log_likelihood.items()
            if np.any(masks.get(name, True))
        },
        "observed_data": {name: axes.labeled(name, v[0]) for name, v in draws.observed.items()},
        "sample_stats": by_chain(
            {
                _suffixed(stat if "jitter" in stat else f"draw_{stat}", name, draws.diagnostics): v
                for name, diagnostics in draws.diagnostics.items()
                for stat, v in diagnostics.items()
            }
        ),
    }


def _as_mask(mask: np.ndarray | None, values: np.ndarray) -> np.ndarray | None:
    """The unmasked entries of a pointwise density, in its shape."""
    return None if mask is None else np.broadcast_to(mask, values.shape[1:])


def _suffixed(statistic: str, name: str, sites: Mapping[str, Any]) -> str:
    """The statistic's name, followed by the site's name if there are several sites."""
    return statistic if len(sites) == 1 else f"{statistic}_{name}"


def _states(result: Any) -> dict[str, Any]:
    """The mutable state of an SVI result."""
    return getattr(getattr(result, "state", None), "mutable_state", None) or {}


def _statistics(result: Any) -> dict[str, Any]:
    if isinstance(result, MCMC):
        fields = result.get_extra_fields(group_by_chain=True)
        statistics: dict[str, Any] = {
            _STATISTICS.get(name, name): (("chain", "draw"), np.asarray(value), {})
            for name, value in fields.items()
            if np.ndim(value) == 2
        }
        if "potential_energy" in statistics:
            dims, energy, _ = statistics.pop("potential_energy")
            statistics["lp"] = (dims, -energy, {})
        return statistics
    statistics = {}
    if hasattr(result, "losses"):
        statistics["loss"] = (("chain", "step"), np.asarray(result.losses)[None], {})
    states = {k: v for k, v in _states(result).items() if isinstance(v, SolverState)}
    for name, state in states.items():
        for statistic, values in state.history().items():
            # The last steps of a run longer than the history; all steps of a resumed run.
            statistics[_suffixed(statistic, name, states)] = (
                ("chain", "solver_step"),
                np.asarray(values)[None],
                {},
            )
    return statistics


def _observed_masks(model: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, np.ndarray]:
    """The entries of each observed site that are not masked.

    Raises:
        ValueError: if the model draws mini-batches, which would differ between draws.
    """

    # Compiled, so that only the masks are computed and not the rest of the model.
    @compiled
    def run(args: tuple, kwargs: dict[str, Any]) -> dict[str, Array]:
        seeded = handlers.seed(model, rng_seed=0)
        feasible = handlers.substitute(seeded, substitute_fn=init_to_feasible)
        trace = trace_of_call(feasible, args, kwargs)
        for name, site in trace.items():
            if is_subsampled(site):
                raise ValueError(
                    f"the plate `{name}` takes {site['args'][1]} of {site['args'][0]} rows: pass "
                    "`model_args` (or `model_kwargs`) with which the model sees all rows to export."
                )
        observed = {name: site for name, site in trace.items() if is_data(site)}
        return {name: counted(site["fn"]) for name, site in observed.items()}

    return {name: np.asarray(mask) for name, mask in run(args, kwargs).items()}


def _labels_of(variables: dict[str, Any]) -> dict[str, np.ndarray]:
    """Labels along the dimensions of a group, whose variables must agree on their lengths."""
    by_dim: dict[str, tuple[str, np.ndarray]] = {}
    for name, (_, _, labels) in variables.items():
        for dim, values in labels.items():
            first_name, first_values = by_dim.setdefault(dim, (name, values))
            if len(first_values) != len(values):
                raise ValueError(
                    f"`dims` names the dimension `{dim}` of `{first_name}`, of length "
                    f"{len(first_values)}, and of `{name}`, of length {len(values)}: give them "
                    "different names."
                )
    return {dim: labels for dim, (_, labels) in by_dim.items()}


def _assemble(groups: dict[str, dict[str, Any]], attributes: dict[str, str]) -> Any:
    try:
        import arviz
        import xarray
    except ImportError as error:
        raise ImportError(
            "`to_arviz` needs ArviZ: pip install arviz, or pip install numpyro_scalegp[examples]."
        ) from error
    datasets = {}
    for group, variables in groups.items():
        if variables:
            arrays = {name: (dims, values) for name, (dims, values, _) in variables.items()}
            labels = _labels_of(variables)
            attrs = attributes if group == "posterior" else {}
            attrs = {"inference_library": "numpyro_scalegp", **attrs}
            dataset = xarray.Dataset(arrays, attrs=attrs)
            numbered = {d: np.arange(n) for d, n in dataset.sizes.items() if d not in labels}
            datasets[group] = dataset.assign_coords({**numbered, **labels})
    if int(arviz.__version__.split(".")[0]) >= 1:
        return xarray.DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)  # type: ignore[arg-type]
