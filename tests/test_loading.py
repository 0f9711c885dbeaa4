"""Files that are truncated, damaged, interrupted while written, or crafted to run code."""

import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.saving import file as saved

ROOT = Path(__file__).parent.parent


def write(path: Path, structure: Any, **arrays: np.ndarray) -> None:
    """Write a file with any structure and arrays, as an attacker could."""
    saved.write(str(path), structure, arrays)


def function(name: str) -> dict[str, Any]:
    return {"kind": "function", "name": name}


def sequence(*items: Any, kind: str = "tuple") -> dict[str, Any]:
    return {"kind": kind, "items": list(items)}


def trend(X: Any) -> Any:
    return X[:, 0]


class Network(eqx.Module):
    weight: jax.Array

    def __check_init__(self) -> None:
        if self.weight.ndim != 2:
            raise ValueError("`weight` must be a matrix.")


# Names

FORBIDDEN = [
    {"kind": "namedtuple", "class": "os:system", "fields": {}},
    {"kind": "partial", "of": "functools", "parts": sequence(
        function("subprocess:check_call"), sequence(sequence("touch", "FILE", kind="list")),
        {"kind": "dict", "items": []},
    )},
    function("os:system"),
    function("builtins:eval"),
    function("jax.debug:callback"),
    function("jax:pure_callback"),
    function("jax.numpy:save"),
    function("jax._src.api:jit"),
    function("numpyro.distributions.util:is_prng_key"),
    function("numpyro_scalegp:save"),
    function("numpyro_scalegp.saving.api:save"),
    function("numpyro_scalegp.datasets:os.system"),
    function("numpyro_scalegp.datasets:load_uci"),
    {"kind": "module", "class": "jax._src.lib:os.system", "fields": {}},
    {"kind": "module", "class": "numpyro_scalegp.saving.file:os.system", "fields": {}},
    {"kind": "module", "class": "numpyro_scalegp.saving.file:zipfile.ZipFile", "fields": {}},
    {"kind": "module", "class": "numpyro_scalegp.datasets:Path", "fields": {}},
    {"kind": "module", "class": "equinox.__main__:X", "fields": {}},
    {"kind": "module", "class": "numpyro_scalegp.kernels.stationary:RBF.__init__", "fields": {}},
    {"kind": "module", "class": "jaxevil:Module", "fields": {}},
    {"kind": "module", "class": "../../evil:Module", "fields": {}},
    {"kind": "module", "class": "numpyro_scalegp.solvers.base:Solution", "fields": {}},
    {"kind": "namedtuple", "class": "numpyro_scalegp.kernels.stationary:RBF", "fields": {}},
    {"kind": "node", "class": "subprocess:Popen", "parts": sequence(1, 2, kind="list")},
    {"kind": "node", "class": "equinox.nn._mlp:MLP", "parts": sequence(1, 2, kind="list")},
    {"kind": "distribution", "class": "optax._src.base:EmptyState", "fields": {}},
    {"kind": "class", "name": "subprocess:Popen"},
    {"kind": "class", "name": "numpyro_scalegp.datasets:Path"},
    {"kind": "default", "name": "activation"},
    {"kind": "code"},
    {"kind": "__init__"},
    {"kind": "key", "implementation": "os", "data": {}},
    {"kind": "array", "name": "../../etc/passwd", "shape": [], "dtype": "<f4", "form": "jax"},
    {"kind": "dtype", "form": "dtype", "name": "object:os.system"},
]  # fmt: skip


