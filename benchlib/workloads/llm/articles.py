"""Prompts and references for summaries: generated ones, CNN/DailyMail, or the file of the MLPerf reference; and their scores.

Scores are ROUGE by the metric ``mlperf_rouge``, beside two controls that need no model: references of other articles, which say what the
wording that all summaries share is worth, and the lead, which says what copying is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from benchlib import metrics
from benchlib.core.errors import UserError
from benchlib.core.files import read_json
from benchlib.workloads.llm import mininews
from benchlib.workloads.llm.decoders import Codec, absent

CNN, CNN_VERSION = "abisee/cnn_dailymail", "3.0.0"
WARM_UPS = 16  # two batches or more: the first ones are slower


@dataclass(frozen=True)
class Summaries:
    """Prompts as tokens, texts and references in the same order, prompts of other texts for the warm-up, and the tokenizer."""

    prompts: list[list[int]]
    texts: list[str]
    references: list[str]
    warm_up: list[list[int]]
    codec: Codec


def load(data: str, path: str, samples: int, seed: int, model: str, vocabulary: int = 0) -> Summaries:
    """Load the first ``samples`` (0: all) of a data set as prompts for a model.

    ``vocabulary`` maps tokens into a smaller one, for random weights that were shrunk. Raises ``BackendUnavailable`` where
    data or tokenizer cannot be had, ``UserError`` for a broken file.
    """
    codec = Codec(model)

    def ids_of(row: dict[str, Any]) -> list[int]:
        # No chat template; the tokenizer adds the token that begins a text.
        ids = row.get("tok_input") or codec.encode(row.get("instruction", mininews.PROMPT).format(input=row["input"]))
        return [token % vocabulary for token in ids] if vocabulary else list(ids)

    others = [{"input": article.text} for article in mininews.generate(WARM_UPS, seed=2**31 - 1, split="train")]
    rows = _rows(data, path, samples, seed)
    try:
        rows = rows[: samples or None]
        texts, references = ([row[name] for row in rows] for name in ("input", "output"))
        return Summaries(list(map(ids_of, rows)), texts, references, list(map(ids_of, others)), codec)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"expected a list of objects with input and output, as in cnn_eval.json ({error!r})"
        raise UserError(f"{path}: {what}") from None


def _rows(data: str, path: str, samples: int, seed: int) -> list[dict[str, Any]]:
    """Return rows as ``cnn_eval.json`` has them: input and output, with instruction and tok_input (ids) where they are there."""
    if data == "file":
        return read_json(path)  # type: ignore[no-any-return]
    if data == "mininews":
        articles = mininews.generate(samples or mininews.WHOLE, seed)
        return [{"input": article.text, "output": article.summary} for article in articles]
    import datasets

    try:
        split: Any = datasets.load_dataset(CNN, CNN_VERSION, split="validation")
    except Exception as error:  # hub, network, cache and format have errors of their own
        raise absent(CNN, error) from error
    return [{"input": row["article"], "output": row["highlights"]} for row in split]


def score(summaries: Summaries, answers: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """Return ROUGE of the answers (tokens by sample) with the splitter, and ROUGE-1 of the two controls."""
    rouge = metrics.load("mlperf_rouge").compute
    rows, decode = sorted(answers), partial(summaries.codec.tokenizer.decode, skip_special_tokens=True)
    texts = [str(decode(list(answers[row]))).strip() for row in rows]
    references = [summaries.references[row] for row in rows]
    leads = [summaries.texts[row][: len(reference)] for row, reference in zip(rows, references, strict=True)]
    # A shuffle may leave some in place; in a shuffled circle the next one is always another.
    order = Random(0).sample(range(len(rows)), len(rows))
    others = dict(zip(order, order[1:] + order[:1], strict=True))
    other_references = [references[others[place]] for place in range(len(rows))]
    shuffled = rouge(predictions=texts, references=other_references)
    lead = rouge(predictions=leads, references=references)
    controls = {"rouge1_shuffled": shuffled["rouge1"], "rouge1_lead": lead["rouge1"]}
    return rouge(predictions=texts, references=references) | controls
