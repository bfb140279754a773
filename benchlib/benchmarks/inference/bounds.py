"""How near prefill and decoding come to what the machine under each engine allows. No torch.

    prefill   2 x parameters x prompt tokens over the peak of matrix products
    decoding  bytes of the weights and of the query's cache over the bandwidth of memory (a copy as large as the weights)

``offline``: the least time for all queries, with the weights read once for the queries of all slots; several workers share the
queries as fast as each can be. ``shares``: times of one query, the first token of a fresh prompt that is answered alone before
the tests, and the time per output token. Where queries share a step, that says how long one waits for a token, and
``roofline_share_offline`` what the machine gives to all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from benchlib.results.metrics import Metric, derived, not_available
from benchlib.workloads.llm import queries


@dataclass(frozen=True)
class Bound:
    """One engine and the machine under it: what a step reads and multiplies, and what the machine reaches."""

    slots: int
    read_bytes: float  # weights that decoding reads
    cache_bytes_per_token: float
    product_parameters: float  # in matrix products
    bytes_per_s: float
    flop_per_s: float

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Bound | None":
        """Return the bound of an engine by what it says of itself; None where it does not say all."""
        values: dict[str, Any] = {field.name: facts.get(field.name) for field in fields(cls)}
        positive = all(isinstance(value, (int, float)) and value > 0 for value in values.values())
        return cls(**values) if positive else None

    def tokens_per_s(self, context: float) -> float:
        """Return the bound of decoding with all slots in use, for answers of queries with so many tokens in the cache."""
        return self.bytes_per_s / (self.read_bytes / self.slots + context * self.cache_bytes_per_token)

    def prompt_tokens_per_s(self) -> float:
        """Return the bound of prefill."""
        return self.flop_per_s / (2 * self.product_parameters)


def offline(bounds: Sequence[Bound], table: np.ndarray | None, missing: str, end: str) -> Iterator[Metric]:
    """Yield both bounds of all engines together, and the share of the least time in that of Offline; ``missing`` says why not."""
    names = (f"decode_bound_tokens_per_s{end}", f"prefill_bound_tokens_per_s{end}", f"roofline_share_offline{end}")
    units = ("tokens/s", "tokens/s", "ratio")
    done = queries.completed(table) if table is not None else np.empty(0, queries.QUERY)
    if missing or not bounds or not len(done):
        why = missing or "no query of Offline was completed"
        yield from (not_available(name, unit, "higher", why) for name, unit in zip(names, units, strict=True))
        return
    prompts, tokens = float(done["prompt_tokens"].sum()), float(done["tokens"].sum())
    context = float(np.mean(done["prompt_tokens"] + done["tokens"] / 2))
    decode = sum(bound.tokens_per_s(context) for bound in bounds)
    prefill = sum(bound.prompt_tokens_per_s() for bound in bounds)
    alone_s = [tokens / each.tokens_per_s(context) + prompts / each.prompt_tokens_per_s() for each in bounds]
    at = f"{sum(bound.bytes_per_s for bound in bounds) / 1e9:.3g} GB/s"
    of = f", sum of {len(bounds)} workers that measured at once" if len(bounds) > 1 else ""
    slots = ", ".join(map(str, sorted({bound.slots for bound in bounds})))
    how = f"{at} over weights / {slots} slots + a cache of {context:.0f} tokens{of}"
    yield derived(names[0], decode, units[0], "none", how)
    flops = sum(bound.flop_per_s for bound in bounds) / 1e9
    yield derived(names[1], prefill, units[1], "none", f"{flops:.4g} GFLOP/s over 2 x parameters{of}")
    how = "least time by both bounds over the time of Offline"
    least_s = 1 / sum(1 / each_s for each_s in alone_s)
    yield derived(names[2], least_s / queries.span_s(done), units[2], "higher", how)


def shares(
    tests: Sequence[Mapping[str, Any]],
    tables: Mapping[str, np.ndarray],
    probes: Sequence[Mapping[str, Any]],
    engines: Mapping[str, Sequence[Bound]],
    end: str,
) -> Iterator[Metric]:
    """Yield the share of each bound that was reached: of prefill for each probed engine, of decoding for each streamed test.

    ``tests`` and ``probes`` are rows of the result, ``tables`` the queries of tests, ``engines`` the bounds of each by the
    number of its worker; one that does not say how large its weights are has none. Names end with ``end``.
    """
    for row in probes:
        bounds = engines.get(row["engine"], ())
        if bounds:
            rate = max(bound.prompt_tokens_per_s() for bound in bounds)
            how = f"{row['tokens']} tokens over {rate:.4g} tokens/s by the peak, over the time to the first token alone"
            how += "; of the fastest worker" * (len(bounds) > 1)
            values = [row["tokens"] / rate / time for time in row["fresh_s"]]
            yield derived(f"prefill_share_{row['engine']}{end}", values, "ratio", "higher", how)
    for row in tests:
        bounds, table = engines.get(row["engine"], ()), tables.get(row["test"])
        if not bounds or table is None or row["scenario"] == "Offline":
            continue
        done = queries.completed(table)
        done = done[(done["tokens"] > 1) & (queries.tpot_s(done) > 0)]
        context = done["prompt_tokens"] + done["tokens"] / 2
        each = {name: np.array([getattr(bound, name) for bound in bounds]) for name in ("read_bytes", "cache_bytes_per_token", "bytes_per_s")}  # fmt: skip
        at = np.maximum(done["worker"], 0)  # -1: the engine in the process of the test
        least_s = (each["read_bytes"][at] + context * each["cache_bytes_per_token"][at]) / each["bytes_per_s"][at]
        if len(done):
            name = f"decode_share_{str(row['test']).lower().replace(' ', '_')}{end}"
            how = f"(weights + cache) over {min(each['bytes_per_s']) / 1e9:.3g} GB/s, over the time per output token of each query"
            yield derived(name, (least_s / queries.tpot_s(done)).tolist(), "ratio", "higher", how)
