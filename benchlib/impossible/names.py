"""What the names of the kit's own metrics stand for: a unit by their ending, and what was measured by their scope."""

import re

# What may stand in for a real model on the whole of SQuAD v1.1; these words end a name (SquadConfig.quality_scope).
SCOPES = ("minisquad", "files", "subset", "tiny", "random", "cut")
SCOPE = re.compile(rf"(?:_(?:{'|'.join(SCOPES)}))*$")

SCORES = ("loss", "loss_first", "loss_final", "f1", "exact_match")
RATIOS = ("padding_share", "exchange_overlap", "rank_skew", "mfu")
ENDINGS = {
    "gbytes_per_s": "GB/s",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "flops_per_s": "FLOP/s",
    "flops": "FLOP/s",
    "gbps": "Gbps",
    "socket_share": "ratio",
    "gb": "GB",
    "us": "us",
    "ms": "ms",
    "s": "s",
    "w": "W",
    "c": "°C",
    "j": "J",
}  # the first that fits counts


def base(name: str) -> str:
    """Return a name without its scope: ``f1_minisquad_tiny`` -> ``f1``."""
    return SCOPE.sub("", name)


def unit_of(name: str) -> str | None:
    """Return the unit that a name stands for, None for a name that stands for none."""
    plain = base(name)
    if plain in SCORES:
        return ""
    if plain in RATIOS:
        return "ratio"
    ending = next((ending for ending in ENDINGS if plain.endswith(f"_{ending}") or plain == ending), None)
    if ending == "s" and plain.endswith("_per_s"):
        return None  # a rate of something that the table does not name
    return ENDINGS[ending] if ending else None
