"""JUnit XML for CI systems: one suite per run, one test per check.

How a status is written (the attributes and their order are those of Jenkins' schema):

- PASS is a test that passed, FAIL a failure; where the run broke, its first check is an error
- AMBIGUOUS is skipped, as it does not fail ``benchlib run`` either: repeat the run, or gate with ``--strict``
- SKIPPED, NO_BASELINE and NOT_COMPARABLE are skipped with their reason, and so is an informative check that differs
- a damaged or unfinished run is a suite with an error, so that it cannot pass unseen
"""

import datetime
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchlib.core.text import counted
from benchlib.judge.checks import Check
from benchlib.results.record import Record
from benchlib.show import markup
from benchlib.show.exports import put

# What XML 1.0 has no way to write, not even escaped (https://www.w3.org/TR/xml/#charsets).
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Case(NamedTuple):
    """A test: ``kind`` is failure, error or skipped, '' for one that passed."""

    name: str
    kind: str
    message: str
    body: str


def write(runs: Sequence[Record], output: str) -> str:
    return put(text(runs), output, f"JUnit XML of {counted(len(runs), 'run')}")


def text(runs: Sequence[Record]) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", markup.page("junit.xml.j2", suites=list(map(_suite, runs))))


def _suite(run: Record) -> dict[str, Any]:
    cases = _cases(run)
    kinds = Counter(case.kind for case in cases)
    began = datetime.datetime.fromtimestamp(run.started_at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    duration = max(0.0, run.ended_at - run.started_at) if run.ended_at else 0.0
    suite = {"run": run, "cases": cases, "tests": len(cases), "took": duration, "began": began}
    return suite | {kind: kinds[kind] for kind in ("failure", "error", "skipped")}


def _cases(run: Record) -> list[Case]:
    cases = [_of_check(check, run.verdict.broken) for check in run.verdict.checks] if run.verdict else []
    if run.problems:
        words = "DAMAGED: parts of the run cannot be read"
        cases.append(Case("run readable", "error", words, "\n".join(run.problems)))
    kind = "skipped" if run.word == "SKIPPED" else "error"
    return cases or [Case("run completed", kind, f"{run.word}: {run.sentence}", run.sentence)]


def _of_check(check: Check, broken: bool) -> Case:
    numbers = f"value {check.value:g} {check.unit}".strip() if check.value is not None else ""
    limit = f"limit {check.limit}" + (f" ({check.source})" if check.source else "") if check.limit else ""
    body = "\n".join(filter(None, (check.question, check.reason, numbers, limit)))
    if check.status == "PASS":
        return Case(check.name, "", "", body)
    if check.status == "FAIL" and check.gates:
        return Case(check.name, "error" if broken and check.kind == "outcome" else "failure", check.reason, body)
    word = "DIFFERS (informative)" if check.word == "DIFFERS" else check.word
    return Case(check.name, "skipped", f"{word}: {check.reason}", body)
