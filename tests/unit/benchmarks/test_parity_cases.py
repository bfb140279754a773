"""The inputs, weights and dev set of a golden folder: what they are, that they repeat, and what is refused."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchlib.benchmarks.parity import inputs as cases
from benchlib.benchmarks.parity import weights
from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.benchmarks.parity.exercise import Exercise
from benchlib.benchmarks.parity.weights import sha256
from benchlib.workloads import answers, encoders, features, minisquad
from benchlib.workloads.executors import MEMBERS
from benchlib.workloads.executors.eager import Eager
from benchlib.workloads.numerics import BATCH, CURVE, GRADIENTS, LAYERS, LOSS, PADDING

CONFIG = ParityConfig(
    lengths=[8, 24, 48], batch_sizes=[1, 2, 4], dev_questions=6, train_steps=3, train_batch=2, train_length=32
)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    return folder, cases.prepare(CONFIG, folder)


def test_every_length_and_batch_is_there_with_text_and_padding(golden):
    inputs = cases.Inputs(golden[0])
    data = inputs.of("data")
    assert {(case.length, case.batch) for case in data} == {(s, b) for s in (8, 24, 48) for b in (1, 2, 4)}
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoders.source("tiny"))
    for case in data:
        tensors = inputs.tensors(case.id)
        assert set(tensors) == {"input_ids", "attention_mask", "token_type_ids"}
        assert {tuple(tensor.shape) for tensor in tensors.values()} == {(case.batch, case.length)}
        lengths = tensors["attention_mask"].sum(1)
        assert lengths.max() == case.length and (case.batch == 1 or lengths.min() < case.length)
        for ids, mask in zip(tensors["input_ids"], tensors["attention_mask"], strict=True):
            real = int(mask.sum())
            assert mask[:real].all() and (ids[real:] == tokenizer.pad_token_id).all()
            assert ids[0] == tokenizer.cls_token_id and ids[real - 1] == tokenizer.sep_token_id


def test_edge_cases_are_what_they_are_called(golden):
    inputs = cases.Inputs(golden[0])
    one, longest, masked = (inputs.tensors(f"edge-{name}") for name in ("one-token", "longest", "masked-row"))
    assert one["attention_mask"].tolist() == [[1] + [0] * 23]
    assert longest["attention_mask"].sum() == longest["input_ids"].numel() == 512  # the embedded model's positions
    assert masked["attention_mask"].sum(1).tolist() == [24, 0]


def test_labels_mark_answers(golden):
    """The labelled tokens, decoded, are the gold answer of a question whose words stand before them."""
    inputs = cases.Inputs(golden[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoders.source("tiny"))
    train = inputs.of("train")
    assert [case.id for case in train] == ["train-00", "train-01", "train-02"]
    examples = minisquad.generate(6, CONFIG.seed, "eval", (4, 8))
    golds = {example.question.lower(): example.answers[0][0].lower() for example in examples}
    seen = 0
    for case in train:
        tensors, (first, last) = inputs.tensors(case.id), inputs.labels(case.id)
        for row in range(case.batch):
            ids = tensors["input_ids"][row].tolist()
            answer = tokenizer.decode(ids[first[row] : last[row] + 1])
            question = tokenizer.decode(ids[1 : ids.index(tokenizer.sep_token_id)])
            gold = next(gold for asked, gold in golds.items() if squeeze(asked).startswith(squeeze(question)))
            assert squeeze(answer) == squeeze(gold)
            seen += 1
    assert seen == 6


def squeeze(text):
    return "".join(text.split())


def test_the_same_config_gives_the_same_inputs_and_another_seed_others(golden, tmp_path):
    again = cases.prepare(CONFIG, tmp_path / "again")
    assert again == golden[1]
    other = cases.prepare(CONFIG.model_copy(update={"seed": 1}), tmp_path / "other")
    assert other["inputs_sha256"] != again["inputs_sha256"] and other["model"] == again["model"]


def test_an_encoder_with_one_segment_gets_none_whatever_its_tokenizer_gives(tmp_path):
    settings = transformers.RobertaConfig(
        vocab_size=4000, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=130, type_vocab_size=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForQuestionAnswering.from_config(settings).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoders.source("tiny"))
    assert "token_type_ids" in tokenizer.model_input_names
    inputs = cases.write(CONFIG, tokenizer, settings, tmp_path)
    for name in {case.kind: case.id for case in inputs.cases}.values():
        assert set(inputs.tensors(name)) == {"input_ids", "attention_mask"}
        assert model(**inputs.tensors(name)).start_logits.shape == inputs.tensors(name)["input_ids"].shape


def test_dev_scores_are_those_of_the_questions_themselves(golden):
    """Random logits for the recorded windows score as they do through the tokenised questions, built apart."""
    folder, _ = golden
    inputs = cases.Inputs(folder)
    real = sum(int(inputs.tensors(case.id)["attention_mask"].sum()) for case in inputs.of("dev"))
    start, end = np.random.default_rng(0).normal(size=(2, real))
    examples = minisquad.generate(6, CONFIG.seed, "eval", (5, 10))
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoders.source("tiny"))
    dataset = features.build(examples, tokenizer, 384, 128, False)
    windows = [inputs.tensors(case.id) for case in inputs.of("dev")]
    ids = np.concatenate([tensors["input_ids"][tensors["attention_mask"] == 1] for tensors in windows])
    np.testing.assert_array_equal(ids, dataset.input_ids)
    # A perfect start and end for one question, so that the score is not 0.
    gold, first = examples[0].answers[0]
    at = np.flatnonzero(dataset.char_start[: dataset.starts[1]] == first)[0]
    last = np.flatnonzero(dataset.char_end[: dataset.starts[1]] == first + len(gold))[0]
    start[at], end[last] = 50, 50
    expected = answers.score(answers.best_answers(examples, dataset, start, end), examples)
    assert cases.dev_f1(folder, {"dev/start": start, "dev/end": end}) == expected["f1"] >= 100 / 6
    assert cases.dev_f1(folder, {"dev/start": start, "dev/end": np.nan * end}) is None


def test_weights_come_back(golden):
    folder, fields = golden
    model, digest = weights.loaded(folder, "eager")
    original, state = load_file(encoders.TINY / "model.safetensors"), model.state_dict()
    assert state.keys() == original.keys() and all(torch.equal(state[name], original[name]) for name in state)
    assert not model.training and fields["model"]["sha256"] == digest == sha256(original)
    assert fields["model"]["parameters"] == sum(tensor.numel() for tensor in original.values())


def _without_mask(inner, attention_mask=None, **more):
    assert attention_mask is None
    return inner(**more)


def test_a_kernel_without_masks_computes_what_has_no_padding_and_says_what_it_left_out(golden, tmp_path):
    """Flash attention of GPUs takes no mask, whatever is in it; the CPU's kernel stands for it."""
    config = CONFIG.model_copy(update={"latency_runs": 2})
    inputs, where, done = cases.Inputs(golden[0]), torch.device("cpu"), {}
    for member in (MEMBERS["eager"], replace(MEMBERS["flash"], backends=("cpu",), precision="fp32", kernel="math")):
        model = weights.loaded(golden[0], member.attention)[0]
        executor = Eager(model, member, where, inputs.tensors("layer"), tmp_path)
        if not member.masks:
            executor.module.forward = partial(_without_mask, executor.module.forward)
        done[member.name] = Exercise(config, member, model, executor, inputs, where, lambda progress: None).run()
    whole, own = done["eager"], done["flash"]
    assert {name.partition("/")[0] for name in own.outputs} == {
        "len8-batch1",
        "len24-batch1",
        "len48-batch1",
        "edge-longest",
    }
    assert {"len8-batch2", "edge-masked-row", "edge-one-token", "layer", "dev"} <= set(own.facts["left_out"])
    for name, values in own.outputs.items():
        np.testing.assert_allclose(values, whole.outputs[name], atol=1e-5)
    assert own.facts["repeats_max_abs"] == 0.0 and len(own.facts["latency_ms"]) == 2
    assert set(own.absent) == {LOSS, GRADIENTS, CURVE, BATCH, PADDING, LAYERS} and not own.gradients
