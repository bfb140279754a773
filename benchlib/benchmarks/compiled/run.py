"""The compiled path: DDP's gradients on all ranks, then everything else on rank 0, which has the machine to itself."""

import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.compiled import models
from benchlib.benchmarks.compiled.config import REFERENCE, CompiledConfig, members
from benchlib.benchmarks.compiled.models import Inputs
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.events import keep_alive
from benchlib.core.machine import usable_cores
from benchlib.runtime.measurement import Rank, Tables
from benchlib.workloads.stablehlo import export, mlir, pjrt, runtimes
from benchlib.workloads.stablehlo.convert import convert
from benchlib.workloads.stablehlo.inspection import inspect
from benchlib.workloads.stablehlo.manifest import Item

TABLES = ("programs", "gradients", "curve", "runtimes", "targets", "executors", "run")
COMPARED = ("max_abs", "one_minus_cos", "reference_error")
OF_GRADIENTS = dict.fromkeys(COMPARED, "its gradients are compared")
Row = dict[str, Any]
Gradients = Mapping[str, np.ndarray]


def measure(rank: Rank) -> Tables:
    """Convert, compute, compare and time; leaves ``programs/``. Raises ``BackendUnavailable`` where a package is missing."""
    config, several = rank.config, rank.world.size > 1
    if config.backend != "cpu":
        raise BackendUnavailable(
            f"compiled simulates its replicas on a CPU and computes there: use backend cpu; for XLA on {config.backend} "
            f"run `benchlib run parity --backend {config.backend} --set members=xla`"
        )
    mlir.jax()  # what is missing is missing on all ranks
    ddp: dict[str, np.ndarray] = {}
    if several:
        loss = export.AnswerLoss(models.bert(config.model, config.seed))
        batch = models.labelled(config, rank.world.rank, loss.model)
        ddp = models.gradients(loss, batch, DistributedDataParallel(loss))
    # A barrier that waits for as long as rank 0 takes, which is more than a collective's time-out.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * config.budget_s)) if several else None
    path = _Path(rank, {name: [] for name in TABLES})
    with keep_alive(rank.events, config.budget_s):
        if rank.world.main:
            path.run(ddp)
        if group:
            dist.barrier(group)
    return path.tables


