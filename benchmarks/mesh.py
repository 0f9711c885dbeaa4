"""Several devices: operations, communication and memory of each, and seconds on CPU cores.

    python benchmarks/evidence.py mesh-work mesh-memory mesh-steps mesh-features
    python benchmarks/evidence.py mesh-symmetry mesh-processes

Devices are virtual devices of a CPU, in a separate process. The first three runs analyze compiled
programs (see programs.py) without running them: products, gradients and sweeps of alternating
projections, training steps of the iterative estimators, and steps of guides with mini-batches.
`mesh-features` trains with one row of parameters per feature, divided among the devices. The last
two measure times: the gain of a product from symmetry, and two processes compared with one.
"""

import functools
import math
import os
import socket
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from iterative import in_new_process, interleaved_seconds, seconds
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from programs import Program, bytes_of, compiled, largest_unsharded
from sparse import number_in

import numpyro_scalegp as sgp
from numpyro_scalegp.linear import alternating_projections, products
from numpyro_scalegp.linear.solver import Iterate, Options, System

BLOCK = 1000  # block size of alternating projections


def on_devices(num, function, **arguments):
    """The result of a function in a new process, with `num` virtual devices and one LAPACK thread.

    Several threads of LAPACK wait for each other if devices or programs share the cores.
    """
    flags = f"--xla_force_host_platform_device_count={num}"
    with mock.patch.dict(os.environ, XLA_FLAGS=flags, OPENBLAS_NUM_THREADS="1"):
        return in_new_process(function, **arguments)[0]


def on_mesh(num, *arrays):
    """Arrays with their rows divided among `num` devices."""
    mesh = jax.make_mesh((num,), ("rows",), devices=jax.devices()[:num])
    return sgp.shard_rows(mesh, *arrays)


def normal(rows, *columns):
    """Random arrays with these numbers of columns."""
    generator = np.random.default_rng(0)
    return [generator.normal(size=(rows, number)).astype(np.float32) for number in columns]


def operator(X):
    return sgp.solvers.KernelOperator(sgp.kernels.Matern32(jnp.ones(X.shape[1])), X, 0.1)


def product(X, V):
    return operator(X).matmul(V)


def gradient(X, V):
    return operator(X).quadratic_gradient(jnp.ones(V.shape[1]), V)


def projections(num, X, V):
    """The setup of alternating projections, and `num` iterations."""

    def iterations(system, state, project, **_):
        for _ in range(num):
            state = project(state, jnp.zeros((), int))
        return state

    solver, start = sgp.solvers.AlternatingProjections(block_size=BLOCK), Iterate(0.0 * V, V)
    system = System(operator(X), V, start, jnp.ones(V.shape[1]), 0, Options())
    with mock.patch.object(alternating_projections, "descend", iterations):
        return solver.solve_system(system)


def record_work(data, split, seed, method, *, rows=64_000, d=8, k=65):
    """The record of a unit such as "2 devices": see `count_work`."""
    return on_devices(number_in(method), count_work, rows=rows, d=d, k=k)


def count_work(rows, d, k):
    """Operations of all devices relative to one device, and numbers that each sends relative to n.

    The cost of a sweep is n / 1000 times the cost that a second iteration adds. `counted` is the
    sum of all operations, with loop bodies counted once, relative to XLA's cost analysis.
    """
    num, tasks = jax.device_count(), {"product": product, "gradient": gradient}
    tasks |= {steps: functools.partial(projections, steps) for steps in (1, 2)}
    work, sent, ours, theirs = {}, {}, 0.0, 0.0
    for p in (1, num):
        arrays = on_mesh(p, *normal(rows, d, k))
        for name, task in tasks.items():
            executable = compiled(task, *arrays)
            program = Program(executable)
            work[name, p], sent[name, p] = program.operations(), program.sent(p) / rows
            ours += program.operations(is_once=True)
            theirs += executable.cost_analysis()["flops"]
        for counts in (work, sent):
            counts["sweep", p] = (counts[2, p] - counts[1, p]) * rows / BLOCK
    names = ("product", "gradient", "sweep")
    return {
        **{f"{name}_work": num * work[name, num] / work[name, 1] for name in names},
        **{f"{name}_sent": sent[name, num] for name in names},
        "counted": ours / theirs,
    }


def record_memory(data, split, seed, method, *, d=8):
    """The record of a unit such as "200,000 rows, 8 devices, 65 vectors": see `plan_memory`."""
    n, num, k = map(number_in, method.split(", "))
    return on_devices(num, plan_memory, n=n, d=d, k=k)


