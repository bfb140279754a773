"""What the launchers would hand to a cluster: the same torchrun command for every node, in each form."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from benchlib.cli import main
from benchlib.config.schema import build, resolve
from benchlib.core.errors import UserError
from benchlib.launch.kubernetes import FLAVOURS, job_name
from benchlib.launch.launchers import LAUNCHERS

RUN = Path("/outputs/smoke-20261122/squad-cuda-010203-abcdef")
NAME = "benchlib-squad-cuda-010203-abcdef"


def job(launcher, profile, folder=RUN, tmp_path=None, **values):
    """Describe a run with a profile given as text."""
    if profile and tmp_path:
        path = tmp_path / "own.yaml"
        path.write_text(profile)
        profile = str(path)
    config = resolve("squad", "smoke", "cuda", {"launcher": launcher, "cluster": profile, **values}).config
    return LAUNCHERS[launcher](config, folder)


def objects(described):
    """Return the objects of a manifest by kind, in lists."""
    kinds = {}
    for item in yaml.safe_load_all(described.files["manifest.yaml"]):
        kinds.setdefault(item["kind"], []).append(item)
    return kinds


def pod_templates(item):
    """Return the pod templates in an object, with the number of pods, in order."""
    if item["kind"] == "Job":
        return [(item["spec"]["completions"], item["spec"]["template"])]
    spec = item["spec"]["template"]["spec"] if item["kind"] == "TrainingRuntime" else item["spec"]
    jobs = [one["template"]["spec"] for one in spec["replicatedJobs"]]
    return [(one["completions"], one["template"]) for one in jobs]


def torchrun_options(command):
    """Return torchrun's options of a pod's command, and what it runs."""
    words = command[command.index("torch.distributed.run") + 1 :]
    split = words.index("-m")
    pairs = words[:split]
    return dict(zip(pairs[::2], pairs[1::2], strict=True)), words[split:]


@pytest.mark.parametrize(
    ("flavour", "kind", "host"),
    [
        ("indexed", "Job", f"{NAME}-node-0.{NAME}"),
        ("jobset", "JobSet", f"{NAME}-node-0-0.{NAME}"),
        ("trainjob", "TrainingRuntime", f"{NAME}-node-0-0.{NAME}"),
    ],
)
def test_every_flavour_runs_the_same_command_on_every_node(tmp_path, flavour, kind, host):
    described = job(
        "kubernetes", f"kubernetes: {{flavour: {flavour}}}", tmp_path=tmp_path, nnodes=4, nproc=8, max_restarts=2
    )
    (item,) = objects(described)[kind]
    ((pods, template),) = pod_templates(item)
    (container,) = template["spec"]["containers"]
    options, worker = torchrun_options(container["command"])
    assert pods == 4
    assert options["--rdzv-endpoint"] == f"{host}:29400"
    assert (options["--nnodes"], options["--nproc-per-node"], options["--max-restarts"]) == ("4", "8", "2")
    assert (options["--rdzv-backend"], options["--rdzv-id"]) == ("c10d", NAME)
    assert {"is_host={is_host}", "join_timeout=3600"} <= set(options["--rdzv-conf"].split(","))
    assert worker == ["-m", "benchlib.runtime.worker", str(RUN)]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert item["spec"].get("completionMode", "Indexed") == "Indexed"
    assert template["metadata"]["labels"]["benchlib.run"] == NAME, "how the agent finds its pods"


def test_pods_of_an_indexed_job_have_names():
    kinds = objects(job("kubernetes", "cpu", nnodes=2))
    (service,), (one,) = kinds["Service"], kinds["Job"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert one["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    labels = one["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_vendors_share_one_rendezvous():
    described = job("kubernetes", "mixed", nnodes=2, nproc=4, collective="hierarchical")
    kinds = objects(described)
    (jobset,) = kinds["JobSet"]
    (_, nvidia), (_, amd) = pod_templates(jobset)
    (one,), (other,) = nvidia["spec"]["containers"], amd["spec"]["containers"]
    assert one["resources"]["limits"] == {"memory": "128Gi", "nvidia.com/gpu": "4"}
    assert other["resources"]["limits"] == {"memory": "128Gi", "amd.com/gpu": "4"}
    assert (one["image"], other["image"]) == ("benchlib:cuda", "benchlib:rocm")
    assert torchrun_options(one["command"]) == torchrun_options(other["command"])
    assert ("--host" in one["command"], "--host" in other["command"]) == (True, False), "one of them opens the store"
    data = kinds["ConfigMap"][0]["data"]
    configs = {name: yaml.safe_load(data[f"{name}.json"]) for name in ("nvidia", "amd")}
    assert {name: each["backend"] for name, each in configs.items()} == {"nvidia": "cuda", "amd": "rocm"}
    assert {each["collective"] for each in configs.values()} == {"hierarchical"}
    for each in configs.values():  # what each rank reads: it fits its own backend, and by it the rank has its group
        build("squad", each).check_whole()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nnodes": 3, "collective": "gloo"}, r"nvidia\(1\) \+ amd\(1\) = 2 nodes .* but nnodes is 3: set nnodes=2"),
        ({"nnodes": 2}, "cannot join ranks of cuda and rocm: set collective=hierarchical .*, gloo or ucc"),
        ({"nnodes": 2, "collective": "nccl"}, "cannot join ranks"),
    ],
)
def test_what_does_not_fit_is_refused(values, words):
    with pytest.raises(UserError, match=words):
        job("kubernetes", "mixed", **values)


@pytest.mark.parametrize(("launcher", "profile"), [("kubernetes", "h100"), ("slurm", "slurm")])
def test_the_notes_name_devices_that_no_rank_would_use(launcher, profile):
    for backend, expected in (("cpu", 1), ("cuda", 0)):
        config = resolve("squad", "smoke", backend, {"launcher": launcher, "cluster": profile}).config
        notes = LAUNCHERS[launcher](config, RUN).notes
        assert sum(note.startswith("CAUTION: backend = cpu, but the profile") for note in notes) == expected


def test_results_come_home_unless_the_folder_is_shared():
    claim = "h100"  # mounts its claim at /outputs
    here = job("kubernetes", claim, folder=RUN, nnodes=2, nproc=8)
    away = job("kubernetes", claim, folder=Path("/home/me/outputs/day/run"), nnodes=2, nproc=8)
    assert "--shared" in here.commands[0] and "--hold" not in here.files["manifest.yaml"]
    assert "--shared" not in away.commands[0] and "--hold" in away.files["manifest.yaml"]
    assert "/outputs/day/run" in away.files["manifest.yaml"]
    assert "/home/me" not in away.files["manifest.yaml"].partition("kind: TrainingRuntime")[2], (
        "no path of this machine"
    )


def test_one_node_needs_no_meeting():
    (one,) = objects(job("kubernetes", "gpu"))["Job"]
    command = one["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "--standalone" in command and "--rdzv-endpoint" not in command


@pytest.mark.parametrize("folder", ["x", "Squad_CPU-1", "9" * 80, "<run>", "-a-", "ü", "squad-cpu-" + "a" * 60])
def test_names_are_labels(folder):
    name = job_name(Path("/o") / folder)
    longest = f"{name}-{'g' * 15}-0-4095"
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(longest) <= 63


def test_slurm_script_by_hand(tmp_path):
    profile = """
