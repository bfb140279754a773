"""FLOPs of training by architecture, held against torch's counter at other shapes and against sums by hand."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchlib.benchmarks.parallel.shapes import MODELS
from benchlib.workloads import counted_flops
from benchlib.workloads.counted_flops import train_flops
from benchlib.workloads.transformer_stack import Stack

L, H, F, V, LONGEST = 2, 64, 96, 64, 128
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "vocab_size": V,
}
SIZES = TOKENS | {"num_hidden_layers": L, "hidden_size": H, "intermediate_size": F, "num_attention_heads": 4}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_position_embeddings": LONGEST}
ENCODERS = {
    "albert": SIZES | {"embedding_size": 16},
    "bert": SIZES,
    "big_bird": SIZES,
    "camembert": SIZES,
    "convbert": SIZES,
    "deberta": SIZES | RELATIVE,
    "deberta-v2": SIZES | RELATIVE | {"position_buckets": 16, "share_att_key": True},
    "distilbert": {"dim": H, "n_layers": L, "n_heads": 4, "hidden_dim": F} | TOKENS,
    "electra": SIZES | {"embedding_size": 16},
    "ernie": SIZES,
    "fnet": SIZES,
    "funnel": TOKENS | {"block_sizes": [2, 2], "d_model": H, "n_head": 4, "d_head": 16, "d_inner": F},
    "ibert": SIZES,
    "longformer": SIZES | {"attention_window": LONGEST},
    "megatron-bert": SIZES,
    "mobilebert": SIZES,
    "modernbert": SIZES,
    "mpnet": SIZES,
    "nystromformer": SIZES,
    "rembert": SIZES,
    "roberta": SIZES,
    "roformer": SIZES,
    "splinter": SIZES,
    "xlm-roberta": SIZES,
    "xlm-roberta-xl": SIZES,
}


def encoder(kind, attention="eager"):
    torch.manual_seed(1)
    settings = transformers.CONFIG_MAPPING[kind](**ENCODERS[kind])
    return transformers.AutoModelForQuestionAnswering.from_config(settings, attn_implementation=attention)


def counted(model, samples, length):
    """Return what torch counts in a step, attention in plain products."""
    ids = torch.full((samples, length), 5)
    ids[:, 1:4] = 2
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        (output.start_logits.sum() + output.end_logits.sum()).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_encoder_takes_what_torch_counts_at_any_shape(kind):
    flops, model = train_flops(encoder(kind), LONGEST), encoder(kind)
    assert not flops.reason
    for shape in ((3, 37), (4, 90), (1, LONGEST)):
        assert flops.of(*shape) == pytest.approx(counted(model, *shape), rel=0.01)


def by_hand(kind, samples, length):
    """Return three times a forward pass: products with weights 2 S h w, attention 4 S² h, the head's two logits."""
    matrices = {"bert": 4 * H * H + 2 * H * F, "modernbert": 4 * H * H + 3 * H * F, "deberta-v2": 4 * H * H + 2 * H * F}
    each = L * (2 * length * matrices[kind] + 4 * length**2 * H) + 2 * length * H * 2
    places = 2 * 16  # two for each bucket; keys and queries of them are made once for the batch
    if kind == "deberta-v2":
        return 3 * (samples * (each + L * 2 * 2 * length * places * H) + L * 2 * 2 * places * H * H)
    return 3 * samples * (each + (2 * length * H * H if kind == "modernbert" else 0))  # its head has a product more


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "deberta-v2"])
def test_plain_gated_and_relative_layers_by_hand(kind, attention):
    if (kind, attention) == ("deberta-v2", "sdpa"):
        pytest.skip("it has no such attention")
    flops = train_flops(encoder(kind, attention), LONGEST)
    assert flops.of(3, 90) == pytest.approx(by_hand(kind, 3, 90), rel=1e-9)


def test_counting_leaves_the_model_and_the_random_numbers_as_they_are():
    model = encoder("bert").train()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    train_flops(model, LONGEST)
    assert model.training and all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_counted_has_a_reason_and_no_number(monkeypatch):
    model = encoder("bert")
    short = train_flops(encoder("roberta"), 10_000)  # it has fewer places
    assert "cannot be counted" in short.reason and short.of(1, 16) != short.of(1, 16)
    real = counted_flops._count
    monkeypatch.setattr(counted_flops, "_count", lambda model, n, s: real(model, n, s) * (2 if s == LONGEST else 1))
    assert "no square of the length" in train_flops(model, LONGEST).reason


@pytest.mark.parametrize("name", ["tiny", "gpt2", "llama-1b", "bert-base"])
def test_the_stack_of_any_shape_takes_what_torch_counts(name):
    shape, samples, length = MODELS[name], 2, 24
    with torch.device("meta"):
        stack, tokens = Stack(shape, length), torch.zeros(samples, length, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            stack(tokens).sum().backward()
    assert shape.step_flops(samples, length) == pytest.approx(counter.get_total_flops(), rel=1e-9)
