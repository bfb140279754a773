"""Machines with runs and prices: what is paid for, what their work is. The definitions stand in ``benchlib.judge.cost``."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchlib.benchmarks import spec_of
from benchlib.core.errors import UserError
from benchlib.core.text import counted
from benchlib.judge.compare import RunSet, read_kinds
from benchlib.judge.prices import Names, Price
from benchlib.judge.regression import Side, side_of
from benchlib.results.record import Record

HOUR_S = 3600.0
UNPRICED = Price(math.nan, "")
# Fields of every config that say where and by how many the work is done, and the seed: the work stays the same.
PLACE = ("nproc", "nnodes", "threads", "collective", "seed")


@dataclass(frozen=True)
class Machine:
    """Runs of one machine and kind, and what an hour of one of its devices costs."""

    label: str
    runs: RunSet
    price: Price = UNPRICED

    @property
    def first(self) -> Record:
        return self.runs.first

    def _factor(self, name: str) -> int:
        return int(self.first.fingerprint.get(name) or 1)

    @property
    def devices(self) -> int:
        """What is paid for: what the run states, else nodes of a CPU backend and ranks of others."""
        return int(self.fact("paid_devices") or self._factor("nodes" if self.first.backend == "cpu" else "world_size"))

    @property
    def device(self) -> str:
        return "whole machine" if self.first.backend == "cpu" else ", ".join(sorted(self.names.devices))

    @property
    def usd_per_s(self) -> float:
        return self.price.usd_per_device_hour * self.devices / HOUR_S

    @property
    def names(self) -> Names:
        devices, factors = self.first.device_names, self.first.fingerprint
        if self.first.backend == "cpu":
            devices = [self.first.machine.get("cpu", {}).get("model") or factors.get("cpu", "")]
        names = {self.label, self.runs.label, Path(self.runs.label).name, *(run.run for run in self.runs.runs)}
        hosts, kinds = {run.host for run in self.runs.runs}, {*(devices or [factors.get("devices", "")])}
        return Names(self.label, *(frozenset(part - {""}) for part in (names, hosts, kinds)))

    @property
    def hardware(self) -> str:
        return "; ".join(self.first.components or sorted(self.names.devices))

    def plain(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "runs": [run.run for run in self.runs.runs],
            "hardware": self.hardware,
            "devices": self.devices,
            "device": self.device,
            "usd_per_device_hour": self.price.usd_per_device_hour,
            "price_from": self.price.origin,
        }

    def usable(self, prefix: str) -> Side | str:
        """Return the metric whose name begins so, over its runs, or the reason why there are no values of it above zero."""
        listed = [metric.name for run in self.runs.runs for metric in run.metrics]
        name = next((name for name in listed if f"{name}_".startswith(f"{prefix}_")), None)
        side = side_of(self.runs.runs, name) if name else None
        if side and side.runs and side.lowest > 0:
            return side
        return (side.metric.reason if side and not side.runs else "") or f"the run has no usable {prefix}"

    @cached_property
    def rate(self) -> Side | str:
        """The items per second, or why it has none."""
        prefix = spec_of(self.first.benchmark).rate
        return self.usable(prefix) if prefix else f"{self.first.benchmark} has no rate to compare by price"

    def fact(self, name: str) -> float | None:
        """Return a number above zero that its first run states; None where it does not."""
        value = self.first.result.facts.get(name) if self.first.result else None
        return value if isinstance(value, (int, float)) and value > 0 else None

    @property
    def config(self) -> dict[str, Any]:
        """The fields of its config that change the work, from the fingerprint, which also a baseline keeps."""
        stated = self.first.fingerprint.items()
        return {name.removeprefix("config."): json.loads(text) for name, text in stated if name.startswith("config.")}

    def work(self) -> dict[str, Any]:
        """Return what its work is, by name: the config without the ways to do it, effective batch, items and scope."""
        own, config, items = spec_of(self.first.benchmark), self.config, self.fact("epoch_items")
        work: dict[str, Any] = {"items of an epoch": items}
        if (used := self.fact("samples_per_epoch")) and items and used < items:
            work["items of an epoch"] = f"{items:,.0f}, cut to {used:,.0f} by the budget"
        if sizes := [config[name] for name in own.batch if name in config]:
            work["effective batch"] = math.prod(sizes) * self._factor("world_size")
        if isinstance(self.rate, Side):
            work["scope of the rate"] = self.rate.metric.name.removeprefix(own.rate).strip("_") or "the real thing"
        work |= {name: value for name, value in config.items() if name not in (*PLACE, *own.ways, *own.batch)}
        stated = self.first.result.facts.get("precision") if self.first.result else None
        return work | ({"precision": stated} if isinstance(stated, str) else {})  # what an automatic choice came to


def read_machines(arguments: Iterable[str]) -> tuple[dict[str, list[Machine]], list[str]]:
    """Return the machines of each benchmark whose runs have a rate, in the order of the arguments, and what is left out.

    Raises ``UserError`` for an argument that cannot be read, and where no benchmark has two machines to compare.
    """
    machines, notes = dict[str, list[Machine]](), list[str]()
    for argument in arguments:
        kinds, excluded = read_kinds(argument)
        notes += [f"{argument}, excluded: {line}" for line in excluded]
        benchmarks = [runs.first.benchmark for runs in kinds]
        for runs, benchmark in zip(kinds, benchmarks, strict=True):
            alone = Path(argument).is_dir() and benchmarks.count(benchmark) == 1
            machine = Machine(Path(argument).name or argument if alone else _kind(runs), runs)
            if isinstance(machine.rate, str):
                notes.append(f"{runs.first.run}, excluded: {machine.rate}")
            else:
                machines.setdefault(benchmark, []).append(machine)
    compared = {name: _with_own_labels(members) for name, members in machines.items() if len(members) > 1}
    notes += [f"{name}: only {machines[name][0].label} has runs of it" for name in machines.keys() - compared.keys()]
    if not compared:
        needed = "two machines with runs of one benchmark that has a rate are needed"
        raise UserError(f"nothing to compare by price: {needed}; {'; '.join(notes or ['none was named'])}")
    return compared, list(dict.fromkeys(notes))


def _kind(runs: RunSet) -> str:
    """Name runs that have no folder of their own by their hardware and ranks."""
    machine = Machine("", runs)
    ranks, devices = machine._factor("world_size"), ", ".join(sorted(machine.names.devices)) or runs.first.backend
    return f"{devices}, {counted(ranks, 'rank')}" if runs.first.backend == "cpu" else f"{ranks} × {devices}"


def _with_own_labels(machines: list[Machine]) -> list[Machine]:
    """Return the machines with labels that differ: where they do not the names of runs, and where those do not with a number."""
    labels = [machine.label for machine in machines]
    names = [machine.first.run if labels.count(machine.label) > 1 else machine.label for machine in machines]
    numbers = [f" ({names[: place + 1].count(name)})" * (names.count(name) > 1) for place, name in enumerate(names)]
    return [replace(machine, label=f"{name}{end}") for machine, name, end in zip(machines, names, numbers, strict=True)]
