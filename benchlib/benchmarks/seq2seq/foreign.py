"""What a table of throughput states, as claims. Rows of several devices are compared with the row of one such device.

A speed-up is compared with the row of one such device, or with the row that the table marks as its baseline.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchlib.benchmarks.seq2seq.table import OPEN, TIMES, Column, Row, Table
from benchlib.benchmarks.seq2seq.table import table as table_of
from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import Reader
from benchlib.judge.impossible.claim import (
    Claim,
    Collective,
    Compute,
    Latency,
    Learning,
    Mean,
    Quantity,
    Requests,
    Speed,
    SpeedUp,
)
from benchlib.judge.impossible.findings import span
from benchlib.judge.impossible.rules import RULES
from benchlib.judge.references import registry


def not_read(path: Path, text: str) -> list[str]:
    """Return the columns that no rule sees, and those of which a cell is no number."""
    table = table_of(path, text)
    columns, marked = table.columns, any(table.baselines(row) for row in table.rows)
    kinds = {column.kind for column in columns} | {"tokens" for column in columns if column.of_tokens}
    pairs = (("wall_s", "samples_counted"), ("batch", "step"), ("length", "tokens"))
    needs = {kind: other for pair in pairs for kind, other in (pair, pair[::-1])}
    unread = {"unread", "latency", *(kind for kind, other in needs.items() if other not in kinds)}
    ordered = [column for group in _ordered(table).values() for column in group]
    seen = [*ordered, *(_mean(table) if "at_once" in kinds else []), *filter(_whole_set, columns if marked else [])]
    return [column.head for column in columns if not column.whole or (column.kind in unread and column not in seen)]


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and column of throughput, and for each other kind of number that a row has.

    ``UserError`` for a row that does not fit the header.
    """
    table, claims = table_of(path, text), list[Claim]()
    for row in table.rows:
        if speedups := list(_speedups(table, row)):
            claims.append(Claim(subject=row.name, speedups=speedups))
        claims += [_claim(table, row, *rate) for rate in table.of("rate", row)]
        parts: dict[str, Any] = {"learning": _scores(table, row), "requests": _under_way(table, row)}
        parts |= {"latencies": list(_latencies(table, row)), "quantities": list(_impossible(table, row))}
        parts |= {"averages": list(_averages(table, row))}
        claims += [Claim(subject=row.name, **{name: part}) for name, part in parts.items() if part]
        claims += [Claim(subject=row.name, compute=each) for each in _compute(table, row, text)]
        claims += [Claim(subject=row.name, collective=each) for each in _collectives(table, row, text)]
        claims += [Claim(subject=row.name, speed=each) for each in (*_efficiencies(table, row), *_steps(table, row))]
    if all(claim.speedups for claim in claims):
        raise UserError(
            f"{path}: a table without a column of throughput or MFU, or of another number that can be judged"
        )
    return claims


def _compute(table: Table, row: Row, text: str) -> Iterator[Compute]:
    """Yield the MFU of a row, and the FLOP/s of a known device against the highest dense peak of all of its forms and precisions."""
    for _, share in table.of("mfu", row):
        yield Compute(mfu=share, ranks=row.ranks)
    words = set(re.findall(r"[A-Z]+\d+[A-Z]*", row.name.upper()))
    # Of those with two chips some tables count both.
    devices = {
        key: device.name.upper().split() for key, device in registry().devices.items() if "die" not in device.name
    }
    names = [key for key, name in devices.items() if words & set(name) and not words & {"GB200", "GB300"}]
    peak = max((each.in_kit_unit()[1] for each in registry().dense_peaks(names)), default=0.0)
    if peak and not re.search(r"fp4|sparse|int[48]", text, re.I):
        source = "the highest dense one of this device"
        for _, rate in table.of("flops", row):
            yield Compute(flops_per_s=rate, peak_flops=peak, peak_kind="claimed", peak_source=source)


def _collectives(table: Table, row: Row, text: str) -> Iterator[Collective]:
    """Yield the bus bandwidths that are in GB/s, as those of the operation that asks least of the links: an all-reduce."""
    for _, rate in table.of("busbw", row) if "GB/s" in text else []:
        yield Collective(operation="all_reduce", ranks=max(2, row.ranks), busbw_gbytes_per_s=rate)


def _efficiencies(table: Table, row: Row) -> Iterator[Speed]:
    """Yield the efficiencies that no rates stand beside: as such, or as the ratio to one device."""
    sole = _sole(table, row)
    if row.ranks == 1 or (sole and _one_device(table, row, sole)):
        return
    for _, share in table.of("efficiency", row):
        yield Speed(efficiency=share, ranks=row.ranks)
    for column, ratio in table.of("speed-up", row) if any(other.ranks == 1 for other in table.rows) else []:
        if column.words.startswith("scaling"):
            yield Speed(efficiency=ratio / row.ranks, ranks=row.ranks)


