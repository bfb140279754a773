"""The process group of a run: rendezvous, collective library, device and thread count of each rank, and how it ends.

    with group.world(config, run_dir) as world:
        train(world)          # models and optimizers live in here, not in this frame

The order at the end matters: whatever refers to the group (a DDP model's reducer) goes first, then the group. Keep
models inside a function that is called within the block, so that they are gone when it ends.
"""

import contextlib
import gc
import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchlib import __version__
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import BackendUnavailable, RunBroken, UserError
from benchlib.core.files import read_json, write_json
from benchlib.core.machine import BACKENDS
from benchlib.core.text import shortened
from benchlib.launch import nodes
from benchlib.launch.nodes import Place, attempt, place
from benchlib.launch.processes import SUPERVISOR_PID
from benchlib.runtime import devices, transport
from benchlib.runtime.libraries import LIBRARIES, Library

T = TypeVar("T")

COLLECTIVE_MARGIN_S = 30.0  # a collective gives up this much after the stall limit: the supervisor names the cause
STORE_FILE = "store.json"
TOLD_S = 10.0  # for all ranks to hear why they are refused
POLL_S = 0.02
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World(Place):
    """This rank's place, device and collective library (``gloo``, ``nccl``, ...).

    ``layout`` says which ranks are in which group of a hierarchical exchange, '' for any other.
    """

    device: torch.device = CPU
    collective: str = ""
    layout: str = ""

    @property
    def main(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def world(config: BaseConfig, run_dir: Path | str) -> Iterator[World]:
    """Join the process group of a run, and leave it in good order when the block ends.

    One rank takes the same path as many. After an error in the block the group of several ranks is left as it is: to
    destroy it could wait for peers that never answer, and the worker ends the process anyway.

    Raises ``BackendUnavailable`` where the device or the collective library is not available, and ``UserError`` on all ranks
    where another node has other parameters or versions.
    """
    where = place()
    devices.require(config.backend, where.local_size)
    library = _library(config)
    torch.set_num_threads(where.threads(config.threads))
    device = devices.device(config.backend, where.local_rank)
    timeout_s = config.stall_timeout_s + COLLECTIVE_MARGIN_S
    with _interface(config, where, transport.variables(Path(run_dir), where.rank)):
        _join(library, where, Path(run_dir), device, timeout_s, config)
        try:
            _agree(config, where, Path(run_dir))
            layout = getattr(dist.group.WORLD, "layout", "")
            yield World(where.rank, where.size, where.local_rank, where.local_size, device, library.name, layout)
        except BaseException:
            if where.size == 1:
                dist.destroy_process_group()
            raise
        barrier()  # nobody leaves while another one still talks to it
        gc.collect()
        dist.destroy_process_group()


@contextlib.contextmanager
def _interface(config: BaseConfig, where: Place, log: Mapping[str, str]) -> Iterator[None]:
    """Tell gloo and NCCL the network interface by which the nodes meet, unless the environment names one already, and NCCL its ``log``.

    Left alone gloo takes the one of the host's name, which may be another, or none at all. The variables are read
    whenever a group is made, and are taken back at the end: another world of this process may meet elsewhere.
    """
    chosen = dict(log)
    if where.one_node:
        chosen["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    elif name := nodes.own_addresses().get(_address(config)):
        # "=": this interface, and not all whose names begin so
        chosen |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    ours = {variable: name for variable, name in chosen.items() if variable not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for variable in ours:
            os.environ.pop(variable, None)


def _address(config: BaseConfig) -> str:
    """Return the address by which this node meets the others; '' where that is not known."""
    host = nodes.endpoint_host(config.rdzv_endpoint) or os.environ.get("MASTER_ADDR", "")
    return nodes.local_address(host) if host else ""


def _agree(config: BaseConfig, where: Place, run_dir: Path) -> None:
    """Write the ranks' hosts down, and raise ``UserError`` on all ranks where they do not do the same work.

    The ranks of one node read the same config.
    """
    if where.one_node:
        return
    address = _address(config)
    hosts = all_gather_objects(f"{platform.node()} ({address})" if address else platform.node())
    if where.local_rank == 0:
        write_json(run_dir / nodes.FILE, hosts)
    if reason := difference(all_gather_objects(statement(config, torch.__version__)), hosts):
        with contextlib.suppress(RuntimeError):  # nobody leaves before the others know it as well
            barrier()
        raise UserError(reason)


def _library(config: BaseConfig) -> Library:
    config.check_whole()
    library = LIBRARIES[config.collective or BACKENDS[config.backend].collective]
    library.register()
    return library


def _join(
    library: Library, where: Place, run_dir: Path, device: torch.device, timeout_s: float, config: BaseConfig
) -> None:
    backend, bound = library.backend, {"device_id": device} if device.type in ("cuda", "xpu") else {}
    common: dict[str, Any] = {"rank": where.rank, "world_size": where.size, "timeout": timedelta(seconds=timeout_s)}
    common |= library.options(config, where.rank) or bound  # bound to its device, a barrier need not guess one
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        met, _, _ = next(dist.rendezvous("env://", where.rank, where.size, timeout=common["timeout"]))
        store = dist.PrefixStore("default_pg", met)
    else:
        store = dist.PrefixStore("benchlib", _store(where, run_dir, config.startup_timeout_s))
    if device.type != "cpu":  # before the library joins, which says less of it, or hangs
        own_devices(dist.PrefixStore(f"devices {attempt()}", store), where, devices.identity(device))
    dist.init_process_group(backend, store=store, **common)


def own_devices(store: dist.Store, where: Place, name: str) -> None:
    """Raise ``BackendUnavailable`` on all ranks if two of them have the same device, by the ``name`` of each rank's."""
    store.set(str(where.rank), f"{platform.node()} {name}")
    stated = [value.decode() for value in store.multi_get([str(rank) for rank in range(where.size)])]
    owners = [(host, name) for host, _, name in (text.partition(" ") for text in stated)]
    if reason := devices.shared(owners):
        store.set(f"told {where.rank}", "")
        if where.rank == 0:  # whose process may hold the store
            with contextlib.suppress(RuntimeError):
                store.wait([f"told {rank}" for rank in range(where.size)], timedelta(seconds=TOLD_S))
        raise BackendUnavailable(reason)


def _store(where: Place, run_dir: Path, startup_s: float) -> dist.TCPStore:
    """Open the store of this run: rank 0 takes a free port and writes it down, the others read it.

    The token keeps a rank from meeting the store of an earlier launch in the same folder.
    """
    names = (SUPERVISOR_PID,) if SUPERVISOR_PID in os.environ else ("SLURM_JOB_ID", "SLURM_STEP_ID")
    token = ".".join(os.environ.get(name, "") for name in names)
    path, timeout = run_dir / STORE_FILE, timedelta(seconds=startup_s)
    if where.rank == 0:
        host = "127.0.0.1" if where.one_node else socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        write_json(path, {"host": host, "port": store.port, "token": token})
        return store
    end = time.monotonic() + startup_s
    while time.monotonic() < end:
        with contextlib.suppress(UserError):  # not written yet
            opened = read_json(path)
            if opened["token"] == token:
                return dist.TCPStore(opened["host"], opened["port"], is_master=False, timeout=timeout)
        time.sleep(POLL_S)
    raise RunBroken(
        f"rank 0 did not open its store within {startup_s:.0f} s (start-up limit): timed out waiting for {path}"
    )


def barrier() -> None:
    dist.barrier()


def all_gather_objects(value: T) -> list[T]:
    """Return every rank's ``value`` in the order of ranks, on all ranks. Values are pickled: for small ones."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def transports(run_dir: Path, here: World) -> list[str]:
    """Return by which ways NCCL moved the data of all ranks, see ``transport``; [] of another library. A collective of NCCL."""
    if here.collective != "nccl":
        return []
    return sorted({way for ways in all_gather_objects(transport.told(run_dir, here.rank)) for way in ways})


def weight_checksum(model: torch.nn.Module) -> str:
    """Return 16 hex digits (SHA-256) over names, types, shapes and bytes of all parameters and buffers.

    Wrappers (DDP, ``torch.compile``) do not change it.
    """
    digest = hashlib.sha256()
    state = {
        name.replace("_orig_mod.", "").removeprefix("module."): tensor for name, tensor in model.state_dict().items()
    }
    for name, tensor in sorted(state.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


# Not part of the work by which results are compared, but of what the ranks do together.
_TOGETHER = ("benchmark", "tier", "checkpoint_every", "max_restarts", "planted_slowdown")


def statement(config: BaseConfig, torch_version: str) -> dict[str, str]:
    """Return what all ranks must have alike, as texts by name: fields of the config and versions.

    Devices of several vendors may work together, so neither the backend nor the build of torch (``+cu126``) is part. Of files
    and folders, whose paths may differ from node to node, the size counts.
    """
    fields = {name: getattr(config, name) for name in _TOGETHER if hasattr(config, name)} | config.work()
    values = {name: _sized(str(value)) if name in config.PATHS else str(value) for name, value in fields.items()}
    return {**values, "version of benchlib": __version__, "version of torch": torch_version.partition("+")[0]}


def difference(statements: Sequence[dict[str, str]], hosts: Sequence[str]) -> str:
    """Return where the ranks differ, with the hosts and values of the first two that do; '' where they are alike."""
    differences = []
    for name in dict.fromkeys(name for item in statements for name in item):
        values = [item.get(name, "missing") or "''" for item in statements]
        if others := [(host, value) for host, value in zip(hosts, values, strict=True) if value != values[0]]:
            differences.append(f"{name} is {values[0]} on {hosts[0]} and {others[0][1]} on {others[0][0]}")
    why = f"the nodes of this run do not do the same work: {shortened(differences, between='; ')}"
    return f"{why}; start it with the same parameters and versions on all of them" if differences else ""


def _sized(text: str) -> str:
    """Return the size of a file, or of those in a folder; a name that is no path of this machine stays as it is."""
    path = Path(text)
    if not path.is_absolute() or not path.exists():
        return text
    files = [path] if path.is_file() else [item for item in path.iterdir() if item.is_file()]
    return f"{sum(item.stat().st_size for item in files):,} bytes"
