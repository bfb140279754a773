"""Inside a pod: run its ranks, and hand what they leave to whoever follows. Neither torch nor the benchmark.

    python -m benchlib.launch.agents.pod run RUN_DIR --config FILE [--host] [--meet HOST:PORT] [--hold S] -- COMMAND...
    python -m benchlib.launch.agents.pod follow RUN_DIR

``run`` makes the run folder from the mounted config, starts COMMAND (once the pod where the nodes meet is there: torchrun
itself gives up on it after a minute), and stays up to S seconds after it until the results were fetched: the folder may
lie in the pod alone and goes with it. ``follow`` is what ``kubectl exec`` starts: it
prints a JSON line for each piece of a file, ``{path, offset, data}`` with base64 data, of the events as they are
written and of everything else at the end (``size`` and ``sha256`` with the last piece), then ``{done: exit code}``; a
line on its standard input says that all of it arrived.
"""

import argparse
import base64
import contextlib
import hashlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchlib.core.files import read_json, write_json, write_text
from benchlib.launch.processes import CONFIG, MARK

HOST_MARK = "{is_host}"
POLL_S = 0.3
CONNECT_S = 5.0
PIECE_BYTES = 1 << 20
LARGEST_BYTES = 64 << 20  # checkpoints and traces stay where they are
EVENTS = "events-*.jsonl"
OWN = ("config.json", "store.json", "peers.json", "cluster.yaml")  # of a pod alone
TERM_S = 15.0  # that the ranks get to end: a pod has half a minute from SIGTERM on
TERMINATED = 128 + signal.SIGTERM


def run(options: argparse.Namespace) -> int:
    """Run a node's part and return its exit code."""
    run_dir: Path = options.run_dir
    host = options.host and os.environ.get("JOB_COMPLETION_INDEX", "0") == "0"
    process, code = None, TERMINATED
    signal.signal(signal.SIGTERM, _stop)  # before anything is there to end: PID 1 of a pod has no default for it
    try:
        own = prepare(run_dir, options.config)
        mark = _mark(run_dir)
        mark.unlink(missing_ok=True)
        _collected(run_dir).unlink(missing_ok=True)
        # Ranks with the mark write their output into the run folder.
        env = {**os.environ, MARK: str(run_dir), CONFIG: own.name}
        if options.meet and not host:
            await_host(options.meet, options.meet_s)
        command = [word.replace(HOST_MARK, str(int(host))) for word in options.command]
        process = subprocess.Popen(command, env=env)
        code = process.wait()
        code = 128 - code if code < 0 else code
        write_json(mark, {"returncode": code})
        end = time.monotonic() + options.hold
        while time.monotonic() < end and not _collected(run_dir).exists():
            time.sleep(POLL_S)
    except _Stopped:
        if process and process.poll() is None:
            process.terminate()
            try:
                process.wait(TERM_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return code


class _Stopped(BaseException):
    """The pod is to end."""


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the rest is clearing up
    raise _Stopped


def await_host(endpoint: str, limit_s: float) -> None:
    """Wait until the store of the rendezvous can be reached, or for ``limit_s``: then torchrun says what is wrong."""
    host, _, port = endpoint.rpartition(":")
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), CONNECT_S):
            return
        time.sleep(POLL_S)


def prepare(run_dir: Path, config: Path) -> Path:
    """Make the run folder; return the config that counts for this pod's ranks, with the cluster's profile beside it.

    All pods may share the folder, with each other and with who submitted the run: the backend of the config is that of
    the pod's own kind, and the profile that ``config.json`` names there may be a file of another machine.
    """
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    values = read_json(config)
    if values.get("cluster"):
        profile = run_dir / "cluster.yaml"
        write_text(profile, (config.parent / values["cluster"]).read_text())
        values["cluster"] = str(profile)
    own = run_dir / f"config-{config.stem}.json"
    write_json(own, values)
    if not (run_dir / "config.json").exists():  # for who looks into the folder
        write_json(run_dir / "config.json", values)
    return own


def _mark(run_dir: Path) -> Path:
    return run_dir / f".ended-{platform.node()}.json"


def _collected(run_dir: Path) -> Path:
    return run_dir / f".collected-{platform.node()}"


def follow(run_dir: Path) -> int:
    """Print what the ranks of this pod write; return 1 where the other side goes away first."""
    sent: dict[Path, int] = {}
    while not run_dir.is_dir():
        time.sleep(POLL_S)
    while True:
        ended = _mark(run_dir).exists()  # asked before reading, so that the last events are not missed
        for path in sorted(run_dir.glob(EVENTS)):
            for piece in pieces(run_dir, path, sent.get(path, 0)):
                sent[path] = piece["offset"] + len(base64.b64decode(piece["data"]))
                _say(piece)
        if ended:
            break
        time.sleep(POLL_S)
    for path in leavings(run_dir):
        _say_whole(run_dir, path)
    _say({"done": int(read_json(_mark(run_dir))["returncode"])})
    if not sys.stdin.readline():
        return 1
    _collected(run_dir).touch()
    return 0


def leavings(run_dir: Path) -> list[Path]:
    """Return the files that go home at the end: what was measured and logged, not what is large or of this pod only."""
    kept = []
    for path in sorted(run_dir.rglob("*")):
        small = path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST_BYTES
        own = path.name.startswith(".") or path.name in OWN or path.match("config-*.json")
        if small and not own and not path.match(EVENTS) and "checkpoints" not in path.relative_to(run_dir).parts:
            kept.append(path)
    return kept


def pieces(run_dir: Path, path: Path, offset: int) -> Iterator[dict[str, Any]]:
    """Yield what a file holds from ``offset`` on."""
    with path.open("rb") as handle:
        handle.seek(offset)
        while data := handle.read(PIECE_BYTES):
            name = path.relative_to(run_dir).as_posix()
            yield {"path": name, "offset": offset, "data": base64.b64encode(data).decode()}
            offset += len(data)


def _say_whole(run_dir: Path, path: Path) -> None:
    digest, size = hashlib.sha256(), 0
    for piece in pieces(run_dir, path, 0):
        data = base64.b64decode(piece["data"])
        digest.update(data)
        size += len(data)
        _say(piece)
    name = path.relative_to(run_dir).as_posix()
    _say({"path": name, "offset": size, "data": "", "size": size, "sha256": digest.hexdigest()})


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command lines of the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchlib.launch.agents.pod", description="Run a pod's ranks.")
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("run", help="run COMMAND in a run folder made from a config")
    one.add_argument("run_dir", type=Path)
    one.add_argument("--config", type=Path, required=True)
    one.add_argument("--host", action="store_true", help="pod 0 of these is where the nodes meet")
    one.add_argument("--meet", default="", help="HOST:PORT that the other pods wait for")
    one.add_argument("--meet-s", type=float, default=3600.0, help="seconds that they wait at most")
    one.add_argument("--hold", type=float, default=0.0, help="seconds to stay for the results to be fetched")
    one.add_argument("command", nargs="+")
    other = commands.add_parser("follow", help="print what the ranks write")
    other.add_argument("run_dir", type=Path)
    options = parser.parse_args(argv)
    if options.what == "run":
        return run(options)
    with contextlib.suppress(BrokenPipeError):
        return follow(options.run_dir)
    return 1


if __name__ == "__main__":
    sys.exit(main())
