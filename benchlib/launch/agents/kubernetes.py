"""The agent of a run on Kubernetes: creates the job, follows its pods, fetches their results, removes the job.

    python -m benchlib.launch.agents.kubernetes RUN_DIR --run NAME --pods N -- kubectl --namespace NS

The supervisor starts and ends it like any agent. ``kubectl logs`` writes each pod's output to ``logs/POD.log`` and
carries its events, ``kubectl cp`` its results (see ``pod``). Exit code: 0 when all pods ended well, else that of the first failing pod.
"""

import argparse
import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from benchlib.launch.agents.pod import EVENTS, LINE
from benchlib.launch.kubernetes import MANIFEST, RUN_LABEL
from benchlib.launch.processes import leave_with_parent

POLL_S = 1.0
AFTER_FAILURE_S = 30.0  # for the other pods to end after one has failed, and for the log of an ended pod
GONE_S = 10.0  # that a pod may be missing in the cluster's answers
QUERY_S = 30.0  # for one answer of the cluster
QUERIES = 5  # that may fail in a row
LOG_CHARACTERS = 8000  # of a failed pod
# A container that waits for one of these does not start by itself.
HOPELESS = re.compile("InvalidImageName|ErrImageNeverPull|ImagePullBackOff|CreateContainer(Config)?Error")


class Failed(Exception):
    """The run cannot go on; the text is for the run's status."""


def add_events(path: Path, offset: int, data: bytes) -> None:
    """Append the part of ``data`` that the file does not have yet; nothing where a part before it is missing."""
    with path.open("ab") as file:
        if offset <= (size := file.tell()):
            file.write(data[size - offset :])


def unpack(archive: Path, run_dir: Path) -> None:
    """Fetch the files of an archive, see ``pod.pack``. Raises ``TarError`` for one that leads out of the folder."""
    with tarfile.open(archive) as tar:
        for member in tar:
            target = run_dir / member.name
            if target.match(EVENTS) and (file := tar.extractfile(member)):
                with file, target.open("ab") as events:
                    file.seek(events.tell())
                    shutil.copyfileobj(file, events)
            # Pods that share a volume all pack the same files, each at its own end: the newest counts.
            elif not target.exists() or target.name == "machine.json" or target.stat().st_mtime < member.mtime:
                tar.extract(member, run_dir, filter="data")


class Pod:
    """One pod. ``code`` is its exit code, None until it is known and nothing more is to come."""

    def __init__(self, name: str, kubectl: list[str], run_dir: Path) -> None:
        self.name, self.kubectl, self.run_dir = name, kubectl, run_dir
        self.log = run_dir / "logs" / f"{name}.log"
        self.code: int | None = None
        self.waits_for, self.seen_at, self.ended_at = "", time.monotonic(), 0.0
        self._offset = 0
        self._results = ("", 0)  # the path of their archive in the pod, and the exit code of its ranks
        self._logs: subprocess.Popen[bytes] | None = None

    def follow(self, ended: bool) -> bool:
        """Return whether the log is being written; begin with it, or again where the connection broke."""
        code = self._logs.poll() if self._logs else -1
        if code is not None and (code or not ended):
            with self.log.open("ab") as log:
                command = [*self.kubectl, "logs", "--follow", self.name]
                self._logs = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log)
        return self._logs is not None and self._logs.poll() is None

    def read(self) -> None:
        """Take the events that the log has more, and the results that it announces."""
        with self.log.open("rb") as log:
            log.seek(self._offset)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if line.startswith(LINE.encode()):
                    self._take(line[len(LINE) :])
        if self._results[0]:
            self._fetch(*self._results)

    def _take(self, text: bytes) -> None:
        try:
            line = json.loads(text)
            if "results" in line:
                self._results = (str(line["results"]), int(line["returncode"]))
            else:
                add_events(self.run_dir / line["path"], line["offset"], line["text"].encode())
        except (ValueError, KeyError, TypeError) as error:
            report(f"pod {self.name}: {error}: {text[:200]!r}")

    def _fetch(self, path: str, code: int) -> None:
        """Copy the archive of the results and unpack it; again as long as that fails and the pod is there."""
        archive = self.run_dir / f".results-{self.name}.tar.gz"
        # A name and no path: kubectl takes what precedes a colon for a pod.
        command = [*self.kubectl, "cp", "--retries=3", f"{self.name}:{path}", archive.name]
        try:
            if subprocess.run(command, stdout=subprocess.DEVNULL, cwd=archive.parent, check=False).returncode == 0:
                unpack(archive, self.run_dir)
                self.code, self._results = code, ("", 0)
        except (OSError, EOFError, tarfile.TarError) as error:
            report(f"pod {self.name}: the archive of its results is damaged: {error}")
        archive.unlink(missing_ok=True)

    def close(self) -> None:
        """End kubectl, and leave the log without the lines that were for here; print the end of a failed pod's."""
        if self._logs:
            self._logs.kill()
            self._logs.wait()
        if self.log.exists():
            lines = self.log.read_text(errors="replace").splitlines(keepends=True)
            text = "".join(line for line in lines if not line.startswith(LINE))
            self.log.write_text(text)
            if self.code:  # torchrun's report of failed ranks is read from the agent's log
                report(text[-LOG_CHARACTERS:])


