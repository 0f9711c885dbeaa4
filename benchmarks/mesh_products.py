"""The iterative family over the devices of a mesh: work, bytes, memory, and what symmetry gains.

    python benchmarks/mesh_products.py work                  # operations a device, beside 1/p
    python benchmarks/mesh_products.py bytes                 # numbers that each device sends
    python benchmarks/mesh_products.py memory --rows 200000  # bytes a device, beside the formula
    python benchmarks/mesh_products.py ring --rows 8000      # seconds: ring beside gathered rows

All on virtual devices of one CPU. What the first three print is read off the compiled programs,
which do not run. XLA's cost analysis counts the body of a loop once, whatever its number of
iterations: `work` counts by the same rules, and multiplies by the iterations that XLA knows of each
loop. Beside each count stands what the rules give with every loop counted once, as a part of XLA's
own figure: that it is 1.000 shows that they are XLA's. Of the branches of a distance the dearest
one counts. Loops of an unknown number of iterations, such as a solver's, count once; a sweep of
alternating projections is n / 1000 times what a second iteration adds to a first.
"""

import argparse
import functools
import math
import os
import re
import time

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_speed import gradient, operator, product
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp
from numpyro_scalegp.solvers import alternating_projections, products

DEVICES = [1, 2, 4, 8]
BLOCK = 1000  # rows of alternating projections


def on_mesh(num, *arrays):
    """Rows on `num` devices."""
    mesh = jax.make_mesh((num,), ("rows",), devices=jax.devices()[:num])
    return sgp.shard_rows(mesh, *arrays)


def inputs(arguments, num):
    """Inputs and vectors."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(arguments.rows, arguments.columns)).astype(np.float32)
    V = generator.normal(size=(arguments.rows, arguments.vectors)).astype(np.float32)
    return on_mesh(num, X, V)


def projections(block_size, num, X, V):
    """The set-up of alternating projections, and `num` iterations."""

    def iterations(operator, system, state, project, **_):
        for _ in range(num):
            state = project(state, jnp.zeros((), int))
        return state

    plain, alternating_projections.descend = alternating_projections.descend, iterations
    solver = sgp.solvers.AlternatingProjections(block_size=block_size)
    zeros = jnp.zeros_like(V)
    system = sgp.solvers.solver.System(jnp.ones(V.shape[1]), V, zeros, V, 0)
    state = solver.run(operator(X), system, None, 0)
    alternating_projections.descend = plain
    return state


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


# Opcodes of which XLA counts one operation for each entry of the result.
ELEMENTWISE = {
    "abs", "add", "and", "atan2", "ceil", "clamp", "compare", "divide", "floor", "is-finite",
    "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "real", "imag", "remainder",
    "round-nearest-afz", "round-nearest-even", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "subtract", "xor",
}  # fmt: skip


class Instruction:
    """One line of a compiled program."""

    LINE = re.compile(r"^\s+(?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
    NAME = re.compile(r"%[\w.-]+")

    def __init__(self, line):
        line = re.sub(r"/\*.*?\*/", "", line)
        self.name, self.type, self.opcode, self.rest = self.LINE.match(line).groups()
        self.operands = self.NAME.findall(self.rest.split(")")[0])

    def sizes(self):
        """The shape of the result, which is no tuple."""
        return [int(one) for one in re.search(r"\[([\d,]*)\]", self.type)[1].split(",") if one]

    def called(self):
        """Computations that it calls: for a while loop the body and its condition."""
        found = re.findall(
            r"(?:body|condition|calls|to_apply|\w+_computation)=(%[\w.-]+)", self.rest
        )
        branches = re.search(r"branch_computations=\{(.*?)\}", self.rest)
        return found + (self.NAME.findall(branches[1]) if branches else [])

    def repeats(self, is_once):
        """How often it runs what it calls, as far as XLA knows."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(known[1]) if known and not is_once else 1


