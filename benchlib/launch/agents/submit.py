"""The agent of a run that a command submits: SLURM's sbatch, TorchX.

    python -m benchlib.launch.agents.submit --id REGEX --cancel "scancel {id}" [--left "squeue -h -j {id}"]
                                            [--log FILE] -- COMMAND...

COMMAND prints the job's id, the first group of REGEX, and ends with the job and its exit code. When this agent is
ended, it cancels the job and waits until nothing is left.
"""

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchlib.launch.processes import leave_with_parent

ID_S = 5.0  # for a command that was interrupted to print the id
CANCEL_S = 10.0
TERM_S = 5.0
POLL_S = 0.3
TAIL_BYTES = 8000


class Submitted:
    """One job. ``run`` returns the exit code of the command; ``cancel`` takes the job back."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.identity = options, ""
        self._id_read = threading.Event()
        # In a session of its own: what ends this agent must not end the command before it has printed the id.
        self.process = subprocess.Popen(
            options.command,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def run(self) -> int:
        code = self.process.wait()
        self._id_read.wait(ID_S)
        if code:  # repeat the end of the job's own output: torchrun's summary of failures is read from here
            with contextlib.suppress(OSError):
                text = Path(self.options.log).read_bytes()[-TAIL_BYTES:].decode(errors="replace")
                print(text, file=sys.stderr, flush=True)
        return 128 - code if code < 0 else code

    def _read(self) -> None:
        for line in self.process.stdout or ():
            print(line, end="", flush=True)
            if not self.identity and (match := re.search(self.options.id, line)):
                self.identity = match.group(1)
                self._id_read.set()
        self._id_read.set()

    def cancel(self) -> None:
        self._id_read.wait(ID_S)
        if self.identity:
            print(f"cancelling {self.identity}", flush=True)
            self._call(self.options.cancel)
            end = time.monotonic() + CANCEL_S
            while self.options.left and self._call(self.options.left) and time.monotonic() < end:
                time.sleep(POLL_S)
        for number in (signal.SIGTERM, signal.SIGKILL):  # TorchX's local scheduler ends its replicas itself
            with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                if self.process.poll() is None:
                    os.killpg(self.process.pid, number)
                    self.process.wait(TERM_S)

    def _call(self, words: str) -> str:
        command = [word.replace("{id}", self.identity) for word in shlex.split(words)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=CANCEL_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"{shlex.join(command)}: {error}", file=sys.stderr, flush=True)
            return ""
        print(done.stderr, end="", file=sys.stderr, flush=True)
        return done.stdout.strip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchlib.launch.agents.submit", description="Submit a job and wait."
    )
    parser.add_argument("--id", required=True, help="expression whose first group is the job's id")
    parser.add_argument("--cancel", required=True, help="command that cancels {id}")
    parser.add_argument("--left", default="", help="command that prints something as long as {id} is there")
    parser.add_argument("--log", default="/dev/null", help="file with the job's own output")
    parser.add_argument("command", nargs="+")
    options, job = parser.parse_args(argv), None
    leave_with_parent()  # killed as an orphan it would leave its job in the queue
    try:
        job = Submitted(options)
        return job.run()
    except BaseException:
        if job:
            job.cancel()
        raise


if __name__ == "__main__":
    sys.exit(main())
