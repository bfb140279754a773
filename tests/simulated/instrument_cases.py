"""Each instrument of the kit on a device whose truth is known: functions return {name: [what was measured, what is true]}.

Truths follow from the rates of ``Truth`` and from counts made by hand, never from code of the kit.
"""

import os
import queue
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from simcuda.device import Device

from benchlib.benchmarks.seq2seq import run as seq2seq
from benchlib.benchmarks.squad import train as squad
from benchlib.benchmarks.squad.balance import Balance
from benchlib.core.events import EventWriter
from benchlib.core.sensors import Sensors
from benchlib.runtime import devices, group, peaks
from benchlib.runtime.queued import QueuedGroup
from benchlib.runtime.timing import StepTimer
from benchlib.workloads import collective_timing, largest, training
from benchlib.workloads.collective_timing import Pace, time_all_reduce
from benchlib.workloads.collectives import exchange
from benchlib.workloads.executors.eager import Executor
from benchlib.workloads.llm.decoders import RANDOM, Static
from benchlib.workloads.llm.engines import Query, Settings

Pairs = dict[str, list[Any]]
CUDA = torch.device("cuda", 0)
MIB = 1 << 20


def products(here: Device, folder: Path) -> Pairs:
    """Peaks of matrix products by precision, whose first one loads a library."""
    pairs: Pairs = {}
    for precision, kind in {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16"}.items():
        (peak,) = peaks.matmul_peaks(CUDA, precision, sizes=[64], seconds=0.02)
        pairs[precision] = [peak.median, here.truth.flops[kind]]
    return pairs


def copies(here: Device, folder: Path) -> Pairs:
    """Bandwidth of copies within the memory and to and from the host, GB/s."""
    rates = {
        "device": here.truth.memory_rate,
        "host_to_device": here.truth.host_rate,
        "device_to_host": here.truth.host_rate,
    }
    return {
        kind: [statistics.median(peaks.copy_rates(kind, CUDA, 1 * MIB, 0.03)), rate / 1e9]
        for kind, rate in rates.items()
    }


def throttled(here: Device, folder: Path) -> Pairs:
    """Peaks before and after the device halves its clock."""
    rates = []
    for start_s in (0.0, here.truth.throttled_at_s):
        time.sleep(max(0.0, start_s - time.perf_counter()))
        (peak,) = peaks.matmul_peaks(CUDA, "fp32", sizes=[128], seconds=0.03)
        rates.append(peak.median)
    return {"before": [rates[0], here.truth.flops["float32"]], "after": [rates[1], here.truth.flops["float32"] / 2]}


def product(size: int = 256) -> torch.Tensor:
    """Queue a product that takes 2 n³ operations."""
    left = torch.ones(size, size, device=CUDA)
    return left @ left


def phases(here: Device, folder: Path, events: bool = True) -> Pairs:
    """The phases of a step: one, two, three and one products of 256³, after a pause that the host makes."""
    if not events:
        devices._EVENT_TYPES = ()  # type: ignore[assignment]
    one_s, rows = 2 * 256**3 / here.truth.flops["float32"], []
    product()
    timer = StepTimer(CUDA)
    timer.begin()
    for _ in range(2):
        for phase, count in {"data": 1, "forward": 2, "backward": 3, "optimizer": 1}.items():
            for _ in range(count):
                product()
            timer.mark(phase)
        timer.end_step()
    rows = timer.take()
    row = rows[-1]
    times = {"data_s": 1, "forward_s": 2, "backward_s": 3, "optimizer_s": 1, "step_s": 7}
    return {name: [row[name], count * one_s] for name, count in times.items()}


def memory(here: Device, folder: Path) -> Pairs:
    """The peak of what tensors hold, after a larger peak before the reset."""
    large = torch.empty(8 * MIB, dtype=torch.uint8, device=CUDA)
    del large
    devices.reset_peak_memory(CUDA)
    small = [torch.empty(MIB, dtype=torch.uint8, device=CUDA) for _ in range(3)]
    del small[1:]
    return {"peak": [devices.peak_memory_bytes(CUDA)[0], 3 * MIB], "held": [torch.cuda.memory_allocated(CUDA), MIB]}


def energy(here: Device, folder: Path) -> Pairs:
    """Energy over one second at rest and some work, by NVML."""
    sensors = Sensors([], backend="cuda", devices=1)
    began, first = time.monotonic(), sensors.read()
    time.sleep(1.0)
    for _ in range(20):
        product()
    devices.synchronize(CUDA)
    last, seconds = sensors.read(), time.monotonic() - began
    busy_s = 20 * (2 * 256**3 / here.truth.flops["float32"] + 4 * 256**2 / here.truth.memory_rate)
    joules = here.truth.idle_w * seconds + (here.truth.busy_w - here.truth.idle_w) * busy_s
    return {"energy_j": [last["energy_j"] - first["energy_j"], joules], "power_w": [last["power_w"], here.truth.idle_w]}


def executor(here: Device, folder: Path) -> Pairs:
    """The time of a forward pass as parity measures it."""

    class Products(Executor):
        def place(self, inputs: Any) -> Any:
            return inputs

        def run(self, placed: Any) -> Any:
            return [product()]

    once = Products(CUDA, {}).timed({})
    began = time.perf_counter()
    once()
    return {"seconds": [time.perf_counter() - began, 2 * 256**3 / here.truth.flops["float32"]]}


def batch(here: Device, folder: Path) -> Pairs:
    """Samples per second of a trial of a batch, whose preparation leaves work in the queue."""

    def prepare() -> Any:
        for _ in range(3):
            product()
        return product

    row = largest.tried(CUDA, 8, here.truth.memory_bytes, prepare)
    return {"samples_per_s": [row["samples_per_s"], 8 * here.truth.flops["float32"] / (2 * 256**3)]}


def trials(here: Device, folder: Path) -> Pairs:
    """Seconds of a step before the training, of an engine's step, and of a calibration: each of one product."""
    one_s = 2 * 256**3 / here.truth.flops["float32"]
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=CUDA)
    world = group.World(device=CUDA, collective="nccl")
    events = EventWriter(folder, "rank0")
    config = SimpleNamespace(startup_timeout_s=100.0)
    task: Any = SimpleNamespace(rank=SimpleNamespace(world=world, events=events), config=config)
    warm: list[int] = []

    def trial(number: int) -> None:
        for _ in range(1 if warm else 5):  # what comes first takes longer
            product()
        warm.append(number)

    step_s = squad.measured_step_s(task, trial)
    engine: Any = SimpleNamespace(
        device=CUDA, task=task, differentiate=lambda *_: product().sum(), update=lambda: None, forget=lambda: None
    )
    product()
    engine_s, _ = seq2seq._timed(engine, torch.empty(0), 1.0)
    product()
    balance_s = Balance._timed(SimpleNamespace(world=world), product)  # type: ignore[arg-type]
    return {name: [value, one_s] for name, value in {"step": step_s, "engine": engine_s, "balance": balance_s}.items()}


