"""Stochastic variational inference whose steps update a few rows of large parameters."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from jaxtyping import Array, Float, Key
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.mesh import divided, is_divisible, mesh_of, replicated
from numpyro_scalegp.likelihoods.elbo import ModelAndGuide
from numpyro_scalegp.programs.compiled import CompiledForLoop, compiled
from numpyro_scalegp.tracing.first_run import initial_state, only_watched
from numpyro_scalegp.tracing.keywords import model_keywords_first, of_model
from numpyro_scalegp.tracing.restoring import unchanged_on_failure
from numpyro_scalegp.tracing.sites import StandIn
from numpyro_scalegp.variational.guide import is_fresh
from numpyro_scalegp.variational.quadruply.chevron_features import weight_rows
from numpyro_scalegp.variational.quadruply.control_variate import ControlVariate
from numpyro_scalegp.variational.quadruply.elbo import QuadruplyStochasticELBO, control_variate_name
from numpyro_scalegp.variational.quadruply.problem import find_family
from numpyro_scalegp.variational.quadruply.row_optimizers import (
    DeclaredRows,
    RowOptimizer,
    all_finite,
    check_rows,
    row_adam,
    tree_where,
    update_rows,
)
from numpyro_scalegp.variational.quadruply.rows import Rows
from numpyro_scalegp.variational.quadruply.support import ControlVariates

# Errors of models that need the values of their arguments.
_NEEDS_VALUES = jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError


class RowSVI(SVI):
    """NumPyro's `SVI` for `QuadruplyStochasticELBO`, at a cost independent of the m features.

    Each step draws sets of features, gathers their rows of the parameters declared with
    `numpyro.param(..., rows=True)`, differentiates with respect to these rows only, and writes the
    updated rows of parameters and optimizer states back. `AutoChevronGP` declares its parameters in
    this way; a model should declare the precisions of a relevance vector machine so, too. For a row
    in both sets, the two gradients add up. All other parameters are updated in full.

    States, `init`, `update`, `stable_update`, `run`, `get_params` and results are as in `SVI`.
    `run` compiles loops of many steps, with donated buffers, and refits control variates between
    them. If you call `update` yourself, donate the state
    (`jax.jit(svi.update, donate_argnums=0)`) and call `refresh` from time to time.

    With the data on a mesh, and m a multiple of the number of devices, each device holds and
    updates the parameter rows of its share of the features: a step gathers the rows that it draws,
    and a refit divides the features. For other m, each device holds all rows.

    Args:
        model: a NumPyro model with a `WeightSpaceGP` site.
        guide: a guide with a `ChevronGP` at that site, such as `AutoChevronGP`.
        optim: an optax optimizer for the parameters without `rows=True`.
        loss: a `QuadruplyStochasticELBO`; None for the default one, with sets of 2,000 features.
        row_optim: the optimizer for parameters with `rows=True`, `row_adagrad` or `row_adam`; or a
            function from a parameter's name to its optimizer; None for `row_adam()`. The entries of
            dense columns are small compared with the mean, and need a smaller learning rate.
        warmup_steps: number of initial steps in which parameters without `rows=True`, such as
            hyperparameters, stay fixed while the weights are trained.
        refresh_every: number of steps of `run` between refits of the control variate, with the
            current hyperparameters, in O(r m (d + k)).
        **static_kwargs: as for `SVI`.

    Raises:
        TypeError: if `optim` is not an optax optimizer or `loss` not a `QuadruplyStochasticELBO`.
        ValueError: in `init`, if a parameter with `rows=True` does not have a row for each feature,
            or there are too few data points for the control variate.

    References:
        Evans and Nair (2020), Quadruply Stochastic Gaussian Processes, section 2.4.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import optax
        >>> import numpyro_scalegp as sgp
        >>> def model(X, y):
        ...     phi = sgp.features.RandomFourier(sgp.kernels.RBF(0.3), 1000, seed=0)
        ...     f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X))
        ...     with numpyro.plate("rows", len(X)):
        ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
        >>> guide = sgp.guides.AutoChevronGP(model, rank=5)
        >>> loss = sgp.infer.QuadruplyStochasticELBO(num_features=100, control_variate_rank=20)
        >>> svi = sgp.infer.RowSVI(model, guide, optax.adam(0.01), loss)
        >>> result = svi.run(jax.random.key(0), 10, X, jnp.sin(X[:, 0]), progress_bar=False)
        >>> result.losses.shape, result.params["f_auto_loc"].shape
        ((10,), (1000,))
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: optax.GradientTransformation,
        loss: QuadruplyStochasticELBO | None = None,
        *,
        row_optim: RowOptimizer | Callable[[str], RowOptimizer] | None = None,
        warmup_steps: int = 0,
        refresh_every: int = 1000,
        **static_kwargs: Any,
    ) -> None:
        checks.instance("optim", optim, optax.GradientTransformation, "an optax optimizer")
        loss = QuadruplyStochasticELBO() if loss is None else loss
        if not isinstance(loss, QuadruplyStochasticELBO):
            raise TypeError(
                f"`loss` must be a `QuadruplyStochasticELBO`, got {type(loss).__name__}: other "
                "objectives go through all rows, with NumPyro's own `SVI`."
            )
        super().__init__(model, guide, optim, loss, **static_kwargs)
        self.dense_optim = optax.with_extra_args_support(optim)
        row_optim = row_adam() if row_optim is None else row_optim
        if isinstance(row_optim, type) or not (
            callable(row_optim) or isinstance(row_optim, RowOptimizer)
        ):
            raise TypeError(
                "`row_optim` must be `row_adagrad(...)`, `row_adam(...)` or a function of a "
                f"parameter's name, got {checks.described(row_optim)}."
            )
        self.row_optim = row_optim if callable(row_optim) else lambda name: row_optim
        self.warmup_steps = checks.count("warmup_steps", warmup_steps, 0)
        self.refresh_every = checks.count("refresh_every", refresh_every)
        self.row_names: tuple[str, ...] = ()
        self.weight_names: tuple[str, ...] = ()  # loc, scale_diag and scale_columns
        self.num_features = 0
        self.dense_precision = False
        self._likelihood: Any = None  # from `init`, for arguments with the signature
        self._analyzed: tuple[Any, ...] = ()

    def init(
        self,
        rng_key: Key[Array, ""],
        *args: Any,
        init_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> SVIState:
        """Get the initial state, with the control variate; see `SVI.init`.

        A call that fails leaves this `RowSVI` unchanged.
        """
        with unchanged_on_failure(self):
            return self._init(rng_key, args, kwargs, init_params)

    def _init(
        self,
        rng_key: Array,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        init_params: dict[str, Any] | None,
    ) -> SVIState:
        key, support_key = _two_keys(rng_key)
        declared = DeclaredRows()

        def guide(*args: Any, **kwargs: Any) -> Any:
            with declared, StandIn():  # without the moments of f
                return self.guide(*args, **kwargs)

        def model(*args: Any, **kwargs: Any) -> Any:
            with declared:
                return self.model(*args, **kwargs)

        plain = SVI(model, guide, optax.identity(), self.loss, **self.static_kwargs)
        state, values = _plain_state(plain, self.guide, key, args, kwargs, init_params)
        self.constrain_fn = plain.constrain_fn
        self.row_names = tuple(declared.names)
        params = plain.optim.get_params(state.optim_state)
        mutable = dict(state.mutable_state or {})
        inputs = {**values, **mutable}, support_key, args, kwargs
        examine, start = self._examine, compiled(self._start)
        self._analyzed = ()
        try:
            eqx.filter_eval_shape(examine, *inputs)
            eqx.filter_eval_shape(self._analyze, *inputs)
            self._analyzed = self._signature(args, kwargs)
        except _NEEDS_VALUES:  # so that each step analyzes again
            examine(*inputs)
            start = self._start
        row_params = {name: params[name] for name in self.row_names}
        check_rows(row_params, self.num_features, self.constrain_fn)
        optim_state, mutable = start(params, mutable, support_key, args, kwargs)
        return self._placed(SVIState(optim_state, mutable or None, state.rng_key), (args, kwargs))

    def _placed(self, state: SVIState, inputs: Any) -> SVIState:
        """Place the state on the inputs' mesh: rows divided among devices, the rest replicated."""
        mesh = mesh_of(inputs)
        step, (params, (dense_state, row_states)) = state.optim_state
        by_rows = {name: params[name] for name in self.row_names}, row_states
        place = divided if is_divisible(self.num_features, mesh) else replicated
        rows, row_states = place(by_rows, mesh)
        dense = {name: value for name, value in params.items() if name not in rows}
        without_rows = dense, step, dense_state, state.mutable_state, state.rng_key
        dense, step, dense_state, mutable, rng_key = replicated(without_rows, mesh)
        return SVIState((step, ({**dense, **rows}, (dense_state, row_states))), mutable, rng_key)

    def _examine(
        self, values: dict[str, Any], key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record what no values of arrays change: the number of features, and weights' names."""
        controls = self._control_variates(args, kwargs)
        problem = controls.problem(values, key)
        self.num_features = problem.q.loc.shape[0]
        self.dense_precision = problem.p.has_dense_precision
        self.weight_names = ()
        if controls.are_used(problem):
            self.weight_names = controls.weight_names(values, self.row_names, key)

    def _analyze(
        self, values: dict[str, Any], key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Analyze once how the likelihood depends on f, which no values of arrays change."""
        pair = ModelAndGuide(values, self.model, self.guide, args, {**kwargs, **self.static_kwargs})
        self._likelihood = self.loss.analyze(key, pair)

    def _start(
        self,
        params: dict[str, Any],
        mutable: dict[str, Any],
        key: Array,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """The optimizers' first state and the mutable state, with the control variate if used."""
        rows = {name: params[name] for name in self.row_names}
        dense = {name: params[name] for name in params if name not in rows}
        row_states = {name: self.row_optim(name).init(rows[name]) for name in rows}
        optim_state = (jnp.array(0), (params, (self.dense_optim.init(dense), row_states)))
        if self.weight_names:
            values = {**self.constrain_fn(params), **mutable}
            controls = self._control_variates(args, kwargs)
            problem = controls.problem(values, key)
            control = controls.initial(values, problem, key)
            mutable = {**mutable, control_variate_name(problem.site): control}
        # Copies: `run` donates them, and they may be arrays of the model or of its arguments.
        return _copied((optim_state, mutable))

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Model, guide and arguments, with shapes and dtypes in place of arrays."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        static_leaves = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array | np.ndarray) else leaf
            for leaf in leaves
        ]
        return self.model, self.guide, structure, static_leaves

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuadruplyStochasticELBO:
        """The objective, with the analysis of `init` if arguments have the same signature."""
        same = self._analyzed == self._signature(args, kwargs)
        return self.loss.for_likelihood(self._likelihood if same else None)

    def _control_variates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ControlVariates:
        kwargs = {**kwargs, **self.static_kwargs}
        loss = self._loss(args, kwargs)
        return ControlVariates(self.model, self.guide, loss, args, kwargs)

    def refresh(self, svi_state: SVIState, *args: Any, **kwargs: Any) -> SVIState:
        """Refit the control variate at the current hyperparameters, which removes rounding errors.

        `run` does so automatically.

        Args:
            svi_state: the state.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            The state with the new control variate, in O(r m (d + k)).
        """
        self._check_initialized()
        mutable = svi_state.mutable_state or {}
        if not any(isinstance(value, ControlVariate) for value in mutable.values()):
            return svi_state
        new = compiled(self._refresh)(svi_state, args, kwargs)
        return svi_state._replace(
            mutable_state=replicated({**mutable, **new}, mesh_of(args, kwargs))
        )

    def _check_initialized(self) -> None:
        """Raise unless `init` has run, which finds the parameters with `rows=True`."""
        if self.constrain_fn is None:
            raise ValueError(
                "this `RowSVI` has not run `init` in this process: call `svi.init(key, *args)` "
                "with the arguments of the fit, then continue from the state."
            )

    def _refresh(
        self, svi_state: SVIState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, ControlVariate]:
        params = {**self.get_params(svi_state), **svi_state.mutable_state}
        key = jax.random.fold_in(svi_state.rng_key, 1)
        controls = self._control_variates(args, kwargs)
        return {
            name: controls.refit(params, old, key, dense_precision=self.dense_precision)
            for name, old in svi_state.mutable_state.items()
            if isinstance(old, ControlVariate)
        }

    def update(self, svi_state: SVIState, *args: Any, **kwargs: Any) -> tuple[SVIState, Array]:
        """Take one step; see `SVI.update`. It may be jitted, with the state donated."""
        return self._update(svi_state, args, kwargs, stable=False)

    def stable_update(
        self, svi_state: SVIState, *args: Any, **kwargs: Any
    ) -> tuple[SVIState, Array]:
        """Take one step, without an update if the loss or a gradient is not finite."""
        return self._update(svi_state, args, kwargs, stable=True)

    def _update(
        self, svi_state: SVIState, args: tuple[Any, ...], kwargs: dict[str, Any], *, stable: bool
    ) -> tuple[SVIState, Array]:
        self._check_initialized()
        rng_key, index_key, loss_key = jax.random.split(svi_state.rng_key, 3)
        step, (params, (dense_state, row_states)) = svi_state.optim_state
        kwargs = {**kwargs, **self.static_kwargs}
        mutable = svi_state.mutable_state or {}
        size = params[self.row_names[0]].shape[0] if self.row_names else self.num_features
        index = self.loss.index_sets(index_key, size, dense_precision=self.dense_precision)
        dense = {name: params[name] for name in params if name not in self.row_names}
        rows = {name: params[name][index] for name in self.row_names}

        def constrained(dense: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
            values = self.constrain_fn({**dense, **rows})
            by_rows = {name: Rows(values[name], index, size) for name in rows}
            return {**values, **by_rows, **jax.lax.stop_gradient(mutable)}

        def loss_fn(dense: dict[str, Any], rows: dict[str, Any]) -> tuple[Array, Any]:
            result = self._loss(args, kwargs).loss_with_mutable_state(
                loss_key, constrained(dense, rows), self.model, self.guide, *args, **kwargs
            )
            return result["loss"], result["mutable_state"] or {}

        (loss, new_mutable), (dense_grads, row_grads) = jax.value_and_grad(
            loss_fn, argnums=(0, 1), has_aux=True
        )(dense, rows)
        accept = all_finite((loss, dense_grads, row_grads)) if stable else jnp.asarray(True)
        updates, new_dense_state = self.dense_optim.update(
            dense_grads, dense_state, dense, value=loss
        )
        new_dense, dense_state = tree_where(
            accept & (step >= self.warmup_steps),
            (optax.apply_updates(dense, updates), new_dense_state),
            (dense, dense_state),
        )
        new_rows, row_params, row_states, is_first = update_rows(
            self.row_optim, index, row_grads, rows, (params, row_states), step, accept
        )
        new_params = {**new_dense, **row_params}
        old_mutable = {name: mutable[name] for name in new_mutable}
        new_mutable = {**mutable, **tree_where(accept, new_mutable, old_mutable)}
        if controls := {k: v for k, v in mutable.items() if isinstance(v, ControlVariate)}:
            before = constrained(dense, rows)
            features = find_family(before, self.guide, loss_key, args, kwargs)[1].features
            change = self._directions(constrained(dense, new_rows)) - self._directions(before)
            # Parameters that are not finite must not spoil the control variate.
            change = jnp.where(is_first[..., None] & all_finite(change), change, 0.0)
            for name, control in controls.items():
                new_mutable[name] = control.updated(features, index, change)
        optim_state = (step + 1, (new_params, (dense_state, row_states)))
        new_state = SVIState(optim_state, new_mutable or None, rng_key)
        return self._placed(new_state, (args, kwargs)), loss

    def _directions(self, values: dict[str, Any]) -> Float[Array, "sets num one_plus_k"]:
        """The rows of [loc, C_k] at these parameters."""
        weights = [values[name] for name in self.weight_names]
        return weight_rows(weights[0].index, *weights).directions

    def evaluate(self, svi_state: SVIState, *args: Any, **kwargs: Any) -> Array:
        """An estimate of the loss at a state, with its control variate; see `SVI.evaluate`."""
        key = jax.random.split(svi_state.rng_key)[1]
        params = {**self.get_params(svi_state), **(svi_state.mutable_state or {})}
        kwargs = {**kwargs, **self.static_kwargs}
        return self.loss.loss(key, params, self.model, self.guide, *args, **kwargs)

    def _steps(
        self,
        inputs: tuple[int, bool, tuple[Any, ...], dict[str, Any]],
        svi_state: SVIState,
    ) -> tuple[SVIState, Float[Array, " steps"]]:
        num_steps, stable, args, kwargs = inputs

        def body(state: SVIState, _: None) -> tuple[SVIState, Array]:
            return self._update(state, args, kwargs, stable=stable)

        return jax.lax.scan(body, svi_state, length=num_steps)

    @model_keywords_first(lambda svi, *_: (svi.model, 3))
    def run(
        self,
        rng_key: Key[Array, ""],
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: SVIState | None = None,
        init_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> SVIRunResult:
        """Take `num_steps` steps, with arguments and result as in `SVI.run`.

        A second run of the same length does not compile again: make a new `RowSVI` if a variable
        that model or guide close over has changed. `init_state` is copied.
        `forward_mode_differentiation` must be False, since there are too many parameters for it.

        Raises:
            ValueError: if `num_steps` is not positive, or `forward_mode_differentiation` is True.
        """
        kwargs = of_model(kwargs)
        if forward_mode_differentiation:
            raise ValueError("`forward_mode_differentiation` is not for parameters of many rows.")
        if num_steps < 1:
            raise ValueError("num_steps must be a positive integer.")
        if init_state is None:
            state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        else:
            state = self._placed(_copied(init_state), (args, kwargs))
            state = self.refresh(state, *args, **kwargs)
        length = max(1, num_steps // 20)
        length = math.ceil(self.refresh_every / math.ceil(self.refresh_every / length))
        stretch, losses = CompiledForLoop(self._steps, donates=True), list[Array]()
        done = since_refresh = 0
        with tqdm.tqdm(total=num_steps, disable=not progress_bar) as bar:
            while done < num_steps:
                if since_refresh >= self.refresh_every:
                    state, since_refresh = self.refresh(state, *args, **kwargs), 0
                steps = min(length, num_steps - done, self.refresh_every - since_refresh)
                state, new_losses = stretch((steps, stable_update, args, kwargs), state)
                losses.append(new_losses)
                done, since_refresh = done + steps, since_refresh + steps
                if progress_bar:
                    bar.update(steps)
                    bar.set_postfix_str(
                        f"init loss: {losses[0][0]:.4f}, "
                        f"avg. loss [{done - steps + 1}-{done}]: {jnp.nanmean(new_losses):.4f}"
                    )
        return SVIRunResult(self.get_params(state), state, jnp.concatenate(losses))


@compiled
def _copied(arrays: Any) -> Any:
    return jax.tree.map(jnp.copy, arrays)


@compiled
def _two_keys(key: Key[Array, ""]) -> tuple[Key[Array, ""], Key[Array, ""]]:
    first, second = jax.random.split(key)
    return first, second


def _plain_state(
    svi: SVI,
    guide: Callable,
    key: Array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    init_params: dict[str, Any] | None,
) -> tuple[SVIState, dict[str, Any]]:
    """`svi.init`, as one program if possible, and the parameters with their constraints."""
    options = {**kwargs, "init_params": init_params}
    if only_watched() and checks.is_concrete((key, args, options)):
        if is_fresh(guide):  # with the key that `svi.init` gives it
            guide_key = jax.random.split(key, 3)[2]
            substituted = handlers.substitute(guide, init_params) if init_params else guide
            with handlers.block(), StandIn():
                handlers.seed(substituted, guide_key)(*args, **kwargs, **svi.static_kwargs)
        with contextlib.suppress(jax.errors.JAXTypeError):
            return initial_state(svi, key, args, options)
    state = svi.init(key, *args, **options)
    return state, svi.get_params(state)
