"""What the launchers would hand to a cluster: the same torchrun command for every node, in each form."""

import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from string import Template

import pytest
import yaml
from click.testing import CliRunner

from benchlib.cli import main
from benchlib.config.schema import BaseConfig, resolve
from benchlib.core.errors import UserError
from benchlib.launch import nodes
from benchlib.launch.jobs import Job, job_name
from benchlib.launch.launchers import LAUNCHERS, SCRIPT

RUN = Path("/outputs/smoke-20261122/squad-cuda-010203-abcdef")
NAME = "benchlib-squad-cuda-010203-abcdef"


def job(launcher, profile="", folder=RUN, backend="cuda", **values):
    """Describe a run with a profile: its name, or a file."""
    config = resolve("squad", "smoke", backend, {"launcher": launcher, "cluster": str(profile), **values}).config
    return LAUNCHERS[launcher](config, folder)


def own(tmp_path, text):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("folder", ["x", "Squad_CPU-1", "9" * 80, "<run>", "-a-", "ü", "squad-cpu-" + "a" * 60])
def test_names_are_labels(folder):
    name = job_name(Path("/o") / folder)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-4095") <= 63


def test_options_of_sbatch_stay_one_word(tmp_path):
    """Quoted where a blank or a sign of the shell is in them; refused with what sbatch's quotes cannot hold."""
    names = ("partition", "account", "gres", "memory")
    profile = "slurm: {" + ", ".join(f"{name}: g p; rm" for name in names) + "}"
    lines = job("slurm", own(tmp_path, profile)).files[SCRIPT].splitlines()
    assert {f'#SBATCH --{name.replace("memory", "mem")}="g p; rm"' for name in names} <= set(lines)
    for sign in "\"'\\":
        with pytest.raises(UserError, match=r"sbatch option gres = .*change slurm of the profile"):
            job("slurm", own(tmp_path, f"slurm: {{gres: a{sign}b}}"))
    with pytest.raises(UserError, match="change --out"):
        job("slurm", folder=Path('/shared/a"b/r'))


HOSTILE = "/shared/FIRST:$(touch oops) <replica_id> is_host=HOST {is_host} ${app_id}/r"


def test_the_shell_of_a_node_knows_where_they_meet_whatever_the_folder_is_called(tmp_path):
    """The line is run by a shell, with a stand-in for the interpreter that shows what torchrun would get."""
    program = tmp_path / "python"
    program.write_text("""#!/bin/sh\nprintf '%s\\n' "$PET_RDZV_ENDPOINT" "$PET_RDZV_CONF" "$@"\n""")
    program.chmod(0o755)
    profile = own(tmp_path, f"torchx: {{python: {program}}}")
    (text,) = job("torchx", profile, folder=Path(HOSTILE), nnodes=2, nproc=4, max_restarts=1).files.values()
    compile(text, "torchx_app.py", "exec")
    assert "num_replicas=2" in text
    # TorchX fills its own names in, and makes one dollar of two.
    line = Template(eval(re.search(r'args=\["-c", (.*)\],\n', text)[1]))
    line = line.safe_substitute(replica_id="0", rank0_env="FIRST", app_id="an application")
    env = {**os.environ, "FIRST": "node1"}
    shown = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=True, cwd=tmp_path, env=env
    ).stdout
    endpoint, conf, *arguments = shown.splitlines()
    assert endpoint == "node1:29400" and "is_host=1" in conf.split(",")
    assert arguments[-1] == HOSTILE and arguments[arguments.index("--max-restarts") + 1] == "1"
    assert not (tmp_path / "oops").exists()


def test_torchrun_gets_addresses_and_restarts(monkeypatch):
    monkeypatch.setattr(nodes, "hosts_store", lambda host: host == "10.9.8.1")
    monkeypatch.setattr(nodes, "local_address", lambda host: "10.9.8.2")
    place = {"rdzv_endpoint": "10.9.8.1:29500", "nnodes": 2, "max_restarts": 3, "startup_timeout_s": 90.5}
    config = BaseConfig(benchmark="squad", launcher="torchrun", nproc=2, **place)
    described = LAUNCHERS["torchrun"](config, "/run")
    command, conf = described.command, described.env["PET_RDZV_CONF"].split(",")
    assert command[command.index("--local-addr") + 1] == "10.9.8.2"
    assert (described.env["PET_RDZV_ENDPOINT"], described.restarts, described.startup_s) == ("10.9.8.1:29500", 3, 90.5)
    assert {"is_host=1", "join_timeout=90"} <= set(conf)
    alone = LAUNCHERS["torchrun"](BaseConfig(benchmark="squad", launcher="torchrun"), "/run")
    assert "--standalone" in alone.command and "PET_RDZV_ENDPOINT" not in alone.env
    for torchrun in (described, alone):
        assert torchrun.command[torchrun.command.index("--log-dir") + 1] == "/run/logs/torchrun"
        assert torchrun.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_launchers_are_pure_and_jobs_travel_as_json(tmp_path):
    for launcher in LAUNCHERS:
        folder = tmp_path / "nowhere" / "run"
        more = {"profile": "mixed", "nnodes": 2, "nproc": 8} if launcher == "groups" else {}
        first, second = (job(launcher, folder=folder, backend="cpu", **more) for _ in range(2))
        assert first == second == Job(**asdict(first)) and not folder.parent.exists()
        assert first.remote is (launcher in ("kubernetes", "slurm", "torchx", "groups"))
        assert not first.remote or (first.agent and first.files and first.needs)


