"""A whole calibration with real runs: what is planted is measured, what is kept is used, and a cut one goes on."""

import shutil

import pytest

from benchlib import baselines
from benchlib.calibrate import _schedule, calibrate
from benchlib.calibration import load_calibration
from benchlib.errors import UserError
from benchlib.judge import judge
from benchlib.machine import fingerprint_key

SMALL = (
    "precisions=[fp32]", "matmul_sizes=[256]", "allreduce_mib=[0.001]", "copy_mib=1", "seconds=0.1", "nproc=2",
)  # fmt: skip


@pytest.mark.timeout(300)
def test_a_calibration_measures_the_plant_and_the_gate_uses_it(tmp_path, monkeypatch, capsys):
    root = tmp_path / "baselines"
    monkeypatch.setattr(baselines, "folder", lambda: root)

    def make(**more):
        return calibrate("machine", "smoke", "cpu", SMALL, 3, "1.0", 1, tmp_path / "out", **{"resume": None} | more)

    first = make()
    by_name = {item.metric: item for item in first.metrics}
    (plant,) = by_name["matmul_fp32_alone_flops"].planted
    assert plant.expected == 0.5
    assert 0.2 < plant.measured < 0.8  # half, on a machine that may be busy
    assert (first.runs, first.planted_runs) == (3, 1)

    (store,) = (tmp_path / "out" / "calibrations").iterdir()
    runs = sorted(path.parent for path in store.glob("*-*/*/config.json"))
    assert len(runs) == 4
    verdict = judge(runs[0], root)
    assert verdict.gate["sentence"] == first.sentence()
    assert load_calibration(root, "machine", "smoke", fingerprint_key(first.fingerprint)) == first

    shutil.rmtree(runs[0])  # as if the calibration had been cut there
    again = make(resume=store)
    assert (again.runs, again.planted_runs) == (3, 1)
    assert len(list(store.glob("*-*/*/config.json"))) == 4
    assert set(runs[1:]) < {path.parent for path in store.glob("*-*/*/config.json")}
    with pytest.raises(UserError, match="another config"):
        calibrate("machine", "smoke", "cpu", ["copy_mib=2", *SMALL[:3], *SMALL[4:]], 3, "", 1, None, store)
    capsys.readouterr()


def test_the_runs_take_turns():
    assert _schedule(4, {0.5: 2}, {0.0: [], 0.5: []}) == [0.0, 0.5, 0.0, 0.0, 0.5, 0.0]
    assert _schedule(2, {0.5: 1}, {0.0: ["whole"], 0.5: []}) == [0.0, 0.5]


@pytest.mark.parametrize(
    ("planted", "said"), [("x", "expected shares"), ("-1", "above 0"), ("0", "above 0"), ("11", "at most 10")]
)
def test_wrong_shares_are_refused_before_anything_runs(planted, said, tmp_path):
    with pytest.raises(UserError, match=said):
        calibrate("machine", "smoke", "cpu", SMALL, 3, planted, 1, tmp_path, None)
    with pytest.raises(UserError, match="one benchmark"):
        calibrate("quick", "quick", "cpu", (), 3, "", 1, tmp_path, None)
    assert list(tmp_path.iterdir()) == []
