"""Parameters of the SQuAD benchmark. The defaults are those of the smoke tier."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from benchlib.config.schema import EMBEDDED_MODEL, BaseConfig, Share
from benchlib.core.errors import UserError

EMBEDDED_LEARNING_RATE, BERT_LEARNING_RATE = 1e-3, 3e-5  # a tiny encoder needs larger steps than BERT


class SquadConfig(BaseConfig):
    """BERT fine-tuning on SQuAD v1.1.

    The global batch is ``batch_size * accumulation * world_size`` samples; samples are features, windows of at most
    ``max_length`` tokens, of which a long paragraph gives several.
    """

    PATHS: ClassVar[dict[str, bool]] = {"train_file": True, "eval_file": True, "resume": True, "model": False}
    ASIDE: ClassVar[tuple[str, ...]] = ("reference_f1", "checkpoint_every", "resume")
    FOLLOWS: ClassVar[dict[str, str]] = {**BaseConfig.FOLLOWS, "data": "train_file", "learning_rate": "model"}
    GONE: ClassVar[dict[str, str]] = {
        "fast_dropout": "dropout is torch's own on every device; leave it out",
        "bf16_ranks": "all ranks compute in one precision: set precision",
        "planted_drift": "set planted_drift_step, after which planted_work holds in reverse order",
    }

    benchmark: Literal["squad"] = "squad"

    data: Literal["minisquad", "squad", "files"] = Field(
        "minisquad", description="generated, rajpurkar/squad, or files"
    )
    train_file: str = Field("", description="SQuAD v1.1 JSON file to train on; sets data=files")
    eval_file: str = Field("", description="SQuAD v1.1 JSON file to evaluate on; sets data=files")
    train_questions: int = Field(160, ge=0, description="questions to train on; 0: all that the source has")
    eval_questions: int = Field(64, ge=0, description="questions to evaluate on; 0: all that the source has")

    model: str = Field(
        EMBEDDED_MODEL, min_length=1, description="hub name, local folder, or tiny: the embedded encoder"
    )
    init: Literal["pretrained", "random"] = Field("pretrained", description="weights to start from")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation of transformers")
    attention_dropout: float = Field(
        -1.0, ge=-1, lt=1, description="dropout of the attention weights; -1: the model's own"
    )
    hidden_dropout: float = Field(-1.0, ge=-1, lt=1, description="dropout of the hidden states; -1: the model's own")

    max_length: int = Field(384, ge=16, le=8192, description="tokens per window: question and part of the context")
    doc_stride: int = Field(128, ge=0, le=8192, description="tokens shared by neighbouring windows")

    engine: Literal["native", "compiled", "trainer"] = Field(
        "native", description="benchlib's loop, the same with its passes in XLA, or transformers' Trainer"
    )
    trainer_padding: Literal["max_length", "longest"] = Field("max_length", description="padding with engine=trainer")
    epochs: float = Field(1.0, gt=0, le=1000, description="passes over the training features")
    max_steps: int = Field(0, ge=0, description="maximum optimizer steps; 0: limited by the budget only")
    batch_size: int = Field(8, ge=1, le=65536, description="samples per rank and micro-batch")
    accumulation: int = Field(1, ge=1, le=65536, description="micro-batches per optimizer step")
    learning_rate: float = Field(BERT_LEARNING_RATE, gt=0, le=1, description="peak of the schedule; of tiny 1e-3")
    warmup_ratio: Share = Field(0.1, ge=0, lt=1, description="fraction of the steps in which the learning rate rises")
    weight_decay: float = Field(0.01, ge=0, le=1, description="weight decay of AdamW; not applied to biases and norms")
    max_grad_norm: float = Field(1.0, ge=0, description="gradient norm limit; 0: no clipping")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="of matrix products; weights are fp32")
    compile: bool = Field(False, description="torch.compile the model")
    fused_optimizer: bool = Field(True, description="use AdamW's fused kernel where the device has one")
    bucket_cap_mb: float = Field(25.0, gt=0, le=4096, description="gradient bucket size in MiB")
    checkpoint_every: int = Field(0, ge=-1, description="steps between checkpoints; 0: only at the end, -1: none")
    resume: str = Field("", description="folder of an interrupted run to continue from its last checkpoint")

    balance: Literal["off", "auto"] = Field("off", description="split of the global batch: even, or by speed")
    memory_limits_gb: list[Annotated[float, Field(gt=0)]] = Field(
        [], description="what a split may fill, by rank in GB; none: what its device has"
    )
    planted_work: list[PositiveInt] = Field([], description="how often each rank does its work, of which it counts one")
    planted_drift_step: int = Field(0, ge=0, description="steps before planted_work is turned around; 0: never")

    n_best: int = Field(20, ge=1, le=1000, description="start and end positions considered for a span")
    max_answer_tokens: int = Field(30, ge=1, le=512, description="longest answer, in tokens")

    target_f1: float | None = Field(None, ge=0, le=100, description="F1 to reach on the whole of SQuAD v1.1")
    target_f1_embedded: float | None = Field(
        None, ge=0, le=100, description="F1 of the stand-in on generated questions"
    )
    reference_f1: float | None = Field(None, ge=0, le=100, description="published F1 to compare with")
    target_loss: float | None = Field(
        None, gt=0, description="final loss to compare with on the whole of SQuAD v1.1; informs"
    )
    target_allreduce_gbps: float | None = Field(None, gt=0, description="bus bandwidth of the gradients, in Gbps")
    target_samples_per_s: float | None = Field(None, gt=0, description="training throughput over all ranks")
    target_minutes: float | None = Field(
        None, gt=0, description="limit of the whole training's time, in minutes; none: 45 for BERT-base, as information"
    )
    target_memory_gb: float | None = Field(None, gt=0, description="limit of a rank's peak device memory, in GB")

    @model_validator(mode="before")
    @classmethod
    def _some_follow_from_others(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("train_file") or values.get("eval_file"):
            if not (values.get("train_file") and values.get("eval_file")):
                raise ValueError("train_file and eval_file go together: set both")
            values = values | {"data": "files"}
        embedded = values.get("model", EMBEDDED_MODEL) == EMBEDDED_MODEL
        return {"learning_rate": EMBEDDED_LEARNING_RATE} | values if embedded else values

    @model_validator(mode="after")
    def _parts_fit(self) -> "SquadConfig":
        if self.data == "files" and not self.train_file:
            raise ValueError("data = files needs train_file=FILE and eval_file=FILE")
        if self.data == "minisquad" and not (self.train_questions and self.eval_questions):
            raise ValueError("data = minisquad is generated: set train_questions and eval_questions to 1 or more")
        if self.doc_stride >= self.max_length - 3:
            most = self.max_length - 4
            raise ValueError(f"doc_stride = {self.doc_stride}, so that windows never advance: set {most} or less")
        used = ["balance = auto"] * (self.balance != "off")
        used += [f"{name} = {','.join(map(str, getattr(self, name)))}" for name in PER_RANK if getattr(self, name)]
        if self.engine != "native" and used:
            raise ValueError(f"{used[0]} with engine = {self.engine}, whose ranks share evenly: set engine=native")
        if self.memory_limits_gb and self.balance == "off":
            raise ValueError(f"{used[0]} limits what a split gives to a rank: set balance=auto")
        if self.planted_drift_step and not self.planted_work:
            raise ValueError("planted_drift_step turns the order of planted_work around: set both")
        if self.engine == "compiled":
            if self.precision != "fp32" or self.compile:
                raise ValueError("engine = compiled trains in fp32 by XLA: set precision=fp32 and compile=false")
            for name in ("attention_dropout", "hidden_dropout"):
                if getattr(self, name) > 0:
                    raise ValueError(f"{name} = {getattr(self, name):g}: engine = compiled trains without: set 0")
        if self.engine == "trainer" and self.resume:
            raise ValueError("resume needs engine=native: the Trainer's checkpoints are pickles, which are not read")
        return self

    def check_whole(self) -> None:
        """Raise ``UserError`` also for a precision that the backend does not have, and for lists of other ranks than these."""
        super().check_whole()
        for name in PER_RANK:
            if (count := len(getattr(self, name))) not in (0, self.world_size):
                raise UserError(f"{name} has {count} numbers for {self.world_size} ranks: give one for each rank")
        if self.backend == "cpu" and self.precision == "fp16":
            raise UserError("precision = 'fp16': a CPU has no fast fp16; use bf16 or fp32")
        if self.backend != "cpu" and self.engine == "compiled":
            raise UserError(f"engine = compiled trains on CPUs: use backend cpu, or engine=native on {self.backend}")

    def check_precision(self, lacks: Mapping[str, str]) -> None:
        if self.precision in lacks:
            raise UserError(f"precision = {self.precision!r}: {lacks[self.precision]}")

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    def work_of(self, rank: int, step: int = 0) -> int:
        """Return how often a rank does the work of a step, numbered from 0: more than once for an injected slow rank."""
        turned = self.planted_drift_step and step >= self.planted_drift_step
        times = self.planted_work[::-1] if turned else self.planted_work
        return times[rank] if times else 1

    def scope(self) -> str:
        """Return the suffix of the names of speed metrics: '' for a real model on SQuAD, else what stands in for it."""
        return ("_minisquad" if self.data == "minisquad" else "") + ("_tiny" if self.model == EMBEDDED_MODEL else "")

    def quality_scope(self) -> str:
        """Return the suffix of the names of loss and F1 of a whole training; '' only on the whole of SQuAD v1.1."""
        shortened = self.data == "squad" and (self.train_questions or self.eval_questions)
        data = {"minisquad": "_minisquad", "files": "_files", "squad": "_subset" if shortened else ""}[self.data]
        tiny = "_tiny" if self.model == EMBEDDED_MODEL else ""
        return data + tiny + ("_random" if self.init == "random" else "")

    def expected_work(self) -> str:
        """Say what will be trained and evaluated; windows are known only once the text is tokenised."""
        counts = [f"{count:,}" if count else "all" for count in (self.train_questions, self.eval_questions)]
        cap = f", at most {self.max_steps:,} steps" if self.max_steps else ""
        return (
            f"{self.engine} fine-tunes {self.model} ({self.init} weights, {self.precision}) on {counts[0]} questions of "
            f"{self.data} for {self.epochs:g} epoch{'s' * (self.epochs != 1)}, {self.global_batch} samples a step{cap}; "
            f"evaluates {counts[1]} questions; cut to fit the budget where the measured speed asks for it"
        )


PER_RANK = ("memory_limits_gb", "planted_work")  # lists with a number for each rank
