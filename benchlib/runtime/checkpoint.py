"""Checkpoints without pickle: tensors as safetensors, the rest as JSON, a manifest with the SHA-256 of every file.

A checkpoint is a folder ``step-000120``. It is written under another name and renamed when it is complete, and it
is verified before it is read: a truncated or altered one is skipped for the one before it. ``newest_shared`` finds the newest
one of any node and sends it to those that lack it.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from benchlib.core.errors import RunBroken, UserError
from benchlib.core.files import is_storage_error, not_written, read_json, read_object, sha256, write_json
from benchlib.runtime.group import all_gather_objects, barrier

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. ``state`` is what was given to ``save`` as plain JSON, ``passed_over`` what is wrong with newer ones."""

    path: Path
    step: int
    state: dict[str, Any]
    passed_over: tuple[str, ...] = ()

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Read one group of tensors onto the CPU."""
        return load_file(self.path / f"{name}.safetensors")


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    extra: Callable[[Path], None] | None = None,
    keep: int = KEEP,
) -> Path:
    """Write checkpoint ``step`` below ``folder`` and remove all but the newest ``keep``; return its path.

    ``tensors`` are groups by file name, ``extra`` may add files of its own to the given folder. One process writes.
    Raises ``StorageError`` where the disk is full; older checkpoints then stay as they are.
    """
    target, temporary = folder / folder_name(step), folder / f".{folder_name(step)}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        if extra:
            extra(temporary)
        for kind, group in tensors.items():
            # clone(): tensors that share memory, or are parts of larger ones, cannot be stored as they are.
            save_file(
                {key: value.detach().cpu().contiguous().clone() for key, value in group.items()},
                temporary / f"{kind}.safetensors",
                {"format": "pt"},
            )
        write_json(temporary / STATE, dict(state))
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(temporary.iterdir())
        }
        write_json(temporary / MANIFEST, {"step": step, "files": files})
        publish(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if cause := storage_error(error):
            raise not_written(target, cause) from error
        raise
    for old in _folders(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def publish(temporary: Path, target: Path) -> None:
    """Give a complete checkpoint its name, by one rename after its bytes are on the disk."""
    for path in temporary.iterdir():
        _sync(path)
    former = target.with_name(f".{target.name}.{os.getpid()}.old")
    shutil.rmtree(former, ignore_errors=True)
    try:
        for last in (False, False, True):
            try:
                os.rename(temporary, target)
                break
            except OSError as error:
                if last or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            # The same step again, after a resume. A folder with files in it cannot be replaced by one call: the former one
            # is set aside, and is given its name again where this ends in between.
            with contextlib.suppress(FileNotFoundError):
                os.rename(target, former)
    except OSError:
        _put_back(target.parent)
        raise
    _sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def _put_back(folder: Path) -> None:
    """Give checkpoints that were set aside for a new one of the same step their name again, where that never came."""
    for former in folder.glob(".step-*.old"):
        target = folder / former.name.split(".")[1]
        if target.exists():
            shutil.rmtree(former, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):  # another rank was faster, or the disk is read-only
            os.rename(former, target)


@contextlib.contextmanager
def naming_storage_errors(target: Path) -> Iterator[None]:
    """Raise ``StorageError`` that names ``target`` where what the block writes, tensors too, finds no space or no permission."""
    try:
        yield
    except Exception as error:
        if cause := storage_error(error):
            raise not_written(target, cause) from error
        raise


def storage_error(error: BaseException) -> OSError | None:
    """Return the system's error where a writer failed for want of space or permission."""
    if isinstance(error, SafetensorError):  # it keeps the number in its text only
        number = re.search(r"os error (\d+)", str(error))
        error = OSError(int(number[1]), os.strerror(int(number[1]))) if number else error
    if isinstance(error, OSError) and (is_storage_error(error) or error.errno == errno.EACCES):
        return OSError(error.errno, "")  # a plain one: what it says of the temporary folder is of no use
    return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(folder: Path) -> list[Path]:
    """Return the checkpoints below ``folder``, the newest first."""
    checkpoints = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(checkpoints, key=lambda path: int(path.name.partition("-")[2]), reverse=True)


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint, or an empty text when every file is as it was written."""
    try:
        manifest = read_object(path / MANIFEST, {"step": int, "files": dict})
        files = manifest["files"]
        wanted_files = {str(name): (int(wanted["bytes"]), str(wanted["sha256"])) for name, wanted in files.items()}
    except (UserError, KeyError, TypeError, ValueError):
        return f"{MANIFEST} is missing or truncated"
    if STATE not in wanted_files or any(Path(name).name != name for name in wanted_files):
        return f"{MANIFEST} was not written by benchlib"
    named = re.search(r"step-(\d+)", path.name)  # also in the name that it has while it is written
    if named and int(named[1]) != manifest["step"]:
        return f"{MANIFEST} is of step {manifest['step']}, its folder's name of step {int(named[1])}"
    for name, (size, digest) in wanted_files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes, not {size:,}"
        if sha256(file) != digest:
            return f"{name} was altered (its SHA-256 is not the one in {MANIFEST})"
    return ""


def read(path: Path) -> Checkpoint:
    """Open a checkpoint that was verified before."""
    return Checkpoint(path, int(path.name.partition("-")[2]), read_json(path / STATE))


def search(folder: Path, usable: Callable[[Checkpoint], bool] = lambda _: True) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint below ``folder`` that is intact and ``usable``, and what is wrong with newer ones."""
    faults = []
    _put_back(folder)
    for path in _folders(folder):
        fault = damage(path)
        if fault:
            faults.append(f"{path.name}: {fault}")
            log.warning("checkpoint %s is skipped: %s", path, fault)
        elif usable(candidate := read(path)):
            return candidate, faults
    return None, faults


