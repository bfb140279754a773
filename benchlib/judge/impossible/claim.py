"""What someone states about a run, in neutral words: only what the rules need, and nothing of it required.

GB/s are 1e9 bytes per second. A number is taken as it was written: 156.2 stands for 156.15 to 156.25.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from benchlib.core.stats import Average, average

MAX_COUNT = 10**15  # larger counts cannot be real, and would not survive as floats

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Ranks = Annotated[int, Field(ge=1, le=10_000_000)]
Rate = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]


class Part(BaseModel):
    """A part of a claim; an unknown field is an error, since no rule would see it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _of(description: str, default: Any = None, **limits: Any) -> Any:
    """Return a field that may be left out unless its default is ``...``; a list or dict starts empty."""
    if isinstance(default, (list, dict)):
        return Field(default_factory=type(default), description=description, **limits)
    return Field(default, description=description, **limits)


class Speed(Part):
    """Rates, with the counts and times that they must follow from. Counts and times are those of the same window."""

    samples_per_s: Rate | None = _of("stated rate")
    unit: str = _of("unit of the rates of samples", "samples/s")
    tokens_per_s: Rate | None = _of("stated rate, padding included")
    stands_for: Literal["all ranks", "one rank"] = _of("what the stated rates are of", "all ranks")
    ranks: Ranks | None = _of("devices that took part")
    samples_counted: Count | None = _of("samples that all ranks together really processed")
    samples_planned: Count | None = _of("samples that the planned steps need")
    features: Count | None = _of("samples per epoch")
    epochs: float | None = _of("epochs that were really run", gt=0, le=1e6)
    samples_source: str = _of("how these samples are known", "counted")
    wall_s: Above0 | None = _of("time for all these samples, in s")
    wall_s_span: list[Above0] = _of("lower and upper end of that time as it was written, in s", [], max_length=2)
    steps_run: Count | None = _of("optimizer steps that were really run")
    batch_per_rank: Positive | None = _of("samples per rank and step")
    step_s: list[Above0] = _of("raw step times of all ranks together, in s", [])
    batches_full: bool = _of("every step had the whole batch; false: some may have had fewer samples", True)
    sequence_length: Positive | None = _of("tokens of every sample, padded")
    tokens_padded: bool = _of("padding is in the rate of tokens; false: not known", True)
    one_device_samples_per_s: Above0 | None = _of("rate of the same work on one device")
    one_device: str = _of("source of the rate of one device", "")
    efficiency: Rate | None = _of("rate over that of one device times the devices: 0.9 is 90%")


class Compute(Part):
    """Floating point work and its peak. Rates and peaks are those of all ranks together."""

    flops_per_s: Rate | None = _of("stated rate, in FLOP/s")
    mfu: float | None = _of("share of the peak: 0.4 is 40%")
    device: str = _of("name of the device as its driver reports it", "")
    ranks: Ranks = _of("devices that took part", 1)
    precision: str = _of("of the matrix products: bf16, fp16, tf32, fp32, fp8", "")
    peak_flops: Above0 | None = _of("the peak that `mfu` is a share of, in FLOP/s")
    peak_kind: Literal["measured", "claimed", ""] = _of("measured, or claimed by the vendor", "")
    peak_precision: str = _of("precision of the peak", "")
    peak_source: str = _of("how the peak was measured, or who claims it", "")
    parameters: Above0 | None = _of("parameters of the matrix products, of which a token takes part in all")
    work: Literal["training", "inference"] = _of(
        "6 (4 for an adapter) or 2 operations per parameter and token", "training"
    )
    layers: Positive | None = _of("layers with attention")
    hidden: Positive | None = _of("width of a layer")
    sequence_length: Positive | None = _of("tokens that a token attends to, padding included")
    tokens_per_s: Above0 | None = _of("tokens processed, padding included")


