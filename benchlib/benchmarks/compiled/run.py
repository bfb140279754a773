"""The compiled path: DDP's gradients on all ranks, then everything else on rank 0, which has the machine to itself."""

import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
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
from benchlib.core import mlir
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.events import keep_alive
from benchlib.core.machine import usable_cores
from benchlib.runtime.measurement import Rank, Tables
from benchlib.workloads.stablehlo import export, pjrt, runtimes
from benchlib.workloads.stablehlo.convert import Converted, convert

TABLES = ("programs", "gradients", "curve", "runtimes", "targets", "executors", "run")
COMPARED = ("max_abs", "one_minus_cos", "reference_error")
OF_GRADIENTS = dict.fromkeys(COMPARED, "its gradients are compared")
Row = dict[str, Any]


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
        joint = self._gradients(ddp)
        tell("phase", name="train")
        self._train(joint)
        if config.runtimes or config.targets:
            tell("phase", name="runtimes")
            self._side_by_side()
        tell("phase", name="latency")
        self._executors()

    def _converted(
        self, name: str, make: Callable[[], Any], flops: float | None, absent: Mapping[str, str], replicas: int = 1
    ) -> Converted:
        """Export, convert and write a program, and add its row.

        ``flops`` are those of its dots by the formula, ``absent`` says by column why the row has no number.
        """
        began = time.perf_counter()
        program = make()
        exported = time.perf_counter()
        converted = convert(program, name, replicas=replicas)
        row: Row = {"program": name, "export_s": exported - began, "convert_s": time.perf_counter() - exported}
        converted.manifest.write(self.folder / f"{name}.mlir", converted.text)
        inspection = mlir.inspect(converted.text, name=name)
        row |= {"text_bytes": len(converted.text), "arguments": len(converted.manifest.arguments)}
        row |= {"operations": sum(inspection.operations.values()), "dot_flops": inspection.dot_flops}
        row |= {"argument_bytes": inspection.argument_bytes, "temporary_bytes": inspection.temporary_bytes}
        row |= {"formula_flops": flops, "why": dict(absent)} | dict.fromkeys(absent)
        if flops is None:
            row["why"]["formula_flops"] = "no formula for this model"
        self.tables["programs"].append(row)
        return converted

    def _compiled(self, converted: Converted) -> runtimes.Xla:
        runtime = runtimes.Xla(converted.text, converted.manifest)
        self.tables["programs"][-1]["compile_s"] = runtime.compile_s
        return runtime

    def _model(self, name: str) -> None:
        """Convert one model and compare XLA's results with torch's."""
        module, inputs = models.model(name, self.config)
        sizes = (self.config.batch, self.config.length)
        flops = models.bert_flops(module.model, *sizes) if name == "bert" else None
        converted = self._converted(name, lambda: export.forward(module, inputs), flops, {})
        reference, exact = models.eager(module, inputs), models.eager(models.doubled(module), inputs)
        row = models.apart(_computed(self._compiled(converted), converted, inputs), reference)
        self.tables["programs"][-1] |= row | {"reference_error": models.apart(reference, exact)["max_abs"]}

    def _gradients(self, ddp: dict[str, np.ndarray]) -> "_Joint":
        """Compare the joint program's gradients with autograd's, and those averaged over replicas with DDP's."""
        config = self.config
        loss = export.AnswerLoss(models.bert(config.model, config.seed))
        batch, exported = models.labelled(config, 0, loss.model), list[Any]()
        flops = 3 * models.bert_flops(loss.model, config.batch, config.length)

        def make() -> Any:
            exported.append(export.joint(loss, batch))
            return exported[0]

        joint = _Joint(loss, self._compiled(self._converted("joint", make, flops, OF_GRADIENTS)))
        reference, exact = models.gradients(loss, batch), models.gradients(models.doubled(loss), batch)
        row = {"gradients": "XLA against autograd", "replicas": 1, "parameters": len(reference), "unequal": 0}
        row["relative"] = models.relative(joint(batch)[1], reference)
        row["reference_error"] = models.relative(reference, exact)
        self.tables["gradients"].append(row)
        if ddp:
            self._replicated(exported[0], loss, ddp, flops)
        return joint

    def _replicated(self, exported: Any, loss: export.AnswerLoss, ddp: dict[str, np.ndarray], flops: float) -> None:
        """Run the joint program on a simulated device for each rank, and compare its mean gradients with DDP's."""
        replicas, absent = self.config.world_size, OF_GRADIENTS | {"export_s": "it is the graph of the joint program"}
        converted = self._converted("replicas", lambda: exported, flops, absent, replicas)
        program = self._compiled(converted)
        parts = [models.labelled(self.config, number, loss.model) for number in range(replicas)]
        arrays = [runtimes.arguments(converted.manifest, runtimes.state(loss), part) for part in parts]
        placed = program.place(
            [
                np.concatenate(own) if item.role == "input" else own[0]
                for item, *own in zip(converted.manifest.arguments, *arrays, strict=True)
            ]
        )
        outputs, items = program.run_replicas(placed), converted.manifest.results
        first, *others = (_split(items, [value[number] for value in outputs])[1] for number in range(replicas))
        exact = [models.gradients(models.doubled(loss), part) for part in parts]
        mean = {name: sum(part[name] for part in exact) / replicas for name in exact[0]}
        row = {"gradients": f"{replicas} replicas against DDP", "replicas": replicas, "parameters": len(ddp)}
        row |= {"relative": models.relative(first, ddp), "reference_error": models.relative(ddp, mean)}
        row["unequal"] = sum(any(not np.array_equal(first[name], other[name]) for other in others) for name in ddp)
        self.tables["gradients"].append(row)

    def _train(self, joint: "_Joint") -> None:
        """Train with gradients of the compiled program and, from the same weights, with autograd's, both by AdamW."""
        config, twin = self.config, copy.deepcopy(joint.loss)
        ours, theirs = (torch.optim.AdamW(module.parameters(), config.learning_rate) for module in (joint.loss, twin))
        for step in range(config.train_steps):
            batch = models.labelled(config, step, joint.loss.model)
            value, gradients = joint(batch)
            for name, parameter in joint.loss.named_parameters():
                parameter.grad = torch.from_numpy(gradients[name])
            ours.step()
            theirs.zero_grad()
            loss = twin(**batch)
            loss.backward()
            theirs.step()
            self.tables["curve"].append({"step": step + 1, "eager": loss.item(), "xla": value})
            self.rank.progress(step + 1, config.train_steps, "steps")

    def _side_by_side(self) -> None:
        """Compute one file of a small BERT by every runtime, and compile it for hardware that is not here."""
        config, module = self.config, export.Answers(models.bert("small", self.config.seed))
        inputs = models.question(2, 8, models.MIN_VOCABULARY, config.seed)
        absent = dict.fromkeys(("compile_s", *COMPARED), "each runtime is compared")
        flops = models.bert_flops(module.model, 2, 8)
        converted = self._converted("small", lambda: export.forward(module, inputs), flops, absent)
        reference = models.eager(module, inputs)
        for name in config.runtimes:
            row: Row = {"runtime": name}
            self.tables["runtimes"].append(row)
            try:
                runtime = runtimes.load(name, self.folder / "small.mlir")
            except BackendUnavailable as error:
                row |= {"status": "skipped", "reason": str(error)}
                continue
            began = time.perf_counter()
            outputs = _computed(runtime, converted, inputs)
            row |= {"run_s": time.perf_counter() - began, "compile_s": runtime.compile_s}
            row |= {"what": runtime.description["runtime"], **models.apart(outputs, reference)}
        for target in config.targets:
            row = {"target": target}
            self.tables["targets"].append(row)
            try:
                row["module_bytes"] = len(runtimes.iree_compiled(converted.text, target, runtimes.TARGETS[target]))
            except BackendUnavailable as error:
                row |= {"status": "skipped", "reason": str(error)}
            except UserError as error:
                row |= {"status": "failed", "reason": str(error)}

    def _executors(self) -> None:
        """Time all executors on each shape, interleaved, and compare what they compute."""
        config, rows = self.config, self.tables["executors"]
        inputs = {shape: models.question(*shape, models.MIN_VOCABULARY, config.seed) for shape in config.shapes}
        double = models.doubled(export.Answers(models.bert(config.timed_model, config.seed)))
        exact = {shape: models.eager(double, tensors) for shape, tensors in inputs.items()}
        del double
        with tempfile.TemporaryDirectory(prefix="benchlib-compiled-") as folder, contextlib.ExitStack() as closing:
            executors: dict[str, Any] = {}
            ready: dict[str, float] = {}
            for name in config.executors:
                member, own = members()[name], Path(folder) / name
                own.mkdir()
                model = models.bert(config.timed_model, config.seed, member.attention)
                began = time.perf_counter()
                try:
                    executors[name] = member.make(model, member, torch.device("cpu"), inputs[config.shapes[0]], own)
                except BackendUnavailable as error:
                    row = {"executor": name, "status": "skipped", "reason": str(error)}
                    rows += [row | {"batch": batch, "length": length} for batch, length in config.shapes]
                    continue
                ready[name] = time.perf_counter() - began
                closing.callback(executors[name].close)
                self.rank.progress(len(executors), len(config.executors), "executors")
            for shape in config.shapes:
                rows += _of_shape(config, shape, executors, ready, inputs[shape], exact[shape])
                ready = dict.fromkeys(ready, 0.0)  # the first call alone makes those of further shapes ready


