"""What is said of a training on unlike ranks: each check can fail, and the pictures show what was recorded."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchlib.benchmarks.parity import tolerances
from benchlib.benchmarks.squad import judge, judge_unlike
from benchlib.benchmarks.squad.figures_unlike import FIGURES
from benchlib.benchmarks.squad.view import VIEW
from benchlib.config.schema import build, save_config
from benchlib.core.errors import UserError
from benchlib.judge.baselines import planted, require_acceptable
from benchlib.judge.checks import Check
from benchlib.judge.numbers import judged_view
from benchlib.results.metrics import derived, not_available
from benchlib.results.run import Result, Run, save_result
from benchlib.results.verdict import Verdict
from benchlib.show.figures import png


def _result(config: Any, distance: float | None = 1.02, last: tuple[int, int] = (12, 4), own_s: float = 0.31, curve: float = 0.01) -> Result:  # fmt: skip
    metric = derived("balance_distance", distance, "ratio", "lower") if distance else not_available("balance_distance", "ratio", "lower", "3 whole steps")  # fmt: skip
    common = {"device": "cpu", "precision": "fp32", "work": 1, "step_s": 0.01, "batch_s": 0.02, "token_s": 1e-4, "micro_batch": 8, "most": 16, "tokens": 100.0, "idle_s": 0.02, "limit_gb": None}  # fmt: skip
    ranks = [
        {**common, "rank": 0, "sample_s": 0.01, "samples": 12, "accumulation": 1, "expected_s": 0.3, "own_s": own_s},
        {**common, "rank": 1, "sample_s": 0.05, "samples": 4, "accumulation": 1, "expected_s": 0.3, "own_s": 0.3},
    ]
    steps = [{"step": -1, "rank": rank, "own_s": [0.2, 0.6][rank], "expected_s": None, "step_s": 0.6, "samples": None} for rank in (0, 1)]  # fmt: skip
    for step in range(30):
        counts = last if step == 29 else (12, 4) if step >= 15 else (8, 8)
        steps += [{"step": step, "rank": rank, "own_s": 0.3, "expected_s": 0.3, "step_s": 0.32, "samples": counts[rank]} for rank in (0, 1)]  # fmt: skip
    plans = [{"from_step": start, "shares": text, "expected_s": 0.3, "why": why} for start, text, why in ((0, "8+8", "by calibration"), (15, "12+4", "rank 1 took 3.00 × the time"))]  # fmt: skip
    tables = {
        "unlike_ranks": ranks, "unlike_steps": steps, "unlike_plans": plans,
        "unlike_wait": [{"part": "the perfect split", "seconds": 0.29}, {"part": "whole samples", "seconds": 0.01}, {"part": "exchange and the rest", "seconds": 0.02}],
        "mixed_precision": [{"step": step, "mixed": 1.0, "fp32": 1.0 + curve} for step in range(5)],
    }  # fmt: skip
    return Result.of(
        config,
        status="complete",
        metrics=[metric],
        facts={"balance": {"shares": [12, 4], "steps_of_last_plan": 15}, "resumed_step": 0},
        tables=tables,
    )


def _config(**values: Any) -> Any:
    return build("squad", {"benchmark": "squad", "nproc": 2, "balance": "auto", "bf16_ranks": [1], **values})


def _checks(config: Any = None, **changes: Any) -> dict[str, Any]:
    config = config or _config()
    return {check.name: check for check in judge_unlike.checks(config, _result(config, **changes))}


def test_a_good_split_passes_and_an_even_one_has_no_checks() -> None:
    assert {check.status for check in _checks().values()} == {"PASS"}
    off = _config(balance="off", bf16_ranks=[])
    assert judge_unlike.checks(off, _result(off)) == []


@pytest.mark.parametrize(
    ("name", "changes", "gates"),
    [
        ("distance to the best split", {"distance": 1.11}, True),
        ("split as planned", {"last": (11, 5)}, True),
        ("predicted times", {"own_s": 0.4}, False),
        ("mixed precision", {"curve": 0.11}, True),
    ],
)
def test_each_check_can_fail(name: str, changes: dict[str, Any], gates: bool) -> None:
    check = _checks(**changes)[name]
    assert (check.status, check.gates) == ("FAIL", gates)


def test_what_no_step_has_is_no_fault_and_what_one_has_is(tmp_path: Path) -> None:
    """Even steps count below zero and have no plan; parts of the wait may be below zero; no limit of memory is known."""
    config = _config()
    save_config(config, tmp_path)

    def faults(change: Callable[[dict[str, Any]], None]) -> tuple[list[str], dict[str, Check]]:
        result = _result(config)
        change(result.tables)
        save_result(tmp_path, result)
        run, wrong = judged_view(Run(tmp_path), judge.lacks, judge.SIGNED)
        assert run.result is not None
        return wrong, {check.name: check for check in judge_unlike.checks(config, run.result)}

    wrong, found = faults(lambda tables: tables["unlike_wait"][1].update(seconds=-1e-5))
    assert not wrong and {check.status for check in found.values()} == {"PASS"}
    for table, row, column, name in (
        ("unlike_steps", 40, "samples", "split as planned"),
        ("unlike_steps", 40, "expected_s", ""),
        ("unlike_ranks", 1, "own_s", "predicted times"),
        ("mixed_precision", 2, "mixed", "mixed precision"),
    ):
        for value in (None, math.nan, math.inf):
            wrong, found = faults(lambda tables: tables[table][row].update({column: value}))  # noqa: B023
            assert wrong and column in wrong[0]
            assert not name or (found[name].status == "FAIL" and column in found[name].reason)
    _, found = faults(lambda tables: tables.pop("mixed_precision"))
    assert found["mixed precision"].status == "FAIL"


def test_too_few_steps_skip_the_distance_and_gate_nothing() -> None:
    check = _checks(distance=None)["distance to the best split"]
    assert (check.status, check.gates) == ("SKIPPED", False)


def test_the_tolerance_of_mixed_precision_is_that_of_parity() -> None:
    assert tolerances.limit("cpu", "bf16", tolerances.CURVE).value == judge_unlike.curve_limit()


def test_ranks_that_were_slowed_are_marked_and_never_a_baseline(tmp_path: Path) -> None:
    config = _config(planted_work=[1, 3], planted_drift=[1, 1], planted_drift_step=20)
    save_config(config, tmp_path)
    save_result(tmp_path, _result(config))
    run = Run(tmp_path)
    assert planted(run) == ["planted_work", "planted_drift", "planted_drift_step"]
    with pytest.raises(UserError, match="changed on purpose"):
        require_acceptable(run, Verdict(verdict="PASS", sentence="", checks=[]))
    said = "\n".join(VIEW.warnings(config, run.result))
    assert "did their work 1,3 times on purpose, 1,1 times after 20 steps" in said
    assert "Ranks 1 computed in bf16" in said


def test_reading_and_pictures_show_the_split_and_its_moments(tmp_path: Path) -> None:
    config = _config()
    save_config(config, tmp_path)
    save_result(tmp_path, _result(config))
    run = Run(tmp_path)
    words = "\n".join(judge_unlike.reading(config, run.result))  # type: ignore[arg-type]
    assert "rank 0 12 (75%) and rank 1 4 (25%)" in words
    assert "works 310 ms of a step; with even shares it took 600 ms" in words
    assert "The first split is 8+8, by calibration." in words
    assert "From step 16 on: rank 1 took 3.00 ×" in words
    pictures = {name: draw(run) for name, draw in FIGURES.items()}
    assert all(len(png(picture)) > 3000 and not picture.empty for picture in pictures.values())
    assert pictures["unlike-timeline"].alt.startswith("Ranks work 94% of a step, with even shares 67%")
    # 0.03 + 0.02 s a sample against 0.03 + 0.06 s a sample: equal at 12 to 4.
    assert pictures["unlike-optimum"].alt.startswith("The best split gives rank 0 12 of 16")
    assert "new plans at steps 16" in pictures["unlike-drift"].alt
    save_result(tmp_path, Result.of(config, status="complete"))
    assert all(draw(Run(tmp_path)).empty for draw in FIGURES.values())


def test_the_best_split_of_a_kept_plan_is_the_exact_optimum(tmp_path: Path) -> None:
    """Of 10, 20 and 40 ms a sample 9+5+2 is best; with the others at the plan's ratio 11 samples would seem to be."""
    config = _config(nproc=3)
    result = _result(config)
    (rank, _) = result.tables["unlike_ranks"]
    rank |= {"step_s": 0.0, "batch_s": 0.0, "token_s": 0.0}
    members = enumerate(((0.01, 12), (0.02, 2), (0.04, 2)))
    result.tables["unlike_ranks"] = [{**rank, "rank": place, "sample_s": each, "samples": count} for place, (each, count) in members]  # fmt: skip
    save_config(config, tmp_path)
    save_result(tmp_path, result)
    assert FIGURES["unlike-optimum"](Run(tmp_path)).alt.startswith("The best split gives rank 0 9 of 16")
