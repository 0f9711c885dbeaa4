"""Predictions in a fresh process: by the package, by exported programs, and by peers.

    python benchmarks/evidence.py serving

Posteriors over four inputs with a Matern-5/2 kernel in float32: of an exact GP with 1,000
observations, and of a collapsed one with 1,024 inducing points. Another process imports what it
needs, reads the posterior from a file, and predicts means and variances. `start_seconds` ends with
the first answer for one row. The peers of the exact GP condition on the same observations with the
same hyperparameters, and keep their posterior in memory: scikit-learn in float64, and GPyTorch with
fast predictive variances. `prediction_error` is the largest difference from the package's mean or
variance, in units of the prior's.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

NUM_INPUTS, NOISE = 4, 0.01


def simulated():
    """Inputs, observations and 1,000 new inputs."""
    generator = np.random.default_rng(0)
    X = generator.uniform(size=(6000, NUM_INPUTS)).astype(np.float32)
    y = np.sin(6.0 * X[:, 0]) * X[:, 1] + np.cos(4.0 * X[:, 2])
    y = (y - y.mean()) / y.std() + NOISE**0.5 * generator.normal(size=len(X))
    return X[:5000], y[:5000].astype(np.float32), X[5000:]


def by_package(file):
    """Mean and variance by the package."""
    import numpyro_scalegp as sgp

    posterior = sgp.load(file)

    def predict(X):
        new = posterior.predictive(X, 0.0)
        return np.asarray(new.mean), np.asarray(new.variance)

    return predict


def by_jax(file):
    """Mean and variance by an exported program of JAX."""
    import jax
    import jax.export

    contents = np.load(file)
    arrays = [
        jax.device_put(contents[name]) for name in sorted(contents) if name.startswith("array")
    ]
    program = jax.jit(jax.export.deserialize(bytearray(contents["program"])).call)

    def predict(X):
        moments = program(arrays, X)
        return np.asarray(moments["mean"]), np.asarray(moments["variance"])

    return predict


def by_onnx(file):
    """Mean and variance by an ONNX model."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession(file)
    return lambda X: session.run(["mean", "variance"], {"Xs": X})


def by_sklearn(_file):
    """Mean and variance by scikit-learn."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    X, y, _ = simulated()
    gp = GaussianProcessRegressor(Matern(1.0, nu=2.5), alpha=NOISE, optimizer=None)
    gp.fit(X[:1000], y[:1000])

    def predict(X):
        mean, deviation = gp.predict(X, return_std=True)
        return mean, deviation**2

    return predict


def by_gpytorch(_file):
    """Mean and variance by GPyTorch, with what its caches keep."""
    import gpytorch
    import torch

    X, y = (torch.tensor(values[:1000]) for values in simulated()[:2])

    class Exact(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(X, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.MaternKernel(nu=2.5)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    model = Exact().eval()
    model.covar_module.lengthscale = 1.0
    model.likelihood.noise = NOISE

    def predict(X):
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            f = model(torch.tensor(X))
            return f.mean.numpy(), f.variance.numpy()

    return predict


READERS = {
    "package": by_package,
    "jax.export": by_jax,
    "ONNX": by_onnx,
    "scikit-learn": by_sklearn,
    "GPyTorch": by_gpytorch,
}


def write(kind, file, is_program):
    """Write the posterior of a kind to a file."""
    import jax
    import jax.numpy as jnp

    import numpyro_scalegp as sgp

    X, y, _ = simulated()
    kernel = sgp.kernels.Matern52(jnp.ones(NUM_INPUTS), 1.0)
    estimator = None
    if kind == "exact":
        X, y = X[:1000], y[:1000]
    else:
        estimator = sgp.estimators.SGPR(sgp.features.kmeans_points(jax.random.key(0), X, 1024))
    posterior = sgp.GaussianProcess(kernel, X, NOISE, estimator=estimator).condition(y)
    if is_program:
        posterior.export(file)
    else:
        sgp.save(file, posterior)


def answer(reader, file):
    """Print seconds and predictions; runs in a separate process."""
    start = time.perf_counter()
    predict = READERS[reader](file)
    _, _, X = simulated()
    predict(X[:1])
    result = {"start_seconds": time.perf_counter() - start}
    for size, repeats in ((1, 200), (1000, 20)):
        predict(X[:size])
        start = time.perf_counter()
        for _ in range(repeats):
            predict(X[:size])
        name = "one_row" if size == 1 else "thousand_rows"
        result[f"{name}_milliseconds"] = 1e3 * (time.perf_counter() - start) / repeats
    print(json.dumps([result, *(np.asarray(moment).tolist() for moment in predict(X))]))


def run(reader, file):
    """What `answer` prints."""
    command = [sys.executable, "-m", "benchmarks.serving", reader, str(file)]
    root = Path(__file__).resolve().parent.parent
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=root).stdout
    result, *moments = json.loads(printed.splitlines()[-1])
    return result, np.array(moments)


def record(data, split, seed, method):
    """The record of a unit."""
    kind, _, reader = method.partition(", ")
    with tempfile.TemporaryDirectory() as folder:
        file, saved = Path(folder) / "program.npz", Path(folder) / "posterior.npz"
        write(kind, saved, is_program=False)
        _, expected = run("package", saved)
        if reader == "ONNX":
            file = file.with_suffix(".onnx")
        if reader in ("jax.export", "ONNX"):
            write(kind, file, is_program=True)
        else:
            file = saved
        result, moments = run(reader, file)
        is_stored = reader in ("package", "jax.export", "ONNX")
        megabytes = {"file_megabytes": file.stat().st_size / 1e6} if is_stored else {}
    error = float(np.max(np.abs(moments - expected)))
    return {**result, **megabytes, "prediction_error": error}


if __name__ == "__main__":
    answer(*sys.argv[1:])
