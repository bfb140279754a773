"""The agent of a run on Kubernetes: apply the manifest, follow the pods, bring the run folder home, remove the job.

    python -m benchlib.launch.agents.kubernetes RUN_DIR --manifest FILE --run NAME --namespace NS --pods N [--shared]

The supervisor starts and ends it like any agent. It uses ``kubectl`` and whatever access that has: create and delete of
the manifest's objects, get of pods and their logs, and, unless ``--shared`` says that the run folder is a volume mounted
here as well, exec in the pods. Exit code: 0 when all pods ended well, else the first failing pod's.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchlib.core.files import atomic_path
from benchlib.launch.agents.intake import LINE_BYTES, Intake, NotTaken
from benchlib.launch.kubernetes import RUN_LABEL
from benchlib.launch.processes import leave_with_parent

POLL_S = 1.0
AFTER_FAILURE_S = 30.0  # that the other pods get to end and to be fetched after one has failed
GONE_S = 10.0  # without any pod, after there were some
QUERY_S = 30.0  # for one answer of the cluster
QUERIES = 5  # that may fail in a row
# A container that waits for one of these does not start by itself.
HOPELESS = (
    "InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff", "CreateContainerConfigError", "CreateContainerError",
)  # fmt: skip


class Failed(Exception):
    """The run cannot go on; the text is for the run's status."""


