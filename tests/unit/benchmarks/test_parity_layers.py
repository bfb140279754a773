"""Where an encoder's parts are found, that hooks go away, and that a planted fault is found where it was planted."""

import numpy as np
import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModelForQuestionAnswering,
    BertConfig,
    DistilBertConfig,
    ModernBertConfig,
    RobertaConfig,
)

from benchlib.benchmarks.parity import layers
from benchlib.core.errors import UserError

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}


def build(config, attention="eager"):
    torch.manual_seed(0)
    return AutoModelForQuestionAnswering.from_config(config, attn_implementation=attention).eval()


@pytest.fixture(scope="module")
def bert():
    return build(BertConfig(**SMALL))


IDS = torch.arange(2, 14).reshape(2, 6)


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize(
    ("config", "layer", "attention", "feed_forward"),
    [
        (BertConfig(**SMALL), "bert.encoder.layer.{}", "attention", "intermediate"),
        (RobertaConfig(**SMALL), "roberta.encoder.layer.{}", "attention", "intermediate"),
        (
            DistilBertConfig(vocab_size=50, dim=16, n_layers=3, n_heads=2, hidden_dim=24),
            "distilbert.transformer.layer.{}",
            "attention",
            "ffn",
        ),
        (ModernBertConfig(**SMALL, pad_token_id=0), "model.layers.{}", "attn", "mlp"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_parts_are_found_in_any_encoder_and_kept_in_forward_order(config, layer, attention, feed_forward):
    model = build(config)
    with layers.kept(model) as kept, torch.no_grad():
        output = model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    names = [name.partition("|")[2] for name in kept.arrays]
    assert [name[:4] for name in kept.arrays] == [f"{index:03d}|" for index in range(len(names))]
    assert kept.kinds[names[0]] == "embeddings" and kept.kinds[names[-1]] == "head"
    expected = [
        name.format(number)
        for number in range(3)
        for name in (f"{layer}.{attention}", f"{layer}.{feed_forward}", layer)
    ]
    assert [name for name in names if kept.kinds[name] in ("attention", "feed-forward", "layer")] == expected
    logits = torch.stack([output.start_logits, output.end_logits], -1).numpy()
    np.testing.assert_array_equal(list(kept.arrays.values())[-1], logits)
    assert hooks(model) == 0


def test_a_layer_whose_weights_are_shared_is_kept_at_every_call():
    model = build(AlbertConfig(**SMALL, embedding_size=8))
    with layers.kept(model) as kept, torch.no_grad():
        model(input_ids=IDS)
    shared = [name for name, kind in kept.kinds.items() if kind == "layer"]
    assert len(shared) == 3 and shared[1:] == [f"{shared[0]}@2", f"{shared[0]}@3"]


def test_hooks_go_away_after_an_exception_and_keep_copies(bert):
    def fail_at_the_second():
        with layers.kept(bert) as kept, torch.no_grad():
            bert(input_ids=IDS)
            found.append((kept, {name: array.copy() for name, array in kept.arrays.items()}))
            assert hooks(bert) == len(layers.parts(bert)) == 11  # embeddings, 3 x 3, head
            bert(input_ids=IDS + 1000)  # outside of the vocabulary

    found = []
    with pytest.raises(IndexError):
        fail_at_the_second()
    kept, before = found[0]
    assert hooks(bert) == 0
    assert all((kept.arrays[name] == array).all() for name, array in before.items())


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_planted_fault_is_in_layer_k_and_not_before(bert, k):
    def activations(layer):
        with layers.planted(bert, layer), layers.kept(bert) as kept, torch.no_grad():
            bert(input_ids=IDS)
        return kept.arrays

    clean, faulty = activations(-1), activations(k)
    differing = [name for name in clean if not np.array_equal(clean[name], faulty[name])]
    assert differing[0].endswith(f"layer.{k}")
    own = clean[differing[0]]
    np.testing.assert_allclose(faulty[differing[0]], own + 0.1 * own[..., ::-1], rtol=1e-6)
    assert hooks(bert) == 0


def test_a_fault_in_a_layer_that_is_not_there_is_refused(bert):
    with (
        pytest.raises(UserError, match="planted_layer = 3: the model has 3 layers: set it to 2 or less"),
        layers.planted(bert, 3),
    ):
        pytest.fail("planted")


def test_a_model_without_recognisable_layers_is_refused():
    with pytest.raises(UserError, match="no modules named"):
        layers.parts(torch.nn.Sequential(torch.nn.Linear(2, 2)))
