"""Synthetic pairs of token sequences, source and target, and where they come from while a model trains: memory or a disk.

Sample i depends on the seed and on i alone. Its tokens come from a counter, not from a generator with a state, so that memory,
any number of shards and any rank give the same sample.

Shards are a cache of what the generator gives: ``DATA_DIR/pairs-KEY/shard_0000.bin`` ..., under a key of content and
layout: a set of fewer samples is the beginning of a larger one. A shard gets its name when it is whole. It ends with the
checksum of its bytes: XXH3 of 128 bits (github.com/Cyan4973/xxHash), seeded by the key and the shard's number.

Notation: n samples, S tokens of a sequence, V tokens of the vocabulary. Rates are bytes per second.
"""

import ctypes
import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import filelock
import numpy as np
import torch
import xxhash
from scipy.special import entr

from benchlib.core.errors import UserError
from benchlib.core.files import atomic_path, not_written
from benchlib.workloads.training import prefetched

FORMAT = 2
SHARD_BYTES = 1 << 27
CHECKSUM_BYTES = 16
BLOCK_BYTES = 1 << 20  # of a sequential read
ROUNDS = 3  # of a measurement of the disk
WRITE_BYTES = 1 << 22  # generated and written at a time
Progress = Callable[..., object]  # called with the shards ``done``, and their ``total``
_BLOCK = 1 << 14  # draws of 8 bytes at a time: the few arrays of a block stay in the second-level cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST, _HALF, _LOW = np.uint64(31), np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Pairs:
    """``samples`` pairs of S tokens each, below V. ``token_bytes`` (8 or 2) is the width of a token on a disk, not in memory."""

    samples: int
    sequence: int
    vocabulary: int
    seed: int
    token_bytes: int = 8

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample on a disk, source and target."""
        return 2 * self.sequence * self.token_bytes


def generate(pairs: Pairs, indices: np.ndarray) -> np.ndarray:
    """Return the samples ``indices``, int64 (n,), as int64 (n, 2, S): source and target.

    Token k has the probability sqrt((k + 1) / V) - sqrt(k / V): floor(V u^2) for a uniform u of 32 bits, in whole numbers,
    so that every machine gives the same. One draw of SplitMix64 (G. L. Steele, D. Lea and C. H. Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014) at the counter i S + j gives token j of both sequences of sample i. Raises
    ``IndexError`` for an index beyond the samples.
    """
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < pairs.samples:
        raise IndexError(f"samples {indices.min()} to {indices.max()} of {pairs.samples}")
    tokens = np.empty((len(indices), 2, pairs.sequence), np.int64)
    places = np.arange(1, pairs.sequence + 1, dtype=np.uint64)
    start = _mixed(np.array([pairs.seed % (1 << 64)], np.uint64) * _GOLDEN)  # neighbouring seeds start far apart
    rows = max(1, _BLOCK // pairs.sequence)
    for low in range(0, len(indices), rows):
        counters = indices[low : low + rows].astype(np.uint64)[:, None] * np.uint64(pairs.sequence)
        draws = _mixed((counters + places) * _GOLDEN + start)
        for part, uniform in enumerate((draws >> _HALF, draws & _LOW)):
            tokens[low : low + rows, part] = (uniform * uniform >> _HALF) * np.uint64(pairs.vocabulary) >> _HALF
    return tokens


def _mixed(state: np.ndarray) -> np.ndarray:
    for shift, factor in _MIX:
        state = (state ^ (state >> shift)) * factor
    return state ^ (state >> _LAST)  # type: ignore[no-any-return]


def entropy(vocabulary: int) -> float:
    """Return the entropy of a token in nats: the loss of a model that has learnt the distribution and nothing else can be."""
    return float(entr(np.diff(np.sqrt(np.arange(vocabulary + 1) / vocabulary))).sum())


class Source:
    """The samples of ``pairs``, generated while they are asked for, ``read_ahead`` batches ahead."""

    def __init__(self, pairs: Pairs, read_ahead: int = 4) -> None:
        self.pairs, self.read_ahead = pairs, read_ahead

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return samples, int64 (n,), as int64 (n, 2, S)."""
        return generate(self.pairs, indices)

    def batches(self, orders: Iterable[np.ndarray], pin: bool = False) -> Iterator[torch.Tensor]:
        """Yield int64 (n, 2, S) for each array of indices, ``read_ahead`` of them being made on threads meanwhile.

        ``pin`` puts them in page-locked memory, from where an accelerator copies them in the background.
        """

        def make(indices: np.ndarray) -> torch.Tensor:
            tokens = torch.from_numpy(self.read(indices))
            return tokens.pin_memory() if pin else tokens

        return prefetched(make, orders, self.read_ahead)