def all_reduce(here: Device, folder: Path) -> Pairs:
    """The times of all-reduces of two ranks: latency and, with 1 MiB, bandwidth."""
    rank = joined()
    where = torch.device("cuda", rank)
    pairs: Pairs = {}
    for size in (4096, MIB):
        series = time_all_reduce([size], where, Pace(0.001, least=3, most=3))
        pairs[f"{size} bytes"] = [
            statistics.median(series.seconds),
            here.truth.exchange_s + size / here.truth.exchange_rate,
        ]
        pairs[f"{size} bytes, wrong"] = [series.wrong, 0]
    return pairs


def joined() -> int:
    """Join the ranks of this case; return the own number."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", int(os.environ["SIMULATED_PORT"]), size, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    return rank


def overlap(here: Device, folder: Path) -> Pairs:
    """Exchanges beside a backward pass of two layers: the second one's gradient travels while the first one's is computed.

    With x seconds for the exchange of a layer and c for the first layer's part of the backward pass, 2x are exchanged, and
    2x - c of them after the last gradient was ready.
    """
    rank, width, rows = joined(), 256, 32
    where = torch.device("cuda", rank)
    layers = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(2))).to(where)
    timer = StepTimer(where)
    ddp = training.data_parallel(layers, timer, bucket_cap_mb=0.1)
    data = torch.ones(rows, width, device=where)
    timer.begin()
    for _ in range(3):
        loss = ddp(data).sum()
        timer.mark("forward")
        loss.backward()
        timer.mark("backward")
        timer.end_step()
    row = timer.take()[-1]
    exchange_s = here.truth.exchange_s + 4 * width**2 / here.truth.exchange_rate
    compute_s = 2 * rows * width**2 / here.truth.flops["float32"]
    return {
        "exchange_s": [row["exchange_s"], 2 * exchange_s],
        "exchange_exposed_s": [row["exchange_exposed_s"], 2 * exchange_s - compute_s],
        "backward_s": [row["backward_s"], 3 * compute_s],
        "forward_s": [row["forward_s"], 2 * compute_s],
    }


class Doubling(QueuedGroup):
    """A group whose collective doubles a tensor, on a stream of its own if it has one, and takes its time."""

    def double(self, tensor: torch.Tensor, stream: Any = None) -> Any:
        def run() -> None:
            if stream:
                product(128)
            else:
                time.sleep(0.2)
            tensor.mul_(2)

        return self._begin("double", None, run, [tensor], stream)


def queued(here: Device, folder: Path) -> Pairs:
    """A collective of a queued group: behind what it is given, before what uses it, its callbacks behind it."""
    pairs, stream = Doubling("test", 0, 1, timedelta(seconds=10)), torch.cuda.Stream()
    one_s = 2 * 128**3 / here.truth.flops["float32"]
    devices.synchronize(CUDA)
    timer = StepTimer(CUDA)
    began = timer.clock.stamp()
    product(128)
    tensor = torch.ones(4, device=CUDA)
    work = pairs.double(tensor, stream)
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    work.get_future().then(lambda _: ended.put(timer.clock.stamp()))
    product(128)  # beside it
    work.wait()
    joined_at = timer.clock.stamp()
    value = float((tensor + 1)[0])
    stamp = ended.get(timeout=10)
    timer.clock.settle()
    of_host = torch.ones(4)
    pairs.double(of_host).wait()
    times = {"done": stamp, "joined": joined_at}
    seconds = {name: [timer.clock.seconds(began, at), 2 * one_s] for name, at in times.items()}
    return {"value": [value, 3.0], "of host": [float(of_host[0]), 2.0], **seconds}


def operations(here: Device, folder: Path) -> Pairs:
    """Wrong elements of operations between two ranks: of the library, waited for later, by sends and receives."""
    rank = joined()
    where = torch.device("cuda", rank)
    place = collective_timing.Place(rank, 2, where)
    kinds = [("all_reduce", variant, "sum") for variant in ("library", "async", "ring", "tree", "rs_ag")]
    kinds += [("all_gather", "direct", ""), ("reduce_scatter", "direct", "sum"), ("send_recv", "library", "")]
    kinds += [("broadcast", "library", ""), ("all_gather", "library", ""), ("reduce_scatter", "library", "sum")]
    pairs: Pairs = {}
    for operation, variant, reduction in kinds:
        case = collective_timing.Case(operation, variant, "fp32", reduction, False, 4096)
        exercise = collective_timing.Exercise(case, place)
        exercise.restore()
        dist.barrier()
        exercise.run()
        float(exercise._get[:1])  # at once: a use that nothing else waits for
        pairs[f"{operation}, {variant}"] = [exercise.check()[0], 0]
    return pairs


def direct(here: Device, folder: Path) -> Pairs:
    """The time of a ring over two ranks: two hops of half of the data, which both ranks send at once."""
    rank, size = joined(), MIB
    data = torch.ones(size // 4, device=torch.device("cuda", rank))
    dist.barrier()
    devices.synchronize(data.device)
    timer = StepTimer(data.device)
    began = timer.clock.stamp()
    exchange.ring(data)
    ended = timer.clock.stamp()
    value = float(data[0])
    hop_s = here.truth.exchange_s + size / 2 / here.truth.exchange_rate
    return {"value": [value, 2.0], "seconds": [timer.clock.seconds(began, ended), 2 * hop_s]}


def training_memory(here: Device, folder: Path) -> Pairs:
    """The peak since a training began, after more was held before."""
    large = torch.empty(8 * MIB, dtype=torch.uint8, device=CUDA)
    del large
    world = SimpleNamespace(main=False, device=CUDA)
    rank: Any = SimpleNamespace(world=world, events=SimpleNamespace(emit=lambda *_, **__: None))
    training.begin(rank, training.Plan(1, 1, 1, 1))
    torch.empty(MIB, dtype=torch.uint8, device=CUDA)
    return {"peak": [devices.peak_memory_bytes(CUDA)[0], MIB]}


def answers(here: Device, folder: Path) -> Pairs:
    """Time to the first token and per further token of the static engine: as long as the device worked on them. The tokens
    are those of the same engine on the CPU."""
    tokens, ((began, busy), (first, busy_first), (ended, busy_ended)) = answered(here, "cuda:0")
    of_cpu, _ = answered(here, "cpu")
    return {
        "ttft_s": [first - began, busy_first - busy],
        "tpot_s": [(ended - first) / 8, (busy_ended - busy_first) / 8],
        "tokens": [tokens, of_cpu],
    }


def answered(here: Device, where: str) -> tuple[list[int], list[tuple[float, float]]]:
    """Return the tokens of a query, and the clock and the busy seconds at its begin, its first token and its end."""
    engine = Static(Settings(model=RANDOM, device=where, shrink=64, fixed_length=True, slots=1, positions=64))
    engine.start()
    tokens: list[int] = []
    moments: list[tuple[float, float]] = []
    errors: list[str] = []
    over = threading.Event()

    def moment(*_: Any) -> None:
        moments.append((time.monotonic(), here.queue.busy(0)))

    def done(rid: int, ids: Any, error: str) -> None:
        moment()
        tokens.extend(ids)
        errors.append(error)
        over.set()

    devices.synchronize(CUDA)
    moment()
    engine.submit(Query(1, list(range(4, 36)), 9, moment, done))
    over.wait(60)
    engine.stop()
    assert errors == [""], errors
    return tokens, moments
