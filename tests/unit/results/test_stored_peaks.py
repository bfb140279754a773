"""The highest peak of a machine is looked for among all its stored runs, and names the run and the day."""

import pytest

from benchlib.config.schema import build, save_config
from benchlib.core.files import write_json
from benchlib.results.metrics import measured
from benchlib.results.peaks import highest
from benchlib.results.run import Result, save_result

FP32 = "matmul_fp32_peak_flops"


@pytest.fixture
def store(tmp_path):
    """Return what stores a run of a benchmark with one peak in a folder of days."""

    def add(folder, value=None, benchmark="machine", host="here", verdict="PASS", name=FP32, **more):
        config, path = build(benchmark, {"nproc": 2} | more), tmp_path / folder
        save_config(config, path)
        cpu = {"model": "a processor", "usable_cores": 2}
        write_json(path / "machine.json", {"host": host, "cpu": cpu, "versions": {}})
        if value:
            metrics = [measured(name, value, "FLOP/s", "higher", reason=f"n = {int(value / 1e9)}")]
            save_result(path, Result.of(config, status="complete", started_at=1.76e9, metrics=metrics))
            write_json(path / "verdict.json", {"verdict": verdict, "sentence": "", "checks": []})
        return path

    return add


def test_the_best_of_all_days_counts_with_its_size_run_and_day(store):
    own = store("quick-20260103/squad-cpu-120000-aaaaaa", benchmark="squad")
    assert highest(own, "fp32", 2) == (None, "")
    store("quick-20260103/machine-cpu-110000-aaaaab", 2.0e11)
    store("smoke-20260101/machine-cpu-110000-aaaaac", 2.6e11)
    others = {
        "host": "elsewhere",
        "verdict": "FAIL",
        "nproc": 1,
        "planted_slowdown": 0.1,
        "name": "matmul_bf16_peak_flops",
    }
    for number, (name, value) in enumerate(others.items()):
        store(f"smoke-20260102/machine-cpu-12000{number}-aaaaad", 9e11, **{name: value})
    (own.parent / "damaged-cpu-110000-aaaaae").mkdir()
    (own.parent / "damaged-cpu-110000-aaaaae" / "result.json").write_text("{")
    value, reason = highest(own, "fp32", 2)
    assert value == 2.6e11
    assert reason.startswith("n = 260, measured by machine-cpu-110000-aaaaac on 2025-10-")
