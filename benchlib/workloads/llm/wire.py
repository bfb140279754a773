"""How a server is spoken to: OpenAI's completions over HTTP, streamed, with token ids or in texts.

A server that gives no token ids is asked in texts: then the tokens of an answer are those that the tokenizer of ``Settings.model``
finds in its text. Which of both a server takes is seen by a first query of two tokens.
"""

import asyncio
import contextlib
import json
import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchlib.config.addresses import DNS, PORTS, REDIRECTED, REDIRECTS, checked
from benchlib.core.errors import BackendUnavailable
from benchlib.workloads.llm.engines import MEMORY, Query, Settings, codec

WARM_UP = [7, 11, 13]  # a prompt that is in no data set
# Of Prometheus' text format: a name with its labels, a number.
METRIC = re.compile(r"^(?!#)(\S.*) (\S+)$", re.MULTILINE)
NO_TIMER = aiohttp.ClientTimeout(total=None, sock_connect=5)  # the dispatcher looks after all queries at once
BUFFER = 2**22  # bytes of an answer that are taken from the wire before they are read
CLOSE = {"Connection": "close"}
MAX_ID = 2**31  # above any token id: LoadGen takes 32 bits

Row = dict[str, Any]


class LostAttempt(Exception):
    """An attempt that another server can make again."""


class WithoutIds(LostAttempt):
    """An answer in text alone."""


class RefusedQuery(Exception):
    """A query that every server would refuse."""


@dataclass(eq=False)
class Job(Query):
    """A query and what became of it so far."""

    attempt: int = 0
    deadline: float = math.inf
    last_error: str = ""
    lost_at: set[int] = field(default_factory=set)  # workers that lost it: others take it, where there are others
    task: "asyncio.Task[Answer] | None" = None  # of the attempt under way
    content: Any = None  # the stream of its answer
    came: int = 0  # bytes of it, when that was looked at last
    moved: float = 0.0  # when there were more


@dataclass
class Worker:
    """A server, how it is asked, and what it does."""

    url: str
    index: int = 0
    model: str = ""  # '': it is asked without a name
    engine: str = ""  # what one of the kit says that it runs
    note: str = ""  # and what it says of it
    text: bool = False  # it gives no token ids
    met: bool = False  # it answered a first query
    ready: bool = False
    reason: str = ""  # why it is not ready
    open: dict[int, Job] = field(default_factory=dict)
    work: int = 0  # tokens that it may still have to give
    tokens: int = 0  # that it gave, in the time in which it had work
    busy_s: float = 0.0
    since: float = 0.0

    def row(self, counters: Mapping[str, float]) -> Row:
        """Return columns of its model, how it is asked, and its memory by the ``counters`` of its ``/metrics``."""
        memory = {name: counters.get(theirs) for name, theirs in MEMORY.items()}
        lacking = [name for name, value in memory.items() if value is None]
        why = dict.fromkeys(lacking, "the worker does not state it in its /metrics")
        return {"model": self.model, "asked_in": "text" if self.text else "ids", "why": why, **memory}


