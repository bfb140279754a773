"""What someone states about a run, in neutral words: only what the rules need, and nothing of it required.

GB/s are 1e9 bytes per second. A number is taken as it was written: 156.2 stands for 156.15 to 156.25.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

CLAIM_VERSION = 1

MOST = 10**15  # counts beyond this are no counts, and would not survive as floats

Count = Annotated[int, Field(ge=0, le=MOST)]
Ranks = Annotated[int, Field(ge=1, le=10_000_000)]
Seconds = Annotated[float, Field(gt=0)]


class Part(BaseModel):
    """A part of a claim; an unknown field is an error, for it would go unjudged."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Speed(Part):
    """Rates, with the counts and times that they must follow from. Counts and times are those of the same window."""

    samples_per_s: float | None = Field(None, description="the stated rate")
    unit: str = Field("samples/s", description="what the rates of samples are counted in")
    tokens_per_s: float | None = Field(None, description="the stated rate, padding included")
    stands_for: Literal["all ranks", "one rank"] = Field("all ranks", description="what the stated rates are of")
    ranks: Ranks | None = Field(None, description="devices that took part")
    samples_counted: Count | None = Field(None, description="samples over all ranks that were really processed")
    samples_planned: Count | None = Field(None, description="samples that the planned steps need")
    features: Count | None = Field(None, description="samples of one epoch")
    epochs: float | None = Field(None, gt=0, le=1e6, description="passes that were really made")
    wall_s: Seconds | None = Field(None, description="time of all these samples")
    steps_run: Count | None = Field(None, description="optimizer steps that were really made")
    steps_planned: Count | None = Field(None, description="optimizer steps that were configured")
    batch_per_rank: Annotated[int, Field(ge=1, le=MOST)] | None = Field(None, description="samples of a rank in a step")
    step_s: list[Seconds] = Field(default_factory=list, description="raw times of the steps, all ranks together")
    step_s_span: list[Seconds] = Field(
        default_factory=list,
        max_length=2,
        description="both ends for the median step, where the raw times are not there",
    )
    batches_full: bool = Field(
        True, description="every step was of the whole batch; false: some may be of fewer samples"
    )
    sequence_length: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="tokens of every sample, padded"
    )
    longest_sequence: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="tokens of a sample at most"
    )
    one_device_samples_per_s: float | None = Field(None, gt=0, description="rate of the same work on one device")
    one_device: str = Field("", description="where the rate of one device is from")


class Compute(Part):
    """Floating point work and the peak it is held against. Rates and peaks are of all ranks unless said otherwise."""

    flops_per_s: float | None = None
    mfu: float | None = Field(None, description="share of the peak: 0.4 is 40 %")
    device: str = Field("", description="name of the device as its driver tells it")
    ranks: Ranks = 1
    precision: str = Field("", description="of the matrix products: bf16, fp16, tf32, fp32, fp8")
    peak_flops: float | None = Field(None, gt=0, description="the peak that the share was taken of")
    peak_kind: Literal["measured", "claimed", ""] = ""
    peak_precision: str = Field("", description="the precision that the peak is of")
    peak_sparse: bool = Field(False, description="the peak counts the zeros of structured sparsity")
    peak_source: str = ""
    parameters: float | None = Field(None, gt=0, description="of the matrix products")
    work: Literal["training", "inference"] = "training"
    tokens_per_s: float | None = Field(None, gt=0)


class Learning(Part):
    """What shows that something was learnt."""

    learning_rates: list[float] = Field(default_factory=list, description="in the order of the steps")
    learning_rate_min: float | None = Field(None, description="the smallest of the steps that were made")
    loss_first: float | None = None
    loss_last: float | None = None
    f1: float | None = None
    exact_match: float | None = None
    shares: dict[str, float] = Field(default_factory=dict, description="values that lie between 0 and 1, by name")


class Collective(Part):
    """One collective operation, or the average over several (then without a size)."""

    operation: str = Field("", description="a name of benchlib.bandwidth.BUS_FACTORS; '' where it is not known")
    size_bytes: Count | None = Field(None, description="bytes of the larger side")
    seconds: float | None = Field(None, description="of one operation")
    ranks: Ranks | None = None
    algbw_gbytes_per_s: float | None = None
    busbw_gbytes_per_s: float | None = None
    bound_gbytes_per_s: float | None = Field(None, gt=0, description="what the links of a rank carry one way at most")
    bound_source: str = ""
    algorithm: str = Field("", description="NVLS, Ring, Tree; '' where it is not known")
    wrong_elements: float | None = None
    average_busbw_gbytes_per_s: float | None = Field(None, description="stated mean of ``all_busbw_gbytes_per_s``")
    all_busbw_gbytes_per_s: list[float] = Field(default_factory=list, description="every row that the mean covers")


