"""What every member does with the golden inputs, in a process of its own, and what of it is recorded.

A name is a member of the table, or ``reference`` or ``fp64_reference``, both of the golden folder: these are not timed, and
no fault is injected into them. What this module imports is loaded once by the server that members are forked from.

Notation: B rows, S tokens, T real tokens of the dev windows. Dropout is off throughout: the model stays in eval mode.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers.models.bert.modeling_bert

from benchlib.benchmarks.parity import golden, recording, switches, weights
from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.benchmarks.parity.inputs import Case, Inputs, padded, repeated
from benchlib.config.schema import load_config
from benchlib.core.errors import BackendUnavailable
from benchlib.core.machine import cpu_model, versions
from benchlib.runtime import devices
from benchlib.workloads.answer_loss import answer_losses
from benchlib.workloads.executors import MEMBERS, Member
from benchlib.workloads.executors.eager import Executor, autocast, device_name
from benchlib.workloads.model_files import attention_note
from benchlib.workloads.numerics import BATCH, CURVE, GRADIENTS, LAYERS, LOSS, PADDING, REPEATS, max_abs
from benchlib.workloads.stablehlo.export import pair

Arrays = dict[str, np.ndarray]
LATENCY, LATENCY_LENGTH = "latency_ms", 128  # tokens of the timed input
WARMUP = 10  # untimed forward passes before the timed ones
REPETITIONS = 5  # of one input, which must be bit-identical
UNMASKED = "the kernel takes no attention mask, which padded inputs need"
_LOADED = transformers.models.bert.modeling_bert  # the embedded model's, which transformers loads when it is used
_VERSIONS = ("benchlib", "python", "torch", "transformers", "numpy", "safetensors")


def task(config: ParityConfig, run_dir: Path, name: str) -> tuple[Member, str, Path]:
    """Return what ``name`` stands for in a run: which member on which backend, and where its recording goes."""
    place = golden.place(run_dir, config.golden) / name
    if name == golden.REFERENCE:
        return MEMBERS["eager"], config.reference_backend, place
    if name == golden.FP64:
        # Not by way of eager: some models compute their softmax in fp32 there, whatever the weights are.
        return MEMBERS["fp64"], "cpu", place
    return MEMBERS[name], config.backend, run_dir / "members" / name


def record(run_dir: Path, name: str, work: Path, tell: Callable[[Any], None]) -> None:
    """Compute what ``name`` stands for, in the empty folder ``work``, and leave its recording, whole or not at all.

    Raises ``BackendUnavailable`` where this way to compute is not available.
    """
    config = load_config(run_dir)
    assert isinstance(config, ParityConfig)
    (member, backend, to), candidate = task(config, run_dir, name), name in MEMBERS
    if member.mode == "exact":
        # cuBLAS is deterministic only with a workspace of its own for each stream, and reads this when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    place = golden.place(run_dir, config.golden)
    tell({"done": 0, "total": 1, "unit": "loading"})
    make = member.make  # first: a missing package is reported before the model is loaded
    devices.require(backend)
    where = devices.device(backend)
    inputs = Inputs(place)
    model, model_sha256 = weights.loaded(place, member.attention)
    if candidate and (note := attention_note(model, member.attention)):
        if member.kernel and (member.name == member.kernel or member.name.startswith("sdpa_")):
            raise BackendUnavailable(note)  # the kernel is what it is about
        member = replace(member, attention="eager")  # which its description then says
    weights.inject(model, config.planted_layer if candidate else -1)
    switched = switches.hold(member, where)
    executor = make(model, member, where, inputs.tensors("layer"), work)
    results = Exercise(config, member, model, executor, inputs, where, tell).run(latency=candidate)
    device, software = device_name(where), versions()
    meta: dict[str, Any] = {
        "member": name,
        "backend": backend,
        "device": device,
        "precision": member.precision,
        "model_sha256": model_sha256,
        "inputs_sha256": inputs.sha256,
        # What distinguishes two recordings: versions, processor, threads.
        "environment": {
            **{name: software[name] for name in software if name in _VERSIONS},
            "platform": platform.platform(terse=True),
            "processor": cpu_model(),
            "device": device,
            "threads": torch.get_num_threads(),
            "thread_waiting": os.environ.get("OMP_WAIT_POLICY", ""),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "executor": executor.description | {"switches": switched},
        "absent": results.absent,
        **results.facts,
    }
    written = recording.write(work / "recording", meta, results.outputs, results.gradients, results.layers)
    to.parent.mkdir(parents=True, exist_ok=True)
    written.folder.rename(to)


@dataclass
class Exercise:
    """All that one member does, in order; the loss curve comes last, since it changes the weights.

    ``model`` owns the parameters, ``executor`` computes with them on ``where``. What is recorded fills up: ``facts`` go into
    recording.json, arrays are float32, or float64 of a member in fp64, ``absent`` says by quantity why there is no number.
    """

    config: ParityConfig
    member: Member
    model: torch.nn.Module
    executor: Executor
    inputs: Inputs
    where: torch.device
    tell: Callable[[Any], None]
    facts: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    outputs: Arrays = field(default_factory=dict)
    gradients: Arrays = field(default_factory=dict)
    layers: Arrays = field(default_factory=dict)

    def run(self, latency: bool = True) -> "Exercise":
        """Do everything; without ``latency`` no time is taken."""
        graph = self.executor.module is None
        if graph:
            self.absent |= dict.fromkeys((LOSS, GRADIENTS, CURVE), "a compiled graph without gradients")
        timed = latency and self.config.latency_runs > 0
        if not timed:
            self.absent[LATENCY] = "latency_runs = 0" if latency else "not timed"
        if not self.member.masks:
            self.absent |= dict.fromkeys((LOSS, GRADIENTS, CURVE, BATCH, PADDING, LAYERS), UNMASKED)
        whole = self.member.masks
        parts = [self._outputs, self._repeats] + [self._invariance, self._layers] * whole
        parts += (
            [self._gradients] * (whole and not graph) + [self._latency] * timed + [self._curve] * (whole and not graph)
        )
        for number, part in enumerate(parts):
            self.tell({"done": number, "total": len(parts), "unit": part.__name__.removeprefix("_")})
            part()
        return self

    def _pair(self, tensors: dict[str, torch.Tensor]) -> np.ndarray:
        """Return start and end logits, (2, B, S)."""
        return np.stack([side.numpy() for side in self.executor.forward(tensors)])

    def _outputs(self) -> None:
        dev: list[np.ndarray] = []  # (2, T) each
        cases = self.inputs.of("data", "edge", "layer", "dev")
        # By the names of what is compared: the dev set is one.
        names = {case: "dev" if case.kind == "dev" else case.id for case in cases}
        left = {names[case] for case in cases if not self._takes(case)}
        self.facts |= {"left_out": sorted(left)} if left else {}
        for case in (case for case in cases if names[case] not in left):
            tensors = self.inputs.tensors(case.id)
            logits = self._pair(tensors)
            if case.kind == "dev":
                dev.append(logits[:, tensors["attention_mask"].numpy().astype(bool)])
            else:
                self.outputs |= {f"{case.id}/start": logits[0], f"{case.id}/end": logits[1]}
        if dev:
            self.outputs["dev/start"], self.outputs["dev/end"] = np.concatenate(dev, axis=1)

    def _takes(self, case: Case) -> bool:
        return self.member.masks or bool(self.inputs.tensors(case.id)["attention_mask"].all())

    def _middle(self) -> Case:
        """Return the data case with the most rows at a middle length, of those that the member takes."""
        data = [case for case in self.inputs.of("data") if self._takes(case)]  # the smallest first
        return [case for case in data if case.length == data[len(data) // 2].length][-1]

    def _repeats(self) -> None:
        if not any(map(self._takes, self.inputs.of("data"))):
            self.absent[REPEATS] = UNMASKED
            return
        tensors = self.inputs.tensors(self._middle().id)
        first = self._pair(tensors)
        others = [self._pair(tensors) for _ in range(REPETITIONS - 1)]
        apart = float(np.max([max_abs(first, other) for other in others]))  # of NaN: NaN
        if apart == 0.0 and any(first.tobytes() != other.tobytes() for other in others):
            apart = float(np.nextafter(0.0, 1.0))  # in bits, if only in the sign of zero
        self.facts["repeats_max_abs"] = apart

    def _invariance(self) -> None:
        """Compare the rows of one case with themselves alone, and padded to the longest length."""
        case = self._middle()
        tensors = self.inputs.tensors(case.id)
        whole = self._pair(tensors)
        real = tensors["attention_mask"].numpy().astype(bool)
        if case.batch > 1:
            rows = ({name: tensor[[row]] for name, tensor in tensors.items()} for row in range(case.batch))
            alone = np.concatenate([self._pair(row) for row in rows], axis=1)
            self.facts["batch_max_abs"] = max_abs(whole[:, real], alone[:, real])
        else:
            self.absent[BATCH] = "batch_sizes has no batch of several rows"
        longest = self.inputs.of("data")[-1].length
        if longest > case.length:
            wide = self._pair(padded(tensors, longest, self.inputs.pad_id))[:, :, : case.length]
            self.facts["padding_max_abs"] = max_abs(whole[:, real], wide[:, real])
        else:
            self.absent[PADDING] = "lengths has no longer one to pad to"

    def _layers(self) -> None:
        states = self.executor.hidden(self.inputs.tensors("layer"))
        self.layers = {f"{number:03d}": state.numpy() for number, state in enumerate(states)}
        if not states:
            self.absent[LAYERS] = "a compiled graph does not show its layers"

    def _differentiated(self, case: str) -> float:
        """Return the mean loss of a training case, whose gradients are then in the parameters."""
        assert self.executor.module is not None
        self.model.zero_grad()
        placed = {name: tensor.to(self.where) for name, tensor in self.inputs.tensors(case).items()}
        with autocast(self.member, self.where):
            start, end = pair(self.executor.module(**placed))
        labels = (label.to(self.where) for label in self.inputs.labels(case))
        loss = answer_losses(start, end, placed["attention_mask"], *labels).mean()
        loss.backward()
        return loss.item()

    def _gradients(self) -> None:
        self.facts["loss"] = self._differentiated(self.inputs.of("train")[0].id)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:  # a parameter that the logits do not depend on has none
                self.gradients[name] = parameter.grad.detach().cpu().numpy().copy()
        self.model.zero_grad()

    def _curve(self) -> None:
        if not self.config.train_steps:
            self.absent[CURVE] = "train_steps = 0"
            return
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        losses = self.facts["curve"] = []
        cases = self.inputs.of("train")[: self.config.train_steps]
        for number, case in enumerate(cases):
            self.tell({"done": number, "total": len(cases), "unit": "training steps"})
            losses.append(self._differentiated(case.id))
            optimizer.step()
            devices.synchronize(self.where)  # on a lazy device this runs the step

    def _latency(self) -> None:
        """Time single forward passes of one full input of one row, the device waited for, in milliseconds."""
        full = repeated(self.inputs.tensors(self.inputs.of("data")[-1].id), LATENCY_LENGTH)
        once, times = self.executor.timed(full, self.config.planted_slowdown), list[float]()
        for _ in range(WARMUP + self.config.latency_runs):
            begin = time.perf_counter()
            once()
            times.append((time.perf_counter() - begin) * 1e3)
        self.facts[LATENCY] = times[WARMUP:]
