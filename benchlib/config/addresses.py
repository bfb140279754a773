"""Addresses of servers as users write them: http://HOST:PORT, or dns+http://NAME:PORT for every address of a name."""

import http.client
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import SplitResult, urlsplit

from benchlib.core.errors import UserError

DNS = "dns+"  # before a URL: each address of the name is a worker, as of a headless service
PORTS = {"http": 80, "https": 443}
TOKEN = "BENCHLIB_TOKEN"  # the environment's variable; a command line can be read by everybody on the machine
REDIRECTS = range(300, 400)  # statuses; nobody follows them: the token is for the server that was named
REDIRECTED = "it redirects to another address, which gets no token; name the server itself in workers="
ASK_S = 2.0  # for an answer before the run; who is not there yet is waited for by the run


def checked(given: str) -> SplitResult:
    """Return the parts of an address without ``dns+``. Raises ``ValueError`` that says what is wrong with it.

    It does not repeat what may be a secret: anything with an @, and what follows the port.
    """
    if "@" in given:
        raise ValueError(f"an address must not hold a password: it is stored; set the variable {TOKEN}")
    parts = urlsplit(given.strip().removeprefix(DNS))
    faults = {
        "its scheme is neither http nor https": parts.scheme not in PORTS,
        "it names no host": not parts.hostname or any(sign.isspace() for sign in parts.netloc),
        "its port has to be a number from 1 to 65535": parts.netloc.endswith(":") or parts.port == 0,
        "leave out what follows the port, as /v1 or a token": parts.path.strip("/") or parts.query or parts.fragment,
    }
    for fault in (fault for fault, applies in faults.items() if applies):
        asked = f"write http://HOST:PORT or {DNS}http://NAME:PORT"
        raise ValueError(f"{parts.scheme}://{parts.netloc} is not the address of a server, {fault}; {asked}")
    return parts


def is_local(url: str) -> bool:
    """Return whether an address is of this machine, as far as its text says."""
    host = checked(url).hostname or ""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def workers(given: Iterable[str]) -> list[str]:
    """Return addresses without what may be left out. Raises ``ValueError`` for a wrong one, and one named twice."""
    servers: dict[tuple[str | None, int], str] = {}
    for url in given:
        parts = checked(url)
        other = servers.setdefault((parts.hostname, parts.port or PORTS[parts.scheme]), url)
        if other is not url:
            raise ValueError(f"{url!r} and {other!r} are one server: name each once, or it gets twice its load")
    return [url.strip().rstrip("/") for url in servers.values()]


def bearer_token() -> str:
    """Return the token for workers that were started elsewhere; '' where none is set."""
    return os.environ.get(TOKEN, "").strip()


def check_token(urls: Sequence[str]) -> None:
    """Raise ``UserError`` for servers that are there and refuse our token or redirect, before anything starts."""
    token = bearer_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def status(url: str) -> int:
        parts = urlsplit(url.removeprefix(DNS))
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=ASK_S)
        try:  # it follows no redirect, which would carry the token elsewhere
            connection.request("GET", "/v1/models", headers=headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):  # not there, or no HTTP: the run says what it is
            return 0
        finally:
            connection.close()

    with ThreadPoolExecutor(len(urls) or 1) as pool:
        codes = dict(zip(urls, pool.map(status, urls), strict=True))
    for url, code in codes.items():
        if code in REDIRECTS:
            raise UserError(f"workers: {url}: {REDIRECTED}")
        if code in (401, 403):
            reason = f"the token in {TOKEN} is not its own" if token else f"{TOKEN} is not set here"
            raise UserError(f"workers: {url}: it refuses the bearer token, {reason}; set it to the workers' token")
