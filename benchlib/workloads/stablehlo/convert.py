"""The graph of torch.export, by the table of lowerings, becomes the text of one StableHLO module.

The text is deterministic: names follow the FX nodes and the parameters, nothing depends on time, memory or hashing.
Each result's shape and type is compared with torch's own. Operations without a lowering are listed all at once before
a line is written.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from benchlib.core.errors import UserError
from benchlib.workloads.stablehlo.emit import Value, Writer, element_of
from benchlib.workloads.stablehlo.lowerings import LOWERINGS
from benchlib.workloads.stablehlo.manifest import Item, Manifest

_ROLES = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.USER_INPUT: "input"}
_RESULTS = {OutputKind.USER_OUTPUT: "output", OutputKind.LOSS_OUTPUT: "loss"}
_RESULTS |= {OutputKind.GRADIENT_TO_PARAMETER: "gradient"}
Named = list[tuple[Item, Value]]


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
        remedy = "add one to benchlib/workloads/stablehlo/lowerings.py, or export a model without it"
        super().__init__(f"no lowering for {listed}: {remedy}")


def convert(program: ExportedProgram, name: str = "main", *, replicas: int = 1) -> Converted:
    """Return the StableHLO module of a graph; its weights are arguments.

    With ``replicas`` above 1 loss and gradients are averaged over them by ``all_reduce``: each replica computes its own
    inputs. Raises ``Unsupported`` for operations that the table does not have, ``UserError`` for outputs that are no
    tensors.
    """
    graph, signature = program.graph_module.graph, program.graph_signature
    _require_known(graph)
    w, state = Writer(), {**program.state_dict, **program.constants}
    values: dict[torch.fx.Node, Any] = {}
    weights: dict[str, torch.Tensor] = {}
    arguments, results = Named(), Named()
    inputs = {spec.arg.name: spec for spec in signature.input_specs}
    for node in graph.nodes:
        if node.op == "placeholder":
            spec = inputs[node.name]
            target = spec.target or node.name
            if spec.kind not in _ROLES:
                w.begin(node.name)
                values[node] = w.end(w.dense(state[target]))
                continue
            shape, element = _type(node.meta["val"])
            values[node] = Value(w, w.unique(target), shape, element)
            arguments.append((Item(target, _ROLES[spec.kind], shape, element), values[node]))
            if spec.kind is not InputKind.USER_INPUT:
                weights[target] = state[target]
        elif node.op == "call_function":
            values[node] = _lower(w, node, values)
        elif node.op == "output":
            results = _results(w, node, values, signature.output_specs, replicas)
    manifest = Manifest(name, replicas, tuple(item for item, _ in arguments), tuple(item for item, _ in results))
    return Converted(_module(name, w, [v for _, v in arguments], [v for _, v in results], replicas), manifest, weights)


def _type(meta: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(meta.shape), element_of(meta.dtype)


def _name(node: torch.fx.Node) -> str:
    """Return the name of an operation without that of its overload."""
    return str(node.target).rpartition(".")[0]


def _require_known(graph: torch.fx.Graph) -> None:
    unknown: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and _name(node) not in LOWERINGS:
            unknown.setdefault(str(node.target), node.name)
    if unknown:
        raise Unsupported(sorted(unknown.items()))


def _lower(w: Writer, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    args: Any = torch.fx.node.map_arg(node.args, values.__getitem__)
    named: Any = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
    if node.target is operator.getitem:
        return args[0][args[1]]
    w.begin(node.name)
    lowered = LOWERINGS[_name(node)](w, node, *args, **named)
    lowered = w.end(lowered) if isinstance(lowered, Value) else lowered
    for value, meta in zip(_listed(lowered), _listed(node.meta.get("val")), strict=True):
        if (value.shape, value.element) != _type(meta):
            types = f"{value.type}, and torch gives {_type(meta)}"
            raise AssertionError(f"{node.target} in node {node.name} was lowered to {types}")
    return lowered


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _results(w: Writer, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], specs: Any, replicas: int) -> Named:
    results = Named()
    for place, (spec, source) in enumerate(zip(specs, _listed(node.args[0]), strict=True)):
        if spec.kind not in _RESULTS:
            continue  # a gradient of an input, which nobody asked for
        if not isinstance(source, torch.fx.Node):
            raise UserError(f"output {place} of the graph is {source!r} and no tensor: return tensors only")
        value, role = values[source], _RESULTS[spec.kind]
        if replicas > 1 and role != "output":
            w.begin(f"mean_{place}")
            value = w.end(w.all_reduce(value, replicas) * (1 / replicas))
        results.append(
            (Item(spec.target if role == "gradient" else spec.arg.name, role, value.shape, value.element), value)
        )
    return results


def _module(name: str, w: Writer, arguments: list[Value], results: list[Value], replicas: int) -> str:
    heading = ",".join(f"\n    {value.name}: {value.type}" for value in arguments)
    types = ", ".join(value.type for value in results)
    numbers = f"mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {replicas} : i32"
    attributes = f" attributes {{{numbers}}}" if replicas > 1 else ""
    head = f"module @{name}{attributes} {{\n  func.func public @main({heading}\n  ) -> ({types}) {{\n    "
    tail = f"\n    return {', '.join(value.name for value in results)} : {types}\n  }}\n}}\n"
    return "".join((head, "\n    ".join(w.lines), tail))
