"""What machines are worth: runs with a rate, compared by time, price and energy, and the answers to a buyer's questions.

Definitions, for a rate R (items per second over all devices, steady state, start-up excluded), a price p (USD per device
hour), d devices, an epoch of N items, F useful FLOP/s and the power P in watts:

- time per epoch ``N / R``; USD per epoch ``p d / 3600 * N / R``; per million items the same with N = 1e6
- USD per 1e18 useful FLOPs ``p d / 3600 * 1e18 / F``; useful are those of the model's shapes, as for MFU (PaLM, appendix B)
- energy per million items ``1e6 P / R`` joules, as Wh: average power over throughput, as MLPerf Power states energy per sample
- break-even price of a machine: the p at which its items cost what those of the cheapest cost, ``p_c d_c R / (d R_c)``
- Pareto front: the machines that no other one beats in time or cost without losing in the other

Intervals are those of ``benchlib.judge.change`` (98%): the samples of a run are resampled, and from three runs on the spread
between runs counts. Time and cost are monotonic in the rate, so the ends of its interval give the ends of theirs; an order is
certain where the interval of the ratio of two machines excludes 1.

A device is what is paid for: of accelerators one for each rank, of a CPU backend one for each node, the whole machine.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from benchlib.core import text
from benchlib.core.errors import UserError
from benchlib.judge.change import GATE_CONFIDENCE, Estimate, Runs, change, estimate
from benchlib.judge.checks import Check, Verdict, verdict_of
from benchlib.judge.machines import HOUR_S, Machine, priced, read_machines
from benchlib.judge.prices import Asked, parse
from benchlib.judge.regression import Side
from benchlib.judge.trends import demo_worth
from benchlib.results.metrics import Direction

DEMO_USD = {"1-rank": 0.06, "2-ranks": 0.10}  # assumed, by folder: half of a machine, and all of it


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Value(_Model):
    """A number with its 98% interval, or the reason why there is none. ``low`` and ``high`` are None without interval."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    @classmethod
    def of(cls, amount: Estimate) -> "Value":
        """Return an estimate as a value."""
        spread = amount.basis != "none"
        return cls(value=amount.value, low=amount.low if spread else None, high=amount.high if spread else None)

    def ends(self, unit: str = "") -> str:
        """Write the interval; '' where there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"{amount_text(self.low, '' if unit == 'USD' else unit)} to {amount_text(self.high, unit)}"


class Row(_Model):
    """One quantity of all machines. ``best`` is the index of the best one, ``certain`` whether every other is surely worse."""

    name: str
    label: str
    unit: str
    direction: Direction
    values: list[Value]
    best: int | None = None
    certain: bool = False


class Offer(_Model):
    """A machine at its price: seconds and USD that the ``Worth.amount`` takes; ``front``: no other beats it in both."""

    label: str
    runs: list[str]
    hardware: str
    devices: int
    device: str
    usd_per_device_hour: float
    price_from: str
    seconds: Value
    usd: Value
    front: bool


class Difference(_Model):
    """A part of the work that differs, with what it is on each machine."""

    name: str
    values: list[str]


class Answer(_Model):
    """A buyer's question with its answer in a sentence. ``certain`` is None where there is nothing to choose from."""

    question: str
    machine: str
    sentence: str
    certain: bool | None


class Worth(_Model):
    """The comparison of machines by price, in one benchmark."""

    schema_version: Literal[1] = 1
    benchmark: str
    tier: str
    items: str
    amount: str
    confidence: float
    same_work: bool
    machines: list[Offer]
    differences: list[Difference]
    rows: list[Row]
    answers: list[Answer]
    notes: list[str]

    def row(self, name: str) -> Row | None:
        """Return the row of this name; None where it is not compared."""
        return next((row for row in self.rows if row.name == name), None)


