"""The interface of a log marginal likelihood."""

import abc
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Float, Key

from numpyro_scalegp.core.functions import RowsFunction
from numpyro_scalegp.estimators.solver_state import SolverState
from numpyro_scalegp.posteriors.posterior import AbstractConditioned
from numpyro_scalegp.solvers import KernelOperator, Solution


class AbstractEstimator(eqx.Module):
    """A way to compute log N(y; 0, H) with H = K(X, X) + noise, and all that rests on it.

    An estimator of your own has three methods: `log_prob`, `condition` and `sample_prior`. What it
    has no use for of their options it takes as `**options`. If it draws at random, it sets
    `is_stochastic = True` and asks `required_key` for its key.
    """

    # Whether it draws at random, so that it needs a key.
    is_stochastic: ClassVar[bool] = False
    # Whether the members of a batch are better worked on one after the other.
    takes_turns: ClassVar[bool] = False

    @property
    def condition_options(self) -> frozenset[str]:
        """The options of `condition` that this estimator has a use for: those it names."""
        return frozenset(inspect.signature(type(self).condition).parameters)

    @abc.abstractmethod
    def log_prob(
        self,
        operator: KernelOperator,
        residual: Float[Array, "*batch n"],
        *,
        key: Key[Array, ""] | None = None,
        state: SolverState | None = None,
    ) -> Float[Array, "*batch"]:
        """The log density of `residual` under N(0, H).

        Args:
            operator: H.
            residual: observations minus the prior mean, shape (..., n).
            key: a typed JAX key, for estimators that draw at random.
            state: where iterative estimators start from, and where they leave their solution.

        Returns:
            Log densities, shape (...).
        """

    @abc.abstractmethod
    def condition(
        self,
        operator: KernelOperator,
        y: Float[Array, " n"],
        mean_function: RowsFunction,
        *,
        key: Key[Array, ""] | None = None,
        state: SolverState | None = None,
        num_samples: int | None = None,
        max_epochs: int | float | None = None,
        start: Any = None,
        progress_bar: bool = True,
    ) -> AbstractConditioned:
        """The posterior of f given observations y ~ N(m(X), H), from what the density rests on.

        Args:
            operator: H, with the kernel, X and the noise variance.
            y: observations, shape (n,).
            mean_function: the prior mean m, from (n, d) inputs to (n,) values.
            key: a typed JAX key, for estimators that draw at random.
            state: the state of the steps before, for estimators that have one.
            num_samples: number of posterior samples to store, for estimators that store some.
            max_epochs: budget of a solve, for estimators that make one.
            start: a posterior of this estimator that the solve starts from.
            progress_bar: whether a solve may show how far it is.

        Returns:
            One of `sgp.posteriors`.
        """

    @abc.abstractmethod
    def sample_prior(
        self, operator: KernelOperator, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "num_samples n"]:
        """Draw from N(0, H).

        Args:
            operator: H.
            key: a typed JAX key.
            num_samples: number of draws.

        Returns:
            Draws, shape (num_samples, n).
        """

    def evaluate(
        self,
        operator: KernelOperator,
        residual: Float[Array, "*batch n"],
        *,
        key: Key[Array, ""] | None = None,
        state: SolverState | None = None,
    ) -> tuple[Float[Array, "*batch"], Solution | None]:
        """What `log_prob` returns, and the solution that it rests on; None if it solves nothing."""
        return self.log_prob(operator, residual, key=key, state=state), None

    def with_inputs(self, change: Callable[[Array], Array]) -> "AbstractEstimator":
        """This estimator where all inputs are changed, with such as it has of its own."""
        return self

    def prepare(
        self, state: SolverState, operator: KernelOperator, key: Key[Array, ""] | None
    ) -> None:
        """Give a state its shape, if it is empty.

        Raises:
            ValueError: if this estimator keeps nothing from one step to the next.
        """
        raise ValueError(
            f"`state` is for estimators that solve iteratively, and `{type(self).__name__}` keeps "
            "nothing from one step to the next: leave `state` out, or take "
            "`sgp.estimators.Pathwise` or `Hutchinson`."
        )

    @property
    def is_of_batch(self) -> bool:
        """Whether its densities are those of some rows, scaled to all."""
        return False

    def required_key(self, key: Key[Array, ""] | None) -> Key[Array, ""]:
        """The key, or an error with where to get one."""
        if key is None:
            raise ValueError(
                f"`{type(self).__name__}` draws at random: give the `GaussianProcess`, or its "
                "`condition`, a `key=`, or run the model under `numpyro.handlers.seed`."
            )
        return key

    def check_frozen_key(self) -> None:
        """Refuse or warn of a key that is the same at each evaluation.

        So it is in a potential energy and in a line search: there an estimate is one frozen draw,
        and its gradient is not that of its value.
        """
        if self.is_stochastic:
            warnings.warn(
                f"`{type(self).__name__}` draws at random, but this model is evaluated under a "
                "constant key, as NUTS, HMC and other users of a potential energy do, and line "
                "searches such as that of `numpyro.optim.Minimize`: they see one frozen draw of "
                "the log density, and a gradient that is not its own. Take "
                "`estimator=sgp.estimators.Cholesky()`, or train by `SVI` with optax; for "
                "stochastic-gradient MCMC seed the model with a new key at each step, by "
                "`numpyro.handlers.seed`.",
                RuntimeWarning,
                stacklevel=2,
            )
