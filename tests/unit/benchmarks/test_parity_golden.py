"""Golden folders: whole, or refused with the file's name."""

import shutil
from pathlib import Path

import pytest

from benchlib.benchmarks.parity import golden
from benchlib.core.errors import UserError

FIELDS = {
    "model": {"name": "tiny", "sha256": "m" * 64},
    "inputs_sha256": "i" * 64,
    "cases": [{"id": "len8-batch1", "kind": "data", "batch": 1, "length": 8}],
    "work": {"lengths": [8], "learning_rate": 5e-5},
    "environment": {"torch": "2.13.0", "cpu": "Größe"},
}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "golden"
    for name in ("model", golden.REFERENCE):
        (folder / name).mkdir(parents=True)
    (folder / "model" / "config.json").write_text('{"model_type": "bert"}')
    (folder / golden.REFERENCE / "recording.json").write_text("{}")
    (folder / golden.WEIGHTS).write_bytes(bytes(range(256)) * 40)
    golden.write(folder, FIELDS)
    return folder


def test_a_golden_folder_is_read_where_it_was_copied_to(folder, tmp_path):
    manifest = golden.read(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert {name: manifest[name] for name in FIELDS} == FIELDS
    assert set(manifest["files"]) == {"weights.safetensors", "model/config.json", "reference/recording.json"}


def flipped(path):
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


DAMAGE = [
    ("weights.safetensors", flipped, r"weights\.safetensors was altered.*record it again"),
    ("model/config.json", Path.unlink, "config.json is missing"),
    ("reference/more.json", Path.touch, "more.json is extra"),
    (golden.NAME, lambda path: path.write_text(path.read_text()[:-40]), r"golden\.json: not valid JSON"),
    (golden.NAME, Path.unlink, "not a golden folder, or an incomplete recording"),
]


@pytest.mark.parametrize(("name", "damage", "says"), DAMAGE)
def test_what_is_cut_altered_missing_or_extra_is_refused(folder, name, damage, says):
    damage(folder / name)
    with pytest.raises(UserError, match=says):
        golden.read(folder)
