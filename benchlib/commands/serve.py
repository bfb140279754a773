"""``benchlib serve``: become a worker. This process is replaced by the server's, which may load torch."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def serve(options: Mapping[str, Any]) -> None:
    """Replace this process by a server with those options that were given; signals and the exit code are then its own."""
    given = {name: value for name, value in options.items() if value is not None}
    os.execv(sys.executable, [sys.executable, "-m", "benchlib.workloads.llm.server", json.dumps(given)])
