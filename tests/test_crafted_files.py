"""Files with invalid values, for each field of each member of the registry."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.processes.posterior import AbstractPosterior
from numpyro_scalegp.saving import file as saved
from tests import registry
from tests.conformance import inputs

KERNEL = sgp.kernels.Matern52(1.2)
X = inputs()
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "DISTRIBUTIONS": (KERNEL, X),
    "ESTIMATORS": (),
    "FEATURES": (KERNEL, X),
    "KERNELS": (1.0,),
    "LATENT_FAMILIES": (KERNEL, X),
    "LOG_DETERMINANTS": (),
    "POSTERIORS": (KERNEL, X),
    "PRECONDITIONERS": (),
    "SOLVERS": (),
}
# These need special arguments, or cannot be loaded without a template.
LEFT_OUT = ("mapped_flax_nnx", "variational_schedule")
QUICK = ("exact", "sparse")
MEMBERS = [
    pytest.param(
        factory,
        ARGUMENTS[kind],
        id=f"{kind.lower()}_{name}",
        marks=[pytest.mark.slow] if kind == "POSTERIORS" and name not in QUICK else [],
    )
    for kind in ARGUMENTS
    for name, factory in getattr(registry, kind)
    if name not in LEFT_OUT
]
NAMES = ("name",)
BAD = ["NaN", -1, {"kind": "list", "items": []}, {"kind": "dict", "items": []}]
# Fields that were tested, since members share kernels and other parts.
tried: set[tuple[str, str]] = set()


def places(code: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The classes of this package in a structure, the dict of their fields and each name in it."""
    if isinstance(code, dict):
        fields = code.get("fields", {})
        if code.get("class", "").startswith("numpyro_scalegp"):
            yield from ((code["class"], fields, name) for name in fields)
        code = list(code.values())
    if isinstance(code, list):
        for item in code:
            yield from places(item)


def unchecked(code: Any) -> Iterator[str]:
    """The names of the classes in a structure whose checks the saved objects did not pass."""
    if isinstance(code, dict):
        if code.get("unchecked"):
            yield code["class"].rpartition(":")[2]
        code = list(code.values())
    if isinstance(code, list):
        for item in code:
            yield from unchecked(item)


def use(value: Any) -> None:
    """Trace the methods of an object."""
    if isinstance(value, AbstractPosterior):
        jax.eval_shape(lambda: (value.mean(X), value.variance(X)))
    elif isinstance(value, sgp.kernels.AbstractKernel):
        jax.eval_shape(lambda: value(X, X))
    elif isinstance(value, sgp.features.AbstractFeatures):
        jax.eval_shape(lambda: value(X))
    else:
        hash(jax.tree.structure(value))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("factory", "args"), MEMBERS)
def test_fields_of_other_kinds(factory: Any, args: Any, tmp_path: Path) -> None:
    path, crafted = str(tmp_path / "a.npz"), str(tmp_path / "b.npz")
    sgp.save(path, factory(*args))
    code, arrays = saved.read(path)
    # Only stacks of objects may fail the checks of their class, and are saved as unchecked.
    assert set(unchecked(code)) <= {"ExactPosterior", "Factor"}
    sgp.load(path, trusted=("tests",))
    for place, (of, _, name) in enumerate(list(places(code))):
        if (of, name) in tried:
            continue
        tried.add((of, name))
        for bad in BAD:
            changed = copy.deepcopy(code)
            _, fields, _ = list(places(changed))[place]
            fields[name] = bad
            saved.write(crafted, changed, arrays)
            try:
                value = sgp.load(crafted, trusted=("tests",))
            except ValueError as error:
                assert "b.npz" in str(error)
            else:
                # A string may be another name, and a number another valid number.
                assert isinstance(bad, int) or (bad == "NaN" and name in NAMES), (of, name, bad)
                use(value)


@pytest.mark.parametrize("name", ["X", "y", "representer_weights"])
def test_arrays_of_other_shapes_and_types(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.npz")
    posterior = sgp.GaussianProcess(KERNEL, X, 0.1).condition(jnp.ones(7))
    sgp.save(path, posterior)
    code, arrays = saved.read(path)
    stored = code["fields"][name]
    array = arrays[stored["name"]]
    for bad in (array[:-1], array[None], array.astype(np.int32), array.astype(np.complex64)):
        changed = {**stored, "shape": list(bad.shape), "dtype": bad.dtype.str}
        fields = {**code["fields"], name: changed}
        saved.write(path, {**code, "fields": fields}, {**arrays, stored["name"]: bad})
        with pytest.raises(ValueError, match=r"a.npz`: `fitted`, a `ExactPosterior`: `.*` must be"):
            sgp.load(path)


def test_fields_that_do_not_fit_together(tmp_path: Path) -> None:
    path = str(tmp_path / "a.npz")
    sgp.save(path, sgp.GaussianProcess(sgp.kernels.RBF(jnp.ones(4)), X, 0.1).condition(jnp.ones(7)))
    code, arrays = saved.read(path)
    sgp.save(path, sgp.kernels.RBF(jnp.ones(3)))
    kernel, (lengthscale, *_) = saved.read(path)[0], saved.read(path)[1].values()
    kernel["fields"]["lengthscale"]["name"] = "other"
    kernel["fields"]["variance"] = code["fields"]["kernel"]["fields"]["variance"]
    code["fields"]["kernel"] = kernel
    saved.write(path, code, {**arrays, "other": lengthscale})
    with pytest.raises(ValueError, match=r"a.npz`: `fitted`, a `ExactPosterior`: .*lengthscale"):
        sgp.load(path)
