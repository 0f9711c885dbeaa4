"""What a new process waits for: imports, `SVI.init`, the first step, a posterior.

    python benchmarks/first_step.py --num-inducing 512 --batch-size 1024

The first page's model, with no persistent cache; imports are those of another process. Prints
seconds, and how many programs XLA compiled.
"""

import argparse
import subprocess
import sys
import time

import jax
import numpyro
import numpyro.distributions as dist
import optax
from jax import numpy as jnp
from jax import random

import numpyro_scalegp as sgp

IMPORTS = """
import time
began = time.perf_counter()
import jax, numpyro, optax, numpyro_scalegp
print(time.perf_counter() - began)
"""


def model(X, y, batch_size=None):
    """The first page's."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale, variance=2.0), X))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-inducing", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=1024)
    arguments = parser.parse_args()
    imports = float(subprocess.check_output([sys.executable, "-c", IMPORTS]))
    began, compiled = time.perf_counter(), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, duration, **_: compiled.append(name) if "backend_compile" in name else None
    )
    marks = []

    def mark(name, values):
        jax.block_until_ready(values)
        marks.append((name, time.perf_counter(), len(compiled)))

    X = random.uniform(random.key(0), (100_000, 2), minval=-3.0, maxval=3.0)
    y = X[:, 0] * jnp.sin(2.0 * X[:, 1]) + 0.3 * random.normal(random.key(1), (100_000,))
    mark("data", y)
    guide = sgp.guides.AutoSparseGP(model, num_inducing=arguments.num_inducing)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, 2000))
    svi = numpyro.infer.SVI(model, guide, optimizer, sgp.infer.QuadratureELBO(2))
    state = svi.init(random.key(2), X, y, arguments.batch_size)
    mark("SVI.init", state.optim_state)
    update = jax.jit(svi.update, static_argnums=3)
    state, loss = update(state, X, y, arguments.batch_size)
    mark("step", loss)
    posterior = sgp.posterior(model, guide, svi.get_params(state), X, y)
    Xs = jnp.array([[1.0, 0.8]])
    mark("posterior", (posterior.mean(Xs), posterior.variance(Xs)))
    print(f"imports    {imports:6.1f} s")
    last, num = began, 0
    for name, now, count in marks:
        print(f"{name:10s} {now - last:6.1f} s, {count - num:3d} programs")
        last, num = now, count
    total = {name: imports + now - began for name, now, _ in marks}
    print(f"to the first step {total['step']:.1f} s, to a posterior {total['posterior']:.1f} s")


if __name__ == "__main__":
    main()
