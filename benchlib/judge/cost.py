"""What machines are worth: runs with a rate, compared by time, price and energy, and the answers to a buyer's questions.

Definitions, for a rate R (items per second over all devices, steady state, start-up excluded), a price p (USD per device
hour), d devices, an epoch of N items and the energy E in joules of n items, both over the same time:

- time per epoch ``N / R``; USD per epoch ``p d / 3600 * N / R``; per million items the same with N = 1e6
- energy per million items ``1e6 E / n`` joules, as Wh, as MLPerf Power states energy per sample
- break-even price of a machine: the p at which its items cost what those of the cheapest cost, ``p_c d_c R / (d R_c)``
- Pareto front: the machines that no other one beats in time or cost without losing in the other

The spread between runs is pooled over the machines; of single runs it is assumed. An order is certain where the interval of the ratio of two machines
excludes 1. Prices are those that a buyer gives, or those of the price sheet ``params/prices.yaml``.

Notation: M machines. Estimates are arrays (3, M): values above zero and the ends of their 98% intervals, NaN where not known.
"""

import datetime
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from benchlib.benchmarks import spec_of
from benchlib.core import text
from benchlib.core.errors import UserError, explained
from benchlib.core.files import home, read_yaml
from benchlib.judge.checks import Ask, Check, Status, Verdict, verdict_of
from benchlib.judge.compare import RunSet, read_argument
from benchlib.judge.references import Strict, registry
from benchlib.judge.regression import LOG, Side, compared, default_spread, own_spread, side_of
from benchlib.results.record import Record

HOUR_S = 3600.0
DEMO = "notebooks/demo-worth"  # of the kit: real runs of the same work, a folder for each number of ranks
DEMO_RUNS, DEMO_USD = ("1-rank", "2-ranks"), "0.06,0.10"  # assumed: half of a machine, and all of it
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

Kind = Literal["on-demand", "spot"]
KINDS: tuple[Kind, ...] = get_args(Kind)
USD = TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)])


class Entry(Strict):
    """A provider's price of one device, as it stood on its page on ``date``. ``device`` is an id of the references."""

    device: str
    kind: Kind
    usd_per_device_hour: float = Field(gt=0)
    provider: str = Field(min_length=1)
    source: str = Field(pattern="^https://.+")
    date: datetime.date


class Sheet(Strict):
    prices: tuple[Entry, ...]


def listed_price(devices: Iterable[str], kind: Kind = "on-demand") -> tuple[float, str] | None:
    """Return the least price of the sheet for a device, by the name that torch reports, and its source; None without one."""
    ids = {name for device in devices for name in registry().devices_of(device)}
    fitting = [entry for entry in offers(kind) if entry.device in ids]
    if not fitting:
        return None
    entry = min(fitting, key=lambda entry: entry.usd_per_device_hour)
    several = f", the least of {len(fitting)}" * (len(fitting) > 1)
    return entry.usd_per_device_hour, f"{entry.provider}, {entry.kind}, {entry.date}{several}"


def offers(kind: Kind) -> list[Entry]:
    """Read the entries of a kind in ``params/prices.yaml``; ``UserError`` names the first thing that is wrong in it."""
    path = home() / "params" / "prices.yaml"
    try:
        return [entry for entry in Sheet.model_validate(read_yaml(path)).prices if entry.kind == kind]
    except ValidationError as error:
        raise UserError(f"{path}: {explained(error, Sheet)}") from None


def parse(prices: str) -> list[float | Kind]:
    """Read ``3.20,on-demand``: for each side a price or the kind of a listed one; ``UserError`` for others."""
    try:
        return [part if part in KINDS else USD.validate_python(part) for part in map(str.strip, prices.split(","))]
    except ValidationError:
        forms = f"for each side, in their order, 3.20 (USD per device hour, above zero), {' or '.join(KINDS)}"
        raise UserError(f"--cost {prices}: write {forms}, separated by commas") from None


