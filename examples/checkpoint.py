"""Killed and resumed: training continues from its checkpoint, bit for bit.

A separate process trains a sparse GP, saves a checkpoint every 200 steps, and is killed by SIGKILL
in the middle of training. Another process resumes from the last checkpoint. Its final parameters
are compared with the parameters of an uninterrupted run: they are equal to the last bit.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_scalegp as sgp


def data(rows):
    """Noisy observations of a sine wave."""
    generator = np.random.default_rng(0)
    X = generator.uniform(-3, 3, size=(rows, 1))
    return jnp.array(X), jnp.array(np.sin(3 * X[:, 0]) + 0.2 * generator.normal(size=rows))


def model(X, y=None, batch_size=128):
    """A GP regression in mini-batches."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    rows = sgp.plate("rows", X.shape[0], min(batch_size, X.shape[0]))
    X_batch, y_batch = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.Matern52(lengthscale), X_batch))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)


def train(rows, steps, every, file=None):
    """Train, from the checkpoint in `file` if there is one; returns the final parameters."""
    X, y = data(rows)
    guide = sgp.guides.AutoSparseGP(model, num_inducing=20)
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(num_nodes=2))
    # A new process needs `init` before it can resume. Its state is the template for loading.
    checkpoint = {"step": 0, "state": svi.init(jax.random.key(0), X, y)}
    if file is not None and file.exists():
        checkpoint = sgp.load(file, like=checkpoint)
        print(f"resuming from step {checkpoint['step']}", flush=True)

    @jax.jit
    def run_steps(state, X, y):
        return jax.lax.scan(lambda state, _: svi.update(state, X, y), state, length=every)

    while checkpoint["step"] < steps:
        state, losses = run_steps(checkpoint["state"], X, y)
        checkpoint = {"step": checkpoint["step"] + every, "state": state}
        if file is not None:
            sgp.save(file, checkpoint)
            print(f"step {checkpoint['step']}: loss {losses.mean():.2f}", flush=True)
    return svi.get_params(checkpoint["state"])


def main(steps=2000, every=200, rows=5000, output="outputs/checkpoint"):
    """Kill training, resume it, and compare; returns whether all parameters are the same."""
    file = Path(output) / "checkpoint.npz"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    sizes = f"--steps={steps}", f"--every={every}", f"--rows={rows}"
    command = [sys.executable, __file__, "--train", f"--output={output}", *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        for line in training.stdout:
            print(line, end="")
            if line.startswith(f"step {2 * every}:"):
                training.kill()  # SIGKILL, which the process cannot catch
    print("killed")
    resumed = train(rows, steps, every, file)
    uninterrupted = train(rows, steps, every)
    same = all(np.array_equal(resumed[name], uninterrupted[name]) for name in uninterrupted)
    print("as without interruption, to the last bit:", same)
    return same


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--output", default="outputs/checkpoint")
    parser.add_argument("--train", action="store_true", help="only train, to be killed")
    options = vars(parser.parse_args())
    if options.pop("train"):
        file = Path(options.pop("output")) / "checkpoint.npz"
        train(**options, file=file)
    else:
        main(**options)
