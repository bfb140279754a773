"""One run of the past: what it was, where it ran, what it measured and what its checks said.

``benchlib.run_reader`` makes it from a run folder. A folder that cannot be read is a run with a reason in ``damaged``.
"""

import datetime
import re
from dataclasses import dataclass, field
from typing import NamedTuple

FILES = ("config.json", "machine.json", "result.json", "verdict.json")
DAY = re.compile(r"(?P<tier>.+)-(?P<day>\d{8})$", re.DOTALL)
CHECKED = (*FILES, "files.json", "samples.parquet", "status.json", "job.json", "predictions.json")  # read, or looked at
RUN = re.compile(r"(?P<benchmark>.+?)-(?P<backend>[a-z]+)-(?P<time>\d{6})-\w+$", re.DOTALL)


class Measured(NamedTuple):
    """A metric of a run: its value with the 95 % interval (None where there is none)."""

    name: str
    value: float
    low: float | None
    high: float | None
    unit: str
    direction: str


@dataclass
class StoredRun:
    """What one run folder says.

    ``path`` is relative to the store. ``word`` is the verdict, or BROKEN, UNFINISHED or DAMAGED. ``series`` stands for
    the fingerprint without versions: runs of the same series measured the same work on the same hardware. ``facts`` are
    the host, its system and all versions; ``planted`` is a slow-down that was put in on purpose. ``regressions`` are
    (metric, reason), ``unreadable`` says why there was no baseline to read. ``digest`` stands for config and result: runs
    that share it are one run in several folders, and ``copy_of`` names the folder that counts.
    """

    path: str
    benchmark: str
    tier: str
    backend: str
    started: float
    ended: float | None = None
    word: str = "UNFINISHED"
    sentence: str = ""
    damaged: str = ""
    ranks: int = 0
    hardware: str = ""
    series: str = ""
    planted: float = 0.0
    report: bool = False
    digest: str = ""
    copy_of: str = ""
    unreadable: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    regressions: list[tuple[str, str]] = field(default_factory=list)
    metrics: list[Measured] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def host(self) -> str:
        """Name of the machine, '' where it is not known."""
        return self.facts.get("host", "")

    @property
    def moment(self) -> datetime.datetime:
        """Local start of the run."""
        return datetime.datetime.fromtimestamp(self.started).astimezone()

    def metric(self, name: str) -> Measured | None:
        """Return the metric of this name, or the first one ``name`` with a scope suffix, or None."""
        whole = next((metric for metric in self.metrics if metric.name == name), None)
        return whole or next((metric for metric in self.metrics if metric.name.startswith(name + "_")), None)
