"""The iterative family over the devices of a mesh: work, bytes, memory, and what symmetry gains.

    python benchmarks/mesh_products.py work                  # operations a device, beside 1/p
    python benchmarks/mesh_products.py bytes                 # numbers that each device sends
    python benchmarks/mesh_products.py memory --rows 200000  # bytes a device, beside the formula
    python benchmarks/mesh_products.py ring --rows 8000      # seconds: ring beside gathered rows

All on virtual devices of one CPU. What the first three print is read off the compiled programs,
which do not run. XLA's cost analysis counts the body of a loop once, whatever its number of
iterations: `work` compiles with all scans unrolled, and prints a check of that on a loop whose
operations are known. `bytes` and `memory` read the programs as they are, and multiply by the
iterations that XLA knows of each loop; what it does not know, such as a solver's, counts once.
"""

import argparse
import functools
import math
import os
import re

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lax.control_flow import loops
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import numpyro_scalegp as sgp
from numpyro_scalegp.solvers import alternating_projections, products

DEVICES = [1, 2, 4, 8]


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


def operator(X):
    return sgp.solvers.KernelOperator(sgp.kernels.Matern32(jnp.ones(X.shape[1])), X, 0.1)


def product(X, V):
    return operator(X).matmul(V)


def gradient(X, V):
    return operator(X).quadratic_gradient(jnp.ones(V.shape[1]), V)


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
        found = re.findall(r"(?:body|condition|calls|to_apply|\w+_computation)=(%[\w.-]+)", self.rest)
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
    """Operations a device."""
    compare(arguments, "10^9 operations", operations, 1e9, check=True)


def sent(arguments):
    """Numbers sent a device, as multiples of n."""
    for num in DEVICES[1:]:
        print(f"p = {num}, multiples of n:", end="")
        for name, program in programs(arguments, num).items():
            total = Program(program).total(functools.partial(numbers_sent, num))
            print(f" {name} {total / arguments.rows:.1f}", end="")
        d, k = arguments.columns, arguments.vectors
        print(f"; n (d / 2 + k) {d / 2 + k}, n (d + k) {d + k}")


def main():
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["work", "bytes", "memory", "ring"])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=8, help="of X")
    parser.add_argument("--vectors", type=int, default=65)
    parser.add_argument("--block", type=int, default=256, help="rows of a block, for work")
    arguments = parser.parse_args()
    {"work": work}[arguments.command](arguments)


if __name__ == "__main__":
    main()
