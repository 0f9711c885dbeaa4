"""Handlers that stand in for the GP sites of models and guides, which are never sampled."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.primitives import CondIndepStackFrame, Messenger

from numpyro_scalegp.core.index_sampling import stratified_indices
from numpyro_scalegp.distributions.mini_batches import takes_part
from numpyro_scalegp.distributions.rows import role_of, unwrapped
from numpyro_scalegp.families import AbstractVariationalGP
from numpyro_scalegp.families.family import AbstractPriorGP
from numpyro_scalegp.kernels import AbstractKernel
from numpyro_scalegp.tracing.runs import is_latent, is_observed, substituted

Model = Callable[..., Any]
Prior = type[AbstractPriorGP]


class StandIn(Messenger):
    """Stands in for the GP sites of a guide and records their families.

    Args:
        value: the value of a site, from its name, its family and a key, or None where handlers
            outside have the keys; None for zeros, which take no moments.
    """

    def __init__(self, value: Callable[..., Array] | None = None) -> None:
        super().__init__()
        self.value = value
        self.families: dict[str, AbstractVariationalGP] = {}

    def __enter__(self) -> "StandIn":
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        """Record a family, and put a value in the place of a draw."""
        if msg["type"] != "sample" or getattr(msg["fn"], "role", "") != "variational":
            return
        name, family = msg["name"], msg["fn"]
        if msg["scale"] is not None:
            family = msg["fn"] = family.under_scale(msg["scale"])
        self.families[name] = family
        if self.value is None:
            msg["value"] = jnp.zeros(family.shape(), family.X.dtype)
        else:
            msg["value"] = self.value(name, family, msg["kwargs"]["rng_key"])


def joint_draw(name: str, family: AbstractVariationalGP, key: Array) -> Float[Array, "*batch n"]:
    """A draw from the process at all rows jointly, for `StandIn`."""
    return family.posterior().sample(key, family.X)[0]


class GPSite(NamedTuple):
    """A GP site of a model, as the model made it under given hyperparameters."""

    name: str
    prior: Any  # of the class that the guide is for
    batch_shape: tuple[int, ...]  # of independent functions, by plates
    plates: tuple[CondIndepStackFrame, ...]
    partial: tuple[str, ...] = ()  # plates of the model that take a part of their elements
    spread: Callable[[int], Array] | None = None  # rows of other mini-batches, at most so many
    is_normal: bool = True  # whether all observations are

    @property
    def kernel(self) -> AbstractKernel:
        """The kernel of a `LatentGP`."""
        return self.prior.kernel

    @property
    def X(self) -> Float[Array, "... n d"]:
        """The rows."""
        return self.prior.X

    def rows(self, max_rows: int = 20_000) -> Float[Array, "... m d"]:
        """Rows from all over the data: those here, or of mini-batches that share none."""
        return self.X if self.spread is None else self.spread(max_rows)


class HideGPSite(Messenger):
    """Replaces a GP site by zeros, records it, and hides it from all handlers outside.

    So neither the model nor NumPyro's own guides ever factorize the prior's covariance.

    Args:
        model: the model.
        site: the name of its GP site, or None if it has just one.
        kind: the kind of prior that the site has.
        hide_others: also replace other GP sites that have no value yet, without recording them.
    """

    def __init__(
        self, model: Model, site: str | None, kind: Prior, *, hide_others: bool = False
    ) -> None:
        super().__init__(model)
        self.site = site
        self.kind = kind
        self.hide_others = hide_others
        self.found: list[GPSite] = []
        self.partial: dict[str, Any] = {}  # plates that take a part of their elements: sizes
        self.is_normal = True  # whether all observations are

    def process_message(self, msg: dict) -> None:
        """Stop at the GP site."""
        if takes_part(msg):
            if msg["name"] in self.partial:
                raise ValueError(
                    f"the plate `{msg['name']}` is made twice, and would take other elements each "
                    "time: make it once, rows = sgp.plate(...), and enter it wherever it is needed."
                )
            self.partial[msg["name"]] = msg["args"]
        if is_observed(msg):
            self.is_normal &= isinstance(unwrapped(msg["fn"]).distribution, dist.Normal)
        if not is_latent(msg) or role_of(msg["fn"]) != "prior":
            return
        if msg.get("_control_flow_done"):
            raise ValueError(
                f"the GP site `{msg['name']}` stands in a `cond` of numpyro.contrib.control_flow, "
                "where a guide cannot give it a value: write it outside, and choose between "
                "kernels or values, as by jnp.where."
            )
        prior, wrapper, _ = inside = unwrapped(msg["fn"])
        inside.refuse_transform(msg["name"])
        is_own = prior.made_of == self.kind.made_of
        if wrapper:
            raise ValueError(
                f"the GP site `{msg['name']}` has a {wrapper} around it: write independent "
                "functions as a plate, with numpyro.plate(name, size) around the site, and mask "
                "the likelihood in place of the function."
            )
        if msg["name"] == self.site and not is_own:
            raise ValueError(
                f"the GP site `{self.site}` has a `{type(prior).__name__}` prior, and this guide "
                f"is for a `{self.kind.__name__}`."
            )
        is_other = self.site not in (None, msg["name"]) or not is_own
        if is_other and not self.hide_others:
            return
        plates = tuple(msg["cond_indep_stack"])
        if not self.partial.keys().isdisjoint(frame.name for frame in plates):
            names = ", ".join(f"`{frame.name}`" for frame in plates)
            raise ValueError(
                f"the GP site `{msg['name']}` stands inside the plate {names}, which takes a part "
                "of its functions: a guide owns all of them. Only rows come in mini-batches, and "
                "their plate belongs around the likelihood."
            )
        if is_other and msg["value"] is not None:
            return
        if not is_other:
            batch_shape = msg["fn"].batch_shape
            self.found.append(GPSite(msg["name"], prior, batch_shape, plates))
        msg["value"] = jnp.zeros(msg["fn"].shape(), jnp.result_type(prior.X, float))
        msg["stop"] = True

    def the_site(self) -> GPSite:
        """The GP site that the last run of the model met.

        Raises:
            ValueError: if there was none, or more than one and no name was given.
        """
        names = [found.name for found in self.found]
        if not names:
            wanted = "no GP site" if self.site is None else f"no GP site `{self.site}`"
            raise ValueError(
                f"the model has {wanted}: write "
                f"numpyro.sample(name, sgp.{self.kind.__name__}({self.kind.made_of}, X))."
            )
        if len(names) > 1:
            raise ValueError(
                f"the model has the GP sites {names}: name the one that this guide owns with "
                "`site=`, and give a GP guide for the others as `rest=`."
            )
        return self.found[0]._replace(partial=tuple(sorted(self.partial)), is_normal=self.is_normal)


class WithoutSite:
    """A model without one GP site: what a guide for all other sites is built on.

    Args:
        model: the model.
        site: the name of its GP site, or None if it has just one.
        kind: the kind of prior that the site has.
    """

    def __init__(self, model: Model, site: str | None, kind: Prior) -> None:
        self.model = model
        self.site = site
        self.kind = kind
        self._is_masked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with zeros for the function."""
        # A handler for each run, so that no traced value outlives it.
        hidden = HideGPSite(self.model, self.site, self.kind)
        return (_MaskObserved(hidden) if self._is_masked else hidden)(*args, **kwargs)

    @contextlib.contextmanager
    def without_likelihood(self) -> Iterator[None]:
        """A context in which observed sites have no density."""
        self._is_masked = True
        try:
            yield
        finally:
            self._is_masked = False


