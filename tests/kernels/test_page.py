"""The table of docs/kernels.md says which kernels have spectral densities and random features."""

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.kernels import AbstractKernel

K = sgp.kernels
PAGE = Path(__file__).parent.parent.parent / "docs/kernels.md"
KEY = jax.random.key(0)
X = jnp.array([[0.0, 1.0], [1.0, 1.0]])

# For each row: a kernel whose parts have the property in the column, and one whose parts do not.
KERNELS: dict[str, list[AbstractKernel]] = {
    "RBF": [K.RBF(1.0)],
    "Matern12": [K.Matern12(1.0)],
    "Matern32": [K.Matern32(1.0)],
    "Matern52": [K.Matern52(1.0)],
    "Matern": [K.Matern(1.0, smoothness=1.2)],
    "Wendland": [K.Wendland(1.0)],
    "OnSphere": [
        K.OnSphere(K.Matern32(500.0)),
        K.OnSphere(K.Matern12(500.0), great_circle=True),
    ],
    "Gneiting": [K.Gneiting(K.RBF(1.0), 1.0)],
    "RationalQuadratic": [K.RationalQuadratic(1.0, alpha=1.0)],
    "Periodic": [K.Periodic(1.0, period=1.0)],
    "Constant": [K.Constant(1.0)],
    "Linear": [K.Linear(1.0)],
    "Harmonic": [K.Harmonic(1.0, quality=2.0).on((0,))],
    "Cosine": [K.Cosine(1.0).on((0,))],
    "Wiener": [K.Wiener(1.0).on((0,))],
    "IntegratedWiener": [K.IntegratedWiener(1.0).on((0,))],
    "Coregion": [K.Coregion(jnp.eye(2), jnp.ones(2)).on((1,))],
    "WithDerivatives": [
        K.WithDerivatives(K.Matern52(1.0)),
        K.WithDerivatives(K.FeatureMapped(K.MultiscaleRBF(1.0), lambda X: X[:, [0, 0]])),
    ],
    "OrthogonalAdditive": [K.OrthogonalAdditive(1.0, jnp.ones(3))],
    "FeatureMapped": [
        K.FeatureMapped(K.RBF(1.0), jnp.tanh),
        K.FeatureMapped(K.MultiscaleRBF(1.0), jnp.tanh),
    ],
    "MultiscaleRBF": [K.MultiscaleRBF(1.0)],
    "sum": [K.Matern32(1.0) + K.Matern12(1.0), K.RBF(1.0) + K.MultiscaleRBF(1.0)],
    "product": [K.Matern32(1.0) * K.Matern12(1.0), K.RBF(1.0) * K.MultiscaleRBF(1.0)],
}


def rows() -> list[tuple[str, ...]]:
    table = PAGE.read_text(encoding="utf-8").partition("| kernel | spectral density |")[2]
    cells = re.findall(r"^\| `?(\w+)`? " + 4 * r"\| ([^|]+) " + r"\|$", table, re.M)
    return [tuple(cell.strip() for cell in row) for row in cells]


def works(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return False
    return True


def answers(kernel: AbstractKernel) -> tuple[bool, bool, bool, bool]:
    has_features = works(lambda: kernel.random_features(KEY, X, 4))
    return (
        works(lambda: kernel.sample_frequencies(KEY, 3, 2)),
        has_features,
        has_features and kernel.has_smooth_features,
        works(kernel.state_space),
    )


def test_the_table_has_every_kernel() -> None:
    concrete = {name for name in K.__all__ if not name.startswith("Abstract")} - {"LinearSDE"}
    assert {name for name, *_ in rows()} == concrete | {"sum", "product"} == KERNELS.keys()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_is_right(row: tuple[str, ...]) -> None:
    name, *cells = row
    for cell, *actual in zip(cells, *map(answers, KERNELS[name]), strict=True):
        expected = {"yes": [True], "no": [False]}.get(cell[:3].strip(), [True, False])
        assert actual == expected * (len(actual) if len(expected) == 1 else 1), (name, cell)


@pytest.mark.parametrize(
    ("kernel", "is_smooth"),
    [
        ((K.RBF(1.0) + K.RBF(2.0)) * K.RBF(1.0), False),
        (K.RBF(1.0) * K.RBF(1.0) + K.RBF(2.0) * K.RBF(1.0), True),
    ],
)
def test_sums_of_products_are_smooth(kernel: AbstractKernel, is_smooth: bool) -> None:
    assert answers(kernel)[:3] == (True, True, is_smooth)
