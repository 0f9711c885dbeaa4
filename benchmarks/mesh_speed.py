"""Seconds of the iterative family on real devices, and in two processes beside two threads.

    python benchmarks/mesh_speed.py devices --rows 125000   # then twice as many, and so on
    python benchmarks/mesh_speed.py processes --rows 16000  # on two cores of a CPU

`devices` takes all there are, GPUs if there are any: a product with 65 vectors, in kernel entries a
second, its gradient, and a step of SVI with a budget of one epoch. `processes` starts its own: one
with two cores, and two with a core each, three times in turn.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from iterative import seconds
from numpyro.infer import SVI, Trace_ELBO

import numpyro_scalegp as sgp


def inputs(arguments, part=0, parts=1):
    """Inputs and vectors on all devices, of which this process has one part."""
    generator = np.random.default_rng(0)
    shapes = (arguments.rows, arguments.columns), (arguments.rows, arguments.vectors)
    whole = (generator.normal(size=shape).astype(np.float32) for shape in shapes)
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    return sgp.shard_rows(mesh, *(np.array_split(rows, parts)[part] for rows in whole))


def operator(X):
    return sgp.solvers.KernelOperator(sgp.kernels.Matern32(jnp.ones(X.shape[1])), X, 0.1)


def product(X, V):
    return operator(X).matmul(V)


def gradient(X, V):
    return operator(X).quadratic_gradient(jnp.ones(V.shape[1]), V)


def model(X, y, num_probes):
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(0.0, 1.0).expand([X.shape[1]]).to_event(1)
    )
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    solver = sgp.solvers.AlternatingProjections(max_epochs=1)
    estimator = sgp.estimators.Pathwise(solver, num_probes, num_logdet_probes=0)
    kernel = sgp.kernels.Matern32(lengthscale)
    gp = sgp.GaussianProcess(kernel, X, noise, estimator=estimator, state="solver")
    numpyro.sample("y", gp, obs=y)


def guide(X, y, num_probes):
    loc = numpyro.param("loc", jnp.zeros(X.shape[1]))
    numpyro.sample("lengthscale", dist.Delta(jnp.exp(loc), event_dim=1))
    numpyro.sample("noise", dist.Delta(jnp.exp(numpyro.param("log_noise", jnp.asarray(-1.0)))))


def median(function, *arguments):
    """The median of a function's seconds, compiled."""
    return float(np.median(seconds(jax.jit(function), *arguments)))


def training_step(X, y, num_probes):
    """Seconds of a step of SVI, the solver's state on the mesh."""
    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    step = jax.jit(svi.update, static_argnames="num_probes", donate_argnums=0)
    state = jax.jit(svi.init, static_argnames="num_probes")(
        jax.random.key(0), X, y, num_probes=num_probes
    )
    times = []
    for _ in range(4):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, X, y, num_probes=num_probes))
        times.append(time.perf_counter() - start)
    return min(times[2:])


def devices(arguments):
    """Seconds on all real devices, for twice as many rows each time, until memory ends."""
    print(f"{jax.device_count()} devices: {jax.devices()[0].device_kind}")
    n = arguments.rows
    while n <= arguments.most:
        arguments.rows = n
        try:
            X, V = inputs(arguments)
            once, back = median(product, X, V), median(gradient, X, V)
            print(
                f"n = {n}: product {once:.2f} s, {n * n / once:.2e} entries a second; gradient "
                f"{back:.2f} s",
                flush=True,
            )
            step = training_step(X, V[:, 0], arguments.vectors - 1)
            print(f"n = {n}: a step of SVI with one epoch {step:.2f} s", flush=True)
        except jax.errors.JaxRuntimeError as error:
            print(f"n = {n}: {str(error).splitlines()[0]}")
            return
        n *= 2


def worker(arguments):
    """One of the processes: prints its seconds."""
    if arguments.num > 1:
        jax.distributed.initialize(arguments.address, arguments.num, arguments.place)
    X, V = inputs(arguments, arguments.place, arguments.num)
    print("seconds", median(product, X, V), median(gradient, X, V), flush=True)


def started(arguments, num, cores):
    """Seconds of a product and a gradient in `num` processes, of the slower one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers = []
    for place in range(num):
        own = cores if num == 1 else cores[place : place + 1]
        command = ["taskset", "-c", ",".join(map(str, own)), sys.executable, __file__, "worker"]
        command += [f"--rows={arguments.rows}", f"--num={num}", f"--place={place}"]
        command += [f"--address={address}"]
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    outputs = [one.communicate()[0] for one in workers]
    lines = [re.search(r"^seconds (\S+) (\S+)$", text, re.M) for text in outputs]
    return [max(float(line.group(i)) for line in lines) for i in (1, 2)]


def processes(arguments):
    """Two processes with a core each, beside one with two."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    found = {1: [], 2: []}
    for _ in range(3):
        for num, times in found.items():
            times.append(started(arguments, num, cores))
    one, two = (np.median(times, axis=0) for times in found.values())
    for name, a, b in zip(("product", "gradient"), one, two, strict=True):
        print(f"n = {arguments.rows}, {name}: {a:.3f} s, two processes {b:.3f} s ({b / a:.2f})")


def main():
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = {"devices": devices, "processes": processes, "worker": worker}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--rows", type=int, default=16000)
    parser.add_argument("--most", type=int, default=2**24, help="rows at which `devices` ends")
    parser.add_argument("--columns", type=int, default=10, help="of X")
    parser.add_argument("--vectors", type=int, default=65, help="1 and the number of probes")
    parser.add_argument("--num", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
