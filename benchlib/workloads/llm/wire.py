"""How a server is spoken to: OpenAI's completions over HTTP, streamed, with token ids or in texts.

A server that gives no token ids is asked in texts: then the tokens of an answer are those that the tokenizer of ``Settings.model``
finds in its text. Which of both a server takes is seen by a first query of two tokens.
"""

import asyncio
import contextlib
import importlib
import json
import math
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchlib.config.addresses import DNS, PORTS, REDIRECTED, REDIRECTS, checked
from benchlib.core.errors import UserError
from benchlib.workloads.llm.engines import Settings

WARM_UP = [7, 11, 13]  # a prompt that is in no data set
TEXTS = "benchlib.workloads.llm.texts"  # imported where a server is asked in texts: it needs transformers
# Of Prometheus' text format: a name with its labels, a number.
METRIC = re.compile(r"^(?!#)(\S.*) (\S+)$", re.MULTILINE)
SKIPPED_HEADERS = ("Accept", "Accept-Encoding", "User-Agent")  # that no server needs: they cost both sides
NO_TIMER = aiohttp.ClientTimeout(total=None, sock_connect=5)  # the dispatcher looks after all queries at once
BUFFER = 2**22  # bytes of an answer that are taken from the wire before they are read
CLOSE = {"Connection": "close"}
MAX_BYTES = 2**20  # of any answer but a completion
TOKEN_CHARACTERS = 256  # that one token stands for at most: a longer text is not counted, which would take seconds
MAX_ID = 2**31  # above any token id: LoadGen takes 32 bits

Row = dict[str, Any]


class LostAttempt(Exception):
    """An attempt that another server can make again."""


class WithoutIds(LostAttempt):
    """An answer in text alone."""


class RefusedQuery(Exception):
    """A query that every server would refuse."""


@dataclass
class Server:
    """A server and how it is asked. ``text``: it gives no token ids; ``engine``: what one of the kit says that it runs."""

    url: str
    model: str = ""  # '': it is asked without a name
    engine: str = ""
    text: bool = False


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
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")] if not self.done else []
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
        if self.ids and not (set(map(type, self.ids)) == {int} and min(self.ids) >= 0 and max(self.ids) < MAX_ID):
            raise LostAttempt(f"token ids are not integers: {str(self.ids)[:80]}")
        if len(self.words) > TOKEN_CHARACTERS * self.max_new or len(self.ids) > self.max_new:
            what = f"a text of {len(self.words)} characters" if self.text else f"{len(self.ids)} tokens"
            raise LostAttempt(f"{what}, {self.max_new} tokens were asked for")

    def _event(self, values: Any) -> None:
        if "error" in values:
            raise LostAttempt(str(values["error"])[:9_000])  # cut to 300 once the token is out of it
        if usage := values.get("usage"):
            self.stated = usage["completion_tokens"]
            if type(self.stated) is not int or not 0 <= self.stated < MAX_ID:
                raise TypeError
        for choice in values["choices"]:
            ids, words = choice.get("token_ids"), choice.get("text") or ""
            if ids is None and words and not self.text:
                raise WithoutIds("text without token ids: the server does not know return_token_ids")
            self.ids += [] if self.text else ids or []
            self.words += words if self.text else ""
            self.reason = str(choice.get("finish_reason") or self.reason)


