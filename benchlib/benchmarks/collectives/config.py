"""Parameters of the collectives benchmark. The defaults are those of the smoke tier."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ByteSize, Field, PositiveInt, TypeAdapter, field_validator, model_validator

from benchlib.config.schema import BaseConfig
from benchlib.core.definitions import size_text
from benchlib.core.errors import UserError
from benchlib.core.text import counted
from benchlib.workloads.operations import OPS, REDUCTIONS, TYPES, VARIANTS

Library = Literal["gloo", "nccl", "xccl", "mpi", "ucc"]
Share = Annotated[float | None, Field(gt=0, le=2)]
# Sizes as a user writes them: ``1KiB:256MiB`` (each twice the one before), ``1KiB:256MiB:8``, ``1KiB,1MiB``, ``100``.
MAX_SIZES = 64
SIZE = TypeAdapter(Annotated[ByteSize, Field(ge=1, le=2**40)])
FORMS = "write sizes as 1KiB:256MiB (each twice the one before), 1KiB:256MiB:8 (eight times), 1KiB,1MiB or plain bytes"
UNITS = "B, KiB, MiB, GiB, TiB (of 1024), KB, MB, GB, TB (of 1000) and K, M, G (of 1024, as in nccl-tests)"
PLACEMENTS = ("out of place", "in place")
# nccl-tests enqueues 20 operations and divides; one alone has its start and its wait in it, 10 to 20 us on a GPU: a tenth of this.
COMPARABLE_US = 200.0
NO_BUS = "one rank has no bus to send on; set nproc to 2 or more"
USUAL = [name for name in VARIANTS if name != "flat"]  # which only a hierarchy has beside it


class CollectivesConfig(BaseConfig):
    """Every collective operation by size, verified and timed, beside what the machine's network reaches."""

    PATHS: ClassVar[dict[str, bool]] = {"nccl_tests": True}
    ASIDE: ClassVar[tuple[str, ...]] = ("planted_fault_rank", "nccl_tests")
    FOLLOWS: ClassVar[dict[str, str]] = {**BaseConfig.FOLLOWS, "variants": "collective"}

    benchmark: Literal["collectives"] = "collectives"

    operations: list[Literal[tuple(OPS)]] = Field(  # type: ignore[valid-type]
        list(OPS), min_length=1, description="the operations of the collective library"
    )
    dtypes: list[Literal[tuple(TYPES)]] = Field(  # type: ignore[valid-type]
        list(TYPES), min_length=1, description="of the elements; the first at all sizes"
    )
    reductions: list[Literal[REDUCTIONS]] = Field(  # type: ignore[valid-type]
        list(REDUCTIONS), min_length=1, description="of the operations that reduce; the first at all sizes"
    )
    sizes: str = Field(
        "1KiB:1MiB:32",
        description="bytes of the larger side: 1KiB:256MiB (factor 2), 1KiB:256MiB:8, 1KiB,1MiB; where each rank has a part "
        "(gather, scatter and their like), rounded down to as many elements for each, at least one",
    )
    type_sizes: str = Field("4KiB", description="sizes for the other types and reductions, written as sizes")
    variants: list[Literal[tuple(VARIANTS)]] = Field(  # type: ignore[valid-type]
        USUAL,
        min_length=1,
        description="implementations to compare: library, async, overlap (beside a computation), direct (send and receive), "
        "ring, tree, rs_ag, flat (gloo without groups)",
    )
    seconds: float = Field(0.02, gt=0, le=600, description="time of the operations of each series, in seconds")
    share_sizes: str = Field(
        "16MiB,64MiB", description="sizes measured interleaved with the sockets, besides the largest"
    )
    pairs: bool = Field(True, description="measure each pair of ranks by itself")
    bucket_bytes: list[PositiveInt] = Field([4096, 262144], description="sizes of gradient buckets, timed one by one")
    compare_gradients: list[Library] = Field(
        ["gloo"], description="libraries over which the same gradients are compared"
    )
    nccl_tests: str = Field("", description="file of results of nccl-tests to show beside")

    planted_fault_rank: int = Field(
        -1, ge=-1, le=2**20, description="rank that alters an element of each result; -1: none"
    )

    target_allreduce_gbps: float | None = Field(
        None, gt=0, description="bus bandwidth of the buckets to exceed, in Gbps"
    )
    target_share_all_reduce: Share = Field(None, description="of the raw sockets of all ranks, at 16 MiB and more")
    target_share_broadcast: Share = Field(None, description="of one raw socket, at 64 MiB")
    target_share_send_recv: Share = Field(None, description="of one raw socket, at 64 MiB")
    target_share_all_gather: Share = Field(None, description="of all raw sockets, at 64 MiB, variant direct")
    target_share_reduce_scatter: Share = Field(None, description="of all raw sockets, at 64 MiB, variant direct")

    @model_validator(mode="before")
    @classmethod
    def _flat_beside_the_hierarchy(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("collective") == "hierarchical":
            return {"variants": [*USUAL, "flat"], **values}
        return values

    @field_validator("sizes", "type_sizes", "share_sizes", mode="before")
    @classmethod
    def _sizes_can_be_read(cls, value: Any) -> str:
        parse_sizes(text := str(value))
        return text

    def check_whole(self) -> None:
        """Raise ``UserError`` also for a fault injected into a rank that does not exist."""
        super().check_whole()
        if self.planted_fault_rank >= self.world_size:
            known = f"there are {self.world_size} ranks, numbered from 0"
            raise UserError(
                f"planted_fault_rank = {self.planted_fault_rank}: {known}; name one of them, or -1 for none"
            )

    @property
    def size_list(self) -> tuple[int, ...]:
        """Bytes at which the operations are measured, rising."""
        return parse_sizes(self.sizes)

    def expected_work(self) -> str:
        """Say what will be measured."""
        sizes = self.size_list
        return (
            f"{counted(len(self.operations), 'operation')} over {counted(self.world_size, 'rank')} at {counted(len(sizes), 'size')} "
            f"from {size_text(sizes[0])} to {size_text(sizes[-1])}, {self.seconds:g} s each; types {', '.join(self.dtypes)} and "
            f"reductions {', '.join(self.reductions)} at {self.type_sizes}; variants {', '.join(self.variants)}; every result is verified"
        )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read a list of sizes or ranges of sizes, in bytes, rising and without repetition; ``ValueError`` says what is wrong.

    A range holds its first size, each next one by the factor (2), and its last, whether or not the factor leads there.
    """
    sizes = {size for part in text.split(",") for size in _range(part)}
    if len(sizes) > MAX_SIZES:
        raise ValueError(f"{text!r} are {len(sizes)} sizes, at most {MAX_SIZES} can be measured: use a larger factor")
    return tuple(sorted(sizes))


def _range(text: str) -> list[int]:
    first, *rest = text.split(":")
    if not rest:
        return [_size(first)]
    if len(rest) > 2:
        raise ValueError(f"{text!r} is not a range of sizes: {FORMS}")
    sizes, last = [_size(first)], _size(rest[0])
    factor = rest[1].strip() if rest[1:] else "2"
    if not re.fullmatch(r"\d+(\.\d+)?", factor) or float(factor) <= 1:
        raise ValueError(f"{text!r}: the factor must be a number above 1, as in {first}:{rest[0]}:8")
    if sizes[0] > last:
        raise ValueError(f"{text!r}: the range ends below its beginning; write it as {rest[0]}:{first}")
    size = float(sizes[0])
    while (size := size * float(factor)) < last and len(sizes) <= MAX_SIZES:
        sizes.append(int(size))
    return [*sizes, last]


def _size(text: str) -> int:
    try:
        return SIZE.validate_python(re.sub(r"(?i)([kmg])\s*$", r"\1iB", text))
    except ValueError:
        raise ValueError(f"{text!r} is not a size from 1 B to 1 TiB: {FORMS}; units are {UNITS}") from None
