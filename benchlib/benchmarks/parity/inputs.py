"""The inputs that all members compute, made once from data, and the score of the dev set.

Notation: B rows, S tokens, T real tokens of all windows of the dev set. Kinds of cases:

    data    questions with contexts, each with its own length, padded to S
    edge    all padding but one token; the longest position; a fully masked row
    layer   the batch whose activations are kept
    train   batches with labels, of loss, gradients and the loss curve
    dev     windows of the dev questions
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchlib.benchmarks.parity import weights
from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.benchmarks.parity.golden import DEV, INPUTS
from benchlib.benchmarks.parity.weights import sha256
from benchlib.core.errors import UserError
from benchlib.core.files import atomic_path, read_json, write_json
from benchlib.runtime import checkpoint
from benchlib.workloads import answers, encoders, features, minisquad
from benchlib.workloads.features import collate
from benchlib.workloads.squad_data import Example, load_hub, read_squad, take

MAX_EDGE = 2048  # tokens of the edge case, where a model has more positions: attention grows with the square
DEFAULT_EDGE = 512  # where a model's config has no limit
DEV_LENGTH, DEV_BATCH = 384, 8
LAYER_BATCH = 4
Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """One input: ``batch`` rows padded to ``length`` tokens."""

    id: str
    kind: str
    batch: int
    length: int


class Inputs:
    """The inputs of a golden folder. ``cases`` are in the order in which they are computed."""

    def __init__(self, golden: Path) -> None:
        with safe_open(golden / INPUTS, framework="pt") as handle:
            about = json.loads(handle.metadata()["benchlib"])
        self._all: Tensors = load_file(golden / INPUTS)
        self.cases = [Case(**case) for case in about["cases"]]
        self.pad_id = int(about["pad_id"])
        self.sha256 = sha256(self._all)  # of names, types, shapes and bytes of all inputs and labels

    def of(self, *kinds: str) -> list[Case]:
        """Return the cases of some kinds, in order."""
        return [case for case in self.cases if case.kind in kinds]

    def tensors(self, case: str) -> Tensors:
        """Return the model's keyword arguments for a case, int64 (B, S) each."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        return {name: self._all[f"{case}/{name}"] for name in names if f"{case}/{name}" in self._all}

    def labels(self, case: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and last token of the answers, int64 (B,) each, of a case of kind train."""
        return self._all[f"{case}/start"], self._all[f"{case}/end"]


def prepare(config: ParityConfig, golden: Path) -> dict[str, Any]:
    """Write weights, inputs and the dev set into ``golden``; return ``model``, ``inputs_sha256`` and ``cases``.

    These are fields of the golden folder's manifest. Raises ``UserError`` where model or data are not there, a
    length is beyond the model's positions or the injected error's layer beyond its layers.
    """
    model, tokenizer, about = weights.prepare(config)
    longest = encoders.positions(model.config)
    for name, length in (("lengths", max(config.lengths)), ("train_length", config.train_length)):
        if longest is not None and length > longest:
            raise UserError(
                f"{name} = {length}: {config.model} has positions for {longest} tokens: set it to {longest} or less"
            )
    weights.require_layer(model, config.planted_layer)
    golden.mkdir(parents=True, exist_ok=True)
    inputs = write(config, tokenizer, model.config, golden)
    facts = weights.save(model, config.model, about, golden)
    return {"model": facts, "inputs_sha256": inputs.sha256, "cases": [case._asdict() for case in inputs.cases]}


def write(config: ParityConfig, tokenizer: Any, settings: Any, golden: Path) -> Inputs:
    """Make all inputs, write them with the dev set into the golden folder, and return them.

    They depend on the data, the tokenizer, ``config.seed`` and the fields of the config that name them, on nothing else.
    """
    # RoBERTa has one embedding for question and context, and its tokenizer may number them beyond the model's table.
    maker = _Maker(config, tokenizer, segments=int(getattr(settings, "type_vocab_size", 2) or 0) >= 2)
    positions = encoders.positions(settings)
    rows = {length: maker.rows(length, config.batch_sizes[-1]) for length in config.lengths}
    middle = rows[config.lengths[len(config.lengths) // 2]]
    token = {name: tensor[:1, :1] for name, tensor in middle.items()}
    masked = {name: tensor[[0, -1]].clone() for name, tensor in middle.items()}
    masked["attention_mask"][1] = 0
    dev = maker.dev(golden, min(DEV_LENGTH, positions or DEV_LENGTH))
    inputs = [
        (f"len{length}-batch{batch}", "data", first(rows[length], batch))
        for length, batch in itertools.product(config.lengths, config.batch_sizes)  # the smallest first
    ]
    inputs += [("edge-one-token", "edge", padded(token, middle["input_ids"].shape[1], maker.pad_id))]
    inputs += [("edge-longest", "edge", repeated(middle, min(positions or DEFAULT_EDGE, MAX_EDGE)))]
    inputs += [("edge-masked-row", "edge", masked), ("layer", "layer", first(middle, LAYER_BATCH))]
    inputs += [(f"train-{step:02d}", "train", tensors) for step, tensors in enumerate(maker.training())]
    inputs += [(f"dev-{number:02d}", "dev", tensors) for number, tensors in enumerate(dev)]
    cases = [Case(name, kind, *tensors["input_ids"].shape) for name, kind, tensors in inputs]
    arrays = {f"{name}/{key}": tensor.clone() for name, _, tensors in inputs for key, tensor in tensors.items()}
    about = {"cases": [case._asdict() for case in cases], "pad_id": maker.pad_id}
    with checkpoint.naming_storage_errors(golden / INPUTS), atomic_path(golden / INPUTS) as path:
        save_file(arrays, path, metadata={"benchlib": json.dumps(about)})
    return Inputs(golden)


class _Maker:
    """Tokenised text in the shapes that the cases want."""

    def __init__(self, config: ParityConfig, tokenizer: Any, segments: bool) -> None:
        self.config, self.tokenizer, self.segments = config, tokenizer, segments
        self.pad_id = int(tokenizer.pad_token_id)

    @cached_property
    def _source(self) -> Sequence[Example]:
        return load_hub()[1] if self.config.data == "squad" else read_squad(self.config.dev_file)

    def _examples(self, count: int, tokens: int) -> list[Example]:
        """Return at most ``count`` questions; generated ones have paragraphs of about ``tokens`` tokens."""
        if self.config.data == "minisquad":
            facts = (max(4, tokens // 24), max(8, tokens // 12))
            return minisquad.generate(count, self.config.seed, "eval", facts)
        return take(self._source, count, self.config.seed)

    def _windows(self, examples: Sequence[Example], length: int, stride: int, training: bool) -> Any:
        windows = features.build(examples, self.tokenizer, length, stride, training)
        return windows if self.segments else replace(windows, token_types=False)

    def rows(self, length: int, count: int) -> Tensors:
        """Return ``count`` questions padded to ``length``: alternately the first window of one, the last of the next.

        Where the last window is full too, a quarter of it is cut: every second row has padding, and so has its batch.
        """
        windows = self._windows(self._examples(count, length), length, 0, training=False)
        first = np.flatnonzero(np.diff(windows.example_index, prepend=-1))
        last = np.append(first[1:], len(windows)) - 1
        chosen = np.where(np.arange(len(first)) % 2, last, first)
        tensors = dict(collate(windows, np.resize(chosen, count), self.pad_id, multiple=length).inputs)
        for row in range(1, count, 2):
            self._cut(tensors, row, length - length // 4)
        return tensors

    def _cut(self, tensors: Tensors, row: int, length: int) -> None:
        """Pad a row from ``length`` on if it is full; its separator ends what is left."""
        if length < tensors["input_ids"].shape[1] and tensors["attention_mask"][row].all():
            tensors["input_ids"][row, length - 1] = tensors["input_ids"][row, -1]
            for name, tensor in tensors.items():
                tensor[row, length:] = self.pad_id if name == "input_ids" else 0

    def training(self) -> list[Tensors]:
        """Return the batches of the training steps, at least one; questions repeat where there are too few.

        Every second row is cut by a quarter, or behind its answer, so that a mask that training leaves out shows in the
        gradients.
        """
        length, batch = self.config.train_length, self.config.train_batch
        count = max(1, self.config.train_steps) * batch
        windows = self._windows(self._examples(count, length), length, 0, training=True)
        answered = np.flatnonzero(windows.start_positions != windows.cls_index)
        # One window a question, so that the samples differ; where no window holds an answer, any.
        _, first = np.unique(windows.example_index[answered], return_index=True)
        chosen = answered[first] if len(first) else np.arange(len(windows))
        batches = []
        for indices in np.resize(chosen, count).reshape(-1, batch):
            collated: Any = collate(windows, indices, self.pad_id, multiple=length)
            for row in range(min(1, batch - 1), batch, 2):
                self._cut(collated.inputs, row, max(length - length // 4, int(collated.end[row]) + 2))
            batches.append({**collated.inputs, "start": collated.start, "end": collated.end})
        return batches

    def dev(self, golden: Path, length: int) -> list[Tensors]:
        """Return the windows of the dev questions in batches, in order, and write what their spans need."""
        if not self.config.dev_questions:
            return []
        examples = self._examples(self.config.dev_questions, 128)
        windows = self._windows(examples, length, length // 3, training=False)
        plain = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(windows).items()
        }
        write_json(golden / DEV, {"examples": [asdict(item) for item in examples], "features": plain})
        parts = np.split(np.arange(len(windows)), range(DEV_BATCH, len(windows), DEV_BATCH))
        return [dict(collate(windows, part, self.pad_id).inputs) for part in parts]


def first(inputs: Tensors, count: int) -> Tensors:
    """Return the first rows of an input."""
    return {name: tensor[:count] for name, tensor in inputs.items()}


def repeated(inputs: Tensors, length: int) -> Tensors:
    """Return an input of one row and ``length`` tokens without padding: the first row's tokens over and over."""
    real = inputs["attention_mask"][0].bool()
    times = -(-length // int(real.sum()))
    return {name: tensor[:1, real].repeat(1, times)[:, :length] for name, tensor in inputs.items()}


def padded(inputs: Tensors, length: int, pad_id: int) -> Tensors:
    """Return the same rows with padding up to ``length`` tokens."""
    more = length - inputs["input_ids"].shape[1]
    return {
        name: torch.nn.functional.pad(tensor, (0, more), value=pad_id if name == "input_ids" else 0)
        for name, tensor in inputs.items()
    }


def dev_f1(golden: Path, outputs: Mapping[str, Any]) -> float | None:
    """Return the F1 in percent of the logits ``dev/start`` and ``dev/end``, (T,) each.

    None where there is no dev set, or the outputs have none of it or no numbers: of those no span is the best.
    """
    sides = [outputs.get(f"dev/{head}") for head in ("start", "end")]
    if not (golden / DEV).exists() or any(side is None or not np.isfinite(side).all() for side in sides):
        return None
    stored = read_json(golden / DEV)
    examples = [Example(**item) for item in stored["examples"]]
    windows: dict[str, Any] = {
        name: np.array(value) if isinstance(value, list) else value
        for name, value in stored["features"].items()
        if name in features.Features.__dataclass_fields__  # a recording that was made earlier has more
    }
    start, end = map(np.asarray, sides)
    best = answers.best_answers(examples, features.Features(**windows), start, end)
    return float(answers.score(best, examples)["f1"])