class Program:
    """A compiled program, and sums over its instructions, each as often as it runs."""

    def __init__(self, compiled):
        self.computations, self.entry = {}, None
        for line in compiled.as_text().splitlines():
            header = re.match(r"^(ENTRY )?(%[\w.-]+) .*\{$", line)
            if header:
                lines = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif Instruction.LINE.match(line):
                one = Instruction(line)
                lines[one.name] = one

    def total(self, count, *, is_once=False):
        """The sum of what `count` makes of an instruction and its operands, of the dearest branch.

        With `is_once` the body of a loop counts once, as in XLA's own analysis.
        """

        @functools.cache
        def of_computation(name):
            lines = self.computations[name]
            return sum(of_instruction(one, lines) for one in lines.values())

        def of_instruction(one, lines):
            own = count(one, [lines[name] for name in one.operands if name in lines])
            inner = [of_computation(name) for name in one.called()] or [0]
            if one.opcode in ("reduce", "reduce-window", "scatter", "map", "sort", "all-reduce"):
                return own
            inner = max(inner) if one.opcode == "conditional" else sum(inner)
            return own + one.repeats(is_once) * inner

        return of_computation(self.entry)


def operations(one, operands):
    """Floating-point operations of an instruction by the rules of XLA's cost analysis."""
    if one.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
        sizes = operands[0].sizes()
        inner = math.prod(sizes[int(axis)] for axis in contracted.split(",") if axis)
        return 2 * math.prod(one.sizes()) * inner
    if one.opcode == "reduce" and not one.type.startswith("("):
        return math.prod(operands[0].sizes()) - math.prod(one.sizes())
    return math.prod(one.sizes()) if one.opcode in ELEMENTWISE else 0


def numbers_sent(num, one, operands):
    """Numbers that each of `num` devices sends: once round the ring where all gather."""
    if one.opcode == "collective-permute":
        return math.prod(one.sizes())
    shares = {"all-gather": 1, "all-reduce": 2, "all-to-all": 1}
    if one.opcode not in shares:
        return 0
    entries = sum(
        math.prod(int(size) for size in sizes.split(",") if size)
        for sizes in re.findall(r"\[([\d,]*)\]", one.type)
    )
    return shares[one.opcode] * entries * (num - 1) / num


def work(arguments):
    """Operations a device, as a part of those of one."""
    of_one = {}
    for num in DEVICES:
        X, V = inputs(arguments, num)
        found, checks = {}, []

        def count(function, X=X, V=V, checks=checks):
            program = compiled(function, X, V)
            once = Program(program).total(operations, is_once=True)
            checks.append(once / program.cost_analysis()["flops"])
            return Program(program).total(operations)

        found["product"], found["gradient"] = count(product), count(gradient)
        one, two = (count(functools.partial(projections, BLOCK, steps)) for steps in (1, 2))
        found["sweep"] = (two - one) * arguments.rows / BLOCK
        of_one = of_one or found
        shares = ", ".join(
            f"{name} {value / 1e9:.4g} ({num * value / of_one[name]:.3f} / {num})"
            for name, value in found.items()
        )
        checked = " ".join(f"{one:.3f}" for one in checks)
        print(f"p = {num}, 10^9 operations: {shares}; checks {checked}", flush=True)


def sent(arguments):
    """Numbers that a device sends, as multiples of n."""
    d, k = arguments.columns, arguments.vectors
    for num in DEVICES[1:]:
        X, V = inputs(arguments, num)

        def count(function, X=X, V=V, num=num):
            program = Program(compiled(function, X, V))
            return program.total(functools.partial(numbers_sent, num)) / arguments.rows

        one, two = (count(functools.partial(projections, BLOCK, steps)) for steps in (1, 2))
        print(
            f"p = {num}, multiples of n: product {count(product):.2f} (d / 2 + k = {d / 2 + k}), "
            f"gradient {count(gradient):.2f} (d + k / 2 = {d + k / 2}), "
            f"alternating projections: set-up {2 * one - two:.1f}, "
            f"sweep {(two - one) * arguments.rows / BLOCK:.1f}",
            flush=True,
        )


