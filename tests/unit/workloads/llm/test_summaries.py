"""The generated articles, scores of answers, the embedded decoder, and engines that must agree token for token."""

import threading

import pytest
import torch

from benchlib.benchmarks.inference import spec as inference
from benchlib.core.errors import UserError
from benchlib.workloads.llm import articles, decoders, mininews
from benchlib.workloads.llm.engines import Query, Settings, make


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_splits_share_no_sentence():
    train, test = (
        {phrase for group in kinds.values() for phrase in group} for kinds in mininews.WORDS["phrases"].values()
    )
    assert not train & test


def answer(engine, prompts, max_new, together=True):
    done, left = {}, threading.Semaphore(0)

    def ended(rid, ids, error):
        assert error == ""
        done[rid] = list(ids)
        left.release()

    for rid, prompt in enumerate(prompts):
        engine.submit(Query(rid, prompt, max_new, lambda *_: None, ended))
        if not together:
            assert left.acquire(timeout=120)
    for _ in prompts if together else ():
        assert left.acquire(timeout=120)
    return [done[rid] for rid in range(len(prompts))]


def greedy(model, ids, max_new, ends):
    """The plainest loop: the whole sequence anew for each token."""
    new = []
    with torch.inference_mode():
        while len(new) < max_new and not (new and new[-1] in ends):
            new.append(int(model(torch.tensor([[*ids, *new]])).logits[0, -1].argmax()))
    return new


def test_static_and_continuous_batches_give_the_tokens_of_the_plainest_loop():
    data = articles.load("mininews", "", 6, 0, "tiny")
    plain = decoders.load("tiny")
    expected = [greedy(plain.model, ids, 24, plain.ends) for ids in data.prompts]
    assert len({len(tokens) for tokens in expected}) > 1
    assert sum(tokens[-1] in plain.ends for tokens in expected) > 2
    for name in ("static", "continuous"):
        engine = make(name, Settings(model="tiny", slots=4))
        engine.start()
        try:
            assert answer(engine, data.prompts, 24) == expected
            with pytest.raises(UserError, match="the engine takes 512"):
                engine.submit(Query(99, [3] * 500, 128, print, print))
            if name == "continuous":  # its callbacks run in the thread that computes for all
                engine.submit(Query(99, data.prompts[0], 4, lambda *_: 1 / 0, print))
                assert answer(engine, data.prompts[:1], 24) == expected[:1] and not engine.failure
        finally:
            engine.stop()


@pytest.mark.parametrize("name", ["static", "continuous"])
def test_answers_of_fixed_length_go_on_after_an_end(name):
    prompts = articles.load("mininews", "", 6, 0, "tiny").prompts
    engine = make(name, Settings(model="tiny", slots=8, fixed_length=True, positions=320))
    engine.start()
    try:
        answers = answer(engine, prompts, 40)
        assert {len(tokens) for tokens in answers} == {40}
        assert any(end in tokens[:-1] for tokens in answers for end in engine.decoder.ends)
    finally:
        engine.stop()


def test_random_weights_have_the_shape_and_answers_of_fixed_length():
    engine = make("static", Settings(model="llama3-8b-random", shrink=64, fixed_length=True, positions=256))
    engine.start()
    assert [len(tokens) for tokens in answer(engine, [[5, 6, 7], [8]], 9)] == [9, 9]
    parameters = engine.model.num_parameters()
    engine.stop()
    # By hand: 1 layer of hidden 128 with 4 heads on 1, intermediate 224, vocabulary 2004, untied.
    layer = 128 * 128 * 2 + 2 * 128 * 32 + 3 * 128 * 224 + 2 * 128
    assert parameters == layer + 2 * 2004 * 128 + 128


def test_files_of_the_reference_are_read_and_broken_ones_named(tmp_path):
    path = tmp_path / "cnn_eval.json"
    path.write_text('[{"instruction": "Sum up: {input}", "input": "a text", "tok_input": [0, 7, 8], "output": "text"}]')
    data = articles.load("file", str(path), 0, 0, "tiny")
    assert data.prompts == [[0, 7, 8]] and data.references == ["text"]
    path.write_text('[{"input": "a text"}]')
    with pytest.raises(UserError, match=r"cnn_eval.*output"):
        articles.load("file", str(path), 0, 0, "tiny")


def test_answers_are_scored_beside_two_controls():
    data = articles.load("mininews", "", 4, 0, "tiny")
    answers = {row: data.codec.encode(data.references[row])[:-1] for row in (3, 1)}
    scores = articles.score(data, answers)
    assert scores["rouge1"] > 80 > scores["rouge1_shuffled"]
    assert set(scores) == {*inference.ROUGE, "gen_len", "splitter", "rouge1_shuffled", "rouge1_lead"}
