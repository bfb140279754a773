"""What every member does with the golden inputs, and what of it is recorded.

Letters: B rows, S tokens, T real tokens of the dev windows. Dropout is off throughout: the model stays in eval mode.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchlib.benchmarks.parity import layers
from benchlib.benchmarks.parity.config import Member, ParityConfig
from benchlib.benchmarks.parity.executors import Executor, autocast, logits
from benchlib.benchmarks.parity.inputs import Case, Inputs, padded, repeated
from benchlib.benchmarks.parity.recording import layer_digests
from benchlib.runtime import devices
from benchlib.runtime.timing import hold

Tell = Callable[[int, int, str], None]
Arrays = dict[str, np.ndarray]

NO_GRADIENTS = "a compiled graph without gradients"
NO_HOOKS = "a compiled graph has no modules to take outputs from"


@dataclass
class Exercised:
    """What is recorded: ``facts`` go into recording.json, arrays are float32, or float64 of a member in fp64."""

    facts: dict[str, Any] = field(default_factory=dict)
    outputs: Arrays = field(default_factory=dict)
    gradients: Arrays = field(default_factory=dict)
    layers: Arrays = field(default_factory=dict)


class Exercise:
    """All that one member does, in order; the loss curve comes last, since it changes the weights.

    ``tell`` gets (steps done, steps in all, what comes).
    """

    def __init__(
        self,
        config: ParityConfig,
        member: Member,
        model: torch.nn.Module,
        executor: Executor,
        inputs: Inputs,
        where: torch.device,
        tell: Tell,
    ) -> None:
        """Nothing runs yet. ``model`` owns the parameters, ``executor`` computes with them on ``where``."""
        self.config, self.member, self.model, self.executor = config, member, model, executor
        self.inputs, self.where, self._tell = inputs, where, tell
        self.results = Exercised()
        self.absent: dict[str, str] = {}
        self._at = 0, 1

    def run(self, latency: bool = True) -> Exercised:
        """Do everything; without ``latency`` no time is taken."""
        parts: list[tuple[str, Callable[[], Any]]] = [
            ("outputs", self._outputs),
            ("repeats", self._repeats),
            ("invariance", self._invariance),
            ("layers", self._layers),
            ("gradients", self._gradients),
        ]
        if latency and self.config.latency_runs:
            parts.append(("latency", self._latency))
        parts.append(("curve", self._curve))
        facts = self.results.facts
        for number, (name, part) in enumerate(parts):
            self._at = number, len(parts)
            self._tell(*self._at, name)
            part()
        self._tell(len(parts), len(parts), "done")
        if not latency:
            self.absent["latency"] = "not timed"
        elif not self.config.latency_runs:
            self.absent["latency"] = "latency_runs = 0"
        for name in ("repeats", "invariance", "loss", "curve", "latency", "layers"):
            facts.setdefault(name, None)
        facts["absent"] = self.absent
        return self.results

    def _pair(self, tensors: dict[str, torch.Tensor]) -> np.ndarray:
        """Return start and end logits, (2, B, S)."""
        return np.stack([side.numpy() for side in self.executor.forward(tensors)])

    def _outputs(self) -> None:
        dev: list[np.ndarray] = []  # (2, T) each
        for case in self.inputs.of("data", "edge", "layer", "dev"):
            tensors = self.inputs.tensors(case.id)
            pair = self._pair(tensors)
            if case.kind == "dev":
                dev.append(pair[:, tensors["attention_mask"].numpy().astype(bool)])
            else:
                self.results.outputs |= {f"{case.id}/start": pair[0], f"{case.id}/end": pair[1]}
        if dev:
            start, end = np.concatenate(dev, axis=1)
            self.results.outputs |= {"dev/start": start, "dev/end": end}

    def _middle(self) -> Case:
        """Return the data case with the most rows at a middle length."""
        data = self.inputs.of("data")
        lengths = sorted({case.length for case in data})
        middle = lengths[len(lengths) // 2]
        return max((case for case in data if case.length == middle), key=lambda case: case.batch)

    def _repeats(self) -> None:
        tensors = self.inputs.tensors(self._middle().id)
        first = self._pair(tensors)
        others = [self._pair(tensors) for _ in range(self.config.repeats - 1)]
        same = all(first.tobytes() == other.tobytes() for other in others)
        self.results.facts["repeats"] = {
            "runs": self.config.repeats,
            "identical": same,
            "max_abs": float(np.max([_max_abs(first, other) for other in others])),  # of NaN: NaN
        }

    def _invariance(self) -> None:
        """Compare the rows of one case with themselves alone, and padded to the longest length."""
        case = self._middle()
        tensors = self.inputs.tensors(case.id)
        whole = self._pair(tensors)
        real = tensors["attention_mask"].numpy().astype(bool)
        differences: dict[str, float | None] = {"batch_max_abs": None, "padding_max_abs": None}
        if case.batch > 1:
            alone = [
                self._pair({name: tensor[row : row + 1] for name, tensor in tensors.items()})
                for row in range(case.batch)
            ]
            differences["batch_max_abs"] = _max_abs(whole[:, real], np.concatenate(alone, axis=1)[:, real])
        else:
            self.absent["batch invariance"] = "batch_sizes has no batch of several rows"
        longest = max(item.length for item in self.inputs.of("data"))
        if longest > case.length:
            wide = self._pair(padded(tensors, longest, self.inputs.pad_id))
            differences["padding_max_abs"] = _max_abs(whole[:, real], wide[:, :, : case.length][:, real])
        else:
            self.absent["padding invariance"] = "lengths has no longer one to pad to"
        self.results.facts["invariance"] = differences

    def _layers(self) -> None:
        if not self.executor.hooks:
            self.absent["layers"] = NO_HOOKS
            return
        with layers.kept(self.model) as kept:
            self._pair(self.inputs.tensors("layer"))
        self.results.layers = kept.arrays
        self.results.facts["layers"] = layer_digests(kept.arrays, kept.kinds)

    def _loss(self, case: str) -> torch.Tensor:
        """Return the loss of a training case with its graph: the mean of the cross entropies of start and end.

        No answer begins or ends in padding: its logits are out of the softmax, as they are out of every comparison.
        """
        assert self.executor.module is not None
        placed = {name: tensor.to(self.where) for name, tensor in self.inputs.tensors(case).items()}
        with autocast(self.member, self.where):
            start, end = logits(self.executor.module(**placed))
        if self.member.precision != "fp64":
            start, end = start.float(), end.float()
        padding = placed["attention_mask"] == 0
        start, end = (side.masked_fill(padding, torch.finfo(side.dtype).min) for side in (start, end))
        first, last = (label.to(self.where) for label in self.inputs.labels(case))
        entropy = torch.nn.functional.cross_entropy
        return (entropy(start, first) + entropy(end, last)) / 2

    def _gradients(self) -> None:
        if self.executor.module is None:
            self.absent |= {"loss": NO_GRADIENTS, "gradients": NO_GRADIENTS}
            return
        self.model.zero_grad()
        loss = self._loss(self.inputs.of("train")[0].id)
        loss.backward()
        devices.synchronize(self.where)
        self.results.facts["loss"] = loss.item()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:  # a parameter that the logits do not depend on has none
                self.results.gradients[name] = parameter.grad.detach().cpu().numpy().copy()
        self.model.zero_grad()

    def _curve(self) -> None:
        if self.executor.module is None:
            self.absent["loss curve"] = NO_GRADIENTS
            return
        if not self.config.train_steps:
            self.absent["loss curve"] = "train_steps = 0"
            return
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        losses = []
        cases = self.inputs.of("train")[: self.config.train_steps]
        for number, case in enumerate(cases):
            self._tell(*self._at, f"curve, step {number + 1} of {len(cases)}")
            optimizer.zero_grad()
            loss = self._loss(case.id)
            loss.backward()
            optimizer.step()
            devices.synchronize(self.where)  # on a lazy device this runs the step
            losses.append(loss.item())
        self.results.facts["curve"] = losses

    def _latency(self) -> None:
        """Time single forward passes of one full input of one row, the device waited for."""
        case = max(self.inputs.of("data"), key=lambda item: (item.length, item.batch))
        tensors = repeated(self.inputs.tensors(case.id), self.config.latency_length)
        once = self.executor.timed(tensors)
        for _ in range(self.config.warmup):
            once()
        samples = [self._timed(once) for _ in range(self.config.latency_runs)]
        self.results.facts["latency"] = {
            "length": self.config.latency_length,
            "batch": 1,
            "samples_ms": samples,
            "warmup": self.config.warmup,
        }

    def _timed(self, once: Callable[[], None]) -> float:
        begin = time.perf_counter()
        once()
        if self.config.planted_slowdown:
            hold((time.perf_counter() - begin) * self.config.planted_slowdown)
        return (time.perf_counter() - begin) * 1e3


def _max_abs(item: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference; NaN where one of them has a NaN."""
    return float(np.max(np.abs(item.astype(np.float64) - other.astype(np.float64)), initial=0.0))
