"""A stand-in for kubectl: pods are processes of this machine that run their container's command for real.

It keeps its cluster in ``$STANDIN``: ``calls.jsonl``, the mounted config maps, and for each pod a folder with its
volume, its output, and its exit code. ``$STANDIN_MODE``: ``image`` (pods wait for an image that is not there). The rank
of a job of one pod is started without torchrun, whose start takes seconds.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(os.environ["STANDIN"])
MODE = os.environ.get("STANDIN_MODE", "")
RUN = '"$@"; echo $? > "$0/code"'  # a container's command, and keep its exit code; the pod's processes are one group
PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def mounted(text):
    """Return a text with the place where the config maps are mounted here."""
    return text.replace("/etc/benchlib", str(ROOT / "config"))


def local(pod, network, words, alone):
    """Replace what only a cluster has: mounts, host names, the image's interpreter."""
    out = []
    for word in words:
        word = mounted(word.replace(f"{network}-0.{network}", "127.0.0.1").replace("/outputs", str(pod / "outputs")))
        out.append(sys.executable if word == "python3" else word)
    if alone and "torch.distributed.run" in out:
        begin, worker = out.index("torch.distributed.run") - 1, out.index("benchlib.runtime.worker") - 1
        out[begin:worker] = []
    return out


def create():
    """Start the pods of the manifest on the standard input."""
    text = sys.stdin.read()
    (ROOT / "created.yaml").write_text(text)
    config, _, job = yaml.safe_load_all(text)
    (ROOT / "config").mkdir()
    for name, content in config["data"].items():
        (ROOT / "config" / name).write_text(mounted(content))
    name, (container,) = job["metadata"]["name"], job["spec"]["template"]["spec"]["containers"]
    alone = job["spec"]["completions"] == 1
    for index in range(job["spec"]["completions"]):
        pod = ROOT / "pods" / f"{name}-{index}"
        (pod / "outputs").mkdir(parents=True)
        if MODE == "image":
            continue
        env = {**os.environ, **{item["name"]: item["value"] for item in container["env"]}}
        env |= {"JOB_COMPLETION_INDEX": str(index), **(PLACE if alone else {})}
        command = ["sh", "-c", RUN, str(pod), *local(pod, name, container["command"], alone)]
        with (pod / "log").open("wb") as log:
            options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True}
            process = subprocess.Popen(command, env=env, **options)
        (pod / "pid").write_text(str(process.pid))


def state(pod):
    """Return a pod as the API shows it."""
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "benchlib:cpu"'}}
    phase, inside = ("Pending", waits) if MODE == "image" else ("Running", {"running": {}})
    if (pod / "code").exists() and (text := (pod / "code").read_text()):
        code = int(text)
        phase, inside = ("Failed" if code else "Succeeded"), {"terminated": {"exitCode": code, "reason": "Error"}}
    status = {"phase": phase, "containerStatuses": [{"state": inside}], "conditions": []}
    return {"metadata": {"name": pod.name}, "status": status}


def follow(pod):
    """Print a pod's log until the pod ends."""
    with (pod / "log").open() as log:
        while True:
            ended = (pod / "code").exists()
            for line in log:
                sys.stdout.write(line)
            sys.stdout.flush()
            if ended:
                return
            time.sleep(0.05)


def main():
    """Do what the command line says."""
    words = sys.argv[1:]
    with (ROOT / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    while words[0].startswith("--"):
        words = words[2:]
    verb, pods = words[0], ROOT / "pods"
    if verb == "create":
        create()
    elif verb == "get":
        print(json.dumps({"items": [state(pod) for pod in sorted(pods.glob("*"))]}))
    elif verb == "logs":
        follow(pods / words[2])
    elif verb == "cp":
        shutil.copy(words[2].partition(":")[2], words[3])  # a pod knows its volume by the path of this machine
    elif verb == "delete":
        for pod in pods.glob("*"):
            if (pod / "pid").exists() and not (pod / "code").exists():
                os.killpg(int((pod / "pid").read_text()), signal.SIGKILL)
        (ROOT / "deleted").write_text(sys.stdin.read())
    else:
        sys.exit(f"unknown command {verb}")


main()
