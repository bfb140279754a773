"""What machines are worth: runs with a rate, compared by time, price and energy, and the answers to a buyer's questions.

Definitions, for a rate R (items per second over all devices, steady state, start-up excluded), a price p (USD per device
hour), d devices, an epoch of N items, F useful FLOP/s and the power P in watts:

- time per epoch ``N / R``; USD per epoch ``p d / 3600 * N / R``; per million items the same with N = 1e6
- USD per 1e18 useful FLOPs ``p d / 3600 * 1e18 / F``; useful are those of the model's shapes, as for MFU (PaLM, appendix B)
- energy per million items ``1e6 P / R`` joules, as Wh: average power over throughput, as MLPerf Power states energy per sample
- break-even price of a machine: the p at which its items cost what those of the cheapest cost, ``p_c d_c R / (d R_c)``
- Pareto front: the machines that no other one beats in time or cost without losing in the other

The spread between runs is pooled over the machines. An order is certain where the interval of the ratio of two machines
excludes 1.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchlib.benchmarks import spec_of
from benchlib.core import text
from benchlib.core.errors import UserError
from benchlib.judge.checks import Ask, Check, Status, Verdict, verdict_of
from benchlib.judge.compare import RunSet, read_kinds
from benchlib.judge.foreign.readers import claim_file
from benchlib.judge.impossible.claim import ClaimFile
from benchlib.judge.prices import Asked, Names, Price, assign, parse
from benchlib.judge.regression import GATE_CONFIDENCE, LOG, NOTICED, Side, compared, own_spread, side_of
from benchlib.judge.trends import demo_worth
from benchlib.results.record import Record

HOUR_S = 3600.0
DEMO_USD = {"1-rank": 0.06, "2-ranks": 0.10}  # assumed, by folder: half of a machine, and all of it
# Parts of the work that leave an item what it is.
SAME_ITEM = (
    "items of an epoch",
    "effective batch",
    "epochs",
    "max_steps",
    "train_questions",
    "precision",
    "learning_rate",
)
# Fields of every config that say where and by how many the work is done, and the seed: the work stays the same.
PLACE = ("nproc", "nnodes", "threads", "collective", "seed")
UNPRICED = Price(math.nan, "")
NO_SAMPLES = "so few samples have no interval"


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
    return f"{devices}, {text.counted(ranks, 'rank')}" if runs.first.backend == "cpu" else f"{ranks} × {devices}"


def _with_own_labels(machines: list[Machine]) -> list[Machine]:
    """Return the machines with labels that differ: where they do not the names of runs, and where those do not with a number."""
    labels = [machine.label for machine in machines]
    names = [machine.first.run if labels.count(machine.label) > 1 else machine.label for machine in machines]
    numbers = [f" ({names[: place + 1].count(name)})" * (names.count(name) > 1) for place, name in enumerate(names)]
    return [replace(machine, label=f"{name}{end}") for machine, name, end in zip(machines, names, numbers, strict=True)]


@dataclass(frozen=True)
class Estimate:
    """A number above zero with its 98% interval, whose ends lie ``below`` and ``above`` its logarithm: NaN where there is none.

    Without a number ``log`` is NaN and ``reason`` says why. Quotients take their factors as independent: intervals add up in
    squares.
    """

    log: float
    below: float = math.nan
    above: float = math.nan
    reason: str = ""

    def __truediv__(self, other: "Estimate") -> "Estimate":
        ends = math.hypot(self.below, other.above), math.hypot(self.above, other.below)
        return Estimate(self.log - other.log, *ends, self.reason or other.reason)

    def __rtruediv__(self, number: float) -> "Estimate":
        return Estimate(math.log(number), 0.0, 0.0) / self

    @property
    def value(self) -> float | None:
        return _number(self.log)

    @property
    def low(self) -> float | None:
        return _number(self.log - self.below)

    @property
    def high(self) -> float | None:
        return _number(self.log + self.above)

    def ends(self, unit: str = "") -> str:
        """Write the interval; '' where there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"{amount_text(self.low, '' if unit == 'USD' else unit)} to {amount_text(self.high, unit)}"

    def text(self, unit: str) -> str:
        ends = f" ({ends})" if (ends := self.ends(unit)) else ""
        return amount_text(self.value or 0.0, unit) + ends

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("value", "low", "high", "reason")}


