import pytest
import torch
import torch.distributed as dist
from worlds import in_ranks

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.machine import run
from benchlib.config.schema import build, save_config
from benchlib.results.run import Run
from benchlib.runtime.measurement import executed
from benchlib.workloads.collective_timing import MIN_ROUNDS, WARMUP, Pace, time_all_reduce

SMALL = {
    "precisions": ["fp32", "tf32"],
    "matmul_sizes": [64, 256],
    "seconds": 0.05,
    "copy_mib": 1,
    "allreduce_mib": [0.001, 0.5],
}


def _measure(config, run_dir, events):
    executed(BENCHMARKS["machine"])(config, run_dir, events)


def _run(folder, **values):
    save_config(build("machine", SMALL | values), folder)
    in_ranks(values["nproc"], folder, _measure)
    return Run(folder)


def test_two_ranks_measure_a_machine(tmp_path):
    machine = _run(tmp_path, nproc=2)
    result = machine.result
    assert result.status == "complete"
    assert result.world_size == 2
    assert [row["wrong_elements"] for row in result.tables["allreduce"]] == [0, 0]
    values = {metric.name: metric.value for metric in result.metrics}
    # Both ranks at once do not exceed twice the best single one: it would count something twice.
    assert values["matmul_fp32_flops"] <= 2 * values["matmul_fp32_best_flops"]
    assert values["matmul_fp32_flops"] <= values["matmul_fp32_peak_flops"] <= 2 * values["matmul_fp32_best_flops"]
    assert values["matmul_fp32_alone_flops"] <= values["matmul_fp32_best_flops"]
    assert values["allreduce_gbps"] == pytest.approx(values["allreduce_algbw_gbps"])  # 2 (n - 1) / n = 1 for two ranks
    # A copy of 1 MiB is one of a cache, and says so in place of the memory's bandwidth.
    copy = result.tables["copies"][0]
    assert values["copy_host_gbytes_per_s"] is None and "a copy of 1 MiB shows caches of" in copy["why"]["gbytes_per_s"]
    assert copy["any_gbytes_per_s"] > 0
    assert 0 < values["startup_s"] < values["total_s"]
    lacking = {metric.name: metric for metric in result.metrics if metric.value is None}
    assert {"matmul_tf32_flops", "copy_host_to_device_gbytes_per_s"} <= lacking.keys()
    assert all(metric.provenance == "not_available" and metric.reason for metric in lacking.values())
    assert [(row["precision"], row["rank"]) for row in result.tables["matmul"]] == [("fp32", 0), ("fp32", 1)]
    assert [row["bytes"] for row in result.tables["allreduce"]] == [1024, 524288]
    assert len(machine.samples["allreduce_gbps"]) >= MIN_ROUNDS
    assert not (tmp_path / "disk.tmp").exists()


def test_rates_of_ranks_are_added_round_by_round():
    assert run._rounds([[1.0, 2.0, 3.0], [10.0, 20.0]]) == [11.0, 22.0]


@pytest.mark.usefixtures("group")
def test_wrong_sums_are_counted(monkeypatch):
    sizes, device, brief = (400, 1000), torch.device("cpu"), Pace(0.0)
    right = time_all_reduce(sizes, device, brief)
    assert (right.bytes, right.wrong) == (sum(sizes), 0)
    assert len(right.seconds) == MIN_ROUNDS
    assert right.checked == (100 + 250) * (WARMUP + MIN_ROUNDS)
    assert time_all_reduce(sizes, device, brief, fault=True).wrong == 2 * (WARMUP + MIN_ROUNDS)
    real = dist.all_reduce

    def swaps_two_elements(tensor, *arguments, **options):
        real(tensor, *arguments, **options)
        if tensor.numel() == 100:
            tensor[[3, 4]] = tensor[[4, 3]]

    monkeypatch.setattr(dist, "all_reduce", swaps_two_elements)
    assert time_all_reduce(sizes, device, brief).wrong == 2 * (WARMUP + MIN_ROUNDS)
