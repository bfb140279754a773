"""Inside a pod: run this node's part of a run, and hand over what its ranks leave. Neither torch nor the benchmark.

    python -m benchlib.launch.agents.pod RUN_DIR --config FILE [--host] [--meet HOST:PORT] [--hold S] -- COMMAND...

Makes the run folder from the mounted config and starts COMMAND, once the pod where the nodes meet can be reached: torchrun
itself gives up on it after a minute.

``--hold`` is for a run folder that is not mounted where the run was submitted. The pod then prints its events as they are
written, packs the results when COMMAND has ended, and stays up to S seconds for ``kubectl cp``, since its folder may go
with it. Its own lines in the log begin with ``LINE`` and are JSON: ``{path, offset, text}`` for a piece of an events file,
at last ``{results, returncode}`` with the path of the archive.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from benchlib.core.files import read_json, write_json, write_text
from benchlib.launch.processes import CONFIG, MARK

LINE = "benchlib-pod: "
HOST_MARK = "{is_host}"
EVENTS = "events-*.jsonl"
POLL_S = 0.3
CONNECT_S = 5.0
LARGEST_BYTES = 64 << 20  # of a file that is handed over: checkpoints and traces stay where they are
POD_FILES = ("config.json", "store.json", "peers.json", "cluster.yaml")  # not handed over
TERM_S = 15.0  # for the ranks to end: a pod has half a minute from SIGTERM on
TERMINATED = 128 + signal.SIGTERM


class _Stopped(BaseException):
    """The pod was asked to end."""


def run(options: argparse.Namespace) -> int:
    """Run a node's part and return its exit code."""
    run_dir: Path = options.run_dir
    host = options.host and os.environ.get("JOB_COMPLETION_INDEX", "0") == "0"
    archive = run_dir / f".results-{platform.node()}.tar.gz"
    process, code = None, TERMINATED
    signal.signal(signal.SIGTERM, _stop)  # before anything is there to end: PID 1 of a pod has no default for it
    try:
        own = prepare(run_dir, options.config)
        if options.meet and not host:
            await_host(options.meet, options.meet_s)
        command = [word.replace(HOST_MARK, str(int(host))) for word in options.command]
        # Ranks with the mark write their output into the run folder.
        process = subprocess.Popen(command, env={**os.environ, MARK: str(run_dir), CONFIG: own.name})
        offsets: dict[Path, int] = {}
        while (returncode := process.poll()) is None:
            time.sleep(POLL_S)
            if options.hold:
                print_events(run_dir, offsets)
        code = 128 - returncode if returncode < 0 else returncode
        if options.hold:
            print_events(run_dir, offsets)
            pack(run_dir, archive)
            _print_line(results=str(archive), returncode=code)
            time.sleep(options.hold)
    except _Stopped:
        if process and process.poll() is None:
            process.terminate()
            try:
                process.wait(TERM_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        archive.unlink(missing_ok=True)
    return code


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the rest is clearing up
    raise _Stopped


def prepare(run_dir: Path, config: Path) -> Path:
    """Make the run folder; return the config of this pod's ranks, with the cluster's profile beside it.

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


def await_host(endpoint: str, limit_s: float) -> None:
    """Wait until the store of the rendezvous can be reached, or for ``limit_s``: then torchrun says what is wrong."""
    host, _, port = endpoint.rpartition(":")
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), CONNECT_S):
            return
        time.sleep(POLL_S)


def print_events(run_dir: Path, offsets: dict[Path, int]) -> None:
    """Print the whole lines that were added to the events; ``offsets`` are the bytes printed so far."""
    for path in sorted(run_dir.glob(EVENTS)):
        with path.open("rb") as handle:
            handle.seek(offsets.get(path, 0))
            for line in handle:
                if line.endswith(b"\n"):
                    offset = offsets.get(path, 0)
                    _print_line(path=path.name, offset=offset, text=line.decode(errors="replace"))
                    offsets[path] = offset + len(line)


def pack(run_dir: Path, archive: Path) -> None:
    """Write what was measured and logged to an archive, without large files and those of the pod itself."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(run_dir.rglob("*")):
            name = path.relative_to(run_dir)
            own = path.name.startswith(".") or path.name in POD_FILES or path.match("config-*.json")
            if path.is_symlink() or not path.is_file() or own or "checkpoints" in name.parts:
                continue
            if path.match(EVENTS) or path.stat().st_size <= LARGEST_BYTES:
                tar.add(path, name)


def _print_line(**values: object) -> None:
    print(LINE + json.dumps(values), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command line of the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchlib.launch.agents.pod", description="Run a pod's ranks.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--host", action="store_true", help="pod 0 of these is where the nodes meet")
    parser.add_argument("--meet", default="", help="HOST:PORT that the other pods wait for")
    parser.add_argument("--meet-s", type=float, default=3600.0, help="seconds that they wait at most")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds to stay for the results to be fetched")
    parser.add_argument("command", nargs="+")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
