"""Write the example jobs of deploy/ from the shipped profiles, as a launcher would submit them.

Question: what exactly would a cluster get?
Method: the benchmark's config and the profile go through the launcher; the folder of the run is a fixed example, so the
files change only when a config, a profile or a launcher does.

    python scripts/make_manifests.py
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchlib.config.cluster import load
from benchlib.config.schema import resolve
from benchlib.core.files import home, write_text
from benchlib.launch import services
from benchlib.launch.launchers import LAUNCHERS

# File: benchmark, tier, backend, and what is set by hand.
JOBS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "kubernetes/job-one-gpu.yaml": ("squad", "quick", "cuda", {"launcher": "kubernetes", "cluster": "gpu"}),
    "kubernetes/job-two-cpu-nodes.yaml": (
        "squad", "smoke", "cpu", {"launcher": "kubernetes", "cluster": "cpu", "nnodes": 2, "nproc": 2},
    ),
    "kubernetes/job-h100-trainjob.yaml": (
        "squad", "nightly", "cuda", {"launcher": "kubernetes", "cluster": "h100", "nnodes": 2, "nproc": 8},
    ),
    "kubernetes/job-mixed-vendors-jobset.yaml": (
        "squad", "quick", "cuda",
        {"launcher": "kubernetes", "cluster": "mixed", "nnodes": 2, "nproc": 8, "collective": "hierarchical", "balance": "auto"},
    ),
    "slurm/job.sh": ("squad", "nightly", "cuda", {"launcher": "slurm", "cluster": "slurm", "nnodes": 2, "nproc": 8}),
    "slurm/job-with-restarts.sh": (
        "squad", "nightly", "cuda",
        {"launcher": "slurm", "cluster": "slurm", "nnodes": 2, "nproc": 8, "max_restarts": 2, "checkpoint_every": 200},
    ),
    "torchx/app.py": ("squad", "smoke", "cpu", {"launcher": "torchx", "cluster": "torchx", "nnodes": 2}),
}  # fmt: skip
PYTHON = "python3"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
# Two nodes with one GPU each, whichever server they run, and the client; the prompts have MLPerf's lengths.
SERVICES: dict[str, Callable[[], str]] = {
    "kubernetes/serving-engine.yaml": lambda: services.service("engine", load("serving"), MODEL, 2),
    "kubernetes/serving-vllm.yaml": lambda: services.service("vllm", load("serving"), MODEL, 2),
    "kubernetes/serving-client.yaml": lambda: services.client(
        "serving", load("client"), ["dns+http://benchlib-engine:8000"], "nightly",
        ["concurrency=64", "max_new=128", "prompt_tokens=870", "ttft_ms=2000", "tpot_ms=100"],
    ),
    # MLPerf's own rules over the network: the tier has model and data.
    "kubernetes/inference-client.yaml": lambda: services.client(
        "inference", load("scores"), ["dns+http://benchlib-engine:8000"], "weekend",
        [f"model={MODEL}", "slots=64", "server_qps=20", "expected_qps=40"],
    ),
}  # fmt: skip


def content(name: str) -> str:
    """Return the text of one example."""
    if name in SERVICES:
        return SERVICES[name]()
    benchmark, tier, backend, values = JOBS[name]
    config = resolve(benchmark, tier, backend, values).config
    folder = Path("/outputs/example") / f"{benchmark}-{Path(name).stem}"
    job = LAUNCHERS[config.launcher](config, folder)
    # The interpreter is the one of whoever submits; the example names any.
    return job.files[job.submits].replace(sys.executable, PYTHON)


def main() -> None:
    """Write all examples."""
    for name in (*JOBS, *SERVICES):
        path = home() / "deploy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, content(name))
        print(path.relative_to(home()))


if __name__ == "__main__":
    main()
