"""Ranks in pods of a Kubernetes cluster: one pod for each node, torchrun's agent in each, meeting at the first pod.

A run is an Indexed Job, a headless service that gives its pods names, and a ConfigMap with what the ranks read: nothing
that has to be installed in a cluster first.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from benchlib.config import cluster as clusters
from benchlib.config.cluster import Cluster, Kubernetes
from benchlib.config.schema import BaseConfig
from benchlib.launch.jobs import TORCHRUN_ENV, Job, job_name, torchrun_command

MANIFEST = "manifest.yaml"
CONFIG_DIR = "/etc/benchlib"
PYTHON = "python3"  # of the image
RUN_LABEL = "benchlib.run"  # on everything that belongs to a run
USER = 1000  # of the image, see deploy/Dockerfile
KEEP_S = 3600  # that a finished job stays when it is not removed
WEEK_S = 7 * 86400
KUBECTL = "install kubectl (https://kubernetes.io/docs/tasks/tools/) and give it a context of the cluster"


def kubernetes(config: BaseConfig, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a manifest, and the agent that creates the job, follows it and fetches the results."""
    profile = clusters.load(config.cluster)
    k8s = profile.kubernetes
    command = [sys.executable, "-m", "benchlib.launch.agents.kubernetes", str(run_dir), "--run", job_name(run_dir)]
    command += [
        "--pods",
        str(config.nnodes),
        "--",
        "kubectl",
        "--namespace",
        k8s.namespace,
        *(["--context", k8s.context] if k8s.context else []),
    ]
    files = {MANIFEST: manifest(objects(config, profile, run_dir, benchmark))}
    return Job.of(config, "kubernetes", command, profile, files=files, needs={"kubectl": KUBECTL})


def manifest(items: list[dict[str, Any]]) -> str:
    return yaml.dump_all(items, Dumper=_Dumper, sort_keys=False, width=4096)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def objects(config: BaseConfig, profile: Cluster, run_dir: Path | str, benchmark: str = "") -> list[dict[str, Any]]:
    """Return ConfigMap, service and job of a run. Pod i of the job is HOST ``job-i.service``, and all meet at pod 0."""
    k8s, name = profile.kubernetes, job_name(run_dir)
    meta = metadata(k8s, name)
    if k8s.queue:
        meta["labels"]["kueue.x-k8s.io/queue-name"] = k8s.queue
    job = {
        "completionMode": "Indexed",
        "completions": config.nnodes,
        "parallelism": config.nnodes,
        "backoffLimit": 0,
        "activeDeadlineSeconds": int(config.hard_limit_s + _queue_s(profile) + 300),
        "ttlSecondsAfterFinished": KEEP_S,
        "template": _template(config, profile, run_dir, benchmark),
    }
    # Names are there before the pods are ready: they meet in order to become so.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {RUN_LABEL: name}}
    data = _config_files(config, profile)
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": job},
    ]


def metadata(k8s: Kubernetes, name: str) -> dict[str, Any]:
    """Return the metadata of an object that belongs to a run, or to workers of a service."""
    return {"name": name, "namespace": k8s.namespace, "labels": {"app.kubernetes.io/name": "benchlib", RUN_LABEL: name}}


def _config_files(config: BaseConfig, profile: Cluster) -> dict[str, str]:
    """Return what the ranks read: their config, and the profile whose links it is judged by."""
    files = dict[str, str]()
    if config.cluster:  # the profile may be a file of the machine that submits
        config = config.model_copy(update={"cluster": f"{CONFIG_DIR}/cluster.yaml"})
        values = profile.model_dump(mode="json", exclude_unset=True)
        files = {"cluster.yaml": yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}
    return {"config.json": config.model_dump_json(indent=1) + "\n", **files}


def _template(config: BaseConfig, profile: Cluster, run_dir: Path | str, benchmark: str) -> dict[str, Any]:
    """Return the pod template of a run: ``agents.pod`` starts torchrun's agent in each."""
    k8s, name = profile.kubernetes, job_name(run_dir)
    folder = f"{k8s.claim_path}/pods/{Path(run_dir).name}"
    command = [PYTHON, "-m", "benchlib.launch.agents.pod", folder, "--config", f"{CONFIG_DIR}/config.json"]
    if config.nnodes > 1:  # pods start when their nodes have room and the image
        command += ["--meet", f"{name}-0.{name}:{profile.port}", "--meet-s", str(_queue_s(profile))]
    torchrun = torchrun_command(config, PYTHON, folder, benchmark)
    container = {"name": "node", "image": k8s.image, "command": [*command, "--", *torchrun]}
    more = {"config": (CONFIG_DIR, {"configMap": {"name": name}})}
    template = pod_template(k8s, name, container, dict(TORCHRUN_ENV), more, devices=config.nproc)
    template["spec"]["subdomain"] = name
    return template


def _queue_s(profile: Cluster) -> int:
    return int(profile.queue_s or WEEK_S)


def pod_template(
    k8s: Kubernetes,
    name: str,
    container: dict[str, Any],
    env: dict[str, Any],
    more: dict[str, tuple[str, dict[str, Any]]],
    devices: int = 1,
    restart: str = "Never",
    grace_s: int = 30,
) -> dict[str, Any]:
    """Return the template of pods with one container, which keep to the restricted standard of Kubernetes.

    ``env`` holds texts, or where a value comes from; ``more`` volumes by name: where each is mounted, and what it is.
    """
    env = {"PYTHONUNBUFFERED": "1", **env, **k8s.env}
    volumes = more | {
        "outputs": (k8s.claim_path, _claim(k8s.claim) if k8s.claim else {"emptyDir": {}}),
        "shm": ("/dev/shm", {"emptyDir": _filled(medium="Memory", sizeLimit=k8s.shm)}),
    }
    if k8s.data_claim:  # not read only: the libraries of HF_HOME write locks and caches beside what they read
        env |= {"HF_HOME": k8s.data_path, "HF_HUB_OFFLINE": "1"}
        volumes["data"] = (k8s.data_path, _claim(k8s.data_claim))
    # No limit of CPU: throttled ranks measure the throttle.
    limits = _filled(memory=k8s.memory) | ({k8s.resource: str(devices)} if k8s.resource else {}) | k8s.resources
    capabilities = {"drop": ["ALL"]} | _filled(add=list(k8s.capabilities))
    whole = container | {
        "env": [{"name": key, "value" if isinstance(value, str) else "valueFrom": value} for key, value in env.items()],
        "resources": _filled(requests=_filled(cpu=k8s.cpu, memory=k8s.memory), limits=limits),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": [{"name": key, "mountPath": path} for key, (path, _) in volumes.items()],
    }
    user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    spec: dict[str, Any] = {
        "restartPolicy": restart,
        "serviceAccountName": k8s.service_account,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": user | {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [whole],
        "volumes": [{"name": key, **volume} for key, (_, volume) in volumes.items()],
    }
    tolerated = [item | {"operator": item.get("operator", "Exists")} for item in k8s.tolerations]
    spec |= _filled(nodeSelector=dict(k8s.node_selector), tolerations=tolerated)
    labelled = {"labels": {RUN_LABEL: name}} | _filled(annotations=dict(k8s.annotations))
    return {"metadata": labelled, "spec": spec}


def _filled(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name}}