@dataclass
class Answer:
    """What came of a stream so far; ``stated`` is how many tokens the server says it has."""

    text: bool
    max_new: int
    ids: list[int] = field(default_factory=list)
    words: str = ""
    reason: str = ""  # why it ended
    done: bool = False
    stated: int | None = None
    _rest: bytes = b""

    def take(self, data: bytes) -> None:
        """Read more bytes, all their events by one call of the parser. Raises ``LostAttempt`` for what is no answer."""
        if self.done:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        # An error may also come as a plain object with status 200.
        events = [line.removeprefix(b"data:").strip() for line in lines if line.startswith((b"data:", b"{"))]
        if b"[DONE]" in events:
            self.done, events = True, events[: events.index(b"[DONE]")]
        text = b"[%b]" % b",".join(events)
        try:
            for values in json.loads(text):
                self._event(values)
        except LostAttempt:
            raise
        except Exception as error:
            raise LostAttempt(f"a malformed event ({type(error).__name__}): {text[1:81]!r}") from None
        if len(self.ids) > self.max_new:
            raise LostAttempt(f"{len(self.ids)} tokens, {self.max_new} were asked for")

    def _event(self, values: Any) -> None:
        if values.get("error") or values.get("object") == "error":
            error = values.get("error") or values
            raise LostAttempt(str(error.get("message", error) if isinstance(error, dict) else error))
        if usage := values.get("usage"):
            self.stated = int(usage["completion_tokens"])
        for choice in values["choices"]:
            ids, words = choice.get("token_ids"), choice.get("text") or ""
            if ids is None and words and not self.text:
                raise WithoutIds("text without token ids: the server does not know return_token_ids")
            new = [] if self.text else ids or []
            if not all(type(token) is int and 0 <= token < MAX_ID for token in new):
                raise LostAttempt("token ids are not integers")
            if self.reason and (new or words):
                raise LostAttempt("tokens came after the end of the answer")
            self.ids += new
            self.words += words if self.text else ""
            self.reason = str(choice.get("finish_reason") or self.reason)


