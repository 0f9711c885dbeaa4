"""Users' functions and classes that are edited after saving: other values are an error."""

import sys
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp

SOURCE = """
import equinox as eqx
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import numpyro_scalegp as sgp


def collapsed(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    gp = sgp.GaussianProcess(sgp.kernels.RBF(scale), {X}, {a} * 0.1, mean={b})
    numpyro.sample("y", gp, obs=y)


def latent(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF({c} * scale), X))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(f, {a} * 0.1), obs=y)


def mean(X):
    return {a} * X[:, 0] + {b}


def features(X):
    return jnp.tanh({c} * X) + {b}


def likelihood(f):
    return dist.Poisson({a} * jnp.exp({c} * f))


def heavy_tails(f):
    return dist.Cauchy(f, {a})


class Kernel(sgp.kernels.RBF):
    def __call__(self, X, Z):
        return {c} * super().__call__(X, Z)
"""


def module(a: float = 1.0, b: float = 0.0, c: float = 1.0, X: str = "X") -> Any:
    """Users' code with these constants."""
    edited = types.ModuleType("edited_code")
    sys.modules["edited_code"] = edited
    code = SOURCE.format(a=a, b=b, c=c, X=X)
    exec(compile(code, "edited_code.py", "exec"), edited.__dict__)
    return edited


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    sys.modules.pop("edited_code", None)


X = np.linspace(0.0, 3.0, 8)[:, None].astype(np.float32)
y = np.sin(X[:, 0])
DRAWS = {"scale": jnp.array([0.8, 1.0, 1.3])}
RBF = sgp.kernels.RBF(0.9)


def mapped(code: Any) -> Any:
    return sgp.kernels.FeatureMapped(RBF, code.features)


# How to make the object, edits that change it, edits that do not, and the name in the error.
MEMBERS: list[tuple[str, Callable[[Any], Any], str, str, str]] = [
    ("model", lambda code: sgp.posterior(code.collapsed, DRAWS, X, y), "ab", "c", "collapsed"),
    (
        "model_of_f",
        lambda code: sgp.posterior(code.latent, {**DRAWS, "f": jnp.stack([y, -y, y])}, X, y),
        "ac",
        "b",
        "latent",
    ),
    (
        "mean",
        lambda code: sgp.GaussianProcess(RBF, X, 1e-4, mean=code.mean).condition(y),
        "ab",
        "c",
        "mean",
    ),
    ("features", lambda code: sgp.LatentGP(mapped(code), X), "bc", "a", "features"),
    (
        "of_two_columns",
        lambda code: {"kernels": [RBF * mapped(code).on((1,)) + mapped(code)]},
        "bc",
        "a",
        "features",
    ),
    ("likelihood", lambda code: sgp.LaplaceGP(RBF, X, code.likelihood), "ac", "b", "likelihood"),
    ("no_moments", lambda code: sgp.LaplaceGP(RBF, X, code.heavy_tails), "a", "bc", "heavy_tails"),
    (
        "class",
        lambda code: sgp.GaussianProcess(code.Kernel(0.5), X, 0.1).condition(y),
        "c",
        "ab",
        "Kernel",
    ),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("make", "edits", "unused", "name"), [pytest.param(*case, id=name) for name, *case in MEMBERS]
)
def test_edited_code(make: Any, edits: str, unused: str, name: str, tmp_path: Any) -> None:
    file = tmp_path / "fitted.npz"
    sgp.save(file, make(module()))
    edited = {letter: 1.05 if letter != "b" else 0.1 for letter in "abc"}
    for letter in edits:
        code = module(**{letter: edited[letter]})
        for options in ({"trusted": ("edited_code",)}, {"like": make(code)}):
            with pytest.raises(
                ValueError, match=rf"fitted.npz`: .*other values than .*`edited_code:{name}`"
            ):
                sgp.load(file, **options)
    # Edits that leave the values unchanged are no error.
    for letters in (unused, ""):
        module(**{letter: edited[letter] for letter in letters})
        sgp.load(file, trusted=("edited_code",))


def test_a_closure_with_other_code(tmp_path: Any) -> None:
    def posterior(scale: float) -> Any:
        return sgp.GaussianProcess(RBF, X, 0.1, mean=lambda X: scale * jnp.sin(X[:, 0]))

    sgp.save(tmp_path / "fitted.npz", posterior(1.0))
    sgp.load(tmp_path / "fitted.npz", like=posterior(2.0))  # whose scale comes from the file
    with_cosines = sgp.GaussianProcess(RBF, X, 0.1, mean=_with_cosines(1.0))
    with pytest.raises(ValueError, match=r"`fitted.mean_function`.* other values .*<lambda>"):
        sgp.load(tmp_path / "fitted.npz", like=with_cosines)


def _with_cosines(scale: float) -> Callable[[Any], Any]:
    def mean(X: Any) -> Any:
        return scale * jnp.cos(X[:, 0])

    mean.__qualname__ = "test_a_closure_with_other_code.<locals>.posterior.<locals>.<lambda>"
    return mean


def test_a_function_that_fails_now(tmp_path: Any) -> None:
    file, code = tmp_path / "fitted.npz", module()
    sgp.save(file, sgp.LatentGP(mapped(code), X))
    code.features.__code__ = (lambda X, scale: X).__code__
    with pytest.raises(ValueError, match=r"cannot be computed .*`edited_code:features` take other"):
        sgp.load(file, trusted=(code.features,))


def test_models_of_rows_that_change(tmp_path: Any) -> None:
    sgp.save(tmp_path / "fitted.npz", sgp.posterior(module().collapsed, DRAWS, X, y))
    code = module(X="2.0 * X")
    with pytest.raises(ValueError, match="other values than when it was saved"):
        sgp.load(tmp_path / "fitted.npz", trusted=(code.collapsed,))


def test_code_of_packages_is_not_computed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from numpyro_scalegp.saving import recorded_values

    monkeypatch.setattr(recorded_values, "record", None)
    kernel = sgp.kernels.FeatureMapped(RBF, jnp.tanh)
    sgp.save(tmp_path / "fitted.npz", sgp.GaussianProcess(kernel, X, 0.1, mean=0.5).condition(y))
