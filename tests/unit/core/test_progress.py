"""What an onlooker is told, against cases that were worked out by hand."""

from types import SimpleNamespace

from benchlib.core.events import Progress
from benchlib.launch import launch


def told(*events):
    progress = Progress()
    for event in events:
        progress.update({"source": "rank0", **event})
    return progress


def test_time_left_follows_what_was_done_and_not_how_often_it_was_told():
    leaps = [{"kind": "progress", "t": t, "done": done, "total": 100} for t, done in ((0.0, 0), (1.0, 10), (6.0, 60))]
    assert told({"kind": "phase", "name": "evaluate", "t": 0}, *leaps).left_s == 4.0  # 10 a second, 40 to go


def test_training_shows_the_planned_steps_loss_and_rate():
    steps = [{"kind": "step", "t": float(i), "step": i, "samples": 16, "loss": 2.0 - i / 10} for i in range(1, 6)]
    progress = told({"kind": "plan", "planned_steps": 9, "t": 0}, {"kind": "phase", "name": "train", "t": 0}, *steps)
    assert (progress.done, progress.total, progress.rate, progress.left_s) == (5, 9, 16.0, 4.0)
    assert progress.line() == "training  5/9  loss 1.500  16.0 samples/s  4 s left"


def test_a_second_count_in_a_phase_starts_anew():
    first = [{"kind": "progress", "t": float(t), "done": 50 * t, "total": 100} for t in range(3)]
    second = [{"kind": "progress", "t": 10.0 + t, "done": t, "total": 4} for t in range(3)]
    assert told(*first, *second).left_s == 2.0


def test_parts_of_a_phase_are_named_and_promise_no_time():
    parts = [
        {"kind": "progress", "t": t, "member": "bf16", "unit": "gradients", "done": done, "total": 7}
        for t, done in ((0.0, 1), (1.0, 4))
    ]
    phase = {"kind": "phase", "name": "members", "text": "computing and comparing members", "t": 0}
    progress = told(phase, *parts)
    assert progress.line() == "computing and comparing members  bf16: gradients  4/7"
    assert told(phase, *parts, {"kind": "phase", "name": "write", "t": 2}).line() == "writing results"


def test_a_long_phase_says_how_long_it_has_taken():
    progress = told({"kind": "phase", "name": "model", "t": 0})
    assert progress.line() == "loading the model"
    progress.began -= 42
    assert progress.line() == "loading the model  for 42 s"
    progress.update({"source": "rank0", "kind": "phase", "name": "train", "t": 1})
    assert progress.line() == "training"


def test_a_launch_that_is_silent_ticks(tmp_path, monkeypatch):
    """Once a second for nine and a half seconds, by a clock that moves where the launch sleeps."""
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], time=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(launch, "time", clock)
    monkeypatch.setattr(launch.Launch, "running", property(lambda _: now[0] < 9.5))
    ticks = list(launch.Launch(tmp_path).events())
    assert len(ticks) in (8, 9)  # with polls every 0.1 s
    assert {event["kind"] for event in ticks} == {"tick"}
    assert not Progress().update(ticks[0])
