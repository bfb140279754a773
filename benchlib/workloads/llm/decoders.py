"""Decoders and their tokenizers by name, and the engines that compute with them here by transformers, in greedy decoding.

A decoder is the embedded one, one of the hub or a folder, or random weights at the shape of Llama-3.1-8B. An answer ends at its
end-of-sequence token, which belongs to it, or at its greatest length; then it is handed on, even where its batch goes on.
"""

import contextlib
import math
import queue
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.files import PACKAGE
from benchlib.runtime import devices
from benchlib.workloads import model_files
from benchlib.workloads.llm.engines import STOPPED, Local, Query

EMBEDDED, RANDOM = "tiny", "llama3-8b-random"
TINY = PACKAGE / "assets" / "tiny-llama"
DIED = "transformers' continuous batching ended by itself; see the log, and start the engine again"
WAIT_S = 0.005  # of a static batch for its next query
PAGE = 32  # tokens of a page of the cache
BATCH_TOKENS = 1024  # of a step with continuous batching: long prompts are prefilled in parts
NO_END = -1  # with an EOS of its own generate would pad ended rows; None would be the model's own
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
    first = model_files.reason(error) or type(error).__name__
    if first == model_files.OWN_CODE:
        raise UserError(f"model = {name}: {first}")
    if Path(name).exists():
        raise UserError(f"{name}: cannot be read: {first}")
    return BackendUnavailable(
        f"{name}: not on this machine and not fetched ({first}); give a folder that holds it, or accept its licence, "
        "log in with `hf auth login` and unset HF_HUB_OFFLINE"
    )


class Codec:
    """A tokenizer for prompts and answers as texts. Raises ``BackendUnavailable`` where it cannot be had."""

    def __init__(self, model: str) -> None:
        model_files.check(folder(model), weights=False)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder(model), use_fast=True, **model_files.NO_CODE)
        except (OSError, ValueError) as error:
            raise absent(model, error) from error

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
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
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
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda", "xpu", "mps"):
        raise UserError(f"device = {device!r}: expected cpu, cuda, xpu or mps, or one by its number, as in cuda:1")
    devices.require("rocm" if kind == "cuda" and torch.version.hip else kind)
    if ":" in device:  # else what asks for the current one would take the first
        torch.get_device_module(kind).set_device(torch.device(device))
    dtype = DTYPES[precision]
    if name == RANDOM:
        model = _random(shrink, device, dtype)
    else:
        model_files.check(folder(name), tokenizer=False)

        def make(attention: str) -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder(name), dtype=dtype, attn_implementation=attention, use_safetensors=True,
                output_loading_info=True, **model_files.NO_CODE, ignore_mismatched_sizes=True,  # said below, with the first name
            )  # fmt: skip

        try:
            loaded: Any = model_files.with_attention(make, "sdpa")
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


def attention_note(name: str) -> str:
    """Return that a model has no attention of torch's own, see ``model_files.attention_note``. Makes it without weights."""
    if name == RANDOM:
        return ""
    settings = transformers.AutoConfig.from_pretrained(folder(name), **model_files.NO_CODE)

    def make(attention: str) -> Any:
        return transformers.AutoModelForCausalLM.from_config(settings, attn_implementation=attention)

    with torch.device("meta"):
        return model_files.attention_note(model_files.with_attention(make, "sdpa"))


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


class _Loaded(Local):
    """What both engines are: a decoder that is loaded at the start."""

    def start(self) -> None:
        """Load the model."""
        settings = self.settings
        if settings.threads:
            torch.set_num_threads(settings.threads)
        if settings.device == "cpu":
            devices.keep_freed_memory()
        shape = settings.positions, settings.shrink
        self.decoder = decoder = load(settings.model, settings.device, settings.precision, *shape)
        self.model: Any = decoder.model
        self.note = model_files.attention_note(self.model)
        self.greedy = partial(GenerationConfig, do_sample=False, pad_token_id=decoder.pad)
        self.positions, self.vocabulary = decoder.positions, self.model.config.vocab_size
        self.ends = [] if settings.fixed_length else list(decoder.ends)

    def device_memory(self) -> tuple[float | None, str]:
        """See ``Local``."""
        return devices.peak_memory_bytes(torch.device(self.settings.device))


