"""XLA through PJRT: text in, arrays out. The one file that calls what jax.extend exports without promising stability.

The range of versions is held by ``benchlib.workloads.stablehlo.mlir.jax``; tried with jax 0.10.2.
Platforms are the CPU, and CUDA, ROCm and TPU where their plugins are installed (``JAX_PLATFORMS``).
"""

import contextlib
import importlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.workloads.stablehlo import mlir
from benchlib.workloads.stablehlo.manifest import Manifest

PLUGINS = {"cuda": "'jax[cuda13]'", "rocm": "'jax[rocm7-local]'", "tpu": "'jax[tpu]'"}  # what brings a platform


def simulated(devices: int) -> None:
    """Make a CPU ``devices`` devices, unless jax was used before in this process: then it has what it had."""
    with contextlib.suppress(RuntimeError):
        mlir.jax().config.update("jax_num_cpu_devices", devices)


class Xla:
    """XLA on as many devices as the program has replicas; see ``runtimes.Runtime``."""

    def __init__(self, text: str, program: Manifest, platform: str = "cpu") -> None:
        """Compile for cpu, cuda, rocm or tpu.

        Raises ``BackendUnavailable`` without the platform's plugin, ``UserError`` with fewer devices than replicas and for a
        program that XLA refuses, such as one with a custom_call that it does not have.
        """
        self.manifest, self._jax, began = program, mlir.jax(), time.perf_counter()
        backend = importlib.import_module("jax.extend.backend")
        try:
            client = backend.get_backend(platform)
        except RuntimeError as error:
            package = PLUGINS.get(platform, "jax")
            raise BackendUnavailable(f"jax has no {platform} here: pip install {package}") from error
        devices = client.local_devices()[: program.replicas]
        if len(devices) < program.replicas:
            available = f"{client.platform} has {len(devices)} devices: give both the same number"
            raise UserError(f"the program has {program.replicas} replicas and {available}")
        options = backend.get_compile_options(
            num_replicas=program.replicas, num_partitions=1, device_assignment=[device.id for device in devices]
        )
        try:
            self._program = client.compile_and_load(text, devices, options)
        except RuntimeError as error:
            raise UserError(f"XLA does not compile for {platform}: {str(error).splitlines()[0][:300]}") from error
        self.compile_s = time.perf_counter() - began
        version = f"jax {self._jax.__version__}, {client.platform_version.splitlines()[0]}"
        self.description = {"runtime": f"XLA, {version}", "platform": client.platform}
        self._places = devices
        if program.replicas > 1:
            sharding, mesh = self._jax.sharding, self._jax.sharding.Mesh(np.array(devices), ("replica",))
            whole, rows = (sharding.NamedSharding(mesh, sharding.PartitionSpec(*dims)) for dims in ((), ("replica",)))
            self._places = [rows if item.role == "input" else whole for item in program.arguments]

    def place(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """See ``Runtime``; of several replicas each gets an equal part of the rows of the inputs, and all of the rest."""
        places = self._places if self.manifest.replicas > 1 else self._places * len(arrays)
        return [self._jax.device_put(array, place) for array, place in zip(arrays, places, strict=True)]

    def run(self, placed: Sequence[Any]) -> Sequence[Any]:
        """See ``Runtime``; of several replicas the results of the first one."""
        return [by_replica[0] for by_replica in self.run_replicas(placed)]

    def run_replicas(self, placed: Sequence[Any]) -> list[list[Any]]:
        """Compute; return for each result its array on each device, ready."""
        results = self._program.execute_sharded(list(placed)).disassemble_into_single_device_arrays()
        self._jax.block_until_ready(results)
        return results  # type: ignore[no-any-return]
