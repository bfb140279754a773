"""The compiled path from the models to the result, on one rank."""

import contextlib
import copy
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchlib.benchmarks.compiled import programs
from benchlib.benchmarks.compiled.config import REFERENCE, CompiledConfig, members
from benchlib.core import mlir
from benchlib.core.definitions import encoder_forward_flops
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.events import EventWriter
from benchlib.core.machine import usable_cores
from benchlib.results.metrics import Metric, measured
from benchlib.results.run import Result, save_result
from benchlib.runtime import peaks
from benchlib.runtime.steps import launched_at
from benchlib.workloads.stablehlo import export, pjrt, runtimes
from benchlib.workloads.stablehlo.convert import Converted, convert

_ALL_REDUCE = re.compile(r" all-reduce(?:-start)?\(")
PEAK_SIZES, PEAK_S = (512, 1024), 0.2
Row = dict[str, Any]


@dataclass
class Bench:
    """What rank 0 has so far."""

    config: CompiledConfig
    folder: Path
    events: EventWriter
    metrics: list[Metric] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[Row]] = field(default_factory=dict)

    def phase(self, name: str) -> None:
        """Say what comes."""
        self.events.emit("phase", name=name)

    def tell(self, phase: str, done: int, total: int, unit: str) -> None:
        """Say how far it is."""
        self.events.emit("progress", phase=phase, done=done, total=total, unit=unit)


def take(config: CompiledConfig, run_dir: Path, events: EventWriter, ddp: dict[str, np.ndarray]) -> None:
    """Convert, compute, compare and time; leave ``result.json`` and ``programs/``. ``ddp`` are its gradients, {} for one rank."""
    launched = launched_at(run_dir)
    torch.set_num_threads(config.threads or usable_cores())
    pjrt.simulated(config.world_size)
    bench = Bench(config, run_dir / "programs", events)
    bench.folder.mkdir(exist_ok=True)
    result = Result.of(config, started_at=launched.wall)
    bench.phase("convert")
    for name in config.models:
        _program(bench, name)
    bench.phase("gradients")
    joint = _gradients(bench, ddp)
    if config.train_steps:
        bench.phase("train")
        _train(bench, joint)
    if config.runtimes or config.targets:
        bench.phase("runtimes")
        _side_by_side(bench)
    bench.phase("latency")
    _latency(bench)
    bench.phase("write")
    total_s = measured("total_s", launched.since(), "s", "lower", reason="from the launch to the result")
    result.metrics = [*bench.metrics, total_s]
    result.facts = bench.facts | {
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "jax": mlir.jax().__version__},
        "identity": {},
    }
    result.tables = bench.tables
    result.status, result.ended_at = "complete", launched.wall + launched.since()
    save_result(run_dir, result)


def _converted(bench: Bench, name: str, make: Callable[[], Any], **options: Any) -> tuple[Converted, Row]:
    """Export, convert and write a program; return it with what that took."""
    began = time.perf_counter()
    program = make()
    exported = time.perf_counter()
    converted = convert(program, name, **options)
    done = time.perf_counter()
    converted.manifest.hashed(converted.weights).write(bench.folder / f"{name}.mlir", converted.text)
    arguments = converted.manifest.arguments
    inspection = mlir.inspect(
        converted.text, [item.name for item in arguments], [item.role for item in arguments], name
    )
    row = {
        "program": name, "export_s": exported - began, "convert_s": done - exported, "text_bytes": len(converted.text),
        "arguments": len(arguments), "operations": sum(inspection.operations.values()), "dot_flops": inspection.dot_flops,
        "argument_bytes": inspection.argument_bytes, "temporary_bytes": inspection.temporary_bytes,
    }  # fmt: skip
    bench.tables.setdefault("programs", []).append(row)
    bench.tables.setdefault("operations", []).extend(
        {"program": name, "operation": kind, "count": count}
        for kind, count in sorted(inspection.operations.items(), key=lambda item: (-item[1], item[0]))
    )
    bench.tables.setdefault("layers", []).extend(
        {"program": name, "layer": layer, **vars(item)} for layer, item in inspection.layers.items()
    )
    bench.tables.setdefault("edges", []).extend(
        {"program": name, "from": a, "to": b, "values": count} for (a, b), count in inspection.edges.items()
    )
    return converted, row


