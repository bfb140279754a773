"""The faster dropout is dropout: right rate, right gradient, the same attention."""

import pytest
import torch
import transformers

from benchlib.workloads import encoders


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_rate_is_met_and_torchs_state_determines_the_mask(rate: float) -> None:
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(encoders.keep_mask((1001, 999), rate))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    spread = (rate * (1 - rate) / masks[0].numel()) ** 0.5
    assert abs(float((~masks[0]).float().mean()) - rate) < 4 * spread
    neighbours = (~masks[0][:, 1:] & ~masks[0][:, :-1]).float().mean()
    assert abs(float(neighbours) - rate**2) < 5 * spread


def test_kept_values_are_scaled_and_so_are_their_gradients() -> None:
    layer = encoders.Dropout(0.25)
    values = torch.ones(100, 100, requires_grad=True)
    result = layer(values)
    result.sum().backward()
    assert result.detach().unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert values.grad is not None
    assert torch.equal(values.grad, result.detach())
    assert layer.eval()(values) is values


def test_attention_and_its_gradients_are_those_of_the_plain_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, 7, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    mask[1, :, :, 5:] = False
    module = torch.nn.Module()

    torch.manual_seed(3)
    result, _ = encoders.attention(module, query, key, value, mask, dropout=0.3)
    torch.manual_seed(3)
    keep = encoders.keep_mask((2, 3, 7, 7), 0.3)
    scores = (query @ key.transpose(2, 3) / 2).masked_fill(~mask, -1e300)
    expected = ((scores.softmax(-1) * keep / 0.7) @ value).transpose(1, 2)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad((result * weight).sum(), (query, key, value))
    torch.testing.assert_close(
        found, torch.autograd.grad((expected * weight).sum(), (query, key, value)), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(
    "family",
    [transformers.BertConfig, transformers.RobertaConfig, transformers.ElectraConfig, transformers.DistilBertConfig],
)
def test_a_model_keeps_its_function(family: type) -> None:
    sizes = {"vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 0}
    small = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32} if family is transformers.DistilBertConfig else {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForQuestionAnswering.from_config(family(**sizes, **small), attn_implementation="sdpa")
    inputs = {"input_ids": torch.randint(1, 50, (3, 20)), "attention_mask": torch.ones(3, 20, dtype=torch.int64)}
    inputs["attention_mask"][1, 12:] = 0
    before = model.eval()(**inputs).start_logits
    assert encoders.speed_up(model) == ["attention", "dropout"]
    torch.testing.assert_close(model(**inputs).start_logits, before)
    # With rates next to zero the training path must give the same as well.
    for module in model.modules():
        if isinstance(module, encoders.Dropout):
            module.p = 1e-9
    trained = model.train()(**inputs).start_logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(trained[real], before[real], rtol=1e-4, atol=1e-4)
    assert not [name for name, module in model.named_modules() if type(module) is torch.nn.Dropout and module.p]
