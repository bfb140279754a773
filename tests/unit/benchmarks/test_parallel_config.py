"""Shapes against counted parameters and second libraries, what is refused before anything starts, and what a rank measures."""

from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering, LlamaConfig, LlamaForCausalLM

from benchlib.benchmarks.parallel import estimate
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.shapes import MODELS
from benchlib.benchmarks.parallel.traces import Counter
from benchlib.config.schema import build
from benchlib.core.errors import UserError
from benchlib.workloads.transformer_stack import Stack, loss

WIDTHS = {"hidden": 32, "layers": 2, "heads": 4, "ffn": 48, "positions": 16, "vocabulary": 40}
THEIRS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
THEIRS |= {"vocab_size": 40, "max_position_embeddings": 16}
LLAMA = LlamaConfig(**THEIRS, num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False)
BERT = BertConfig(**THEIRS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5)
LLAMA_NAMES = """embed.tokens=model.embed_tokens blocks.=model.layers. norm1=input_layernorm norm2=post_attention_layernorm
    attention.query=self_attn.q_proj attention.key=self_attn.k_proj attention.value=self_attn.v_proj
    attention.output=self_attn.o_proj ffn.up=mlp.up_proj ffn.gate=mlp.gate_proj ffn.down=mlp.down_proj
    final.norm=model.norm head.=lm_head."""
BERT_NAMES = """embed.tokens=bert.embeddings.word_embeddings embed.places=bert.embeddings.position_embeddings
    embed.types=bert.embeddings.token_type_embeddings embed.norm=bert.embeddings.LayerNorm blocks.=bert.encoder.layer.
    norm1=attention.output.LayerNorm norm2=output.LayerNorm attention.query=attention.self.query
    attention.key=attention.self.key attention.value=attention.self.value attention.output.w=attention.output.dense.w
    attention.output.b=attention.output.dense.b ffn.up=intermediate.dense ffn.down=output.dense head.=qa_outputs."""


@pytest.mark.parametrize("name", list(MODELS))
def test_a_stack_has_the_parameters_of_its_shape(name):
    shape = replace(MODELS[name], hidden=16 * MODELS[name].heads, layers=2, ffn=24, positions=8, vocabulary=30)
    with torch.device("meta"):
        model = Stack(shape, 8)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


@pytest.mark.parametrize(("name", "kv_heads", "kind", "config", "names"), [
    ("llama-1b", 2, LlamaForCausalLM, LLAMA, LLAMA_NAMES), ("bert-base", 4, BertForQuestionAnswering, BERT, BERT_NAMES),
])  # fmt: skip
def test_a_stack_computes_what_transformers_does(name, kv_heads, kind, config, names):
    own = Stack(replace(MODELS[name], **WIDTHS, kv_heads=kv_heads, tied=False), 16).double()
    other = kind(config).double()
    theirs, mapped = other.state_dict(), {}
    for key in own.state_dict():
        mapped[key] = f"final.{key}" if key.startswith("norm.") else key
        for word, replacement in (pair.split("=") for pair in names.split()):
            if word in mapped[key] and replacement not in mapped[key]:
                mapped[key] = mapped[key].replace(word, replacement)
    own.load_state_dict({key: theirs[their_key] for key, their_key in mapped.items()})
    drawn = torch.Generator().manual_seed(0)
    tokens, places = torch.randint(40, (2, 16), generator=drawn), torch.randint(16, (2, 2), generator=drawn)
    if name == "bert-base":
        expected = other(tokens, start_positions=places[:, 0], end_positions=places[:, 1]).loss
        torch.testing.assert_close(loss(own(tokens), places), expected)
    else:
        close = {"rtol": 1e-4, "atol": 1e-7}  # its norms and angles are fp32
        torch.testing.assert_close(own(tokens), other(tokens).logits, **close)


