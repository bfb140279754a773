"""Parameters of the encoder-decoder benchmark: the model and its sizes, the data and where they lie, the training."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from benchlib.config.schema import BaseConfig, Share
from benchlib.core.definitions import encoder_forward_flops

FULL = (3_750_000, 7_500_000)  # samples of the full size, and of twice as much
# 3.5 M, 52.7 M, 211 M and 2.85 G parameters. Any of the values can be set by itself.
FIELDS = ("d_model", "nhead", "encoder_layers", "decoder_layers", "dim_feedforward", "sequence", "batch_size")
SIZES: dict[str, tuple[int, ...]] = {
    "small": (128, 4, 3, 3, 512, 256, 128),
    "medium": (512, 8, 6, 6, 2048, 256, 128),
    "large": (768, 12, 12, 12, 3072, 256, 128),
    "xl": (2048, 32, 24, 24, 8192, 512, 8),
}
SWITCHES: dict[str, tuple[str, int]] = {"full": ("samples", FULL[1]), "single": ("nproc", 1)}
TRUE = ("true", "1", "yes", "on", "t", "y")  # the texts that pydantic reads as true


class Seq2seqConfig(BaseConfig):
    """Training of torch's ``nn.Transformer`` on pairs of synthetic token sequences.

    The effective batch is ``batch_size * world_size`` samples. A sample is a source and a target of ``sequence`` tokens
    each; the decoder sees the target shifted right by one and predicts it.
    """

    PATHS: ClassVar[dict[str, bool]] = {"data_dir": True}
    DECIDED: ClassVar[dict[str, str]] = {name: switch for switch, (name, _) in SWITCHES.items()}
    EXCLUSIVE: ClassVar[dict[str, str]] = {"batch_size": "batch", **DECIDED}
    FOLLOWS: ClassVar[dict[str, str]] = {**BaseConfig.FOLLOWS, **dict.fromkeys(FIELDS, "size"), **DECIDED}
    ASIDE: ClassVar[tuple[str, ...]] = (*SWITCHES, "read")
    LATER: ClassVar[dict[str, Any]] = {"num_shards": 0, "warmup_epochs": 1}
    GONE: ClassVar[dict[str, str]] = {
        "verify": "every shard is compared with its checksum at the start of a run; leave it out",
        "planted_disk_mb_per_s": "set data_dir to a folder on a slow disk",
    }

    benchmark: Literal["seq2seq"] = "seq2seq"

    size: Literal["small", "medium", "large", "xl"] = Field(
        "small", description="preset of the seven values that follow: 3.5 M, 52.7 M, 211 M or 2.85 G parameters"
    )
    d_model: int = Field(128, ge=1, le=65536, description="width of the hidden states")
    nhead: int = Field(4, ge=1, le=1024, description="attention heads; divides d_model")
    encoder_layers: int = Field(3, ge=1, le=512, description="layers of the encoder")
    decoder_layers: int = Field(3, ge=1, le=512, description="layers of the decoder")
    dim_feedforward: int = Field(512, ge=1, le=262144, description="width within the feed-forward parts")
    sequence: int = Field(256, ge=2, le=65536, description="tokens of a source, and of a target")
    batch_size: int = Field(128, ge=1, le=65536, description="samples per device and step")
    batch: Literal["", "auto"] = Field("", description="auto: the largest that fits, by trials, not batch_size")
    memory_share: Share = Field(0.9, gt=0, le=1, description="with batch=auto: share of a device's memory to fill")
    memory_gb: float = Field(0.0, ge=0, description="with batch=auto: of a device, in GB (1e9 bytes); 0: what is free")
    vocabulary: int = Field(8192, ge=2, le=2**31, description="tokens that there are")

    samples: int = Field(512, ge=0, description="of an epoch; 0: the whole set of 3,750,000; cut to fit the budget")
    full: bool = Field(False, description="short for samples=7500000: twice the set of samples=0")
    single: bool = Field(False, description="short for nproc=1: one device, whatever the machine has")
    epochs: int = Field(3, ge=1, le=1000, description="counted passes over the samples")
    warmup_epochs: int = Field(1, ge=0, le=1000, description="passes before the counted ones, left out of all speeds")
    data_dir: str = Field("", description="folder for shards of the samples; '': generated in memory")
    num_shards: int = Field(0, ge=0, le=100_000, description="shards of the whole set; 0: as many as hold 128 MB each")
    token_bytes: Literal[8, 2] = Field(8, description="bytes of a token on the disk; 2: compact")
    read: Literal["file", "mmap"] = Field(
        "file", description="mmap: samples of shards are copied out of a memory mapping"
    )
    page_cache: Literal["warm", "cold"] = Field("warm", description="shards are in it before an epoch, or not")
    read_ahead: int = Field(4, ge=0, le=64, description="batches made ahead on threads; 0: each when it is asked for")

    engine: Literal["both", "plain", "tuned"] = Field(
        "both", description="plain: the usual loop; tuned: this machine's best; both: compare them, then train tuned"
    )
    compare_steps: int = Field(3, ge=1, le=1000, description="with engine=both: steps of each engine, interleaved")
    compile: bool = Field(False, description="torch.compile the tuned engine; its time is reported apart")
    amp: bool = Field(True, description="mixed precision where the device has it: bf16, else fp16 with a scaler")
    learning_rate: float = Field(1e-4, gt=0, le=1, description="of AdamW, the same in every step")

    @model_validator(mode="before")
    @classmethod
    def _size_sets_what_is_not_set(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("size") not in SIZES:
            return values
        preset = dict(zip(FIELDS, SIZES[values["size"]], strict=True))
        return {name: preset[name] for name in preset if name != "batch_size" or not values.get("batch")} | values

    @model_validator(mode="before")
    @classmethod
    def _switches_set_their_field(cls, values: Any) -> Any:
        chosen = [name for name in SWITCHES if isinstance(values, dict) and str(values.get(name)).lower() in TRUE]
        return values | dict(SWITCHES[name] for name in chosen) if chosen else values

    @model_validator(mode="after")
    def _parts_fit(self) -> "Seq2seqConfig":
        if self.d_model % self.nhead:
            raise ValueError(f"nhead = {self.nhead} does not divide d_model = {self.d_model}: set one that does")
        if self.token_bytes == 2 and self.vocabulary > 1 << 16:
            raise ValueError(
                f"token_bytes = 2 holds tokens below {1 << 16:,}, vocabulary = {self.vocabulary:,}: set token_bytes=8"
            )
        if self.single and self.nnodes > 1:
            raise ValueError(f"single = true is one device, nnodes = {self.nnodes}: leave one of them out")
        if self.num_shards > self.epoch_samples:
            raise ValueError(
                f"num_shards = {self.num_shards:,} of {self.epoch_samples:,} samples: each shard holds at least one, set "
                f"num_shards={self.epoch_samples} or less"
            )
        for name in ("page_cache", "token_bytes", "num_shards"):
            if getattr(self, name) != type(self).model_fields[name].default and not self.data_dir:
                raise ValueError(f"{name} = {getattr(self, name)} is about shards: set data_dir=FOLDER, too")
        if self.memory_gb and not self.batch:
            raise ValueError(f"memory_gb = {self.memory_gb:g} is the limit of batch=auto: set that, too")
        return self

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch as asked for; the budget may cut them."""
        return self.samples or FULL[0]

    @property
    def passes(self) -> int:
        """Passes over the samples, warm-up included."""
        return self.warmup_epochs + self.epochs

    @property
    def shape(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in (*FIELDS[:-1], "vocabulary")}

    @property
    def parameters(self) -> int:
        """Parameters of torch's ``nn.Transformer`` with the embeddings and the output layer around it.

        An attention has 4h² + 4h, a feed-forward part 2hf + f + h, a norm 2h: an encoder's layer has one, one and two of them, a
        decoder's two, one and three; each stack ends with a norm. Around it one embedding of V tokens for both sides, one of S
        positions, and an output layer hV + V of its own.
        """
        h, f = self.d_model, self.dim_feedforward
        attention, dense, norm = 4 * h * h + 4 * h, 2 * h * f + f + h, 2 * h
        encoder = self.encoder_layers * (attention + dense + 2 * norm) + norm
        decoder = self.decoder_layers * (2 * attention + dense + 3 * norm) + norm
        return encoder + decoder + (2 * h + 1) * self.vocabulary + self.sequence * h

    @property
    def sample_flops(self) -> float:
        """FLOPs of training on one sample, a pair of S source and S target tokens: three times the forward pass.

        ``(L_e + L_d) [2S(4h² + 2hf) + 4S²h] + L_d [8Sh² + 4S²h] + 2ShV``: the decoder's second term attends to the encoder. A
        causal mask is not deducted, embeddings are look-ups.
        """
        h, s = self.d_model, self.sequence
        stacks = (self.encoder_layers + self.decoder_layers) * encoder_forward_flops(1, h, self.dim_feedforward, s)
        return 3 * (stacks + self.decoder_layers * (8 * s * h**2 + 4 * s**2 * h) + 2 * s * h * self.vocabulary)

    @staticmethod
    def scope(samples: int) -> str:
        """Return the suffix of metrics of an epoch of ``samples``: '' for a full size, else that of a subset."""
        return "" if samples in FULL else "_subset"

    def expected_work(self) -> str:
        """Say what will be trained, with the parameter count."""
        batch = "the largest batch that fits" if self.batch else f"{self.batch_size:,} samples"
        total = "" if self.batch else f", {self.batch_size * self.world_size:,} a step"
        where = f"shards in {self.data_dir} ({self.page_cache} page cache)" if self.data_dir else "memory"
        turns = f"; before that {self.compare_steps} steps of plain and tuned, interleaved" * (self.engine == "both")
        return (
            f"{'tuned' if self.engine == 'both' else self.engine} trains {self.parameters:,} parameters ({self.size}) "
            f"on {self.epoch_samples:,} samples from {where}, {self.warmup_epochs} + {self.epochs} epochs, {batch} per device{total}"
            f"{turns}; cut to fit the budget where the measured speed asks for it"
        )
