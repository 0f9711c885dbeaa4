"""Analyze compiled programs of XLA without running them: operations, communication, memory.

XLA's cost analysis counts the body of a loop once, regardless of its number of iterations. This
module counts by the same rules, and multiplies by the number of iterations of a loop if XLA knows
it; other loops, such as a solver's, count once. Of the branches of a condition only the most
expensive branch counts.
"""

import functools
import math
import re

import jax

# Opcodes for which XLA counts one operation per entry of the result.
ELEMENTWISE = {
    "abs", "add", "and", "atan2", "ceil", "clamp", "compare", "divide", "floor", "is-finite",
    "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "real", "imag", "remainder",
    "round-nearest-afz", "round-nearest-even", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "subtract", "xor",
}  # fmt: skip


def compiled(function, *arguments, **options):
    """The compiled program of a function; arguments may be shapes, options are for `jax.jit`."""
    return jax.jit(function, **options).lower(*arguments).compile()


class Instruction:
    """One line of a compiled program."""

    LINE = re.compile(r"^\s+(?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
    NAME = re.compile(r"%[\w.-]+")

    def __init__(self, line):
        line = re.sub(r"/\*.*?\*/", "", line)
        self.name, self.type, self.opcode, self.attributes = self.LINE.match(line).groups()
        self.operands = self.NAME.findall(self.attributes.split(")")[0])

    def sizes(self):
        """The shape of the result, which must not be a tuple."""
        sizes = re.search(r"\[([\d,]*)\]", self.type)[1].split(",")
        return [int(size) for size in sizes if size]

    def called(self):
        """The computations that it calls: for a while loop the body and the condition."""
        names = re.findall(
            r"(?:body|condition|calls|to_apply|\w+_computation)=(%[\w.-]+)", self.attributes
        )
        branches = re.search(r"branch_computations=\{(.*?)\}", self.attributes)
        return names + (self.NAME.findall(branches[1]) if branches else [])

    def repeats(self, is_once):
        """How often it runs the computations that it calls; 1 if XLA does not know."""
        count = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(count[1]) if count and not is_once else 1


class Program:
    """A compiled program, with sums over its instructions, weighted by how often each runs."""

    def __init__(self, compiled):
        self.computations, self.entry = {}, None
        for line in compiled.as_text().splitlines():
            header = re.match(r"^(ENTRY )?(%[\w.-]+) .*\{$", line)
            if header:
                lines = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif Instruction.LINE.match(line):
                instruction = Instruction(line)
                lines[instruction.name] = instruction

    def total(self, count, *, is_once=False):
        """The sum of `count` over instructions and operands, with the most expensive branches.

        With `is_once` the body of a loop counts once, as in XLA's cost analysis.
        """

        @functools.cache
        def of_computation(name):
            lines = self.computations[name]
            return sum(of_instruction(line, lines) for line in lines.values())

        def of_instruction(line, lines):
            outer = count(line, [lines[name] for name in line.operands if name in lines])
            inner = [of_computation(name) for name in line.called()] or [0]
            if line.opcode in ("reduce", "reduce-window", "scatter", "map", "sort", "all-reduce"):
                return outer
            inner = max(inner) if line.opcode == "conditional" else sum(inner)
            return outer + line.repeats(is_once) * inner

        return of_computation(self.entry)

    def operations(self, *, is_once=False):
        """Floating-point operations of a device, without LAPACK's."""
        return self.total(_operations, is_once=is_once)

    def sent(self, num):
        """How many numbers each of `num` devices sends."""
        return self.total(functools.partial(_sent, num))


def _operations(instruction, operands):
    """Operations of an instruction by the rules of XLA's cost analysis."""
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)[1]
        sizes = operands[0].sizes()
        inner = math.prod(sizes[int(axis)] for axis in contracted.split(",") if axis)
        return 2 * math.prod(instruction.sizes()) * inner
    if instruction.opcode == "reduce" and not instruction.type.startswith("("):
        return math.prod(operands[0].sizes()) - math.prod(instruction.sizes())
    return math.prod(instruction.sizes()) if instruction.opcode in ELEMENTWISE else 0


def _sent(num, instruction, operands):
    """How many numbers an instruction sends; an all-gather sends them once around the ring."""
    if instruction.opcode == "collective-permute":
        return math.prod(instruction.sizes())
    shares = {"all-gather": 1, "all-reduce": 2, "all-to-all": 1}
    if instruction.opcode not in shares:
        return 0
    entries = sum(
        math.prod(int(size) for size in sizes.split(",") if size)
        for sizes in re.findall(r"\[([\d,]*)\]", instruction.type)
    )
    return shares[instruction.opcode] * entries * (num - 1) / num


def bytes_of(compiled):
    """Bytes of arguments, results and temporary arrays on one device."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def largest_unsharded(compiled, num_rows):
    """Entries of the largest array with all rows on one device."""
    shapes = re.findall(r"\w\[([\d,]+)\]", compiled.as_text())
    shapes = [[int(size) for size in shape.split(",")] for shape in set(shapes)]
    return max((math.prod(shape) for shape in shapes if max(shape) >= num_rows), default=0)
