"""Times of queries against cases worked out by hand, and the sim engine against its own arithmetic."""

import math
import threading
import time

import pytest
import torch
import transformers

from benchlib.workloads.llm import decoders, load
from benchlib.workloads.llm.engines import Query, Settings, make, sim_answer
from benchlib.workloads.llm.load import QueryLog


def log_of_three():
    log = QueryLog()
    log.issue([7], [0], 10.0, [3], scheduled_s=9.5)
    log.issue([8, 9], [1, 2], 11.0, [4, 5])
    assert log.first(7, 10.5)
    assert log.done(7, 12.5, tokens=5)
    assert log.done(8, 13.0, tokens=1)
    return log


def test_times_are_those_of_the_definitions():
    table = log_of_three().table()
    each = load.each_s(table)
    assert each["ttft"][0] == pytest.approx(1.0)  # from the schedule, not from the late issue
    assert each["tpot"][0] == pytest.approx(0.5)  # 2 s for the 4 tokens after the first
    assert each["latency"][:2] == pytest.approx([3.0, 2.0])
    assert math.isnan(each["tpot"][1])  # one token has no gap
    assert load.lateness_s(table) == pytest.approx([0.5])
    assert table["failed"].tolist() == [False, False, True]  # the third one never ended
    assert table[["query", "prompt_tokens", "worker", "attempt"]].tolist()[1] == (8, 4, -1, 1)
    assert load.span_s(load.completed(table)) == pytest.approx(3.5)


def test_a_query_starts_and_ends_once():
    log = log_of_three()
    assert not log.first(7, 20.0)
    assert not log.done(7, 20.0, tokens=9)
    assert log.repeated == 2
    assert log.table()["last_s"][0] == 12.5
    assert log.overdue(13.0, limit_s=0.5) == [9] and log.unended == 1


def test_a_first_token_outside_of_its_query_is_an_error_and_no_time():
    log = QueryLog()
    log.issue([1, 2, 3], [0, 1, 2], 10.0, [3, 3, 3])
    log.first(1, 12.5)
    log.first(2, 9.0)
    assert log.done(1, 12.0, tokens=5) and log.done(2, 12.0, tokens=5) and log.done(3, 12.0, tokens=5)
    assert not log.first(3, 12.5)
    table = log.table()
    assert table["failed"].tolist() == [True, True, False] and log.repeated == 1
    assert not len(load.times_s(load.completed(table))["tpot"])
    assert "first token" in log.errors[1] and log.errors[1] == log.errors[2]
    assert "had ended" in log.errors[3]


def test_sim_takes_its_steps_and_no_more_queries_than_slots():
    engine = make("sim", Settings(slots=2, step_s=0.01, fixed_length=True))
    engine.start()
    began, ended, firsts, all_done = time.monotonic(), {}, {}, threading.Event()

    def done(rid, ids, error):
        ended[rid] = (time.monotonic() - began, list(ids), error)
        if len(ended) == 3:
            all_done.set()

    for rid in range(3):
        first = lambda rid, now, token: firsts.setdefault(rid, (now - began, token))  # noqa: E731
        engine.submit(Query(rid, [rid, 5], 4, first, done))
    assert all_done.wait(120)
    engine.submit(Query(3, [1], 1000, print, done))
    engine.stop()
    assert ended[0][1] == sim_answer([0, 5], 4, fixed_length=True) and firsts[0][1] == ended[0][1][0]
    assert firsts[0][0] >= 0.01 and ended[0][0] >= 0.04 and ended[2][0] >= 0.08  # the third waits for a slot
    assert ended[3][1:] == ([], "the engine was stopped")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("engine", ["static", "continuous"])
def test_a_decoder_without_torchs_attention_answers_with_its_own_and_says_so(engine, tmp_path):
    """Gemma 2 caps its attention scores, which ``sdpa`` cannot."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    sizes |= {"vocab_size": 500, "intermediate_size": 64, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**sizes, eos_token_id=0, pad_token_id=0, bos_token_id=0)
    )
    model.eval().save_pretrained(tmp_path)
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    answers, note = [], "transformers has no sdpa attention for gemma2: it computes with eager"
    running = make(engine, Settings(model=str(tmp_path), slots=1, positions=64))
    running.start()
    try:
        assert running.note.startswith(note) and decoders.attention_note(str(tmp_path)).startswith(note)
        running.submit(
            Query(0, [5, 6, 7], 4, lambda *_: None, lambda rid, ids, error: answers.append((list(ids), error)))
        )
        end = time.monotonic() + 120
        while not answers and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        running.stop()
    assert answers == [(expected, "")]
    assert decoders.attention_note("tiny") == ""
