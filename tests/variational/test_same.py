"""A divergence needs a guide and a prior with the same kernel."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions.kl import kl_divergence

import numpyro_scalegp as sgp
from numpyro_scalegp.features import RandomFourier
from numpyro_scalegp.kernels import RBF, FeatureMapped, Matern32
from numpyro_scalegp.variational.same import one_if_same

X = jnp.linspace(-1.0, 1.0, 4)[:, None]
WEIGHTS = jnp.zeros(2), jnp.eye(2)
FAMILIES: dict[str, Any] = {
    "sparse": lambda kernel: sgp.SparseGP(kernel, X, X[:2], *WEIGHTS),
    "hybrid": lambda kernel: sgp.HybridGP(kernel, X, X[:2], *WEIGHTS, X, jnp.zeros(4)),
    "decoupled": lambda kernel: sgp.DecoupledGP(kernel, X, X, jnp.zeros(4), X[:2], WEIGHTS[1]),
    "chevron": lambda kernel: sgp.ChevronGP(
        RandomFourier(kernel, 4, seed=0), X, jnp.zeros(4), jnp.ones(4), jnp.zeros((4, 1))
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_divergence_is_from_the_same_prior(name):
    def divergence(kernel: Any, prior_kernel: Any) -> Any:
        prior = (
            sgp.WeightSpaceGP(RandomFourier(prior_kernel, 4, seed=0), X)
            if name == "chevron"
            else sgp.LatentGP(prior_kernel, X)
        )
        return kl_divergence(FAMILIES[name](kernel), prior)

    with pytest.raises(ValueError, match=r"kernel.lengthscale` is 0.25 in the guide, .* is 0.75"):
        divergence(RBF(0.25), RBF(0.75))
    traced = jax.jit(lambda a, b: divergence(RBF(a), RBF(b)))
    assert np.isnan(traced(0.25, 0.75))
    same = traced(0.25, 0.25)
    np.testing.assert_allclose(same, divergence(RBF(0.25), RBF(0.25)), atol=1e-6)


class Scaled(eqx.Module):
    factor: Any

    def __call__(self, X: Any) -> Any:
        return self.factor * X


@pytest.mark.parametrize(
    ("kernel", "prior_kernel", "path"),
    [
        (RBF(0.3), Matern32(0.3), "kernel"),
        (RBF(0.3), RBF(jnp.array([0.3, 0.3])), "kernel.lengthscale"),
        (RBF(0.3) + RBF(0.4), RBF(0.3) * RBF(0.4), "kernel"),
        (RBF(0.3).on((0,)), RBF(0.3).on((1,)), "kernel.dims[0]"),
        (RBF(0.3).on((0,)), RBF(0.3).on((0, 1)), "nothing"),
        (RBF(0.3) + RBF(0.4), RBF(0.3) + RBF(0.5), "kernel.right.lengthscale"),
        (
            FeatureMapped(RBF(0.3), Scaled(jnp.ones(3))),
            FeatureMapped(RBF(0.3), Scaled(jnp.zeros(3))),
            "kernel.feature_map.arrays.factor",
        ),
    ],
)
def test_the_error_names_the_difference(kernel, prior_kernel, path):
    assert one_if_same("kernel", kernel, kernel) == 1.0
    with pytest.raises(ValueError, match="prior differ") as caught:
        one_if_same("kernel", kernel, prior_kernel)
    assert f"`{path}`" in str(caught.value)


def test_closures_are_assumed_to_be_the_same():
    kernels = [FeatureMapped(RBF(0.3), lambda X: 2.0 * X) for _ in range(2)]
    assert one_if_same("kernel", *kernels) == 1.0
