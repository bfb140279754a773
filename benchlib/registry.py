"""The benchmarks of the kit. Adding one is a row here, a notebook and a section in the tiers that run it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Benchmark:
    """One subject. The references are ``module:name`` and are imported when used: the front never loads torch.

    ``config`` is the pydantic model of its parameters, ``run`` what each rank executes
    (``run(config, run_dir, events)``), ``checks`` the judge (``checks(run, comparison) -> list[Check]``), ``limits`` how much
    worse than the baseline its metrics may get (``limits(run) -> list[RegressionLimit]``), ``reading`` what its numbers
    say in sentences (``reading(run) -> list[str]``), ``published`` which of its values can be placed beside published
    figures (``published(run) -> list[Measured]``; '' for none), ``refuse`` what raises ``UserError`` for files that a
    valid config names and that cannot be used (``refuse(config)``; '' for none).
    """

    name: str
    question: str
    notebook: str
    config: str
    run: str
    checks: str
    limits: str
    reading: str
    published: str = ""
    refuse: str = ""

    def load(self, part: str) -> Any:
        """Import and return what one of the references names."""
        module, _, name = str(getattr(self, part)).partition(":")
        return getattr(importlib.import_module(module), name)

    def load_run(self) -> Callable[..., None]:
        """Import and return the function that a rank executes. Imports torch: for workers only."""
        return self.load("run")  # type: ignore[no-any-return]


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="machine",
            question="What is this machine, and what can it reach?",
            notebook="00_machine.ipynb",
            config="benchlib.hardware.config:MachineConfig",
            run="benchlib.hardware.run:run",
            checks="benchlib.hardware.checks:checks",
            limits="benchlib.hardware.checks:limits",
            reading="benchlib.hardware.reading:reading",
            published="benchlib.hardware.published:measured",
        ),
        Benchmark(
            name="squad",
            question="Does BERT fine-tuning on SQuAD learn what it should, as fast as it should?",
            notebook="10_squad.ipynb",
            config="benchlib.squad.config:SquadConfig",
            run="benchlib.squad.run:run",
            checks="benchlib.squad.checks:checks",
            limits="benchlib.squad.checks:limits",
            reading="benchlib.squad.reading:reading",
            published="benchlib.squad.published:measured",
        ),
        Benchmark(
            name="collectives",
            question="Does the fabric deliver what was paid for, and is what it delivers right?",
            notebook="20_collectives.ipynb",
            config="benchlib.collectives.config:CollectivesConfig",
            run="benchlib.collectives.run:run",
            checks="benchlib.collectives.checks:checks",
            limits="benchlib.collectives.checks:limits",
            reading="benchlib.collectives.reading:reading",
            published="benchlib.collectives.published:measured",
            refuse="benchlib.foreign.nccl_series:refuse",
        ),
        Benchmark(
            name="parity",
            question="Does this backend compute the same, and if not, where, and does it matter?",
            notebook="40_parity.ipynb",
            config="benchlib.parity.config:ParityConfig",
            run="benchlib.parity.run:run",
            checks="benchlib.parity.checks:checks",
            limits="benchlib.parity.checks:limits",
            reading="benchlib.parity.reading:reading",
            refuse="benchlib.parity.recorded:refuse",
        ),
    )
}