class Ranking:
    """What machines, by index, take; from the least on; and how many times that of the first each further one takes.

    ``ratio`` says how many times what the second takes the first takes. ``loads`` say how busy each was: nothing that rests on a
    busy machine is certain, unless its runs show their spread.
    """

    def __init__(self, amounts: Mapping[int, Estimate], ratio: Callable[[int, int], Estimate], loads: Sequence[str]):
        self.amounts, self.order = amounts, sorted(amounts, key=lambda index: amounts[index].value)
        self.ratios = [ratio(index, self.order[0]) for index in self.order[1:]]
        pairs = zip(self.order[1:], self.ratios, strict=True)
        self.open = [index for index, ratio in pairs if ratio.basis == "none" or ratio.low <= 1]  # may be as good
        unseen = any(ratio.basis != "runs" for ratio in self.ratios)
        self.busy = [loads[index] for index in self.order if loads[index] and unseen]
        self.certain = not self.open and not self.busy

    @classmethod
    def per_item(cls, rates: Mapping[int, Runs], factors: Sequence[float], loads: Sequence[str]) -> "Ranking":
        """Rank machines by ``factor / rate``, as time and cost are of a rate."""

        def ratio(index: int, other: int) -> Estimate:
            factor = factors[index] / factors[other]
            if rates[index] == rates[other]:  # the same runs, perhaps at another price
                return Estimate(factor, factor, factor, "runs")
            return _ratio(rates[index], rates[other]).under(factor)

        return cls({index: estimate(runs).under(factors[index]) for index, runs in rates.items()}, ratio, loads)

    def sentence(self, labels: Sequence[str]) -> str:
        """Say how sure the first place is; '' where there is no second."""
        bases = {ratio.basis for ratio in self.ratios}
        if self.busy and not self.open:
            return f"The order holds for these runs, but is not certain: {text.listing(self.busy)} began on a busy machine."
        if not self.open:
            return f"The order is certain{' as far as single runs show' * ('samples' in bases)}." if bases else ""
        if "none" in bases:
            return "The order is open: so few samples have no interval."
        return f"The order is open: {text.listing([labels[index] for index in self.open])} may be as good."

    def row(
        self, name: str, label: str, unit: str, amounts: Mapping[int, Estimate] | float, reasons: Sequence[str]
    ) -> Row:
        """Return a row of the ranked amounts times a number, or of others that rank so; with a single one none is best."""
        if not isinstance(amounts, Mapping):
            amounts = {index: amount.times(amounts) for index, amount in self.amounts.items()}
        several = len(self.order) > 1
        return Row(
            name=name, label=label, unit=unit, direction="higher" if unit.endswith("/s") else "lower",
            values=[
                Value.of(amounts[index]) if index in amounts else Value(value=None, reason=reason)
                for index, reason in enumerate(reasons)
            ],
            best=self.order[0] if several else None, certain=several and self.certain,
        )  # fmt: skip


