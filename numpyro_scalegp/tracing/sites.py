"""Handlers that replace the GP sites of models and guides, which are never sampled."""

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
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.sites.family import AbstractPriorGP, AbstractVariationalGP
from numpyro_scalegp.sites.mini_batches import is_subsampled
from numpyro_scalegp.sites.rows import role_of, unwrapped
from numpyro_scalegp.tracing.runs import is_latent, is_observed, substituted

Model = Callable[..., Any]
Prior = type[AbstractPriorGP]


class StandIn(Messenger):
    """Sets the values of the GP sites of a guide and records their families.

    Args:
        value: computes the value of a site from its name, its family and a key (None if the key
            comes from handlers outside); None for zeros, which need no moments.
    """

    def __init__(self, value: Callable[..., Array] | None = None) -> None:
        super().__init__()
        self.value = value
        self.families: dict[str, AbstractVariationalGP] = {}

    def __enter__(self) -> "StandIn":
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        """Record the family of a GP site and set its value."""
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
    """A joint draw from the process at all inputs, for `StandIn`."""
    return family.posterior().sample(key, family.X)[0]


class GPSite(NamedTuple):
    """A GP site of a model at fixed hyperparameters."""

    name: str
    prior: Any  # an instance of the guide's prior class
    batch_shape: tuple[int, ...]  # of independent functions, by plates
    plates: tuple[CondIndepStackFrame, ...]
    partial: tuple[str, ...] = ()  # the model's subsampled plates
    spread: Callable[[int], Array] | None = None  # up to this many inputs, from several batches
    is_normal: bool = True  # whether all observations have normal distributions

    @property
    def kernel(self) -> AbstractKernel:
        """The kernel of a `LatentGP`."""
        return self.prior.kernel

    @property
    def X(self) -> Float[Array, "... n d"]:
        """The inputs."""
        return self.prior.X

    def rows(self, max_rows: int = 20_000) -> Float[Array, "... m d"]:
        """Inputs from all the data: X, or the inputs of disjoint mini-batches."""
        return self.X if self.spread is None else self.spread(max_rows)


