"""The interface of the estimators of a log marginal likelihood."""

import abc
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import Array, Float, Key

from numpyro_scalegp.core.summary import OneLine
from numpyro_scalegp.integrated.iterative.solver_state import SolverState
from numpyro_scalegp.linear.operator import KernelOperator
from numpyro_scalegp.linear.solver import Solution
from numpyro_scalegp.processes.posterior import AbstractConditioned
from numpyro_scalegp.programs.functions import RowsFunction


class AbstractEstimator(OneLine):
    """A method to compute log N(y; 0, H), with H = K(X, X) + noise, the posterior and prior draws.

    A custom estimator implements `log_prob`, `condition` and `sample_prior`, and takes the options
    that it does not use as `**options`. If it draws at random, it sets `is_stochastic = True` and
    calls `required_key` for its key.
    """

    # Whether it draws at random, so that it needs a key.
    is_stochastic: ClassVar[bool] = False
    # Whether to process the members of a batch one after the other, in the memory of one.
    takes_turns: ClassVar[bool] = False

    @property
    def condition_options(self) -> frozenset[str]:
        """The options of `condition` that this estimator uses: its named arguments."""
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
            state: for iterative estimators, holds the previous solution. The solve starts from it
                and replaces it.

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
        """The posterior of f given observations y ~ N(m(X), H), consistent with the density.

        Args:
            operator: H, with the kernel, X and the noise variance.
            y: observations, shape (n,).
            mean_function: the prior mean m, from (n, d) inputs to (n,) values.
            key: a typed JAX key, for estimators that draw at random.
            state: the state of the previous steps, for iterative estimators.
            num_samples: number of posterior samples to store, for iterative estimators.
            max_epochs: budget of the solve, for iterative estimators.
            start: a posterior of this estimator whose solution is the initial guess of the solve.
            progress_bar: whether a solve may show its progress.

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
        """The result of `log_prob` and the linear solve behind it, None if there is no solve."""
        return self.log_prob(operator, residual, key=key, state=state), None

    def with_inputs(self, change: Callable[[Array], Array]) -> "AbstractEstimator":
        """This estimator with `change` applied to its stored inputs, such as inducing points."""
        return self

    def prepare(
        self, state: SolverState, operator: KernelOperator, key: Key[Array, ""] | None
    ) -> None:
        """Initialize an empty state with arrays of the right shapes.

        Raises:
            ValueError: if this estimator has no state.
        """
        raise ValueError(
            f"`state` is for iterative estimators, and `{type(self).__name__}` is not one: leave "
            "`state` out, or use `sgp.estimators.Pathwise` or `Hutchinson`."
        )

    @property
    def is_of_batch(self) -> bool:
        """Whether the density is estimated from a mini-batch and scaled to all observations."""
        return False

    def required_key(self, key: Key[Array, ""] | None) -> Key[Array, ""]:
        """The key; raises a ValueError if there is none."""
        if key is None:
            raise ValueError(
                f"`{type(self).__name__}` draws at random: give the `GaussianProcess`, or its "
                "`condition`, a `key=`, or run the model under `numpyro.handlers.seed`."
            )
        return key

    def check_frozen_key(self) -> None:
        """Raise or warn if this estimator is not valid under a constant key.

        Potential energies and line searches use the same key at each evaluation. The estimated
        value is then a fixed function, and the estimated gradient is not the gradient of this
        function.
        """
        if self.is_stochastic:
            warnings.warn(
                f"`{type(self).__name__}` draws at random, but this model is evaluated under a "
                "constant key: NUTS, HMC, other users of a potential energy and the line search of "
                "`numpyro.optim.Minimize` see one frozen draw of the log density, and a gradient "
                "that does not match it. Use `estimator=sgp.estimators.Cholesky()`, or train by "
                "`SVI` with optax. For stochastic-gradient MCMC, seed the model with a new key at "
                "each step, by `numpyro.handlers.seed`.",
                RuntimeWarning,
                stacklevel=2,
            )
