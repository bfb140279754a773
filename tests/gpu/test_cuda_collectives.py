"""The collectives on all GPUs of this machine, through the same launcher as everywhere."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchlib.benchmarks import BENCHMARKS
from benchlib.config.schema import build, save_config
from benchlib.judge.baselines import find
from benchlib.launch.launch import execute
from benchlib.results.run import Run
from benchlib.workloads.collectives import hierarchy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")]


def test_every_operation_is_right_on_the_gpus_of_this_machine(tmp_path):
    backend, ranks = "rocm" if torch.version.hip else "cuda", torch.cuda.device_count()
    values = {"backend": backend, "nproc": ranks, "sizes": "1,999,4KiB,16MiB", "budget_s": 300.0}
    (tmp_path / "logs").mkdir()
    save_config(build("collectives", values), tmp_path)
    assert execute(tmp_path)["outcome"] == "complete"
    run = Run(tmp_path)
    assert run.result.facts["collective"] == "nccl"
    assert run.result.facts["wrong_elements"] == 0
    measured = {(row["operation"], row["dtype"]) for row in run.result.tables["series"]}
    assert {("all_reduce", "bf16"), ("all_gather", "uint8"), ("barrier", "")} <= measured
    failed = [check.name for check in BENCHMARKS["collectives"].spec.judge(run, find(run)) if check.status == "FAIL"]
    assert failed == []


def one_of_a_pair(rank, folder, backends):
    """Add a tensor on this rank's device to the other rank's, in segments and several at once."""
    backend = backends[rank]
    device = torch.device("cpu" if backend == "cpu" else "cuda")
    hierarchy.load()
    options = {"rank": rank, "world_size": 2, "pg_options": hierarchy.member(backend)}
    dist.init_process_group(hierarchy.BACKEND, init_method=f"file://{folder}/store", **options)
    numbers = torch.arange(1_500_001, dtype=torch.float64)
    tensors = [(rank + 1) * numbers.to(device) for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert torch.equal((tensor + 0).cpu(), 3 * numbers)
    shared = torch.full((3,), float(rank), device=device)
    dist.broadcast(shared, 1)
    assert shared.tolist() == [1.0] * 3
    dist.barrier()
    dist.destroy_process_group()


def test_a_gpu_beside_a_processor_in_one_world(tmp_path):
    mp.spawn(one_of_a_pair, (tmp_path, ["rocm" if torch.version.hip else "cuda", "cpu"]), nprocs=2)
