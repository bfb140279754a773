"""Where the samples of :mod:`benchlib.workloads.pairs` come from while a model trains: from memory or from shards on a disk.

Shards are a cache of what the generator gives: ``DATA_DIR/pairs-KEY/shard_0000.bin`` ... and a manifest with the checksum of
each, under a key of content and layout: a set of fewer samples is the beginning of a larger one. A shard counts once the
manifest names it. At each opening its size and its first and
last sample are compared; its checksum is where its size or time of change is not that of the last comparison, since that reads
all of it, and always with ``verify=always``. XXH3 because it reads faster than disks do (15 GB/s beside 2.3 of CRC-32 on the
machine where this was chosen); it is made to find damage, not forgery.

Letters: B samples of a batch, S tokens of a sequence.
"""

import contextlib
import errno
import hashlib
import json
import mmap
import os
import shutil
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
import xxhash

from benchlib.core import disk
from benchlib.core.definitions import size_text
from benchlib.core.errors import UserError
from benchlib.core.files import atomic_path, not_written, read_object, write_json
from benchlib.core.text import counted
from benchlib.workloads.pairs import Pairs, generate

FORMAT = 1
SHARD_BYTES = 1 << 27
MANIFEST = "manifest.json"
_WRITE_BYTES = 1 << 22  # generated, hashed and written at a time
CHUNK_BYTES = (
    1 << 22
)  # of shards that are read at once: fewer requests than one for each batch, and threads wake up less often
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
CHUNKS = 3  # that are on their way at the same time, at least
LEAST_CHUNKS = 32  # of a set, so that a small one is not read in a few bursts
Progress = Callable[[int, int], None]  # shards done, shards; also now and then while another process writes


@dataclass(frozen=True)
class Shard:
    """The samples ``first`` to ``first + samples`` and the file that holds them."""

    path: Path
    first: int
    samples: int
    size_bytes: int


