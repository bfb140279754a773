"""A worker: one engine behind an HTTP server that speaks OpenAI's completions, with token ids in and out.

    benchlib serve --engine sim --port 8000

``POST /v1/completions`` takes ``prompt`` (token ids, or text where the engine has a tokenizer) and ``max_tokens`` and answers
greedily, as one object or, with ``stream``, as server-sent events: each token as the engine gives it. ``return_token_ids`` adds
the ids, as vLLM and SGLang do. ``POST /v1/chat/completions`` takes ``messages`` instead. A query whose client has gone is
cancelled. ``/v1/models`` says which engine answers, ``/health`` answers 200 while the worker takes work, ``/metrics`` speaks
Prometheus' text format. The worker listens on this machine alone unless it is given an address and a token. SIGTERM lets it
finish what it accepted.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import itertools
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import psutil
from aiohttp import web
from pydantic import AliasChoices, BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from benchlib.config.addresses import TOKEN
from benchlib.core.errors import BackendUnavailable, RunBroken, UserError, explained
from benchlib.core.files import read_text, write_text
from benchlib.core.machine import usable_cores
from benchlib.launch.diagnosis import EXIT_SKIPPED
from benchlib.launch.processes import THREAD_VARIABLES, die_with_parent
from benchlib.workloads.llm.engines import MEMORY, Local, Query, Settings, codec, make

MAX_NEW = 8192  # tokens of an answer
BACKLOG = 4096  # connections that the system may hold until they are accepted
POLL_S = 0.01
LAST = 500  # characters of a worker's errors that a message holds
# A client that goes on sending what was refused is cut off soon; it has this long to read the reason.
# One that goes away ends its request, and with it the work on its query.
RUNNER: dict[str, Any] = {
    "access_log": None, "shutdown_timeout": 1.0, "lingering_time": 0.1, "handler_cancellation": True,
}  # fmt: skip
# Fields that would make the answer another than the greedy one, with the only value that they may have.
GREEDY: dict[str, tuple[Any, ...]] = {
    "temperature": (0, None), "n": (1, None), "best_of": (1, None), "echo": (False, None), "logprobs": (None,),
    "suffix": (None, ""), "stop": (None, []), "presence_penalty": (0, None), "frequency_penalty": (0, None),
}  # fmt: skip


@dataclass(frozen=True)
class Options(Settings):
    """What a worker process is started with, as one JSON object; one with ``announce``, a file for its address, ends with its parent."""

    engine: str = ""
    model: str = "tiny"
    host: str = "127.0.0.1"
    port: int = 8000
    token_file: str = ""
    max_queue: int = 4096  # requests accepted and not answered yet; beyond it 429
    max_body: int = 4 * 2**20
    drain_s: float = 60.0
    announce: str = ""


class Ask(BaseModel, strict=True):
    """The body of a request. The context is the ``Codec`` that reads a prompt of text; None: there is none."""

    prompt: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1, le=MAX_NEW)
    stream: bool | None = False
    return_token_ids: bool | None = False

    @model_validator(mode="before")
    @classmethod
    def _is_greedy(cls, values: Any) -> Any:
        for name, allowed in GREEDY.items() if isinstance(values, dict) else ():
            if (value := values.get(name, allowed[0])) not in allowed:
                raise ValueError(f"{name} = {value!r}: this worker decodes greedily; leave {name} out")
        return values

    @field_validator("prompt", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        return info.context.encode(value) if info.context and value and isinstance(value, str) else value


class Part(BaseModel):
    """A part of a message."""

    text: str


class Message(BaseModel):
    """A turn of a conversation."""

    role: str
    content: str | list[Part]

    def turn(self) -> dict[str, str]:
        """Return it with its parts as one text."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role, "content": "".join(parts)}


