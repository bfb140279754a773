"""Collectives and mixed clusters"""

import json
import math
import re
import shutil
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from promised import promise, skip_rest

from benchlib import session
from benchlib.results.run import Run

SMALL = (
    "operations=all_reduce,broadcast,barrier",
    "dtypes=fp32",
    "sizes=4KiB",
    "share_sizes=64KiB",
    "variants=library",
)
TRAINED = (
    "threads=1",
    "learning_rate=1e-4",
    "train_questions=8",
    "eval_questions=2",
    "attention_dropout=0",
    "hidden_dropout=0",
    "epochs=4",
)
ONE_PROCESS = (*TRAINED, "nproc=1", "batch_size=8")
# Two groups on this machine, of a rank each, which do their work once and three times, and change places after two of four steps.
UNLIKE = (
    *TRAINED,
    "exchange_groups=a,b",
    "batch_size=4",
    "balance=auto",
    "planted_work=1,3",
    "planted_drift_step=2",
    "memory_limits_gb=0.03,0.03",
)
LIBRARIES = ("collective=mpi", "compare_gradients=gloo,mpi,ucc") if find_spec("mpi4py") else ("compare_gradients=gloo",)
GROUP = "  - {{hosts: [127.0.0.1], backend: cpu, command: '', folder: {folder}}}\n"
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "31_unlike_nodes.ipynb"


def settings(*pairs):
    return [word for pair in pairs for word in ("--set", pair)]


