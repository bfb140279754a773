"""Inside a pod: run this node's part of a run, and hand over what its ranks leave. Neither torch nor the benchmark.

    python -m benchlib.launch.agents.pod RUN_DIR --config FILE|- [--meet HOST:PORT] -- COMMAND...

Makes the run folder and starts COMMAND, once the pod where the nodes meet can be reached: torchrun itself gives up on
it after a minute. The first pod opens the store there.

The pod prints its events as they are written, packs the results when COMMAND has ended, and stays ``HOLD_S`` for
``kubectl cp``, since its folder may go with it. Its own lines in the log begin with ``LINE`` and are JSON: ``{path, offset, text}`` for a piece of an
events file, at last ``{results, returncode}`` with the path of the archive.

With ``--config -`` there is a connection in place of ``kubectl cp`` (see ``agents.groups``): the first line of the standard input has
the files of the run folder by name, the end of that input ends the node, and the results are printed: ``{archive, returncode}``.
"""

import argparse
import base64
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections import defaultdict
from pathlib import Path

from benchlib.launch.jobs import rendezvous
from benchlib.launch.processes import MARK, leave_with_parent

LINE = "benchlib-pod: "
EVENTS = "events-*.jsonl"
POLL_S = 0.3
CONNECT_S = 5.0
HOLD_S = 120.0  # that a pod waits after its ranks for the results to be fetched
MAX_BYTES = 64 << 20  # of a file that is handed over: checkpoints and traces stay where they are
POD_FILES = ("config.json", "cluster.yaml", "hosts.json")  # not handed over
TERM_S = 15.0  # for the ranks to end: a pod has half a minute from SIGTERM on


def run(options: argparse.Namespace) -> int:
    run_dir: Path = options.run_dir
    archive = run_dir / f".results-{platform.node()}.tar.gz"
    process, code = None, 128 + signal.SIGTERM
    leave_with_parent()  # before anything is there to end: PID 1 of a pod has no default for SIGTERM
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        connected = options.config == Path("-")
        if connected:
            for name, content in json.loads(sys.stdin.readline()).items():
                (run_dir / name).write_text(json.dumps(content))
            threading.Thread(target=_leave_with_input, daemon=True).start()
        else:
            shutil.copy(options.config, run_dir / "config.json")
        # Ranks with the mark write their output into the run folder.
        env = {**os.environ, **_met(options), MARK: str(run_dir)}
        process = subprocess.Popen(options.command, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        offsets, returncode = defaultdict[Path, int](int), None
        while returncode is None:
            time.sleep(POLL_S)
            returncode = process.poll()
            print_events(run_dir, offsets)
        code = 128 - returncode if returncode < 0 else returncode
        pack(run_dir, archive)
        if connected:
            _print_line(archive=base64.b64encode(archive.read_bytes()).decode(), returncode=code)
            return code
        _print_line(results=str(archive), returncode=code)
        time.sleep(HOLD_S)
    except SystemExit:  # the pod was asked to end
        pass
    finally:
        if process and process.poll() is None:  # also when this pod's own part failed: its disk is full, say
            process.terminate()
            try:
                process.wait(TERM_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        archive.unlink(missing_ok=True)
    return code


def _leave_with_input() -> None:
    """Leave when the standard input ends: the connection, or the agent at its other end, is gone."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _met(options: argparse.Namespace) -> dict[str, str]:
    """Wait until the store of the rendezvous can be reached, at most as long as pods may take to start: then torchrun
    says what is wrong. Return torchrun's settings for it."""
    if not options.meet:
        return {}
    is_host = os.environ.get("JOB_COMPLETION_INDEX", "0") == "0"
    host, _, port = options.meet.rpartition(":")
    end = time.monotonic() + options.meet_s
    while not is_host and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), CONNECT_S):
            break
        time.sleep(POLL_S)
    return rendezvous(options.meet, options.meet_s, str(int(is_host)))


def print_events(run_dir: Path, offsets: dict[Path, int]) -> None:
    """Print the whole lines that were added to the events; ``offsets`` are the bytes printed so far."""
    for path in sorted(run_dir.glob(EVENTS)):
        with path.open("rb") as handle:
            handle.seek(offsets[path])
            for line in handle:
                if line.endswith(b"\n"):
                    _print_line(path=path.name, offset=offsets[path], text=line.decode(errors="replace"))
                    offsets[path] += len(line)


def pack(run_dir: Path, archive: Path) -> None:
    """Write what was measured and logged to an archive, without large files and those of the pod itself."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(run_dir.rglob("*")):
            name = path.relative_to(run_dir)
            own = path.name.startswith(".") or path.name in POD_FILES or "checkpoints" in name.parts
            small = path.match(EVENTS) or path.lstat().st_size <= MAX_BYTES
            if small and not own and path.is_file() and not path.is_symlink():
                tar.add(path, name)


def _print_line(**values: object) -> None:
    print(LINE + json.dumps(values), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchlib.launch.agents.pod", description="Run a pod's ranks.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--config", type=Path, required=True, help="config of the run, as this pod sees it")
    parser.add_argument("--meet", default="", help="HOST:PORT of the first pod, where the nodes meet")
    parser.add_argument("--meet-s", type=float, default=3600.0, help="seconds that they wait for each other at most")
    parser.add_argument("command", nargs="+")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
