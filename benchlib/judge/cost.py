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

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchlib.core import text
from benchlib.core.errors import UserError
from benchlib.judge.change import GATE_CONFIDENCE, LOG, compared, own_spread
from benchlib.judge.checks import Ask, Check, Status, Verdict, verdict_of
from benchlib.judge.foreign.readers import claim_file
from benchlib.judge.impossible.claim import ClaimFile
from benchlib.judge.machines import HOUR_S, Machine, read_machines
from benchlib.judge.prices import Asked, assign, parse
from benchlib.judge.regression import Side
from benchlib.judge.trends import demo_worth

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
NO_SAMPLES = "so few samples have no interval"


@dataclass(frozen=True)
class Estimate:
    """A number above zero with its 98% interval, whose ends lie ``below`` and ``above`` its logarithm: NaN where there is none.

    Without a number ``log`` is NaN and ``reason`` says why. Products and quotients take their factors as independent: intervals
    add up in squares.
    """

    log: float
    below: float = math.nan
    above: float = math.nan
    reason: str = ""

    @classmethod
    def exact(cls, number: float) -> "Estimate":
        return cls(math.log(number), 0.0, 0.0)

    def __mul__(self, other: "Estimate | float") -> "Estimate":
        other = other if isinstance(other, Estimate) else Estimate.exact(other)
        ends = math.hypot(self.below, other.below), math.hypot(self.above, other.above)
        return Estimate(self.log + other.log, *ends, self.reason or other.reason)

    def __truediv__(self, other: "Estimate | float") -> "Estimate":
        other = other if isinstance(other, Estimate) else Estimate.exact(other)
        return self * Estimate(-other.log, other.above, other.below, other.reason)

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
        return {"value": self.value, "low": self.low, "high": self.high, "reason": self.reason}


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

    def check(self, benchmark: str) -> Check:
        ask = Ask(f"{self.question.removesuffix('?').lower()} in {benchmark}", self.question, "target")
        status: Status = "SKIPPED" if self.certain is None else "PASS" if self.certain else "AMBIGUOUS"
        return ask.answer(status, self.sentence, gates=self.certain is not None)


@dataclass(frozen=True)
class Published:
    """A rate that a claim file states, in items per second: it stands beside what was measured and takes part in no order."""

    subject: str
    source: str
    rate: float
    usd_per_million: float | None