def _steps(table: Table, row: Row) -> Iterator[Speed]:
    """Yield the rate of samples with the samples of a step and its time. Beside tokens a batch may be of those."""
    sole, batches, steps = _sole(table, row), table.of("batch", row), table.of("step", row)
    if not sole or sole.of_tokens or any(column.kind == "length" or column.of_tokens for column in table.columns):
        return
    for (_, batch), (column, seconds) in itertools.product(batches, steps):
        ends = [column.scales[row.place] * end for end in span(column.numbers[row.place], 0.99)]
        window = {
            "samples_counted": round(batch),
            "samples_source": "of a step",
            "wall_s": seconds,
            "wall_s_span": ends,
        }
        yield Speed(samples_per_s=sole.numbers[row.place], ranks=row.ranks, **window)


def _scores(table: Table, row: Row) -> Learning | None:
    named = {"f1": "f1", "em": "exact_match", "exact match": "exact_match"}
    scores = {
        named.get(column.words.removesuffix(" %"), column.head): value for column, value in table.of("score", row)
    }
    own = {name: scores.pop(name) for name in named.values() if name in scores}
    return Learning(**own, scores=scores) if own or scores else None


def _latencies(table: Table, row: Row) -> Iterator[Latency]:
    for (words, _), group in _ordered(table).items():
        cells = {column.point: value for column, value in table.of("latency", row) if column in group}
        ends = {name: value for name, value in cells.items() if name.endswith("_s")}
        percentiles = {float(name): value for name, value in cells.items() if name not in ends}
        yield Latency(name=words or "latency", percentiles_s=percentiles, **ends)


def _ordered(table: Table) -> dict[tuple[str, float], list[Column]]:
    """Return the columns of latencies that stand in an order, by what they time and their unit: percentiles, ends and mean."""
    groups = dict[tuple[str, float], list[Column]]()
    for column in table.columns:
        if column.kind == "latency" and column.point:
            groups.setdefault((column.of, max(column.scales)), []).append(column)
    return {key: group for key, group in groups.items() if len(group) > 1}


def _mean(table: Table) -> list[Column]:
    """Return the columns of the mean time of whole requests."""
    means = [column for column in table.columns if column.kind == "latency" and column.point == "mean_s"]
    return [each for each in means if re.fullmatch(rf"((e2e|end to end|request) )?latency( ({TIMES}))?", each.of)]


def _under_way(table: Table, row: Row) -> Requests | None:
    """Return how many requests were under way at once, of each device, with their rate and their mean time."""
    rates = [value for column, value in table.of("rate", row) if not column.of_tokens and not column.per_device]
    means = [value for column, value in table.of("latency", row) if column in _mean(table)]
    counts = [round(count) * row.ranks for _, count in table.of("at_once", row)]
    if not len(rates) == len(means) == len(counts) == 1:
        return None
    return Requests(at_once=counts[0], completed_per_s=rates, mean_latency_s=means[0])


def _averages(table: Table, row: Row) -> Iterator[Mean]:
    """Yield the numbers of a row that is called an average, with those of all other rows."""
    if not re.fullmatch(r"(the )?(average|avg|mean)s?\.?( of .*)?", row.name.strip(), re.I):
        return
    for column in table.columns:
        values = [number for place, number in enumerate(column.numbers) if place != row.place]
        stated = column.numbers[row.place]
        if stated and len(values) > 1 and all(values) and len({*column.scales}) == 1 and column.kind != "speed-up":
            yield Mean(name=column.head, stated=stated, values=values, weights_known=False)


def _impossible(table: Table, row: Row) -> Iterator[Quantity]:
    """Yield what a row states below zero, or as infinite."""
    for column in table.columns:
        if row.place in column.impossible:
            yield Quantity(name=column.head, value=column.impossible[row.place])


def _one_device(table: Table, row: Row, rate: Column) -> Row | None:
    """Return the fastest row of one device as those of this row with the same work, None if there is none with a rate."""
    alike = [other for other in table.rows if (other.ranks, other.device) == (1, row.device) and row.ranks > 1]
    alike = [other for other in alike if table.same_work(row, other)]
    best = max(alike, key=lambda other: rate.numbers[other.place], default=None)
    return best if best and rate.numbers[best.place] else None


def _sole(table: Table, row: Row) -> Column | None:
    """Return the column of throughput whose counts, times and ratios a row states: the only one, or that of samples beside tokens."""
    rates = [column for column, _ in table.of("rate", row) if not column.per_device]
    samples = [column for column in rates if not column.of_tokens]
    return next((columns[0] for columns in (rates, samples) if len(columns) == 1), None)


