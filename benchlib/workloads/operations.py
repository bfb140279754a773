"""The collective operations and the ways to do them, without torch: the front reads it, too."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from benchlib.spec.tables import Row, Rows

TYPES = {  # of the elements: their names in torch, and their bytes
    "fp32": ("float32", 4),
    "fp16": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "int32": ("int32", 4),
    "int64": ("int64", 8),
    "uint8": ("uint8", 1),
}
REDUCTIONS = ("sum", "avg", "min", "max", "product")
IN_PLACE_FIRST, OUT_OF_PLACE_FIRST, OUT_OF_PLACE = (True, False), (False, True), (False,)


class Op(NamedTuple):
    """One operation. torch's all-reduce, broadcast and reduce work in place; the others on a part of the larger side.

    ``ends`` says who moves data: all at once, rank 0 and the others, rank 0 to rank 1, nobody. Headline figures are of the
    first of ``placements`` (in place or not).
    """

    name: str
    label: str
    ends: Literal["all", "root", "pair", "none"] = "all"
    placements: tuple[bool, ...] = OUT_OF_PLACE_FIRST
    reduces: bool = False
    parts_given: bool = False  # the input is the larger side, with a part for each rank
    parts_got: bool = False  # the output is the larger side, with a part of each rank
    least_ranks: int = 1
    may_lose: float = 0.25  # of the accepted bandwidth
    latency_may_grow: float | None = None  # by this share: a few microseconds of the scheduler are a large part of it
    target: str = ""  # the variant that may have to reach a share of raw sockets ...
    target_bytes: int = 64 << 20  # ... in messages of at least this size

    def elements(self, size_bytes: int, dtype: str, ranks: int) -> int:
        """Return the elements of the larger side nearest below a size, at least one for each part."""
        parts = ranks if self.parts_given or self.parts_got else 1
        return parts * max(1, size_bytes // TYPES[dtype][1] // parts) if self.ends != "none" else 0


_ALL_REDUCE = {"may_lose": 0.15, "latency_may_grow": 0.5, "target": "library", "target_bytes": 16 << 20}
OPS: Mapping[str, Op] = {
    op.name: op
    for op in (
        Op("all_reduce", "all-reduce", "all", IN_PLACE_FIRST, reduces=True, **_ALL_REDUCE),  # type: ignore[arg-type]
        Op("all_gather", "all-gather", parts_got=True, target="direct"),
        Op("reduce_scatter", "reduce-scatter", reduces=True, parts_given=True, target="direct"),
        Op("broadcast", "broadcast", "root", IN_PLACE_FIRST, target="library"),
        Op("reduce", "reduce", "root", IN_PLACE_FIRST, reduces=True),
        Op("gather", "gather", "root", parts_got=True),
        Op("scatter", "scatter", "root", parts_given=True),
        Op("all_to_all", "all-to-all", "all", OUT_OF_PLACE, parts_given=True, parts_got=True),
        Op("send_recv", "send/recv", "pair", OUT_OF_PLACE, least_ranks=2, latency_may_grow=0.5, target="library"),
        Op("barrier", "barrier", "none", OUT_OF_PLACE, latency_may_grow=0.5),
    )
}
TOGETHER = tuple(op.name for op in OPS.values() if op.ends == "all")


class Variant(NamedTuple):
    """A way to do operations. ``own``: of sends and receives of the kit, by none of the library's collectives."""

    label: str
    operations: tuple[str, ...]
    own: bool = True


VARIANTS = {
    "library": Variant("", tuple(OPS), own=False),
    "async": Variant("async", tuple(OPS), own=False),  # started and waited for at once
    "overlap": Variant("overlapped", TOGETHER, own=False),  # beside a computation
    "direct": Variant("direct", ("all_gather", "reduce_scatter")),
    "ring": Variant("ring", ("all_reduce",)),
    "tree": Variant("recursive doubling", ("all_reduce",)),
    "rs_ag": Variant("reduce-scatter + all-gather", ("all_reduce",)),
    "flat": Variant("gloo without groups", ("all_reduce",)),  # which only a hierarchy has beside it
}


def bus_conditions(row: Row, run: Rows) -> dict[str, Any]:
    """Return under which conditions a bus bandwidth was measured, for the figures published of others."""
    ranks = {"devices": run.world, "nodes": run.config.nnodes}
    return ranks | {"definition": "bus bandwidth", "message_bytes": row["bytes"]}