def newest(folder: Path, unfinished: Callable[[Checkpoint], bool] = lambda _: True) -> Checkpoint:
    """Return the newest intact checkpoint below ``folder`` that is ``unfinished``; ``UserError`` where there is none."""
    checkpoint, faults = search(folder, unfinished)
    if checkpoint is None:
        if len(faults) < len(_folders(folder)):
            raise UserError(
                f"{folder}: the training is finished, nothing is left to resume; start a new run without --resume"
            )
        reason = f" ({'; '.join(faults)})" if faults else ": the folder has none"
        raise UserError(f"{folder}: no intact checkpoint to resume from{reason}")
    return replace(checkpoint, passed_over=tuple(faults))


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
    """Put back what ``rng_state`` returned."""
    torch.set_rng_state(states["cpu"])
    if "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


# Nodes need not share a file system. After a failure ranks may be on other nodes than before, and a node that replaces a
# lost one has nothing: whoever has the newest checkpoint sends its files to those that lack it, and they verify it.

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Held:
    """The newest checkpoint on a rank's node: only one rank of each node looks (``leads``)."""

    leads: bool
    step: int = -1
    digest: str = ""
    files: tuple[tuple[str, int], ...] = ()
    faults: tuple[str, ...] = ()


def newest_shared(
    folder: Path,
    leads: bool,
    device: torch.device,
    usable: Callable[[Checkpoint], bool],
    alive: Callable[[], None] = lambda: None,
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint of any node that is ``usable``, and what is wrong with those skipped.

    Collective: all ranks call it and get the same step, or None. ``folder`` is that of this node; ``leads`` is true for
    one rank of each node. Messages are made on ``device``, and ``alive`` is called while files travel. Raises
    ``RunBroken`` where a file arrives other than it was sent.
    """
    held = _look(folder, usable) if leads else _Held(False)
    by_rank: list[_Held] = all_gather_objects(held)
    faults = [fault for item in by_rank for fault in item.faults]
    source = max(range(len(by_rank)), key=lambda rank: (by_rank[rank].step, -rank))
    best = by_rank[source]
    if best.step < 0:
        return None, faults
    path = folder / folder_name(best.step)
    if any(item.leads and item.digest != best.digest for item in by_rank):
        _share(path, best.files, source, leads and held.digest != best.digest, device, alive)
    barrier()  # the other ranks of a node read what its leader received
    return read(path), faults


def _look(folder: Path, usable: Callable[[Checkpoint], bool]) -> _Held:
    for left in folder.glob(".step-*.tmp"):  # by a process that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    checkpoint, faults = search(folder, usable)
    if checkpoint is None:
        return _Held(True, faults=tuple(faults))
    files = tuple((file.name, file.stat().st_size) for file in sorted(checkpoint.path.iterdir()))
    return _Held(True, checkpoint.step, sha256(checkpoint.path / MANIFEST), files, tuple(faults))


def _share(
    path: Path,
    files: Iterable[tuple[str, int]],
    source: int,
    wanted: bool,
    device: torch.device,
    alive: Callable[[], None],
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
                    alive()
        if wanted and not (fault := damage(temporary)):
            publish(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    faults = [text for text in all_gather_objects(fault) if text]
    if faults:
        raise RunBroken(f"checkpoint {path.name} was damaged on its way between the nodes: {faults[0]}")
