"""Progress in notebooks: the lines of a headless run, the Stop button, and what an interrupt does."""

import queue
import threading
import time

import pytest

from benchlib.show import widgets

CELL = """
import time, threading
from benchlib.show.widgets import watch

class Slow:
    flag = threading.Event()
    def events(self):
        yield {"t": time.time(), "source": "rank0", "kind": "phase", "name": "train"}
        yield {"t": time.time(), "source": "rank0", "kind": "plan", "planned_steps": 12000, "total_steps": 12000}
        for step in range(12000):
            if self.flag.wait(0.05):
                return
            yield {"t": time.time(), "source": "rank0", "kind": "step", "step": step + 1, "loss": 2.0, "samples": 16}
    def stop(self):
        self.flag.set()
    def wait(self):
        return {"outcome": "stopped" if self.flag.is_set() else "complete"}

status = watch(Slow())
print(status["outcome"])
"""


class Fake:
    """A launch that yields given events; an exception among them is raised in its place."""

    def __init__(self, *events, outcome="complete"):
        self.given, self.outcome, self.stopped = events, outcome, threading.Event()

    def events(self):
        for event in self.given:
            if isinstance(event, BaseException):
                raise event
            yield event

    def stop(self):
        self.stopped.set()

    def wait(self):
        return {"outcome": self.outcome, "reason": ""}


def phase(name):
    return {"t": time.time(), "source": "rank0", "kind": "phase", "name": name}


def step(number, loss=1.5):
    return {"t": 100.0 + number, "source": "rank0", "kind": "step", "step": number, "loss": loss, "samples": 8}


PLAN = {"t": 100.0, "source": "rank0", "kind": "plan", "planned_steps": 50, "total_steps": 50}


@pytest.fixture(autouse=True)
def headless(monkeypatch):
    monkeypatch.setenv("BENCHLIB_HEADLESS", "1")


def test_lines_are_few_and_say_phase_loss_and_speed(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(widgets.time, "monotonic", lambda: clock[0])

    def events():
        yield from (phase("import"), PLAN, phase("train"), step(1, "nan"))
        for number in range(2, 51):
            clock[0] += 1.0  # a step a second: a line every ten
            yield step(number)

    launch = Fake()
    launch.events = events
    assert widgets.watch(launch) == {"outcome": "complete", "reason": ""}
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ["starting", "loading torch", "training  0/50"]
    steps = [f"training  {done}/50  loss 1.500  8.0 samples/s  {50 - done} s left" for done in (11, 21, 31, 41)]
    assert printed[3:-1] == steps
    assert printed[-1].startswith("finished after") and not launch.stopped.is_set()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the follower broke")])
def test_interrupt_ends_the_ranks_and_is_raised_again(capsys, error):
    launch = Fake(phase("train"), PLAN, step(1), error)
    with pytest.raises(type(error)):
        widgets.watch(launch)
    assert launch.stopped.is_set()
    assert "interrupted" in capsys.readouterr().out


@pytest.fixture
def kernel(monkeypatch):
    """A real kernel that takes itself for one with an onlooker, and a client of it."""
    from jupyter_client.manager import KernelManager

    monkeypatch.delenv("BENCHLIB_HEADLESS")
    manager = KernelManager(kernel_name="python3", transport="ipc")
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=300)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def find(client, wanted, timeout=120.0):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if wanted(message["msg_type"], message["content"]):
            return message["content"]
    raise AssertionError("the kernel did not send the message")


def test_stop_button_works_in_a_kernel_that_is_busy_with_the_cell(kernel):
    """The messages are those of JupyterLab: the click goes to a subshell while the cell runs."""
    kernel.execute(CELL)
    button = find(
        kernel,
        lambda kind, content: kind == "comm_open" and content["data"]["state"].get("_model_name") == "ButtonModel",
    )
    shown = find(kernel, lambda kind, content: kind == "display_data")
    assert {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"} == set(shown["data"])
    find(kernel, lambda kind, content: kind == "comm_msg")
    kernel.control_channel.send(kernel.session.msg("create_subshell_request", {}))
    reply = kernel.get_control_msg(timeout=120)
    message = kernel.session.msg(
        "comm_msg", {"comm_id": button["comm_id"], "data": {"method": "custom", "content": {"event": "click"}}}
    )
    message["header"]["subshell_id"] = reply["content"]["subshell_id"]
    kernel.shell_channel.send(message)
    last = find(kernel, lambda kind, content: kind == "update_display_data")
    assert set(last["data"]) == {"text/html", "text/plain"}
    assert "stopped" in last["data"]["text/plain"]
    find(kernel, lambda kind, content: kind == "stream" and content["text"] == "stopped\n")
