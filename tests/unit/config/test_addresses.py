"""Addresses of workers: scheme, host, port, no page, no password, none twice."""

import pytest
from aiohttp import web
from llm_servers import TOKEN, Faulty, own

from benchlib.benchmarks import BENCHMARKS
from benchlib.config.addresses import check_token, workers
from benchlib.config.schema import resolve
from benchlib.core.errors import UserError


def test_addresses_are_kept_as_they_are_given():
    given = ["http://a:8000/", "https://b", "dns+http://engine:8000", "http://[::1]:8000"]
    assert workers(given) == ["http://a:8000", "https://b", "dns+http://engine:8000", "http://[::1]:8000"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a:8000"], "its scheme is neither http nor https"),
        (["ftp://a:8000"], "its scheme"),
        (["http://:8000"], "names no host"),
        (["http://a:0"], "from 1 to 65535"),
        (["http://a:70000"], "Port out of range"),
        (["http://a:"], "from 1 to 65535"),
        (["http://a:8000/v1"], "leave out what follows the port"),
        (["http://a:8000?x=1"], "leave out what follows the port"),
        (["http://me:secret@a:8000"], "must not hold a password"),
        (["http://a:8000", "http://b:8000", "HTTP://A:8000/"], "one server"),
        (["https://a", "https://a:443"], "one server"),
    ],
)
def test_wrong_addresses_are_refused_with_what_to_write(given, words):
    with pytest.raises(ValueError, match=words):
        workers(given)


@pytest.mark.parametrize(
    "given",
    [
        "http://me:hunter2@a:8000", "http://hunter2@a:8000", "ftp://me:hunter2@a", "me:hunter2@a:8000", "http://a:8000?token=hunter2",
        "http://a:8000/hunter2", "http://a:8000#hunter2", "ftp://a?hunter2", "dns+http://hunter2@a:0", "http://me:hunter2@[a",
    ],
)  # fmt: skip
def test_the_reason_does_not_repeat_what_may_be_a_secret(given):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        workers([given])
    assert "hunter2" not in str(told.value)
    with pytest.raises(UserError) as told:
        resolve("serving", "smoke", "cpu", {"workers": given})
    assert "hunter2" not in str(told.value)


def test_a_redirect_is_refused_and_takes_the_token_nowhere(monkeypatch):
    monkeypatch.setenv("BENCHLIB_TOKEN", TOKEN)
    thief = Faulty(lambda number: "")

    async def elsewhere(request):
        return web.Response(status=302, headers={"Location": thief.url + request.path})

    worker = Faulty(lambda number: "", other=elsewhere)
    try:
        with pytest.raises(UserError, match=f"^workers: {worker.url}: it redirects to another address"):
            check_token([worker.url])
        assert worker.headers[0]["Authorization"] == f"Bearer {TOKEN}" and not thief.headers
    finally:
        worker.hosted.cut()
        thief.hosted.cut()


def test_a_wrong_token_is_refused_before_anything_starts(monkeypatch):
    """By both benchmarks that take workers; who is not there yet is left to the run."""
    server, gone = own(), own()
    gone.cut()
    try:
        for name in ("inference", "serving"):
            config = resolve(name, "smoke", "cpu", {"workers": f"{server.url},{gone.url}"}).config
            for token, words in (
                ("wrong", "the token in BENCHLIB_TOKEN is not its own"),
                ("", "BENCHLIB_TOKEN is not set here"),
            ):
                monkeypatch.setenv("BENCHLIB_TOKEN", token)
                with pytest.raises(UserError, match=f"^workers: {server.url}: it refuses the bearer token, {words}"):
                    BENCHMARKS[name].spec.refuse(config)
            monkeypatch.setenv("BENCHLIB_TOKEN", TOKEN)
            BENCHMARKS[name].spec.refuse(config)
    finally:
        server.cut()
