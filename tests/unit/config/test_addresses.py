"""Addresses of workers: scheme, host, port, no page, no password, none twice."""

import pytest

from benchlib.config.addresses import workers


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
