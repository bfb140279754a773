"""The file of a run for other programs: its schema by a second library, and what is refused."""

import json

import jsonschema
import pytest

from benchlib.benchmarks.seq2seq import export
from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.core.errors import UserError
from benchlib.core.files import home
from benchlib.results.metrics import measured, not_available
from benchlib.results.record import Record
from benchlib.results.run import Result
from benchlib.results.verdict import Verdict

H100 = "NVIDIA H100 80GB HBM3"
STARTED = 1_795_367_498.25  # 2026-11-22 17:11:38 UTC
PASSED = Verdict(verdict="PASS", sentence="9 checks passed.", checks=[])


def run(name="seq2seq-cuda-171138-abc", backend="cuda", ranks=4, speed=100.0, started=STARTED, **more):
    config = Seq2seqConfig(backend=backend, nproc=ranks, batch_size=32)
    metrics = [
        measured("train_samples_per_s", [speed, speed + 1, speed + 3], "samples/s", "higher"),
        not_available("power_w", "W", "lower", "no sensor"),
    ]
    common = {"benchmark": "seq2seq", "tier": "smoke", "backend": backend}
    return Record(
        **common, run=name, verdict=PASSED, started_at=started, config=config.model_dump(mode="json"),
        machine={"host": name, "cpu": {"model": "AMD EPYC (7763)"}, "devices": {"backends": {"cuda": {"names": [H100] * ranks}}}},
        result=Result(
            **common, status="complete", world_size=ranks, started_at=started, ended_at=started + 60, metrics=metrics,
            facts={"epoch_items": 512, "precision": "bf16", "samples_per_epoch": 512},
            tables={"epochs": [{"epoch": n, "counted": n > 0, "seconds": 5.0 + n, "loss": 9.0 - n} for n in range(4)]},
        ),
        fingerprint={"backend": backend, "world_size": str(ranks), "nodes": "1",
                     **{f"config.{key}": json.dumps(value) for key, value in config.work().items()}},
        samples={metrics[0].name: metrics[0].samples},
    ).model_copy(update=more)  # fmt: skip


def test_the_committed_schema_is_that_of_the_model_and_accepts_the_file(tmp_path):
    schema = json.loads((home() / "docs" / "bench.schema.json").read_text())
    assert schema == export.Bench.model_json_schema()
    export.write([run()], str(tmp_path))
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)
    assert export.bench(run(backend="cpu")).gpu_name is None
    assert [metric["samples"] for metric in content["summary"]] == [[100.0, 101.0, 103.0], []]
    for change in ({"schema_version": 1}, {"epochs": [{"epoch": 0}]}, {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(content | change, schema, cls=jsonschema.Draft202012Validator)


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match="no complete run"):
        export.write([run(problems=["result.json is cut"]), run(benchmark="squad")], str(tmp_path))
    with pytest.raises(UserError, match="name a folder"):
        export.write([run()], str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []
