"""JUnit XML for CI systems: one suite per run, one test per check.

How a status is written (the attributes and their order are those of Jenkins' schema):

- PASS is a test that passed, FAIL a failure; where the run broke, its first check is an error
- AMBIGUOUS is skipped, as it does not fail ``benchlib run`` either: repeat the run, or gate with ``--strict``
- SKIPPED, NO_BASELINE and NOT_COMPARABLE are skipped with their reason, and so is an informative check that differs
- a damaged or unfinished run is a suite with an error, so that it cannot pass unseen
"""

import datetime
import re
from collections.abc import Sequence
from xml.etree import ElementTree

from benchlib.core.text import counted
from benchlib.judge.checks import Check
from benchlib.results.record import Record
from benchlib.show.exports import put

# What XML 1.0 has no way to write, not even escaped (https://www.w3.org/TR/xml/#charsets).
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(runs: Sequence[Record], output: str) -> str:
    return put(text(runs), output, f"JUnit XML of {counted(len(runs), 'run')}")


def text(runs: Sequence[Record]) -> str:
    suites = [_suite(run) for run in runs]
    sums = {name: str(sum(int(suite.get(name, "0")) for suite in suites)) for name in ("tests", "failures", "errors")}
    time = f"{sum(float(suite.get('time', '0')) for suite in suites):.3f}"
    root = ElementTree.Element("testsuites", {"name": "benchlib"} | sums | {"time": time})
    root.extend(suites)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _clean(words: object) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", str(words))


def _suite(run: Record) -> ElementTree.Element:
    class_name = _clean(".".join(("benchlib", run.benchmark, run.tier, run.backend)))
    cases = [_case(class_name, *test) for test in _tests(run)]
    kinds = (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    suite = ElementTree.Element(
        "testsuite",
        {"name": _clean(run.run), "tests": str(len(cases))}
        | {name: str(sum(case.find(kind) is not None for case in cases)) for name, kind in kinds},
        time=f"{max(0.0, run.ended_at - run.started_at) if run.ended_at else 0.0:.3f}",
        timestamp=datetime.datetime.fromtimestamp(run.started_at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        hostname=_clean(run.host or "unknown"),
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(run).items():
        ElementTree.SubElement(properties, "property", name=_clean(name), value=_clean(value))
    suite.extend(cases)
    return suite


def _properties(run: Record) -> dict[str, str]:
    facts = {"verdict": run.word, "sentence": run.sentence}
    facts |= {"benchmark": run.benchmark, "tier": run.tier, "backend": run.backend}
    return facts | {f"metric.{metric.name}": metric.text for metric in run.metrics if metric.value is not None}


def _tests(run: Record) -> list[tuple[str, str, str, str]]:
    verdict = run.verdict
    tests = [_of_check(check, verdict.broken) for check in verdict.checks] if verdict else []
    if run.problems:
        tests.append(("run readable", "error", "DAMAGED: parts of the run cannot be read", "\n".join(run.problems)))
    if not tests:
        kind = "skipped" if run.word == "SKIPPED" else "error"
        tests.append(("run completed", kind, f"{run.word}: {run.sentence}", run.sentence))
    return tests


def _of_check(check: Check, broken: bool) -> tuple[str, str, str, str]:
    numbers = f"value {check.value:g} {check.unit}".strip() if check.value is not None else ""
    limit = f"limit {check.limit}" + (f" ({check.source})" if check.source else "") if check.limit else ""
    body = "\n".join(line for line in (check.question, check.reason, numbers, limit) if line)
    if check.status == "PASS":
        return check.name, "", "", body
    if check.status == "FAIL" and check.gates:
        kind = "error" if broken and check.kind == "outcome" else "failure"
        return check.name, kind, check.reason, body
    word = "DIFFERS (informative)" if check.word == "DIFFERS" else check.word
    return check.name, "skipped", f"{word}: {check.reason}", body


def _case(class_name: str, name: str, kind: str, message: str, body: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=class_name, name=_clean(name), time="0.000")
    if kind:
        result = ElementTree.SubElement(case, kind, message=_clean(message))
        if kind != "skipped":
            result.set("type", "benchlib")
            result.text = _clean(body)
    if kind in ("", "skipped"):
        ElementTree.SubElement(case, "system-out").text = _clean(body)
    return case
