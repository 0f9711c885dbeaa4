"""Mini-batches of rows in the running model, and distributions without a density there."""

from typing import Any, NamedTuple

from jaxtyping import Array
from numpyro import handlers
from numpyro.primitives import _PYRO_STACK

from numpyro_scalegp.core import checks

_REMEDIES = {
    "prior": (
        "the density of a function at these rows ignores all other rows, and the next mini-batch "
        "needs other values of it. Train the model with a guide of this package,\n"
        "    guide = sgp.guides.AutoSparseGP(model)  # or AutoChevronGP, for a WeightSpaceGP\n"
        "    svi = SVI(model, guide, optim, sgp.infer.QuadratureELBO())\n"
        "or, for NUTS, HMCECS and NumPyro's guides, give it all rows, without a `subsample_size`."
    ),
    "collapsed": (
        "its marginal likelihood is not a sum over rows, so that a plate cannot scale it to all "
        "rows. Give the model all rows, without a `subsample_size`, or make the function a site,\n"
        '    f = numpyro.sample("f", sgp.LatentGP(kernel, X))\n'
        "    with rows:\n"
        '        numpyro.sample("y", dist.Normal(f, noise), obs=y)\n'
        "with guide = sgp.guides.AutoSparseGP(model), or take `sgp.FeatureSpaceGP`."
    ),
}


class MiniBatch(NamedTuple):
    """A plate that takes a subsample of its elements."""

    plate: str
    size: int
    num_taken: int


def is_subsampled(site: dict[str, Any]) -> bool:
    """Whether a site is a plate that takes a subsample of its elements, such as a mini-batch."""
    return site["type"] == "plate" and site["args"][1] not in (None, site["args"][0])


def mini_batch_of(X: Array) -> MiniBatch | None:
    """The mini-batch that rows belong to, if its plate has already run in the model.

    The first plate with as many indices as there are rows, unless the rows are concrete and its
    indices are traced.

    Args:
        X: rows, shape (..., n, d).
    """
    for handler in _PYRO_STACK:
        for site in handler.trace.values() if isinstance(handler, handlers.trace) else ():
            if not is_subsampled(site) or site["args"][1] != X.shape[-2]:
                continue
            if checks.is_concrete(site["value"]) or not checks.is_concrete(X):
                return MiniBatch(site["name"], *site["args"])
    return None


def refuse_mini_batch(kind: str, role: str, batch: MiniBatch | None) -> None:
    """Raise if a distribution over all rows has the rows of a mini-batch.

    Args:
        kind: the name of the distribution.
        role: the role of the distribution; see `RowsDistribution`.
        batch: the result of `mini_batch_of`.
    """
    if batch is not None:
        raise ValueError(
            f"`{kind}` has the rows of a mini-batch, of which the plate `{batch.plate}` takes "
            f"{batch.num_taken} of {batch.size}: {_REMEDIES[role]} (If its rows do not belong to "
            "that plate, and only have the same number, take mini-batches of another size.)"
        )
