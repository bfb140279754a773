"""Addresses of workers: scheme, host, port, no page, no password, none twice."""

import pytest

from benchlib.config.addresses import workers
from benchlib.config.schema import resolve
from benchlib.core.errors import UserError


def test_addresses_are_kept_as_they_are_given():
    urls = ["http://a:8000/", "https://b", "dns+http://engine:8000", "http://[::1]:8000"]
    assert workers(urls) == ["http://a:8000", "https://b", "dns+http://engine:8000", "http://[::1]:8000"]


@pytest.mark.parametrize(
    ("urls", "words"),
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
def test_wrong_addresses_are_refused_with_what_to_write(urls, words):
    with pytest.raises(ValueError, match=words):
        workers(urls)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@a:8000", "http://hunter2@a:8000", "ftp://me:hunter2@a", "me:hunter2@a:8000", "http://a:8000?token=hunter2",
        "http://a:8000/hunter2", "http://a:8000#hunter2", "ftp://a?hunter2", "dns+http://hunter2@a:0", "http://me:hunter2@[a",
    ],
)  # fmt: skip
def test_the_reason_does_not_repeat_what_may_be_a_secret(url):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        workers([url])
    assert "hunter2" not in str(error.value)
    with pytest.raises(UserError) as error:
        resolve("serving", "smoke", "cpu", {"workers": url})
    assert "hunter2" not in str(error.value)
