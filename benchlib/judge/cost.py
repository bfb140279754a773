"""What machines are worth: runs with a rate, compared by time, price and energy, and the answers to a buyer's questions.

Definitions, for a rate R (items per second over all devices, steady state, start-up excluded), a price p (USD per device
hour), d devices, an epoch of N items, F useful FLOP/s and the power P in watts:

- time per epoch ``N / R``; USD per epoch ``p d / 3600 * N / R``; per million items the same with N = 1e6
- USD per 1e18 useful FLOPs ``p d / 3600 * 1e18 / F``; useful are those of the model's shapes, as for MFU (PaLM, appendix B)
- energy per million items ``1e6 P / R`` joules, as Wh: average power over throughput, as MLPerf Power states energy per sample
- break-even price of a machine: the p at which its items cost what those of the cheapest cost, ``p_c d_c R / (d R_c)``
- Pareto front: the machines that no other one beats in time or cost without losing in the other

All are products and quotients of what runs measured, so they are computed in logarithms, as arrays (3, machines): the value
and how far below and above it its 98% interval ends; independent intervals add up in squares. The spread between runs is
pooled over the machines. An order is certain where the interval of the ratio of two machines excludes 1.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchlib.core import text
from benchlib.core.errors import UserError
from benchlib.judge.change import GATE_CONFIDENCE, LOG, compared, own_spread
from benchlib.judge.checks import Ask, Check, Status, Verdict, verdict_of
from benchlib.judge.machines import HOUR_S, Machine, priced, read_machines
from benchlib.judge.prices import Asked, parse
from benchlib.judge.regression import Side
from benchlib.judge.trends import demo_worth

DEMO_USD = {"1-rank": 0.06, "2-ranks": 0.10}  # assumed, by folder: half of a machine, and all of it


@dataclass(frozen=True)
class Estimate:
    """A number with its 98% interval, or the reason why there is none. ``low`` and ``high`` are None without interval."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    def ends(self, unit: str = "") -> str:
        """Write the interval; '' where there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"{amount_text(self.low, '' if unit == 'USD' else unit)} to {amount_text(self.high, unit)}"

    def text(self, unit: str) -> str:
        ends = f" ({ends})" if (ends := self.ends(unit)) else ""
        return amount_text(self.value or 0.0, unit) + ends


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
    confidence: float = GATE_CONFIDENCE

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def plain(self) -> dict[str, Any]:
        content = dataclasses.asdict(dataclasses.replace(self, machines=[]))
        amounts = zip(content.pop("seconds"), content.pop("usd"), strict=True)
        takes = [{"seconds": seconds, "usd": usd} for seconds, usd in amounts]
        for place, machine in enumerate(self.machines):
            content["machines"].append(machine.plain() | takes[place] | {"front": place in self.front})
        differences = [{"name": name, "values": values} for name, values in self.differences.items()]
        del content["front"]
        return content | {"schema_version": 1, "same_work": not differences, "differences": differences}


class Ranking:
    """What machines take of something, in logarithms, and their order from the least on; NaN for one that is not known.

    ``doubt`` says why the order is not certain. Nothing that rests on a busy machine is, unless runs show their spread.
    """

    def __init__(self, machines: Sequence[Machine], amounts: np.ndarray, basis: str):
        self.amounts, self.basis, labels = amounts, basis, [machine.label for machine in machines]
        values = amounts[0]
        self.order = [int(place) for place in np.argsort(values) if not math.isnan(values[place])]
        first, others = (self.order or [0])[0], self.order[1:]
        self.ratios = _times(amounts, -amounts[[0, 2, 1], first][:, None])  # to the first
        same = [place for place in others if machines[place].rate == machines[first].rate]  # perhaps at another price
        self.ratios[1:, same] = 0.0
        level = [labels[place] for place in others if self.ratios[0, place] <= self.ratios[1, place]]
        busy = [machines[place].load for place in self.order if machines[place].load and basis != "runs"]
        self.doubt, self.sure = "", ""
        if basis == "none" and same != others:
            self.doubt = "The order is open: so few samples have no interval."
        elif level:
            self.doubt = f"The order is open: {text.listing(level)} may be as good."
        elif busy:
            began = f"{text.listing(busy)} began on a busy machine"
            self.doubt = f"The order holds for these runs, but is not certain: {began}."
        elif others:
            self.sure = f"The order is certain{' as far as single runs show' * (basis != 'runs')}."

    def estimates(self, factor: float, reasons: Sequence[str] = ()) -> list[Estimate]:
        return _estimates(_times(self.amounts, _exact(factor)), self.basis, reasons)

    def row(self, name: str, label: str, unit: str, values: list[Estimate], direction: str = "lower") -> Row:
        several = len(self.order) > 1
        return Row(name, label, unit, values, self.order[0] if several else None, several and not self.doubt, direction)


def _estimates(amounts: np.ndarray, basis: str, reasons: Sequence[str] = ()) -> list[Estimate]:
    def number(logarithm: float) -> float | None:
        # Rounded, so that 60 s stay 60 s through their logarithm.
        return None if math.isnan(logarithm) else float(f"{math.exp(logarithm):.12g}")

    without = math.nan if basis == "none" else 0.0
    return [
        Estimate(number(value), number(value - below + without), number(value + above + without), reason)
        for (value, below, above), reason in zip(amounts.T.tolist(), reasons or [""] * amounts.shape[1], strict=True)
    ]


def _levels(sides: Sequence[Side | str]) -> tuple[np.ndarray, str]:
    """Return what runs measured on each machine, NaN for one that did not, and what the intervals rest on."""
    runs = {place: side.readings(LOG) for place, side in enumerate(sides) if isinstance(side, Side)}
    levels, bases = np.full((3, len(sides)), math.nan), set[str]()
    for place, items in runs.items():
        change = compared(items, known=own_spread(*(other for at, other in runs.items() if at != place)))
        levels[:, place] = change.move, change.move - change.least, change.most - change.move
        bases.add(change.basis)
    return levels, next((basis for basis in ("none", "samples", "runs") if basis in bases), "none")


def _exact(factors: Any) -> np.ndarray:
    factors = np.log(np.atleast_1d(factors))
    return np.stack([factors, 0 * factors, 0 * factors])


def _under(amounts: np.ndarray) -> np.ndarray:
    return np.stack([-amounts[0], amounts[2], amounts[1]])


def _times(amounts: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.stack([amounts[0] + others[0], *np.hypot(amounts[1:], others[1:])])


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
    items, usd_per_s = units[0].removesuffix("/s"), _exact([machine.usd_per_s for machine in machines])
    rates, basis = _levels(sides)
    time, cost = (Ranking(machines, _times(_under(rates), by), basis) for by in (_exact(1), usd_per_s))
    works = [machine.work() for machine in machines]
    differences = {
        name: [text.text(work.get(name)) or "not stated" for work in works]
        for name in dict.fromkeys(name for work in works for name in work)
        if any(work.get(name) != works[0].get(name) for work in works)
    }
    # Without a common epoch a million items of each are compared.
    epoch = None if differences else machines[0].fact("epoch_items")
    amount, size = ("an epoch", epoch) if epoch else (f"a million {items}", 1e6)
    rows = [time.row("epoch_s", "Time per epoch", "s", time.estimates(epoch))] if epoch else []
    values = _estimates(rates, basis)
    rows.append(time.row("rate", f"{items.capitalize()} per second", f"{items}/s", values, "higher"))
    rows += [cost.row("usd_per_epoch", "Cost per epoch", "USD", cost.estimates(epoch))] if epoch else []
    rows.append(cost.row("usd_per_million", f"Cost per million {items}", "USD", cost.estimates(1e6)))
    for name, label, unit, metric, factor in (
        ("usd_per_exaflop", "Cost per 1e18 useful FLOPs", "USD", "flops_per_s", 1e18),
        ("wh_per_million", f"Energy per million {items}", "Wh", "power_w", 1e6 / HOUR_S),
    ):
        usable = [machine.usable(metric) for machine in machines]
        reasons = [side if isinstance(side, str) else "" for side in usable]
        levels, of = _levels(usable)
        amounts = _times(_under(levels), usd_per_s) if unit == "USD" else _times(levels, _under(rates))
        ranks = Ranking(machines, amounts, of if basis != "none" else basis)
        if unit != "USD" or not differences:
            rows.append(ranks.row(name, label, unit, ranks.estimates(factor, reasons)))
    prices = [machine.price.usd_per_device_hour for machine in machines]
    even = _estimates(_times(_under(cost.ratios), _exact(prices)), basis)
    even[cost.order[0]] = Estimate(prices[cost.order[0]], reason="the cheapest")
    rows.append(Row("break_even", "Break-even price", "USD per device hour", even, direction="none"))
    same_price = f"costs {{}} as much, and would cost the same at {even[cost.order[1]].text('USD')} per device hour"
    seconds, usd = time.estimates(size), cost.estimates(size)
    answers = [
        _first(machines, time, f"{seconds[time.order[0]].text('s')} for {amount}", "fastest", "takes {} as long"),
        _first(machines, cost, f"{usd[cost.order[0]].text('USD')} for {amount}", "cheapest", same_price),
    ]
    if deadline_s is not None:
        answers.append(_within(machines, time, cost, epoch, deadline_s))
    return Worth(
        benchmark=machines[0].runs.first.benchmark,
        tier=" and ".join(dict.fromkeys(machine.runs.first.tier for machine in machines)),
        items=items,
        amount=amount,
        machines=list(machines),
        seconds=seconds,
        usd=usd,
        front=front([(first.value or 0.0, second.value or 0.0) for first, second in zip(seconds, usd, strict=True)]),
        differences=differences,
        rows=rows,
        answers=answers,
        notes=list(dict.fromkeys(_notes(machines, basis, items, bool(differences), epoch))),
    )


def _first(machines: Sequence[Machine], ranks: Ranking, takes: str, word: str, verb: str) -> Answer:
    first, second = ranks.order[:2]
    label, other, question = machines[first].label, machines[second].label, f"Which is the {word}?"
    if not ranks.ratios[:, second].any():
        both = f"{label} and {other}"
        return Answer(question, both, f"{both} do not differ: {takes} each.", False)
    ratio = _estimates(ranks.ratios, ranks.basis)[second]
    ends = "" if ratio.low is None else f" ({ratio.low:.3g} to {ratio.high:.3g})"
    behind = f"{other} {verb.format(f'{ratio.value:.3g} times{ends}')}"
    sentence = f"{label} is the {word}: {takes}; {behind}. {ranks.doubt or ranks.sure}"
    return Answer(question, label, sentence, not ranks.doubt)


def _within(
    machines: Sequence[Machine], time: Ranking, cost: Ranking, epoch: float | None, deadline_s: float
) -> Answer:
    """Answer which is the cheapest within a deadline of the whole work, which has the epochs of the config."""
    limit, labels = amount_text(deadline_s, "s"), [machine.label for machine in machines]
    question = f"Which is the cheapest within {limit}?"
    if not epoch:
        unknown = "Open: the work differs or has no epochs, so that no machine's time for it is known."
        return Answer(question, "", unknown, None)
    epochs = float(machines[0].config.get("epochs") or 1)
    work, s = f"{epochs:g} epoch{'s' * (epochs != 1)}", "s" * (epochs == 1)
    times, costs = time.estimates(epochs * epoch), cost.estimates(epochs * epoch)
    late = [(item.value or 0.0) > deadline_s for item in times]
    near = [labels[place] for place, item in enumerate(times) if late[place] and (item.low or math.inf) <= deadline_s]
    ranks = Ranking(machines, np.where(late, math.nan, cost.amounts), cost.basis)
    doubts = [f"{text.listing(near)} may just make it"] if near else []
    if not ranks.order:
        first = time.order[0]
        sentence = f"None finishes {work} within {limit}: the fastest, {labels[first]}, takes {times[first].text('s')}."
        return Answer(question, "", " ".join([sentence, *(f"But {doubt}." for doubt in doubts)]), not doubts)
    best, label = ranks.order[0], labels[ranks.order[0]]
    doubts += [f"{label} may miss the deadline"] if (times[best].high or 0.0) > deadline_s else []
    doubts += ["so few samples have no interval"] if times[best].low is None else []
    sentence = (
        f"Within {limit}, {label} is the cheapest: {work} take{s} {times[best].text('s')} and cost{s} "
        f"{costs[best].text('USD')}. {ranks.doubt or ranks.sure or f'No other finishes {work} in time.'}"
    )
    sentence += f" But {text.listing(doubts)}." if doubts else ""
    return Answer(question, label, sentence, not doubts and not ranks.doubt)


def _notes(machines: Sequence[Machine], basis: str, items: str, differs: bool, epoch: float | None) -> Iterable[str]:
    yield from filter(None, (machine.price.warning for machine in machines))
    if busy := [machine.load for machine in machines if machine.load]:
        yield (
            f"Other work kept the processor busy when a run began: {text.listing(busy)}. It slows a run without a trace in its "
            "samples: repeat it on a quiet machine, or run it three times and more."
        )
    if differs:
        item = items.removesuffix("s")
        yield f"The work differs, so only what is per {item} is compared: no time or cost per epoch, no cost per FLOP."
    elif not epoch:
        yield f"The runs do not say how many {items} an epoch has: nothing is compared per epoch."
    if basis != "runs":
        yield (
            "Intervals rest on the samples within a run where no machine has three: how much runs differ "
            "from each other is not in them. Three runs of each machine show it."
        )


def worths(arguments: Iterable[str], asked: Asked, deadline_s: float | None = None) -> tuple[list[Worth], list[str]]:
    """Read the machines that the arguments name and compare them, benchmark by benchmark; return that and what is left out."""
    machines, notes = read_machines(arguments)
    return [worth(priced(members, asked), deadline_s) for members in machines.values()], notes


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
