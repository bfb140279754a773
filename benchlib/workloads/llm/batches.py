"""Engines that compute here with transformers: static batches of ``generate``, and its continuous batching. Greedy decoding.

An answer ends at its end-of-sequence token, which belongs to it, or at its greatest length; then it is handed on, even where
its batch goes on.
"""

import contextlib
import math
import queue
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from benchlib.core.errors import BackendUnavailable
from benchlib.runtime import devices
from benchlib.workloads.llm import decoders
from benchlib.workloads.llm.engines import STOPPED, Local, Query

DIED = "transformers' continuous batching ended by itself; see the log, and start the engine again"
WAIT_S = 0.005  # of a static batch for its next query
PAGE = 32  # tokens of a page of the cache
BATCH_TOKENS = 1024  # of a step with continuous batching: long prompts are prefilled in parts
NO_END = -1  # with an EOS of its own generate would pad ended rows; None would be the model's own


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
        self.decoder = decoder = decoders.load(settings.model, settings.device, settings.precision, *shape)
        self.model: Any = decoder.model
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


class _Straight(queue.Queue[Any]):
    """Transformers' queue of results, which hands each on in the thread that computed it.

    With a thread of its own to read them, each token waits until the two have passed the interpreter's lock to each other: 5 ms
    and more on a busy machine, at a step of 3 ms.
    """

    def __init__(self, take: Callable[[Any], None]) -> None:
        super().__init__()
        self.take = take

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Hand a result on. What its receiver does wrong must not end the thread that computes for all."""
        try:
            self.take(item)
        except Exception:
            traceback.print_exc()


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
            if not isinstance(manager.output_router.output_queue, queue.Queue):  # what nobody reads would hang a run
                raise TypeError("its results come in no queue")
            manager.output_router.output_queue = _Straight(self._take)
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

    def _take(self, output: Any) -> None:
        """Hand on what a result says: tokens that are new, or the whole answer."""
        if query := self._open.get(int(output.request_id)):
            query.take([int(token) for token in output.generated_tokens[len(query.tokens) :]])
            if output.is_finished():
                self._end(query.rid, query.tokens, str(output.error or ""))
