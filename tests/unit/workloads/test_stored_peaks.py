"""The highest peak of a machine is looked for among all its stored runs, and names the run and the day."""

from make_run import START, _metric
from series import DAY, on_machine, place

from benchlib.workloads.stored_peaks import highest

FP32 = "matmul_fp32_peak_flops"


def peak(store, age, value, host="here", name=FP32, **changes):
    metrics = [_metric(name, value, "FLOP/s", "higher", 1, reason=f"n = {int(value / 1e9)}")] if value else []
    folder = place(store, START - age * DAY, benchmark="machine", metrics=metrics, **changes)
    on_machine(folder, host=host)
    return folder


def test_the_best_of_all_days_counts_with_its_size_run_and_day(tmp_path):
    own = peak(tmp_path, 0, None)
    assert highest(own, "fp32", 2) == (None, "")
    peak(tmp_path, 1, 2.0e11)
    best = peak(tmp_path, 9, 2.6e11, tier="smoke")
    failed = {"verdict": "FAIL", "sentence": "", "checks": []}
    others = [{"host": "elsewhere"}, {"verdict": failed}, {"ranks": 1}, {"config": {"planted_slowdown": 0.1}}]
    for age, changes in enumerate([*others, {"name": "matmul_bf16_peak_flops"}], 2):
        peak(tmp_path, age, 9e11, **changes)
    (peak(tmp_path, 8, 9e11) / "result.json").write_text("{")
    value, reason = highest(own, "fp32", 2)
    assert value == 2.6e11
    assert reason.startswith(f"n = 260, measured by {best.name} on 2026-09-")