def training_step(solver, num_probes, X, y):
    """A step of SVI, compiled with its state divided as in a run."""

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


def bytes_of(program):
    """Arguments, results and what is between, on one device."""
    found = program.memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def largest_whole(program, num_rows):
    """The shape of the largest array with all rows on one device, or None."""
    shapes = re.findall(r"\w\[([\d,]+)\]", program.as_text())
    sizes = {tuple(int(size) for size in shape.split(",")) for shape in shapes}
    return max((one for one in sizes if max(one) >= num_rows), key=math.prod, default=None)


def memory(arguments):
    """Bytes a device, for the product and for training steps, beside the formula."""
    num, n, k = arguments.devices, arguments.rows, arguments.vectors
    X, V = inputs(arguments, num)
    programs = {
        "product": compiled(product, X, V),
        "cg": training_step(sgp.solvers.ConjugateGradients(), k - 1, X, V[:, 0]),
        "ap": training_step(sgp.solvers.AlternatingProjections(), k - 1, X, V[:, 0]),
    }
    for name, program in programs.items():
        found = bytes_of(program) / 2**20
        expected = formula(name, n, num, arguments.columns, k) / 2**20
        print(
            f"n = {n}, p = {num}, k = {k}, {name}: {found:.0f} MiB, formula {expected:.0f} MiB "
            f"({found / expected:.2f}), with all rows at most: {largest_whole(program, n)}",
            flush=True,
        )


def formula(name, n, p, d, k):
    """Bytes a device in float32: what n / p rows take, and what does not depend on n."""
    block = 4 * products._MAX_ROWS_ON_CPU**2
    if name == "product":
        return 4 * (n / p * (13 * k + 4 * d) + block)
    rank = min(10 * math.sqrt(n), 2**26 / n)
    columns = {"cg": 31 * (k + 16) + rank, "ap": 17 * k + 3 * BLOCK}[name]
    draws = 3 * min(2**24, n / p * 2000) + n / p * 5 * k
    return 4 * max(n / p * (columns + 4 * d) + block, draws)


def gathered_product(X, V):
    """H V without symmetry: each device multiplies its rows of H with all of V."""
    kernel = operator(X).kernel

    def of_share(own, X, V):
        return products.kernel_matmul(kernel, own, X, V)

    product = jax.shard_map(
        of_share,
        mesh=operator(X).mesh,
        in_specs=(P("rows"), P(), P()),
        out_specs=P("rows"),
        check_vma=False,
    )
    return product(X, X, V) + 0.1 * V


def ring(arguments):
    """Seconds of a product: the ring with symmetry beside gathered rows without."""
    X, V = inputs(arguments, arguments.devices)
    functions = {"ring": jax.jit(product), "gathered": jax.jit(gathered_product)}
    found = {name: np.asarray(function(X, V)) for name, function in functions.items()}
    difference = np.abs(found["ring"] - found["gathered"]).max() / np.abs(found["ring"]).max()
    times = {name: [] for name in functions}
    for _ in range(7):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(X, V))
            times[name].append(time.perf_counter() - start)
    once, twice = (np.median(times[name]) for name in functions)
    print(
        f"n = {arguments.rows}, p = {arguments.devices}: ring {once:.3f} s, gathered {twice:.3f} s "
        f"({twice / once:.2f}), relative difference {difference:.1e}"
    )


def main():
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser()
    commands = {"work": work, "bytes": sent, "memory": memory, "ring": ring}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--rows", type=int, default=64000)
    parser.add_argument("--columns", type=int, default=8, help="of X")
    parser.add_argument("--vectors", type=int, default=65, help="1 and the number of probes")
    parser.add_argument("--devices", type=int, default=8, help="for memory and ring")
    arguments = parser.parse_args()
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
