"""What a benchmark begins before a rank imports its libraries: the fork server of inference."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchlib.benchmarks import BENCHMARKS


@pytest.mark.parametrize(
    ("name", "config", "begun"),
    [
        ("inference", {"engine": "auto"}, True),
        ("inference", {"engine": "http"}, False),  # torch would be loaded for nothing
        ("squad", {}, False),
    ],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="members are forked on Linux only")
def test_a_fork_server_starts_only_where_something_is_forked(monkeypatch, name, config, begun):
    started = []
    monkeypatch.setattr("multiprocessing.forkserver.set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: started.append(name))
    BENCHMARKS[name].part("ahead", "begin", lambda config: None)(SimpleNamespace(**config))
    assert bool(started) == begun


@pytest.mark.parametrize("name", ["inference", "compiled"])
def test_what_begins_ahead_does_not_wait_for_torch(name):
    program = f'import sys; from benchlib.benchmarks import BENCHMARKS; BENCHMARKS[{name!r}].part("ahead", "begin"); assert \'torch\' not in sys.modules'
    subprocess.run([sys.executable, "-c", program], check=True)


def test_openmp_learns_to_wait_before_it_is_loaded(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    BENCHMARKS["compiled"].part("ahead", "begin")(SimpleNamespace())
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    BENCHMARKS["compiled"].part("ahead", "begin")(SimpleNamespace())
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE", "the user's own stays"
