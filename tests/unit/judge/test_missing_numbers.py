"""No number of a result can go missing unnoticed: a smoke run of each benchmark, one number after the other damaged.

Each metric, each numeric column of a table and each numeric fact is replaced, in turn by null, NaN, infinity and a text: the run
does not pass, the reason names the number, and no check passes that read it.
"""

import collections
import copy
import itertools
import json
import math
from functools import cache

import pandas as pd
import pytest

from benchlib.benchmarks import BENCHMARKS
from benchlib.judge import checks, numbers
from benchlib.judge.baselines import accept, find
from benchlib.judge.verdict import judge, judged
from benchlib.results.run import Run, save_result
from benchlib.spec.tables import Rows, split_samples, with_samples
from tests.fixtures.make_smoke import SMOKE, unpack

PORTED = sorted(path.name.removesuffix(".json.gz") for path in SMOKE.glob("*.json.gz"))


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def places(result):
    """Yield the label of each numeric column and fact, and (container, key) of its number in a row, for columns in two rows."""
    for table, rows in result.tables.items():
        columns = collections.defaultdict(list)
        for index, row in enumerate(rows):
            for name, value in row.items():
                if is_number(value):
                    columns[name].append((("tables", table, index), name))
        for name, cells in columns.items():
            yield f"{table}.{name}", cells[:2]  # the first rows may be of another kind than most
    yield from facts(result.facts, ("facts",))


def facts(values, path):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from facts(value, (*path, key))
        elif is_number(value) or (isinstance(value, list) and value and is_number(value[0])):
            yield ".".join([*path, key]), [(path, key)]


def replaced(result, path, key, value):
    """Return a result with one number replaced; of a list its first item is."""
    holder = copy.copy(getattr(result, path[0]))
    changed = result.model_copy(update={path[0]: holder})
    for part in path[1:]:
        holder[part] = copy.copy(holder[part])
        holder = holder[part]
    holder[key] = [value, *holder[key][1:]] if isinstance(holder[key], list) else value
    return changed


def judge_with(run, result, root):
    """Judge another result by the checks of the benchmark; files, status and baselines are those of the run, seen before."""
    other = copy.copy(run)
    other.result = result
    return checks.verdict_of(BENCHMARKS[run.config.benchmark].spec.judge(other, no_baseline(run, root)))


@cache
def no_baseline(run, root):
    return find(run, root)


def one_operation(tables):
    """Of collectives keep one operation, and beside its curves one type and reduction of each variant."""

    def keep(table, row):
        chosen = row.get("operation", "barrier") in ("all_reduce", "barrier")
        chosen &= row.get("variant", "library") in ("library", "tree")
        return chosen and (table != "series" or row["curve"] or row["bytes"] != 4096)

    return {name: [row for row in rows if keep(name, row)] for name, rows in tables.items()}


def two_differences(tables):
    """Of parity keep two differences of each quantity of each member."""
    rows = tables["differences"]
    first = pd.DataFrame(rows).groupby(["member", "quantity"]).head(2).index
    return tables | {"differences": [rows[index] for index in first]}


THIN = {"collectives": one_operation, "parity": two_differences}  # the others have few rows


def thinned(run):
    """Drop rows that are like others, and state the metrics anew: a run is judged hundreds of times."""
    if change := THIN.get(run.config.benchmark):
        spec = BENCHMARKS[run.config.benchmark].spec
        tables, samples = split_samples(spec.tables, change(with_samples(run.result.tables, run.row_samples)))
        result = run.result.model_copy(update={"tables": tables})
        save_result(run.path, result, samples)
        save_result(run.path, result.model_copy(update={"metrics": spec.stated(Rows.of(Run(run.path)))}), samples)
    return Run(run.path)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    @cache
    def make(name) -> Run:
        return thinned(unpack(name, tmp_path_factory.mktemp("smoke") / name))

    return make


@pytest.fixture
def readers(monkeypatch):
    """Return a mapping that fills itself while a run is judged: the checks that read a number, by its place and name."""
    read, asking = collections.defaultdict(set), []
    by, getitem = checks.Ask.by, numbers.Cells.__getitem__

    def note(self, answer, *args, **options):
        asking.append(self.name)
        try:
            return by(self, answer, *args, **options)
        finally:
            asking.pop()

    def get(self, name):
        if asking:
            read[name, self.place].add(asking[-1])
        return getitem(self, name)

    monkeypatch.setattr(checks.Ask, "by", note)
    monkeypatch.setattr(numbers.Cells, "__getitem__", get)
    return read


