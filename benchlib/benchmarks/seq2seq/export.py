"""The result of a run as one JSON file for other programs: ``bench_{GPU}_{N}gpu_{TIMESTAMP}.json``.

:class:`Bench` is the schema, ``docs/bench.schema.json`` the same for programs that do not read Python. A field is added
with the same version; one that is changed or dropped raises it.
"""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from benchlib.core.errors import UserError
from benchlib.core.files import write_text
from benchlib.core.text import counted
from benchlib.results.metrics import Metric
from benchlib.results.record import Record
from benchlib.results.shared import KEPT_BYTES
from benchlib.show.exports import put

NAME = "seq2seq"


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
    machine: dict[str, Any] = Field(description="processor, memory, system, versions, drivers, devices")
    fingerprint: dict[str, str] = Field(description="what has to be equal for two runs to be comparable")
    facts: dict[str, Any] = Field(description="counts and flags of the run: parameters, precision, global_batch …")


class Epoch(_Part):
    """One pass over the samples."""

    epoch: int = Field(ge=0, description="number, from 0")
    counted: bool = Field(description="false for the epoch that warms up")
    seconds: float = Field(gt=0, description="wall time")
    loss: float | None = Field(description="mean of the epoch, in nats per token")


class Number(Metric):
    """A metric of the whole run, with its samples: all of them, or 200 quantiles of more."""

    samples: list[float] = Field(default_factory=list)


class Bench(_Part):
    """The whole file."""

    format: Literal["benchlib-bench"] = "benchlib-bench"
    schema_version: Literal[1] = 1
    gpu_name: str | None = Field(None, description="name of a device; null for a CPU backend")
    wall_time_s: float | None = Field(None, ge=0, description="the training, all of its epochs")
    total_samples: int | None = Field(None, ge=0, description="samples trained on in that time, all ranks")
    throughput_samples_per_s: float | None = Field(None, ge=0, description="total_samples / wall_time_s")
    metadata: Metadata
    config: dict[str, Any] = Field(description="every parameter with the value that ran")
    epochs: list[Epoch]
    summary: list[Number] = Field(description="every metric with unit, provenance, 95% interval and samples")


def bench(run: Record) -> Bench:
    small = run.thin(most_bytes=KEPT_BYTES)
    result = run.result
    assert result is not None and small.result is not None
    processor, gpu = str(run.machine.get("cpu", {}).get("model") or "cpu"), run.backend != "cpu"
    device = next(iter(run.device_names), run.backend if gpu else processor)
    same = ("run", "benchmark", "tier", "backend", "sentence", "machine", "fingerprint")
    wall_s, samples = (result.facts.get(name) for name in ("train_s", "trained_samples"))
    return Bench(
        gpu_name=device if gpu else None,
        wall_time_s=wall_s,
        total_samples=samples,
        throughput_samples_per_s=samples / wall_s if samples is not None and wall_s else None,
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
        epochs=[Epoch(**{name: row[name] for name in Epoch.model_fields}) for row in result.tables.get("epochs", [])],
        summary=[Number(**one.model_dump(), samples=small.samples.get(one.name, [])) for one in result.metrics],
    )


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
