"""Two nodes without a common disk agree on the newest checkpoint; what is damaged on its way is not used."""

import json
from pathlib import Path

import pytest
from harness import HERE, none_left, prepare

from benchlib.launch.launch import execute


def test_two_nodes_and_their_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    run_dir = prepare(tmp_path / "run", threads=1)
    assert execute(run_dir, benchmark="checkpoint_cases:run")["outcome"] == "complete"
    none_left(run_dir)
    seen = [json.loads((run_dir / f"seen{rank}.json").read_text()) for rank in range(2)]
    for rank, told in enumerate(seen):
        assert told["nothing"] is None
        assert told["newest"] == [8, 8.0], "rank 0 has step 12, which is damaged; rank 1 has step 8, rank 0 step 4"
        assert told["fault"] == [
            "step-00000012: model.safetensors was altered (its SHA-256 is not the one in manifest.json)"
        ]
        assert told["usable"] == [4, 4.0], "the newest that may be used"
        assert told["whole"] == "", "verified again where it arrived"
        assert told["folders"] == ["step-00000004", "step-00000008", *["step-00000012"][rank:]]
        assert "was damaged on its way between the nodes: model.safetensors was altered" in told["tampered"]
    assert seen[0]["after"] == ["step-00000004", "step-00000012"], "what arrived damaged was not kept"
