"""What compiled programs of XLA do, without running them: operations, numbers sent, memory.

XLA's cost analysis counts the body of a loop once, whatever its number of iterations. This counts
by the same rules, and multiplies by the iterations that XLA knows of each loop. Of the branches of
a condition the dearest one counts. Loops of an unknown number of iterations, such as a solver's,
count once.
"""

import functools
import math
import re

import jax

# Opcodes of which XLA counts one operation for each entry of the result.
ELEMENTWISE = {
    "abs", "add", "and", "atan2", "ceil", "clamp", "compare", "divide", "floor", "is-finite",
    "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "real", "imag", "remainder",
    "round-nearest-afz", "round-nearest-even", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "subtract", "xor",
}  # fmt: skip


def compiled(function, *arguments, **options):
    """A function's program for arguments, which may be shapes; options are those of `jax.jit`."""
    return jax.jit(function, **options).lower(*arguments).compile()


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

    def operations(self, *, is_once=False):
        """Floating-point operations of a device; LAPACK's are none of XLA's."""
        return self.total(_operations, is_once=is_once)

    def sent(self, num):
        """Numbers that each of `num` devices sends."""
        return self.total(functools.partial(_sent, num))


def _operations(one, operands):
    """Operations of an instruction by the rules of XLA's cost analysis."""
    if one.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
        sizes = operands[0].sizes()
        inner = math.prod(sizes[int(axis)] for axis in contracted.split(",") if axis)
        return 2 * math.prod(one.sizes()) * inner
    if one.opcode == "reduce" and not one.type.startswith("("):
        return math.prod(operands[0].sizes()) - math.prod(one.sizes())
    return math.prod(one.sizes()) if one.opcode in ELEMENTWISE else 0


def _sent(num, one, operands):
    """Numbers that an instruction sends: once round the ring where all gather."""
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


def bytes_of(compiled):
    """Arguments, results and what is between, on one device."""
    found = compiled.memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def largest_whole(compiled, num_rows):
    """Entries of the largest array with all rows on one device."""
    shapes = re.findall(r"\w\[([\d,]+)\]", compiled.as_text())
    sizes = [[int(size) for size in shape.split(",")] for shape in set(shapes)]
    return max((math.prod(one) for one in sizes if max(one) >= num_rows), default=0)
