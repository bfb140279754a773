"""Ranks in pods of a Kubernetes cluster: torchrun's agent in each, meeting at the first pod.

The profile chooses the kind of job. ``indexed`` needs nothing but Kubernetes: an Indexed Job for each kind of node and
a headless service that gives the pods their names. ``jobset`` and ``trainjob`` are the maintained route where JobSet or
Kubeflow Trainer is installed: one object, one replicated job for each kind of node, queued and restarted as a whole.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from benchlib import cluster as clusters
from benchlib.cluster import Cluster
from benchlib.launchers.job import HasRanks, Job
from benchlib.launchers.pods import RUN_LABEL, WEEK_S, Pods, groups, shared, template, unused_devices

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
        sys.executable, "-m", "benchlib.agents.kubernetes", str(run_dir), "--manifest", MANIFEST, "--run", name,
        "--namespace", k8s.namespace, "--context", k8s.context, "--pods", str(config.nnodes), "--python", k8s.python,
        *(["--shared"] if shared(profile, str(run_dir)) else []),
    ]  # fmt: skip
    notes = [
        *unused_devices(groups(config, profile)),
        f"the agent applies {MANIFEST}, follows the {config.nnodes} pods, brings the run folder back and removes the job, also when the run is stopped",
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