slurm:
  partition: gpu
  account: me
  gres: gpu:{nproc}
  cpus_per_rank: 12
  constraint: a100&ib
  exclusive: true
  setup: [module load cuda]
  python: /shared/venv/bin/python
  sbatch: [--reservation=x]
  srun: [--mpi=none]
"""
    described = job(
        "slurm", profile, folder=Path("/shared/my runs/r"), tmp_path=tmp_path, nnodes=2, nproc=4, wall_limit_s=600
    )
    assert (
        described.files["slurm.sh"]
        == """#!/bin/bash
#SBATCH --job-name=benchlib-r
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=12
#SBATCH --output="/shared/my runs/r/logs/slurm.out"
#SBATCH --chdir="/shared/my runs/r"
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --constraint="a100&ib"
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=12
#SBATCH --no-requeue
#SBATCH --exclusive
#SBATCH --reservation=x

set -euo pipefail
module load cuda
export BENCHLIB_RUN_DIR='/shared/my runs/r'
export PYTHONUNBUFFERED=1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --kill-on-bad-exit=1 --cpus-per-task=12 --mpi=none /shared/venv/bin/python -m benchlib.runtime.worker '/shared/my runs/r'
"""
    )


@pytest.mark.parametrize("name", ["partition", "account", "qos", "constraint", "gres", "memory"])
def test_options_of_sbatch_stay_one_word(tmp_path, name):
    """Quoted where a blank or a sign of the shell is in them; refused with what sbatch's quotes cannot hold."""
    script = job("slurm", f"slurm: {{{name}: g p; rm}}", tmp_path=tmp_path).files["slurm.sh"]
    option = {"memory": "mem"}.get(name, name)
    assert f'#SBATCH --{option}="g p; rm"' in script.splitlines()
    for sign in "\"'\\":
        with pytest.raises(UserError, match=f"sbatch option {option} = .*change slurm of the profile"):
            job("slurm", f"slurm: {{{name}: a{sign}b}}", tmp_path=tmp_path)


