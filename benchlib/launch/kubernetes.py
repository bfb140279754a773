"""The pods of a run on Kubernetes: one for each node, of every kind of node, as plain values of the API's objects."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchlib.config import cluster as clusters
from benchlib.config.cluster import Cluster, Node
from benchlib.core.errors import UserError
from benchlib.launch.jobs import TORCHRUN_ENV, HasRanks, Job, node_command

CONFIG_DIR = "/etc/benchlib"
COLLECT_S = 120  # that a pod waits after its ranks for the results to be fetched
WEEK_S = 7 * 86400
USER = 1000  # of the image, see deploy/Dockerfile
RUN_LABEL = "benchlib.run"  # on everything that belongs to a run
VENDORS_APART = ("", "nccl", "xccl")  # libraries that cannot join devices of several vendors in one group


@dataclass(frozen=True)
class Pods:
    """Some of a run's pods: ``nodes`` of one kind. ``group`` is "node" where all are of one kind."""

    group: str
    nodes: int
    node: Node
    backend: str


def groups(config: HasRanks, cluster: Cluster) -> list[Pods]:
    """Return the kinds of pods of a run; their nodes add up to the config's. Raises ``UserError``."""
    k8s = cluster.kubernetes
    if not k8s.groups:
        return [Pods("node", config.nnodes, k8s, config.backend)]
    nodes = sum(group.nodes for group in k8s.groups)
    if nodes != config.nnodes:
        parts = " + ".join(f"{group.name}({group.nodes})" for group in k8s.groups)
        raise UserError(
            f"{parts} = {nodes} nodes in the profile {config.cluster} but nnodes is {config.nnodes}: set nnodes={nodes}"
        )
    found = [Pods(group.name, group.nodes, k8s.node(group), group.backend or config.backend) for group in k8s.groups]
    backends = sorted({one.backend for one in found})
    if len(backends) > 1 and config.collective in VENDORS_APART:
        raise UserError(
            f"collective = {config.collective!r} cannot join ranks of {' and '.join(backends)}: set collective=gloo or ucc"
        )
    return found


def unused_devices(pods: list[Pods]) -> list[str]:
    """Return a sentence for each kind of pods that would hold devices without a rank that computes on them."""
    return [
        f"CAUTION: backend = cpu, but the profile's {one.group} asks for {one.node.resource}: its pods would hold devices "
        "that no rank uses; set --backend to theirs, or a profile without `resource`"
        for one in pods
        if one.backend == "cpu" and one.node.resource
    ]


def pod_run_dir(cluster: Cluster, run_dir: str) -> str:
    """Return the run's folder in the pods: on the claim the path is the same wherever that is mounted alike."""
    parts = run_dir.rstrip("/").split("/")
    root = cluster.kubernetes.claim_path
    return run_dir if run_dir.startswith(f"{root}/") else "/".join([root, *parts[-2:]])


def shared(cluster: Cluster, run_dir: str) -> bool:
    """Whether the folder of the run here is the one that the pods write to: a volume claim mounted on both sides."""
    return bool(cluster.kubernetes.claim) and run_dir.startswith(f"{cluster.kubernetes.claim_path}/")


def template(
    config: HasRanks, cluster: Cluster, pods: Pods, name: str, endpoint: str, first: bool, run_dir: str, benchmark: str
) -> dict[str, Any]:
    """Return the pod template of a kind of nodes. ``first``: its pod 0 is the one where the nodes meet."""
    k8s = cluster.kubernetes
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": k8s.service_account,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(config, cluster, pods, name, endpoint, first, run_dir, benchmark)],
        "volumes": _volumes(cluster, pods, name),
    }  # fmt: skip
    if k8s.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if pods.node.node_selector:
        spec["nodeSelector"] = dict(pods.node.node_selector)
    if pods.node.tolerations:
        spec["tolerations"] = [
            one.model_dump(exclude_defaults=True) | {"operator": one.operator} for one in pods.node.tolerations
        ]
    return {"metadata": {"labels": {RUN_LABEL: name}}, "spec": spec}


