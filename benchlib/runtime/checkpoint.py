"""Checkpoints without pickle: tensors as safetensors, the rest as JSON, a manifest with the SHA-256 of every file.

A checkpoint is a folder ``step-00000120``. It is written under another name and renamed when it is complete, and it
is verified before it is read: a truncated or altered one is skipped for the one before it. ``newest_shared`` finds the
newest one of any node and sends it to those that lack it.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from benchlib.core.errors import RunBroken, UserError
from benchlib.core.files import not_written, read_json, read_object, sha256, storage_error, sync, write_json
from benchlib.runtime.group import all_gather_objects

MANIFEST = "manifest.json"
STATE = "state.json"
KEEP = 2
CHUNK_BYTES = 64 * 2**20  # of a file at a time, on its way to another node


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. ``state`` is what was given to ``save`` as plain JSON."""

    path: Path
    step: int
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.path / f"{name}.safetensors")


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    extra: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write checkpoint ``step`` below ``folder`` and remove all but the newest ``KEEP``.

    ``tensors`` are groups by file name, ``extra`` may add files of its own to the given folder. One process of each node
    writes. Raises ``StorageError`` where the disk is full; older checkpoints then stay as they are.
    """
    target = folder / f"step-{step:08d}"
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with naming_storage_errors(target):
            temporary.mkdir(parents=True)
            extra(temporary)
            for kind, group in tensors.items():
                # clone(): tensors that share memory, or are parts of larger ones, cannot be stored as they are.
                whole = {key: value.detach().cpu().contiguous().clone() for key, value in group.items()}
                save_file(whole, temporary / f"{kind}.safetensors", {"format": "pt"})
            write_json(temporary / STATE, dict(state))
            write_json(temporary / MANIFEST, {"files": {path.name: sha256(path) for path in temporary.iterdir()}})
            _publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in _folders(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)


def _publish(temporary: Path, target: Path) -> None:
    """Give a complete checkpoint its name, by one rename after its bytes are on the disk."""
    for path in temporary.iterdir():
        sync(path)
    shutil.rmtree(target, ignore_errors=True)  # of the same step before a restart, which went on from an earlier one
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # a node that shares the disk was faster
            raise
    sync(target.parent)


@contextlib.contextmanager
def naming_storage_errors(target: Path) -> Iterator[None]:
    """Raise ``StorageError`` that names ``target`` where what the block writes, tensors too, finds no space or no permission."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = re.search(r"os error (\d+)", str(error))  # which safetensors keeps in its text only
        code = error.errno if isinstance(error, OSError) else int(number[1]) if number else 0
        cause = OSError(code, "")  # what the error says of the temporary folder is of no use
        if storage_error(cause) or code == errno.EACCES:
            raise not_written(target, cause) from error
        raise


def _folders(folder: Path) -> list[Path]:
    """Return the checkpoints below ``folder``, the newest first."""
    checkpoints = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(checkpoints, key=lambda path: int(path.name.partition("-")[2]), reverse=True)


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint, or an empty text when every file is as it was written."""
    try:
        files = read_object(path / MANIFEST, {"files": dict})["files"]
    except UserError:
        files = {}
    if STATE not in files:
        return f"{MANIFEST} is missing or truncated"
    for name, digest in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if sha256(file) != digest:
            return f"{name} was altered (its SHA-256 is not the one in {MANIFEST})"
    return ""


def _read(path: Path) -> Checkpoint:
    return Checkpoint(path, int(path.name.partition("-")[2]), read_json(path / STATE))


def search(folder: Path, usable: Callable[[Checkpoint], bool] = lambda _: True) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint below ``folder`` that is intact and ``usable``, and what is wrong with newer ones."""
    faults = []
    for path in _folders(folder):
        if fault := damage(path):
            faults.append(f"{path.name}: {fault}")
        elif usable(candidate := _read(path)):
            return candidate, faults
    return None, faults


def newest(folder: Path, unfinished: Callable[[Checkpoint], bool]) -> tuple[Checkpoint, list[str]]:
    """Do as ``search`` does; ``UserError`` where there is no checkpoint to go on from."""
    checkpoint, faults = search(folder, unfinished)
    if checkpoint is None and len(faults) < len(_folders(folder)):
        raise UserError(
            f"{folder}: the training is finished, nothing is left to resume; start a new run without --resume"
        )
    if checkpoint is None:
        reason = f" ({'; '.join(faults)})" if faults else ": the folder has none"
        raise UserError(f"{folder}: no intact checkpoint to resume from{reason}")
    return checkpoint, faults


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer's state as tensors named ``<number of the parameter>.<name of the state>``."""
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put back what ``optimizer_tensors`` returned; parameter groups stay as they are."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's random generators of this process, uint8."""
    states = {"cpu": torch.get_rng_state()}
    if device.type in ("cuda", "xpu", "mps"):
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def set_rng_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


def newest_shared(
    folder: Path, leads: bool, device: torch.device, usable: Callable[[Checkpoint], bool]
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint of any node that is ``usable``, and what is wrong with those skipped.

    Nodes need not share a file system. After a failure ranks may be on other nodes than before, and a node that replaces
    a lost one has nothing: a rank that has the newest checkpoint sends its files to those that lack it, who verify them.

    Collective: all ranks call it and get the same step, or None. ``folder`` is that of this node; ``leads`` is true for
    one rank of each node. Messages are made on ``device``. Raises ``RunBroken`` where a file arrives damaged.
    """
    for left in folder.glob(".step-*.tmp") if leads else ():  # by a process that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    checkpoint, faults = search(folder, usable) if leads else (None, [])
    files = [(path.name, path.stat().st_size) for path in checkpoint.path.iterdir()] if checkpoint else []
    by_rank = all_gather_objects((leads, checkpoint.step if checkpoint else -1, files, faults))
    faults = [fault for *_, item in by_rank for fault in item]
    source = max(range(len(by_rank)), key=lambda rank: by_rank[rank][1])
    _, step, files, _ = by_rank[source]
    if step < 0:
        return None, faults
    path = folder / f"step-{step:08d}"
    if any(leader and other < step for leader, other, *_ in by_rank):
        lacks = leads and (checkpoint is None or checkpoint.step < step)
        damaged = all_gather_objects(_share(path, files, source, lacks, device))
        if any(damaged):
            fault = next(filter(None, damaged))
            raise RunBroken(f"checkpoint {path.name} was damaged on its way between the nodes: {fault}")
    return _read(path), faults


def _share(path: Path, files: list[tuple[str, int]], source: int, lacks: bool, device: torch.device) -> str:
    """Send a checkpoint's files from rank ``source`` to all; who ``lacks`` them keeps them, or returns their damage."""
    sends, fault = dist.get_rank() == source, ""
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        if lacks:
            temporary.mkdir(parents=True)
        for name, size in files:
            place = path / name if sends else temporary / name if lacks else os.devnull
            with open(place, "rb" if sends else "wb", buffering=0) as file:
                for begin in range(0, size, CHUNK_BYTES):
                    data = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
                    if sends:
                        file.readinto(data.numpy().data)
                    moved = data.to(device)
                    dist.broadcast(moved, src=source)
                    if not sends:
                        file.write(moved.cpu().numpy().data)
        if lacks and not (fault := damage(temporary)):
            _publish(temporary, path)
        return fault
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
