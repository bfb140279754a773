"""What the tables of a collectives run state, as claims: one for each series, against the limits of the same run."""

from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from benchlib.core.definitions import BUS_FACTORS, size_text
from benchlib.core.errors import UserError
from benchlib.core.stats import smoothed, smoothing_window
from benchlib.judge.impossible import numbers as names
from benchlib.judge.impossible.claim import Claim, Collective, Compute, Latency, Learning, Part, Quantity, Speed
from benchlib.judge.impossible.numbers import Numbers
from benchlib.judge.impossible.restated import restated
from benchlib.judge.impossible.restated_parity import latencies
from benchlib.results.metrics import Metric

BITS = 8
# What no operation between ranks exceeds: each of its bytes is copied, and passes the link. A raw socket is no such
# limit: a library may drive the same network better than one stream does.
HARD = ("memory copy", "claimed link")
WITH_SWITCH = ("", "nccl", "rccl", "sharp")  # libraries in whose algorithms a switch may add


def series_claims(numbers: Numbers) -> list[Claim]:
    """Return a claim for each row of the table ``series`` and one for the buckets of gradients, where a result has them."""
    limit = _limit(_rows(numbers, "bounds"))
    library = str(numbers.facts.get("collective", ""))
    claims = [_claim(row, numbers.world_size, limit, library) for row in _rows(numbers, "series")]
    rate = numbers.value("gradient_allreduce_gbps")
    if rate is not None:
        claims.append(
            _claim(
                {"operation": "all_reduce", "busbw_gbps": rate},
                numbers.world_size,
                limit,
                library,
                "buckets of gradients",
            )
        )
    return claims


def _rows(numbers: Numbers, name: str) -> list[dict[str, Any]]:
    rows = numbers.tables.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _limit(bounds: Iterable[dict[str, Any]]) -> tuple[float, str] | None:
    """Return the lowest hard limit in GB/s and who states it.

    Of the copies the best of all sizes counts, and it is held against the bus bandwidth of one rank although it is read
    and written by all ranks. On processors that is loose: a copy in a cache is several times faster than one in memory,
    and most operations move each byte of the bus at least twice per rank. A limit by the row's own size and by the least
    traffic of its operation would be 4 times lower on two ranks, and could fail an honest run: copies are timed for a
    moment, and beside a neighbour on the same cores they were seen 4 times slower than in the next run, at the same size;
    and where ranks share a cache, or read each other's memory, an operation leaves part of that traffic out. So the
    limit finds what was not waited for (many times too fast), and no speed that is merely better than it should be.
    """
    best: dict[str, tuple[float, str]] = {}
    for row in bounds:
        name, rate = str(row.get("bound")), row.get("gbps")
        if name in HARD and isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0:
            told = f"{row.get('provenance') or 'stated'}: {name}"
            best[name] = max(best.get(name, (0.0, "")), (rate / BITS, told))
    return min(best.values(), default=None)


def _claim(row: dict[str, Any], ranks: int, limit: tuple[float, str] | None, library: str, subject: str = "") -> Claim:
    operation, variant = str(row.get("operation", "")), str(row.get("variant", ""))
    words = [
        operation,
        variant,
        row.get("dtype"),
        row.get("reduction"),
        "in place" if row.get("in_place") is True else "",
    ]
    subject = subject or f"{' '.join(str(word) for word in words if word)}, {_size(row.get('bytes'))}"
    own = variant in ("ring", "tree", "rs_ag", "direct")
    algbw, busbw = (_gbytes(row.get(name)) for name in ("algbw_gbps", "busbw_gbps"))
    percentiles = {50.0: row.get("median_us"), 95.0: row.get("p95_us"), 99.0: row.get("p99_us")}
    try:
        times = {key: _seconds(value) for key, value in percentiles.items() if value is not None}
        return Claim(
            subject=subject,
            collective=Collective(
                operation=operation if operation in BUS_FACTORS else "",
                algorithm=variant if own else "" if library.lower() in WITH_SWITCH else library,
                size_bytes=row.get("bytes") or None,
                seconds=_seconds(row.get("median_us")) if algbw is not None else None,
                ranks=ranks,
                algbw_gbytes_per_s=algbw,
                busbw_gbytes_per_s=busbw,
                bound_gbytes_per_s=limit[0] if limit else None,
                bound_source=limit[1] if limit else "",
                wrong_elements=row.get("wrong_elements"),
            )
            if operation in BUS_FACTORS
            else None,
            latencies=[Latency(name="time of a round", percentiles_s=times)] if times else [],
        )
    except (ValidationError, TypeError) as error:
        raise UserError(
            f"the result states a series that cannot be read ({subject}): {str(error).splitlines()[0]}"
        ) from None