class _MaskObserved(Messenger):
    """Leaves the densities of observed sites out."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Mask an observed site."""
        if is_observed(msg):
            msg["fn"] = msg["fn"].mask(False)


def find_gp_site(
    model: Model,
    site: str | None,
    kind: Prior,
    values: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    indices: dict[str, Any] | None = None,
) -> GPSite:
    """Run a model at given values of its other sites and return its GP site.

    Parameters, mutable state and plates stay visible to the handlers outside, so that networks in
    the model see the optimizer's parameters and a plate's rows are drawn once; the rest is hidden.

    Args:
        model: the model.
        site: the name of its GP site, or None if it has just one.
        kind: the kind of prior that the site has.
        values: values of the other latent sites, functions included; without one they are zeros.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        indices: of plates, as far as they are drawn already.

    Raises:
        ValueError: if the model has no such site, or several, or `values` has a value of it.
    """
    # The values come first: a function that has one is no site to be hidden.
    given = substituted(model, {}, values, indices)
    hidden = HideGPSite(given, site, kind, hide_others=True)
    visible = ("param", "mutable", "plate")
    seeded = handlers.seed(hidden, numpyro.prng_key())
    with handlers.trace() as trace:
        handlers.block(seeded, hide_fn=lambda msg: msg["type"] not in visible)(*args, **kwargs)
    found = hidden.the_site()
    if found.name in values:
        raise ValueError(
            f"`rest` samples `{found.name}`, the function that this guide owns: give a guide for "
            "all other sites alone as `rest=`."
        )
    params = {name: one["value"] for name, one in trace.items() if one["type"] != "plate"}
    parts = [(name, *sizes) for name, sizes in hidden.partial.items()]
    if len(parts) != 1 or parts[0][2] != found.X.shape[-2]:
        return found
    ((plate, size, taken),) = parts

    def spread(max_rows: int) -> Array:
        count = max(1, min(max_rows, size) // taken)
        index = stratified_indices(jax.random.key(0), size, count * taken)

        def of_batch(index: Array) -> Array:
            again = substituted(model, params, values, {**(indices or {}), plate: index})
            other = HideGPSite(again, site, kind, hide_others=True)
            with handlers.block():
                handlers.seed(other, jax.random.key(0))(*args, **kwargs)
            return other.the_site().X

        # Each mini-batch has rows from all over the data, too.
        batches = jax.lax.map(of_batch, index.reshape(taken, count).T)
        *members, _, d = found.X.shape
        return jnp.moveaxis(batches, 0, -3).reshape(*members, -1, d)

    return found._replace(spread=spread)
