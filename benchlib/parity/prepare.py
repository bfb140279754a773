"""What a golden folder needs before anything is computed: weights and inputs."""

from pathlib import Path
from typing import Any

from benchlib.parity import cases, weights
from benchlib.parity.config import ParityConfig


def prepare(config: ParityConfig, golden: Path) -> dict[str, Any]:
    """Write weights, inputs and the dev set into ``golden``; return ``model``, ``inputs_sha256`` and ``cases``.

    These are fields of the golden folder's manifest. Raises ``UserError`` where model or data are not there, or a
    length is beyond the model's positions.
    """
    prepared = weights.prepare(config)
    cases.check_lengths(config, prepared.model.config)
    golden.mkdir(parents=True, exist_ok=True)
    found = cases.write(config, prepared.tokenizer, prepared.model.config, golden)
    model = weights.save(prepared, golden)
    listed = [{"id": case.id, "kind": case.kind, "batch": case.batch, "length": case.length} for case in found.cases]
    return {"model": model, "inputs_sha256": found.sha256, "cases": listed}
