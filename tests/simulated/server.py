"""Starts ranks with simulated devices: what they need of torch and transformers is loaded once, each rank is a fork.

    python server.py        # reads a request a line, answers with a line: JSON both

A request names a function ``MODULE:FUNCTION``, its arguments, how many ranks call it, changes of ``truth`` and of the kit's
source: ``[file, old text, new text]``. The answer has what each rank returned, or the last lines of its error.
"""

import faulthandler
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import simcuda

simcuda.load()

PRELOADED = (
    "torch.distributed.fsdp", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.pipelining", "transformers.trainer",
    "transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama", "transformers.generation",
    "scipy.optimize", "pydantic", "psutil", "torch.optim", "evaluate",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


class Changed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Loads one module of the kit with another text in its source."""

    def __init__(self, file: str, old: str, new: str) -> None:
        self.path = ROOT / "benchlib" / file
        self.name = f"benchlib.{file.removesuffix('.py').replace('/', '.')}"
        text = self.path.read_text()
        if text.count(old) != 1:
            raise LookupError(f"{file} has {old!r} {text.count(old)} times")
        self.text = text.replace(old, new)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_filename(self, name: str) -> str:
        return str(self.path)

    def get_data(self, path: Any) -> bytes:
        return self.text.encode()


def rank(request: dict[str, Any], number: int, folder: Path) -> None:
    """Be one rank: call the function, write down what it returns."""
    size = request["ranks"]
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place["SIMULATED_PORT"] = request["port"]
    os.environ.update({name: str(value) for name, value in place.items()})
    answer: dict[str, Any] = {}
    gc.freeze()  # to look through what was preloaded copies its pages
    faulthandler.dump_traceback_later(0.8 * request["limit_s"])
    try:
        import torch

        torch.set_num_threads(1)
        if request["change"]:
            sys.meta_path.insert(0, Changed(*request["change"]))
        here = simcuda.start(simcuda.truth(**{"devices": size, **request["truth"]})) if request["device"] else None
        module, _, function = request["function"].partition(":")
        answer["value"] = getattr(importlib.import_module(module), function)(here, folder, **request["arguments"])
    except BaseException as error:
        answer["error"] = f"{type(error).__name__}: {error}"
        answer["trace"] = traceback.format_exc()[-4000:]
    (folder / f"answer{number}.json").write_text(json.dumps(answer, default=float))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Let ranks do what a request asks for and return their answers; ranks that hang are ended."""
    with tempfile.TemporaryDirectory(prefix="simulated-") as name:
        folder, ranks = Path(name), dict[int, int]()
        request["port"] = free_port()
        for number in range(request["ranks"]):
            process = os.fork()
            if not process:
                try:
                    log = os.open(folder / f"log{number}", os.O_WRONLY | os.O_CREAT)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    rank(request, number, folder)
                finally:
                    os._exit(0)
            ranks[process] = number
        end, failed = time.monotonic() + request["limit_s"], False
        while ranks and time.monotonic() < end and not failed:
            process, _status = os.waitpid(-1, os.WNOHANG)
            if not process:
                time.sleep(0.01)
            elif process in ranks:
                number = ranks.pop(process)
                path = folder / f"answer{number}.json"
                failed = not path.exists() or "error" in json.loads(path.read_text())
        if failed and ranks:
            time.sleep(1)  # the others may tell more than that a peer is gone
        for process in ranks:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        answers = []
        for number in range(request["ranks"]):
            path = folder / f"answer{number}.json"
            log = (folder / f"log{number}").read_text(errors="replace")
            log = f"{log[:1000]} ... {log[-1000:]}"
            lost = {"error": "no answer: it crashed, hung, or was ended with a peer", "trace": log}
            answers.append(json.loads(path.read_text()) if path.exists() else lost)
        return answers


def main() -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=output, flush=True)


if __name__ == "__main__":
    main()