def _size(size: Any) -> str:
    return size_text(size) if isinstance(size, (int, float)) and size > 0 else f"{size} bytes"


def _gbytes(gbps: Any) -> float | None:
    return gbps / BITS if gbps is not None else None


def _seconds(micros: Any) -> Any:
    return 1e-6 * micros if micros is not None else None


# What the kit's own results state, as claims: by the names of metrics and facts, so that one reading serves all.
#
# Nothing is assumed that a result does not hold: an absent metric, fact or config leaves its part of the claim empty.


QUANTILES = 200  # that ``benchlib.judge.regression`` keeps of long series


P = TypeVar("P", bound=Part)


def _part(cls: type[P], **fields: Any) -> P:
    try:
        return cls(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"the result states {where} = {first['input']!r}: {first['msg']}") from None


def own_claims(numbers: Numbers) -> list[Claim]:
    """Return what a result states: the whole training, its steady steps, learning, operations, exchange, all values."""
    claims = [
        Claim(subject="whole training", speed=whole_training(numbers)),
        Claim(subject="steady steps", speed=steady_steps(numbers)),
        Claim(subject="training", learning=learning(numbers), compute=compute(numbers), latencies=rank_steps(numbers)),
        Claim(subject="all-reduce", collective=all_reduce(numbers)),
        *series_claims(numbers),
        *(Claim(subject=f"{name} products", speed=speed) for name, speed in products(numbers).items()),
        Claim(subject="latency", latencies=latencies(numbers)),
        Claim(subject="", quantities=quantities(numbers), restated=restated(numbers)),
    ]
    return [claim for claim in claims if claim.model_dump(exclude={"subject"}, exclude_defaults=True)]


def whole_training(numbers: Numbers) -> Speed | None:
    """Return the rate of all steps with the samples and the time that it is the ratio of."""
    seen = numbers.count("samples_seen")
    if seen is None:
        return None
    resumed = numbers.count("resumed_step") or 0  # then the time covers a part of the samples only
    time_s = numbers.value("train_s")
    return _part(
        Speed,
        samples_per_s=numbers.value("end_to_end_samples_per_s") if not resumed else None,
        ranks=numbers.world_size,
        samples_counted=seen,
        samples_planned=numbers.count("samples_expected"),
        wall_s=time_s if time_s and time_s > 0 else None,
    )


def steady_steps(numbers: Numbers) -> Speed | None:
    """Return the rates of the steady steps beside their raw times; times count where every step was a full batch."""
    rate = numbers.value("train_samples_per_s")
    if rate is None:
        return None
    batch = getattr(numbers.config, "global_batch", None)
    planned, expected = numbers.count("planned_steps"), numbers.count("samples_expected")
    full = batch is not None and planned is not None and expected == planned * batch
    times = [value for value in numbers.raw("step_s") if value > 0] if full else []
    median = numbers.metric("step_s")
    return _part(
        Speed,
        samples_per_s=rate,
        tokens_per_s=numbers.value("train_tokens_per_s"),
        ranks=numbers.world_size,
        batch_per_rank=batch // numbers.world_size if batch else None,
        step_s=times,
        step_s_span=_span(median) if median is not None and not times else [],
        batches_full=full,
        longest_sequence=getattr(numbers.config, "max_length", None),
    )


def _span(median: Metric) -> list[float]:
    """Return the ends of the interval of a median of times, or twice the time where there is but one."""
    ends = [median.value if end is None else end for end in (median.ci_low, median.ci_high)]
    return [end for end in ends if end is not None and end > 0]


def learning(numbers: Numbers) -> Learning | None:
    """Return the learning rates, the smoothed loss at both ends by its raw values, scores and shares."""
    losses = numbers.raw("loss")
    rates = numbers.facts.get("learning_rates")
    shares = {name: numbers.value(name) for name in ("padding_share", "exchange_overlap")}
    curve = smoothed(losses) if len(losses) > 1 else None
    found = _part(
        Learning,
        learning_rate_min=rates.get("min") if isinstance(rates, dict) else None,
        loss_first=float(curve[smoothing_window(len(losses)) - 1]) if curve is not None else None,
        loss_last=float(curve[-1]) if curve is not None else None,
        f1=numbers.value("f1"),
        exact_match=numbers.value("exact_match"),
        shares={name: share for name, share in shares.items() if share is not None},
    )
    return found if found.model_dump(exclude_defaults=True) else None