def test_a_run_folder_that_sbatch_cannot_read_is_refused():
    with pytest.raises(UserError, match="change --out"):
        job("slurm", "", folder=Path('/shared/a"b/r'))


def test_slurm_with_restarts_has_an_agent_on_each_node():
    script = job("slurm", "slurm", nnodes=2, nproc=4, max_restarts=1).files["slurm.sh"]
    line = shlex.split(script.splitlines()[-1])
    assert line[:4] == ["srun", "--kill-on-bad-exit=1", "--ntasks=2", "--ntasks-per-node=1"]
    inner = line[-1]
    assert '--rdzv-endpoint "$FIRST":29400' in inner and 'is_host="$((SLURM_NODEID == 0))"' in inner
    assert "--max-restarts 1" in inner and "--nproc-per-node 4" in inner


def test_torchx_component_is_python_of_one_role():
    described = job("torchx", "torchx", nnodes=2, nproc=2)
    text = described.files["torchx_app.py"]
    compile(text, "torchx_app.py", "exec")
    assert "num_replicas=2" in text and "--nproc-per-node 2" in text and "FIRST:29400" in text
    assert described.commands[0][-1].endswith("torchx_app.py:app")


def test_launchers_are_pure(tmp_path):
    for launcher in ("kubernetes", "slurm", "torchx"):
        folder = tmp_path / "nowhere" / "run"
        config = resolve("squad", "smoke", "cpu", {"launcher": launcher, "nnodes": 2}).config
        first, second = (LAUNCHERS[launcher](config, folder) for _ in range(2))
        assert first == second and not folder.parent.exists()
        assert first.remote and first.agent and first.submits in first.files and first.needs


def test_the_manifest_is_printed_alone():
    words = ["run", "squad", "-b", "cpu", "--manifest", "--set", "launcher=kubernetes", "--set", "nnodes=2"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    kinds = [item["kind"] for item in yaml.safe_load_all(done.output)]
    assert kinds == ["ConfigMap", "Service", "Job"]


def test_the_dry_run_shows_the_manifest_unbroken(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # a dry run needs no kubectl
    words = ["run", "squad", "-b", "cpu", "--dry-run", "--set", "launcher=kubernetes", "--set", "cluster=cpu"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    text = done.output.partition("manifest.yaml in the run folder\n")[2].partition("\n\nexpected work")[0]
    assert [item["kind"] for item in yaml.safe_load_all(text)] == ["ConfigMap", "Service", "Job"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--manifest"], "launcher=local hands nothing to a cluster"),
        (["--manifest", "--set", "launcher=slurm", "-b", "auto"], "say which, as in --backend cuda"),
        (["--dry-run", "--set", "cluster=h10"], "did you mean h100?"),
        (["--dry-run", "--set", "launcher=kubernetes", "--set", "cluster=mixed"], "set nnodes=2"),
    ],
)
def test_wrong_input_is_reported_before_anything_starts(words, message):
    words = words if "-b" in words else [*words, "-b", "cpu"]
    done = CliRunner().invoke(main, ["run", "squad", *words])
    assert done.exit_code == 2 and message in done.output


def test_a_missing_program_is_reported_before_a_run_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["run", "squad", "-b", "cpu", "--out", str(tmp_path / "out"), "--set", "launcher=slurm"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and "sbatch is not on the PATH: log in to a node" in done.output
    assert not (tmp_path / "out").exists()


def test_flavours_are_those_of_the_profile():
    from benchlib.config.cluster import Kubernetes

    assert set(FLAVOURS) == set(Kubernetes.model_fields["flavour"].annotation.__args__)
