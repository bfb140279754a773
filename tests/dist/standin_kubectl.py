"""A stand-in for kubectl: pods are processes of this machine that run their container's command for real.

It keeps its cluster in ``$STANDIN``: ``calls.jsonl``, the mounted config maps, and for each pod a folder with its
volume, its output, and its exit code. ``$STANDIN_MODE``: ``image`` (pods wait for an image that is not there),
``refused`` (create is forbidden), ``cut`` (the first connection to a log breaks after two seconds), ``lost`` (a pod is gone after two seconds). With ``$STANDIN_DIRECT`` a
pod's only rank is started without torchrun, whose start takes seconds.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(os.environ["STANDIN"])
MODE = os.environ.get("STANDIN_MODE", "")
DIRECT = "STANDIN_DIRECT" in os.environ
LIMIT_S = 2.0  # after which the pods of "lost" are gone
CUT_AT = 5  # events of steps


def templates(item: dict[str, Any]) -> list[tuple[str, int, dict[str, Any]]]:
    """Return (host name without index, pods, pod template) of the jobs that an object describes."""
    spec, name = item.get("spec", {}), item["metadata"]["name"]
    if item["kind"] == "Job":
        return [(name, spec["completions"], spec["template"])]
    if item["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    if item["kind"] not in ("JobSet", "TrainingRuntime"):
        return []
    jobs = [(job["name"], job["template"]["spec"]) for job in spec["replicatedJobs"]]
    return [(f"{name}-{job}-0", one["completions"], one["template"]) for job, one in jobs]


def local(pod: Path, words: list[str]) -> list[str]:
    """Replace what only a cluster has: mounts, host names, the image's interpreter."""
    hosts = json.loads((ROOT / "hosts.json").read_text())
    out = []
    for word in words:
        for host in hosts:
            word = word.replace(host, "127.0.0.1")
        word = word.replace("/etc/benchlib", str(ROOT / "config")).replace("/outputs", str(pod / "outputs"))
        out.append(sys.executable if word == "python3" else word)
    if DIRECT and "torch.distributed.run" in out:
        begin, worker = out.index("torch.distributed.run") - 1, out.index("benchlib.runtime.worker") - 1
        out[begin:worker] = []
    return out


def create(path: str) -> None:
    """Start the pods of a manifest."""
    if MODE == "refused":
        sys.exit("Error from server (Forbidden): jobs.batch is forbidden: User cannot create resource")
    text = sys.stdin.read() if path == "-" else Path(path).read_text()
    (ROOT / "created.yaml").write_text(text)
    objects = list(yaml.safe_load_all(text))
    pods = [
        (f"{base}-{index}", index, made)
        for item in objects
        for base, count, made in templates(item)
        for index in range(count)
    ]
    network = next(item["metadata"]["name"] for item in objects)
    (ROOT / "hosts.json").write_text(json.dumps([f"{name}.{network}" for name, _, _ in pods]))
    for item in objects:
        for name, content in item.get("data", {}).items():
            (ROOT / "config").mkdir(exist_ok=True)
            (ROOT / "config" / name).write_text(content)
    for name, index, made in pods:
        pod = ROOT / "pods" / name
        (pod / "outputs").mkdir(parents=True)
        container = made["spec"]["containers"][0]
        (pod / "made.json").write_text(json.dumps(made))
        if MODE == "image":
            continue
        env = {
            **os.environ,
            **{one["name"]: one["value"] for one in container["env"]},
            "JOB_COMPLETION_INDEX": str(index),
            **({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if DIRECT else {}),
        }
        command = [sys.executable, "-c", RUN, str(pod), *local(pod, container["command"])]
        with (pod / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        (pod / "pid").write_text(str(process.pid))


# Runs a container's command and keeps its exit code; the pod's processes are one group.
RUN = (
    "import pathlib, subprocess, sys; "
    "code = subprocess.run(sys.argv[2:]).returncode; "
    "pathlib.Path(sys.argv[1], 'code').write_text(str(code))"
)


def state(pod: Path) -> dict[str, Any]:
    """Return a pod as the API shows it."""
    made = json.loads((pod / "made.json").read_text())
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "benchlib:cpu"'}}
    phase, inside = ("Pending", waits) if MODE == "image" else ("Running", {"running": {}})
    if (pod / "code").exists() and (text := (pod / "code").read_text()):
        code = int(text)
        phase, inside = ("Failed" if code else "Succeeded"), {"terminated": {"exitCode": code, "reason": "Error"}}
    status = {"phase": phase, "containerStatuses": [{"state": inside}], "conditions": []}
    return {"metadata": {"name": pod.name}, "spec": made["spec"], "status": status}


def follow(pod: Path) -> None:
    """Print a pod's log until the pod ends."""
    steps = 0
    with (pod / "log").open() as log:
        while True:
            ended = (pod / "code").exists()
            text = log.read()
            steps += text.count(r'\"step\"')  # within a line of JSON
            sys.stdout.write(text)
            sys.stdout.flush()
            if ended:
                return
            if MODE == "cut" and steps > CUT_AT and not (pod / "was-cut").exists():
                (pod / "was-cut").touch()
                sys.exit("error: lost connection to pod")
            time.sleep(0.05)


def main() -> None:
    """Do what the command line says."""
    words = sys.argv[1:]
    with (ROOT / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    while words[0].startswith("--"):
        words = words[2:]
    verb, pods = words[0], ROOT / "pods"
    if verb == "create":
        create(words[2])
    elif verb == "get":
        there = [] if MODE == "lost" and time.time() - pods.stat().st_ctime > LIMIT_S else sorted(pods.glob("*"))
        print(json.dumps({"items": [state(pod) for pod in there]}))
    elif verb == "logs":
        follow(pods / words[2])
    elif verb == "cp":
        shutil.copy(words[2].partition(":")[2], words[3])  # a pod knows its volume by the path of this machine
    elif verb == "delete":
        for pod in pods.glob("*"):
            if (pod / "pid").exists() and not (pod / "code").exists():
                os.killpg(int((pod / "pid").read_text()), signal.SIGKILL)
        (ROOT / "deleted").write_text(sys.stdin.read() if words[2] == "-" else Path(words[2]).read_text())
    else:
        sys.exit(f"unknown command {verb}")


main()
