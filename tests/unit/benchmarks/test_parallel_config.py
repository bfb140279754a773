"""Shapes against counted parameters and second libraries, what is refused before anything starts, and what a rank measures."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering, LlamaConfig, LlamaForCausalLM

from benchlib.benchmarks.parallel import estimate, largest_batch, measure, proofs, run
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.shapes import MODELS, Job
from benchlib.benchmarks.parallel.traces import Counter
from benchlib.config.schema import build
from benchlib.core.errors import UserError
from benchlib.core.events import Moment
from benchlib.judge.verdict import judged
from benchlib.results.run import Run, save_result
from benchlib.runtime import largest
from benchlib.runtime.group import World
from benchlib.runtime.measurement import Rank
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


@pytest.mark.parametrize("gated", [False, True])
def test_the_estimates_of_element_wise_work_are_counted(gated: bool) -> None:
    """Values that element-wise operations read and write, by models of which one width differs at a time."""
    base = replace(
        MODELS["tiny"], hidden=64, ffn=64, heads=2, kv_heads=2, layers=2, vocabulary=64, gated=gated, biases=not gated
    )

    def values(**widths: int) -> float:
        shape = replace(base, **widths)
        stack, tokens = Stack(shape, 32), torch.randint(shape.vocabulary, (4, 32))
        with Counter() as counter:
            loss(stack(tokens), tokens).backward()
        return counter.bytes["elementwise"] / 4 / tokens.numel()

    of_ffn = (values(ffn=192) - values(ffn=64)) / 128 / base.layers / (base.ffn_matrices - 1)
    of_loss = (values(vocabulary=192) - values(vocabulary=64)) / 128
    assert of_ffn == pytest.approx(estimate.FFN_PASSES, rel=0.25)
    assert of_loss == pytest.approx(estimate.LOSS_PASSES, rel=0.5)  # and the gradients of the embedding
    of_layers = (values(layers=4) - values(layers=2)) / 2 - of_ffn * base.ffn * (base.ffn_matrices - 1)
    assert of_layers / base.hidden == pytest.approx(estimate.LAYER_PASSES, rel=0.25)


def test_flops_are_counted_as_the_field_counts_them() -> None:
    """Products are those of the formula; attention's backward pass computes its weights again, 2.5 times the forward pass."""
    shape = MODELS["tiny"]
    stack, tokens = Stack(shape, 64), torch.randint(512, (8, 64))
    with Counter() as counter:
        loss(stack(tokens), tokens).backward()
    attention = 8 * 4 * shape.layers * 64**2 * shape.hidden
    assert counter.flops["matmul"] == shape.step_flops(8, 64) - 3 * attention
    assert counter.flops["attention"] == 3.5 * attention


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model": "tinny"}, "did you mean tiny?"),
        ({"strategies": "data,fsdp"}, "'fsdp' is unknown"),
        ({"heads": 5}, "parallel has no heads any more: set model"),
        ({"suite": "tiny,small"}, "start a run for each"),
        ({"seq_len": 200}, "set seq_len=128"),
        ({"nproc": 4, "strategies": "data_tensor", "data": 3}, "data(3) × tensor(2) = 6 but world size is 4: set data=2,tensor=2"),
        ({"nproc": 3, "strategies": "data"}, "data = 3 does not divide batch_size = 8: set batch_size=9"),
        ({"nproc": 2, "strategies": "tensor", "model": "gpt2"}, "tensor = 2 does not divide vocabulary = 50,257 of gpt2: set model to one of tiny, small"),
        ({"nproc": 8, "strategies": "pipeline"}, "8 stages (1f1b) for 4 layers of tiny: set model to one of medium, large"),
        ({"nproc": 2, "strategies": "pipeline", "micro_batches": 3}, "micro_batches = 3 does not divide 8 samples: set micro_batches=2"),
        ({"nproc": 2, "strategies": "tensor", "model": "llama-1b"}, "set untie=true"),
        ({"planted": "data"}, "set planted_slowdown=1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        build("parallel", {"benchmark": "parallel", **values})
    assert says in str(caught.value)


def test_a_trial_takes_steps_and_says_what_they_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "limited", lambda device, limit: None)  # not of this process
    config = ParallelConfig(seq_len=8)
    row = largest_batch.one_trial(config, 2, 1 << 60)
    assert row["fits"] and row["peak_gb"] > 0 and row["samples_per_s"] > 0
    assert not largest_batch.one_trial(config, 2, 1 << 20)["fits"]  # the process alone holds more
    found = largest.search(lambda batch: row | {"batch": batch, "fits": batch <= 11}, 64)
    assert [one["batch"] for one in found.tried if one["fits"]][-1] == found.batch == 11


