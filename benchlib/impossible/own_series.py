"""What the tables of a collectives run state, as claims: one for each series, against the limits of the same run."""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from benchlib.bandwidth import BUS_FACTORS
from benchlib.collectives.sizes import size_text
from benchlib.errors import UserError
from benchlib.impossible.claim import Claim, Collective, Latency
from benchlib.impossible.numbers import Numbers

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