def stored(out):
    (config,) = out.glob("*/*/config.json")
    return Run(config.parent)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, program):
    """Return a run in which rank 1 alters an element, on links that are claimed to carry next to nothing, and what it printed."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "slow.yaml").write_text("links: {intra_node_gbps: 1e-6, intra_node_source: a label}\n")
    more = ("nproc=2", "reductions=sum", "seconds=0.002", f"cluster={folder / 'slow.yaml'}", *LIBRARIES)
    words = settings(*SMALL, *more, "planted_fault_rank=1")
    return folder, program("run", "collectives", *words, "--out", folder / "out", code=1)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory, program):
    """Return a training that one command started on the groups of a profile, and the folder of the nodes."""
    folder = tmp_path_factory.mktemp("unlike")
    (folder / "two.yaml").write_text("groups:\n" + 2 * GROUP.format(folder=folder / "nodes"))
    program("run", "squad", *settings(f"cluster={folder / 'two.yaml'}", *UNLIKE), "--out", folder / "out")
    return stored(folder / "out"), folder / "nodes"


def samples(run, table, index, column):
    return run.row_samples[f"{table}[{index}].{column}"]


@promise(
    "P047",
    "Measure all-reduce, all-gather, broadcast, reduce-scatter, all-to-all, barrier and others by size, with wrong results found",
    "benchlib run collectives --tier quick",
)
def test_p047_every_operation_is_measured_by_size_and_a_wrong_element_fails_with_its_place(recorded, faulty):
    rows = Run(recorded("collectives")).result.tables["series"]
    collectives = {
        "all_reduce",
        "all_gather",
        "broadcast",
        "reduce_scatter",
        "all_to_all",
        "barrier",
        "reduce",
        "send_recv",
    }
    assert collectives | {"gather", "scatter"} == {row["operation"] for row in rows}
    for name in collectives - {"barrier"}:
        own = [row for row in rows if row["operation"] == name and row["dtype"] == "fp32"]
        assert len({row["bytes"] for row in own}) >= 3
        assert all(row["checked_elements"] > 0 == row["wrong_elements"] for row in own)
    folder, printed = faulty
    run = stored(folder / "out")
    (row,) = [row for row in run.result.tables["series"] if row["operation"] == "all_reduce" and row["in_place"]]
    assert row["wrong_elements"] > 0
    # The smallest fp32 above 2049.
    assert row["first"] == f"element 1,023 of 1,024 on rank 1 is {2049 + 2**-12} and should be 2049.0"
    assert "2 checks failed: right results" in printed


@promise(
    "P048",
    "Judge the all-reduce of BERT's gradients against 30 Gbps, only where the tier says so",
    "benchlib run collectives --set target_allreduce_gbps=30",
)
def test_p048_the_gradients_are_judged_against_the_gbps_of_the_tier(recorded, tmp_path, program):
    (row,) = Run(recorded("collectives")).result.tables["buckets"]
    measured = 8 * row["bytes"] / row["times_us"] / 1e3  # of two ranks the bus factor is 1
    for target, status in ((None, "SKIPPED"), (30.0, "FAIL"), (0.99 * measured, "PASS"), (1.01 * measured, "FAIL")):
        folder = shutil.copytree(recorded("collectives"), tmp_path / str(target))
        config = json.loads((folder / "config.json").read_text()) | {"target_allreduce_gbps": target}
        (folder / "config.json").write_text(json.dumps(config))
        (check,) = [check for check in session.judge(Run(folder)).checks if check.name == "gradient all-reduce"]
        assert check.status == status, check
        assert target is None or check.value == pytest.approx(measured)
    for backend, target in (("cuda", "30.0"), ("cpu", "None")):
        shown = program("run", "collectives", "--tier", "nightly", "--backend", backend, "--dry-run")
        assert re.search(rf"target_allreduce_gbps +{target} ", shown)


@promise(
    "P049",
    "Compare algorithms of the all-reduce: ring, tree, reduce-scatter + all-gather, direct",
    "benchlib run collectives --set variants=ring,tree,rs_ag,direct",
)
def test_p049_algorithms_are_timed_beside_the_librarys_and_their_crossings_told(recorded):
    run = Run(recorded("collectives"))
    rows = list(enumerate(run.result.tables["series"]))
    assert {"ring", "tree", "rs_ag", "direct"} <= {row["variant"] for _, row in rows}
    assert not any(row["wrong_elements"] for _, row in rows)
    times = {
        (row["variant"], row["bytes"]): row["times_us"]
        for _, row in rows
        if row["operation"] == "all_reduce" and row["curve"]
    }
    ratios = {(row["variant"], row["bytes"]): row["ratio"] for row in run.result.tables["ratios"]}
    for (variant, size), ratio in ratios.items():
        assert ratio == pytest.approx(times[variant, size] / times["library", size])
    crossed = {row["variant"]: row for row in run.result.tables["crossover"]}
    for variant in ("ring", "tree", "rs_ag"):
        above = [ratios[variant, size] > 1 for size in sorted(size for name, size in ratios if name == variant)]
        changes = sum(one != other for one, other in pairwise(above))
        expected = {0: "never" if above[0] else "always", 1: "below" if above[-1] else "above"}.get(changes, "mixed")
        assert crossed[variant]["faster"] == expected
    assert "Against the library's all-reduce ring is" in session.reading(run).data


@promise(
    "P050",
    "Measure bandwidth and latency of each pair of ranks, as a share of sockets or of a claimed link, and refuse more than a link carries",
    "benchlib run collectives --set pairs=true --set cluster=h100",
)
def test_p050_pairs_are_measured_and_more_than_a_claimed_link_carries_fails(recorded, faulty):
    run = Run(recorded("collectives"))
    pairs = run.result.tables["pairs"]
    assert [(row["source"], row["target"]) for row in pairs] == [(0, 1), (1, 0)]
    assert all(row["times_us"] > 0 == row["wrong_elements"] for row in pairs)
    shares = run.result.tables["shares"]
    (place,) = [i for i, row in enumerate(shares) if (row["operation"], row["variant"]) == ("all_reduce", "library")]
    both = zip(samples(run, "shares", place, "bound_times_us"), samples(run, "shares", place, "times_us"), strict=True)
    assert run.result.value("allreduce_socket_share") == pytest.approx(median(bound / own for bound, own in both))
    checks = {check.name: check for check in session.judge(stored(faulty[0] / "out")).checks}
    refused = checks["possible bandwidth"]
    assert refused.status == "FAIL" and "can be moved (claimed: a label)" in refused.reason


@promise(
    "P051",
    "Run the same training over gloo, MPI, UCC or NCCL and compare the gradients",
    "benchlib run collectives --set collective=mpi --set compare_gradients=gloo,mpi,ucc",
)
def test_p051_libraries_give_the_gradients_of_one_process(faulty):
    if "collective=mpi" not in LIBRARIES:
        skip_rest("mpi4py is not installed: pip install -e '.[mpi]'")
    run = stored(faulty[0] / "out")
    rows = {row["collective"]: row for row in run.result.tables["gradients"]}
    assert run.result.facts["collective"] == "mpi" and list(rows) == ["gloo", "mpi", "ucc"]
    has_ucc = torch.distributed.is_ucc_available()
    for name in ("gloo", "mpi", *(["ucc"] if has_ucc else [])):
        assert rows[name]["status"] == "ok" and rows[name]["max_difference"] <= rows[name]["tolerance"] == 1e-12
    assert has_ucc or (rows["ucc"]["status"] == "skipped" and "USE_UCC=1" in rows["ucc"]["reason"])


@promise(
    "P052",
    "Train one model on NVIDIA and AMD nodes in one run, and on more than two nodes",
    "benchlib run squad --set cluster=mixed --set balance=auto",
    needs="a node with NVIDIA and one with AMD devices",
)
def test_p052_groups_train_one_model_through_the_hierarchy(unlike):
    run, _ = unlike
    assert run.config.collective == "hierarchical" and run.config.exchange_groups == "a,b"
    checks = {check.name: check for check in session.judge(run).checks}
    assert (checks["ranks equal"].status, checks["all-reduce right"].status) == ("PASS", "PASS")
    skip_rest("no NVIDIA and no AMD node is here: two groups of CPU ranks exchanged over gloo")


@promise(
    "P053",
    "Start groups of unlike nodes (NVIDIA + AMD) with one command, from one cluster profile",
    "benchlib run squad --set cluster=mixed",
)
def test_p053_one_command_starts_the_hosts_of_a_profile_and_gathers_what_they_leave(unlike, program, in_folder):
    run, nodes = unlike
    assert json.loads((run.path / "status.json").read_text())["outcome"] == "complete"
    assert run.result.world_size == 2 and len(list(nodes.iterdir())) == 2
    assert {f"events-rank{rank}.jsonl" for rank in range(2)} <= {path.name for path in run.path.iterdir()}
    shown = program("run", "squad", "--set", "cluster=mixed", "--dry-run")
    starts = [json.loads(text) for text in re.findall(r'"command": (\[.*?\])', shown, re.S)]
    assert [words[:4] for words in starts] == [["ssh", "-o", "BatchMode=yes", host] for host in ("nvidia-1", "amd-1")]
    assert all(words[words.index("--nnodes") : words.index("--nnodes") + 2] == ["--nnodes", "2"] for words in starts)
    assert re.findall(r'"config.json": {.*?"backend": "(\w+)"', shown, re.S) == ["cuda", "rocm"]
    (in_folder / "uneven.yaml").write_text(
        "groups:\n  - {hosts: [a], backend: cuda, devices: 8}\n  - {hosts: [b], backend: rocm, devices: 4}\n"
    )
    refused = program("run", "squad", "--backend", "cpu", "--set", "cluster=mixed", code=2)
    assert "--backend cpu: the groups of mixed name their backends: leave it out" in refused
    refused = program("run", "squad", "--set", "cluster=uneven.yaml", code=2)
    assert "groups have 4 and 8 devices a host: give all the smaller number" in refused


@promise(
    "P054",
    "Let each device have the batch that its memory and speed allow, by accumulation, with the gradients of one process",
    "benchlib run squad --set balance=auto",
)
def test_p054_an_uneven_split_has_the_losses_of_one_process(unlike, ran):
    run, _ = unlike
    one = ran("squad", *ONE_PROCESS)
    assert all(sum(row["shares"]) == 8 for row in run.result.tables["splits"])
    for row in run.result.tables["shares"]:  # 0.03 GB hold fewer samples than the 8 of a step
        assert 0 < row["most"] < 8 and row["micro_batches"] == math.ceil(row["samples"] / row["most"])
    assert len(run.samples["loss"]) == 4
    np.testing.assert_allclose(run.samples["loss"], one.samples["loss"], rtol=1e-5)


@promise(
    "P055",
    "Read in the notebook of unlike nodes which rank got how much",
    "jupyter lab notebooks/31_unlike_nodes.ipynb",
)
def test_p055_the_table_pairs_the_work_of_a_rank_with_its_part_of_the_same_split(unlike):
    run, _ = unlike
    ranks, splits = session.table(run, "Heterogeneous ranks"), session.table(run, "Splits")
    assert list(ranks["work in the last step"]) == ["3", "1"]  # they changed places
    assert "+".join(ranks["samples"]) == splits["samples by rank"].iloc[-1]
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    (shown,) = [cell for cell in cells if "Heterogeneous ranks" in "".join(cell["source"]) and cell["outputs"]]
    html = "".join(shown["outputs"][0]["data"]["text/html"])
    heading = re.findall(r"<th>([^<]*)</th>", html.partition("</thead>")[0])
    rows = [
        dict(zip(heading, re.findall(r"<t[hd]>([^<]*)</t[hd]>", row), strict=True)) for row in html.split("<tr>")[1:]
    ]
    slow, fast = sorted(rows, key=lambda row: -int(row["work in the last step"]))
    assert (slow["rank"], fast["rank"]) == ("0", "1") and int(slow["samples"]) < int(fast["samples"])


@promise(
    "P056",
    "Measure on M4 Metal and on 4x V100 with NVLink, over ConnectX-5 at 25 Gbit/s, GPU-direct RDMA or a BlueField-2",
    "benchlib run collectives --backend mps; benchlib run collectives --backend cuda",
    needs="an M4 Mac; four V100 with NVLink; ConnectX-5",
)
def test_p056_the_machines_are_known_and_refused_where_they_are_not(program):
    shown = program("run", "parallel", "--set", "machine=v100-4x-nvlink", "--dry-run")
    claims = ("NVLink 2 (GB/s one way) 150: claimed", "ConnectX-5, 25 Gbit/s (GB/s one way) 3.125: claimed")
    assert "estimates for v100-4x-nvlink (4 x NVIDIA V100 16 GB SXM2" in shown and all(text in shown for text in claims)
    shown = program("run", "collectives", "--backend", "mps", "--dry-run")
    assert "(not available: " not in shown or "needs a Mac with Apple silicon" in shown
    skip_rest("neither an M4 nor V100 with NVLink, ConnectX-5 or BlueField-2 is here: nothing was measured on one")
