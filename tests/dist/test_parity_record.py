"""Record here, verify there: the folder that goes from one machine to another, and what is refused before any work."""

import json

import pytest
from click.testing import CliRunner

from benchlib.benchmarks.parity import command, golden
from benchlib.cli import main
from benchlib.commands import run as runner
from benchlib.config.schema import build
from benchlib.core.errors import UserError
from benchlib.launch import plan


def call(*arguments):
    return CliRunner().invoke(main, ["parity", *map(str, arguments)])


def made(folder, **changes):
    """Write a golden folder that nobody computed; its seal is real."""
    config = build("parity", {"benchmark": "parity", "lengths": [8, 32], **changes})
    (folder / "reference").mkdir(parents=True)
    (folder / golden.WEIGHTS).write_bytes(bytes(1000))
    (folder / "reference" / "recording.json").write_text("{}")
    about = {"model": {"name": "tiny", "sha256": "ab" * 32}, "inputs_sha256": "cd", "cases": []}
    golden.write(folder, about | {"environment": {"torch": "2.0"}, "work": golden.work(config)})
    return folder


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fail where a command asks for devices or makes a run although its input is wrong."""
    monkeypatch.setattr(plan, "probe_devices", lambda: pytest.fail("asked torch although the input is wrong"))
    monkeypatch.setattr(runner, "run_one", lambda *_: pytest.fail("a run was started although the input is wrong"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--backend", "cpu"], "weights.safetensors was altered"),
        (["--set", "lengths=8,64"], "lengths = [8, 64] contradicts"),
        (["--set", "model=bert-base"], "model = 'bert-base' contradicts"),
        (["--set", "golden=elsewhere"], "sets golden itself"),
        (["--backend", "cudda"], "did you mean cuda"),
        ([], "is a slim recording"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_a_damaged_recording_and_what_contradicts_one_are_refused(tmp_path, arguments, says):
    folder = made(tmp_path / "golden")
    if "altered" in says:
        (folder / golden.WEIGHTS).write_bytes(bytes(999))
    if "slim" in says:
        command._publish(folder, tmp_path / "slim", slim=True)
        folder = tmp_path / "slim"
    done = call("verify", folder, *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2 and says in done.output, done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_starts")
def test_a_taken_target_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    done = call("record", tmp_path / "taken", "--out", tmp_path / "out")
    assert done.exit_code == 2 and "never overwritten" in done.output, done.output
    done = call("record", tmp_path / "new", "--set", "members=eager")
    assert done.exit_code == 2 and "members" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


def test_a_recording_fixes_the_work_and_nothing_of_its_machine(tmp_path):
    (tmp_path / "my-model").mkdir()
    values = {"model": str(tmp_path / "my-model"), "tier": "nightly", "seed": 4, "latency_runs": 7}
    manifest = {"work": golden.work(build("parity", {"benchmark": "parity", **values})), "benchlib": "0.1.0"}
    assert str(tmp_path) not in json.dumps(manifest)
    parameters = golden.parameters(manifest)
    assert (parameters["model"], parameters["seed"], manifest["work"]["tier"]) == ("my-model", 4, "nightly")
    assert "latency_runs" not in parameters and "dev_file" not in parameters
    less = {name: value for name, value in manifest["work"].items() if name != "lengths"}
    for work, name in ((manifest["work"] | {"colour": "red"}, "colour"), (less, "lengths")):
        with pytest.raises(UserError, match=name):
            golden.parameters({"work": work, "benchlib": "0.1.0"})
