"""What a disk gives: reads past the page cache, the page cache itself, the raw sequential rate, and whether that is enough.

Rates are bytes per second. A planted rate really delays reads, one after the other, so that a slow disk can be tested for.
"""

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchlib.core.errors import UserError

PAGE = mmap.PAGESIZE
BLOCK_BYTES = 1 << 20  # of a sequential read
LEAST_BYTES = 1 << 24  # for fio: some milliseconds of a fast disk
_LOCAL = threading.local()  # the buffer of each thread, for all files


class Planted:
    """A slow disk on purpose: each read waits until its bytes would have come at ``bytes_per_s`` (0: none is planted).

    ``sharers`` processes that read at the same time share that rate: each gets its part.
    """

    def __init__(self, bytes_per_s: float = 0.0, sharers: int = 1) -> None:
        self.bytes_per_s, self.sharers = bytes_per_s, sharers
        self._one_at_a_time = threading.Lock()  # more threads do not make a disk faster that gives no more

    def delay(self, read_bytes: int) -> None:
        if self.bytes_per_s:
            with self._one_at_a_time:
                time.sleep(read_bytes * self.sharers / self.bytes_per_s)

    def alone(self) -> "Planted":
        """Return the same disk for a process that has it for itself."""
        return Planted(self.bytes_per_s)


def _buffer(size: int) -> memoryview:
    if len(getattr(_LOCAL, "buffer", b"")) < size:
        _LOCAL.buffer = mmap.mmap(-1, size)  # begins at a page, as direct reads ask for
    return memoryview(_LOCAL.buffer)[:size]


