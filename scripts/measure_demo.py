"""What does the demo need: how much memory, how many seconds, and any network?

Does the path of a Binder visitor (open JupyterLab, open a notebook, Run All) fit into 2 GB and 2 minutes without a network?
Method: start `jupyter lab` as Binder does, in a network namespace of its own that has nothing but the loopback
interface (where the system permits it; else it is said). Open the notebook through the server's own interface, execute
its cells one after the other over the kernel's websocket as a browser does, widgets included; or, with --voila, ask for
the page that Voila makes of it. Meanwhile add up the
proportional set size (PSS: shared pages are divided among those who share them) of the server and all its descendants.
Afterwards everything that was started is ended, and what is left over is counted.

    python scripts/measure_demo.py                       # the smoke tier of 10_squad
    python scripts/measure_demo.py --notebook 00_machine.ipynb
    python scripts/measure_demo.py --notebook 90_history.ipynb --voila
"""

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from measuring import machine, options_of

from benchlib.core.files import home

LIMIT_BYTES, LIMIT_S = 2e9, 120.0
SAMPLE_S = 0.2
START_S = 120.0
INSIDE = "MEASURE_DEMO_INSIDE"
# What a process is, by a part of its command line; the first that fits counts.
KINDS = (
    ("benchlib.launch.supervise", "supervisor"),
    ("--probe", "question for the devices"),
    ("benchlib.runtime.worker", "ranks"),
    ("ipykernel_launcher", "kernel"),
    ("jupyter", "server"),
)