class Latency(Part):
    """Times of requests or steps under one name, in seconds; percentiles by their number, as in ``{99.0: 0.12}``."""

    name: str = "latency"
    samples_s: list[float] = Field(default_factory=list)
    min_s: float | None = None
    mean_s: float | None = None
    max_s: float | None = None
    percentiles_s: dict[float, float] = Field(default_factory=dict)


class Requests(Part):
    """Counts of requests, and how many of them went into the latencies."""

    issued: Count | None = None
    completed: Count | None = None
    failed: Count | None = None
    in_latency: Count | None = None


class LoadGen(Part):
    """What an MLPerf LoadGen summary says of itself. Times in seconds."""

    scenario: str = ""
    valid: bool | None = None
    satisfied: dict[str, str] = Field(default_factory=dict, description="constraint: Yes, NO or Skipped")
    samples_per_s: float | None = None
    samples: Count | None = Field(None, description="samples that were processed, where the summary tells")
    duration_s: float | None = Field(None, description="from the first sample to the last, where the summary tells")
    min_duration_s: float | None = None
    target_latency_s: float | None = None
    target_percentile: float | None = Field(None, ge=1, le=99.9999)
    target_percentile_s: float | None = None
    processed: Annotated[int, Field(ge=0, le=10**10)] | None = Field(
        None, description="queries, as the early stopping tells"
    )
    at_least: Count | None = Field(None, description="queries that early stopping asks for, as told")
    discarded: Count | None = Field(None, description="highest latencies that early stopping sets aside, as told")
    short_of: Count | None = Field(None, description="queries that the run lacks for early stopping, as told")


class SpeedUp(Part):
    """A stated ratio of two named runs; ``others`` are further runs that it could have been taken against."""

    stated: float
    new: float = Field(gt=0)
    old: float = Field(gt=0)
    others: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)
    unit: str = ""


class Expectation(Part):
    """What was announced beside what was measured, as the ends of ranges."""

    name: str
    announced: list[float] = Field(min_length=1, max_length=2)
    measured: list[float] = Field(min_length=1, max_length=2)
    unit: str = ""


class AccuracyLimit(Part):
    """A limit for the quality of results, and who states it. ``enforced``: it is what a checker really applies."""

    metric: str
    value: float
    source: str = ""
    version: str = ""
    enforced: bool = False


class Quantity(Part):
    """Any value that cannot be below zero. ``value`` is None where it was not a finite number."""

    name: str
    value: float | None
    unit: str = ""
    samples: list[float] = Field(default_factory=list)
    median_of_samples: bool = Field(False, description="the value is stated to be the samples' median")
    median_span: list[float] = Field(
        default_factory=list, max_length=2, description="both ends for the median, where only quantiles were kept"
    )
    low: float | None = Field(None, description="lower end of the interval that is stated with the value")
    high: float | None = Field(None, description="upper end of the interval that is stated with the value")
    unit_of_name: str | None = Field(None, description="the one unit that the name stands for, where it does")


class Restated(Part):
    """What is stated in one place and follows from another; both in the same words."""

    name: str
    stated: str
    other: str
    source: str = Field("", description="where ``other`` is from")


class Claim(Part):
    """All that is stated about one subject."""

    subject: str = Field("", description="what it is about, for the reader of a finding")
    speed: Speed | None = None
    compute: Compute | None = None
    learning: Learning | None = None
    collective: Collective | None = None
    latencies: list[Latency] = Field(default_factory=list)
    requests: Requests | None = None
    loadgen: LoadGen | None = None
    speedups: list[SpeedUp] = Field(default_factory=list)
    expectations: list[Expectation] = Field(default_factory=list)
    accuracy_limits: list[AccuracyLimit] = Field(default_factory=list)
    quantities: list[Quantity] = Field(default_factory=list)
    restated: list[Restated] = Field(default_factory=list)


class ClaimFile(Part):
    """The neutral file: ``{"claim_version": 1, "source": "…", "claims": [{…}]}``."""

    claim_version: Literal[1]
    source: str = ""
    claims: list[Claim] = Field(min_length=1)
