"""What a device reaches: the FLOP rate of matrix products and the bandwidth of memory copies, measured and verified.

A sample is one group of operations that takes about ten milliseconds, timed from an idle device to an idle device. The
inputs are random numbers, as in real work: products of zeros or small integers draw less power and run faster.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil
import torch

from benchlib.core.definitions import size_text
from benchlib.core.errors import RunBroken
from benchlib.core.text import counted
from benchlib.runtime import devices, group
from benchlib.runtime.group import World
from benchlib.runtime.timing import hold

GROUP_S = 0.01
MIN_SAMPLES = 3
MIB = 1 << 20
TIMES_CACHE = 4  # STREAM's rule: arrays of at least four times all last-level caches
# Of a device 4 x 256 MiB: no driver tells the size of MI300X's Infinity Cache.
LEAST_COPY, LEAST_DEVICE_COPY = 64 * MIB, 1024 * MIB
MEMORY_SHARE, BUFFERS = 0.25, 3  # of the host's free memory, for the buffers of all ranks' copies
LEAST_PEAK = {"cpu": 256}  # n from which products are near the peak, of other devices the least of their default sizes

DTYPES = devices.DTYPES | {"tf32": torch.float32}


@dataclass(frozen=True)
class MatmulPeak:
    """FLOP rates of n x n x n products (2 n^3 operations each). ``samples`` is empty where the device lacks the precision."""

    size: int
    samples: tuple[float, ...]  # FLOP/s
    reason: str = ""

    @property
    def best(self) -> float | None:
        """The highest rate, FLOP/s: what a rate of useful work on this device cannot exceed."""
        return max(self.samples, default=None)

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None


def default_sizes(device: torch.device) -> tuple[int, ...]:
    """Return the sizes of products whose rate is near the peak. On a CPU the smallest take milliseconds; 4096 is for many threads."""
    return (512, 1024, 2048, 4096) if device.type == "cpu" else (4096, 8192)


def too_small(device: torch.device, size: int) -> str:
    """Return why products of a size show no peak of the device; '' if they may."""
    least = LEAST_PEAK.get(device.type, min(default_sizes(device)))
    return (
        f"products of n = {size} are too small for a peak of {device.type}: take {least} or more"
        if size < least
        else ""
    )


@dataclass(frozen=True)
class CopySize:
    """Bytes of each rank's copy, and of all last-level caches together (0: not known).

    ``lacking`` says why so few bytes show the caches and not the memory.
    """

    bytes: int
    cache: int
    lacking: str = ""


def copy_size(kind: str, here: World, asked: int = 0) -> CopySize:
    """Return the size of a copy of each rank: ``asked`` bytes, else as many as the caches do not hold and the free memory does.

    The ranks of a host share its caches and its memory. Copies to and from a device pass through those.
    """
    own = kind == "device"
    cache, ranks = devices.cache_bytes(here.device if own else torch.device("cpu")), 1 if own else here.local_size
    needed = max(LEAST_DEVICE_COPY if own else LEAST_COPY, TIMES_CACHE * cache // ranks)
    fitting = psutil.virtual_memory().available * MEMORY_SHARE / BUFFERS / here.local_size
    size = asked or max(1, int(min(needed, fitting)) // MIB) * MIB
    held = f"caches of {size_text(cache)}" if cache else "caches of an unknown size"
    short = f"a copy of {size_text(size)} shows {held}: the memory takes {size_text(needed)} or more"
    return CopySize(size, cache, short if size < needed else "")


def matmul_peaks(
    device: torch.device,
    precision: str,
    *,
    sizes: Sequence[int],
    seconds: float,
    slowdown: float = 0.0,
) -> list[MatmulPeak]:
    """Measure each size on its own, from the smallest on.

    A size is left out when one product of it would take longer than ``seconds``, judged by the smaller one before it.
    ``precision`` is a name of ``DTYPES``. A precision that the device does not have gives no samples and the reason. A wrong product raises ``RunBroken``. ``slowdown`` makes
    each timed group longer by this share of its time.
    """
    peaks: list[MatmulPeak] = []
    # Of others only a try can tell.
    reason = devices.lacking(precision, device) if device.type == "cuda" or precision == "tf32" else ""
    with devices.products_held(precision, device):
        for size in sorted(set(sizes)) if not reason else ():
            if peaks and 2 * size**3 / (peaks[-1].median or math.inf) > seconds:
                break
            try:
                rates = _matmul_rates(device, DTYPES[precision], size, seconds, slowdown)
            except RunBroken:
                raise
            except (RuntimeError, TypeError) as error:  # after the first size such as too little memory for the next
                reason = f"{device.type} does not multiply {precision} matrices: {' '.join(str(error).split())[:200]}"
                break
            peaks.append(MatmulPeak(size, tuple(rates)))
    return peaks or [MatmulPeak(max(sizes), (), reason)]


def best(peaks: Iterable[MatmulPeak]) -> float:
    """Return the highest rate of several measurements, FLOP/s, NaN without any: a busy neighbour lowers a peak and nothing raises it."""
    return max((peak.best for peak in peaks if peak.best), default=math.nan)


def peak_together(by_rank: Sequence[Sequence[MatmulPeak]]) -> tuple[float, int]:
    """Return the peak of all ranks at once in FLOP/s, and its size n: the highest sum of the ranks' best samples of a size.

    Only sizes that every rank measured can be summed: a slow rank may have left one out.
    """
    rates = [{peak.size: peak.best for peak in peaks if peak.best} for peaks in by_rank]
    sizes = set.intersection(*(set(of_rank) for of_rank in rates))
    return max((sum(of_rank[size] for of_rank in rates), size) for size in sizes)


def all_ranks_peak(here: World, precision: str, seconds: float) -> tuple[float | None, str]:
    """Measure all ranks at the same time, with the threads of their work; return their sum in FLOP/s and what it is of.

    Where a device has no such products it is None and the reason. All ranks call it.
    """
    group.barrier()
    own = matmul_peaks(here.device, precision, sizes=default_sizes(here.device), seconds=seconds)
    by_rank = group.all_gather_objects(own)
    lacking = next((peak.reason for peaks_of_rank in by_rank for peak in peaks_of_rank if peak.reason), "")
    if lacking:
        return None, lacking
    peak, size = peak_together(by_rank)
    each = f", {counted(torch.get_num_threads(), 'thread')} each" if here.device.type == "cpu" else ""
    together = f"{counted(here.size, 'rank')}{' at once' * (here.size > 1)}"
    return peak, f"n = {size}, {precision} products, {together}{each}, the best of this run"


def timed_groups(
    device: torch.device, operation: Callable[[], object], seconds: float, slowdown: float = 0.0
) -> list[float]:
    """Return the seconds of one ``operation``, one sample a group, for ``seconds`` and at least three samples.

    The first two calls (libraries load, memory is mapped) are not in the samples.
    """
    operation()
    devices.synchronize(device)
    once = _timed(device, operation, 1)
    repeats = max(1, math.ceil(GROUP_S / max(once, 1e-9)))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        samples.append(_timed(device, operation, repeats, slowdown))
    return samples


def copy_rates(kind: str, device: torch.device, size_bytes: int, seconds: float, slowdown: float = 0.0) -> list[float]:
    """Return samples of a copy's bandwidth in GB/s (1e9 bytes per second).

    ``kind`` is ``host`` or ``device`` (a copy within the memory: bytes read and bytes written both count), or
    ``host_to_device`` or ``device_to_host`` (pinned memory where there is such: the bytes count once). A copy that is
    not equal to its source raises ``RunBroken``.
    """
    source_place, _, target_place = kind.partition("_to_")
    across = bool(target_place)
    pattern = torch.arange(size_bytes // 4, dtype=torch.int32)
    source, target = (
        _placed(tensor, place, device, across)
        for tensor, place in ((pattern, source_place), (torch.zeros_like(pattern), target_place or source_place))
    )
    times = timed_groups(device, lambda: target.copy_(source, non_blocking=True), seconds, slowdown)
    if not torch.equal(target.cpu(), pattern):
        raise RunBroken(f"a {kind.replace('_', ' ')} copy of {size_bytes} bytes on {device} is not equal to its source")
    moved = 4 * len(pattern) * (1 if across else 2)
    return [1e-9 * moved / value for value in times]


def _placed(tensor: torch.Tensor, place: str, device: torch.device, across: bool) -> torch.Tensor:
    if place == "device":
        return tensor.to(device)
    # Pageable memory goes through a staging buffer and shows the host's speed, not the link's.
    return tensor.pin_memory() if across and device.type in ("cuda", "xpu") else tensor


def _timed(device: torch.device, operation: Callable[[], object], repeats: int, slowdown: float = 0.0) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        operation()
    devices.synchronize(device)
    hold(slowdown * (time.perf_counter() - began))
    return (time.perf_counter() - began) / repeats


def _matmul_rates(device: torch.device, dtype: torch.dtype, size: int, seconds: float, slowdown: float) -> list[float]:
    generator = torch.Generator().manual_seed(size)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=dtype)
    times = timed_groups(device, lambda: torch.mm(left, right, out=product), seconds, slowdown)
    # Some entries against fp64. The entries' own size is about sqrt(n); a product that lost or mixed terms is far off,
    # the rounding of any of the precisions is far within.
    rows = torch.randint(size, (32,), generator=generator)
    columns = torch.randint(size, (32,), generator=generator)
    exact = (left.cpu()[rows].double() * right.cpu()[:, columns].T.double()).sum(1)
    error = (product.cpu()[rows, columns].double() - exact).abs().max().item()
    if not error <= 0.05 * math.sqrt(size):
        raise RunBroken(
            f"a {size} x {size} {dtype} product on {device} is wrong by {error:.3g}: the device or its library is at fault"
        )
    return [2 * size**3 / value for value in times]
