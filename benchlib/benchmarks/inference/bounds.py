"""How near prefill and decoding each come to what the machine allows. No torch.

    prefill   2 x parameters x prompt tokens over the peak of matrix products; the time is that of the first token of a fresh
              prompt that is answered alone, before the tests
    decoding  bytes of the weights and of the query's cache over the bandwidth of memory; the time is that per output token

Both are times of one query. Where queries share a step, decoding reads the weights once for all of them: what one query
reaches says how long it waits for a token, and ``roofline_share_offline`` what the machine gives to all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchlib.results.metrics import Metric, derived
from benchlib.workloads.llm import queries


def shares(
    tests: Sequence[Mapping[str, Any]],
    tables: Mapping[str, np.ndarray],
    probes: Sequence[Mapping[str, Any]],
    engines: Mapping[str, Mapping[str, Any]],
    bytes_per_s: float,
    flop_per_s: float,
    end: str,
) -> list[Metric]:
    """Return the share of each bound that was reached: of prefill for each probed engine, of decoding for each streamed test.

    ``tests`` and ``probes`` are rows of the result, ``tables`` the queries of tests, ``engines`` what engines say of
    themselves; one that does not know its weights has no bound. Names end with ``end``.
    """
    made = []
    for row in probes:
        facts = engines.get(row["engine"], {})
        if "product_parameters" in facts:
            least = 2 * facts["product_parameters"] * row["tokens"] / flop_per_s
            how = f"2 x parameters x {row['tokens']} tokens over {flop_per_s / 1e9:.4g} GFLOP/s, over the time to the first token alone"
            values = [least / time for time in row["fresh_s"]]
            made.append(derived(f"prefill_share_{row['engine']}{end}", values, "ratio", "higher", how))
    for row in tests:
        facts, table = engines.get(row["engine"], {}), tables.get(row["test"])
        if "read_bytes" not in facts or table is None or row["scenario"] == "Offline":
            continue
        done = queries.completed(table)
        done = done[(done["tokens"] > 1) & (queries.tpot_s(done) > 0)]
        context = done["prompt_tokens"] + done["tokens"] / 2
        least_s = (facts["read_bytes"] + context * facts["cache_bytes_per_token"]) / bytes_per_s
        if len(done):
            name = f"decode_share_{str(row['test']).lower().replace(' ', '_')}{end}"
            how = f"(weights + cache) over {bytes_per_s / 1e9:.3g} GB/s, over the time per output token of each query"
            made.append(derived(name, (least_s / queries.tpot_s(done)).tolist(), "ratio", "higher", how))
    return made