@dataclass
class _Joint:
    """The forward and backward program of a BERT, compiled."""

    loss: export.AnswerLoss
    runtime: runtimes.Runtime

    def __call__(self, inputs: Inputs) -> tuple[float, dict[str, np.ndarray]]:
        """Return loss and gradients by parameter, with the weights that the model has now."""
        arrays = runtimes.arguments(self.runtime.manifest, runtimes.state(self.loss), inputs)
        return _split(self.runtime.manifest.results, self.runtime.run(self.runtime.place(arrays)))


def _split(items: Sequence[Any], outputs: Sequence[Any]) -> tuple[float, dict[str, np.ndarray]]:
    values = [(item, np.array(value)) for item, value in zip(items, outputs, strict=True)]
    (loss,) = (float(value) for item, value in values if item.role == "loss")
    return loss, {item.name: value for item, value in values if item.role == "gradient"}


def _computed(runtime: runtimes.Runtime, converted: Converted, inputs: Inputs) -> list[np.ndarray]:
    placed = runtime.place(runtimes.arguments(runtime.manifest, converted.weights, inputs))
    return [np.asarray(value) for value in runtime.run(placed)]


def _of_shape(
    config: CompiledConfig,
    shape: tuple[int, int],
    executors: Mapping[str, Any],
    ready: Mapping[str, float],
    inputs: Inputs,
    exact: list[np.ndarray],
) -> list[Row]:
    """Compare the executors on inputs of one shape and time them; ``ready`` are the seconds that each took so far."""
    reference = [side.numpy() for side in executors[REFERENCE].forward(inputs)]
    of_all = {"batch": shape[0], "length": shape[1], "reference_error": models.apart(reference, exact)["max_abs"]}
    calls, rows = dict[str, Callable[[], None]](), dict[str, Row]()
    for name, executor in executors.items():
        began = time.perf_counter()
        own = [side.numpy() for side in executor.forward(inputs)]
        rows[name] = {"executor": name, "what": members()[name].what, "gates": members()[name].gates, **of_all}
        rows[name] |= {"ready_s": ready[name] + time.perf_counter() - began, **models.apart(own, reference)}
        calls[name] = executor.timed(inputs)
        calls[name]()
    wall, cpu = _interleaved(calls, config)
    for name, row in rows.items():
        row |= {"wall_ms": wall[name], "cpu_ms": cpu[name], "eager_ready_s": rows[REFERENCE]["ready_s"]}
        row["eager_ms"] = median(wall[REFERENCE])
        if name == REFERENCE:
            row["why"] = {"cpu_over_eager": "it is what others are divided by"}
        else:
            row["cpu_over_eager"] = [own / base for own, base in zip(cpu[name], cpu[REFERENCE], strict=True) if base]
    return list(rows.values())


def _interleaved(
    calls: Mapping[str, Callable[[], None]], config: CompiledConfig
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return wall and CPU milliseconds (of all threads) of each call; every round has all, each time another one first."""
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
