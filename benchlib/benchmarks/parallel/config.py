"""Parameters of the parallelism benchmark: the model, the ways of spreading it, how they are run and proved."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from benchlib.benchmarks.parallel.shapes import MODELS, SCHEDULES, STRATEGIES, Job, Layout, Shape, shape_of
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import UserError
from benchlib.core.text import counted

FEW = ("single", "data", "sharded_direct", "tensor", "pipeline")
COVERAGE: dict[str, tuple[str, ...]] = {"few": FEW, "most": (*FEW, "sharded", "sequence"), "all": tuple(STRATEGIES)}


class ParallelConfig(BaseConfig):
    """One model, spread over the ranks in several ways that are proved and timed one after the other."""

    ASIDE: ClassVar[tuple[str, ...]] = ("find_max_batch",)
    LATER: ClassVar[dict[str, Any]] = {"fused_loss": False}
    benchmark: Literal["parallel"] = "parallel"

    model: str = Field(
        "tiny",
        description=f"shape of a decoder or encoder: {', '.join(MODELS)}, a file of it or a folder of transformers",
    )
    untie: bool = Field(False, description="give the output layer weights of its own, not those of the embedding")

    strategies: list[Literal[tuple(STRATEGIES)]] = Field(  # type: ignore[valid-type]
        [], description=f"{', '.join(STRATEGIES)}; empty: by coverage"
    )
    coverage: Literal["few", "most", "all"] = Field("all", description="which of the strategies that fit are taken")
    schedules: list[Literal[tuple(SCHEDULES)]] = Field(  # type: ignore[valid-type]
        ["1f1b"], min_length=1, description=f"{', '.join(SCHEDULES)}; hybrids: the first"
    )
    data: int = Field(0, ge=0, le=65536, description="copies in hybrids; 0: what the other degrees leave")
    tensor: int = Field(2, ge=1, le=1024, description="tensor-parallel ranks in hybrids")
    pipeline: int = Field(2, ge=1, le=1024, description="pipeline stages in hybrids")
    shard: int = Field(2, ge=1, le=65536, description="ranks that share a copy in hybrid_sharded")
    scaling: Literal["", "strong", "weak", "both"] = Field("", description="fewer ranks, too; strong: at one batch")

    batch_size: int = Field(8, ge=1, le=1048576, description="samples of a step, all ranks together")
    seq_len: int = Field(0, ge=0, le=1048576, description="tokens of a sample; 0: all places, at most 512")
    micro_batches: int = Field(4, ge=1, le=4096, description="of a pipeline's step")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of matrix products; weights are fp32")
    checkpointing: bool = Field(False, description="compute activations again on the way back instead of keeping them")
    compile: bool = Field(False, description="torch.compile each layer")
    fused_loss: bool = Field(
        False, description="loss in one pass: a Triton kernel on GPUs, torch's operations elsewhere"
    )
    learning_rate: float = Field(1e-3, gt=0, le=1, description="of AdamW, the same in every step")
    warmup: int = Field(1, ge=1, le=1000, description="steps of each strategy that are not counted")
    steps: int = Field(5, ge=1, le=100000, description="counted steps of each strategy")
    prove: bool = Field(True, description="first compare every strategy with one device, on a narrow model")

    memory_gb: float = Field(0.0, ge=0, description="what a rank may use, in GB (1e9 bytes); 0: what is free")
    find_max_batch: bool = Field(
        False, description="also find the largest batch of each strategy, by trials within memory_gb"
    )
    machine: str = Field("", description="with --dry-run: a machine of params/machines; '': this one")
    planted: Literal["", "data", "rank", "communication"] = Field("", description="what planted_slowdown slows")

    @field_validator("model")
    @classmethod
    def _is_model(cls, value: str) -> str:
        """Return a known name, or the absolute path of one's own, since ranks work in another folder."""
        try:
            shape_of(value)
        except UserError as error:
            raise ValueError(str(error)) from None
        return value if value in MODELS else str(Path(value).expanduser().resolve())

    @model_validator(mode="after")
    def _parts_fit(self) -> "ParallelConfig":
        if self.seq_len > (most := self.shape.positions):
            raise ValueError(f"seq_len = {self.seq_len:,} is more than the places of {self.model}: set seq_len={most}")
        if self.planted and not self.planted_slowdown:
            raise ValueError(f"planted = {self.planted} without planted_slowdown: set planted_slowdown=1, too")
        if self.planted == "communication" and "data" not in self.chosen:
            raise ValueError("planted = communication slows the exchange of strategy data: add it to strategies")
        if self.world_size > 1:  # one may stand for a number that the machine decides
            self._named_fit()
        return self

    def _named_fit(self) -> None:
        for name, schedule in self.ways(() if self.machine else self.strategies):  # a machine has ranks of its own
            self.job(name, schedule, self.world_size)

    def check_whole(self) -> None:
        """Raise ``UserError`` also where a named strategy does not fit the machine's number of ranks."""
        super().check_whole()
        self._named_fit()

    def check_start(self) -> None:
        if self.machine:
            raise UserError(f"machine = {self.machine} is for --dry-run: nothing runs on a machine that is not here")

    @property
    def chosen(self) -> Sequence[str]:
        return self.strategies or COVERAGE[self.coverage]

    @property
    def shape(self) -> Shape:
        shape = shape_of(self.model)
        return replace(shape, tied=shape.tied and not self.untie)

    def ways(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Return strategies with the schedules that they run with: '' without a pipeline, of a hybrid the first."""
        piped = {name: self.schedules if name == "pipeline" else self.schedules[:1] for name in names}
        own = {name: piped[name] if "pipeline" in STRATEGIES[name] else [""] for name in piped}
        return [(name, schedule) for name, schedules in own.items() for schedule in schedules]

    def layout(self, strategy: str, world: int) -> Layout:
        """Return the degrees of a strategy on ``world`` ranks; ``UserError`` where their product is another number."""
        axes = STRATEGIES[strategy]
        if len(axes) < 2:
            return Layout(**dict.fromkeys(axes, world))
        inner = {axis: int(getattr(self, axis)) for axis in axes[1:]}
        degrees = {"data": self.data or max(1, world // math.prod(inner.values())), **inner}
        if math.prod(degrees.values()) != world:
            left, fitting = world, list[str]()
            for axis, degree in inner.items():
                near = _nearest(degree, lambda number, whole=left: whole % number == 0)  # type: ignore[misc]
                left, fitting = left // near, [*fitting, f"{axis}={near}"]
            text = " × ".join(f"{axis}({degree})" for axis, degree in degrees.items())
            text = f"{strategy}: {text} = {math.prod(degrees.values())} but world size is {world}"
            raise UserError(f"{text}: set {','.join([f'data={left}', *fitting])}")
        return Layout(**dict(zip(axes, degrees.values(), strict=True)))

    def job(
        self, strategy: str = "single", schedule: str = "", world: int = 1, batch: int = 0, scaling: str = ""
    ) -> Job:
        """Return a strategy on ``world`` ranks; ``UserError``, with what fits, where it does not. ``batch`` 0: own."""
        if STRATEGIES[strategy] and world < 2:
            raise UserError(f"{strategy} spreads a model over ranks and there is one: set nproc=2 or more")
        layout, seq = self.layout(strategy, world), self.seq_len or min(self.shape.positions, 512)
        shape = self.shape.padded(layout.tensor)
        names = ("precision", "checkpointing", "compile", "fused_loss", "learning_rate", "seed")
        same = {name: getattr(self, name) for name in names} | {"micro_batches": self.micro_batches if schedule else 1}
        job = Job(shape, strategy, layout, schedule, batch or self.batch_size, seq, scaling=scaling, **same)
        for fault in _faults(job):
            raise UserError(f"{strategy} on {world} ranks: {fault}")
        return job

    def expected_work(self) -> str:
        """Say what will be trained in which ways, and what a machine is estimated to need for it."""
        from benchlib.benchmarks.parallel.estimate import expected

        ways = ", ".join(self.strategies) or f"what fits of {', '.join(self.chosen)}"
        proofs = "each proved against one device on a narrow model, then " if self.prove else ""
        return (
            f"{self.model} ({self.shape.parameters:,} parameters) on {counted(self.world_size, 'rank')} by {ways}; "
            f"{proofs}{self.warmup} + {self.steps} steps of {self.batch_size:,} samples each{expected(self)}"
        )


def _faults(job: Job) -> Iterator[str]:
    """Yield why a job does not fit, each with a choice that does."""
    axes, shape, tensor, copies = STRATEGIES[job.strategy], job.shape, job.layout.tensor, job.layout.feeds
    if len(axes) == 2 and getattr(job.layout, axes[0]) == 1:
        yield f"{job.layout} leaves one copy: set nproc={2 * job.layout.world}"
    if uneven := shape.uneven(tensor):
        others = _models(lambda other: not other.uneven(tensor))
        yield f"tensor = {tensor} does not divide {uneven} of {shape.name}: {others}"
    if shape.tied and (tensor > 1 or job.layout.pipeline > 1):
        yield f"output layer and embedding of {shape.name}, put apart here, share weights: set untie=true"
    if job.stages > shape.layers:
        deeper = _models(lambda other: other.layers >= job.stages)
        yield f"{job.stages} stages ({job.schedule}) for {shape.layers} layers of {shape.name}: {deeper}"
    # Ranks with several stages take micro-batches by the group.
    group = job.layout.pipeline if job.rank_stages > 1 else 1
    samples, whole = job.batch // copies, copies * group
    parts = {"sequence": tensor, "context": 2 * job.layout.context}.get(job.strategy, 1)
    rules: list[tuple[str, int, str, Callable[[int], bool]]] = [
        ("batch_size", job.batch, f"a multiple of {whole}", lambda n: n % whole == 0),
        ("micro_batches", job.micro_batches, f"a divisor of {samples}", lambda n: samples % n == 0),
        ("micro_batches", job.micro_batches, f"a multiple of {group}", lambda n: samples % n == n % group == 0),
        ("seq_len", job.seq, f"a multiple of {parts}", lambda n: n % parts == 0),
    ]
    for name, value, rule, fits in rules:
        if not fits(value):
            yield f"{name} = {value:,} has to be {rule}: set {name}={_nearest(value, fits)}"


def _models(fit: Callable[[Shape], bool]) -> str:
    return f"set model to one of {', '.join(name for name, shape in MODELS.items() if fit(shape))}, or fewer ranks"


def _nearest(value: int, fits: Callable[[int], bool]) -> int:
    """Return the number above 0 that fits and is nearest to ``value``."""
    return next(n for step in itertools.count() for n in (value - step, value + step) if n > 0 and fits(n))
