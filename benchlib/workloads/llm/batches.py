"""Engines that compute here with transformers: static batches of ``generate``, and its continuous batching. Greedy decoding.

An answer ends at its end-of-sequence token, which belongs to it, or at its greatest length; then it is handed on, even where
its batch goes on.
"""

import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.runtime import devices
from benchlib.workloads.llm import decoders
from benchlib.workloads.llm.decoders import Decoder
from benchlib.workloads.llm.engines import CANCELLED, OnDone, OnFirst, OnMore, Settings

STOPPED = "the engine was stopped"
DIED = "transformers' continuous batching ended by itself; see the log, and start the engine again"
PAGE = 32  # tokens of a page of the cache
BATCH_TOKENS = 1024  # of a step with continuous batching: long prompts are prefilled in parts


@dataclass
class _Query:
    rid: int
    ids: Sequence[int]
    max_new: int
    on_first: OnFirst
    on_done: OnDone
    on_more: OnMore = None
    started: bool = False
    ended: bool = False
    tokens: list[int] = field(default_factory=list)
    _once: list[None] = field(default_factory=lambda: [None])

    def end(self, tokens: Sequence[int], error: str = "") -> None:
        """Hand the answer on, once: the engine and who cancels may both be here."""
        try:
            self._once.pop()
        except IndexError:
            return
        self.ended = True
        self.on_done(self.rid, tokens, error)


class _Loaded:
    """What both engines are: a decoder that is loaded at the start, and queries that are open."""

    failure = ""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.facts: dict[str, Any] = {}
        self.decoder: Decoder | None = None
        self._open: dict[int, _Query] = {}
        self._over = threading.Event()

    def _load(self) -> Decoder:
        settings = self.settings
        if settings.threads:
            torch.set_num_threads(settings.threads)
        if settings.device == "cpu":
            devices.keep_freed_memory()
        names = ("model", "device", "precision", "positions", "shrink")
        self.decoder = decoder = decoders.load(*(getattr(settings, name) for name in names))
        settled = {"slots": settings.slots, "threads": torch.get_num_threads(), "ends": list(decoder.ends)}
        self.facts = decoder.facts() | settled
        return decoder

    def submit(
        self, rid: int, ids: Sequence[int], max_new: int, on_first: OnFirst, on_done: OnDone, on_more: OnMore = None
    ) -> None:
        """Take a query, which an engine does by its ``_take_in``."""
        if self._over.is_set() or self.decoder is None:
            raise UserError(STOPPED)
        if len(ids) + max_new > self.decoder.positions:
            most = self.decoder.positions
            raise UserError(f"a prompt of {len(ids):,} tokens and {max_new} new ones: the engine takes {most:,}")
        query = self._open[rid] = _Query(rid, ids, max_new, on_first, on_done, on_more)
        self._take_in(query)

    def _take_in(self, query: _Query) -> None:
        raise NotImplementedError

    def cancel(self, rid: int) -> None:
        """See ``Engine``. In a static batch its row stops; a batch ends when all rows have."""
        if query := self._open.pop(rid, None):
            query.end([], CANCELLED)

    def device_memory(self) -> tuple[float | None, str]:
        """See ``Engine``."""
        return devices.peak_memory_bytes(torch.device(self.settings.device))


