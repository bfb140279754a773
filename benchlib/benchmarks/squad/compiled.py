"""The same training with loss and gradients computed by XLA: the joint graph of torch.export as StableHLO text.

Weights are arguments of the program, so the optimizer stays torch's and the loop, batches and schedule are those of the native engine.
Gradients are added over the ranks when the program has returned all of them: nothing of the exchange is hidden behind the
backward pass. Dropout is off. Shapes are static: lengths are padded to a multiple of 64 tokens, a micro-batch with fewer rows
than the others is filled with rows of weight 0, and each shape is compiled once, before the training where it is foreseeable.

Notation: B rows, S tokens.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist

from benchlib.benchmarks.squad.train import Native, Task, buckets
from benchlib.benchmarks.squad.train import train as native
from benchlib.core.events import keep_alive
from benchlib.workloads.features import MicroBatch, padded_length
from benchlib.workloads.stablehlo import export, runtimes
from benchlib.workloads.stablehlo.convert import convert
from benchlib.workloads.training import Trained


def train(task: Task) -> Trained:
    """Fine-tune ``task.loaded.model`` in place. Called by all ranks."""
    # XLA's pool of threads, which PJRT sizes by this variable when the client is first made: a rank's share of the cores.
    os.environ.setdefault("NPROC", str(torch.get_num_threads()))
    return native(task, Xla)


class Xla(Native):
    """Forward and backward pass of a micro-batch as one program."""

    multiple = 64
    unknown = ("forward_s", "backward_s")

    def prepare(self) -> None:
        task, began = self.task, time.perf_counter()
        self._loss = export.AnswerLoss(self.model.eval())  # eval: without dropout
        self._programs: dict[tuple[int, ...], runtimes.Runtime] = {}  # by (B, S)
        with keep_alive(task.rank.events, task.config.startup_timeout_s):
            for inputs in self._foreseen():
                self._program(inputs)
        reached = {item.name for program in self._programs.values() for item in program.manifest.results}
        # Of the others the loss does not depend.
        parameters = [parameter for name, parameter in self._loss.named_parameters() if name in reached]
        self._buckets: list[torch.Tensor] = []
        for group in buckets(parameters, task.config.bucket_cap_mb):
            sizes = [parameter.numel() for parameter in group]
            self._buckets.append(torch.zeros(sum(sizes)))
            for parameter, part in zip(group, self._buckets[-1].split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
        shapes = ", ".join(f"{rows} x {length}" for rows, length in self._programs)
        runtime = next(iter(self._programs.values())).description["runtime"]
        words = f"{runtime}: programs of {shapes} tokens were ready after {time.perf_counter() - began:.1f} s; dropout is off"
        if task.rank.world.main:
            task.rank.events.emit("log", message=words)

    def differentiate(self, batch: MicroBatch, weight: float, last: bool, step: int) -> torch.Tensor:
        """See ``Work``. A rank without work computes nothing."""
        loss = torch.zeros(())
        if weight:
            inputs, gradients = self._filled(batch, weight), dict(self._loss.named_parameters())
            program = self._program(inputs)
            arrays = runtimes.arguments(program.manifest, {**dict(self._loss.named_buffers()), **gradients}, inputs)
            for item, value in zip(program.manifest.results, program.run(program.place(arrays)), strict=True):
                array = torch.from_numpy(np.array(value))
                if item.role == "loss":
                    loss = array
                else:
                    grad = gradients[item.name].grad
                    assert grad is not None
                    grad += array
        if last and dist.get_world_size() > 1:
            records = [[self.timer.clock.stamp(), None, bucket.nbytes] for bucket in self._buckets]
            self.timer.intervals += records
            waiting = [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]
            for record, work in zip(records, waiting, strict=True):
                work.wait()
                record[1] = self.timer.clock.stamp()
        self.timer.mark("backward")
        return loss

    def _foreseen(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield inputs of each shape that this rank's share of the training has."""
        task, parts = self.task, dict[int, np.ndarray]()
        total = math.ceil(task.config.epochs * task.per_epoch)
        for step in range(min(total, task.config.max_steps or total)):
            for part, _, _ in self.parts(step):
                longest = int(self.lengths[part].max())
                parts[padded_length(longest, self.multiple, task.features.max_length)] = part
        for _, part in sorted(parts.items()):
            yield self._filled(task.collate(part, self.multiple), 1.0)

    def _filled(self, batch: MicroBatch, weight: float) -> dict[str, torch.Tensor]:
        """Return the program's inputs: B a multiple of the usual rows, where those beyond the batch's repeat its first and weigh 0."""
        usual = self.task.config.batch_size
        rows = torch.arange(math.ceil(batch.shape[0] / usual) * usual)
        filler = rows >= batch.shape[0]
        rows[filler] = 0
        inputs = {name: tensor[rows] for name, tensor in batch.inputs.items()}
        weights = torch.full((len(rows),), weight).masked_fill(filler, 0.0)
        return {"start": batch.start[rows], "end": batch.end[rows], "weight": weights, **inputs}

    def _program(self, inputs: Mapping[str, torch.Tensor]) -> runtimes.Runtime:
        """Return the program of the inputs' shape; the first time it is converted, checked and compiled."""
        shape = tuple(inputs["input_ids"].shape)
        if shape not in self._programs:
            converted = convert(export.joint(self._loss, inputs), "training")
            self._programs[shape] = runtimes.Xla(converted.text, converted.manifest)
        return self._programs[shape]