@dataclass(frozen=True)
class Machine:
    """Runs of one machine and kind, and what an hour of one of its devices costs: a price, or the kind of a listed one."""

    label: str
    runs: RunSet
    asked: float | Kind

    @property
    def first(self) -> Record:
        return self.runs.first

    def _factor(self, name: str) -> int:
        return int(self.first.fingerprint.get(name) or 1)

    @property
    def devices(self) -> int:
        """What is paid for: what the run states, else the servers that it asked, nodes of a CPU backend and ranks of others."""
        here = self._factor("nodes" if self.first.backend == "cpu" else "world_size")
        return int(self.fact("paid_devices") or len(self.config.get("workers") or ()) or here)

    @property
    def models(self) -> list[str]:
        """The names of its devices, as torch reports them, or of its processor."""
        if self.first.backend == "cpu":
            return [self.first.machine.get("cpu", {}).get("model") or self.first.fingerprint.get("cpu", "")]
        return sorted({*self.first.device_names} or {self.first.fingerprint.get("devices", "")})

    @cached_property
    def price(self) -> tuple[float, str]:
        """USD per device hour, and its source. Raises ``UserError`` where the sheet has none for its device."""
        if isinstance(self.asked, float):
            return self.asked, "given"
        if listed := listed_price(self.models, self.asked):
            return listed
        names = ", ".join(sorted({entry.device for entry in offers(self.asked)})) or "nothing"
        remedy = f"give it with --cost (USD per device hour); params/prices.yaml has prices {self.asked} of {names}"
        raise UserError(f"no price for {self.label} ({' and '.join(self.runs.machines)}): {remedy}")

    def plain(self) -> dict[str, Any]:
        device = "whole machine" if self.first.backend == "cpu" else ", ".join(self.models)
        price = dict(zip(("usd_per_device_hour", "price_from"), self.price, strict=True))
        hardware = " and ".join(self.runs.machines)
        parts = {"label": self.label, "hardware": hardware, "devices": self.devices, "device": device}
        return parts | price | {"runs": self.runs.names}

    def side(self, prefix: str) -> Side | None:
        """Return the metric whose name begins so, over its runs; None for '' and where there are no values of it above zero."""
        listed = [metric.name for run in self.runs.runs for metric in run.metrics if prefix]
        name = next((name for name in listed if f"{name}_".startswith(f"{prefix}_")), None)
        side = side_of(self.runs.runs, name) if name else None
        return side if side and side.runs and side.lowest > 0 else None

    @cached_property
    def rate(self) -> Side | None:
        """The items per second."""
        return self.side(spec_of(self.first.benchmark).rate)

    def fact(self, name: str) -> float | None:
        """Return a number above zero that its first run states; None where it does not."""
        value = self.first.result.facts.get(name) if self.first.result else None
        return value if isinstance(value, (int, float)) and value > 0 else None

    @property
    def config(self) -> dict[str, Any]:
        """The fields of its config that change the work, from the fingerprint, which also a baseline keeps."""
        stated = self.first.fingerprint.items()
        return {name.removeprefix("config."): json.loads(value) for name, value in stated if name.startswith("config.")}

    def work(self) -> dict[str, Any]:
        """Return what its work is, by name: the config without the ways to do it, effective batch, items and scope."""
        own, config = spec_of(self.first.benchmark), self.config
        work: dict[str, Any] = {"items of an epoch": self.fact("epoch_items")}
        if sizes := [config[name] for name in own.batch if name in config]:
            work["effective batch"] = math.prod(sizes) * self._factor("world_size")
        work |= {name: value for name, value in config.items() if name not in (*PLACE, *own.ways, *own.batch)}
        stated = self.first.result.facts.get("precision") if self.first.result else None
        return work | ({"precision": stated} if isinstance(stated, str) else {})  # what an automatic choice came to


def read_machines(
    arguments: Sequence[str], prices: Sequence[float | Kind]
) -> tuple[dict[str, list[Machine]], list[str]]:
    """Return the machines of each benchmark whose runs have a rate, in the order of the arguments, and what is left out.

    Raises ``UserError`` for an argument that cannot be read, too few or too many prices (one kind of listed ones is for all), a
    machine without a price, and where no benchmark has two machines to compare.
    """
    if len({*arguments}) < len(arguments):
        raise UserError("a side is named twice: its runs would count twice; name each once")
    machines, notes = dict[str, list[Machine]](), list[str]()
    labels = [Path(argument).name or argument for argument in arguments]
    if len({*labels}) < len(labels):
        labels = list(arguments)
    if len(prices) == 1 and prices[0] in KINDS:
        prices = [*prices] * len(arguments)
    if len(prices) != len(arguments):
        count = f"{text.counted(len(prices), 'price')} for {text.counted(len(arguments), 'side')}"
        raise UserError(f"--cost gives {count}: give one for each, in this order: {', '.join(labels)}")
    for label, argument, price in zip(labels, arguments, prices, strict=True):
        sides, excluded = read_argument(argument)
        notes += [f"{argument}, excluded: {line}" for line in excluded]
        for benchmark, runs in sides.items():
            machine = Machine(label, runs, price)
            if machine.rate is None:
                notes.append(f"{runs.first.run}, excluded: {benchmark} has no rate to compare by price")
            elif machine.price:  # an error where it has none
                machines.setdefault(benchmark, []).append(machine)
    compared = {name: members for name, members in machines.items() if len(members) > 1}
    notes += [f"{name}: only {machines[name][0].label} has runs of it" for name in machines.keys() - compared.keys()]
    if not compared:
        needed = "two machines with runs of one benchmark that has a rate are needed"
        raise UserError(f"nothing to compare by price: {needed}; {'; '.join(notes or ['none was named'])}")
    return compared, list(dict.fromkeys(notes))


