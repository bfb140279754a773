"""Addresses of servers as users write them: http://HOST:PORT, or dns+http://NAME:PORT for every address of a name."""

import os
from collections.abc import Iterable, Sequence
from urllib.parse import SplitResult, urlsplit

from benchlib.core.errors import UserError

DNS = "dns+"  # before a URL: each address of the name is a worker, as of a headless service
PORTS = {"http": 80, "https": 443}
TOKEN = "BENCHLIB_TOKEN"  # the environment's variable; a command line can be read by everybody on the machine
ASK_S = 2.0  # for an answer before the run; who is not there yet is waited for by the run


def checked(given: str) -> SplitResult:
    """Return the parts of an address without ``dns+``. Raises ``ValueError`` that says what is wrong with it."""
    asked = f"write http://HOST:PORT or {DNS}http://NAME:PORT"
    parts = urlsplit(given.strip().removeprefix(DNS))
    if parts.scheme not in PORTS:
        raise ValueError(f"{given!r} is not the address of a server, its scheme is neither http nor https; {asked}")
    if parts.password or parts.username:
        raise ValueError("an address must not hold a password: it is stored; set the variable BENCHLIB_TOKEN")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if not parts.hostname or any(sign.isspace() for sign in parts.netloc):
        raise ValueError(f"{given!r} is not the address of a server, it names no host; {asked}")
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError(f"{given!r}: the port has to be a number from 1 to 65535; {asked}")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{given!r} is not the address of a server but of a page of it; {asked}, without /v1")
    return parts


def is_local(url: str) -> bool:
    """Return whether an address is of this machine, as far as its text says."""
    host = checked(url).hostname or ""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def workers(given: Iterable[str]) -> list[str]:
    """Return addresses of workers without what may be left out. Raises ``ValueError`` for a wrong one and for one named twice."""
    made: dict[tuple[str | None, int], str] = {}
    for url in given:
        parts = checked(url)
        place = parts.hostname, parts.port or PORTS[parts.scheme]
        if place in made:
            raise ValueError(f"{url!r} and {made[place]!r} are one server: name each once, or it gets twice its load")
        made[place] = url.strip().rstrip("/")
    return list(made.values())


def bearer_token() -> str:
    """Return the token for workers that were started elsewhere; '' where none is set."""
    return os.environ.get(TOKEN, "").strip()


def check_token(urls: Sequence[str]) -> None:
    """Raise ``UserError`` for servers that are there and refuse our bearer token, before anything starts."""
    import urllib.error  # slow to import, and only who has workers pays
    import urllib.request
    from concurrent.futures import ThreadPoolExecutor

    token = bearer_token()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the run reaches them

    def refused(url: str) -> bool:
        request = urllib.request.Request(f"{url.removeprefix(DNS)}/v1/models")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with opener.open(request, timeout=ASK_S):
                return False
        except urllib.error.HTTPError as error:
            with error:
                return error.code in (401, 403)
        except (OSError, ValueError):  # not there, or no HTTP: the run says what it is
            return False

    with ThreadPoolExecutor(max(1, min(16, len(urls)))) as pool:
        if wrong := [url for url, is_refused in zip(urls, pool.map(refused, urls), strict=True) if is_refused]:
            given = f"the token in {TOKEN} is not theirs" if token else f"{TOKEN} is not set here"
            raise UserError(
                f"workers: {', '.join(wrong)}: they refuse the bearer token, {given}; set it to the workers' token"
            )
