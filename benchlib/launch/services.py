"""Workers that serve a model from pods, and the job that sends them queries: Deployment, headless Service and Job.

A worker is a server and no rank: it joins no group, and may come, go and be replaced. The Service is headless, so that its name
has the address of every ready worker and the dispatcher sees each: ``dns+http://benchlib-engine:8000``. All of them take the
bearer token from one secret.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from benchlib.config.addresses import TOKEN
from benchlib.config.cluster import Cluster
from benchlib.core.errors import UserError, nearest
from benchlib.launch.kubernetes import RUN_LABEL, USER, YamlDumper

PORT = 8000
DRAIN_S = 60
LOAD_S = 1800  # that a worker may take to load its model
KEEP_S = 3600


@dataclass(frozen=True)
class Kind:
    """A kind of worker: the command of its container, the variable that its server reads the token from, more variables."""

    words: str
    command: Callable[[str], list[str]]
    token: str
    image: str = ""  # '': that of the profile
    env: tuple[tuple[str, str], ...] = ()


def _engine(model: str) -> list[str]:
    serve = ["benchlib", "serve", "--engine", "continuous", "--device", "cuda", "--precision", "bf16", "--slots", "64"]
    return [*serve, "--model", model, "--host", "0.0.0.0", "--port", str(PORT), "--drain-s", str(DRAIN_S)]


def _vllm(model: str) -> list[str]:
    # MLPerf forbids what one query leaves for another: no prefix cache.
    return ["vllm", "serve", model, "--port", str(PORT), "--dtype", "bfloat16", "--no-enable-prefix-caching"]


KINDS = {
    "engine": Kind("the kit's own server over transformers", _engine, TOKEN),
    "vllm": Kind(
        "vLLM's server, in its own image", _vllm, "VLLM_API_KEY", "vllm/vllm-openai:v0.33.0",
        (("HOME", "/tmp"), ("USER", "benchlib"), ("VLLM_NO_USAGE_STATS", "1"), ("DO_NOT_TRACK", "1")),
    ),
}  # fmt: skip


def service(kind: str, profile: Cluster, model: str, replicas: int) -> str:
    """Return Deployment and Service of some workers as YAML. Raises ``UserError`` for an unknown kind or a missing secret."""
    if kind not in KINDS:
        raise UserError(f"a worker of kind {kind!r}: {nearest(kind, KINDS)}")
    name, k8s = f"benchlib-{kind}", profile.kubernetes
    probe = {"httpGet": {"path": "/health", "port": PORT}}
    container = {
        "name": "worker",
        "image": KINDS[kind].image or k8s.image,
        "command": KINDS[kind].command(model),
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": probe | {"periodSeconds": 5, "failureThreshold": LOAD_S // 5},
        "readinessProbe": probe | {"periodSeconds": 2, "timeoutSeconds": 2},
        "livenessProbe": probe | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }
    resources = _resources(profile)
    if k8s.resource:
        resources["limits"] = {**resources.get("limits", {}), k8s.resource: str(k8s.devices or 1)}
    spec = _pod(profile, container, KINDS[kind], resources, "Always")
    meta = {"name": name, "namespace": k8s.namespace, "labels": {"app.kubernetes.io/name": "benchlib", RUN_LABEL: name}}
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta,
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": {RUN_LABEL: name}},
            "strategy": {"type": "Recreate"},  # a second generation would wait for the devices of the first
            "template": {"metadata": {"labels": {RUN_LABEL: name}}, "spec": spec},
        },
    }  # fmt: skip
    port = {"name": "http", "port": PORT, "targetPort": PORT}
    headless = {"clusterIP": "None", "selector": {RUN_LABEL: name}, "ports": [port]}
    return _yaml([deployment, {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": headless}])


def client(benchmark: str, profile: Cluster, workers: Sequence[str], tier: str, settings: Sequence[str] = ()) -> str:
    """Return the Job that measures ``workers`` with a benchmark that is a client of theirs; it needs no device.

    The image of ``serving`` needs no torch; that of ``inference`` has tokenizer and scores, so it is the kit's for a CPU.
    """
    k8s, name = profile.kubernetes, f"benchlib-{benchmark}"
    command = [
        "benchlib",
        "run",
        benchmark,
        "--tier",
        tier,
        "--backend",
        "cpu",
        "--set",
        f"workers={','.join(workers)}",
    ]
    command += [word for setting in settings for word in ("--set", setting)]
    container = {"name": "client", "image": k8s.image, "command": command}
    spec = _pod(profile, container, Kind("", lambda _: [], TOKEN), _resources(profile), "Never")
    meta = {"name": name, "namespace": k8s.namespace, "labels": {"app.kubernetes.io/name": "benchlib", RUN_LABEL: name}}
    job = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": meta,
        "spec": {
            "backoffLimit": 0, "ttlSecondsAfterFinished": KEEP_S,
            "template": {"metadata": {"labels": {RUN_LABEL: name}}, "spec": spec},
        },
    }  # fmt: skip
    return _yaml([job])


def _resources(profile: Cluster) -> dict[str, Any]:
    k8s = profile.kubernetes
    requests = {key: value for key, value in (("cpu", k8s.cpu), ("memory", k8s.memory)) if value}
    limits = {"memory": k8s.memory} if k8s.memory else {}
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _pod(
    profile: Cluster, container: dict[str, Any], kind: Kind, resources: dict[str, Any], restart: str
) -> dict[str, Any]:
    """Return the spec of a pod with one container, as strict as those of the ranks."""
    k8s = profile.kubernetes
    if not k8s.token_secret:
        raise UserError("the profile names no token_secret: workers that other machines reach need a token")
    env: list[dict[str, Any]] = [
        {"name": key, "value": value} for key, value in {"PYTHONUNBUFFERED": "1", **dict(kind.env), **k8s.env}.items()
    ]
    env.append({"name": kind.token, "valueFrom": {"secretKeyRef": {"name": k8s.token_secret, "key": "token"}}})
    mounts = [
        {"name": "outputs", "mountPath": k8s.claim_path},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    shm = {"medium": "Memory"} | ({"sizeLimit": k8s.shm} if k8s.shm else {})
    outputs = {"persistentVolumeClaim": {"claimName": k8s.claim}} if k8s.claim else {"emptyDir": {}}
    volumes: list[dict[str, Any]] = [
        {"name": "outputs", **outputs},
        {"name": "shm", "emptyDir": shm},
        {"name": "tmp", "emptyDir": {}},
    ]
    if k8s.data_claim:
        env += [{"name": "HF_HOME", "value": k8s.data_path}, {"name": "HF_HUB_OFFLINE", "value": "1"}]
        mounts.append({"name": "data", "mountPath": k8s.data_path})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": k8s.data_claim}})
    spec: dict[str, Any] = {
        "restartPolicy": restart,
        "serviceAccountName": k8s.service_account,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": DRAIN_S + 10,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            container | {
                "env": env, "resources": resources, "volumeMounts": mounts,
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
        "volumes": volumes,
    }  # fmt: skip
    if k8s.node_selector:
        spec["nodeSelector"] = dict(k8s.node_selector)
    if k8s.tolerations:
        spec["tolerations"] = [
            item.model_dump(exclude_defaults=True) | {"operator": item.operator} for item in k8s.tolerations
        ]
    return spec


def _yaml(objects: list[dict[str, Any]]) -> str:
    return yaml.dump_all(objects, Dumper=YamlDumper, sort_keys=False, width=4096)
