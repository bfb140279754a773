"""What someone states about a run, in neutral words: only what the rules need, and nothing of it required.

GB/s are 1e9 bytes per second. A number is taken as it was written: 156.2 stands for 156.15 to 156.25.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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
    wall_s: Seconds | None = Field(None, description="time of all these samples, in s")
    steps_run: Count | None = Field(None, description="optimizer steps that were really made")
    steps_planned: Count | None = Field(None, description="optimizer steps that were configured")
    batch_per_rank: Annotated[int, Field(ge=1, le=MOST)] | None = Field(None, description="samples of a rank in a step")
    step_s: list[Seconds] = Field(default_factory=list, description="raw times of the steps in s, all ranks together")
    step_s_span: list[Seconds] = Field(
        default_factory=list,
        max_length=2,
        description="both ends for the median step in s, where the raw times are not there",
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

    flops_per_s: float | None = Field(None, description="the stated rate, in FLOP/s")
    mfu: float | None = Field(None, description="share of the peak: 0.4 is 40 %")
    device: str = Field("", description="name of the device as its driver tells it")
    ranks: Ranks = Field(1, description="devices that the rate is of")
    precision: str = Field("", description="of the matrix products: bf16, fp16, tf32, fp32, fp8")
    peak_flops: float | None = Field(None, gt=0, description="the peak that the share was taken of, in FLOP/s")
    peak_kind: Literal["measured", "claimed", ""] = Field("", description="whether that peak was measured or a maker's")
    peak_precision: str = Field("", description="the precision that the peak is of")
    peak_sparse: bool = Field(False, description="the peak counts the zeros of structured sparsity")
    peak_source: str = Field("", description="how it was measured, or whose figure it is")
    parameters: float | None = Field(None, gt=0, description="of the matrix products")
    work: Literal["training", "inference"] = Field("training", description="6 or 2 operations a parameter and token")
    tokens_per_s: float | None = Field(None, gt=0, description="processed, padding included")


class Learning(Part):
    """What shows that something was learnt."""

    learning_rates: list[float] = Field(default_factory=list, description="in the order of the steps")
    learning_rate_min: float | None = Field(None, description="the smallest of the steps that were made")
    loss_first: float | None = Field(None, description="smoothed, at the start")
    loss_last: float | None = Field(None, description="smoothed, at the end")
    f1: float | None = Field(None, description="from 0 to 100")
    exact_match: float | None = Field(None, description="from 0 to 100")
    shares: dict[str, float] = Field(default_factory=dict, description="values that lie between 0 and 1")


class Collective(Part):
    """One collective operation, or the average over several (then without a size)."""

    operation: str = Field(
        "",
        description="all_reduce, all_gather, reduce_scatter, all_to_all, gather, scatter, broadcast, reduce or send_recv",
    )
    size_bytes: Count | None = Field(None, description="bytes of the larger side")
    seconds: float | None = Field(None, description="time of one operation, in s")
    ranks: Ranks | None = Field(None, description="devices that took part")
    algbw_gbytes_per_s: float | None = Field(None, description="algorithm bandwidth: size over time, in GB/s")
    busbw_gbytes_per_s: float | None = Field(
        None, description="bus bandwidth: times the factor of the operation, in GB/s"
    )
    bound_gbytes_per_s: float | None = Field(
        None, gt=0, description="what the links of a rank carry one way at most, in GB/s"
    )
    bound_source: str = Field("", description="who states that, or how it was measured")
    algorithm: str = Field("", description="of NCCL: NVLS, Ring or Tree")
    wrong_elements: float | None = Field(None, description="elements of the result that were not right")
    average_busbw_gbytes_per_s: float | None = Field(None, description="stated mean of all_busbw_gbytes_per_s")
    all_busbw_gbytes_per_s: list[float] = Field(default_factory=list, description="every row that the mean covers")


class Latency(Part):
    """Times of requests or steps under one name, in seconds; percentiles by their number, as in ``{"99": 0.12}``."""

    name: str = Field("latency", description="what was timed")
    samples_s: list[float] = Field(default_factory=list, description="raw times, in s")
    min_s: float | None = Field(None, description="the shortest, in s")
    mean_s: float | None = Field(None, description="their mean, in s")
    max_s: float | None = Field(None, description="the longest, in s")
    percentiles_s: dict[float, float] = Field(
        default_factory=dict, description="in s; the name is the number, 99 for p99"
    )


class Requests(Part):
    """Counts of requests, and how many of them went into the latencies."""

    issued: Count | None = Field(None, description="sent to the server")
    completed: Count | None = Field(None, description="answered rightly")
    failed: Count | None = Field(None, description="refused, broken or timed out")
    in_latency: Count | None = Field(None, description="whose times the latencies are of")


class LoadGen(Part):
    """What an MLPerf LoadGen summary says of itself. Times in seconds."""

    scenario: str = Field("", description="Offline, Server, SingleStream or MultiStream")
    valid: bool | None = Field(None, description="whether the summary says VALID")
    satisfied: dict[str, str] = Field(default_factory=dict, description="constraint: Yes, NO or Skipped")
    samples_per_s: float | None = Field(None, description="the stated rate")
    samples: Count | None = Field(None, description="samples that were processed, where the summary tells")
    duration_s: float | None = Field(
        None, description="in s, from the first sample to the last, where the summary tells"
    )
    min_duration_s: float | None = Field(None, description="that the run had to last, in s")
    target_latency_s: float | None = Field(None, description="that the percentile had to keep, in s")
    target_percentile: float | None = Field(None, ge=1, le=99.9999, description="which percentile: 99 for p99")
    target_percentile_s: float | None = Field(None, description="that percentile as measured, in s")
    processed: Annotated[int, Field(ge=0, le=10**10)] | None = Field(
        None, description="queries, as the early stopping tells"
    )
    at_least: Count | None = Field(None, description="queries that early stopping asks for, as told")
    discarded: Count | None = Field(None, description="highest latencies that early stopping sets aside, as told")
    short_of: Count | None = Field(None, description="queries that the run lacks for early stopping, as told")


class SpeedUp(Part):
    """A stated ratio of two named runs; ``others`` are further runs that it could have been taken against."""

    stated: float = Field(description="the ratio, as in 4.3 for 4.3 ×")
    new: float = Field(gt=0, description="rate of the faster run")
    old: float = Field(gt=0, description="rate of the run that it is held against")
    others: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list, description="rates of further runs")
    unit: str = Field("", description="of the rates")


class Expectation(Part):
    """What was announced beside what was measured, as the ends of ranges."""

    name: str = Field(description="what both are of")
    announced: list[float] = Field(min_length=1, max_length=2, description="one value or both ends")
    measured: list[float] = Field(min_length=1, max_length=2, description="one value or both ends")
    unit: str = Field("", description="of both")


class AccuracyLimit(Part):
    """A limit for the quality of results, and who states it. ``enforced``: it is what a checker really applies."""

    metric: str = Field(description="what is limited")
    value: float = Field(description="the limit")
    source: str = Field("", description="who states it")
    version: str = Field("", description="of the source")
    enforced: bool = Field(False, description="it is what a checker really applies")


class Quantity(Part):
    """Any value that cannot be below zero. ``value`` is null where it was not a finite number."""

    name: str = Field(description="what it is")
    value: float | None = Field(description="in its unit, null where it was not a finite number")
    unit: str = Field("", description="of the value, its samples and its interval")
    samples: list[float] = Field(default_factory=list, description="raw samples")
    median_of_samples: bool = Field(False, description="the value is stated to be the samples' median")
    median_span: list[float] = Field(
        default_factory=list, max_length=2, description="both ends for the median, where only quantiles were kept"
    )
    low: float | None = Field(None, description="lower end of the interval that is stated with the value")
    high: float | None = Field(None, description="upper end of the interval that is stated with the value")
    unit_of_name: str | None = Field(None, description="the one unit that the name stands for, where it does")


class Restated(Part):
    """What is stated in one place and follows from another; both in the same words."""

    name: str = Field(description="what is stated twice")
    stated: str = Field(description="as stated")
    other: str = Field(description="as it follows from the other place")
    source: str = Field("", description="where the other is from")


class Claim(Part):
    """All that is stated about one subject."""

    subject: str = Field("", description="what it is about, for the reader of a finding")
    speed: Speed | None = Field(None, description="rates, and the counts and times that they follow from")
    compute: Compute | None = Field(None, description="operations per second and their peak")
    learning: Learning | None = Field(None, description="what shows that something was learnt")
    collective: Collective | None = Field(None, description="one collective operation, or the average over several")
    latencies: list[Latency] = Field(default_factory=list, description="times of requests or steps")
    requests: Requests | None = Field(None, description="counts of requests")
    loadgen: LoadGen | None = Field(None, description="what an MLPerf LoadGen summary says of itself")
    speedups: list[SpeedUp] = Field(default_factory=list, description="stated ratios of two runs")
    expectations: list[Expectation] = Field(
        default_factory=list, description="what was announced beside what was measured"
    )
    accuracy_limits: list[AccuracyLimit] = Field(
        default_factory=list, description="limits of quality and who states them"
    )
    quantities: list[Quantity] = Field(default_factory=list, description="any other value that cannot be below zero")
    restated: list[Restated] = Field(
        default_factory=list, description="what is stated in one place and follows from another"
    )


class ClaimFile(Part):
    """The neutral file: ``{"claim_version": 1, "source": "…", "claims": [{…}]}``."""

    claim_version: Literal[1] = Field(description="of this format")
    source: str = Field("", description="where the statements are from")
    claims: list[Claim] = Field(min_length=1, description="one for each subject")
