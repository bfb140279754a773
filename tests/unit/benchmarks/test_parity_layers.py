"""Where an encoder's layers are found, and that a fault is where it was injected."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, BertConfig, DistilBertConfig, ModernBertConfig

from benchlib.benchmarks.parity import weights
from benchlib.workloads.executors import MEMBERS
from benchlib.workloads.executors.eager import Eager

CPU = torch.device("cpu")
SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
IDS = torch.arange(2, 14).reshape(2, 6)
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def build(config):
    torch.manual_seed(0)
    return AutoModelForQuestionAnswering.from_config(config, attn_implementation="eager").eval()


def hidden(model, folder):
    return [state.numpy() for state in Eager(model, MEMBERS["eager"], CPU, INPUTS, folder).hidden(INPUTS)]


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (BertConfig(**SMALL), "bert.encoder.layer.{}"),
        (
            DistilBertConfig(vocab_size=50, dim=16, n_layers=3, n_heads=2, hidden_dim=24),
            "distilbert.transformer.layer.{}",
        ),
        (ModernBertConfig(**SMALL, pad_token_id=0), "model.layers.{}"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_planted_fault_is_in_layer_k_and_not_before_in_any_encoder(config, layer, tmp_path):
    model = build(config)
    assert list(weights.encoder_layers(model)) == [layer.format(number) for number in range(3)]
    clean = hidden(model, tmp_path)
    assert len(clean) == 4  # embeddings, three layers
    for k in range(3):
        other = copy.deepcopy(model)
        weights.inject(other, k)
        faulty = hidden(other, tmp_path)
        differing = [number for number in range(4) if not np.array_equal(clean[number], faulty[number])]
        assert differing[0] == k + 1
        own = clean[k + 1]
        if k < 2:  # the last one may be normed once more
            np.testing.assert_allclose(faulty[k + 1], own + 0.1 * own[..., ::-1], rtol=1e-6)
