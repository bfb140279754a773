"""The result of a run as one JSON file for other programs: ``bench_{GPU}_{N}gpu_{TIMESTAMP}.json``.

:class:`Bench` is the schema, ``docs/bench.schema.json`` the same for programs that do not read Python. A field is added
with the same version; one that is changed or dropped raises it. ``benchlib compare`` reads the file like the run's folder.
"""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from benchlib.core.errors import UserError
from benchlib.core.files import read_model, write_text
from benchlib.core.text import counted
from benchlib.results.metrics import Metric, RegressionLimit
from benchlib.results.record import Record
from benchlib.results.run import Result
from benchlib.results.shared import KEPT_BYTES
from benchlib.results.verdict import Verdict
from benchlib.show.exports import put

NAME, SCHEMA = "seq2seq", 2


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Metadata(_Part):
    """What ran, where, when and how it was judged."""

    run: str = Field(description="name of the run folder")
    benchmark: Literal["seq2seq"]
    tier: str = Field(description="how much work: smoke, quick, nightly, weekend or one of your own")
    backend: str = Field(description="cpu, cuda, rocm, mps, xpu or tpu")
    device: str = Field(description="name of the device that each rank had; of a CPU backend the processor")
    gpus: int = Field(ge=0, description="devices over all nodes; 0 for a CPU backend")
    ranks: int = Field(ge=1, description="processes over all nodes")
    verdict: str = Field(description="PASS, FAIL or AMBIGUOUS")
    sentence: str = Field(description="the verdict in a sentence")
    started_at: datetime.datetime = Field(description="UTC")
    ended_at: datetime.datetime | None = Field(description="UTC")
    others: float = Field(0.0, ge=0, lt=1, description="share of the CPU time that other processes used")
    machine: dict[str, Any] = Field(description="processor, memory, system, versions, drivers, devices")
    fingerprint: dict[str, str] = Field(description="what has to be equal for two runs to be comparable")
    facts: dict[str, Any] = Field(description="counts and flags of the run: parameters, precision, global_batch …")


class Epoch(_Part):
    """One pass over the samples."""

    epoch: int = Field(ge=0, description="number, from 0")
    counted: bool = Field(description="false for the epoch that warms up")
    wall_time_s: float = Field(gt=0, description="wall time")
    total_samples: int | None = Field(None, ge=0, description="samples trained on in that time, all ranks")
    throughput_samples_per_s: float | None = Field(None, ge=0, description="total_samples / wall_time_s")
    loss: float | None = Field(description="mean of the epoch, in nats per token")


class Number(Metric):
    """A metric of the whole run, with its samples: all of them, or 200 quantiles of more."""

    samples: list[float] = Field(default_factory=list)


class Bench(_Part):
    """The whole file."""

    format: Literal["benchlib-bench"] = "benchlib-bench"
    schema_version: Literal[2] = 2
    gpu_name: str | None = Field(None, description="name of a device; null for a CPU backend")
    wall_time_s: float | None = Field(None, ge=0, description="the counted epochs, without those that warm up")
    total_samples: int | None = Field(None, ge=0, description="samples trained on in that time, all ranks")
    throughput_samples_per_s: float | None = Field(None, ge=0, description="total_samples / wall_time_s")
    metadata: Metadata
    config: dict[str, Any] = Field(description="every parameter with the value that ran")
    epochs: list[Epoch]
    summary: list[Number] = Field(description="every metric with unit, provenance, 95% interval and samples")
    limits: list[RegressionLimit] = Field([], description="how much worse a metric may get before it is a regression")


def bench(run: Record) -> Bench:
    small = run.thin(most_bytes=KEPT_BYTES)
    result = run.result
    assert result is not None and small.result is not None
    processor, gpu = str(run.machine.get("cpu", {}).get("model") or "cpu"), run.backend != "cpu"
    device = next(iter(run.device_names), run.backend if gpu else processor)
    same = ("run", "benchmark", "tier", "backend", "sentence", "machine", "fingerprint", "others")
    samples, rows = result.facts.get("samples_per_epoch"), result.tables.get("epochs", [])
    counted_s = [row["seconds"] for row in rows if row["counted"]]
    return Bench(
        gpu_name=device if gpu else None,
        **_throughput(sum(counted_s), samples and samples * len(counted_s)),
        metadata=Metadata(
            **{name: getattr(run, name) for name in same},
            device=device,
            gpus=result.world_size if gpu else 0,
            ranks=result.world_size,
            verdict=run.word,
            started_at=result.started_at,
            ended_at=result.ended_at,
            facts=small.result.facts,
        ),
        config=run.config,
        epochs=[
            Epoch(**{name: row[name] for name in ("epoch", "counted", "loss")}, **_throughput(row["seconds"], samples))
            for row in rows
        ],
        summary=[Number(**one.model_dump(), samples=small.samples.get(one.name, [])) for one in result.metrics],
        limits=run.limits,
    )


def _throughput(seconds: float, samples: int | None) -> dict[str, Any]:
    rate = samples / seconds if samples is not None and seconds else None
    return {"wall_time_s": seconds, "total_samples": samples, "throughput_samples_per_s": rate}


def read(path: Path) -> Record:
    """Return the run that such a file describes; ``UserError`` names the first thing that is wrong in it."""
    file = read_model(path, Bench, f"a bench file of version {SCHEMA}: export the run again", SCHEMA)
    about, numbers = file.metadata, file.summary
    common = {name: getattr(about, name) for name in ("benchmark", "tier", "backend")}
    ended = about.ended_at.timestamp() if about.ended_at else None
    times = {"started_at": about.started_at.timestamp(), "ended_at": ended}
    metrics = [Metric(**number.model_dump(exclude={"samples"})) for number in numbers]
    return Record(
        **common,
        **times,
        **{name: getattr(about, name) for name in ("run", "machine", "fingerprint", "others")},
        config=file.config,
        verdict=Verdict(verdict=about.verdict, sentence=about.sentence, checks=[]),
        result=Result(**common, **times, status="complete", world_size=about.ranks, metrics=metrics, facts=about.facts),
        samples={number.name: number.samples for number in numbers if number.samples},
        limits=file.limits,
    )


READERS = {"benchlib-bench": read}


def write(runs: Sequence[Record], output: str) -> str:
    """Write a file for each complete run into the folder ``output`` ('' is the current one), or print one with ``-``.

    Runs of other benchmarks and incomplete ones are left out; none is a ``UserError``.
    """
    files = [bench(run) for run in runs if run.benchmark == NAME and run.complete and run.word != "DAMAGED"]
    if not files:
        raise UserError(f"bench: no complete run of {NAME} among {counted(len(runs), 'run')}; name one")
    texts = {}
    for content in files:
        about = content.metadata  # device, devices (0 for a CPU backend), start in UTC
        device = re.sub(r"[^A-Za-z0-9.]+", "-", about.device).strip("-.") or "device"
        name = f"bench_{device}_{about.gpus}gpu_{about.started_at:%Y%m%dT%H%M%SZ}.json"
        texts[name] = content.model_dump_json(indent=1) + "\n"
    if output == "-":
        if len(files) > 1:
            raise UserError(f"bench: {len(files)} runs do not fit one output: name a folder with --output FOLDER")
        return put("".join(texts.values()), "-", "")
    folder = Path(output or ".").expanduser()
    if not folder.is_dir():
        raise UserError(f"--output {output}: bench writes files named after device and time: name a folder that exists")
    for name, text in texts.items():
        write_text(folder / name, text)
    return f"{', '.join(texts)} written to {folder}"
