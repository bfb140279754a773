"""What lies in deploy/: it is what the launchers make, holds against the published schemas, and asks for no more rights
than are used. The schemas come with the extra ``test``."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchlib.config.cluster import load
from benchlib.config.schema import resolve
from benchlib.core.errors import UserError
from benchlib.core.files import home
from benchlib.launch import services
from benchlib.launch.kubernetes import FLAVOURS, RUN_LABEL, USER, Submission
from benchlib.launch.launchers import LAUNCHERS

ROOT = home()
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sh"))
VERSION = "1.34"

sys.path.insert(0, str(ROOT / "scripts"))
import make_manifests  # noqa: E402


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def pods(value):
    """Yield every pod spec in an object."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for one in value.values():
            yield from pods(one)
    elif isinstance(value, list):
        for one in value:
            yield from pods(one)


@pytest.mark.parametrize("name", [*make_manifests.JOBS, *make_manifests.SERVICES])
def test_examples_are_what_the_launchers_make(name):
    assert (DEPLOY / name).read_text() == make_manifests.content(name), "run python scripts/make_manifests.py"


def validate(item, path=""):
    """Raise for an object that breaks its published schema, unknown fields included."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[test]'")
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -e '.[test]'")
    own = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }.get(item["kind"])
    if own is None:
        kubernetes_validate.validate(item, VERSION, strict=True)
        return
    # The models drop what they do not know; a JobSet is described there without its own apiVersion and kind.
    back = own.from_dict(item).to_dict()
    assert {key: value for key, value in back.items() if key in item} == item, path
    for spec in pods(item):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_hold_against_the_published_schemas(path):
    for item in documents(path):
        validate(item, path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("job-one-gpu.yaml", lambda item: item["spec"].update(backofLimit=0)),
        ("job-one-gpu.yaml", lambda item: item["spec"].update(completions="two")),
        ("job-mixed-vendors-jobset.yaml", lambda item: item["spec"]["network"].update(subdomains="x")),
        ("job-h100-trainjob.yaml", lambda item: item["spec"].pop("runtimeRef")),
    ],
)
def test_the_validation_can_fail(name, change):
    item = documents(DEPLOY / "kubernetes" / name)[-1]
    validate(item)
    change(item)
    with pytest.raises(Exception, match=r"backofLimit|'two'|assert|runtimeRef|runtime_ref"):
        validate(item)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_keep_to_the_restricted_standard(path):
    """The namespace enforces it: a pod that does not is refused by the cluster."""
    for item in documents(path):
        for spec in pods(item):
            outer = spec["securityContext"]
            assert outer["runAsNonRoot"] is True and outer["runAsUser"] > 0
            assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not spec.get("hostNetwork") and not spec.get("hostPID")
            assert {key for volume in spec["volumes"] for key in volume} <= {
                "name", "configMap", "emptyDir", "persistentVolumeClaim",
            }  # fmt: skip
            for container in spec["containers"]:
                inner = container["securityContext"]
                assert inner["allowPrivilegeEscalation"] is False and inner["capabilities"] == {"drop": ["ALL"]}
            token = spec.get("automountServiceAccountToken")
            assert token is False or spec["serviceAccountName"] == "benchlib-agent", (
                "only who submits speaks to the API"
            )


def test_rights_are_those_that_are_used():
    """The agent makes and removes what the flavours consist of, lists pods, reads logs and runs a command in a pod."""
    rules = next(item for item in documents(DEPLOY / "kubernetes/10-access.yaml") if item["kind"] == "Role")["rules"]
    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used = {("", "pods", "get"), ("", "pods", "list"), ("", "pods/log", "get"), ("", "pods/exec", "create")}
    for flavour in FLAVOURS:
        config = resolve("squad", "smoke", "cpu", {"launcher": "kubernetes", "nnodes": 2}).config
        for item in _of(flavour, config):
            group = item["apiVersion"].rpartition("/")[0]
            used |= {(group, item["kind"].lower() + "s", verb) for verb in ("create", "get", "delete")}
    assert granted == used


def test_only_pods_of_runs_reach_a_run():
    """The policy covers the pods of every flavour, and what it lets in are those."""
    (policy,) = documents(DEPLOY / "kubernetes/15-network.yaml")
    (selector,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert selector == {"key": RUN_LABEL, "operator": "Exists"}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchExpressions": [selector]}}]}], (
        "no other namespace, no address"
    )
    config = resolve("squad", "smoke", "cpu", {"launcher": "kubernetes", "nnodes": 2}).config
    for flavour in FLAVOURS:
        made = list(_templates(_of(flavour, config)))
        assert made and all(RUN_LABEL in one["metadata"]["labels"] for one in made), flavour


def _templates(value):
    """Yield every pod template in objects."""
    if isinstance(value, dict) and "containers" in value.get("spec", {}):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _templates(one)


def _of(flavour, config):
    from benchlib.config.cluster import Cluster, Kubernetes

    return FLAVOURS[flavour](Submission(config, Cluster(kubernetes=Kubernetes(flavour=flavour)), "/outputs/a/b"))


def test_names_agree():
    """Namespace, accounts, claims and images of the profiles are those that deploy/ makes."""
    made = {(item["kind"], item["metadata"]["name"]) for path in MANIFESTS for item in documents(path)}
    images = set(re.findall(r"-t (benchlib:\w+)", (DEPLOY / "Dockerfile").read_text()))
    images |= {kind.image for kind in services.KINDS.values()}
    for path in MANIFESTS:
        for item in documents(path):
            assert item["kind"] == "Namespace" or ("Namespace", item["metadata"]["namespace"]) in made
            for spec in pods(item):
                assert ("ServiceAccount", spec["serviceAccountName"]) in made
                claims = {volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}  # fmt: skip
                assert all(("PersistentVolumeClaim", claim) in made for claim in claims)
                assert {container["image"] for container in spec["containers"]} <= images


def test_nightly_commands_are_commands():
    """What the CronJobs start is accepted by the command line, to the last option."""
    from click.testing import CliRunner

    from benchlib.cli import main

    for path in MANIFESTS:
        for item in documents(path):
            if item["kind"] != "CronJob":
                continue
            (spec,) = pods(item)
            words = spec["containers"][0]["command"]
            done = CliRunner().invoke(main, [*words[1:], "--dry-run"])
            assert words[0] == "benchlib" and done.exit_code == 0, done.output


def test_the_image_needs_neither_root_nor_network():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    last = len(steps) - 1 - next(i for i, step in enumerate(reversed(steps)) if step[0] == "FROM")
    final = steps[last:]
    assert [step[1] for step in final if step[0] == "USER"] == ["1000:1000"]
    assert "HF_HUB_OFFLINE=1" in next(step[1] for step in final if step[0] == "ENV")
    after_user = final[[step[0] for step in final].index("USER") :]
    assert not any(step[0] in ("RUN", "ADD", "COPY") for step in after_user)
    for what, argument in steps:
        if what == "COPY" and not argument.startswith("--from"):
            *sources, _ = argument.split()
            assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text().split()
    needed = (
        "benchlib",
        "notebooks",
        "params",
        "baselines",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "scripts",
    )
    assert {".git", ".venv", "outputs"} <= set(ignored) and not set(needed) & set(ignored)
    assert USER == 1000


@pytest.mark.skipif(
    not shutil.which("hadolint", path=str(Path(sys.executable).parent)), reason="pip install -e '.[deploy]'"
)
def test_the_image_passes_hadolint():
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_batch_scripts_are_shell(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_readme_names_files_that_are_there():
    text = (DEPLOY / "README.md").read_text()
    named = set(re.findall(r"deploy/[\w./-]+\w", text))
    assert len(named) > 5 and all((ROOT / name).exists() for name in named), named
    assert {f"deploy/kubernetes/{path.name}" for path in MANIFESTS if path.name[0].isdigit()} <= named


def test_every_launcher_elsewhere_has_an_example():
    from benchlib.config.cluster import ELSEWHERE

    shown = {values["launcher"] for _, _, _, values in make_manifests.JOBS.values()}
    assert shown == set(ELSEWHERE) <= set(LAUNCHERS)


@pytest.mark.parametrize("kind", services.KINDS)
def test_workers_let_in_only_who_has_the_token(kind):
    """Each is told it by a secret, is ready only when it answers, and is reached by pods of runs alone."""
    deployment, service = yaml.safe_load_all(services.service(kind, load("serving"), "some/model", 3))
    (spec,) = pods(deployment)
    (container,) = spec["containers"]
    variables = {item["name"]: item for item in container["env"]}
    assert variables[services.KINDS[kind].token]["valueFrom"]["secretKeyRef"]["name"] == "benchlib-token"
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": services.PORT}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert RUN_LABEL in labels and service["spec"]["selector"] == labels and service["spec"]["clusterIP"] == "None"
    assert spec["terminationGracePeriodSeconds"] > services.DRAIN_S
    with pytest.raises(UserError, match="token_secret"):
        services.service(kind, load("gpu"), "some/model", 1)
    with pytest.raises(UserError, match="a worker of kind 'vlm': did you mean vllm"):
        services.service("vlm", load("serving"), "some/model", 1)


def test_the_clients_command_is_one():
    from click.testing import CliRunner

    from benchlib.cli import main

    (spec,) = pods(documents(DEPLOY / "kubernetes/serving-client.yaml")[0])
    words = spec["containers"][0]["command"]
    done = CliRunner().invoke(main, [*words[1:], "--dry-run"])
    assert words[0] == "benchlib" and done.exit_code == 0, done.output
    (spec,) = pods(documents(DEPLOY / "kubernetes/serving-engine.yaml")[0])
    words = spec["containers"][0]["command"]
    known = {name for option in main.get_command(None, "serve").params for name in option.opts}
    assert words[:2] == ["benchlib", "serve"] and {word for word in words if word.startswith("--")} <= known


def test_the_clients_image_has_no_torch():
    import client_requirements

    names = {re.split(r"[^\w-]", line)[0] for line in client_requirements.requirements()}
    assert {"aiohttp", "pydantic", "papermill"} <= names and not names & client_requirements.WITH_TORCH
