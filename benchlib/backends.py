"""Where work can run. Data only: what torch reports about each backend is asked by ``benchlib.devices``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """One kind of device.

    ``device_type`` is torch's name of it, ``collective`` the library that exchanges gradients on it, ``install`` what
    a user must do to get it.
    """

    name: str
    device_type: str
    collective: str
    visible_devices: str
    install: str


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("cpu", "cpu", "gloo", "", "every torch wheel has it"),
        Backend(
            "cuda", "cuda", "nccl", "CUDA_VISIBLE_DEVICES", "pip install torch (the CUDA wheel) and NVIDIA's driver"
        ),
        Backend(
            "rocm",
            "cuda",
            "nccl",
            "HIP_VISIBLE_DEVICES",
            "pip install torch from PyTorch's ROCm index and AMD's driver",
        ),
        Backend("mps", "mps", "gloo", "", "a Mac with Apple silicon and macOS 14 or newer"),
        Backend(
            "xpu",
            "xpu",
            "xccl",
            "ZE_AFFINITY_MASK",
            "pip install torch from PyTorch's XPU index and Intel's GPU driver",
        ),
        Backend("tpu", "xla", "xla", "TPU_VISIBLE_CHIPS", "pip install torch_xla[tpu] on a TPU machine"),
    )
}

# The types of device, by torch's names, whose tensors each collective library moves.
MOVES: dict[str, tuple[str, ...]] = {
    "gloo": ("cpu", "cuda", "mps"),  # of MPS what it shares with the CPU
    "nccl": ("cuda",),
    "xccl": ("xpu",),
    "mpi": ("cpu",),
    "ucc": ("cpu",),
    "xla": ("xla",),
}