class Kubectl:
    """Calls kubectl in a namespace."""

    def __init__(self, namespace: str, context: str) -> None:
        self._base = ["kubectl", "--namespace", namespace, *(["--context", context] if context else [])]

    def command(self, *words: str) -> list[str]:
        """Return a command line."""
        return [*self._base, *words]

    def __call__(self, *words: str, told: str = "") -> str:
        """Run a command, with ``told`` on its standard input, and return what it prints.

        Raises ``Failed`` with its own words.
        """
        try:
            done = subprocess.run(
                self.command(*words), capture_output=True, text=True, timeout=QUERY_S, check=False, input=told
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"kubectl {words[0]} had no answer within {QUERY_S:.0f} s") from None
        if done.returncode:
            raise Failed(f"kubectl {words[0]}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


class Pod(threading.Thread):
    """Follows one pod through ``kubectl exec`` and writes into the run folder what its ranks write."""

    def __init__(self, kubectl: Kubectl, name: str, remote: str, intake: Intake, python: str) -> None:
        super().__init__(daemon=True)
        self.kubectl, self.pod, self.remote, self.intake, self.python = kubectl, name, remote, intake, python
        self.returncode: int | None = None
        self.problem = ""
        self.told: set[str] = set()
        self.process: subprocess.Popen[str] | None = None

    def run(self) -> None:
        """Follow the pod to the end of its ranks; a connection that breaks is opened again."""
        for _ in range(QUERIES):
            command = self.kubectl.command(
                "exec", "-i", self.pod, "--", self.python, "-m", "benchlib.launch.agents.pod", "follow", self.remote
            )
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert self.process.stdout and self.process.stdin and self.process.stderr
            try:
                while line := self.process.stdout.readline(LINE_BYTES):
                    self._take(json.loads(line))
                    if self.returncode is not None:
                        self.process.stdin.write("ok\n")
                        self.process.stdin.close()
                        self.process.wait(QUERY_S)
                        return
            except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
                self.problem = f"{type(error).__name__}: {error}"
                if self.returncode is not None:
                    return
            finally:
                self.process.kill()
                said = self.process.stderr.read().strip()
                self.process.wait()
            self.problem = said.splitlines()[-1] if said else self.problem
            time.sleep(POLL_S)

    def end(self) -> None:
        """End the connection, where there is one."""
        if self.process and self.process.poll() is None:
            self.process.kill()

    def _take(self, line: dict[str, Any]) -> None:
        if "done" in line:
            self.returncode = int(line["done"])
            return
        try:
            self.intake.take(line, self.pod)
        except NotTaken as error:
            if str(error) not in self.told:
                self.told.add(str(error))
                print(f"pod {self.pod}: {error}", file=sys.stderr, flush=True)


class Agent:
    """One run. ``run`` returns the exit code; whatever happens, the job is removed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.run_dir = options, options.run_dir.resolve()
        self.kubectl = Kubectl(options.namespace, options.context)
        # Removed is what was created: pods may write to the folder, and to a file there.
        self.manifest = (self.run_dir / options.manifest).read_text()
        self.intake = Intake(self.run_dir)
        self.pods: dict[str, Pod] = {}
        self.codes: dict[str, int] = {}
        self.waiting: dict[str, str] = {}

    def run(self) -> int:
        """Submit, follow and remove."""
        try:
            self.kubectl("create", "-f", "-", told=self.manifest)
            print(f"created {self.options.run} in {self.options.namespace}", flush=True)
            return self._follow()
        finally:
            self._keep_logs()
            self._remove()
            for pod in self.pods.values():
                pod.end()

    def _follow(self) -> int:
        failures, failed_at, seen_at = 0, None, time.monotonic()
        while len(self.codes) < self.options.pods:
            time.sleep(POLL_S)
            try:
                found = json.loads(self.kubectl("get", "pods", "-l", f"{RUN_LABEL}={self.options.run}", "-o", "json"))
                failures = 0
            except (Failed, ValueError) as error:
                failures += 1
                if failures >= QUERIES:
                    raise Failed(f"the cluster does not answer any more: {error}") from None
                continue
            now = time.monotonic()
            for pod in found["items"]:
                self._look(pod)
            if found["items"] or not self.pods:
                seen_at = now
            elif now - seen_at > GONE_S:
                raise Failed(f"the pods of {self.options.run} are gone: evicted, or the job was removed by somebody")
            if any(self.codes.values()):
                failed_at = failed_at or now
                if now - failed_at > AFTER_FAILURE_S:
                    break
        return next((code for code in self.codes.values() if code), 0)

    def _look(self, pod: dict[str, Any]) -> None:
        """Take in the state of a pod: start to follow it, note why it waits, or how it ended."""
        name, status = pod["metadata"]["name"], pod["status"]
        follower = self.pods.get(name)
        if follower and follower.returncode is not None:
            self.codes[name] = follower.returncode
            return
        container: dict[str, Any] = next(iter(status.get("containerStatuses", [])), {})
        state = container.get("state", {})
        if "running" in state and not follower and not self.options.shared:
            remote = pod["spec"]["containers"][0]["command"][4]
            self.pods[name] = Pod(self.kubectl, name, remote, self.intake, self.options.python)
            self.pods[name].start()
        ended = state.get("terminated")
        if ended or status.get("phase") in ("Failed", "Succeeded"):
            if follower and follower.is_alive():
                return  # it still reads
            code = int((ended or {}).get("exitCode", status.get("phase") == "Failed"))
            if follower and not code:
                raise Failed(
                    f"pod {name} ended before its results were fetched: {follower.problem or 'no reason known'}"
                )
            if code and (reason := (ended or status).get("reason")) not in (None, "Error"):
                print(f"pod {name}: {reason} {(ended or status).get('message', '')}", file=sys.stderr, flush=True)
            self.codes[name] = code
            return
        self._why(name, status, state.get("waiting"))

    def _why(self, name: str, status: dict[str, Any], waiting: dict[str, Any] | None) -> None:
        unscheduled = [
            one
            for one in status.get("conditions", [])
            if one.get("status") == "False" and one["type"] == "PodScheduled"
        ]
        cause = waiting or (unscheduled[0] if unscheduled else {})
        text = f"{cause.get('reason', '')}: {cause.get('message', '')}" if cause else ""
        if text and text != self.waiting.get(name):
            self.waiting[name] = text
            print(f"pod {name} waits: {text}", file=sys.stderr, flush=True)
        if waiting and waiting.get("reason") in HOPELESS:
            raise Failed(f"pod {name} cannot start: {text}")

    def _keep_logs(self) -> None:
        """Write the end of each pod's own output to ``logs/``: what torchrun's agent said there."""
        for name in dict.fromkeys([*self.pods, *self.codes]):
            with contextlib.suppress(Failed, OSError):
                text = self.kubectl("logs", name, "--tail", "2000")
                with atomic_path(self.run_dir / "logs" / f"{name}.log") as path:
                    path.write_text(text)
                if self.codes.get(name):
                    print(text[-8000:], file=sys.stderr, flush=True)

    def _remove(self) -> None:
        try:
            self.kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=false", told=self.manifest)
            print(f"removed {self.options.run}", flush=True)
        except Failed as error:
            print(
                f"{self.options.run} could not be removed ({error}): kubectl delete -f {self.run_dir / self.options.manifest}",
                file=sys.stderr,
                flush=True,
            )


def main(argv: list[str] | None = None) -> int:
    """Run the command line of the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchlib.launch.agents.kubernetes", description="Run pods of a run."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--manifest", required=True, help="file in RUN_DIR")
    parser.add_argument("--run", required=True, help="name of the job")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--context", default="")
    parser.add_argument("--pods", type=int, required=True)
    parser.add_argument("--python", default="python3", help="interpreter in the pods")
    parser.add_argument("--shared", action="store_true", help="RUN_DIR is a volume that the pods write to")
    options = parser.parse_args(argv)
    leave_with_parent()  # killed as an orphan it would leave its job in the cluster
    try:
        return Agent(options).run()
    except Failed as error:
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # not to wait for a follower whose connection hangs
