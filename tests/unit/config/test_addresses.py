"""Addresses of workers: scheme, host, port, no page, no password, none twice."""

import pytest
from llm_servers import TOKEN, own

from benchlib.benchmarks import BENCHMARKS
from benchlib.config.addresses import workers
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
        (["http://a b:8000"], "names no host"),
        (["http://a:0"], "from 1 to 65535"),
        (["http://a:70000"], "from 1 to 65535"),
        (["http://a:"], "from 1 to 65535"),
        (["http://a:http"], "from 1 to 65535"),
        (["http://a:8000/v1"], "without /v1"),
        (["http://a:8000?x=1"], "a page of it"),
        (["http://me:secret@a:8000"], "must not hold a password"),
        (["http://a:8000", "http://b:8000", "HTTP://A:8000/"], "one server"),
        (["https://a", "https://a:443"], "one server"),
    ],
)
def test_wrong_addresses_are_refused_with_what_to_write(given, words):
    with pytest.raises(ValueError, match=words):
        workers(given)


def test_a_wrong_token_is_refused_before_anything_starts(monkeypatch):
    """By both benchmarks that take workers; who is not there yet is left to the run."""
    server, gone = own(), own()
    gone.cut()
    try:
        for name in ("inference", "serving"):
            config = resolve(name, "smoke", "cpu", {"workers": f"{server.url},{gone.url}"}).config
            for token, words in (
                ("wrong", "the token in BENCHLIB_TOKEN is not theirs"),
                ("", "BENCHLIB_TOKEN is not set here"),
            ):
                monkeypatch.setenv("BENCHLIB_TOKEN", token)
                with pytest.raises(UserError, match=f"^workers: {server.url}: they refuse the bearer token, {words}"):
                    BENCHMARKS[name].refuse(config)
            monkeypatch.setenv("BENCHLIB_TOKEN", TOKEN)
            BENCHMARKS[name].refuse(config)
    finally:
        server.cut()
