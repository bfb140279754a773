"""What a StableHLO or MHLO program consists of, counted in its text without running it.

Operations and FLOPs count as often as they run: those of a function at each call, those of a loop with a constant count in each
round. FLOPs are those of dots: 2 x elements of the result x contracted elements. Temporaries are counted in the order of the text,
each from its operation to its last use: what a program needs that fuses nothing and reuses memory at once.

What depends on values is not guessed: a loop without a constant count is counted once, of several branches the one with the
most FLOPs counts, and ``uncounted`` names what the numbers leave out.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchlib.core.errors import UserError
from benchlib.workloads.stablehlo import mlir

DYNAMIC = math.inf  # of a size that the text does not say: what is added to it stays unknown
CALLS = {"func.call": "callee", "composite": "decomposition"}  # with the attribute that names the function
DOTS = ("dot", "dot_general")
COMPUTES = (
    "convolution",
    "dynamic_conv",
    "fft",
    "cholesky",
    "triangular_solve",
    "custom_call",
)  # FLOPs of which are not counted
FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@dataclass
class Inspection:
    """What a program consists of; a number is None if the size of a tensor that it counts is dynamic.

    ``uncounted`` says in words what is not in the numbers, and how often that occurs.
    """

    operations: Counter[str]
    dot_flops: int | None
    argument_bytes: int | None
    result_bytes: int | None
    temporary_bytes: int | None
    uncounted: Counter[str]


@dataclass
class _Cost:
    """What a block runs. ``peak`` are the most bytes of temporaries alive at once."""

    operations: Counter[str] = field(default_factory=Counter)
    flops: float = 0
    peak: float = 0
    uncounted: Counter[str] = field(default_factory=Counter)

    def add(self, other: "_Cost", times: int) -> None:
        """Add what runs ``times``, but for its memory."""
        self.flops += times * other.flops if times else 0  # 0 times a dynamic size is no number
        for name, count in other.operations.items():
            self.operations[name] += times * count
        for name, count in other.uncounted.items():
            self.uncounted[name] += times * count


def inspect(text: str, name: str = "text") -> Inspection:
    """Count what a program consists of. Raises ``UserError`` for a text that is none."""
    module = mlir.parse(text, name)
    program, entry = _Program(module, name), mlir.main(module, name)
    block = entry.regions[0].blocks[0]
    cost = program.block(block)
    arguments = sum(program.bytes(value.type, cost) for value in block.arguments)
    results = sum(program.bytes(value.type, cost) for value in _end(block).operands)
    peak = _number(cost.peak)
    return Inspection(
        +cost.operations, _number(cost.flops), _number(arguments), _number(results), peak, +cost.uncounted
    )


def _number(value: float) -> int | None:
    return None if value == DYNAMIC else int(value)


def _kind(op: Any) -> str:
    return str(op.operation.name.removeprefix("stablehlo.").removeprefix("mhlo."))


def _end(block: Any) -> Any:
    return list(block.operations)[-1]


def _inside(op: Any) -> Iterator[Any]:
    """Yield the operations in the regions of one, and in theirs."""
    for inner in (inner for region in op.regions for block in region.blocks for inner in block.operations):
        yield inner
        yield from _inside(inner)


class _Program:
    """The functions of a module, each counted once."""

    def __init__(self, module: Any, name: str) -> None:
        functions = [op for op in module.body.operations if op.operation.name == "func.func"]
        self.name, self.functions = name, {op.attributes["sym_name"].value: op for op in functions}
        self.known = dict[str, _Cost]()
        self.open = list[str]()

    def function(self, name: str) -> _Cost:
        if name in self.open:
            raise UserError(f"{self.name}: @{name} calls itself, and StableHLO has no recursion")
        if name not in self.known:
            blocks = self.functions[name].regions[0].blocks if name in self.functions else []
            if not len(blocks):
                return _Cost(uncounted=Counter([f"what @{name} runs, which has no body"]))
            self.open.append(name)
            self.known[name] = self.block(blocks[0])
            self.open.pop()
        return self.known[name]

    def block(self, block: Any) -> _Cost:
        """Count the operations of a block up to its terminator."""
        operations, cost = list(block.operations), _Cost()
        last = {value: place for place, op in enumerate(operations) for value in op.operands}
        last |= {
            value: place for place, op in enumerate(operations) for inner in _inside(op) for value in inner.operands
        }
        ends, alive = defaultdict[int, float](float), 0.0
        for place, op in enumerate(operations):
            kind = _kind(op)
            if place < len(operations) - 1:
                cost.operations[kind] += 1
            within = self._within(op, kind, cost)
            cost.peak = max(cost.peak, alive + within)
            for value in op.results if kind != "constant" else ():  # one that is a splat takes no memory
                size = self.bytes(value.type, cost)
                alive += size
                ends[last.get(value, place)] += size
            cost.peak = max(cost.peak, alive)
            alive -= ends[place]
        return cost

    def _within(self, op: Any, kind: str, cost: _Cost) -> float:
        """Add to ``cost`` what an operation computes and runs, and return the bytes of temporaries that it needs meanwhile."""
        parts = list[tuple[_Cost, int]]()
        if kind in DOTS:
            cost.flops += _dot_flops(op, kind)
        elif kind in COMPUTES:
            cost.uncounted[f"FLOPs of {kind}"] += 1
        elif kind in CALLS:
            parts.append((self.function(op.attributes[CALLS[kind]].value), 1))
        elif kind == "while":
            condition, body = (self.block(region.blocks[0]) for region in op.regions)
            rounds = _rounds(op)
            if rounds is None:
                cost.uncounted["rounds after the first of a loop without a constant count"] += 1
                rounds = 1
            parts += [(condition, rounds + 1), (body, rounds)]
        elif kind in ("case", "if"):
            branches = [self.block(region.blocks[0]) for region in op.regions]
            parts.append((max(branches, key=lambda branch: branch.flops), 1))
            cost.uncounted[f"branches of {kind} but the one with the most FLOPs"] += 1
        elif any(_kind(inner) in (*DOTS, *COMPUTES, *CALLS, "while") for inner in _inside(op)):
            cost.uncounted[f"what the regions of {kind} run"] += 1
        for part, times in parts:
            cost.add(part, times)
        return max((part.peak for part, times in parts if times), default=0.0)

    def bytes(self, kind: Any, cost: _Cost) -> float:
        """Return the bytes of a tensor; of what is none ``cost`` notes that it is not counted."""
        ir, _, _ = mlir.bindings()
        try:
            shaped = ir.RankedTensorType(kind)
            element = shaped.element_type
            bits = 2 * element.element_type.width if isinstance(element, ir.ComplexType) else element.width
        except (ValueError, AttributeError, RuntimeError):  # a token, a tuple, a quantised number
            cost.uncounted[f"bytes of {kind}"] += 1
            return 0
        return _product(shaped, range(shaped.rank)) * max(1, bits // 8)


def _product(shaped: Any, axes: Any) -> float:
    """Return how many elements a tensor has along some axes."""
    return math.prod(DYNAMIC if shaped.is_dynamic_dim(axis) else shaped.get_dim_size(axis) for axis in axes)


def _dot_flops(op: Any, kind: str) -> float:
    ir, _, _ = mlir.bindings()
    left, result = ir.RankedTensorType(op.operands[0].type), ir.RankedTensorType(op.results[0].type)
    contracted = [left.rank - 1]
    if kind == "dot_general":
        text = str(op.attributes["dot_dimension_numbers"])  # has no field of what is empty
        axes = re.search(r"lhs_contracting_dimensions = \[([\d, ]+)\]", text)
        contracted = [int(axis) for axis in axes[1].split(",")] if axes else []
    return 2 * _product(result, range(result.rank)) * _product(left, contracted)


def _rounds(op: Any) -> int | None:
    """Return how often a loop runs that steps a counter from a constant to a constant; None for any other."""
    condition, body = (region.blocks[0] for region in op.regions)
    state = _State(list(op.operands), condition, body)
    compare = _owner(_end(condition).operands[0])
    if compare is None or _kind(compare) != "compare":
        return None
    direction = re.search(r"comparison_direction (\w+)", str(compare.attributes["comparison_direction"]))
    word = direction[1] if direction else ""
    left, right = compare.operands
    place, limit = state.place(left), state.constant(right)
    if place is None:
        place, limit, word = state.place(right), state.constant(left), FLIPPED.get(word, "")
    if place is None or limit is None or word not in FLIPPED:
        return None
    start, step = state.constant(op.operands[place]), state.step(place)
    if start is None or not step:
        return None
    if word == "NE":
        count, rest = divmod(limit - start, step)
        return count if count >= 0 and not rest else None
    if word in ("GT", "GE"):
        start, step, limit = -start, -step, -limit
    last = limit if word in ("LE", "GE") else limit - 1  # value of the counter in the last round
    if start > last:
        return 0
    return (last - start) // step + 1 if step > 0 else None


def _owner(value: Any) -> Any:
    """Return the operation that makes a value; None for the argument of a block."""
    owner = value.owner
    return owner if hasattr(owner, "operands") else None


@dataclass
class _State:
    """The state of a loop: what it starts with, and the blocks that get it as their arguments."""

    starts: list[Any]
    condition: Any
    body: Any

    def place(self, value: Any) -> int | None:
        """Return which part of the state a value is."""
        arguments = [*enumerate(self.condition.arguments), *enumerate(self.body.arguments)]
        return next((place for place, argument in arguments if argument == value), None)

    def constant(self, value: Any) -> int | None:
        """Return the integer that a value always is, also as a part of the state that no round changes; None for any other."""
        place, owner = self.place(value), _owner(value)
        if place is not None:
            kept = _end(self.body).operands[place] == self.body.arguments[place]
            return self.constant(self.starts[place]) if kept else None
        if owner is None or _kind(owner) != "constant":
            return None
        numbers = np.array(owner.attributes["value"])
        return int(numbers.reshape(-1)[0]) if numbers.size == 1 and numbers.dtype.kind in "iu" else None

    def step(self, place: int) -> int | None:
        """Return what each round adds to a part of the state; None if that is no constant."""
        change = _owner(_end(self.body).operands[place])
        if change is None or _kind(change) not in ("add", "subtract"):
            return None
        left, right = change.operands
        if _kind(change) == "add" and right == self.body.arguments[place]:
            left, right = right, left
        amount = self.constant(right) if left == self.body.arguments[place] else None
        return amount if amount is None or _kind(change) == "add" else -amount
