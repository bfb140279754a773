"""Parameters of the parallelism benchmark: the model, the ways of spreading it, how they are run and proved."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from benchlib.benchmarks.parallel.shapes import MODELS, SCHEDULES, STRATEGIES, Job, Layout, Shape
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import UserError, nearest


def _known(names: Iterable[str], value: str) -> str:
    if value not in names:
        raise ValueError(f"{value!r} is unknown: {nearest(value, names)}")
    return value


Model = Annotated[str, AfterValidator(functools.partial(_known, MODELS))]
Name = Annotated[str, AfterValidator(functools.partial(_known, STRATEGIES))]
Schedule = Annotated[str, AfterValidator(functools.partial(_known, SCHEDULES))]
WIDTHS = ("hidden", "layers", "heads", "kv_heads", "ffn", "positions", "vocabulary")
FEW = ("single", "data", "sharded_direct", "tensor", "pipeline")
COVERAGE: dict[str, tuple[str, ...]] = {"few": FEW, "most": (*FEW, "sharded", "sequence"), "all": tuple(STRATEGIES)}


class ParallelConfig(BaseConfig):
    """One model, spread over the ranks in several ways that are proved and timed one after the other."""

    benchmark: Literal["parallel"] = "parallel"

    model: Model = Field("tiny", description=f"shape of a decoder or encoder: {', '.join(MODELS)}")
    untie: bool = Field(False, description="give the output layer weights of its own, not those of the embedding")

    strategies: list[Name] = Field([], description=f"{', '.join(STRATEGIES)}, which have to fit; empty: by coverage")
    coverage: Literal["few", "most", "all"] = Field("all", description="which of the strategies that fit are taken")
    schedules: list[Schedule] = Field(["1f1b"], min_length=1, description=f"{', '.join(SCHEDULES)}; hybrids: the first")
    data: int = Field(0, ge=0, le=65536, description="copies in hybrids; 0: what the other degrees leave")
    tensor: int = Field(2, ge=1, le=1024, description="tensor-parallel ranks in hybrids")
    pipeline: int = Field(2, ge=1, le=1024, description="pipeline stages in hybrids")
    shard: int = Field(2, ge=1, le=65536, description="ranks that share a copy in hybrid_sharded")
    scaling: Literal["", "strong", "weak", "both"] = Field(
        "", description="same batch of all, or of a rank, on fewer ranks"
    )

    batch_size: int = Field(8, ge=1, le=1048576, description="samples of a step, all ranks together")
    seq_len: int = Field(0, ge=0, le=1048576, description="tokens of a sample; 0: all places, at most 512")
    micro_batches: int = Field(4, ge=1, le=4096, description="of a pipeline's step")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of matrix products; weights are fp32")
    checkpointing: bool = Field(False, description="compute activations again on the way back instead of keeping them")
    compile: bool = Field(False, description="torch.compile each layer")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of activations that is dropped; the proofs drop none")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="of AdamW, the same in every step")
    warmup: int = Field(1, ge=1, le=1000, description="steps of each strategy that are not counted")
    steps: int = Field(5, ge=1, le=100000, description="counted steps of each strategy")
    prove: bool = Field(True, description="first compare every strategy with one device, on a narrow model")

    find_max_batch: bool = Field(False, description="also search the largest batch of one device, by trials")
    memory_gb: float = Field(0.0, ge=0, description="what a rank may use, in GB (1e9 bytes); 0: what is free")
    machine: str = Field("", description="with --dry-run: a machine of params/machines; '': this one")
    planted: Literal["", "data", "rank", "communication"] = Field(
        "", description="what planted_slowdown slows; '': steps"
    )

    GONE: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ["hidden", "layers", "heads", "kv_heads", "ffn", "positions", "vocabulary"],
            "set model, which has its widths",
        ),
        "suite": "a run has one model: set model, and start a run for each",
        "source": "tokens are random, at the same rates: leave it out",
    }

    @model_validator(mode="after")
    def _parts_fit(self) -> "ParallelConfig":
        if self.seq_len > (most := self.shape.positions):
            raise ValueError(f"seq_len = {self.seq_len:,} is more than the places of {self.model}: set seq_len={most}")
        if self.planted and not self.planted_slowdown:
            raise ValueError(f"planted = {self.planted} without planted_slowdown: set planted_slowdown=1, too")
        if self.planted == "communication" and "data" not in self.chosen:
            raise ValueError("planted = communication slows the exchange of strategy data: add it to strategies")
        if self.world_size > 1:
            self._named_fit()
        return self

    def _named_fit(self) -> None:
        if self.machine:  # whose ranks are not those of this one
            return
        for name, schedule in self.ways(self.strategies):
            if why := self.obstacle(name, schedule, self.world_size):
                raise UserError(why)

    def check_whole(self) -> None:
        """Raise ``UserError`` also where a named strategy does not fit the machine's number of ranks."""
        super().check_whole()
        self._named_fit()

    def check_start(self) -> None:
        """Raise ``UserError`` where the config is about another machine."""
        if self.machine:
            raise UserError(f"machine = {self.machine} is for --dry-run: nothing runs on a machine that is not here")

    @property
    def chosen(self) -> Sequence[str]:
        """The strategies to run: those that are named, else those of the coverage."""
        return self.strategies or COVERAGE[self.coverage]

    @property
    def shape(self) -> Shape:
        """The shape of the model."""
        shape = MODELS[self.model]
        return replace(shape, tied=shape.tied and not self.untie)

    def ways(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Return strategies with the schedules that they run with: '' without a pipeline, of a hybrid the first."""
        piped = {name: self.schedules if name == "pipeline" else self.schedules[:1] for name in names}
        own = {name: piped[name] if "pipeline" in STRATEGIES[name].axes else [""] for name in piped}
        return [(name, schedule) for name, schedules in own.items() for schedule in schedules]

    def layout(self, strategy: str, world: int) -> Layout:
        """Return the degrees of a strategy on ``world`` ranks. Raises ``ValueError`` where their product is another number."""
        axes = STRATEGIES[strategy].axes
        if len(axes) < 2:
            return Layout(**dict.fromkeys(axes, world))
        inner = {axis: getattr(self, axis) for axis in axes if axis != "data"}
        layout = Layout(data=self.data or max(1, world // math.prod(inner.values())), **inner)
        if layout.world != world:
            text = " × ".join(f"{axis}({getattr(layout, axis)})" for axis in ("data", *inner))
            near = _nearest_degrees(inner, world)
            raise ValueError(f"{strategy}: {text} = {layout.world} but world size is {world}: set {near}")
        return layout

    def job(
        self, strategy: str = "single", schedule: str = "", world: int = 1, batch: int = 0, scaling: str = ""
    ) -> Job:
        """Return a strategy on ``world`` ranks as a job; ``batch`` 0: the config's. Raises ``ValueError`` as ``layout``."""
        names = ("micro_batches", "precision", "checkpointing", "compile", "dropout", "learning_rate", "seed", "shard")
        layout, seq = self.layout(strategy, world), self.seq_len or min(self.shape.positions, 512)
        same = {name: getattr(self, name) for name in names}
        return Job(self.shape, strategy, layout, schedule, batch or self.batch_size, seq, scaling=scaling, **same)

    def obstacle(self, strategy: str, schedule: str, world: int, batch: int = 0) -> str:
        """Return why a strategy does not fit, with the nearest valid choice; '' where it does. ``batch`` 0: the config's."""
        axes, kind = STRATEGIES[strategy].axes, f"{strategy} on {world} ranks"
        if axes and world < 2:
            return f"{strategy} spreads a model over ranks and there is one: set nproc=2 or more"
        try:
            job = self.job(strategy, schedule, world, batch)
        except ValueError as error:
            return str(error)
        shape, layout, tensor = job.shape, job.layout, job.layout.tensor
        samples, micro = job.batch // layout.data, self.micro_batches
        if len(axes) == 2 and layout.data == 1:
            return f"{kind}: {layout} leaves one copy, {axes[1]} alone: set nproc={2 * world}, or take {axes[1]}"
        if strategy == "hybrid_sharded" and (world % self.shard or world == self.shard):
            fitting = _divisor(world, self.shard) if world > 3 else 2
            return f"{kind}: groups of shard = {self.shard} leave no copies: set shard={fitting} with nproc={max(4, world)}"
        if lacking := shape.lacks(tensor):
            others = _models(lambda other: not other.lacks(tensor))
            return f"{kind}: tensor = {tensor} does not divide {lacking} of {shape.name}: {others}"
        if shape.tied and (tensor > 1 or layout.pipeline > 1):
            return f"{kind}: output layer and embedding of {shape.name}, put apart here, share weights: set untie=true"
        if job.stages > shape.layers:
            deeper = _models(lambda other: other.layers >= job.stages)
            return f"{kind}: {job.stages} stages ({schedule}) for {shape.layers} layers of {shape.name}: {deeper}"
        if job.batch % layout.data:
            fitting = _multiple(job.batch, layout.data)
            return f"{kind}: data = {layout.data} does not divide batch_size = {job.batch}: set batch_size={fitting}"
        if layout.pipeline > 1 and samples % micro:
            fitting = _divisor(samples, micro)
            return f"{kind}: micro_batches = {micro} does not divide {samples} samples: set micro_batches={fitting}"
        if job.rank_stages > 1 and micro % layout.pipeline:
            fitting = _multiple(micro, layout.pipeline)
            return f"{kind}: micro_batches = {micro} is no multiple of {schedule}'s ranks: set micro_batches={fitting}"
        cuts = {"sequence": tensor, "context": 2 * layout.context}.get(strategy, 1)
        if job.seq % cuts:
            return f"{kind}: {cuts} parts do not divide seq_len = {job.seq:,}: set seq_len={_multiple(job.seq, cuts)}"
        return ""

    def expected_work(self) -> str:
        """Say what will be trained in which ways, and what a machine is estimated to need for it."""
        from benchlib.benchmarks.parallel.planning import expected

        ways = ", ".join(self.strategies) or f"what fits of {', '.join(self.chosen)}"
        proofs = "each proved against one device on a narrow model, then " if self.prove else ""
        return (
            f"{self.model} ({self.shape.parameters:,} parameters) on {self.world_size} rank{'s' * (self.world_size > 1)} "
            f"by {ways}; {proofs}{self.warmup} + {self.steps} steps of {self.batch_size:,} samples each{expected(self)}"
        )


def _models(fit: Callable[[Shape], bool]) -> str:
    return f"set model to one of {', '.join(name for name, shape in MODELS.items() if fit(shape))}, or fewer ranks"


def _divisor(whole: int, wanted: int) -> int:
    """Return the divisor of ``whole`` nearest to ``wanted``."""
    fitting = [number for number in range(1, whole + 1) if whole % number == 0]
    return min(fitting, key=lambda number: (abs(number - wanted), number))


def _multiple(value: int, of: int) -> int:
    """Return the multiple of ``of`` nearest to ``value``, at least ``of``."""
    return max(of, round(value / of) * of)


def _nearest_degrees(inner: dict[str, int], world: int) -> str:
    """Return degrees whose product is ``world``, as few changed as possible: the inner ones as near as they can be."""
    fitting = dict[str, int]()
    for axis, degree in inner.items():
        fitting[axis] = _divisor(world // math.prod(fitting.values()), degree)
    every = {"data": world // math.prod(fitting.values()), **fitting}
    return ",".join(f"{axis}={degree}" for axis, degree in every.items())
