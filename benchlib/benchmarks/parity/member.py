"""One member in a process of its own: what it computes from the golden inputs becomes its recording.

A name is a member of the table, or ``reference`` or ``truth`` (the fp64 reference), both of the golden folder. What this module imports is
loaded once by the server that members are forked from.
"""

import dataclasses
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.models.bert.modeling_bert

from benchlib.benchmarks.parity import golden, layers, recording, switches, weights
from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.benchmarks.parity.exercise import Exercise
from benchlib.benchmarks.parity.inputs import Inputs
from benchlib.config.schema import load_config
from benchlib.core.machine import cpu_model, versions
from benchlib.runtime import devices
from benchlib.workloads.executors import MEMBERS, Member
from benchlib.workloads.executors.eager import device_name

_LOADED = transformers.models.bert.modeling_bert  # the embedded model's, which transformers loads when it is used
_VERSIONS = ("benchlib", "python", "torch", "transformers", "numpy", "safetensors")


@dataclasses.dataclass(frozen=True)
class Task:
    """What a name stands for: which member on which backend, and where its recording goes.

    A ``candidate`` is timed and has the injected fault; a reference is not and has not.
    """

    member: Member
    backend: str
    folder: Path
    candidate: bool = False


def task(config: ParityConfig, run_dir: Path, name: str) -> Task:
    """Return what ``name`` stands for in a run."""
    place = golden.place(run_dir, config.golden)
    if name == golden.REFERENCE:
        return Task(MEMBERS["eager"], config.reference_backend, place / name)
    if name == golden.TRUTH:
        # Not by way of eager: some models compute their softmax in fp32 there, whatever the weights are.
        return Task(MEMBERS["fp64"], "cpu", place / name)
    return Task(MEMBERS[name], config.backend, run_dir / "members" / name, candidate=True)


def variables(name: str) -> dict[str, str]:
    """Return what is set in the environment of a process before it opens a device."""
    if name in MEMBERS and MEMBERS[name].mode == "native":
        return {}
    # cuBLAS is deterministic only with a workspace of its own for each stream, and reads this when it starts.
    return {"CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")}


def record(run_dir: Path, name: str, replacement: str, tell: Callable[[Any], None]) -> None:
    """Compute what ``name`` stands for and leave its recording, whole or not at all.

    ``replacement`` stands in for the table's executor, where it is not empty. Raises ``BackendUnavailable`` where this way
    to compute is not available.
    """
    began = time.monotonic()
    config = load_config(run_dir)
    assert isinstance(config, ParityConfig)
    todo = task(config, run_dir, name)
    member = dataclasses.replace(todo.member, executor=replacement or todo.member.executor)
    place = golden.place(run_dir, config.golden)
    tell({"done": 0, "total": 1, "what": "loading"})
    make = member.make  # first: a missing package is reported before the model is loaded
    devices.require(todo.backend)
    where = devices.device(todo.backend)
    inputs = Inputs(place)
    model, model_sha256 = weights.loaded(config, place, member.attention)
    with (
        tempfile.TemporaryDirectory(prefix=f".member-{name}-", dir=run_dir, ignore_cleanup_errors=True) as folder,
        switches.held(member, where) as switched,
        layers.planted(model, config.planted_layer if todo.candidate else -1),
    ):
        executor = make(model, member, where, inputs.tensors("layer"), Path(folder))
        results = Exercise(config, member, model, executor, inputs, where, tell).run(latency=todo.candidate)
        description = {**executor.description, "switches": switched}
        executor.close()
    device, software = device_name(where), versions()
    meta: dict[str, Any] = {
        "member": name,
        "backend": todo.backend,
        "device": device,
        "precision": member.precision,
        "seconds": time.monotonic() - began,
        "model_sha256": model_sha256,
        "inputs_sha256": inputs.sha256,
        # What two recordings are told apart by: versions, processor, threads.
        "environment": {
            **{name: software[name] for name in software if name in _VERSIONS},
            "platform": platform.platform(terse=True),
            "processor": cpu_model(),
            "device": device,
            "threads": torch.get_num_threads(),
            "thread_waiting": os.environ.get("OMP_WAIT_POLICY", ""),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "executor": description,
        "absent": results.absent,
        **results.facts,
    }
    recording.write(todo.folder, meta, results.outputs, results.gradients, results.layers)
