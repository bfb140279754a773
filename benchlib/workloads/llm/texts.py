"""Between tokens and texts, for servers and clients of text: what a tokenizer reads, writes and counts."""

from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchlib.core import model_files
from benchlib.workloads.llm.decoders import EMBEDDED, RANDOM, TINY, absent, folder


def tokenizer_of(model: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model. Raises ``BackendUnavailable`` where it cannot be had."""
    # Random weights need tokens of real lengths and no words: the embedded pieces serve.
    where = str(TINY) if model in (EMBEDDED, RANDOM) else folder(model)
    model_files.check(where, weights=False)
    try:
        return AutoTokenizer.from_pretrained(where, use_fast=True)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise absent(model, error) from error


class Codec:
    """A tokenizer for prompts and answers as texts."""

    def __init__(self, model: str) -> None:
        self.tokenizer = tokenizer_of(model)
        end = self.tokenizer.eos_token_id
        self.end = end if isinstance(end, int) else None

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, with the one that begins a text."""
        return list(self.tokenizer(prompt)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def count(self, answer: str, stopped: bool) -> list[int]:
        """Return the tokens that an answer is counted as: those of its text, and the end token where it stopped by itself.

        A model may have chosen other pieces for the same text, so their number is not exact.
        """
        ids = list(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
        return ids + ([self.end] if stopped and self.end is not None else [])
