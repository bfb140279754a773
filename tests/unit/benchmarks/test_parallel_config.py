"""Shapes against counted parameters, and what is refused before anything starts, with the nearest that fits."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering, LlamaConfig, LlamaForCausalLM

from benchlib.benchmarks.parallel import estimate, largest_batch, measure, proofs, run, scaling, strategies
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.judge import _counted, _losses, _proofs, claims, lacks
from benchlib.benchmarks.parallel.metrics import complete
from benchlib.benchmarks.parallel.shapes import MODELS, Layout
from benchlib.config.schema import build
from benchlib.core.errors import UserError
from benchlib.judge.checks import right_results_check
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.verdict import judged
from benchlib.results.run import Run, save_result
from benchlib.runtime import largest
from benchlib.runtime.group import World
from benchlib.workloads.transformer_stack import Stack, loss
from tests.fixtures.make_smoke import unpack

LLAMA = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "positions": 16, "vocabulary": 40}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_stack_has_the_parameters_of_its_shape(name: str) -> None:
    shape = replace(MODELS[name], hidden=16 * MODELS[name].heads, layers=2, ffn=24, positions=8, vocabulary=30)
    with torch.device("meta"):
        model = Stack(shape, 8)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


def test_a_llama_computes_what_transformers_does() -> None:
    shape = replace(MODELS["llama-1b"], **LLAMA, tied=False)
    own = Stack(shape, 16).double()
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=40, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    other = LlamaForCausalLM(config).double()
    words = [
        ("embed.tokens", "model.embed_tokens"), ("blocks.", "model.layers."), ("norm1", "input_layernorm"), ("norm2", "post_attention_layernorm"),
        ("attention.query", "self_attn.q_proj"), ("attention.key", "self_attn.k_proj"), ("attention.value", "self_attn.v_proj"),
        ("attention.output", "self_attn.o_proj"), ("ffn.up", "mlp.up_proj"), ("ffn.gate", "mlp.gate_proj"), ("ffn.down", "mlp.down_proj"),
        ("final.norm", "model.norm"), ("head.", "lm_head."),
    ]  # fmt: skip
    _load(own, other, words)
    tokens = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(own(tokens), other(tokens).logits, rtol=1e-4, atol=1e-7)  # its norms and angles are fp32


def test_an_encoder_computes_what_transformers_does() -> None:
    shape = replace(MODELS["bert-base"], hidden=32, layers=2, heads=4, kv_heads=4, ffn=48, positions=16, vocabulary=40)
    own = Stack(shape, 16).double()
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=40, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5,
    )  # fmt: skip
    other = BertForQuestionAnswering(config).double()
    words = [
        ("embed.tokens", "bert.embeddings.word_embeddings"), ("embed.places", "bert.embeddings.position_embeddings"),
        ("embed.types", "bert.embeddings.token_type_embeddings"), ("embed.norm", "bert.embeddings.LayerNorm"), ("blocks.", "bert.encoder.layer."),
        ("norm1", "attention.output.LayerNorm"), ("norm2", "output.LayerNorm"), ("attention.query", "attention.self.query"),
        ("attention.key", "attention.self.key"), ("attention.value", "attention.self.value"), ("attention.output.w", "attention.output.dense.w"),
        ("attention.output.b", "attention.output.dense.b"), ("ffn.up", "intermediate.dense"), ("ffn.down", "output.dense"), ("head.", "qa_outputs."),
    ]  # fmt: skip
    _load(own, other, words)
    drawn = torch.Generator().manual_seed(0)
    tokens, places = torch.randint(40, (2, 16), generator=drawn), torch.randint(16, (2, 2), generator=drawn)
    expected = other(tokens, start_positions=places[:, 0], end_positions=places[:, 1]).loss
    torch.testing.assert_close(loss(own(tokens), places), expected)


def _load(own: Stack, other: torch.nn.Module, words: list[tuple[str, str]]) -> None:
    theirs, mine = other.state_dict(), {}
    for name in own.state_dict():
        mapped = f"final.{name}" if name.startswith("norm.") else name
        for word, replacement in words:
            if word in mapped and replacement not in mapped:
                mapped = mapped.replace(word, replacement)
        mine[name] = theirs[mapped]
    own.load_state_dict(mine)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"heads": 5}, "heads = 5 does not divide hidden = 128: set heads=4"),
        ({"seq_len": 200}, "set seq_len=128"),
        ({"nproc": 4, "strategies": "data_tensor", "data": 3}, "data(3) × tensor(2) = 6 but world size is 4"),
        ({"nproc": 3, "strategies": "data"}, "data = 3 does not divide batch_size = 8: set batch_size=9"),
        ({"nproc": 2, "strategies": "tensor", "vocabulary": 511}, "tensor = 2 does not divide vocabulary = 511 of tiny: set vocabulary=512"),
        ({"nproc": 8, "strategies": "pipeline"}, "8 stages (1f1b) for 4 layers of tiny: set layers=8"),
        ({"nproc": 2, "strategies": "pipeline", "micro_batches": 3}, "micro_batches = 3 does not divide the 8 samples of a pipeline: set micro_batches=2"),
        ({"nproc": 2, "strategies": "tensor", "model": "gpt2", "vocabulary": 50258}, "set untie=true"),
        ({"planted": "data"}, "set planted_slowdown=1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        build("parallel", {"benchmark": "parallel", **values})
    assert says in str(caught.value)


def test_a_trial_takes_steps_and_says_what_they_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "limited", lambda device, limit: None)  # not of this process
    config = ParallelConfig(hidden=32, layers=1, heads=2, ffn=32, vocabulary=40, seq_len=8)
    row = largest_batch.one_trial(config, 2, 1 << 60)
    assert row["fits"] and row["peak_gb"] > 0 and row["samples_per_s"] > 0
    assert not largest_batch.one_trial(config, 2, 1 << 20)["fits"]  # the process alone holds more
    found = largest.search(lambda batch: row | {"batch": batch, "fits": batch <= 11}, 64)
    assert [one["batch"] for one in found.tried if one["fits"]][-1] == found.batch == 11


@pytest.mark.parametrize(
    ("seconds", "alpha_s", "beta_s_per_byte"),
    [
        (lambda size: 2e-4 + 1e-9 * size, 2e-4, 1e-9),
        (lambda size: 1e-9 * size - 3e-7, 0.0, 1e-9),  # a free line starts below zero
        (lambda size: 1e-3 if size in (1 << 10, 1 << 20) else 1.0, None, None),
    ],
)
def test_links_are_fitted_within_bounds(
    monkeypatch: pytest.MonkeyPatch, seconds: Any, alpha_s: Any, beta_s_per_byte: Any
) -> None:
    taken = [SimpleNamespace(seconds=[seconds(size)], wrong=0) for size in measure.LINK_BYTES]
    monkeypatch.setattr(measure, "Exercise", lambda case, place: case)
    monkeypatch.setattr(measure, "take_in_turns", lambda cases, device, pace: taken)
    here = World(0, 2, 0, 2, torch.device("cpu"), "gloo")
    row = measure.links(here)[0]
    fit = row["alpha_s"], row["beta_s_per_byte"]
    assert fit == (
        (None, None) if alpha_s is None else (pytest.approx(alpha_s, abs=1e-7), pytest.approx(beta_s_per_byte, rel=0.2))
    )
    assert ("do not fit a line" in row["reason"]) == (alpha_s is None)


@pytest.mark.parametrize(
    ("strategy", "schedule", "batches", "expected"),
    [
        # Half of the samples: 4 x 10 ms, the optimizer's 2 ms, and 4 ms for 2 narrow layers, of which there are 4.
        ("data", "", {4}, 0.040 + 0.002 + 0.008),
        # Four micro-batches of 2 samples, half of the layers and about half of the optimizer; a narrow rank has 2 layers of 4.
        ("pipeline", "1f1b", {2}, 4 * 0.020 / 2 + 0.001 + 0.004),
    ],
)
def test_compute_of_a_rank_is_its_share_and_what_the_strategy_adds(
    monkeypatch: pytest.MonkeyPatch, strategy: str, schedule: str, batches: set[int], expected: float
) -> None:
    config, layout = ParallelConfig(nproc=2), Layout(**{strategy: 2})
    seen = set()

    def phases(_: Any, job: strategies.Job, way: str, *rest: Any) -> dict[str, float]:
        if way == "spread":
            return {"step_s": 0.005 if strategy == "data" else 0.004 + narrow_s[-1] / (1 - 1 / 5)}
        if job.form != MODELS["tiny"]:
            times = {"data_s": 0.0, "forward_s": 0.0004, "backward_s": 0.0006, "optimizer_s": 0.0}
            narrow_s.append(0.001 if strategy == "data" else 4 * 0.001 / 2)
            return times
        seen.add(job.batch)
        return {
            "data_s": 0.001 * job.batch,
            "forward_s": 0.003 * job.batch,
            "backward_s": 0.006 * job.batch,
            "optimizer_s": 0.002,
        }

    narrow_s: list[float] = []
    monkeypatch.setattr(measure, "_phases", phases)
    monkeypatch.setattr(measure, "prepare", lambda *_: "spread")
    monkeypatch.setattr(measure, "whole", lambda _: "alone")
    free = estimate.Rates(1e11, 1e10, lambda op, ranks, stride: (0.0, 0.0))
    here = World(0, 2, 0, 2, torch.device("cpu"), "gloo")
    plan, alone = measure.Plan(config.shapes[0], strategy, schedule, layout, 8), measure.Alone()
    first = measure.compute_s(config, plan, free, here, None, alone)  # type: ignore[arg-type]
    assert first == pytest.approx(expected, rel=0.02) and seen == batches
    seen.clear()
    assert measure.compute_s(config, plan, free, here, None, alone) == pytest.approx(first)  # type: ignore[arg-type]
    assert not seen  # what was measured once is kept


@pytest.mark.parametrize(
    ("table", "row", "column", "reason"),
    [
        ("strategies", {"fp64": False}, "loss_error", True), ("strategies", {"fp64": True}, "loss_error", False),
        ("strategies", {}, "weight_error", False), ("strategies", {"fp64": False}, "loss_error_fp32", False),
        ("strategies", {"n": 4}, "step_ci_low", True), ("scaling", {"n": 5}, "samples_per_s_low", False),
        ("strategies", {"comm_s": 0.0}, "comm_hidden_share", True), ("strategies", {"comm_s": None}, "comm_hidden_share", False),
        ("strategies", {"schedule": "1f1b", "pipeline": 2}, "bubble_s", False), ("strategies", {"schedule": ""}, "bubble_s", True),
        ("alpha_beta", {"reason": "no line"}, "alpha_s", True), ("alpha_beta", {"reason": ""}, "alpha_s", False),
        ("batches", {"reason": "out of memory"}, "peak_gb", True), ("batches", {"reason": ""}, "peak_gb", False),
        ("strategies", {"unpredicted": ""}, "predicted_step_s", False), ("facts", {}, "checkpointing_error", False),
    ],
)  # fmt: skip
def test_a_null_needs_its_own_reason(table: str, row: dict[str, Any], column: str, reason: bool) -> None:
    assert lacks(table, row, column) is reason


def _row(strategy: str, world: int, step_s: float, kind: str = "", batch: int = 8) -> dict[str, Any]:
    return {
        "key": f"tiny {strategy} {kind}{world}", "model": "tiny", "strategy": strategy, "schedule": "", "scaling": kind, "world": world,
        "batch_size": batch, "seq_len": 10, "precision": "fp32", "flops": 6e9, "step_s": step_s, "step_ci_low": step_s, "step_ci_high": step_s,
        "samples_per_s": batch / step_s, "losses": [2.0, 1.5], "status": "ok", "fp64": True, "loss_error": 1e-15, "weight_error": 1e-11,
        "gradient_error": 1e-7, "loss_error_fp32": 1e-7, "n": 5, "predicted_step_s": None, "unpredicted": "one device",
    }  # fmt: skip


def test_rows_are_completed_and_scaled() -> None:
    row = _row("data", 2, 0.1)
    complete(row, {"matmul_flops": {"fp32": 1e11}, "matmul_flops_alone": 2e11})
    assert row["tokens_per_s"] == 800 and row["mfu"] == pytest.approx(0.3)
    points = scaling.table(
        [_row("single", 1, 0.2), row, _row("single", 1, 0.18, "strong"), _row("single", 1, 0.1, "weak", 4)]
    )
    assert [(point["kind"], point["world"], point["samples_per_s"]) for point in points] == [
        ("strong", 1, pytest.approx(8 / 0.18)), ("strong", 2, 80), ("weak", 1, 40), ("weak", 2, 80),
    ]  # fmt: skip


def test_a_strategy_without_proof_or_with_other_losses_fails() -> None:
    config = ParallelConfig()

    def statuses(rows: list[dict[str, Any]]) -> list[str]:
        return [check.status for check in (*_proofs(config, rows), _losses(config, rows))]

    rows = [_row("single", 1, 0.2), _row("data", 2, 0.1)]
    assert statuses(rows) == ["PASS", "PASS", "PASS"]
    wrong = {"losses": [2.0, 1.51], "loss_error": 1.1e-12, "gradient_error": 2e-5}
    assert statuses([rows[0], rows[1] | wrong]) == ["FAIL", "FAIL", "FAIL"]
    # Only the flag says that a device has no fp64: a column that is gone, or infinite, is a failure.
    without = [
        {name: value for name, value in row.items() if name not in ("loss_error", "weight_error")} for row in rows
    ]
    assert statuses(without) == ["FAIL", "PASS", "PASS"]
    assert statuses([row | {"fp64": False} for row in without]) == ["SKIPPED", "PASS", "PASS"]
    del without[0]["fp64"]
    assert statuses(without) == ["FAIL", "PASS", "PASS"]


@pytest.mark.parametrize("value", [math.inf, math.nan, None])
def test_errors_that_are_no_numbers_fail_after_they_were_stored(tmp_path: Path, value: float | None) -> None:
    one = unpack("parallel", tmp_path / "run")
    assert one.result is not None
    for row in one.result.tables["strategies"]:
        row |= dict.fromkeys(("loss_error", "weight_error", "loss_error_fp32"), value)
    save_result(one.path, one.result)
    checks = {check.name: check for check in judged(Run(one.path), tmp_path).checks}
    for name in ("equal to one device in fp64", "equal to one device in fp32"):
        assert checks[name].status == "FAIL" and "loss_error" in checks[name].reason
    assert checks["finite"].status == "FAIL"


@pytest.mark.parametrize("place", [0, 1])
def test_a_nan_is_infinitely_far_wherever_it_is(place: int) -> None:
    values = [("a", torch.ones(2)), ("b", torch.ones(2))]
    values[place][1][1] = math.nan
    assert proofs._apart(values, {"a": torch.zeros(2), "b": torch.zeros(2)}) == math.inf


def test_shards_are_counted_once_and_an_empty_one_fails() -> None:
    def status(*ranks: dict[Any, int]) -> str:
        row = {"key": "x", "model": "tiny", "parameters": 100, "counted_parameters": measure.counted(ranks)}
        return _counted([row]).status

    copies = [
        {("norm", ()): 10, ("weight", (("data", rank % 2),)): 45} for rank in range(4)
    ]  # two copies of two shards
    assert status(*copies) == "PASS"
    for rank in range(4):  # an empty one fails, also where another copy is whole
        assert (
            status(*(dict.fromkeys(held, 0) if place == rank else held for place, held in enumerate(copies))) == "FAIL"
        )
    assert status(copies[0]) == "FAIL"


@pytest.mark.parametrize(
    ("wrong", "status"), [([0, 0], "PASS"), ([0, 3], "FAIL"), ([0, None], "FAIL"), ([], "FAIL"), (0.0, "FAIL")]
)
def test_wrong_results_of_the_timed_exchanges_fail(wrong: Any, status: str) -> None:
    facts = {"exchange_wrong_elements": wrong, "learning_rates": {"min": 1e-3}}
    stated = OwnClaims(Numbers("parallel", [], 2, facts=facts, tables={"x": []}))
    assert right_results_check(stated, 2).status == status
    assert right_results_check(list(claims(Numbers("parallel", [], 1))), 1).status == "SKIPPED"


def test_what_a_rank_cannot_hold_is_not_run_and_says_so() -> None:
    config = ParallelConfig(nproc=2)
    plan = measure.Plan(config.shapes[0], "single", "", Layout(), 8)
    assert run._too_large(config, plan, 1e12) == ""
    tables: dict[str, Any] = {"strategies": []}
    row = run._one(config, plan, run._too_large(config, plan, 1e6), None, None, tables, {}, {})  # type: ignore[arg-type]
    assert row["status"] == "skipped" and "GB of memory and may use 0.001 GB" in row["reason"]
    assert tables == {"strategies": [row]}
