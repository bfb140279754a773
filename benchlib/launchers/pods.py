"""The pods of a run on Kubernetes: one for each node, of every kind of node, as plain values of the API's objects."""

from dataclasses import dataclass
from typing import Any

from benchlib.cluster import Cluster, Node
from benchlib.errors import UserError
from benchlib.launchers.job import HasRanks
from benchlib.launchers.rendezvous import ENV, agent_command

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
    wrapper = [k8s.python, "-m", "benchlib.agents.pod", "run", folder, "--config", f"{CONFIG_DIR}/{pods.group}.json"]
    torchrun = agent_command(config, k8s.python, endpoint, name, "{is_host}", folder, benchmark, meet_s)
    env = {**ENV, "PYTHONUNBUFFERED": "1", **pods.node.env}
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