class Chat(Ask):
    """The body of a request for a chat; ``prompt`` is what the model's template makes of its messages."""

    prompt: list[int] = []
    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(128, ge=1, le=MAX_NEW, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))

    @model_validator(mode="after")
    def _apply_template(self, info: ValidationInfo) -> Self:
        if not info.context:
            reason = "this engine has no tokenizer; serve a model (--engine static), or send token ids"
            raise ValueError(f"messages: {reason}")
        self.prompt = info.context.chat([message.turn() for message in self.messages])
        return self


Events = asyncio.Queue[tuple[list[int], str | None]]  # of a query: its tokens so far; at the end '' or why it failed


class Server:
    """The requests of one engine. ``open`` counts those that have no answer yet; ``codec`` is that of its tokenizer, if it has one."""

    def __init__(self, engine: Local, options: Options, codec: Any = None) -> None:
        self.engine, self.options, self.codec, self.draining = engine, options, codec, False
        self.name = options.model if codec else options.engine
        self.counts = dict.fromkeys(("ok", "error", "refused", "cancelled"), 0)
        self.tokens, self.open = 0, 0
        self._token = f"Bearer {options.token}".encode() if options.token else b""
        self._ids = itertools.count(1)

    def application(self) -> web.Application:
        application = web.Application(client_max_size=self.options.max_body, middlewares=[self._guard])
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_post("/v1/chat/completions", partial(self._complete, form=Chat))
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

    async def _complete(self, request: web.Request, form: type[Ask] = Ask) -> web.StreamResponse:
        if self.draining or self.engine.failure:
            return self._refuse(503, self.engine.failure or "this worker is shutting down")
        if self.open >= self.options.max_queue:
            return self._refuse(429, f"{self.open} requests are open, which is this worker's limit")
        self.open += 1
        rid, events = next(self._ids), Events()
        try:
            ask = form.model_validate_json(await request.read(), context=self.codec)
            if max(ask.prompt) >= self.engine.vocabulary:  # such an id would end more than its own query
                raise ValueError(
                    f"prompt: token id {max(ask.prompt)}, this model has 0 to {self.engine.vocabulary - 1}"
                )
            loop = asyncio.get_running_loop()

            def tell(_: int, ids: Sequence[int], error: str | None = None) -> None:
                if error is not None or ask.stream:
                    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                        loop.call_soon_threadsafe(events.put_nowait, ([*ids], error))

            query = Query(rid, ask.prompt, ask.max_tokens, lambda _, time_s, token: tell(rid, [token]), tell)
            query.on_more = lambda *_: tell(rid, query.tokens)
            self.engine.submit(query)
            return await self._answer(request, rid, ask, events)
        except ValueError as error:  # also a query that is longer than the model takes
            return self._refuse(400, explained(error) if isinstance(error, ValidationError) else str(error))
        finally:
            self.open -= 1  # last: who sees it closed sees it counted

    async def _answer(self, request: web.Request, rid: int, ask: Ask, events: Events) -> web.StreamResponse:
        """Send new tokens as they come where they are streamed, else all of them."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response, sent = web.StreamResponse(headers=headers), 0
        error: str | None = None
        try:
            if ask.stream:
                await response.prepare(request)
            while error is None:
                ids, error = await events.get()
                # What came meanwhile goes along: each event costs both sides.
                while error is None and not events.empty():
                    ids, error = events.get_nowait()
                if error is not None:
                    self.counts["error" if error else "ok"] += 1
                    self.tokens += len(ids)
                values = self._chunk(rid, ask, ids, sent, error)
                if not ask.stream:
                    return web.json_response(values, status=500 if error else 200)
                await response.write(b"data: " + json.dumps(values, separators=(",", ":")).encode() + b"\n\n")
                sent = len(ids)
            await response.write(b"" if error else b"data: [DONE]\n\n")
            await response.write_eof()
        except ConnectionError:  # the client has gone
            pass
        finally:
            if error is None:  # others wait for the slot
                self.counts["cancelled"] += 1
                self.engine.cancel(rid)
        return response

    def _chunk(self, rid: int, ask: Ask, ids: list[int], sent: int, error: str | None) -> dict[str, Any]:
        """Return an object of OpenAI's completions with the tokens of an answer that were not ``sent``, or of its error."""
        if error:
            return {"error": {"message": error, "code": 500}}
        done = error is not None
        if self.codec and not ask.return_token_ids:
            # What the answer's text has more with them; a character whose bytes are not all there yet waits.
            whole, old = self.codec.decode(ids), self.codec.decode(ids[:sent]).rstrip("\ufffd")
            text = (whole if done else whole.rstrip("\ufffd"))[len(old) :]
        else:
            text = "".join(f" {item}" for item in ids[sent:])  # a word for each token: clients of text count something
        kind, part = "text_completion", {"text": text}  # type: str, dict[str, Any]
        if isinstance(ask, Chat):
            kind = f"chat.completion{'.chunk' * bool(ask.stream)}"
            part = {"delta" if ask.stream else "message": {"role": "assistant", "content": text}}
        reason = ("length" if len(ids) >= ask.max_tokens else "stop") if done else None
        choice = {"index": 0, **part, "finish_reason": reason}
        choice |= {"token_ids": ids[sent:]} if ask.return_token_ids else {}
        counts = {"prompt_tokens": len(ask.prompt), "completion_tokens": len(ids)}
        usage = {"usage": counts | {"total_tokens": sum(counts.values())}} if done else {}
        common = {"id": f"cmpl-{rid}", "object": kind, "created": int(time.time()), "model": self.name}
        return common | {"choices": [choice]} | usage

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.name, "object": "model", "owned_by": "benchlib"}
        own = {"engine": self.options.engine, "note": self.engine.note}
        return web.json_response({"object": "list", "data": [model | {"benchlib": own}]})

    async def _health(self, _: web.Request) -> web.Response:
        status = self.engine.failure or ("draining" if self.draining else "ready")
        return web.json_response({"status": status, "open": self.open}, status=200 if status == "ready" else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        process = psutil.Process()
        times, memory = process.cpu_times(), (process.memory_info().rss, self.engine.device_memory()[0])
        values = {f'benchlib_requests_total{{outcome="{key}"}}': count for key, count in self.counts.items()} | {
            "benchlib_generated_tokens_total": self.tokens,
            "benchlib_requests_open": self.open,
            "process_cpu_seconds_total": times.user + times.system,
            **dict(zip(MEMORY.values(), memory, strict=True)),
        }
        text = "".join(f"{name} {value}\n" for name, value in values.items() if value is not None)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})