def test_forbidden_names_are_refused_and_nothing_is_called(tmp_path, monkeypatch):
    called: list[str] = []
    monkeypatch.setattr(os, "system", lambda *args: called.append("system"))
    monkeypatch.setattr(subprocess, "check_call", lambda *args: called.append("check_call"))
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("jaxevil", "evil"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')")
    for structure in FORBIDDEN:
        path = tmp_path / "attack.npz"
        write(path, {"kind": "dict", "items": [["x", structure]]})
        with pytest.raises(ValueError, match=r"cannot load `.*attack\.npz`"):
            pytest.fail(f"{structure} gave {sgp.load(path)}")
    assert not called
    assert not {"jaxevil", "evil"} & set(sys.modules)


def test_what_is_not_trusted_and_how_to_trust_it(tmp_path, unchecked):
    path, fitted = tmp_path / "a.npz", [trend, Network(jnp.eye(2))]
    sgp.save(path, fitted)
    with pytest.raises(
        ValueError, match=r"a\.npz.*test_loading:trend.*trusted=\('tests',\).*like="
    ):
        sgp.load(path)
    for trusted in (("tests",), ("tests.test_loading",), (trend, Network)):
        again = sgp.load(path, trusted=trusted)
        assert again[0] is trend
        assert isinstance(again[1], Network)
    with pytest.raises(ValueError, match="Network, which is not trusted"):
        sgp.load(path, trusted=(trend, "tests.other"))
    for bad in ("tests", (3,)):
        with pytest.raises(TypeError, match="`trusted` must"):
            sgp.load(path, trusted=bad)


def test_a_script_is_found_under_another_name(tmp_path):
    path = tmp_path / "a.npz"
    write(path, function("__main__:trend"))
    assert sgp.load(path, trusted=(trend,)) is trend


# Fields and checks


def test_fields_that_are_missing_unknown_or_refused(tmp_path):
    path = tmp_path / "a.npz"
    sgp.save(path, sgp.kernels.RBF(2.0))
    code, arrays = saved.read(str(path))
    fields = code["fields"]
    for changed, message in (
        ({"lengthscale": fields["lengthscale"]}, r"lacks \['variance'\]"),
        ({**fields, "extra": 1}, r"has \['extra'\] besides"),
        ({**fields, "variance": None}, "cannot load .*a.npz"),
    ):
        write(path, {**code, "fields": changed}, **arrays)
        with pytest.raises(ValueError, match=message):
            sgp.load(path)
    write(path, code, **{**arrays, "array_0": np.array(-2.0, np.float32)})
    with pytest.raises(
        ValueError, match="`fitted`, a `RBF`: `lengthscale` must be positive and finite"
    ):
        sgp.load(path)
    write(path, code, **{**arrays, "array_0": np.ones((2, 2, 2), np.float32)})
    with pytest.raises(ValueError, match=r"`fitted.lengthscale` has shape \(2, 2, 2\) in the file"):
        sgp.load(path)


# Damaged files


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "broken.npz"
    sgp.save(path, {"a": jnp.arange(1000.0)})
    intact = path.read_bytes()
    flipped = bytearray(intact)
    flipped[1500] ^= 1
    for content in (b"", b"text", intact[:10], intact[:2000], intact[:-3], bytes(flipped)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.npz` is damaged, cut short or no file"):
            sgp.load(path)
    np.savez(path, a=np.ones(2))
    with pytest.raises(ValueError, match=r"broken\.npz` is damaged.*structure"):
        sgp.load(path)
    with pytest.raises(FileNotFoundError, match="none"):
        sgp.load(tmp_path / "none.npz")


def test_a_flipped_bit_is_no_error_of_the_system(tmp_path):
    path = tmp_path / "broken.npz"
    sgp.save(path, [1, np.arange(3)])
    content, refused = path.read_bytes(), 0
    # The directory of the archive, with offsets in the file.
    for place in range(len(content) - 40, len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                loaded = sgp.load(path)
            except ValueError as error:
                assert "broken.npz" in str(error)
                refused += 1
            else:
                np.testing.assert_array_equal(loaded[1], [0, 1, 2])
    assert refused > 100


@pytest.mark.parametrize("bad", [5, None, 1.5, True, ["a.npz"], io.BytesIO()])
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_path(bad):
    expected = r"`path` must be a path, such as .fit.npz., got (5|None|1.5|True|a `(list|BytesIO)`)"
    for call in (lambda: sgp.save(bad, 1), lambda: sgp.load(bad)):
        with pytest.raises(TypeError, match=expected):
            call()


def test_paths_of_bytes_and_empty_ones(tmp_path):
    path = os.fsencode(tmp_path / "a.npz")
    sgp.save(path, 3)
    assert sgp.load(path) == sgp.load(tmp_path / "a.npz") == 3
    for bad in ("", "a\0b"):
        with pytest.raises(ValueError, match="`path` must be the name of a file, got"):
            sgp.save(bad, 1)
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        sgp.load(tmp_path)


def test_an_error_of_the_disk_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    sgp.save(path, 1)

    def fail(*args: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(saved, "_read", fail)
    with pytest.raises(OSError, match=r"Input/output error: .*a\.npz"):
        sgp.load(path)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    header = {"format": "numpyro_scalegp", "version": 99, "structure": 1}
    np.savez(path, structure=np.frombuffer(json.dumps(header).encode(), np.uint8))
    with pytest.raises(
        ValueError, match=r"a\.npz` has the format .*, version 99; this .*version 1"
    ):
        sgp.load(path)


def entries(path: Path, compression: int = zipfile.ZIP_STORED, **contents: bytes) -> None:
    header = {"format": "numpyro_scalegp", "version": 1, "structure": 1}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, structure=text)
    with zipfile.ZipFile(path, "a", compression) as archive:
        for name, content in contents.items():
            archive.writestr(f"{name}.npy", content)


def npy(descr: str, shape: str, data: bytes = b"") -> bytes:
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


def test_bombs_and_pickles(tmp_path):
    path = tmp_path / "a.npz"
    pickled = b"cos\nsystem\n(S'touch pickled'\ntR."
    for content, compression, message in (
        (npy("|O", "(1,)", pickled), zipfile.ZIP_STORED, "pickled"),
        (npy("<f4", "(100000000000000,)"), zipfile.ZIP_STORED, "has 0 bytes and needs"),
        (npy("<f4", "(250000,)", bytes(10**6)), zipfile.ZIP_DEFLATED, "compressed"),
        (b"no array", zipfile.ZIP_STORED, "magic"),
    ):
        entries(path, compression, array_0=content)
        with pytest.raises(ValueError, match=rf"a\.npz` is damaged.*{message}"):
            sgp.load(path)
    deep = functools.reduce(lambda inner, _: sequence(inner), range(30_000), 1)
    with pytest.raises((ValueError, RecursionError)):
        write(path, deep)
    entries(path)
    assert sgp.load(path) == 1


# A file is complete or does not exist


@pytest.mark.parametrize("error", [(28, "No space left on device"), ("No space left",)])
@pytest.mark.parametrize("fails", ["savez", "fsync", "replace"])
def test_a_failing_save_keeps_the_old_file(fails, error, tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    sgp.save(path, {"step": 1})

    def fail(*args: Any, **kwargs: Any) -> None:
        if fails == "savez":
            args[0].write(b"some of it")
        raise OSError(*error)

    with monkeypatch.context() as patch:
        patch.setattr(np if fails == "savez" else os, fails, fail)
        with pytest.raises(OSError, match=r"a\.npz.*No space left|No space left.*a\.npz"):
            sgp.save(path, {"step": 2})
    assert sgp.load(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_what_stands_there_already(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a directory: give the name of a file"):
        sgp.save(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match=r"no folder `.*gone` for .*create it"):
        sgp.save(tmp_path / "gone" / "a.npz", 1)
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(OSError, match=r"pipe.npz` is a device or a pipe, which a file would"):
        sgp.save(tmp_path / "pipe.npz", 1)
    path, link = tmp_path / "a.npz", tmp_path / "link.npz"
    sgp.save(path, 1)
    path.chmod(0o640)
    link.symlink_to(path)
    sgp.save(link, 2)
    assert link.is_symlink()
    assert (sgp.load(path), path.stat().st_mode & 0o777) == (2, 0o640)


SAVES_FOREVER = """
import itertools, sys
import numpy as np
from numpyro_scalegp.saving import file
print("ready", flush=True)
for step in itertools.count():
    file.write(sys.argv[1], step, {"array_0": np.full(2_000_000, step)})
    print(step, flush=True)
"""


def test_a_killed_save_leaves_a_whole_file(tmp_path):
    path = tmp_path / "a.npz"
    generator = np.random.default_rng(0)
    # Only the module that writes files, without importing JAX.
    file = str(ROOT / "numpyro_scalegp" / "saving" / "file.py")
    load = f"import importlib.util as u; s = u.spec_from_file_location('file', {file!r})"
    script = SAVES_FOREVER.replace(
        "from numpyro_scalegp.saving import file",
        f"{load}; file = u.module_from_spec(s); s.loader.exec_module(file)",
    )
    for _ in range(8):
        command = [sys.executable, "-c", script, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            first = process.stdout.readline()
            time.sleep(generator.uniform(0.0, 0.05))
            process.send_signal(signal.SIGKILL)
            printed = [int(line) for line in (first + process.stdout.read()).split()]
        step, arrays = saved.read(str(path))
        assert step in (printed[-1], printed[-1] + 1)
        assert np.all(arrays["array_0"] == step)
