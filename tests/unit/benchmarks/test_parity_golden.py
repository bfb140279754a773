"""Golden folders and recordings: whole, or refused with the file's name."""

import json
import math
import shutil
from pathlib import Path

import make_recordings
import numpy as np
import pytest

from benchlib.benchmarks.parity import golden, recording
from benchlib.benchmarks.parity.recording import Recording
from benchlib.core.errors import UserError


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sealed") / "golden"
    make_recordings.write(folder / golden.REFERENCE)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "bert"}')
    (folder / golden.WEIGHTS).write_bytes(bytes(range(256)) * 40)
    seal(folder)
    return folder


def seal(folder):
    return golden.write(
        folder,
        model={"name": "tiny", "sha256": "m" * 64},
        inputs_sha256="i" * 64,
        cases=[{"id": "len8-batch1", "kind": "data", "batch": 1, "length": 8}],
        work={"lengths": [8], "learning_rate": 5e-5},
        environment={"torch": "2.13.0", "cpu": "Größe"},
    )


@pytest.fixture
def folder(sealed, tmp_path):
    return shutil.copytree(sealed, tmp_path / "golden")


def refused(folder, *words):
    with pytest.raises(UserError) as error:
        golden.read(folder)
    for word in (*words, "record it again"):
        assert word in str(error.value)


def test_a_golden_folder_is_read_where_it_was_copied_to(folder):
    found = golden.read(folder)
    assert found["model"]["name"] == "tiny" and found["environment"]["cpu"] == "Größe"
    assert set(found["files"]) == {
        "weights.safetensors", "model/config.json", "reference/recording.json", "reference/outputs.safetensors",
        "reference/gradients.safetensors", "reference/layers.safetensors",
    }  # fmt: skip


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path):
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


def longer(path):
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("weights.safetensors", cut, "was cut: 10,239 of 10,240 bytes"),
        ("reference/outputs.safetensors", flipped, "was altered"),
        ("reference/recording.json", longer, "was altered"),
        ("model/config.json", Path.unlink, "is missing"),
        ("reference/more.json", Path.touch, "is extra"),
    ],
)
def test_a_file_that_is_cut_altered_missing_or_extra_is_named(folder, name, damage, says):
    damage(folder / name)
    refused(folder, f"{name} {says}")


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    shutil.move(folder / golden.WEIGHTS, tmp_path / "elsewhere")
    (folder / golden.WEIGHTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"weights\.safetensors is neither a file nor a folder"):
        golden.read(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["model"].update(sha256="0" * 64),
        lambda found: found["work"].update(learning_rate=1e-4),
        lambda found: found["files"].pop("weights.safetensors"),
        lambda found: found["files"]["weights.safetensors"].update(sha256="0" * 64),
        lambda found: found.update(created_at=found["created_at"] + 1),
        lambda found: found.update(note="more"),
    ],
)
def test_an_altered_manifest_is_refused(folder, change):
    path = folder / golden.NAME
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    refused(folder, "golden.json was altered: its digest does not match")


def test_another_layout_of_the_same_manifest_is_the_same(folder):
    path = folder / golden.NAME
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    golden.read(folder)


def test_a_cut_manifest_is_refused(folder):
    path = folder / golden.NAME
    path.write_text(path.read_text()[:-40])
    with pytest.raises(UserError, match=r"golden\.json: not valid JSON"):
        golden.read(folder)


def test_no_golden_folder(folder, tmp_path):
    (folder / golden.NAME).unlink()
    refused(folder, "golden.json is missing", "an incomplete recording")
    with pytest.raises(UserError, match="not a golden folder; make one with `benchlib parity record"):
        golden.read(tmp_path / "none")


def test_a_manifest_of_a_later_version_says_so(folder):
    path = folder / golden.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
    with pytest.raises(UserError, match="later benchlib"):
        golden.read(folder)


def test_weights_may_be_left_out_when_it_is_sealed_again(folder):
    (folder / golden.WEIGHTS).unlink()
    seal(folder)
    assert golden.WEIGHTS not in golden.read(folder)["files"]


def test_a_number_that_is_none_seals_nothing(folder):
    before = (folder / golden.NAME).read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        golden.write(folder, model={}, inputs_sha256="", cases=[], work={"x": math.nan}, environment={})
    assert (folder / golden.NAME).read_bytes() == before


def test_a_recording_comes_back_to_the_bit(tmp_path):
    outputs = make_recordings.outputs() | {"dev/start": np.array([1e-300, -0.0, np.inf, np.nan])}
    facts = make_recordings.meta("sdpa_math", loss=np.float32(0.1))
    written = make_recordings.write(tmp_path / "members" / "sdpa_math", facts, outputs=outputs)
    found = Recording.open(written.folder)
    assert {name: array.tobytes() for name, array in found.outputs().items()} == {
        name: array.tobytes() for name, array in outputs.items()
    }
    assert found.outputs()["dev/start"].dtype == np.float64
    assert found.meta["loss"] == float(np.float32(0.1))
    assert next(iter(found.layers())) == "000|bert.embeddings" and len(found.gradients()) == 5
    assert found.meta["layers"][0]["kind"] == "BertEmbeddings"
    assert found.meta["layers"][1]["norm"] == pytest.approx(np.linalg.norm(found.layers()["001|bert.encoder.layer.0"]))
    assert found.meta["nonfinite"] == {"outputs dev/start": 2}
    assert [path.name for path in (tmp_path / "members").iterdir()] == ["sdpa_math"]
    plain = tmp_path / "plain"
    plain.write_text("")
    assert {path.stat().st_mode for path in written.folder.iterdir()} == {plain.stat().st_mode}


def test_numbers_that_are_none_become_null_and_are_counted(tmp_path):
    facts = make_recordings.meta(loss=math.nan, curve=[1.0, math.inf, math.nan], nonfinite={"step 3": 1})
    made = recording.write(tmp_path / "r", facts, {}, {"w": np.array([np.nan, 1.0], np.float32)})
    found = Recording.open(made.folder)
    assert found.meta["loss"] is None and found.meta["curve"] == [1.0, None, None]
    assert found.meta["nonfinite"] == {"step 3": 1, "loss": 1, "curve": 2, "gradients w": 1}
    assert dict(found.layers()) == {} and dict(found.outputs()) == {}


def test_a_recording_is_whole_or_absent(tmp_path):
    for broken in ({"x": np.ones(2, np.float16)}, {"x": np.ones(2, np.int64)}):
        with pytest.raises(ValueError, match="float32 and float64"):
            recording.write(tmp_path / "r", make_recordings.meta(), broken)
    with pytest.raises(TypeError):
        recording.write(tmp_path / "r", make_recordings.meta(device=object()), {})
    with pytest.raises(ValueError, match="model_sha256"):
        recording.write(tmp_path / "r", {"member": "x", "backend": "cpu", "precision": "fp32"}, {})
    assert list(tmp_path.iterdir()) == []
    make_recordings.write(tmp_path / "r")
    with pytest.raises(UserError, match="never overwritten"):
        make_recordings.write(tmp_path / "r")


def test_a_cut_recording_is_refused(tmp_path):
    made = make_recordings.write(tmp_path / "r")
    path = made.folder / recording.OUTPUTS
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        dict(made.outputs())
    (made.folder / recording.NAME).write_text('{"member": "x"}')
    with pytest.raises(UserError, match="backend is missing"):
        Recording.open(made.folder)
