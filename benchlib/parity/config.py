"""Parameters of the parity benchmark. The defaults are those of the smoke tier."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from benchlib.config import BaseConfig
from benchlib.squad.config import EMBEDDED_MODEL


class ParityConfig(BaseConfig):
    """The same weights and inputs on a reference and on every member of a backend."""

    PATHS: ClassVar[dict[str, bool]] = {"golden": True, "dev_file": True, "model": False}

    benchmark: Literal["parity"] = "parity"

    reference: Literal["cpu", "cuda", "rocm", "mps", "xpu", "tpu"] = Field(
        "cpu", description="backend that computes the reference, in fp32 with eager attention"
    )
    golden: str = Field("", description="folder recorded before, here or elsewhere, that is the reference instead")
    members: list[str] = Field([], description="ways to compute that are compared; empty: all of the backend")
    slow: bool = Field(False, description="also the members that compile or export the model, which take a minute each")
    keep: bool = Field(False, description="keep weights, gradients and activations in the run folder")

    model: str = Field(
        EMBEDDED_MODEL,
        min_length=1,
        description="hub name, local folder, tiny, or bert-base: its config, random weights",
    )
    init: Literal["auto", "pretrained", "random"] = Field(
        "auto", description="weights; auto: the model's own where they are at hand, else random ones"
    )
    data: Literal["minisquad", "squad", "files"] = Field(
        "minisquad", description="text of the inputs: embedded generator, rajpurkar/squad, or dev_file"
    )
    dev_file: str = Field("", description="SQuAD v1.1 JSON file with the inputs; sets data=files")
    lengths: list[PositiveInt] = Field([8, 32, 128], min_length=1, description="tokens of the inputs, padding included")
    batch_sizes: list[PositiveInt] = Field([1, 2, 4, 8], min_length=1, description="rows of the inputs")
    dev_questions: int = Field(32, ge=0, description="questions of the F1 difference; 0: none")
    train_steps: int = Field(20, ge=0, le=1000, description="steps of the loss curve; 0: none")
    train_batch: int = Field(4, ge=1, le=1024, description="samples of a training step")
    train_length: int = Field(64, ge=8, le=8192, description="tokens of a training sample")
    learning_rate: float = Field(5e-5, gt=0, le=1, description="AdamW's, constant, of the loss curve")
    repeats: int = Field(5, ge=2, le=1000, description="runs of one input that have to give the same bits")
    warmup: int = Field(10, ge=0, le=10000, description="forward passes before the timed ones")
    latency_runs: int = Field(100, ge=0, le=100000, description="timed forward passes at batch 1; 0: none")
    latency_length: int = Field(128, ge=1, le=8192, description="tokens of the timed input")
    attention_kernels: bool = Field(True, description="compare the attention kernels of the device side by side")
    member_timeout_s: float = Field(300.0, gt=0, description="seconds after which a member is ended and FAILs")
    planted_layer: int = Field(
        -1, ge=-1, le=1000, description="encoder layer whose output is changed on purpose in every candidate; -1: none"
    )
