"""What the numbers of a collectives run say, in sentences, each with its ratio to a bound."""

from collections.abc import Iterator
from typing import Any

from benchlib.bandwidth import NO_LIMIT
from benchlib.collectives.config import CollectivesConfig
from benchlib.collectives.sizes import size_text
from benchlib.metrics import quantity
from benchlib.published import placements, summary
from benchlib.results import Result, Run

Row = dict[str, Any]
# Shares of the raw sockets that a good library reaches, and from which size on; a run gates on them where it is asked to.
GOOD = {
    ("all_reduce", "library"): (0.8, 16 << 20),
    ("broadcast", "library"): (0.9, 64 << 20),
    ("send_recv", "library"): (0.9, 64 << 20),
    ("all_gather", "direct"): (0.6, 64 << 20),
    ("reduce_scatter", "direct"): (0.6, 64 << 20),
}
NAMES = {"ring": "the ring", "tree": "recursive doubling", "rs_ag": "reduce-scatter and all-gather"}
SOCKETS = {
    "tcp socket one way": "a raw TCP socket carries one way",
    "tcp socket all ranks": "raw TCP sockets of all ranks carry at once",
}
HIGH_SKEW = 0.5  # of an operation's time, between the first and the last rank


def reading(run: Run) -> list[str]:
    """Return sentences about what was verified, which share of which limit was reached, and what takes the time."""
    config, result = run.config, run.result
    assert isinstance(config, CollectivesConfig) and result is not None
    found = [
        _verified(result),
        *_shares(result),
        _memory(result),
        _claimed(result),
        _latency(result),
        *_crossovers(result),
        _skew(result),
        _overlap(result),
        _missing(result),
        _cut(result),
        summary(placements(run)),
    ]
    return [sentence for sentence in found if sentence]


def _rows(result: Result, table: str) -> list[Row]:
    return result.tables.get(table, [])


def _word(operation: str) -> str:
    return operation.replace("_", "-").replace("send-recv", "send/recv")


def _verified(result: Result) -> str:
    checked, wrong = int(result.facts["checked_elements"]), int(result.facts["wrong_elements"])
    if not wrong:
        return f"Every one of the {checked:,} elements that were compared is right, bit by bit."
    first = next(iter(_rows(result, "wrong")), None)
    told = f", first in {first['case']}: {first['first']}" if first else ""
    return f"{wrong:,} of {checked:,} elements are wrong{told}: no speed of this run counts."


def _shares(result: Result) -> Iterator[str]:
    """Yield of each operation its share of the raw sockets at its largest size, and whether that is what to expect.

    What is faster than the sockets has no limit in them, and whether it is good is not told by its share.
    """
    rows = _rows(result, "shares")
    for key in dict.fromkeys((row["operation"], row["variant"]) for row in rows):
        row = max((row for row in rows if (row["operation"], row["variant"]) == key), key=lambda row: row["bytes"])
        variant = " (ours)" if key[1] == "direct" else ""
        text = (
            f"The {_word(key[0])}{variant} reaches {row['share']:.2f} of what {SOCKETS[row['bound']]} at {size_text(row['bytes'])}: "
            f"{quantity(row['busbw_gbps'])} of {quantity(row['bound_gbps'])} Gbps"
        )
        good, least = GOOD.get(key, (None, 0))
        if row["share"] > NO_LIMIT:
            text += "; the sockets were slower than what the library drives, so they are no limit in this run"
        elif good is not None and row["bytes"] >= least:
            text += f"; {good:g} is to be expected, and it is {'met' if row['share'] >= good else 'missed'}"
        yield text + "."


