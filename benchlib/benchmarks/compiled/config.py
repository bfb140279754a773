"""Parameters of the compiled path. The defaults are those of the smoke tier."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from benchlib.config.schema import BaseConfig
from benchlib.core.errors import nearest
from benchlib.workloads.executors import MEMBERS

REFERENCE = "eager"  # of parity's members: what all others are compared with, and their speed divided by


def members() -> Mapping[str, Any]:
    """Return parity's members that compute on a CPU, by name: the executors of this benchmark."""
    return {name: member for name, member in MEMBERS.items() if "cpu" in member.backends}


class CompiledConfig(BaseConfig):
    """PyTorch models as StableHLO text, computed by other compilers, beside torch; they have positions for 512 tokens."""

    OMP_WAIT_POLICY: ClassVar[str] = "PASSIVE"
    LATER: ClassVar[dict[str, Any]] = {"gelu": "plain"}

    benchmark: Literal["compiled"] = "compiled"

    models: list[Literal["bert", "encdec", "llama"]] = Field(
        ["bert"], min_length=1, description="models to convert: question answering, encoder-decoder, decoder"
    )
    model: Literal["small", "tiny"] = Field(
        "small", description="BERT of programs, gradients and training; small: one layer of width 32, random weights"
    )
    batch: int = Field(
        2, ge=1, le=1024, description="rows of a converted program, of each replica and of a training step"
    )
    length: int = Field(16, ge=8, le=512, description="tokens of a row of these")
    train_steps: int = Field(5, ge=0, le=10000, description="training steps through the compiled program; 0: none")
    learning_rate: float = Field(5e-5, gt=0, le=1, description="constant learning rate of AdamW")
    runtimes: list[Literal["xla", "iree", "interpreter"]] = Field(
        [], description="executors of one .mlir file of a small BERT, side by side"
    )
    targets: list[Literal["cuda", "rocm", "vulkan-spirv", "metal-spirv"]] = Field(
        [], description="targets that IREE compiles the small BERT for, without their hardware"
    )
    gelu: Literal["plain", "custom_call"] = Field(
        "plain", description="custom_call: convert BERT also with each GELU as stablehlo.custom_call @gelu"
    )
    executors: list[str] = Field(
        [REFERENCE, "xla"], description="members of parity to time; eager is always among them"
    )
    timed_model: Literal["small", "tiny", "bert-base"] = Field(
        "small", description="model to time; small and bert-base have random weights"
    )
    batch_sizes: list[Annotated[int, Field(ge=1, le=8192)]] = Field(
        [1], min_length=1, description="rows of the timed inputs"
    )
    lengths: list[Annotated[int, Field(ge=1, le=512)]] = Field(
        [32], min_length=1, description="tokens of the timed inputs"
    )
    rounds: int = Field(5, ge=2, le=10000, description="timed calls of each executor, interleaved")

    @field_validator("executors")
    @classmethod
    def _executors_are_known(cls, value: list[str]) -> list[str]:
        available = members()
        for name in value:
            if name not in available:
                raise ValueError(f"there is no executor {name!r}: {nearest(name, available)}")
            if available[name].precision != "fp32":
                raise ValueError(f"executor {name!r} computes in {available[name].precision}: name one in fp32")
        return [REFERENCE, *(name for name in dict.fromkeys(value) if name != REFERENCE)]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and tokens of the timed inputs."""
        return [(batch, length) for length in sorted(set(self.lengths)) for batch in sorted(set(self.batch_sizes))]

    def expected_work(self) -> str:
        """Say what will be converted, compared and timed."""
        parts = [f"converts {', '.join(self.models)} and BERT's joint graph to StableHLO, {self.batch} x {self.length}"]
        if self.world_size > 1:
            parts.append(f"{self.world_size} replicas against DDP")
        parts += [f"{self.train_steps} training steps"] * bool(self.train_steps)
        parts += [f"one file through {', '.join(self.runtimes)}"] * bool(self.runtimes)
        shapes = ", ".join(f"{batch} x {length}" for batch, length in self.shapes)
        parts.append(f"times {', '.join(self.executors)} on {self.timed_model} at {shapes}")
        return "; ".join(parts)
