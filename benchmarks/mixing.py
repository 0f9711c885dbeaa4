"""Outputs mixed from a few GPs under `QuadratureELBO`: milliseconds a step against their number.

    python benchmarks/mixing.py --outputs 20 40 80 --functions 4

Counts whose log rates are W f, functions in a plate and W learned: every entry of the likelihood
depends on all functions, through one affine combination, and is integrated as one normal variable.
Made-up data, an RBF kernel, float32. Steps of all sizes alternate in blocks, so that a noisy
machine disturbs all alike. Prints the least of the blocks and the line through them: what the
functions cost and what an output adds.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp


def model(X, Y, num_functions, batch_size):
    """Y, (outputs, n), of which each has a log rate of its own, mixed from the same functions."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    rows = sgp.plate("rows", len(X), batch_size)
    prior = sgp.LatentGP(sgp.kernels.RBF(lengthscale), rows.take(X))
    with numpyro.plate("functions", num_functions):
        f = numpyro.sample("f", prior)
    mixing = dist.Normal(0.0, 1.0).expand([len(Y), num_functions]).to_event(2)
    W = numpyro.sample("W", mixing)
    with numpyro.plate("outputs", len(Y), dim=-2), rows:
        numpyro.sample("y", dist.Poisson(jnp.exp(W @ f)), obs=rows.take(Y.T).T)


def steps(num_outputs, arguments):
    """A compiled run of some steps, from one state to another, and the state to begin with."""
    key = jax.random.key(num_outputs)
    X = jax.random.normal(key, (arguments.rows, 3))
    W = 0.5 * np.random.default_rng(0).normal(size=(num_outputs, arguments.functions))
    f = jnp.sin(X @ jax.random.normal(key, (3, arguments.functions)))
    Y = jax.random.poisson(key, jnp.exp(W @ f.T))
    points = sgp.features.kmeans_points(key, X, arguments.num_inducing)
    guide = sgp.guides.AutoSparseGP(model, rest=AutoDelta, inducing_points=points)
    svi = SVI(model, guide, optax.adam(0.005), sgp.infer.QuadratureELBO(arguments.nodes))
    given = X, Y, arguments.functions, arguments.batch_size
    state = svi.init(key, *given)

    def run(state):
        update = lambda state, _: svi.update(state, *given)  # noqa: E731
        return jax.lax.scan(update, state, length=arguments.steps)

    return jax.jit(run).lower(state).compile(), state


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--outputs", type=int, nargs="+", default=[20, 40, 80])
    parser.add_argument("--functions", type=int, default=4)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--blocks", type=int, default=15)
    arguments = parser.parse_args()
    runs = {number: steps(number, arguments) for number in arguments.outputs}
    spent, losses = {number: [] for number in runs}, {number: [] for number in runs}
    for block in range(arguments.blocks + 1):
        for number, (run, state) in runs.items():
            start = time.perf_counter()
            state, loss = jax.block_until_ready(run(state))
            if block:  # the first one warms up
                spent[number].append(1e3 * (time.perf_counter() - start) / arguments.steps)
            runs[number] = run, state
            losses[number].append(float(loss.mean()))
    print(f"{arguments.functions} functions, device {jax.devices()[0]}")
    least = np.array([np.min(spent[number]) for number in runs])
    slope, constant = np.polyfit(list(runs), least, 1)
    for number, spent_ms in zip(runs, least, strict=True):
        line, (first, *_, last) = constant + slope * number, losses[number]
        print(f"{number:4d} outputs: {spent_ms:6.2f} ms a step, on the line {line:6.2f};", end=" ")
        print(f"loss {first:.0f} to {last:.0f}")
    print(f"{constant:.2f} ms, and {1e3 * slope:.0f} microseconds for each output")


if __name__ == "__main__":
    main()
