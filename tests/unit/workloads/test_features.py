import logging
import multiprocessing
import time
from dataclasses import fields

import numpy as np
import pytest
import qa_reference
from texts import TEXTS, TOKENIZERS, odd_examples

from benchlib.core.errors import UserError
from benchlib.workloads import features
from benchlib.workloads.features import DamagedFile, read_arrays, write_arrays
from benchlib.workloads.squad_text import Example


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("max_length", "doc_stride"), [(384, 128), (96, 24), (64, 0)])
def test_features_equal_the_usual_recipe(name, max_length, doc_stride):
    examples, tokenizer = odd_examples(), TOKENIZERS[name]
    train = features.build(examples, tokenizer, max_length, doc_stride, True, None)
    evaluation = features.build(examples, tokenizer, max_length, doc_stride, False, None)
    rows = qa_reference.recipe(examples, tokenizer, max_length, doc_stride)
    assert len(train) == len(evaluation) == len(rows)
    slips = 0
    for i, row in enumerate(rows):
        assert train.ids(i).tolist() == evaluation.ids(i).tolist() == row["ids"]
        assert train.types(i).tolist() == row["types"]
        assert train.example_index[i] == row["example"]
        part = slice(evaluation.starts[i], evaluation.starts[i + 1])
        pairs = zip(evaluation.char_start[part].tolist(), evaluation.char_end[part].tolist(), strict=True)
        assert [None if pair == (-1, -1) else pair for pair in pairs] == row["offsets"]
        start, end = int(train.start_positions[i]), int(train.end_positions[i])
        assert end == row["end"]
        if start != row["start"]:
            # The two slips of the recipe that are not followed: past the context's end, and behind the end.
            slips += 1
            outside = row["offsets"][row["start"]] is None
            assert outside or row["start"] > row["end"]
            assert start <= end
            assert train.context_start[i] <= start
    assert slips < len(rows) / 5


def test_an_answer_at_the_end_of_a_window_is_labelled_with_its_token():
    tokenizer = TOKENIZERS["bert"]
    built = features.build([Example("q", "river", "the river", (("river", 4),))], tokenizer, 64, 8, True, None)
    context = built.ids(0)[built.context_start[0] : -1]
    expected = tokenizer("river", add_special_tokens=False)["input_ids"]
    assert context[-len(expected) :].tolist() == expected
    labelled = built.ids(0)[built.start_positions[0] : built.end_positions[0] + 1]
    assert labelled.tolist() == expected


def test_every_window_with_the_answer_is_labelled_and_the_others_are_not():
    context = "river " * 40 + "1843 " + "river " * 40
    built = features.build([Example("q", "year", context, (("1843", 240),))], TOKENIZERS["bert"], 40, 30, True, None)
    answer = TOKENIZERS["bert"]("1843", add_special_tokens=False)["input_ids"]
    found = 0
    for i in range(len(built)):
        ids, labels = built.ids(i).tolist(), (int(built.start_positions[i]), int(built.end_positions[i]))
        places = [k for k in range(len(ids)) if ids[k : k + len(answer)] == answer]
        found += bool(places)
        assert labels == ((places[0], places[0] + len(answer) - 1) if places else (0, 0))
    assert 2 <= found < len(built)


def test_a_question_longer_than_the_window_is_cut():
    endless = Example("long", "river " * 500, "the year was 1843 , near the river " * 10, (("1843", 13),))
    short = odd_examples(1)[0]
    built = features.build([endless, short], TOKENIZERS["bert"], 96, 24, True, None)
    alone = features.build([short], TOKENIZERS["bert"], 96, 24, True, None)
    assert built.questions_cut == 1
    assert alone.questions_cut == 0
    assert built.lengths.max() <= 96
    assert (built.start_positions[built.example_index == 0] > 0).any(), "the answer is still in a window"
    assert built.ids(len(built) - 1).tolist() == alone.ids(len(alone) - 1).tolist()


def test_a_context_without_tokens_has_a_window_without_an_answer():
    empty = Example("q", "what?", "\u200b\x00", (("\x00", 1),))
    built = features.build([empty, *odd_examples(3)], TOKENIZERS["bert"], 64, 8, True, None)
    assert built.lengths[0] == built.context_start[0] + built.suffix
    assert built.start_positions[0] == built.end_positions[0] == 0


def test_lengths_without_room_and_slow_tokenizers_are_refused():
    with pytest.raises(UserError, match=r"max_length = 64 with doc_stride = 60 .* set max_length to 67 or more"):
        features.build(odd_examples(3), TOKENIZERS["bert"], 64, 60, True, None)

    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="not a fast one"):
        features.build(odd_examples(3), Slow(), 64, 8, True, None)


def test_the_tokenizer_keeps_its_state_and_its_state_does_not_matter():
    examples, tokenizer = odd_examples(9), qa_reference.bert_tokenizer(TEXTS)
    plain = features.build(examples, tokenizer, 96, 24, True, None)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    again = features.build(examples, tokenizer, 96, 24, True, None)
    assert again.input_ids.tolist() == plain.input_ids.tolist()
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 5
    assert tokenizer.backend_tokenizer.padding["length"] == 50