class Memory(threading.Thread):
    """Adds up the PSS of a process and its descendants until stopped; keeps the peaks in bytes."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root, self.stopped = psutil.Process(root), threading.Event()
        self.peak, self.seen = 0, {root}
        self.by_kind: dict[str, int] = {}

    def run(self) -> None:
        while not self.stopped.wait(SAMPLE_S):
            self.sample()

    def sample(self) -> None:
        now: Counter[str] = Counter()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self.root, *self.root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    command = " ".join(process.cmdline())
                    kind = next((kind for part, kind in KINDS if part in command), "others")
                    now[kind] += process.memory_full_info().pss
                    self.seen.add(process.pid)
        self.peak = max(self.peak, now.total())
        self.by_kind = {kind: max(now[kind], self.by_kind.get(kind, 0)) for kind in {*now, *self.by_kind}}


class Server:
    """A running `jupyter lab` on the loopback interface."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}",
        ]  # fmt: skip
        folders = {
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "BENCHLIB_OUTPUTS": "outputs",
        }
        environment = os.environ | {name: str(folder / part) for name, part in folders.items()}
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=home(), env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request to the server's REST interface and return its JSON answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def page(self, path: str) -> str:
        """Return a page of the server as a browser gets it, once it is whole."""
        address = f"http://127.0.0.1:{self.port}/{path}?token={self.token}"
        with urllib.request.urlopen(address, timeout=3 * LIMIT_S) as answer:
            return str(answer.read().decode())

    def wait(self) -> None:
        """Return once the server answers; ``SystemExit`` with its log where it does not."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self.call("GET", "api/status")
                return
            time.sleep(0.05)
        raise SystemExit(f"the server did not start:\n{self.log.read_text()[-3000:]}")


def execute(server: Server, notebook: str) -> tuple[int, float]:
    """Run all code cells as a browser does; return their number and the seconds until the kernel was ready."""
    import websocket  # comes with jupyter_server

    content = server.call("GET", f"api/contents/notebooks/{notebook}")["content"]
    cells = [cell["source"] for cell in content["cells"] if cell["cell_type"] == "code"]
    began = time.monotonic()
    body = {"path": f"notebooks/{notebook}", "name": notebook, "type": "notebook", "kernel": {"name": "python3"}}
    kernel = server.call("POST", "api/sessions", body)["kernel"]["id"]
    address = f"ws://127.0.0.1:{server.port}/api/kernels/{kernel}/channels?token={server.token}"
    channel = websocket.create_connection(address, timeout=LIMIT_S * 3)
    try:
        _run_cell(channel, "0")
        ready_s = time.monotonic() - began
        for number, source in enumerate(cells, 1):
            error = _run_cell(channel, source)
            if error:
                raise SystemExit(f"cell {number} of {notebook} failed: {error}")
    finally:
        channel.close()
    return len(cells), ready_s


def _run_cell(channel: Any, source: str) -> str:
    """Execute a cell and wait until the kernel is idle again; return its error, '' where there was none."""
    name = uuid.uuid4().hex
    header = {"msg_id": name, "msg_type": "execute_request", "username": "", "session": "measure", "version": "5.3"}
    content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    channel.send(json.dumps(message))
    error, replied, idle = "", False, False
    while not (replied and idle):
        answer = json.loads(channel.recv())
        if answer.get("parent_header", {}).get("msg_id") != name:
            continue
        kind, body = answer["header"]["msg_type"], answer["content"]
        if kind == "error":
            error = f"{body['ename']}: {body['evalue']}"
        replied |= kind == "execute_reply"
        idle |= kind == "status" and body["execution_state"] == "idle"
    return error


@contextlib.contextmanager
def ended(server: Server, memory: Memory) -> Iterator[None]:
    """End the server with all its descendants, whatever happens in the block."""
    try:
        yield
    finally:
        memory.stopped.set()
        memory.join()
        with contextlib.suppress(OSError):
            server.call("POST", "api/shutdown")
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(20)
        for pid in memory.seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() >= memory.root.create_time():
                    process.kill()


def render(server: Server, notebook: str) -> tuple[int, float]:
    """Let Voila make a page of a notebook; return its number of outputs and the seconds that it took."""
    began = time.monotonic()
    page = server.page(f"voila/render/notebooks/{notebook}")
    outputs = page.count('class="jp-Cell-outputWrapper"') or page.count("jp-OutputArea-output")
    if not outputs or "Traceback (most recent call last)" in page:
        raise SystemExit(f"Voila made no page of {notebook}: {outputs} outputs, {len(page)} characters")
    return outputs, time.monotonic() - began


def measure(notebook: str, voila: bool, folder: Path) -> bool:
    """Start, run, end; print the figures and return whether all limits hold."""
    began = time.monotonic()
    server = Server(folder)
    memory = Memory(server.process.pid)
    memory.start()
    with ended(server, memory):
        server.wait()
        server_s = time.monotonic() - began
        parts, first_s = render(server, notebook) if voila else execute(server, notebook)
        total_s = time.monotonic() - began
    left_over = [pid for pid in memory.seen if psutil.pid_exists(pid)]
    print(f"{notebook}: {parts} {'outputs of the page' if voila else 'cells'} in {total_s:.1f} s: server {server_s:.1f} s, "
          f"then kernel or page {first_s:.1f} s")  # fmt: skip
    print(f"peak: {memory.peak / 1e6:.0f} MB of PSS; of each kind by itself:")
    for kind, size in sorted(memory.by_kind.items(), key=lambda item: -item[1]):
        print(f"  {kind:26s} {size / 1e6:6.0f} MB")
    print(f"{len(memory.seen)} processes seen, {len(left_over)} left over")
    return memory.peak <= LIMIT_BYTES and total_s <= LIMIT_S and not left_over


def raise_loopback() -> None:
    """Switch on the loopback interface of this network namespace (netdevice(7): SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(handle, 0x8913, request))[1]
        fcntl.ioctl(handle, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))


def isolated_command() -> list[str] | None:
    """Return the command that starts a program without any network but loopback, or None where that is not permitted."""
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        with contextlib.suppress(OSError):
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
                return command
    return None


def main() -> None:
    """Exit with 1 where a limit is exceeded or a process was left over."""
    parser = options_of(__doc__)
    parser.add_argument("--notebook", default="10_squad.ipynb", help="file in notebooks/ [10_squad.ipynb]")
    parser.add_argument("--voila", action="store_true", help="the page of Voila instead of JupyterLab")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        command = isolated_command()
        environment = os.environ | {INSIDE: "isolated" if command else "open"}
        sys.exit(subprocess.run([*(command or []), sys.executable, *sys.argv], env=environment, check=False).returncode)
    isolated = os.environ.pop(INSIDE) == "isolated"
    if isolated:
        raise_loopback()
    packages = ("benchlib", "torch", "jupyterlab", "ipykernel", "voila")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages if importlib.util.find_spec(name)]
    network = "none but loopback" if isolated else "NOT cut off: unshare is not permitted here"
    print(f"{machine()}, Python {platform.python_version()}, {', '.join(versions)}, network: {network}", flush=True)
    with tempfile.TemporaryDirectory(prefix="measure-demo-", ignore_cleanup_errors=True) as folder:
        sys.exit(not measure(options.notebook, options.voila, Path(folder)))


if __name__ == "__main__":
    main()
