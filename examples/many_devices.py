"""Several devices: an exact and a sparse GP on a mesh, compared with one device.

The model is the same for any number of devices; only the data are placed on a mesh of devices.
These are real devices, or virtual devices on a CPU. With `--processes 2`, the script instead starts
two processes on this host, each of which reads its own part of the data.

The script prints the differences between the results on the mesh and on one device, for values,
gradients and posteriors, and ends with an error if a difference exceeds 1e-8.
"""

import argparse
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

TOLERANCE = 1e-8


def write_data(rows, parts, folder):
    """Write noisy observations of a function of three inputs, in a file for each process."""
    generator = np.random.default_rng(0)
    X = generator.uniform(-2, 2, size=(rows, 3))
    y = np.sin(2 * X[:, 0]) * X[:, 1] + 0.2 * generator.normal(size=rows)
    edges = np.linspace(0, rows, parts + 1).astype(int)
    for index, (start, end) in enumerate(itertools.pairwise(edges)):
        np.savez(Path(folder) / f"part_{index}.npz", X=X[start:end], y=y[start:end])


def read_data(parts, folder):
    """The observations of several parts, concatenated."""
    files = [np.load(Path(folder) / f"part_{index}.npz") for index in parts]
    return tuple(np.concatenate([file[name] for file in files]) for name in ("X", "y"))


def results(X, y):
    """Values, a gradient and posteriors, as NumPy arrays by name."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    import optax
    from numpyro.infer import SVI

    import numpyro_scalegp as sgp

    Xs = np.random.default_rng(1).uniform(-2, 2, size=(50, 3))
    solver = sgp.solvers.ConjugateGradients(tolerance=1e-10, max_epochs=30)
    estimator = sgp.estimators.Pathwise(solver, num_probes=8, num_features=200)

    def exact(lengthscale, X):
        kernel = sgp.kernels.Matern32(lengthscale)
        return sgp.GaussianProcess(kernel, X, 0.1, estimator=estimator, key=jax.random.key(0))

    def sparse(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        rows = sgp.plate("rows", X.shape[0], X.shape[0] // 10)
        X_batch, y_batch = rows.take(X, y)
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern32(lengthscale), X_batch))
        with rows:
            numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)

    @jax.jit
    def value_and_gradient(lengthscale, X, y):
        return jax.value_and_grad(lambda value: exact(value, X).log_prob(y))(lengthscale)

    arrays = {}
    lengthscale = jnp.array([0.8, 1.0, 3.0])
    arrays["log density"], arrays["its gradient"] = value_and_gradient(lengthscale, X, y)
    posterior = exact(lengthscale, X).condition(y, progress_bar=False)
    arrays["posterior mean"], arrays["posterior variance"] = (
        posterior.mean(Xs),
        posterior.variance(Xs),
    )
    arrays["posterior draws"] = posterior.sample(jax.random.key(1), Xs, 4)

    points = np.random.default_rng(2).uniform(-2, 2, size=(30, 3))
    guide = sgp.guides.AutoSparseGP(sparse, inducing_points=points)
    svi = SVI(sparse, guide, optax.adam(0.02), sgp.infer.QuadratureELBO(num_nodes=2))
    result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
    arrays["losses of SVI"] = result.losses
    arrays["its posterior mean"] = sgp.posterior(sparse, guide, result, X, y).mean(Xs)
    return {name: np.asarray(value) for name, value in arrays.items()}


def on_mesh(parts, folder):
    """The results on a mesh of all devices, from this process's parts of the data."""
    import jax

    import numpyro_scalegp as sgp

    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    return results(*sgp.shard_rows(mesh, *read_data(parts, folder)))


def work(place, processes, address, folder):
    """Run one of several processes."""
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(address, processes, place)
    arrays = on_mesh([place], folder)
    if place == 0:
        np.savez(Path(folder) / "found.npz", **arrays)


def start_workers(processes, folder):
    """Run this script in several processes; raise an error if one of them fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    environment = {**os.environ, "XLA_FLAGS": flags}
    command = [sys.executable, __file__, f"--processes={processes}", f"--output={folder}"]
    workers = [
        subprocess.Popen([*command, f"--work={place}", f"--address={address}"], env=environment)
        for place in range(processes)
    ]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit(f"the processes ended with {codes}")
    return dict(np.load(Path(folder) / "found.npz"))


def main(devices=8, processes=None, rows=603, output="outputs/many_devices"):
    """Compare the results; returns the largest differences by name."""
    Path(output).mkdir(parents=True, exist_ok=True)
    parts = processes or 1
    write_data(rows, parts, output)
    # Each virtual device has its own LAPACK threads, which would wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    actual = start_workers(processes, output) if processes else None

    import jax

    jax.config.update("jax_enable_x64", True)
    expected = results(*read_data(range(parts), output))
    if actual is None:
        print(f"{jax.device_count()} devices: {jax.devices()}")
        actual = on_mesh(range(parts), output)
    differences = {name: float(np.max(np.abs(actual[name] - expected[name]))) for name in expected}
    for name, difference in differences.items():
        print(f"{name:20s} {difference:.1e}")
    if not max(differences.values()) < TOLERANCE:
        raise SystemExit(f"not the results of one device: {differences}")
    return differences


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--rows", type=int, default=603)
    parser.add_argument("--output", default="outputs/many_devices")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    place, address = options.pop("work"), options.pop("address")
    if place is None:
        main(**options)
    else:
        work(place, options["processes"], address, options["output"])
