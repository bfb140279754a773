"""Parameters of the parity benchmark, and the members that they choose."""

import pytest

from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.core.errors import UserError
from benchlib.launch import plan


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"members": ["sdpa_mth"]}, "did you mean sdpa_math"),
        ({"members": ["efficient"]}, "'efficient' is not of cpu but of cuda, rocm"),
        ({"data": "files"}, "needs dev_file=FILE"),
        ({"record": True, "golden": "folder"}, "omit golden"),
    ],
)
def test_wrong_values_say_what_to_do_before_anything_starts(values, words):
    with pytest.raises((ValueError, UserError), match=words):
        ParityConfig(**values).check_whole()


def test_the_work_is_what_the_members_compute():
    same = ParityConfig(members=["bf16"], slow=True, keep=True, planted_layer=1, golden="", member_timeout_s=9)
    assert same.work() == ParityConfig().work()
    assert ParityConfig(golden="/a/h100").work() == ParityConfig(golden="/b/h100").work() != ParityConfig().work()
    assert ParityConfig(lengths=[8]).work() != ParityConfig().work()


def test_a_tier_over_many_ranks_gives_parity_one_process_and_none_over_nodes(capsys):
    eight = {one.config.benchmark: one.config.nproc for one in plan.plans("nightly", None, "cpu", ["nproc=8"], None)}
    assert (eight["parity"], eight["squad"]) == (1, 8)
    nodes = plan.plans("nightly", None, "cuda", ["nproc=8", "nnodes=2", "launcher=slurm", "cluster=slurm"], None)
    assert "parity" not in [one.config.benchmark for one in nodes]
    assert "left out: parity runs in one process" in capsys.readouterr().err
