"""XLA through PJRT: text in, arrays out. The one file that calls what jax.extend exports without promising stability.

The range of versions is held by ``benchlib.core.mlir.jax``; tried with jax 0.10.2.
Platforms are the CPU, and CUDA, ROCm and TPU where their plugins are installed (``JAX_PLATFORMS``).
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchlib.core import mlir
from benchlib.core.errors import BackendUnavailable, UserError

PLUGINS = {"cuda": "'jax[cuda13]'", "rocm": "'jax[rocm7-local]'", "tpu": "'jax[tpu]'"}  # what brings a platform


def simulated(devices: int) -> None:
    """Make a CPU ``devices`` devices. Raises ``UserError`` where jax was used before in this process with fewer."""
    module = mlir.jax()
    try:
        module.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        if len(module.devices()) < devices:
            words = "simulated devices must be asked for before jax is first used in a process"
            raise UserError(f"{devices} {words}") from error


class Program:
    """A compiled module on as many devices as it has replicas."""

    def __init__(self, text: str | bytes, replicas: int = 1, platform: str = "cpu") -> None:
        """Compile for cpu, cuda, rocm or tpu.

        Raises ``BackendUnavailable`` without the platform's plugin, ``UserError`` with fewer devices than replicas.
        """
        self._jax = mlir.jax()
        backend = importlib.import_module("jax.extend.backend")
        try:
            client = backend.get_backend(platform)
        except RuntimeError as error:
            package = PLUGINS.get(platform, "jax")
            raise BackendUnavailable(f"jax has no {platform} here: pip install {package}") from error
        self.platform, self.devices = client.platform, client.local_devices()[:replicas]
        if len(self.devices) < replicas:
            there = f"{self.platform} has {len(self.devices)} devices: give both the same number"
            raise UserError(f"the program has {replicas} replicas and {there}")
        options = backend.get_compile_options(
            num_replicas=replicas, num_partitions=1, device_assignment=[device.id for device in self.devices]
        )
        self._program = client.compile_and_load(text, self.devices, options)
        self.version = f"jax {self._jax.__version__}, {client.platform_version.splitlines()[0]}"
        if replicas > 1:
            mesh = self._jax.sharding.Mesh(np.array(self.devices), ("replica",))
            spec = self._jax.sharding.PartitionSpec
            self._same = self._jax.sharding.NamedSharding(mesh, spec())
            self._apart = self._jax.sharding.NamedSharding(mesh, spec("replica"))

    def place(self, array: np.ndarray, apart: bool = False) -> Any:
        """Put an array on the devices: whole on each, or ``apart``, an equal part of its rows on each."""
        if len(self.devices) == 1:
            return self._jax.device_put(array, self.devices[0])
        return self._jax.device_put(array, self._apart if apart else self._same)

    def run(self, placed: Sequence[Any]) -> list[list[Any]]:
        """Compute; return for each result its array on each device, ready."""
        made = self._program.execute_sharded(list(placed)).disassemble_into_single_device_arrays()
        self._jax.block_until_ready(made)
        return made  # type: ignore[no-any-return]

    def compiled_text(self) -> str:
        """Return what the compiler made of it (HLO after optimisation)."""
        return "\n".join(module.to_string() for module in self._program.hlo_modules())
