"""Ranks in pods of a Kubernetes cluster: one pod for each node, torchrun's agent in each, meeting at the first pod.

The profile chooses the kind of job. ``indexed`` needs nothing but Kubernetes: an Indexed Job for each kind of node and
a headless service that gives the pods their names. ``jobset`` and ``trainjob`` are the maintained route where JobSet or
Kubeflow Trainer is installed: one object, one replicated job for each kind of node, queued and restarted as a whole.
"""

import json
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from benchlib.config import cluster as clusters
from benchlib.config.cluster import Cluster, Node
from benchlib.core.errors import UserError
from benchlib.launch.jobs import TORCHRUN_ENV, HasRanks, Job, node_command

MANIFEST = "manifest.yaml"
CONFIG_DIR = "/etc/benchlib"
RUN_LABEL = "benchlib.run"  # on everything that belongs to a run
USER = 1000  # of the image, see deploy/Dockerfile
NAME_MAX = 31  # characters after "benchlib-": with a group and indices a host name has at most 63
COLLECT_S = 120  # that a pod waits after its ranks for the results to be fetched
KEEP_S = 3600  # that a finished job stays when it is not removed
WEEK_S = 7 * 86400
STOP_S = 20.0  # for kubectl to remove a job
VENDORS_APART = ("", "nccl", "xccl")  # libraries that cannot join devices of several vendors in one group
KUBECTL = "install kubectl (https://kubernetes.io/docs/tasks/tools/) and give it a context of the cluster"


@dataclass(frozen=True)
class Pods:
    """Some of a run's pods: ``nodes`` of one kind. ``group`` is "node" where all are of one kind."""

    group: str
    nodes: int
    node: Node
    backend: str


@dataclass(frozen=True)
class Submission:
    """A run as it is handed to a cluster. ``run_dir`` is its folder on this machine."""

    config: HasRanks
    profile: Cluster
    run_dir: str
    benchmark: str = ""

    @property
    def name(self) -> str:
        """The name of the job."""
        return job_name(self.run_dir)

    @cached_property
    def pods(self) -> list[Pods]:
        """The kinds of pods; their nodes add up to the config's. Raises ``UserError``."""
        config, k8s = self.config, self.profile.kubernetes
        if not k8s.groups:
            return [Pods("node", config.nnodes, k8s, config.backend)]
        nodes = sum(group.nodes for group in k8s.groups)
        if nodes != config.nnodes:
            parts = " + ".join(f"{group.name}({group.nodes})" for group in k8s.groups)
            raise UserError(
                f"{parts} = {nodes} nodes in the profile {config.cluster} but nnodes is {config.nnodes}: "
                f"set nnodes={nodes}"
            )
        backends = sorted({group.backend or config.backend for group in k8s.groups})
        if len(backends) > 1 and config.collective in VENDORS_APART:
            raise UserError(
                f"collective = {config.collective!r} cannot join ranks of {' and '.join(backends)}: "
                "set collective=hierarchical (each vendor's own library, and gloo between them), gloo or ucc"
            )
        return [Pods(group.name, group.nodes, k8s.node(group), group.backend or config.backend) for group in k8s.groups]

    @property
    def shared(self) -> bool:
        """Whether the run folder is a volume claim that is mounted here and in the pods."""
        k8s = self.profile.kubernetes
        return bool(k8s.claim) and self.run_dir.startswith(f"{k8s.claim_path}/")

    @property
    def pod_run_dir(self) -> str:
        """The run's folder in the pods: on the claim the path is the same wherever that is mounted alike."""
        root = self.profile.kubernetes.claim_path
        parts = self.run_dir.rstrip("/").split("/")
        return self.run_dir if self.run_dir.startswith(f"{root}/") else "/".join([root, *parts[-2:]])

    @property
    def limit_s(self) -> int:
        """Seconds after which the cluster itself ends the job, the wait in its queue included."""
        return int(self.config.hard_limit_s + (self.profile.queue_s or WEEK_S) + 300)


