"""Cluster profiles: the shipped ones hold, a wrong one is refused by the name of its nearest field, claims have sources."""

import pytest

from benchlib.config import cluster, schema
from benchlib.core.errors import UserError


def test_shipped_profiles_load_and_travel():
    for name in cluster.names():
        profile = cluster.load(name)
        assert len(profile.description) > 20
        # Written and read again it is the same: this is how it travels to the pods.
        assert cluster.Cluster.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("links: {inter_node_gpbs: 3}", "links.inter_node_gpbs: no such field: did you mean inter_node_gbps?"),
        ("links: {inter_node_gbps: 3}", "inter_node_gbps needs inter_node_source"),
        ("kubernets: {}", "kubernets: no such field: did you mean kubernetes?"),
        ('slurm: {setup: ["module load x\\nrm -r y"]}', "slurm.setup.0: 'module load x\\nrm -r y' has to be one line"),
        ('torchx: {cfg: {queue: "a\\nb"}}', "torchx.cfg"),
        ('kubernetes: {node_selector: {"a\\nb": c}}', "kubernetes.node_selector"),
        ('kubernetes: {image: ""}', "kubernetes.image = ''"),
        ("torchx: {scheduler: \"'''\"}", "torchx.scheduler"),
        ("[1, 2]", "Input should be a valid dictionary"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_field(tmp_path, text, words):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        cluster.load(str(path))
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_names_and_files(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("description: x")
    monkeypatch.chdir(tmp_path)
    for name, resolved in (("mine.yaml", str(tmp_path / "mine.yaml")), ("h100", "h100")):
        assert schema.absolute_paths("squad", {"cluster": name}) == {"cluster": resolved}
    for name, words in (("h1000", "did you mean h100"), ("other.yaml", r"other.yaml.*no such profile or file")):
        with pytest.raises(UserError, match=words):
            schema.absolute_paths("squad", {"cluster": name})