@dataclass
class _Path:
    """What rank 0 does, and the rows that it has so far."""

    rank: Rank
    tables: Tables

    @property
    def config(self) -> CompiledConfig:
        return self.rank.config  # type: ignore[no-any-return]

    @property
    def folder(self) -> Path:
        return self.rank.run_dir / "programs"

    def run(self, ddp: dict[str, np.ndarray]) -> None:
        """Do everything. ``ddp`` are the gradients of all ranks, {} for one."""
        config, tell = self.config, self.rank.events.emit
        torch.set_num_threads(config.threads or usable_cores())
        pjrt.simulated(config.world_size)
        self.folder.mkdir(exist_ok=True)
        scope = "tiny" if config.timed_model == "tiny" else "random"
        self.tables["run"].append({"stand_in": scope, "jax": mlir.jax().__version__})
        tell("phase", name="convert")
        for name in config.models:
            self._model(name)
        tell("phase", name="gradients")
        self._gradients(ddp)
        if config.runtimes or config.targets:
            tell("phase", name="runtimes")
            self._side_by_side()
        if config.gelu == "custom_call":
            tell("phase", name="runtimes")
            self._custom_calls()
        tell("phase", name="latency")
        self._executors()

    def _program(
        self, name: str, graph: Any, export_s: float, flops: float | None, why: dict[str, str], replicas: int = 1
    ) -> runtimes.Xla:
        """Convert, write, count and compile a graph, and add its row.

        ``flops`` are those of its dots by the formula, ``why`` says by column why the row has no number.
        """
        converted, convert_s = _timed(lambda: convert(graph, name, replicas=replicas))
        converted.manifest.write(self.folder / f"{name}.mlir", converted.text)
        inspected = inspect(converted.text, name)
        runtime = runtimes.Xla(converted.text, converted.manifest)
        row: Row = {"program": name, "export_s": export_s, "convert_s": convert_s, "compile_s": runtime.compile_s}
        row |= {"text_bytes": len(converted.text), "arguments": len(converted.manifest.arguments)}
        row |= {"operations": sum(inspected.operations.values()), "dot_flops": inspected.dot_flops}
        row |= {"argument_bytes": inspected.argument_bytes, "temporary_bytes": inspected.temporary_bytes}
        row |= {"formula_flops": flops, **dict.fromkeys(why)}
        no_formula = {"formula_flops": "no formula for this model"} if flops is None else {}
        self.tables["programs"].append(row | {"why": no_formula | why})
        return runtime

    def _model(self, name: str) -> None:
        """Convert one model and compare XLA's results with torch's."""
        module, inputs = models.model(name, self.config)
        flops = models.bert_flops(module.model, self.config.batch, self.config.length) if name == "bert" else None
        program = self._program(name, *_timed(lambda: export.forward(module, inputs)), flops, {})
        reference, exact = models.eager(module, inputs), models.eager(models.doubled(module), inputs)
        row = models.apart(_arrays(program, module, inputs), reference)
        self.tables["programs"][-1] |= row | {"reference_error": models.apart(reference, exact)["max_abs"]}

    def _custom_calls(self) -> None:
        """Convert BERT with each GELU as a custom_call, which a compiler may have or not, and try every runtime."""
        module, inputs = models.model("bert", self.config)
        converted = convert(export.forward(module, inputs, whole_gelu=True), "bert_gelu")
        path = self.folder / "bert_gelu.mlir"
        converted.manifest.write(path, converted.text)
        reference = models.eager(module, inputs)
        for name in runtimes.RUNTIMES:
            row: Row = {"runtime": f"{name}, GELU as custom_call"}
            try:
                row |= _computed(name, path, module, inputs, reference)
            except (BackendUnavailable, UserError) as error:
                row |= {"status": "skipped", "reason": str(error)}
            self.tables["runtimes"].append(row)

    def _gradients(self, ddp: dict[str, np.ndarray]) -> None:
        """Compare the joint program's gradients with autograd's, those of its replicas with DDP's, and train by it."""
        config = self.config
        loss = export.AnswerLoss(models.bert(config.model, config.seed))
        parts = [models.labelled(config, number, loss.model) for number in range(config.world_size)]
        exact = [models.gradients(models.doubled(loss), part) for part in parts]
        flops = 3 * models.bert_flops(loss.model, config.batch, config.length)
        graph, export_s = _timed(lambda: export.joint(loss, parts[0]))
        joint = self._program("joint", graph, export_s, flops, OF_GRADIENTS)
        _, own = _split(runtimes.computed(joint, runtimes.state(loss), parts[0]))
        self._add("XLA against autograd", [own], models.gradients(loss, parts[0]), exact[:1])
        if ddp:
            why = OF_GRADIENTS | {"export_s": "it is the graph of the joint program"}
            program = self._program("replicas", graph, 0.0, flops, why, config.world_size)
            arrays = [runtimes.arguments(program.manifest, runtimes.state(loss), part) for part in parts]
            columns = zip(program.manifest.arguments, *arrays, strict=True)
            placed = [np.concatenate(of) if item.role == "input" else of[0] for item, *of in columns]
            outputs = program.run_replicas(program.place(placed))
            pairs = list(zip(program.manifest.results, outputs, strict=True))
            each = range(len(parts))
            replicas = [_split([(item, np.array(value[number])) for item, value in pairs])[1] for number in each]
            self._add(f"{len(parts)} replicas against DDP", replicas, ddp, exact)
        self.rank.events.emit("phase", name="train")
        self._train(joint, loss)

    def _add(self, name: str, replicas: Sequence[Gradients], reference: Gradients, exact: Sequence[Gradients]) -> None:
        """Add the row of gradients that each replica has, beside torch's own and the double precision of each part."""
        first, *others = replicas
        mean = {name: sum(part[name] for part in exact) / len(exact) for name in exact[0]}
        row: Row = {"gradients": name, "replicas": len(replicas), "parameters": len(reference)}
        row["unequal"] = sum(any(not np.array_equal(first[key], other[key]) for other in others) for key in reference)
        row["relative"] = models.relative(first, reference)
        self.tables["gradients"].append(row | {"reference_error": models.relative(reference, mean)})

    def _train(self, joint: runtimes.Xla, loss: export.AnswerLoss) -> None:
        """Train with gradients of the compiled program and, from the same weights, with autograd's, both by AdamW."""
        config, twin = self.config, copy.deepcopy(loss)
        ours, theirs = (torch.optim.AdamW(module.parameters(), config.learning_rate) for module in (loss, twin))
        for step in range(config.train_steps):
            batch = models.labelled(config, step, loss.model)
            value, gradients = _split(runtimes.computed(joint, runtimes.state(loss), batch))
            for name, parameter in loss.named_parameters():
                parameter.grad = torch.from_numpy(gradients[name])
            ours.step()
            theirs.zero_grad()
            other = twin(**batch)
            other.backward()
            theirs.step()
            self.tables["curve"].append({"step": step + 1, "eager": other.item(), "xla": value})
            self.rank.progress(step + 1, config.train_steps, "steps")

    def _side_by_side(self) -> None:
        """Compute one file of a small BERT by every runtime, and compile it for hardware that is not here."""
        config, module = self.config, export.Answers(models.bert("small", self.config.seed))
        inputs, path = models.question(2, 8, models.MIN_VOCABULARY, config.seed), self.folder / "small.mlir"
        why = dict.fromkeys(COMPARED, "each runtime is compared")
        graph, export_s = _timed(lambda: export.forward(module, inputs))
        self._program("small", graph, export_s, models.bert_flops(module.model, 2, 8), why)
        reference = models.eager(module, inputs)

        def compiled(target: str) -> Row:
            try:
                module = runtimes.iree_compiled(path.read_text("utf-8"), target, runtimes.TARGETS[target])
            except UserError as error:
                return {"status": "failed", "reason": str(error)}
            return {"module_bytes": len(module)}

        load = partial(_computed, path=path, module=module, inputs=inputs, reference=reference)
        self.tables["runtimes"] += [{"runtime": name} | _available(partial(load, name)) for name in config.runtimes]
        self.tables["targets"] += [{"target": name} | _available(partial(compiled, name)) for name in config.targets]

    def _executors(self) -> None:
        """Time all executors on each shape, interleaved, and compare what they compute."""
        config, rows = self.config, self.tables["executors"]
        inputs = {shape: models.question(*shape, models.MIN_VOCABULARY, config.seed) for shape in config.shapes}
        double = models.doubled(export.Answers(models.bert(config.timed_model, config.seed)))
        exact = {shape: models.eager(double, tensors) for shape, tensors in inputs.items()}
        del double
        with tempfile.TemporaryDirectory(prefix="benchlib-compiled-") as folder:
            executors: dict[str, Any] = {}
            ready: dict[str, float] = {}
            for name in config.executors:
                member, own = members()[name], Path(folder) / name
                own.mkdir()
                model = models.bert(config.timed_model, config.seed, member.attention)
                make = partial(member.make, model, member, torch.device("cpu"), inputs[config.shapes[0]], own)
                try:
                    executors[name], ready[name] = _timed(make)
                except BackendUnavailable as error:
                    row = {"executor": name, "status": "skipped", "reason": str(error)}
                    rows += [row | {"batch": batch, "length": length} for batch, length in config.shapes]
                    continue
                self.rank.progress(len(executors), len(config.executors), "executors")
            for shape in config.shapes:
                rows += _of_shape(config, executors, ready, inputs[shape], exact[shape])
                ready = dict.fromkeys(ready, 0.0)  # the first call alone makes those of further shapes ready


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what ``work`` returns, and its seconds."""
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def _available(work: Callable[[], Row]) -> Row:
    try:
        return work()
    except BackendUnavailable as error:
        return {"status": "skipped", "reason": str(error)}


def _computed(name: str, path: Path, module: torch.nn.Module, inputs: Inputs, reference: list[np.ndarray]) -> Row:
    """Return the row of a runtime that computes a file; raises as ``runtimes.load``."""
    runtime = runtimes.load(name, path)
    outputs, run_s = _timed(lambda: _arrays(runtime, module, inputs))
    row = {"what": runtime.description["runtime"], "compile_s": runtime.compile_s, "run_s": run_s}
    return row | models.apart(outputs, reference)


def _arrays(runtime: runtimes.Runtime, module: torch.nn.Module, inputs: Inputs) -> list[np.ndarray]:
    return [value for _, value in runtimes.computed(runtime, runtimes.state(module), inputs)]


def _split(results: Sequence[tuple[Item, np.ndarray]]) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss, and the gradients by parameter, of what a joint program gave."""
    (loss,) = (float(value) for item, value in results if item.role == "loss")
    return loss, {item.name: value for item, value in results if item.role == "gradient"}


