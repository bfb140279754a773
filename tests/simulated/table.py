"""The instruments with their devices, and the synchronisations of the kit with the instrument that misses each of them."""

from dataclasses import dataclass, field
from typing import Any

from stage import RankError, Stage

NEAR = 0.01  # how far a measurement may be from the truth
FAST_MEMORY = {"memory_rate": 1e12}  # what is not about the memory takes it no time


@dataclass(frozen=True)
class Instrument:
    """A function of ``instrument_cases``: on how many ranks it runs, and on which device."""

    name: str
    ranks: int = 1
    truth: dict[str, Any] = field(default_factory=lambda: FAST_MEMORY)
    arguments: dict[str, Any] = field(default_factory=dict)

    def wrong(self, stage: Stage, change: tuple[str, str, str] | None = None) -> list[str]:
        """Return what differs from the truth, and errors; with a ``change`` of the kit's source."""
        function = f"instrument_cases:{self.name.partition(' ')[0]}"
        try:
            values = stage.values(
                function, ranks=self.ranks, truth=self.truth, change=change, limit_s=60, **self.arguments
            )
        except RankError as error:
            return [str(error).partition("\n")[0]]
        pairs = ((name, *pair) for value in values for name, pair in value.items())
        return [f"{name} is {got} and should be {true}" for name, got, true in pairs if not near(got, true)]


def near(got: Any, true: Any) -> bool:
    return bool(got == true) if not true or not isinstance(true, float | int) else abs(got / true - 1) <= NEAR


INSTRUMENTS = [
    Instrument("products", truth={"first_s": 1.0}),
    Instrument("copies", truth={"first_s": 1.0}),
    Instrument("throttled", truth={"throttled_at_s": 1002.0, "throttled_to": 0.5}),
    Instrument("phases"),
    Instrument("phases without events", arguments={"events": False}),
    Instrument("memory"),
    Instrument("training_memory"),
    Instrument("energy"),
    Instrument("executor"),
    Instrument("batch"),
    Instrument("trials"),
    Instrument("queued"),
    Instrument("answers", truth=FAST_MEMORY | {"flops": {"float32": 2e7}}),
    Instrument("all_reduce", ranks=2, truth={"exchange_s": 1e-3, "wait_s": 0.0}),
    Instrument("overlap", ranks=2),
    Instrument("operations", ranks=2),
    Instrument("direct", ranks=2),
]
BY_NAME = {instrument.name: instrument for instrument in INSTRUMENTS}


@dataclass(frozen=True)
class Removal:
    """A synchronisation of the kit: ``old`` in ``file`` becomes ``new``, and the instrument ``misses`` it.

    ``harmless`` says why nothing can miss it on this device. Those ``often`` removed are removed in every run of the tests,
    all of them by scripts/remove_synchronisations.py.
    """

    file: str
    old: str
    new: str
    misses: str = ""
    harmless: str = ""
    often: bool = False

    @property
    def change(self) -> tuple[str, str, str]:
        return self.file, self.old, self.new

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())}"


def _timed(before: str, after: str = "") -> tuple[str, str]:
    """Return a wait for the device between two texts, and the texts without it."""
    return f"{before}devices.synchronize(device)\n{after}", f"{before}pass\n{after}"


REMOVALS = [
    Removal(
        "runtime/devices.py", "torch.get_device_module(where).synchronize(where)", "pass", "products", often=True
    ),
    Removal(
        "runtime/devices.py", "torch.get_device_module(where).reset_peak_memory_stats(where)", "pass", "memory", often=True
    ),
    Removal("runtime/queued.py", "self._stream.wait_event(self._ready)", "pass", "queued"),
    Removal("runtime/queued.py", "if not self._done.wait(limit_s):", "if False:", "queued", often=True),
    Removal(
        "runtime/queued.py", "self._ended.wait()  # lets", "pass  # lets", "queued", often=True
    ),
    Removal(
        "runtime/queued.py", "with _module(self._stream).stream(self._stream) if on_stream else contextlib.nullcontext():",
        "with contextlib.nullcontext():", "queued",
    ),
    Removal("runtime/peaks.py", *_timed("    operation()\n    ", "    once"), "products", often=True),
    Removal("runtime/peaks.py", *_timed("        operation()\n    "), "products", often=True),
    Removal(
        "runtime/timing.py", "devices.synchronize(self.device)\n        return", "return", "phases without events", often=True
    ),
    Removal(
        "runtime/timing.py", "        devices.synchronize(self.device)\n\n    def seconds", "        pass\n\n    def seconds",
        "phases", often=True,
    ),
    Removal("workloads/training.py", "devices.reset_peak_memory(rank.world.device)", "pass", "training_memory", often=True),
    Removal("workloads/executors/eager.py", "devices.synchronize(self.where)", "pass", "executor"),
    Removal("workloads/largest.py", *_timed("            step()\n            "), "batch"),
    Removal(
        "workloads/largest.py", *_timed("range(STEPS):\n            "),
        harmless="the last of the two steps counts, and the wait after the first one has drained the queue",
    ),
    Removal("workloads/collective_timing.py", *_timed("thing.run()\n    "), "all_reduce", often=True),
    Removal(
        "workloads/collective_timing.py", *_timed("thing.restore()\n    "),
        harmless="the barrier behind it waits for what its own stream holds before it lets the host go on",
    ),
    Removal("workloads/collective_timing.py", "                work.wait()\n", "                pass\n", "operations", often=True),
    Removal("workloads/collective_ops.py", "        pending.wait()\n", "        pass\n", "operations"),
    Removal("workloads/collectives/exchange.py", "        work.wait()\n\n\ndef flat", "        pass\n\n\ndef flat", "direct"),
    Removal("workloads/collectives/exchange.py", "    work.wait()\n    return None", "    return None", "operations"),
]  # fmt: skip