def compute(numbers: Numbers) -> Compute | None:
    """Return the rate of operations and its share of the peak that was measured beside it."""
    rate, peak = numbers.value("flops_per_s"), numbers.value("matmul_peak_flops")
    share = numbers.value("mfu")
    if rate is None and share is None:
        return None
    return _part(
        Compute,
        flops_per_s=rate,
        mfu=share,
        ranks=numbers.world_size,
        peak_flops=peak if peak and peak > 0 else None,
        peak_kind="measured",
    )


def rank_steps(numbers: Numbers) -> list[Latency]:
    """Return the step times of each rank."""
    found = []
    for row in numbers.tables.get("ranks", []):
        columns = {5.0: row.get("step_s_p05"), 50.0: row.get("step_s_median"), 95.0: row.get("step_s_p95")}
        known = {key: value for key, value in columns.items() if isinstance(value, (int, float))}
        if len(known) > 1:
            found.append(_part(Latency, name=f"steps of rank {row.get('rank')}", percentiles_s=known))
    return found


def all_reduce(numbers: Numbers) -> Collective | None:
    """Return the all-reduce; what it is held against is the measured copy within the memory that its data lie in."""
    busbw, algbw = numbers.value("allreduce_gbps"), numbers.value("allreduce_algbw_gbps")
    wrong = numbers.count("allreduce_wrong_elements")
    if busbw is None and algbw is None and wrong is None:
        return None
    kind = "device" if numbers.value("copy_device_gbytes_per_s") else "host"
    bound = numbers.value(f"copy_{kind}_gbytes_per_s")
    library = str(numbers.facts.get("collective", ""))
    return _part(
        Collective,
        operation="all_reduce",
        algorithm=library if library not in ("", "nccl") else "",  # only NCCL lets a switch add
        ranks=numbers.world_size,
        algbw_gbytes_per_s=algbw / BITS if algbw is not None else None,
        busbw_gbytes_per_s=busbw / BITS if busbw is not None else None,
        bound_gbytes_per_s=bound if bound and bound > 0 else None,
        bound_source=f"measured copy within the {kind}'s memory, all ranks together" if bound else "",
        wrong_elements=wrong,
    )


def products(numbers: Numbers) -> dict[str, Speed]:
    """Return the matrix products of all ranks at once beside the best of one rank, by precision."""
    found = {}
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        together, best = (numbers.value(f"matmul_{precision}{kind}_flops") for kind in ("", "_best"))
        if together and best and best > 0:
            found[precision] = _part(
                Speed,
                samples_per_s=together,
                unit="FLOP/s",
                ranks=numbers.world_size,
                one_device_samples_per_s=best,
                one_device="the best sample of a rank",
            )
    return found


def quantities(numbers: Numbers) -> list[Quantity]:
    """Return every measured or derived value with its raw samples; the smoothed loss follows from the raw losses."""
    found = []
    losses = numbers.raw("loss")
    curve = smoothed(losses) if losses else None
    ends = {"loss_first": smoothing_window(len(losses)) - 1, "loss_final": -1}
    for metric in numbers.metrics:
        if metric.value is None and metric.provenance not in ("measured", "derived"):
            continue
        raw = list(numbers.samples.get(metric.name, metric.samples))
        end = next((index for name, index in ends.items() if metric.name.startswith(name)), None)
        if not raw and end is not None and curve is not None:
            raw = [float(curve[end])]
        finite = all(value == value and abs(value) != float("inf") for value in raw)
        found.append(
            _part(
                Quantity,
                name=metric.name,
                value=metric.value if finite else None,
                unit=metric.unit,
                samples=raw if finite else [],
                # Fewer raw samples than the value is of were thinned, as in a baseline.
                median_of_samples=len(raw) == metric.n,
                median_span=_beside_median(raw, metric.n) if finite else [],
                low=metric.ci_low,
                high=metric.ci_high,
                unit_of_name=names.unit_of(metric.name),
            )
        )
    return found


def _beside_median(kept: list[float], n: int) -> list[float]:
    """Return the quantiles on both sides of the median of n samples, none where other samples than quantiles were kept."""
    if not len(kept) == QUANTILES < n or kept != sorted(kept):
        return []
    return kept[QUANTILES // 2 - 1 : QUANTILES // 2 + 1]
