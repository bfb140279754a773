"""The dispatcher against servers that die, hang, return, lie, stop half way or are slow: nothing is lost, nothing comes twice."""

import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from llm_servers import LONG_S, TOKEN, Faulty, own, until

from benchlib.core.errors import BackendUnavailable
from benchlib.workloads.llm import wire
from benchlib.workloads.llm.dispatch import MAX_ATTEMPTS, Dispatcher, in_flight
from benchlib.workloads.llm.engines import Policy, Query, Settings, sim_answer
from benchlib.workloads.llm.load import Client

# A server that is cut as SIGKILL does it may leave a connection that was just accepted to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PROMPTS = [[3 + (7 * row + place) % 400 for place in range(5 + row % 4)] for row in range(40)]
PATIENT = Policy(
    cap=4, deadline_s=LONG_S, stall_s=LONG_S, gone_s=LONG_S, probe_s=0.05, probe_limit_s=LONG_S, start_s=LONG_S
)


@pytest.fixture
def place():
    """Start servers and dispatchers that end with the test."""
    hosted, dispatchers = [], []

    class Place:
        def own(self, **options):
            hosted.append(own(**options))
            return hosted[-1]

        def faulty(self, fault=lambda number: "", other=None):
            server = Faulty(fault, other=other)
            hosted.append(server.hosted)
            return server

        def client(self, *servers, policy=PATIENT, token=TOKEN):
            urls = tuple(server.url for server in servers)
            dispatchers.append(Dispatcher(Settings(urls=urls, token=token, policy=policy)))
            dispatchers[-1].start()
            return Client(dispatchers[-1], PROMPTS, 16, LONG_S)

    yield Place()
    for dispatcher in dispatchers:
        dispatcher.stop()
    for item in hosted:
        if not item.loop.is_closed():
            item.cut()


def whole(client, table, failed=0):
    """Every query ended once, the failed ones are counted, and the others have exactly the tokens of an undisturbed run."""
    assert len(table) == len(set(table["query"])) and client.log.unended == 0 and client.log.repeated == 0
    assert int(table["failed"].sum()) == failed == len(client.log.errors)
    assert len(client.answers) == len(table) - failed
    assert all(ids == sim_answer(PROMPTS[sample], 16) for sample, ids in client.answers.items())
    done = table[~table["failed"]]
    assert (done["first_s"] >= done["issued_s"]).all() and (done["last_s"] >= done["first_s"]).all()
    return True


def test_a_worker_never_has_more_than_its_cap(place):
    client = place.client(place.own(slots=16))
    assert whole(client, client.at_once(40))
    attempts = client.engine.attempts
    open_at = [sum(row["sent_s"] <= one["sent_s"] < row["ended_s"] for row in attempts) for one in attempts]
    assert max(open_at) == PATIENT.cap


@pytest.mark.parametrize("fault", ["no end", "miscounts", "too many", "503", "429"])
def test_a_worker_that_fails_now_and_then_loses_nothing(place, fault):
    """It is set aside until it is healthy again, in which time the other one may have answered all: then it is asked again."""
    client = place.client(place.faulty(lambda number: fault if number % 4 == 2 else ""), place.own())
    again = 0

    def answered():
        nonlocal again
        table = client.at_once(40)
        assert whole(client, table)
        again += int((table["attempt"] > 1).sum())
        return client.engine.workers[0].tokens > 0 and again > 0

    until(answered)


# What a worker may send instead of an answer, always; those of bytes are events.
HOSTILE = {
    "no choices": b'{"choices": null}', "no event": b"", "negative id": b'{"choices": [{"token_ids": [5, -6]}]}',
    "half a character": b'{"error": "\\ud800"}', "307": "307", "401": "401",
    "tokens after the end": b'{"choices": [{"token_ids": [5], "finish_reason": "stop"}]}\n\ndata: {"choices": [{"token_ids": [6]}]}',
}  # fmt: skip


@pytest.mark.parametrize("fault", HOSTILE.values(), ids=HOSTILE)
def test_whatever_a_worker_sends_all_queries_are_answered(place, fault):
    client = place.client(place.faulty(lambda number: fault), place.own())
    assert whole(client, client.at_once(40))
    record = client.engine.record()
    json.dumps(record, ensure_ascii=False).encode()  # it can be stored
    assert [row["answered"] for row in record["workers"]] == [0, 40]
    assert client.log.table()["attempt"].max() == 2, "nobody is asked twice where another one can answer"


@pytest.mark.parametrize(
    "body",
    [
        b'event: error\ndata: {"error": "out of memory"}',
        b'data: {"object": "error", "message": "out of memory"}\n\ndata: [DONE]\n\n',
        b'{"error": {"message": "out of memory"}}',
    ],
)
def test_an_error_with_status_200_before_the_first_token_is_counted_with_its_text(place, body):
    """After all attempts: no other worker can answer."""

    async def other(request):
        if request.path != "/v1/completions" or (await request.json())["prompt"] == wire.WARM_UP:
            return None
        return web.Response(body=body)

    client = place.client(place.faulty(other=other))
    table = client.at_once(1)
    assert whole(client, table, 1) and np.isnan(table["first_s"]).all()
    assert f": out of memory (attempt {MAX_ATTEMPTS})" in next(iter(client.log.errors.values()))


def test_what_is_open_and_what_is_queued_ends_with_the_dispatcher(place):
    client = place.client(place.faulty(lambda number: "hang"))
    ended = []
    for rid in range(20):
        client.engine.submit(Query(rid, [5, 6], 4, print, lambda rid, ids, error: ended.append((rid, error))))
    until(lambda: len(client.engine.workers[0].open) == PATIENT.cap)
    client.engine.stop()
    assert sorted(rid for rid, _ in ended) == [*range(20)] and all("stopped" in error for _, error in ended)


