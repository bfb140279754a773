"""Shapes against counted parameters, and what is refused before anything starts, with the nearest that fits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering, LlamaConfig, LlamaForCausalLM

from benchlib.benchmarks.parallel import largest_batch, measure, run, scaling
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.judge import _losses, _proved, claims
from benchlib.benchmarks.parallel.measure import fitted
from benchlib.benchmarks.parallel.metrics import complete
from benchlib.benchmarks.parallel.shapes import MODELS, Layout
from benchlib.config.schema import build
from benchlib.core.errors import UserError
from benchlib.judge.checks import right_results_check
from benchlib.judge.impossible.own import Numbers
from benchlib.runtime import largest
from benchlib.workloads.transformer_stack import Stack, loss

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


def test_links_are_fitted_to_a_line() -> None:
    sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
    row = fitted(sizes, [2e-4 + 1e-9 * size for size in sizes])
    assert row["alpha_s"] == pytest.approx(2e-4) and row["beta_s_per_byte"] == pytest.approx(1e-9)
    assert row["r2"] == pytest.approx(1)


def _row(strategy: str, world: int, step_s: float, kind: str = "", batch: int = 8) -> dict[str, Any]:
    return {
        "key": f"tiny {strategy} {kind}{world}", "model": "tiny", "strategy": strategy, "schedule": "", "scaling": kind, "world": world,
        "batch_size": batch, "seq_len": 10, "precision": "fp32", "flops": 6e9, "step_s": step_s, "step_ci_low": step_s, "step_ci_high": step_s,
        "samples_per_s": batch / step_s, "losses": [2.0, 1.5], "status": "ok", "loss_error": 1e-15, "weight_error": 1e-11,
        "gradient_error": 1e-7, "loss_error_fp32": 1e-7,
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
    rows = [_row("single", 1, 0.2), _row("data", 2, 0.1)]
    limits = {"loss_error": 1e-12}
    assert _proved(config, rows, "x", limits, "?").status == "PASS" == _losses(config, rows).status
    rows[1] |= {"losses": [2.0, 1.51], "loss_error": 1.1e-12}
    assert _proved(config, rows, "x", limits, "?").status == "FAIL" == _losses(config, rows).status
    for name in ("loss_error", "gradient_error"):
        del rows[1][name]
    assert _proved(config, rows, "x", limits, "?").status == "FAIL"


@pytest.mark.parametrize(
    ("wrong", "status"), [([0, 0], "PASS"), ([0, 3], "FAIL"), ([0, None], "FAIL"), ([], "FAIL"), (0.0, "FAIL")]
)
def test_wrong_results_of_the_timed_exchanges_fail(wrong: Any, status: str) -> None:
    stated = list(claims(Numbers("parallel", [], 2, facts={"exchange_wrong_elements": wrong})))
    assert right_results_check(stated, 2).status == status
    assert right_results_check(list(claims(Numbers("parallel", [], 1))), 1).status == "SKIPPED"


def test_what_a_rank_cannot_hold_is_not_run_and_says_so() -> None:
    config = ParallelConfig(nproc=2)
    plan = measure.Plan(config.shapes[0], "single", "", Layout(), 8)
    assert run._too_large(config, plan, 1e12) == ""
    tables: dict[str, Any] = {"strategies": []}
    row = run._one(config, plan, run._too_large(config, plan, 1e6), None, None, tables, {})  # type: ignore[arg-type]
    assert row["status"] == "skipped" and "GB of memory and may use 0.001 GB" in row["reason"]
    assert tables == {"strategies": [row]}
