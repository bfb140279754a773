"""The agent of a run on groups of nodes: starts ``pod`` on each host, takes in its events and results, ends all.

    python -m benchlib.launch.agents.groups RUN_DIR

The hosts and their commands stand in ``RUN_DIR/nodes.json``. A node reads its files from the first line of its standard input,
ends when that input ends, and writes its lines (see ``pod``) and at last its results to its standard output: all that a
connection by ssh carries. Exit code: 0 when all nodes ended well, else that of the first failing one.
"""

import base64
import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchlib.launch.agents.kubernetes import AFTER_FAILURE_S, POLL_S, Failed, add_events, report, unpack
from benchlib.launch.agents.pod import LINE, TERM_S
from benchlib.launch.groups import NODES
from benchlib.launch.processes import leave_with_parent


class Node:
    """The connection to one host. ``reader`` ends with the output of the node."""

    def __init__(
        self, name: str, command: list[str], files: dict[str, Any], run_dir: Path, taking: threading.Lock
    ) -> None:
        self.name, self.run_dir, self.taking, self.gave_results = name, run_dir, taking, False
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        with contextlib.suppress(BrokenPipeError):  # it has left; its exit code says so
            self._input().write(json.dumps(files).encode() + b"\n")
            self._input().flush()

    def _input(self) -> Any:
        return self.process.stdin

    def _read(self) -> None:
        log = self.run_dir / "logs" / f"{self.name}.log"
        for line in self.process.stdout or ():
            if line.startswith(LINE.encode()):
                with self.taking:
                    self._take(line[len(LINE) :])
            else:
                with log.open("ab") as file:
                    file.write(line)

    def _take(self, text: bytes) -> None:
        try:
            line = json.loads(text)
            if "archive" not in line:
                add_events(self.run_dir / line["path"], line["offset"], line["text"].encode())
                return
            archive = self.run_dir / f".results-{self.name}.tar.gz"
            archive.write_bytes(base64.b64decode(line["archive"]))
            unpack(archive, self.run_dir)
            archive.unlink()
            self.gave_results = True
        except Exception as error:  # a thread has nobody to raise to
            report(f"{self.name}: {error}: {text[:200]!r}")

    def code(self) -> int | None:
        """Return its exit code, None as long as there is something to read. Raises ``Failed`` for results that did not come."""
        code = self.process.poll()
        if code is None or self.reader.is_alive():
            return None
        if not self.gave_results:
            raise Failed(
                f"{self.name} was not reached or its connection broke: its command ended with exit code {code}"
            )
        return code

    def end(self) -> None:
        """Close its input, which ends it."""
        with contextlib.suppress(OSError):
            self._input().close()


def run(run_dir: Path) -> int:
    nodes, taking, failed_at = list[Node](), threading.Lock(), float("inf")
    leave_with_parent()  # killed as an orphan it would leave the ranks of others behind
    try:
        for row in json.loads((run_dir / NODES).read_text()):
            nodes.append(Node(**row, run_dir=run_dir, taking=taking))
        codes = dict[str, int]()
        while len(codes) < len(nodes) and time.monotonic() - failed_at < AFTER_FAILURE_S:
            time.sleep(POLL_S)
            for node in nodes:
                if node.name not in codes and (code := node.code()) is not None:
                    codes[node.name] = code
                    failed_at = min(failed_at, time.monotonic()) if code else failed_at
        return next((abs(code) for code in codes.values() if code), 0)
    finally:
        for node in nodes:
            node.end()
        end = time.monotonic() + TERM_S
        for node in nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.0, end - time.monotonic()))
            node.process.kill()


def main(argv: list[str]) -> int:
    try:
        return run(Path(argv[0]))
    except (Failed, OSError) as error:
        report(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
