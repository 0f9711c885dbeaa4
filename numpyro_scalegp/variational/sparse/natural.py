"""The sparse variational family whose Gaussian sites have natural gradients."""

import copy
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_scalegp.core import batches, checks
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.numerics.derivatives import explained_forward_mode
from numpyro_scalegp.processes.expansion import (
    ExpansionPosterior,
    WhitenedNormal,
    inducing_whitening,
)
from numpyro_scalegp.processes.whitening import Whitening
from numpyro_scalegp.programs.compiled import compiled
from numpyro_scalegp.variational.latent import LatentGP
from numpyro_scalegp.variational.natural_gradients import (
    HOW_TO_TRAIN,
    LOC,
    PRECISION,
    scaled_derivatives,
    without_derivatives,
)
from numpyro_scalegp.variational.same import same_prior
from numpyro_scalegp.variational.sparse.natural_parameters import (
    Normal,
    WhitenedSites,
    natural_divergence,
    natural_moments,
    whitened_sites,
)
from numpyro_scalegp.variational.sparse.sparse import SparseGP


class NaturalNormal(WhitenedNormal):
    """A `WhitenedNormal` whose moments have natural gradients with respect to the sites."""

    natural: Normal  # b and P of the sites
    held: Normal  # the mean and the scale, without derivatives in the sites
    to_reference: Float[Array, "*batch M M"] | None  # R, see `whitened_sites`

    def moments(
        self,
        whitening: Whitening,
        across: Float[Array, "M n"],
        diagonal: Float[Array, " n"],
    ) -> tuple[Float[Array, " n"], ...]:
        """The moments of `WhitenedNormal.moments`; see `natural_moments`."""
        sites = *self.natural, self.held, self.to_reference
        return natural_moments(whitening, across, diagonal, *sites)

    def to_draw(self) -> WhitenedNormal:
        """The distribution without derivatives."""
        return WhitenedNormal(*without_derivatives((self.loc, self.scale_tril)))