def _memory(result: Result) -> str:
    """Say which share of the memory's own speed the all-reduce has, at the largest size."""
    best = result.metric("allreduce_busbw_gbps")
    copies = [row for row in _rows(result, "bounds") if row["bound"] == "memory copy" and row["gbps"]]
    if best is None or best.value is None or not copies:
        return ""
    copy = max(copies, key=lambda row: row["bytes"])
    return (
        f"Copies of {size_text(copy['bytes'])} within the memory move {quantity(copy['gbps'])} Gbps, read and written by all ranks; "
        f"the all-reduce has {best.value / copy['gbps']:.3f} of it."
    )


def _claimed(result: Result) -> str:
    link = next((row for row in _rows(result, "bounds") if row["provenance"] == "claimed"), None)
    best = result.metric("allreduce_busbw_gbps")
    if link is None or best is None or best.value is None:
        return ""
    return f"The all-reduce reaches {best.value / link['gbps']:.2f} of the {quantity(link['gbps'])} Gbps that the links claim ({link['source']})."


def _latency(result: Result) -> str:
    fit = next(
        (row for row in _rows(result, "fits") if (row["operation"], row["variant"]) == ("all_reduce", "library")), None
    )
    if fit is None:
        return ""
    if fit["alpha_us"] is None:
        return f"Start-up time and bandwidth of the all-reduce cannot be told apart: {fit['reason']}."
    return (
        f"An all-reduce takes {quantity(fit['alpha_us'])} us to start; below {size_text(fit['half_bytes'])} (n1/2) "
        f"that is more than half of its time. The line through {fit['points']} sizes misses them by {fit['residual']:.0%}."
    )


def _crossovers(result: Result) -> Iterator[str]:
    for row in _rows(result, "crossover"):
        where = (
            f" {'from' if 'from there' in row['reason'] else 'up to'} {size_text(row['bytes'])}" if row["bytes"] else ""
        )
        speed = "faster" if row["bytes"] else row["reason"]
        of = f" ({row['points']} sizes were timed)" if row.get("points") else ""  # older results do not say
        yield f"Against the library's all-reduce {NAMES.get(row['algorithm'], row['algorithm'])} is {speed}{where}{of}."


def _skew(result: Result) -> str:
    rows = [
        row
        for row in _rows(result, "series")
        if row["median_us"] and row["bytes"] >= 1 << 20 and row["variant"] == "library"
    ]
    # Of a rooted operation the other ranks are done early by its nature.
    together = [row for row in rows if row["operation"] in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")]
    if not together:
        return ""
    worst = max(together, key=lambda row: row["skew_us"] / row["median_us"])
    share = worst["skew_us"] / worst["median_us"]
    told = f"Between the first and the last rank lie at most {share:.0%} of an operation's time ({_word(worst['operation'])}, {size_text(worst['bytes'])}"
    return told + f"; rank {worst['slowest_rank']} is the last most often)." if share > HIGH_SKEW else told + ")."


def _overlap(result: Result) -> str:
    rows = _rows(result, "overlap")
    if not rows:
        return ""
    told = ", ".join(f"{_word(row['operation'])} {row['hidden_share']:.0%}" for row in rows)
    return f"Beside a computation of the same length this share of the time is hidden at {size_text(rows[0]['bytes'])}: {told}."


def _missing(result: Result) -> str:
    rows = _rows(result, "unsupported")
    if not rows:
        return ""
    reasons: dict[str, set[str]] = {}
    for row in rows:
        kind = " ".join(word for word in (_word(row["operation"]), row["reduction"], row["dtype"]) if word)
        reasons.setdefault(row["reason"], set()).add(kind)
    told = "; ".join(f"{', '.join(sorted(kinds))} ({reason})" for reason, kinds in reasons.items())
    return f"Not supported by {result.facts['collective']}: {told}."


def _cut(result: Result) -> str:
    cut = result.facts.get("cut") or []
    short = [f"{what} {share:.0%}" for what, share in (result.facts.get("shortened") or {}).items()]
    told = f"The time did not hold all that was planned: {'; '.join(cut[:5])}. " if cut else ""
    told += f"To fit it, series were given a part of their time: {', '.join(short)}." if short else ""
    return told.strip()