def _number(logarithm: float) -> float | None:
    # Rounded, so that 60 s stay 60 s through their logarithm.
    return None if math.isnan(logarithm) else float(f"{math.exp(logarithm):.12g}")


@dataclass(frozen=True)
class Row:
    """One quantity of all machines. ``best`` is the index of the best one, ``certain`` whether every other is surely worse."""

    name: str
    label: str
    unit: str
    values: list[Estimate]
    best: int | None = None
    certain: bool = False
    direction: str = "lower"

    def plain(self) -> dict[str, Any]:
        return vars(self) | {"values": [value.plain() for value in self.values]}


@dataclass(frozen=True)
class Answer:
    """A buyer's question with its answer in a sentence. ``certain`` is None where there is nothing to choose from."""

    question: str
    machine: str
    sentence: str
    certain: bool | None


@dataclass(frozen=True)
class Worth:
    """The comparison of machines by price, in one benchmark. ``seconds`` and ``usd`` are what each takes for ``amount``.

    ``differences`` are parts of the work that differ, with what they are on each machine; none beats a machine of the ``front``
    in time or cost without losing in the other. ``published`` are rates that claim files state, in items per second: they stand
    beside what was measured and take part in no order.
    """

    benchmark: str
    tier: str
    items: str
    amount: str
    machines: list[Machine]
    seconds: list[Estimate]
    usd: list[Estimate]
    front: list[int]
    differences: dict[str, list[str]]
    rows: list[Row]
    answers: list[Answer]
    notes: list[str]
    published: list[dict[str, Any]] = field(default_factory=list)

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def plain(self) -> dict[str, Any]:
        machines = [
            machine.plain() | {"seconds": seconds.plain(), "usd": usd.plain(), "front": place in self.front}
            for place, (machine, seconds, usd) in enumerate(zip(self.machines, self.seconds, self.usd, strict=True))
        ]
        stated = {name: getattr(self, name) for name in ("benchmark", "tier", "items", "amount", "notes")}
        return stated | {
            "schema_version": 1,
            "confidence": GATE_CONFIDENCE,
            "machines": machines,
            "rows": [row.plain() for row in self.rows],
            "published": self.published,
            "answers": list(map(asdict, self.answers)),
            "same_work": not self.differences,
            "differences": [{"name": name, "values": values} for name, values in self.differences.items()],
        }


class Ranking:
    """The order of machines by what they take of something, from the least on; those that are not known are left out.

    ``doubt`` says why the order is not certain, ``sure`` that it is; both are '' for a single machine.
    """

    def __init__(self, machines: Sequence[Machine], amounts: list[Estimate], of_runs: bool):
        self.labels, self.amounts = [machine.label for machine in machines], amounts
        available = [place for place, amount in enumerate(amounts) if amount.value is not None]
        self.order = sorted(available, key=lambda place: amounts[place].log)
        self.ratios = {place: amounts[place] / amounts[self.order[0]] for place in self.order}
        for place, ratio in self.ratios.items():
            if machines[place].rate == machines[self.order[0]].rate:  # the same runs, perhaps at another price
                self.ratios[place] = replace(ratio, below=0.0, above=0.0)
        ratios = {place: self.ratios[place] for place in self.order[1:]}
        level = [self.labels[place] for place, ratio in ratios.items() if ratio.log <= ratio.below]
        self.doubt = self.sure = ""
        if any(ratio.low is None for ratio in ratios.values()):
            self.doubt = f"{text.capitalized(NO_SAMPLES)}."
        elif level:
            self.doubt = f"{text.capitalized(text.listing(level))} may be as good."
        elif ratios:
            alone = "Single runs show this order: three of each would also show how much runs differ."
            self.sure = "Noise between runs does not explain the order." if of_runs else alone

    def row(
        self, name: str, label: str, unit: str, values: list[Estimate] | None = None, direction: str = "lower"
    ) -> Row:
        best = self.order[0] if self.order[1:] else None
        return Row(name, label, unit, values or self.amounts, best, best is not None and not self.doubt, direction)

    def answer(self, word: str, amount: str, unit: str, verb: str) -> Answer:
        """Say which machine is the ``word``: it takes the least, and by how much it is ahead of the second."""
        first, second = self.order[:2]
        label, other, ratio = self.labels[first], self.labels[second], self.ratios[second]
        question, takes = f"Which is the {word}?", f"{self.amounts[first].text(unit)} for {amount}"
        if (ratio.value, ratio.low, ratio.high) == (1, 1, 1):
            both = f"{label} and {other}"
            return Answer(question, both, f"{both} do not differ: {takes} each.", False)
        ends = "" if ratio.low is None else f" ({ratio.low:.3g} to {ratio.high:.3g})"
        behind = f"{other} {verb.format(f'{ratio.value:.3g} times{ends}')}"
        looks = f"{label} looks {word} ({takes}), but noise leaves it open; {behind}. {self.doubt}"
        sentence = looks if self.doubt else f"{label} is the {word}: {takes}; {behind}. {self.sure}"
        return Answer(question, label, sentence, not self.doubt)


