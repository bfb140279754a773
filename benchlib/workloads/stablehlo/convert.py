"""The graph of torch.export, operation by operation through the table of lowerings, becomes the text of one StableHLO module.

The text is deterministic: names follow the FX nodes and the parameters, nothing depends on time, memory or hashing. Each
result's shape and type is compared with torch's own. Operations without a lowering are listed all at once before a line is written.
"""

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from benchlib.core.errors import UserError
from benchlib.workloads.stablehlo.emit import Value, Writer, element_of
from benchlib.workloads.stablehlo.export import Filled
from benchlib.workloads.stablehlo.lowerings import LOWERINGS
from benchlib.workloads.stablehlo.manifest import Item, Manifest

_ROLES = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.USER_INPUT: "input"}
_RESULTS = {
    OutputKind.USER_OUTPUT: "output",
    OutputKind.LOSS_OUTPUT: "loss",
    OutputKind.GRADIENT_TO_PARAMETER: "gradient",
}


@dataclass(frozen=True)
class Converted:
    """A program as text, what it takes and gives, and its weights by name."""

    text: str
    manifest: Manifest
    weights: Mapping[str, torch.Tensor]


class Unsupported(UserError):
    """Operations that have no lowering; ``operations`` are (operation, node) pairs."""

    def __init__(self, operations: list[tuple[str, str]]) -> None:
        self.operations = operations
        listed = ", ".join(f"{name} (node {node})" for name, node in operations)
        super().__init__(
            f"no lowering for {listed}: add one to benchlib/workloads/stablehlo/lowerings.py, or export a model without it"
        )


def convert(program: ExportedProgram | Filled, name: str = "main", *, replicas: int = 1) -> Converted:
    """Return the StableHLO module of a graph; its weights are arguments.

    With ``replicas`` above 1 loss and gradients are averaged over them by ``all_reduce``: each replica computes its own inputs.
    Raises ``Unsupported`` for operations that the table does not have, ``UserError`` for a graph with outputs of another kind.
    """
    graph, signature = program.graph_module.graph, program.graph_signature
    _require_known(graph)
    w = Writer()
    values: dict[torch.fx.Node, Any] = {}
    state = {**program.state_dict, **program.constants}
    arguments: list[tuple[Item, Value]] = []
    kept: dict[str, torch.Tensor] = {}
    inputs = {spec.arg.name: spec for spec in signature.input_specs}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        spec = inputs[node.name]
        target = spec.target or node.name
        if spec.kind not in _ROLES:
            w.begin(node.name)
            values[node] = w.end(w.dense(state[target]))
            continue
        meta = node.meta["val"]
        shape, element = tuple(meta.shape), element_of(meta.dtype)
        value = Value(w.unique(target), shape, element)
        values[node] = value
        arguments.append((Item(target, _ROLES[spec.kind], shape, element), value))
        if spec.kind is not InputKind.USER_INPUT:
            kept[target] = state[target]
    results: list[tuple[Item, Value]] = []
    for node in graph.nodes:
        if node.op == "call_function":
            values[node] = _lower(w, node, values)
        elif node.op == "output":
            results = _results(w, node, values, signature.output_specs, replicas)
    manifest = Manifest(name, replicas, tuple(item for item, _ in arguments), tuple(item for item, _ in results))
    return Converted(_module(name, w, [v for _, v in arguments], [v for _, v in results], replicas), manifest, kept)


def operations(program: ExportedProgram | Filled) -> Counter[str]:
    """Return how often the graph has which operation."""
    return Counter(str(node.target) for node in program.graph_module.graph.nodes if node.op == "call_function")


def _require_known(graph: torch.fx.Graph) -> None:
    unknown: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and str(node.target) not in LOWERINGS:
            unknown.setdefault(str(node.target), node.name)
    if unknown:
        raise Unsupported(sorted(unknown.items()))


def _lower(w: Writer, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    def given(argument: Any) -> Any:
        return torch.fx.node.map_arg(argument, lambda other: values[other])

    if node.target is operator.getitem:
        return given(node.args[0])[node.args[1]]
    w.begin(node.name)
    made = LOWERINGS[str(node.target)](w, node, *given(node.args), **given(node.kwargs))
    if isinstance(made, Value):
        made = w.end(made)
    for value, meta in zip(_listed(made), _listed(node.meta.get("val")), strict=True):
        wanted = tuple(meta.shape), element_of(meta.dtype)
        if (value.shape, value.element) != wanted:
            raise AssertionError(
                f"{node.target} in node {node.name} was lowered to {value.type}, and torch gives {wanted}"
            )
    return made


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _results(
    w: Writer, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], specs: Any, replicas: int
) -> list[tuple[Item, Value]]:
    made = []
    for place, (spec, source) in enumerate(zip(specs, _listed(node.args[0]), strict=True)):
        if spec.kind not in _RESULTS:
            continue  # a gradient of an input, which nobody asked for
        if not isinstance(source, torch.fx.Node):
            raise UserError(f"output {place} of the graph is {source!r} and no tensor: return tensors only")
        value, role = values[source], _RESULTS[spec.kind]
        if replicas > 1 and role in ("loss", "gradient"):
            w.begin(f"mean_{place}")
            total = w.all_reduce(value, replicas)
            value = w.end(w.binary("multiply", total, w.splat(1 / replicas, total.shape, total.element)))
        name = spec.target if role == "gradient" else spec.arg.name
        made.append((Item(name, role, value.shape, value.element), value))
    return made


def _module(name: str, w: Writer, arguments: list[Value], results: list[Value], replicas: int) -> str:
    heading = "".join(
        f"\n    {value.name}: {value.type}{',' if place < len(arguments) - 1 else ''}"
        for place, value in enumerate(arguments)
    )
    types = ", ".join(value.type for value in results)
    attributes = (
        f" attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {replicas} : i32}}" if replicas > 1 else ""
    )
    head = f"module @{name}{attributes} {{\n  func.func public @main({heading}\n  ) -> ({types}) {{\n    "
    tail = f"\n    return {', '.join(value.name for value in results)} : {types}\n  }}\n}}\n"
    return "".join((head, "\n    ".join(w.lines), tail))
