"""Machines by price: definitions by hand, intervals against a bootstrap by force, orders that are certain and that are not."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from make_run import make_run
from pages import Page, assert_self_contained_and_accessible

from benchlib.cli import main
from benchlib.core.errors import UserError
from benchlib.judge import cost
from benchlib.judge.compare import RunSet
from benchlib.judge.cost import Machine, front, offers, parse, worth
from benchlib.judge.references import registry
from benchlib.results.metrics import measured, not_available
from benchlib.results.record import Record
from benchlib.results.run import Result
from benchlib.show import cost as showing

RATE = "train_samples_per_s_minisquad_tiny"


def run(rates, *, name="run", backend="cpu", ranks=1, nodes=1, epoch=3000, joules=(), on=("host", []), **config):
    """Return a run of squad: samples of its rate and of joules per sample, and its config."""
    settings = {"batch_size": 8, "precision": "fp32", "epochs": 2.0, "nproc": ranks, "seed": 0} | config
    factors = {f"config.{key}": json.dumps(value) for key, value in settings.items()}
    name_of, unit = "energy_per_sample_j", "J"
    energy = measured(name_of, [*joules], unit) if len(joules) else not_available(name_of, unit, "lower", "no sensor")
    metrics = [measured(RATE, list(rates), "samples/s", "higher"), energy]
    common, facts = {"benchmark": "squad", "tier": "smoke", "backend": backend}, {"epoch_items": epoch} if epoch else {}
    return Record(
        **common,
        run=name,
        machine={"host": on[0], "cpu": {"model": "CPU"}, "devices": {"backends": {backend: {"names": on[1]}}}},
        result=Result(**common, status="complete", world_size=ranks, started_at=1.0, metrics=metrics, facts=facts),
        fingerprint={"backend": backend, "world_size": str(ranks), "nodes": str(nodes), "cpu": "CPU", **factors},
        samples={metric.name: metric.samples for metric in metrics if metric.samples},
    )


def machine(label, usd, *rates, **more):
    """Return a machine with a run for each list of rates."""
    runs = [run(samples, name=f"{label}-{index}", **more) for index, samples in enumerate(rates)]
    return Machine(label, RunSet(label, tuple(runs)), float(usd))


def worth_of(*machines, **more):
    return worth(machines, **more)


def row(item, name):
    (one,) = (row for row in item["rows"] if row["name"] == name)
    return one


def values(item, name):
    return [value["value"] for value in row(item, name)["values"]]


# Prices.

SIDES = [
    Machine(label, RunSet(label, (run([1.0], name=name, backend="cuda", on=(host, [device])),)), 1.0)
    for label, name, host, device in (
        ("a", "squad-1", "node1", "NVIDIA H100 80GB HBM3"), ("b", "squad-2", "node2", "NVIDIA A100-SXM4-80GB")
    )
]  # fmt: skip


def priced(prices, monkeypatch):
    sides = {"a": {"squad": SIDES[0].runs}, "b": {"squad": SIDES[1].runs}}
    monkeypatch.setattr(cost, "read_argument", lambda name: (sides[name], []))
    machines, _ = cost.read_machines("ab", parse(prices))
    return [machine.price for machine in machines["squad"]]


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        *((text, "--cost .*write for each side") for text in ("-1,2", "0,1", "nan,1", "inf,1", "", "three,1", "a=1")),
        ("1", "1 price for 2 sides.*in this order: a, b"),
        ("1,2,3", "3 prices for 2"),
        ("1,spot", "no price for b .node2; .* NVIDIA A100.*prices spot of nothing"),
    ],
)
def test_a_price_that_cannot_be_is_refused(prices, message, monkeypatch):
    monkeypatch.setattr(cost, "offers", lambda kind: [])
    with pytest.raises(UserError, match=message):
        priced(prices, monkeypatch)


def test_the_kits_sheet_fills_what_is_not_given_with_the_least_by_the_name_of_the_device(monkeypatch):
    listed, custom = priced("on-demand,1", monkeypatch)
    of_device = [entry for entry in offers("on-demand") if entry.device == "h100-sxm"]
    least = min(of_device, key=lambda entry: entry.usd_per_device_hour)
    assert custom == (1, "given") and len(of_device) > 3
    origin = f"{least.provider}, on-demand, {least.date}, the least of {len(of_device)}"
    assert listed == (least.usd_per_device_hour, origin) == priced("on-demand", monkeypatch)[0]
    assert offers("spot") and all(entry.device in registry().devices for entry in offers("spot") + offers("on-demand"))


# Definitions.


def test_a_table_by_hand():
    # 3,000 samples at 100/s and at 150/s; 2 and 4 USD an hour; 200 W and 450 W are 2 and 3 J for a sample.
    slow = machine("slow", 2.0, [100.0] * 5, joules=[2.0] * 5)
    quick = machine("quick", 4.0, [150.0] * 5, joules=[3.0] * 5)
    item = worth([slow, quick], 50.0)
    assert values(item, "epoch_s") == pytest.approx([30, 20])
    assert values(item, "rate") == pytest.approx([100, 150])
    assert values(item, "usd_per_epoch") == pytest.approx([2 * 30 / 3600, 4 * 20 / 3600])
    assert values(item, "usd_per_million") == pytest.approx([2 * 1e4 / 3600, 4 * 1e6 / 150 / 3600])
    assert values(item, "wh_per_million") == pytest.approx([2e6 / 3600, 3e6 / 3600])
    assert values(item, "break_even") == pytest.approx([2, 3])  # 1.5 times as fast is worth 1.5 times the price
    assert [row["best"] for row in item["rows"]] == [1, 1, 0, 0, 0, None]
    assert [row["certain"] for row in item["rows"]] == [True] * 5 + [False]
    # Two epochs: 60 s on the cheaper machine are too long, 40 s are not.
    within = item["answers"][2]
    assert (within["machine"], within["certain"]) == ("quick", True)
    assert "cheapest: 40 s" in within["sentence"] and "for 2 epochs" in within["sentence"]
    assert item["front"] == ["slow", "quick"]


@pytest.mark.parametrize(
    ("more", "devices"),
    [
        ({"backend": "cpu", "ranks": 4}, 1),
        ({"backend": "cpu", "ranks": 4, "nodes": 2}, 2),
        ({"backend": "cuda", "ranks": 4, "on": ("host", ["NVIDIA H100 80GB HBM3"] * 4)}, 4),
    ],
)
def test_what_is_paid_for_is_counted(more, devices):
    one = machine("a", 3.0, [100.0], **more)
    assert one.devices == devices
    item = worth([one, machine("b", 3.0, [100.0], **more)])
    assert values(item, "usd_per_million") == pytest.approx([3.0 * devices / 3600 * 1e4] * 2)


def test_the_pareto_front_and_deadlines_by_hand():
    assert front([(1, 9), (2, 5), (3, 5), (4, 1), (4, 2), (1, 9)]) == [0, 1, 3, 5]
    assert [cost.parse_deadline(words) for words in ("8h", "90min", "1.5 d", "30s")] == [28800, 5400, 129600, 30]
    item = worth_of(machine("a", 1, [100.0, 100.0]), machine("b", 1, [50.0, 50.0]), deadline_s=50.0)
    answer = item["answers"][2]
    assert (answer["machine"], "None finishes 2 epochs within 50 s" in answer["sentence"]) == ("", True)


# Intervals and orders.


def test_the_interval_of_a_cost_is_that_of_a_bootstrap_by_force():
    rng = np.random.default_rng(3)
    rates, joules = rng.lognormal(4, 1.0, 60), rng.lognormal(5, 0.2, 40)  # wider than the spread that is assumed
    item = worth_of(machine("a", 3.0, rates, joules=joules), machine("b", 3.0, rates / 2))
    medians = np.median(rng.choice(rates, (20_000, 60)), axis=1)
    each = np.median(rng.choice(joules, (20_000, 40)), axis=1)
    for name, drawn in (
        ("usd_per_epoch", 3 / 3600 * 3000 / medians),
        ("wh_per_million", 1e6 / 3600 * each),
    ):
        value = row(item, name)["values"][0]
        assert (value["low"], value["high"]) == pytest.approx(np.percentile(drawn, [1, 99]), rel=0.03)


def test_the_spread_between_runs_counts_from_three_runs_on():
    from scipy.stats import t

    rates = (100.0, 110.0, 121.0)
    item = worth_of(machine("a", 1, *[[rate] * 5 for rate in rates]), machine("b", 1, [60.0]))
    value = row(item, "rate")["values"][0]
    half = t.ppf(0.99, 2) * math.log(1.1) / math.sqrt(3)
    assert value["value"] == pytest.approx(110)
    assert (value["low"], value["high"]) == pytest.approx((110 * math.exp(-half), 110 * math.exp(half)))


def noisy(middle, seed):
    return middle * np.random.default_rng(seed).normal(1, 0.1, 100)


def test_an_order_is_certain_or_open():
    wide_apart = worth_of(machine("a", 1, noisy(100, 1)), machine("b", 1, noisy(130, 2)))
    assert [(answer["machine"], answer["certain"]) for answer in wide_apart["answers"]] == [("b", True), ("b", True)]
    assert [showing.cell(row(wide_apart, "rate"), index).mark for index in (0, 1)] == ["", "✓"]
    close = worth_of(machine("a", 1, noisy(100, 1)), machine("b", 1, noisy(101, 2)))
    assert [answer["certain"] for answer in close["answers"]] == [False, False]
    assert "may be as good" in close["answers"][0]["sentence"]
    assert "≈" in [showing.cell(row(close, "rate"), index).mark for index in (0, 1)]
    assert cost.judge_worth([close]).verdict == "AMBIGUOUS"
    # A price that outweighs the noise makes the cheaper one certain, and leaves the faster one open.
    priced = worth_of(machine("a", 1, noisy(100, 1)), machine("b", 2, noisy(101, 2)))
    assert [answer["certain"] for answer in priced["answers"]] == [False, True]


def test_a_machine_that_was_slowed_on_purpose_is_named():
    slowed = machine("b", 1, [50.0])
    slowed.first.config["planted_slowdown"] = 1.0
    assert worth_of(machine("a", 1, [100.0]), slowed)["notes"] == [
        "b was made 100% slower on purpose (planted_slowdown)."
    ]


# Work that differs.


@pytest.mark.parametrize(
    ("other", "name", "shown"),
    [
        ({"batch_size": 16}, "effective batch", ["8", "16"]),
        ({"precision": "bf16"}, "precision", ["fp32", "bf16"]),
        ({"epoch": 500}, "items of an epoch", ["3,000", "500"]),
        ({"max_steps": 11}, "max_steps", ["not stated", "11"]),
    ],
)
def test_unlike_work_is_compared_per_item_and_the_difference_is_named(other, name, shown):
    item = worth_of(machine("a", 1, [100.0]), machine("b", 1, [200.0], **other), deadline_s=60)
    assert item["differences"] == {name: shown}
    names = [row["name"] for row in item["rows"]]
    assert "rate" in names and not [name for name in names if "epoch" in name]
    assert item["amount"] == "a million samples"
    ways = machine("b", 1, [200.0], ranks=2, batch_size=4, threads=3, compile=True, seed=9)
    assert worth_of(machine("a", 1, [100.0]), ways)["differences"] == {}
    assert item["answers"][2]["certain"] is None


# Doors.


@pytest.fixture
def stored(tmp_path):
    """Two machines with a run each, as folders."""
    metrics = [
        {"name": RATE, "value": speed, "unit": "samples/s", "direction": "higher", "provenance": "derived", "n": 1}
        for speed in (100.0, 150.0)
    ]
    for name, metric in zip(("old", "new"), metrics, strict=True):
        make_run(tmp_path / name / "squad", metrics=[metric], with_samples=False, facts={"epoch_items": 3000})
    return [str(tmp_path / name) for name in ("old", "new")]


def call(*words):
    return CliRunner().invoke(main, ["compare", *words])


def test_the_command_compares_and_writes_a_page(stored, tmp_path):
    page = tmp_path / "page.html"
    done = call(*stored, "--cost", "1,3", "--deadline", "1h", "--html", str(page))
    assert done.exit_code == 0 and "new costs 2 times (1.6 to 2.5) as much" in " ".join(done.output.split()), (
        done.output
    )
    assert_self_contained_and_accessible(Page(page))
    item = json.loads(call(*stored, "--cost", "1,3", "--json").stdout)["worth"][0]
    (even,) = (row for row in item["rows"] if row["name"] == "break_even")
    assert even["values"][1]["value"] == pytest.approx(1.5)
    assert item["machines"][1]["usd_per_device_hour"] == 3.0 and item["front"] == ["old", "new"]
