"""Results as ArviZ data: `InferenceData` in ArviZ 0.2x, an xarray `DataTree` from 1.0 on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, ArrayLike, Key
from numpyro import handlers
from numpyro.infer import MCMC, init_to_feasible

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.programs import compiled
from numpyro_scalegp.distributions.mini_batches import takes_part
from numpyro_scalegp.distributions.rows import counted
from numpyro_scalegp.estimators import SolverState
from numpyro_scalegp.infer import Draws, Predictive
from numpyro_scalegp.tracing.runs import is_data, trace_of_call

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

    Groups: `posterior`, `posterior_predictive` (replicates of the observed sites),
    `log_likelihood` (pointwise, of observed sites and not of `numpyro.factor` terms; for a
    `GaussianProcess`, `MultiOutputGP` or `FeatureSpaceGP` site the leave-one-out densities
    log p(y_i | y_-i, parameters), which PSIS leave-one-out takes; entries that a mask hides are
    left out, and the others of a site `y` stand along `y_counted`),
    `observed_data`, `constant_data` and `sample_stats` (SVI: `loss` over steps and, of solver
    states, `residual`, `probe_residual`, `epochs`, `converged` and `standard_error` over steps;
    MCMC: divergences and their like; for each draw `jitter` of an exact Gaussian process and
    `jitter_to_noise`, its ratio to the noise variance, or `draw_residual`, `draw_epochs` and their
    like of an iterative one).

    Args:
        result: an `MCMC` after its run, what `SVI.run` returns, or a dict of SVI parameters.
        model: the model; for MCMC the sampler's own by default.
        guide: for SVI, the guide.
        key: a typed JAX key.
        model_args: the model's positional arguments, observations included; for MCMC those of its
            run by default. The model must get all the rows to export: no mini-batches.
        model_kwargs: the model's keyword arguments, likewise.
        num_samples: for SVI, draws from the guide.
        sites: latent and deterministic sites to keep in `posterior`; None for all. A function at
            many rows makes a large group.
        constant_data: further arrays to store, such as the inputs.
        coords: labels along dimensions by the dimensions' names, as ArviZ's own converters take
            them; integers by default.
        dims: names of the dimensions by the names of sites and constant data, without chains and
            draws: `y_dim_0` and so on by default, and where a name is None.

    Returns:
        An `arviz.InferenceData` (ArviZ 0.2x) or `xarray.DataTree` (ArviZ >= 1). Time: one run of
        the model a draw; an exact Gaussian process costs a factorization each, an iterative one a
        solve that starts at the solver state, features O(n d^2): ask for few draws of a large one.

    Raises:
        ImportError: if ArviZ is not installed.
        ValueError: if the model or the guide is missing, a name in `sites` or `dims` is unknown,
            a site has fewer axes than `dims` or another length than in `coords`, or the model
            subsamples its rows.

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
    masks = _counted(model, args, kwargs)
    draws = predictive.draws(key, *args, **kwargs)
    constants = {name: np.asarray(value) for name, value in (constant_data or {}).items()}
    axes = _Axes({k: np.asarray(v) for k, v in (coords or {}).items()}, dict(dims or {}))
    known = sorted({*draws.sites, *draws.observed, *constants})
    for name in sorted(set(axes.dims) - set(known)):
        raise ValueError(f"`dims` has `{name}`, and there are {known} to export.")
    groups = _groups(draws, shape, sites, axes, masks)
    groups["sample_stats"] |= _statistics(result)
    groups["constant_data"] = {name: axes.labeled(name, v) for name, v in constants.items()}
    return _assemble(groups)


class _Axes(NamedTuple):
    """Names of dimensions, and labels along them."""

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
            name: of the variable.
            values: with a leading axis of draws if there is a `shape`.
            shape: chains and draws.
            mask: entries to keep, without the axis of draws; None for all.
        """
        lengths = values.shape[0 if shape is None else 1 :]
        given = self.dims.get(name, ())
        if isinstance(given, str) or len(given) > len(lengths):
            raise ValueError(
                f"`dims` has {given!r} for `{name}`, whose axes have the lengths {lengths}: give a "
                "list of names, one for each axis."
            )
        names = [*given, *[None] * (len(lengths) - len(given))]
        named = tuple(one or f"{name}_dim_{place}" for place, one in enumerate(names))
        labels = {}
        for one, length in zip(named, lengths, strict=True):
            labels[one] = self.coords.get(one, np.arange(length))
            if labels[one].shape != (length,):
                raise ValueError(
                    f"`coords` has labels of shape {labels[one].shape} for the dimension `{one}`, "
                    f"along which `{name}` has the length {length}."
                )
        if mask is not None and not mask.all():
            kept = np.flatnonzero(mask)
            values = values.reshape(len(values), -1)[:, kept]
            labels = {f"{name}_counted": labels[named[0]][kept] if len(named) == 1 else kept}
            named = tuple(labels)
        if shape is None:
            return named, values, labels
        return ("chain", "draw", *named), values.reshape(*shape, *values.shape[1:]), labels


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

    kept = {name: draws.sites[name] for name in (draws.sites if sites is None else sites)}
    return {
        "posterior": by_chain(kept),
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
    """The entries of a pointwise density that count."""
    return None if mask is None else np.broadcast_to(mask, values.shape[1:])


def _suffixed(statistic: str, name: str, sites: Mapping[str, Any]) -> str:
    """The statistic's name, with its site's where there are several sites."""
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
            # Of a run longer than the records, the last steps; of a resumed one, all steps.
            statistics[_suffixed(statistic, name, states)] = (
                ("chain", "solver_step"),
                np.asarray(values)[None],
                {},
            )
    return statistics


def _counted(model: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Which entries of each observed site no mask hides.

    Raises:
        ValueError: if the model draws mini-batches: each draw would have rows of its own.
    """

    # Compiled, since of the model then nothing is computed but the masks.
    @compiled
    def run(args: tuple, kwargs: dict[str, Any]) -> dict[str, Array]:
        seeded = handlers.seed(model, rng_seed=0)
        feasible = handlers.substitute(seeded, substitute_fn=init_to_feasible)
        trace = trace_of_call(feasible, args, kwargs)
        for name, site in trace.items():
            if takes_part(site):
                raise ValueError(
                    f"the plate `{name}` takes {site['args'][1]} of {site['args'][0]} rows: pass "
                    "`model_args` (or `model_kwargs`) with which the model sees all rows to export."
                )
        observed = {name: site for name, site in trace.items() if is_data(site)}
        return {name: counted(site["fn"]) for name, site in observed.items()}

    return {name: np.asarray(mask) for name, mask in run(args, kwargs).items()}


def _labels_of(variables: dict[str, Any]) -> dict[str, np.ndarray]:
    """Labels along the dimensions of a group, whose variables must agree on their lengths."""
    found: dict[str, tuple[str, np.ndarray]] = {}
    for name, (_, _, labels) in variables.items():
        for dim, one in labels.items():
            other, known = found.setdefault(dim, (name, one))
            if len(known) != len(one):
                raise ValueError(
                    f"`dims` names the dimension `{dim}` of `{other}`, of length {len(known)}, and "
                    f"of `{name}`, of length {len(one)}: give them names of their own."
                )
    return {dim: labels for dim, (_, labels) in found.items()}


def _assemble(groups: dict[str, dict[str, Any]]) -> Any:
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
            dataset = xarray.Dataset(arrays, attrs={"inference_library": "numpyro_scalegp"})
            numbered = {d: np.arange(n) for d, n in dataset.sizes.items() if d not in labels}
            datasets[group] = dataset.assign_coords({**numbered, **labels})
    if int(arviz.__version__.split(".")[0]) >= 1:
        return xarray.DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)  # type: ignore[arg-type]