def _ratio(runs: Runs, other: Runs) -> Estimate:
    ratio = change(runs, other)
    return Estimate(ratio.value, ratio.low, ratio.high, ratio.basis)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point is better than in one coordinate and no worse than in the other."""

    return [
        index
        for index, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]


class _Comparison:
    """Machines of one benchmark with what an item takes of each, on which rows and answers rest."""

    def __init__(self, machines: Sequence[Machine]):
        self.machines = machines
        self.labels = [machine.label for machine in machines]
        self.prices = [machine.price.usd_per_device_hour for machine in machines]
        self.usd_per_s = [machine.usd_per_s for machine in machines]
        sides = [machine.rate for machine in machines if isinstance(machine.rate, Side)]
        units = sorted({side.metric.unit for side in sides})
        if len(units) > 1 or not units[0].endswith("/s"):
            raise UserError(f"rates of {' and '.join(units)} cannot be compared: one unit, items per second, is needed")
        self.items = units[0].removesuffix("/s")
        self.rates: dict[int, Runs] = {index: side.runs for index, side in enumerate(sides)}
        self.loads = [machine.load for machine in machines]
        self.time = Ranking.per_item(self.rates, [1.0] * len(machines), self.loads)
        self.cost = Ranking.per_item(self.rates, self.usd_per_s, self.loads)
        ratios = zip(self.cost.order[1:], self.cost.ratios, strict=True)
        self.even = {index: ratio.under(self.prices[index]) for index, ratio in ratios}
        works = [machine.work() for machine in machines]
        self.differences = [
            Difference(name=name, values=[text.text(work.get(name)) or "not stated" for work in works])
            for name in dict.fromkeys(name for work in works for name in work)
            if any(work.get(name) != works[0].get(name) for work in works)
        ]
        # Without a common epoch a million items of each are compared.
        self.epoch_items = None if self.differences else machines[0].fact("epoch_items")
        self.amount, self.size = f"a million {self.items}", 1e6
        if self.epoch_items:
            self.amount, self.size = "an epoch", self.epoch_items

    def rows(self) -> Iterator[Row]:
        """Return the table."""
        items, epoch, none = self.items, self.epoch_items, [""] * len(self.machines)
        if epoch:
            yield self.time.row("epoch_s", "Time per epoch", "s", epoch, none)
        rates = {index: time.under(1) for index, time in self.time.amounts.items()}
        yield self.time.row("rate", f"{items.capitalize()} per second", f"{items}/s", rates, none)
        if epoch:
            yield self.cost.row("usd_per_epoch", "Cost per epoch", "USD", epoch, none)
        yield self.cost.row("usd_per_million", f"Cost per million {items}", "USD", 1e6, none)
        if not self.differences:
            runs, reasons = self._usable("flops_per_s")
            spent = Ranking.per_item(runs, self.usd_per_s, self.loads)
            yield spent.row("usd_per_exaflop", "Cost per 1e18 useful FLOPs", "USD", 1e18, reasons)
        runs, reasons = self._usable("power_w")
        joules = {index: _ratio(watts, self.rates[index]) for index, watts in runs.items()}

        def ratio(index: int, other: int) -> Estimate:  # from the ends of both intervals, which is on the safe side
            a, b = joules[index], joules[other]
            return Estimate(a.value / b.value, a.low / b.high, a.high / b.low, "none" if b.basis == "none" else a.basis)

        used = Ranking(joules, ratio, self.loads)
        yield used.row("wh_per_million", f"Energy per million {items}", "Wh", 1e6 / HOUR_S, reasons)
        own = [Value(value=price, reason="the cheapest") for price in self.prices]
        even = [Value.of(self.even[index]) if index in self.even else value for index, value in enumerate(own)]
        unit = "USD per device hour"
        yield Row(name="break_even", label="Break-even price", unit=unit, direction="none", values=even)

    def _usable(self, metric: str) -> tuple[dict[int, Runs], list[str]]:
        """Return the samples of a metric for each machine that has them, and the reasons of those that do not."""
        sides = [machine.usable(metric) for machine in self.machines]
        runs: dict[int, Runs] = {index: side.runs for index, side in enumerate(sides) if isinstance(side, Side)}
        return runs, [side if isinstance(side, str) else "" for side in sides]

    def offers(self) -> list[Offer]:
        """Return the machines with time and cost of the amount."""
        places = range(len(self.machines))
        pairs = [
            (self.time.amounts[index].times(self.size), self.cost.amounts[index].times(self.size)) for index in places
        ]
        on_front = front([(time.value, cost.value) for time, cost in pairs])
        return [
            Offer(
                label=machine.label, runs=[run.run for run in machine.runs.runs], hardware=machine.hardware, devices=machine.devices,
                device=machine.device, usd_per_device_hour=self.prices[index], price_from=machine.price.origin,
                seconds=Value.of(pairs[index][0]), usd=Value.of(pairs[index][1]), front=index in on_front,
            )
            for index, machine in enumerate(self.machines)
        ]  # fmt: skip

    def answers(self, deadline_s: float | None) -> Iterator[Answer]:
        """Answer what a buyer asks, for a deadline of the whole work too."""
        for ranks, word, verb, unit in (
            (self.time, "fastest", "takes {} as long", "s"),
            (self.cost, "cheapest", "costs {} as much, and would cost the same at {} per device hour", "USD"),
        ):
            first, second = ranks.order[:2]
            label, other, ratio = self.labels[first], self.labels[second], ranks.ratios[0]
            question, takes = f"Which is the {word}?", _with_ends(ranks.amounts[first].times(self.size), unit)
            if ratio.low == ratio.high == 1:
                sentence = f"{label} and {other} do not differ: {takes} for {self.amount} each."
                yield Answer(question=question, machine=f"{label} and {other}", sentence=sentence, certain=False)
                continue
            even = _with_ends(self.even[second], "USD") if second in self.even else ""
            sentence = (
                f"{label} is the {word}: {takes} for {self.amount}; {other} {verb.format(_times(ratio), even)}. "
                f"{ranks.sentence(self.labels)}"
            )
            yield Answer(question=question, machine=label, sentence=sentence, certain=ranks.certain)
        if deadline_s is not None:
            yield self._within(deadline_s)

    def _within(self, deadline_s: float) -> Answer:
        """Answer for the whole work, which has the epochs of the config."""
        limit = amount_text(deadline_s, "s")

        def answer(sentence: str, certain: bool | None, machine: str = "") -> Answer:
            question = f"Which is the cheapest within {limit}?"
            return Answer(question=question, machine=machine, sentence=sentence, certain=certain)

        if not self.epoch_items:
            return answer("Open: the work differs or has no epochs, so that no machine's time for it is known.", None)
        epochs = float(self.machines[0].config.get("epochs") or 1)
        work, s = f"{epochs:g} epoch{'s' * (epochs != 1)}", "s" * (epochs == 1)
        places, items = range(len(self.machines)), epochs * self.epoch_items
        times, costs = ([ranks.amounts[index].times(items) for index in places] for ranks in (self.time, self.cost))
        inside = [index for index, time in enumerate(times) if time.value <= deadline_s]
        near = [index for index, time in enumerate(times) if time.low <= deadline_s < time.value]
        if not inside:
            first = self.time.order[0]
            sentence = f"None finishes {work} within {limit}: the fastest, {self.labels[first]}, takes {_with_ends(times[first], 's')}."
            maybe = f" {text.listing([self.labels[index] for index in near])} may just make it." if near else ""
            return answer(sentence + maybe, not near)
        ranks = Ranking.per_item({index: self.rates[index] for index in inside}, self.usd_per_s, self.loads)
        best, label = ranks.order[0], self.labels[ranks.order[0]]
        doubts = [f"{label} may miss the deadline"] if times[best].high > deadline_s else []
        cheaper = [index for index in near if costs[index].value < costs[best].value]
        doubts += [f"{self.labels[index]} would be cheaper and may make it" for index in cheaper]
        doubts += ["so few samples have no interval"] if times[best].basis == "none" else []
        sentence = (
            f"Within {limit}, {label} is the cheapest: {work} take{s} {_with_ends(times[best], 's')} and cost{s} "
            f"{_with_ends(costs[best], 'USD')}. {ranks.sentence(self.labels) or f'No other finishes {work} in time.'}"
        )
        sentence += f" But {text.listing(doubts)}." if doubts else ""
        return answer(sentence, not doubts and ranks.certain, label)

    def notes(self) -> list[str]:
        """Return what a reader has to know of prices, work and intervals."""
        notes = [machine.price.warning for machine in self.machines if machine.price.warning]
        if busy := list(filter(None, self.loads)):
            notes.append(
                f"Other work kept the processor busy when a run began: {text.listing(busy)}. It slows a run without a trace in its "
                "samples: repeat it on a quiet machine, or run it three times and more."
            )
        if self.differences:
            notes.append(
                f"The work differs, so only what is per {self.items.removesuffix('s')} is compared: no time or cost per epoch, no cost per FLOP."
            )
        elif not self.epoch_items:
            notes.append(f"The runs do not say how many {self.items} an epoch has: nothing is compared per epoch.")
        if any(time.basis != "runs" for time in self.time.amounts.values()):
            notes.append(
                "Intervals rest on the samples within a run where a machine has fewer than three: how much runs differ "
                "from each other is not in them. Three runs of each machine show it."
            )
        return list(dict.fromkeys(notes))


def worth(machines: Sequence[Machine], deadline_s: float | None = None) -> Worth:
    """Compare machines of one benchmark by price. ``deadline_s`` is the time that the whole work may take."""
    compared = _Comparison(machines)
    tiers = " and ".join(dict.fromkeys(machine.runs.first.tier for machine in machines))
    return Worth(
        benchmark=machines[0].runs.first.benchmark, tier=tiers, items=compared.items, amount=compared.amount,
        confidence=GATE_CONFIDENCE, same_work=not compared.differences, machines=compared.offers(),
        differences=compared.differences, rows=list(compared.rows()), answers=list(compared.answers(deadline_s)),
        notes=compared.notes(),
    )  # fmt: skip


def worths(arguments: Iterable[str], asked: Asked, deadline_s: float | None = None) -> tuple[list[Worth], list[str]]:
    """Read the machines that the arguments name and compare them, benchmark by benchmark; return that and what is left out."""
    compared, notes = read_machines(arguments)
    return [worth(priced(machines, asked), deadline_s) for machines in compared.values()], notes


def amount_text(value: float, unit: str = "") -> str:
    """Write an amount for a reader; a time in the unit that fits: ``5 h 12 min``, ``12.3 s``, ``261 ms``."""
    if unit != "s":
        return text.quantity(value, unit)
    if value < 60:
        return text.seconds(value)
    return text.duration(value).removesuffix(" 0 min").removesuffix(" 0 s")


def _with_ends(amount: Estimate, unit: str) -> str:
    ends = Value.of(amount).ends(unit)
    return amount_text(amount.value, unit) + (f" ({ends})" if ends else "")


def _times(ratio: Estimate) -> str:
    ends = "" if ratio.basis == "none" else f" ({ratio.low:.3g} to {ratio.high:.3g})"
    return f"{ratio.value:.3g} times{ends}"


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
    checks = []
    for item in items:
        names = ", ".join(difference.name for difference in item.differences)
        reason = f"{names} differ: compared per item only" if names else "config, effective batch and items agree"
        checks.append(Check(
            name=f"same work in {item.benchmark}", kind="sanity", question="Did all machines do the same work?",
            status="NOT_COMPARABLE" if names else "PASS", gates=False, reason=reason,
        ))  # fmt: skip
        checks += [Check(
            name=f"{answer.question.removesuffix('?').lower()} in {item.benchmark}", kind="target", question=answer.question,
            status="SKIPPED" if answer.certain is None else "PASS" if answer.certain else "AMBIGUOUS", reason=answer.sentence,
            gates=answer.certain is not None,
        ) for answer in item.answers]  # fmt: skip
    verdict, names = verdict_of(checks), ", ".join(check.name for check in checks if check.status == "AMBIGUOUS")
    if verdict.verdict != "AMBIGUOUS":
        return verdict
    # The words for one run advise what a comparison cannot do.
    return verdict.model_copy(update={"sentence": f"Open: {names}. More runs of each machine narrow the intervals."})