class _Watch(StoppingCriteria):
    """Sees each new token of a static batch: notes the first ones and hands on the answers that end."""

    def __init__(self, batch: Sequence[_Query], ends: frozenset[int], over: threading.Event) -> None:
        self.batch, self.ends, self.over = batch, ends, over

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return which rows need no more tokens, (B,) of bool."""
        new, now = input_ids[:, -1].tolist(), time.monotonic()
        for query, token in zip(self.batch, new, strict=True):
            if query.ended:
                continue
            query.tokens.append(token)
            if not query.started:
                query.started = True
                query.on_first(query.rid, now, token)
            elif query.on_more:
                query.on_more(query.rid, [token])
            if token in self.ends or len(query.tokens) >= query.max_new:
                query.end(query.tokens)
        stop = self.over.is_set()
        return torch.tensor([stop or query.ended for query in self.batch], device=input_ids.device)


class Static(_Loaded):
    """Takes what waits, at most ``slots`` queries, answers them as one batch, and takes the next.

    Prompts are padded on the left to the longest of their batch. A batch waits ``wait_s`` for its next query.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._queue: queue.SimpleQueue[_Query | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="static batches", daemon=True)

    def start(self) -> None:
        """Load the model and start the thread."""
        self._load()
        self._thread.start()

    def _take_in(self, query: _Query) -> None:
        self._queue.put(query)

    def stop(self) -> None:
        """End after the token that is computed now."""
        self._over.set()
        self._queue.put(None)
        if self._thread.ident:  # not where the model did not load
            self._thread.join()
        for query in [*self._open.values()]:
            query.end([], STOPPED)

    def _serve(self) -> None:
        while query := self._queue.get():
            batch: list[_Query] = []
            while query:
                batch += [] if query.ended else [query]
                if len(batch) >= self.settings.slots:
                    break
                try:
                    query = self._queue.get(timeout=self.settings.wait_s if batch else None)
                except queue.Empty:
                    break
            if self._over.is_set():
                return
            self._answer(batch)
            for query in batch:
                self._open.pop(query.rid, None)

    def _answer(self, batch: list[_Query]) -> None:
        assert self.decoder is not None
        decoder, error = self.decoder, STOPPED
        try:
            longest = max(len(query.ids) for query in batch)
            ids = torch.full((len(batch), longest), decoder.pad)
            mask = torch.zeros_like(ids)
            for row, query in enumerate(batch):
                ids[row, longest - len(query.ids) :] = torch.tensor(query.ids)
                mask[row, longest - len(query.ids) :] = 1
            ends = frozenset() if self.settings.fixed_length else frozenset(decoder.ends)
            watch = _Watch(batch, ends, self._over)
            model: Any = decoder.model
            device = model.device
            # The watch ends rows: with an EOS of its own generate would do so, too, but for the padding of ended rows.
            # None would be the model's own end, at which a batch of fixed length must go on.
            most, watches = max(query.max_new for query in batch), StoppingCriteriaList([watch])
            how = GenerationConfig(max_new_tokens=most, do_sample=False, pad_token_id=decoder.pad, eos_token_id=-1)
            ids, mask = ids.to(device), mask.to(device)
            with torch.inference_mode():
                model.generate(ids, attention_mask=mask, generation_config=how, stopping_criteria=watches)
        except Exception as failure:  # whatever it is, the queries of this batch have no other answer
            error = f"{type(failure).__name__}: {failure}"
        for query in batch:
            query.end([], error)


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

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._manager: Any = None

    def start(self) -> None:
        """Load the model and start transformers' thread."""
        decoder, slots = self._load(), self.settings.slots
        how = GenerationConfig(do_sample=False, pad_token_id=decoder.pad, eos_token_id=self._ends)
        model: Any = decoder.model
        try:
            from transformers import ContinuousBatchingConfig

            limits = ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=slots * (math.ceil(decoder.positions / PAGE) + 1),
                max_batch_tokens=max(BATCH_TOKENS, slots), max_requests_per_batch=slots,
                allow_block_sharing=False,  # the prefix cache that MLPerf forbids
            )  # fmt: skip
            self._manager = model.init_continuous_batching(generation_config=how, continuous_batching_config=limits)
            router = self._manager.output_router
            if not isinstance(router.output_queue, queue.Queue):  # what nobody reads would be a run that hangs
                raise TypeError("its results come in no queue")
            router.output_queue = _Straight(self._take)
        except (ImportError, TypeError, AttributeError) as error:
            version = f"transformers {transformers.__version__}: {error}"
            raise BackendUnavailable(f"continuous batching needs transformers 5.18 or later ({version})") from None
        self._manager.start()

    @property
    def _ends(self) -> list[int]:
        assert self.decoder is not None
        return [-1] if self.settings.fixed_length else list(self.decoder.ends)

    def _take_in(self, query: _Query) -> None:
        how = {"max_new_tokens": query.max_new, "eos_token_id": self._ends, "streaming": True}
        self._manager.add_request(list(query.ids), request_id=str(query.rid), **how)

    def cancel(self, rid: int) -> None:
        """See ``Engine``."""
        if rid in self._open:
            self._manager.cancel_request(str(rid))
        super().cancel(rid)

    @property
    def failure(self) -> str:  # type: ignore[override]
        """See ``Engine``: transformers' thread died, and what is put in its queue stays there."""
        return DIED if self._manager is not None and not self._over.is_set() and not self._manager.is_running() else ""

    def stop(self) -> None:
        """Stop transformers' thread, which would outlive the process, and end what is left."""
        self._over.set()
        if self._manager is not None:
            self._manager.stop(block=True, timeout=30, hard_stop=True)
        for query in [*self._open.values()]:
            query.end([], STOPPED)

    def _take(self, output: Any) -> None:
        """Hand on what a result says: the first token, or the whole answer."""
        now, query = time.monotonic(), self._open.get(int(output.request_id))
        if query is None:
            return
        tokens = output.generated_tokens
        if tokens and not query.started:
            query.started = True
            query.on_first(query.rid, now, int(tokens[0]))
            query.tokens = [int(tokens[0])]
        if query.on_more and len(tokens) > len(query.tokens):
            new = [int(token) for token in tokens[len(query.tokens) :]]
            query.on_more(query.rid, new)
            query.tokens += new
        if output.is_finished() and self._open.pop(query.rid, None):
            query.end([int(token) for token in tokens], str(output.error or ""))