@dataclass(frozen=True)
class Worth:
    """The comparison of machines by price, in one benchmark. ``seconds`` and ``usd`` are what each takes for ``amount``.

    ``differences`` are parts of the work that differ, with what they are on each machine; none beats a machine of the ``front``
    in time or cost without losing in the other.
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
    published: list[Published] = field(default_factory=list)

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
            "published": [vars(item) for item in self.published],
            "answers": [vars(answer) for answer in self.answers],
            "same_work": not self.differences,
            "differences": [{"name": name, "values": values} for name, values in self.differences.items()],
        }


class Ranking:
    """The order of machines by what they take of something, from the least on; those that are not known are left out.

    ``doubt`` says why the order is not certain, ``sure`` that it is; both are '' for a single machine.
    """

    def __init__(self, machines: Sequence[Machine], amounts: Sequence[Estimate], of_runs: bool):
        available = [place for place, amount in enumerate(amounts) if amount.value is not None]
        self.order = sorted(available, key=lambda place: amounts[place].log)
        self.ratios = {place: amounts[place] / amounts[self.order[0]] for place in self.order}
        for place, ratio in self.ratios.items():
            if machines[place].rate == machines[self.order[0]].rate:  # the same runs, perhaps at another price
                self.ratios[place] = replace(ratio, below=0.0, above=0.0)
        ratios = {place: self.ratios[place] for place in self.order[1:]}
        level = [machines[place].label for place, ratio in ratios.items() if ratio.log <= ratio.below]
        self.doubt = self.sure = ""
        if any(ratio.low is None for ratio in ratios.values()):
            self.doubt = f"{text.capitalized(NO_SAMPLES)}."
        elif level:
            self.doubt = f"{text.capitalized(text.listing(level))} may be as good."
        elif ratios:
            self.sure = f"The order is certain{' as far as single runs show' * (not of_runs)}."

    def row(self, name: str, label: str, unit: str, values: list[Estimate], direction: str = "lower") -> Row:
        several = len(self.order) > 1
        return Row(name, label, unit, values, self.order[0] if several else None, several and not self.doubt, direction)


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
    return [
        index
        for index, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]


def worth(machines: Sequence[Machine], deadline_s: float | None = None) -> Worth:
    """Compare machines of one benchmark by price. ``deadline_s`` is the time that the whole work may take."""
    sides = [machine.rate for machine in machines]
    units = sorted({side.metric.unit for side in sides if isinstance(side, Side)})
    if len(units) > 1 or not units[0].endswith("/s"):
        raise UserError(f"rates of {' and '.join(units)} cannot be compared: one unit, items per second, is needed")
    items, prices = units[0].removesuffix("/s"), [machine.price.usd_per_device_hour for machine in machines]
    works = [machine.work() for machine in machines]
    differences = {
        name: [text.text(work.get(name)) or "not stated" for work in works]
        for name in dict.fromkeys(name for work in works for name in work)
        if any(work.get(name) != works[0].get(name) for work in works)
    }
    # Without a common epoch a million items of each are compared.
    epoch = None if differences else machines[0].fact("epoch_items")
    amount, size = ("an epoch", epoch) if epoch else (f"a million {items}", 1e6)
    rates, of_runs = _measured(sides)
    (flops, _), (watts, _) = (
        _measured([machine.usable(name) for machine in machines]) for name in ("flops_per_s", "power_w")
    )

    def taken(count: float, *, cost: bool) -> list[Estimate]:
        """Return the seconds, or USD, that each machine takes for so many items."""
        pairs = zip(machines, rates, strict=True)
        return [Estimate.exact(count * (machine.usd_per_s if cost else 1.0)) / rate for machine, rate in pairs]

    seconds, usd = taken(size, cost=False), taken(size, cost=True)
    time, price = Ranking(machines, seconds, of_runs), Ranking(machines, usd, of_runs)
    energy = [watt / rate * (1e6 / HOUR_S) for watt, rate in zip(watts, rates, strict=True)]
    work = [Estimate.exact(1e18 * machine.usd_per_s) / rate for machine, rate in zip(machines, flops, strict=True)]
    even = [Estimate.exact(usd) / price.ratios[place] for place, usd in enumerate(prices)]
    even[price.order[0]] = Estimate(math.log(prices[price.order[0]]), reason="the cheapest")
    effort, useful = Ranking(machines, energy, of_runs), Ranking(machines, work, of_runs)
    rows = [
        time.row("epoch_s", "Time per epoch", "s", seconds),
        time.row("rate", f"{items.capitalize()} per second", f"{items}/s", rates, "higher"),
        price.row("usd_per_epoch", "Cost per epoch", "USD", usd),
        price.row("usd_per_million", f"Cost per million {items}", "USD", taken(1e6, cost=True)),
        useful.row("usd_per_exaflop", "Cost per 1e18 useful FLOPs", "USD", work),
        effort.row("wh_per_million", f"Energy per million {items}", "Wh", energy),
        Row("break_even", "Break-even price", "USD per device hour", even, direction="none"),
    ]
    other_items = [name for name in differences if name not in SAME_ITEM]
    if other_items:  # no item is worth another one: nothing per item has a best machine
        rows = [row if row.name == "usd_per_exaflop" else replace(row, best=None, certain=False) for row in rows]
    rows = [row for row in rows if epoch or row.name not in ("epoch_s", "usd_per_epoch")]
    same_price = f"costs {{}} as much, and would cost the same at {even[price.order[1]].text('USD')} per device hour"
    answers = [
        _first(machines, time, f"{seconds[time.order[0]].text('s')} for {amount}", "fastest", "takes {} as long"),
        _first(machines, price, f"{usd[price.order[0]].text('USD')} for {amount}", "cheapest", same_price),
    ]
    if other_items:
        lasts = [Estimate.exact(1e18) / rate for rate in flops]
        answers = _per_flop(machines, Ranking(machines, lasts, of_runs), useful, lasts, work, other_items)
    open_ = "Open: the work differs or has no epochs, so no time for it is known."
    within: tuple[str, str, bool | None] = ("", open_, None)
    if deadline_s is not None and epoch:
        epochs = float(machines[0].config.get("epochs") or 1)
        times, costs = (taken(epochs * epoch, cost=cost) for cost in (False, True))
        within = _within(machines, times, costs, of_runs, f"{epochs:g} epoch{'s' * (epochs != 1)}", deadline_s)
    if deadline_s is not None:
        answers.append(Answer(f"Which is the cheapest within {amount_text(deadline_s, 's')}?", *within))
    return Worth(
        benchmark=machines[0].runs.first.benchmark,
        tier=" and ".join(dict.fromkeys(machine.runs.first.tier for machine in machines)),
        items=items,
        amount=amount,
        machines=list(machines),
        seconds=seconds,
        usd=usd,
        front=front([(first.log, second.log) for first, second in zip(seconds, usd, strict=True)]),
        differences=differences,
        rows=rows,
        answers=answers,
        notes=list(dict.fromkeys(_notes(machines, of_runs, items, bool(differences), epoch))),
    )


def _per_flop(
    machines: Sequence[Machine],
    time: Ranking,
    price: Ranking,
    seconds: Sequence[Estimate],
    usd: Sequence[Estimate],
    differing: Sequence[str],
) -> list[Answer]:
    """Compare machines whose items are different work by the FLOPs of it, where all of them are known."""
    if len(time.order) < len(machines) or len(price.order) < len(machines):
        reason = f"Open: an item is other work in {text.listing(differing)}, and not all runs state their FLOPs."
        return [Answer(f"Which is the {word}?", "", reason, None) for word in ("fastest", "cheapest")]
    amount = "1e18 useful FLOPs"
    return [
        _first(
            machines, time, f"{seconds[time.order[0]].text('s')} for {amount}", "fastest per FLOP", "takes {} as long"
        ),
        _first(
            machines, price, f"{usd[price.order[0]].text('USD')} for {amount}", "cheapest per FLOP", "costs {} as much"
        ),
    ]


def _first(machines: Sequence[Machine], ranks: Ranking, takes: str, word: str, verb: str) -> Answer:
    first, second = ranks.order[:2]
    label, other, question = machines[first].label, machines[second].label, f"Which is the {word}?"
    ratio = ranks.ratios[second]
    if (ratio.value, ratio.low, ratio.high) == (1, 1, 1):
        both = f"{label} and {other}"
        return Answer(question, both, f"{both} do not differ: {takes} each.", False)
    ends = "" if ratio.low is None else f" ({ratio.low:.3g} to {ratio.high:.3g})"
    behind = f"{other} {verb.format(f'{ratio.value:.3g} times{ends}')}"
    looks = f"{label} looks {word} ({takes}), but noise leaves it open; {behind}. {ranks.doubt}"
    sentence = looks if ranks.doubt else f"{label} is the {word}: {takes}; {behind}. {ranks.sure}"
    return Answer(question, label, sentence, not ranks.doubt)


def _within(
    machines: Sequence[Machine],
    times: Sequence[Estimate],
    costs: Sequence[Estimate],
    of_runs: bool,
    work: str,
    limit_s: float,
) -> tuple[str, str, bool]:
    """Return the cheapest of those that do the whole work in time, a sentence about it and whether that is certain."""
    limit, labels = amount_text(limit_s, "s"), [machine.label for machine in machines]
    late = [(item.value or 0.0) > limit_s for item in times]
    reach = [(item.low or item.value or 0.0, item.high or item.value or 0.0) for item in times]
    near = [labels[place] for place, (low, high) in enumerate(reach) if low <= limit_s < high]
    doubt = f" But {text.listing(near)} may or may not make it." if near else ""
    ranks = Ranking(
        machines, [Estimate(math.nan) if late[place] else cost for place, cost in enumerate(costs)], of_runs
    )
    if not ranks.order:
        first = min(range(len(times)), key=lambda place: times[place].log)
        sentence = f"None finishes {work} within {limit}: the fastest, {labels[first]}, takes {times[first].text('s')}."
        return "", sentence + doubt, not doubt
    best, s = ranks.order[0], "s" * (work == "1 epoch")
    doubt = doubt or f" But {NO_SAMPLES}." * (times[best].low is None)
    order = ranks.doubt or ranks.sure or f"No other finishes {work} in time."
    takes = f"{work} take{s} {times[best].text('s')} and cost{s} {costs[best].text('USD')}"
    sentence = f"Within {limit}, {labels[best]} is the cheapest: {takes}. {order}{doubt}"
    return labels[best], sentence, not doubt and not ranks.doubt


def _notes(machines: Sequence[Machine], of_runs: bool, items: str, differs: bool, epoch: float | None) -> Iterator[str]:
    if differs:
        item = items.removesuffix("s")
        yield f"The work differs: no time or cost per epoch is compared, and what is per {item} only where a {item} is the same work."
    elif not epoch:
        yield f"The runs do not say how many {items} an epoch has: nothing is compared per epoch."
    if not of_runs:
        yield (
            "Intervals rest on the samples within a run where no machine has three: how much runs differ "
            "from each other is not in them. Three runs of each machine show it."
        )


def worths(arguments: Iterable[str], asked: Asked, deadline_s: float | None = None) -> tuple[list[Worth], list[str]]:
    """Read the machines that the arguments name and compare them, benchmark by benchmark; return that and what is left out.

    What claim files state stands beside the runs whose items it counts.
    """
    named = {argument: claim_file(Path(argument)) for argument in arguments}
    files = {Path(argument).stem: file for argument, file in named.items() if file}
    machines, notes = read_machines(argument for argument, file in named.items() if not file)
    prices_of = {name: usd for name, usd in asked.named.items() if name in files}
    asked = replace(asked, named={name: usd for name, usd in asked.named.items() if name not in files})
    items = []
    for members in machines.values():
        prices = assign(asked, [machine.names for machine in members])
        priced = [replace(machine, price=price) for machine, price in zip(members, prices, strict=True)]
        item = worth(priced, deadline_s)
        stated = [entry for name, file in files.items() for entry in _published(file, item.items, prices_of.get(name))]
        items.append(replace(item, published=stated))
    return items, notes


def _published(file: ClaimFile, items: str, usd_per_hour: float | None) -> Iterator[Published]:
    for speed, subject in ((claim.speed, claim.subject) for claim in file.claims if claim.speed):
        rate = speed.tokens_per_s if items == "tokens" else speed.samples_per_s if speed.unit == f"{items}/s" else None
        if rate:
            usd = usd_per_hour and 1e6 * usd_per_hour * (speed.ranks or 1) / HOUR_S / rate
            yield Published(subject, file.source, rate, usd)


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
        checks += [answer.check(item.benchmark) for answer in item.answers]
    return verdict_of(checks, remedy="More runs of each machine narrow the intervals.")
