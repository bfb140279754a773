"""TensorBoard event files, written by TensorBoard's own writer: no torch, no TensorFlow.

A folder a run: ``loss`` and the other series of the training by step, raw samples by index, the metrics, and the verdict
with its checks as text.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from benchlib.core.errors import UserError
from benchlib.core.text import counted
from benchlib.judge.snapshot import Snapshot
from benchlib.show.exports.github import text as markdown


def write(runs: Sequence[Snapshot], output: str) -> str:
    """Write ``OUTPUT/<run>/events.out.tfevents...``; a run that is there already is left as it is."""
    if output in ("", "-"):
        raise UserError("tensorboard writes a folder: name it with --output FOLDER")
    root, written = Path(output).expanduser(), 0
    if root.is_file():
        raise UserError(f"--output {output} is a file: name a folder")
    for run in runs:
        folder = root / _folder(run)
        if any(folder.glob("events.out.tfevents.*")):
            continue  # TensorBoard reads all files of a folder as one run: a second one would double every point
        folder.mkdir(parents=True, exist_ok=True)
        writer = EventFileWriter(str(folder))
        for event in _events(run):
            writer.add_event(event)
        writer.close()
        written += 1
    left = f", {counted(len(runs) - written, 'run')} left as they were" if written < len(runs) else ""
    return f"{counted(written, 'run')} written to {root}{left}; see them with: tensorboard --logdir {root}"


def _folder(run: Snapshot) -> str:
    # The name may come from a foreign report: it must stay one folder below the root.
    return "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in run.run).lstrip(".") or "run"


def _events(run: Snapshot) -> Iterator[Event]:
    start = run.started_at or 0.0
    for name, values in run.samples.items():
        yield from _series(f"samples/{name}", values, start)
    for metric in run.result.metrics if run.result else []:
        if metric.value is not None:
            yield from _series(f"metrics/{metric.name}", [metric.value], run.ended_at or start)
    yield _text("verdict", markdown([run]), run.ended_at or start)


def _series(tag: str, values: Iterable[float], start: float) -> Iterator[Event]:
    for step, value in enumerate(values):
        if math.isfinite(value):
            yield Event(wall_time=start, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def _text(tag: str, words: str, moment: float) -> Event:
    """Return an event of the text plugin, which shows Markdown."""
    tensor = TensorProto(
        dtype=DT_STRING,
        string_val=[words.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
    return Event(wall_time=moment, step=0, summary=Summary(value=[value]))