class Static(_Loaded):
    """Takes what waits, at most ``slots`` queries, answers them as one batch, and takes the next.

    Prompts are padded on the left to the longest of their batch. A batch waits ``WAIT_S`` for its next query.
    """

    def start(self) -> None:
        """Load the model and start the thread."""
        super().start()
        self._thread(self._serve)

    def _serve(self) -> None:
        while query := self._queue.get():
            batch = [query]
            with contextlib.suppress(queue.Empty):
                while len(batch) < self.settings.slots and (query := self._queue.get(timeout=WAIT_S)):
                    batch.append(query)
            if self._over.is_set():
                return
            if batch := [query for query in batch if query.rid in self._open]:
                self._answer(batch)

    def _answer(self, batch: list[Query]) -> None:
        error, pad = STOPPED, partial(pad_sequence, batch_first=True, padding_side="left")
        try:
            rows = [torch.tensor(query.ids) for query in batch]
            ids, mask = pad(rows, padding_value=self.decoder.pad), pad([torch.ones_like(row) for row in rows])
            watch = [partial(self._step, batch)]
            how = self.greedy(max_new_tokens=max(query.max_new for query in batch), eos_token_id=NO_END)
            ids, mask = ids.to(self.model.device), mask.to(self.model.device)
            with torch.inference_mode():
                self.model.generate(ids, attention_mask=mask, generation_config=how, stopping_criteria=watch)
        except Exception as failure:  # whatever it is, the queries of this batch have no other answer
            error = f"{type(failure).__name__}: {failure}"
        for query in batch:
            self._end(query.rid, [], error)

    def _step(self, batch: Sequence[Query], input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Hand on the last token of each row and the answers that end with it; return which rows have ended."""
        for query, token in zip(batch, input_ids[:, -1].tolist(), strict=True):
            if query.rid in self._open:
                query.take([token])
                if token in self.ends or len(query.tokens) >= query.max_new:
                    self._end(query.rid, query.tokens)
        return torch.tensor([query.rid not in self._open for query in batch], device=input_ids.device)


class Continuous(_Loaded):
    """Lets queries join and leave the batch at every token. No block of the cache is shared across queries."""

    _manager: Any = None

    def start(self) -> None:
        """Load the model and start transformers' thread."""
        super().start()
        slots = self.settings.slots
        how = self.greedy(eos_token_id=self.ends or [NO_END])
        try:
            from transformers import ContinuousBatchingConfig

            limits = ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=slots * (math.ceil(self.positions / PAGE) + 1),
                max_batch_tokens=max(BATCH_TOKENS, slots), max_requests_per_batch=slots,
                allow_block_sharing=False,  # the prefix cache that MLPerf forbids
            )  # fmt: skip
            manager = self.model.init_continuous_batching(generation_config=how, continuous_batching_config=limits)
            # Each result is handed on in the thread that computed it. With a thread of its own to read them, each token waits until
            # the two have passed the interpreter's lock to each other: 5 ms and more on a busy machine, at a step of 3 ms.
            manager.output_router.output_queue.put = self._take  # type: ignore[method-assign, assignment]
        except (ImportError, TypeError, AttributeError) as error:
            version = f"transformers {transformers.__version__}: {error}"
            raise BackendUnavailable(f"continuous batching needs transformers 5.18 or later ({version})") from None
        self._manager = manager
        manager.start()

    def _take_in(self, query: Query) -> None:
        how = {"max_new_tokens": query.max_new, "eos_token_id": self.ends or [NO_END], "streaming": True}
        self._manager.add_request(list(query.ids), request_id=str(query.rid), **how)

    def cancel(self, rid: int) -> None:
        """See ``Local``."""
        if rid in self._open:
            self._manager.cancel_request(str(rid))
        super().cancel(rid)

    @property
    def failure(self) -> str:  # type: ignore[override]
        """Transformers' thread died, and what is put in its queue stays there."""
        return DIED if self._manager and not self._over.is_set() and not self._manager.is_running() else ""

    def stop(self) -> None:
        """Stop transformers' thread, too, which would outlive the process."""
        super().stop()
        if self._manager:
            self._manager.stop(block=True, timeout=30, hard_stop=True)

    def _take(self, output: Any, *_: Any, **__: Any) -> None:
        """Hand on what a result says: tokens that are new, or the whole answer."""
        try:
            if query := self._open.get(int(output.request_id)):
                query.take([int(token) for token in output.generated_tokens[len(query.tokens) :]])
                if output.is_finished():
                    self._end(query.rid, query.tokens, str(output.error or ""))
        except Exception:  # what a receiver does wrong must not end the thread that computes for all
            traceback.print_exc()