class Learning(Part):
    """What shows that something was learnt."""

    learning_rates: list[float] = _of("in the order of the steps", [])
    learning_rate_min: float | None = _of("smallest of all steps between a warm-up from zero and a decay to zero")
    loss_first: float | None = _of("smoothed, at the start")
    loss_last: float | None = _of("smoothed, at the end")
    f1: float | None = _of("from 0 to 100")
    exact_match: float | None = _of("from 0 to 100")
    scores: dict[str, float] = _of("other scores by name, from 0 to 100", {})


class Collective(Part):
    """One collective operation, or the average over several (then without a size)."""

    operation: str = _of(
        "all_reduce, all_gather, reduce_scatter, all_to_all, gather, scatter, broadcast, reduce or send_recv", ""
    )
    size_bytes: Count | None = _of("bytes of the larger side")
    seconds: Rate | None = _of("time of one operation, in s")
    ranks: Ranks | None = _of("devices that took part")
    algbw_gbytes_per_s: Rate | None = _of("algorithm bandwidth: size over time, in GB/s")
    busbw_gbytes_per_s: Rate | None = _of("bus bandwidth: algorithm bandwidth times the operation's factor, in GB/s")
    bound_gbytes_per_s: Above0 | None = _of("most that a rank's links carry in one direction, in GB/s")
    bound_source: str = _of("who claims that, or how it was measured", "")
    algorithm: str = _of("of NCCL: NVLS, Ring or Tree", "")
    wrong_elements: Rate | None = _of("wrong elements in the result")


class Latency(Part):
    """Times of requests or steps under one name, in seconds; percentiles by their number, as in ``{"99": 0.12}``."""

    name: str = _of("what was timed", "latency")
    samples_s: list[float] = _of("raw times, in s", [])
    min_s: float | None = _of("minimum, in s")
    mean_s: float | None = _of("mean, in s")
    max_s: float | None = _of("maximum, in s")
    percentiles_s: dict[float, float] = _of("in s; the name is the number, 99 for p99", {})
    of_tokens: bool = _of("times of tokens, of which none can be zero", False)

    @property
    def stated(self) -> dict[str, float]:
        """What is stated by name: the minimum, the percentiles from the least on, the maximum and the mean."""
        percentiles = {f"p{key:g}": self.percentiles_s[key] for key in sorted(self.percentiles_s)}
        ends = {"minimum": self.min_s} | percentiles | {"maximum": self.max_s, "mean": self.mean_s}
        return {name: value for name, value in ends.items() if value is not None}


class Requests(Part):
    """Counts and rates of requests, and how many of them went into the latencies."""

    issued: Count | None = _of("sent to the server")
    completed: Count | None = _of("answered correctly")
    failed: Count | None = _of("refused, failed or timed out")
    in_latency: Count | None = _of("requests whose times make up the latencies")
    logged_errors: Count | None = _of("errors in the log of the load generator")
    due_per_s: Rate | None = _of("requests per second that the load generator scheduled")
    asked_per_s: Rate | None = _of("requests per second that the load generator was asked to send")
    completed_per_s: list[Rate] = _of("requests answered per second, each time that this is stated", [])
    tokens_per_s: list[Rate] = _of("tokens answered per second, each time that this is stated", [])
    at_once: Positive | None = _of("most requests that are under way at once")
    mean_latency_s: Above0 | None = _of("mean time of a request, in s")


class Limit(Part):
    """A limit of time: of a constraint that a program calls satisfied, or by another time of the same run."""

    name: str = _of("what is limited", ...)
    value_s: float = _of("a time, in s", ...)
    limit_s: float = _of("most that it may be, in s", ...)
    at_least: bool = _of("the limit is the least that it may be", False)
    wrong: str = _of("what is wrong if the limit is not met", "it is called satisfied")


class Verdict(Part):
    """What a program calls its own run."""

    valid: bool = _of("false: INVALID, so that the run is no result", ...)
    unmet: list[str] = _of("constraints that it calls not satisfied", [])