class Wire:
    """A session with all servers, opened in the running event loop. It follows no redirect: our token would go elsewhere."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.codec = settings, None  # type: Settings, Any
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            headers={"Authorization": f"Bearer {settings.token}"} if settings.token else {},
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),  # no server needs them: they cost both sides
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, url: str, limit_s: float) -> tuple[int, str]:
        """Return status and text of an answer."""
        limit = aiohttp.ClientTimeout(total=limit_s)
        # Some servers close the connection of an answer that failed, and do not say so: no query is sent over it.
        async with self._session.get(url, allow_redirects=False, timeout=limit, headers=CLOSE) as response:
            return response.status, await response.text(errors="replace")

    async def health(self, url: str, limit_s: float) -> str:
        """Return why a server is not healthy; '' where it is."""
        try:
            status, _ = await self.get(f"{url}/health", limit_s)
        except Exception as error:
            return f"/health: {self.reason(error, limit_s)}"
        return "" if status == 200 else f"/health answers {status}{f': {REDIRECTED}' * (status in REDIRECTS)}"

    async def counters(self, url: str, limit_s: float) -> Row:
        """Return the numbers of a server's ``/metrics`` by name; empty where it has none."""
        with contextlib.suppress(Exception):  # whatever it sends, it is no number of a run
            status, text = await self.get(f"{url}/metrics", limit_s)
            read = METRIC.findall(text) if status == 200 else []
            return {name: number for name, value in read if math.isfinite(number := float(value))}
        return {}

    async def meet(self, worker: Worker, limit_s: float) -> None:
        """See how a server is asked, once: by ids or in texts, and by which name.

        Raises ``BackendUnavailable``, and nothing else, for one that gives no answer within ``limit_s``.
        """
        if worker.met:
            return
        # A server that is pinned to a model of another name than it lists takes queries without a name.
        ways = [(False, True), (True, True), (True, False)]
        errors = dict[str, None]()
        for worker.text, named in ways[: 2 if self.settings.served_model else 3]:
            try:
                if worker.text and self.codec is None:
                    self.codec = await asyncio.to_thread(codec, self.settings.model)
                async with asyncio.timeout(limit_s):
                    worker.model, worker.engine = await self._named(worker, limit_s) if named else ("", "")
                    await self.complete(worker, Job(0, WARM_UP, 2, lambda *_: None, lambda *_: None))
                worker.met = True
                return
            except Exception as error:
                errors[self.reason(error, limit_s)] = None
                if not isinstance(error, (RefusedQuery, WithoutIds)):
                    break
        raise BackendUnavailable(f"worker {worker.url} does not answer a query: {'; '.join(errors)}")

    async def _named(self, worker: Worker, limit_s: float) -> tuple[str, str]:
        """Return what a server calls its model, and the engine of one of the kit; '' for what it does not say. Keeps its note."""
        status, text = await self.get(f"{worker.url}/v1/models", limit_s)
        _accept(status, "")
        try:
            rows = {str(row["id"]): row for row in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError):
            rows = {}
        asked = self.settings.served_model
        if asked and rows and asked not in rows:
            raise LostAttempt(f"it serves {', '.join(rows)} and not {asked}: correct served_model")
        name = asked or next(iter(rows), "")
        own = rows.get(name, {}).get("benchlib", {})
        worker.note = str(own.get("note", ""))
        return name, str(own.get("engine", ""))

    async def complete(self, worker: Worker, job: Job) -> Answer:
        """Return the answer of a server, complete and checked; ``job`` gets its stream and its first token at once.

        Of the tokens after it only the end has a time: they lie in the stream's buffer until then and are read together. To wake
        this task for each would take more than all else that a query costs.
        """
        asked: Row = {"model": worker.model} if worker.model else {}
        asked |= {"prompt": self.codec.decode(job.ids) if worker.text else [*map(int, job.ids)]}
        asked |= {"max_tokens": job.max_new, "temperature": 0, "stream": True}
        if not worker.text:  # servers of text may refuse a field that they do not know
            asked |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        answer, new, url = Answer(worker.text, job.max_new), list[int](), f"{worker.url}/v1/completions"
        async with self._session.post(
            url, json=asked, allow_redirects=False, timeout=NO_TIMER, read_bufsize=BUFFER
        ) as response:
            if response.status != 200:
                _accept(response.status, (await response.content.read(9_000)).decode(errors="replace").strip())
            job.content = content = response.content
            while not content.at_eof():
                if new and not content.is_eof() and content.exception() is None:
                    await content.wait_eof()
                answer.take(await content.readany())
                if not new:
                    new = self.codec.count(answer.words, False) if answer.words else answer.ids
                    if not job.tokens:  # of a later attempt it is no first token
                        job.take(new[:1])
        answer.take(b"\n")
        if not answer.done and not answer.reason:
            raise aiohttp.ClientPayloadError("the stream ended before its end")
        if worker.text:
            answer.ids = self.codec.count(answer.words, answer.reason == "stop")
        if not answer.ids or (not worker.text and answer.stated not in (None, len(answer.ids))):
            least = "at least 1" if answer.stated is None else answer.stated
            raise LostAttempt(f"{len(answer.ids)} token ids where {least} tokens are stated")
        if not job.tokens:  # the first token came with the end
            job.take(answer.ids[:1])
        return answer

    def reason(self, error: BaseException, limit_s: float) -> str:
        """Return why there was no answer, in words that can be stored: no halves of characters, and not our token."""
        words = str(error) or type(error).__name__
        if isinstance(error, aiohttp.ClientPayloadError):
            words = "the stream ended before its end"
        elif isinstance(error, TimeoutError):
            words = f"no answer within {limit_s:g} s"
        words = words.replace(self.settings.token, "...") if self.settings.token else words
        return words.encode(errors="replace").decode()[:300]


def _accept(status: int, text: str) -> None:
    """Raise what a status other than 200 means: what is no fault of the query another server may answer."""
    if status in REDIRECTS:
        raise LostAttempt(f"{status}: {REDIRECTED}")
    if status in (401, 403):
        fix = "set the environment variable BENCHLIB_TOKEN to the worker's"
        raise LostAttempt(f"{status}: it refuses the bearer token; {fix} {text}")
    if text and status != 200:
        raise (LostAttempt if status in (408, 429) or status >= 500 else RefusedQuery)(f"{status} {text}")


async def addresses(name: str) -> list[str]:
    """Return the URLs of a worker: itself, or one for each address of its name where it begins with ``dns+``."""
    if not name.startswith(DNS):
        return [name]
    parts = checked(name)
    port = parts.port or PORTS[parts.scheme]
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BackendUnavailable(f"workers: {parts.hostname} has no address: {error}") from None
    hosts = sorted({str(row[4][0]) for row in rows})
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]
