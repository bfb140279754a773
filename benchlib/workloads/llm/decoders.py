"""Decoders and their tokenizers by name: the embedded one, one of the hub or a folder, or random weights at the shape of Llama-3.1-8B."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchlib.core import model_files
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.files import PACKAGE
from benchlib.runtime import devices

EMBEDDED, RANDOM = "tiny", "llama3-8b-random"
TINY = PACKAGE / "assets" / "tiny-llama"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# https://huggingface.co/meta-llama/Llama-3.1-8B, config.json
LLAMA3_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}  # fmt: skip


@dataclass(frozen=True)
class Decoder:
    """A model in evaluation mode on its device; ``ends`` are its end-of-sequence tokens, ``pad`` fills batches."""

    model: PreTrainedModel
    ends: tuple[int, ...]
    pad: int
    positions: int


def folder(name: str) -> str:
    """Return where transformers finds the model or tokenizer of this name."""
    # Random weights need tokens of real lengths and no words: the embedded pieces serve.
    return str(TINY) if name in (EMBEDDED, RANDOM) else name


def absent(name: str, error: Exception) -> BackendUnavailable:
    """Return the error that says that weights or data are not to be had here, and what to do.

    Raises ``UserError`` for a path: where the folder is there, something is wrong with it.
    """
    if Path(name).is_absolute() and not Path(name).exists():
        raise UserError(f"{name}: no such folder or file")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if Path(name).exists():
        raise UserError(f"{name}: cannot be read: {first}")
    return BackendUnavailable(
        f"{name}: not on this machine and not fetched ({first}); give a folder that holds it, or accept its licence, "
        "log in with `hf auth login` and unset HF_HUB_OFFLINE"
    )


def tokenizer_of(model: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model. Raises ``BackendUnavailable`` where it cannot be had."""
    model_files.check(folder(model), weights=False)
    try:
        return AutoTokenizer.from_pretrained(folder(model), use_fast=True)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise absent(model, error) from error


class Codec:
    """A tokenizer for prompts and answers as texts."""

    def __init__(self, model: str) -> None:
        self.tokenizer = tokenizer_of(model)

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, with the one that begins a text."""
        return list(self.tokenizer(prompt)["input_ids"])

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, by the model's chat template or, without one, as a line per message.

        Raises ``ValueError`` for messages that the template refuses.
        """
        if not self.tokenizer.chat_template:
            turns = [f"{message['role']}: {message['content']}\n" for message in messages]
            return self.encode("".join([*turns, "assistant:"]))
        try:
            ids: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template raises whatever it likes
            raise ValueError(f"messages: the model's chat template refuses them: {error}") from None
        return [int(token) for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def count(self, answer: str, stopped: bool) -> list[int]:
        """Return the tokens that an answer is counted as: those of its text, and the end token where it stopped by itself.

        A model may have chosen other pieces for the same text, so their number is not exact.
        """
        ids, end = list(self.tokenizer(answer, add_special_tokens=False)["input_ids"]), self.tokenizer.eos_token_id
        return ids + [end] * (stopped and isinstance(end, int))


def load(name: str, device: str = "cpu", precision: str = "fp32", positions: int = 0, shrink: int = 1) -> Decoder:
    """Load a decoder for answers of up to ``positions`` tokens with their prompts (0: what the model has, at most 4,096).

    Raises ``BackendUnavailable`` where the device is not here or the weights cannot be had, ``UserError`` for a model that is too short.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _require(device)
    dtype = DTYPES[precision]
    if name == RANDOM:
        model = _random(shrink, device, dtype)
    else:
        model_files.check(folder(name), tokenizer=False)
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder(name), dtype=dtype, attn_implementation="sdpa", use_safetensors=True,
                output_loading_info=True, ignore_mismatched_sizes=True,  # said below, with the first name
            )  # fmt: skip
        except Exception as error:  # of a config that makes no sense transformers raises anything
            raise absent(name, error) from error
        model, info = loaded
        if why := model_files.misfit(info):
            raise UserError(f"model = {name}: {why}: give weights and config that belong together")
        model.to(device)
    config = model.config
    longest = int(config.max_position_embeddings)
    if positions > longest:
        raise UserError(f"{name} has {longest:,} positions, prompts and answers take {positions:,}: shorten them")
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [int(end) for end in ends if end is not None]
    pad = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
    return Decoder(model.eval(), tuple(ends), int(pad), positions or min(longest, 4096))


def _require(device: str) -> None:
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda", "xpu", "mps"):
        raise UserError(f"device = {device!r}: expected cpu, cuda, xpu or mps, or one by its number, as in cuda:1")
    devices.require("rocm" if kind == "cuda" and torch.version.hip else kind)


def _random(shrink: int, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return random weights at the shape of Llama-3.1-8B, divided by ``shrink``; drawn on the device itself."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 256}
    shape = {**LLAMA3_8B, **{name: max(least, LLAMA3_8B[name] // shrink) for name, least in sizes.items()}}
    if shrink > 1:
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": [1, 2, 3]}
    torch.manual_seed(0)
    with torch.device(device):
        config = transformers.LlamaConfig(**shape)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-any-return]