class Wire:
    """A session with all servers, opened in the running event loop. It follows no redirect: our token would go elsewhere."""

    def __init__(self, settings: Settings) -> None:
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
        self.settings, self.codec = settings, None  # type: Settings, Any
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=SKIPPED_HEADERS,
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, url: str, limit_s: float) -> tuple[int, str]:
        """Return status and text of an answer. Raises ``LostAttempt`` for one of more than ``MAX_BYTES``."""
        limit, data = aiohttp.ClientTimeout(total=limit_s), bytearray()
        # Some servers close the connection of an answer that failed, and do not say so: no query is sent over it.
        async with self._session.get(url, allow_redirects=False, timeout=limit, headers=CLOSE) as response:
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > MAX_BYTES:
                    raise LostAttempt(f"an answer of more than {MAX_BYTES:,} bytes")
            return response.status, data.decode(errors="replace")

    async def health(self, url: str, limit_s: float) -> tuple[int, str]:
        """Return the status of a server's answer to the question for its health, 0 where there is none; and what is wrong."""
        try:
            status, _ = await self.get(f"{url}/health", limit_s)
        except Exception as error:
            return 0, f"/health: {self.reason(error, limit_s)}"
        if status in REDIRECTS:
            return status, f"answers {status}: {REDIRECTED}"
        return status, "" if status == 200 else f"/health answers {status}"

    async def counters(self, url: str, limit_s: float) -> Row:
        """Return the numbers of a server's ``/metrics`` by name; empty where it has none."""
        with contextlib.suppress(Exception):  # whatever it sends, it is no number of a run
            status, text = await self.get(f"{url}/metrics", limit_s)
            read = METRIC.findall(text) if status == 200 else []
            return {name: number for name, value in read if math.isfinite(number := float(value))}
        return {}

    async def meet(self, server: Server, model: str, limit_s: float) -> None:
        """See how a server is asked: by ids or in texts, and by which name. ``model`` '': the first that it names.

        Raises ``UserError``, and nothing else, for one that gives no answer within ``limit_s``, whatever it sends.
        """
        # A server that is pinned to a model of another name than it lists takes queries without a name.
        ways = [(False, True), (True, True), *([(True, False)] if not model else [])]
        errors = dict[str, None]()
        for server.text, named in ways:
            try:
                if server.text and self.codec is None:
                    self.codec = await asyncio.to_thread(self._make_codec)
                async with asyncio.timeout(limit_s):
                    server.model, server.engine = await self._named(server, model, limit_s) if named else ("", "")
                    await self.complete(server, WARM_UP, 2)
                return
            except Exception as error:
                errors[self.reason(error, limit_s)] = None
                if not isinstance(error, (RefusedQuery, WithoutIds)):
                    break
        raise UserError(f"worker {server.url} does not answer a query: {'; '.join(errors)}")

    def _make_codec(self) -> Any:
        try:
            if self.settings.model:
                return importlib.import_module(TEXTS).Codec(self.settings.model)
            raise RefusedQuery("a tokenizer counts its tokens: set model to the one that it serves")
        except ImportError as error:
            raise RefusedQuery(f"a tokenizer counts its tokens, which needs transformers ({error})") from None

    async def _named(self, server: Server, model: str, limit_s: float) -> tuple[str, str]:
        """Return what a server calls its model, and the engine of one of the kit; '' for what it does not say."""
        status, text = await self.get(f"{server.url}/v1/models", limit_s)
        _accept(status, "")
        try:
            rows = {_clean(row["id"]): row for row in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError):
            rows = {}
        if model and rows and model not in rows:
            raise LostAttempt(f"it serves {', '.join(rows)} and not {model}: correct served_model")
        name = model or next(iter(rows), "")
        facts = rows.get(name, {}).get("benchlib")
        return name, _clean(facts.get("engine", "")) if isinstance(facts, dict) else ""

    async def complete(
        self,
        server: Server,
        ids: Sequence[int],
        max_new: int,
        begun: Callable[[Any], None] = lambda _: None,
        first: Callable[[int], None] = lambda _: None,
    ) -> Answer:
        """Return the answer of a server, complete and checked. ``begun`` gets its stream, ``first`` the first token, at once.

        Of the tokens after it only the end has a time: they lie in the stream's buffer until then and are read together. To wake
        this task for each would take more than all else that a query costs.
        """
        asked: Row = {"model": server.model} if server.model else {}
        asked |= {"prompt": self.codec.decode(ids) if server.text else [*map(int, ids)]}
        asked |= {"max_tokens": max_new, "temperature": 0, "stream": True}
        if not server.text:  # servers of text may refuse a field that they do not know
            asked |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        answer, new = Answer(server.text, max_new), list[int]()
        url, body = f"{server.url}/v1/completions", json.dumps(asked).encode()
        async with self._session.post(
            url, data=body, allow_redirects=False, timeout=NO_TIMER, read_bufsize=BUFFER
        ) as response:
            if response.status != 200:
                _accept(response.status, (await response.content.read(9_000)).decode(errors="replace").strip())
            content = response.content
            begun(content)
            while not content.at_eof():
                if new and not content.is_eof() and content.exception() is None:
                    await content.wait_eof()
                answer.take(await content.readany())
                if not new and (new := self.codec.count(answer.words, False) if answer.words else answer.ids):
                    first(new[0])
        if not answer.done and not answer.reason:
            raise aiohttp.ClientPayloadError("the stream ended before its end")
        if server.text:
            answer.ids = self.codec.count(answer.words, answer.reason == "stop")
        if not answer.ids or (not server.text and answer.stated not in (None, len(answer.ids))):
            least = "at least 1" if answer.stated is None else answer.stated
            raise LostAttempt(f"{len(answer.ids)} token ids where {least} tokens are stated")
        return answer

    def reason(self, error: BaseException, limit_s: float) -> str:
        """Return why there was no answer, as it can be stored: without halves of characters, and without our token.

        aiohttp says ``ssl:default`` of an http address, and nothing of a time that was over.
        """
        words = str(error) or type(error).__name__
        if isinstance(error, aiohttp.ClientPayloadError):
            words = "the stream ended before its end"
        elif isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
            number = error.os_error.errno or 0
            words = os.strerror(number).lower() if number > 0 else error.os_error.strerror or words
        elif isinstance(error, TimeoutError):
            words = str(error) or f"no answer within {limit_s:g} s"
        elif not isinstance(error, (LostAttempt, RefusedQuery, UserError, aiohttp.ClientError, OSError)):
            words = f"an answer that cannot be read ({type(error).__name__}: {error})"
        return _clean(words.replace(self.settings.token, "...") if self.settings.token else words)


def _accept(status: int, text: str) -> None:
    """Raise what a status other than 200 means: what is no fault of the query another server may answer."""
    if status in REDIRECTS:
        raise LostAttempt(f"{status}: {REDIRECTED}")
    if status in (401, 403):
        raise LostAttempt(
            f"{status}: it refuses the bearer token; set the environment variable BENCHLIB_TOKEN to the worker's {text}"
        )
    if text and status != 200:
        raise (LostAttempt if status in (408, 429) or status >= 500 else RefusedQuery)(f"{status} {text}")


def _clean(value: Any) -> str:
    """Return words of a server as they can be stored: JSON may hold halves of characters."""
    return str(value).encode(errors="replace").decode()[:300]


async def addresses(name: str) -> list[str]:
    """Return the URLs of a worker: itself, or one for each address of its name where it begins with ``dns+``."""
    try:
        parts = checked(name)
    except ValueError as error:
        raise UserError(f"workers: {error}") from None
    if not name.startswith(DNS):
        return [name.rstrip("/")]
    port = parts.port or PORTS[parts.scheme]
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"workers: {parts.hostname} has no address: {error}") from None
    hosts = sorted({str(row[4][0]) for row in rows})
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]
