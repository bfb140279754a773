"""What does the frame itself cost: everything in `benchlib run` but the work of the ranks and the import of torch?

Question: how many seconds of a run go to resolving the config, asking torch for its devices, starting notebook and
kernel, drawing, judging and rendering?

Method: `benchlib run squad` as a user starts it. From its wall time are taken the time from the launch of the ranks to
their result (``total_s`` of the result), and one import of torch, which the question about the devices needs; that
import is timed in a process of its own in the same round. The help and the import of the package are timed as well.
The smallest of the rounds is what the frame needs, the largest what a busy machine makes of it.

    python scripts/bench_frame.py --tier quick --rounds 3
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchlib.results.run import Run, find_runs


def seconds(command: list[str]) -> float:
    """Return the wall time of a command that has to succeed, in seconds."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def frame_seconds(tier: str) -> tuple[float, float, float]:
    """Return (frame, wall, import of torch) of one run, in seconds."""
    torch_s = seconds([sys.executable, "-c", "import torch"])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        wall_s = seconds([sys.executable, "-m", "benchlib.cli", "run", "squad", "--tier", tier, "--out", folder])
        result = Run(next(iter(find_runs(out)))).result
    assert result is not None
    total_s = result.value("total_s")
    assert total_s is not None
    return wall_s - total_s - torch_s, wall_s, torch_s


def main() -> None:
    """Print the rounds, then the smallest and the largest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tier", default="quick", help="tier of the run [quick]")
    parser.add_argument("--rounds", type=int, default=3, help="how often [3]")
    arguments = parser.parse_args()
    frames = []
    for number in range(arguments.rounds):
        frame_s, wall_s, torch_s = frame_seconds(arguments.tier)
        frames.append(frame_s)
        help_s = seconds([sys.executable, "-m", "benchlib.cli", "--help"])
        import_s = seconds([sys.executable, "-c", "import benchlib"])
        print(
            f"round {number + 1}: frame {frame_s:.1f} s of {wall_s:.1f} s (import of torch {torch_s:.1f} s), "
            f"--help {help_s:.2f} s, import benchlib {import_s:.2f} s"
        )
    print(f"frame: {min(frames):.1f} s at best, {max(frames):.1f} s at worst")


if __name__ == "__main__":
    main()