def _program(bench: Bench, name: str) -> None:
    """Convert one model and compare XLA's results with torch's."""
    config = bench.config
    module, inputs = programs.model(name, config.batch, config.length, config.seed, config.model)
    converted, row = _converted(bench, name, lambda: export.forward(module, inputs))
    runtime = runtimes.load("xla", bench.folder / f"{name}.mlir")
    arrays = runtimes.arguments(runtime.manifest, converted.weights, inputs)
    runtime.manifest.check(arrays)
    made = [np.asarray(value) for value in runtime.run(runtime.place(arrays))]
    reference, exact = programs.eager(module, inputs), programs.truth(module, inputs)
    row["compile_s"] = runtime.compile_s
    row["max_abs"], row["one_minus_cos"] = programs.apart(made, reference)
    row["reference_error"] = programs.apart(reference, exact)[0]
    row["truth_max_abs"] = programs.apart(made, exact)[0]
    row["largest"] = max(float(np.abs(side).max()) for side in reference)
    if name == "bert":
        sizes = module.model.config  # type: ignore[union-attr]
        row["formula_flops"] = _bert_flops(sizes, config.batch, config.length)
    bench.metrics += [
        measured(f"convert_s_{name}", row["convert_s"], "s", "lower", reason="FX graph to text, without torch.export"),
        measured(f"max_abs_{name}", row["max_abs"], "", "lower", reason="XLA against eager, fp32"),
    ]


def _bert_flops(sizes: Any, batch: int, length: int) -> float:
    """Return the FLOPs of the dots of a forward pass, with those of the two logits of a token."""
    encoder = encoder_forward_flops(sizes.num_hidden_layers, sizes.hidden_size, sizes.intermediate_size, length)
    return batch * (encoder + 4 * sizes.hidden_size * length)


@dataclass
class Joint:
    """The forward and backward program of the embedded BERT, compiled."""

    loss: export.AnswerLoss
    converted: Converted
    runtime: runtimes.Runtime

    def __call__(self, inputs: programs.Inputs) -> tuple[float, dict[str, np.ndarray]]:
        """Return loss and gradients by parameter, with the weights that the model has now."""
        state = {**dict(self.loss.named_buffers()), **dict(self.loss.named_parameters())}
        arrays = runtimes.arguments(self.runtime.manifest, state, inputs)
        made = self.runtime.run(self.runtime.place(arrays))
        return _loss_and_gradients(self.runtime.manifest.results, made)


def _loss_and_gradients(items: Any, made: Any) -> tuple[float, dict[str, np.ndarray]]:
    values = [(item, np.array(value)) for item, value in zip(items, made, strict=True)]
    losses = [float(value) for item, value in values if item.role == "loss"]
    return losses[0], {item.name: value for item, value in values if item.role == "gradient"}


def _gradients(bench: Bench, ddp: dict[str, np.ndarray]) -> Joint:
    """Compare the joint program's gradients with autograd's, and those averaged over replicas with DDP's."""
    config = bench.config
    loss = export.AnswerLoss(programs.bert(config.model, config.seed))
    given = programs.rows(config, 0, loss)
    exported: list[Any] = []

    def make() -> Any:
        exported.append(export.joint(loss, given))
        return exported[0]

    converted, row = _converted(bench, "joint", make)
    runtime = runtimes.load("xla", bench.folder / "joint.mlir")
    joint = Joint(loss, converted, runtime)
    row["compile_s"] = runtime.compile_s
    reference = programs.gradients(loss, given)
    exact = programs.gradients(copy.deepcopy(loss).double(), given)
    rows: list[Row] = [{"gradients": "XLA against autograd", "replicas": 1, "relative": programs.relative(joint(given)[1], reference),
             "reference_error": programs.relative(reference, exact), "parameters": len(reference)}]  # fmt: skip
    if ddp:
        rows.append(_replicated(bench, exported[0], loss, ddp))
    bench.tables["gradients"] = rows
    bench.metrics += [
        measured(
            "gradient_relative" if item["replicas"] == 1 else "ddp_gradient_relative",
            item["relative"],
            "",
            "lower",
            reason=item["gradients"],
        )
        for item in rows
    ]
    return joint


