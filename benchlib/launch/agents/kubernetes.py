"""The agent of a run on Kubernetes: creates the job, follows its pods, fetches their results, removes the job.

    python -m benchlib.launch.agents.kubernetes RUN_DIR --run NAME --pods N [--shared] -- kubectl --namespace NS

The supervisor starts and ends it like any agent. ``kubectl logs`` writes each pod's output to ``logs/POD.log`` and carries
its events, ``kubectl cp`` its results (see ``pod``); with ``--shared`` RUN_DIR is a volume that the pods write to. Exit
code: 0 when all pods ended well, else that of the first failing pod.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

from benchlib.launch.agents.pod import LINE
from benchlib.launch.kubernetes import COLLECT_S, MANIFEST, RUN_LABEL
from benchlib.launch.processes import leave_with_parent

POLL_S = 1.0
AFTER_FAILURE_S = 30.0  # for the other pods to end after one has failed, and for the log of an ended pod
GONE_S = 10.0  # that a pod may be missing in the cluster's answers
QUERY_S = 30.0  # for one answer of the cluster
QUERIES = 5  # that may fail in a row
LOG_CHARACTERS = 8000  # of a failed pod
# A container that waits for one of these does not start by itself.
HOPELESS = (
    "InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff", "CreateContainerConfigError", "CreateContainerError",
)  # fmt: skip
EVENTS = re.compile(r"events-rank\d{1,6}\.jsonl")
DATA = (
    ".json",
    ".jsonl",
    ".parquet",
    ".csv",
    ".txt",
    ".log",
    ".npy",
    ".npz",
    ".png",
    ".svg",
    ".out",
    ".err",
    ".stacks",
)
# Written here in the course of a run, by the supervisor, the judge and the report.
RESERVED = frozenset(("status.json", "verdict.json", "files.json", "store.json", "peers.json", "repeats.json"))


class Failed(Exception):
    """The run cannot go on; the text is for the run's status."""


