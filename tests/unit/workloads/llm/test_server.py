"""The worker: what it speaks, what it refuses, how many connections it holds, and how it ends."""

import asyncio
import json
import socket
import urllib.error
import urllib.request

import psutil
import pytest
from llm_servers import LONG_S, TOKEN, own, until

from benchlib.core.errors import UserError
from benchlib.workloads.llm.dispatch import Dispatcher
from benchlib.workloads.llm.engines import Policy, Settings, sim_answer
from benchlib.workloads.llm.load import Client
from benchlib.workloads.llm.server import Pool, check_place, main

IDS = [5, 6, 7]


@pytest.fixture(scope="module")
def worker():
    hosted = own(max_body=20_000, max_queue=3)
    yield hosted
    hosted.cut()


def ask(worker, path="/v1/completions", data=None, token=TOKEN, **values):
    """Return status and body of a request."""
    body = data if data is not None else json.dumps(values).encode() if values else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(worker.url + path, body, headers), timeout=LONG_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_an_answer_has_the_ids_of_the_engine_whole_or_streamed(worker):
    expected = sim_answer(IDS, 8)
    status, body = ask(worker, prompt=IDS, max_tokens=8, return_token_ids=True)
    answer = json.loads(body)
    assert status == 200 and answer["choices"][0]["token_ids"] == expected
    count = len(expected)
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
    status, body = ask(worker, prompt=IDS, max_tokens=8, return_token_ids=True, stream=True)
    *events, end, rest = body.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert (end, rest) == ("data: [DONE]", "")
    assert [item for chunk in chunks for item in chunk["choices"][0]["token_ids"]] == expected
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons.pop() in ("stop", "length") and not any(reasons)
    assert "token_ids" not in ask(worker, prompt=IDS, max_tokens=8)[1]


@pytest.mark.parametrize(
    ("values", "status", "words"),
    [
        *(({"prompt": prompt}, 400, "prompt") for prompt in ("text", [], [1, True], [-1], [1, 2**31])),
        ({"prompt": IDS, "max_tokens": 10**9}, 400, "max_tokens = 10"),
        *(({"prompt": IDS} | other, 400, "greedily") for other in ({"temperature": 0.7}, {"n": 2})),
        *(({"prompt": IDS, "token": token}, 401, "missing or wrong") for token in ("wrong", "\xfcber", "")),
        ({"data": b"not json"}, 400, "Invalid JSON"),
        ({"prompt": [1] * 9000, "max_tokens": 4}, 413, "20000"),
        ({"path": "/nowhere"}, 404, "Not Found"),
    ],
)
def test_what_it_cannot_answer_is_refused_with_the_reason(worker, values, status, words):
    code, body = ask(worker, **values)
    assert code == status and words in json.loads(body)["error"]["message"]


def test_health_needs_no_token_and_metrics_count(worker):
    assert ask(worker, "/health", token="")[0] == 200 and ask(worker, "/metrics", token="")[0] == 401
    prometheus = pytest.importorskip("prometheus_client.parser")
    families = prometheus.text_string_to_metric_families(ask(worker, "/metrics")[1])
    samples = [item for family in families for item in family.samples]
    values = {(item.name, *item.labels.values()): item.value for item in samples}
    assert values["benchlib_requests_total", "ok"] > 0 and values["process_cpu_seconds_total",] > 0
    assert values["benchlib_requests_open",] == 0 and ("benchlib_device_memory_peak_bytes",) not in values
    assert values["process_resident_memory_bytes",] == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node1"])
def test_other_machines_are_let_in_by_a_token_alone(host, capsys, monkeypatch):
    monkeypatch.delenv("BENCHLIB_TOKEN", raising=False)
    check_place(host, "secret")
    for own_place in ("127.0.0.1", "::1", "localhost"):
        check_place(own_place, "")
    with pytest.raises(UserError, match="lets other machines in"):
        check_place(host, "")
    assert main(json.dumps({"engine": "sim", "host": host})) == 2 and "BENCHLIB_TOKEN" in capsys.readouterr().err


def test_a_worker_process_holds_1000_connections_and_drains(tmp_path):
    """And its client loses nothing while it drains, nor when it is killed and started again."""
    options = [{"engine": "sim", "slots": 8, "step_ms": 5}] * 2
    with Pool(tmp_path, options) as pool:
        port = int(pool.urls[0].rpartition(":")[2])
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(1000)]
        prompts = [[3 + row, 4, 5] for row in range(60)]
        policy = Policy(cap=16, probe_s=0.05, probe_limit_s=LONG_S, deadline_s=LONG_S, stall_s=LONG_S, gone_s=LONG_S)
        dispatcher = Dispatcher(Settings(urls=tuple(pool.urls), token=pool.token, policy=policy))
        dispatcher.start()
        client, loop = Client(dispatcher, prompts, 16, LONG_S), asyncio.new_event_loop()
        try:
            assert not client.at_once(60)["failed"].any()
            running = loop.run_in_executor(None, client.at_once, 60)
            until(lambda: dispatcher.workers[0].open)
            pool.processes[0].terminate()  # with queries under way: it answers them and ends
            table = loop.run_until_complete(running)
            assert not table["failed"].any() and client.log.repeated == 0
            assert pool.processes[0].wait(LONG_S) == 0
            assert "every request answered" in (tmp_path / "worker-0.log").read_text()
            # It refuses what comes late, or has closed the idle connection on which that comes.
            late = ("503", "Server disconnected", "Connect call failed", "reset")
            errors = [row["error"] for row in dispatcher.attempts if row["error"]]
            assert all(any(word in error for word in late) for error in errors), errors
            pool.kill(1)
            pool.start(0)
            pool.wait(0)
            table = client.at_once(20)
            assert not table["failed"].any() and set(table["worker"]) == {0}
        finally:
            loop.close()
            dispatcher.stop()
            for connection in held:
                connection.close()


def test_a_client_that_goes_away_frees_its_slot(worker):
    """Its query is worked on no more, and the next one does not wait for it."""
    before = worker.server.counts["cancelled"]
    body = json.dumps({"prompt": IDS, "max_tokens": 8000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", worker.port), timeout=LONG_S) as connection:
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(1000)
        until(lambda: (worker.server.open, len(worker.engine._open)) == (1, 1))
    until(lambda: (worker.server.open, len(worker.engine._open)) == (0, 0))
    assert worker.server.counts["cancelled"] == before + 1


def test_who_asks_a_worker_hears_what_it_says_of_its_engine(worker, monkeypatch):
    monkeypatch.setattr(worker.server.engine, "note", "it computes with eager", raising=False)
    dispatcher = Dispatcher(Settings(urls=(worker.url,), token=TOKEN, policy=Policy(start_s=LONG_S)))
    dispatcher.start()
    try:
        assert [(each.engine, each.note) for each in dispatcher.workers] == [("sim", "it computes with eager")]
    finally:
        dispatcher.stop()
