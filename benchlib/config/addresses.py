"""Addresses of servers as users write them: http://HOST:PORT, or dns+http://NAME:PORT for every address of a name."""

import os
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

DNS = "dns+"  # before a URL: each address of the name is a worker, as of a headless service
PORTS = {"http": 80, "https": 443}
TOKEN = "BENCHLIB_TOKEN"  # the environment's variable; a command line can be read by everybody on the machine
REDIRECTS = range(300, 400)  # statuses; nobody follows them: the token is for the server that was named
REDIRECTED = "it redirects to another address, which gets no token; name the server itself in workers="


def checked(url: str) -> SplitResult:
    """Return the parts of an address without ``dns+``. Raises ``ValueError`` that says what is wrong with it.

    It does not repeat what may be a secret: anything with an @, and what follows the port.
    """
    if "@" in url:
        raise ValueError(f"an address must not hold a password: it is stored; set the variable {TOKEN}")
    parts = urlsplit(url.strip().removeprefix(DNS))
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


def workers(urls: Iterable[str]) -> list[str]:
    """Return addresses without what may be left out. Raises ``ValueError`` for a wrong one, and one named twice."""
    servers: dict[tuple[str | None, int], str] = {}
    for url in urls:
        parts = checked(url)
        other = servers.setdefault((parts.hostname, parts.port or PORTS[parts.scheme]), url)
        if other is not url:
            raise ValueError(f"{url!r} and {other!r} are one server: name each once, or it gets twice its load")
    return [url.strip().rstrip("/") for url in servers.values()]


def bearer_token() -> str:
    """Return the token for workers that were started elsewhere; '' where none is set."""
    return os.environ.get(TOKEN, "").strip()
