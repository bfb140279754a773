"""Whether the nodes of a run do the same work: each starts from a config of its own, and only one writes the result.

Paths differ from node to node, what lies there must not: files are compared by their content.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from benchlib import __version__
from benchlib.config import BaseConfig
from benchlib.files import sha256

# Not part of the work by which results are compared, but of what the ranks do together.
_TOGETHER = ("benchmark", "tier", "checkpoint_every", "max_restarts", "planted_slowdown")
_SHOWN = 3  # differences that are told in full
_WHOLE_BYTES = 2**20  # files of a folder above this size are compared by their size: weights are checked later anyway

Statement = dict[str, str]


def statement(config: BaseConfig, torch_version: str) -> Statement:
    """Return what all ranks must have alike, as texts by name: fields of the config and versions.

    Devices of several vendors may work together, so neither the backend nor the build of torch (``+cu126``) is part.
    """
    fields = {name: getattr(config, name) for name in _TOGETHER if hasattr(config, name)} | config.work()
    told = {name: _content(str(value)) if name in config.PATHS else str(value) for name, value in fields.items()}
    return {**told, "version of benchlib": __version__, "version of torch": torch_version.partition("+")[0]}


def difference(statements: Sequence[Statement], hosts: Sequence[str]) -> str:
    """Return in what the ranks differ, with the hosts and values of the first two that do; '' where they are alike."""
    first, found = statements[0], []
    for name in dict.fromkeys(name for one in statements for name in one):
        here = first.get(name, "missing")
        others = [
            (host, value)
            for host, one in zip(hosts, statements, strict=True)
            if (value := one.get(name, "missing")) != here
        ]
        if others:
            host, value = others[0]
            found.append(f"{name} is {here or repr(here)} on {hosts[0]} and {value or repr(value)} on {host}")
    if not found:
        return ""
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    return f"the nodes of this run do not do the same work: {'; '.join(found[:_SHOWN])}{more}; start it with the same parameters and versions on all of them"


def _content(text: str) -> str:
    """Return a digest of a file or folder; a name that is no path of this machine stays as it is."""
    path = Path(text)
    if not text or not path.is_absolute() or not path.exists():
        return text
    if path.is_file():
        return f"a file with SHA-256 {sha256(path)[:16]}"
    digest = hashlib.sha256()
    for one in sorted(path.iterdir()):
        if one.is_file() and not one.name.startswith("."):
            size = one.stat().st_size
            digest.update(f"{one.name} {sha256(one) if size <= _WHOLE_BYTES else size}\n".encode())
    return f"a folder with SHA-256 {digest.hexdigest()[:16]}"
