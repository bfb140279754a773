"""What a report of parity shows first, its tables and its words."""

from typing import Any

from benchlib.benchmarks.parity.config import MEMBERS as ALL
from benchlib.core.text import stand_ins
from benchlib.spec.unported import View

# Members whose largest difference gets a card, of any backend.
MEMBERS = ("exact", "native", "sdpa_math", "sdpa_flash", "compile", "onnxruntime", "openvino", "bf16", "fp64")
TIMED = ("reference", "exact", "sdpa_flash", "compile")


def tables(run: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the report, by heading."""
    from benchlib.benchmarks.parity.tables import TABLES
    from benchlib.results.frames import report

    return report(run, TABLES)


def warnings(config: Any, result: Any) -> list[str]:
    """Return what limits the meaning of the result: stand-ins for the model, a planted difference."""
    sentences = stand_ins("", result.facts.get("model") if result else None)
    if config.planted_layer >= 0:
        sentences.append(
            f"The output of encoder layer {config.planted_layer} was changed on purpose in every member (planted_layer), to test whether the comparison detects it."
        )
    return sentences


VIEW = View(
    headlines=(
        *(f"{name}_logits_max_difference" for name in MEMBERS),
        *(f"{name}_latency_ms" for name in TIMED),
        "total_s",
    ),
    labels={
        **{f"{name}_logits_max_difference": f"{name}: difference of logits" for name in ALL},
        **{f"{name}_latency_ms": f"{name}: latency" for name in ("reference", *ALL)},
    },
    tables=tables,
    warnings=warnings,
)
