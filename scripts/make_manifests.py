"""Write the example jobs of deploy/ from the shipped profiles, as a launcher would submit them, and the servers of a model.

The benchmark's config and the profile go through the launcher; the folder of the run is a fixed example, so the
files change only when a config, a profile or a launcher does.

A server is no rank: it joins no group, and may come, go and be replaced. Its service is headless, so that the name has the
address of every ready worker and the dispatcher sees each: ``dns+http://benchlib-engine:8000``. All of them take the bearer
token from one secret.

    python scripts/make_manifests.py
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import options_of

from benchlib.config.addresses import TOKEN
from benchlib.config.cluster import load
from benchlib.config.schema import resolve
from benchlib.core.files import home, write_text
from benchlib.launch.kubernetes import KEEP_S, PYTHON, RUN_LABEL, manifest, metadata, pod_template
from benchlib.launch.launchers import LAUNCHERS

TWO = {"launcher": "kubernetes", "nnodes": 2}
# File: benchmark, tier, backend, and what is set by hand.
JOBS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "kubernetes/job-one-gpu.yaml": ("squad", "quick", "cuda", {"launcher": "kubernetes", "cluster": "gpu"}),
    "kubernetes/job-two-cpu-nodes.yaml": ("squad", "smoke", "cpu", {**TWO, "cluster": "cpu", "nproc": 2}),
    "kubernetes/job-two-h100-nodes.yaml": ("squad", "nightly", "cuda", {**TWO, "cluster": "h100", "nproc": 8}),
    "slurm/job.sh": ("squad", "nightly", "cuda", {"launcher": "slurm", "cluster": "slurm", "nnodes": 2, "nproc": 8}),
    "torchx/app.py": ("squad", "smoke", "cpu", {"launcher": "torchx", "cluster": "torchx", "nnodes": 2}),
}
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
PORT = 8000
DRAIN_S = 60
TMP: dict[str, tuple[str, dict[str, Any]]] = {"tmp": ("/tmp", {"emptyDir": {}})}
LOAD_S = 1800  # that a worker may take to load its model


@dataclass(frozen=True)
class Server:
    """A kind of worker: its command, the variable that it reads the token from, its image ('': the profile's), variables."""

    command: str
    token: str
    image: str = ""
    env: tuple[tuple[str, str], ...] = ()


SERVERS = {
    "engine": Server(
        "benchlib serve --engine continuous --device cuda --precision bf16 --slots 64 "
        f"--model {MODEL} --host 0.0.0.0 --port {PORT} --drain-s {DRAIN_S}",
        TOKEN,
    ),
    "vllm": Server(  # MLPerf forbids what one query leaves for another: no prefix cache
        f"vllm serve {MODEL} --port {PORT} --dtype bfloat16 --no-enable-prefix-caching",
        "VLLM_API_KEY",
        "vllm/vllm-openai:v0.33.0",
        (("HOME", "/tmp"), ("USER", "benchlib"), ("VLLM_NO_USAGE_STATS", "1"), ("DO_NOT_TRACK", "1")),
    ),
}


def servers(kind: str, replicas: int) -> str:
    """Return Deployment and Service of some workers as YAML."""
    name, k8s, server = f"benchlib-{kind}", load("serving").kubernetes, SERVERS[kind]
    probe = {"httpGet": {"path": "/health", "port": PORT}}
    container = {
        "name": "worker",
        "image": server.image or k8s.image,
        "command": server.command.split(),
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": probe | {"periodSeconds": 5, "failureThreshold": LOAD_S // 5},
        "readinessProbe": probe | {"periodSeconds": 2, "timeoutSeconds": 2},
        "livenessProbe": probe | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }
    env = {**dict(server.env), server.token: _token(k8s.token_secret)}
    template = pod_template(k8s, name, container, env, TMP, restart="Always", grace_s=DRAIN_S + 10)
    deployment = {
        "replicas": replicas,
        "selector": {"matchLabels": {RUN_LABEL: name}},
        "strategy": {"type": "Recreate"},  # a second generation would wait for the devices of the first
        "template": template,
    }
    port = {"name": "http", "port": PORT, "targetPort": PORT}
    headless = {"clusterIP": "None", "selector": {RUN_LABEL: name}, "ports": [port]}
    meta = metadata(k8s, name)
    return manifest(
        [
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": deployment},
            {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": headless},
        ]
    )


def client(benchmark: str, profile: str, tier: str, settings: Sequence[str]) -> str:
    """Return the Job that measures the kit's own workers with a benchmark that is a client of theirs; it needs no device.

    The image of ``serving`` needs no torch; that of ``inference`` has tokenizer and scores, so it is the kit's for a CPU.
    """
    k8s, name = load(profile).kubernetes, f"benchlib-{benchmark}"
    command = ["benchlib", "run", benchmark, "--tier", tier, "--backend", "cpu"]
    pairs = [f"workers=dns+http://benchlib-engine:{PORT}", *settings]
    command += [word for pair in pairs for word in ("--set", pair)]
    container = {"name": "client", "image": k8s.image, "command": command}
    template = pod_template(k8s, name, container, {TOKEN: _token(k8s.token_secret)}, TMP)
    job = {"backoffLimit": 0, "ttlSecondsAfterFinished": KEEP_S, "template": template}
    return manifest([{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(k8s, name), "spec": job}])


def _token(secret: str) -> dict[str, Any]:
    return {"secretKeyRef": {"name": secret, "key": "token"}}


# Two nodes with one GPU each, whichever server they run, and the client; the prompts have MLPerf's lengths. MLPerf's own
# rules over the network: the tier has model and data.
LOAD = ["concurrency=64", "max_new=128", "prompt_tokens=870", "ttft_ms=2000", "tpot_ms=100"]
MLPERF = [f"model={MODEL}", "slots=64", "server_qps=20", "expected_qps=40"]
SERVICES: dict[str, Callable[[], str]] = {
    "kubernetes/serving-engine.yaml": lambda: servers("engine", 2),
    "kubernetes/serving-vllm.yaml": lambda: servers("vllm", 2),
    "kubernetes/serving-client.yaml": lambda: client("serving", "client", "nightly", LOAD),
    "kubernetes/inference-client.yaml": lambda: client("inference", "scores", "weekend", MLPERF),
}


def content(name: str) -> str:
    """Return the text of one example."""
    if name in SERVICES:
        return SERVICES[name]()
    benchmark, tier, backend, values = JOBS[name]
    config = resolve(benchmark, tier, backend, values).config
    folder = Path("/outputs/example") / f"{benchmark}-{Path(name).stem}"
    job = LAUNCHERS[config.launcher](config, folder)
    # The interpreter is the one of whoever submits; the example names any.
    return next(iter(job.files.values())).replace(sys.executable, PYTHON)


def main() -> None:
    options_of(__doc__).parse_args()
    for name in (*JOBS, *SERVICES):
        path = home() / "deploy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, content(name))
        print(path.relative_to(home()))


if __name__ == "__main__":
    main()
