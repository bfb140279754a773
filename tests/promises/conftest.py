"""Commands and runs for the promises, and the table of their states at the end of ``pytest tests/promises``."""

import functools
import os

import pytest
from click.testing import CliRunner
from filelock import FileLock
from make_smoke import unpack

from benchlib.cli import main
from benchlib.commands import kit
from benchlib.core import machine
from benchlib.judge.verdict import judge
from benchlib.launch import plan
from benchlib.results.run import Run

STATES = {"passed": "works", "failed": "FAILS", "skipped": "needs hardware"}


@pytest.fixture(autouse=True, scope="session")
def _one_probe():
    """Ask torch once what is here: each answer is a process of seconds."""
    probe = functools.cache(machine.probe_devices)
    with pytest.MonkeyPatch.context() as patch:
        for module in (plan, kit):
            patch.setattr(module, "probe_devices", probe)
        yield


@pytest.fixture(scope="session")
def program():
    """Run a command of benchlib as a terminal would and return what it prints; its exit code has to be ``code``."""

    def run(*words, code=0):
        done = CliRunner().invoke(main, [str(word) for word in words])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output

    return run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Return the folder of a recorded run of a benchmark on the smoke tier, judged anew. Read it, do not change it."""
    folders = {}

    def folder(benchmark):
        if benchmark not in folders:
            day = tmp_path_factory.mktemp(benchmark) / "smoke-20261126"
            folders[benchmark] = unpack(benchmark, day / f"{benchmark}-cpu-101500-aaaaaa").path
            judge(folders[benchmark])
        return folders[benchmark]

    return folder


@pytest.fixture(scope="session")
def ran(tmp_path_factory, program):
    """Return a run of a benchmark that is made once for all promises, by its name and ``NAME=VALUE`` settings."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared

    def run(benchmark, *settings, tier="smoke", code=0):
        name = "-".join([benchmark, tier, *settings]).replace("/", "_").replace("=", "_")
        store = shared / "promised" / name
        store.parent.mkdir(exist_ok=True)
        with FileLock(f"{store}.lock"):
            if not store.exists():
                words = [word for setting in settings for word in ("--set", setting)]
                program("run", benchmark, "--tier", tier, "--out", store, *words, code=code)
        (config,) = store.glob("*/*/config.json")
        return Run(config.parent)

    return run


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Work in an empty folder, as a user would."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if (row := getattr(getattr(item, "function", None), "promise", None)) and call.when == "call":
        report.user_properties.append(("promise", (row.number, row.what)))
    return report


def pytest_terminal_summary(terminalreporter):
    rows = {}
    for outcome, state in STATES.items():
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == "promise":
                    rows.setdefault(value[0], []).append((state, value[1], report))
    if not rows:
        return
    terminalreporter.section("promises")
    for number, shown in sorted(rows.items()):
        state = next(state for state in ("FAILS", "needs hardware", "works") if state in [row[0] for row in shown])
        terminalreporter.line(f"{number}  {state:14}  {shown[0][1]}")
    counts = {state: sum(any(row[0] == state for row in shown) for shown in rows.values()) for state in STATES.values()}
    terminalreporter.line(f"{len(rows)} rows: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