@pytest.mark.parametrize("name", PORTED)
def test_a_smoke_run_passes_and_can_be_accepted(smoke, tmp_path, name):
    run = smoke(name)
    verdict = judge(run.path, tmp_path)
    assert verdict.verdict == "PASS", verdict.sentence
    accept(Run(run.path), "first", BENCHMARKS[name].spec.limits(run), root=tmp_path)
    assert find(run, tmp_path).baseline and not find(run, tmp_path).refused


def test_a_run_fails_by_a_baseline_that_lost_its_numbers(smoke, tmp_path):
    run = smoke("machine")
    judge(run.path, tmp_path)
    run = Run(run.path)
    path = accept(run, "first", BENCHMARKS["machine"].spec.limits(run), root=tmp_path)
    content = json.loads(path.read_text())
    for metric in content["runs"][0]["result"]["metrics"]:
        metric["value"] = None
    path.write_text(json.dumps(content))
    verdict = judge(run.path, tmp_path)
    assert verdict.verdict == "FAIL" and "baseline readable" in verdict.sentence


@pytest.mark.parametrize("name", PORTED)
def test_a_damaged_number_fails_what_reads_it(smoke, tmp_path, monkeypatch, readers, name):
    run, wrong, values = smoke(name), [], itertools.cycle((None, math.nan, math.inf, "5"))
    judged(run, tmp_path)
    read = {place: set(names) for place, names in readers.items()}
    monkeypatch.undo()  # note who reads what no longer, which takes time
    for label, numbers_of in places(run.result):
        result, asked, damage = run.result, set[str](), []
        for path, key in numbers_of:
            value = next(values)
            if value == "5" and path[0] == "facts":  # a fact may be a text
                value = -math.inf
            result = replaced(result, path, key, value)
            place = (
                numbers.place_of(path[1], path[2], result.tables[path[1]][path[2]]) if len(path) == 3 else "the facts"
            )
            asked |= read.get((label.partition(".")[2], place), set())
            damage.append(value)
        verdict = judge_with(run, result, tmp_path)
        failed = [check for check in verdict.checks if check.gates and check.status == "FAIL"]
        if verdict.verdict != "FAIL" or not any(key in check.reason for check in failed):
            wrong.append(f"{label} = {damage}: {verdict.verdict}, {verdict.sentence}")
        wrong += [
            f"{label} = {damage}: {check.name} read it and is {check.status}"
            for check in verdict.checks
            if check.name in asked and check.status != "FAIL"
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PORTED)
def test_a_damaged_metric_fails(smoke, tmp_path, name):
    run, wrong, values = smoke(name), [], itertools.cycle((None, math.nan, -math.inf))
    for index, metric in enumerate(run.result.metrics):
        if metric.provenance != "not_available":
            metrics = [*run.result.metrics]
            metrics[index] = metric.model_copy(update={"stored": next(values)})
            verdict = judge_with(run, run.result.model_copy(update={"metrics": metrics}), tmp_path)
            if not any(check.status == "FAIL" and metric.name in check.reason for check in verdict.checks):
                wrong.append(f"{metric.name} = {metrics[index].stored}: {verdict.verdict}, {verdict.sentence}")
    assert not wrong, "\n".join(wrong)


def metric_of(result, start):
    return next(metric for metric in result.metrics if metric.name.startswith(start))


@pytest.mark.parametrize(
    ("name", "change", "check"),
    [
        ("serving", lambda result: result.facts.pop("failed"), "every query answered"),
        ("serving", lambda result: result.tables["recovery"].pop(0), "recovery"),
        ("serving", lambda result: result.tables.pop("load"), "limits met"),
        ("serving", lambda result: result.tables.pop("scaling"), "possible scaling"),
        ("serving", lambda result: result.metrics.remove(metric_of(result, "scaling_efficiency")), "numbers agree"),
        ("inference", lambda result: result.tables["accuracy"].pop(0), "accuracy complete"),
        ("inference", lambda result: result.tables["tests"].pop(0), "numbers agree"),
        ("inference", lambda result: result.tables.pop("tests"), "valid"),
    ],
)
def test_what_the_config_asks_for_and_the_result_lacks_fails(smoke, tmp_path, name, change, check):
    """No run passes for want of a check."""
    result = smoke(name).result.model_copy(deep=True)
    change(result)
    verdict = judge_with(smoke(name), result, tmp_path)
    failed = [each.name for each in verdict.checks if each.status == "FAIL"]
    assert verdict.verdict == "FAIL" and check in failed, verdict.sentence
