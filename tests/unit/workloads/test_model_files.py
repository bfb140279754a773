"""A model's folder that is not whole is refused before anything starts, by file and reason."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchlib.core.errors import UserError
from benchlib.core.files import PACKAGE
from benchlib.workloads import encoders, model_files
from benchlib.workloads.llm import decoders


@pytest.fixture
def folder(tmp_path):
    def make(asset="tiny", change=None):
        place = tmp_path / "model"
        shutil.copytree(PACKAGE / "assets" / asset, place)
        if change:
            change(place)
        return place

    return make


def without_tokenizer(place):
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"):
        (place / name).unlink(missing_ok=True)


def edited(name, change):
    return lambda place: (place / name).write_bytes(change((place / name).read_bytes()))


def cut(name):
    return edited(name, lambda data: data[: len(data) // 2])


def set_config(**values):
    return edited("config.json", lambda data: json.dumps(json.loads(data) | values).encode())


def renamed(name):
    return lambda place: (place / "model.safetensors").rename(place / name)


def of_a_lost_part(place):
    renamed("model-1.safetensors")(place)
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


NOT_WHOLE = {
    "no tokenizer": (without_tokenizer, "no tokenizer in the folder"),
    "cut tokenizer": (cut("tokenizer.json"), "tokenizer.json: not valid JSON"),
    "cut weights": (cut("model.safetensors"), "model.safetensors was cut, altered or is no safetensors file"),
    "cut header": (edited("model.safetensors", lambda data: data[:20]), "model.safetensors was cut"),
    "longer weights": (edited("model.safetensors", lambda data: data + b"more"), "model.safetensors was cut, altered"),
    "noise": (edited("model.safetensors", lambda _: bytes(range(256)) * 9), "is no safetensors file"),
    "a pickle": (renamed("pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    "a lost part": (of_a_lost_part, "model-2.safetensors is missing, which model.safetensors.index.json names"),
    "cut config": (cut("config.json"), "config.json: not valid JSON"),
    "another config": (edited("config.json", lambda _: b'{"a": 1}'), "model_type is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_WHOLE)
def test_a_folder_that_is_not_whole_names_file_and_reason(folder, case):
    change, words = NOT_WHOLE[case]
    place = folder(change=change)
    with pytest.raises(UserError, match=words) as refused:
        model_files.check(str(place))
    assert str(refused.value).startswith(f"model = {place}: ")


MISFITS = {
    "another width": (set_config(intermediate_size=100), r"is \[256\] in the weights and \[100\] by config.json and \d+ more"),
    "more layers": (set_config(num_hidden_layers=9), r"the weights lack bert.encoder.layer.4.* more, which config.json asks for"),
    "fewer layers": (set_config(num_hidden_layers=2), r"the weights have bert.encoder.layer.2.*which config.json does not ask for"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_their_config_are_refused(folder, case):
    change, words = MISFITS[case]
    with pytest.raises(UserError, match=words):
        encoders.load(str(folder(change=change)), seed=1)


def test_a_checkpoint_of_another_head_still_loads(folder):
    """Pretrained encoders have a pooler and a head of their own, and no head for questions."""

    def other_head(place):
        tensors = load_file(place / "model.safetensors")
        state = {name: tensor for name, tensor in tensors.items() if not name.startswith("qa_outputs")}
        state |= {"cls.predictions.bias": torch.zeros(4), "bert.pooler.dense.weight": torch.zeros(4, 4)}
        save_file(state, place / "model.safetensors", {"format": "pt"})

    assert encoders.load(str(folder(change=other_head)), seed=1).fresh == ["qa_outputs.bias", "qa_outputs.weight"]


def with_code_of_its_own(place):
    """Make a model folder of an architecture that only its own Python file has, as hubs have many."""
    set_config(model_type="own", auto_map={name: f"own.{name}" for name in AUTO_CLASSES})(place)
    (place / "own.py").write_text(f"open({str(place / 'ran')!r}, 'w')\n")
    settings = (
        json.loads((place / "tokenizer_config.json").read_text()) if (place / "tokenizer_config.json").exists() else {}
    )
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))


AUTO_CLASSES = ("AutoConfig", "AutoModelForQuestionAnswering", "AutoModelForCausalLM")
LOADERS = {
    "encoder": ("tiny", lambda place: encoders.load(place, seed=0)),
    "encoder without weights": ("tiny", lambda place: encoders.load(place, seed=0, init="random")),
    "decoder": ("tiny-llama", decoders.load),
    "tokenizer": ("tiny-llama", decoders.Codec),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_python_of_a_model_folder_never_runs_even_if_somebody_answers_yes(folder, monkeypatch, kind):
    asset, load = LOADERS[kind]
    place = folder(asset, with_code_of_its_own)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UserError, match="is never run: give a model whose architecture transformers has"):
        load(str(place))
    assert not (place / "ran").exists()
