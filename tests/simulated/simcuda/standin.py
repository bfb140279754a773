"""The parts of torch and of Python's clock that stand in front of the device: ``torch.cuda``, ``nccl``, ``time``, NVML."""

import contextlib
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from simcuda.device import Device, Memory

MOST_SLEEP_S = 0.02  # really: whoever looks again and again for what another process does sleeps no longer


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
        return torch.Stream(device=torch.device("cuda", _index(device)))


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> torch.Event:
        return torch.Event(device="cuda", enable_timing=enable_timing)


def _index(where: Any = None) -> int:
    index = where if isinstance(where, int) else where and torch.device(where).index
    return torch._C._accelerator_getDeviceIndex() if index is None else int(index)


def install(device: Device) -> None:
    """Let torch see the device, and the process its clock."""
    _cuda(device)
    _exchange()
    _clock(device)
    sys.modules["pynvml"] = nvml(device)


def _cuda(device: Device) -> None:
    truth, cuda = device.truth, torch.cuda
    properties = types.SimpleNamespace(
        name="Simulated GPU", total_memory=truth.memory_bytes, major=9, minor=0, multi_processor_count=132, is_integrated=0,
        gcnArchName="", L2_cache_size=0, uuid="00000000-0000-0000-0000-000000000000",
    )  # fmt: skip

    def memory(read: Callable[[Memory], Any]) -> Callable[..., Any]:
        return lambda where=None: read(device.memory[_index(where)])

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def fraction(share: float, where: Any = None) -> None:
        device.memory[_index(where)].limit = int(share * truth.memory_bytes)

    functions = {
        "is_available": constant(True),
        "is_initialized": constant(True),
        "init": constant(None),
        "_lazy_init": constant(None),
        "_is_in_bad_fork": constant(False),
        "device_count": constant(truth.devices),
        "current_device": _index,
        "set_device": lambda where: torch._C._accelerator_setDeviceIndex(_index(where)),
        "get_device_name": constant(properties.name),
        "get_device_properties": constant(properties),
        "get_device_capability": constant((9, 0)),
        "is_bf16_supported": constant(True),
        "is_current_stream_capturing": constant(False),
        "synchronize": lambda where=None: torch._C._accelerator_synchronizeDevice(_index(where)),
        "current_stream": lambda where=None: torch._C._accelerator_getStream(_index(where)),
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "memory_allocated": memory(lambda own: own.allocated),
        "max_memory_allocated": memory(lambda own: own.highest),
        "memory_reserved": memory(lambda own: own.reserved),
        "max_memory_reserved": memory(lambda own: own.highest_reserved),
        "mem_get_info": memory(lambda own: (own.size - own.reserved, own.size)),
        "reset_peak_memory_stats": memory(Memory.reset),
        "empty_cache": lambda: device.memory[_index()].empty(),
        "set_per_process_memory_fraction": fraction,
        "manual_seed": constant(None),
        "manual_seed_all": constant(None),
        "get_rng_state": constant(torch.get_rng_state()),
        "set_rng_state": constant(None),
    }
    for name, function in functions.items():
        setattr(cuda, name, function)
    cuda.Stream, cuda.Event = Stream, Event  # type: ignore[misc]
    cuda.nccl.version = constant((2, 28, 9))
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = constant(True)
    torch.backends.cudnn.version = constant(91300)
    torch.tensor = lifted(torch.tensor)
    _modules()
    torch.inference_mode = torch.no_grad  # type: ignore[misc, assignment]  # wrappers are no tensors of inference
    torch.Tensor.record_stream = constant(None)  # type: ignore[method-assign]


def lifted(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let ``torch.tensor`` make a tensor of the CPU and then move it, in every thread: so that the device sees it."""

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        torch._C._set_only_lift_cpu_tensors(True)
        return make(*args, **kwargs)

    return tensor


def _modules() -> None:
    """Let ``Module.to`` put other tensors in the place of parameters: the data of a wrapper cannot be set."""
    apply = torch.nn.Module._apply

    def swapping(module: Any, function: Any, recurse: bool = True) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, function, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    torch.nn.Module._apply = swapping  # type: ignore[method-assign]


def _exchange() -> None:
    """Let groups of the library nccl be groups over gloo, whose exchanges of tensors of the device are simulated."""
    c10d: Any = dist.distributed_c10d
    config, device_of_objects = c10d.BackendConfig, c10d._get_object_coll_device
    c10d._NCCL_AVAILABLE = True

    def over_gloo(backend: str) -> Any:
        return config("cpu:gloo,cuda:gloo" if str(backend) == "nccl" else backend)

    def of_objects(group: Any = None) -> str:
        return "cuda" if dist.get_backend(group) == "nccl" else str(device_of_objects(group))

    def unbound(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init(*args, **kwargs)  # groups of a bound device are split by NCCL, which gloo cannot

    init = dist.init_process_group
    c10d.BackendConfig, c10d._get_object_coll_device, dist.init_process_group = over_gloo, of_objects, unbound


def _clock(device: Device) -> None:
    """Make the host's clock the clock of this process. Only the main thread, which measures, moves it by looking at it."""
    queue, really_sleep = device.queue, time.sleep
    began = time.time() - queue.host()

    def now() -> float:
        if threading.current_thread() is threading.main_thread():
            queue.host_works(device.truth.look_s)
        return float(queue.host())

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            really_sleep(seconds)
            return
        queue.host_works(seconds)
        really_sleep(min(seconds, MOST_SLEEP_S))

    time.perf_counter, time.monotonic, time.sleep = now, now, sleep
    time.time = lambda: began + now()


def nvml(device: Device) -> Any:
    """Return a stand-in for the module pynvml, which reads the power and the energy of this process's device."""
    truth, queue = device.truth, device.queue
    began = queue.host()

    def energy_mj(handle: int) -> float:
        busy = queue.busy(handle)
        return 1e3 * (truth.idle_w * (queue.host() - began) + (truth.busy_w - truth.idle_w) * busy)

    module: Any = types.ModuleType("pynvml")
    module.NVML_TEMPERATURE_GPU = 0
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByIndex = int
    module.nvmlDeviceGetTotalEnergyConsumption = energy_mj
    module.nvmlDeviceGetPowerUsage = lambda handle: (
        1e3 * (truth.idle_w if queue.host() >= queue.done_at() else truth.busy_w)
    )
    module.nvmlDeviceGetTemperature = lambda handle, sensor: 55
    module.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=100)
    return module
