"""A worker: one engine behind an HTTP server that speaks OpenAI's completions, with token ids in and out.

    benchlib serve --engine sim --port 8000

``POST /v1/completions`` takes ``prompt`` (token ids, or text where the engine has a tokenizer) and ``max_tokens`` and answers
greedily, as one object or, with ``stream``, as server-sent events: each token as the engine gives it. ``return_token_ids`` adds
the ids, as vLLM and SGLang do. A query whose client has gone is cancelled. ``/v1/models`` says which engine answers, ``/health`` answers 200 while the worker takes work, ``/metrics`` speaks Prometheus' text format. The worker listens on this
machine alone unless it is given an address and a token. SIGTERM lets it finish what it accepted.
"""

import asyncio
import contextlib
import hmac
import importlib
import ipaddress
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from benchlib.config.addresses import TOKEN
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.files import write_json
from benchlib.launch.diagnosis import EXIT_SKIPPED
from benchlib.launch.processes import die_with_parent
from benchlib.workloads.llm.engines import MEMORY, Computing, Settings, make

SERVED = ("sim", "static", "continuous")  # the engines that answer here; another server is no worker of this one
BACKLOG = 4096  # connections that the system may hold until they are accepted
# A client that goes on sending what was refused is cut off soon; it has this long to read the reason.
# One that goes away ends its request, and with it the work on its query.
RUNNER: dict[str, Any] = {
    "access_log": None, "shutdown_timeout": 1.0, "lingering_time": 0.1, "handler_cancellation": True,
}  # fmt: skip
TEXTS = "benchlib.workloads.llm.texts"  # imported where an engine computes: it needs transformers
# Fields that would make the answer another than the greedy one, with the only value that they may have.
GREEDY: dict[str, tuple[Any, ...]] = {
    "temperature": (0, None), "n": (1, None), "best_of": (1, None), "echo": (False, None), "logprobs": (None,),
    "suffix": (None, ""), "stop": (None, []), "presence_penalty": (0, None), "frequency_penalty": (0, None),
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a worker accepts. Bodies in bytes, times in seconds."""

    body_bytes: int = 4 * 2**20
    queue: int = 4096  # requests accepted and not answered yet; beyond it 429
    new_tokens: int = 8192
    drain_s: float = 60.0


@dataclass(frozen=True)
class Ask:
    """One request, checked."""

    ids: list[int]
    max_new: int
    stream: bool
    with_ids: bool

    @classmethod
    def parse(cls, body: bytes, limits: Limits, vocabulary: int = 2**31, codec: Any = None) -> "Ask":
        """Read the body of a request; token ids are below ``vocabulary``. Raises ``ValueError`` that says what is wrong with it.

        ``codec`` (``texts.Codec``) reads prompts of text; None: there are none.
        """
        values = json.loads(body)
        if not isinstance(values, dict):
            raise ValueError("the body has to be a JSON object")
        for name, allowed in GREEDY.items():
            if (value := values.get(name, allowed[0])) not in allowed:
                raise ValueError(f"{name} = {value!r}: this worker decodes greedily; leave {name} out")
        ids = values.get("prompt")
        if codec and isinstance(ids, str) and ids:
            ids = list(codec.encode(ids))
        if not isinstance(ids, list) or not ids or not all(type(item) is int for item in ids):
            also = ", or a text" if codec else ": this worker has no tokenizer"
            raise ValueError(f"prompt has to be a list of token ids{also}")
        if min(ids) < 0 or max(ids) >= vocabulary:  # such an id would end more than its own query
            has = f"this model has 0 to {vocabulary - 1}"
            raise ValueError(f"prompt has token ids from {min(ids)} to {max(ids)}: {has}")
        max_new = values.get("max_tokens", 16)
        if type(max_new) is not int or not 1 <= max_new <= limits.new_tokens:
            raise ValueError(f"max_tokens = {max_new!r}: expected a whole number from 1 to {limits.new_tokens}")
        return cls(ids, max_new, bool(values.get("stream")), bool(values.get("return_token_ids")))


Events = asyncio.Queue[tuple[Sequence[int], bool, str]]  # of a query: new tokens, whether that is all, why it failed


class Server:
    """The requests of one engine. ``open`` counts those that have no answer yet; ``kind`` is the engine's name in ``ENGINES``."""

    def __init__(
        self,
        engine: Computing,
        name: str,
        limits: Limits = Limits(),
        token: str = "",
        kind: str = "",
        codec: Any = None,  # texts.Codec, where it has a tokenizer
    ) -> None:
        self.engine, self.name, self.limits, self.draining = engine, name, limits, False
        self.kind, self.codec = kind, codec
        self.counts = dict.fromkeys(("ok", "error", "refused", "cancelled"), 0)
        self.tokens, self.open = 0, 0
        self._token = f"Bearer {token}".encode() if token else b""
        self._ids = itertools.count(1)
        self._events: dict[int, Events] = {}  # of queries that the engine works on
        self._loop: asyncio.AbstractEventLoop | None = None

    def application(self) -> web.Application:
        """Return the application, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        application = web.Application(client_max_size=self.limits.body_bytes, middlewares=[self._guard])
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/metrics", self._metrics)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Ask for the token before the body is read, but for ``/health``, which probes read; answer errors in OpenAI's form."""
        if request.path == "/health":
            return await self._health(request)
        sent = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._token and not hmac.compare_digest(sent, self._token):
            return self._refuse(401, "the bearer token is missing or wrong")
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except web.HTTPException as error:
            return self._refuse(error.status, error.text or error.reason)

    def _refuse(self, status: int, message: str) -> web.Response:
        self.counts["refused"] += 1
        return web.json_response({"error": {"message": message, "code": status}}, status=status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.draining or self.engine.failure:
            return self._refuse(503, self.engine.failure or "this worker is shutting down")
        if self.open >= self.limits.queue:
            return self._refuse(429, f"{self.open} requests are open, which is this worker's limit")
        rid, events = next(self._ids), Events()
        self.open += 1
        try:
            vocabulary = self.engine.facts.get("vocabulary", 2**31)
            ask = Ask.parse(await request.read(), self.limits, vocabulary, self.codec)
            self._events[rid] = events
            self.engine.submit(
                rid, ask.ids, ask.max_new, self._on_first, self._on_done, self._on_more if ask.stream else None
            )
            answer = self._stream(request, rid, ask, events) if ask.stream else self._whole(rid, ask, events)
            return await answer
        except (ValueError, UserError, RecursionError) as error:  # or longer than the model takes
            self._events.pop(rid, None)
            return self._refuse(400, str(error))
        finally:
            if self._events.pop(rid, None):  # its client has gone: others wait for the slot
                self.counts["cancelled"] += 1
                self.engine.cancel(rid)
            self.open -= 1  # last: who sees it closed sees it counted

    # The engine calls from threads of its own.

    def _on_first(self, rid: int, _time_s: float, token: int) -> None:
        self._tell(rid, [token])

    def _on_more(self, rid: int, ids: Sequence[int]) -> None:
        self._tell(rid, list(ids))

    def _on_done(self, rid: int, ids: Sequence[int], error: str) -> None:
        self._tell(rid, list(ids), True, error)

    def _tell(self, rid: int, ids: list[int], done: bool = False, error: str = "") -> None:
        assert self._loop
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, rid, ids, done, error)

    def _deliver(self, rid: int, ids: list[int], done: bool, error: str) -> None:
        if not (events := self._events.get(rid)):  # its client has gone
            return
        events.put_nowait((ids, done, error))
        if done:
            del self._events[rid]
            self.counts["error" if error else "ok"] += 1
            self.tokens += len(ids)

    async def _whole(self, rid: int, ask: Ask, events: Events) -> web.Response:
        done = False
        while not done:
            ids, done, error = await events.get()
        if error:
            return web.json_response(_failure(error), status=500)
        return web.json_response(self._chunk(rid, ask, ids, self._reason(ask, ids)) | _usage(ask, ids))

    async def _stream(self, request: web.Request, rid: int, ask: Ask, events: Events) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response, sent, done = web.StreamResponse(headers=headers), list[int](), False
        with contextlib.suppress(ConnectionError):  # the client has gone
            await response.prepare(request)
            while not done:
                ids, done, error = await events.get()
                new = ids[len(sent) :] if done else ids
                values = self._chunk(rid, ask, new, self._reason(ask, ids) if done else None, sent)
                values |= _usage(ask, ids) if done else {}
                await response.write(_event(_failure(error) if error else values))
                sent += new
            await response.write(b"" if error else b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    def _chunk(
        self, rid: int, ask: Ask, ids: Sequence[int], reason: str | None, before: Sequence[int] = ()
    ) -> dict[str, Any]:
        if self.codec and not ask.with_ids:
            # What the answer's text has more with them; a character whose bytes are not all there yet waits.
            whole, old = self.codec.decode([*before, *ids]), self.codec.decode(before).rstrip("\ufffd")
            text = (whole if reason else whole.rstrip("\ufffd"))[len(old) :]
        else:
            text = "".join(f" {item}" for item in ids)  # a word for each token: clients of text count something
        with_ids = {"token_ids": list(ids)} if ask.with_ids else {}
        choices = [{"index": 0, "text": text, "finish_reason": reason, **with_ids}]
        common = {"id": f"cmpl-{rid}", "object": "text_completion", "created": int(time.time()), "model": self.name}
        return common | {"choices": choices}

    @staticmethod
    def _reason(ask: Ask, ids: Sequence[int]) -> str:
        return "length" if len(ids) >= ask.max_new else "stop"

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.name, "object": "model", "owned_by": "benchlib", "benchlib": {"engine": self.kind}}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        status = self.engine.failure or ("draining" if self.draining else "ready")
        return web.json_response({"status": status, "open": self.open}, status=200 if status == "ready" else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        name, process = "benchlib_requests_total", psutil.Process()
        times, memory = process.cpu_times(), (process.memory_info().rss, self.engine.device_memory()[0])
        of_outcomes = (f'{name}{{outcome="{key}"}} {count}' for key, count in self.counts.items())
        lines = [f"# TYPE {name} counter", *of_outcomes]
        for name, kind, value in (
            ("benchlib_generated_tokens_total", "counter", self.tokens),
            ("benchlib_requests_open", "gauge", self.open),
            ("process_cpu_seconds_total", "counter", f"{times.user + times.system:.6f}"),
            ("process_start_time_seconds", "gauge", f"{process.create_time():.3f}"),
            *((name, "gauge", held) for name, held in zip(MEMORY.values(), memory, strict=True)),
        ):
            lines += [f"# TYPE {name} {kind}", f"{name} {value}"] if value is not None else []
        return web.Response(text="\n".join(lines) + "\n", headers={"Content-Type": "text/plain; version=0.0.4"})


def _event(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values, separators=(",", ":")).encode() + b"\n\n"


def _failure(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "code": 500}}


def _usage(ask: Ask, ids: Sequence[int]) -> dict[str, Any]:
    count, new = len(ask.ids), len(ids)
    return {"usage": {"prompt_tokens": count, "completion_tokens": new, "total_tokens": count + new}}


def check_place(host: str, token: str) -> None:
    """Raise ``UserError`` for an address that other machines reach without a token."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not token:
        fix = f"set a bearer token in the environment variable {TOKEN} (or --token-file), or leave --host out"
        raise UserError(f"--host {host} lets other machines in: {fix}")


async def serve(server: Server, host: str, port: int, announce: Path | None = None) -> bool:
    """Serve until SIGTERM or SIGINT, then answer what was accepted. Return whether all of it was, in the time for it.

    ``announce`` is a file that gets the address once the worker takes requests; port 0 is any free one.
    """
    runner = web.AppRunner(server.application(), **RUNNER)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    bound = runner.addresses[0]
    name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
    url = f"http://{name}:{bound[1]}"
    if announce:
        write_json(announce, {"url": url, "pid": os.getpid()})
    print(f"{server.name} serves on {url}", flush=True)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    server.draining = True  # /health says so, while what was accepted is answered
    end = time.monotonic() + server.limits.drain_s
    while server.open and time.monotonic() < end:
        await asyncio.sleep(0.02)
    left = server.open
    await runner.cleanup()
    print(f"ended with {left} requests unanswered" if left else "ended, every request answered", flush=True)
    return not left


@dataclass(frozen=True)
class Options(Settings):
    """What a worker process is started with, as one JSON object; ``announce`` and ``with_parent`` are for who starts it."""

    engine: str = ""
    model: str = "tiny"
    host: str = "127.0.0.1"
    port: int = 8000
    token_file: str = ""
    max_queue: int = Limits.queue
    max_body: int = Limits.body_bytes
    drain_s: float = Limits.drain_s
    announce: str = ""
    with_parent: bool = False


def main(text: str) -> int:
    """Serve as ``Options`` say. Exit codes: 0 drained, 1 not all answered, 2 wrong input, 3 (to a pool 77) no device or weights."""
    engine = None
    try:
        values = json.loads(text)
        step = {"step_s": 1e-3 * values.pop("step_ms")} if "step_ms" in values else {}
        options = Options(**values, **step)
        if options.with_parent:
            die_with_parent(os.getppid())
        token = Path(options.token_file).read_text() if options.token_file else os.environ.get(TOKEN, "")
        check_place(options.host, token := token.strip())
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY:  # each connection is an open file; macOS takes no number without a limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        engine = make(options.engine, options, SERVED)
        engine.start()
        limits = Limits(options.max_body, options.max_queue, drain_s=options.drain_s)
        codec, name = None, options.engine
        if options.engine != "sim":
            codec, name = importlib.import_module(TEXTS).Codec(options.model), options.model
        server = Server(engine, name, limits, token, options.engine, codec)
        announce = Path(options.announce) if options.announce else None
        return 0 if asyncio.run(serve(server, options.host, options.port, announce)) else 1
    except BackendUnavailable as error:
        print(f"benchlib serve: {error}", file=sys.stderr)
        return EXIT_SKIPPED if options.with_parent else 3  # what was named is not here, as of `benchlib run`
    except (UserError, OSError) as error:
        print(f"benchlib serve: {error}", file=sys.stderr)
        return 2
    finally:
        if engine:
            engine.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
