"""The values of a machine run under the names and conditions of the published figures."""

from benchlib.hardware.config import MachineConfig
from benchlib.placing import Measured, device_name
from benchlib.results import Run


def measured(run: Run) -> list[Measured]:
    """Return the matrix products of one device alone, by precision, and the all-reduce of the largest message."""
    config, result = run.config, run.result
    assert isinstance(config, MachineConfig) and result is not None
    device = device_name(run.machine, config.backend, config.nproc)
    found = []
    for precision in config.precisions:
        rate = result.value(f"matmul_{precision}_alone_flops")
        if rate is not None:
            label = f"matrix products in {precision}"
            found.append(Measured("matmul_flops", label, rate, device, {"precision": precision, "devices": 1}))
    rate = result.value("allreduce_gbps")
    if rate is not None:
        conditions = {
            "definition": "bus bandwidth",
            "devices": config.world_size,
            "nodes": config.nnodes,
            "message_bytes": int(max(config.allreduce_mib) * 2**20),
        }
        found.append(Measured("allreduce_gbps", "all-reduce", rate, device, conditions))
    return found
