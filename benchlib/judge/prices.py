"""What an hour of a device costs: the prices that a buyer gives, for the rest the price sheet ``params/prices.yaml``."""

import datetime
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from benchlib.core.errors import UserError, explained
from benchlib.core.files import home, read_yaml
from benchlib.core.text import counted
from benchlib.judge.references import Strict, registry

Kind = Literal["on-demand", "spot"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Entry(Strict):
    """A provider's price of one device, as it stood on its page on ``date``. ``device`` is an id of the references."""

    device: str
    kind: Kind
    usd_per_device_hour: float = Field(gt=0)
    provider: str = Field(min_length=1)
    source: str = Field(pattern="^https://.+")
    date: datetime.date

    @field_validator("device")
    @classmethod
    def _is_known(cls, device: str) -> str:
        if device not in registry().devices:
            raise ValueError(f"device {device!r} is not in `devices` of references.yaml")
        return device


class Sheet(Strict):
    prices: tuple[Entry, ...]

    @model_validator(mode="after")
    def _is_consistent(self) -> "Sheet":
        keys = [(entry.device, entry.kind, entry.provider) for entry in self.prices]
        for entry, key in zip(self.prices, keys, strict=True):
            if keys.count(key) > 1:
                raise ValueError(f"{entry.device} has two prices {entry.kind} of {entry.provider}: leave one")
            if entry.date > datetime.date.today() + datetime.timedelta(days=1):  # a day for other time zones
                raise ValueError(f"the price of {entry.device} is of {entry.date}, which is in the future")
        return self


def read_sheet() -> Sheet:
    """Read ``params/prices.yaml``; ``UserError`` names the first thing that is wrong in it."""
    path = home() / "params" / "prices.yaml"
    try:
        return Sheet.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UserError(f"{path}: {explained(error, Sheet)}") from None


@dataclass(frozen=True)
class Price:
    """USD per device hour, and where it comes from."""

    usd_per_device_hour: float
    origin: str


@dataclass(frozen=True)
class Names:
    """The names by which a price finds a side: its own (argument and runs), then its hosts, then its devices."""

    label: str
    own: frozenset[str]
    hosts: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()

    def level(self, name: str) -> int | None:
        """Return how precisely ``name`` means this side: 0 itself, 1 its host, 2 its device; None where it does not.

        Case does not count. A device is also meant by whole words of its name, as H100 is of NVIDIA H100 80GB HBM3.
        """
        for level, names in enumerate((self.own, self.hosts)):
            if name.casefold() in map(str.casefold, names):
                return level
        word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)
        return 2 if any(map(word.search, self.devices)) else None

    def text(self) -> str:
        places = ", ".join([*sorted(self.hosts), *sorted(self.devices)])
        return f"{self.label} ({places})" if places else self.label


@dataclass
class Asked:
    """What ``--cost`` said: prices in the order of the sides, or by name, and which of the sheet's prices fill the rest."""

    plain: list[float] = field(default_factory=list)
    named: dict[str, float] = field(default_factory=dict)
    kind: Kind = "on-demand"


def parse(texts: Iterable[str]) -> Asked:
    """Read ``NAME=3.00``, ``3.00,2.50``, ``on-demand`` and ``spot``; ``UserError`` for others, and where names and order mix."""
    asked = Asked()
    for text in (part.strip() for line in texts for part in line.split(",")):
        name, sign, amount = text.rpartition("=")
        if text in KINDS:
            asked.kind = text
        else:
            try:
                usd = float(amount)
            except ValueError:
                usd = math.nan
            if not 0 < usd < math.inf or (sign and not name):
                forms = f"write NAME=3.00 or 3.00, USD per device hour above zero, or {' or '.join(KINDS)}"
                raise UserError(f"--cost {text}: {forms}")
            if name in asked.named:
                raise UserError(f"--cost gives {name} two prices: leave one")
            if name:
                asked.named[name] = usd
            else:
                asked.plain.append(usd)
    if asked.plain and asked.named:
        raise UserError("--cost mixes prices by name and by order: name all of them, or none")
    return asked


def assign(asked: Asked, sides: Sequence[Names], sheet: Sheet | None = None) -> list[Price]:
    """Return the price of each side: the one given, else that of the sheet for its device.

    Where several names mean a side, the most precise one counts. Raises ``UserError`` for too few or too many prices in
    order, a name that means no side, two names that mean one equally, and a side without any price.
    """
    expected, count = "; ".join(side.text() for side in sides), len(asked.plain)
    if count and count != len(sides):
        order = f"give one for each, in this order: {expected}"
        raise UserError(f"--cost gives {counted(count, 'price')} for {len(sides)}: {order}")
    if unknown := [name for name in asked.named if all(side.level(name) is None for side in sides)]:
        remedy = f"give a run, host or machine of: {expected}"
        raise UserError(f"--cost {unknown[0]}=…: nothing compared has this name; {remedy}")
    if count:
        return [Price(usd, "given") for usd in asked.plain]
    offers = [entry for entry in (sheet or read_sheet()).prices if entry.kind == asked.kind]
    prices = [_named(asked, side) or listed_price(side, offers) for side in sides]
    if lacking := [side.text() for side, price in zip(sides, prices, strict=True) if price is None]:
        listed = ", ".join(sorted({entry.device for entry in offers})) or "nothing"
        remedy = f"add --cost NAME=3.00 (USD per device hour); params/prices.yaml has prices {asked.kind} of {listed}"
        raise UserError(f"no price for {'; '.join(lacking)}: {remedy}")
    return [price for price in prices if price is not None]


def _named(asked: Asked, side: Names) -> Price | None:
    levels = {name: level for name in asked.named if (level := side.level(name)) is not None}
    closest = [name for name, level in levels.items() if level == min(levels.values())]
    if len(closest) > 1:
        raise UserError(f"--cost: {' and '.join(closest)} both mean {side.text()}: leave one")
    return Price(asked.named[closest[0]], "given") if closest else None


def listed_price(side: Names, offers: Iterable[Entry]) -> Price | None:
    """Return the least of the offers for a side's device, by the name that torch reports; None where there is none."""
    ids = {name for device in side.devices for name in registry().devices_of(device)}
    fitting = sorted((entry for entry in offers if entry.device in ids), key=lambda entry: entry.usd_per_device_hour)
    if not fitting:
        return None
    entry, several = fitting[0], f", the least of {len(fitting)}" * (len(fitting) > 1)
    return Price(entry.usd_per_device_hour, f"{entry.provider}, {entry.kind}, {entry.date}{several}")
