"""Parameters of the collectives benchmark. The defaults are those of the smoke tier."""

from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from benchlib.config.schema import BaseConfig
from benchlib.core.definitions import parse_size, parse_sizes, size_text
from benchlib.core.errors import UserError
from benchlib.core.text import counted

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
    "gather", "scatter", "all_to_all", "send_recv", "barrier",
]  # fmt: skip
Reduction = Literal["sum", "avg", "min", "max", "product"]
DataType = Literal["fp32", "fp16", "bf16", "int32", "int64", "uint8"]
Library = Literal["gloo", "nccl", "xccl", "mpi", "ucc"]
Variant = Literal["library", "async", "overlap", "direct", "ring", "tree", "rs_ag", "flat"]
USUAL: list[Variant] = [name for name in get_args(Variant) if name != "flat"]  # which only a hierarchy has beside it
FASTER_FROM, FASTER_UP_TO = "faster from there on", "faster up to there"  # reasons of a crossover that has a size


class CollectivesConfig(BaseConfig):
    """Every collective operation by size, verified and timed, beside what the machine's memory and network reach.

    The first of ``dtypes`` and ``reductions`` is measured at all ``sizes``, the others at ``type_sizes``.
    """

    PATHS: ClassVar[dict[str, bool]] = {"nccl_tests": True}
    FOLLOWS: ClassVar[dict[str, str]] = {**BaseConfig.FOLLOWS, "variants": "collective"}

    benchmark: Literal["collectives"] = "collectives"

    operations: list[Operation] = Field(
        list(get_args(Operation)), min_length=1, description="the operations of the collective library"
    )
    dtypes: list[DataType] = Field(
        list(get_args(DataType)), min_length=1, description="of the elements; the first at all sizes"
    )
    reductions: list[Reduction] = Field(
        list(get_args(Reduction)), min_length=1, description="of the operations that reduce; the first at all sizes"
    )
    sizes: str = Field(
        "1KiB:1MiB:32",
        description="bytes of the larger side: 1KiB:256MiB (factor 2), 1KiB:256MiB:8, 1KiB,1MiB; where each rank has a part "
        "(gather, scatter and their like), rounded down to as many elements for each, at least one",
    )
    type_sizes: str = Field("4KiB", description="sizes for the other types and reductions, written as sizes")
    in_place: bool = Field(True, description="measure in place and out of place, where the operation can be both")
    variants: list[Variant] = Field(
        USUAL,
        min_length=1,
        description="implementations to compare: library, async, overlap (beside a computation), direct (send and receive), "
        "ring, tree, rs_ag, flat (gloo without groups)",
    )
    seconds: float = Field(0.02, gt=0, le=600, description="time of the operations of each series, in seconds")
    share_sizes: str = Field(
        "16MiB,64MiB", description="sizes at which the limits are measured in turns, besides the largest"
    )
    pairs: bool = Field(True, description="measure each pair of ranks by itself")
    pair_size: str = Field("1MiB", description="bytes that a rank sends to another one, for the matrix of pairs")
    bucket_bytes: list[PositiveInt] = Field(
        [4096, 262144], description="sizes of gradient buckets whose all-reduce is timed one after the other"
    )
    compare_gradients: list[Library] = Field(
        ["gloo"], description="collective libraries over which the same gradients are compared"
    )
    nccl_tests: str = Field("", description="file of nccl-tests results (text or JSON) to show beside")

    planted_fault_rank: int = Field(
        -1, ge=-1, le=2**20, description="rank that alters one element of each result on purpose; -1: none"
    )

    target_allreduce_gbps: float | None = Field(
        None, gt=0, description="bus bandwidth to exceed over the gradient buckets, in Gbps"
    )
    target_share_all_reduce: float | None = Field(
        None, gt=0, le=2, description="of the raw sockets of all ranks, at 16 MiB and more"
    )
    target_share_broadcast: float | None = Field(None, gt=0, le=2, description="of one raw socket, at 64 MiB")
    target_share_send_recv: float | None = Field(None, gt=0, le=2, description="of one raw socket, at 64 MiB")
    target_share_all_gather: float | None = Field(
        None, gt=0, le=2, description="of the raw sockets of all ranks, at 64 MiB, variant direct"
    )
    target_share_reduce_scatter: float | None = Field(
        None, gt=0, le=2, description="of the raw sockets of all ranks, at 64 MiB, variant direct"
    )

    @model_validator(mode="before")
    @classmethod
    def _flat_beside_the_hierarchy(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("collective") == "hierarchical":
            return {"variants": [*USUAL, "flat"], **values}
        return values

    @field_validator("sizes", "type_sizes", "share_sizes", "pair_size", mode="before")
    @classmethod
    def _sizes_can_be_read(cls, value: Any, info: ValidationInfo) -> str:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str):
            sizes = parse_sizes(text)
            if info.field_name == "pair_size" and len(sizes) > 1:
                raise ValueError(f"{text!r} are {len(sizes)} sizes: pairs are measured at one, such as 1MiB")
        return text  # type: ignore[no-any-return]  # another type is refused by pydantic

    def check_whole(self) -> None:
        """Raise ``UserError`` also for a planted fault on a rank that is not there: nothing would be planted."""
        super().check_whole()
        if self.planted_fault_rank >= self.world_size:
            raise UserError(
                f"planted_fault_rank = {self.planted_fault_rank}: there are {self.world_size} ranks, numbered from 0, and "
                "no fault would be planted; name one of them, or -1 for none"
            )

    @property
    def size_list(self) -> tuple[int, ...]:
        """Bytes at which the operations are measured, rising."""
        return parse_sizes(self.sizes)

    @property
    def pair_bytes(self) -> int:
        """Bytes of a message of the matrix of pairs."""
        return parse_size(self.pair_size)

    def expected_work(self) -> str:
        """Say what will be measured."""
        sizes = self.size_list
        return (
            f"{counted(len(self.operations), 'operation')} over {counted(self.world_size, 'rank')} at {counted(len(sizes), 'size')} "
            f"from {size_text(sizes[0])} to {size_text(sizes[-1])}, {self.seconds:g} s each; types {', '.join(self.dtypes)} and "
            f"reductions {', '.join(self.reductions)} at {self.type_sizes}; variants {', '.join(self.variants)}; every result is verified"
        )

    def work(self) -> dict[str, Any]:
        """Return the fields that change the work; targets, a planted fault and foreign results do not."""
        skip = {name for name in type(self).model_fields if name.startswith("target_")}
        skip |= {"planted_fault_rank", "nccl_tests"}
        return {name: value for name, value in super().work().items() if name not in skip}
