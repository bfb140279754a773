"""The newest checkpoint that any node of a run has, for all of its nodes: they need not share a file system.

After a failure ranks may be on other nodes than before, and a node that replaces a lost one has nothing. So the nodes tell
each other what they have, verified by SHA-256; who has the newest sends its files to those that lack it, and they verify
what they got before it counts.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchlib import checkpoint
from benchlib.checkpoint import MANIFEST, Checkpoint
from benchlib.errors import RunBroken
from benchlib.files import sha256
from benchlib.process_group import all_gather_objects, barrier

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Held:
    """What a rank knows of the checkpoints on its node: only one rank of each node looks (``leads``)."""

    leads: bool
    step: int = -1
    digest: str = ""
    files: tuple[tuple[str, int], ...] = ()
    faults: tuple[str, ...] = ()


def newest(
    folder: Path,
    leads: bool,
    device: torch.device,
    usable: Callable[[Checkpoint], bool],
    tell: Callable[[], None] = lambda: None,
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest whole checkpoint of any node that is ``usable``, and what is wrong with those passed over.

    Collective: all ranks call it and get the same step, or None. ``folder`` is that of this node; ``leads`` is true for
    one rank of each node. Messages are made on ``device``, and ``tell`` is called while files travel. Raises
    ``RunBroken`` where a file arrives other than it was sent.
    """
    held = _look(folder, usable) if leads else _Held(False)
    known: list[_Held] = all_gather_objects(held)
    faults = [fault for one in known for fault in one.faults]
    source = max(range(len(known)), key=lambda rank: (known[rank].step, -rank))
    best = known[source]
    if best.step < 0:
        return None, faults
    path = folder / checkpoint.name(best.step)
    if any(one.leads and one.digest != best.digest for one in known):
        _share(path, best.files, source, leads and held.digest != best.digest, device, tell)
    barrier()  # the other ranks of a node read what its leader received
    return checkpoint.read(path), faults


def _look(folder: Path, usable: Callable[[Checkpoint], bool]) -> _Held:
    for left in folder.glob(".step-*.tmp"):  # by a process that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    found, faults = checkpoint.search(folder, usable)
    if found is None:
        return _Held(True, faults=tuple(faults))
    files = tuple((file.name, file.stat().st_size) for file in sorted(found.path.iterdir()))
    return _Held(True, found.step, sha256(found.path / MANIFEST), files, tuple(faults))


def _share(
    path: Path,
    files: Iterable[tuple[str, int]],
    source: int,
    wanted: bool,
    device: torch.device,
    tell: Callable[[], None],
) -> None:
    """Send a checkpoint's files from rank ``source`` to all; those that ``wanted`` them keep and verify them."""
    sends, fault = dist.get_rank() == source, ""
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        if wanted:
            temporary.mkdir(parents=True)
        for name, size in files:
            with contextlib.ExitStack() as stack:
                own = stack.enter_context((path / name).open("rb")) if sends else None
                copy = stack.enter_context((temporary / name).open("wb")) if wanted else None
                for begin in range(0, size, CHUNK_BYTES):
                    count = min(CHUNK_BYTES, size - begin)
                    data = torch.empty(count, dtype=torch.uint8)
                    if own:
                        own.readinto(data.numpy().data)
                    moved = data.to(device)
                    dist.broadcast(moved, src=source)
                    if copy:
                        copy.write(moved.cpu().numpy().data)
                    tell()
        if wanted and not (fault := checkpoint.damage(temporary)):
            checkpoint.publish(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    found = [text for text in all_gather_objects(fault) if text]
    if found:
        raise RunBroken(f"checkpoint {path.name} was damaged on its way between the nodes: {found[0]}")
