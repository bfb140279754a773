"""What `parallel` reads of a device, from events and queues as a GPU gives them: there is none here."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchlib.benchmarks.parallel import measure, strategies, traces
from benchlib.benchmarks.parallel.config import ParallelConfig

GPU = torch.device("cuda", 0)


def event(name, start, end, of_gpu=True, annotation=False, shapes=(), kinds=()):
    """An event of torch's profiler, times in microseconds."""
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name, time_range=span, device_type=DeviceType.CUDA if of_gpu else DeviceType.CPU, is_user_annotation=annotation,
        input_shapes=list(shapes), input_dtypes=list(kinds), self_device_time_total=end - start, cpu_children=[],
    )  # fmt: skip


# A step on a GPU: two kernels, an exchange of which the second half is alone, an optimizer; around them what torch annotates, on
# the host and once more among the kernels.
STEP = [
    event("ampere_sgemm_128x64", 0, 100),
    event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 50, 150),
    event("void at::native::multi_tensor_apply_kernel", 150, 170),
    event("DistributedDataParallel.forward", 0, 160, annotation=True),
    event("nccl:all_reduce", 50, 150, annotation=True),
    event("Optimizer.step#AdamW.step", 150, 170, annotation=True),
    event("nccl:all_reduce", 5, 6, False, True, [[1000]], ["c10::BFloat16"]),
    event("nccl:_all_gather_base", 6, 7, False, True, [[10, 10]], ["float"]),
    event("Optimizer.step#AdamW.step", 8, 9, False, True),
]


def test_kernels_count_once_and_an_exchange_is_hidden_by_kernels_alone():
    seen = traces.read(SimpleNamespace(events=lambda: STEP), GPU, 1, traces.Counter(), 0)
    rows = {row["class"]: row for row in seen["kernels"]}
    times = {name: row["time_s"] for name, row in rows.items() if row["time_s"]}
    assert times == pytest.approx({"matmul": 100e-6, "communication": 100e-6, "optimizer": 20e-6})
    assert (rows["communication"]["calls"], rows["optimizer"]["calls"]) == (1, 1)
    assert seen["exposed_s"] == pytest.approx(50e-6)
    assert rows["communication"]["bytes"] == 2 * 1000 + 4 * 100


def test_the_wait_for_a_neighbour_is_idle_time_and_pending_sends_are_no_work(monkeypatch):
    """A clock that moves as a device would make the host wait: 3 s for the neighbour, 1 s of work, 5 s until sends are done."""
    clock, queue = [0.0], [3.0]

    def wait():
        clock[0] += sum(queue)
        queue.clear()

    def wait_for_all():
        wait()
        clock[0] += 5

    stream = SimpleNamespace(synchronize=wait)
    module = SimpleNamespace(current_stream=lambda where: stream, synchronize=wait_for_all)
    monkeypatch.setattr(torch, "get_device_module", lambda where: module)
    monkeypatch.setattr(strategies.time, "perf_counter", lambda: clock[0])
    work = {name: lambda number: queue.append(1.0) for name in strategies._CHUNKS}
    stage = SimpleNamespace(device=GPU, stage_index=0, **work)
    rows = strategies.record(SimpleNamespace(stages=[stage]))
    stage.forward_one_chunk(0)
    assert [(row["start_s"], row["end_s"]) for row in rows] == [(3.0, 4.0)]


def test_the_host_does_not_wait_for_its_batch_to_be_copied(monkeypatch):
    asked = []

    class Batch(torch.Tensor):
        def pin_memory(self):
            asked.append("pinned")
            return self

        def to(self, where, non_blocking=False):
            asked.append((where, non_blocking))
            return self

    runner, cpu = object.__new__(measure.Runner), torch.device("cpu")
    for where in (GPU, cpu):
        runner.way = SimpleNamespace(
            job=ParallelConfig().job(), device=where, share=lambda batch: batch.as_subclass(Batch)
        )
        runner.number = 0
        runner._batch()
    assert asked == ["pinned", (GPU, True)] * 2 + [(cpu, False)] * 2