class NaturalSparseGP(SparseGP):
    """A `SparseGP` whose inducing values have the density p(u) exp(c'b - c'P c / 2), normalized.

    The sites exp(c'b - c'P c / 2) stand for the observations, and p(u) = N(0, K) depends on the
    hyperparameters, so that q(u) follows the kernel. c are the inducing values u, whitened by the
    covariance at fixed hyperparameters, the reference. Derivatives with respect to b and P are
    natural gradients: gradient descent at rate r, which `infer.natural_gradients` does, takes a
    natural-gradient step of size r.

    Args:
        kernel: covariance function of the prior.
        X: inputs, shape (n, d).
        inducing_points: Z, shape (M, d).
        natural_loc: b, shape (M,), or (*batch, M) for independent functions.
        natural_precision: P, positive semidefinite, shape (*batch, M, M).
        reference_kernel: covariance function at the reference hyperparameters; None for `kernel`.
        inducing_mean: the mean m(Z) of a prior with a mean function, shape (M,) or (*batch, M). The
            process is without it, and the sites are on the inducing values with it.
        **options: options of `SparseGP`.

    Raises:
        ValueError: as for `SparseGP`.

    References:
        Khan and Lin (2017), Conjugate-Computation Variational Inference; Adam, Chang, Khan and
        Solin (2021), Dual Parameterization of Sparse Variational Gaussian Processes. Time
        O(n M^2 + M^3), memory O(n M + M^2).
    """

    arg_constraints = {
        **SparseGP.arg_constraints,
        LOC: constraints.real_vector,
        PRECISION: constraints.real_matrix,
    }
    reparametrized_params = list(arg_constraints)
    pytree_data_fields = (LOC, PRECISION, "whitening", "natural", "held", "to_reference")
    whitening: Whitening
    natural: Normal
    held: Normal
    to_reference: Float[Array, "*batch M M"] | None

    def __init__(
        self,
        kernel: Any,
        X: Float[ArrayLike, "... n d"],
        inducing_points: Float[ArrayLike, "... M d"],
        natural_loc: Float[ArrayLike, "*batch M"],
        natural_precision: Float[ArrayLike, "*batch M M"],
        reference_kernel: AbstractKernel | None = None,
        inducing_mean: Float[ArrayLike, "*batch M"] | None = None,
        **options: Any,
    ) -> None:
        self.natural_loc = checks.as_float(natural_loc, LOC)
        self.natural_precision = checks.as_float(natural_precision, PRECISION)
        batch, M = self.natural_loc.shape[:-1], self.natural_loc.shape[-1]
        why = "a row for each inducing point"
        checks.shape(PRECISION, self.natural_precision, (*batch, M, M), why=why)
        checks.finite(LOC, self.natural_loc)
        checks.finite(PRECISION, self.natural_precision)
        checks.instance("kernel", kernel, AbstractKernel)
        Z = checks.inputs("inducing_points", inducing_points, may_be_batch=True)
        checks.shape(LOC, self.natural_loc, (*batch, Z.shape[-2]), why="a value for each point")
        jitter, reference = checks.jitter(options.get("jitter")), None
        whitening = inducing_whitening(kernel, Z, jitter)
        if reference_kernel is not None:
            reference = inducing_whitening(reference_kernel, Z, jitter)
        mean = None
        if inducing_mean is not None:
            mean = checks.as_float(inducing_mean, "inducing_mean")
            mean = jnp.broadcast_to(mean, self.natural_loc.shape)
        with explained_forward_mode():
            parameters = self.natural_loc, self.natural_precision
            whitened = _whitened(whitening, reference, mean, *parameters)
        loc, scale_tril, added_jitter, self.held, self.to_reference, self.natural = whitened
        self.whitening = whitening._replace(jitter=whitening.jitter + added_jitter)
        super().__init__(kernel, X, Z, loc, scale_tril, **options)

    def under_scale(self, scale: Float[ArrayLike, ""]) -> "NaturalSparseGP":
        """This family at a site with a scale; natural-gradient steps are as with scale one."""
        if jnp.ndim(scale):
            return self
        scaled = copy.copy(self)
        scale = jnp.asarray(scale, self.natural_loc.dtype)
        scaled.natural = scaled_derivatives(self.natural, scale)
        return scaled

    def sample(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*sample_shape_and_batch n"]:
        """Draw as `SparseGP` does, without derivatives in the natural parameters."""
        fixed = copy.copy(self)
        fixed.natural = without_derivatives(self.natural)
        return super(NaturalSparseGP, fixed).sample(key, sample_shape)

    def posterior(self) -> ExpansionPosterior:
        """The approximate posterior, with moments and joint samples at any inputs.

        Warns if P is not positive semidefinite, as after steps of another optimizer.
        """
        _check_positive(self.natural_precision)
        sites = self.natural, self.held, self.to_reference
        values = NaturalNormal(self.loc, self.scale_tril, *sites)
        return ExpansionPosterior.of_inducing_values(
            self.kernel, self.inducing_points, values, whitening=self.whitening
        )


@compiled
def _whitened(
    whitening: Whitening,
    reference: Whitening | None,
    mean: Float[Array, "*batch M"] | None,
    b: Float[Array, "*batch M"],
    P: Float[Array, "*batch M M"],
) -> WhitenedSites:
    """The whitened inducing values given the sites, for each function of a batch."""
    arguments = (b, P), whitening, reference, mean
    of_whitening: Any = Whitening(2, 2, 0, 2)  # type: ignore[arg-type]
    of_reference = None if reference is None else of_whitening
    event_ndims = (1, 2), of_whitening, of_reference, None if mean is None else 1
    leading = jax.tree.map(lambda array, ndim: array.ndim - ndim, arguments, event_ndims)
    of_one = lambda a: whitened_sites(*a[0], *a[1:])  # noqa: E731
    return batches.each(of_one, batches.Batch(arguments, leading))


def _check_positive(P: Float[Array, "*batch M M"]) -> None:
    """Warn if a concrete precision is indefinite by more than rounding errors."""
    if not checks.is_concrete(P):
        return
    # NumPy, because within a trace JAX operations on concrete arrays are traced.
    matrix = np.asarray(P)
    eigenvalues = np.linalg.eigvalsh((matrix + np.swapaxes(matrix, -1, -2)) / 2.0)
    least, largest = eigenvalues[..., 0], eigenvalues[..., -1]
    if np.any(least < -0.01 - 100.0 * np.finfo(eigenvalues.dtype).eps * largest):
        warnings.warn(
            f"`{PRECISION}` has the eigenvalue {least.min():.3g}, but must be positive "
            f"semidefinite: {HOW_TO_TRAIN}",
            RuntimeWarning,
            stacklevel=2,
        )


@kl_divergence.register(NaturalSparseGP, LatentGP)
def _(q: NaturalSparseGP, p: LatentGP) -> Float[Array, "*batch"]:
    """The divergence of `SparseGP`, with natural gradients."""
    divergence = natural_divergence(*q.natural, q.held)
    return same_prior(q, p) * divergence