class SpeedUp(Part):
    """A stated ratio of two named runs."""

    stated: Above0 = _of("the ratio: 4.3 for 4.3 ×", ...)
    new: Above0 | None = _of("rate of the faster run, or time of the slower one")
    old: Above0 | None = _of("rate of the run that it is compared with, or time of the faster one")
    base: str = _of("name of the run that it is compared with", "")
    unit: str = _of("unit of the rates or times", "")


class Mean(Part):
    """A mean that is stated beside all values that it is of; of one value it is the same number, stated twice."""

    name: str = _of("what it is", ...)
    stated: float = _of("the mean as stated", ...)
    values: list[float] = _of("all of the values", ..., min_length=1)
    weights_known: bool = _of("it is the arithmetic mean; false: another mean, or a weighted one, may be meant", True)
    unit: str = _of("unit of the mean and the values", "")


class Quantity(Part):
    """Any value that cannot be negative. ``value`` is null where it was not a finite number."""

    name: str = _of("what it is", ...)
    value: float | None = _of("in its unit, of several the least; null where it was not a finite number", ...)
    unit: str = _of("unit of the value", "")
    stated: float | None = _of("the value that stands for several")
    most: Above0 | None = _of("most that is physically possible")
    least: Above0 | None = _of("least that is physically possible")
    ceiling_source: str = _of("why no more or no less is possible", "")


class Claim(Part):
    """All that is stated about one subject."""

    subject: str = _of("what it is about, for the reader of a finding", "")
    speed: Speed | None = _of("rates, and the counts and times that they follow from")
    compute: Compute | None = _of("operations per second and their peak")
    learning: Learning | None = _of("what shows that something was learnt")
    collective: Collective | None = _of("one collective operation, or the average over several")
    latencies: list[Latency] = _of("times of requests or steps", [])
    requests: Requests | None = _of("counts and rates of requests")
    verdict: Verdict | None = _of("what a program calls its own run")
    limits: list[Limit] = _of("limits that a program calls satisfied", [])
    speedups: list[SpeedUp] = _of("stated ratios of two runs", [])
    averages: list[Mean] = _of("means with the values that they are of", [])
    quantities: list[Quantity] = _of("any other value that cannot be negative", [])

    @classmethod
    def of_roles(cls, subject: str, series: str, roles: Mapping[str, Any]) -> "Claim":
        """Return what values state by their roles, as in ``collective.wrong_elements``; ``series`` names the latencies."""
        parts: dict[str, Any] = {}
        for role, value in roles.items():
            part, _, name = role.partition(".")
            parts.setdefault(part, {})[name] = value
        if "latencies" in parts:
            parts["latencies"] = [Latency(name=series, **parts["latencies"])]
        return cls(subject=subject, **parts)


SAMPLES = ("step_s", "samples_s", "learning_rates")  # fields of a claim that take all samples of a column
SCALES = {"Gbps": 1 / 8, "us": 1e-6, "ms": 1e-3}  # to the GB/s and seconds of a claim


def in_its_unit(role: str, unit: str, value: Any, numbers: Sequence[float], kind: Average = "median") -> Any:
    """Return what a cell with a role states, in the unit of the claim's field; None for what is not finite, which "finite" fails.

    ``kind`` says how several ``numbers`` make one.
    """
    name = role.partition(".")[2]
    scale = SCALES.get(unit, 1.0)
    if name in SAMPLES:
        return [scale * item for item in numbers if math.isfinite(item)] if numbers[1:] else None  # a median alone
    if isinstance(value, (float, list)):
        return scale * average(numbers, kind) if numbers and all(map(math.isfinite, numbers)) else None
    return value


class ClaimFile(Part):
    """The neutral file: ``{"claim_version": 1, "source": "…", "claims": [{…}]}``."""

    claim_version: Literal[1] = _of("version of this format", ...)
    source: str = _of("where the statements come from", "")
    claims: list[Claim] = _of("one for each subject", ..., min_length=1)