@pytest.mark.parametrize("gated", [False, True])
def test_the_estimates_of_element_wise_work_are_counted(gated):
    """Values that element-wise operations read and write, by models of which one width differs at a time."""
    widths = {"hidden": 64, "ffn": 64, "heads": 2, "kv_heads": 2, "layers": 2, "vocabulary": 64}
    base = replace(MODELS["tiny"], **widths, gated=gated, biases=not gated)

    def values(**widths):
        shape = replace(base, **widths)
        stack, tokens = Stack(shape, 32), torch.randint(shape.vocabulary, (4, 32))
        with Counter() as counter:
            loss(stack(tokens), tokens).backward()
        return counter.bytes["elementwise"] / 4 / tokens.numel()

    of_ffn = (values(ffn=192) - values(ffn=64)) / 2 / base.layers / base.ffn_inputs
    of_loss = (values(vocabulary=192) - values(vocabulary=64)) / 128
    assert of_ffn == pytest.approx(estimate.FFN_PASSES, rel=0.25)
    assert of_loss == pytest.approx(estimate.LOSS_PASSES, rel=0.5)  # and the gradients of the embedding
    of_layers = (values(layers=4) - values(layers=2)) / 2 - of_ffn * base.ffn_inputs
    assert of_layers / base.hidden == pytest.approx(estimate.LAYER_PASSES, rel=0.25)


def test_flops_are_counted_as_the_field_counts_them():
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
        ({"nproc": 4, "strategies": "data_tensor", "data": 3}, "data(3) × tensor(2) = 6 but world size is 4: set data=2,tensor=2"),
        ({"nproc": 2, "strategies": "hybrid_sharded"}, "shard 2 leaves one copy: set nproc=4"),
        ({"nproc": 3, "strategies": "data"}, "batch_size = 8 has to be a multiple of 3: set batch_size=9"),
        ({"nproc": 2, "strategies": "tensor", "model": "gpt2"}, "share weights: set untie=true"),
        ({"nproc": 8, "strategies": "tensor", "model": "gpt2"}, "tensor = 8 does not divide heads = 12 of gpt2: set model to one of medium, large"),
        ({"nproc": 2, "strategies": "pipeline", "schedules": "interleaved", "micro_batches": 1}, "a multiple of 2: set micro_batches=2"),
        ({"nproc": 2, "strategies": "sequence", "seq_len": 63}, "set seq_len=62"),
        ({"planted": "data"}, "set planted_slowdown=1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(values, says):
    with pytest.raises(UserError) as caught:
        build("parallel", {"benchmark": "parallel", **values})
    assert says in str(caught.value)


@pytest.mark.parametrize(("model", "tensor", "rows"), [("gpt2", 2, 50304), ("bert-base", 4, 30528)])
def test_an_odd_vocabulary_is_padded_and_trains_as_without(model, tensor, rows):
    shape = replace(MODELS[model], tied=False)
    assert ParallelConfig(model=model, untie=True, nproc=tensor).job("tensor", "", tensor).shape.rows == rows
    assert shape.padded(tensor).rows == rows and shape.padded(1) == shape
    losses, gradients, odd = [], [], replace(shape, **WIDTHS | {"vocabulary": 41})
    for form in (odd, odd.padded(2)):
        with torch.device("meta"):
            stack = Stack(form, 16)
        torch.manual_seed(0)
        list(stack.fill(torch.device("cpu"), torch.float64))
        stack.places = torch.arange(16)
        tokens = torch.randint(41, (2, 16), generator=torch.Generator().manual_seed(0))
        losses.append(loss(stack(tokens), tokens[:, :2] % 16 if form.kind == "encoder" else tokens))
        losses[-1].backward()
        gradients.append({name: weight.grad for name, weight in stack.named_parameters()})
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    for name, plain in gradients[0].items():
        padded = gradients[1][name]
        torch.testing.assert_close(padded[: len(plain)], plain, rtol=1e-9, atol=1e-15)
        assert not padded[len(plain) :].any(), name