def layout(pairs: Pairs, data_dir: Path | str, num_shards: int = 0) -> list[Shard]:
    """Return the shards of ``pairs``, in order: as many as ``num_shards`` says, else of about 128 MB, the last one shorter.

    ``UserError`` for more shards than samples.
    """
    if num_shards > pairs.samples:
        raise UserError(f"num_shards = {num_shards}: there are {pairs.samples:,} samples; set it to that or less")
    each = max(1, SHARD_BYTES // pairs.sample_bytes)
    whole = -(-pairs.samples // each)
    ends = [pairs.samples * (index + 1) // num_shards for index in range(num_shards)] or [
        min(pairs.samples, each * (index + 1)) for index in range(whole)
    ]
    firsts = [0, *ends[:-1]]
    key = hashlib.sha256(json.dumps([_content(pairs), firsts if num_shards else each]).encode()).hexdigest()[:16]
    folder = Path(data_dir).absolute() / f"pairs-{key}"
    return [
        Shard(folder / f"shard_{index:04d}.bin", first, end - first, (end - first) * pairs.sample_bytes)
        for index, (first, end) in enumerate(zip(firsts, ends, strict=True))
    ]


def _content(pairs: Pairs) -> dict[str, int]:
    content = {"format": FORMAT, **asdict(pairs)}
    del content["samples"]  # fewer samples are the beginning of more
    return content


def _dtype(pairs: Pairs) -> np.dtype:
    return np.dtype("<i8" if pairs.token_bytes == 8 else "<u2")


@dataclass(frozen=True)
class Prepared:
    """What opening a set of shards took.

    ``mended`` names each shard that was there and had to be made again, with the reason; ``checked`` counts the shards whose
    checksum was compared now and is right. Where several processes open a set, the first one mends it: gather their records.
    """

    shards: int
    written: int
    checked: int
    mended: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        unchanged = self.shards - self.written - self.checked
        text = f"{counted(self.shards, 'shard')}: {self.written} written, {self.checked} compared with their checksum, {unchanged} unchanged"
        return "; ".join(
            [text, *self.mended[:3], *([f"{len(self.mended) - 3} more were made again"] if self.mended[3:] else [])]
        )


def prepare(pairs: Pairs, shards: Sequence[Shard], verify: str = "auto", progress: Progress | None = None) -> Prepared:
    """Write the shards that are missing, cut, foreign or damaged, and leave the others alone.

    Any number of processes may call this at once, of one run or of several: one works, the others wait. Raises ``UserError``
    before the first byte is written where the disk has too little space, ``StorageError`` where it cannot be written.
    """
    began = time.monotonic()
    folder = shards[0].path.parent
    manifest = _read_manifest(folder)
    entries = [(shard, manifest.get(shard.path.name)) for shard in shards]
    if verify == "auto" and not any(_changed(*entry) or _foreign(pairs, *entry) for entry in entries):
        return Prepared(len(shards), 0, 0, (), time.monotonic() - began)
    lock = filelock.FileLock(folder / ".lock")  # the operating system frees it when its process dies
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=2)
            except filelock.Timeout:
                if progress:
                    progress(0, 0)
    except (OSError, NotImplementedError) as error:
        raise not_written(folder, error if isinstance(error, OSError) else OSError(str(error))) from error
    try:
        return _mend(pairs, shards, verify, progress, began)
    except OSError as error:
        raise not_written(folder, error) from error
    finally:
        lock.release()


def _mend(pairs: Pairs, shards: Sequence[Shard], verify: str, progress: Progress | None, began: float) -> Prepared:
    folder = shards[0].path.parent
    for left in folder.glob(".*.tmp"):
        left.unlink()  # of a writing that was interrupted: whoever writes holds the lock
    manifest = _read_manifest(folder)  # the process that held the lock may have written it
    mended, missing, checked = [], [], 0
    for done, shard in enumerate(shards):
        entry = manifest.get(shard.path.name)
        reason = _foreign(pairs, shard, entry)
        short = entry is not None and entry["size_bytes"] < shard.size_bytes
        if not reason and entry and not short and (verify == "always" or _changed(shard, entry)):
            reason = "" if _checksum(shard.path) == entry["xxh3_128"] else "its checksum is not that of its writing"
            checked += not reason
            manifest[shard.path.name] = _entry(shard, entry["xxh3_128"])
        if progress and checked:
            progress(done + 1, len(shards))
        if not entry or reason or short:
            missing.append(shard)
            if shard.path.exists() and (reason or not entry):
                mended.append(f"{shard.path.name} was made again: {reason or 'no manifest names it'}")
                shard.path.unlink()
            manifest.pop(shard.path.name, None)
    needed, free = sum(shard.size_bytes for shard in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder} has {size_text(free)} free and needs {size_text(needed)} for {counted(len(missing), 'shard')} of samples: free some "
            "space, set fewer samples, token_bytes=2 or another data_dir"
        )

    def store() -> None:
        write_json(folder / MANIFEST, {"schema_version": 1, "content": _content(pairs), "shards": manifest})

    if missing or checked:
        store()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="shards") as pool:
        writing = {pool.submit(_write, pairs, shard): shard for shard in missing}
        try:
            for done, future in enumerate(as_completed(writing)):
                manifest[writing[future].path.name] = future.result()
                store()
                if progress:
                    progress(done + 1, len(missing))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return Prepared(len(shards), len(missing), checked, tuple(mended), time.monotonic() - began)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the entries of the shards that count; none where the manifest is missing, cut or not one."""
    try:
        value = read_object(folder / MANIFEST, {"shards": dict})
    except UserError:
        return {}
    whole = {"size_bytes": int, "changed_ns": int, "xxh3_128": str}
    return {
        name: entry
        for name, entry in value["shards"].items()
        if isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in whole.items())
    }


def _changed(shard: Shard, entry: dict[str, Any] | None) -> bool:
    try:
        status = shard.path.stat()
    except OSError:
        return True
    if not entry or entry["size_bytes"] < shard.size_bytes:
        return True
    return (status.st_size, status.st_mtime_ns) != (entry["size_bytes"], entry["changed_ns"])


def _foreign(pairs: Pairs, shard: Shard, entry: dict[str, Any] | None) -> str:
    """Return why a file cannot be this shard: its size, or its first or last sample beside the generator's."""
    expected_bytes = entry["size_bytes"] if entry else shard.size_bytes
    try:
        size = shard.path.stat().st_size
        if size != expected_bytes:
            return f"it has {size:,} bytes of {expected_bytes:,}"
        ends = np.array([0, max(1, min(shard.samples, size // pairs.sample_bytes)) - 1])
        with shard.path.open("rb", buffering=0) as handle:
            for place, expected in zip(ends, generate(pairs, ends + shard.first), strict=True):
                handle.seek(place * pairs.sample_bytes)
                if handle.read(pairs.sample_bytes) != expected.astype(_dtype(pairs)).tobytes():
                    return f"its sample {place} is not sample {shard.first + place} of this set"
    except OSError as error:
        return f"it cannot be read ({(error.strerror or str(error)).lower()})"
    return ""


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(disk.BLOCK_BYTES)
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def _entry(shard: Shard, checksum: str) -> dict[str, Any]:
    status = shard.path.stat()
    return {"size_bytes": status.st_size, "changed_ns": status.st_mtime_ns, "xxh3_128": checksum}


def _write(pairs: Pairs, shard: Shard) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    rows = max(1, _WRITE_BYTES // (16 * pairs.sequence))
    with atomic_path(shard.path) as temporary, temporary.open("wb") as handle:
        for low in range(0, shard.samples, rows):
            indices = np.arange(shard.first + low, shard.first + min(low + rows, shard.samples))
            data = generate(pairs, indices).astype(_dtype(pairs), copy=False).data
            digest.update(data)
            handle.write(data)
    return _entry(shard, digest.hexdigest())


class _Mapped:
    """A shard by memory map: the system reads what is touched, through the page cache, and is told what will be."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)
        self.cached = False  # all of it is in the page cache: there is nothing to tell the system
        try:  # copy on write, which torch asks for: nobody writes
            self.mapped, self.lasting = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY), True
        except OSError:  # the system promises no such memory for a file that is larger than all of it
            self.mapped, self.lasting = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ), False

    def read(self, offset: int, length: int) -> memoryview:
        if hasattr(os, "posix_fadvise") and not self.cached:  # in large requests, not page by page as it is touched
            os.posix_fadvise(self.descriptor, offset, length, os.POSIX_FADV_WILLNEED)
        return memoryview(self.mapped)[offset : offset + length]

    def present(self, offset: int, length: int) -> memoryview:
        """Return a range that is in memory and mapped: who reads it waits for no disk and takes no fault."""
        view, low = self.read(offset, length), offset - offset % disk.PAGE
        try:
            self.mapped.madvise(_POPULATE_READ, low, offset + length - low)
        except (OSError, AttributeError) as error:
            if getattr(error, "errno", errno.EINVAL) != errno.EINVAL:  # beyond the end of the file
                raise UserError(f"{self.path} was cut while it was read; start again") from error
            np.frombuffer(view, np.uint8)[:: disk.PAGE].max()  # a system without that request
        return view

    def release(self) -> None:
        if hasattr(self.mapped, "madvise"):
            self.mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a batch that is still in use keeps the map
            self.mapped.close()
        os.close(self.descriptor)


class _Memory:
    """Memory for chunks of samples that is taken again once no tensor looks at it: the first touch of fresh memory costs as much
    as reading the page cache does. It begins at a page, as direct reads ask for. Any thread may take some.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()

    def take(self, samples: int, sequence: int) -> np.ndarray:
        """Return int64 (samples, 2, S), whose content is left over."""
        needed = max(1, 16 * samples * sequence)
        store = self._free.pop() if self._free else None
        if store is None or len(store) < needed:
            store = mmap.mmap(-1, needed)
        array = np.frombuffer(store, np.int64, 2 * samples * sequence).reshape(samples, 2, sequence)
        weakref.finalize(array, self._free.append, store).atexit = False
        return array


class Shards:
    """Shards that are open to be read, and the page cache in the state that was asked for.

    ``mode`` says how they are read, as it really is; ``prepared`` what opening them took.
    """

    def __init__(
        self,
        pairs: Pairs,
        shards: Sequence[Shard],
        prepared: Prepared,
        page_cache: str,
        read: str,
        planted: disk.Planted,
    ) -> None:
        self.pairs, self.shards, self.prepared, self.planted = pairs, list(shards), prepared, planted
        self.page_cache, self.direct = page_cache, read == "direct"
        self.paths = [shard.path for shard in shards]
        self._firsts = np.array([shard.first for shard in shards])
        self._files = [disk.DirectFile(path) if self.direct else _Mapped(path) for path in self.paths]
        past = (
            "O_DIRECT" if all(getattr(file, "direct", False) for file in self._files) else "pread, then dropped from it"
        )
        self.mode = f"direct, past the page cache ({past})" if self.direct else "memory map"
        if planted.bytes_per_s:
            self.mode += f", slowed down on purpose to {planted.bytes_per_s / 1e6:g} MB/s"

    def release(self) -> None:
        """Unmap the pages that this process has touched: what any process maps is not evicted."""
        for file in self._files:
            if isinstance(file, _Mapped):
                file.release()

    def settle(self) -> float | None:
        """Put the page cache into the state that was asked for and return the share of the shards that is in it now.

        To be called before each timed pass, since the one before left its pages: by one process of a host, after the others
        have called :meth:`release`. None where the system does not tell.
        """
        self.release()
        if self.direct or self.page_cache == "cold":
            disk.evict(self.paths)
        elif (disk.residency(self.paths) or 0) < 1:
            disk.fill(self.paths)
        share = disk.residency(self.paths)
        for file in self._files:
            if isinstance(file, _Mapped):
                file.cached = share == 1
        return share

    def read(self, indices: np.ndarray, tokens: np.ndarray | None = None) -> np.ndarray:
        """Return samples, int64 (B,), as int64 (B, 2, S), in ``tokens`` where it is given. Any thread may call it.

        Neighbours in a shard are one read; direct reads of int64 tokens go to where they will be used, without a copy.
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.pairs.samples:
            raise IndexError(f"samples {indices.min()} to {indices.max()} of {self.pairs.samples}")
        tokens = np.empty((len(indices), 2, self.pairs.sequence), np.int64) if tokens is None else tokens
        owners = np.searchsorted(self._firsts, indices, side="right") - 1
        cuts = np.flatnonzero((np.diff(indices) != 1) | (np.diff(owners) != 0)) + 1
        size, dtype = self.pairs.sample_bytes, _dtype(self.pairs)
        for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(indices)], strict=True):
            if low == high:  # no indices at all
                continue
            owner = int(owners[low])
            file, offset = self._files[owner], (int(indices[low]) - int(self._firsts[owner])) * size
            if isinstance(file, disk.DirectFile) and dtype == tokens.dtype:
                file.read_into(offset, tokens[low:high])
            else:
                data = np.frombuffer(file.read(offset, (high - low) * size), dtype)
                tokens[low:high] = data.reshape(high - low, 2, self.pairs.sequence)
            self.planted.delay((high - low) * size)
        return tokens

    def view(self, indices: np.ndarray) -> np.ndarray | None:
        """Return samples as int64 (B, 2, S) where they lie, without a copy; None where they are no neighbours in a memory map.

        A copy costs more than it takes to read the page cache: its target, other than the one buffer of a plain reader, is
        too large for the processor's caches.
        """
        if self.direct or self.pairs.token_bytes != 8 or not len(indices) or not (np.diff(indices) == 1).all():
            return None
        owner = int(np.searchsorted(self._firsts, indices[0], side="right")) - 1
        shard, file, size = self.shards[owner], self._files[owner], self.pairs.sample_bytes
        low, count = int(indices[0]) - shard.first, len(indices)
        if not (isinstance(file, _Mapped) and file.lasting and 0 <= low <= shard.samples - count):
            return None
        data = np.frombuffer(file.present(low * size, count * size), np.int64)
        self.planted.delay(count * size)
        return data.reshape(count, 2, self.pairs.sequence)

    def close(self) -> None:
        for file in self._files:
            file.close()


@dataclass(frozen=True)
class Batch:
    """B pairs in one tensor, int64 (B, 2, S), and the seconds that the caller waited for them."""

    tokens: torch.Tensor
    waited_s: float

    @property
    def source(self) -> torch.Tensor:
        """Int64 (B, S), a view."""
        return self.tokens[:, 0]

    @property
    def target(self) -> torch.Tensor:
        """Int64 (B, S), a view."""
        return self.tokens[:, 1]

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch on ``device``, in one copy; from pinned memory without waiting for it."""
        return Batch(self.tokens.to(device, non_blocking=True), self.waited_s)


@dataclass(frozen=True)
class Source:
    """What gives samples: ``read`` takes int64 (B,) and returns int64 (B, 2, S). ``description`` says where they come from."""

    pairs: Pairs
    read: Callable[[np.ndarray], np.ndarray]
    description: str
    read_ahead: int = 4
    shards: Shards | None = None  # None: from memory

    def batches(self, orders: Iterable[np.ndarray], pin: bool = False) -> Generator[Batch]:
        """Yield a batch for each array of indices, int64 (B,), in their order.

        ``read_ahead`` batches or more are made on threads while the caller works; with 0 each is made when it is asked for.
        From shards several batches are read at once, in chunks of some MB, of which some are on their way; neighbours in a
        memory map stay where they are and are not to be written. An error of a thread is raised here. Ends its threads when it is closed or left. ``pin`` puts the tensors in page-locked memory, from
        where an accelerator copies them in the background.
        """
        memory = _Memory()

        def make(chunk: list[np.ndarray]) -> Sequence[torch.Tensor]:
            indices = np.concatenate(chunk)
            if self.shards is None:
                read = self.read(indices)
            elif (view := self.shards.view(indices)) is not None:
                read = view
            else:
                read = self.shards.read(indices, memory.take(len(indices), self.pairs.sequence))
            tokens = torch.from_numpy(read)
            return (tokens.pin_memory() if pin else tokens).split([len(order) for order in chunk])

        if not self.read_ahead:
            for order in orders:
                began = time.perf_counter()
                (tokens,) = make([order])
                yield Batch(tokens, time.perf_counter() - began)
            return
        pool = ThreadPoolExecutor(self.read_ahead, thread_name_prefix="samples")
        waiting: deque[tuple[int, Future[Sequence[torch.Tensor]]]] = deque()
        chunks = self._chunks(orders)

        def submit() -> None:
            while sum(count for count, _ in waiting) < self.read_ahead or len(waiting) < min(CHUNKS, self.read_ahead):
                if (chunk := next(chunks, None)) is None:
                    return
                waiting.append((len(chunk), pool.submit(make, chunk)))

        try:
            submit()
            while waiting:
                began = time.perf_counter()
                made = waiting.popleft()[1].result()
                waited_s = time.perf_counter() - began
                submit()
                for tokens in made:
                    yield Batch(tokens, waited_s)
                    waited_s = 0.0
                del made, tokens  # their memory is free for the next chunks
        finally:
            pool.shutdown(cancel_futures=True)

    def _chunks(self, orders: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """Yield the batches that are made at once: one from memory, as many as a large read takes from shards."""
        wanted = min(CHUNK_BYTES, self.pairs.samples * self.pairs.sample_bytes // LEAST_CHUNKS) if self.shards else 0
        chunk: list[np.ndarray] = []
        for order in orders:
            chunk.append(order)
            if sum(map(len, chunk)) * self.pairs.sample_bytes >= wanted:
                yield chunk
                chunk = []
        if chunk:
            yield chunk


def open_source(
    pairs: Pairs,
    data_dir: Path | str = "",
    num_shards: int = 0,
    page_cache: str = "warm",
    read: str = "mmap",
    read_ahead: int = 4,
    verify: str = "auto",
    planted: disk.Planted | None = None,
    progress: Progress | None = None,
) -> Source:
    """Open the samples of ``pairs``: generated while they are asked for, or with ``data_dir`` from shards, written if need be.

    ``page_cache`` is "warm" or "cold", ``read`` "mmap" or "direct", ``verify`` "auto" or "always" (compare every checksum),
    ``planted`` a slow disk on purpose. Raises what :func:`layout` and :func:`prepare` do.
    """
    choices = (
        ("page_cache", page_cache, "warm cold"),
        ("read", read, "mmap direct"),
        ("verify", verify, "auto always"),
    )
    for name, value, accepted in choices:
        if value not in accepted.split():
            raise UserError(f"{name} = {value!r}: choose {' or '.join(accepted.split())}")
    if not data_dir:
        return Source(pairs, lambda indices: generate(pairs, indices), "memory: generated while training", read_ahead)
    shards = layout(pairs, data_dir, num_shards)
    prepared = prepare(pairs, shards, verify, progress)
    opened = Shards(pairs, shards, prepared, page_cache, read, planted or disk.Planted())
    return Source(pairs, opened.read, f"{counted(len(shards), 'shard')}, {opened.mode}", read_ahead, opened)


@dataclass
class DiskRates:
    """Bytes per second of rounds that took turns on the same shards, and which tool read them raw."""

    raw_bytes_per_s: list[float] = field(default_factory=list)
    loader_bytes_per_s: list[float] = field(default_factory=list)
    tool: str = ""


def disk_rates(
    source: Source,
    batch: int,
    rounds: int = 3,
    seconds: float = 2.0,
    order: np.ndarray | None = None,
    raw: bool = True,
    barrier: Callable[[], object] = lambda: None,
) -> DiskRates:
    """Read the shards raw and by the loader in turns, as ``source`` reads them, each for ``seconds`` or to the end.

    Before each pass the page cache is put into the state of ``source``. The loader makes batches of ``batch``
    samples, as they come in ``order``; of a memory map each is copied to one place, as the raw reader copies its
    blocks: who only maps reads nothing. Ranks that share a disk call it together: one of each host with ``raw`` while
    the others wait at ``barrier``, then all load at once, and their rates add up.
    """
    opened = source.shards
    if opened is None:
        raise UserError("samples that are generated lie on no disk: set data_dir")
    order = np.arange(source.pairs.samples) if order is None else order
    rates, place = DiskRates(), np.empty((batch, 2, source.pairs.sequence), np.int64)

    def read_raw() -> None:
        depth = max(1, source.read_ahead)
        rate = disk.raw_sequential_rate(opened.paths, opened.direct, depth, seconds, opened.planted.alone())
        rates.raw_bytes_per_s.append(rate.bytes_per_s)
        rates.tool = rate.tool

    def load() -> None:
        began, elapsed, samples = time.perf_counter(), 0.0, 0
        batches = source.batches(order[low : low + batch] for low in range(0, len(order), batch))
        while elapsed < seconds and (loaded := next(batches, None)):
            if not opened.direct:
                np.copyto(place[: len(loaded.tokens)], loaded.tokens.numpy())
            samples += len(loaded.tokens)
            elapsed = time.perf_counter() - began
        batches.close()
        rates.loader_bytes_per_s.append(samples * opened.pairs.sample_bytes / elapsed)

    for number in range(rounds):
        for measure in (read_raw, load)[:: -1 if number % 2 else 1]:
            opened.release()
            barrier()
            if raw:
                opened.settle()
            barrier()
            if raw or measure is load:
                measure()
            barrier()
    return rates
