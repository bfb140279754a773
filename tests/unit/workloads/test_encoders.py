"""Which models are taken, and what is said of the others."""

import pytest
import torch
import transformers

from benchlib.core.definitions import encoder_forward_flops
from benchlib.core.errors import UserError
from benchlib.workloads import encoders, model_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An encoder without a QA head."""
    path = tmp_path_factory.mktemp("encoder")
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}
    transformers.BertTokenizerFast(vocab=words).save_pretrained(path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    settings = transformers.BertConfig(**sizes, vocab_size=7, max_position_embeddings=64)
    transformers.BertModel(settings).save_pretrained(path)
    return path


def _load(model, **changes):
    return encoders.load(str(model), **({"max_length": 64, "seed": 0} | changes))


def test_an_encoder_gets_a_head_that_depends_on_the_seed_only(folder):
    loaded = [_load(folder, seed=seed) for seed in (1, 1, 2)]
    first, same, other = (item.model.qa_outputs.weight for item in loaded)
    assert loaded[0].fresh == ["qa_outputs.bias", "qa_outputs.weight"]
    assert torch.equal(first, same) and not torch.equal(first, other)
    head = 2 * 8 * 2 * 40  # of two logits a token
    assert loaded[0].flops.of(3, 40) == 3 * 3 * (encoder_forward_flops(2, 8, 16, 40) + head)
    assert loaded[0].matmul_parameters == 2 * (4 * 8 * 8 + 2 * 8 * 16) + 8 * 2


def test_a_pickled_checkpoint_is_never_opened(folder, tmp_path):
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle at all")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        _load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors .* init=random"):
        _load(tmp_path)
    assert _load(tmp_path, init="random").parameters > 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (transformers.GPT2Config(), "gpt2 is a decoder"),
        (transformers.BartConfig(), "bart is an encoder-decoder"),
        (transformers.ViTConfig(), "vit has no extractive question answering head"),
    ],
)
def test_only_encoders_of_text(settings, reason):
    for name in ("Bert", "Roberta", "DistilBert", "Electra"):
        encoders.check_kind("some/model", getattr(transformers, f"{name}Config")())
    with pytest.raises(UserError, match=reason):
        encoders.check_kind("some/model", settings)


def test_a_model_without_torchs_attention_has_its_own_and_says_so(folder, tmp_path):
    """DeBERTa computes its attention itself: transformers refuses ``sdpa`` for it."""
    for path in folder.iterdir():
        if path.name.startswith(("tokenizer", "vocab", "special")):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    settings = transformers.DebertaV2Config(**sizes, vocab_size=7, max_position_embeddings=64, pad_token_id=0)
    transformers.DebertaV2ForQuestionAnswering(settings).save_pretrained(tmp_path)
    for init in ("pretrained", "random"):
        model = _load(tmp_path, init=init).model
        assert "no sdpa attention for deberta-v2: it computes with eager" in model_files.attention_note(model, "sdpa")
        assert model(input_ids=torch.ones(1, 8, dtype=torch.long)).start_logits.shape == (1, 8)
    assert model_files.attention_note(_load(folder).model, "sdpa") == ""
    assert model_files.attention_note(_load(folder, attention="eager").model, "eager") == ""
