"""What the fork server of members loads, once. To be imported there and nowhere else: it ties the process to its parent.

The server ends with the rank that started it, also while a member keeps it busy, and the members end with the server.
"""

import importlib
import os

from benchlib.core.imports import importing
from benchlib.launch.processes import die_with_parent

die_with_parent(os.getppid())
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's starts its threads when it is loaded; no member computes with it
# libgomp's threads spin while they wait, which on cores that others use makes a step ten times slower.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY") or "PASSIVE"
with importing():
    for name in ("weights", "exercise", "executors", "switches", "recording", "processes"):
        importlib.import_module(f"benchlib.benchmarks.parity.{name}")
    importlib.import_module("transformers.models.bert.modeling_bert")