def plan_memory(n, d, k):
    """MiB of each device as planned by XLA, and relative to the formula.

    `whole` is the size, as a multiple of n, of the largest array with all rows on one device.
    """
    num = jax.device_count()
    X, V = on_mesh(num, *normal(n, d, k))
    programs = {
        "product": compiled(product, X, V),
        "cg": training_step(sgp.solvers.ConjugateGradients(), k - 1, X, V[:, 0]),
        "ap": training_step(sgp.solvers.AlternatingProjections(), k - 1, X, V[:, 0]),
    }
    memory = {"whole": max(largest_unsharded(p, n) for p in programs.values()) / n}
    for name, program in programs.items():
        size = bytes_of(program)
        memory[f"{name}_memory"] = size / 2**20
        memory[f"{name}_formula"] = size / formula(name, n, num, d, k)
    return memory


def training_step(solver, num_probes, X, y):
    """A compiled step of SVI, with its state sharded as in a run."""

    def model(X, y):
        lengthscale = numpyro.sample(
            "lengthscale", dist.LogNormal(0.0, 1.0).expand([X.shape[1]]).to_event(1)
        )
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        kernel = sgp.kernels.Matern32(lengthscale)
        estimator = sgp.estimators.Pathwise(solver, num_probes)
        gp = sgp.GaussianProcess(kernel, X, noise, estimator=estimator, state="solver")
        numpyro.sample("y", gp, obs=y)

    svi = SVI(model, AutoDelta(model), optax.adam(0.1), Trace_ELBO())

    def placed(leaf):
        spec = P(*("rows" if size == len(X) else None for size in leaf.shape))
        sharding = NamedSharding(X.sharding.mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = jax.tree.map(placed, jax.eval_shape(svi.init, jax.random.key(0), X, y))
    return compiled(svi.update, state, X, y)


def formula(name, n, p, d, k):
    """Bytes per device in float32: a part proportional to n / p, and a constant part."""
    block = 4 * products._MAX_ROWS_ON_CPU**2
    if name == "product":
        return 4 * (n / p * (13 * k + 4 * d) + block)
    rank = min(10 * math.sqrt(n), 2**26 / n)
    columns = {"cg": 31 * (k + 16) + rank, "ap": 17 * k + 3 * BLOCK}[name]
    draws = 3 * min(2**24, n / p * 2000) + n / p * 5 * k
    return 4 * max(n / p * (columns + 4 * d) + block, draws)


def record_symmetry(data, split, seed, method, *, rows=8000, d=8, k=65):
    """The record of a unit such as "2 devices": see `time_symmetry`."""
    return on_devices(number_in(method), time_symmetry, rows=rows, d=d, k=k)


def gathered_product(X, V):
    """H V without symmetry: each device multiplies its rows of H with all of V."""
    kernel, mesh = operator(X).kernel, operator(X).mesh
    specs = {"in_specs": (P("rows"), P(), P()), "out_specs": P("rows"), "check_vma": False}
    multiply = functools.partial(products.kernel_matmul, kernel)
    return jax.shard_map(multiply, mesh=mesh, **specs)(X, X, V) + 0.1 * V


def time_symmetry(rows, d, k):
    """Median seconds of a product by the ring, and by gathering without symmetry."""
    arrays = on_mesh(jax.device_count(), *normal(rows, d, k))
    tasks = {f: (jax.jit(f), *arrays) for f in (product, gathered_product)}
    ours, theirs = (np.asarray(task(*arrays)) for task, *_ in tasks.values())
    once, twice = (float(np.median(times)) for times in interleaved_seconds(tasks, 7).values())
    return {
        "seconds": once,
        "gathered_seconds": twice,
        "gathered_ratio": twice / once,
        "gathered_difference": float(np.abs(ours - theirs).max() / np.abs(ours).max()),
    }


def record_processes(data, split, seed, method, *, rows=16_000, d=10, k=65):
    """The record of "product" or "gradient": two processes with a core each, compared with one.

    Medians over three repetitions of medians over five calls, of the slower process.
    """
    seconds = {1: [], 2: []}
    for _ in range(3):
        for num, times in seconds.items():
            times.append(in_processes(num, method, rows, d, k))
    single, double = (float(np.median(times)) for times in seconds.values())
    return {
        "seconds": single,
        "processes_seconds": double,
        "processes_ratio": double / single,
    }


def in_processes(num, *arguments):
    """Seconds of the slowest of `num` processes on two cores."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    cores = sorted(os.sched_getaffinity(0))[:2]
    divided = [cores] if num == 1 else [[core] for core in cores]
    calls = [(address, num, index, assigned, *arguments) for index, assigned in enumerate(divided)]
    with ProcessPoolExecutor(num, mp_context=get_context("spawn")) as pool:
        return max(pool.map(run_process, *zip(*calls, strict=True)))


def run_process(address, num, index, cores, method, rows, d, k):
    """The median seconds of five calls, with a part of the rows in this process."""
    os.sched_setaffinity(0, cores)  # before JAX creates its device and counts the cores
    if num > 1:
        jax.distributed.initialize(address, num, index)
    parts = [np.array_split(array, num)[index] for array in normal(rows, d, k)]
    task = {"product": product, "gradient": gradient}[method]
    took = float(np.median(seconds(jax.jit(task), *on_mesh(num, *parts))))
    if num > 1:
        jax.distributed.shutdown()
    return took


def model(X, y, batch):
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(0.0, 1.0).expand([X.shape[1]]).to_event(1)
    )
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    rows = sgp.plate("rows", len(X), batch)
    X_batch, y_batch = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X_batch))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)


def guide_of(method, points, m):
    """A guide with m inducing points, and 4 m mean or residual points."""
    few, many = points[:m], points[m:]
    options, guides = {"rest": AutoDelta}, sgp.guides
    if method == "sparse":
        return guides.AutoSparseGP(model, inducing_points=few, **options)
    if method == "decoupled":
        return guides.AutoDecoupledGP(model, mean_points=many, cov_points=few, **options)
    return guides.AutoHybridGP(model, inducing_points=few, residual_points=many, **options)


def record_steps(data, split, seed, method, *, devices=8, **options):
    """The record of a unit, for a kind of guide: see `count_step`."""
    return on_devices(devices, count_step, method=method, **options)


def count_step(method, rows=16_384, d=8, batch=512, num_inducing=256):
    """Operations of each of p devices with a batch p times as large, relative to one device.

    The operations of LAPACK are not counted.
    """
    num = jax.device_count()
    (X,), (points,) = normal(rows, d), normal(5 * num_inducing, d)
    y, programs = np.sin(X[:, 0]), {}
    for p, inputs in ((1, (X, y)), (num, on_mesh(num, X, y))):
        guide = guide_of(method, points, num_inducing)
        svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO())
        state = svi.init(jax.random.key(0), *inputs, p * batch)
        step = compiled(svi.update, state, *inputs, p * batch, static_argnums=3)
        programs[p] = Program(step)
    return {
        "step_work": programs[num].operations() / programs[1].operations(),
        "megabytes_sent": 4e-6 * programs[num].sent(num),
    }


def record_features(data, split, seed, method, *, devices=8, **options):
    """The record of a unit such as "10,000,000 features": see `train_features`."""
    return on_devices(devices, train_features, m=number_in(method), **options)


def train_features(m, rows=65_536, d=8, batch=512, rank=10):
    """Five steps with m features on one device and on all devices: MiB of the state, and losses."""
    num, (X,) = jax.device_count(), normal(rows, d)
    y = np.sin(X[:, 0])

    def model(X, y):
        rows = sgp.plate("rows", len(X), batch)
        X_batch, y_batch = rows.take(X, y)
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(2.0), m, seed=0)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X_batch))
        with rows:
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y_batch)

    sizes, losses = [], []
    for inputs in ((X, y), on_mesh(num, X, y)):
        guide = sgp.guides.AutoChevronGP(model, rank=rank)
        loss = sgp.infer.QuadruplyStochasticELBO(num_features=2000, control_variate_rank=200)
        svi = sgp.infer.RowSVI(model, guide, optax.adam(0.01), loss)
        state = svi.init(jax.random.key(0), *inputs)
        step, values = compiled(svi.update, state, *inputs, donate_argnums=0), []
        for _ in range(5):
            state, value = step(state, *inputs)
            values.append(float(value))
        leaves = [leaf for leaf in jax.tree.leaves(state) if m in leaf.shape]
        sizes.append(sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / 2**20)
        losses.append(values)
    alone, shared = np.array(losses)
    return {
        "state_alone": sizes[0],
        "state_each": sizes[1],
        "megabytes_sent": 4e-6 * Program(step).sent(num),
        "loss_difference": float(np.abs(shared / alone - 1.0).max()),
    }