class Codec:
    """A tokenizer with a token for each word."""

    def __init__(self, model):
        assert model == ""

    def decode(self, ids):
        return "News: " * len(ids)

    def count(self, words, stopped):
        return [5] * len(words.split()) + [2] * stopped


WORDS = b"""data: {"choices": [{"text": "a b"}]}

data: {"choices": [{"text": " c"}]}

data: {"choices": [{"finish_reason": "stop", "text": ""}], "usage": {"completion_tokens": 4}}

"""


def test_a_server_without_token_ids_is_asked_in_texts_by_itself(place, monkeypatch):
    """As `transformers serve`: 422 for a field that it does not know, and a stream that ends with its reason and without [DONE]."""

    async def other(request):
        if request.path != "/v1/completions":
            return None
        asked = await request.json()
        if "return_token_ids" in asked or not isinstance(asked["prompt"], str):
            return web.Response(status=422, text="Unexpected fields in the request: {'return_token_ids'}")
        return web.Response(body=WORDS)

    monkeypatch.setattr(wire, "codec", Codec)
    client = place.client(place.faulty(other=other))
    assert not client.at_once(6)["failed"].any() and set(map(tuple, client.answers.values())) == {(5, 5, 5, 2)}
    record = client.engine.record()
    assert record["workers"][0]["asked_in"] == "text" and record["counts"] == {"stated": 24, "counted": 24}


def test_an_answer_whose_only_line_has_no_end_has_a_first_token(place, monkeypatch):
    """Its first token came with its last byte: a query without that time would leave the percentile of all."""

    async def other(request):
        if request.path != "/v1/completions":
            return None
        if "return_token_ids" in await request.json():
            return web.Response(status=422, text="unexpected fields")
        return web.Response(body=b'data: {"choices": [{"text": "a b", "finish_reason": "length"}]}')

    monkeypatch.setattr(wire, "codec", Codec)
    table = place.client(place.faulty(other=other)).at_once(4)
    assert not table["failed"].any() and (table["first_s"] <= table["last_s"]).all()


def test_a_stream_that_stands_still_goes_to_another_worker(place):
    policy = replace(PATIENT, stall_s=1)
    client = place.client(place.faulty(lambda number: "hang" if number == 3 else ""), place.own(), policy=policy)
    table = client.at_once(40)
    assert whole(client, table) and any("nothing came for 1 s" in row["error"] for row in client.engine.attempts)


def test_when_all_are_gone_the_rest_fails_and_is_counted(place):
    """Soon, without waiting for any answer: all other limits are beyond the client's own."""
    servers = [place.faulty(lambda number: "hang") for _ in range(2)]
    client = place.client(*servers, policy=replace(PATIENT, gone_s=0.3, deadline_s=2 * LONG_S, stall_s=2 * LONG_S))

    def cut():
        until(lambda: all(server.asked == 1 + PATIENT.cap for server in servers))  # with its greeting
        for server in servers:
            server.hosted.cut()

    thread = threading.Thread(target=cut)
    thread.start()
    table = client.at_once(40)
    thread.join()
    failed = int(table["failed"].sum())
    assert failed > 0 and whole(client, table, failed)
    assert all("no worker was left for 0.3 s" in why for why in client.log.errors.values())
    assert len(client.at_once(3)) == 3 and len(client.log.errors) == 3, "later ones fail at once"


def test_a_query_without_end_fails_at_its_deadline(place):
    hangs = place.faulty(lambda number: "hang" if number == 2 else "")
    client = place.client(hangs, policy=replace(PATIENT, deadline_s=2))
    table = client.at_once(10)
    failed = int(table["failed"].sum())  # one; on a busy machine others may come late as well
    assert failed > 0 and whole(client, table, failed)
    assert all("not answered within 2 s" in why for why in client.log.errors.values())


def test_a_wrong_token_or_nobody_is_refused_at_the_start(place):
    with pytest.raises(BackendUnavailable, match="refuses the bearer token"):
        place.client(place.own(), token="another")
    dead = place.own()
    dead.cut()
    with pytest.raises(BackendUnavailable, match=r"not ready within 0.2 s \(/health: .*[Cc]onnect"):
        place.client(dead, policy=Policy(start_s=0.2))


def test_a_run_goes_on_with_the_workers_that_are_there_and_says_what_was_lost(place):
    dead = place.own()
    dead.cut()
    policy = replace(PATIENT, partial=True, start_s=0.1)
    client = place.client(place.own(step_s=0.005), dead, policy=policy)
    assert whole(client, client.at_once(20))
    record = client.engine.record(time.monotonic())
    assert [row["down_by"] == "" for row in record["workers"]] == [True, False]
    assert "was not ready within" in record["losses"][0]["because"] and record["losses"][0]["t_s"] == 0
    place.own(port=dead.port, step_s=0.005)
    until(lambda: client.engine.workers[1].ready)
    table = client.at_once(40)
    assert whole(client, table) and set(table["worker"]) == {0, 1}
    assert [event["event"] for event in client.engine.events] == ["down", "up"]
    assert "its /health answers" in client.engine.events[1]["because"], "why it came back, and not why it went"


def test_requests_in_flight_are_counted_by_worker():
    spans = [(0, 10.0, 12.0), (0, 11.0, 13.0), (1, 10.0, 14.0)]
    attempts = [{"worker": worker, "sent_s": sent, "ended_s": ended} for worker, sent, ended in spans]
    rows = in_flight(attempts, 2, 10.0, points=5)
    assert [row["open"] for row in rows] == [[1, 2, 1, 0, 0], [1, 1, 1, 1, 0]] and in_flight([], 2) == []
