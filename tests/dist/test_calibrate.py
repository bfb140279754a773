"""A whole calibration with real measurements: an injected slow-down is measured, what is stored is used, and a cut one goes on."""

import shutil

import pytest
from harness import in_this_process

from benchlib.commands import calibrate as command
from benchlib.commands.calibrate import Request, _schedule, calibrate, request, shares
from benchlib.core.errors import UserError
from benchlib.core.files import write_json
from benchlib.judge import baselines
from benchlib.judge.calibration import load_calibration
from benchlib.judge.verdict import judge
from benchlib.results.run import fingerprint_key

SMALL = {
    "precisions": "fp32", "matmul_sizes": "256", "allreduce_mib": "0.001", "copy_mib": "1", "seconds": "0.1", "nproc": "1", "threads": "1",
}  # fmt: skip


def test_a_calibration_measures_the_plant_and_the_gate_uses_it(tmp_path, monkeypatch, capsys):
    root = tmp_path / "baselines"
    monkeypatch.setattr(baselines, "folder", lambda: root)
    real, ranks = command.execute, []

    def execute(run_dir):  # once as users have it
        ranks.append(run_dir)
        return real(run_dir) if len(ranks) == 1 else in_this_process(run_dir)

    monkeypatch.setattr(command, "execute", execute)

    asked = Request(
        target="machine", tier="smoke", backend="cpu", overrides=SMALL, runs=3, planted=[1.0], planted_runs=1
    )

    def make(resume=None):
        return calibrate(asked if resume is None else request({}, resume), tmp_path / "out", resume)

    first = make()
    by_name = {item.metric: item for item in first.metrics}
    (plant,) = by_name["matmul_fp32_alone_flops"].planted
    assert plant.expected == 0.5
    assert plant.measured > 0  # how much one run lost is up to the machine's other work
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
    capsys.readouterr()


def test_the_runs_take_turns():
    assert _schedule(4, {0.5: 2}, {0.0: [], 0.5: []}) == [0.0, 0.5, 0.0, 0.0, 0.5, 0.0]
    assert _schedule(2, {0.5: 1}, {0.0: ["whole"], 0.5: []}) == [0.0, 0.5]


def test_wrong_shares_are_refused():
    for planted, message in (("x", "expected shares"), ("0", "above 0"), ("11", "at most 10")):
        with pytest.raises(UserError, match=message):
            shares(planted)


def test_a_resumed_calibration_does_what_was_asked(tmp_path):
    with pytest.raises(UserError, match="no calibration was started there"):
        request({}, tmp_path)
    stored = Request(target="machine", tier="smoke", overrides={"seconds": "0.1"})
    write_json(tmp_path / "request.json", stored.model_dump(mode="json"))
    assert request({"target": None, "runs": None, "overrides": {}}, tmp_path) == stored
    with pytest.raises(UserError, match="leave out target, runs"):
        request({"target": "squad", "runs": 20}, tmp_path)
    with pytest.raises(UserError, match="needs a benchmark"):
        request({"target": None}, None)
    with pytest.raises(UserError, match="one benchmark"):
        calibrate(Request(target="quick"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