def _container(
    config: HasRanks, cluster: Cluster, pods: Pods, name: str, endpoint: str, first: bool, run_dir: str, benchmark: str
) -> dict[str, Any]:
    k8s, folder = cluster.kubernetes, pod_run_dir(cluster, run_dir)
    meet_s = cluster.queue_s or WEEK_S  # pods start when their nodes have room and the image
    hold = [] if shared(cluster, run_dir) else ["--hold", str(COLLECT_S)]
    index = ["--host"] if first else []
    meet = ["--meet", endpoint, "--meet-s", str(int(meet_s))] if config.nnodes > 1 else []
    wrapper = [k8s.python, "-m", "benchlib.launch.agents.pod", folder, "--config", f"{CONFIG_DIR}/{pods.group}.json"]
    torchrun = node_command(config, k8s.python, endpoint, name, "{is_host}", folder, benchmark, meet_s)
    env = {**TORCHRUN_ENV, "PYTHONUNBUFFERED": "1", **pods.node.env}
    if k8s.data_claim:  # not read only: the libraries of HF_HOME write locks and caches beside what they read
        env |= {"HF_HOME": k8s.data_path, "HF_HUB_OFFLINE": "1"}
    mounts = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "outputs", "mountPath": k8s.claim_path},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if k8s.data_claim:
        mounts.append({"name": "data", "mountPath": k8s.data_path})
    return {
        "name": "node",
        "image": pods.node.image,
        "command": [*wrapper, *index, *meet, *hold, "--", *torchrun],
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "resources": _resources(config, pods.node),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def _resources(config: HasRanks, node: Node) -> dict[str, Any]:
    requests = {key: value for key, value in (("cpu", node.cpu), ("memory", node.memory)) if value}
    limits = {"memory": node.memory} if node.memory else {}  # no limit of CPU: throttled ranks measure the throttle
    if node.resource:
        limits[node.resource] = str(node.devices or config.nproc)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _volumes(cluster: Cluster, pods: Pods, name: str) -> list[dict[str, Any]]:
    k8s = cluster.kubernetes
    outputs = {"persistentVolumeClaim": {"claimName": k8s.claim}} if k8s.claim else {"emptyDir": {}}
    shm: dict[str, Any] = {"medium": "Memory"} | ({"sizeLimit": pods.node.shm} if pods.node.shm else {})
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "outputs", **outputs},
        {"name": "shm", "emptyDir": shm},
    ]
    if k8s.data_claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": k8s.data_claim}})
    return volumes


# Ranks in pods of a Kubernetes cluster: torchrun's agent in each, meeting at the first pod.
#
# The profile chooses the kind of job. ``indexed`` needs nothing but Kubernetes: an Indexed Job for each kind of node and
# a headless service that gives the pods their names. ``jobset`` and ``trainjob`` are the maintained route where JobSet or
# Kubeflow Trainer is installed: one object, one replicated job for each kind of node, queued and restarted as a whole.


MANIFEST = "manifest.yaml"
KEEP_S = 3600  # that a finished job stays when nobody removes it
NAME_MAX = 31  # characters after "benchlib-": with a group and indices a host name has at most 63
STOP_S = 20.0  # for kubectl to remove a job
KUBECTL = "install kubectl (https://kubernetes.io/docs/tasks/tools/) and give it a context of the cluster"


def kubernetes(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a manifest, and the agent that applies it, follows it and brings the results back."""
    profile = clusters.load(config.cluster)
    k8s, name = profile.kubernetes, job_name(run_dir)
    text = manifest(config, profile, str(run_dir), benchmark)
    command = [
        sys.executable, "-m", "benchlib.launch.agents.kubernetes", str(run_dir), "--run", name, "--pods", str(config.nnodes),
        *(["--shared"] if shared(profile, str(run_dir)) else []),
        "--", "kubectl", "--namespace", k8s.namespace, *(["--context", k8s.context] if k8s.context else []),
    ]  # fmt: skip
    notes = [
        *unused_devices(groups(config, profile)),
        f"the agent creates what {MANIFEST} describes, follows the {config.nnodes} pods, fetches their results and removes the job, also when the run is stopped",
        f"should this machine crash: kubectl delete -f {Path(run_dir) / MANIFEST}",
    ]
    named = {field: str(getattr(config, field)) for field in getattr(config, "PATHS", {})}
    if local := [f"{field}={value}" for field, value in named.items() if value.startswith("/")]:
        notes.append(f"{', '.join(local)}: these paths have to be there in the pods, in the image or on a claim")
    return Job(
        "kubernetes", [command], {}, notes, [{}], agent=True, ranks=0, restarts=config.max_restarts,
        files={MANIFEST: text}, submits=MANIFEST, needs={"kubectl": KUBECTL},
        queue_s=profile.queue_s, stop_s=STOP_S,
    )  # fmt: skip


def job_name(run_dir: Path | str) -> str:
    """Return the name of a run's job: what its folder is called, as a part of a host name."""
    text = re.sub(r"[^a-z0-9]+", "-", Path(run_dir).name.lower()).strip("-") or "run"
    return f"benchlib-{text[-NAME_MAX:].strip('-')}"


def manifest(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str = "") -> str:
    """Return the objects of a run as YAML."""
    objects = FLAVOURS[profile.kubernetes.flavour](config, profile, run_dir, benchmark)
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=4096)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _meta(profile: Cluster, name: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "benchlib", RUN_LABEL: name}
    if profile.kubernetes.queue:
        labels["kueue.x-k8s.io/queue-name"] = profile.kubernetes.queue
    return {"name": name, "namespace": profile.kubernetes.namespace, "labels": labels}


