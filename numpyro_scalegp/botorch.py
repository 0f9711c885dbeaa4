"""A fitted posterior as a model of BoTorch, for its acquisition functions and for Ax."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import Model
from botorch.posteriors import GPyTorchPosterior
from botorch.posteriors.fully_bayesian import GaussianMixturePosterior
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.padding import pad_rows
from numpyro_scalegp.processes.mixture import MixturePosterior
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.programs.padded import padded_size

__all__ = ["PosteriorModel"]


class PosteriorModel(Model):
    """A posterior of one function, with joint means and covariances and their gradients in PyTorch.

    After `sgp.posterior(model, guide, result, ...)` it is a model with a single posterior. After
    NUTS it is a fully Bayesian model: BoTorch's acquisition functions are averaged over draws of
    the hyperparameters. These are conditioned on the data once, here, which keeps an n x n matrix
    for each draw with an exact GP.

    Args:
        posterior: of one function, of inputs in the units of BoTorch's, such as the unit cube.
        loc: the mean of the observations before standardization; results have their units.
        scale: the standard deviation of the observations before standardization.
        num_draws: after NUTS, the number of draws, evenly thinned, at most as many as there are.

    Raises:
        TypeError: if `posterior` is not a posterior.
        ValueError: if `scale` is not positive, or the posterior is one of several functions.

    Example:
        >>> import numpy as np, torch  # doctest: +SKIP
        >>> import numpyro_scalegp as sgp
        >>> X = np.random.default_rng(0).uniform(size=(20, 2))
        >>> gp = sgp.GaussianProcess(sgp.kernels.Matern52(0.5), X, 0.01)
        >>> model = sgp.botorch.PosteriorModel(gp.condition(np.sin(X[:, 0])))  # doctest: +SKIP
        >>> model.posterior(torch.rand(5, 3, 2)).mean.shape  # doctest: +SKIP
        torch.Size([5, 3, 1])
    """

    def __init__(
        self,
        posterior: AbstractPosterior,
        *,
        loc: float = 0.0,
        scale: float = 1.0,
        num_draws: int = 16,
    ) -> None:
        checks.instance("posterior", posterior, AbstractPosterior)
        super().__init__()
        self._loc, self._scale = float(loc), checks.number("scale", scale, "(0, inf)")
        self._is_fully_bayesian = self._is_ensemble = isinstance(posterior, MixturePosterior)
        self._members = posterior
        if isinstance(posterior, MixturePosterior):
            number = min(checks.count("num_draws", num_draws), posterior.num_draws)
            chosen = np.linspace(0, posterior.num_draws - 1, number).round().astype(int)
            draws = jax.tree.map(lambda leaf: leaf[chosen], posterior.draws)
            self._members = _conditioned(posterior.posterior_given, draws)

    @property
    def num_outputs(self) -> int:
        """One."""
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        """The number of draws of a fully Bayesian model, otherwise empty."""
        return torch.Size([self._num_members] if self._is_fully_bayesian else [])

    @property
    def _num_members(self) -> int:
        return jax.tree.leaves(eqx.filter(self._members, eqx.is_array))[0].shape[0]

    def posterior(
        self,
        X: torch.Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | torch.Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Any:
        """The joint posterior at q inputs for each t-batch.

        Args:
            X: inputs, shape (*batch, q, d).
            output_indices: None or [0].
            observation_noise: whether to add the noise variance of the model; or variances, shape
                (*batch, q, 1).
            posterior_transform: applied to the result.

        Returns:
            A BoTorch posterior with mean (*batch, q, 1), or (*batch, draws, q, 1) for a fully
            Bayesian model.

        Raises:
            ValueError: if noise is asked for and the model has none.
        """
        mean, covariance = _Moments.apply(X, self)
        if isinstance(observation_noise, torch.Tensor):
            noise = observation_noise.squeeze(-1)
            if self._is_fully_bayesian and noise.ndim > 1:
                noise = noise.unsqueeze(-2)
            covariance = covariance + torch.diag_embed(noise.expand(mean.shape))
        elif observation_noise:
            variance = _as_tensor(self._scale**2 * self._noise_variance(), X)
            variance = variance[..., None].expand(mean.shape)
            covariance = covariance + torch.diag_embed(variance)
        # As a linear operator: GPyTorch then adds jitter where inputs coincide.
        normal = MultivariateNormal(mean, to_linear_operator(covariance))
        kind = GaussianMixturePosterior if self._is_fully_bayesian else GPyTorchPosterior
        joint = kind(distribution=normal)
        return joint if posterior_transform is None else posterior_transform(joint)

    def _noise_variance(self) -> np.ndarray:
        """The variance of the noise, shape () or, for a fully Bayesian model, (draws,)."""

        def of_member(member: Any) -> jax.Array:
            return jnp.reshape(member._noise_or_raise(), ())

        variance = eqx.filter_vmap(of_member) if self._is_fully_bayesian else of_member
        return np.asarray(variance(self._members))

    def _moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and covariances at inputs of shape (*batch, q, d)."""
        flat, batch_shape, size = _padded(X)
        results = _moments(self._members, flat, self._is_fully_bayesian)
        mean, covariance = (
            np.asarray(array)[:size].reshape(*batch_shape, *array.shape[1:]) for array in results
        )
        return self._loc + self._scale * mean, self._scale**2 * covariance

    def _gradient(
        self, X: np.ndarray, of_mean: np.ndarray, of_covariance: np.ndarray
    ) -> np.ndarray:
        """The gradient of X, given the gradients of means and covariances."""
        flat, batch_shape, size = _padded(X)
        ndim = len(batch_shape)
        gradients = self._scale * of_mean, self._scale**2 * of_covariance
        rows = [array.reshape(size, *array.shape[ndim:]) for array in gradients]
        of_mean, of_covariance, _ = pad_rows(len(flat), *rows)
        gradient = _pullback(self._members, flat, of_mean, of_covariance, self._is_fully_bayesian)
        return np.asarray(gradient)[:size].reshape(X.shape)