class DirectFile:
    """Reads ranges of a file past the page cache: O_DIRECT, aligned, where the file system takes it (``direct``).

    Elsewhere each range is read through the page cache and dropped from it. Any number of threads may read.
    """

    def __init__(self, path: Path, direct: bool = True) -> None:
        self.path = path
        self.direct = direct and self._opened(getattr(os, "O_DIRECT", 0))
        self.drop = direct and not self.direct
        if not self.direct:
            self.descriptor = os.open(path, os.O_RDONLY)

    def _opened(self, flag: int) -> bool:
        if not flag:
            return False
        try:
            self.descriptor = os.open(self.path, os.O_RDONLY | flag)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        try:  # some file systems open such a file and then refuse to read it
            os.preadv(self.descriptor, [_buffer(PAGE)], 0)
        except OSError:
            os.close(self.descriptor)
            return False
        return True

    def read(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes; valid until the same thread reads again. ``UserError`` for a file that was cut."""
        low = offset - offset % PAGE
        wanted = offset + length - low
        buffer = _buffer(wanted + -wanted % PAGE)
        self._fill(buffer, low, wanted)
        return buffer[offset - low : wanted]

    def read_into(self, offset: int, place: np.ndarray) -> None:
        """Read as many bytes as ``place`` has, C-contiguous, to where it lies: without a copy where its ends allow that."""
        aligned = not (offset % PAGE or place.nbytes % PAGE or place.ctypes.data % PAGE)
        if aligned or not self.direct:
            self._fill(place.data.cast("B"), offset, place.nbytes)
        else:
            place.data.cast("B")[:] = self.read(offset, place.nbytes)

    def _fill(self, buffer: memoryview, offset: int, wanted: int) -> None:
        have = 0
        while have < wanted:
            got = os.preadv(self.descriptor, [buffer[have:]], offset + have)
            if not got:
                raise UserError(
                    f"{self.path} ends at byte {offset + have:,}: it was cut while it was read; start again"
                )
            have += got
        if self.drop and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, len(buffer), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.descriptor)


def evict(paths: Sequence[Path]) -> None:
    """Ask the system to drop files from the page cache. What is dirty or mapped stays: :func:`residency` tells."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fill(paths: Sequence[Path]) -> None:
    """Read files once, so that they are in the page cache as far as they fit."""
    buffer = bytearray(BLOCK_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def residency(paths: Sequence[Path]) -> float | None:
    """Return the share of the files' bytes that is in the page cache, by mincore(2), in pages; None where nobody tells.

    For a file that the caller neither owns nor may write Linux calls every page resident: that is no answer.
    """
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    pages = resident = 0
    for path in paths:
        status = path.stat()
        if mincore is None or not (os.access(path, os.W_OK) or status.st_uid == os.geteuid()):
            return None
        if not status.st_size:
            continue
        vector = (ctypes.c_ubyte * -(-status.st_size // PAGE))()
        with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
            first = ctypes.c_char.from_buffer(mapped)  # the address of a mapping: pages are not touched
            failed = mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(status.st_size), vector)
            del first  # a mapping with a pointer into it cannot be closed
        if failed:
            return None
        pages += len(vector)
        resident += int((np.frombuffer(bytes(vector), np.uint8) & 1).sum())
    return resident / pages if pages else None


@dataclass(frozen=True)
class Rate:
    """Bytes per second, of how many bytes, and what measured it."""

    bytes_per_s: float
    read_bytes: int
    tool: str


def raw_sequential_rate(
    paths: Sequence[Path], direct: bool, depth: int = 4, seconds: float = 10.0, planted: Planted | None = None
) -> Rate:
    """Read files in order for ``seconds`` or to the end, in blocks of 1 MiB: by fio where it is installed, else by this kit.

    ``direct`` reads past the page cache with ``depth`` blocks under way; else through the page cache as it is, one block at a
    time. This kit also reads a planted disk, whose delay fio would not see, and what is too small for fio's clock of
    milliseconds, and where fio fails; ``tool`` says so.
    """
    sizes = {path: path.stat().st_size for path in paths}
    large = [path for path in paths if sizes[path] >= BLOCK_BYTES]  # fio refuses a file that is smaller than its block
    fio = shutil.which("fio")
    tool, block_bytes = "benchlib's own reader", BLOCK_BYTES
    if planted and planted.bytes_per_s:  # blocks that take an eighth of the time
        block_bytes = max(PAGE, min(BLOCK_BYTES, int(planted.bytes_per_s * seconds / 8) // PAGE * PAGE))
    elif fio and sum(sizes[path] for path in large) >= LEAST_BYTES:
        rate, reason = _by_fio(fio, large, direct, depth, seconds)
        if rate:
            return rate
        tool += f" (fio failed: {reason})"
    files = {path: DirectFile(path, direct) for path in paths}
    began = time.perf_counter()

    def read(block: tuple[Path, int]) -> int:
        path, offset = block
        if time.perf_counter() - began > seconds:
            return 0
        length = min(block_bytes, sizes[path] - offset)
        files[path].read(offset, length)
        if planted:
            planted.delay(length)
        return length

    blocks = [(path, offset) for path in paths for offset in range(0, sizes[path], block_bytes)]
    with ThreadPoolExecutor(depth if direct else 1, thread_name_prefix="raw") as pool:
        total = sum(pool.map(read, blocks))
    elapsed = time.perf_counter() - began
    for file in files.values():
        file.close()
    return Rate(total / elapsed, total, tool)


def _by_fio(fio: str, paths: Sequence[Path], direct: bool, depth: int, seconds: float) -> tuple[Rate | None, str]:
    names = ":".join(str(path.resolve()).replace("\\", "\\\\").replace(":", r"\:") for path in paths)
    engine = ["--direct=1", "--ioengine=libaio", f"--iodepth={depth}"] if direct else ["--ioengine=psync"]
    command = [fio, "--name=raw", "--readonly", "--rw=read", f"--bs={BLOCK_BYTES}", f"--filename={names}", *engine]
    command += [f"--runtime={seconds * 1000:.0f}ms", "--file_service_type=sequential", "--invalidate=0"]
    command += ["--output-format=json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60 + 2 * seconds)
    try:
        report = json.loads(result.stdout[result.stdout.index("{") :])
        job = report["jobs"][0]
        total, elapsed_ms, failed = int(job["read"]["io_bytes"]), float(job["read"]["runtime"]), job["error"]
    except (ValueError, LookupError):
        failed = True
    if failed or result.returncode or not total or not elapsed_ms:
        return None, " ".join((result.stderr or result.stdout).split())[:300] or "it read nothing"
    return Rate(total / elapsed_ms * 1e3, total, str(report["fio version"]).replace("-", " ", 1)), ""


@dataclass(frozen=True)
class DataLimit:
    """Whether data holds a model back, and where that turns.

    ``limit`` is "" (no), "disk", "loader" (the disk would give enough, its reader does not), "disk or loader" where the raw
    rate was not measured. ``asked_share`` is the rate asked for over the rate delivered. At ``turn_samples_per_s`` both are
    equal, for a model of ``turn_flops_per_sample`` at the same FLOP/s: a smaller one is held back. The batch turns at
    ``turn_batch`` or beyond it: who is held back is so at every batch above it, who is not is not at any below it.
    """

    limit: str
    asked_bytes_per_s: float
    given_bytes_per_s: float
    asked_share: float
    turn_samples_per_s: float
    turn_batch: int
    turn_flops_per_sample: float | None


def data_limit(
    sample_bytes: int,
    batch: int,
    compute_s: float,
    loader_bytes_per_s: float,
    raw_bytes_per_s: float | None = None,
    flops_per_sample: float | None = None,
) -> DataLimit:
    """Compare what a training asks of its data with what it gets; ``ValueError`` for what is not above zero.

    ``compute_s`` is a step of ``batch`` samples without its waiting for data, ``loader_bytes_per_s`` what the loader delivers
    with nothing else at work, ``raw_bytes_per_s`` what the disk gives to plain sequential reads. Samples/s turn at the
    delivered bytes/s over the bytes of a sample. A step takes t = a + b batch, a and b unknown and not negative: the batch turns at
    a / (1 / turn - b), which is turn x t for b = 0 and farther from this batch for any other b.
    """
    if not min(sample_bytes, batch, compute_s, loader_bytes_per_s) > 0:
        raise ValueError(
            f"sample_bytes {sample_bytes}, batch {batch}, compute_s {compute_s}, loader {loader_bytes_per_s}: must be above 0"
        )
    asked = sample_bytes * batch / compute_s
    turn = loader_bytes_per_s / sample_bytes
    limit = ""
    if asked > loader_bytes_per_s:
        limit = "disk or loader" if raw_bytes_per_s is None else "disk" if asked > raw_bytes_per_s else "loader"
    share = asked / loader_bytes_per_s
    flops = None if flops_per_sample is None else flops_per_sample * share
    return DataLimit(limit, asked, loader_bytes_per_s, share, turn, int(turn * compute_s), flops)
