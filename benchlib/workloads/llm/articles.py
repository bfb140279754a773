"""Prompts and references for summaries: generated ones, CNN/DailyMail, or the file of the MLPerf reference."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchlib.core.errors import UserError
from benchlib.core.files import read_bytes
from benchlib.workloads.llm import mininews
from benchlib.workloads.llm.decoders import absent
from benchlib.workloads.llm.mininews import PROMPT, Article
from benchlib.workloads.llm.texts import tokenizer_of

CNN, CNN_VERSION = "abisee/cnn_dailymail", "3.0.0"


@dataclass(frozen=True)
class Summaries:
    """Prompts as tokens, texts and references in the same order, and the tokenizer that decodes answers."""

    prompts: list[list[int]]
    texts: list[str]
    references: list[str]
    tokenizer: PreTrainedTokenizerBase

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def load(data: str, path: str, samples: int, seed: int, model: str, vocabulary: int = 0) -> Summaries:
    """Load the first ``samples`` (0: all) of a data set as prompts for a model.

    ``vocabulary`` maps tokens into a smaller one, for random weights that were shrunk. Raises ``BackendUnavailable`` where
    data or tokenizer cannot be had, ``UserError`` for a broken file.
    """
    tokenizer = tokenizer_of(model)
    no_ids: list[int] | None = None
    if data == "mininews":
        articles = mininews.generate(samples or mininews.WHOLE, seed)
        rows = [(item.prompt, item.text, item.summary, no_ids) for item in articles]
    elif data == "file":
        rows = _file(Path(path))
    else:
        rows = [(item.prompt, item.text, item.summary, no_ids) for item in _hub(path or CNN)]
    rows = rows[:samples] if samples else rows
    # No chat template; the tokenizer adds the token that begins a text.
    prompts = [list(ids) if ids else list(tokenizer(prompt)["input_ids"]) for prompt, _, _, ids in rows]
    if vocabulary:
        prompts = [[token % vocabulary for token in ids] for ids in prompts]
    return Summaries(prompts, [row[1] for row in rows], [row[2] for row in rows], tokenizer)


def _hub(name: str) -> list[Article]:
    import datasets

    try:
        split: Any = datasets.load_dataset(name, CNN_VERSION, split="validation")
    except Exception as error:  # hub, network, cache and format have errors of their own
        raise absent(name, error) from error
    return [Article(row["id"], row["article"], row["highlights"]) for row in split]


def _file(path: Path) -> list[tuple[str, str, str, list[int] | None]]:
    """Read ``cnn_eval.json``: a list of instruction, input, tok_input (ids, optional) and output."""
    try:
        rows = json.loads(read_bytes(path))
        prompts = [row.get("instruction", PROMPT).format(input=row["input"]) for row in rows]
        both = zip(prompts, rows, strict=True)
        return [(prompt, row["input"], row["output"], row.get("tok_input")) for prompt, row in both]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"expected a list of objects with input and output, as in cnn_eval.json ({error!r})"
        raise UserError(f"{path}: {what}") from None


def outside(tokenizer: PreTrainedTokenizerBase, count: int, vocabulary: int = 0) -> list[list[int]]:
    """Return ``count`` prompts that are in no data set, for the warm-up."""
    articles = mininews.generate(count, seed=2**31 - 1, split="train")
    prompts = [list(tokenizer(item.prompt)["input_ids"]) for item in articles]
    return [[token % vocabulary for token in ids] for ids in prompts] if vocabulary else prompts