def here(config: ParallelConfig | None = None) -> Rank:
    world = World(0, 2, 0, 2, torch.device("cpu"), "gloo")
    return Rank(config or ParallelConfig(nproc=2), Path(), world, None, Moment.at(0.0))  # type: ignore[arg-type]


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
    row = measure.links(here().world)[0]
    if alpha_s is None:
        assert "do not fit a line" in row["why"]["alpha_s"] and "alpha_s" not in row
        assert estimate.Rates.of_run(1e9, 1e9, [row]) is None  # no exchange is free
    else:
        assert row["alpha_s"] == pytest.approx(alpha_s, abs=1e-7)
        assert row["beta_s_per_byte"] == pytest.approx(beta_s_per_byte, rel=0.2)


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
    seen, narrow_s = set(), list[float]()

    def phases(job: Job, way: str, _: Any) -> dict[str, float]:
        if way == "spread":
            return {"step_s": 0.005 if strategy == "data" else 0.004 + narrow_s[-1] / (1 - 1 / 5)}
        if job.shape != MODELS["tiny"]:
            narrow_s.append(0.001 if strategy == "data" else 4 * 0.001 / 2)
            return {"data_s": 0.0, "forward_s": 0.0004, "backward_s": 0.0006, "optimizer_s": 0.0}
        seen.add(job.batch)
        times = {"data_s": 0.001, "forward_s": 0.003, "backward_s": 0.006}
        return {name: each * job.batch for name, each in times.items()} | {"optimizer_s": 0.002}

    monkeypatch.setattr(measure, "_phases", phases)
    monkeypatch.setattr(measure, "prepare", lambda *_: "spread")
    monkeypatch.setattr(measure, "alone", lambda *_: "alone")
    free = estimate.Rates(1e11, 1e10, lambda op, ranks, stride: (0.0, 0.0))
    job, known = ParallelConfig(nproc=2).job(strategy, schedule, 2), measure.Shares()
    first = measure.compute_s(job, free, here(), known)
    assert first == pytest.approx(expected, rel=0.02) and seen == batches
    seen.clear()
    assert measure.compute_s(job, free, here(), known) == pytest.approx(first)
    assert not seen  # what was measured once is kept


@pytest.mark.parametrize("value", [math.inf, math.nan, None])
def test_errors_that_are_no_numbers_fail_after_they_were_stored(tmp_path: Path, value: float | None) -> None:
    one = unpack("parallel", tmp_path / "run")
    assert one.result is not None
    for row in one.result.tables["strategies"]:
        row |= dict.fromkeys(("loss_error", "weight_error", "loss_error_fp32"), value)
    save_result(one.path, one.result, one.row_samples)
    checks = {check.name: check for check in judged(Run(one.path), tmp_path).checks}
    for name in ("equal to one device in fp64", "equal to one device in fp32"):
        assert checks[name].status == "FAIL" and "loss_error" in checks[name].reason
    assert checks["finite"].status == "FAIL"


@pytest.mark.parametrize("place", [0, 1])
def test_a_nan_is_infinitely_far_wherever_it_is(place: int) -> None:
    values = [("a", torch.ones(2)), ("b", torch.ones(2))]
    values[place][1][1] = math.nan
    assert proofs._apart(values, {"a": torch.zeros(2), "b": torch.zeros(2)}) == math.inf


def test_shards_are_counted_once_and_an_empty_one_is_missed() -> None:
    copies = [
        {("norm", ()): 10, ("weight", (("data", rank % 2),)): 45} for rank in range(4)
    ]  # two copies of two shards
    assert measure.counted(copies) == 100
    for rank in range(4):  # an empty one is missed, also where another copy is whole
        ranks = [dict.fromkeys(held, 0) if place == rank else held for place, held in enumerate(copies)]
        assert measure.counted(ranks) < 100
    assert measure.counted(copies[:1]) < 100


def test_what_a_rank_cannot_hold_is_not_run_and_says_so() -> None:
    config = ParallelConfig(nproc=2, strategies=["single", "data"])
    assert [obstacle for _, obstacle, _ in run._plans(config, 2, 1e12)] == ["", ""]
    ((job, obstacle, why), _) = run._plans(config, 2, 1e6)
    tables: dict[str, Any] = {"strategies": []}
    row = run._one(job, obstacle, why, here(config), None, tables, {})
    assert (row["status"], row["obstacle"]) == ("skipped", "memory")
    assert "GB of memory and may use 0.001 GB" in row["reason"] and tables == {"strategies": [row]}
