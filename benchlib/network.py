"""This machine's addresses: which of them reaches another machine, on which interface, and whether one is ours."""

import ipaddress
import socket

DEFAULT_PORT = 29400  # torchrun's, where an endpoint names none


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``[IPv6]:PORT`` or ``HOST``."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.startswith("[")):
        return endpoint.strip("[]"), DEFAULT_PORT
    return host.strip("[]"), int(port)


def own_addresses() -> dict[str, str]:
    """Return the interface of each IPv4 and IPv6 address of this machine (of this network namespace)."""
    import psutil

    return {
        address.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def resolve(host: str) -> list[str]:
    """Return the addresses of a host; none where its name is not known."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)]
    except (OSError, UnicodeError):
        return []


def local_address(host: str, port: int = DEFAULT_PORT) -> str:
    """Return the address of ours by which ``host`` is reached; '' where no way leads there. Sends nothing."""
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))  # of a datagram socket: the kernel looks up the way and that is all
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return ""


def interface(address: str) -> str:
    """Return the interface that has an address of ours, or ''."""
    return own_addresses().get(address, "")


def carrier_lost(address: str) -> str:
    """Return the interface of an address of ours where its cable is out or it was taken down, else ''."""
    import psutil

    name = interface(address)
    stats = psutil.net_if_stats().get(name)
    return name if stats is not None and not stats.isup else ""


def hosts_store(host: str) -> bool | None:
    """Whether torchrun's rendezvous store is to be opened here. None where torchrun finds that out by itself.

    It compares with the addresses of this machine's name, so it does not know a second network card or a namespace. Where
    it knows, it also copes with a second agent on the same machine, which a plain yes would not.
    """
    addresses = resolve(host)
    if not addresses:
        return None
    named = {host, *addresses} & {"localhost", socket.gethostname(), *resolve(socket.gethostname())}
    if named or any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return None
    return bool(set(addresses) & set(own_addresses()))
