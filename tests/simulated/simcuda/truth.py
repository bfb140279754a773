"""What the simulated device can do: the truth that every instrument is held against."""

from dataclasses import dataclass

FLOPS = {"float64": 2e9, "float32": 2e9, "tf32": 4e9, "bfloat16": 8e9, "float16": 8e9}


@dataclass(frozen=True)
class Truth:
    """Rates and costs of a device, slow enough that the CPU beneath keeps up: seconds of it are milliseconds of a real one.

    ``flops`` are operations per second by type of the factors. ``memory_rate``, ``host_rate`` and ``exchange_rate`` are bytes
    per second: within the memory, to and from the host, and between ranks in each direction. The host takes ``launch_s`` for an
    operation, ``wait_s`` for a wait beside the time until the device is done, ``look_s`` for a look at the clock. The first
    operation of each kind takes the device ``first_s`` longer, an exchange ``exchange_s`` beside its bytes. From ``throttled_at_s`` on (the
    host's clock begins at 1000 s) all rates of the device are multiplied by ``throttled_to``.
    """

    flops: dict[str, float]
    memory_rate: float = 3e9
    host_rate: float = 1e9
    exchange_rate: float = 1e8
    launch_s: float = 5e-6
    wait_s: float = 1e-5
    look_s: float = 1e-7
    first_s: float = 0.0
    exchange_s: float = 20e-6
    memory_bytes: int = 1 << 30
    devices: int = 1
    throttled_at_s: float = float("inf")
    throttled_to: float = 1.0
    idle_w: float = 60.0
    busy_w: float = 300.0


def truth(**changes: object) -> Truth:
    """Return the usual device with ``changes``."""
    return Truth(**{"flops": FLOPS, **changes})  # type: ignore[arg-type]
