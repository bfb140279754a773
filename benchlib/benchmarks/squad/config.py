"""Parameters of the SQuAD benchmark. The defaults are those of the smoke tier."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from benchlib.benchmarks.squad import shares
from benchlib.config.schema import EMBEDDED_MODEL, BaseConfig
from benchlib.core.errors import UserError

EMBEDDED_LEARNING_RATE, BERT_LEARNING_RATE = 1e-3, 3e-5  # a tiny encoder needs larger steps than BERT


class SquadConfig(BaseConfig):
    """BERT fine-tuning on SQuAD v1.1.

    The global batch is ``batch_size * accumulation * world_size`` samples; samples are features, windows of at most
    ``max_length`` tokens, of which a long paragraph gives several.
    """

    PATHS: ClassVar[dict[str, bool]] = {
        "train_file": True, "eval_file": True, "resume": True, "model": False, "balance": False,
    }  # fmt: skip
    AMOUNTS: ClassVar[tuple[str, ...]] = ("f1",)
    FOLLOWS: ClassVar[dict[str, str]] = {**BaseConfig.FOLLOWS, "data": "train_file", "learning_rate": "model"}

    benchmark: Literal["squad"] = "squad"

    data: Literal["minisquad", "squad", "files"] = Field(
        "minisquad", description="embedded generator, rajpurkar/squad, or train_file and eval_file"
    )
    train_file: str = Field("", description="SQuAD v1.1 JSON file to train on; sets data=files")
    eval_file: str = Field("", description="SQuAD v1.1 JSON file to evaluate on; sets data=files")
    train_questions: int = Field(160, ge=0, description="questions to train on; 0: all that the source has")
    eval_questions: int = Field(64, ge=0, description="questions to evaluate on; 0: all that the source has")

    model: str = Field(
        EMBEDDED_MODEL, min_length=1, description="hub name, local folder, or tiny: the embedded encoder"
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="start from the model's weights or from random ones"
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation of transformers")
    attention_dropout: float = Field(
        -1.0, ge=-1, lt=1, description="dropout rate of the attention weights; -1: the model's own"
    )
    hidden_dropout: float = Field(
        -1.0, ge=-1, lt=1, description="dropout rate of the hidden states; -1: the model's own"
    )

    max_length: int = Field(384, ge=16, le=8192, description="tokens per window: question and part of the context")
    doc_stride: int = Field(128, ge=0, le=8192, description="tokens shared by neighbouring windows")

    engine: Literal["native", "compiled", "trainer"] = Field(
        "native",
        description="benchlib's loop, the same with forward and backward pass in XLA, or transformers' Trainer",
    )
    trainer_padding: Literal["max_length", "longest"] = Field("max_length", description="padding with engine=trainer")
    epochs: float = Field(1.0, gt=0, le=1000, description="passes over the training features")
    max_steps: int = Field(0, ge=0, description="maximum optimizer steps; 0: limited by the budget only")
    batch_size: int = Field(8, ge=1, le=65536, description="samples per rank and micro-batch")
    accumulation: int = Field(1, ge=1, le=65536, description="micro-batches per optimizer step")
    learning_rate: float = Field(
        BERT_LEARNING_RATE, gt=0, le=1, description="peak of the schedule; the embedded model defaults to 1e-3"
    )
    warmup_ratio: float = Field(0.1, ge=0, lt=1, description="fraction of the steps in which the learning rate rises")
    weight_decay: float = Field(0.01, ge=0, le=1, description="weight decay of AdamW; not applied to biases and norms")
    max_grad_norm: float = Field(1.0, ge=0, description="gradient norm limit; 0: no clipping")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="precision of matrix products; weights stay fp32"
    )
    compile: bool = Field(False, description="torch.compile the model")
    fused_optimizer: bool = Field(True, description="use AdamW's fused kernel where the device has one")
    fast_dropout: bool = Field(
        True, description="with engine=native on a CPU: draw dropout masks with a faster generator"
    )
    bucket_cap_mb: float = Field(25.0, gt=0, le=4096, description="gradient bucket size in MiB")
    checkpoint_every: int = Field(
        0, ge=-1, description="optimizer steps between checkpoints; 0: only at the end, -1: none"
    )
    resume: str = Field("", description="folder of an interrupted run to continue from its last checkpoint")

    balance: str = Field(
        "off",
        min_length=1,
        description="split of the global batch: off (even), auto (by speed), or an earlier run's plan",
    )
    memory_limits_gb: list[Annotated[float, Field(gt=0)]] = Field(
        [], description="memory that a split may fill, of each rank in GB; none: what its device has"
    )
    bf16_ranks: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="ranks that compute in bf16 beside the others in fp32"
    )
    planted_work: list[PositiveInt] = Field(
        [], description="how often each rank does its work, of which it counts one: slow ranks on purpose"
    )
    planted_drift: list[PositiveInt] = Field([], description="the same after planted_drift_step steps")
    planted_drift_step: int = Field(0, ge=0, description="optimizer steps before planted_drift holds")

    n_best: int = Field(20, ge=1, le=1000, description="start and end positions considered for a span")
    max_answer_tokens: int = Field(30, ge=1, le=512, description="longest answer, in tokens")

    target_f1: float | None = Field(None, ge=0, le=100, description="F1 to reach on the whole of SQuAD v1.1")
    target_f1_embedded: float | None = Field(
        None, ge=0, le=100, description="F1 of the stand-in on its generated questions; not the target of BERT"
    )
    reference_f1: float | None = Field(None, ge=0, le=100, description="published F1 to compare with")
    target_loss: float | None = Field(
        None, gt=0, description="limit of the final smoothed loss on the whole of SQuAD v1.1"
    )
    target_allreduce_gbps: float | None = Field(
        None, gt=0, description="bus bandwidth of the gradient all-reduce, in Gbps"
    )
    target_samples_per_s: float | None = Field(None, gt=0, description="training throughput over all ranks")
    target_memory_gb: float | None = Field(None, gt=0, description="limit of a rank's peak device memory, in GB")

    @model_validator(mode="before")
    @classmethod
    def _files_are_the_data(cls, values: object) -> object:
        if isinstance(values, dict) and (values.get("train_file") or values.get("eval_file")):
            if not (values.get("train_file") and values.get("eval_file")):
                raise ValueError("train_file and eval_file go together: set both")
            values = values | {"data": "files"}
        return values

    @model_validator(mode="before")
    @classmethod
    def _step_size_suits_the_model(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("model", EMBEDDED_MODEL) == EMBEDDED_MODEL:
            return {"learning_rate": EMBEDDED_LEARNING_RATE} | values
        return values

    @model_validator(mode="after")
    def _parts_fit(self) -> "SquadConfig":
        if self.data == "files" and not self.train_file:
            raise ValueError("data = files needs train_file=FILE and eval_file=FILE")
        if self.data == "minisquad" and not (self.train_questions and self.eval_questions):
            raise ValueError("data = minisquad is generated: set train_questions and eval_questions to 1 or more")
        if self.doc_stride >= self.max_length - 3:
            raise ValueError(
                f"doc_stride = {self.doc_stride} must be smaller than max_length - 3 = {self.max_length - 3}, else windows never advance"
            )
        if self.engine == "compiled":
            self._for_xla()
        return self

    @model_validator(mode="after")
    def _unlike_ranks_need_the_own_loop(self) -> "SquadConfig":
        names = ("memory_limits_gb", "bf16_ranks", "planted_work", "planted_drift")
        used = [f"balance = {self.balance}"] * (self.balance != "off")
        used += [f"{name} = {','.join(map(str, value))}" for name in names if (value := getattr(self, name))]
        if self.engine != "native" and used:
            raise ValueError(
                f"{used[0]} with engine = {self.engine}, which gives every rank the same work: set engine=native"
            )
        if self.memory_limits_gb and self.balance == "off":
            raise ValueError(f"{used[0]} limits what a split gives to a rank: set balance=auto")
        if self.bf16_ranks and self.precision != "fp32":
            raise ValueError(
                f"{used[-1]} with precision = {self.precision}: the other ranks compute in fp32, leave it out"
            )
        if bool(self.planted_drift) != bool(self.planted_drift_step):
            raise ValueError("planted_drift and planted_drift_step go together: set both")
        return self

    def _for_xla(self) -> None:
        if self.precision != "fp32" or self.compile:
            raise ValueError("engine = compiled trains in fp32 by XLA: set precision=fp32 and compile=false")
        for name in ("attention_dropout", "hidden_dropout"):
            if getattr(self, name) > 0:
                raise ValueError(
                    f"{name} = {getattr(self, name):g}: engine = compiled trains without dropout; set 0, or -1 and engine=native"
                )

    def check_whole(self) -> None:
        """Raise ``UserError`` also for a precision that the backend does not have, and for lists of other ranks than these."""
        super().check_whole()
        for name in ("memory_limits_gb", "planted_work", "planted_drift"):
            if (count := len(getattr(self, name))) not in (0, self.world_size):
                raise UserError(f"{name} has {count} numbers for {self.world_size} ranks: give one for each rank")
        if self.balance not in ("auto", "off"):
            plan = shares.load(self.balance)
            theirs, ours = (plan.global_batch, len(plan.ranks)), (self.global_batch, self.world_size)
            if theirs != ours:
                raise UserError(
                    f"balance = {self.balance}: its plan is for {theirs[0]} samples a step on {theirs[1]} ranks, this run has {ours[0]} on {ours[1]}: make one with balance=auto"
                )
        if beyond := [rank for rank in self.bf16_ranks if rank >= self.world_size]:
            raise UserError(f"bf16_ranks = {beyond[0]}: there are {self.world_size} ranks, numbered from 0")
        if self.backend == "cpu" and self.precision == "fp16":
            raise UserError("precision = 'fp16': a CPU has no fast fp16; use bf16 or fp32")
        if self.backend != "cpu" and self.engine == "compiled":
            raise UserError(f"engine = compiled trains on CPUs: use backend cpu, or engine=native on {self.backend}")

    def check_precision(self, lacks: Mapping[str, str]) -> None:
        """Raise ``UserError`` for a precision that the device does not support."""
        if self.precision in lacks:
            raise UserError(f"precision = {self.precision!r}: {lacks[self.precision]}")

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    def precision_of(self, rank: int) -> str:
        """Return the precision of a rank's matrix products."""
        return "bf16" if rank in self.bf16_ranks else self.precision

    def work_of(self, rank: int, step: int = 0) -> int:
        """Return how often a rank does the work of a step, numbered from 0: more than once where that was planted."""
        planted = self.planted_drift if self.planted_drift and step >= self.planted_drift_step else self.planted_work
        return planted[rank] if planted else 1

    def on_purpose(self) -> list[str]:
        """Say in sentences what was done to the ranks, for the report."""
        notes = []
        if self.planted_work or self.planted_drift:
            text = f"The ranks did their work {','.join(map(str, self.planted_work or [1] * self.world_size))} times on purpose"
            if self.planted_drift:
                text += f", {','.join(map(str, self.planted_drift))} times after {self.planted_drift_step} steps"
            notes.append(f"{text}, and counted it once: their speed is not the machine's.")
        if self.bf16_ranks:
            notes.append(f"Ranks {', '.join(map(str, self.bf16_ranks))} computed in bf16, the others in fp32.")
        if self.memory_limits_gb:
            limits = ", ".join(f"{limit:g}" for limit in self.memory_limits_gb)
            notes.append(f"The split kept to declared memory limits: {limits} GB.")
        return notes

    def scope(self) -> str:
        """Return the suffix of the names of speed metrics: '' for a real model on SQuAD, else what stands in for it."""
        return ("_minisquad" if self.data == "minisquad" else "") + ("_tiny" if self.model == EMBEDDED_MODEL else "")

    def quality_scope(self, epoch_share: float = 1.0) -> str:
        """Return the suffix of the names of loss and F1; '' only for a whole training on the whole of SQuAD v1.1.

        ``epoch_share`` is the share of the planned samples that the run saw, from 0 to 1.
        """
        shortened = self.data == "squad" and (self.train_questions or self.eval_questions)
        data = {"minisquad": "_minisquad", "files": "_files", "squad": "_subset" if shortened else ""}[self.data]
        tiny = "_tiny" if self.model == EMBEDDED_MODEL else ""
        random = "_random" if self.init == "random" else ""
        return data + tiny + random + ("_cut" if epoch_share < 1 else "")

    def expected_work(self) -> str:
        """Say what will be trained and evaluated; windows are known only once the text is tokenised."""
        counts = [f"{count:,}" if count else "all" for count in (self.train_questions, self.eval_questions)]
        steps = -(-self.train_questions // self.global_batch) if self.train_questions else 0
        least = f", at least {int(steps * self.epochs):,} steps" if steps else ""
        cap = f", at most {self.max_steps:,} steps" if self.max_steps else ""
        return (
            f"{self.engine} fine-tunes {self.model} ({self.init} weights, {self.precision}) on {counts[0]} questions of {self.data} for {self.epochs:g} epoch{'s' * (self.epochs != 1)}, "
            f"{self.global_batch} samples a step{least}{cap}; evaluates {counts[1]} questions; cut to fit the budget where the measured speed asks for it"
        )

    def work(self) -> dict[str, object]:
        """Return the fields that change the work; targets and the checkpoint schedule do not."""
        skip = {name for name in type(self).model_fields if name.startswith(("target_", "reference_"))}
        return {
            name: value for name, value in super().work().items() if name not in skip | {"checkpoint_every", "resume"}
        }
