"""What lies in deploy/: it is what the launchers make, holds against the published schemas, and asks for no more rights
than are used. The schemas come with the extra ``test``."""

import sys

import pytest
import yaml
from click.testing import CliRunner

from benchlib.cli import main
from benchlib.config.cluster import Cluster
from benchlib.config.schema import resolve
from benchlib.core.files import home
from benchlib.launch.kubernetes import objects

ROOT = home()
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VERSION = "1.34"

sys.path.insert(0, str(ROOT / "scripts"))
import make_manifests  # noqa: E402


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def pods(value):
    """Yield every pod spec in an object."""
    if isinstance(value, dict) and "containers" in value:
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
        yield from pods(item)


def of_a_run():
    config = resolve("squad", "smoke", "cpu", {"launcher": "kubernetes", "nnodes": 2}).config
    return objects(config, Cluster(), "/outputs/a/b")


@pytest.mark.parametrize("name", [*make_manifests.JOBS, *make_manifests.SERVICES])
def test_examples_are_what_the_launchers_make(name):
    assert (DEPLOY / name).read_text() == make_manifests.content(name), "run python scripts/make_manifests.py"


def validate(item):
    """Raise for an object that breaks its published schema, unknown fields included."""
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[test]'")
    schemas.validate(item, VERSION, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_hold_against_the_schemas_and_the_restricted_standard(path):
    """The namespace enforces the standard: a pod that does not keep to it is refused by the cluster."""
    with pytest.raises(Exception, match="backofLimit"):
        validate(of_a_run()[-1] | {"spec": {"backofLimit": 0}})
    for item in documents(path):
        validate(item)
        for spec in pods(item):
            outer = spec["securityContext"]
            assert outer["runAsNonRoot"] is True and outer["runAsUser"] > 0
            assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not spec.get("hostNetwork") and not spec.get("hostPID")
            kinds = {key for volume in spec["volumes"] for key in volume}
            assert kinds <= {"name", "configMap", "emptyDir", "persistentVolumeClaim"}
            for container in spec["containers"]:
                inner = container["securityContext"]
                assert inner["allowPrivilegeEscalation"] is False and inner["capabilities"] == {"drop": ["ALL"]}
            token, account = spec.get("automountServiceAccountToken"), spec["serviceAccountName"]
            assert token is False or account == "benchlib-agent", "only who submits speaks to the API"


def test_rights_are_those_that_are_used():
    """The agent makes and removes what a run consists of, lists pods, reads logs and runs a command in a pod."""
    rules = next(item for item in documents(DEPLOY / "kubernetes/10-access.yaml") if item["kind"] == "Role")["rules"]
    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used = {("", "pods", "get"), ("", "pods", "list"), ("", "pods/log", "get"), ("", "pods/exec", "create")}
    for item in of_a_run():
        group = item["apiVersion"].rpartition("/")[0]
        used |= {(group, item["kind"].lower() + "s", verb) for verb in ("create", "get", "delete")}
    assert granted == used


def test_commands_of_pods_are_commands():
    """What the nightly jobs and the clients start is accepted by the command line, to the last option."""
    jobs = [item for path in MANIFESTS for item in documents(path) if item["kind"] == "CronJob"]
    for name in ("serving", "inference"):
        jobs += documents(DEPLOY / f"kubernetes/{name}-client.yaml")
    assert len(jobs) == 4
    for (spec,) in (list(pods(job)) for job in jobs):
        words = spec["containers"][0]["command"]
        done = CliRunner().invoke(main, [*words[1:], "--dry-run"])
        assert words[0] == "benchlib" and done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("index", "version", "said"),
    [
        ("https://download.pytorch.org/whl/cu130", "2.13.0+cu130", None),
        ("https://download.pytorch.org/whl/cpu/", "2.13.0+cpu", None),
        ("https://download.pytorch.org/whl/rocm7.1", "2.13.0+cu130", "torch 2.13.0+cu130 is not the build of rocm7.1"),
        ("https://download.pytorch.org/whl/xpu", "2.13.0", "torch 2.13.0 is not the build of xpu"),
    ],
)
def test_the_image_is_not_built_with_the_torch_of_another_vendor(index, version, said, monkeypatch):
    text = (DEPLOY / "Dockerfile").read_text()
    check = text.partition("/opt/venv/bin/python -c '")[2].partition("'")[0].replace("\\\n", "")
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.setattr(sys, "argv", ["-c", index])
    with pytest.raises(SystemExit) as ended:
        exec(check, {})
    assert (ended.value.code or None) == said


def test_the_image_has_what_compiles_for_a_gpu():
    last = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")[-1]
    assert "command -v gcc" in last and 'lacking="${lacking} g++"' in last