def _replicated(bench: Bench, exported: Any, loss: export.AnswerLoss, ddp: dict[str, np.ndarray]) -> Row:
    """Run the joint program on a simulated device for each rank; return how far its mean gradients are from DDP's."""
    config, replicas = bench.config, bench.config.world_size
    converted, row = _converted(bench, "replicas", lambda: exported, replicas=replicas)
    del row["export_s"]  # it is the graph of the joint program
    began = time.perf_counter()
    program = pjrt.Program(converted.text, replicas)
    row["compile_s"] = time.perf_counter() - began
    parts = [programs.rows(config, number, loss) for number in range(replicas)]
    inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    state = {**dict(loss.named_buffers()), **dict(loss.named_parameters())}
    arrays = runtimes.arguments(converted.manifest, state, inputs)
    placed = [
        program.place(array, apart=item.role == "input")
        for array, item in zip(arrays, converted.manifest.arguments, strict=True)
    ]
    made = program.run(placed)
    items = converted.manifest.results
    by_replica = [_loss_and_gradients(items, [value[number] for value in made])[1] for number in range(replicas)]
    double = copy.deepcopy(loss).double()
    exact = [programs.gradients(double, part) for part in parts]
    mean = {name: sum(part[name] for part in exact) / replicas for name in exact[0]}
    bench.facts["all_reduce"] = {
        "text": converted.text.count('"stablehlo.all_reduce"'),
        "compiled": len(_ALL_REDUCE.findall(program.compiled_text())),
    }
    return {
        "gradients": f"{replicas} replicas against DDP", "replicas": replicas, "relative": programs.relative(by_replica[0], ddp),
        "reference_error": programs.relative(ddp, mean), "parameters": len(ddp),
        "replicas_equal": all(np.array_equal(by_replica[0][name], other[name]) for other in by_replica for name in ddp),
    }  # fmt: skip


def _train(bench: Bench, joint: Joint) -> None:
    """Train with gradients of the compiled program and, from the same weights, with autograd's; the optimizer is torch's."""
    config = bench.config
    twin = copy.deepcopy(joint.loss)
    ours, theirs = (torch.optim.AdamW(module.parameters(), lr=config.learning_rate) for module in (joint.loss, twin))
    rows = []
    for step in range(config.train_steps):
        given = programs.rows(config, step, joint.loss)
        value, gradients = joint(given)
        for name, parameter in joint.loss.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name])
        ours.step()
        theirs.zero_grad()
        loss = twin(**given)
        loss.backward()
        theirs.step()
        rows.append({"step": step + 1, "eager": loss.item(), "xla": value})
        bench.tell("train", step + 1, config.train_steps, "steps")
    bench.tables["curve"] = rows
    worst = max(abs(row["eager"] - row["xla"]) for row in rows)
    bench.metrics.append(
        measured("curve_max_abs", worst, "", "lower", reason=f"loss of XLA against eager, {len(rows)} steps")
    )


def _side_by_side(bench: Bench) -> None:
    """Compute one file of a small BERT by every runtime, and compile it for hardware that is not here."""
    config = bench.config
    module = export.Answers(programs.bert("small", config.seed))
    inputs = programs.question(2, 8, programs.SMALLEST, config.seed)
    converted, _ = _converted(bench, "small", lambda: export.forward(module, inputs))
    reference = programs.eager(module, inputs)
    path, rows = bench.folder / "small.mlir", []
    for name in config.runtimes:
        row: Row = {
            "runtime": name,
            "status": "computed",
            "max_abs": None,
            "one_minus_cos": None,
            "compile_s": None,
            "run_s": None,
            "reason": "",
        }
        rows.append(row)
        try:
            runtime = runtimes.load(name, path)
        except BackendUnavailable as error:
            row |= {"status": "SKIPPED", "reason": str(error)}
            continue
        placed = runtime.place(runtimes.arguments(runtime.manifest, converted.weights, inputs))
        began = time.perf_counter()
        made = [np.asarray(value) for value in runtime.run(placed)]
        row |= {
            "run_s": time.perf_counter() - began,
            "compile_s": runtime.compile_s,
            "reason": str(runtime.description["runtime"]),
        }
        row["max_abs"], row["one_minus_cos"] = programs.apart(made, reference)
    bench.tables["runtimes"] = rows
    compiled = []
    for target in config.targets:
        row = {"target": target, "status": "compiled", "module_bytes": None, "reason": ""}
        try:
            row["module_bytes"] = len(runtimes.iree_compiled(converted.text, target, runtimes.TARGETS[target]))
        except BackendUnavailable as error:
            row |= {"status": "SKIPPED", "reason": str(error)}
        except UserError as error:
            row |= {"status": "FAIL", "reason": str(error)}
        compiled.append(row)
    bench.tables["targets"] = compiled


