"""The sparse variational family by its natural parameters, for natural gradients."""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import checks
from numpyro_scalegp.core.derivatives import explained_forward_mode
from numpyro_scalegp.core.natural import (
    natural_divergence,
    natural_moments,
    normal_of,
    scaled_derivatives,
    without_derivatives,
)
from numpyro_scalegp.families.latent import LatentGP
from numpyro_scalegp.families.same import one_if_same
from numpyro_scalegp.families.sparse import SparseGP, SparsePosterior

# What parameters are called, so that an optimizer knows them.
LOC, PRECISION = "natural_loc", "natural_precision"


class NaturalPosterior(SparsePosterior):
    """A `SparsePosterior` whose moments have natural gradients."""

    # Given always; without a default they would stand behind fields that have one.
    natural_loc: Float[Array, "*batch M"] = None  # type: ignore[assignment]
    natural_precision: Float[Array, "*batch M M"] = None  # type: ignore[assignment]
    lift: Float[Array, "..."] = None  # type: ignore[assignment]

    def _weights(self) -> tuple[Any, ...]:
        return *super()._weights(), self.natural_loc, self.natural_precision, self.lift

    @property
    def _lift(self) -> Float[Array, "..."]:
        return super()._lift + self.lift

    def _moments(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        across, diagonal = self._of_f(self.inducing_points, X), self._of_f.diag(X)
        q = self.natural_loc, self.natural_precision, (self.loc, self.scale_tril)
        return natural_moments(self.whitening, across, diagonal, *q)

    def _joint(self, X: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
        return super(NaturalPosterior, self._fixed())._joint(X)

    def _update(self, prior: Float[Array, "M s"], key: Key[Array, ""]) -> Float[Array, "M s"]:
        return super(NaturalPosterior, self._fixed())._update(prior, key)

    def _fixed(self) -> "NaturalPosterior":
        loc, scale_tril = without_derivatives((self.loc, self.scale_tril))
        return dataclasses.replace(self, loc=loc, scale_tril=scale_tril)


class NaturalSparseGP(SparseGP):
    """A `SparseGP` by what observations add to the natural parameters of its inducing values.

    The whitened inducing values have the precision I + P and the mean (I + P)^-1 b. Derivatives
    with respect to b and P are natural gradients: gradient descent at rate r takes the step of that
    size, and `infer.natural_gradients` does.

    Args:
        kernel: covariance function of the prior.
        X: inputs, shape (n, d).
        inducing_points: Z, shape (M, d).
        natural_loc: b, shape (M,), or (*batch, M) for independent functions.
        natural_precision: P, positive semidefinite, shape (*batch, M, M).
        **options: as of `SparseGP`.

    Raises:
        ValueError: as `SparseGP`.

    References:
        Khan and Lin (2017), Conjugate-Computation Variational Inference. Time O(n M^2 + M^3),
        memory O(n M + M^2).
    """

    arg_constraints = {
        **SparseGP.arg_constraints,
        LOC: constraints.real_vector,
        PRECISION: constraints.real_matrix,
    }
    reparametrized_params = list(arg_constraints)
    pytree_data_fields = (LOC, PRECISION, "lift")
    lift: Float[Array, "..."]

    def __init__(
        self,
        kernel: Any,
        X: Float[ArrayLike, "... n d"],
        inducing_points: Float[ArrayLike, "... M d"],
        natural_loc: Float[ArrayLike, "*batch M"],
        natural_precision: Float[ArrayLike, "*batch M M"],
        **options: Any,
    ) -> None:
        self.natural_loc = checks.as_float(natural_loc, LOC)
        self.natural_precision = checks.as_float(natural_precision, PRECISION)
        batch, M = self.natural_loc.shape[:-1], self.natural_loc.shape[-1]
        checks.shape(PRECISION, self.natural_precision, (*batch, M, M), why="as of the precision")
        checks.finite(LOC, self.natural_loc)
        checks.finite(PRECISION, self.natural_precision)
        with explained_forward_mode():
            loc, scale_tril, self.lift = _normals(self.natural_loc, self.natural_precision)
        super().__init__(kernel, X, inducing_points, loc, scale_tril, **options)

    def under_scale(self, scale: Float[ArrayLike, ""]) -> "NaturalSparseGP":
        """With natural gradients of a bound of that scale, so that steps are as with scale one."""
        if jnp.ndim(scale):
            return self
        other = copy.copy(self)
        given = self.natural_loc, self.natural_precision
        scale = jnp.asarray(scale, self.natural_loc.dtype)
        other.natural_loc, other.natural_precision = scaled_derivatives(given, scale)
        return other

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape_and_batch n"]:
        """Draw as `SparseGP` does, without derivatives in the natural parameters."""
        drawn = copy.copy(self)
        given = self.natural_loc, self.natural_precision
        drawn.natural_loc, drawn.natural_precision = without_derivatives(given)
        return super(NaturalSparseGP, drawn).sample(key, sample_shape)

    def posterior(self) -> NaturalPosterior:
        """The process itself, for moments and joint samples at any inputs.

        Warns where P is no sum over observations, as after steps of another optimizer.
        """
        _check_positive(self.natural_precision)
        return NaturalPosterior(
            self.kernel,
            self.inducing_points,
            self.loc,
            self.scale_tril,
            self.jitter,
            natural_loc=self.natural_loc,
            natural_precision=self.natural_precision,
            lift=self.lift,
        )


def _check_positive(P: Float[Array, "*batch M M"]) -> None:
    """Warn where a precision that is not traced is further from semidefinite than by rounding."""
    if not checks.is_concrete(P):
        return
    # In NumPy: within a trace JAX makes traced values of known ones.
    matrix = np.asarray(P)
    eigenvalues = np.linalg.eigvalsh((matrix + np.swapaxes(matrix, -1, -2)) / 2.0)
    least, largest = eigenvalues[..., 0], eigenvalues[..., -1]
    if np.any(least < -0.01 - 100.0 * np.finfo(eigenvalues.dtype).eps * largest):
        warnings.warn(
            f"`{PRECISION}` has the eigenvalue {least.min():.3g}, and what observations add to a "
            "precision has none below zero: natural parameters take the steps of "
            "sgp.infer.natural_gradients(optimizer), and no other optimizer's, nor changed ones. "
            "Train again with it, and clipping and the like inside, around the optimizer.",
            RuntimeWarning,
            stacklevel=2,
        )


@jax.jit
def _normals(b: Array, P: Array) -> tuple[Array, Array, Array]:
    each: Callable[..., Any] = normal_of
    for _ in b.shape[:-1]:
        each = jax.vmap(each)
    return each(b, P)


@kl_divergence.register(NaturalSparseGP, LatentGP)
def _(q: NaturalSparseGP, p: LatentGP) -> Float[Array, "*batch"]:
    """That of `SparseGP`, with natural gradients."""
    divergence = natural_divergence(q.natural_loc, q.natural_precision, (q.loc, q.scale_tril))
    return one_if_same("kernel", q.kernel, p.kernel) * divergence
