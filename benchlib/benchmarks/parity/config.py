"""Parameters of the parity benchmark. The smoke tier has less than the defaults."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from benchlib.config.schema import EMBEDDED_MODEL, BaseConfig, Seconds
from benchlib.core.errors import UserError, nearest
from benchlib.workloads.executors import MEMBERS, Member


def chosen(config: "ParityConfig") -> tuple[Member, ...]:
    """Return the members that take part, in the order of the table: those that are named, else all of the backend.

    ``UserError`` for one that is not on this backend.
    """
    here = {name: member for name, member in MEMBERS.items() if config.backend in member.backends}
    for name in config.members:
        if name not in here:
            of = ", ".join(MEMBERS[name].backends)
            raise UserError(f"members: {name!r} is not of {config.backend} but of {of}: {nearest(name, here)}")
    wanted = config.members or [member.name for member in here.values() if config.slow or not member.slow]
    return tuple(member for name, member in here.items() if name in wanted)


PRELOAD = ("benchlib.benchmarks.parity.exercise",)


class ParityConfig(BaseConfig):
    """The same weights and inputs on a reference and on every member of a backend."""

    PATHS: ClassVar[dict[str, bool]] = {"golden": True, "dev_file": True, "model": False}
    FOLLOWS: ClassVar[dict[str, str]] = {**BaseConfig.FOLLOWS, "data": "dev_file"}
    # The fields that do not change what a member computes or how its time is taken.
    ASIDE: ClassVar[tuple[str, ...]] = ("record", "keep", "members", "slow", "member_timeout_s", "planted_layer")
    ONE_PROCESS: ClassVar[bool] = True
    OMP_WAIT_POLICY: ClassVar[str] = "PASSIVE"
    # The fields that a golden folder fixes: weights and inputs come from it, whatever machine computes.
    RECORDED: ClassVar[tuple[str, ...]] = (
        *("model", "init", "data", "dev_file", "lengths", "batch_sizes", "dev_questions", "train_steps", "train_batch"),
        *("train_length", "learning_rate", "seed"),
    )

    benchmark: Literal["parity"] = "parity"

    reference: Literal["cpu", "cuda", "rocm", "mps", "xpu", "tpu"] = Field(
        "cpu", description="backend that computes the reference, in fp32 with eager attention"
    )
    golden: str = Field("", description="golden folder to use as the reference, recorded earlier on any machine")
    record: bool = Field(
        False,
        description="compute only the reference, on `backend`, and the fp64 reference, and keep the golden folder",
    )
    members: list[str] = Field([], description="members to compare; empty: all of the backend")
    slow: bool = Field(False, description="include members that compile or export the model (about a minute each)")
    keep: bool = Field(False, description="keep weights, gradients and activations in the run folder")

    model: str = Field(
        EMBEDDED_MODEL,
        min_length=1,
        description="hub name, local folder, tiny, or bert-base: its config, random weights",
    )
    init: Literal["auto", "pretrained", "random"] = Field(
        "auto", description="weights; auto: pretrained where available, else random"
    )
    data: Literal["minisquad", "squad", "files"] = Field(
        "minisquad", description="text of the inputs: embedded generator, rajpurkar/squad, or dev_file"
    )
    dev_file: str = Field("", description="SQuAD v1.1 JSON file with the inputs; sets data=files")
    # A question and a context need 8 tokens with the special ones.
    lengths: list[Annotated[int, Field(ge=8, le=8192)]] = Field(
        [8, 32, 128], min_length=1, description="tokens of the inputs, padding included"
    )
    batch_sizes: list[Annotated[int, Field(ge=1, le=1024)]] = Field(
        [1, 2, 4, 8], min_length=1, description="rows of the inputs"
    )
    dev_questions: int = Field(32, ge=0, description="questions for the F1 difference; 0: none")
    train_steps: int = Field(20, ge=0, le=1000, description="training steps of the loss curve; 0: none")
    train_batch: int = Field(4, ge=1, le=1024, description="samples of a training step")
    train_length: int = Field(64, ge=8, le=8192, description="tokens of a training sample")
    learning_rate: float = Field(5e-5, gt=0, le=1, description="constant learning rate of the loss curve (AdamW)")
    latency_runs: int = Field(100, ge=0, le=100000, description="timed forward passes at batch 1; 0: none")
    member_timeout_s: Seconds = Field(
        300.0, gt=0, description="time limit of a member, seconds; beyond it the member fails"
    )
    planted_layer: int = Field(
        -1, ge=-1, le=1000, description="encoder layer with an injected fault in every member; -1: none"
    )

    @field_validator("members")
    @classmethod
    def _members_are_known(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in MEMBERS:
                raise ValueError(f"there is no member {name!r}: {nearest(name, MEMBERS)}")
        return value

    @field_validator("lengths", "batch_sizes")
    @classmethod
    def _each_once_and_rising(cls, value: list[int]) -> list[int]:
        return sorted(set(value))

    @model_validator(mode="before")
    @classmethod
    def _a_file_is_the_data(cls, values: object) -> object:
        return values | {"data": "files"} if isinstance(values, dict) and values.get("dev_file") else values

    @model_validator(mode="after")
    def _parts_fit(self) -> "ParityConfig":
        if self.data == "files" and not self.dev_file and not self.golden:
            raise ValueError(
                "data = files needs dev_file=FILE, SQuAD v1.1 as JSON (a golden folder has its inputs already)"
            )
        if self.record:
            contrary = {"golden": self.golden, "members": self.members, "planted_layer": self.planted_layer >= 0}
            for name in (name for name, value in contrary.items() if value):
                raise ValueError(f"record = true computes no member and starts its own golden folder: omit {name}")
        return self

    def check_whole(self) -> None:
        """Raise ``UserError`` also for a member that the backend does not have: it would silently be left out."""
        super().check_whole()
        chosen(self)

    @property
    def reference_backend(self) -> str:
        return self.backend if self.record else self.reference

    def expected_work(self) -> str:
        """Say what will be computed and compared."""
        names = [] if self.record else [member.name for member in chosen(self)]
        against = f"the recording in {Path(self.golden).name}" * bool(self.golden)
        against = against or f"eager attention in fp32 on {self.reference_backend}"
        who = f"compares {', '.join(names)} of {self.backend} with" if names else "records"
        count = len(self.lengths) * len(self.batch_sizes)
        parts = [f"{count} inputs of {self.data} from {self.lengths[0]} to {self.lengths[-1]} tokens"]
        parts += [f"{self.train_steps} training steps"] * bool(self.train_steps)
        parts += [f"{self.dev_questions} dev questions"] * bool(self.dev_questions)
        parts += [f"{self.latency_runs} timed passes"] * bool(self.latency_runs and names)
        what = f"{self.model} ({self.init} weights), {', '.join(parts)}"
        return f"{who} {against}: {what}, beside an fp64 reference on the CPU"

    def work(self) -> dict[str, Any]:
        """Return the fields that change the work; of a golden folder its name, not where it lies."""
        return super().work() | {"golden": Path(self.golden).name}