def kubernetes(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a manifest, and the agent that creates the job, follows it and fetches the results."""
    run = Submission(config, clusters.load(config.cluster), str(run_dir), benchmark)
    k8s = run.profile.kubernetes
    command = [
        sys.executable, "-m", "benchlib.launch.agents.kubernetes", run.run_dir, "--run", run.name,
        "--pods", str(config.nnodes), *(["--shared"] if run.shared else []),
        "--", "kubectl", "--namespace", k8s.namespace, *(["--context", k8s.context] if k8s.context else []),
    ]  # fmt: skip
    notes = [
        f"CAUTION: backend = cpu, but the profile's {pods.group} asks for {pods.node.resource}: its pods would hold devices "
        "that no rank uses; set --backend to theirs, or a profile without `resource`"
        for pods in run.pods
        if pods.backend == "cpu" and pods.node.resource
    ] + [
        f"the agent creates what {MANIFEST} describes, follows the {config.nnodes} pods, fetches their results and removes "
        "the job, also when the run is stopped",
        f"should this machine crash: kubectl delete -f {Path(run_dir) / MANIFEST}",
    ]
    paths = {field: str(getattr(config, field)) for field in getattr(config, "PATHS", {})}
    if local := [f"{field}={value}" for field, value in paths.items() if value.startswith("/")]:
        notes.append(f"{', '.join(local)}: these paths have to be there in the pods, in the image or on a claim")
    return Job(
        "kubernetes", [command], {}, notes, [{}], agent=True, ranks=0, restarts=config.max_restarts,
        files={MANIFEST: manifest(run)}, submits=MANIFEST, needs={"kubectl": KUBECTL},
        queue_s=run.profile.queue_s, stop_s=STOP_S,
    )  # fmt: skip


def job_name(run_dir: Path | str) -> str:
    """Return the name of a run's job: what its folder is called, as a part of a host name."""
    text = re.sub(r"[^a-z0-9]+", "-", Path(run_dir).name.lower()).strip("-") or "run"
    return f"benchlib-{text[-NAME_MAX:].strip('-')}"


def manifest(run: Submission) -> str:
    """Return the objects of a run as YAML."""
    objects = FLAVOURS[run.profile.kubernetes.flavour](run)
    return yaml.dump_all(objects, Dumper=YamlDumper, sort_keys=False, width=4096)


class YamlDumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


YamlDumper.add_representer(str, _text)


# The objects of each kind of job


def _indexed(run: Submission) -> list[dict[str, Any]]:
    """One Job for each kind of node, and a headless service: pod i of a job is HOST ``job-i.service``."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(run),
        # Names are there before the pods are ready: they meet in order to become so.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {RUN_LABEL: run.name}},
    }
    jobs = []
    for pods in run.pods:
        pod_template = _pod_template(run, pods, f"{run.name}-{run.pods[0].group}-0")
        pod_template["spec"] = {"subdomain": run.name, **pod_template["spec"]}
        spec = _job_spec(run, pods, pod_template, ttlSecondsAfterFinished=KEEP_S)
        meta = _meta(run) | {"name": f"{run.name}-{pods.group}"}
        jobs.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec})
    return [_config_map(run), service, *jobs]


def _jobset(run: Submission) -> list[dict[str, Any]]:
    spec = {"ttlSecondsAfterFinished": KEEP_S, **_replicated(run)}
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [_config_map(run), {**kind, "metadata": _meta(run), "spec": spec}]


def _trainjob(run: Submission) -> list[dict[str, Any]]:
    """A TrainJob over a runtime of its own: that says what the pods are, as the shipped torch runtime cannot."""
    spec = _replicated(run)
    # The first replicated job is the trainer: the TrainJob's numNodes is the number of its pods.
    spec["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    api = "trainer.kubeflow.org/v1alpha1"
    policy = {"numNodes": run.pods[0].nodes}
    runtime = {
        "apiVersion": api, "kind": "TrainingRuntime", "metadata": _meta(run),
        "spec": {"mlPolicy": policy, "template": {"spec": spec}},
    }  # fmt: skip
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": run.name}
    job = {
        "apiVersion": api, "kind": "TrainJob", "metadata": _meta(run),
        "spec": {"runtimeRef": reference, "trainer": policy},
    }  # fmt: skip
    return [_config_map(run), runtime, job]


FLAVOURS = {"indexed": _indexed, "jobset": _jobset, "trainjob": _trainjob}


def _replicated(run: Submission) -> dict[str, Any]:
    """Return the spec of a JobSet: a replicated job for each kind of node. Pod i is HOST ``set-job-0-i.set``."""
    jobs = []
    for pods in run.pods:
        pod_template = _pod_template(run, pods, f"{run.name}-{run.pods[0].group}-0-0")
        spec = _job_spec(run, pods, pod_template)
        jobs.append({"name": pods.group, "replicas": 1, "template": {"spec": spec}})
    return {
        "network": {"enableDNSHostnames": True, "subdomain": run.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": jobs,
    }


def _job_spec(run: Submission, pods: Pods, pod_template: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "completionMode": "Indexed", "completions": pods.nodes, "parallelism": pods.nodes, "backoffLimit": 0,
        "activeDeadlineSeconds": run.limit_s, **more, "template": pod_template,
    }  # fmt: skip


def _meta(run: Submission) -> dict[str, Any]:
    k8s = run.profile.kubernetes
    queue = {"kueue.x-k8s.io/queue-name": k8s.queue} if k8s.queue else {}
    labels = {"app.kubernetes.io/name": "benchlib", RUN_LABEL: run.name, **queue}
    return {"name": run.name, "namespace": k8s.namespace, "labels": labels}


def _config_map(run: Submission) -> dict[str, Any]:
    """Return what the ranks read: the config of each kind of node, and the profile whose links it is judged by."""
    config: Any = run.config
    values = config.model_dump(mode="json") if hasattr(config, "model_dump") else dict(vars(config))
    values.pop("hard_limit_s", None)  # of a plain namespace; a config works it out
    if config.cluster:
        values["cluster"] = "cluster.yaml"
    data = {
        f"{pods.group}.json": json.dumps(values | {"backend": pods.backend}, indent=1, sort_keys=True) + "\n"
        for pods in run.pods
    }
    if config.cluster:
        profile = run.profile.model_dump(mode="json", exclude_unset=True)
        data["cluster.yaml"] = yaml.safe_dump(profile, sort_keys=False, allow_unicode=True, width=4096)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(run), "data": data}


# The pods


def _pod_template(run: Submission, pods: Pods, first_host: str) -> dict[str, Any]:
    """Return the pod template of a kind of nodes. The nodes meet at ``first_host``, pod 0 of the first kind."""
    k8s = run.profile.kubernetes
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": k8s.service_account,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(run, pods, f"{first_host}.{run.name}:{run.profile.port}")],
        "volumes": _volumes(run, pods),
    }  # fmt: skip
    if k8s.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if pods.node.node_selector:
        spec["nodeSelector"] = dict(pods.node.node_selector)
    if pods.node.tolerations:
        spec["tolerations"] = [
            toleration.model_dump(exclude_defaults=True) | {"operator": toleration.operator}
            for toleration in pods.node.tolerations
        ]
    return {"metadata": {"labels": {RUN_LABEL: run.name}}, "spec": spec}


def _container(run: Submission, pods: Pods, endpoint: str) -> dict[str, Any]:
    k8s, folder = run.profile.kubernetes, run.pod_run_dir
    meet_s = run.profile.queue_s or WEEK_S  # pods start when their nodes have room and the image
    command = [k8s.python, "-m", "benchlib.launch.agents.pod", folder, "--config", f"{CONFIG_DIR}/{pods.group}.json"]
    command += ["--host"] if pods is run.pods[0] else []
    command += ["--meet", endpoint, "--meet-s", str(int(meet_s))] if run.config.nnodes > 1 else []
    command += [] if run.shared else ["--hold", str(COLLECT_S)]
    torchrun = node_command(run.config, k8s.python, endpoint, run.name, "{is_host}", folder, run.benchmark, meet_s)
    env = {**TORCHRUN_ENV, "PYTHONUNBUFFERED": "1", **pods.node.env}
    mounts = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "outputs", "mountPath": k8s.claim_path},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if k8s.data_claim:  # not read only: the libraries of HF_HOME write locks and caches beside what they read
        env |= {"HF_HOME": k8s.data_path, "HF_HUB_OFFLINE": "1"}
        mounts.append({"name": "data", "mountPath": k8s.data_path})
    return {
        "name": "node",
        "image": pods.node.image,
        "command": [*command, "--", *torchrun],
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "resources": _resources(run.config, pods.node),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def _resources(config: HasRanks, node: Node) -> dict[str, Any]:
    requests = {key: value for key, value in (("cpu", node.cpu), ("memory", node.memory)) if value}
    limits = {"memory": node.memory} if node.memory else {}  # no limit of CPU: throttled ranks measure the throttle
    if node.resource:
        limits[node.resource] = str(node.devices or config.nproc)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _volumes(run: Submission, pods: Pods) -> list[dict[str, Any]]:
    k8s = run.profile.kubernetes
    outputs = {"persistentVolumeClaim": {"claimName": k8s.claim}} if k8s.claim else {"emptyDir": {}}
    shm = {"medium": "Memory"} | ({"sizeLimit": pods.node.shm} if pods.node.shm else {})
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": run.name}},
        {"name": "outputs", **outputs},
        {"name": "shm", "emptyDir": shm},
    ]
    if k8s.data_claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": k8s.data_claim}})
    return volumes
