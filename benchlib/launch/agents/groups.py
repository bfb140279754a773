"""The agent of a run on groups of nodes: starts ``pod`` on each host, takes in its events and results, ends all.

    python -m benchlib.launch.agents.groups RUN_DIR

The hosts and their commands stand in ``RUN_DIR/nodes.json``. A node reads its files from the first line of its standard input,
ends when that input ends, and prints its lines (see ``pod``) and at last its results: all that a connection by ssh carries.
Exit code: 0 when all nodes ended well, else that of the first failing one.
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
    """The connection to one host. A thread takes in what it prints, one node at a time (``taking``)."""

    def __init__(self, row: dict[str, Any], run_dir: Path, taking: threading.Lock) -> None:
        self.name, self.run_dir, self.taking, self.gave_results = row["name"], run_dir, taking, False
        self.process = subprocess.Popen(row["command"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        assert self.process.stdin
        self.input = self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has left; its exit code says so
            self.input.write(json.dumps(row["files"]).encode() + b"\n")
            self.input.flush()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith(LINE.encode()):
                try:
                    with self.taking:
                        self._take(json.loads(line[len(LINE) :]))
                except Exception as error:  # a thread has nobody to raise to
                    report(f"{self.name}: {error}: {line[:200]!r}")

    def _take(self, line: dict[str, Any]) -> None:
        if "archive" not in line:
            add_events(self.run_dir / line["path"], line["offset"], line["text"].encode())
            return
        archive = self.run_dir / ".results.tar.gz"
        archive.write_bytes(base64.b64decode(line["archive"]))
        unpack(archive, self.run_dir)
        archive.unlink()
        self.gave_results = True

    def code(self) -> int | None:
        """Return its exit code, None before it has ended. Raises ``Failed`` if it ended without results."""
        code = self.process.poll()
        if code is None or self.reader.is_alive():
            return None
        if not self.gave_results:
            raise Failed(
                f"{self.name} was not reached or its connection broke: its command ended with exit code {code}"
            )
        return code


def run(run_dir: Path) -> int:
    nodes, codes, failed_at, taking = list[Node](), dict[str, int](), float("inf"), threading.Lock()
    leave_with_parent()  # killed as an orphan it would leave the ranks of others behind
    try:
        nodes.extend(Node(row, run_dir, taking) for row in json.loads((run_dir / NODES).read_text()))
        while len(codes) < len(nodes) and time.monotonic() - failed_at < AFTER_FAILURE_S:
            time.sleep(POLL_S)
            ended = {node.name: node.code() for node in nodes if node.name not in codes}
            codes |= {name: code for name, code in ended.items() if code is not None}
            failed_at = min(failed_at, time.monotonic()) if any(codes.values()) else failed_at
        return next(filter(None, codes.values()), 0)
    except Failed as error:
        report(str(error))
        return 1
    finally:
        end = time.monotonic() + TERM_S
        for node in nodes:
            with contextlib.suppress(OSError):
                node.input.close()  # which ends it
        for node in nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.0, end - time.monotonic()))
            node.process.kill()


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
