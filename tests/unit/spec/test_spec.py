"""The engine by hand-computed cases: kinds of checks over rows, metrics of rows, sentences, tables, and what is not declared."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchlib.benchmarks import BENCHMARKS
from benchlib.judge.impossible.claim import Claim, Collective
from benchlib.judge.numbers import judged
from benchlib.spec import tables
from benchlib.spec.checks import above, above_zero, below, judge, near, reached, rule, zero
from benchlib.spec.spec import Metric, Show, Spec, each, run_table
from benchlib.spec.tables import Col, Rows, Table, split_samples, with_samples
from benchlib.workloads.same_check import same

T = Table("t", "{name}", note="{hint}", cols=[
    Col("name"), Col("hint"), Col("group"), Col("size", "B"),
    Col("time_us", "us", "time", samples=True), Col("value"), Col("count", "count"), Col("limit", "count"),
    Col("losses", "error"), Col("rate", "Gbps", of=lambda size, times: [8e-3 * size / time for time in times], needs="size time_us", samples=True),
])  # fmt: skip
SPEC = Spec(tables=[T, run_table()], metrics=[], checks=[])
CONFIG = SimpleNamespace(tier="quick", backend="cpu", world_size=2, target=None, most=4.0)
TEXTS = {"name": "a", "hint": "", "group": "x"}
WHOLE = TEXTS | {"size": 1000, "time_us": [1.0, 2.0, 3.0], "value": 1, "count": 0, "limit": 3, "losses": [1.0, 0.5]}


def run_of(*rows):
    return Rows(CONFIG, 2, {"t": [WHOLE | row for row in rows], "run": [{"total_s": 1.0}]})


def answers(check, run, claims=()):
    rows, _ = judged(SPEC.tables, run)
    return list(judge(check, rows, list(claims)))


WHY = {"count": None, "why": {"count": "a barrier moves nothing"}}
SKIPPED = {"status": "skipped", "reason": "no such library"}
CASES = [
    (zero("c", "?", T["count"]), [{}], "PASS", "a: count 0"),
    (zero("c", "?", T["count"]), [{}, {"name": "b", "count": 2, "hint": "rank 1"}], "FAIL", "b: count 2, not = 0 (rank 1)"),
    (zero("c", "?", T["count"]), [{"count": None}], "FAIL", "count is missing in row 1 of t (a, x)"),
    (zero("c", "?", T["count"]), [{"count": math.nan}], "FAIL", "count is nan"),
    (zero("c", "?", T["count"]), [{"count": -1}], "FAIL", "below zero"),
    (zero("c", "?", T["count"]), [{"count": "0"}], "FAIL", "which is no number"),
    (below("c", "?", (T["count"], 9)), [{"count": 2.5}], "FAIL", "2.5, which is no count"),
    (zero("c", "?", T["count"]), [{}, WHY], "PASS", "skipped: a: a barrier moves nothing"),
    (zero("c", "?", T["count"]), [WHY], "SKIPPED", "a barrier moves nothing"),
    (zero("c", "?", T["count"]), [{"count": None} | SKIPPED], "SKIPPED", "no such library"),
    (zero("c", "?", T["count"]), [], "FAIL", "no row to judge"),
    (above_zero("c", "?", T["count"]), [{}], "FAIL", "not > 0"),
    (below("c", "?", (T["count"], T["limit"])), [{"count": 3}], "PASS", "count 3"),
    (below("c", "?", (T["count"], T["limit"])), [{"count": 4}], "FAIL", "count 4, not <= 3"),
    (below("c", "?", (T["count"], T["limit"])), [{"limit": None}], "FAIL", "limit is missing"),
    (below("c", "?", (T["count"], lambda config: config.most)), [{"count": 4}, {"count": 5}], "FAIL", "count 5, not <= 4"),
    (below("c", "?", (T["time_us"], 2.0)), [{}], "PASS", "time 2 µs"),  # of samples the median
    (below("c", "?", (T["time_us"], 1.95)), [{}], "FAIL", "time 2 µs, not <= 1.95 µs"),
    (below("c", "?", (T["count"], lambda config: config.target)), [{}], "FAIL", "no limit"),
    (above("c", "?", (T["limit"], T["count"])), [{"count": 4}], "FAIL", "limit 3, not >= 4"),
    (above("c", "?", (T["count"], 1.0), most=2), [{}], "FAIL", "not <= 2, >= 1"),
    (near("c", "?", (T["count"], T["limit"]), share=0.1), [{"count": 4}], "FAIL", "count 4, not within 10% of 3"),
    (same("c", "?", T["losses"], "group", 0.01), [{}, {"losses": [1.005, 0.5]}], "PASS", "differ by 0.005"),
    (same("c", "?", T["losses"], "group", 0.01), [{}, {"losses": [1.1, 0.5]}], "FAIL", "losses differ by 0.1, not <= 0.01"),
    (same("c", "?", T["losses"], "group", 0.01), [{}, {"losses": [math.nan, 0.5]}], "FAIL", "losses is nan at 0 in row 2"),
    (same("c", "?", T["losses"], "group", 0.01, unless=lambda run: ""), [{}], "SKIPPED", "nothing to compare"),
    (same("c", "?", T["losses"], "group", 0.01, unless=lambda run: "dropout"), [{}, {}], "SKIPPED", "dropout"),
    (zero("c", "?", T["size"], unless=lambda run: T.text("{count}", T.rows(run)[0], run)), [{"count": None}], "FAIL", "count is missing"),
    (reached("c", "?", T["count"], "target"), [{"count": 5}], "SKIPPED", "measured 5; the quick tier sets no target"),
    (reached("c", "?", T["count"], "most"), [{"count": 4}], "PASS", "count 4"),
    (reached("c", "?", T["count"], "most", sign=">"), [{"count": 4}], "FAIL", "count 4, not > 4"),
    (reached("c", "?", T["count"], "most", sign="<"), [{"count": 4}], "FAIL", "count 4, not < 4"),
    (reached("c", "?", T["count"], "most"), [], "SKIPPED", "nothing that the target is for was measured"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "rows", "status", "reason"), CASES)
def test_a_kind_of_check(check, rows, status, reason):
    (answer,) = answers(check, run_of(*rows))
    assert (answer.status, reason in answer.reason) == (status, True), (answer.status, answer.reason)
    # A target without its measurement gates; anything else that is skipped does not.
    assert answer.gates == (status != "SKIPPED" or (check.asked == "most" and not rows))


def test_a_name_with_columns_makes_a_check_for_each_name():
    check = below("{group} at {size}", "?", (T["count"], 1.0))
    rows = [{}, {"count": 3}, {"group": "y", "size": 2048}]
    judged = [(answer.name, answer.status) for answer in answers(check, run_of(*rows))]
    assert judged == [("x at 1000 B", "FAIL"), ("y at 2 KiB", "PASS")]
    assert [answer.name for answer in answers(below("share at {size}", "?", (T["count"], 1.0)), run_of())] == ["share"]


def test_a_rule_names_the_claim_that_breaks_it():
    claims = [Claim(subject=f"run {wrong}", collective=Collective(wrong_elements=wrong)) for wrong in (0, 3)]
    (answer,) = answers(rule("c", "?", "right results"), run_of({}), claims)
    assert answer.status == "FAIL" and answer.reason.startswith("run 3: 3 wrong elements")
    assert answers(rule("c", "?", "right results"), run_of({}), claims[:1])[0].status == "PASS"
    assert answers(rule("c", "?", "right results"), run_of({}))[0].status == "SKIPPED"
    assert answers(rule("c", "?", "right results", needed=True), run_of({}))[0].status == "FAIL"


def test_metrics_follow_from_rows_with_their_samples():
    spec = Spec([T], [Metric("rate_{name}", T["rate"], "Rate of {name}", "{size}", "higher", 0.1, headline=True)], [])
    rate, none = spec.stated(run_of({}, {"name": "b", "time_us": []} | SKIPPED))
    assert (rate.name, rate.value, rate.n, rate.provenance, rate.unit) == ("rate_a", 4.0, 3, "derived", "Gbps")
    assert rate.samples == pytest.approx([8.0, 4.0, 8 / 3])  # 8e-3 * 1000 / 1, 2, 3 us in Gbps
    assert (none.provenance, none.reason) == ("not_available", "no such library")
    lost = spec.stated(run_of({"time_us": []}))[0]
    assert lost.fault == "nan", "a number that is missing without a reason is no metric that is not available"
    assert spec.label("rate_a") == "Rate of a" and spec.first(["other", "rate_a"]) == {"rate_a": "Rate of a"}


COMPUTED = Table("t", "{name}", [
    Col("name"), Col("limit", "count"), Col("time_us", "us", samples=True),
    Col("rate", "1/us", of=lambda count, times: [count / time for time in times], needs="limit time_us"),
    Col("log", "number", of=lambda count, _: math.log(count), needs="limit total_s"),
    Col("pairs", "number", of=lambda times, rates: [*zip(times, rates, strict=True)], needs="time_us losses"),
    Col("losses", "error", samples=True),
    Col("few", "number", of=lambda count: count, needs="limit time_us"),
    Col("unknown", "number", of=lambda times: times.mean(), needs="time_us"),
    Col("unpacked", "number", of=lambda name: dict([name]), needs="name"),
])  # fmt: skip


@pytest.mark.parametrize(
    ("column", "damage"),
    [
        ("rate", {"time_us": [1.0, 0.0, 3.0]}),
        ("rate", {"time_us": [1.0, None, 3.0]}),
        ("rate", {"time_us": [1.0, "2", 3.0]}),
        ("rate", {"limit": "3"}),
        ("few", {"limit": "3"}),
        ("unknown", {"time_us": math.nan}),
        ("log", {"limit": 0}),
        ("log", {"limit": -3}),
        ("pairs", {}),
    ],
    ids=str,
)
def test_what_cannot_be_computed_of_a_damaged_row_is_a_number_that_is_none(column, damage):
    run = run_of(damage)
    assert math.isnan(COMPUTED[column].number(COMPUTED.rows(run)[0], run))


@pytest.mark.parametrize("column", ["few", "unknown", "unpacked"])
def test_a_mistake_in_the_function_of_a_column_is_an_error_and_no_number_that_is_missing(column):
    """Neither a metric nor a check takes it for a fault of the machine, and its traceback is kept."""
    run, ref = run_of({}), COMPUTED[column]
    for use in (
        lambda: Metric("m", ref).state("m", COMPUTED.rows(run)[0], run),
        lambda: list(judge(below("c", "?", (ref, 1.0)), judged([COMPUTED], run)[0], [])),
    ):
        with pytest.raises(tables.ColumnFault, match=f"the column {column} of t cannot be computed") as raised:
            use()
        assert isinstance(raised.value.__cause__, (TypeError, AttributeError, ValueError)), "the error itself"


def test_a_percentile_has_the_interval_of_its_order_statistics():
    """Of 200 binomial draws at 0.9 the middle 95% are 171 to 188; all n lie below p99 with 0.99^n: 53% of 64, 2.48% of 368."""
    cases = [
        (0.9, 200, 180.1, 171, 189),
        (0.99, 64, 63.37, 61, None),
        (0.99, 367, 363.34, 359, None),
        (0.99, 368, 364.33, 360, 368),
    ]
    for share, n, value, low, high in cases:
        spec = Spec([T], [Metric("p", T["time_us"], percentile=share)], [])
        run = run_of({"time_us": [float(time) for time in range(n, 0, -1)]})
        (stated,) = spec.stated(run)
        assert (stated.value, stated.ci_low, stated.ci_high, stated.n) == (pytest.approx(value), low, high, n)
        assert spec._disagreements(replace(run, metrics={"p": stated})) == []
        assert spec._disagreements(replace(run, metrics={"p": stated.model_copy(update={"stored": n / 2})}))
    (broken,) = spec.stated(run_of({"time_us": [1.0, math.nan, 2.0]}))
    assert broken.fault == "nan", "one sample that is not finite stands for all"


@pytest.mark.parametrize(("gates", "faults"), [(False, []), (True, ["count is nan in row 1 of t (a, x)"])])
def test_a_row_that_informs_fails_no_run(gates, faults):
    rows, seen = judged(SPEC.tables[:1], run_of({"gates": gates, "count": math.nan}))
    assert seen == faults
    (answer,) = judge(below("c", "?", (T["count"], 1.0), informs=not gates), rows, [])
    assert (answer.word, answer.gates) == ("FAIL" if gates else "DIFFERS", gates) and "nan" in answer.reason


def test_sentences_speak_of_rows_and_a_table_has_one_column_for_each_size():
    assert each(T.where(group="x"), "{name} takes {time_us}.")(run_of({})) == ["a takes 2 µs."]
    run = run_of({"size": 2048}, {"size": 1024, "time_us": [4.0]}, {"size": 2048, "name": "b"})
    assert Show("h", T, "name time_us", across="size").rows(run) == [
        {"name": "a", "1 KiB": "4 µs", "2 KiB": "2 µs"},
        {"name": "b", "1 KiB": "–", "2 KiB": "2 µs"},
    ]


def test_selections_keep_the_rows_that_they_name():
    run = run_of({"size": 8}, {"size": 9, "name": "b"}, {"size": 7, "name": "c"} | SKIPPED)

    def names(table):
        return "".join(row["name"] for row in table.rows(run))

    assert names(T.where(name=("a", "b"), size=lambda size: size > 8)) == "b"
    assert (names(T.unless(name="a")), names(T.ran()), names(T.most("size"))) == ("bc", "ab", "b")
    assert names(T.most("size", "group", least=True)) == "c"
    run = run_of({"size": 1000}, {"time_us": []})
    assert [row["rate"] for row in T.whole(run)] == [[8.0, 4.0, pytest.approx(8 / 3)], None]


def test_samples_go_out_of_their_rows_and_come_back():
    tables = {"t": [WHOLE, WHOLE | SKIPPED | {"time_us": []}], "run": [{"total_s": 1.0}]}
    rest, samples = split_samples(SPEC.tables, tables)
    assert samples == {"t[0].time_us": [1.0, 2.0, 3.0]} and rest["t"][0]["time_us"] == 2.0
    assert with_samples(rest, samples | {"other": [1.0], "t[9].time_us": [1.0]}) == tables


@pytest.mark.parametrize("name", [name for name, own in BENCHMARKS.items() if isinstance(own.spec, Spec)])
def test_targets_and_names_of_a_spec_exist(name):
    spec, fields = BENCHMARKS[name].spec, BENCHMARKS[name].config.model_fields
    assert {check.asked for check in spec.checks if check.asked} <= set(fields)
    assert len({metric.name for metric in spec.metrics}) == len(spec.metrics)
    assert len({chart.name for chart in spec.charts}) == len(spec.charts)
    forms = [(table, form) for table in spec.tables for form in (table.title, table.note)]
    forms += [(metric.of.table, form) for metric in spec.metrics for form in (metric.name, metric.basis)]
    forms += [(ref.table, check.name) for check in spec.checks for ref, _ in check.over]
    forms += [(show.table, name) for show in spec.shows for name in map("{{{}}}".format, show.columns.split())]
    assert all(table[name] for table, form in forms for name in tables.fields(form)), "a column that is not declared"
