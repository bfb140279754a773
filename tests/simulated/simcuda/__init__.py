"""A simulated CUDA device: real numbers on the CPU, an asynchronous queue, a virtual clock. No GPU, no CUDA build of torch.

    import simcuda
    here = simcuda.start(simcuda.truth(devices=2))    # before anything imports torch; once in a process

Tensors of the device ``cuda`` are wrappers around tensors of the CPU. What an operation costs follows from ``Truth``: it
costs the host the time of a launch, and the device its floating-point operations or its bytes; the host waits where CUDA
waits. The process has the host's clock: nothing that a test measures depends on the machine.

What it does not have: kernels (attention's choice, Triton, ``torch.compile``, graphs), memory of libraries and of
fragmentation, write-after-read races, NCCL's own failures.
"""

from simcuda.truth import Truth, truth

__all__ = ["Truth", "start", "truth"]

_kept: list[object] = []


def load() -> object:
    """Load what torch must find when it is imported."""
    from simcuda import build

    if not _kept:
        _kept.append(build.load())
    return _kept[0]


def start(of: Truth) -> "object":
    """Make this process one with devices; return its ``device.Device``."""
    queue = load()

    from simcuda import device, standin, tensors

    here = device.Device(queue, of)  # type: ignore[arg-type]
    _kept.append(tensors.install(here))
    standin.install(here)
    return here
