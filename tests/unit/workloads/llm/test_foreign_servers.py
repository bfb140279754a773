"""Servers and clients that are not the kit's: `transformers serve` asked by the dispatcher, and OpenAI's client at a worker."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from llm_servers import TOKEN, own
from transformers import AutoModelForCausalLM
from transformers.utils.import_utils import is_serve_available

from benchlib.workloads.llm.articles import load
from benchlib.workloads.llm.decoders import TINY, Codec, Static
from benchlib.workloads.llm.dispatch import Dispatcher
from benchlib.workloads.llm.engines import Policy, Settings
from benchlib.workloads.llm.load import Client

LONG_S = 240  # for what hangs: no test depends on how busy the machine is
NEW = 24
CONTINUOUS = ("--continuous-batching", "--cb-num-blocks", "64", "--cb-block-size", "32")
PATIENT = Policy(
    cap=4, deadline_s=LONG_S, stall_s=LONG_S, gone_s=LONG_S, probe_s=0.1, probe_limit_s=LONG_S, start_s=LONG_S
)


@pytest.fixture(scope="module")
def prompts():
    return load("mininews", "", 6, 0, "tiny").prompts


@pytest.fixture(scope="module")
def answers(prompts):
    """Return the token ids that the model's own ``generate`` gives for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    with torch.inference_mode():
        every = [model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0] for ids in prompts]
    return [ids[len(prompt) :].tolist() for ids, prompt in zip(every, prompts, strict=True)]


@pytest.fixture
def served(tmp_path):
    """Start `transformers serve` with the embedded model, which it finds in no cache, on a free port; return its URL."""
    if not is_serve_available():
        pytest.skip("`transformers serve` needs fastapi, openai and uvicorn: pip install 'transformers[serving]'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(TINY), *CONTINUOUS]
    command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    alone = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=alone, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def worker():
    """Host a worker of the kit that computes with the embedded model."""
    engine = Static(Settings(model="tiny", slots=4, threads=1))
    engine.start()
    hosted = own(engine=engine, kind="static", codec=Codec("tiny"))
    yield hosted
    hosted.cut()
    engine.stop()


def texts(answers):
    return [Codec("tiny").decode(ids) for ids in answers]


def test_transformers_serve_answers_what_the_model_says(served, prompts, answers):
    dispatcher = Dispatcher(Settings(model="tiny", urls=(served,), policy=PATIENT))
    dispatcher.start()
    try:
        asked = Client(dispatcher, prompts, NEW, LONG_S)
        table, record = asked.at_once(len(answers)), dispatcher.record()
    finally:
        dispatcher.stop()
    assert not table["failed"].any() and (table["attempt"] == 1).all(), asked.log.errors
    assert texts(asked.answers[sample] for sample in range(len(answers))) == texts(answers)
    assert record["workers"][0]["asked_in"] == "text"
    assert 0 < record["counts"]["stated"] == pytest.approx(record["counts"]["counted"], rel=0.05)


def test_a_chat_template_of_the_model_is_applied():
    codec = Codec("tiny")
    codec.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert codec.decode(codec.chat([{"role": "user", "content": "News"}])).strip() == "<user>News"
    codec.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match="no system role"):
        codec.chat([{"role": "system", "content": "x"}])


def test_openais_client_reads_whole_and_streamed_answers(worker, prompts, answers):
    openai = pytest.importorskip("openai")
    (text,), asked = texts(answers[:1]), {"model": "tiny", "prompt": prompts[0], "max_tokens": NEW, "temperature": 0}
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key=TOKEN, timeout=LONG_S) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(**asked)
        assert (whole.choices[0].text, whole.usage.completion_tokens) == (text, len(answers[0]))
        events = list(client.completions.create(**asked, stream=True))
        assert "".join(event.choices[0].text for event in events) == text and len(events) > 3
        # What the plain template makes of the messages is a prompt of text like any other.
        article = Codec("tiny").decode(prompts[0])
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": article}]
        text = f"system: Be short.\nuser: {article}\nassistant:"
        expected = client.completions.create(model="tiny", prompt=text, max_tokens=NEW).choices[0].text
        parts = [messages[0], {"role": "user", "content": [{"type": "text", "text": article}]}]
        for turns, limit in ((messages, "max_tokens"), (parts, "max_completion_tokens")):
            chat = {"model": "tiny", "messages": turns, limit: NEW}
            answer = client.chat.completions.create(**chat)
            assert (answer.choices[0].message.content, answer.choices[0].message.role) == (expected, "assistant")
            options = {"include_usage": True}
            events = list(client.chat.completions.create(**chat, stream=True, stream_options=options))
            assert "".join(event.choices[0].delta.content for event in events) == expected and len(events) > 1
            assert events[-1].usage == answer.usage
    wrong = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="wrong")
    with wrong as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(**asked)