class _Moments(torch.autograd.Function):
    """Means and covariances as functions of X that PyTorch differentiates."""

    @staticmethod
    def forward(ctx: Any, X: torch.Tensor, model: PosteriorModel) -> Any:
        ctx.model = model
        ctx.save_for_backward(X)
        return tuple(_as_tensor(array, X) for array in model._moments(_as_array(X)))

    @staticmethod
    def backward(ctx: Any, of_mean: torch.Tensor, of_covariance: torch.Tensor) -> Any:
        (X,) = ctx.saved_tensors
        gradient = ctx.model._gradient(*map(_as_array, (X, of_mean, of_covariance)))
        return _as_tensor(gradient, X), None


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _as_tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(np.array(array), dtype=like.dtype, device=like.device)


def _padded(X: np.ndarray) -> tuple[np.ndarray, tuple[int, ...], int]:
    """Inputs of shape (size, q, d), with padding, so that few programs are compiled."""
    batch_shape = X.shape[:-2]
    size = math.prod(batch_shape)
    flat = X.reshape(size, *X.shape[-2:])
    padded, _ = pad_rows(padded_size(size), flat)
    return padded, batch_shape, size


@eqx.filter_jit
def _conditioned(posterior_given: Any, draws: Any) -> AbstractPosterior:
    """The posteriors given all draws, with a leading axis."""
    return jax.lax.map(posterior_given, draws)


@eqx.filter_jit
def _moments(members: Any, X: Any, is_batch: bool) -> tuple[jax.Array, jax.Array]:
    def moments(X: jax.Array) -> tuple[jax.Array, jax.Array]:
        def of_member(member: Any) -> tuple[jax.Array, jax.Array]:
            return member.mean(X), member.covariance(X)

        return eqx.filter_vmap(of_member)(members) if is_batch else of_member(members)

    return jax.vmap(moments)(jnp.asarray(X))


@eqx.filter_jit
def _pullback(members: Any, X: Any, of_mean: Any, of_covariance: Any, is_batch: bool) -> jax.Array:
    (mean, covariance), pullback = jax.vjp(lambda X: _moments(members, X, is_batch), jnp.asarray(X))
    cotangents = of_mean.astype(mean.dtype), of_covariance.astype(covariance.dtype)
    (gradient,) = pullback(cotangents)
    return gradient
