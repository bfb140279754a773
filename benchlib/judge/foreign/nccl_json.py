"""The JSON of nccl-tests (``-J FILE``). Source of the format: NVIDIA/nccl-tests, src/util.cu, version 2 of the file."""

from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.judge.foreign import nccl
from benchlib.judge.foreign.kit import keys, number, parse, rows
from benchlib.judge.foreign.nccl import Setting
from benchlib.judge.impossible.claim import Claim

PLACEMENTS = {"out_of_place": "out of place", "in_place": "in place"}


def sniff(path: Path, text: str) -> bool:
    """A JSON object with the results of nccl-tests."""
    return "nccl_version" in keys(text)


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and placement, and one for the footer."""
    content = parse(path, text)
    setting = _setting(content)
    claims, busbws = list[Claim](), list[float]()
    for row in rows(content.get("results")):
        size = row.get("size")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise UserError(f"{path}: a row of results has the size {size!r}; expected bytes")
        for key, placement in PLACEMENTS.items():
            cells = row.get(key)
            if isinstance(cells, dict):
                claims.append(_claim(path, setting, placement, size, cells))
                busbws.append(number(cells.get("bus_bw")) or 0.0)
    if not claims:
        raise UserError(f"{path}: JSON of nccl-tests without a row of results; the test failed or the file is cut")
    average = _part(content, "average_bus_bandwidth", "bandwidth")
    wrong = _part(content, "out_of_bounds", "count")
    if average is not None or wrong is not None:
        claims.append(nccl.average_claim(average, busbws, wrong))
    return claims


def _claim(path: Path, setting: Setting, placement: str, size: int, cells: dict[str, Any]) -> Claim:
    for name in ("alg_bw", "bus_bw"):
        if number(cells.get(name)) is None:
            raise UserError(f"{path}: {name} of {size:,} bytes is {cells.get(name)!r}; expected GB/s")
    time_us = number(cells.get("time"))
    seconds = 1e-6 * time_us if time_us is not None else None
    algbw, busbw, wrong = (number(cells.get(name)) for name in ("alg_bw", "bus_bw", "nwrong"))
    return nccl.row_claim(setting, placement, size, seconds, algbw, busbw, wrong)


def _part(content: dict[str, Any], name: str, field: str) -> float | None:
    part = content.get(name)
    return number(part.get(field)) if isinstance(part, dict) else None


def _setting(content: dict[str, Any]) -> Setting:
    config = content.get("config")
    config = config if isinstance(config, dict) else {}
    devices = rows(config.get("devices"))
    threads, gpus = config.get("nthreads"), config.get("ngpus")
    # One entry a process is written, whatever its devices are; several groups are several communicators.
    groups = {device.get("group") for device in devices}
    ranks = None
    if devices and isinstance(threads, int) and isinstance(gpus, int) and threads * gpus > 0:
        total = len(devices) * threads * gpus
        ranks = total // len(groups) if total % len(groups) == 0 else None
    args = content.get("args")
    program = str(args[0]) if isinstance(args, list) and args else ""
    names = {str(device["device_info"]).strip() for device in devices if device.get("device_info")}
    return Setting(nccl.operation_of(program) if program else "", ranks, tuple(sorted(names)), _algorithm(content))


def _algorithm(content: dict[str, Any]) -> str:
    env = content.get("env")
    values = dict(str(item).partition("=")[::2] for item in env) if isinstance(env, list) else {}
    if values.get("NCCL_ALGO"):
        return nccl.forced_algorithm(values["NCCL_ALGO"])
    return nccl.WITHOUT_SWITCH if values.get("NCCL_NVLS_ENABLE") == "0" else ""
