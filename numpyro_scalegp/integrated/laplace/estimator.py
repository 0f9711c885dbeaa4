"""The interface of the estimators that take Laplace's approximation."""

import abc
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Key

from numpyro_scalegp.integrated.estimator import AbstractEstimator
from numpyro_scalegp.integrated.laplace.search import Entries, Sites
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.processes.posterior import AbstractConditioned
from numpyro_scalegp.programs.functions import RowsFunction


class LaplaceProblem(NamedTuple):
    """A function and its observations, for one Gaussian process or a batch of them."""

    kernel: AbstractKernel
    X: Float[Array, "... n d"]
    entries: Entries  # log likelihoods (*batch, n), each of one entry of f, given f and `data`
    mean: Float[Array, "*batch n"]  # prior mean of f at X
    data: Any  # further argument of `entries`, a pytree of arrays with y
    key: Key[Array, ""]  # for estimators that draw probes


class AbstractLaplaceEstimator(AbstractEstimator):
    """An estimator that also integrates a function out of other likelihoods than normal noise.

    It does so by Laplace's approximation, for `LaplaceGP`.
    """

    def draws_probes(self, num_rows: int) -> bool:
        """Whether the approximation has terms that are estimated from random probes."""
        return False

    def for_inputs(
        self, kernel: AbstractKernel, X: Float[Array, "... n d"]
    ) -> "AbstractLaplaceEstimator":
        """This estimator with what it finds from the inputs on the host, such as neighbors."""
        return self

    @abc.abstractmethod
    def laplace_log_prob(self, problem: LaplaceProblem) -> Float[Array, "*batch"]:
        """Laplace's approximation of the log marginal likelihood.

        Returns:
            Log densities, shape (*batch,), with derivatives of every order. NaN, with a warning, if
            the likelihood is not log-concave at the mode, or there is no mode.
        """

    @abc.abstractmethod
    def laplace_sites(self, problem: LaplaceProblem) -> Sites:
        """The normal approximation around the mode."""

    @abc.abstractmethod
    def laplace_posterior(
        self,
        kernel: AbstractKernel,
        X: Float[Array, "n d"],
        sites: Sites,
        mean: Float[Array, " n"],
        mean_function: RowsFunction,
        key: Key[Array, ""],
        num_samples: int | None,
    ) -> AbstractConditioned:
        """The posterior of one member, given its sites.

        Args:
            kernel: covariance function.
            X: inputs, shape (n, d).
            sites: of this member.
            mean: prior mean of f at X, shape (n,).
            mean_function: the mean function of the result, which may differ from it.
            key: a typed JAX key, for estimators that store draws.
            num_samples: the number of draws to store; None for the estimator's default.
        """
