"""How threads wait for work, which OpenMP reads once, before a rank imports torch.

Two libraries' threads that spin take the cores from each other, and CPU time would count the spinning.
"""

import os
from typing import Any


def begin(config: Any) -> None:
    """Let them wait passively, unless the user chose."""
    os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY") or "PASSIVE"