Estimates = np.ndarray
Worth = dict[str, Any]


def inverse(estimates: Estimates) -> Estimates:
    return 1 / estimates[[0, 2, 1]]


def ratio(over: Estimates, under: Estimates) -> Estimates:
    """Divide independent estimates: the logarithms of their intervals add up in squares."""
    below = np.hypot(np.log(over[0] / over[1]), np.log(under[2] / under[0]))
    above = np.hypot(np.log(over[2] / over[0]), np.log(under[0] / under[1]))
    return over[0] / under[0] * np.exp([np.zeros_like(below), -below, above])


def measured(machines: Sequence[Machine], prefix: str) -> tuple[Estimates, bool]:
    """Return what runs measured on each machine, and whether its intervals hold the spread between runs.

    Where no machine has several runs to tell it, that of speeds is assumed as the gate assumes it.
    """
    sides = {place: side for place, machine in enumerate(machines) if (side := machine.side(prefix))}
    runs = {place: side.readings(LOG) for place, side in sides.items()}
    estimates, bases, alone = np.full((3, len(machines)), math.nan), set[str](), own_spread(*runs.values()) is None
    for place, items in runs.items():
        default = default_spread(sides[place].metric, None, LOG, sides[place].others) if alone else None
        of_others = own_spread(*(other for at, other in runs.items() if at != place))
        change = compared(items, known=of_others, default=default)
        bases.add(change.basis)
        ends = (change.least, change.most) if change.basis != "none" else (math.nan, math.nan)
        estimates[:, place] = np.exp([change.move, *ends])
    return estimates, bases == {"runs"}