class HideGPSite(Messenger):
    """Replaces a GP site by zeros, records it, and hides it from all handlers outside.

    So neither the model nor NumPyro's guides factorize the prior covariance.

    Args:
        model: the model.
        site: the name of its GP site, or None if it has only one.
        kind: the class of the site's prior.
        hide_others: also replace other GP sites without a value, but do not record them.
    """

    def __init__(
        self, model: Model, site: str | None, kind: Prior, *, hide_others: bool = False
    ) -> None:
        super().__init__(model)
        self.site = site
        self.kind = kind
        self.hide_others = hide_others
        self.sites: list[GPSite] = []
        self.partial: dict[str, Any] = {}  # sizes and subsample sizes of subsampled plates
        self.is_normal = True  # whether all observations have normal distributions

    def process_message(self, msg: dict) -> None:
        """Replace and hide the GP site."""
        if is_subsampled(msg):
            if msg["name"] in self.partial:
                raise ValueError(
                    f"the plate `{msg['name']}` is made twice, and would take a different "
                    "subsample each time: make it once, rows = sgp.plate(...), and enter it "
                    "wherever it is needed."
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
        is_of_kind = prior.made_of == self.kind.made_of
        if wrapper:
            raise ValueError(
                f"the GP site `{msg['name']}` has a {wrapper} around it: write independent "
                "functions as a plate, with numpyro.plate(name, size) around the site, and mask "
                "the likelihood in place of the function."
            )
        if msg["name"] == self.site and not is_of_kind:
            raise ValueError(
                f"the GP site `{self.site}` has a `{type(prior).__name__}` prior, and this guide "
                f"is for a `{self.kind.__name__}`."
            )
        is_other = self.site not in (None, msg["name"]) or not is_of_kind
        if is_other and not self.hide_others:
            return
        plates = tuple(msg["cond_indep_stack"])
        if not self.partial.keys().isdisjoint(frame.name for frame in plates):
            names = ", ".join(f"`{frame.name}`" for frame in plates)
            raise ValueError(
                f"the GP site `{msg['name']}` stands inside the plate {names}, which subsamples "
                "its functions: a guide owns all of them. Only rows come in mini-batches, and "
                "their plate belongs around the likelihood."
            )
        if is_other and msg["value"] is not None:
            return
        if not is_other:
            batch_shape = msg["fn"].batch_shape
            self.sites.append(GPSite(msg["name"], prior, batch_shape, plates))
        msg["value"] = jnp.zeros(msg["fn"].shape(), jnp.result_type(prior.X, float))
        msg["stop"] = True

    def the_site(self) -> GPSite:
        """The GP site of the model's last run.

        Raises:
            ValueError: if there was none, or more than one and no name was given.
        """
        names = [site.name for site in self.sites]
        if not names:
            missing = "no GP site" if self.site is None else f"no GP site `{self.site}`"
            raise ValueError(
                f"the model has {missing}: write "
                f"numpyro.sample(name, sgp.{self.kind.__name__}({self.kind.made_of}, X))."
            )
        if len(names) > 1:
            raise ValueError(
                f"the model has the GP sites {names}: name the one that this guide owns with "
                "`site=`, and give a GP guide for the others as `rest=`."
            )
        return self.sites[0]._replace(partial=tuple(sorted(self.partial)), is_normal=self.is_normal)


class WithoutSite:
    """A model without its GP site, on which a guide for all other sites is built.

    Args:
        model: the model.
        site: the name of its GP site, or None if it has only one.
        kind: the class of the site's prior.
    """

    def __init__(self, model: Model, site: str | None, kind: Prior) -> None:
        self.model = model
        self.site = site
        self.kind = kind
        self._is_masked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with zeros for the function."""
        # A new handler for each run, so that no tracer leaks from it.
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
    """Masks the densities of observed sites."""

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
    """Run a model at values of its other sites and return its GP site.

    Parameters, mutable state and plates stay visible to the handlers outside, so that networks in
    the model see the optimizer's parameters, and each plate is subsampled once. All other sites are
    hidden.

    Args:
        model: the model.
        site: the name of its GP site, or None if it has only one.
        kind: the class of the site's prior.
        values: values of the other latent sites, including functions; a function without a value
            is zero.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        indices: indices of the plates that are already subsampled, by name.

    Raises:
        ValueError: if the model has no such site, or several, or `values` has a value of it.
    """
    # Substitute first, so that a function with a value is not hidden.
    model_at_values = substituted(model, {}, values, indices)
    hidden = HideGPSite(model_at_values, site, kind, hide_others=True)
    visible = ("param", "mutable", "plate")
    seeded = handlers.seed(hidden, numpyro.prng_key())
    with handlers.trace() as trace:
        handlers.block(seeded, hide_fn=lambda msg: msg["type"] not in visible)(*args, **kwargs)
    gp_site = hidden.the_site()
    if gp_site.name in values:
        raise ValueError(
            f"`rest` samples `{gp_site.name}`, the function that this guide owns: give a guide for "
            "only the other sites as `rest=`."
        )
    params = {name: msg["value"] for name, msg in trace.items() if msg["type"] != "plate"}
    plates = [(name, *sizes) for name, sizes in hidden.partial.items()]
    if len(plates) != 1 or plates[0][2] != gp_site.X.shape[-2]:
        return gp_site
    ((plate, size, batch_size),) = plates

    def spread(max_rows: int) -> Array:
        count = max(1, min(max_rows, size) // batch_size)
        index = stratified_indices(jax.random.key(0), size, count * batch_size)

        def inputs_of_batch(index: Array) -> Array:
            batch_model = substituted(model, params, values, {**(indices or {}), plate: index})
            hidden = HideGPSite(batch_model, site, kind, hide_others=True)
            with handlers.block():
                handlers.seed(hidden, jax.random.key(0))(*args, **kwargs)
            return hidden.the_site().X

        # So each mini-batch has rows from all the data, too.
        batches = jax.lax.map(inputs_of_batch, index.reshape(batch_size, count).T)
        *members, _, d = gp_site.X.shape
        return jnp.moveaxis(batches, 0, -3).reshape(*members, -1, d)

    return gp_site._replace(spread=spread)
