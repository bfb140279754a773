"""Asks ``server.py`` for ranks with simulated devices."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_S = 120.0  # for a request that hangs
Change = tuple[str, str, str]  # a file of the kit, a text in it, and what stands there instead


class RankError(RuntimeError):
    """A rank failed: ``trace`` says where."""


@dataclass
class Stage:
    """A server that runs. Use it as a context."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls) -> "Stage":
        paths = (HERE.parents[1], HERE)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, str(HERE / "server.py")]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment))

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def answers(
        self, function: str, ranks: int = 1, change: Change | None = None, device: bool = True, truth: Any = None,
        limit_s: float = LIMIT_S, **arguments: Any,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return what each rank says: ``value``, or ``error`` and ``trace``."""
        request = {"function": function, "ranks": ranks, "change": change, "device": device, "truth": truth or {}}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({**request, "limit_s": limit_s, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        answers: list[dict[str, Any]] = json.loads(self.process.stdout.readline())
        return answers

    def values(self, function: str, **how: Any) -> list[Any]:
        """Return what each rank returned; raise ``RankError`` for the first that failed."""
        answers = self.answers(function, **how)
        failed = [answer for answer in answers if "error" in answer]
        for answer in sorted(failed, key=lambda one: one["error"].startswith("no answer")):
            raise RankError(f"{answer['error']}\n{answer['trace']}")
        return [answer["value"] for answer in answers]
