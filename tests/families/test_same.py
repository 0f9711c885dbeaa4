"""A divergence is one of processes with the same prior, or none."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions.kl import kl_divergence

import numpyro_scalegp as sgp
from numpyro_scalegp.families.same import one_if_same
from numpyro_scalegp.features import RandomFourier
from numpyro_scalegp.kernels import RBF, FeatureMapped, Matern32

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
    def divergence(own: Any, other: Any) -> Any:
        prior = (
            sgp.WeightSpaceGP(RandomFourier(other, 4, seed=0), X)
            if name == "chevron"
            else sgp.LatentGP(other, X)
        )
        return kl_divergence(FAMILIES[name](own), prior)

    with pytest.raises(ValueError, match=r"kernel.lengthscale` is 0.25 in the guide, .* is 0.75"):
        divergence(RBF(0.25), RBF(0.75))
    traced = jax.jit(lambda own, other: divergence(RBF(own), RBF(other)))
    assert np.isnan(traced(0.25, 0.75))
    same = traced(0.25, 0.25)
    np.testing.assert_allclose(same, divergence(RBF(0.25), RBF(0.25)), atol=1e-6)


class Scaled(eqx.Module):
    factor: Any

    def __call__(self, X: Any) -> Any:
        return self.factor * X


@pytest.mark.parametrize(
    ("own", "other", "path"),
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
def test_what_differs_is_named(own, other, path):
    assert one_if_same("kernel", own, own) == 1.0
    with pytest.raises(ValueError, match="prior differ") as caught:
        one_if_same("kernel", own, other)
    assert f"`{path}`" in str(caught.value)


def test_closures_are_taken_to_be_the_same():
    one, other = (FeatureMapped(RBF(0.3), lambda X: 2.0 * X) for _ in range(2))
    assert one_if_same("kernel", one, other) == 1.0