def check_place(host: str, token: str) -> None:
    """Raise ``UserError`` for an address that other machines reach without a token."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not token:
        fix = f"set a bearer token in the environment variable {TOKEN} (or --token-file), or leave --host out"
        raise UserError(f"--host {host} lets other machines in: {fix}")


async def serve(server: Server) -> bool:
    """Serve until SIGTERM or SIGINT, then answer what was accepted. Return whether all of it was, in the time for it.

    ``Options.announce`` gets the address once the worker takes requests; port 0 is any free one.
    """
    options, stop, loop = server.options, asyncio.Event(), asyncio.get_running_loop()
    runner = web.AppRunner(server.application(), **RUNNER)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port, backlog=BACKLOG).start()
    host, port = runner.addresses[0][:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if options.announce:
        write_text(options.announce, url)
    print(f"{server.name} serves on {url}", flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    server.draining = True  # /health says so, while what was accepted is answered
    end = time.monotonic() + options.drain_s
    while server.open and time.monotonic() < end:
        await asyncio.sleep(0.02)
    left = server.open
    await runner.cleanup()
    print(f"ended with {left} requests unanswered" if left else "ended, every request answered", flush=True)
    return not left


def main(text: str) -> int:
    """Serve as ``Options`` say. Exit codes: 0 drained, 1 not all answered, 2 wrong input, 3 (to a pool 77) no device or weights."""
    engine = None
    try:
        values = json.loads(text)
        if "announce" in values:
            die_with_parent(os.getppid())
        if "step_ms" in values:
            values["step_s"] = 1e-3 * values.pop("step_ms")
        token = read_text(file) if (file := values.get("token_file")) else os.environ.get(TOKEN, "")
        options = Options(**values, token=token.strip())
        check_place(options.host, options.token)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY:  # each connection is an open file; macOS takes no number without a limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        engine = make(options.engine, options)
        engine.start()
        server = Server(engine, options, None if options.engine == "sim" else codec(options.model))
        return 0 if asyncio.run(serve(server)) else 1
    except BackendUnavailable as error:
        print(f"benchlib serve: {error}", file=sys.stderr)
        return EXIT_SKIPPED if options.announce else 3  # what was named is not here, as of `benchlib run`
    except (UserError, OSError) as error:
        print(f"benchlib serve: {error}", file=sys.stderr)
        return 2
    finally:
        if engine:
            engine.stop()


class Pool:
    """Workers on this machine: each a process of this module on a free port of loopback, with one token. They share the cores.

        with Pool(folder, [{"engine": "sim"}, {"engine": "sim", "step_ms": 20}]) as pool:
            pool.urls, pool.token

    To be used by the main thread: the workers end with the thread that started them. ``ready_s`` are the seconds that each took
    to get ready.
    """

    def __init__(self, folder: Path, options: Sequence[Mapping[str, Any]], start_s: float = 120.0) -> None:
        self.folder, self.options, self.start_s = folder, list(options), start_s
        # Workers share the cores: with all of them each, two would wait for each other at every product. Nor may they spin.
        share = max(1, usable_cores() // max(1, len(options)))
        self._environment = {"OMP_WAIT_POLICY": "PASSIVE", **dict.fromkeys(THREAD_VARIABLES, str(share))}
        self.token = secrets.token_urlsafe(24)
        self.urls = [""] * len(options)
        self.ready_s = [0.0] * len(options)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._began: dict[int, float] = {}

    def __enter__(self) -> "Pool":
        try:
            for index in range(len(self.options)):
                self.start(index)
            for index in range(len(self.options)):
                self.wait(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for index in self.processes:
            self.kill(index)

    def start(self, index: int) -> None:
        """Start a worker, again on the port that it had."""
        self.folder.mkdir(parents=True, exist_ok=True)
        announce = self._file(index, "url")
        announce.unlink(missing_ok=True)
        port = int(self.urls[index].rpartition(":")[2] or 0)
        options = {**self.options[index], "port": port, "announce": str(announce)}
        command = [sys.executable, "-m", "benchlib.workloads.llm.server", json.dumps(options)]
        env = {**os.environ, **self._environment, TOKEN: self.token}
        with self._file(index, "log").open("ab") as log:
            self.processes[index] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        self._began[index] = time.monotonic()

    def wait(self, index: int) -> None:
        """Wait until a worker takes requests. Raises ``RunBroken`` for one that ends or takes too long."""
        announce = self._file(index, "url")
        while not announce.exists():
            code, took_s = self.processes[index].poll(), time.monotonic() - self._began[index]
            if code is not None or took_s > self.start_s:
                words = self._file(index, "log").read_text("utf-8", "replace").strip()[-LAST:] or "no output"
                if code == EXIT_SKIPPED:
                    raise BackendUnavailable(words)
                how = f"was not ready within {self.start_s:g} s" if code is None else f"ended with exit code {code}"
                raise RunBroken(f"worker {index} {how}: {words}")
            time.sleep(POLL_S)
        self.ready_s[index] = time.monotonic() - self._began[index]
        self.urls[index] = announce.read_text()

    def kill(self, index: int) -> None:
        """End a worker at once; it is gone when this returns."""
        self.processes[index].kill()
        self.processes[index].wait()

    def _file(self, index: int, kind: str) -> Path:
        return self.folder / f"worker-{index}.{kind}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
