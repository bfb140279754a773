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
            config="benchlib.benchmarks.machine.config:MachineConfig",
            run="benchlib.benchmarks.machine.run:run",
            checks="benchlib.benchmarks.machine.judge:checks",
            limits="benchlib.benchmarks.machine.judge:limits",
            reading="benchlib.benchmarks.machine.judge:reading",
            published="benchlib.benchmarks.machine.judge:measured",
        ),
        Benchmark(
            name="squad",
            question="Does BERT fine-tuning on SQuAD learn what it should, as fast as it should?",
            notebook="10_squad.ipynb",
            config="benchlib.benchmarks.squad.config:SquadConfig",
            run="benchlib.benchmarks.squad.run:run",
            checks="benchlib.benchmarks.squad.judge:checks",
            limits="benchlib.benchmarks.squad.judge:limits",
            reading="benchlib.benchmarks.squad.judge:reading",
            published="benchlib.benchmarks.squad.judge:measured",
        ),
        Benchmark(
            name="collectives",
            question="Does the fabric deliver what was paid for, and is what it delivers right?",
            notebook="20_collectives.ipynb",
            config="benchlib.benchmarks.collectives.config:CollectivesConfig",
            run="benchlib.benchmarks.collectives.run:run",
            checks="benchlib.benchmarks.collectives.judge:checks",
            limits="benchlib.benchmarks.collectives.judge:limits",
            reading="benchlib.benchmarks.collectives.judge:reading",
            published="benchlib.benchmarks.collectives.judge:measured",
            refuse="benchlib.judge.foreign.nccl_series:refuse",
        ),
        Benchmark(
            name="parity",
            question="Does this backend compute the same, and if not, where, and does it matter?",
            notebook="40_parity.ipynb",
            config="benchlib.benchmarks.parity.config:ParityConfig",
            run="benchlib.benchmarks.parity.run:run",
            checks="benchlib.benchmarks.parity.judge:checks",
            limits="benchlib.benchmarks.parity.judge:limits",
            reading="benchlib.benchmarks.parity.judge:reading",
            refuse="benchlib.benchmarks.parity.golden:refuse",
        ),
    )
}
