"""A whole calibration with real measurements: an injected slow-down is measured, and what is stored is used."""

from harness import in_this_process

from benchlib.commands import calibrate as command
from benchlib.commands.calibrate import _schedule, calibrate
from benchlib.judge import baselines
from benchlib.judge.calibration import load_calibration
from benchlib.judge.verdict import judge

SMALL = {
    "precisions": "fp32", "matmul_sizes": "256", "allreduce_mib": "0.001", "copy_mib": "1", "seconds": "0.1", "nproc": "1", "threads": "1",
}  # fmt: skip


def test_a_calibration_measures_the_injected_slow_down_and_the_gate_uses_it(tmp_path, monkeypatch):
    root = tmp_path / "baselines"
    monkeypatch.setattr(baselines, "folder", lambda: root)
    monkeypatch.setattr(command, "execute", in_this_process)
    first = calibrate("machine", "smoke", "cpu", SMALL, {0.0: 3, 1.0: 1}, tmp_path / "out")
    ratio, judged = first.calibrated["matmul_fp32_alone_flops"].slowed[1.0]
    assert ratio > 0 and judged.total() == 1  # how much one run lost is up to the machine's other work
    assert [bool(run.injected) for run in first.runs] == [False] * 3 + [True]

    (store,) = (tmp_path / "out" / "calibrations").iterdir()
    runs = sorted(path.parent for path in store.glob("*-*/*/config.json"))
    assert len(runs) == 4
    verdict = judge(runs[0], root)
    assert verdict.gate["sentence"] == first.sentence()
    assert load_calibration(root, "machine", "smoke", first.runs[0].fingerprint).rows() == first.rows()


def test_the_runs_are_interleaved():
    assert _schedule({0.0: 4, 0.5: 2}) == [0.0, 0.5, 0.0, 0.0, 0.5, 0.0]