@pytest.mark.parametrize(
    ("text", "values", "message"),
    [
        (
            "{hosts: [a, b], backend: cuda, devices: 4}",
            {"nnodes": 2},
            "nnodes = 2 and nproc = 1: the profile has groups of 2 hosts",
        ),
        ("{hosts: [a], backend: cuda, folder: /a b}", {}, "use words without blanks, quotes and \\$"),
        ("{hosts: [a], backend: cuda, env: {A: $HOME}}", {}, "'A=\\$HOME'"),
        ("{hosts: [], backend: cuda}", {}, "hosts"),
    ],
)
def test_groups_that_cannot_be_started_are_refused(tmp_path, text, values, message):
    with pytest.raises(UserError, match=message):
        job("groups", own(tmp_path, f"groups: [{text}]"), **values)


def run(*words):
    return CliRunner().invoke(main, ["run", "squad", *(words if "-b" in words else ["-b", "cpu", *words])])


def test_the_manifest_is_printed_whole_and_alone(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # neither needs kubectl
    pods = ["--set", "launcher=kubernetes", "--set", "cluster=cpu", "--set", "nnodes=2"]
    manifest, shown = run("--manifest", *pods).output, run("--dry-run", *pods).output
    assert [item["kind"] for item in yaml.safe_load_all(manifest)] == ["ConfigMap", "Service", "Job"]
    part = shown.partition("manifest.yaml in the run folder\n")[2].partition("\n\nexpected work")[0]
    assert len(part.strip().splitlines()) == len(manifest.strip().splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--manifest"], "launcher=local hands nothing to a cluster"),
        (["--manifest", "--set", "launcher=slurm", "-b", "auto"], "say which, as in --backend cuda"),
        (["--dry-run", "--set", "cluster=h10"], "did you mean h100?"),
        (["--set", "launcher=slurm"], "sbatch is not on the PATH: log in to a node"),
    ],
)
def test_wrong_input_is_reported_before_anything_starts(words, message, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    done = run(*words, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2 and message in done.output
    assert not (tmp_path / "out").exists()


def test_a_pod_asks_for_the_adapters_that_a_profile_names(tmp_path):
    named = {"rdma/hca_shared_devices_a": "1"}
    annotations = {"k8s.v1.cni.cncf.io/networks": "ib-net"}
    section = {
        "resource": "nvidia.com/gpu",
        "resources": named,
        "capabilities": ["IPC_LOCK"],
        "annotations": annotations,
    }
    for values, granted in ((section, {"drop": ["ALL"], "add": ["IPC_LOCK"]}), ({}, {"drop": ["ALL"]})):
        (tmp_path / "ours.yaml").write_text(yaml.safe_dump({"kubernetes": values}))
        manifest = job("kubernetes", tmp_path / "ours.yaml", nnodes=2, nproc=8).files["manifest.yaml"]
        template = next(item for item in yaml.safe_load_all(manifest) if item["kind"] == "Job")["spec"]["template"]
        (container,) = template["spec"]["containers"]
        limits = {"nvidia.com/gpu": "8", **named} if values else {}
        assert container["resources"].get("limits", {}) == limits
        assert container["securityContext"]["capabilities"] == granted
        assert template["metadata"].get("annotations", {}) == (annotations if values else {})


START = """
import sys, time
from pathlib import Path
from benchlib.launch.jobs import Job
from benchlib.launch.ranks import Children

folder = Path(sys.argv[1])
(folder / "logs").mkdir()
children = Children()
children.start(Job("local", ["env"], env={"WORLD_SIZE": "1"}, agent=False, ranks=1), folder)
while children.living:
    children.ended()
    time.sleep(0.01)
"""


def test_ranks_of_this_machine_do_not_hear_where_those_of_another_job_meet(tmp_path):
    stray = {
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "29500",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
    }
    stray |= {"GROUP_RANK": "1", "NODE_RANK": "1", "TORCHELASTIC_RUN_ID": "other", "MASTER_KEY": "kept"}
    subprocess.run([sys.executable, "-c", START, str(tmp_path)], env=os.environ | stray, check=True, timeout=60)
    lines = dict(
        line.split("=", 1) for line in (tmp_path / "logs" / "rank0.out").read_text().splitlines() if "=" in line
    )
    assert {name: lines[name] for name in stray if name in lines} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_KEY": "kept",
    }
