"""The store of runs: read once, cached, never stale; and the verdict on a past."""

import json
import os
import re
import shutil

import pytest
from click.testing import CliRunner
from make_run import START, _metric, make_run
from series import DAY, STEADY, on_machine, place, speed

from benchlib.cli import main
from benchlib.commands import history as history_page
from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.files import write_json
from benchlib.judge import trends
from benchlib.judge.checks import Verdict, save_verdict
from benchlib.judge.snapshot import snapshot as take_snapshot
from benchlib.results import store as history
from benchlib.results.run import Run
from benchlib.show import index


@pytest.fixture
def store(tmp_path):
    """Four runs with their summaries."""
    for age in range(4):
        history.summarize(place(tmp_path, START - age * DAY, metrics=speed(60.0 + age)))
    return tmp_path


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that are opened."""
    names, original = [], history.read_bytes
    monkeypatch.setattr(history, "read_bytes", lambda path: names.append(path.rsplit("/", 1)[-1]) or original(path))
    return names


def test_what_is_read_is_what_was_written(store):
    runs = history.read(store)
    assert [run.started for run in runs] == sorted(run.started for run in runs)
    newest = runs[-1]
    assert (newest.benchmark, newest.tier, newest.backend, newest.word, newest.ranks) == (
        "squad",
        "quick",
        "cpu",
        "PASS",
        2,
    )
    assert newest.hardware == "Imaginary 3000 CPU × 2"
    assert newest.facts | {"host": "made-up-host", "torch": "2.13.0"} == newest.facts
    assert newest.metric("train_samples_per_s").value == 60.0
    frame = history.frame(runs)
    assert list(frame["value"]) == [63.0, 62.0, 61.0, 60.0]
    assert set(frame["series"]) == {newest.series} != {""}


def test_a_summary_stands_for_the_files_of_its_run(store, opened):
    summarized = history.read(store)
    assert opened == [history.SUMMARY] * 4
    for path in store.glob(f"*/*/{history.SUMMARY}"):
        path.unlink()
    assert history.read(store) == summarized
    assert {run.word for run in summarized} == {"PASS"}
    assert all(run.metrics and run.series and run.digest and run.facts for run in summarized)


def test_the_summary_of_every_verdict_is_written_with_it(tmp_path):
    for age, verdict in enumerate(("PASS", "FAIL", "AMBIGUOUS", "SKIPPED")):
        folder = place(tmp_path, START - age * DAY)
        save_verdict(folder, Verdict(verdict=verdict, sentence="said", checks=[]))
        assert (folder / history.SUMMARY).exists()
    assert [run.word for run in history.read(tmp_path)] == ["SKIPPED", "AMBIGUOUS", "FAIL", "PASS"]


def test_a_run_whose_files_changed_is_read_from_them(store, opened):
    run = history.read(store)[1]
    path = store / run.path / "verdict.json"
    verdict = json.loads(path.read_text())
    write_json(path, verdict | {"verdict": "FAIL"})
    opened.clear()
    assert [item.word for item in history.read(store)] == ["PASS", "FAIL", "PASS", "PASS"]
    assert opened.count("verdict.json") == 1
    path.unlink()
    assert [item.word for item in history.read(store)] == ["PASS", "UNFINISHED", "PASS", "PASS"]
    shutil.rmtree(path.parent)
    assert len(history.read(store)) == 3


@pytest.mark.parametrize(
    "damage", ["cut", "foreign", "shape", "numbers", "folder", "pipe", "empty", "of another version"]
)
def test_a_summary_that_cannot_be_used_is_passed_over(store, opened, damage):
    expected = history.read(store)
    path = store / expected[0].path / history.SUMMARY
    whole = path.read_bytes()
    content = json.loads(whole)
    if damage in ("folder", "pipe"):
        path.unlink()
        path.mkdir() if damage == "folder" else os.mkfifo(path)
    else:
        rows = [["train", "fast", None, None, "samples/s", "higher"]]
        wrong = {
            "cut": whole[: len(whole) // 2],
            "foreign": b'{"runs": 1}',
            "shape": json.dumps(content | {"parts": {"config": content["parts"]["config"]}}).encode(),
            "numbers": json.dumps(content | {"parts": content["parts"] | {"result.json": {"rows": rows}}}).encode(),
            "empty": b"",
            "of another version": json.dumps(content | {"schema_version": history.SUMMARY_SCHEMA + 1}).encode(),
        }
        path.write_bytes(wrong[damage])
    opened.clear()
    assert history.read(store) == expected
    assert opened.count("result.json") == 1


def test_damaged_runs_get_no_summary_and_a_disk_that_takes_none_costs_nothing(store, monkeypatch):
    first, second, *_ = (store / run.path for run in history.read(store))
    (first / "result.json").write_text("{")
    history.summarize(first)
    assert not (first / history.SUMMARY).exists()
    (second / history.SUMMARY).unlink()

    def refuse(path, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(history, "write_bytes", refuse)
    history.summarize(second)
    assert [run.word for run in history.read(store)] == ["DAMAGED", "PASS", "PASS", "PASS"]


def test_a_config_of_another_version_is_listed_without_a_series(tmp_path):
    folder = place(tmp_path, START)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"a_field_of_the_past": 1}))
    other = place(tmp_path, START - DAY)
    (other / "config.json").write_text(json.dumps(config | {"benchmark": "unheard_of"}))
    runs = history.read(tmp_path)
    assert [bool(run.series) for run in runs] == [False, True]
    assert "cannot read its config" in trends.exclusion(runs[0])
    assert [run.word for run in runs] == ["PASS", "PASS"]


def history_of(store, values, **facts):
    for age, value in enumerate(reversed(values)):
        folder = place(
            store, START - age * DAY, metrics=[_metric("train_samples_per_s", value, "samples/s", "higher", 1)]
        )
        if age < 4 and facts:
            on_machine(folder, **facts)
    verdict = trends.judge_history(trends.read_history(*trends.choose_store(str(store))))
    return verdict, {check.name.split(" of ")[0]: check for check in verdict.checks}


def test_a_steady_past_passes(tmp_path):
    verdict, checks = history_of(tmp_path, STEADY)
    assert verdict.verdict == "PASS"
    assert {check.status for check in checks.values()} == {"PASS"}


def test_a_level_that_got_worse_without_a_cause_fails(tmp_path):
    verdict, checks = history_of(tmp_path, [*STEADY, *(value * 0.8 for value in STEADY[:4])])
    assert verdict.verdict == "FAIL"
    assert checks["level"].reason.startswith("Training throughput from 60.05 to 48.08 samples/s since")


def test_a_level_that_got_worse_with_a_new_version_is_open(tmp_path):
    values = [*STEADY, *(value * 0.8 for value in STEADY[:4])]
    verdict, checks = history_of(tmp_path, values, versions={"torch": "2.14.0"})
    assert verdict.verdict == checks["level"].status == "AMBIGUOUS"
    assert "with torch 2.13.0 → 2.14.0" in checks["level"].reason


def test_a_loss_is_open_where_the_newest_run_does_not_tell_its_limits(tmp_path):
    """A tenth is lost, which the limit of 20% allows; without the limit it neither passes nor fails."""
    changes_of(tmp_path, [*STEADY, *(value * 0.9 for value in STEADY[:4])])
    assert trends.judge_history(trends.read_history(tmp_path, False, trends.Filter())).verdict == "PASS"
    path = tmp_path / history.read(tmp_path)[-1].path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_a_later_version": 1}))
    verdict = trends.judge_history(trends.read_history(tmp_path, False, trends.Filter()))
    assert verdict.verdict == "AMBIGUOUS"
    assert [check.reason for check in verdict.checks[1:]] == [
        f"limits unknown: {path.parent.name} cannot be read whole; restore or delete it"
    ]


def test_a_level_that_came_back_or_got_better_passes(tmp_path):
    slow = [value * 0.8 for value in STEADY[:6]]
    assert history_of(tmp_path / "back", [*STEADY, *slow, *STEADY])[0].verdict == "PASS"
    assert history_of(tmp_path / "better", [*slow, *STEADY])[0].verdict == "PASS"


def test_a_newest_run_off_its_band_is_open_only_on_the_worse_side(tmp_path):
    verdict, checks = history_of(tmp_path / "worse", [*STEADY, 50.0])
    assert verdict.verdict == checks["newest run"].status == "AMBIGUOUS"
    assert "repeat" in checks["newest run"].reason
    assert history_of(tmp_path / "better", [*STEADY, 70.0])[0].verdict == "PASS"


def test_too_few_runs_decide_nothing(tmp_path):
    verdict, checks = history_of(tmp_path, STEADY[:3])
    assert [checks[name].status for name in ("level", "newest run")] == ["SKIPPED", "SKIPPED"]
    assert verdict.verdict == "SKIPPED"  # that the records can be read is no pass
    assert verdict.sentence == "Too few runs: the longest series has 3; a change of level needs 6."
    assert trends.judge_history(trends.History(tmp_path, False, trends.Filter(), 0, [])).verdict == "SKIPPED"


def test_hosts_that_take_turns_are_no_factor(tmp_path):
    for age, value in enumerate(reversed([*STEADY, *(value * 0.8 for value in STEADY[:4])])):
        on_machine(place(tmp_path, START - age * DAY, metrics=speed(value)), host=f"node{age % 3}")
    change = trends.read_history(*trends.choose_store(str(tmp_path))).trends[0].changes[0]
    assert change.factors == []


def test_filters(tmp_path):
    for age in range(3):
        place(tmp_path, START - age * DAY, tier=("quick", "smoke", "smoke")[age])
    make_run(
        tmp_path / "smoke-20260101" / "machine-cpu-101500-abcdef", config={"benchmark": "machine", "tier": "smoke"}
    )

    def count(**asked):
        return len(trends.read_history(*trends.choose_store(str(tmp_path), **asked)).runs)

    day = history.read(tmp_path)[-1].moment.strftime("%Y-%m-%d")
    assert [count(), count(tier="smoke"), count(benchmark="machine"), count(machine="imaginary"), count(first_day=day)] == [
        4, 3, 1, 4, 2,
    ]  # fmt: skip
    for wrong, said in (
        ({"benchmark": "sqad"}, "did you mean squad"),
        ({"first_day": "yesterday"}, "such as 2026-11-21"),
        ({"machine": "H100"}, "none of the 4 runs"),
        ({"metric": "train_sample_per_s"}, "did you mean train_samples_per_s_minisquad_tiny"),
    ):
        with pytest.raises(UserError, match=said):
            count(**wrong)


def test_without_runs_the_demo_of_the_kit_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path))
    store, demo, _ = trends.choose_store("")
    assert demo
    found = history.read(store)
    assert len(found) >= 10
    assert {run.word for run in found} == {"PASS"}
    assert all(run.series and not run.host for run in found)
    assert sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) < 600_000
    place(tmp_path, START)
    assert trends.choose_store("")[:2] == (tmp_path, False)


HUGE = int("9" * 401)  # JSON may hold it, no float does
PLACES = [
    ("result.json", ("metrics", 0, "value")),
    ("result.json", ("metrics", 0, "ci_low")),
    ("result.json", ("started_at",)),
    ("result.json", ("ended_at",)),
    ("result.json", ("world_size",)),
    ("config.json", ("planted_slowdown",)),
]


@pytest.mark.parametrize(("name", "where"), PLACES, ids=lambda value: str(value))
@pytest.mark.parametrize("value", [HUGE, 1e308, "many", True, [1]], ids=["huge", "large", "text", "true", "list"])
def test_a_number_that_is_none_damages_its_run_alone(store, name, where, value):
    path = store / history.read(store)[-1].path / name
    content = json.loads(path.read_text())
    target = content
    for step in where[:-1]:
        target = target[step]
    target[where[-1]] = value
    path.write_text(json.dumps(content))
    runs = history.read(store)
    assert sorted(run.word for run in runs) == ["DAMAGED", "PASS", "PASS", "PASS"]
    assert next(run.damaged for run in runs if run.damaged).startswith(f"{name} is not readable: ")
    assert "not readable" in index.render(store).read_text()
    assert trends.judge_history(trends.read_history(store, False, trends.Filter())).checks[0].value == 1.0


def test_a_tiny_number_among_zeros_is_a_zero(tmp_path):
    found = changes_of(tmp_path, [0.0] * 9 + [5e-324] * 9)
    assert [len(trend.changes) for trend in found] == [0]


def changes_of(store, values):
    for age, value in enumerate(reversed(values)):
        place(store, START - age * DAY, metrics=speed(value))
    return trends.read_history(store, False, trends.Filter()).trends


def listed(store):
    done = CliRunner().invoke(main, ["list", "--runs", "--out", str(store)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_listed_run_has_time_and_key_number_in_80_columns_and_a_name_to_copy(tmp_path):
    passed = place(tmp_path, START, metrics=[_metric("f1_minisquad_tiny", 91.0, "", "higher", 1)])
    failed = place(tmp_path, START - DAY, verdict={"verdict": "FAIL", "sentence": "1 check failed.", "checks": []})
    lines = listed(tmp_path).splitlines()
    assert [line.split()[0] for line in (lines[0], lines[1])] == [
        str(f.relative_to(tmp_path)) for f in (passed, failed)
    ]
    assert re.search(r"  PASS  \d\d:\d\d  F1 91\.00$", lines[0])
    assert lines[2].strip() == "1 check failed."
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("result.json", b"\x00garbage", "result.json is not readable"),
        ("config.json", b"\x00garbage", "config.json is not readable"),
        ("machine.json", b"{", "machine.json is not readable"),
        ("verdict.json", b'{"verdict": "FINE"}', "not a verdict of benchlib: 'FINE'"),
        ("files.json", b"garbage", "files.json is not readable"),
        ("files.json", b'{"files": 3}', "files.json is not readable"),
        ("samples.parquet", b"garbage", "samples.parquet is not readable: not a Parquet file, or cut"),
        ("samples.parquet", b"PAR1 and a beginning that was cut", "samples.parquet is not readable"),
        ("result.json", None, "result.json is missing"),
        ("samples.parquet", None, "samples.parquet is missing"),
    ],
)
def test_index_list_and_history_mark_the_same_damage(tmp_path, name, content, said):
    place(tmp_path, START - DAY, metrics=speed(60.0))
    folder = place(tmp_path, START)
    save_samples(folder)
    run_folder.record_files(folder)
    history.summarize(folder)
    assert "DAMAGED" not in listed(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    run = history.read(tmp_path)[-1]
    assert said in run.damaged
    assert said in " ".join(listed(tmp_path).split())
    assert f"{listed(tmp_path).count('DAMAGED')} {listed(tmp_path).count('PASS')}" == "1 1"
    assert index.render(tmp_path).read_text().count('<span aria-hidden="true">!</span>DAMAGED') == 1


def save_samples(folder):
    from pandas import DataFrame

    DataFrame({"metric": ["step_s"], "index": [0], "value": [0.25]}).to_parquet(folder / "samples.parquet")


def test_a_copy_of_a_run_counts_once(store):
    original = store / history.read(store)[-1].path
    for name in (f"{original.name}-copy", f"Copy of {original.name}"):
        shutil.copytree(original, original.parent / name)
    runs = history.read(store)
    copies = {run.name: run.copy_of for run in runs if run.copy_of}
    assert copies == {f"{original.name}-copy": original.name, f"Copy of {original.name}": original.name}
    (members,) = trends.series(runs).values()
    assert trends.trend("train_samples_per_s_minisquad_tiny", members).values == [63.0, 62.0, 61.0, 60.0]
    found = trends.read_history(store, False, trends.Filter())
    assert {why for _, why in found.excluded} == {f"copy of {original.name}"}
    assert index.render(store).read_text().count(f"Copy of {original.name}: excluded") == 2
    assert " ".join(listed(store).split()).count("copy of squad") == 2
    assert history.read(store) == runs
    shutil.rmtree(original)  # now the copies are the run, and one of them counts
    assert [run.copy_of for run in history.read(store)].count("") == 4


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "1 of 4 is damaged: {}; restore or delete it"),
        (4, "4 of 4 are damaged: {}, {}, {} and 1 more; restore or delete them"),
    ],
)
def test_damaged_runs_leave_a_past_open_in_all_its_words(store, capsys, count, said):
    paths = [run.path for run in history.read(store)][:count]
    for path in paths:
        (store / path / "result.json").write_text("{")
    found = trends.read_history(store, False, trends.Filter())
    verdict = trends.judge_history(found)
    check = verdict.checks[0]
    assert (verdict.verdict, check.status, verdict.sentence) == ("AMBIGUOUS", "AMBIGUOUS", "Open: runs readable.")
    assert check.reason == said.format(*(run.name for run in found.runs if run.damaged))
    history_page._print(found, verdict, store / "history.html")
    printed = capsys.readouterr().out
    assert f"AMBIGUOUS  runs readable: {check.reason}" in printed
    assert "note" not in printed


def test_an_unreadable_baseline_is_no_regression(tmp_path):
    checks = [
        {"name": name, "kind": "regression", "question": "?", "status": "FAIL", "reason": reason, "gates": True}
        for name, reason in (
            ("baseline readable", "key.json is cut"),
            ("step_s_minisquad_tiny vs baseline", "ratio 1.9"),
        )
    ]
    place(tmp_path, START, verdict={"verdict": "FAIL", "checks": checks[:1]})
    place(tmp_path, START - DAY, verdict={"verdict": "FAIL", "checks": checks[1:]})
    slow, cut = history.read(tmp_path)
    assert (slow.regressions, slow.unreadable) == ([("step_s_minisquad_tiny", "ratio 1.9")], "")
    assert (cut.regressions, cut.unreadable) == ([], "key.json is cut")
    page = index.render(tmp_path).read_text()
    assert page.count("regression: ") == 1
    assert "not readable, nothing compared: key.json is cut" in page


def test_a_run_that_broke_or_was_skipped_lasts_as_long_as_its_supervisor_says(tmp_path):
    """Not from the result, which a broken run leaves open and which a skipped one writes in one moment."""
    for number, (outcome, result) in enumerate((("failed", True), ("failed", False), ("skipped", True))):
        folder = place(tmp_path, START - number * DAY, outcome=outcome, with_result=result)
        status = json.loads((folder / "status.json").read_text())
        write_json(
            folder / "status.json", status | {"started_at": START - number * DAY, "ended_at": START - number * DAY + 31}
        )
        if result:
            content = json.loads((folder / "result.json").read_text())
            changes = (
                {"ended_at": None, "status": "running"}
                if outcome == "failed"
                else {"ended_at": content["started_at"] - 2e-5}
            )
            write_json(folder / "result.json", content | changes)
        for _ in range(2):  # read from its files, and from its summary
            (run,) = (run for run in history.read(tmp_path) if run.path.endswith(folder.name))
            assert run.ended - run.started == 31
            snapshot = take_snapshot(Run(folder))
            assert snapshot.ended_at - snapshot.started_at == 31
            history.summarize(folder)


def test_a_skipped_run_without_a_supervisor_has_no_duration(tmp_path):
    folder = place(tmp_path, START, outcome="skipped", with_status=False)
    (run,) = history.read(tmp_path)
    assert (run.ended, take_snapshot(Run(folder)).ended_at) == (None, None)


def test_a_repeat_with_the_same_numbers_is_no_copy(tmp_path):
    for age in range(3):
        place(tmp_path, START - age * DAY, metrics=speed(60.0))
    assert not any(run.copy_of for run in history.read(tmp_path))


def test_a_name_that_is_not_utf8_is_shown_with_question_marks(tmp_path):
    folder = place(tmp_path, START)
    os.rename(folder, os.fsencode(folder) + b"\xff")
    (run,) = history.read(tmp_path)
    assert run.name == f"{folder.name}?"