def ranked(labels: Sequence[str], amounts: Estimates) -> tuple[list[int], str]:
    """Return the indices from the least amount on, those that are not known left out, and why this order is not certain."""
    order = [place for place in np.argsort(amounts[0]).tolist() if not math.isnan(amounts[0, place])]
    lows = ratio(amounts[:, order[1:]], amounts[:, order[:1]])[1].tolist()
    if any(map(math.isnan, lows)):
        return order, "So few samples have no interval."
    level = [labels[place] for place, low in zip(order[1:], lows, strict=True) if low <= 1]
    return order, f"{text.capitalized(text.listing(level))} may be as good." if level else ""


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point is better than in one coordinate and no worse than in the other."""
    beaten = [any(a <= x and b <= y and (a, b) != (x, y) for a, b in points) for x, y in points]
    return [index for index, worse in enumerate(beaten) if not worse]


def plain(estimates: Estimates) -> list[dict[str, float | None]]:
    """Return estimates as JSON has them: ``value``, ``low`` and ``high`` of each machine, None where not known."""
    rows = [[None if math.isnan(end) else end for end in column] for column in estimates.T.tolist()]
    return [dict(zip(("value", "low", "high"), row, strict=True)) for row in rows]


def worth(machines: Sequence[Machine], deadline_s: float | None = None) -> Worth:
    """Compare machines of one benchmark by price; return the comparison as JSON has it.

    ``deadline_s`` is the time that the whole work may take. ``seconds`` and ``usd`` are what each machine takes for the ``amount``,
    ``differences`` the parts of the work that differ, with what they are on each. No machine beats one of the ``front`` in time or
    cost without losing in the other. Of a row, ``best`` is the index of the best machine, and it is ``certain`` where every other
    is surely worse; of an answer, None is where there is nothing to choose from.
    """
    units, labels = sorted({it.rate.metric.unit for it in machines if it.rate}), [it.label for it in machines]
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
    own = spec_of(machines[0].first.benchmark)
    rates, of_runs = measured(machines, own.rate)
    joules, _ = measured(machines, own.energy)
    prices = np.array([machine.price[0] for machine in machines])
    per_s = prices * [machine.devices for machine in machines] / HOUR_S
    time, each = size * inverse(rates), inverse(rates) * per_s
    usd = size * each
    cheapest, dearer = ranked(labels, usd)[0][:2]
    break_even = prices * inverse(ratio(usd, usd[:, [cheapest]]))
    break_even[1:, cheapest] = math.nan
    # No item is worth another one: nothing per item has a best machine.
    other_items = [name for name in differences if name not in SAME_ITEM]

    def row(name: str, label: str, unit: str, values: Estimates, least: Estimates | None) -> dict[str, Any]:
        order, doubt = ([], "") if other_items or least is None else ranked(labels, least)
        best = order[0] if order[1:] else None
        parts = {"name": name, "label": label, "unit": unit, "values": plain(values)}
        return parts | {"best": best, "certain": best is not None and not doubt}

    energy, title = joules * 1e6 / HOUR_S, items.capitalize()
    rows = [
        row("rate", f"{title} per second", f"{items}/s", rates, time),
        row("usd_per_million", f"Cost per million {items}", "USD", 1e6 * each, each),
        row("wh_per_million", f"Energy per million {items}", "Wh", energy, energy),
        row("break_even", "Break-even price", "USD per device hour", break_even, None),
    ]
    if epoch:
        rows.insert(0, row("epoch_s", "Time per epoch", "s", time, time))
        rows.insert(2, row("usd_per_epoch", "Cost per epoch", "USD", usd, usd))
    if other_items:
        why = f"Open: an item is other work in {text.listing(other_items)}."
        answers = [_answer(f"Which is the {word}?", "", why, None) for word in ("fastest", "cheapest")]
    else:
        price = f"would cost the same at {written(break_even[:, dearer], 'USD')} per device hour"
        answers = [
            _least(labels, of_runs, "fastest", time, amount, "s", "takes {} as long"),
            _least(labels, of_runs, "cheapest", usd, amount, "USD", f"costs {{}} as much, and {price}"),
        ]
    if deadline_s is not None:
        epochs = float(machines[0].config.get("epochs") or 1)
        answers.append(_within(labels, of_runs, time * epochs if epoch else None, per_s, epochs, deadline_s))
    return {
        "benchmark": machines[0].first.benchmark,
        "tier": " and ".join(dict.fromkeys(machine.first.tier for machine in machines)),
        "items": items,
        "amount": amount,
        "machines": [machine.plain() for machine in machines],
        "seconds": plain(time),
        "usd": plain(usd),
        "front": [labels[place] for place in front([*zip(time[0], usd[0], strict=True)])],
        "differences": differences,
        "rows": rows,
        "answers": answers,
        "notes": [words for machine in machines for words in machine.runs.notes(machine.label)],
    }


def _answer(question: str, machine: str, sentence: str, certain: bool | None) -> dict[str, Any]:
    return {"question": question, "machine": machine, "sentence": sentence, "certain": certain}


def _sure(of_runs: bool) -> str:
    alone = "Single runs show this order, with an assumed spread between runs: three of each would measure it."
    return "Noise between runs does not explain the order." if of_runs else alone


def _least(
    labels: Sequence[str], of_runs: bool, word: str, amounts: Estimates, amount: str, unit: str, behind: str
) -> dict[str, Any]:
    """Say which machine is the ``word``: it takes the least, and by how much it is ahead of the second."""
    (best, second, *_), doubt = ranked(labels, amounts)
    value, low, high = ratio(amounts[:, second], amounts[:, best]).tolist()
    takes = f"{written(amounts[:, best], unit)} for {amount}"
    times = f"{value:.3g} times" + ("" if math.isnan(low) else f" ({low:.3g} to {high:.3g})")
    label, behind = labels[best], f"{labels[second]} {behind.format(times)}"
    sentence = f"{label} is the {word}: {takes}; {behind}. {_sure(of_runs)}"
    if doubt:
        sentence = f"{label} looks {word} ({takes}), but noise leaves it open; {behind}. {doubt}"
    return _answer(f"Which is the {word}?", label, sentence, not doubt)


def _within(
    labels: Sequence[str], of_runs: bool, time: Estimates | None, per_s: np.ndarray, epochs: float, limit_s: float
) -> dict[str, Any]:
    """Answer which machine does all epochs in time at the least cost."""
    limit = amount_text(limit_s, "s")
    question, work = f"Which is the cheapest within {limit}?", f"{epochs:g} epoch{'s' * (epochs != 1)}"
    if time is None:
        return _answer(question, "", "Open: the work differs or has no epochs, so no time for it is known.", None)
    near = [label for label, (_, low, high) in zip(labels, time.T, strict=True) if low <= limit_s < high]
    doubt = f" But {text.listing(near)} may or may not make it." if near else ""
    usd = np.where(time[0] > limit_s, math.nan, time * per_s)
    order, unsure = ranked(labels, usd)
    if not order:
        fastest = ranked(labels, time)[0][0]
        why = f"the fastest, {labels[fastest]}, takes {written(time[:, fastest], 's')}"
        return _answer(question, "", f"None finishes {work} within {limit}: {why}.{doubt}", not doubt)
    label, best = labels[order[0]], order[0]
    takes = f"{written(time[:, best], 's')} and {written(usd[:, best], 'USD')} for {work}"
    why = unsure or (_sure(of_runs) if order[1:] else "No other finishes in time.")
    sentence = f"Within {limit}, {label} is the cheapest: {takes}. {why}{doubt}"
    return _answer(question, label, sentence, not doubt and not unsure)


def worths(
    arguments: Sequence[str], prices: Sequence[float | Kind], deadline_s: float | None = None
) -> tuple[list[Worth], list[str]]:
    """Read the machines that the arguments name and compare them, benchmark by benchmark; return that and what is left out."""
    machines, notes = read_machines(arguments, prices)
    return [worth(members, deadline_s) for members in machines.values()], notes


def amount_text(value: float, unit: str = "") -> str:
    """Write an amount for a reader; a time in the unit that fits: ``5 h 12 min``, ``12.3 s``, ``261 ms``."""
    if unit != "s":
        return text.quantity(value, unit)
    if value < 60:
        return text.seconds(value)
    return text.duration(value).removesuffix(" 0 min").removesuffix(" 0 s")


def interval_text(low: float, high: float, unit: str = "") -> str:
    return f"{amount_text(low, '' if unit == 'USD' else unit)} to {amount_text(high, unit)}"


def written(estimate: np.ndarray, unit: str) -> str:
    """Write the estimate of one machine with its interval, where there is one."""
    value, low, high = estimate.tolist()
    return amount_text(value, unit) + ("" if math.isnan(low) else f" ({interval_text(low, high, unit)})")


def parse_deadline(words: str) -> float:
    """Read a deadline: ``8h``, ``90min``, ``1.5 d``, ``30s``; return seconds. ``UserError`` says which forms there are."""
    units = {"s": 1.0, "min": 60.0, "h": HOUR_S, "d": 24 * HOUR_S}
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(s|min|h|d)\s*", words)
    if not match or not float(match[1]):
        raise UserError(f"--deadline {words}: write a number above zero with its unit, as in 8h, 90min, 2d or 30s")
    return float(match[1]) * units[match[2]]


class Offers(NamedTuple):
    """Machines compared by price, a comparison for each benchmark that has a rate, and what was asked for, in words."""

    items: list[Worth]
    asked: dict[str, str]


def read_offers(runs: str, prices: str, deadline: str) -> Offers:
    """Compare the runs that are named, lists separated by commas; '' takes the demo runs of the kit, at assumed prices.

    Raises ``UserError`` for prices or a deadline that cannot be, before any run is read.
    """
    named = [part.strip() for part in runs.split(",") if part.strip()]
    stated = {"runs": runs, "USD per device hour": prices or "on-demand", "deadline": deadline or "none"}
    if not named:
        named, prices = [str(home() / DEMO / name) for name in DEMO_RUNS], prices or DEMO_USD
        stated |= {"runs": "the demo runs of the kit", "USD per device hour": f"{prices}: assumed, no offer"}
    asked, deadline_s = parse(prices or "on-demand"), parse_deadline(deadline) if deadline else None
    return Offers(worths(named, asked, deadline_s)[0], stated)


def judge_worth(items: Sequence[Worth]) -> Verdict:
    """Check what the comparison can be trusted for: the same work, and an order that noise does not turn."""
    checks = list[Check]()
    for item in items:
        names = ", ".join(item["differences"])
        ask = Ask(f"same work in {item['benchmark']}", "Did all machines do the same work?")
        reason = f"{names} differ: compared per item only" if names else "config, effective batch and items agree"
        checks.append(ask.answer("NOT_COMPARABLE" if names else "PASS", reason, gates=False))
        for answer in item["answers"]:
            question, certain = answer["question"], answer["certain"]
            name = f"{question.removesuffix('?').lower()} in {item['benchmark']}"
            status: Status = "SKIPPED" if certain is None else "PASS" if certain else "AMBIGUOUS"
            checks.append(Ask(name, question, "target").answer(status, answer["sentence"], gates=certain is not None))
    return verdict_of(checks, remedy="More runs of each machine narrow the intervals.")