def _same(left, right):
    for field in fields(features.Features):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if field.name in ("from_cache", "seconds"):
            continue
        assert (a is None) == (b is None), field.name
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, field.name


@pytest.mark.parametrize("training", [True, False])
def test_the_cache_gives_the_same_arrays_without_building(tmp_path, monkeypatch, training):
    examples, tokenizer = odd_examples(), TOKENIZERS["bert"]
    first = features.build(examples, tokenizer, 96, 24, training, tmp_path)
    monkeypatch.setattr(features, "cut", None)  # a second build would fail
    second = features.build(examples, tokenizer, 96, 24, training, tmp_path)
    assert (first.from_cache, second.from_cache) == (False, True)
    _same(first, second)
    assert not second.input_ids.flags.writeable


def test_whatever_changes_the_features_changes_the_key(tmp_path):
    examples, tokenizer = odd_examples(6), TOKENIZERS["bert"]
    moved = [
        *examples[:-1],
        Example("q5", examples[-1].question, examples[-1].context, ((examples[-1].context[:2], 0),)),
    ]
    variants = [
        (examples, tokenizer, 96, 24, True),
        (examples, tokenizer, 95, 24, True),
        (examples, tokenizer, 96, 23, True),
        (examples, tokenizer, 96, 24, False),
        (examples[::-1], tokenizer, 96, 24, True),
        (moved, tokenizer, 96, 24, True),
        (examples, qa_reference.bert_tokenizer(TEXTS, size=300), 96, 24, True),
    ]
    for variant in variants:
        assert not features.build(*variant, tmp_path).from_cache
    assert all(features.build(*variant, tmp_path).from_cache for variant in variants)


@pytest.mark.parametrize("damage", ["cut", "one bit", "empty", "foreign", "header"])
def test_a_damaged_file_is_found_and_built_anew(tmp_path, caplog, damage):
    examples, tokenizer = odd_examples(), TOKENIZERS["bert"]
    good = features.build(examples, tokenizer, 96, 24, True, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        raw = raw[:-64]
    elif damage == "one bit":
        raw[-100] ^= 1
    elif damage == "empty":
        raw = bytearray()
    elif damage == "foreign":
        raw = bytearray(b"PK\x03\x04" * 100)
    else:
        raw = raw.replace(b'"shape":[', b'"shape":[9', 1)
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        rebuilt = features.build(examples, tokenizer, 96, 24, True, tmp_path)
    assert not rebuilt.from_cache
    assert "built anew" in caplog.text
    _same(good, rebuilt)
    assert features.build(examples, tokenizer, 96, 24, True, tmp_path).from_cache


def _build_in_a_process(folder, tokenizer, queue, gate):
    original = features.cut

    def slow(*arguments):
        time.sleep(0.5)
        return original(*arguments)

    features.cut = slow
    gate.wait()
    built = features.build(odd_examples(), tokenizer, 96, 24, True, folder)
    queue.put((built.from_cache, built.input_ids.sum().item()))


def test_of_three_processes_at_once_one_builds(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue, gate = context.Queue(), context.Event()
    processes = [
        context.Process(target=_build_in_a_process, args=(tmp_path, TOKENIZERS["bert"], queue, gate)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    gate.set()
    results = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(timeout=300)
    assert sorted(from_cache for from_cache, _ in results) == [False, True, True]
    assert len({total for _, total in results}) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features, "write_arrays", full)
    with caplog.at_level(logging.WARNING):
        assert len(features.build(odd_examples(), TOKENIZERS["bert"], 96, 24, True, tmp_path))
    assert "No space left" in caplog.text


@pytest.mark.parametrize("place", ["a file", "a folder with the cache's name"])
def test_a_place_that_can_hold_no_cache_costs_only_time(tmp_path, caplog, place):
    folder = tmp_path / "cache"
    if place == "a file":
        folder.write_text("x")
    else:
        features.build(odd_examples(), TOKENIZERS["bert"], 96, 24, True, folder)
        (path,) = folder.glob("*.safetensors")
        path.unlink()
        path.mkdir()
    with caplog.at_level(logging.WARNING):
        built = features.build(odd_examples(), TOKENIZERS["bert"], 96, 24, True, folder)
    assert len(built) and not built.from_cache
    assert "cannot be locked" in caplog.text if place == "a file" else "cannot be written" in caplog.text


def test_array_files_hold_empty_and_odd_shapes(tmp_path):
    arrays = {
        "none": np.zeros((0, 3), np.int64),
        "one": np.array(7.5),
        "many": np.arange(10, dtype=np.int16).reshape(2, 5),
    }
    write_arrays(tmp_path / "a", arrays, {"note": "ö"})
    back, meta = read_arrays(tmp_path / "a")
    assert meta == {"note": "ö"}
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert (back[name] == array).all()
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes() + b"x")
    with pytest.raises(DamagedFile, match="extended"):
        read_arrays(tmp_path / "a")
