"""The interface of a log marginal likelihood."""

import abc
import warnings

import equinox as eqx
from jaxtyping import Array, Float, Key

from numpyro_scalegp.estimators.solver_state import SolverState
from numpyro_scalegp.kernels import AbstractKernel


class AbstractEstimator(eqx.Module):
    """A way to compute log N(y; 0, K(X, X) + noise) and its gradient."""

    @property
    @abc.abstractmethod
    def is_stochastic(self) -> bool:
        """Whether it draws at random, so that it needs a key or a state."""

    @abc.abstractmethod
    def log_prob(
        self,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        noise_variance: Float[Array, "..."],
        residual: Float[Array, "*batch n"],
        *,
        key: Key[Array, ""] | None = None,
        state: SolverState | None = None,
    ) -> Float[Array, "*batch"]:
        """The log density of `residual` under N(0, H) with H = K(X, X) + noise.

        Args:
            kernel: covariance function.
            X: inputs, shape (n, d).
            noise_variance: shape () or (n,).
            residual: observations minus the mean, shape (..., n).
            key: a typed JAX key, for estimators that draw at random.
            state: where iterative estimators start from, and where they leave their solution.

        Returns:
            Log densities, shape (...).
        """

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
                "stochastic-gradient MCMC seed the model anew at each step, by "
                "`numpyro.handlers.seed`.",
                RuntimeWarning,
                stacklevel=2,
            )


def key_of(estimator: AbstractEstimator, key: Key[Array, ""] | None) -> Key[Array, ""]:
    """The key that an estimator got, or an error that says where to get one."""
    if key is None:
        raise ValueError(
            f"`{type(estimator).__name__}` draws at random: give the `GaussianProcess` a `key=`"
            + (" or a `state=`" if hasattr(estimator, "solver") else "")
            + ", or run the model under `numpyro.handlers.seed`."
        )
    return key
