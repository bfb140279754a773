"""Ranks that are started again: from the last checkpoint that is whole, on the same node or another, to the same weights."""

import socket

import pytest
import training_cases
from harness import failed, free_port, none_left, prepare
from waiting import until
from worlds import in_ranks

from benchlib.config.schema import resolve, save_config
from benchlib.core.errors import UserError
from benchlib.judge import baselines
from benchlib.launch.launch import Launch, execute
from benchlib.launch.processes import kill_marked
from benchlib.results.run import Run
from benchlib.results.verdict import Verdict
from benchlib.spec.tables import Rows


def _squad(run_dir, **values):
    """Make the run folder of a small training: 12 steps on two ranks of one thread."""
    work = {"threads": 1, "batch_size": 4, "eval_questions": 8, "checkpoint_every": 4, "max_steps": 12, "budget_s": 300}
    run_dir.mkdir()
    save_config(resolve("squad", overrides={"nproc": 2, **work, **values}).config, run_dir)
    return run_dir


def _nodes(**values):
    endpoint = f"127.0.0.1:{free_port()}"
    return {"launcher": "torchrun", "nproc": 1, "nnodes": 2, "rdzv_endpoint": endpoint, "max_restarts": 1, **values}


def _start(launches, endpoint):
    """Start nodes; the first of them holds the rendezvous store."""

    def answers():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(endpoint.rpartition(":")[2]))) == 0

    for launch in launches:
        launch.start()
        until(answers)


def _lose(launch):
    """Kill every process of a node, the supervisor too."""
    kill_marked(launch.run_dir)
    none_left(launch.run_dir)
    launch.wait()


def _wait(launch):
    until(lambda: not launch.running)
    return launch.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = _squad(tmp_path_factory.mktemp("undisturbed") / "run")
    in_ranks(2, run_dir, training_cases.whole)
    return Run(run_dir)


def _same_training(run_dir, undisturbed):
    """The weights of both ranks, bit for bit, and the loss of each step are those of the undisturbed run."""
    again, whole = Rows.of(Run(run_dir)).run, Rows.of(undisturbed).run
    assert again["planned_steps"] == whole["planned_steps"] == len(again["loss"]) == 12
    assert again["checksums"][-1] == whole["checksums"][-1] and len(set(again["checksums"][-1])) == 1
    assert again["loss"] == whole["loss"]


def test_another_node_takes_the_place_of_a_lost_one(request, tmp_path):
    values = _nodes()
    nodes = [Launch(_squad(tmp_path / name, **values), "restarting:waits_for_its_end") for name in "abc"]
    with nodes[0], nodes[1], nodes[2]:
        _start(nodes[:2], values["rdzv_endpoint"])
        until((tmp_path / "b/waits").exists)
        _lose(nodes[1])
        nodes[2].start()
        undisturbed = request.getfixturevalue("undisturbed")  # while the lost node's heartbeats run out
        first, third = _wait(nodes[0]), _wait(nodes[2])
    assert (first["outcome"], first["restarts"]) == ("complete", 1), first["reason"]
    assert (third["outcome"], third["restarts"]) == ("complete", 0), third["reason"]
    assert "may lie on another node" in first["earlier_attempts"][0]["reason"]
    (holder,) = [tmp_path / name for name in "ac" if (tmp_path / name / "result.json").exists()]
    facts = Rows.of(Run(holder)).run
    assert (facts["resumed_step"], facts["restarts"]) == (8, 1)
    assert (tmp_path / "c/checkpoints").is_dir(), "any node may be the next that is lost"
    _same_training(holder, undisturbed)


def test_from_the_checkpoint_before_the_damaged_one(undisturbed, tmp_path):
    run_dir = _squad(tmp_path / "run", launcher="torchrun", max_restarts=1)
    ended = execute(run_dir, benchmark="restarting:flipped_and_killed")
    none_left(run_dir)
    assert (ended["outcome"], ended["restarts"]) == ("complete", 1)
    (earlier,) = ended["earlier_attempts"]
    # torchrun names one rank: the killed one, or the one that lost its peer by it where that ends within the same look.
    assert (earlier["attempt"], earlier["culprit"]) in ((1, 0), (1, 1))
    if earlier["culprit"] == 1:
        assert earlier["ranks"][1]["signal"] == "SIGKILL"
        assert earlier["reason"].startswith("rank 1 was killed by SIGKILL during phase train")
    assert (run_dir / "logs/rank1.err").exists(), "of both attempts"
    facts = Rows.of(Run(run_dir)).run
    assert (facts["resumed_step"], facts["restarts"]) == (4, 1), "step 8 is there and has a wrong bit"
    assert any("step-00000008: model.safetensors was altered" in fault for fault in facts["checkpoint_faults"])
    _same_training(run_dir, undisturbed)
    passed = Verdict(verdict="PASS", sentence="", checks=[])
    with pytest.raises(UserError, match="was started again 1 time after failures"):
        baselines.require_acceptable(Run(run_dir), passed)


def test_a_rank_that_hangs_is_killed_and_all_are_started_again(tmp_path):
    values = {"launcher": "torchrun", "max_restarts": 1, "fault": "spin_without_end", "stall_timeout_s": 4}
    ended = failed(prepare(tmp_path / "run", **values)).status
    assert (ended["outcome"], ended["culprit"], ended["restarts"]) == ("stalled", 1, 1), "it hangs every time"
    (earlier,) = ended["earlier_attempts"]
    assert (earlier["outcome"], earlier["culprit"]) == ("stalled", 1)
    for attempt in (ended, earlier):
        assert "spin_without_end" in attempt["reason"]