class Agent:
    """One run. ``run`` returns the exit code; whatever happens, the job is removed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.manifest = (options.run_dir / MANIFEST).read_text()
        self.pods: dict[str, Pod] = {}

    def run(self) -> int:
        try:
            self._kubectl("create", "-f", "-", stdin=self.manifest)
            print(f"created {self.options.run}", flush=True)
            return self._follow()
        finally:
            try:
                self._kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=false", stdin=self.manifest)
                print(f"removed {self.options.run}", flush=True)
            except Failed as error:
                remedy = f"kubectl delete -f {self.options.run_dir / MANIFEST}"
                report(f"{self.options.run} could not be removed ({error}): {remedy}")
            finally:
                with contextlib.ExitStack() as closing:  # each of them, whatever becomes of another
                    for pod in self.pods.values():
                        closing.callback(pod.close)

    def _kubectl(self, *words: str, stdin: str = "") -> str:
        """Run kubectl and return what it prints. Raises ``Failed`` with its message."""
        command = [*self.options.kubectl, *words]
        try:
            done = subprocess.run(
                command, input=stdin, timeout=QUERY_S, capture_output=True, text=True, errors="replace", check=False
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"kubectl {words[0]} did not answer within {QUERY_S:.0f} s") from None
        if done.returncode:
            raise Failed(f"kubectl {words[0]}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def _follow(self) -> int:
        failures, failed_at = 0, math.inf
        while True:
            time.sleep(POLL_S)
            try:
                answer = self._kubectl("get", "pods", "-l", f"{RUN_LABEL}={self.options.run}", "-o", "json")
                items, failures = json.loads(answer)["items"], 0
            except (Failed, ValueError) as error:
                failures += 1
                if failures >= QUERIES:
                    raise Failed(f"the cluster does not answer any more: {error}") from None
                continue
            now = time.monotonic()
            for item in items:
                name = item["metadata"]["name"]
                pod = self.pods.setdefault(name, Pod(name, self.options.kubectl, self.options.run_dir))
                pod.seen_at = now
                if pod.code is None:
                    self._look(pod, item["status"])
            codes = [pod.code for pod in self.pods.values()]
            for pod in self.pods.values():
                if pod.code is None and now - pod.seen_at > GONE_S:
                    raise Failed(f"pod {pod.name} is gone: evicted, or the job was removed by somebody")
            if code := next(filter(None, codes), 0):
                failed_at = min(failed_at, now)
            if len(codes) - codes.count(None) >= self.options.pods or now - failed_at > AFTER_FAILURE_S:
                return code

    def _look(self, pod: Pod, status: dict[str, Any]) -> None:
        """Take in the state of a pod: what its log has more, why it waits, or how it ended."""
        state = (status.get("containerStatuses") or [{}])[0].get("state", {})
        ended = state.get("terminated") or (status if status.get("phase") in ("Failed", "Succeeded") else None)
        if not ended and "running" not in state:
            self._waits(pod, status, state.get("waiting") or {})
            return
        followed = pod.follow(bool(ended))
        pod.read()
        if not ended or pod.code is not None:
            return
        pod.ended_at = pod.ended_at or pod.seen_at
        if followed and pod.seen_at - pod.ended_at < AFTER_FAILURE_S:
            return
        code = int(ended.get("exitCode", ended.get("phase") == "Failed"))
        if not code:
            raise Failed(f"pod {pod.name} ended before its results were fetched")
        if code and ended.get("reason") not in (None, "Error"):
            report(f"pod {pod.name}: {ended['reason']} {ended.get('message', '')}")
        pod.code = code

    def _waits(self, pod: Pod, status: dict[str, Any], waiting: dict[str, Any]) -> None:
        conditions = (item for item in status.get("conditions", []) if item["type"] == "PodScheduled")
        cause = waiting or next((item for item in conditions if item.get("status") == "False"), {})
        text = f"{cause.get('reason', '')}: {cause.get('message', '')}"
        if cause and text != pod.waits_for:
            pod.waits_for = text
            report(f"pod {pod.name} waits: {text}")
        if HOPELESS.fullmatch(str(waiting.get("reason"))):
            raise Failed(f"pod {pod.name} cannot start: {text}")


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchlib.launch.agents.kubernetes", description="Run pods.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--run", required=True, help="name of the job")
    parser.add_argument("--pods", type=int, required=True)
    parser.add_argument("kubectl", nargs="+", help="kubectl with its global options")
    options = parser.parse_args(argv)
    leave_with_parent()  # killed as an orphan it would leave its job in the cluster
    try:
        return Agent(options).run()
    except Failed as error:
        report(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