def _claim(table: Table, row: Row, rate: Column, new: float) -> Claim:
    stated = dict[str, Any]()
    if best := _one_device(table, row, rate):
        stated |= {"one_device_samples_per_s": rate.numbers[best.place], "one_device": best.name}
    if rate is _sole(table, row):
        if not rate.of_tokens:
            stated |= {column.kind: value for column, value in table.of("samples_counted", row)}
        for column, seconds in table.of("wall_s", row):
            ends = span(column.numbers[row.place], 0.99)  # 0.03 hours may be 0.025
            stated |= {"wall_s": seconds, "wall_s_span": [column.scales[row.place] * end for end in ends]}
            for base in table.baselines(row)[:1] if _whole_set(column) and not rate.of_tokens else []:
                count = rate.numbers[base.place] * column.scales[base.place] * column.numbers[base.place]
                if count and "samples_counted" not in stated:
                    stated |= {"samples_counted": round(count), "samples_source": f"as in {base.name}"}
    unit, of = _unit(rate), "one rank" if rate.per_device else "all ranks"
    lengths = [length for _, length in table.of("length", row) if length % 1 == 0]
    tokens = [each for each, _ in table.of("rate", row) if each.of_tokens and each.per_device == rate.per_device]
    if len(lengths) == len(tokens) == 1 and re.search("sample|seq", rate.words):
        stated |= {"tokens_per_s": tokens[0].numbers[row.place], "sequence_length": lengths[0], "tokens_padded": False}
    speed = Speed(samples_per_s=new, unit=unit, ranks=row.ranks, stands_for=of, **stated)
    return Claim(subject=f"{row.name}, {rate.head}", speed=speed)


def _unit(rate: Column) -> str:
    return "tokens/s" if rate.of_tokens else "samples/s"


def _whole_set(column: Column) -> bool:
    return column.kind == "wall_s" and bool(re.search("data ?set", column.words))


def _speedups(table: Table, row: Row) -> Iterator[SpeedUp]:
    """Yield the ratios that a row states, each with the two rates or times that it is of; without them if the table does not say.

    A ratio holds if a row that it may be compared with gives it: one such device, one that is marked as baseline, by ``1x`` or
    a word, or the row before. If the row is not faster than the baseline, the ratio is one of something else.
    """
    sole = _sole(table, row)
    rates = [sole] if sole else []
    alone = [best] if sole and (best := _one_device(table, row, sole)) else []
    shares = [row.ranks * share for _, share in table.of("efficiency", row) if row.ranks > 1]
    for stated in shares:  # without rates beside it an efficiency is judged as such
        yield from itertools.islice(_ratios(stated, rates, row, alone), 1)
    for column, stated in table.of("speed-up", row):
        marked = table.baselines(row) if stated != 1 else []
        near = marked + list(table.rows[max(0, row.place - 1) : row.place]) if marked else []
        ratios = list(_ratios(stated, rates, row, [each for each in alone if column.numbers[each.place] in (0, 1)]))
        others = _ratios(stated, rates, row, near)
        ratios += [each for each in others if each.new and each.old and (each.new > each.old) == (stated > 1)]
        if ratios:
            # An improvement may be that of anything in the table, a speed-up that of a time.
            kinds = ("wall_s", "latency", "step", *OPEN * bool(re.search("improve|gain", column.words)))
            ratios += _ratios(stated, [each for each in table.columns if each.kind in kinds], row, [*alone, *marked])
        elif stated != 1:
            ratios = [SpeedUp(stated=stated)]
        judged = RULES["speed-up"].findings(Claim(speedups=ratios))
        held = [ratio for ratio, found in zip(ratios, judged, strict=True) if found.status == "PASS"]
        yield from held[:1] or ratios[:1]


def _ratios(stated: float, columns: Sequence[Column], row: Row, bases: Sequence[Row]) -> Iterator[SpeedUp]:
    """Yield a stated ratio with the numbers of a row and of those that it may be compared with; those of times are inverse."""
    for base, column in itertools.product(bases, columns):
        here, there = (column.scales[each.place] * column.numbers[each.place] for each in (row, base))
        if here and there:
            unit = _unit(column) if column.kind == "rate" else "s" * (column.kind not in OPEN)
            common = {"stated": stated, "base": base.name, "unit": unit}
            if column.kind in ("rate", *OPEN):
                yield SpeedUp(new=here, old=there, **common)
            if column.kind != "rate":
                yield SpeedUp(new=there, old=here, **common)


def _sniff(path: Path, text: str) -> bool:
    return path.suffix.lower() in (".csv", ".tsv", ".md") or text.lstrip().startswith("|")


READERS = {"table": Reader("a throughput table (CSV, TSV or Markdown)", read, sniff=_sniff, unread=not_read)}
