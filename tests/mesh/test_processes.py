"""Several processes on one host."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.slow

WORKER = r"""
import sys
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO

import numpyro_scalegp as sgp

place, processes, address, file, steps, dies = sys.argv[1:]
jax.config.update("jax_enable_x64", True)
if int(processes) > 1:
    jax.distributed.initialize(address, int(processes), int(place), heartbeat_timeout_seconds=10)

generator = np.random.default_rng(0)
X = generator.normal(size=(48, 2))
y = np.sin(2 * X[:, 0]) + 0.3 * generator.normal(size=48)
if int(processes) > 1:
    part = slice(24 * int(place), 24 * (int(place) + 1))
    X, y = sgp.shard_rows(jax.make_mesh((jax.device_count(),), ("rows",)), X[part], y[part])

def model(X, y):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    solver = sgp.solvers.AlternatingProjections(block_size=12, max_epochs=3)
    estimator = sgp.estimators.Pathwise(solver, num_probes=2, num_features=8, num_logdet_probes=0)
    gp = sgp.GaussianProcess(sgp.kernels.RBF(scale), X, 0.5, estimator=estimator, state="solver")
    numpyro.sample("y", gp, obs=y)

def guide(X, y):
    loc = numpyro.param("loc", 0.0)
    numpyro.sample("scale", dist.LogNormal(loc, 0.1))

svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
start = jax.jit(svi.init)(jax.random.key(0), X, y), 0
try:
    state, done = sgp.load(file, like=start)
    print("resuming from", done, flush=True)
except FileNotFoundError:
    state, done = start
step = jax.jit(svi.update)
while done < int(steps):
    if done == int(dies) and place == "1":
        import os
        os._exit(9)
    state, loss = step(state, X, y)
    done += 1
    sgp.save(file, (state, done))
print("at", repr(float(svi.get_params(state)["loc"])), flush=True)

if int(processes) > 1:
    import pytest
    from numpyro.infer.autoguide import AutoDelta

    # A mistake in one process raises an error in both, after which both continue.
    mesh, index = X.sharding.mesh, int(place)
    with pytest.raises(ValueError, match=r"float64\[n, 2\] in .* 0; int64\[n, 3\] in process 1"):
        sgp.shard_rows(mesh, np.ones((8, 2 + index), [float, int][index]))
    with pytest.raises(ValueError, match=r"float64\[n\] in .* 0; float64\[n\], float64\[n\] in"):
        sgp.shard_rows(mesh, *[np.ones(8)] * (1 + index))
    with pytest.raises(ValueError, match=["in process 1: all arrays must", "^all arrays"][index]):
        sgp.shard_rows(mesh, np.ones(8), np.ones(8 - index))
    with pytest.raises(OSError, match=["there is no folder", "the first process could not"][index]):
        sgp.save(file + ".nowhere/x.npz", X)

    stream = sgp.streams.arrays(np.ones((8, 2)), batch_size=4, seed=index)
    options = {"place": lambda batch: (X, y), "checkpoint": file + ".stream"}
    with pytest.raises(ValueError, match="holds one position in the stream for all processes"):
        sgp.streams.run(svi, jax.random.key(0), 2, stream, **options)

    def exact(X, y):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        numpyro.sample("y", sgp.GaussianProcess(sgp.kernels.RBF(scale), X, 0.5), obs=y)

    guide = AutoDelta(exact)
    numpyro.handlers.seed(guide, jax.random.key(0))(X, y)
    fitted = {"guide": guide, "params": {"scale_auto_loc": 1.0}}
    predictive = sgp.infer.Predictive(exact, num_samples=2, **fitted)
    assert np.isfinite(predictive(jax.random.key(1), np.zeros((3, 2)), None)["y"]).all()
"""


def run(processes: int, file: Path, steps: int, dies: int = -1) -> list[tuple[int, str]]:
    """The exit codes and outputs of processes that train together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = re.sub(r"--xla_force_host\S*", "", os.environ["XLA_FLAGS"])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(place), str(processes), address, str(file),
             str(steps), str(dies)],
            env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for place in range(processes)
    ]  # fmt: skip
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    return [(worker.returncode, output) for worker, output in zip(workers, outputs, strict=True)]


def reached(output: str) -> float:
    match = re.search(r"^at (.*)$", output, re.M)
    assert match is not None, output
    return float(match.group(1))


def test_a_killed_process_ends_the_run_and_its_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.npz"
    (code, output), (killed, _) = run(2, file, steps=5, dies=3)
    assert killed == 9
    assert code != 0
    assert re.search(r"peer|heartbeat|distributed", output), output
    # One process resumes from the checkpoint of two.
    ((code, output),) = run(1, file, steps=5)
    assert code == 0, output
    assert "resuming from 3" in output
    ((_, uninterrupted),) = run(1, tmp_path / "whole.npz", steps=5)
    np.testing.assert_allclose(reached(output), reached(uninterrupted), rtol=1e-10)
    # Two processes resume from the checkpoint of one.
    before = tmp_path / "before.npz"
    run(1, before, steps=2)
    outcomes = run(2, before, steps=5)
    for code, output in outcomes:
        assert code == 0, output
        assert "resuming from 2" in output
        np.testing.assert_allclose(reached(output), reached(uninterrupted), rtol=1e-10)