def _config_map(config: Any, profile: Cluster, pods: list[Pods], name: str) -> dict[str, Any]:
    """Return what the ranks read: the config of each kind of node, and the profile whose links it is judged by."""
    values = config.model_dump(mode="json") if hasattr(config, "model_dump") else dict(vars(config))
    values.pop("hard_limit_s", None)  # of a plain namespace; a config works it out
    data = {}
    for one in pods:
        own = values | {"backend": one.backend} | ({"cluster": "cluster.yaml"} if config.cluster else {})
        data[f"{one.group}.json"] = json.dumps(own, indent=1, sort_keys=True) + "\n"
    if config.cluster:
        data["cluster.yaml"] = yaml.safe_dump(
            profile.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True, width=4096
        )
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(profile, name), "data": data}


def _limit_s(config: HasRanks, profile: Cluster) -> int:
    """Return the seconds after which the cluster itself ends the job, should nobody else: the wait is part of them."""
    return int(config.hard_limit_s + (profile.queue_s or WEEK_S) + 300)


def _job_spec(pods: Pods, pod_template: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "completionMode": "Indexed", "completions": pods.nodes, "parallelism": pods.nodes, "backoffLimit": 0, **more,
        "template": pod_template,
    }  # fmt: skip


def _indexed(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str) -> list[dict[str, Any]]:
    """One Job for each kind of node, and a headless service: pod i of a job is HOST ``job-i.service``."""
    name, pods = job_name(run_dir), groups(config, profile)
    endpoint = f"{name}-{pods[0].group}-0.{name}:{profile.port}"
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(profile, name),
        # Names are there before the pods are ready: they meet in order to become so.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {RUN_LABEL: name}},
    }
    jobs = []
    for one in pods:
        pod_template = template(config, profile, one, name, endpoint, one is pods[0], run_dir, benchmark)
        pod_template["spec"] = {"subdomain": name, **pod_template["spec"]}
        limits = {"activeDeadlineSeconds": _limit_s(config, profile), "ttlSecondsAfterFinished": KEEP_S}
        meta = _meta(profile, name) | {"name": f"{name}-{one.group}"}
        jobs.append(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": _job_spec(one, pod_template, **limits)}
        )
    return [_config_map(config, profile, pods, name), service, *jobs]


def _replicated(config: HasRanks, profile: Cluster, pods: list[Pods], run_dir: str, benchmark: str) -> dict[str, Any]:
    """Return the spec of a JobSet: a replicated job for each kind of node. Pod i is HOST ``set-job-0-i.set``."""
    name = job_name(run_dir)
    endpoint = f"{name}-{pods[0].group}-0-0.{name}:{profile.port}"
    jobs = []
    for one in pods:
        pod_template = template(config, profile, one, name, endpoint, one is pods[0], run_dir, benchmark)
        spec = _job_spec(one, pod_template, activeDeadlineSeconds=_limit_s(config, profile))
        jobs.append({"name": one.group, "replicas": 1, "template": {"spec": spec}})
    return {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": jobs,
    }


def _jobset(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str) -> list[dict[str, Any]]:
    name, pods = job_name(run_dir), groups(config, profile)
    spec = {"ttlSecondsAfterFinished": KEEP_S, **_replicated(config, profile, pods, run_dir, benchmark)}
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [_config_map(config, profile, pods, name), {**kind, "metadata": _meta(profile, name), "spec": spec}]


def _trainjob(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str) -> list[dict[str, Any]]:
    """A TrainJob over a runtime of its own: that says what the pods are, as the shipped torch runtime cannot."""
    name, pods = job_name(run_dir), groups(config, profile)
    spec = _replicated(config, profile, pods, run_dir, benchmark)
    # The first replicated job is the trainer: the TrainJob's numNodes is the number of its pods.
    spec["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    api = "trainer.kubeflow.org/v1alpha1"
    policy = {"numNodes": pods[0].nodes}
    runtime = {
        "apiVersion": api, "kind": "TrainingRuntime", "metadata": _meta(profile, name),
        "spec": {"mlPolicy": policy, "template": {"spec": spec}},
    }  # fmt: skip
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    job = {
        "apiVersion": api, "kind": "TrainJob", "metadata": _meta(profile, name),
        "spec": {"runtimeRef": reference, "trainer": policy},
    }  # fmt: skip
    return [_config_map(config, profile, pods, name), runtime, job]


FLAVOURS = {"indexed": _indexed, "jobset": _jobset, "trainjob": _trainjob}