class Shards(Source):
    """The files of ``pairs`` below ``data_dir``, of about 128 MB, the last one shorter. They have to be prepared before they are read.

    ``page_cache`` is the state to put the page cache into, "warm" or "cold". With ``num_shards`` a set of ``set_samples``, of which
    ``pairs`` are the beginning, has that many shards, which differ by one sample at most. ``mapped`` copies samples out of a memory
    mapping in place of reading them from the file.
    """

    def __init__(
        self,
        pairs: Pairs,
        data_dir: Path | str,
        page_cache: str = "warm",
        read_ahead: int = 4,
        num_shards: int = 0,
        set_samples: int = 0,
        mapped: bool = False,
    ) -> None:
        super().__init__(pairs, read_ahead)
        self.page_cache, self.mapped = page_cache, mapped
        each, total = max(1, SHARD_BYTES // pairs.sample_bytes), set_samples or pairs.samples
        content = {"format": FORMAT, **asdict(replace(pairs, samples=1))}  # fewer samples are the beginning of more
        layout = [total, num_shards] if num_shards else each
        self.key = hashlib.sha256(json.dumps([content, layout]).encode()).hexdigest()[:16]
        firsts = np.arange(num_shards) * total // num_shards if num_shards else np.arange(0, pairs.samples, each)
        self.firsts = firsts[firsts < pairs.samples]
        self.folder = Path(data_dir).absolute() / f"pairs-{self.key}"
        self.paths = [self.folder / f"shard_{number:04d}.bin" for number in range(len(self.firsts))]
        self.samples = np.diff(self.firsts, append=pairs.samples).tolist()
        self._dtype = np.dtype("<i8" if pairs.token_bytes == 8 else "<u2")

    def prepare(self, progress: Progress = lambda **counts: None, part: int = 0, parts: int = 1) -> list[Path]:
        """Write the shards that are missing, too short or changed, and leave the others alone; return those that were changed.

        Any number of processes may call this at once, of one run or of several: one writes, the others wait. Each of ``parts``
        processes compares its ``part`` of the shards with their checksums. Raises ``StorageError`` if they cannot be written.
        """
        missing = self._missing()
        changed = [number for number in range(part, len(self.paths), parts) if number not in missing]
        changed = [number for number in changed if not self._is_intact(number)]
        if not missing and not changed:
            return []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.folder / ".lock"):  # the operating system frees it when its process dies
                for left in self.folder.glob(".*.tmp"):
                    left.unlink()  # of a writing that was interrupted: whoever writes holds the lock
                missing = sorted({*changed, *self._missing()})  # after the process that held the lock
                for done, number in enumerate(missing, 1):
                    self._write(number)
                    progress(done=done, total=len(missing))
        except (OSError, NotImplementedError) as error:
            raise not_written(self.folder, error if isinstance(error, OSError) else OSError(str(error))) from error
        return [self.paths[number] for number in changed]

    def _missing(self) -> list[int]:
        """Return the numbers of those that are not there whole; a longer file begins with the same samples."""
        needed = [count * self.pairs.sample_bytes + CHECKSUM_BYTES for count in self.samples]
        pairs = enumerate(zip(self.paths, needed, strict=True))
        return [number for number, (path, size) in pairs if not path.exists() or path.stat().st_size < size]

    def _checksum(self, number: int) -> xxhash.xxh3_128:
        return xxhash.xxh3_128(seed=int(self.key, 16) ^ number)

    def _is_intact(self, number: int) -> bool:
        checksum, path, block = self._checksum(number), self.paths[number], memoryview(bytearray(BLOCK_BYTES))
        left = path.stat().st_size - CHECKSUM_BYTES
        with path.open("rb", buffering=0) as file:
            while left and (count := file.readinto(block[:left])):
                checksum.update(block[:count])
                left -= count
            return file.read() == checksum.digest()

    def _write(self, number: int) -> None:
        rows, checksum = max(1, WRITE_BYTES // (16 * self.pairs.sequence)), self._checksum(number)
        first = int(self.firsts[number])
        end = first + self.samples[number]
        with atomic_path(self.paths[number]) as temporary, temporary.open("wb") as handle:
            for low in range(first, end, rows):
                tokens = generate(self.pairs, np.arange(low, min(low + rows, end))).astype(self._dtype, copy=False)
                checksum.update(tokens.data)
                handle.write(tokens.data)
            handle.write(checksum.digest())

    def settle(self) -> float | None:
        """Put the page cache into the state that was asked for and return the share of the shards that is in it now.

        To be called before each timed pass, since the one before left its pages, by one process of a host. None where
        the system does not tell.
        """
        if self.page_cache == "cold":
            evict(self.paths)
        elif (residency(self.paths) or 0) < 1:
            raw_rate(self.paths, np.inf)
        return residency(self.paths)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """See ``Source``: neighbours come by one read. Any thread may call it."""
        owners = np.searchsorted(self.firsts, indices, side="right") - 1
        places = indices - self.firsts[owners]
        tokens = np.empty((len(indices), 2, self.pairs.sequence), self._dtype)
        cuts = (np.flatnonzero((np.diff(indices) != 1) | np.diff(owners)) + 1).tolist()
        for low, high in zip([0, *cuts], [*cuts, len(indices)], strict=True) if len(indices) else ():
            path, run = self.paths[owners[low]], tokens[low:high]
            begin = int(places[low]) * self.pairs.sample_bytes
            with path.open("rb", buffering=0) as file:
                count = os.fstat(file.fileno()).st_size - begin
                if self.mapped and count >= run.nbytes:  # for this read alone: pages that are mapped cannot be evicted
                    run[:] = np.memmap(file, self._dtype, "r", begin, run.shape)
                elif not self.mapped:
                    file.seek(begin)
                    count = file.readinto(run.data.cast("B"))
                if count < run.nbytes:
                    raise UserError(f"{path} became shorter while it was read: leave the shards alone during a run")
        return tokens.astype(np.int64, copy=False)


def evict(paths: Iterable[Path]) -> None:
    """Ask the system to drop files from the page cache. What is dirty stays: :func:`residency` tells."""
    for path in paths:
        with path.open("rb") as handle:
            if hasattr(os, "posix_fadvise"):
                os.fsync(handle.fileno())
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def residency(paths: Sequence[Path]) -> float | None:
    """Return the share of the files' bytes that is in the page cache, by mincore(2), in pages; None if unknown.

    For a file that the caller neither owns nor may write Linux calls every page resident: that is no answer.
    """
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    pages = resident = 0
    for path in paths:
        status = path.stat()
        if mincore is None or not (os.access(path, os.W_OK) or status.st_uid == os.geteuid()):
            return None
        vector = (ctypes.c_ubyte * -(-status.st_size // mmap.PAGESIZE))()
        with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
            first = ctypes.c_char.from_buffer(mapped)  # the address of a mapping: pages are not touched
            failed = mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(status.st_size), vector)
            del first  # a mapping with a pointer into it cannot be closed
        if failed:
            return None
        pages += len(vector)
        resident += int((np.frombuffer(bytes(vector), np.uint8) & 1).sum())
    return resident / pages if pages else None


def raw_rate(paths: Iterable[Path], seconds: float, see: Callable[[memoryview], object] = len) -> float:
    """Read files in order for ``seconds`` or to the end, in blocks of 1 MiB through the page cache that ``see`` gets; bytes/s."""
    buffer, total, began = memoryview(bytearray(BLOCK_BYTES)), 0, time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as handle:
            while time.perf_counter() - began < seconds and (count := handle.readinto(buffer)):
                see(buffer[:count])
                total += count
    return total / (time.perf_counter() - began)


def disk_rates(
    shards: Shards, batch: int, order: np.ndarray, seconds: float, raw: bool, barrier: Callable[[], object]
) -> dict[str, list[float]]:
    """Read the shards raw, with their checksums, and by the loader in batches as they come in ``order``.

    The three kinds of pass are interleaved, each for ``seconds`` or to the end. Before each pass the page cache is put into the
    state that was asked for. Ranks that share a disk call it together: one of each host with ``raw`` while the others wait at
    ``barrier``, then all load at once, and their rates add up. Returns bytes/s by kind: ``raw``, ``checked``, ``loader``.
    """
    by_kind: dict[str, list[float]] = {"raw": [], "checked": [], "loader": []}

    def load() -> float:
        began, elapsed, samples = time.perf_counter(), 0.0, 0
        batches = shards.batches(order[low : low + batch] for low in range(0, len(order), batch))
        while elapsed < seconds and (tokens := next(batches, None)) is not None:
            samples += len(tokens)
            elapsed = time.perf_counter() - began
        del batches  # ends its threads
        return samples * shards.pairs.sample_bytes / elapsed

    measure = {"raw": lambda: raw_rate(shards.paths, seconds), "loader": load}
    measure["checked"] = lambda: raw_rate(shards.paths, seconds, xxhash.xxh3_128().update)
    for number in range(ROUNDS):
        for kind in [*by_kind][:: -1 if number % 2 else 1]:
            if raw:
                shards.settle()
            barrier()
            if raw or kind == "loader":
                by_kind[kind].append(measure[kind]())
            barrier()
    return by_kind