def _of_shape(
    config: CompiledConfig,
    executors: Mapping[str, Any],
    ready: Mapping[str, float],
    inputs: Inputs,
    exact: list[np.ndarray],
) -> list[Row]:
    """Compare the executors on inputs of one shape and time them; ``ready`` are the seconds that each took so far.

    Every round has all executors, each time another one first; CPU time is that of all threads.
    """
    reference = [side.numpy() for side in executors[REFERENCE].forward(inputs)]
    batch, length = inputs["input_ids"].shape
    of_all = {"batch": batch, "length": length, "reference_error": models.apart(reference, exact)["max_abs"]}
    calls, rows = dict[str, Callable[[], None]](), dict[str, Row]()
    for name, executor in executors.items():
        sides, first_s = _timed(partial(executor.forward, inputs))
        rows[name] = {"executor": name, "what": members()[name].what, "gates": members()[name].gates, **of_all}
        rows[name] |= {"ready_s": ready[name] + first_s, "wall_ms": [], "cpu_ms": []}
        rows[name] |= models.apart([side.numpy() for side in sides], reference)
        calls[name] = executor.timed(inputs, config.planted_slowdown)
        calls[name]()
    names = list(calls)
    for number in range(config.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began, used = time.perf_counter(), time.process_time()
            calls[name]()
            rows[name]["wall_ms"].append((time.perf_counter() - began) * 1e3)
            rows[name]["cpu_ms"].append((time.process_time() - used) * 1e3)
    eager = rows[REFERENCE]
    for row in rows.values():
        row |= {"eager_ms": median(eager["wall_ms"]), "eager_ready_s": eager["ready_s"]}
        row["cpu_over_eager"] = [own / base for own, base in zip(row["cpu_ms"], eager["cpu_ms"], strict=True) if base]
    eager |= {"cpu_over_eager": None, "why": {"cpu_over_eager": "it is what others are divided by"}}
    return list(rows.values())
