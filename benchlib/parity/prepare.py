"""What a golden folder needs before anything is computed: weights and inputs."""

from pathlib import Path
from typing import Any

from benchlib.parity import cases, layers, room, weights
from benchlib.parity.config import ParityConfig


def prepare(config: ParityConfig, golden: Path) -> dict[str, Any]:
    """Write weights, inputs and the dev set into ``golden``; return ``model``, ``inputs_sha256`` and ``cases``.

    These are fields of the golden folder's manifest. Raises ``UserError`` where model or data are not there, a
    length is beyond the model's positions, an input beyond the memory, or the planted layer beyond the model's.
    """
    prepared = weights.prepare(config)
    cases.check_lengths(config, prepared.model.config)
    layers.require_layer(prepared.model, config.planted_layer)
    room.require(config, prepared.model.config)
    golden.mkdir(parents=True, exist_ok=True)
    found = cases.write(config, prepared.tokenizer, prepared.model.config, golden)
    model = weights.save(prepared, golden)
    listed = [{"id": case.id, "kind": case.kind, "batch": case.batch, "length": case.length} for case in found.cases]
    return {"model": model, "inputs_sha256": found.sha256, "cases": listed}
