"""Cluster profiles: the shipped ones hold, a wrong one is refused by the name of its nearest field, claims have sources."""

import json
from pathlib import Path

import pytest

from benchlib.config import cluster, schema
from benchlib.core.errors import UserError
from benchlib.launch import nodes


@pytest.mark.parametrize("name", cluster.names())
def test_shipped_profiles_load_and_say_what_they_are(name):
    profile = cluster.load(name)
    assert len(profile.description) > 20
    # Written and read again it is the same: this is how it travels to the pods.
    assert cluster.Cluster.model_validate_json(profile.model_dump_json()) == profile


def test_no_profile_claims_nothing():
    links = cluster.load("").links
    assert links.claimed(one_node=True) == (None, "") and links.claimed(one_node=False) == (None, "")


def test_h100_claims_are_those_of_the_data_sheets():
    links = cluster.load("h100").links
    one, source = links.claimed(one_node=True)
    assert one == 900 * 8 / 2 and "NVLink" in source, "900 GB/s in both directions"
    several, source = links.claimed(one_node=False)
    assert several == 8 * 400 and "ConnectX-7" in source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("links: {inter_node_gpbs: 3}", "links.inter_node_gpbs: no such field: did you mean inter_node_gbps?"),
        ("links: {inter_node_gbps: 3}", "inter_node_gbps needs inter_node_source"),
        ("links: {inter_node_gbps: -3, inter_node_source: x}", "links.inter_node_gbps = -3: Input should be greater"),
        ("kubernets: {}", "kubernets: no such field: did you mean kubernetes?"),
        ("kubernetes: {groups: [{name: a, nodes: 1, imagee: x}]}", "groups.0.imagee: no such field: did you mean image?"),
        ("kubernetes: {groups: [{name: a, nodes: 1}, {name: a, nodes: 2}]}", "two groups have the same name"),
        ("kubernetes: {namespace: Not_A_Label}", "kubernetes.namespace = 'Not_A_Label'"),
        ("kubernetes: {tolerations: [{key: a, efect: NoSchedule}]}", "did you mean effect?"),
        ("kubernetes: {memory: 64GB}", "kubernetes.memory = '64GB'"),
        ('slurm: {setup: ["module load x\\nrm -r y"]}', "has to be one line"),
        ('slurm: {memory: "64G\\nrm -rf /"}', "slurm.memory: '64G"),
        ('slurm: {container: "a\\rb"}', "slurm.container"),
        ('torchx: {cfg: {queue: "a\\nb"}}', "torchx.cfg"),
        ('kubernetes: {node_selector: {"a\\nb": c}}', "kubernetes.node_selector"),
        ('kubernetes: {groups: [{name: a, nodes: 1, image: ""}]}', "kubernetes.groups.0.image = ''"),
        ("kubernetes: {image: a b}", "kubernetes.image = 'a b'"),
        ("kubernetes: {resource: nvidia.com/gpu 8}", "kubernetes.resource"),
        ("kubernetes: {service_account: Me_}", "kubernetes.service_account"),
        ("kubernetes: {claim: a/b}", "kubernetes.claim"),
        ("kubernetes: {env: {1A: x}}", "kubernetes.env.1A"),
        ("kubernetes: {groups: [{name: a, nodes: 1, env: {A-B: x}}]}", "kubernetes.groups.0.env.A-B"),
        ("kubernetes: {claim_path: outputs}", "kubernetes.claim_path"),
        ("kubernetes: {claim_path: /}", "kubernetes.claim_path"),
        ("kubernetes: {claim_path: /etc/benchlib/x}", "claim_path: '/etc/benchlib/x' has to be an absolute path"),
        ("kubernetes: {data_path: /a/../etc}", "without . and .."),
        ("kubernetes: {data_claim: d, data_path: /outputs/data}", "lie in each other"),
        ('torchx: {scheduler: "\'\'\'"}', "torchx.scheduler"),
        ("[1, 2]", "expected the sections description, queue_s, port, links"),
        ("a: b: c", "not valid YAML"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_refused_with_the_field(tmp_path, text, words):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        cluster.load(str(path))
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_names_and_files(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("description: x")
    monkeypatch.chdir(tmp_path)
    assert schema.absolute_paths("squad", {"cluster": "mine.yaml"}) == {"cluster": str(tmp_path / "mine.yaml")}
    assert schema.absolute_paths("squad", {"cluster": "h100"}) == {"cluster": "h100"}
    with pytest.raises(UserError, match="did you mean h100"):
        schema.absolute_paths("squad", {"cluster": "h1000"})
    with pytest.raises(UserError, match=r"other.yaml.*no such file"):
        schema.absolute_paths("squad", {"cluster": "other.yaml"})


def test_a_group_takes_what_it_does_not_say_from_its_section():
    k8s = cluster.load("mixed").kubernetes
    nvidia, amd = (k8s.node(group) for group in k8s.groups)
    assert (nvidia.image, nvidia.resource, nvidia.cpu) == ("benchlib:cuda", "nvidia.com/gpu", "16")
    assert (amd.image, amd.resource, amd.cpu) == ("benchlib:rocm", "amd.com/gpu", "16")
    assert [one.key for one in amd.tolerations] == ["amd.com/gpu"]


def test_a_profile_is_no_part_of_the_work():
    plain = schema.resolve("squad", "smoke", "cpu").config
    other = schema.resolve("squad", "smoke", "cpu", {"cluster": "h100"}).config
    assert plain.work() == other.work()


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4", [4]), ("4(x2)", [4, 4]), ("2(x3),1", [2, 2, 2, 1]), ("1,8(x2),3", [1, 8, 8, 3]), ("", [])],
)
def test_slurm_lists_of_tasks(text, sizes):
    assert nodes.local_sizes(text) == sizes


@pytest.mark.parametrize(
    ("env", "place"),
    [
        # A step of 7 tasks on three nodes, as srun sets it: the step's own names win over the job's.
        ({"SLURM_PROCID": 6, "SLURM_STEP_NUM_TASKS": 7, "SLURM_NTASKS": 9, "SLURM_LOCALID": 0, "SLURM_NODEID": 2,
          "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_TASKS_PER_NODE": "3(x3)"}, (6, 7, 0, 1)),
        ({"SLURM_PROCID": 4, "SLURM_STEP_NUM_TASKS": 7, "SLURM_LOCALID": 1, "SLURM_NODEID": 1,
          "SLURM_STEP_TASKS_PER_NODE": "3(x2),1"}, (4, 7, 1, 3)),
        ({"SLURM_PROCID": 1, "SLURM_NTASKS": 2, "SLURM_LOCALID": 1}, (1, 2, 1, 2)),
        ({"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "JOB_COMPLETION_INDEX": 1}, (3, 4, 1, 2)),
        ({"JOB_COMPLETION_INDEX": 0}, (0, 1, 0, 1)),
    ],
)  # fmt: skip
def test_places(monkeypatch, env, place):
    _only(monkeypatch, env)
    seen = nodes.place()
    assert (seen.rank, seen.size, seen.local_rank, seen.local_size) == place


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"JOB_COMPLETION_INDEX": 1}, "JOB_COMPLETION_INDEX=1 without RANK"),
        ({"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "two"}, "not the place of a rank"),
        ({"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 4, "SLURM_NODEID": 3, "SLURM_STEP_TASKS_PER_NODE": "2,2"}, "not the place"),
    ],
)  # fmt: skip
def test_places_that_cannot_be(monkeypatch, env, words):
    _only(monkeypatch, env)
    with pytest.raises(UserError, match=words):
        nodes.place()


def _only(monkeypatch, env):
    import os

    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MPI_", "RANK", "WORLD_SIZE", "LOCAL_", "JOB_COMPLETION")):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, str(value))


def test_the_list_shows_clusters(capsys):
    from benchlib.commands import list

    list.show_kit()
    shown = capsys.readouterr().out
    assert all(name in shown for name in cluster.names())


def test_schema_of_a_stored_job(tmp_path):
    """A job travels to the supervisor as JSON and back."""
    from benchlib.launch.jobs import Job
    from benchlib.launch.launchers import LAUNCHERS

    made = schema.resolve("squad", "smoke", "cpu", {"launcher": "kubernetes", "cluster": "cpu", "nnodes": 2}).config
    job = LAUNCHERS["kubernetes"](made, Path("/outputs/x/y"))
    assert Job(**json.loads(json.dumps(job.as_json()))) == job
