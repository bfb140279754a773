"""Parameters of the machine benchmark. The defaults are those of the smoke tier."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from benchlib.config.schema import BaseConfig
from benchlib.core.text import counted, listing


class MachineConfig(BaseConfig):
    """The measured peaks that other benchmarks are placed beside. n is the size of square matrices."""

    benchmark: Literal["machine"] = "machine"

    matmul_sizes: list[PositiveInt] = Field(
        [], description="n of the square matrix products; none: those that come near the peak of the device"
    )
    precisions: list[Literal["fp32", "tf32", "bf16", "fp16"]] = Field(
        ["fp32", "bf16"], min_length=1, description="of the matrix products"
    )
    copy_mib: int = Field(
        0, ge=0, le=65536, description="size of a rank's memory copies, in MiB; 0: more than the caches hold"
    )
    allreduce_mib: list[PositiveFloat] = Field(
        [0.001, 1, 16], min_length=1, description="sizes of the all-reduce, in MiB"
    )
    seconds: float = Field(0.5, gt=0, le=600, description="time that each measurement takes at least")

    @property
    def allreduce_sizes(self) -> list[int]:
        """Bytes of the all-reduces: whole KiB from 1 KiB on, as 0.001 MiB is meant."""
        sizes = (int(mib * 2**20) for mib in self.allreduce_mib)
        return [size - size % 1024 if size > 1024 else size for size in sizes]

    def expected_work(self) -> str:
        """Say what will be measured."""
        sizes = f"of n = {listing(list(map(str, self.matmul_sizes)))}" if self.matmul_sizes else "near the peak"
        copies = f"of {self.copy_mib} MiB" if self.copy_mib else "larger than the caches"
        exchanges = f"{counted(len(self.allreduce_mib), 'all-reduce size')} over {counted(self.world_size, 'rank')}"
        products = f"matrix products {sizes} in {listing(list(self.precisions))}"
        return f"{products}, memory copies {copies} and {exchanges}, {self.seconds:g} s each"