@contextlib.contextmanager
def _executors(
    bench: Bench, example: programs.Inputs
) -> Iterator[tuple[dict[str, Any], dict[str, float], dict[str, str]]]:
    """Yield executors by name, the seconds that making each took, and why some are not there."""
    made: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="benchlib-compiled-") as folder:
        for name in bench.config.executors:
            member = members()[name]
            own = Path(folder) / name
            own.mkdir()
            model = programs.bert(bench.config.timed_model, bench.config.seed, member.attention)
            began = time.perf_counter()
            try:
                made[name] = member.make(model, member, torch.device("cpu"), example, own)
            except BackendUnavailable as error:
                absent[name] = str(error)
                continue
            seconds[name] = time.perf_counter() - began
            bench.tell("latency", len(made), len(bench.config.executors), "executors")
        yield made, seconds, absent
        for executor in made.values():
            executor.close()


def _latency(bench: Bench) -> None:
    """Time all executors on each shape in turns, and compare what they compute."""
    config = bench.config
    scope = "_tiny" if config.timed_model == "tiny" else "_random"
    rows: list[Row] = []
    inputs = {shape: programs.question(*shape, programs.SMALLEST, config.seed) for shape in config.shapes}
    double = export.Answers(programs.bert(config.timed_model, config.seed)).double()
    exact = {shape: programs.eager(double, tensors) for shape, tensors in inputs.items()}
    del double
    peak = max(
        best
        for item in peaks.matmul_peaks(torch.device("cpu"), "fp32", sizes=PEAK_SIZES, seconds=PEAK_S)
        if (best := item.best)
    )
    with _executors(bench, inputs[config.shapes[0]]) as (made, seconds, absent):
        for shape in config.shapes:
            reference = [side.numpy() for side in made[REFERENCE].forward(inputs[shape])]
            calls, by_name = {}, {}
            for name, executor in made.items():
                began = time.perf_counter()
                own = [side.numpy() for side in executor.forward(inputs[shape])]
                first_s = time.perf_counter() - began
                calls[name] = executor.timed(inputs[shape])
                calls[name]()
                by_name[name] = {"ready_s": first_s + (seconds[name] if shape == config.shapes[0] else 0.0)}
                by_name[name] |= dict(zip(("max_abs", "one_minus_cos"), programs.apart(own, reference), strict=True))
                by_name[name]["reference_error"] = programs.apart(reference, exact[shape])[0]
            wall, cpu = _in_turns(calls, config)
            sizes = made[REFERENCE].module.config
            flops = _bert_flops(sizes, *shape)
            label = f"b{shape[0]}_s{shape[1]}{scope}"
            for name in calls:
                metric = measured(f"latency_ms_{name}_{label}", wall[name], "ms", "lower", reason=members()[name].what)
                bench.metrics.append(metric)
                wall_ms = float(np.median(wall[name]))
                if name != REFERENCE:
                    ratios = [own / base for own, base in zip(cpu[name], cpu[REFERENCE], strict=True) if base]
                    bench.metrics.append(
                        measured(
                            f"cpu_over_eager_{name}_{label}",
                            ratios,
                            "",
                            "lower",
                            derived=True,
                            reason="CPU time by round",
                        )
                    )
                rows.append({"executor": name, "batch": shape[0], "length": shape[1], "wall_ms": wall_ms, "ci_low": metric.ci_low,
                             "ci_high": metric.ci_high, "cpu_ms": float(np.median(cpu[name])), **by_name[name],
                             "peak_share": flops / (wall_ms * 1e-3) / peak, "status": "timed", "reason": ""})  # fmt: skip
    rows += [{"executor": name, "status": "SKIPPED", "reason": reason} for name, reason in absent.items()]
    bench.tables["executors"] = rows
    bench.facts["peak_flops"] = peak


def _in_turns(
    calls: dict[str, Callable[[], None]], config: CompiledConfig
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return wall and CPU milliseconds (of all threads) of each call; every round has every executor, each time another one first."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(config.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began, used = time.perf_counter(), time.process_time()
            calls[name]()
            seconds = time.perf_counter() - began
            if config.planted_slowdown:
                time.sleep(seconds * config.planted_slowdown)
                seconds = time.perf_counter() - began
            wall[name].append(seconds * 1e3)
            cpu[name].append((time.process_time() - used) * 1e3)
    return wall, cpu