class RunFolder:
    """Takes from pods what ranks measure and log, and nothing that steers or judges the run here."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()  # each pod has a thread
        # What was here before the pods stays, but for the facts of the machine: rank 0 knows its own.
        self._ours = set(path.rglob("*")) - {path / "machine.json"}

    def add_events(self, name: str, offset: int, data: bytes) -> None:
        """Append the part of ``data`` that the file does not have yet; nothing where a part before it is missing."""
        if not EVENTS.fullmatch(name):
            raise ValueError(f"{name!r} is not a file of a rank's events")
        with self._lock, (self.path / name).open("ab") as file:
            if offset <= (size := file.tell()):
                file.write(data[size - offset :])

    def unpack(self, archive: Path) -> list[str]:
        """Take the files of an archive, see ``pod.pack``; return the names of those that were refused."""
        refused = []
        with tarfile.open(archive) as tar:
            for member in tar:
                target = self.path / member.name
                if EVENTS.fullmatch(member.name) and (file := tar.extractfile(member)):
                    self.add_events(member.name, 0, file.read())
                elif not self._allowed(member, target):
                    refused.append(member.name)
                # Pods that share a volume all pack the same files, each at its own end: the newest counts.
                elif not target.exists() or target.name == "machine.json" or target.stat().st_mtime < member.mtime:
                    with self._lock:
                        tar.extract(member, self.path, filter="data")
        return refused

    def _allowed(self, member: tarfile.TarInfo, target: Path) -> bool:
        """Whether a file is data, is not written here and stays in the run folder."""
        names = Path(member.name).parts
        inside = self.path in target.resolve().parents and ".." not in names
        hidden = any(name.startswith(".") or not name.isprintable() for name in names)
        here = member.name in RESERVED or target in self._ours
        return member.isfile() and inside and not hidden and not here and target.suffix in DATA


class Pod:
    """One pod. ``code`` is its exit code, None until it is known and nothing more is to come."""

    def __init__(self, name: str, kubectl: list[str], folder: RunFolder) -> None:
        self.name, self.kubectl, self.folder = name, kubectl, folder
        self.log = folder.path / "logs" / f"{name}.log"
        self.code: int | None = None
        self.problem, self.waits_for = "", ""
        self.seen_at, self.ended_at = time.monotonic(), 0.0
        self._lines = 0
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    @property
    def followed(self) -> bool:
        """Whether its log is being read."""
        return self._thread is not None and self._thread.is_alive()

    def follow(self) -> None:
        """Read its log from the start, on a thread, unless that is going on; again where the connection broke."""
        if not self.followed:
            self._process = subprocess.Popen(
                [*self.kubectl, "logs", "--follow", self.name], text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            )  # fmt: skip
            self._thread = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the connection, where there is one."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        try:
            with self.log.open("a") as log:
                for number, line in enumerate(process.stdout):
                    if line.startswith(LINE):
                        self._take(json.loads(line.removeprefix(LINE)))
                    elif number >= self._lines:  # not the lines of an earlier connection again
                        log.write(line)
                        log.flush()
                    self._lines = max(self._lines, number + 1)
        except (Failed, OSError, EOFError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
            self.problem = f"{type(error).__name__}: {error}"
            process.kill()

    def _take(self, line: dict[str, Any]) -> None:
        if "results" not in line:
            self.folder.add_events(line["path"], line["offset"], line["text"].encode())
            return
        archive = self.folder.path / f".results-{self.name}.tar.gz"
        try:
            # A name and no path: kubectl takes what precedes a colon for a pod.
            call(self.kubectl, "cp", "--retries=3", f"{self.name}:{line['results']}", archive.name,
                 folder=archive.parent, limit_s=COLLECT_S)  # fmt: skip
            for name in self.folder.unpack(archive):
                report(f"pod {self.name}: {name!r} was not taken: it is written here, or is not data")
        finally:
            archive.unlink(missing_ok=True)
        self.code = int(line["returncode"])


class Agent:
    """One run. ``run`` returns the exit code; whatever happens, the job is removed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.kubectl = options, options.kubectl
        self.folder = RunFolder(options.run_dir.resolve())
        # Removed is what was created: pods may write to the folder, and to a file there.
        self.manifest = (options.run_dir / MANIFEST).read_text()
        self.pods: dict[str, Pod] = {}

    def run(self) -> int:
        """Create, follow and remove the job."""
        try:
            call(self.kubectl, "create", "-f", "-", stdin=self.manifest)
            print(f"created {self.options.run}", flush=True)
            return self._follow()
        finally:
            self._remove()
            for pod in self.pods.values():
                pod.close()
                if pod.code:  # torchrun's report of failed ranks is read from the agent's log
                    report(pod.log.read_text()[-LOG_CHARACTERS:])

    def _follow(self) -> int:
        failures, failed_at = 0, 0.0
        while True:
            time.sleep(POLL_S)
            try:
                query = call(self.kubectl, "get", "pods", "-l", f"{RUN_LABEL}={self.options.run}", "-o", "json")
                items, failures = json.loads(query)["items"], 0
            except (Failed, ValueError) as error:
                failures += 1
                if failures >= QUERIES:
                    raise Failed(f"the cluster does not answer any more: {error}") from None
                continue
            now = time.monotonic()
            for item in items:
                name = item["metadata"]["name"]
                pod = self.pods.setdefault(name, Pod(name, self.kubectl, self.folder))
                pod.seen_at = now
                if pod.code is None:
                    self._look(pod, item["status"], now)
            for pod in self.pods.values():
                if pod.code is None and now - pod.seen_at > GONE_S:
                    raise Failed(f"pod {pod.name} is gone: evicted, or the job was removed by somebody")
            codes = [pod.code for pod in self.pods.values() if pod.code is not None]
            failed_at = failed_at or (now if any(codes) else 0.0)
            if len(codes) >= self.options.pods or (failed_at and now - failed_at > AFTER_FAILURE_S):
                return next((code for code in codes if code), 0)

    def _look(self, pod: Pod, status: dict[str, Any], now: float) -> None:
        """Take in the state of a pod: follow its log, say why it waits, or how it ended."""
        containers = status.get("containerStatuses") or [{}]
        state = containers[0].get("state", {})
        ended = state.get("terminated") or (status if status.get("phase") in ("Failed", "Succeeded") else None)
        if not ended:
            if "running" in state:
                pod.follow()
            else:
                self._waits(pod, status, state.get("waiting"))
            return
        if not pod.ended_at:
            pod.ended_at = now
            pod.follow()
        if pod.followed and now - pod.ended_at < AFTER_FAILURE_S:
            return
        code = int(ended.get("exitCode", ended.get("phase") == "Failed"))
        if not code and not self.options.shared:
            raise Failed(f"pod {pod.name} ended before its results were fetched: {pod.problem or 'no reason known'}")
        if code and ended.get("reason") not in (None, "Error"):
            report(f"pod {pod.name}: {ended['reason']} {ended.get('message', '')}")
        pod.code = code

    def _waits(self, pod: Pod, status: dict[str, Any], waiting: dict[str, Any] | None) -> None:
        conditions = (item for item in status.get("conditions", []) if item["type"] == "PodScheduled")
        cause = waiting or next((item for item in conditions if item.get("status") == "False"), {})
        text = f"{cause.get('reason', '')}: {cause.get('message', '')}"
        if cause and text != pod.waits_for:
            pod.waits_for = text
            report(f"pod {pod.name} waits: {text}")
        if waiting and waiting.get("reason") in HOPELESS:
            raise Failed(f"pod {pod.name} cannot start: {text}")

    def _remove(self) -> None:
        try:
            call(self.kubectl, "delete", "-f", "-", "--ignore-not-found", "--wait=false", stdin=self.manifest)
            print(f"removed {self.options.run}", flush=True)
        except Failed as error:
            remedy = f"kubectl delete -f {self.folder.path / MANIFEST}"
            report(f"{self.options.run} could not be removed ({error}): {remedy}")


def call(kubectl: list[str], *words: str, stdin: str = "", folder: Path | None = None, limit_s: float = QUERY_S) -> str:
    """Run kubectl in a working folder and return what it prints. Raises ``Failed`` with its message."""
    try:
        done = subprocess.run(
            [*kubectl, *words], input=stdin, cwd=folder, timeout=limit_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"kubectl {words[0]} did not answer within {limit_s:.0f} s") from None
    if done.returncode:
        raise Failed(f"kubectl {words[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def report(text: str) -> None:
    """Print to the agent's log."""
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command line of the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchlib.launch.agents.kubernetes", description="Run pods of a run."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--run", required=True, help="name of the job")
    parser.add_argument("--pods", type=int, required=True)
    parser.add_argument("--shared", action="store_true", help="RUN_DIR is a volume that the pods write to")
    parser.add_argument("kubectl", nargs="+", help="kubectl with its global options")
    options = parser.parse_args(argv)
    leave_with_parent()  # killed as an orphan it would leave its job in the cluster
    try:
        return Agent(options).run()
    except Failed as error:
        report(str(error))
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # not to wait for a log whose connection hangs