def _measured(sides: Sequence[Side | str]) -> tuple[list[Estimate], bool]:
    """Return what runs measured on each machine, and whether its intervals hold the spread between runs."""
    runs = {place: side.readings(LOG) for place, side in enumerate(sides) if isinstance(side, Side)}
    estimates, bases = [Estimate(math.nan, reason=side if isinstance(side, str) else "") for side in sides], set[str]()
    for place, items in runs.items():
        change = compared(items, known=own_spread(*(other for at, other in runs.items() if at != place)))
        bases.add(change.basis)
        ends = (change.move - change.least, change.most - change.move) if change.basis != "none" else ()
        estimates[place] = Estimate(change.move, *ends)
    return estimates, bases == {"runs"}


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point is better than in one coordinate and no worse than in the other."""
    beaten = [any(a <= x and b <= y and (a, b) != (x, y) for a, b in points) for x, y in points]
    return [index for index, worse in enumerate(beaten) if not worse]


def worth(machines: Sequence[Machine], deadline_s: float | None = None) -> Worth:
    """Compare machines of one benchmark by price. ``deadline_s`` is the time that the whole work may take."""
    units = sorted({side.metric.unit for side in (machine.rate for machine in machines) if isinstance(side, Side)})
    if len(units) > 1 or not units[0].endswith("/s"):
        raise UserError(f"rates of {' and '.join(units)} cannot be compared: one unit, items per second, is needed")
    items, works = units[0].removesuffix("/s"), [machine.work() for machine in machines]
    differences = {
        name: [text.text(work.get(name)) or "not stated" for work in works]
        for name in dict.fromkeys(name for work in works for name in work)
        if any(work.get(name) != works[0].get(name) for work in works)
    }
    # Without a common epoch a million items of each are compared.
    epoch = None if differences else machines[0].fact("epoch_items")
    amount, size = ("an epoch", epoch) if epoch else (f"a million {items}", 1e6)
    rates, of_runs = _measured([machine.rate for machine in machines])
    flops, _ = _measured([machine.usable("flops_per_s") for machine in machines])
    watts, _ = _measured([machine.usable("power_w") for machine in machines])

    def times(count: float, rates: Sequence[Estimate] = rates) -> Ranking:
        return Ranking(machines, [count / rate for rate in rates], of_runs)

    def costs(count: float, rates: Sequence[Estimate] = rates) -> Ranking:
        pairs = zip(machines, rates, strict=True)
        return Ranking(machines, [count * machine.usd_per_s / rate for machine, rate in pairs], of_runs)

    time, price, useful = times(size), costs(size), costs(1e18, flops)
    energy = times(1e6 / HOUR_S, [rate / watt for rate, watt in zip(rates, watts, strict=True)])
    even = [machine.price.usd_per_device_hour / price.ratios[place] for place, machine in enumerate(machines)]
    even[price.order[0]] = Estimate(even[price.order[0]].log, reason="the cheapest")
    rows = [
        time.row("epoch_s", "Time per epoch", "s"),
        time.row("rate", f"{items.capitalize()} per second", f"{items}/s", rates, "higher"),
        price.row("usd_per_epoch", "Cost per epoch", "USD"),
        price.row("usd_per_million", f"Cost per million {items}", "USD", costs(1e6).amounts),
        useful.row("usd_per_exaflop", "Cost per 1e18 useful FLOPs", "USD"),
        energy.row("wh_per_million", f"Energy per million {items}", "Wh"),
        Row("break_even", "Break-even price", "USD per device hour", even, direction="none"),
    ]
    rows = [row for row in rows if epoch or row.name not in ("epoch_s", "usd_per_epoch")]
    same_price = f"costs {{}} as much, and would cost the same at {even[price.order[1]].text('USD')} per device hour"
    fastest = time.answer("fastest", amount, "s", "takes {} as long")
    answers = [fastest, price.answer("cheapest", amount, "USD", same_price)]
    if other_items := [name for name in differences if name not in SAME_ITEM]:
        # No item is worth another one: nothing per item has a best machine.
        rows = [row if row.name == "usd_per_exaflop" else replace(row, best=None, certain=False) for row in rows]
        if len(useful.order) == len(machines):
            answers = [
                times(1e18, flops).answer("fastest per FLOP", "1e18 useful FLOPs", "s", "takes {} as long"),
                useful.answer("cheapest per FLOP", "1e18 useful FLOPs", "USD", "costs {} as much"),
            ]
        else:
            why = f"Open: an item is other work in {text.listing(other_items)}, and not all runs state their FLOPs."
            answers = [Answer(answer.question, "", why, None) for answer in answers]
    if deadline_s is not None:
        within = Answer("", "", "Open: the work differs or has no epochs, so no time for it is known.", None)
        if epoch:
            epochs = float(machines[0].config.get("epochs") or 1)
            work = f"{epochs:g} epoch{'s' * (epochs != 1)}"
            pairs = list(zip(times(epochs * epoch).amounts, costs(epochs * epoch).amounts, strict=True))
            usd = [Estimate(math.nan) if (needs.value or 0.0) > deadline_s else cost for needs, cost in pairs]
            within = _within(Ranking(machines, usd, of_runs), [needs for needs, _ in pairs], work, deadline_s)
        answers.append(replace(within, question=f"Which is the cheapest within {amount_text(deadline_s, 's')}?"))
    notes = list[str]()
    if differences:
        item = items.removesuffix("s")
        only = f"only where a {item} is the same work"
        notes.append(f"The work differs: no time or cost per epoch is compared, and what is per {item} {only}.")
    elif not epoch:
        notes.append(f"The runs do not say how many {items} an epoch has: nothing is compared per epoch.")
    if not of_runs:
        notes.append(
            "Intervals rest on the samples within a run where no machine has three: how much runs differ "
            "from each other is not in them. Three runs of each machine show it."
        )
    for machine in machines:
        if (others := max(run.others for run in machine.runs.runs)) >= NOTICED:
            notes.append(
                f"Others took up to {others:.0%} of the processors of {machine.label}: its speeds are what the rest gave."
            )
    return Worth(
        benchmark=machines[0].first.benchmark,
        tier=" and ".join(dict.fromkeys(machine.first.tier for machine in machines)),
        items=items,
        amount=amount,
        machines=list(machines),
        seconds=time.amounts,
        usd=price.amounts,
        front=front([(first.log, second.log) for first, second in zip(time.amounts, price.amounts, strict=True)]),
        differences=differences,
        rows=rows,
        answers=answers,
        notes=notes,
    )


def _within(ranks: Ranking, times: Sequence[Estimate], work: str, limit_s: float) -> Answer:
    """Answer which machine does the whole work in time at the least cost; ``ranks`` are the costs of those that do."""
    limit = amount_text(limit_s, "s")
    reach = [(item.low or item.value or 0.0, item.high or item.value or 0.0) for item in times]
    near = [label for label, (low, high) in zip(ranks.labels, reach, strict=True) if low <= limit_s < high]
    doubt = f" But {text.listing(near)} may or may not make it." if near else ""
    if not ranks.order:
        first = min(range(len(times)), key=lambda place: times[place].log)
        fastest = f"the fastest, {ranks.labels[first]}, takes {times[first].text('s')}"
        return Answer("", "", f"None finishes {work} within {limit}: {fastest}.{doubt}", not doubt)
    best, s = ranks.order[0], "s" * (work == "1 epoch")
    doubt = doubt or f" But {NO_SAMPLES}." * (times[best].low is None)
    order = ranks.doubt or ranks.sure or f"No other finishes {work} in time."
    takes = f"{work} take{s} {times[best].text('s')} and cost{s} {ranks.amounts[best].text('USD')}"
    sentence = f"Within {limit}, {ranks.labels[best]} is the cheapest: {takes}. {order}{doubt}"
    return Answer("", ranks.labels[best], sentence, not doubt and not ranks.doubt)


def worths(arguments: Iterable[str], asked: Asked, deadline_s: float | None = None) -> tuple[list[Worth], list[str]]:
    """Read the machines that the arguments name and compare them, benchmark by benchmark; return that and what is left out.

    What claim files state stands beside the runs whose items it counts.
    """
    named = {argument: claim_file(Path(argument)) for argument in arguments}
    files = {Path(argument).stem: file for argument, file in named.items() if file}
    machines, notes = read_machines(argument for argument, file in named.items() if not file)
    of_runs = replace(asked, named={name: usd for name, usd in asked.named.items() if name not in files})
    items = []
    for members in machines.values():
        prices = assign(of_runs, [machine.names for machine in members])
        item = worth([replace(machine, price=usd) for machine, usd in zip(members, prices, strict=True)], deadline_s)
        stated = {name: [*_published(file, item.items, asked.named.get(name))] for name, file in files.items()}
        apart = f"states no rate in {item.items}/s, which the {item.benchmark} runs are compared by"
        notes += [f"{name}: {apart}" for name, rows in stated.items() if not rows]
        items.append(replace(item, published=[row for rows in stated.values() for row in rows]))
    return items, notes


def _published(file: ClaimFile, items: str, usd_per_hour: float | None) -> Iterator[dict[str, Any]]:
    for speed, subject in ((claim.speed, claim.subject) for claim in file.claims if claim.speed):
        rate = speed.tokens_per_s if items == "tokens" else speed.samples_per_s if speed.unit == f"{items}/s" else None
        if rate:
            usd = usd_per_hour and 1e6 * usd_per_hour * (speed.ranks or 1) / HOUR_S / rate
            yield {"subject": subject, "source": file.source, "rate": rate, "usd_per_million": usd}


def amount_text(value: float, unit: str = "") -> str:
    """Write an amount for a reader; a time in the unit that fits: ``5 h 12 min``, ``12.3 s``, ``261 ms``."""
    if unit != "s":
        return text.quantity(value, unit)
    if value < 60:
        return text.seconds(value)
    return text.duration(value).removesuffix(" 0 min").removesuffix(" 0 s")


def parse_deadline(words: str) -> float:
    """Read a deadline: ``8h``, ``90min``, ``1.5 d``, ``30s``; return seconds. ``UserError`` says which forms there are."""
    units = {"s": 1.0, "min": 60.0, "m": 60.0, "h": HOUR_S, "d": 24 * HOUR_S}
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(s|min|m|h|d)\s*", words)
    if not match or not float(match[1]):
        raise UserError(f"--deadline {words}: write a number above zero with its unit, as in 8h, 90min, 2d or 30s")
    return float(match[1]) * units[match[2]]


@dataclass(frozen=True)
class Offers:
    """Machines compared by price, a comparison for each benchmark that has a rate, and what was asked for."""

    items: list[Worth]
    runs: tuple[str, ...]
    asked: Asked
    deadline_s: float | None
    demo: bool


def read_offers(runs: str, prices: str, deadline: str) -> Offers:
    """Compare the runs that are named, lists separated by commas; '' takes the demo runs of the kit, at assumed prices.

    Raises ``UserError`` for prices or a deadline that cannot be, before any run is read.
    """
    named = tuple(part.strip() for part in runs.split(",") if part.strip())
    if prices and not named:
        raise UserError(f"prices = {prices!r} without runs: name the runs that they are for")
    asked = parse([prices] if prices else []) if named else Asked(plain=list(DEMO_USD.values()))
    chosen = named or tuple(str(demo_worth() / name) for name in DEMO_USD)
    deadline_s = parse_deadline(deadline) if deadline else None
    return Offers(worths(chosen, asked, deadline_s)[0], chosen, asked, deadline_s, demo=not named)


def judge_worth(items: Sequence[Worth]) -> Verdict:
    """Check what the comparison can be trusted for: the same work, and an order that noise does not turn."""
    checks = list[Check]()
    for item in items:
        names = ", ".join(item.differences)
        ask = Ask(f"same work in {item.benchmark}", "Did all machines do the same work?")
        reason = f"{names} differ: compared per item only" if names else "config, effective batch and items agree"
        checks.append(ask.answer("NOT_COMPARABLE" if names else "PASS", reason, gates=False))
        for answer in item.answers:
            name = f"{answer.question.removesuffix('?').lower()} in {item.benchmark}"
            status: Status = "SKIPPED" if answer.certain is None else "PASS" if answer.certain else "AMBIGUOUS"
            gates = answer.certain is not None
            checks.append(Ask(name, answer.question, "target").answer(status, answer.sentence, gates=gates))
    return verdict_of(checks, remedy="More runs of each machine narrow the intervals.")
