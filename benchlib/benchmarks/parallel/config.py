"""Parameters of the parallelism benchmark: the model, the ways of spreading it, how they are run and proved."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from benchlib.benchmarks.parallel.shapes import MODELS, STAGES_PER_RANK, STRATEGIES, Layout, Shape
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import UserError

Name = Literal[
    "single", "data", "sharded", "sharded_direct", "hybrid_sharded", "tensor", "sequence", "context", "pipeline",
    "data_tensor", "sharded_tensor", "data_pipeline", "sharded_pipeline", "data_tensor_pipeline",
]  # fmt: skip
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Model = Literal[
    "tiny", "small", "medium", "large", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-1b", "llama-8b",
    "bert-base", "bert-large",
]  # fmt: skip
FEW = ("single", "data", "sharded_direct", "tensor", "pipeline")
COVERAGE: dict[str, tuple[str, ...]] = {"few": FEW, "most": (*FEW, "sharded", "sequence"), "all": tuple(STRATEGIES)}
PROOF_STEPS = 6  # of AdamW in fp64, after which losses and weights are compared with one device
WIDTHS = ("hidden", "layers", "heads", "kv_heads", "ffn", "positions", "vocabulary")


class ParallelConfig(BaseConfig):
    """One model, or a suite of them, spread over the ranks in several ways that are proved and timed one after the other."""

    benchmark: Literal["parallel"] = "parallel"

    model: Model = Field("tiny", description="preset of a decoder or encoder; its parameters are shown")
    suite: list[Model] = Field([], description="several models in one run and one report, instead of model")
    hidden: int = Field(0, ge=0, le=65536, description="width of hidden states; 0: the model's own, as in all widths")
    layers: int = Field(0, ge=0, le=1024, description="layers; 0: the model's own")
    heads: int = Field(0, ge=0, le=1024, description="attention heads; 0: the model's own")
    kv_heads: int = Field(0, ge=0, le=1024, description="heads of keys and values; 0: the model's own, or heads")
    ffn: int = Field(0, ge=0, le=262144, description="width within the feed-forward parts; 0: the model's own")
    positions: int = Field(0, ge=0, le=1048576, description="places that the model knows; 0: the model's own")
    vocabulary: int = Field(0, ge=0, le=2**31, description="tokens that there are; 0: the model's own")
    untie: bool = Field(False, description="give the output layer weights of its own, not those of the embedding")

    strategies: list[Name] = Field([], description="ways of spreading the model, which have to fit; empty: by coverage")
    coverage: Literal["few", "most", "all"] = Field(
        "all", description="where strategies is empty: of which ways those that fit are taken"
    )
    schedules: list[Schedule] = Field(["1f1b"], description="of pipelines: each for `pipeline`, the first for hybrids")
    data: int = Field(0, ge=0, le=65536, description="copies in hybrids; 0: what the other degrees leave")
    tensor: int = Field(0, ge=0, le=1024, description="tensor-parallel ranks in hybrids; 0: two")
    pipeline: int = Field(0, ge=0, le=1024, description="pipeline stages in hybrids; 0: two")
    shard: int = Field(0, ge=0, le=65536, description="ranks that share a copy in hybrid_sharded; 0: two")
    scaling: Literal["", "strong", "weak", "both"] = Field(
        "", description="also on 1, 2, 4 ... of the ranks: the same global batch, the same batch of a rank, or both"
    )

    batch_size: int = Field(8, ge=1, le=1048576, description="samples of a step, all ranks together")
    seq_len: int = Field(0, ge=0, le=1048576, description="tokens of a sample; 0: all places, at most 512")
    micro_batches: int = Field(4, ge=1, le=4096, description="of a pipeline's step")
    source: Literal["synthetic", "text"] = Field(
        "synthetic", description="tokens: random ones or bytes of the kit's own news"
    )
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
        "", description="what planted_slowdown slows: all of a step, its data, the last rank, DDP's exchange"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> "ParallelConfig":
        for shape in self.shapes:
            if shape.hidden % shape.heads:
                raise ValueError(
                    f"heads = {shape.heads} does not divide hidden = {shape.hidden}: set heads={_divisor(shape.hidden, shape.heads)}"
                )
            if shape.heads % shape.kv_heads:
                raise ValueError(
                    f"kv_heads = {shape.kv_heads} does not divide heads = {shape.heads}: set kv_heads={_divisor(shape.heads, shape.kv_heads)}"
                )
            if not shape.learned_positions and shape.hidden // shape.heads % 2:
                raise ValueError(
                    f"heads of {shape.hidden // shape.heads} values cannot be turned in pairs: set hidden={2 * shape.hidden}"
                )
            if self.seq_len > shape.positions:
                raise ValueError(
                    f"seq_len = {self.seq_len:,} is more than the {shape.positions:,} places of {shape.name}: set seq_len={shape.positions}"
                )
            if self.source == "text" and shape.vocabulary < 256:
                raise ValueError(f"source = text are bytes, vocabulary = {shape.vocabulary}: set vocabulary=256")
        if self.planted and not self.planted_slowdown:
            raise ValueError(f"planted = {self.planted} without planted_slowdown: set planted_slowdown=1, too")
        if self.planted == "communication" and "data" not in self.chosen:
            raise ValueError("planted = communication slows the exchange of strategy data: add it to strategies")
        if len(set(self.schedules)) < len(self.schedules) or not self.schedules:
            raise ValueError("schedules: name at least one, each once")
        if self.world_size > 1 and not self.machine:
            self._named_fit()
        return self

    def _named_fit(self) -> None:
        for shape in self.shapes:
            for name in self.strategies:
                for schedule in self.schedules_of(name):
                    if why := self.obstacle(name, schedule, shape, self.world_size):
                        raise UserError(why)

    def check_whole(self) -> None:
        """Raise ``UserError`` also where a named strategy does not fit the machine's number of ranks."""
        super().check_whole()
        if not self.machine:  # whose ranks are not those of this one
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
    def shapes(self) -> list[Shape]:
        """The shapes of the run's models, with the widths that are set."""
        return [self._shape(name) for name in self.suite or [self.model]]

    def _shape(self, name: str) -> Shape:
        shape = MODELS[name]
        given: dict[str, Any] = {width: getattr(self, width) for width in WIDTHS if getattr(self, width)}
        if "heads" in given and "kv_heads" not in given and shape.kv_heads == shape.heads:
            given["kv_heads"] = given["heads"]
        return replace(shape, **given, tied=shape.tied and not self.untie)

    def length(self, shape: Shape) -> int:
        """Tokens of a sample."""
        return self.seq_len or min(shape.positions, 512)

    def schedules_of(self, strategy: str) -> Sequence[str]:
        """The schedules that a strategy runs with; [''] where it has no pipeline."""
        if "pipeline" not in STRATEGIES[strategy].axes:
            return [""]
        return self.schedules if strategy == "pipeline" else self.schedules[:1]

    def layout(self, strategy: str, world: int) -> Layout:
        """Return the degrees of a strategy on ``world`` ranks. Raises ``ValueError`` where their product is another number."""
        axes = STRATEGIES[strategy].axes
        if len(axes) == 1:
            return Layout(**{axes[0]: world})
        if not axes:
            return Layout()
        inner = {axis: getattr(self, axis) or 2 for axis in axes if axis != "data"}
        layout = Layout(data=self.data or max(1, world // math.prod(inner.values())), **inner)
        if layout.world != world:
            text = " × ".join(f"{axis}({getattr(layout, axis)})" for axis in ("data", *inner))
            raise ValueError(
                f"{strategy}: {text} = {layout.world} but world size is {world}: set degrees whose product is {world}, "
                f"as in {_nearest_degrees(axes, layout, world)}"
            )
        return layout

    def obstacle(self, strategy: str, schedule: str, shape: Shape, world: int, batch: int = 0) -> str:
        """Return why a strategy does not fit, with the nearest valid choice; '' where it does. ``batch`` 0: the config's."""
        axes, kind = STRATEGIES[strategy].axes, f"{strategy} on {world} ranks"
        if axes and world < 2:
            return f"{strategy} spreads a model over ranks and there is one: set nproc=2 or more"
        try:
            layout = self.layout(strategy, world)
        except ValueError as error:
            return str(error)
        batch, tensor = batch or self.batch_size, layout.tensor
        if len(axes) == 2 and layout.data == 1:
            return f"{kind}: {layout} leaves one copy, {axes[1]} alone: set nproc={2 * world}, or take {axes[1]}"
        if strategy == "hybrid_sharded" and (world % (self.shard or 2) or world == (self.shard or 2)):
            fitting = _divisor(world, self.shard or 2) if world > 3 else 2
            return f"{kind}: groups of shard = {self.shard or 2} leave no copies: set shard={fitting} with nproc={max(4, world)}"
        for what in ("heads", "kv_heads", "ffn", "vocabulary"):
            if (value := getattr(shape, what)) % tensor:
                return f"{kind}: tensor = {tensor} does not divide {what} = {value:,} of {shape.name}: set {what}={_multiple(value, tensor)}"
        if shape.tied and (tensor > 1 or layout.pipeline > 1):
            return f"{kind}: {shape.name} shares its output layer's weights with the embedding, which this strategy puts apart: set untie=true"
        stages = layout.pipeline * STAGES_PER_RANK.get(schedule, 1)
        if stages > shape.layers:
            return f"{kind}: {stages} stages ({schedule}) for {shape.layers} layers of {shape.name}: set layers={stages}, or fewer stages"
        if batch % layout.data:
            return f"{kind}: data = {layout.data} does not divide batch_size = {batch}: set batch_size={_multiple(batch, layout.data)}"
        if layout.pipeline > 1 and batch // layout.data % self.micro_batches:
            return (
                f"{kind}: micro_batches = {self.micro_batches} does not divide the {batch // layout.data} samples of a pipeline: "
                f"set micro_batches={_divisor(batch // layout.data, self.micro_batches)}"
            )
        if schedule in ("interleaved", "zero_bubble") and self.micro_batches % layout.pipeline:
            return (
                f"{kind}: {schedule} takes a multiple of its {layout.pipeline} ranks as micro_batches, not {self.micro_batches}: "
                f"set micro_batches={_multiple(self.micro_batches, layout.pipeline)}"
            )
        length, parts = self.length(shape), {"sequence": tensor, "context": 2 * layout.context}.get(strategy, 1)
        if length % parts:
            return f"{kind}: {parts} parts do not divide seq_len = {length:,}: set seq_len={_multiple(length, parts)}"
        return ""

    @staticmethod
    def proof_shape(shape: Shape, layout: Layout) -> Shape:
        """Return a narrow shape of the same kind on which a layout is proved against one device."""
        heads = 2 * layout.tensor
        return replace(
            shape, hidden=8 * heads, heads=heads, kv_heads=heads if shape.kv_heads == shape.heads else layout.tensor,
            ffn=16 * heads, layers=2 * layout.pipeline, vocabulary=24 * layout.tensor, positions=8 * max(layout.tensor, layout.context),
        )  # fmt: skip

    def expected_work(self) -> str:
        """Say what will be trained in which ways."""
        from benchlib.benchmarks.parallel.planning import expected

        models = ", ".join(f"{shape.name} ({shape.parameters:,} parameters)" for shape in self.shapes)
        ways = ", ".join(self.strategies) or f"what fits of {', '.join(self.chosen)}"
        proofs = "each proved against one device on a narrow model, then " if self.prove else ""
        text = (
            f"{models} on {self.world_size} rank{'s' * (self.world_size > 1)} by {ways}; {proofs}{self.warmup} + {self.steps} steps of "
            f"{self.batch_size:,} samples each"
        )
        return text + expected(self)


def _divisor(whole: int, wanted: int) -> int:
    """Return the divisor of ``whole`` nearest to ``wanted``."""
    fitting = [number for number in range(1, whole + 1) if whole % number == 0]
    return min(fitting, key=lambda number: (abs(number - wanted), number))


def _multiple(value: int, of: int) -> int:
    """Return the multiple of ``of`` nearest to ``value``, at least ``of``."""
    return max(of, round(value / of) * of)


def _nearest_degrees(axes: Sequence[str], layout: Layout, world: int) -> str:
    """Return degrees whose product is ``world``, as few changed as possible: the inner ones as near as they can be."""
    left, words = world, []
    for axis in (axis for axis in axes if axis != "data"):
        degree = _divisor(left, getattr(layout, axis))
        left //= degree
        words.append(f"{axis}={degree}")
    return ",".join([f"data={left}", *words])
