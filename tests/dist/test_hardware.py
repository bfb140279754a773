import pytest
import torch
import torch.distributed as dist
from worlds import in_ranks

from benchlib.benchmarks.machine.judge import limits, reading
from benchlib.benchmarks.machine.run import run
from benchlib.config.schema import build, save_config
from benchlib.core.events import read_events
from benchlib.results.run import Run
from benchlib.workloads.collective_timing import LEAST_ROUNDS, WARMUP, AllReduce, Pace, time_all_reduce

SMALL = {
    "precisions": ["fp32", "tf32"],
    "matmul_sizes": [64, 128],
    "seconds": 0.05,
    "copy_mib": 1,
    "allreduce_mib": [0.001, 0.5],
}


def _run(folder, **values):
    save_config(build("machine", SMALL | values), folder)
    in_ranks(values["nproc"], folder, run)
    return Run(folder)


def test_two_ranks_measure_a_machine(tmp_path):
    machine = _run(tmp_path, nproc=2)
    result = machine.result
    assert result.status == "complete"
    assert result.world_size == 2
    assert result.facts["allreduce_wrong_elements"] == 0
    values = {metric.name: metric.value for metric in result.metrics}
    # Both ranks at once do not exceed twice the best single one: it would count something twice.
    assert values["matmul_fp32_flops"] <= 2 * values["matmul_fp32_best_flops"]
    assert values["matmul_fp32_flops"] <= values["matmul_fp32_peak_flops"] <= 2 * values["matmul_fp32_best_flops"]
    said = " ".join(reading(machine))
    assert f"fp32 peak at {result.metric('matmul_fp32_peak_flops').text} in this run (n = " in said and "honestly" not in said
    assert values["matmul_fp32_alone_flops"] <= values["matmul_fp32_best_flops"]
    assert values["allreduce_gbps"] == pytest.approx(values["allreduce_algbw_gbps"])  # 2 (n - 1) / n = 1 for two ranks
    assert values["copy_host_gbytes_per_s"] > 0
    assert 0 < values["startup_s"] < values["total_s"]
    lacking = {metric.name: metric for metric in result.metrics if metric.value is None}
    assert set(lacking) == {
        *("matmul_tf32_flops", "matmul_tf32_alone_flops", "matmul_tf32_best_flops", "matmul_tf32_peak_flops"),
        *("copy_device_gbytes_per_s", "copy_host_to_device_gbytes_per_s", "copy_device_to_host_gbytes_per_s"),
    }
    assert all(metric.provenance == "not_available" and metric.reason for metric in lacking.values())
    assert {(row["n"], row["rank"]) for row in result.tables["matmul"]} == {
        (n, rank) for n in (64, 128) for rank in (0, 1)
    }
    assert [row["bytes"] for row in result.tables["allreduce"]] == [1024, 524288]
    assert len(machine.samples["allreduce_gbps"]) >= LEAST_ROUNDS
    progress = [event for event in read_events(tmp_path, {"progress"}) if event["source"] == "rank0"]
    assert [event["done"] for event in progress] == list(range(1, progress[-1]["total"] + 1))
    assert not (tmp_path / "disk.tmp").exists()
    assert {limit.metric for limit in limits(machine)} >= {"matmul_fp32_flops", "copy_host_gbytes_per_s", "allreduce_gbps"}


def test_one_rank_has_no_exchange_to_measure(tmp_path):
    result = _run(tmp_path, nproc=1, precisions=["fp32"], matmul_sizes=[64]).result
    metric = result.metric("allreduce_gbps")
    assert metric.provenance == "not_available"
    assert "one rank" in metric.reason
    assert result.facts["allreduce_wrong_elements"] == 0


@pytest.mark.usefixtures("group")
def test_wrong_sums_are_counted(monkeypatch):
    sizes, device, brief = (400, 1000), torch.device("cpu"), Pace(0.0)
    right = time_all_reduce(sizes, device, brief)
    assert (right.sizes, right.wrong) == (sizes, 0)
    assert len(right.seconds) == LEAST_ROUNDS
    assert right.checked == (100 + 250) * (WARMUP + LEAST_ROUNDS)
    assert time_all_reduce(sizes, device, brief, fault=True).wrong == 2 * (WARMUP + LEAST_ROUNDS)
    real = dist.all_reduce

    def swaps_two_elements(tensor, *arguments, **options):
        real(tensor, *arguments, **options)
        if tensor.numel() == 100:
            tensor[[3, 4]] = tensor[[4, 3]]

    monkeypatch.setattr(dist, "all_reduce", swaps_two_elements)
    assert time_all_reduce(sizes, device, brief).wrong == 2 * (WARMUP + LEAST_ROUNDS)


def test_bandwidths_of_a_timing_by_hand():
    timing = AllReduce(sizes=(4 * 10**8, 6 * 10**8), ranks=4, seconds=(0.5, 1.0), wrong=0, checked=0)
    assert timing.algbw_gbps == pytest.approx([16, 8])
    assert timing.busbw_gbps == pytest.approx([24, 12])
